"""Real jobs that are paused: nothing is on its way then, nothing is lost, and a worker may be killed.

``MINISHUFFLE_SOAK=1`` pauses the join of ads at full rate fifty times.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.errors import UsageError
from minishuffle.examples.ads import ads, answer
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

CYCLES = 50
PAUSE_SECONDS_MAX = 1.0
RESUME_SECONDS_MAX = 0.2
ADS_RECORDS = 40_000_000
PACE = threading.Event()
"""Never set."""


class Numbers:
    """Numbers from 0 on, in two splits, up to 100,000 a second; without an end if ``rows`` is None."""

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self.bounded = rows is not None

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        pace = threading.Event()
        while self.rows is None or offset < self.rows:
            yield list(range(offset, offset + 100))
            offset += 100
            pace.wait(0.001)


def counted(rows: int | None) -> Stream[Any]:
    counts = Stream.source(Numbers(rows)).key_by(lambda number: number % 7)
    return counts.count(emit="batch").to_count() if rows is None else counts.count(emit="end").collect()


def taken(handle: JobHandle) -> tuple[int, int]:
    """Rows that sources have emitted, and that others have taken of these."""
    tasks = handle.info().tasks
    made = sum(task.counters.records_out for task in tasks if task.operator == 0)
    return made, sum(task.counters.records_in for task in tasks if task.operator == 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=3, slots=1, pause_timeout=60.0) as cluster:
        yield cluster


def test_a_paused_job_has_nothing_on_its_way_and_loses_nothing(
    cluster: LocalCluster, wait_until: Callable[..., Any]
) -> None:
    """It is asked for at once, so that it waits until all tasks run, and twice more."""
    rows = 300_000
    handle = cluster.submit(counted(rows), parallelism=2)
    paused = 0
    while paused < 3 and handle.info().state in ("created", "running"):
        try:
            info = handle.pause()
        except UsageError:
            assert handle.wait_until_over(60).state == "finished", "nothing but its end forbids it"
            break
        paused += 1
        assert (info.state, info.pause_left) == ("paused", [])
        wait_until(lambda: len(set(taken(handle))) == 1, "all that was emitted to be taken")
        before = taken(handle)
        handle.pause()
        handle.resume()
        wait_until(
            lambda before=before: taken(handle) > before or handle.info().state != "running", "it goes on"
        )
    assert paused
    result = handle.wait(timeout=60)
    assert dict(result.rows) == {key: 2 * len(range(key, rows, 7)) for key in range(7)}
    events = [event.kind for event in handle.events()]
    assert [kind for kind in events if kind in ("pausing", "paused")] == ["pausing", "paused"] * paused


def test_a_worker_killed_while_the_job_is_paused_costs_what_it_costs_otherwise(
    cluster: LocalCluster, wait_until: Callable[..., Any]
) -> None:
    handle = cluster.submit(counted(None), parallelism=2)
    wait_until(lambda: min(taken(handle)) > 0, "rows")
    handle.pause()
    lost = next(task.worker for task in handle.info().tasks)
    cluster.kill_worker(lost)

    def restarted() -> bool:
        tasks = handle.info().tasks
        return any(task.attempt > 1 for task in tasks) and all(task.state == "running" for task in tasks)

    wait_until(restarted, "the next attempts, while it is paused")
    info = handle.info()
    assert info.state == "paused"
    moved = [task for task in info.tasks if task.attempt > 1]
    assert {task.index for task in moved} == {moved[0].index} and len(moved) == 2
    assert info.rows_dropped.keys() <= {"sink_unfinished"}, "nothing was on its way"
    before = {(task.operator, task.index): task.counters.records_in for task in info.tasks}
    handle.resume()
    wait_until(
        lambda: all(
            task.counters.records_in > before[task.operator, task.index]
            for task in handle.info().tasks
            if task.operator == 1
        ),
        "rows for all again",
    )
    handle.cancel()
    handle.wait_until_over(30)
    wait_until(lambda: len([w for w in cluster.client.workers() if w.state == "alive"]) == 3, "its successor")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_join_of_ads_is_paused_fifty_times(capsys: pytest.CaptureFixture[str]) -> None:
    """At full rate; prints how long that took."""
    pauses, resumes = [], []
    with LocalCluster(workers=2, slots=2) as cluster:
        handle = cluster.submit(ads(rate=100_000_000, records=ADS_RECORDS), parallelism=2)
        while len(pauses) < CYCLES and handle.info().state in ("created", "running"):
            PACE.wait(0.1)
            begin = time.monotonic()
            handle.pause()
            pauses.append(time.monotonic() - begin)
            begin = time.monotonic()
            handle.resume()
            resumes.append(time.monotonic() - begin)
        results = [each.value for each in handle.wait(timeout=600).results]
    found = {key: sum(result[key] for result in results) for key in ("examples", "clicks")}
    p95 = {
        "cycles": len(pauses),
        "pause_p95": statistics.quantiles(pauses, n=20)[-1],
        "resume_p95": statistics.quantiles(resumes, n=20)[-1],
    }
    with capsys.disabled():
        print(json.dumps(p95))
    assert found == answer(ADS_RECORDS)
    assert len(pauses) == CYCLES
    assert p95["pause_p95"] <= PAUSE_SECONDS_MAX and p95["resume_p95"] <= RESUME_SECONDS_MAX
