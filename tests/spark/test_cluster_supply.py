"""How many workers are ordered, and when no more are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.local import LocalCluster
from minishuffle.spark.cluster import BACKOFF_SECONDS_MAX, FAILURES_MAX, SparkCluster, Supply


def test_all_are_ordered_at_once_and_no_more() -> None:
    supply = Supply(3)
    assert supply.due(0.0) == [1, 2, 3]
    assert supply.due(0.0) == []


def test_a_worker_that_ran_is_replaced_at_once_under_a_new_number() -> None:
    supply = Supply(2)
    supply.due(0.0)
    supply.ended(1, "its executor is lost", True, 10.0)
    assert supply.due(10.0) == [3]
    assert supply.orders == {2, 3}
    assert not supply.first_failure


def test_another_order_takes_the_place_of_one_whose_worker_is_lost_before_that_has_ended() -> None:
    supply = Supply(2)
    supply.due(0.0)
    supply.lost(1)
    assert supply.due(10.0) == [3]
    supply.ended(1, "it hung", True, 11.0)
    assert supply.due(11.0) == []
    assert supply.orders == {2, 3}


@pytest.mark.parametrize("failures, seconds", [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)])
def test_after_a_failure_the_next_order_waits_longer_each_time(failures: int, seconds: float) -> None:
    supply = Supply(1)
    now = 0.0
    for _ in range(failures):
        (order,) = supply.due(now)
        supply.ended(order, "no Python", False, now)
        before, now = now, now + BACKOFF_SECONDS_MAX
    assert supply.due(before + seconds - 0.001) == []
    assert supply.due(before + seconds) == [failures + 1]


def test_failures_in_a_row_end_it_with_the_first_reason() -> None:
    supply = Supply(1)
    for number in range(FAILURES_MAX):
        assert not supply.failed
        (order,) = supply.due(number * 100.0)
        supply.ended(order, f"reason {number}", False, number * 100.0)
    assert supply.failed
    assert supply.first_failure == "reason 0"
    assert supply.due(1e9) == []


def test_a_worker_that_registered_ends_the_row() -> None:
    supply = Supply(1)
    now = 0.0
    for number in range(3 * FAILURES_MAX):
        (order,) = supply.due(now)
        supply.ended(order, "x", number % FAILURES_MAX == 0, now)
        now += 100.0
    assert not supply.failed


@given(
    wanted=st.integers(1, 5),
    steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 4), st.booleans())),
)
def test_orders_never_exceed_what_is_wanted_and_no_number_comes_twice(
    wanted: int, steps: list[tuple[float, int, bool]]
) -> None:
    supply = Supply(wanted)
    placed: list[int] = []
    now = 0.0
    for seconds, which, was_registered in steps:
        now += seconds
        placed += supply.due(now)
        assert len(supply.orders) <= wanted
        assert supply.orders <= set(placed)
        orders = sorted(supply.orders)
        if which < len(orders):
            supply.ended(orders[which], "it ended", was_registered, now)
    assert placed == sorted(set(placed))
    due = supply.due(now + BACKOFF_SECONDS_MAX)
    assert bool(due) <= (not supply.failed)
    assert supply.failed or len(supply.orders) == wanted


def test_workers_are_ordered_to_end_before_spark_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    found: Any = SparkCluster.__new__(SparkCluster)
    found._supplier = SimpleNamespace(
        order_no_more=lambda: said.append("no further orders"),
        stop=lambda: said.append("cancel the rest"),
    )
    monkeypatch.setattr(LocalCluster, "__exit__", lambda *_: said.append("stop the cluster"))
    found.__exit__(None, None, None)
    assert said == ["no further orders", "stop the cluster", "cancel the rest"]
