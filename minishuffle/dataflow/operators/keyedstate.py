"""State as Arrow batches of keys and values, divisible by key: another number of subtasks can go on with it.

(Flink: key groups; here any subtask's part is cut out by the hash that its records are partitioned by.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from minishuffle.exchange.gather import taken
from minishuffle.exchange.keys import destination, fixed_values, hash_columns, hash_rows
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = [
    "StatePart",
    "by_columns",
    "by_rows",
    "chunks",
    "divided",
    "greatest",
    "key_columns_of",
    "keys_of",
    "packed",
    "unpacked",
]

Item = TypeVar("Item")

_HASH: Final = "hash"
_KEY: Final = "key"


@dataclass(frozen=True, slots=True)
class StatePart:
    """Rows of one kind of an operator's state, at most ``BATCH_ROWS_MAX``.

    Each has the hash of its key; what has none belongs to all subtasks (how far event time is).
    """

    name: str
    batch: pa.RecordBatch


def divided(parts: Iterable[StatePart], index: int, parallelism: int) -> Iterator[StatePart]:
    """What of the state of all subtasks before belongs to subtask ``index`` of ``parallelism`` now."""
    for part in parts:
        place = part.batch.schema.get_field_index(_HASH)
        if place < 0:
            yield part
            continue
        mine = destination(fixed_values(part.batch.column(place), np.uint64), parallelism) == index
        if mine.any():
            yield StatePart(part.name, taken(part.batch, np.flatnonzero(mine)))


def chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """As many at a time as fit into one part."""
    iterator = iter(items)
    while some := list(islice(iterator, BATCH_ROWS_MAX)):
        yield some


# --- keys and values that are Python's ------------------------------------------------------------------


def packed(values: Iterable[Any]) -> pa.Array:
    """Values as the bytes in which they cross an exchange. Raises UnserializableRecord as that does."""
    return pa.array([pack_rows([value]) for value in values], pa.large_binary())


def unpacked(column: pa.Array) -> list[Any]:
    return [unpack_rows(value)[0] for value in column.to_pylist()]


def by_rows(name: str, keys: Sequence[Any], **columns: Any) -> StatePart:
    """A part with these keys, as records brought them, and columns (arrays or lists)."""
    hashes = pa.array(hash_rows(keys))
    return StatePart(name, pa.RecordBatch.from_pydict({_HASH: hashes, _KEY: packed(keys), **columns}))


def keys_of(part: StatePart) -> list[Any]:
    return unpacked(part.batch.column(_KEY))


# --- keys that are columns ------------------------------------------------------------------------------


def by_columns(name: str, keys: Sequence[pa.Array], columns: dict[str, pa.Array]) -> Iterator[StatePart]:
    """Parts with these columns of keys, and others; as many as it takes."""
    numbered = {f"{_KEY}{number}": column for number, column in enumerate(keys)}
    batch = pa.RecordBatch.from_pydict({_HASH: pa.array(hash_columns(keys)), **numbered, **columns})
    for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
        yield StatePart(name, batch.slice(start, BATCH_ROWS_MAX))


def key_columns_of(part: StatePart) -> list[pa.Array]:
    names = [name for name in part.batch.schema.names if name.removeprefix(_KEY).isdigit()]
    return [part.batch.column(name) for name in names]


# --- event time -----------------------------------------------------------------------------------------


def greatest(part: StatePart, times: list[int], column: str) -> list[int]:
    """The greater ones of these times and those of a part that all subtasks get."""
    return [max(pair) for pair in zip(times, part.batch.column(column).to_pylist(), strict=True)]
