"""Stateless operators: a function of the user for each row or each Arrow batch.

What a function makes of a row happened when the row did: ``map`` keeps the batch's times, ``filter`` masks
them, ``flat_map`` repeats each as often as its row gave rows, also where what it gives is cut before a row's
iterable ends. A row that is dropped because its function raised drops its time.

A function is called exactly once per record. Under ``on_error="fail"`` a batch runs through one
comprehension; only when it raises is it worked out which record was to blame, from how far the
iterator had come. (``list(map(fn, rows))`` would end silently at a function that raises
StopIteration.) Under the other policies a plain loop drops the one record.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from functools import partial
from inspect import isgeneratorfunction
from itertools import compress, groupby, islice, repeat
from operator import is_, itemgetter, length_hint, sub
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import (
    NO_ROWS,
    Emit,
    Used,
    refuse_as_rows,
)
from minishuffle.dataflow.operators.chained import (
    ChainedOperator,
    OnError,
    RecordOperator,
    asides_of,
    preview,
)
from minishuffle.dataflow.operators.copies import copies_of
from minishuffle.dataflow.operators.pandasindex import without_unnamed_index
from minishuffle.errors import MissingColumn, UnknownName, UsageError, WrongColumns, WrongResult
from minishuffle.exchange.batch import Batch, KeyColumns, Mask, Times
from minishuffle.exchange.keys import hash_rows, key_array
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.sizes import FIRST_ROWS, RowsOut
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = ["FilterRows", "FlatMapRows", "Forwarded", "KeyRows", "KeyRowsByColumns", "MapBatches", "MapRows"]


class _Stamps:
    """The times of rows that were made of a batch's, in order: whose each row is, and how many it gave."""

    __slots__ = ("_at", "_counts", "_made", "_owners", "_times")

    def __init__(self, times: Times) -> None:
        self._times = times
        self._owners: list[int] = []
        self._counts: list[int] = []
        self._made: Times | None = None
        """A time for each row that was noted, the first ``_at`` of them taken; None: not computed yet."""
        self._at = 0

    def note(self, owners: Iterable[int], counts: Iterable[int]) -> None:
        self._owners += owners
        self._counts += counts

    def take(self, rows: int) -> Times:
        """The times of the next so many rows; all that were noted are taken before any other is."""
        if self._made is None:
            owners, counts = self._owners, self._counts
            self._owners, self._counts = [], []
            if counts.count(1) == len(counts) == len(self._times):  # Each has given one.
                self._made = self._times
            else:
                self._made = np.repeat(self._times.take(owners), counts)
        begin, self._at = self._at, self._at + rows
        some: Times = self._made[begin : self._at]
        if self._at == len(self._made):
            self._made, self._at = None, 0
        return some


class _EachRow(RecordOperator):
    """One call of ``fn`` per row; what the results mean is the subclass's."""

    def __init__(self, fn: Callable[[Any], Any], on_error: OnError = "fail") -> None:
        super().__init__(fn, on_error)

    def call(self, rows: list[Any]) -> list[Any]:
        """The results; under ``fail`` only."""
        fn, left = self.fn, iter(rows)
        try:
            return [fn(row) for row in left]
        except Exception as error:
            self.note_failure(error, _last_taken(rows, left))
            raise

    def call_one_by_one(self, batch: Batch) -> tuple[list[int], list[Any]]:
        """The numbers of the rows whose function did not raise, and their results."""
        kept: list[int] = []
        results: list[Any] = []
        for number, row in enumerate(batch.payload):
            try:
                result = self.fn(row)
            except Exception as error:
                self.drop(error, row, _time_of(batch, number))
            else:
                kept.append(number)
                results.append(result)
        return kept, results

    def called(self, batch: Batch) -> tuple[Batch, list[Any]]:
        """The records whose function did not raise, and their results."""
        if self.on_error == "fail":
            return batch, self.call(batch.payload)
        kept, results = self.call_one_by_one(batch)
        return batch if len(kept) == len(batch.payload) else batch.take(np.array(kept, np.int64)), results

    def gathered(self, stamps: _Stamps | None, emit: Emit) -> RowsOut:
        """Where rows go that are given in batches that are not too long, with their times."""
        return RowsOut(self.parted(emit), stamps)

    def takes_times(self, input: int, used: Used) -> bool:
        return used.times


