"""The handshake in which two processes prove that they know the cluster's secret, sans-IO.

::

    dialer                                   acceptor
    Hello(nonce d, no proof)         ->
                                     <-      Hello(nonce a, no proof)
    Hello(nonce d, proof "dialer")   ->
                                     <-      Hello(nonce a, proof "acceptor"), Welcome;
                                             or Reject(reason, text) at any point

The dialer proves itself first, so a process that can reach the port and does not know the secret gets nothing
against which it could test guesses. A proof is HMAC-SHA256, keyed with the secret. It covers the protocol
version, the direction, both nonces, the cluster id, the role, worker id, epoch and counter of both sides,
dialer first, and the purpose of a one-way connection. With TLS it also covers the hashes of both certificates
of the connection, so that a process in the middle with TLS to both sides cannot pass on their messages. The
directions differ, so a proof sent back to its maker proves nothing. Until the peer has proved itself, an
acceptor reads only Hello, and a dialer only Hello and Reject.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from minishuffle import limits
from minishuffle.errors import AuthenticationError, LocalProtocolError, RemoteProtocolError
from minishuffle.wire.frames import (
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    LENGTH_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Frame,
    FrameType,
    Hello,
    OneWay,
    Reject,
    Role,
    Welcome,
    decode_body,
    encode_frame,
    encode_text,
)

__all__ = [
    "NONCE_BYTES",
    "REASONS",
    "Handshake",
    "HandshakeRefused",
    "Identity",
    "rejection",
    "tls_on_one_side",
]

NONCE_BYTES: Final = 32
REASONS: Final = ("secret", "version", "cluster", "malformed", "peer", "tls")
"""Reasons for which a handshake is refused; a Reject's ``code`` is the position in this tuple, from 1."""

_MAGIC_AND_VERSION: Final = struct.Struct(">IH")
_CLIENT_HELLO: Final = b"\x16\x03"
_ALERT: Final = b"\x15\x03"
"""First bytes of a TLS dialer, and of a TLS server's answer to a peer without TLS. Read as lengths, both
exceed every frame."""
_REJECT_TEXT_BYTES_MAX: Final = limits.HANDSHAKE_FRAME_BYTES_MAX - 64


@dataclass(frozen=True, slots=True)
class Identity:
    """The claimed identity of a process. ``worker`` and ``epoch`` are 0 except for registered workers.

    ``counter``: the number of times it has dialed the other side, from 1; 0 where it is not counted.
    ``one_way``: the purpose of a one-way connection.
    """

    role: Role
    cluster: str
    worker: int
    epoch: int
    counter: int = 0
    one_way: OneWay | None = None

    def __str__(self) -> str:
        if self.role is Role.COORDINATOR:
            return "the coordinator"
        return f"{self.role.name.lower()} {self.worker}" if self.worker else f"a {self.role.name.lower()}"


class HandshakeRefused(AuthenticationError):
    """The handshake ended without trust.

    ``reason`` is one of :data:`REASONS`; ``final_frame`` has the bytes to send before closing.
    """

    def __init__(self, reason: str, text: str, final_frame: bytes = b"") -> None:
        assert reason in REASONS
        super().__init__(text)
        self.reason = reason
        self.final_frame = final_frame


def tls_on_one_side(*, dialed: bool) -> HandshakeRefused:
    """The refusal if only one side uses TLS: the ``dialed`` one, or the dialer."""
    uses, lacks = ("was dialed", "dialed it") if dialed else ("dialed", "was dialed")
    return HandshakeRefused(
        "tls",
        f"the side that {uses} uses TLS, and the side that {lacks} does not: set tls_certificate, tls_key "
        "and tls_ca for both, or for neither",
    )


def rejection(refusal: HandshakeRefused) -> Reject:
    """The frame that tells a dialer why it is refused."""
    text = encode_text(str(refusal), _REJECT_TEXT_BYTES_MAX).decode()
    return Reject(REASONS.index(refusal.reason) + 1, text)


def _accept_all(peer: Identity) -> str | None:
    return None


