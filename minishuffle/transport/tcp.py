"""The asyncio shell of data connections: sockets on one side, ``Connection`` machines on the other.

There is one flush per connection and loop turn. The transport's high-water mark is 0, so that
``pause_writing`` says exactly "not everything went to the kernel" and ``resume_writing`` "now it did":
segments are given back then and not before, because uvloop on every Python, and asyncio from 3.12,
alias a memoryview instead of copying it. uvloop takes all views of a flush in one ``writelines``,
which pauses correctly there; on plain asyncio each goes by a ``write`` of its own, because
``writelines`` has no back-pressure on some 3.12 and 3.13 releases.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeAlias

import uvloop

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ShuffleError,
    text_of,
)
from minishuffle.ids import Address
from minishuffle.protocol.channel import Outgoing
from minishuffle.protocol.connection import (
    SILENT_AFTER_INTERVALS,
    Connection,
    ConnectionEvent,
    PeerClosed,
)
from minishuffle.protocol.oneway import OneWayReceiver, OneWaySender
from minishuffle.transport.addresses import cannot_listen, host_port, unreachable
from minishuffle.transport.admission import UnprovenConnections
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.forks import close_in_forks
from minishuffle.transport.tls import TlsStream, tls_layer
from minishuffle.wire.frames import OneWay, Role
from minishuffle.wire.handshake import Handshake, HandshakeRefused, Identity

__all__ = ["DataEndpoint", "DataLink", "EndpointHandler", "Machine"]

Machine: TypeAlias = Connection | OneWayReceiver | OneWaySender

TCP_INFO_BYTES: Final = 216
"""The beginning of Linux' ``struct tcp_info``, up to ``tcpi_bytes_retrans``."""
_TCP_INFO: Final = struct.Struct("=2xB65xI48xQ16xII24xQ16xQQ")
"""``tcpi_retransmits``, ``tcpi_rtt``, ``tcpi_bytes_acked``, ``tcpi_notsent_bytes``, ``tcpi_min_rtt``,
``tcpi_rwnd_limited``, ``tcpi_bytes_sent`` and ``tcpi_bytes_retrans``; times are in microseconds."""
_NOT_MEASURED: Final = (1 << 32) - 1


class Measured(NamedTuple):
    """TCP's measurements of a connection; times in seconds, 0.0 for not known."""

    round_trip: float = 0.0
    """The least of the last minutes."""
    smoothed: float = 0.0
    """The recent mean. It includes the time that data waits on the way for earlier data, and the delay of
    acknowledgements, up to 40 ms even on one machine."""
    unsent: int = 0
    """Bytes that the kernel took and has not sent."""
    in_flight: int = 0
    """Bytes that it has sent and the peer has not acknowledged."""
    window_closed: float = 0.0
    """For so long, in all, it had something to send and the peer's window had no room."""
    retransmits: int = 0
    """How often in a row it has sent the same again, each time after twice the time before. A peer that does
    not read acknowledges all the same."""


class EndpointHandler(Protocol):
    """Receives what happens on the data connections of a process."""

    def link_up(self, link: DataLink) -> None:
        """A handshake is complete; ``link.peer`` is proven."""

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None: ...

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        """An established link is gone; its channels have been failed already."""

    def refused(self, reason: str, text: str, remote: str) -> None:
        """A connection was turned away before it was established."""

    def authorize(self, peer: Identity) -> str | None:
        """Why a proven peer may not connect, or None."""


