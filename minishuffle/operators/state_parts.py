"""State as Arrow batches of keys and values, divisible by key: another number of subtasks can go on with it.

(Flink: key groups; here any subtask's part is cut out by the hash that its records are partitioned by.)

========================  ========  ======================================================================
column                    type      holds
========================  ========  ======================================================================
``hash``                  uint64    the hash of the row's key; without it the part is no key's
``subtask``               int64     which subtask wrote it, where that one goes on with it
``key``                   any       keys of Python: integers, floats or texts as such, all others as binary,
                                    as they cross an exchange; or
``key0``, ``key1``, …     any       the columns of the key
``order``                 int64     the row's number in the order in which its subtask had it
all others                any       what the operator says of it
========================  ========  ======================================================================

The version of this format stands in the metadata of the batch's schema. In version 1 all keys of Python were
binary, and all values but numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError
from minishuffle.exchange.gather import taken
from minishuffle.exchange.keys import destination, fixed_values, hash_columns, hash_rows
from minishuffle.exchange.rows import pack_each, unpack_rows
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = [
    "HASH",
    "KEY",
    "ORDER",
    "SLICE_ROWS",
    "SUBTASK",
    "StatePart",
    "as_column",
    "by_columns",
    "by_rows",
    "chunks",
    "cut",
    "divided",
    "from_column",
    "in_order",
    "key_columns_of",
    "keys_of",
    "packed",
    "unpacked",
    "versioned",
]

Item = TypeVar("Item")

HASH: Final = "hash"
KEY: Final = "key"
SUBTASK: Final = "subtask"
ORDER: Final = "order"
SLICE_ROWS: Final = 2_048
"""Keys, or rows, of Python in a part that is made between two elements: in 0.5 ms if values are numbers, in 2
if they are dicts."""
_FORMAT: Final = b"minishuffle.state"
_VERSION: Final = b"2"
_READABLE: Final = (b"1", _VERSION)
_OWN_TYPES: Final = {float: pa.float64(), int: pa.int64(), str: pa.large_string()}
"""Values of one of these types make a column of it: that takes a tenth of the time."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Rows of one kind of an operator's state, at most ``BATCH_ROWS_MAX``.

    Each has the hash of its key; what has none belongs to all subtasks (how far event time is).
    """

    name: str
    batch: pa.RecordBatch


def divided(parts: Iterable[StatePart], index: int, parallelism: int) -> Iterator[StatePart]:
    """The parts of subtask ``index`` of ``parallelism``, cut out of what all subtasks before have written."""
    for part in parts:
        names = part.batch.schema.names
        if HASH in names:
            owners = destination(fixed_values(part.batch[HASH], np.uint64), parallelism)
        elif SUBTASK in names:
            owners = part.batch[SUBTASK].to_numpy() % parallelism
        else:
            yield part
            continue
        mine = np.flatnonzero(owners == index)
        if len(mine) == len(owners):
            yield part
        elif len(mine):
            yield StatePart(part.name, taken(part.batch, mine))


def chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """As many at a time as fit into one part."""
    iterator = iter(items)
    while some := list(islice(iterator, BATCH_ROWS_MAX)):
        yield some


def cut(part: StatePart) -> Iterator[StatePart]:
    """The part in as many as it takes."""
    for start in range(0, part.batch.num_rows, BATCH_ROWS_MAX):
        yield StatePart(part.name, part.batch.slice(start, BATCH_ROWS_MAX))


def versioned(name: str, columns: dict[str, Any]) -> StatePart:
    """A part with these columns, and the version of the format."""
    batch = pa.RecordBatch.from_pydict(columns)
    return StatePart(name, batch.replace_schema_metadata({_FORMAT: _VERSION}))


def in_order(parts: Iterable[StatePart]) -> list[StatePart]:
    """The parts that have rows, by the number of their first. What one subtask wrote is in the order in which
    it was there, whichever order the parts come in.

    Raises:
        UsageError: they are of another version.
    """
    kept = []
    for part in parts:
        version = (part.batch.schema.metadata or {}).get(_FORMAT, b"0")
        if version not in _READABLE:
            raise UsageError(
                f"state {part.name!r} of format {version.decode()} cannot be read here, where it is "
                f"{_VERSION.decode()}: go on with the release that wrote it"
            )
        if part.batch.num_rows:
            kept.append(part)
    return sorted(kept, key=_first)


def _first(part: StatePart) -> int:
    number: int = part.batch[ORDER][0].as_py()
    return number


# --- keys and values that are Python's ------------------------------------------------------------------


def packed(values: Sequence[Any]) -> pa.Array:
    """Values as the bytes in which they cross an exchange. Raises UnserializableRecord as that does."""
    return pa.array(pack_each(values), pa.large_binary())


def unpacked(column: pa.Array) -> list[Any]:
    return [unpack_rows(value)[0] for value in column.to_pylist()]


def as_column(values: Sequence[Any], *, alike: bool = False) -> pa.Array:
    """Values that :func:`from_column` gives back: of their own type if all are float, int of 64 bits or str,
    else packed; ``alike`` as in ``pack_each``. Raises UnserializableRecord as that does."""
    kinds = set(map(type, values))
    kind = _OWN_TYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is not None:
        try:
            return pa.array(values, kind)
        except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):  # too long, or half of a character
            pass
    return pa.array(pack_each(values, alike=alike), pa.large_binary())


def from_column(column: pa.Array) -> list[Any]:
    values: list[Any] = unpacked(column) if pa.types.is_large_binary(column.type) else column.to_pylist()
    return values


def by_rows(name: str, keys: Sequence[Any], **columns: Any) -> StatePart:
    """A part with these keys, as records brought them, and columns (arrays or lists)."""
    column = as_column(keys)
    is_packed = pa.types.is_large_binary(column.type)
    hashes = hash_rows(keys) if is_packed else hash_columns([column])
    return versioned(name, {HASH: pa.array(hashes), KEY: column, **columns})


def keys_of(part: StatePart) -> list[Any]:
    return from_column(part.batch.column(KEY))


# --- keys that are columns ------------------------------------------------------------------------------


def by_columns(name: str, keys: Sequence[pa.Array], columns: dict[str, pa.Array]) -> StatePart:
    """A part with these columns of keys, and others."""
    numbered = {f"{KEY}{number}": column for number, column in enumerate(keys)}
    return versioned(name, {HASH: pa.array(hash_columns(keys)), **numbered, **columns})


def key_columns_of(part: StatePart) -> list[pa.Array]:
    names = [name for name in part.batch.schema.names if name.removeprefix(KEY).isdigit()]
    return [part.batch.column(name) for name in names]
