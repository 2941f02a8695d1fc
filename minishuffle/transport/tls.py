"""TLS between a socket of asyncio and a protocol: for the socket it is a protocol, for the protocol a
transport.

asyncio's own layer announces a connection to a protocol only when TLS is up. This one does it at once, so the
limits for unproven connections (their number, and the time for a handshake) apply to TLS handshakes as well.
Its errors are of the tree in ``errors``, and a peer without TLS gets an answer it can read. Its high-water
mark is the socket's, since no data waits in here: encryption copies its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import Iterable
from typing import Any, Final

from minishuffle import limits
from minishuffle.errors import PeerLost
from minishuffle.transport.credentials import Credentials, TlsContexts, tls_problem
from minishuffle.wire.frames import encode_frame
from minishuffle.wire.handshake import HandshakeRefused, rejection, tls_on_one_side

__all__ = ["TlsLayer", "TlsStream", "binding_of", "tls_layer"]

_ALERT: Final = 0x15
_HANDSHAKE: Final = 0x16
READ_BYTES: Final = 64 * 1024
"""Decrypted at once for a protocol that has no buffer of its own."""


class TlsLayer:
    """Wraps the protocols of one endpoint or server, in one thread.

    ``plain_answer`` is sent to who dials without TLS.
    """

    def __init__(self, credentials: Credentials, plain_answer: bytes) -> None:
        self.credentials = credentials
        self.plain_answer = plain_answer
        self.scratch = memoryview(bytearray(limits.RECEIVE_BUFFER_BYTES))
        """The buffer of one read, shared by all connections: it is decrypted before the next read."""

    def accept(self, protocol: asyncio.BaseProtocol, *, web: bool = False) -> TlsStream:
        """The protocol for an accepted socket, in place of ``protocol``."""
        contexts = self.credentials.current()
        return TlsStream(self, protocol, contexts, contexts.web if web else contexts.accepting, None)

    def dial(self, protocol: asyncio.BaseProtocol, host: str) -> TlsStream:
        """The same for a socket that dials ``host``."""
        contexts = self.credentials.current()
        return TlsStream(self, protocol, contexts, contexts.dialing, host)


def tls_layer(credentials: Credentials | None) -> TlsLayer | None:
    """For connections between processes; None: there is to be no TLS."""
    if credentials is None:
        return None
    return TlsLayer(credentials, encode_frame(rejection(tls_on_one_side(dialed=True))))


class TlsStream(asyncio.Transport, asyncio.BufferedProtocol):
    """A TLS connection; made only by :class:`TlsLayer`."""

    def __init__(
        self,
        layer: TlsLayer,
        protocol: asyncio.BaseProtocol,
        contexts: TlsContexts,
        context: ssl.SSLContext,
        host: str | None,
    ) -> None:
        super().__init__()
        self._layer, self._protocol, self._contexts, self._host = layer, protocol, contexts, host
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._below: asyncio.Transport | None = None
        self._up = False
        """The handshake of TLS is complete."""
        self._heard = False
        self._reads = True
        """The protocol takes what comes."""
        self._closing = False
        self._queued: list[bytes] = []
        """Written before TLS is up."""
        self._error: Exception | None = None

    @property
    def _socket(self) -> asyncio.Transport:
        assert self._below is not None, "asyncio has not connected it yet"
        return self._below

    # --- the socket's side -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = transport  # type: ignore[assignment]
        self._protocol.connection_made(self)
        if self._host is not None and not self._closing:
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._layer.scratch

    def buffer_updated(self, nbytes: int) -> None:
        data = self._layer.scratch[:nbytes]
        if not self._heard:
            self._heard = True
            if data[0] != _HANDSHAKE and (self._host is None or data[0] != _ALERT):
                if self._host is None:
                    self._socket.write(self._layer.plain_answer)
                self._fail(tls_on_one_side(dialed=self._host is None))
                return
        self._incoming.write(data)
        if self._up or self._shake_hands():
            self._deliver()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if self._error is None and exc is None and self._heard and not self._up:
            self._error = PeerLost("the other side closed the connection in the handshake of TLS")
        error, self._error = self._error or exc, None
        self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # --- TLS -------------------------------------------------------------------------------------

    def _shake_hands(self) -> bool:
        """Go on with the handshake; whether it is complete."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return False
        except ssl.SSLError as error:
            self._send()  # the alert, with the reason
            self._fail(HandshakeRefused("tls", tls_problem(error, self._host or "")))
            return False
        self._up = True
        queued, self._queued = self._queued, []
        self._encrypt(queued)
        return True

    def _deliver(self) -> None:
        """Give the protocol what can be decrypted, as long as it takes it."""
        while self._reads and not self._closing:
            try:
                more = self._deliver_some()
            except ssl.SSLError as error:
                self._fail(HandshakeRefused("tls", tls_problem(error, self._host or "")))
                return
            if not more:
                return

    def _deliver_some(self) -> bool:
        """Whether there may be more."""
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            view = memoryview(protocol.get_buffer(-1))
        else:
            view = memoryview(bytearray(READ_BYTES))
        filled, ended, more = 0, False, True
        try:
            while filled < len(view):
                size: Any = self._ssl.read(len(view) - filled, view[filled:])
                if not size:
                    ended = True
                    break
                filled += size
        except ssl.SSLWantReadError:
            more = False
        except ssl.SSLZeroReturnError:
            ended = True
        if filled and isinstance(protocol, asyncio.BufferedProtocol):
            protocol.buffer_updated(filled)
        elif filled and isinstance(protocol, asyncio.Protocol):
            protocol.data_received(bytes(view[:filled]))
        if ended and not self._closing:
            self.close()
        return more and not ended

    def _send(self) -> None:
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _fail(self, error: HandshakeRefused) -> None:
        """End the connection. Unsent data is sent first only if it is no more than the handshake."""
        self._error = error
        self._closing = True
        (self._socket.abort if self._up else self._socket.close)()

    # --- the protocol's side ---------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._encrypt([data])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """As many calls of :meth:`write`, sent together."""
        self._encrypt(list_of_data)

    def _encrypt(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Each by itself: to put long ones together first takes longer than the records that it spares."""
        if self._closing:
            return
        if not self._up:
            self._queued += map(bytes, list_of_data)
            return
        for data in list_of_data:
            view, at = memoryview(data), 0
            while at < len(view):
                at += self._ssl.write(view[at:])  # One record.
        self._send()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._up:
            with contextlib.suppress(ssl.SSLError):  # it would wait for the other side's close
                self._ssl.unwrap()
            self._send()
        self._socket.close()

    def abort(self) -> None:
        self._closing = True
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reads = False
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        if self._reads or self._closing:
            return
        self._reads = True
        self._socket.resume_reading()
        if self._up:
            asyncio.get_running_loop().call_soon(self._deliver)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size() + sum(map(len, self._queued))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """``sslcontext`` and ``peercert`` are those of TLS; all else is the socket's."""
        if name == "sslcontext":
            return self._ssl.context
        if name == "peercert":
            return self._ssl.getpeercert() if self._up else default
        return self._socket.get_extra_info(name, default)

    def binding(self) -> bytes:
        """See :func:`binding_of`; once TLS is up."""
        return binding_of(self._ssl, self._contexts, dialer=self._host is not None)


def binding_of(tls: ssl.SSLObject | ssl.SSLSocket, contexts: TlsContexts, *, dialer: bool) -> bytes:
    """The binding that the proof of the secret covers, so that it is valid only on this connection: the
    hashes of both certificates in use, the dialer's first."""
    theirs = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest()
    mine = contexts.fingerprint
    return mine + theirs if dialer else theirs + mine
