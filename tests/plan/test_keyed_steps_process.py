"""Process functions: what a user may write, and what each mistake is told."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import UsageError
from minishuffle.operators.event_time import BESIDE, EventTime
from minishuffle.operators.keyed_process import ProcessContext, ProcessRows
from support.planned import planned


def on_record(row: Any, context: ProcessContext) -> None:
    """Keeps nothing."""


def on_timer(at: datetime, context: ProcessContext) -> None:
    """Gives nothing."""


def test_process_takes_rows_by_key() -> None:
    timed = Stream.items([{"user": "a", "t": 1}]).event_time("t")
    processed = timed.key_by("user").process(on_record, on_timer, ttl=timedelta(seconds=5), on_error="skip")
    (node,) = processed.plan.ends
    operator = planned(node)
    assert isinstance(operator, ProcessRows)
    assert (operator.times, operator.ttl, operator.on_error) == ((EventTime(column="t"),), 5.0, "skip")
    assert planned(node.feeds[0].node).name == "key_by"
    assert processed.plan.gives.time == BESIDE
    plain = Stream.items([1]).key_by(int).process(on_record)
    assert plain.plan.gives.time is None
    assert plain.name("sessions").plan.ends[0].label == "sessions"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"on_record": 3}, "process takes a function, not 3"),
        ({"on_timer": "no"}, "process takes a function, not 'no'"),
        ({"ttl": 5}, r"process\(ttl=...\) takes a datetime.timedelta, not 5"),
        ({"ttl": timedelta(0)}, "takes a time above 0"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Stream.items([1]).key_by(int).process(**{"on_record": on_record, **arguments})
