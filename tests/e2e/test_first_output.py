"""Real jobs whose consumers are deployed when there is something for them to read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import TaskInfo
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

ROWS = 40_000
KEYS = 10
SECONDS_MAX = 60.0


class Numbers:
    """Those below ROWS; none before there is a file, if one is given, and half of them before the other."""

    def __init__(self, go_on: Path | None = None, end: Path | None = None) -> None:
        self.go_on, self.end = go_on, end

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[str]]:
        while self.go_on is not None and not self.go_on.exists():
            threading.Event().wait(0.01)
            yield []
        for first in range(offset, ROWS, 100):
            while self.end is not None and first >= ROWS // 2 and not self.end.exists():
                threading.Event().wait(0.01)
                yield []
            yield [f"{number % KEYS}" * 200 for number in range(first, first + 100)]


def counts(go_on: Path, end: Path | None = None) -> Stream[Any]:
    late = Stream.source(Numbers(go_on, end)).name("late")
    return Stream.source(Numbers()).name("early").union(late).key_by(str).count(emit="end").collect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=3, slots=1) as cluster:
        yield cluster


def states(handle: JobHandle, operator: str) -> set[str]:
    return {task.state for task in tasks(handle, operator)}


def tasks(handle: JobHandle, operator: str) -> list[TaskInfo]:
    return [task for task in handle.info().tasks if operator in task.name]


@pytest.mark.soak
def test_a_source_and_a_coordinator_that_are_killed_before_there_are_consumers_cost_no_row(
    tmp_path: Path,
) -> None:
    go_on = tmp_path / "go on"
    settings = JobSettings(schedule="first_output", start_when="all")
    with LocalCluster(workers=2, slots=1, standby=1) as cluster:
        handle = cluster.submit(counts(go_on), parallelism=2, settings=settings)

        def waits_in(attempt: int) -> bool:
            """The attempt with the rows waits for consumers."""
            source = max(tasks(handle, "early"), key=lambda task: task.counters.records_out)
            return source.attempt == attempt and source.counters.backpressured_seconds > 0.2

        until(lambda: waits_in(1), "the source of the rows waits for consumers")
        source = max(tasks(handle, "early"), key=lambda task: task.counters.records_out)
        cluster.kill_worker(source.worker)
        until(lambda: waits_in(2), "so does its next attempt")
        cluster.kill_coordinator()
        until(lambda: states(handle, "count") == {"waiting"}, "the next coordinator")
        go_on.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
    assert dict(result.rows) == {f"{key}" * 200: 2 * ROWS // KEYS for key in range(KEYS)}
    assert (info.state, info.rows_in_flight, info.rows_dropped) == ("finished", 0, {})


def test_with_a_guarantee_no_row_is_lost_with_a_producer_before_or_a_consumer_behind_its_first(
    tmp_path: Path,
) -> None:
    go_on, end = tmp_path / "go on", tmp_path / "end"
    settings = JobSettings(
        schedule="first_output", start_when="all", guarantee="at_least_once", snapshot_interval=0.1
    )
    with LocalCluster(workers=3, slots=1, standby=2) as cluster:
        handle = cluster.submit(counts(go_on, end), parallelism=2, settings=settings)

        def source_of_rows() -> TaskInfo:
            return max(tasks(handle, "early"), key=lambda task: task.counters.records_out)

        until(lambda: source_of_rows().counters.records_out > 0, "rows wait for consumers")
        killed = source_of_rows()
        cluster.kill_worker(killed.worker)
        until(lambda: source_of_rows().attempt > 1, "another attempt makes them again")
        assert states(handle, "count") == {"waiting"}
        go_on.touch()
        until(
            lambda: all(task.counters.records_in > ROWS // 4 for task in tasks(handle, "count")),
            "both consumers have read rows",
        )
        cluster.kill_worker(tasks(handle, "count")[0].worker)
        until(lambda: max(task.attempt for task in tasks(handle, "count")) > 1, "a consumer restarts")
        end.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
    assert dict(result.rows) == {f"{key}" * 200: 2 * ROWS // KEYS for key in range(KEYS)}
    assert (info.state, info.rows_in_flight, info.rows_dropped, info.fallbacks) == ("finished", 0, {}, 0)


@pytest.mark.parametrize("start_when", ["any", "all"])
def test_a_consumer_is_deployed_when_any_of_its_inputs_has_rows_or_all_have(
    start_when: Literal["any", "all"], cluster: LocalCluster, tmp_path: Path
) -> None:
    """Rows wait for one that never ran, whatever becomes of those for one that is restarting."""
    go_on = tmp_path / "go on"
    settings = JobSettings(
        schedule="first_output", start_when=start_when, on_unavailable="drop", floating_buffers_per_gate=1
    )
    handle = cluster.submit(counts(go_on), parallelism=2, settings=settings)
    if start_when == "any":
        until(lambda: states(handle, "count") == {"running"}, "the consumers run")
    else:
        until(
            lambda: sum(each.counters.backpressured_seconds for each in tasks(handle, "early")) > 0.2,
            "the source of the rows waits for consumers",
        )
        assert states(handle, "count") == {"waiting"}
        (why,) = [wait.text for wait in handle.info().deploy_waits]
        assert "waits for rows" in why and "late" in why
    assert sum(each.counters.records_out for each in tasks(handle, "late")) == 0
    go_on.touch()
    result = handle.wait(SECONDS_MAX)
    assert dict(result.rows) == {f"{key}" * 200: 2 * ROWS // KEYS for key in range(KEYS)}
    info = handle.info()
    assert (info.state, info.rows_dropped) == ("finished", {})
    assert {task.attempt for task in info.tasks} == {1}
    readable = [event.text for event in handle.events() if event.kind == "partition readable"]
    assert any("early" in text for text in readable)
