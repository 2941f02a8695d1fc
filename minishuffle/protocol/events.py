"""What a connection reports to its shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from minishuffle.errors import ShuffleError
from minishuffle.wire.frames import PartitionRequest

__all__ = ["ConnectionEvent", "PartitionRequested", "PeerClosed", "PeerSilent"]


@dataclass(frozen=True, slots=True)
class PartitionRequested:
    """Answer with :meth:`Connection.attach` or :meth:`Connection.refuse`."""

    request: PartitionRequest


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer said Close or a connection-wide Error: nothing more will come."""

    error: ShuffleError | None


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """No byte came for ``seconds`` although a Ping was sent."""

    seconds: float


ConnectionEvent: TypeAlias = PartitionRequested | PeerClosed | PeerSilent
