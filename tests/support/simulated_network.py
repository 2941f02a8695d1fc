"""Simulated sockets: asyncio transports that are joined by pipes with a latency, a size and a fate.

Bytes of one direction arrive in order, in pieces of any size; directions and connections overtake each other.
What does not fit into a pipe stays where it is, in the memory of the sender, as with real transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from support.simulated_loop import Host, World

__all__ = ["Network", "SimulatedTransport"]

PIPE_BYTES = (200, 2_000, 20_000, 200_000)
"""What the kernels of both ends hold of one direction."""
LATENCY_SECONDS = (50e-6, 0.5e-3, 3e-3)
HIGH_WATER_BYTES = 65_536
"""asyncio's own."""


class _Socket:
    def fileno(self) -> int:
        """None: there is nothing that a fork could copy."""
        return -1

    def setsockopt(self, *options: int) -> None:
        """Of no effect."""

    def getsockopt(self, *options: int) -> bytes:
        """Nothing is measured."""
        return b""


class SimulatedTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, host: Host, local: int, remote: int) -> None:
        super().__init__()
        world = network.world
        self.host = host
        self.ports = (local, remote)
        self.peer: SimulatedTransport
        self.protocol: Any = None
        """None before the connection is made, and after it is lost."""
        self.latency = world.random.choice(LATENCY_SECONDS)
        self.hole = False
        """What is sent gets lost without a sign."""
        self.held_until = 0.0
        """Nothing arrives before that time."""
        self._world = world
        self._loop = host.loop
        self._capacity = world.random.choice(PIPE_BYTES)
        self._unsent: list[memoryview] = []
        """Not in the pipe yet; the sender's memory."""
        self._pipe = bytearray()
        """On the way to the peer."""
        self._arrived = bytearray()
        """In this end's kernel."""
        self._moving = self._reading = False
        self._high = HIGH_WATER_BYTES
        self._writing_paused = self._reading_paused = False
        self._closing = False
        self._end: str = ""
        """How the peer's kernel ends the stream: "" not yet, "fin" in order, "reset"."""
        host.transports.append(self)

    # --- asyncio.Transport -----------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return _Socket()
        return ("127.0.0.1", self.ports[name == "peername"])

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._unsent))

    def write(self, data: Any) -> None:
        if self._closing or self.protocol is None or not len(data):
            return
        self._unsent.append(memoryview(data).cast("B"))
        self._fill()
        if not self._writing_paused and self.get_write_buffer_size() > self._high:
            self._writing_paused = True
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._read_soon()

    def close(self) -> None:
        """Send what there is, then end."""
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._finish()

    def abort(self) -> None:
        if self.protocol is not None:
            self._closing = True
            self._loop.call_soon(self._lose, None)
            if not self.hole:
                self._world.within(self.latency, partial(self.peer.ended, "reset"))

    # --- the pipe --------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Move what fits into the pipe."""
        while self._unsent and (room := self._capacity - len(self._pipe) - len(self.peer._arrived)) > 0:
            first = self._unsent[0]
            self._pipe += first[:room]
            if len(first) > room:
                self._unsent[0] = first[room:]
            else:
                del self._unsent[0]
        self._move_soon()

    def _move_soon(self) -> None:
        if self._pipe and not self._moving:
            self._moving = True
            wait = max(0.0, self.held_until - self._world.now) + self.latency
            self._world.at(self._world.now + wait * (0.5 + self._world.random.random()), self._move)

    def _move(self) -> None:
        """Some of it arrives."""
        self._moving = False
        if self.hole or self.peer._end == "reset":  # Behind a reset nothing arrives: a stream has no gaps.
            self._pipe.clear()
            return
        if self.held_until > self._world.now:
            self._move_soon()
            return
        peer, size = self.peer, len(self._pipe)
        if peer.protocol is None and peer._closing:  # Nobody will read it: the kernel resets the connection.
            self._pipe.clear()
            self._world.within(self.latency, partial(self.ended, "reset"))
            return
        if self._world.random.random() < 0.5:
            size = self._world.random.randint(1, size) if size else 0
        peer._arrived += self._pipe[:size]
        del self._pipe[:size]
        peer._read_soon()
        self._move_soon()
        if not self._pipe:
            peer._read_soon()

    def _read_soon(self) -> None:
        if not self._reading and (self._arrived or self._end) and not self.host.dead:
            self._reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = False
        protocol = self.protocol
        if protocol is None or self._reading_paused or self._closing:
            return
        if self._arrived:
            if isinstance(protocol, asyncio.BufferedProtocol):
                into = protocol.get_buffer(-1)
                size = min(len(into), len(self._arrived))
                into[:size] = self._arrived[:size]
                del self._arrived[:size]
                protocol.buffer_updated(size)
            else:
                data, self._arrived = bytes(self._arrived), bytearray()
                protocol.data_received(data)
            self._world.within(self.latency, partial(self.peer._loop.call_soon, self.peer._drained))
            self._read_soon()
        elif self._end == "reset":
            self._lose(ConnectionResetError(104, "Connection reset by peer"))
        elif self._end == "fin" and not self.peer._pipe:
            protocol.eof_received()
            self.close()

    def _drained(self) -> None:
        """There is room in the pipe."""
        if self.host.dead or self.protocol is None:
            return
        self._fill()
        if self._unsent:
            return
        if self._closing:
            self._finish()
        elif self._writing_paused:
            self._loop.call_soon(self._resume_writing)

    def _resume_writing(self) -> None:
        if self._writing_paused and not self._unsent and self.protocol is not None:
            self._writing_paused = False
            self.protocol.resume_writing()

    # --- ends ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Everything is on its way: the end follows it."""
        self._loop.call_soon(self._lose, None)
        if not self.hole:
            self._world.at(self._world.now + 2 * self.latency, partial(self.peer.ended, "fin"))

    def _lose(self, error: Exception | None) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            self._closing = True
            self._unsent.clear()
            if self in self.host.transports:
                self.host.transports.remove(self)
            protocol.connection_lost(error)
            if self.peer.protocol is not None and not self.hole:
                how = "reset" if self._arrived else "fin"
                self._world.within(self.latency, partial(self.peer.ended, how))

    def ended(self, how: str) -> None:
        """The peer has ended the stream."""
        if self.protocol is None or self.host.dead:
            return
        if how == "reset":
            if self._world.random.random() < 0.5:
                self._arrived.clear()
                self.peer._pipe.clear()
            self._end = how
        else:
            self._end = self._end or how
        self._read_soon()
        if how == "reset":
            self._loop.call_soon(self._broken)

    def _broken(self) -> None:
        """A write finds that there is nobody, even if nothing is read."""
        if not self._arrived:
            self._lose(ConnectionResetError(104, "Connection reset by peer"))
        else:
            self._read_soon()
            self._world.within(0.01, partial(self._loop.call_soon, self._broken))

    def host_died(self) -> None:
        """The process of this end was killed: the kernel says so, unless the machine is gone."""
        self._unsent.clear()
        self.protocol = None
        if self.host.silent:
            self.hole = self.peer.hole = True
        elif not self.hole:
            how = self._world.random.choice(["fin", "reset"])
            unread, self._closing = bool(self._arrived), True
            self._world.within(2 * self.latency, partial(self.peer.ended, "reset" if unread else how))


