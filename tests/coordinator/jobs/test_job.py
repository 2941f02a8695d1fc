"""Tasks that restart: who is deployed again, where, when, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs.lifecycle import TASK_TRANSITIONS
from minishuffle.counters import TaskCounters
from minishuffle.errors import CannotWrite, ResourceExhausted, TaskFailed, UsageError, WrongResult
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import (
    CancelTasks,
    DeployTasks,
    ErrorInfo,
    PlacedAttempt,
    RecoveryStep,
    RecoverySteps,
    ReleaseJob,
    Step,
    TaskAttempt,
    TasksRestarted,
)
from minishuffle.wire.requests import CancelJob, GetEvents, JobEvent, JobInfo

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)
BOOM = ErrorInfo(code=TaskFailed.code, text="count[1]: ZeroDivisionError: division by zero", traceback="here")


@pytest.fixture
def restarting(make_graph: MakeGraph) -> MakeGraph:
    """Graphs whose tasks restart alone."""

    def make(*counts: Any, **settings: Any) -> JobGraph:
        return make_graph(*counts, **{"restart_strategy": "individual", **settings})

    return make


def states(info: JobInfo) -> dict[str, str]:
    return {f"{task.name}[{task.index}]#{task.attempt}": task.state for task in info.tasks}


def events(cluster: FakeCluster, operator: int, index: int) -> list[JobEvent]:
    found: list[JobEvent] = cluster.request(GetEvents(job="j1")).events
    return [event for event in found if (event.operator, event.index) == (operator, index)]


def since(worker: Any, count: int) -> list[Any]:
    """What a worker was sent after its first so many messages."""
    return [message for message in worker.inbox[count:] if message.type != "acknowledge"]


# --- in its own slot -------------------------------------------------------------------------------


def test_a_task_that_fails_is_deployed_again_at_once_and_alone(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    before = [len(worker.inbox) for worker in pair]
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    release, deploy, restarted = since(pair[1], before[1])
    assert release == ReleaseJob(term=7, job="j1", attempts=[TaskAttempt(operator=1, index=1, attempt=1)])
    assert isinstance(deploy, DeployTasks)
    assert [(task.operator, task.index, task.attempt) for task in deploy.tasks] == [(1, 1, 2)]
    assert (deploy.programs, deploy.attempts) == ({1: b"count"}, [])
    assert list(deploy.channels(deploy.tasks[0].inputs[0])) == [(0, 1, 1), (1, 1, 2)]
    assert restarted == TasksRestarted(
        term=7,
        job="j1",
        tasks=[PlacedAttempt(operator=1, index=1, attempt=2, worker=2)],
        workers=[address for address in deploy.workers if address.worker == 2],
    )
    assert since(pair[0], before[0]) == [restarted]
    info = cluster.show("j1")
    assert (info.state, info.causes) == ("running", [])
    assert states(info)["count[1]#2"] == "created"
    cluster.report(pair[1], COUNT1, "running", attempt=2)
    assert states(cluster.show("j1"))["count[1]#2"] == "running"


def test_each_recovery_is_a_timeline_of_events(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.report(pair[1], COUNT1, "running", attempt=2)
    timeline = [(event.kind, event.attempt, event.worker, event.text) for event in events(cluster, 1, 1)]
    assert timeline[1:] == [
        ("task failed", 1, 2, BOOM.text),
        ("task restarting", 1, 2, f"attempt 2 follows at once (failure 1 of 10): {BOOM.text}"),
        ("task rescheduled", 2, 2, "count[1] to worker 2, in its slot"),
        ("task deployed", 2, 2, "count[1]"),
        ("task running", 2, 2, "count[1]"),
    ]


def test_a_timeline_ends_when_both_sides_are_attached_and_a_batch_was_passed_on(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    def seen(worker: Any, attempt: int, kind: Step, channels: int, age: float) -> None:
        step = RecoveryStep(operator=0, index=1, attempt=attempt, step=kind, channels=channels, age=age)
        cluster.send(worker, RecoverySteps(term=7, job="j1", steps=[step]))

    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    cluster.report(pair[1], READ1, "failed", error=BOOM)
    detected = events(cluster, 0, 1)[1]
    assert (detected.kind, detected.since) == ("task failed", 0.0)
    cluster.now += 0.25
    cluster.report(pair[1], READ1, "running", attempt=2)
    seen(pair[1], 1, "outputs", 2, 0.0)
    seen(pair[1], 2, "inputs", 1, 0.0)
    seen(pair[1], 2, "outputs", 1, 0.0)
    cluster.now += 0.25
    seen(pair[0], 2, "outputs", 1, 0.125)
    seen(pair[1], 2, "first record", 1, 0.0)
    cluster.report(pair[1], READ1, "finished", attempt=2)
    timeline = [(event.kind, event.since, event.text) for event in events(cluster, 0, 1)[-4:]]
    assert timeline == [
        ("task running", 0.25, "read[1]"),
        ("outputs reattached", 0.375, "read[1] is read by all 2 consumers"),
        ("first record", 0.5, "read[1] has passed on its first batch"),
        ("task finished", 0.0, "read[1]"),
    ], "what is of another attempt, or was not to be expected, changes nothing"


def test_the_second_restart_comes_after_a_delay(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.report(pair[1], COUNT1, "failed", error=BOOM, attempt=2)
    assert states(cluster.show("j1"))["count[1]#2"] == "restarting"
    assert "attempt 3 follows in 0.1 s (failure 2 of 10)" in events(cluster, 1, 1)[-1].text
    cluster.advance(0.08)
    assert len(pair[1].got(DeployTasks)) == 2
    cluster.advance(0.04)
    assert len(pair[1].got(DeployTasks)) == 3
    assert states(cluster.show("j1"))["count[1]#3"] == "created"


def test_a_task_that_always_fails_ends_the_job_after_the_limit_with_its_first_cause_first(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting(restart_failures_max=4))
    cluster.report_all("j1", "running")
    for attempt in (1, 2, 3, 4):
        error = BOOM.model_copy(update={"text": f"failure {attempt}"})
        cluster.report(pair[1], COUNT1, "failed", error=error, attempt=attempt)
        cluster.advance(1.0)
    info = cluster.show("j1")
    assert info.state == "failing"
    assert [(cause.code, cause.text) for cause in info.causes] == [
        (TaskFailed.code, "failure 1"),
        (
            ResourceExhausted.code,
            "count[1] failed 4 times within 300 s (restart_failures_max): remove the cause, or allow more "
            "with --set restart_failures_max=N",
        ),
    ]
    assert info.causes[0].traceback == "here"
    assert [len(worker.got(CancelTasks)) for worker in pair] == [1, 1]
    assert len(pair[1].got(DeployTasks)) == 4


def test_tasks_that_fail_together_share_their_messages(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting(2, 2))
    for key in (COUNT0, COUNT1):
        # The second failure of each waits for about as long.
        worker = pair[key[2]]
        cluster.report(worker, key, "failed", error=BOOM)
    before = [len(worker.inbox) for worker in pair]
    for key in (COUNT0, COUNT1):
        cluster.report(pair[key[2]], key, "failed", error=BOOM, attempt=2)
    # Late: both are due when the timer fires.
    cluster.now += 0.5
    cluster.do(cluster.state.handle_timer(cluster.now))
    for worker, count in zip(pair, before, strict=True):
        sent = since(worker, count)
        assert [type(message) for message in sent] == [ReleaseJob, DeployTasks, TasksRestarted]
        assert [(task.index, task.attempt) for task in sent[2].tasks] == [(0, 3), (1, 3)]


def test_only_workers_that_exchange_rows_with_the_task_hear_of_it(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    workers = [cluster.add(slots=1) for _ in range(3)]
    cluster.submit(restarting(3, 3, "forward"))
    cluster.report(workers[1], COUNT1, "failed", error=BOOM)
    assert [len(worker.got(TasksRestarted)) for worker in workers] == [0, 1, 0]


@pytest.mark.parametrize("state", ["failed", "abandoned", "canceled"])
def test_whatever_ends_an_attempt_early_is_followed_by_the_next(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph, state: str
) -> None:
    cluster.submit(restarting())
    cluster.report(pair[1], COUNT1, state)
    cluster.advance(0.2)
    assert states(cluster.show("j1"))["count[1]#2"] == "created"
    cluster.report(pair[1], COUNT1, "finished", attempt=2)
    for worker, key in ((pair[0], COUNT0), (pair[0], READ0), (pair[1], READ1)):
        cluster.report(worker, key, "finished")
    assert cluster.show("j1").state.startswith("finished")


def test_reports_of_an_attempt_that_was_replaced_change_nothing(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    before = cluster.show("j1")
    for state in ("running", "finished", "failed", "canceled", "abandoned"):
        cluster.report(pair[1], COUNT1, state, attempt=1)
        cluster.report(pair[0], COUNT1, state, attempt=2)
        cluster.report(pair[1], COUNT1, state, attempt=3)
    assert cluster.show("j1") == before


def test_an_attempt_that_was_abandoned_has_done_what_its_last_report_says(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    done = TaskCounters(records_in=70, state_rows=4, rows_dropped={"failed_batch": 10})
    cluster.report(pair[1], COUNT1, "abandoned", error=BOOM, counters=done)
    info = cluster.show("j1")
    (task,) = [task for task in info.tasks if (task.operator, task.index) == (1, 1)]
    assert (task.attempt, task.counters.records_in, task.state_rows_lost) == (2, 70, 4)
    assert info.rows_dropped == {"failed_batch": 10}


@pytest.mark.parametrize("final", [CannotWrite, WrongResult])
def test_what_no_other_attempt_can_change_fails_its_job_at_once(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph, final: type[UsageError]
) -> None:
    job = cluster.submit(restarting())
    error = ErrorInfo(code=final.code, text="cannot write into /proc/x: No such file or directory")
    cluster.report(pair[1], COUNT1, "failed", error=error)
    cluster.report_all(job, "canceled")
    info = cluster.show(job)
    assert (info.state, info.restarts) == ("failed", {})


def test_a_cancelled_job_restarts_nothing(cluster: FakeCluster, pair: Any, restarting: MakeGraph) -> None:
    cluster.submit(restarting())
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.report(pair[1], COUNT1, "failed", error=BOOM, attempt=2)
    cluster.request(CancelJob(job="j1"))
    assert states(cluster.show("j1"))["count[1]#2"] == "canceled"
    cluster.advance(1.0)
    for worker, key in ((pair[0], COUNT0), (pair[0], READ0), (pair[1], READ1)):
        cluster.report(worker, key, "canceled")
    assert cluster.show("j1").state == "canceled"
    assert len(pair[1].got(DeployTasks)) == 2


def test_what_sinks_give_when_a_job_is_cancelled_is_kept(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it fits: a job that is being cancelled does not fail any more."""
    monkeypatch.setattr(limits, "RESULT_BYTES_MAX", 10)
    cluster.submit(restarting())
    cluster.request(CancelJob(job="j1"))
    cluster.report(pair[0], COUNT0, "canceled", result=bytes(8))
    cluster.report(pair[1], COUNT1, "canceled", result=bytes(8))
    for worker, key in ((pair[0], READ0), (pair[1], READ1)):
        cluster.report(worker, key, "canceled")
    info = cluster.show("j1")
    assert (info.state, [len(task.result) for task in info.tasks]) == ("canceled", [0, 0, 8, 0])


