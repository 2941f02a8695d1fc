"""Restarts are spaced and limited."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.coordinator.jobs.failover import (
    QUIET_SECONDS,
    RESTART_BACKOFF,
    Failures,
    Regions,
)
from minishuffle.errors import ResourceExhausted
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import ErrorInfo

MANY = 1_000


def cause(text: str = "boom") -> ErrorInfo:
    return ErrorInfo(code=60, text=text)


def steady(failures_max: int = MANY) -> Failures:
    """Without jitter."""
    return Failures(failures_max, 3, lambda: 0.5)


def test_the_first_restart_is_at_once_and_then_the_delay_doubles_up_to_its_maximum() -> None:
    failures = steady()
    now, delays = 1e9, []
    for _ in range(12):
        delay = failures.add(cause(), now)
        assert delay is not None
        delays.append(round(delay, 6))
        now += delay
    assert delays == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10, 10]


def test_a_minute_without_a_failure_begins_anew() -> None:
    failures = steady()
    assert [failures.add(cause(), now) for now in (100.0, 101.0, 102.0)] == [0, 0.1, 0.2]
    assert failures.add(cause(), 102.0 + QUIET_SECONDS - 0.1) == 0.4
    assert failures.add(cause(), 102.0 + 2 * QUIET_SECONDS) == 0
    assert [failures.add(typo(), 1000.0 + number * QUIET_SECONDS) for number in range(3)] == [0, 0, 0]


def test_so_many_failures_within_the_window_are_too_many() -> None:
    failures = steady(3)
    assert failures.add(cause("first"), 100.0) == 0
    assert failures.add(cause("second"), 101.0) == RESTART_BACKOFF.first
    assert failures.add(cause("third"), 102.0) is None
    assert (failures.first.text, failures.count) == ("first", 3)
    limit = failures.limit_reached("count[1]")
    assert limit.code == ResourceExhausted.code
    assert limit.text == (
        "count[1] failed 3 times within 300 s (restart_failures_max): remove the cause, or allow more with "
        "--set restart_failures_max=N"
    )


def test_failures_before_the_window_do_not_count() -> None:
    failures = steady(2)
    window = limits.RESTART_FAILURE_WINDOW_SECONDS
    assert failures.add(cause("first"), 100.0) == 0
    assert failures.add(cause("second"), 100.0 + window) == 0
    assert failures.first.text == "second"
    assert failures.add(cause("third"), 100.0 + window + 1) is None


def test_one_failure_may_be_the_limit() -> None:
    assert steady(1).add(cause(), 5.0) is None


def typo(text: str = "map[0]: NameError: name 'x' is not defined") -> ErrorInfo:
    return ErrorInfo(code=60, text=text, mistake=True)


@pytest.mark.parametrize(
    ("failed", "too_many"),
    [
        ([(typo(), 0)] * 3, True),
        ([(typo(), 0)] * 2, False),
        ([(cause(), 0)] * 9, False),
        ([(typo(), 1)] * 9, False),
        ([(typo(), 0), (typo(), 0), (typo("map[0]: KeyError: 'b'"), 0)] * 3, False),
        ([(typo(), 0), (typo(), 0), (cause(), 0)] * 3, False),
        ([(typo(), 0), (typo(), 0), (typo(), 7), (typo(), 0), (typo(), 0)], False),
        ([(cause(), 0), (typo(), 5), (typo(), 0), (typo(), 0), (typo(), 0)], True),
    ],
)
def test_the_same_mistake_before_a_row_is_done_ends_the_job_the_third_time(
    failed: list[tuple[ErrorInfo, int]], too_many: bool
) -> None:
    failures = steady(10)
    delays = []
    for number, (error, rows_done) in enumerate(failed):
        again = steady(10)
        again.recall(failures.record())  # As after each a new coordinator would.
        failures = again
        error = error.model_copy(update={"traceback": f"by the record {number}"})
        delays.append(failures.add(error, 100.0 + number, rows_done=rows_done))
    assert delays[:-1].count(None) == 0
    assert (delays[-1] is None) is too_many
    limit = failures.limit_reached("map[0]").text
    told = "map[0] failed 3 times with the same error before it got a row done: a restart does not help "
    assert limit.startswith(told) is too_many


@pytest.mark.parametrize(("drawn", "delay"), [(0.0, 0.09), (0.5, 0.1), (1.0, 0.11)])
def test_delays_have_jitter(drawn: float, delay: float) -> None:
    failures = Failures(MANY, 3, lambda: drawn)
    assert failures.add(cause(), 100.0) == 0
    assert failures.add(cause(), 100.0) == pytest.approx(delay)


@given(st.integers(), st.integers(1, 50), st.lists(st.floats(0, 100), max_size=60))
def test_delays_are_bounded_and_the_limit_holds_whenever_failures_come(
    seed: int, failures_max: int, gaps: list[float]
) -> None:
    failures = Failures(failures_max, 3, random.Random(seed).random)
    now, times = 1e9, []
    for gap in gaps:
        now += gap
        times.append(now)
        delay = failures.add(cause(), now)
        recent = [time for time in times if time > now - limits.RESTART_FAILURE_WINDOW_SECONDS]
        assert failures.count == len(recent)
        assert (delay is None) == (len(recent) >= failures_max)
        if delay is None:
            return
        assert 0 <= delay <= RESTART_BACKOFF.longest * (1 + RESTART_BACKOFF.jitter)


# --- regions --------------------------------------------------------------------------------------


def graph_of(counts: list[int], edges: list[Edge], strategy: Any) -> JobGraph:
    vertices = [
        Vertex(name=f"v{n}", parallelism=count, operators=["x"], is_source=True, program=b"")
        for n, count in enumerate(counts)
    ]
    settings = JobSettings(restart_strategy=strategy)
    return JobGraph(vertices=vertices, edges=edges, settings=settings)


@st.composite
def graphs(draw: st.DrawFn, strategy: Any) -> JobGraph:
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    edges = []
    for target in range(1, len(counts)):
        for source in draw(st.sets(st.integers(0, target - 1), max_size=2)):
            kind: Any = draw(st.sampled_from(["hash", "broadcast", "rescale"]))
            edges.append(Edge(source=source, target=target, partitioner=kind))
    return graph_of(counts, edges, strategy)


@given(graphs("region"))
def test_a_region_is_what_exchanges_connect(graph: JobGraph) -> None:
    regions = Regions(graph)
    keys = [
        (vertex, index) for vertex, each in enumerate(graph.vertices) for index in range(each.parallelism)
    ]
    for key in keys:
        found, fresh = {key}, [key]
        while fresh:
            beside = [(v, i) for v, indices in graph.neighbours(*fresh.pop()) for i in indices]
            fresh += list(set(beside) - found)
            found.update(beside)
        assert sorted(regions.of([key])) == sorted(found)


@pytest.mark.parametrize(
    ("strategy", "together"),
    [("individual", [(1, 0)]), ("none", [(1, 0)]), ("full", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])],
)
def test_a_region_is_one_subtask_or_all(strategy: str, together: list[tuple[int, int]]) -> None:
    graph = graph_of([2, 2, 1], [Edge(source=0, target=1, partitioner="forward")], strategy)
    assert sorted(Regions(graph).of([(1, 0)])) == together


def test_a_region_is_ending_until_none_of_its_attempts_runs() -> None:
    regions = Regions(graph_of([2, 2], [Edge(source=0, target=1, partitioner="forward")], "region"))
    running = {(0, 0), (0, 1), (1, 1)}
    assert regions.restart([(1, 0)], running.__contains__) == [(0, 0)]
    assert regions.must_end((0, 0)) and not regions.must_end((1, 0)) and not regions.must_end((0, 1))
    assert regions.is_ending((1, 0)) and not regions.is_ending((1, 1))
    assert regions.restart([(1, 0)], running.__contains__) == [], "it is cancelled once"
    assert regions.take_ended() == []
    regions.ended((0, 0))
    assert regions.take_ended() == [[(0, 0), (1, 0)]]
    assert not regions.is_ending((1, 0)) and regions.take_ended() == []


def test_a_region_in_which_nothing_runs_has_ended_at_once() -> None:
    regions = Regions(graph_of([1], [], "full"))
    assert regions.restart([(0, 0)], lambda key: False) == []
    assert regions.take_ended() == [[(0, 0)]]


def test_the_regions_of_a_large_job_are_found_without_looking_at_every_pair() -> None:
    edges = [Edge(source=0, target=2, partitioner="hash"), Edge(source=1, target=2, partitioner="hash")]
    regions = Regions(graph_of([limits.PARALLELISM_MAX] * 3, edges, "region"))
    assert len(regions.of([(0, 0)])) == 3 * limits.PARALLELISM_MAX
