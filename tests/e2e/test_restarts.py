"""Real processes: a function that raises once, a worker that is killed, a function that always raises."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import RowsLost, TaskFailed
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import JobInfo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 60.0
ROWS = 2_000
Until = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=3, slots=2, restart_workers=False) as started:
        yield started


TIMELINE = [
    "task lost",
    "task restarting",
    "task rescheduled",
    "task deployed",
    "task running",
    "inputs reattached",
    "first record",
]


def attempts(info: JobInfo) -> dict[str, int]:
    return {f"{task.name}[{task.index}]": task.attempt for task in info.tasks}


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_task_that_raises_once_restarts_alone_and_the_rest_arrives(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    raised = tmp_path / "raised"

    def raise_once(number: int) -> int:
        if number == ROWS // 2 and not raised.exists():
            raised.touch()
            raise ValueError("just once")
        return number

    stream = Stream.generate(numbers, rate=1_000, records=ROWS).rebalance().map(raise_once)
    handle = cluster.submit(stream.rebalance().collect(), parallelism=2)
    with pytest.raises(RowsLost, match="in 1 restart, ") as caught:
        handle.wait(SECONDS_MAX)
    raised_at = f'File "{__file__}", line {raise_once.__code__.co_firstlineno + 3}, in raise_once\n'
    assert raised_at in str(caught.value) and "ValueError: just once" in str(caught.value)
    result = handle.wait(SECONDS_MAX, allow_loss=True)
    assert result.state == "finished_with_loss"
    info = handle.info()
    assert sorted(attempts(info).values()) == [1, 1, 1, 1, 1, 2]
    assert info.restarts == {"failed": 1}
    assert len(set(result.rows)) == len(result.rows), "no row came twice"
    missing = set(range(ROWS)) - set(result.rows)
    assert 0 < len(missing) < ROWS // 4
    (failed,) = [event for event in handle.events() if event.kind == "task failed"]
    assert raised_at in failed.traceback and failed == info.first_failure
    kinds = [event.kind for event in handle.events() if event.attempt == 2]
    assert kinds[:3] == ["task rescheduled", "task deployed", "task running"]


@pytest.mark.parametrize(("strategy", "second"), [("region", [0, 1]), ("full", [0, 1, 2, 3])])
def test_what_restarts_together_goes_on_where_its_sources_were(
    cluster: LocalCluster, tmp_path: Path, strategy: Any, second: list[int]
) -> None:
    """Two parts that no exchange connects, in one job: what the books count as lost is what is missing."""
    raised = tmp_path / "raised"

    def raise_once(number: int) -> int:
        if number == ROWS // 2 and not raised.exists():
            raised.touch()
            raise ValueError("just once")
        return number

    def part(start: int, rate: float) -> Stream[Any]:
        def count(at: int, rows: int) -> list[int]:
            return numbers(start + at, rows)

        return Stream.generate(count, rate=rate, records=ROWS).rebalance()

    # The second is not to have finished when the first one fails, also where that one starts late.
    slow = part(ROWS, rate=1_000).collect("b")
    stream = Stream.together(part(0, rate=2_000).map(raise_once).collect("a"), slow)
    settings = JobSettings(restart_strategy=strategy)
    handle = cluster.submit(stream, parallelism=2, settings=settings)
    result = handle.wait(SECONDS_MAX, allow_loss=True)
    info = handle.info()
    assert set(attempts(info).values()) <= {1, 2}
    assert sorted({task.operator for task in info.tasks if task.attempt == 2}) == second, attempts(info)
    assert len(set(result.rows)) == len(result.rows), "no row came twice"
    missing = 2 * ROWS - len(result.rows)
    assert sum(info.rows_dropped.values()) == missing
    assert info.rows_in_flight == 0


def test_tasks_of_a_killed_worker_restart_on_another_and_the_rest_runs_on(
    cluster: LocalCluster, wait_until: Until
) -> None:
    stream = Stream.generate(numbers, rate=2_000).key_by(lambda number: number % 100).count(emit="batch")
    handle = cluster.submit(stream.to_count(), parallelism=2)

    def grown(index: int, than: int) -> bool:
        task = next(task for task in handle.info().tasks if (task.operator, task.index) == (1, index))
        return task.state == "running" and task.counters.records_in > than

    wait_until(lambda: grown(0, 500) and grown(1, 500), "rows at both counts")
    before = handle.info()
    victim = next(task.worker for task in before.tasks if task.index == 1)
    counted = {task.index: task.counters.records_in for task in before.tasks if task.operator == 1}
    cluster.kill_worker(victim, signal.SIGKILL)
    wait_until(lambda: attempts(handle.info()) == {**attempts(before), **lost(before)}, "the restart")
    wait_until(lambda: all(grown(index, counted[index] + 1_000) for index in (0, 1)), "more rows at both")
    found = [event for event in handle.events() if (event.operator, event.index) == (1, 1)]
    timeline = found[[event.kind for event in found].index("task lost") :]
    assert [event.kind for event in timeline][:4] == TIMELINE[:4]
    assert sorted(event.kind for event in timeline) == sorted(TIMELINE)
    assert all(0 <= event.since < SECONDS_MAX for event in timeline)
    assert "is read by" not in " ".join(event.text for event in timeline), "nobody reads from it"
    info = handle.info()
    assert (info.state, info.causes, info.restarts) == ("running", [], {"lost": 2})
    assert victim not in {task.worker for task in info.tasks}
    handle.cancel()
    assert handle.wait_until_over(SECONDS_MAX).state == "canceled"


def lost(before: JobInfo) -> dict[str, int]:
    """The attempts of the tasks in the job's slot 1 after its worker was lost."""
    return {f"{task.name}[{task.index}]": 2 for task in before.tasks if task.index == 1}


def test_a_function_that_always_raises_ends_its_job_after_the_limit(cluster: LocalCluster) -> None:
    def fail(number: int) -> int:
        raise ValueError(f"never {number}")

    stream = Stream.items(list(range(100))).map(fail).collect()
    handle = cluster.submit(stream, parallelism=1, settings=JobSettings(restart_failures_max=3))
    with pytest.raises(TaskFailed, match=r"(?s)ValueError: never \d+.*in fail.*failed 3 times within 300 s"):
        handle.wait(SECONDS_MAX)
    seen = [(event.kind, event.attempt, event.text) for event in handle.events()]
    assert [attempt for kind, attempt, _ in seen if kind == "task failed"] == [1, 2, 3], seen
