"""What an input of a pipeline may be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql import DataFrame

from minishuffle.errors import UsageError
from minishuffle.pipelines import Input

pytestmark = pytest.mark.extra


class Frame(DataFrame):
    """A DataFrame as far as it is looked at before a row moves: it needs no Spark."""

    def __new__(cls, *names: str) -> Frame:
        return object.__new__(cls)

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    @property
    def columns(self) -> list[str]:
        return self._names


@pytest.mark.parametrize(
    "frame, order_by, splits, problem",
    [
        ("ab", ("a",), 1, "Input(frame=...) takes a DataFrame of Spark, not str"),
        (["a", "b", "a"], ("b",), 1, "Input(frame=...): there are 2 columns 'a': rename all but one"),
        (["a"], (), 1, "Input(order_by=...) takes column names"),
        (["a"], "a", 1, "takes column names: write order_by=('a',)"),
        (["a"], None, 1, "Input(order_by=...) takes column names"),
        (["a"], 3, 1, "Input(order_by=...) takes names of columns, not 3"),
        (["a"], ("a", 3), 1, "Input(order_by=...) takes names of columns, not ('a', 3)"),
        (["a"], ("b",), 1, "Input(order_by=...): there is no column 'b'; there are a"),
        (["a"], ("a",), 0, "Input(splits=...) takes a whole number from 1 to "),
        (["a"], ("a",), 2.0, "Input(splits=...) takes a whole number from 1 to "),
        (["a"], ("a",), "2", "Input(splits=...) takes a whole number from 1 to "),
        (["a"], ("a",), True, "Input(splits=...) takes a whole number from 1 to "),
    ],
)
def test_what_cannot_be_written_is_refused(frame: Any, order_by: Any, splits: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)) as caught:
        Input(frame if isinstance(frame, str) else Frame(*frame), order_by, splits)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order_by", [("b", "a"), ["a"]])
def test_columns_may_stand_in_a_tuple_or_a_list(order_by: Any) -> None:
    assert Input(Frame("a", "b"), order_by, 3).order_by == order_by
