"""A function of the user that gives one row, or the key, for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.errors import MissingColumn, UnknownName, UsageError, WrongColumns, did_you_mean
from minishuffle.exchange.batch import Batch, KeyColumns
from minishuffle.exchange.keys import hash_rows, key_array
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.sizes import FIRST_ROWS
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator, OnError, preview
from minishuffle.operators.each_row import EachRow, last_taken, times_of

__all__ = ["Forwarded", "KeyRows", "KeyRowsByColumns", "MapRows"]


class MapRows(EachRow):
    """Emits ``fn(row)`` for each row, in batches within BATCH_BYTES_MAX: the first results show how many
    rows to take at a time."""

    name = "map"
    shares = True

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        if len(rows) < FIRST_ROWS and self.on_error == "fail":
            if rows:
                self.emit_parted(Batch(self.call(rows), None, batch.times), emit)
            return
        stamps = times_of(batch)
        out = self.gathered(stamps, emit)
        begin = 0
        while begin < len(rows):
            end = min(len(rows), begin + max(1, out.room - len(out.rows)))
            some = batch.slice(begin, end) if begin or end < len(rows) else batch
            kept: Iterable[int]
            if self.on_error == "fail":
                kept, results = range(end - begin), self.call(some.payload)
            else:
                kept, results = self.call_one_by_one(some)
            out.extend(results)
            if stamps is not None:
                stamps.note([begin + number for number in kept], repeat(1, len(results)))
            out.look()
            begin = end
        out.flush()


COLUMN_KEYS_MIN: Final = 2048
"""Keys from which on a column of them pays: to make, cut up, send, read and count one takes about 0.4 ms,
however short it is. With 64 keys all takes five times as long as with each by itself, with 1,024 a
fifth to two thirds longer, with 4,096 a third less."""
KEY_TYPES_OF_ROWS: Final = (pa.int64(), pa.large_string(), pa.large_binary(), pa.date32())
"""Columns whose values come back as the very keys that went in, and of which no two are equal unless they
are one key."""


def keys_alone(keys: list[Any]) -> Batch:
    """What is sent of rows of which nothing but the keys is read: one column, if their types allow it and
    they are not too few, else rows that are their own keys."""
    if len(keys) >= COLUMN_KEYS_MIN:
        column = key_array(keys)
        if column is not None and column.type in KEY_TYPES_OF_ROWS:
            alone = pa.RecordBatch.from_arrays([column], ["key"])
            return Batch(alone, KeyColumns(alone, [0]))
    return Batch(keys, keys)


class KeyRows(EachRow):
    """Emits the rows with ``fn(row)`` as the key of each.

    Args:
        alone: nothing but the keys is read, and they are emitted as :func:`keys_alone` says.
    """

    name = "key_by"
    only_reads = True

    def __init__(self, fn: Callable[[Any], Any], on_error: OnError = "fail", *, alone: bool = False) -> None:
        super().__init__(fn, on_error)
        self._alone = alone

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given, keys = self.called(batch)
        rows = given.payload
        if not self._alone and all(map(is_, keys, rows)):
            keys = rows
        keyed = Batch(rows, keys, given.times)
        if self.on_error != "fail":
            keyed = self._with_keys_that_hash(keyed)
        if not keyed.payload:
            return
        emit(keys_alone(keyed.keys) if self._alone else keyed)

    def _with_keys_that_hash(self, keyed: Batch) -> Batch:
        """Drop the records whose key is of a type that cannot be one."""
        try:
            hash_rows(keyed.keys)
        except UsageError:
            kept = [self._hashes(key, row) for key, row in zip(keyed.keys, keyed.payload, strict=True)]
            return keyed.mask(np.array(kept, np.bool_))
        return keyed

    def _hashes(self, key: Any, row: Any) -> bool:
        try:
            hash_rows([key])
        except UsageError as error:
            self.drop(error, row)
            return False
        return True


class KeyRowsByColumns(ChainedOperator):
    """Emits dict rows with the named columns as the key: a bare value for one, a tuple for several.

    Args:
        alone: as of :class:`KeyRows`.

    Raises:
        MissingColumn: no row so far has had such a column.
        UnknownName: a row has none, and others have.
        WrongColumns: no row so far was a dict.
        UsageError: a row is not, and others are.
    """

    name = "key_by"
    only_reads = True

    def __init__(self, names: tuple[str, ...], *, alone: bool = False) -> None:
        self._alone = alone
        self.names = names
        self._key_of = itemgetter(*names)
        self._keyed = False
        """Some rows had all of the columns."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        left = iter(rows)
        try:
            keys = list(map(self._key_of, left))
        except (LookupError, TypeError) as error:
            raise self._explain(last_taken(rows, left), rows) from error
        if keys:
            self._keyed = True
            emit(keys_alone(keys) if self._alone else Batch(rows, keys, batch.times))

    def _explain(self, row: Any, rows: list[Any]) -> UsageError:
        dicts = [each for each in rows if isinstance(each, dict)]
        if not isinstance(row, dict):
            kind: type[UsageError] = UsageError if self._keyed or dicts else WrongColumns
            return kind(
                f"key_by({', '.join(map(repr, self.names))}) takes dict rows, but a row is "
                f"{preview(row)}: map the rows to dicts, or give key_by a function"
            )
        missing = next((name for name in self.names if name not in row), self.names[0])
        kind = UnknownName if self._keyed or any(missing in each for each in dicts) else MissingColumn
        hint = did_you_mean(missing, row)
        return kind(f"no column {missing!r} to key by: {hint}the row has {', '.join(map(str, row))}")


class Forwarded(ChainedOperator):
    """Emits rows as an exchange gives them out (instances of subclasses as their base, say): stands where
    ``forward()`` leaves them in their thread."""

    name = "forward"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        emit(batch.map_rows(lambda rows: unpack_rows(pack_rows(rows))))
