"""Tables of fixed entries that control messages carry as bytes: placements, traffic and positions."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

from pydantic import AfterValidator, Field

from minishuffle import limits

__all__ = [
    "WORKER_BYTES",
    "PeerRows",
    "PositionTable",
    "SplitPosition",
    "TrafficTable",
    "pack_placement",
    "pack_positions",
    "pack_traffic",
    "unpack_placement",
    "unpack_positions",
    "unpack_traffic",
]


# --- placements -----------------------------------------------------------------------------------

WORKER_BYTES: Final = 4


def pack_placement(workers: Sequence[int]) -> bytes:
    """The worker id of each subtask of an operator, as a table of u32."""
    return struct.pack(f">{len(workers)}I", *workers)


def unpack_placement(table: bytes) -> tuple[int, ...]:
    """Raises ValueError: the table ends in the middle of an entry."""
    count, rest = divmod(len(table), WORKER_BYTES)
    if rest:
        raise ValueError(f"a placement of {len(table)} bytes is not a table of u32")
    return struct.unpack(f">{count}I", table)


# --- traffic --------------------------------------------------------------------------------------

_ENTRY: Final = struct.Struct(">IIIQQQQ")


class PeerRows(NamedTuple):
    """Rows that one attempt has exchanged over one edge with one attempt of another subtask."""

    edge: int
    subtask: int
    attempt: int
    """0, with subtask 0: all former peers for which there was no entry left."""
    sent: int = 0
    """Rows of elements whose beginning was handed to the peers."""
    skipped: int = 0
    """Rows, of those sent, whose element was cut off when the attachment ended."""
    received: int = 0
    """Rows of elements whose beginning came from the peers."""
    incomplete: int = 0
    """Rows, of those received, whose element was cut off."""


def pack_traffic(entries: Iterable[PeerRows]) -> bytes:
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def unpack_traffic(table: bytes) -> list[PeerRows]:
    """Raises struct.error: the table ends in the middle of an entry."""
    return [PeerRows(*entry) for entry in _ENTRY.iter_unpack(table)]


def _whole_entries_of(size: int) -> AfterValidator:
    def checked(table: bytes) -> bytes:
        if len(table) % size:
            raise ValueError(f"a table of {len(table)} bytes has no whole number of entries")
        return table

    return AfterValidator(checked)


TrafficTable = Annotated[
    bytes, Field(max_length=2 * limits.TRAFFIC_ENTRIES_MAX * _ENTRY.size), _whole_entries_of(_ENTRY.size)
]
"""The traffic of one attempt, in a message; see :func:`unpack_traffic`."""


# --- positions ------------------------------------------------------------------------------------

_POSITION: Final = struct.Struct(">IQQ?")


class SplitPosition(NamedTuple):
    """How far a source's subtask is in one of its splits."""

    split: int
    """Its index in ``Source.splits()``."""
    position: int
    """Rows of the split that were emitted, those that were skipped included."""
    lease: int = 0
    """Rows behind them that may be emitted before the next report."""
    done: bool = False
    """The split has ended."""

    @property
    def end(self) -> int:
        """Nothing from here on was emitted."""
        return self.position + self.lease


def pack_positions(entries: Iterable[SplitPosition]) -> bytes:
    return b"".join(_POSITION.pack(*entry) for entry in entries)


def unpack_positions(table: bytes) -> list[SplitPosition]:
    """Raises struct.error: the table ends in the middle of an entry."""
    return [SplitPosition(*entry) for entry in _POSITION.iter_unpack(table)]


PositionTable = Annotated[
    bytes, Field(max_length=limits.SPLITS_MAX * _POSITION.size), _whole_entries_of(_POSITION.size)
]
"""Positions of one source's subtask, in a message; see :func:`unpack_positions`."""