def _stamps_of(batch: Batch) -> _Stamps | None:
    return None if batch.times is None else _Stamps(batch.times)


def _time_of(batch: Batch, number: int) -> Times | None:
    return None if batch.times is None else batch.times[number : number + 1]


def _last_taken(rows: Sequence[Any], left: Iterator[Any]) -> Any:
    """The row that a list's iterator gave out last."""
    return rows[len(rows) - length_hint(left) - 1]


class MapRows(_EachRow):
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
        stamps = _stamps_of(batch)
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


class FilterRows(_EachRow):
    """Emits the rows for which ``fn(row)`` is true.

    Raises:
        WrongResult: ``fn`` gave an Aside, a generator or a coroutine, which would count as true.
    """

    name = "filter"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given, results = self.called(batch)
        self._check(results)
        try:
            rows = list(compress(given.payload, results))
            times = given.times
            if times is not None and 0 < len(rows) < len(results):
                times = times[_truths(results)]
        except Exception:  # of a result that is neither true nor false
            truths = self._truths_one_by_one(given, results)
            rows = list(compress(given.payload, truths))
            times = None if given.times is None else given.times[np.array(truths, np.bool_)]
        if rows:
            if times is not None:
                self.last_time = times[-1:]
            emit(Batch(rows, None, times) if len(rows) < len(batch.payload) else batch)

    def _check(self, results: list[Any]) -> None:
        if aside := asides_of(results):
            raise WrongResult(
                f"{self.name}: its function gave Aside({aside[0].name!r:.80}, ...), and filter has no side "
                "outputs of your own: write flat_map(fn, sides=[...]) with a function that returns a list"
            )
        if results and type(results[0]) is not bool and isinstance(results[0], Generator | Coroutine):
            raise WrongResult(
                f"{self.name}: its function gave a {type(results[0]).__name__}, which counts as true "
                "whatever it would give: return True or False"
            )

    def _truths_one_by_one(self, given: Batch, results: list[Any]) -> list[bool]:
        truths = []
        for number, result in enumerate(results):
            truth = False
            try:
                truth = bool(result)
            except Exception as error:
                row = given.payload[number]
                if self.on_error == "fail":
                    self.note_failure(error, row)
                    raise
                self.drop(error, row, _time_of(given, number))
            truths.append(truth)
        return truths


def _truths(results: list[Any]) -> Mask:
    """Which of some results are true."""
    if set(map(type, results)) != {bool}:
        results = list(map(bool, results))
    marks: Mask = np.frombuffer(bytes(results), np.bool_)
    return marks


