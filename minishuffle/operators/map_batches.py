"""A function of the user for each Arrow batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from minishuffle.errors import MissingColumn, WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Emit
from minishuffle.operators.batch_times import event_times
from minishuffle.operators.chained import OnError, RecordOperator
from minishuffle.operators.event_time import BESIDE, EVENT_TIME, EventTime
from minishuffle.operators.pandas_index import without_unnamed_index

__all__ = ["MapBatches"]


class MapBatches(RecordOperator):
    """Emits what ``fn`` makes of each Arrow batch: a RecordBatch, a Table, or None for nothing.

    Under ``skip`` and ``dead_letter`` a batch whose function raises is tried again row by row, as
    batches of one row, so that the bad record alone is dropped: ``fn`` sees the other records of
    that batch twice.

    Args:
        columns: what ``fn`` gets; None: all. Where ``EVENT_TIME`` is among them it sees event times in a
            column of that name, and the times of what it gives are taken from there.
        rows: so many at most are given to it at a time.
        gives_times: something reads the times beside what it emits.

    Raises:
        MissingColumn: ``fn`` gave no column of event times, and something reads them.
        WrongResult: ``fn`` returned something else.
    """

    name = "map_batches"

    def __init__(
        self,
        fn: Callable[[Any], Any],
        on_error: OnError = "fail",
        columns: Sequence[str] | None = None,
        rows: int | None = None,
        *,
        gives_times: bool = True,
    ) -> None:
        super().__init__(fn, on_error)
        self._columns = columns
        self._rows = rows or BATCH_ROWS_MAX
        self._shows_times = columns is not None and EVENT_TIME in columns
        self._gives_times = self._shows_times and gives_times

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given = batch.payload
        if self._shows_times:
            given = given.append_column(EVENT_TIME, pa.array(event_times(BESIDE, batch)))
        if self._columns is not None:
            given = given.select(list(self._columns))
        for start in range(0, given.num_rows, self._rows):
            self._map(given.slice(start, self._rows), emit)

    def _map(self, columns: pa.RecordBatch, emit: Emit) -> None:
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
                emit(self._given_batch(piece))

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
                emit(self._given_batch(piece))

    def _given_batch(self, columns: pa.RecordBatch) -> Batch:
        """What is emitted of columns that the function gave."""
        names = columns.schema.names
        if not self._shows_times or (EVENT_TIME not in names and not self._gives_times):
            return Batch(columns)
        if EVENT_TIME not in names:
            raise MissingColumn(
                f"no column for the event time: the batch has {', '.join(names)}: keep it in map_batches(), "
                "or call event_time() again"
            )
        times = event_times(EventTime(column=EVENT_TIME), Batch(columns)) if self._gives_times else None
        return Batch(columns.drop_columns([EVENT_TIME]), None, times)

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
