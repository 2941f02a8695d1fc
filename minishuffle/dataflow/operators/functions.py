"""Stateless operators: a function of the user for each row or each Arrow batch.

A function is called exactly once per record. Under ``on_error="fail"`` a batch runs through one
comprehension; only when it raises is it worked out which record was to blame, from how far the
iterator had come. (``list(map(fn, rows))`` would end silently at a function that raises
StopIteration.) Under the other policies a plain loop drops the one record.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from inspect import isgeneratorfunction
from itertools import compress, groupby, islice
from operator import is_, itemgetter, length_hint
from typing import Any, Final

import pyarrow as pa

from minishuffle.dataflow.operators.base import NO_ROWS, Emit, refuse_as_rows
from minishuffle.dataflow.operators.chained import (
    ChainedOperator,
    OnError,
    RecordOperator,
    asides_of,
    preview,
)
from minishuffle.dataflow.operators.copies import copies_of
from minishuffle.dataflow.operators.moments import without_times
from minishuffle.dataflow.operators.pandasindex import without_unnamed_index
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.errors import MissingColumn, UnknownName, UsageError, WrongColumns, WrongResult
from minishuffle.exchange.batch import Batch, KeyColumns
from minishuffle.exchange.keys import hash_rows, key_array
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.sizes import FIRST_ROWS, RowsOut
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = ["FilterRows", "FlatMapRows", "Forwarded", "KeyRows", "KeyRowsByColumns", "MapBatches", "MapRows"]


class _PerRow(RecordOperator):
    """One call of ``fn`` per row; what the results mean is the subclass's."""

    def __init__(self, fn: Callable[[Any], Any], on_error: OnError = "fail") -> None:
        super().__init__(fn, on_error)

    def call(self, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """The rows whose function did not raise, and their results, in order."""
        fn = self.fn
        if self.on_error != "fail":
            return self._call_one_by_one(rows)
        left = iter(rows)
        try:
            return rows, [fn(row) for row in left]
        except Exception as error:
            self.note_failure(error, _last_taken(rows, left))
            raise

    def _call_one_by_one(self, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        kept: list[Any] = []
        results: list[Any] = []
        for row in rows:
            try:
                result = self.fn(row)
            except Exception as error:
                self.drop(error, row)
            else:
                kept.append(row)
                results.append(result)
        return kept, results


class MapRows(_PerRow):
    """Emits ``fn(row)`` for each row, in batches within BATCH_BYTES_MAX: the first results show how many
    rows to take at a time."""

    name = "map"
    shares = True

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given = batch.payload
        if len(given) < FIRST_ROWS:
            if results := self.call(given)[1]:
                self.emit_parted(Batch(results), emit)
            return
        out = RowsOut(self.parted(emit))
        begin = 0
        while begin < len(given):
            end = begin + max(1, out.room - len(out.rows))
            results = self.call(given[begin:end] if begin or end < len(given) else given)[1]
            out.rows = out.rows + results if out.rows else results
            out.look()
            begin = end
        out.flush()


class FilterRows(_PerRow):
    """Emits the rows for which ``fn(row)`` is true.

    Raises:
        WrongResult: ``fn`` gave an Aside, a generator or a coroutine, which would count as true.
    """

    name = "filter"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given, results = self.call(batch.payload)
        if aside := asides_of(results):
            raise WrongResult(
                f"{self.name}: its function gave Aside({aside[0].name!r:.80}, ...), and filter has no side "
                "outputs of your own: write flat_map(fn, sides=[...]) with a function that returns a list"
            )
        if results and isinstance(results[0], Generator | Coroutine):
            raise WrongResult(
                f"{self.name}: its function gave a {type(results[0]).__name__}, which counts as true "
                "whatever it would give: return True or False"
            )
        try:
            rows = list(compress(given, results))
        except Exception:  # of a result that is neither true nor false
            rows = self._true(given, results)
        if rows:
            emit(Batch(rows))

    def _true(self, given: list[Any], results: list[Any]) -> list[Any]:
        rows = []
        for row, result in zip(given, results, strict=True):
            try:
                if result:
                    rows.append(row)
            except Exception as error:
                if self.on_error == "fail":
                    self.note_failure(error, row)
                    raise
                self.drop(error, row)
        return rows


class FlatMapRows(_PerRow):
    """Emits each item of the iterable that ``fn(row)`` returns.

    A record whose iterable raises half-way through is dropped whole. What a generator gives is copied before
    it goes on: it may give one object again and again, and change it in between.

    Raises:
        WrongResult: ``fn`` gave what is no list of rows: see :data:`~.base.NO_ROWS`.
    """

    name = "flat_map"

    def __init__(self, fn: Callable[[Any], Any], on_error: OnError = "fail") -> None:
        super().__init__(fn, on_error)
        self._generates = isgeneratorfunction(fn)
        self.shares = not self._generates

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given = batch.payload
        out = RowsOut(self.parted(emit))
        left = iter(given)
        if self.on_error != "fail":
            self._take_one_by_one(left, out)
        elif self._generates:
            self._take_items(left, out)
        else:
            while self._take(given, left, out):
                out.look()
        out.look()
        out.flush()

    def _take(self, given: list[Any], left: Iterator[Any], out: RowsOut) -> bool:
        """Call the function until there are as many rows as fit; False once it was called for all."""
        fn, rows, room = self.fn, out.rows, out.room
        extend = rows.extend
        try:
            for row in left:
                found = fn(row)
                if type(found) in NO_ROWS:
                    refuse_as_rows(found)
                extend(found)
                if len(rows) >= room:
                    return True
        except Exception as error:
            self.note_failure(error, _last_taken(given, left))
            raise
        return False

    def _take_items(self, left: Iterator[Any], out: RowsOut) -> None:
        """Also of a generator that gives very many, no more are taken at a time than fit."""
        for row in left:
            items = self.fn(row)
            found: list[Any] = [None]
            while found:
                try:
                    found = copies_of(islice(items, max(1, out.room - len(out.rows))))
                except Exception as error:
                    self.note_failure(error, row)
                    raise
                out.rows += found
                out.look()

    def _take_one_by_one(self, left: Iterator[Any], out: RowsOut) -> None:
        for row in left:
            try:
                items = self.fn(row)
                if type(items) in NO_ROWS:
                    refuse_as_rows(items)
                out.rows += copies_of(items) if self._generates else list(items)
            except WrongResult as error:
                self.note_failure(error, row)
                raise
            except Exception as error:
                self.drop(error, row)
            if len(out.rows) >= out.room:
                out.look()


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


class KeyRows(_PerRow):
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
        rows, keys = self.call(batch.payload)
        if self.on_error != "fail":
            rows, keys = self._with_keys_that_hash(rows, keys)
        if self._alone and keys:
            emit(keys_alone(keys))
        elif rows:
            emit(Batch(rows, rows if all(map(is_, keys, rows)) else keys))

    def _with_keys_that_hash(self, rows: list[Any], keys: list[Any]) -> tuple[list[Any], list[Any]]:
        """Drop the records whose key is of a type that cannot be one."""
        try:
            hash_rows(keys)
        except UsageError:
            kept = [self._hashes(key, row) for key, row in zip(keys, rows, strict=True)]
            return list(compress(rows, kept)), list(compress(keys, kept))
        return rows, keys

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
        time: where the event times stand; with pairs it is their rows that have the columns.
        alone: as of :class:`KeyRows`.

    Raises:
        MissingColumn: no row so far has had such a column.
        UnknownName: a row has none, and others have.
        WrongColumns: no row so far was a dict.
        UsageError: a row is not, and others are.
    """

    name = "key_by"
    only_reads = True

    def __init__(self, names: tuple[str, ...], time: EventTime | None = None, *, alone: bool = False) -> None:
        self._alone = alone
        self.names = names
        self._key_of = itemgetter(*names)
        self._keyed = False
        """Some rows had all of the columns."""
        self._time = time or EventTime()

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = without_times(self._time, batch).payload
        left = iter(rows)
        try:
            keys = list(map(self._key_of, left))
        except (LookupError, TypeError) as error:
            raise self._explain(_last_taken(rows, left), rows) from error
        if keys:
            self._keyed = True
            emit(keys_alone(keys) if self._alone else Batch(batch.payload, keys))

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
        return kind(f"no column {missing!r} to key by: the row has {', '.join(map(str, row))}")


class Forwarded(ChainedOperator):
    """Emits rows as an exchange gives them out (instances of subclasses as their base, say): stands where
    ``forward()`` leaves them in their thread."""

    name = "forward"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        payload = batch.payload
        emit(Batch(unpack_rows(pack_rows(payload))) if isinstance(payload, list) else batch)


class MapBatches(RecordOperator):
    """Emits what ``fn(batch)`` makes of each Arrow batch: a RecordBatch, a Table, or None for nothing.

    Under ``skip`` and ``dead_letter`` a batch whose function raises is tried again row by row, as
    batches of one row, so that the bad record alone is dropped: ``fn`` sees the other records of
    that batch twice.

    Raises:
        WrongResult: ``fn`` returned something else.
    """

    name = "map_batches"

    def __init__(self, fn: Callable[[Any], Any], on_error: OnError = "fail") -> None:
        super().__init__(fn, on_error)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        columns = batch.payload
        try:
            result = self.fn(columns)
        except Exception as error:
            if self.on_error == "fail":
                error.add_note(
                    f"raised in operator {self.name!r} by a batch of {columns.num_rows} rows with the "
                    f"columns {', '.join(columns.schema.names)}"
                )
                raise
            self._retry_row_by_row(columns, emit)
        else:
            for piece in self._batches_of(result):
                emit(Batch(piece))

    def _retry_row_by_row(self, batch: pa.RecordBatch, emit: Emit) -> None:
        pieces: list[pa.RecordBatch] = []
        for row in range(batch.num_rows):
            one = batch.slice(row, 1)
            try:
                result = self.fn(one)
            except Exception as error:
                self.drop(error, one.to_pylist()[0])
            else:
                pieces.extend(self._batches_of(result))
        for _, alike in groupby(pieces, key=lambda piece: piece.schema):
            table = pa.Table.from_batches(list(alike)).combine_chunks()
            for piece in table.to_batches(max_chunksize=BATCH_ROWS_MAX):
                emit(Batch(piece))

    def _batches_of(self, result: Any) -> list[pa.RecordBatch]:
        if result is None:
            return []
        if isinstance(result, pa.RecordBatch | pa.Table):
            result = without_unnamed_index(result)  # of a pandas frame that it was made of
        if isinstance(result, pa.RecordBatch):
            if 0 < result.num_rows <= BATCH_ROWS_MAX:
                return [result]
            result = pa.Table.from_batches([result])
        if not isinstance(result, pa.Table):
            raise WrongResult(
                f"the function of map_batches returned a {type(result).__name__}: "
                "return a pyarrow.RecordBatch, a pyarrow.Table, or None for no rows"
            )
        return [piece for piece in result.to_batches(max_chunksize=BATCH_ROWS_MAX) if piece.num_rows]


def _last_taken(rows: list[Any], left: Iterator[Any]) -> Any:
    """The row that a list's iterator gave out last."""
    return rows[len(rows) - length_hint(left) - 1]