class _Server:
    """What ``create_server`` gives."""

    def __init__(self, network: Network, port: int) -> None:
        self._network = network
        self._port = port
        self.sockets = [self]

    def fileno(self) -> int:
        """None, as of a connection's."""
        return -1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def close(self) -> None:
        self._network.listeners.pop(self._port, None)


class Network:
    """Every port and every connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[int, tuple[Host, Callable[[], Any]]] = {}
        self.links: list[tuple[SimulatedTransport, SimulatedTransport]] = []
        """Dialer's and listener's end of each connection that was ever made."""
        self.apart: dict[frozenset[Host], bool] = {}
        """Pairs of hosts between which nothing gets through, and whether who dials is told so."""
        self._port = 1_000

    def listen(self, host: Host, factory: Callable[[], Any], port: int) -> _Server:
        port = port or self._next_port()
        self.listeners[port] = host, factory
        return _Server(self, port)

    def _next_port(self) -> int:
        self._port += 1
        return self._port

    async def connect(self, host: Host, factory: Callable[[], Any], port: int) -> Any:
        """Raises OSError: nobody listens there."""
        connected: asyncio.Future[Any] = host.loop.create_future()
        latency = self.world.random.choice(LATENCY_SECONDS)
        self.world.within(latency, partial(self._arrive, host, factory, port, connected))
        return await connected

    def _arrive(self, host: Host, factory: Callable[[], Any], port: int, connected: Any) -> None:
        found = self.listeners.get(port)
        if host.dead or (found is not None and found[0].silent):
            return
        if found is None or found[0].dead:
            error = ConnectionRefusedError(111, "Connection refused")
            host.loop.call_soon(lambda: connected.done() or connected.set_exception(error))
            return
        other, accept = found
        if (told := self.apart.get(frozenset((host, other)))) is not None:
            if told:
                unreachable = OSError(113, "No route to host")
                host.loop.call_soon(lambda: connected.done() or connected.set_exception(unreachable))
            return
        mine = SimulatedTransport(self, host, self._next_port(), port)
        theirs = SimulatedTransport(self, other, port, mine.ports[0])
        mine.peer, theirs.peer = theirs, mine
        self.links.append((mine, theirs))

        def established() -> None:
            if connected.done():
                mine.protocol = asyncio.Protocol()
                mine.abort()
            else:
                _begin(mine, factory)
                connected.set_result((mine, mine.protocol))

        host.loop.call_soon(established)
        other.loop.call_soon(_begin, theirs, accept)

    def cut_off(self, first: Host, second: Host, *, told: bool) -> None:
        """Nothing gets from one to the other any more, in both directions."""
        self.apart[frozenset((first, second))] = told
        for mine, theirs in self.between(first, second):
            mine.hole = theirs.hole = True

    def between(self, first: Host, second: Host) -> list[tuple[SimulatedTransport, SimulatedTransport]]:
        """The connections of two hosts that are open at both ends."""
        return [
            (mine, theirs)
            for mine, theirs in self.links
            if {mine.host, theirs.host} == {first, second} and mine.protocol and theirs.protocol
        ]


def _begin(transport: SimulatedTransport, factory: Callable[[], Any]) -> None:
    protocol = transport.protocol = factory()
    protocol.connection_made(transport)
    transport.resume_reading() if not transport._reading_paused else None
