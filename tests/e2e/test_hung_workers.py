"""A worker whose function holds the interpreter is ended and replaced, whatever else it could answer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import TaskFailed
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECONDS_MAX = 60.0
TIMING = {"heartbeat_interval": 0.2, "heartbeat_timeout": 1.0}
HANG_SECONDS = 600


class HoldsTheInterpreter:
    """Passes numbers on, but the first attempt that gets to 500, or each one, stays in C code with the
    interpreter's lock."""

    def __init__(self, once: Path | None) -> None:
        self._once = once

    def __call__(self, number: int) -> int:
        if number >= 500 and (self._once is None or not self._once.exists()):
            if self._once is not None:
                self._once.touch()
            ctypes.PyDLL(None).sleep(HANG_SECONDS)
        return number


def test_a_function_that_holds_the_interpreter_costs_its_worker_alone(
    tmp_path: Path, wait_until: Callable[..., Any], is_running: Callable[[int], bool]
) -> None:
    once = tmp_path / "once"
    numbers = Stream.generate(lambda start, count: list(range(start, start + count)), rate=2_000)
    with LocalCluster(workers=2, slots=1, **TIMING) as cluster:
        before = cluster.workers
        handle = cluster.submit(numbers.rebalance().map(HoldsTheInterpreter(once)).to_count(), parallelism=2)
        wait_until(once.exists, "the call that does not return")
        wait_until(lambda: cluster.workers != before, "another process")
        (hung,) = {worker for worker, pid in cluster.workers.items() if pid != before[worker]}
        wait_until(lambda: not is_running(before[hung]), "the end of the one that hangs")
        wait_until(lambda: {task.state for task in handle.info().tasks} == {"running"}, "all tasks")
        assert {worker.worker for worker in cluster.status().workers if worker.state == "alive"} == {1, 2}
        info = handle.info()
        assert {(task.attempt, task.worker == hung) for task in info.tasks} == {(1, False), (2, True)}
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)


@pytest.mark.soak
def test_a_function_that_holds_the_interpreter_each_time_ends_its_job() -> None:
    """Three workers hang in turn."""
    numbers = Stream.generate(lambda start, count: list(range(start, start + count)), rate=2_000)
    settings = JobSettings(restart_failures_max=3)
    with LocalCluster(workers=2, slots=2, **TIMING) as cluster:
        beside = cluster.submit(numbers.to_count(), parallelism=1)
        job = numbers.map(HoldsTheInterpreter(None)).to_count()
        with pytest.raises(TaskFailed, match=r"each of the 3 times .* as if a function held the interpreter"):
            cluster.submit(job, parallelism=1, settings=settings).wait(SECONDS_MAX)
        assert beside.info().state == "running"
        beside.cancel()
        beside.wait_until_over(SECONDS_MAX)
