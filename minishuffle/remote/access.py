"""Where a cluster is and what proves the right to enter it; pickles, to go where a task of Spark goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from minishuffle.config import default_secret_file, default_state_dir, read_secret
from minishuffle.errors import UsageError
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity

__all__ = ["Access", "find_access"]

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


def find_access(
    coordinator: str | None, cluster: str, state_dir: str | None, secret_file: str | None
) -> Access:
    """Where the cluster is, from what the user said of it; by default what ``cluster up`` wrote down.

    Raises:
        UsageError: nothing says where the coordinator is, or there is no secret.
    """
    directory = Path(state_dir) if state_dir else default_state_dir(cluster)
    secret = read_secret(Path(secret_file) if secret_file else default_secret_file(directory))
    if coordinator is None:
        try:
            coordinator = str(json.loads((directory / "cluster.json").read_text())["coordinator"])
        except (OSError, ValueError, KeyError):
            raise UsageError(
                f"nothing in {directory} says where the coordinator is: start a cluster with 'minishuffle "
                "cluster up', or say option('coordinator', 'HOST:PORT')"
            ) from None
    address = Address.parse(coordinator)
    return Access(address.host, address.port, cluster, secret)
