"""Aggregates found by name."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.operators.aggregates import input_of, outputs_of
from minishuffle.operators.event_time import EventTime


@pytest.mark.parametrize(
    ("function", "hint"),
    [("median", ""), ("avg", r"did you mean 'mean'\? "), ("nunique", r"did you mean 'count_distinct'\? ")],
)
def test_an_unknown_function_is_refused_with_those_that_there_are(function: str, hint: str) -> None:
    text = f"no aggregate '{function}' .*: {hint}write one of sum, .*, count_distinct"
    with pytest.raises(UsageError, match=text):
        outputs_of({"m": ("v", function)})  # type: ignore[dict-item]


@pytest.mark.parametrize("function", ["first", "last"])
def test_first_and_last_need_event_time(function: str) -> None:
    with pytest.raises(InvalidGraph, match="of column 'v'. go by event time, and there is none: call event_"):
        outputs_of({"n": ("w", "count"), "f": ("v", function)})  # type: ignore[dict-item]


def test_first_and_last_read_the_time_and_all_columns_that_settle_ties() -> None:
    outputs = outputs_of({"a": ("v", "first"), "n": ("k", "count"), "b": ("w", "last")}, EventTime("t"))
    batch = pa.record_batch({"w": ["x"], "v": [1], "k": [2], "t": [3], "z": [4]})
    read = [input_of(batch, column, aggregate).to_pylist() for _, column, aggregate in outputs]
    row = {"time": 3, "0": 1, "1": "x"}
    assert read == [[row], [2], [row]]