class DataLink(asyncio.BufferedProtocol):
    """One data connection: first its handshake, then its ``Connection``, or a machine that goes one way.

    Args:
        one_way: what it is dialed for, if not for both ways.
    """

    def __init__(
        self, endpoint: DataEndpoint, handshake: Handshake, *, dialer: bool, one_way: OneWay | None = None
    ) -> None:
        self.one_way = one_way
        self._machine: Machine | None = None
        """Made when the handshake is complete."""
        self.established = False
        self.local = self.remote = ""
        self._endpoint = endpoint
        self._handshake = handshake
        self._dialer = dialer
        self._loop = asyncio.get_running_loop()
        self._gathers = False
        """Data is sent with ``writelines``."""
        self._connected: asyncio.Transport | None = None
        self.paused = False
        """The kernel accepts no more data for now."""
        self.on_written: Callable[[], None] = lambda: None
        """Called when data was passed to the socket, and when the socket is full."""
        self._reading = True
        """The socket is read as far as the machine is concerned."""
        self._flush_scheduled = False
        self._in_transport: list[Outgoing] = []
        self._error: ShuffleError | None = None
        """Why the connection ends; without a traceback, whose frames would keep this link alive."""
        self._silent = True
        """The peer has said nothing at all."""
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None
        """The time-out of the handshake, while that lasts."""
        self.done: asyncio.Future[None] = self._loop.create_future()
        """Resolved when the handshake is complete or the connection is gone."""

    @property
    def greeted(self) -> bool:
        return not self._dialer and self._handshake.greeted

    @property
    def peer(self) -> Identity:
        peer = self._handshake.peer
        assert peer is not None
        return peer

    def check_established(self) -> None:
        """Raises why the handshake failed, once: its traceback has frames that refer to this link."""
        if self.established or self._error is None:
            return
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error

    @property
    def machine(self) -> Machine:
        """The protocol's machine, of an established link."""
        assert self._machine is not None, "the handshake is not complete yet"
        return self._machine

    @property
    def connection(self) -> Connection:
        """The machine of an established link that goes both ways."""
        assert isinstance(self._machine, Connection)
        return self._machine

    @property
    def _transport(self) -> asyncio.Transport:
        assert self._connected is not None, "asyncio has not connected the link yet"
        return self._connected

    # --- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._connected = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=0)
        self._gathers = isinstance(self._loop, uvloop.Loop) or isinstance(transport, TlsStream)
        sock = transport.get_extra_info("socket")
        close_in_forks(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.local = host_port(transport.get_extra_info("sockname"))
        self.remote = host_port(transport.get_extra_info("peername"))
        self._endpoint.opened(self, dialer=self._dialer)
        self._timer = self._loop.call_later(self._endpoint.handshake_seconds, self._handshake_timeout)
        self._send_handshake(self._handshake.start())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._endpoint.scratch

    def buffer_updated(self, nbytes: int) -> None:
        data, frames = self._endpoint.scratch[:nbytes], 0
        try:
            if not self.established:
                self._receive_handshake(data)
            else:
                assert self._machine is not None
                frames = self._machine.receive(data, self._loop.time())
        except RemoteProtocolError as error:
            self._endpoint.handler.refused("malformed", str(error), self.remote)
            self.abort(error.with_traceback(None))
            return
        if self.established:
            self._after_step()
            if frames > limits.FRAMES_PER_TURN_MAX and not self._transport.is_closing():
                # uvloop reads up to 32 times before anything else has its turn.
                self._transport.pause_reading()
                self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._reading and not self._lost and not self._transport.is_closing():
            self._transport.resume_reading()

    def _read_as_wanted(self, reads: bool) -> None:
        """Go on reading, or stop."""
        if not self._transport.is_closing():
            self._reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._cancel_timer()
        pieces, self._in_transport = self._in_transport, []
        for piece in pieces:
            piece.released()
        if self.established:
            error = self._error or PeerLost(
                f"connection to worker {self.peer.worker} broke: {text_of(exc) if exc else 'closed by peer'}"
            )
            self.machine.lost(error)
            self._endpoint.closed(self)
            self._endpoint.handler.link_down(self, error)
        else:
            self._endpoint.closed(self)
            if isinstance(exc, HandshakeRefused) and self._error is None:
                self._endpoint.handler.refused(exc.reason, str(exc), self.remote)
                self._error = exc
            if self._error is None:
                self._left_early(begun=isinstance(exc, PeerLost))
        if not self.done.done():
            self.done.set_result(None)

    def _left_early(self, *, begun: bool) -> None:
        self._error = PeerLost(f"{self.remote} closed the connection during the handshake")
        # A connection without any data, TLS included, was only a test whether the port is open.
        if not self._dialer and (begun or not self._silent):
            self._endpoint.handler.refused("closed", str(self._error), self.remote)

    def pause_writing(self) -> None:
        self.paused = True
        self.on_written()

    def resume_writing(self) -> None:
        self.paused = False
        pieces, self._in_transport = self._in_transport, []
        for piece in pieces:
            piece.released()
        self.flush_soon()

    # --- handshake ------------------------------------------------------------------------------

    def _send_handshake(self, data: bytes) -> None:
        self._count_handshake()
        if data:
            self._endpoint.counters.bytes_out += len(data)
            self._transport.write(data)

    def _count_handshake(self) -> None:
        """Book the handshake's frames like all others, so that frames and bytes agree."""
        handshake, counters = self._handshake, self._endpoint.counters
        for kinds, counted in (
            (handshake.frames_in, counters.frames_in),
            (handshake.frames_out, counters.frames_out),
        ):
            for kind in kinds:
                name = kind.name.lower()
                counted[name] = counted.get(name, 0) + 1
            kinds.clear()

    def _receive_handshake(self, data: memoryview) -> None:
        counters = self._endpoint.counters
        counters.bytes_in += len(data)
        self._silent = False
        if isinstance(self._transport, TlsStream):
            self._handshake.binding = self._transport.binding()
        try:
            self._send_handshake(self._handshake.receive(data))
        except HandshakeRefused as refusal:
            self._send_handshake(refusal.final_frame)
            self._refuse(refusal.reason, str(refusal), refusal.with_traceback(None))
            return
        peer = self._handshake.peer
        if peer is None:
            return
        self._cancel_timer()
        self.one_way = self.one_way or peer.one_way
        self._machine = self._endpoint.new_machine(peer, self.one_way, dialer=self._dialer)
        if self._machine is None:
            self._refuse("peer", f"nobody wants that one-way connection with {peer} any more")
            return
        self.established = True
        self._bound_sockets()
        leftover = self._handshake.leftover()
        self._endpoint.settled(self)
        if not self.done.done():
            self.done.set_result(None)
        self._endpoint.handler.link_up(self)
        if leftover and not self._lost:
            counters.bytes_in -= len(leftover)
            self.machine.receive(leftover, self._loop.time())

    def _bound_sockets(self) -> None:
        """Bound the socket buffers of a one-way connection. Their data waits for a consumer without a buffer,
        and Linux would let them grow to many seconds of what this consumer reads."""
        sends = isinstance(self._machine, OneWaySender)
        if sends or isinstance(self._machine, OneWayReceiver):
            option = socket.SO_SNDBUF if sends else socket.SO_RCVBUF
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, option, limits.ONE_WAY_SOCKET_BYTES)

    def _handshake_timeout(self) -> None:
        seconds = self._endpoint.handshake_seconds
        self._refuse("timeout", f"no handshake within {seconds} s")

    def evict(self, text: str) -> None:
        """Close a connection whose handshake is not complete: another one needs its place."""
        self._refuse("limit", text)

    def _refuse(self, reason: str, text: str, error: ShuffleError | None = None) -> None:
        self._cancel_timer()
        self._endpoint.handler.refused(reason, text, self.remote)
        self._error = error or PeerLost(text)
        self._transport.close()

    # --- sending --------------------------------------------------------------------------------

    @property
    def unsent_buffers(self) -> int:
        """Buffers that the transport still holds."""
        return len(self._in_transport)

    def measured(self) -> Measured:
        """TCP's measurements of the connection; empty if Linux does not report them."""
        sock = self._transport.get_extra_info("socket")
        info = b"" if sock is None else sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        if len(info) < TCP_INFO_BYTES:
            return Measured()
        repeats, smoothed, acknowledged, unsent, least, closed, sent, again = _TCP_INFO.unpack(info)
        return Measured(
            0.0 if least == _NOT_MEASURED else least / 1e6,
            smoothed / 1e6,
            unsent,
            max(0, sent - again - acknowledged),
            closed / 1e6,
            repeats,
        )

    def flush_soon(self) -> None:
        """Send what the machine has at the end of this loop turn."""
        if not self._flush_scheduled and not self._lost and self.established:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.paused or self._lost:
            return
        machine = self._machine
        assert machine is not None
        chunks, pieces = machine.data_to_send(limits.FLUSH_SEGMENTS_MAX)
        if not chunks:
            return
        if self._gathers:
            self._transport.writelines(chunks)
        else:
            for chunk in chunks:
                self._transport.write(chunk)
        if self.paused:
            self._in_transport.extend(pieces)
            return
        self._flush_scheduled = True  # whether what waited for these pieces is to be sent is asked once
        for piece in pieces:
            piece.released()
        self._flush_scheduled = False
        self.on_written()
        if machine.wants_to_send:
            self.flush_soon()

    def stepped(self) -> None:
        """Something has been done with the machine of an established link."""
        if not self._lost:
            self._after_step()

    def _after_step(self) -> None:
        machine = self._machine
        assert machine is not None
        events = machine.events()
        if events:
            for event in events:
                if isinstance(event, PeerClosed):
                    self._error = event.error or PeerLost(f"worker {self.peer.worker} closed the connection")
                    self._transport.close()
            self._endpoint.handler.link_events(self, events)
        if not self._lost:
            if machine.reading != self._reading:
                self._read_as_wanted(machine.reading)
            if machine.wants_to_send:
                self.flush_soon()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look_at_clock(self, now: float) -> float:
        """Have the machine of an established link do what is due; gives when the next is (inf: never)."""
        machine = self.machine
        before = machine.next_deadline()
        if before is None:
            return math.inf
        machine.handle_timer(now)
        due = machine.next_deadline()
        if due != before:
            self.stepped()
        return math.inf if due is None else due

    def close(self) -> None:
        """Send queued data and Close, and close the socket."""
        if self._lost:
            return
        self._error = self._error or PeerLost("the connection was closed on this side")
        if self.established:
            self.machine.close()
            self._flush()
        self._transport.close()

    def abort(self, error: ShuffleError) -> None:
        """Drop the connection at once; ``error`` is what its channels see."""
        self._error = self._error or error
        self._transport.abort()


