"""Workers that are stopped: a join goes on without them, and one that is stopped for too long is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.config import ClusterSettings
from minishuffle.coordinator.scheduling.placement import buffers_needed
from minishuffle.examples.ads import ads
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS_MAX = 60.0
SPIN_SECONDS = 600.0 if os.environ.get("MINISHUFFLE_SOAK") == "1" else 5.0
SPINNERS = 8
"""Threads of each worker."""
SEGMENT_BYTES = 4096
SUSPECT_AFTER: float = ClusterSettings.model_fields["suspect_after"].default
"""The tests of other things are more patient."""
SETTINGS = JobSettings(floating_buffers_per_gate=1)
Until = Callable[..., Any]


def join() -> Any:
    """Most of its rows come out when the watermark of both sides has passed them."""
    return ads(rate=3_000, within=0.5)


def least_memory(parallelism: int) -> int:
    """What the join needs of each worker that has one slot of it, in bytes: no segment more."""
    graph = compile_job(join(), parallelism=parallelism, settings=SETTINGS)
    needs = buffers_needed(graph, tuple(range(1, parallelism + 1)))
    segments = max(need.segments for need in needs.values())
    return segments * (SEGMENT_BYTES + limits.SEGMENT_HEADROOM_BYTES)


def trained(handle: JobHandle) -> dict[int, int]:
    """By worker, the examples that its sink has had, if it runs."""
    tasks = [task for task in handle.info().tasks if task.name.endswith("training")]
    return {task.worker: task.counters.records_in for task in tasks if task.state == "running"}


def goes_on(handle: JobHandle, wait_until: Until, *workers: int) -> None:
    before = trained(handle)
    wait_until(
        lambda: all(trained(handle).get(worker, 0) > before.get(worker, 0) + 200 for worker in workers),
        f"more examples on workers {workers}",
    )


def said(handle: JobHandle) -> set[str]:
    """What the job's events say."""
    return {event.text for event in handle.events()}


def test_a_join_goes_on_while_a_worker_is_stopped_and_no_attempt_changes(wait_until: Until) -> None:
    with LocalCluster(
        workers=2,
        slots=1,
        segment_bytes=SEGMENT_BYTES,
        network_memory_bytes=least_memory(2),
        suspect_after=SUSPECT_AFTER,
        heartbeat_timeout=60.0,
    ) as cluster:
        handle = cluster.submit(join(), parallelism=2, settings=SETTINGS)
        goes_on(handle, wait_until, 1, 2)
        cluster.kill_worker(2, signal.SIGSTOP)
        wait_until(lambda: "worker 1 gets no answer from worker 2" in said(handle), "the suspicion")
        goes_on(handle, wait_until, 1)
        goes_on(handle, wait_until, 1)
        cluster.kill_worker(2, signal.SIGCONT)
        wait_until(lambda: "worker 1 gets answers again from worker 2" in said(handle), "its end")
        goes_on(handle, wait_until, 1, 2)
        info = handle.info()
        assert (info.state, {task.attempt for task in info.tasks}) == ("running", {1})
        assert info.rows_dropped["suspected"] > 0
        assert "worker 2 gets no answer from worker 1" not in said(handle), "it was stopped itself"
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)


def test_a_job_that_waits_for_its_consumers_loses_nothing_by_a_worker_that_was_only_slow(
    wait_until: Until,
) -> None:
    """It has an end: every row of it is wanted, and none of them soon."""
    records, wide = 300_000, "x" * 200
    numbers = Stream.generate(
        lambda start, count: [(n, wide) for n in range(start, start + count)], records=records
    )
    counts = numbers.key_by(lambda row: row[0] % 100).count(emit="end")
    with LocalCluster(workers=2, slots=1, suspect_after=0.1, heartbeat_timeout=60.0) as cluster:
        handle = cluster.submit(counts.collect(), parallelism=2)
        wait_until(
            lambda: all(task.counters.records_in for task in handle.info().tasks if task.operator == 1),
            "rows on both workers",
        )
        cluster.kill_worker(2, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped + 1.0, "ten times as long as a suspicion takes")
        cluster.kill_worker(2, signal.SIGCONT)
        rows = handle.wait(SECONDS_MAX).rows
        assert (len(rows), sum(count for _, count in rows)) == (100, records)
        assert not [event for event in handle.events() if event.kind == "worker suspected"]


