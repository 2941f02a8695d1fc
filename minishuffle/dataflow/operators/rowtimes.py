"""Event time apart from rows: where functions made the rows, each is a pair of its time and the row.

What a function makes of a row need not show when that was. So the step before puts the time beside each row,
int microseconds; what functions make of the row gets that time too, and what shows rows to a user takes the
times off again. Exchanges carry the pairs like any tuples.
"""

from __future__ import annotations

from minishuffle.dataflow.operators.base import Emit
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.moments import event_times, without_times
from minishuffle.dataflow.operators.times import PAIRED, EventTime
from minishuffle.exchange.batch import Batch

__all__ = ["PairRows", "UnpairRows"]


class PairRows(ChainedOperator):
    """Emits pairs of rows; ``time`` says where the times of those that come stand."""

    name = "event_time"

    def __init__(self, time: EventTime) -> None:
        self._time = time

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        if rows:
            emit(Batch(list(zip(event_times(self._time, batch).tolist(), rows, strict=True))))


class UnpairRows(ChainedOperator):
    """Emits the rows of pairs."""

    name = "rows"
    unpairs = True

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        emit(without_times(PAIRED, batch))
