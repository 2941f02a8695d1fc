"""Tasks that fail for ever: their job ends in bounded time, or goes on in bounded memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs import lossaccounting
from minishuffle.coordinator.jobs.failover import QUIET_SECONDS, RESTART_BACKOFF
from minishuffle.coordinator.jobs.job import Job
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted, TaskFailed
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.packed import PeerRows, pack_traffic
from minishuffle.wire.reports import TaskStateChanged
from support.attempts import attempt
from support.soak import SOAK

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
BOOM = ErrorInfo(code=TaskFailed.code, text="count[0]: ValueError: never", traceback="in fail\n")
FAILURES_MAX = 10
FEW, MANY = (600, 2_000) if SOAK else (300, 700)
BYTES_PER_RESTART = 8
"""What a restart may leave behind for good: numbers that grow, and nothing else."""


def always_raise(cluster: FakeCluster, worker: FakeWorker) -> None:
    """Each task that is deployed there raises at once, and what is cancelled is canceled."""
    for key, task in list(worker.tasks.items()):
        if worker.is_canceled(key, task.attempt):
            cluster.report(worker, key, "canceled", attempt=task.attempt)
        else:
            cluster.report(worker, key, "failed", attempt=task.attempt, error=BOOM)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["individual", "region", "full"])
def test_tasks_that_always_raise_end_their_job_in_bounded_time_with_their_own_traceback_first(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.submit(make_graph(restart_strategy=strategy, restart_failures_max=FAILURES_MAX))
    delays = [RESTART_BACKOFF.seconds(failures) for failures in range(FAILURES_MAX - 1)]
    until = cluster.now + sum(delays) * (1 + RESTART_BACKOFF.jitter) + 1.0
    while cluster.show("j1").state in ("created", "running") and cluster.now < until:
        for worker in pair:
            always_raise(cluster, worker)
        cluster.advance(0.05)
    for worker in pair:
        always_raise(cluster, worker)
    info = cluster.show("j1")
    assert info.state == "failed"
    assert (info.causes[0].text, info.causes[0].traceback) == (BOOM.text, BOOM.traceback)
    assert info.causes[1].code == ResourceExhausted.code
    assert f"failed {FAILURES_MAX} times" in info.causes[1].text
    assert max(task.attempt for task in info.tasks) == FAILURES_MAX
    assert not any(worker.tasks for worker in pair), "what ended was released"


def fail_and_restart(job: Job, at: float) -> None:
    """Subtask 0 of operator 1 fails, with rows exchanged, state and a log line, and is deployed again."""
    (task,) = [each for each in job.subtasks.values() if each.key == (1, 0)]
    peers = [PeerRows(0, 0, 1, received=10), PeerRows(0, 1, 1, received=10)]
    message = TaskStateChanged(
        attempt=attempt(1, 0, task.attempt, job=job.id),
        state="failed",
        error=BOOM,
        counters=TaskCounters(records_in=20, state_rows=3, rows_dropped={"failed_batch": 2}),
        traffic=pack_traffic(peers),
    )
    assert job.task_changed(task, message, at)
    (task,) = job.due(at)
    job.deployed(task, at)
    assert job.task_changed(task, message.model_copy(update={"state": "running"}), at)
    job.history.log([f"attempt {task.attempt - 1} has failed"])


@pytest.mark.slow
def test_thousands_of_restarts_keep_their_sums_and_leave_no_memory_behind(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare enough not to end the job."""
    monkeypatch.setattr(limits, "JOB_EVENTS_KEPT", 500)
    monkeypatch.setattr(limits, "JOB_LOG_LINES_KEPT", 500)
    monkeypatch.setattr(lossaccounting, "ATTEMPTS_KEPT", 8)
    graph = make_graph(restart_strategy="individual")
    job = Job("j1", "storm", graph, (1, 2), {}, at=0.0, random=Random(0).random)
    times = iter(range(1, 1_000_000))

    def restart(count: int) -> None:
        for _ in range(count):
            fail_and_restart(job, next(times) * (QUIET_SECONDS + 1))

    restart(FEW)
    gc.collect()
    tracemalloc.start()
    try:
        restart(FEW)  # what is kept of these takes the place of what was not traced
        before, _ = tracemalloc.get_traced_memory()
        restart(MANY)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < MANY * BYTES_PER_RESTART, f"{grown} bytes more"
    info, total = job.info(results=True), 2 * FEW + MANY
    assert info.restarts == {"failed": total}
    assert info.rows_dropped["failed_batch"] == 2 * total
    assert info.state_rows_lost == 3 * total
    assert info.tasks[2].counters.records_in == 20 * total
