"""Standby workers with real processes: a killed worker's tasks go on in one, and another takes its place."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import ClusterStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SECONDS_MAX = 60.0
Until = Callable[..., Any]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def endless() -> Stream[Any]:
    counted = Stream.generate(numbers, rate=200).key_by(lambda number: number % 100).count(emit="batch")
    return counted.to_count()


def rows(handle: JobHandle, index: int) -> int:
    """Taken in by subtask ``index`` of the second operator, over all attempts; 0 while it does not run."""
    task = next(task for task in handle.info().tasks if (task.operator, task.index) == (1, index))
    return task.counters.records_in if task.state == "running" else 0


def roles(status: ClusterStatus) -> list[tuple[int, bool]]:
    """The workers that are alive, each with whether it is on standby."""
    return [(worker.worker, worker.standby) for worker in status.workers if worker.state == "alive"]


def test_a_killed_worker_is_taken_over_and_there_is_another_standby_worker_again(wait_until: Until) -> None:
    with LocalCluster(workers=2, slots=1, standby=1) as cluster:
        assert roles(cluster.status()) == [(1, False), (2, False), (3, True)]
        handle = cluster.submit(endless())
        assert handle.parallelism == 2
        wait_until(lambda: rows(handle, 0) and rows(handle, 1), "rows at both")
        before = {(task.operator, task.index): task.worker for task in handle.info().tasks}
        log = cluster.state_dir / "worker-3.log"
        for victim, heir in ((1, 3), (3, 1)):
            counted = [rows(handle, index) for index in (0, 1)]
            cluster.kill_worker(victim, signal.SIGKILL)
            wait_until(
                lambda counted=counted: all(rows(handle, i) > counted[i] + 100 for i in (0, 1)),
                "more rows at both",
            )
            where = {(task.operator, task.index): task.worker for task in handle.info().tasks}
            assert where == {key: heir if worker == 1 else worker for key, worker in before.items()}
            wait_until(
                lambda victim=victim: (victim, True) in roles(cluster.status()),
                "another standby worker",
                60.0,
            )
        info = handle.info()
        assert (info.state, info.causes) == ("running", [])
        attempts = {task.index: task.attempt for task in info.tasks}
        victims = {index for (_, index), worker in before.items() if worker == 1}
        assert attempts == {index: 3 if index in victims else 1 for index in (0, 1)}
        assert "cannot be loaded" not in log.read_text()
        for worker in [number for number, is_standby in roles(cluster.status()) if not is_standby]:
            cluster.kill_worker(worker, signal.SIGKILL)
        wait_until(
            lambda: sorted(is_standby for _, is_standby in roles(cluster.status())) == [False, False, True],
            "as many of each as before, whichever started first",
            60.0,
        )
        wait_until(lambda: rows(handle, 0) and rows(handle, 1), "rows at both again")
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)


def test_without_standby_and_slots_the_tasks_wait_for_the_process_that_is_started(wait_until: Until) -> None:
    with LocalCluster(workers=2, slots=1) as cluster:
        pids = cluster.workers
        handle = cluster.submit(endless())
        wait_until(lambda: rows(handle, 0) and rows(handle, 1), "rows at both")
        cluster.kill_worker(2, signal.SIGKILL)
        wait_until(lambda: cluster.workers[2] != pids[2] and rows(handle, 0) and rows(handle, 1), "rows")
        assert sorted({task.attempt for task in handle.info().tasks}) == [1, 2]
        assert {task.worker for task in handle.info().tasks} == {1, 2}
        kinds = [event.kind for event in handle.events() if event.attempt == 1]
        assert kinds.count("task waiting for a slot") == 2
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)


def test_a_worker_that_ends_in_order_is_not_started_again(wait_until: Until) -> None:
    with LocalCluster(workers=2, slots=1) as cluster:
        first, second = cluster.workers[1], cluster.workers[2]
        cluster.kill_worker(2, signal.SIGTERM)
        wait_until(lambda: roles(cluster.status()) == [(1, False)], "the end of worker 2")
        cluster.kill_worker(1, signal.SIGKILL)
        wait_until(
            lambda: roles(cluster.status()) == [(1, False)] and cluster.workers[1] != first, "worker 1"
        )
        assert cluster.workers[2] == second


def test_cluster_up_starts_a_lost_worker_again_where_cluster_down_finds_it(
    command_line: Any, wait_until: Until, is_running: Callable[[int], bool]
) -> None:
    shell = command_line("up")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    up = shell.start("cluster", "up", "--workers", "1", "--standby", "1", "--port", port, "--web-port", "0")
    assert up.stdout is not None
    lines = []
    for line in up.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    assert "1 workers x 2 slots, 1 more on standby" in lines[0]

    def workers() -> list[dict[str, Any]]:
        found = shell.look("cluster", "status")["workers"]
        return [worker for worker in found if worker["state"] == "alive"]

    before = set(shell.pids())
    (first,) = [worker["pid"] for worker in workers() if worker["worker"] == 1]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: first not in shell.pids(), "the new record")
    (new,) = set(shell.pids()) - before
    wait_until(lambda: new in [worker["pid"] for worker in workers()], "the new worker")
    assert not is_running(first)
    shell.run("cluster", "down")
    out, errors = up.communicate(timeout=SECONDS_MAX)
    assert up.returncode == 0, errors
    assert f"worker 1 (pid {first}) was killed by SIGKILL; see " in errors
    assert f"worker 1 is started again (pid {new})" in errors
    assert not any(map(is_running, [*before, new]))
