"""Event time apart from the columns that a table shows: the column ``HIDDEN_TIME``, int64 microseconds.

A step that leaves out or replaces the column of the event time has it copied there first. Steps pass it on as
any other column, and what shows columns to a user leaves it out.
"""

from __future__ import annotations

import pyarrow as pa

from minishuffle.dataflow.operators.base import Emit, Used
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.moments import Vector, event_times
from minishuffle.dataflow.operators.times import HIDDEN_TIME, EventTime
from minishuffle.exchange.batch import Batch

__all__ = ["HideTime", "KeepTime", "gives_time", "with_time"]


def gives_time(used: Used) -> bool:
    """Whether something reads the hidden column of what an operator gives."""
    return used.gives is None or HIDDEN_TIME in used.gives


def with_time(batch: pa.RecordBatch, times: Vector) -> pa.RecordBatch:
    """The batch with its rows' times in the hidden column."""
    return batch.append_column(HIDDEN_TIME, pa.array(times))


class KeepTime(ChainedOperator):
    """Adds the hidden column to batches that have that of ``time``, where the event time stands: a function
    of ``map_batches`` may have left it out. None: nothing reads it.
    """

    name = "event_time"

    def __init__(self, time: EventTime | None) -> None:
        self._time = time

    def for_columns(self, used: Used) -> KeepTime:
        """(At submission.) Without the column if nothing reads it."""
        return self if gives_time(used) else KeepTime(None)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if self._time is not None and self._time.column in batch.payload.schema.names:
            batch = Batch(with_time(batch.payload, event_times(self._time, batch)))
        emit(batch)


class HideTime(ChainedOperator):
    """Leaves the hidden column out of batches that have it."""

    name = "columns"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        columns = batch.payload
        if HIDDEN_TIME in columns.schema.names:
            batch = Batch(columns.drop_columns([HIDDEN_TIME]))
        emit(batch)