class Handshake:
    """One side of a handshake.

    Args:
        identity: of this process.
        secret: the cluster's; not empty.
        nonce: 32 fresh random bytes.
        dialer: whether this side opened the connection.
        target: for a dialer, the worker id it dials, 0 for the coordinator.
        authorize: for an acceptor, returns why a proven peer may not connect, or None.
        expected_epoch: for a dialer, the required epoch of the peer, None for any.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        nonce: bytes,
        *,
        dialer: bool,
        target: int = 0,
        authorize: Callable[[Identity], str | None] = _accept_all,
        expected_epoch: int | None = None,
    ) -> None:
        if not secret or len(nonce) != NONCE_BYTES:
            raise LocalProtocolError(f"a handshake needs a secret and a nonce of {NONCE_BYTES} bytes")
        self.peer: Identity | None = None
        """Set when the handshake is complete."""
        self.frames_in: list[FrameType] = []
        """Types of the received frames, in order; the counter of frames removes them."""
        self.frames_out: list[FrameType] = []
        """Types of the frames to send, likewise."""
        self.binding = b""
        """Additional bytes covered by a proof, for a connection with TLS; set before the first bytes
        arrive."""
        self._identity = identity
        self._secret = secret
        self._dialer = dialer
        self._authorize = authorize
        self._expected_epoch = expected_epoch
        self._mine = Hello(
            identity.role,
            identity.cluster,
            identity.worker,
            identity.epoch,
            target,
            nonce,
            counter=identity.counter,
            one_way=identity.one_way,
        )
        self._theirs: Hello | None = None
        """The peer's first Hello."""
        self._proved = False
        """To a dialer: the acceptor has proved itself."""
        self._buffer = bytearray()
        self._refused = False

    @property
    def greeted(self) -> bool:
        """The peer has sent a valid first Hello, without proof yet."""
        return self._theirs is not None

    def start(self) -> bytes:
        """The first bytes to send: the dialer's Hello, nothing for an acceptor."""
        return self._encode(self._mine) if self._dialer else b""

    def receive(self, data: bytes | memoryview) -> bytes:
        """Take bytes from the peer; returns the bytes to send now.

        Raises:
            HandshakeRefused: either side refused; send its ``final_frame`` and close.
            LocalProtocolError: the handshake has ended.
        """
        if self.peer is not None or self._refused:
            raise LocalProtocolError("the handshake has ended")
        self._buffer += data
        answer = b""
        try:
            while self.peer is None and (frame := self._next_frame()) is not None:
                answer += self._dialer_step(frame) if self._dialer else self._acceptor_step(frame)
        except HandshakeRefused as refusal:
            self._refused = True
            refusal.final_frame = self._final_frame(refusal)
            raise
        return answer

    def leftover(self) -> bytes:
        """The bytes received after the handshake's last frame."""
        return bytes(self._buffer)

    # --- frames -----------------------------------------------------------------------------------

    def _next_frame(self) -> Frame | None:
        buffer = self._buffer
        if self._theirs is None and buffer.startswith(_ALERT if self._dialer else _CLIENT_HELLO):
            raise tls_on_one_side(dialed=self._dialer)
        if len(buffer) < FRAME_HEADER_BYTES:
            return None
        length, kind, channel = FRAME_HEADER.unpack_from(buffer)
        if not FRAME_HEADER_BYTES - LENGTH_BYTES <= length <= limits.HANDSHAKE_FRAME_BYTES_MAX:
            raise HandshakeRefused(
                "malformed",
                f"the peer does not speak minishuffle's protocol: its frame has {length} bytes, "
                f"at most {limits.HANDSHAKE_FRAME_BYTES_MAX} are allowed",
            )
        if kind not in self._expected():
            raise HandshakeRefused("malformed", f"the peer sent a frame of type {kind} in the handshake")
        if len(buffer) < LENGTH_BYTES + length:
            return None
        body = bytes(buffer[FRAME_HEADER_BYTES : LENGTH_BYTES + length])
        del buffer[: LENGTH_BYTES + length]
        self.frames_in.append(FrameType(kind))
        if kind == FrameType.HELLO:
            _check_version(body)
        try:
            return decode_body(kind, channel, memoryview(body))
        except RemoteProtocolError as error:
            raise HandshakeRefused("malformed", str(error)) from error

    def _encode(self, frame: Hello | Welcome | Reject) -> bytes:
        data = encode_frame(frame)
        self.frames_out.append(FrameType(FRAME_HEADER.unpack_from(data)[1]))
        return data

    def _expected(self) -> tuple[FrameType, ...]:
        if not self._dialer:
            return (FrameType.HELLO,)
        return (FrameType.WELCOME if self._proved else FrameType.HELLO, FrameType.REJECT)

    def _final_frame(self, refusal: HandshakeRefused) -> bytes:
        """The frame with the reason for a refused peer; empty for a dialer, which only disconnects."""
        if self._dialer:
            return b""
        return self._encode(rejection(refusal))

    # --- steps ------------------------------------------------------------------------------------

    def _dialer_step(self, frame: Frame) -> bytes:
        if isinstance(frame, Hello):
            if self._theirs is None:
                self._greeted_by(frame)
                return self._encode(replace(self._mine, proof=self._proof("dialer", self._mine, frame)))
            self._check_proof(self._theirs, frame)
            self._proved = True
            return b""
        if isinstance(frame, Reject):
            reason = REASONS[frame.code - 1] if 1 <= frame.code <= len(REASONS) else "peer"
            text = "".join(char if char.isprintable() else " " for char in frame.text)
            raise HandshakeRefused(reason, text)
        assert isinstance(frame, Welcome) and self._theirs is not None
        if (frame.worker, frame.epoch) != (self._theirs.worker, self._theirs.epoch):
            raise HandshakeRefused("malformed", "the peer's Welcome does not match its Hello")
        self.peer = _identity(self._theirs)
        return b""

    def _acceptor_step(self, frame: Frame) -> bytes:
        assert isinstance(frame, Hello)
        if self._theirs is None:
            self._greeted_by(frame)
            self._mine = replace(self._mine, target=frame.worker)
            return self._encode(self._mine)
        self._check_proof(self._theirs, frame)
        peer = _identity(frame)
        refusal = self._authorize(peer)
        if refusal is not None:
            raise HandshakeRefused("peer", refusal)
        self.peer = peer
        mine = replace(self._mine, proof=self._proof("acceptor", self._theirs, self._mine))
        return self._encode(mine) + self._encode(Welcome(mine.worker, mine.epoch))

    def _greeted_by(self, hello: Hello) -> None:
        """The peer's first Hello."""
        self._check_peer(hello)
        if hello.proof:
            raise HandshakeRefused("malformed", "the peer's first Hello has a proof already")
        self._theirs = hello

    # --- checks -----------------------------------------------------------------------------------

    def _check_peer(self, hello: Hello) -> None:
        """Check a first Hello, except its proof."""
        if hello.role not in Role.__members__.values():
            raise HandshakeRefused("malformed", f"the peer has the unknown role {hello.role}")
        if self._dialer and hello.one_way is not None:
            raise HandshakeRefused("malformed", "the peer that was dialed says what the connection is for")
        peer = _identity(hello)
        if peer.cluster != self._identity.cluster:
            raise HandshakeRefused(
                "cluster",
                f"{peer} of cluster {peer.cluster!r} and {self._identity} of cluster "
                f"{self._identity.cluster!r} cannot work together",
            )
        dialed, answers = (self._mine, peer) if self._dialer else (hello, self._identity)
        role = Role.WORKER if dialed.target else Role.COORDINATOR
        if (answers.role, answers.worker) != (role, dialed.target):
            wanted = f"worker {dialed.target}" if dialed.target else "the coordinator"
            raise HandshakeRefused("peer", f"{wanted} was dialed, but {answers} answers there")
        if self._dialer and self._expected_epoch not in (None, peer.epoch):
            raise HandshakeRefused(
                "peer",
                f"{peer} with epoch {self._expected_epoch} was dialed, epoch {peer.epoch} answers there",
            )

    def _check_proof(self, first: Hello, proved: Hello) -> None:
        """Check the peer's second Hello, which is the first one with a proof."""
        if self._dialer:
            expected = self._proof("acceptor", self._mine, first)
        else:
            expected = self._proof("dialer", first, self._mine)
        if not hmac.compare_digest(expected, proved.proof):
            raise HandshakeRefused(
                "secret", f"{_identity(first)} and {self._identity} do not have the same secret"
            )
        if replace(proved, proof=b"") != first:
            raise HandshakeRefused("malformed", "the peer's two Hello frames differ")

    def _proof(self, direction: str, dialer: Hello, acceptor: Hello) -> bytes:
        cluster = dialer.cluster.encode()
        digest = hmac.new(self._secret, digestmod=hashlib.sha256)
        digest.update(struct.pack(">HB", PROTOCOL_VERSION, len(direction)) + direction.encode())
        digest.update(dialer.nonce + acceptor.nonce)
        digest.update(struct.pack(">H", len(cluster)) + cluster)
        for hello in (dialer, acceptor):
            one_way, who = hello.one_way, (hello.role, hello.worker, hello.epoch, hello.counter)
            digest.update(struct.pack(">BIQI?", *who, one_way is not None))
            if one_way is not None:
                job = one_way.job.encode()
                digest.update(struct.pack(">?IIH", one_way.produces, one_way.edge, one_way.number, len(job)))
                digest.update(job)
        digest.update(self.binding)
        return digest.digest()


def _identity(hello: Hello) -> Identity:
    role = Role(hello.role)
    return Identity(role, hello.cluster, hello.worker, hello.epoch, hello.counter, hello.one_way)


def _check_version(body: bytes) -> None:
    """Check a Hello's magic and version first: another version may have another layout."""
    if len(body) < _MAGIC_AND_VERSION.size:
        raise HandshakeRefused("malformed", f"the peer's Hello has no more than {len(body)} bytes")
    magic, version = _MAGIC_AND_VERSION.unpack_from(body)
    if magic != MAGIC:
        raise HandshakeRefused("malformed", f"the peer is not minishuffle: its magic is {magic:#010x}")
    if version != PROTOCOL_VERSION:
        raise HandshakeRefused(
            "version",
            f"one side speaks protocol version {version}, the other {PROTOCOL_VERSION}; "
            "install the same release of minishuffle on both",
        )
