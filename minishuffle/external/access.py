"""Where a cluster is and what proves the right to enter it; pickles, to go where a task of Spark goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity

__all__ = ["Access"]

REQUEST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Access:
    """``host`` and ``port`` are the coordinator's."""

    host: str
    port: int
    cluster: str
    secret: bytes = field(repr=False)

    @contextmanager
    def control(self) -> Iterator[BlockingControlClient]:
        """A connection to the coordinator.

        Raises:
            PeerLost: nobody answers there.
            HandshakeRefused: the secret or the cluster is another one.
        """
        identity = Identity(Role.CLIENT, self.cluster, 0, 0)
        address = Address(self.host, self.port)
        with BlockingControlClient(address, identity, self.secret, REQUEST_SECONDS) as control:
            yield control
