"""The state clock adds up, whenever it is read and whatever it is in the middle of."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minishuffle.counters import COUNTED_MAX, Histogram, TaskCounters
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME, END_OF_TIME
from minishuffle.ids import AttemptId
from minishuffle.wire.control import pack_message, unpack_message
from minishuffle.wire.messages import Heartbeat, TaskReport, WorkerReport


@pytest.mark.parametrize(
    "counters",
    [
        {"unknown": 1},
        {"records_in": -1},
        {"busy_seconds": float("nan")},
        {"user_errors": {"skip": -1}},
        {"watermark": 1 << 63},
    ],
)
def test_counters_of_a_message_are_checked_like_its_other_fields(counters: dict[str, Any]) -> None:
    fields = {"attempt": ("j1", 0, 0, 1)}
    found = TaskReport.model_validate({**fields, "counters": {"records_in": 3, "user_errors": {"skip": 1}}})
    assert found.counters == TaskCounters(records_in=3, user_errors={"skip": 1})
    with pytest.raises(ValidationError, match=next(iter(counters))):
        TaskReport.model_validate({**fields, "counters": counters})


@pytest.mark.parametrize("watermark", [None, 0, -1, BEGINNING_OF_TIME + 1, END_OF_TIME - 1])
def test_any_watermark_fits_into_a_heartbeat(watermark: int | None) -> None:
    """Event time before 1970 is negative."""
    counters = TaskCounters(watermark=watermark)
    report = TaskReport(attempt=AttemptId.of("j1", 0, 0, 1), counters=counters)
    heartbeat = Heartbeat(term=1, worker=1, epoch=1, report=WorkerReport(), tasks=[report], peers=[])
    message = unpack_message(pack_message(heartbeat))
    assert message == heartbeat


def test_a_quantile_is_the_edge_of_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) == 0.0
    for value in (0.5, 1.5, 3.0, 9.0):
        histogram.observe(value)
    assert [histogram.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert (histogram.count, histogram.total) == (4, 14.0)


# --- totals of several attempts --------------------------------------------------------------------


def test_counts_of_two_attempts_add_up() -> None:
    first = TaskCounters(records_in=3, user_errors={"skip": 1}, watermark=5, first_output_at=2.0)
    first.rows_dropped, first.last_input_at, first.busy_seconds = {"failed_batch": 2}, 9.0, 0.5
    second = TaskCounters(records_in=4, user_errors={"skip": 1, "dead_letter": 2}, first_output_at=7.0)
    second.rows_dropped, second.busy_seconds = {"failed_batch": 1, "partial_element": 3}, 0.25
    first.state_rows, second.state_rows = 8, 2
    both = first.plus(second)
    assert both.state_rows == 2, "of the present attempt"
    assert (both.records_in, both.busy_seconds) == (7, 0.75)
    assert both.user_errors == {"skip": 2, "dead_letter": 2}
    assert both.rows_dropped == {"failed_batch": 3, "partial_element": 3}
    assert (both.watermark, both.first_output_at, both.last_input_at) == (5, 2.0, 9.0)


def test_sums_stay_within_what_a_message_carries() -> None:
    dropped = {"failed_batch": COUNTED_MAX}
    most = TaskCounters(records_in=COUNTED_MAX, busy_seconds=1e308, rows_dropped=dropped)
    both = most.plus(most)
    assert (both.records_in, both.rows_dropped) == (COUNTED_MAX, dropped)
    assert both.busy_seconds == float(COUNTED_MAX)


def test_a_limit_was_first_hit_by_the_first_attempt_that_hit_it() -> None:
    first, second = (
        TaskCounters(limits_hit={"pool": 5.0}),
        TaskCounters(limits_hit={"queue": 8.0, "pool": 9.0}),
    )
    assert first.plus(second).limits_hit == {"queue": 8.0, "pool": 5.0}


def test_what_is_sampled_is_added_up_and_what_is_estimated_is_that_of_the_newer_attempt() -> None:
    first = TaskCounters(flow={"looks": 3.0, "queued": 1.0}, hot_keys={"0:1:'a'": 0.5}, latency={"max": 2.0})
    second = TaskCounters(flow={"looks": 2.0}, hot_keys={"0:0:'b'": 0.25}, cpu_wait_seconds=0.5)
    both = first.plus(second)
    assert both.flow == {"looks": 5.0, "queued": 1.0}
    assert both.hot_keys == {"0:0:'b'": 0.25}
    assert both.latency == {"max": 2.0}, "the newer one has none so far"
    assert both.cpu_wait_seconds == 0.5