class FlatMapRows(_EachRow):
    """Emits each item of the iterable that ``fn(row)`` returns.

    A record whose iterable raises half-way through is dropped whole. What a generator gives is copied before
    it goes on: it may give one object again and again, and change it in between.

    Raises:
        WrongResult: ``fn`` gave what is no list of rows: see ``NO_ROWS``.
    """

    name = "flat_map"

    def __init__(self, fn: Callable[[Any], Any], on_error: OnError = "fail") -> None:
        super().__init__(fn, on_error)
        self._generates = isgeneratorfunction(fn)
        self.shares = not self._generates

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        left = iter(rows)
        if self.on_error == "fail" and not self._generates:
            self._take_lists(batch, left, emit)
            return
        stamps = _stamps_of(batch)
        out = self.gathered(stamps, emit)
        if self.on_error != "fail":
            self._take_one_by_one(batch, out, stamps)
        else:
            self._take_items(left, out, stamps)
        out.look()
        out.flush()

    def _take_lists(self, batch: Batch, left: Iterator[Any], emit: Emit) -> None:
        rows = batch.payload
        made: list[Any] = []
        stamps = _stamps_of(batch)
        take = self._take if stamps is None else partial(self._take_timed, stamps)
        if not take(rows, left, made, FIRST_ROWS):  # All is made, and too few rows to weigh.
            if made:
                self.emit_parted(Batch(made, None, None if stamps is None else stamps.take(len(made))), emit)
            return
        out = self.gathered(stamps, emit)
        out.extend(made)
        out.look()
        while take(rows, left, out.rows, out.room):
            out.look()
        out.look()
        out.flush()

    def _take(self, rows: list[Any], left: Iterator[Any], made: list[Any], room: int) -> bool:
        """Call the function until there are as many rows as fit; False once it was called for all."""
        fn, extend = self.fn, made.extend
        try:
            for row in left:
                found = fn(row)
                if type(found) in NO_ROWS:
                    refuse_as_rows(found)
                extend(found)
                if len(made) >= room:
                    return True
        except Exception as error:
            self.note_failure(error, _last_taken(rows, left))
            raise
        return False

    def _take_timed(
        self, stamps: _Stamps, rows: list[Any], left: Iterator[Any], made: list[Any], room: int
    ) -> bool:
        """Like :meth:`_take`; also note how many rows each call gave: its time is repeated as often."""
        fn, extend, ends = self.fn, made.extend, [len(made)]
        end = ends.append
        first = len(rows) - length_hint(left)
        is_full = False
        try:
            for row in left:
                found = fn(row)
                if type(found) in NO_ROWS:
                    refuse_as_rows(found)
                extend(found)
                end(count := len(made))
                if count >= room:
                    is_full = True
                    break
        except Exception as error:
            self.note_failure(error, _last_taken(rows, left))
            raise
        stamps.note(range(first, first + len(ends) - 1), map(sub, ends[1:], ends))
        return is_full

    def _take_items(self, left: Iterator[Any], out: RowsOut, stamps: _Stamps | None) -> None:
        """Also of a generator that gives very many, no more are taken at a time than fit."""
        for number, row in enumerate(left):
            items = self.fn(row)
            found: list[Any] = [None]
            while found:
                try:
                    found = copies_of(islice(items, max(1, out.room - len(out.rows))))
                except Exception as error:
                    self.note_failure(error, row)
                    raise
                out.rows.extend(found)
                if stamps is not None:
                    stamps.note((number,), (len(found),))
                out.look()

    def _take_one_by_one(self, batch: Batch, out: RowsOut, stamps: _Stamps | None) -> None:
        for number, row in enumerate(batch.payload):
            try:
                items = self.fn(row)
                if type(items) in NO_ROWS:
                    refuse_as_rows(items)
                found = copies_of(items) if self._generates else list(items)
            except WrongResult as error:
                self.note_failure(error, row)
                raise
            except Exception as error:
                self.drop(error, row, _time_of(batch, number))
                continue
            out.rows.extend(found)
            if stamps is not None:
                stamps.note((number,), (len(found),))
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


class KeyRows(_EachRow):
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
        keyed = Batch(rows, rows if all(map(is_, keys, rows)) else keys, given.times)
        if self.on_error != "fail":
            keyed = self._with_keys_that_hash(keyed)
        if not keyed.payload:
            return
        emit(keys_alone(keyed.keys) if self._alone else keyed)

    def takes_times(self, input: int, used: Used) -> bool:
        return used.times and not self._alone

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
            raise self._explain(_last_taken(rows, left), rows) from error
        if keys:
            self._keyed = True
            emit(keys_alone(keys) if self._alone else Batch(rows, keys, batch.times))

    def takes_times(self, input: int, used: Used) -> bool:
        return used.times and not self._alone

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
        emit(
            Batch(unpack_rows(pack_rows(payload)), None, batch.times) if isinstance(payload, list) else batch
        )

    def takes_times(self, input: int, used: Used) -> bool:
        return used.times


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
                emit(self.given_batch(piece))

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
                emit(self.given_batch(piece))

    def given_batch(self, columns: pa.RecordBatch) -> Batch:
        """What is emitted of columns that the function gave."""
        return Batch(columns)

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
