"""Probes of links to other workers: a connection is dialed, and closed once it is proven."""

from __future__ import annotations

import asyncio

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import ShuffleError, clipped
from minishuffle.ids import Address
from minishuffle.protocol.connection import ConnectionEvent
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import HandshakeRefused, Identity
from minishuffle.wire.messages import WorkerAddress

__all__ = ["Prober"]

AGAIN_SECONDS = 0.2
"""A worker that has just been registered may not know its id for a moment."""


class Prober:
    """Dials as a :attr:`Role.PROBE`, for which nothing is kept on either side.

    Args:
        identity: of this worker.
        counters: of all its connections, whose frames the other side counts too.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        counters: ConnectionCounters,
        ping_interval: float,
        *,
        tls: Credentials | None = None,
    ) -> None:
        self._room = asyncio.Semaphore(limits.PROBES_MAX)
        self._under_way: set[tuple[int, int, str, int]] = set()
        self._endpoint = DataEndpoint(
            self,
            Identity(Role.PROBE, identity.cluster, identity.worker, identity.epoch),
            secret,
            counters,
            ping_interval,
            handshake_seconds=limits.PROBE_SECONDS_MAX,
            tls=tls,
        )

    async def probe(self, peer: WorkerAddress) -> str | None:
        """The reason why no link to a worker can be made; empty if one can. None: a probe of it is under way,
        and its first caller gets the result."""
        key = (peer.worker, peer.epoch, peer.host, peer.data_port)
        if key in self._under_way:
            return None
        self._under_way.add(key)
        try:
            async with self._room:
                error = await self._dial(peer)
        finally:
            self._under_way.remove(key)
        return clipped(str(error), limits.LINK_ERROR_CHARS_MAX) if error is not None else ""

    async def _dial(self, peer: WorkerAddress) -> ShuffleError | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.PROBE_SECONDS_MAX
        while True:
            try:
                link = await self._endpoint.dial(Address(peer.host, peer.data_port), peer.worker, peer.epoch)
            except ShuffleError as error:
                early = isinstance(error, HandshakeRefused) and error.reason == "peer"
                if not early or loop.time() >= deadline:
                    return error
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                link.close()
                return None

    async def close(self) -> None:
        """Give up what is under way."""
        await self._endpoint.close()

    # --- EndpointHandler -------------------------------------------------------------------------

    def link_up(self, link: DataLink) -> None:
        """Nothing follows."""

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        """Nothing follows."""

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        """Nothing follows."""

    def refused(self, reason: str, text: str, remote: str) -> None:
        """Ignored: :meth:`probe` returns the reason."""

    def authorize(self, peer: Identity) -> str | None:
        """Never called: this endpoint does not listen."""
        return None