def test_a_job_whose_last_open_tasks_wait_for_their_restart_ends_when_it_is_cancelled(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting(1, 1))
    cluster.report(pair[0], READ0, "finished")
    cluster.report(pair[0], COUNT0, "failed", error=BOOM)
    cluster.report(pair[0], COUNT0, "failed", error=BOOM, attempt=2)
    cluster.request(CancelJob(job="j1"))
    assert cluster.show("j1").state == "canceled"
    assert [message.attempts for message in pair[0].got(ReleaseJob)][-1] == []


def test_a_restart_that_cannot_be_sent_fails_the_job(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    deploy = pair[1].got(DeployTasks)[-1]
    cluster.do(cluster.state.undeployable(2, deploy, ResourceExhausted("too large"), cluster.now))
    info = cluster.show("j1")
    assert info.state == "failing"
    assert states(info) == {
        "read[0]#1": "running",
        "read[1]#1": "running",
        "count[0]#1": "running",
        "count[1]#2": "failed",
    }


# --- the tables ------------------------------------------------------------------------------------


def test_every_event_of_a_task_is_a_transition_of_the_table(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report(pair[1], COUNT1, "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.lose(pair[1])
    seen = [event.kind.removeprefix("task ") for event in events(cluster, 1, 1)]
    moves = ["created", *(state.replace("deployed", "created") for state in seen if state != "rescheduled")]
    assert len(moves) > 6
    assert set(pairwise(moves)) <= set(TASK_TRANSITIONS)
