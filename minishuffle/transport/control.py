"""Control links: one TCP connection each, Message frames both ways once both sides are proven.

:class:`ControlServer` and :func:`connect_control` are for processes with an event loop (uvloop or
asyncio's own), :class:`BlockingControlClient` for programs without one.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Self

from minishuffle import limits
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ResourceExhausted,
    ShuffleError,
    error_from_code,
    text_of,
)
from minishuffle.ids import Address
from minishuffle.transport.addresses import (
    cannot_listen,
    host_port,
    no_coordinator,
    no_handshake,
    refused_at,
)
from minishuffle.transport.admission import UnprovenConnections
from minishuffle.transport.credentials import Credentials, tls_problem
from minishuffle.transport.forks import close_in_forks
from minishuffle.transport.tls import TlsStream, binding_of, tls_layer
from minishuffle.wire.control import MessageDecoder, encode_message
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import NONCE_BYTES, Handshake, HandshakeRefused, Identity
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import Failure

__all__ = ["BlockingControlClient", "ControlLink", "ControlServer", "connect_control"]

OnMessage = Callable[[ControlMessage, int], None]
OnClosed = Callable[[Exception | None], None]


class ControlLink(asyncio.Protocol):
    """One control connection; made by :class:`ControlServer` and :func:`connect_control` only.

    ``peer`` is proven, ``remote`` and ``local`` are ``HOST:PORT``, and ``remote_host`` is the first of these
    alone. All calls are on the loop's thread. While
    it is not ``writable``, whoever can should wait; ``on_writable`` is called once it is again.
    """

    def __init__(
        self,
        handshake: Handshake,
        opened: Callable[[ControlLink], None],
        proven: Callable[[ControlLink], None],
        failed: Callable[[ControlLink, str, ShuffleError], None],
        values_max: int = limits.CONTROL_FRAME_BYTES_MAX,
    ) -> None:
        """Exactly one of ``proven`` and ``failed`` follows ``opened``; ``failed`` gets a reason."""
        self.remote = self.local = self.remote_host = ""
        self._handshake: Handshake | None = handshake
        self._peer: Identity | None = None
        self._opened, self._proven, self._failed = opened, proven, failed
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Transport | None = None
        self._inbox = MessageDecoder(values_max)
        self._held = b""  # received before :meth:`start`
        self._delivering = False
        self._silent = self.writable = True
        self.on_writable: Callable[[], None] = lambda: None
        self._begun = self._closed_here = self._ended = False
        self._on_message: OnMessage = lambda message, request: None
        self._on_closed: OnClosed = lambda error: None
        self._error: Exception | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()

    @property
    def peer(self) -> Identity:
        assert self._peer is not None, "the link is not proven yet"
        return self._peer

    def start(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Begin to deliver messages, from the next loop turn on; to be called once.

        ``on_message`` gets each message with its request number (0: none) and may raise
        RemoteProtocolError to have the link closed. ``on_closed`` comes once, last: with None when either
        side closed the connection, PeerLost when it broke, RemoteProtocolError when the peer sent
        what it must not, ResourceExhausted when the peer did not read.
        """
        self._on_message, self._on_closed = on_message, on_closed
        self._loop.call_soon(self._begin)

    def send(self, message: ControlMessage, request: int = 0) -> None:
        """Queue a message; without effect on a link that is closed or closing.

        Raises:
            ResourceExhausted: the message is longer than a control frame may be.
        """
        data = encode_message(message, request)
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size() + len(data)
        if unsent > limits.CONTROL_UNSENT_BYTES_MAX:
            self._abort(ResourceExhausted(f"{self._peer} at {self.remote} left {unsent} bytes unread"))
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what is queued, for CLOSE_SECONDS_MAX at most, and close."""
        self._closed_here = True
        if not self._transport.is_closing():
            self._transport.close()
            timer = self._loop.call_later(limits.CLOSE_SECONDS_MAX, self._transport.abort)
            self._lost.add_done_callback(lambda _: timer.cancel())

    @property
    def greeted(self) -> bool:
        """The peer has sent a valid first Hello."""
        return self._handshake is not None and self._handshake.greeted

    @property
    def error(self) -> Exception | None:
        """Why the link was or will be closed, if not because either side wanted it so."""
        return self._error

    def on_lost(self, forget: Callable[[ControlLink], None]) -> None:
        """Have ``forget`` called when the socket is closed."""
        self._lost.add_done_callback(lambda _: forget(self))

    async def wait_closed(self) -> None:
        """Return when the socket is closed."""
        await asyncio.shield(self._lost)

    def refuse(self, reason: str, error: ShuffleError) -> None:
        """End a link that is not proven yet."""
        self._handshake = None
        if isinstance(error, HandshakeRefused) and error.final_frame:
            self._transport.write(error.final_frame)
        self.close()
        self._failed(self, reason, error)

    # --- asyncio's side ---------------------------------------------------------------------------

    @property
    def _transport(self) -> asyncio.Transport:
        assert self._connected is not None, "asyncio has not connected the link yet"
        return self._connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connected = transport  # type: ignore[assignment]
        close_in_forks(transport.get_extra_info("socket"))
        self.local = host_port(transport.get_extra_info("sockname"))
        self.remote = host_port(peer := transport.get_extra_info("peername"))
        self.remote_host = str(peer[0]) if isinstance(peer, tuple) else ""
        self._opened(self)
        if self._handshake is not None and (hello := self._handshake.start()):
            self._transport.write(hello)

    def data_received(self, data: bytes) -> None:
        self._silent = False
        if self._handshake is not None:
            self._receive_handshake(self._handshake, data)
        elif self._begun:
            self._receive_messages(data)
        elif self._peer is not None:
            self._held += data

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.on_writable()
        if self._inbox and self._begun:
            self._deliver_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._handshake is not None and isinstance(exc, HandshakeRefused):
            self.refuse(exc.reason, exc)
        elif self._handshake is not None:
            # A connection without any data, TLS included, was only a test whether the port is open.
            reason = "" if self._silent and not isinstance(exc, PeerLost) else "closed"
            self.refuse(reason, PeerLost(f"{self.remote} closed the connection during the handshake"))
        if self._error is None and exc is not None:
            self._error = PeerLost(f"the connection to {self._peer} at {self.remote} broke: {text_of(exc)}")
        self._lost.set_result(None)
        if self._begun and not self._delivering:
            self._end()

    def _receive_handshake(self, handshake: Handshake, data: bytes) -> None:
        if isinstance(self._transport, TlsStream):
            handshake.binding = self._transport.binding()
        try:
            answer = handshake.receive(data)
        except HandshakeRefused as refusal:
            self.refuse(refusal.reason, refusal)
            return
        self._transport.write(answer)
        if handshake.peer is not None:
            self._handshake = None
            self._peer = handshake.peer
            self._held = handshake.leftover()
            self._transport.pause_reading()
            self._proven(self)

    def _begin(self) -> None:
        self._begun = True
        held, self._held = self._held, b""
        self._receive_messages(held)

    def _receive_messages(self, data: bytes) -> None:
        try:
            self._inbox.receive(data)
        except RemoteProtocolError as error:
            self._abort(error)
        if not self._delivering:
            self._deliver()

    def _deliver(self) -> None:
        """Hand out some messages; the rest in later turns of the loop, and meanwhile nothing is read."""
        self._delivering = False
        try:
            for _ in range(limits.MESSAGES_PER_TURN_MAX):
                if not self._inbox or self._closed_here or self._must_wait():
                    break
                self._on_message(*self._inbox.take())
        except RemoteProtocolError as error:
            self._abort(error)
        waits = bool(self._inbox) and not self._closed_here
        if waits and not self._must_wait():
            self._deliver_soon()
        elif self._lost.done():
            self._end()
        if not self._transport.is_closing():
            (self._transport.pause_reading if waits else self._transport.resume_reading)()

    def _deliver_soon(self) -> None:
        if not self._delivering:
            self._delivering = True
            self._loop.call_soon(self._deliver)

    def _must_wait(self) -> bool:
        """A client reads the replies to its requests before it has more of them answered. Workers and the
        coordinator must not wait for each other."""
        return not self.writable and not self._lost.done() and self.peer.role is Role.CLIENT

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_closed(self._error)

    def _abort(self, error: Exception) -> None:
        self._closed_here = True
        self._error = self._error or error
        self._transport.abort()


async def connect_control(
    address: Address, identity: Identity, secret: bytes, *, timeout: float, tls: Credentials | None = None
) -> ControlLink:
    """Connect to the coordinator at ``address`` and complete the handshake, with ``tls`` over TLS.

    Raises:
        PeerLost: nobody answers there within ``timeout`` seconds, or the connection broke.
        HandshakeRefused: one side did not accept the other.
    """
    loop = asyncio.get_running_loop()
    proven: asyncio.Future[None] = loop.create_future()

    def failed(link: ControlLink, reason: str, error: ShuffleError) -> None:
        if not proven.done():
            proven.set_exception(error)
            proven.exception()  # nobody may be left to see it

    handshake = Handshake(identity, secret, secrets.token_bytes(NONCE_BYTES), dialer=True)
    link = ControlLink(handshake, lambda link: None, lambda link: proven.set_result(None), failed)
    layer = tls_layer(tls)
    deadline = loop.time() + timeout
    try:
        async with asyncio.timeout_at(deadline):
            await loop.create_connection(
                lambda: link if layer is None else layer.dial(link, address.host), address.host, address.port
            )
    except OSError as error:
        raise no_coordinator(address, timeout, error) from error
    try:
        async with asyncio.timeout_at(deadline):
            await proven
    except BaseException as error:
        link.close()
        if isinstance(error, HandshakeRefused):
            raise refused_at(address, error) from None
        if isinstance(error, (OSError, PeerLost)):
            raise no_handshake(address, timeout, error) from error
        raise
    return link


class ControlServer:
    """Accepts control links; ``port`` is where it listens, once started."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._unproven = UnprovenConnections[ControlLink](0, attrgetter("greeted"))
        self._timers: dict[ControlLink, asyncio.TimerHandle] = {}
        self._links: dict[ControlLink, None] = {}

    async def start(
        self,
        host: str,
        port: int,
        identity: Identity,
        secret: bytes,
        *,
        on_link: Callable[[ControlLink], None],
        refused: Callable[[str, str, str], None],
        authorize: Callable[[Identity], str | None] = lambda peer: None,
        handshake_seconds: float = limits.HANDSHAKE_SECONDS_MAX,
        unproven_max: int = limits.UNAUTHENTICATED_CONNECTIONS_MAX,
        tls: Credentials | None = None,
    ) -> None:
        """Listen on ``host:port``, any free port for 0; with ``tls`` for TLS alone.

        ``on_link`` gets each proven link and calls its ``start``; ``refused`` gets reason (of REASONS, or
        timeout, limit, closed), text and remote of each connection refused or closed for cause.

        Raises:
            UsageError: the port is taken, or the host is not one of this machine's.
        """

        def opened(link: ControlLink) -> None:
            if (oldest := self._unproven.add(link)) is not None:
                oldest.refuse("limit", ResourceExhausted(self._unproven.eviction()))
            self._timers[link] = loop.call_later(handshake_seconds, link.refuse, "timeout", late)

        def settled(link: ControlLink) -> None:
            self._unproven.remove(link)
            self._timers.pop(link).cancel()

        def proven(link: ControlLink) -> None:
            settled(link)
            self._links[link] = None
            link.on_lost(closed)
            on_link(link)

        def closed(link: ControlLink) -> None:
            self._links.pop(link, None)
            if cause := _cause(link.error):
                refused(cause, str(link.error), link.remote)

        def failed(link: ControlLink, reason: str, error: ShuffleError) -> None:
            settled(link)
            if reason:
                refused(reason, str(error), link.remote)

        def new_link() -> asyncio.BaseProtocol:
            nonce = secrets.token_bytes(NONCE_BYTES)
            shake = Handshake(identity, secret, nonce, dialer=False, authorize=authorize)
            link = ControlLink(shake, opened, proven, failed, limits.MESSAGE_VALUES_MAX)
            return link if layer is None else layer.accept(link)

        loop, late = asyncio.get_running_loop(), PeerLost(f"no handshake within {handshake_seconds:g} s")
        layer = tls_layer(tls)
        self._unproven = UnprovenConnections(unproven_max, attrgetter("greeted"))
        await self._listen(new_link, host, port)

    async def _listen(self, new_link: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(new_link, host, port, backlog=limits.LISTEN_BACKLOG)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        close_in_forks(*self._server.sockets)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and close every link; what they hold unsent goes out first."""
        if self._server is not None:
            self._server.close()
        links = [*self._links, *self._unproven]
        for link in links:
            link.close()
        for link in links:
            await link.wait_closed()


def _cause(error: Exception | None) -> str:
    """As what the end of a proven link is counted; empty if nobody is to blame."""
    if isinstance(error, RemoteProtocolError):
        return "malformed"
    return "limit" if isinstance(error, ResourceExhausted) else ""


class BlockingControlClient:
    """A control link for a program without an event loop. Not thread-safe.

    Args:
        address: of the coordinator.
        timeout: seconds to connect and prove, and to wait for a reply unless a request says otherwise.
        tls: has the connection use TLS.

    Raises:
        PeerLost: nobody answers there.
        HandshakeRefused: one side did not accept the other.
    """

    def __init__(
        self,
        address: Address,
        identity: Identity,
        secret: bytes,
        timeout: float,
        *,
        tls: Credentials | None = None,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._inbox = MessageDecoder()
        self._request = 0
        deadline = time.monotonic() + timeout
        try:
            self._socket: socket.socket = socket.create_connection((address.host, address.port), timeout)
        except OSError as error:
            raise no_coordinator(address, timeout, error) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = Handshake(identity, secret, secrets.token_bytes(NONCE_BYTES), dialer=True)
            if tls is not None:
                handshake.binding = self._wrap(tls, deadline)
            self._prove(handshake, deadline)
        except PeerLost as error:
            self._socket.close()
            raise no_handshake(address, timeout, error) from error
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; may be called again."""
        self._socket.close()

    def request(self, message: ControlMessage, timeout: float | None = None) -> ControlMessage:
        """Send a request and wait for its reply.

        Raises:
            ShuffleError: the coordinator answered with that failure.
            PeerLost: no reply within ``timeout`` seconds, or the connection broke.
            RemoteProtocolError: the coordinator sent what it must not.
            ResourceExhausted: the message is longer than a control frame may be.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        self._request += 1
        self._send(encode_message(message, self._request), deadline)
        while True:
            self._inbox.receive(self._receive(deadline))
            while self._inbox:
                reply, number = self._inbox.take()
                if number != self._request:
                    continue  # a late reply, no longer awaited
                if isinstance(reply, Failure):
                    raise error_from_code(reply.code, reply.text)
                return reply

    def _wrap(self, tls: Credentials, deadline: float) -> bytes:
        """Use TLS from now on; gives what the proof covers of it."""
        contexts = tls.current()
        plain = self._socket
        self._socket = wrapped = contexts.dialing.wrap_socket(
            plain, server_hostname=self.address.host, do_handshake_on_connect=False
        )
        try:
            wrapped.settimeout(max(deadline - time.monotonic(), 0.001))
            wrapped.do_handshake()
        except OSError as error:
            raise self._lost(error) from error
        return binding_of(wrapped, contexts, dialer=True)

    def _prove(self, handshake: Handshake, deadline: float) -> None:
        self._send(handshake.start(), deadline)
        while handshake.peer is None:
            data = self._receive(deadline)
            try:
                answer = handshake.receive(data)
            except HandshakeRefused as refusal:
                self._send(refusal.final_frame, deadline)
                raise refused_at(self.address, refusal) from None
            self._send(answer, deadline)
        self._inbox.receive(handshake.leftover())

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(data)
        except OSError as error:
            self._socket.close()  # a part of the frame may have gone out
            raise self._lost(error) from error

    def _receive(self, deadline: float) -> bytes:
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._socket.recv(limits.RECEIVE_BUFFER_BYTES)
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise PeerLost(f"the coordinator at {self.address} closed the connection")
        return data

    def _lost(self, error: OSError) -> ShuffleError:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            refusal = HandshakeRefused("tls", tls_problem(error, self.address.host))
            return refused_at(self.address, refusal)
        if isinstance(error, TimeoutError):
            return PeerLost(f"the coordinator at {self.address} did not answer in time")
        reason = error.strerror or error
        return PeerLost(f"the connection to the coordinator at {self.address} broke: {reason}")
