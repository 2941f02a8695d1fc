"""One data connection of an external client: a loop in a thread of its own, and the paths between it and
the program's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import uvloop

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import Address
from minishuffle.protocol.connection import ConnectionEvent, PeerSilent
from minishuffle.remote.access import Access
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import WorkerAddress
from minishuffle.worker.tasks.handoff import LoopInbox, TaskPaths

__all__ = ["ExternalConnection"]

T = TypeVar("T")

SEGMENTS: Final = 64
PING_SECONDS: Final = 5.0
CLOSE_SECONDS_MAX: Final = 10.0


class ExternalConnection:
    """A connection to one worker, which expects ``ticket``. Use it in a ``with`` statement.

    Everything that is called ``(Loop.)`` runs in the thread of the loop; the rest in the program's.

    Args:
        on_events: (Loop.) what the connection reports but its end.
        segment_bytes: of its network buffers, which is that of the worker's.

    Raises (on entry):
        PeerLost, HandshakeRefused: as ``DataEndpoint.dial``.
    """

    def __init__(
        self,
        access: Access,
        worker: WorkerAddress,
        on_events: Callable[[DataLink, list[ConnectionEvent]], None],
        *,
        ticket: int,
        term: int,
        segment_bytes: int,
    ) -> None:
        self.error: ShuffleError | None = None
        """Why the connection is gone, once it is."""
        self.pool = NetworkBufferPool(SEGMENTS, segment_bytes)
        self.counters = TaskCounters()
        self._access = access
        self._worker = worker
        self._identity = Identity(Role.CLIENT, access.cluster, ticket, term)
        self._on_events = on_events
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="minishuffle connection", daemon=True)
        self._inbox = LoopInbox(self._loop)
        self.paths = TaskPaths(self._inbox)
        self._endpoint: DataEndpoint | None = None
        self._link: DataLink | None = None

    def __enter__(self) -> ExternalConnection:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_SECONDS_MAX)
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS_MAX)

    @property
    def link(self) -> DataLink:
        """The established link; of a connection that was entered."""
        assert self._link is not None
        return self._link

    def check(self) -> None:
        """Raises the error that ended the connection, if one did."""
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until the loop has handled everything that was posted to it before."""
        self.run(lambda: None)

    def run(self, call: Callable[[], T]) -> T:
        """What ``call`` gives in the thread of the loop."""

        async def there() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(CLOSE_SECONDS_MAX)

    # --- loop ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _open(self) -> None:
        self._endpoint = DataEndpoint(
            self,
            self._identity,
            self._access.secret,
            ConnectionCounters(),
            PING_SECONDS,
            tls=self._access.tls,
        )
        address = Address(self._worker.host, self._worker.data_port)
        self._link = await self._endpoint.dial(address, self._worker.worker, self._worker.epoch)

    async def _close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        self._inbox.close()

    # --- EndpointHandler (loop) ------------------------------------------------------------------

    def authorize(self, peer: Identity) -> str | None:
        return "this program takes no connections"

    def refused(self, reason: str, text: str, remote: str) -> None:
        """The dialer's own error says it."""

    def link_up(self, link: DataLink) -> None:
        """:meth:`_open` has it."""

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        for event in events:
            if isinstance(event, PeerSilent):
                link.abort(PeerLost(f"worker {self._worker.worker} was silent for {event.seconds:.1f} s"))
        self._on_events(link, events)

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        self.error = error
        self.paths.cancel()
