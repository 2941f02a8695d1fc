"""Metrics of the user's code: one by each name, few of them, and with names that Prometheus takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.errors import UsageError
from minishuffle.operators.user_metrics import UserMetrics


def test_what_is_made_twice_by_one_name_is_the_same() -> None:
    metrics = UserMetrics("map", 1)
    metrics.counter("seen").add()
    metrics.counter("seen").add(2.5)
    metrics.gauge("size").set(4)
    metrics.gauge("size").set(3)
    metrics.histogram("seconds", bounds=[1, 2]).observe(1.5)
    metrics.histogram("seconds", bounds=[1, 2]).observe(3)
    seen, size, seconds = metrics.series()
    assert (seen.name, seen.kind, seen.value, seen.operator, seen.position) == (
        "seen",
        "counter",
        3.5,
        "map",
        1,
    )
    assert (size.kind, size.value) == ("gauge", 3)
    assert seconds.histogram is not None and seconds.histogram.counts == [0, 1, 1]


def _again_as_gauge(metrics: UserMetrics) -> None:
    metrics.counter("seen")
    metrics.gauge("seen")


def _one_too_many(metrics: UserMetrics) -> None:
    for number in range(limits.USER_METRICS_MAX + 1):
        metrics.counter(f"seen_{number}")


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda metrics: metrics.counter("seen-here"), "lower-case letters"),
        (lambda metrics: metrics.counter("Seen"), "lower-case letters"),
        (lambda metrics: metrics.counter("seen_total"), "without one of _total"),
        (lambda metrics: metrics.counter("x" * 101), "at most 100"),
        (lambda metrics: metrics.counter("errors"), "'errors' is taken: minishuffle counts records whose"),
        (lambda metrics: metrics.counter("seen").add(-1), "cannot grow by -1: use a gauge"),
        (lambda metrics: metrics.histogram("s", bounds=[]), "1 to 32 finite bounds, not 0"),
        (lambda metrics: metrics.histogram("s", bounds=[1.0, float("inf")]), "finite"),
        (lambda metrics: metrics.histogram("s", bounds=[2, 1]), "ascend"),
        (lambda metrics: metrics.histogram("s", bounds=range(33)), "not 33"),
        (_again_as_gauge, "'seen' of 'map' is a counter, not a gauge"),
        (_one_too_many, "has 64 metrics, which is the limit: make each once"),
    ],
)
def test_what_prometheus_would_not_take_is_refused(make: Callable[[UserMetrics], Any], refusal: str) -> None:
    with pytest.raises(UsageError, match=refusal):
        make(UserMetrics("map", 1))


def test_a_gauge_takes_what_is_a_number_and_keeps_what_it_had() -> None:
    """Text would spoil the scrape of everything else."""
    metrics = UserMetrics()
    gauge = metrics.gauge("size")
    gauge.set(True)
    with pytest.raises(ValueError, match="could not convert"):
        gauge.set("many")  # type: ignore[arg-type]
    (size,) = metrics.series()
    assert (type(size.value), size.value) == (float, 1.0)