class DataEndpoint:
    """All data connections of a process: the listening socket, and dialing.

    Args:
        identity: what this process proves to be.
        secret: the cluster's.
        counters: shared by all connections.
        ping_interval: seconds of silence before a Ping.
        suspect_after: seconds of silence after which a worker is reported; three quarters of it are for the
            answer to a Ping. Everybody else has four intervals.
        tls: has all connections use TLS.
    """

    def __init__(
        self,
        handler: EndpointHandler,
        identity: Identity,
        secret: bytes,
        counters: ConnectionCounters,
        ping_interval: float,
        *,
        suspect_after: float | None = None,
        handshake_seconds: float = limits.HANDSHAKE_SECONDS_MAX,
        tls: Credentials | None = None,
    ) -> None:
        self.handler = handler
        self.identity = identity
        self.counters = counters
        self.handshake_seconds = handshake_seconds
        self.links: dict[DataLink, None] = {}
        """Established, the oldest first, as Pings are sent."""
        self._secret = secret
        self._ping_interval = ping_interval
        self._suspect_after = suspect_after
        self.tls = tls
        self._layer = tls_layer(tls)
        self.scratch = memoryview(bytearray(limits.RECEIVE_BUFFER_BYTES))
        """The buffer of one read, shared by all connections of the loop: it is decoded before the next
        read."""
        self.unproven = UnprovenConnections[DataLink](
            limits.UNAUTHENTICATED_CONNECTIONS_MAX, attrgetter("greeted")
        )
        """Accepted, and in their handshake."""
        self.dialing: dict[DataLink, None] = {}
        """Dialed, and in their handshake."""
        self._server: asyncio.Server | None = None
        self.one_way: Callable[[Identity, OneWay, bool], Machine | None] = lambda peer, one_way, dialer: None
        """Gives the machine of a one-way connection with that peer; the last argument: this side has
        dialed."""
        self._dialed: dict[int, int] = {}
        """How many times each worker was dialed."""
        self._timer: asyncio.TimerHandle | None = None
        """For the next deadline of any connection."""
        self._timer_at = math.inf

    def serve(
        self,
        identity: Identity,
        handler: EndpointHandler,
        one_way: Callable[[Identity, OneWay, bool], Machine | None],
    ) -> None:
        """The process has an identity: it proves that from now on, and ``handler`` decides who may connect.
        ``one_way``: see there."""
        self.identity, self.handler, self.one_way = identity, handler, one_way

    async def listen(self, host: str, port: int = 0) -> int:
        """Start listening; returns the port.

        Raises:
            UsageError: ``host`` is not an address of this machine, or the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port, backlog=limits.LISTEN_BACKLOG)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        close_in_forks(*self._server.sockets)
        return int(self._server.sockets[0].getsockname()[1])

    async def dial(
        self, address: Address, worker: int, epoch: int | None, one_way: OneWay | None = None
    ) -> DataLink:
        """Connect to that worker's data port and complete the handshake.

        Raises:
            PeerLost: nobody answers there, or the connection broke.
            HandshakeRefused: one side did not accept the other's proof.
        """
        loop = asyncio.get_running_loop()
        counter = self._dialed[worker] = self._dialed.get(worker, 0) + 1
        identity = replace(self.identity, counter=counter, one_way=one_way)
        link = self._new_link(identity, dialer=True, target=worker, epoch=epoch)
        try:
            async with asyncio.timeout(self.handshake_seconds):
                await loop.create_connection(
                    lambda: link if self._layer is None else self._layer.dial(link, address.host),
                    address.host,
                    address.port,
                )
                await asyncio.shield(link.done)
                link.check_established()
        except (OSError, UnicodeError) as error:  # such a name cannot be looked up
            why = unreachable(address, self.handshake_seconds, error)
            raise PeerLost(f"worker {worker} cannot be reached: {why}") from error
        return link

    def _accept(self) -> asyncio.BaseProtocol:
        link = self._new_link(self.identity, dialer=False)
        return link if self._layer is None else self._layer.accept(link)

    def _new_link(
        self, identity: Identity, *, dialer: bool, target: int = 0, epoch: int | None = None
    ) -> DataLink:
        handshake = Handshake(
            identity,
            self._secret,
            os.urandom(32),
            dialer=dialer,
            target=target,
            authorize=self.handler.authorize,
            expected_epoch=epoch,
        )
        return DataLink(self, handshake, dialer=dialer, one_way=identity.one_way)

    def new_machine(self, peer: Identity, one_way: OneWay | None, *, dialer: bool) -> Machine | None:
        """The machine for a connection after its handshake; None if the one-way connection is no longer
        needed."""
        if one_way is not None:
            return self.one_way(peer, one_way, dialer)
        interval, now = self._ping_interval, asyncio.get_running_loop().time()
        if peer.role == Role.WORKER and self._suspect_after is not None:
            interval = self._suspect_after / SILENT_AFTER_INTERVALS
        return Connection(dialer=dialer, counters=self.counters, ping_interval=interval, now=now)

    def opened(self, link: DataLink, *, dialer: bool) -> None:
        """A socket is connected."""
        if dialer:
            self.dialing[link] = None
        elif (oldest := self.unproven.add(link)) is not None:
            oldest.evict(self.unproven.eviction())

    def settled(self, link: DataLink) -> None:
        """A handshake is complete."""
        self.closed(link)
        self.links[link] = None
        self._call_by(link.machine.next_deadline())

    def _call_by(self, deadline: float | None) -> None:
        """Look at the clock then, or before. What a connection receives moves its deadline: a timer that
        comes early is set again, which is cheaper than setting it at every read."""
        if deadline is not None and deadline < self._timer_at:
            self._cancel_timer()
            self._timer_at = deadline
            self._timer = asyncio.get_running_loop().call_at(deadline, self._look_at_clock)

    def _look_at_clock(self) -> None:
        """Handle the deadlines of all connections that are due, or nearly due, in one wake of the process."""
        self._cancel_timer()
        now = asyncio.get_running_loop().time()
        self._call_by(min([link.look_at_clock(now) for link in [*self.links]], default=None))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    def closed(self, link: DataLink) -> None:
        self.unproven.remove(link)
        self.dialing.pop(link, None)
        self.links.pop(link, None)

    async def close(self) -> None:
        """Close every connection and the listening socket."""
        if self._server is not None:
            self._server.close()
        self._cancel_timer()
        for link in [*self.links, *self.unproven, *self.dialing]:
            link.close()
        await asyncio.sleep(0)
        for link in [*self.links, *self.unproven, *self.dialing]:
            link.abort(PeerLost("the process is shutting down"))
        await asyncio.sleep(0)
