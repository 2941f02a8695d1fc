"""Data connections without sockets: two ``Connection`` machines and a seeded wire between them.

The wire cuts the stream into random fragments, pauses either direction, and can be cut. A
:class:`MemoryLink` looks like a ``tcp.DataLink`` to its handler, so that whole clusters can be driven
through faults by one seed, without a clock.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Protocol

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import PeerLost, RemoteProtocolError, ShuffleError
from minishuffle.protocol.channel import Outgoing
from minishuffle.protocol.connection import Connection, ConnectionEvent, PeerClosed
from minishuffle.wire.handshake import Identity

__all__ = ["MemoryHandler", "MemoryLink", "MemoryWire"]


class MemoryHandler(Protocol):
    """What a ``tcp.EndpointHandler`` is told once a link is established."""

    def link_up(self, link: MemoryLink) -> None: ...

    def link_events(self, link: MemoryLink, events: list[ConnectionEvent]) -> None: ...

    def link_down(self, link: MemoryLink, error: ShuffleError) -> None: ...


class MemoryLink:
    """One end of a wire."""

    def __init__(self, handler: MemoryHandler, peer: Identity, connection: Connection) -> None:
        self.connection = connection
        self.peer = peer
        self.wire: MemoryWire
        self.error: ShuffleError | None = None
        self.lost = False
        self.closing = False
        self.handler = handler
        self.outbound: deque[bytes] = deque()
        self.held: deque[list[Outgoing]] = deque()
        """Pieces that the wire has not let go of yet."""

    def flush_soon(self) -> None:
        """Nothing to schedule: the wire looks at every step."""

    def close(self) -> None:
        """Say Close, send what there is, and end."""
        if not self.lost:
            self.error = self.error or PeerLost("the connection was closed on this side")
            self.connection.close()
            self.closing = True

    def abort(self, error: ShuffleError) -> None:
        """Drop the connection at once; ``error`` is what this side's channels see."""
        self.error = self.error or error
        self.wire.cut()


class MemoryWire:
    """The two directions between two links.

    Args:
        rng: decides on fragments and pauses.
        pause: probability that a step of a direction does nothing.
    """

    def __init__(
        self,
        rng: Random,
        handlers: tuple[MemoryHandler, MemoryHandler],
        peers: tuple[Identity, Identity],
        counters: tuple[ConnectionCounters, ConnectionCounters],
        *,
        pause: float = 0.2,
        now: float = 0.0,
        ping_interval: float = 5.0,
    ) -> None:
        self._rng = rng
        self._pause = pause
        self.links = tuple(
            MemoryLink(
                handlers[side],
                peers[1 - side],
                Connection(dialer=side == 0, counters=counters[side], ping_interval=ping_interval, now=now),
            )
            for side in (0, 1)
        )
        self.is_cut = False
        for link in self.links:
            link.wire = self
        for link in self.links:
            link.handler.link_up(link)

    def step(self, now: float) -> bool:
        """Let both ends send and move a fragment each way; False when nothing at all moved."""
        moved = False
        for side in (0, 1):
            if not self.is_cut:
                moved |= self._move(self.links[side], self.links[1 - side], now)
        return moved

    def run(self, now: float = 0.0, steps_max: int = 100_000) -> None:
        """Step until nothing moves.

        Raises:
            AssertionError: it still moved after ``steps_max`` steps.
        """
        quiet = 0
        for _ in range(steps_max):
            quiet = 0 if self.step(now) else quiet + 1
            if quiet > 40 or self.is_cut:
                return
        raise AssertionError(f"the wire still moved after {steps_max} steps")

    def tick(self, now: float) -> None:
        for link in self.links:
            if not self.is_cut:
                link.connection.handle_timer(now)
                self._deliver_events(link)

    def _move(self, sender: MemoryLink, receiver: MemoryLink, now: float) -> bool:
        chunks, pieces = sender.connection.data_to_send(self._rng.randint(1, limits.FLUSH_SEGMENTS_MAX))
        sender.outbound.extend(bytes(chunk) for chunk in chunks)
        if pieces:
            sender.held.append(pieces)
        if not sender.outbound:
            if sender.closing:
                self.cut()
                return True
            return bool(chunks)
        if self._rng.random() < self._pause:
            return True
        data = sender.outbound.popleft()
        size = self._rng.randint(1, len(data))
        if size < len(data):
            sender.outbound.appendleft(data[size:])
        self._let_go(sender)
        self._receive(receiver, data[:size], now)
        return True

    def _let_go(self, sender: MemoryLink) -> None:
        """Release pieces whose bytes have all left; late on purpose, as a real transport may be."""
        if not sender.outbound:
            while sender.held:
                for piece in sender.held.popleft():
                    piece.released()

    def _receive(self, receiver: MemoryLink, data: bytes, now: float) -> None:
        try:
            receiver.connection.receive(data, now)
        except RemoteProtocolError as error:
            receiver.abort(error)
            return
        self._deliver_events(receiver)

    def _deliver_events(self, link: MemoryLink) -> None:
        events = link.connection.events()
        if not events:
            return
        link.handler.link_events(link, events)
        for event in events:
            if isinstance(event, PeerClosed):
                link.error = event.error or PeerLost(f"worker {link.peer.worker} closed the connection")
                self.cut()

    def cut(self) -> None:
        """Both directions break at once: what is on the wire is lost. Idempotent."""
        if self.is_cut:
            return
        self.is_cut = True
        for link in self.links:
            link.lost = True
            link.outbound.clear()
            while link.held:
                for piece in link.held.popleft():
                    piece.released()
            error = link.error or PeerLost(f"connection to worker {link.peer.worker} broke")
            link.connection.lost(error)
            link.handler.link_down(link, error)
