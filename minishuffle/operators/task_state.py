"""State of a task that is no value of a key, in parts as keyed state. (Flink: ``OperatorStateStore``.)

=========  =============================================================  ====================================
scope      who goes on with it                                            such as
=========  =============================================================  ====================================
key        the subtask to which the key of each record belongs            both sides of a join; rows that wait
subtask    the subtask of the same number, modulo how many there are now  an open file, numbers of results
all        every subtask, with what all have written                      the greatest time of each split
=========  =============================================================  ====================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.operators.row_copies import copies_of
from minishuffle.operators.state_parts import (
    HASH,
    KEY,
    ORDER,
    SLICE_ROWS,
    SUBTASK,
    StatePart,
    by_columns,
    by_rows,
    cut,
    in_order,
    key_columns_of,
    keys_of,
    packed,
    unpacked,
    versioned,
)

__all__ = ["Holding", "Records", "Scope", "TaskState"]

Scope: TypeAlias = Literal["key", "subtask", "all"]

_ROW: Final = "row"
_COLUMN: Final = "row."
"""In front of the names of the records' own columns."""


@dataclass(frozen=True, slots=True)
class Records:
    """Records that are written together.

    ``payload`` are rows, or columns (at least one); ``keys`` of rows are objects, of columns columns; with a
    scope other than "key" there are none. ``marks`` are columns beside the payload, such as which of its
    records have matched; their names are not "row", "key", "hash", "order" or "subtask".
    """

    payload: Any
    """``list[Any] | pa.RecordBatch``."""
    keys: Any = None
    """``list[Any] | Sequence[pa.Array] | None``."""
    marks: Mapping[str, pa.Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.payload)


@dataclass(frozen=True, slots=True)
class Holding:
    """What an operator holds under one name: who goes on with it, and how the operator gives and takes it."""

    scope: Scope
    write: Callable[[], Iterable[Records]]
    read: Callable[[Records], None]
    is_fixed: bool = False
    """Nobody changes the records that ``write`` has given, nor what they hold, while the state goes on."""


class TaskState:
    """What one subtask of an operator holds, by name. Names differ from those of its keyed states."""

    def __init__(self, holdings: Mapping[str, Holding]) -> None:
        self._holdings = holdings

    def write(self, index: int) -> Iterator[StatePart]:
        """All of it, as parts of at most ``BATCH_ROWS_MAX`` records, numbered in the order in which they are
        given.

        Args:
            index: the subtask's number.

        Raises:
            UnserializableRecord: an exchange would not take a row.
        """
        for name, holding in self._holdings.items():
            yield from _parts(name, holding, holding.write(), index)

    def freeze(self, index: int) -> Iterator[StatePart]:
        """What :meth:`write` gives now; but rows are packed when their part is asked for, and so are all
        records that nobody changes. Others are copied before, which takes a tenth of the time."""
        found = list[Iterable[StatePart]]()
        for name, holding in self._holdings.items():
            written = list(holding.write())
            if holding.is_fixed or all(map(_are_rows, written)):
                some = [piece for records in written for piece in _sliced(records)]
                if not holding.is_fixed:
                    some = [replace(piece, payload=copies_of(piece.payload)) for piece in some]
                found.append(_parts(name, holding, some, index))
            else:
                found.append(list(_parts(name, holding, written, index)))
        return chain.from_iterable(found)

    def read(self, parts: Iterable[StatePart]) -> None:
        """Go on with the parts of its names that :meth:`write` gave, those of one subtask in the order in
        which it gave them.

        Raises:
            UsageError: the parts are of another version.
        """
        for part in in_order(part for part in parts if part.name in self._holdings):
            self._holdings[part.name].read(_records(part))


def _parts(name: str, holding: Holding, written: Iterable[Records], index: int) -> Iterator[StatePart]:
    owner, number = index if holding.scope == "subtask" else None, 0
    for records in written:
        yield from cut(_part(name, records, number, owner))
        number += len(records)


def _are_rows(records: Records) -> bool:
    return isinstance(records.payload, list)


def _sliced(records: Records) -> Iterator[Records]:
    """Rows in pieces that take a moment each to be packed; columns as they are."""
    if not _are_rows(records):
        yield records
        return
    for begin in range(0, len(records), SLICE_ROWS):
        some = slice(begin, begin + SLICE_ROWS)
        keys = None if records.keys is None else records.keys[some]
        marks = {name: column[some] for name, column in records.marks.items()}
        yield Records(records.payload[some], keys, marks)


def _part(name: str, records: Records, number: int, owner: int | None) -> StatePart:
    columns: dict[str, Any] = {ORDER: pa.array(np.arange(number, number + len(records))), **records.marks}
    if owner is not None:
        columns[SUBTASK] = pa.repeat(pa.scalar(owner, pa.int64()), len(records))
    keys = records.keys
    if _are_rows(records):
        columns[_ROW] = packed(records.payload)
        return versioned(name, columns) if keys is None else by_rows(name, keys, **columns)
    names, arrays = records.payload.schema.names, records.payload.columns
    columns |= {f"{_COLUMN}{each}": array for each, array in zip(names, arrays, strict=True)}
    return versioned(name, columns) if keys is None else by_columns(name, keys, columns)


def _records(part: StatePart) -> Records:
    payload: list[Any] | pa.RecordBatch
    keys: list[Any] | None
    names = part.batch.schema.names
    own = [name for name in names if name.startswith(_COLUMN)]
    if own:
        arrays = [part.batch[name] for name in own]
        payload = pa.RecordBatch.from_arrays(arrays, [name.removeprefix(_COLUMN) for name in own])
        key_columns = key_columns_of(part)
        keys = key_columns or None
    else:
        payload = unpacked(part.batch[_ROW])
        keys = keys_of(part) if KEY in names else None
    taken = {HASH, KEY, ORDER, SUBTASK, _ROW, *own}
    marks = {
        name: part.batch[name] for name in names if name not in taken and not name.removeprefix(KEY).isdigit()
    }
    return Records(payload, keys, marks)
