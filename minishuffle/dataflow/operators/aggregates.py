"""The aggregates by their names, and what each reads of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import pyarrow as pa

from minishuffle.dataflow.operators.columns import Aggregate, Fold, Mean, Outputs, ValueCount
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.distinct import DistinctCount
from minishuffle.dataflow.operators.firstlast import FirstOrLast
from minishuffle.dataflow.operators.spread import Deviation
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.errors import InvalidGraph, UsageError

__all__ = ["BY_TIME", "Function", "input_of", "outputs_of"]

Function: TypeAlias = Literal["sum", "count", "min", "max", "mean", "std", "first", "last", "count_distinct"]

BY_TIME = ("first", "last")
"""Those that read the event time."""


def outputs_of(columns: Mapping[str, tuple[str, Function]], time: EventTime | None = None) -> Outputs:
    """An aggregate for each output name: (input column, function).

    Raises:
        InvalidGraph: a function needs event time, and there is none.
        UsageError: there is no such function.
    """
    by_time = tuple(dict.fromkeys(column for column, function in columns.values() if function in BY_TIME))
    if by_time and time is None:
        raise InvalidGraph(
            f"first and last (of column {by_time[0]!r}) go by event time, and there is none: call "
            "event_time() right after the source"
        )
    outputs: Outputs = []
    for name, (column, function) in columns.items():
        if function in BY_TIME:
            assert time is not None
            outputs.append((name, column, FirstOrLast(function == "last", column, by_time, time)))
        else:
            outputs.append((name, column, _of_values(function, column)))
    return outputs


def _of_values(function: Function, column: str) -> Aggregate:
    if function in ("sum", "min", "max"):
        return Fold(function, column)
    if function == "count":
        return ValueCount()
    if function == "mean":
        return Mean(column)
    if function == "std":
        return Deviation(column)
    if function == "count_distinct":
        return DistinctCount(column)
    names = ", ".join(get_args(Function))
    raise UsageError(f"no aggregate {function!r} (of column {column!r}): write one of {names}")


def input_of(batch: pa.RecordBatch, column: str, aggregate: Aggregate) -> pa.Array:
    """What the aggregate of that column takes of a batch."""
    return aggregate.rows_of(batch) if isinstance(aggregate, FirstOrLast) else column_of(batch, column)
