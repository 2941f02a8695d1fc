"""Several records for each one, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import isgeneratorfunction
from itertools import islice
from operator import length_hint, sub
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.errors import WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.gather import take
from minishuffle.exchange.sizes import FIRST_ROWS, RowsOut
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import NO_ROWS, Emit, refuse_as_rows
from minishuffle.operators.chained import OnError
from minishuffle.operators.each_row import EachRow, RowTimes, last_taken, time_of, times_of
from minishuffle.operators.row_copies import copies_of

__all__ = ["FlatMap", "ListColumn", "is_list"]


@dataclass(frozen=True, slots=True)
class ListColumn:
    """The column whose lists have a value for each record that is made of theirs."""

    name: str


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of that type may be a :class:`ListColumn`."""
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_a(kind) for is_a in checks)


class FlatMap(EachRow):
    """Emits what is made of each record: of a row each item of the iterable that a function returns; of
    columns the record once for each value of a list in it, with that value, and none if the list is null.

    A row whose iterable raises half-way through is dropped whole. What a generator gives is copied before it
    goes on: it may give one object again and again, and change it in between.

    Args:
        made: the function, or the column of lists.

    Raises:
        WrongResult: the function gave what is no list of rows: see ``NO_ROWS``.
    """

    name = "flat_map"

    def __init__(self, made: Callable[[Any], Any] | ListColumn, on_error: OnError = "fail") -> None:
        super().__init__(made, on_error)
        self._column = made.name if isinstance(made, ListColumn) else None
        if self._column is not None:
            self.name = "explode"
        self._generates = isgeneratorfunction(made)
        self.shares = self._column is None and not self._generates

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if self._column is not None:
            self._take_column(self._column, batch, emit)
            return
        rows = batch.payload
        left = iter(rows)
        if self.on_error == "fail" and not self._generates:
            self._take_lists(batch, left, emit)
            return
        stamps = times_of(batch)
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
        stamps = times_of(batch)
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
            self.note_failure(error, last_taken(rows, left))
            raise
        return False

    def _take_timed(
        self, stamps: RowTimes, rows: list[Any], left: Iterator[Any], made: list[Any], room: int
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
            self.note_failure(error, last_taken(rows, left))
            raise
        stamps.note(range(first, first + len(ends) - 1), map(sub, ends[1:], ends))
        return is_full

    def _take_items(self, left: Iterator[Any], out: RowsOut, stamps: RowTimes | None) -> None:
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

    def _take_one_by_one(self, batch: Batch, out: RowsOut, stamps: RowTimes | None) -> None:
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
                self.drop(error, row, time_of(batch, number))
                continue
            out.rows.extend(found)
            if stamps is not None:
                stamps.note((number,), (len(found),))
            if len(out.rows) >= out.room:
                out.look()

    def _take_column(self, name: str, batch: Batch, emit: Emit) -> None:
        import pyarrow.compute as pc  # takes 9 MiB, which functions of rows do without

        columns = batch.payload
        lists = columns.column(name)
        values, lengths = pc.list_flatten(lists), pc.fill_null(pc.list_value_length(lists), 0)
        # Not list_parent_indices: it counts values under a null list, which list_flatten leaves out.
        rows = np.repeat(np.arange(len(lists)), lengths.to_numpy(zero_copy_only=False))
        for begin in range(0, len(values), BATCH_ROWS_MAX):
            some = rows[begin : begin + BATCH_ROWS_MAX]
            arrays = [
                values.slice(begin, BATCH_ROWS_MAX) if each == name else take(column, some)
                for each, column in zip(columns.schema.names, columns, strict=True)
            ]
            times = None if batch.times is None else batch.times.take(some)
            emit(Batch(pa.RecordBatch.from_arrays(arrays, columns.schema.names), None, times))
