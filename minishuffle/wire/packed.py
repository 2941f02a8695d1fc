"""Tables that control messages carry as bytes: placements, traffic and positions."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

from pydantic import AfterValidator, Field

from minishuffle import limits

__all__ = [
    "WORKER_BYTES",
    "Cursor",
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
    """The rows that an attempt has exchanged over an edge with an attempt of another subtask."""

    edge: int
    subtask: int
    attempt: int
    """0, with subtask 0: all former peers without an entry of their own."""
    sent: int = 0
    """Rows of elements whose beginning was passed to the peers."""
    skipped: int = 0
    """The part of ``sent`` whose element was cut off when the attachment ended."""
    received: int = 0
    """Rows of elements whose beginning came from the peers."""
    incomplete: int = 0
    """The part of ``received`` whose element was cut off."""


def pack_traffic(entries: Iterable[tuple[int, ...]]) -> bytes:
    """The table of entries, each with the fields of :class:`PeerRows`."""
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

_POSITION: Final = struct.Struct(">IQQB")
_DONE, _HAS_CURSOR, _FORGOTTEN = 1, 2, 4
_CURSOR: Final = struct.Struct(">QHH")
"""Follows a position with a cursor: rows, and the lengths of the name and of the position, which come
next."""
_POSITIONS_BYTES_MAX: Final = limits.SPLITS_MAX * _POSITION.size
assert (
    limits.NAMED_SPLITS_MAX
    * (_POSITION.size + _CURSOR.size + limits.SPLIT_NAME_BYTES_MAX + limits.SPLIT_POSITION_BYTES_MAX)
    <= _POSITIONS_BYTES_MAX
)


class Cursor(NamedTuple):
    """The position from which a named split is read on."""

    name: str
    position: bytes = b""
    """The position that the source returned with its last batch; empty at the beginning of the split."""
    rows: int = 0
    """Rows of the split before this position."""


class SplitPosition(NamedTuple):
    """The position of a source's subtask in one of its splits."""

    split: int
    """Its number: the index in ``Source.splits()``, if that never changes."""
    position: int
    """Rows of the split that were emitted or skipped."""
    lease: int = 0
    """Further rows that may be emitted before the next report."""
    done: bool = False
    """The split has ended."""
    cursor: Cursor | None = None
    """None: the split is read on from its row count."""
    forgotten: bool = False
    """It has ended, and its source does not give it any more: nothing is kept of it."""

    @property
    def end(self) -> int:
        """No row from here on was emitted."""
        return self.position + self.lease


def pack_positions(entries: Iterable[SplitPosition]) -> bytes:
    return b"".join(map(_packed_position, entries))


def _packed_position(entry: SplitPosition) -> bytes:
    split, position, lease, done, cursor, forgotten = entry
    flags = done * _DONE | forgotten * _FORGOTTEN
    if cursor is None:
        return _POSITION.pack(split, position, lease, flags)
    name = cursor.name.encode()
    head = _POSITION.pack(split, position, lease, flags | _HAS_CURSOR)
    return b"".join((head, _CURSOR.pack(cursor.rows, len(name), len(cursor.position)), name, cursor.position))


def unpack_positions(table: bytes) -> list[SplitPosition]:
    """Raises ValueError: it is not a table of positions."""
    entries, at = [], 0
    try:
        while at < len(table):
            split, position, lease, flags = _POSITION.unpack_from(table, at)
            at += _POSITION.size
            cursor = None
            if flags & _HAS_CURSOR:
                rows, name_bytes, position_bytes = _CURSOR.unpack_from(table, at)
                start = at + _CURSOR.size
                middle, at = start + name_bytes, start + name_bytes + position_bytes
                if at > len(table):
                    raise ValueError(f"a table of {len(table)} bytes ends in the middle of a position")
                cursor = Cursor(table[start:middle].decode(), table[middle:at], rows)
            done, forgotten = bool(flags & _DONE), bool(flags & _FORGOTTEN)
            entries.append(SplitPosition(split, position, lease, done, cursor, forgotten))
    except struct.error as error:
        raise ValueError(f"a table of {len(table)} bytes is none of positions: {error}") from error
    return entries


def _checked_positions(table: bytes) -> bytes:
    unpack_positions(table)
    return table


PositionTable = Annotated[bytes, Field(max_length=_POSITIONS_BYTES_MAX), AfterValidator(_checked_positions)]
"""Positions of one source's subtask, in a message; see :func:`unpack_positions`."""
