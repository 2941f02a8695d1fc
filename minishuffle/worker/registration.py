"""A worker process before its registration, and how it gets its id from the coordinator.

Between its start and its registration a process listens, refuses all connections, and serves metrics. It
registers again, with all it has, with each coordinator that replaces another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from minishuffle import limits
from minishuffle.config import ClusterSettings, CoordinatorPlace
from minishuffle.counters import (
    LAG_SECONDS_BOUNDS,
    ConnectionCounters,
    Histogram,
    OneWayCounts,
    WorkerSnapshot,
)
from minishuffle.errors import PeerLost, RemoteProtocolError, ShuffleError, error_from_code
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.protocol.connection import ConnectionEvent
from minishuffle.transport.admission import RefusalLog
from minishuffle.transport.control import ControlLink
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.requests import Failure
from minishuffle.worker.interpreter import GarbageClock
from minishuffle.worker.reports.workerreports import worker_snapshot
from minishuffle.worker.tasks.crashrecord import CrashRecord
from minishuffle.worker.wallclock import WallClock

__all__ = ["COORDINATOR_SECONDS_MAX", "LinkOwner", "UnregisteredWorker", "ask_registration"]

COORDINATOR_SECONDS_MAX: Final = 30.0
"""How long a worker tries to reach its coordinator at its start before it gives up."""
_log = logging.getLogger("minishuffle.worker")


class LinkOwner(Protocol):
    """Takes what comes over a control link once its worker is registered."""

    def on_message(self, link: ControlLink, message: ControlMessage) -> None: ...

    def on_closed(self, link: ControlLink, error: Exception | None) -> None: ...


async def ask_registration(
    link: ControlLink, request: Register, accept: Callable[[Registered], LinkOwner]
) -> Registered:
    """Have a registration answered over that link, which is closed if it is not.

    Args:
        accept: called with the answer before anything else of the link is handled; gives who takes that.

    Raises:
        ShuffleError: the coordinator refuses, went away, or does not answer.
    """
    answer: asyncio.Future[Registered] = asyncio.get_running_loop().create_future()
    owner: LinkOwner | None = None

    def on_message(message: ControlMessage, number: int) -> None:
        nonlocal owner
        if owner is not None:
            owner.on_message(link, message)
        elif answer.done():
            return
        elif isinstance(message, Registered):
            owner = accept(message)
            answer.set_result(message)
        elif isinstance(message, Failure):
            answer.set_exception(error_from_code(message.code, message.text))
        else:
            name = type(message).__name__
            raise RemoteProtocolError(f"the coordinator sent {name} before it registered this worker")

    def on_closed(error: Exception | None) -> None:
        if owner is not None:
            owner.on_closed(link, error)
        elif not answer.done():
            answer.set_exception(error or PeerLost("the coordinator closed the connection"))

    link.start(on_message, on_closed)
    link.send(request)
    try:
        return await asyncio.wait_for(answer, COORDINATOR_SECONDS_MAX)
    except TimeoutError as error:
        raise PeerLost(
            f"the coordinator did not register this worker within {COORDINATOR_SECONDS_MAX:g} s"
        ) from error
    finally:
        if owner is None:
            link.close()


class _Nobody:
    """The ``EndpointHandler`` of a worker that is not registered: nobody may connect."""

    def __init__(self, refusals: RefusalLog, now: Callable[[], float]) -> None:
        self._refusals, self._now = refusals, now

    def authorize(self, peer: Identity) -> str | None:
        return "this worker is not registered yet"

    def refused(self, reason: str, text: str, remote: str) -> None:
        self._refusals.refused(reason, text, remote, self._now())

    def link_up(self, link: DataLink) -> None:
        link.abort(PeerLost("this worker is not registered yet"))

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None: ...

    def link_down(self, link: DataLink, error: ShuffleError) -> None: ...


class UnregisteredWorker:
    """A worker process before its registration. The registered worker takes over its parts.

    Args:
        spool_directory: where sinks keep rows for external clients; None: the system's directory for
            temporary files.
        find: where the coordinator is by now, if it is known.
        record: where its tasks note the rows in hand, for its launcher.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        cluster: str,
        secret: bytes,
        spool_directory: str | None = None,
        find: Callable[[], CoordinatorPlace | None] = lambda: None,
        *,
        record: CrashRecord | None = None,
        tls: Credentials | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.secret = secret
        self.spool_directory = spool_directory
        self.find = find
        self.record = record or CrashRecord()
        self.garbage, self.wall = GarbageClock(time.perf_counter), WallClock()
        self.pool = _network_pool(settings)
        self.refusals = RefusalLog(_log.warning, loop.call_at)
        self.endpoint = DataEndpoint(
            _Nobody(self.refusals, loop.time),
            Identity(Role.WORKER, cluster, 0, 0),
            secret,
            ConnectionCounters(),
            settings.ping_interval,
            suspect_after=settings.suspect_after,
            tls=tls,
        )
        self.ended: asyncio.Future[str] = loop.create_future()
        """Resolved with the reason why this process is to stop; empty for an orderly end."""

    def leave(self) -> None:
        """The process was sent SIGTERM."""
        if not self.ended.done():
            self.ended.set_result("")

    def snapshot(self) -> WorkerSnapshot:
        """For ``/metrics``, which is served before the coordinator knows of this process."""
        return worker_snapshot(
            self.endpoint,
            self.pool,
            None,
            slots=self.settings.slots,
            refused=self.refusals.counts,
            loop_lag=Histogram(LAG_SECONDS_BOUNDS),
            gc_seconds=self.garbage.seconds,
            wall=self.wall(),
            one_way=OneWayCounts(),
        )

    async def close(self) -> None:
        """Close every socket."""
        self.garbage.close()
        await self.endpoint.close()


def _network_pool(settings: ClusterSettings) -> NetworkBufferPool:
    stride = settings.segment_bytes + limits.SEGMENT_HEADROOM_BYTES
    return NetworkBufferPool(settings.network_memory_bytes // stride, settings.segment_bytes)
