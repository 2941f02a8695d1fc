"""Where a cluster is and what proves the right to enter it; pickles, to go where a task of Spark goes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from minishuffle.config import (
    TlsFiles,
    default_secret_file,
    default_state_dir,
    read_secret,
    tls_files_of,
)
from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import ControlMessage

__all__ = ["AWAY_SECONDS_MAX", "Access", "find_access"]

REQUEST_SECONDS = 30.0
AWAY_SECONDS_MAX = 60.0
"""How long a program that is at work waits for a coordinator that is started again."""
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Access:
    """``host`` and ``port`` are the coordinator's; with ``tls`` all connections use TLS."""

    host: str
    port: int
    cluster: str
    secret: bytes = field(repr=False)
    tls: Credentials | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def control(self) -> Iterator[BlockingControlClient]:
        """A connection to the coordinator.

        Raises:
            PeerLost: nobody answers there.
            HandshakeRefused: the secret or the cluster is another one.
        """
        identity = Identity(Role.CLIENT, self.cluster, 0, 0)
        address = Address(self.host, self.port)
        with BlockingControlClient(address, identity, self.secret, REQUEST_SECONDS, tls=self.tls) as control:
            yield control

    def request(
        self, message: ControlMessage, seconds: float = REQUEST_SECONDS, *, away_seconds: float = 0.0
    ) -> ControlMessage:
        """The reply to a request, which may be asked again.

        Args:
            seconds: for each reply.
            away_seconds: how long to ask again while no coordinator answers.

        Raises:
            ShuffleError: what the coordinator answered, or PeerLost when none did.
        """
        deadline: float | None = None
        while True:
            try:
                with self.control() as control:
                    return control.request(message, seconds)
            except PeerLost:
                now = time.monotonic()
                deadline = now + away_seconds if deadline is None else deadline
                if now >= deadline:
                    raise
            time.sleep(RETRY_SECONDS)


def find_access(options: Mapping[str, str]) -> Access:
    """Where the cluster is, from what the user said of it: ``coordinator``, ``cluster``, ``state-dir``,
    ``secret-file``, ``tls-certificate``, ``tls-key`` and ``tls-ca``; by default what ``cluster up`` wrote.

    Raises:
        UsageError: nothing says where the coordinator is, there is no secret, or no TLS with those files.
    """
    coordinator, state_dir = options.get("coordinator"), options.get("state-dir")
    cluster, secret_file = options.get("cluster", "default"), options.get("secret-file")
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
    files = tls_files_of([options.get(f"tls-{name}") for name in TlsFiles._fields], directory, address)
    tls = None if files is None else Credentials(files)
    return Access(address.host, address.port, cluster, secret, tls)