def test_a_worker_that_is_stopped_for_too_long_is_ended_and_replaced(
    wait_until: Until, is_running: Callable[[int], bool]
) -> None:
    with LocalCluster(
        workers=2,
        slots=1,
        standby=1,
        segment_bytes=SEGMENT_BYTES,
        network_memory_bytes=least_memory(2),
        suspect_after=SUSPECT_AFTER,
    ) as cluster:
        handle = cluster.submit(join(), parallelism=2, settings=SETTINGS)
        goes_on(handle, wait_until, 1, 2)
        zombie = cluster.workers[2]
        cluster.kill_worker(2, signal.SIGSTOP)
        goes_on(handle, wait_until, 1, 3)
        attempts = {(task.operator, task.index): (task.attempt, task.worker) for task in handle.info().tasks}
        assert Counter(attempts.values()) == {(1, 1): len(attempts) // 2, (2, 3): len(attempts) // 2}
        assert "worker 1 gets no answer from worker 2" in said(handle)
        wait_until(lambda: not is_running(zombie), "the end of the worker that was stopped")

        def on_standby() -> list[int]:
            return [w.worker for w in cluster.status().workers if w.state == "alive" and w.standby]

        wait_until(lambda: on_standby() == [2], "a new process in its place")
        goes_on(handle, wait_until, 1, 3)
        after = {(task.operator, task.index): (task.attempt, task.worker) for task in handle.info().tasks}
        assert after == attempts
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)


class Spin:
    """A sink that computes, for so many seconds, when the first rows come."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rests = False

    def open(self, context: Any) -> None:
        self._context = context

    def write(self, batch: Any) -> None:
        end = time.monotonic() + self._seconds
        while not self._rests and time.monotonic() < end:
            pass
        if not self._rests:
            self._context.log("rests")
        self._rests = True

    def close(self) -> None: ...


@pytest.mark.alone
def test_threads_that_compute_bring_no_suspicion_and_no_verdict(watch: Any, wait_until: Until) -> None:
    """With all settings as they are by default."""

    def numbers(start: int, count: int) -> list[int]:
        return list(range(start, start + count))

    with LocalCluster(workers=2, slots=SPINNERS + 1, suspect_after=SUSPECT_AFTER) as cluster:
        seen = watch(cluster)
        endless = Stream.generate(numbers, rate=2_000)
        quiet = cluster.submit(
            endless.key_by(lambda n: n % 100).count(emit="batch").to_count(), parallelism=2
        )
        wait_until(lambda: seen.total("minishuffle_connections") == 2, "the connection of the two")
        spin = endless.rebalance().to(Spin(SPIN_SECONDS))
        spinners = cluster.submit(spin, parallelism=2 * SPINNERS)
        wait_until(
            lambda: sum("rests" in line for line in spinners.logs()) == 2 * SPINNERS,
            "the end of the spinning",
            SPIN_SECONDS + SECONDS_MAX,
        )
        lag = [worker.report.loop_lag_p99_seconds for worker in cluster.status().workers]
        print(f"99th percentile of the loops' lag: at most {max(lag):g} s")
        assert seen.total("minishuffle_suspicions_total") == 0
        assert [worker.state for worker in cluster.status().workers] == ["alive", "alive"]
        for handle in (quiet, spinners):
            info = handle.info()
            assert (info.state, {task.attempt for task in info.tasks}) == ("running", {1})
            assert not [event for event in handle.events() if event.kind == "worker suspected"]
            handle.cancel()
            handle.wait_until_over(SECONDS_MAX)
