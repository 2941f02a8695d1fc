"""What a coordinator does, and does not do, while its journal cannot be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minishuffle.coordinator.instructions import CoordinatorStep, Instruction, Reply, SendToWorker
from minishuffle.coordinator.journal.writeahead import WriteAhead
from minishuffle.errors import CannotWrite, ResourceExhausted
from minishuffle.plan.graph import JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import (
    Acknowledge,
    Advertise,
    CancelTasks,
    ConsumersEnded,
    DeployTasks,
    ErrorInfo,
    HostLook,
    Probe,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
)
from minishuffle.wire.outputs import GetFiles
from minishuffle.wire.registration import Registered
from minishuffle.wire.reports import AttemptReport, FileCompleted, TaskStateChanged
from minishuffle.wire.requests import Accepted, CancelJob, GetStatus, JobInfo
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

TERM = 7
FULL = "the journal cannot be written (disk full): make room"
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


BOOM = ErrorInfo(code=60, text="boom")


def lone_source() -> JobGraph:
    """A source that restarts."""
    vertex = Vertex(name="read", parallelism=1, operators=["read"], is_source=True, program=b"read")
    return JobGraph(vertices=[vertex], edges=[], settings=JobSettings(restart_strategy="individual"))


def acknowledge(number: int, *, refused: bool = False, journaled: bool = True) -> Acknowledge:
    return Acknowledge(term=TERM, number=number, refused=refused, journaled=journaled)


def registered(applied: int) -> Registered:
    return Registered(term=TERM, worker=1, epoch=1, heartbeat_interval=1.0, applied=applied)


def completed(file: int, number: int) -> AttemptReport:
    path = f"/out/part-{file}.parquet"
    found = FileCompleted(attempt=attempt(1), file=file, path=path, rows=10, bytes=1000, checksum="ab")
    return AttemptReport(term=TERM, number=number, facts=[found])


# --- the machine ----------------------------------------------------------------------------------


def failed(ahead: WriteAhead, behind: list[Instruction]) -> list[Instruction]:
    """The journal could not be written; gives what is carried out of what stands behind that."""
    (step,) = ahead.failed([CoordinatorStep(messages=behind)], FULL)
    return list(step.messages)


def test_what_stands_behind_a_write_that_failed_is_held_back_and_told_later() -> None:
    ahead = WriteAhead()
    restarted = SendToWorker(1, 5, TasksRestarted(term=TERM, job="j1", tasks=[], workers=[]))
    before = SendToWorker(1, 5, acknowledge(3))
    assert list(ahead.passed([before, restarted])) == [before, restarted]
    behind = [SendToWorker(1, 5, acknowledge(4)), restarted, Reply(8, 2, JobInfo.model_construct(job="j1"))]
    now = failed(ahead, behind)
    assert now == [SendToWorker(1, 5, acknowledge(4, journaled=False)), behind[2]]
    ahead.validate()
    assert ahead.written() == [restarted, behind[0]]
    ahead.validate()
    assert list(ahead.passed(behind)) == behind


def test_that_consumers_have_ended_is_said_at_once_but_not_before_the_attempts_that_hear_it() -> None:
    """A producer that waits for it may be what would make room."""
    ahead = WriteAhead()
    ended = [
        SendToWorker(n, n, ConsumersEnded(term=TERM, job=job, ends=[]))
        for n in (1, 2)
        for job in ("j1", "j2")
    ]
    deploy = DeployTasks.model_construct(job="j1")
    assert failed(ahead, [ended[0], SendToWorker(1, 1, deploy), *ended]) == [ended[0], *ended[1:]]
    ahead.validate()
    assert ahead.written() == [SendToWorker(1, 1, deploy), ended[0]]


def test_acknowledgements_stand_for_those_before_but_for_files_that_are_refused() -> None:
    ahead = WriteAhead()
    failed(ahead, [])
    given = [acknowledge(1), acknowledge(2), acknowledge(3, refused=True), acknowledge(4), acknowledge(5)]
    told = list(ahead.passed(SendToWorker(1, 5, each) for each in given))
    assert [each.message.journaled for each in told if isinstance(each, SendToWorker)] == [False] * 5  # type: ignore[attr-defined]
    assert ahead.written() == [SendToWorker(1, 5, each) for each in (given[1], given[2], given[4])]


def test_a_worker_that_comes_back_is_to_repeat_what_is_not_journaled() -> None:
    ahead = WriteAhead()
    failed(ahead, [SendToWorker(1, 5, acknowledge(4))])
    list(ahead.passed([SendToWorker(1, 5, acknowledge(5))]))
    back = list(ahead.passed([SendToWorker(1, 6, registered(5)), SendToWorker(2, 7, registered(9))]))
    assert [each.message.applied for each in back if isinstance(each, SendToWorker)] == [3, 9]  # type: ignore[attr-defined]
    list(ahead.passed([SendToWorker(1, 6, acknowledge(4))]))
    assert ahead.written() == [SendToWorker(1, 6, acknowledge(4))]


def test_a_job_is_cancelled_at_once_and_again_behind_what_was_held_back() -> None:
    ahead = WriteAhead()
    restarted = SendToWorker(1, 5, TasksRestarted(term=TERM, job="j1", tasks=[], workers=[]))
    cancel = SendToWorker(1, 5, CancelTasks(term=TERM, job="j1"))
    assert failed(ahead, [restarted, cancel]) == [cancel]
    assert ahead.written() == [restarted, cancel]


def deploy(job: str) -> DeployTasks:
    return DeployTasks(term=TERM, job=job, name="", settings={}, programs={}, tasks=[], workers=[])


def test_attempts_of_a_job_that_ends_are_not_spoken_of_and_other_jobs_keep_their_order() -> None:
    ahead = WriteAhead()
    one, other = (
        [
            SendToWorker(worker, 5, message)
            for worker, message in (
                (1, ReleaseJob(term=TERM, job=job, attempts=[attempt])),
                (2, deploy(job)),
                (1, deploy(job)),
                (1, CancelTasks(term=TERM, job=job, attempts=[attempt])),
                (1, TasksRestarted(term=TERM, job=job, tasks=[], workers=[])),
            )
        ]
        for attempt in [TaskAttempt(operator=0, index=0, attempt=1)]
        for job in ("j1", "j2")
    )
    assert failed(ahead, [each for both in zip(one, other, strict=True) for each in both]) == []
    assert ahead.give_up("j3") == []
    assert ahead.give_up("j1") == [(2, deploy("j1")), (1, deploy("j1"))]
    assert ahead.give_up("j1") == []
    assert ahead.written() == [one[0], *other]


def test_who_changes_something_is_warned() -> None:
    ahead = WriteAhead()
    replies = failed(ahead, [Reply(8, 2, Accepted(job="j1")), Reply(8, 3, Accepted(warning="it is late"))])
    warning = f"{FULL}; a coordinator that is started again would not know of this"
    assert replies == [
        Reply(8, 2, Accepted(job="j1", warning=warning)),
        Reply(8, 3, Accepted(warning=f"{warning}; it is late")),
    ]


# --- in the coordinator ---------------------------------------------------------------------------


def test_files_are_acknowledged_once_they_are_journaled(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.send(pair[0], completed(0, 1))
    cluster.send(pair[0], completed(1, 2))
    assert pair[0].got(Acknowledge) == [acknowledge(1, journaled=False), acknowledge(2, journaled=False)]
    cluster.journal_error = None
    cluster.heartbeat(pair[0])
    cluster.report(pair[1], READ1, "failed", number=1)
    assert pair[0].got(Acknowledge)[2:] == [acknowledge(2)]


def test_the_next_coordinator_hears_of_what_the_journal_did_not_take(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """A file would have been listed never, and everything behind it; an end would have been forgotten."""
    cluster.send(pair[0], completed(0, 1))
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.send(pair[0], completed(1, 2))
    cluster.report(pair[0], READ0, "finished", number=3)
    assert cluster.show(job).files_listed == 2
    cluster.journal_error = None
    cluster.lose_coordinator()
    assert cluster.show(job).files_listed == 1
    for worker in pair:
        cluster.come_back(worker)
    assert pair[0].got(Registered)[-1].applied == 1
    for report in (completed(1, 2), completed(2, 4)):
        cluster.send(pair[0], report.model_copy(update={"term": cluster.term}))
    assert [file.path[-9] for file in cluster.request(GetFiles(job=job)).files] == ["0", "1", "2"]
    assert not any(each.refused for each in pair[0].got(Acknowledge))


def test_workers_are_looked_for_all_the_same(cluster: FakeCluster) -> None:
    """Whether they reach each other, or a host, no journal has to know. Such questions are repeated."""
    one = cluster.add(identity="a", host="0.0.0.0", seen="127.0.0.1")
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.add(identity="b", host="10.0.0.2")
    cluster.advance(0.2)
    assert len(one.got(Advertise)) == 1 and len(one.got(Probe)) == 1
    cluster.heartbeat(one)
    cluster.advance(0.25, heartbeats=False)
    cluster.do(cluster.state.host_looked(cluster.looks[-1].ticket, False, cluster.now))
    assert len(one.got(HostLook)) == 1
    cluster.journal_error = None
    cluster.advance(1.0)
    assert [len(one.got(kind)) for kind in (Advertise, Probe, HostLook)] == [1, 1, 1], "none waited"


def test_no_attempt_is_deployed_or_released_that_the_journal_does_not_know(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.report(pair[0], COUNT0, "failed", number=1)
    cluster.advance(5.0)
    assert [len(each.got(kind)) for each in pair for kind in (DeployTasks, ReleaseJob)] == [1, 0, 1, 0]
    cluster.journal_error = None
    cluster.advance(1.0)
    cluster.report(pair[1], COUNT1, "failed", number=1)
    cluster.advance(5.0)
    assert {key: task.attempt for key, task in pair[0].tasks.items()} == {READ0: 1, COUNT0: 2}
    assert {key: task.attempt for key, task in pair[1].tasks.items()} == {READ1: 1, COUNT1: 2}


def test_a_job_whose_restart_is_held_back_can_be_cancelled_without_room(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """Nobody else would say that the attempt has ended. What another job waits for comes in its order."""
    other = cluster.submit(lone_source())
    cluster.report_all(other, "running")
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.report(pair[0], COUNT0, "failed", number=1)
    cluster.report(pair[0], (other, 0, 0), "failed", number=2)
    cluster.advance(5.0)
    assert cluster.show(job).task_states == {"running": 3, "created": 1}
    before = cluster.show(job).rows_dropped
    cluster.request(CancelJob(job=job))
    assert cluster.show(job).task_states == {"running": 3, "canceled": 1}
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "canceled")
    found = cluster.show(job)
    assert found.state == "canceled" and found.tasks[2].attempt == 2 and found.rows_dropped == before
    assert not pair[0].got(ReleaseJob), "the next coordinator would ask for what it has"
    cluster.journal_error = None
    cluster.write_again()
    assert [message.job for message in pair[0].got(DeployTasks)] == [job, other, other]
    assert {message.job for message in pair[0].got(TasksRestarted)} == {other}
    assert {key for key in pair[0].tasks if key[0] == job} == set(), "all of it is released"
    assert pair[0].tasks[other, 0, 0].attempt == 2


def test_a_restart_that_is_held_back_only_after_the_job_was_cancelled_is_given_up(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """Both stand behind one write, and that fails."""
    fact = TaskStateChanged(attempt=attempt(1, job=job), state="failed", error=BOOM)
    failed = AttemptReport(term=TERM, number=1, facts=[fact])
    first = cluster.state.worker_message(pair[0].link, failed, cluster.now)
    then = cluster.state.client_request(1_000, 99, CancelJob(job=job), cluster.now)
    messages = [*first.messages, *then.messages]
    assert any(isinstance(each, SendToWorker) and isinstance(each.message, DeployTasks) for each in messages)
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.do(CoordinatorStep(first.records | then.records, messages=messages, timers=then.timers))
    assert pair[0].got(CancelTasks) and len(pair[0].got(DeployTasks)) == 1
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "canceled")
    assert cluster.show(job).state == "canceled"


def test_a_job_that_fails_does_not_wait_for_a_restart_that_is_held_back(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.report(pair[0], COUNT0, "failed", number=1)
    cannot = ErrorInfo(code=CannotWrite.code, text="no such directory")
    cluster.report(pair[1], COUNT1, "failed", number=1, error=cannot)
    for worker, key in ((pair[0], READ0), (pair[1], READ1)):
        cluster.report(worker, key, "canceled")
    found = cluster.show(job)
    assert (found.state, found.causes) == ("failed", [cannot])


def test_the_next_coordinator_runs_on_what_was_cancelled_unless_the_journal_has_it(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """Each worker still has what it ran, and repeats how that has ended."""
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.report(pair[0], COUNT0, "failed", number=1)
    cluster.request(CancelJob(job=job))
    ends = [(pair[0], READ0, 2), (pair[1], READ1, 1), (pair[1], COUNT1, 2)]
    for worker, key, number in ends:
        cluster.report(worker, key, "canceled", number=number)
    assert cluster.show(job).state == "canceled"
    cluster.journal_error = None
    cluster.lose_coordinator()
    for worker in pair:
        cluster.come_back(worker)
    assert cluster.show(job).task_states == {"running": 4}
    cluster.report(pair[0], COUNT0, "failed", number=1)
    for worker, key, number in ends:
        cluster.report(worker, key, "canceled", number=number)
    cluster.advance(20.0)
    assert {key: task.attempt for each in pair for key, task in each.tasks.items()} == dict.fromkeys(
        (READ0, READ1, COUNT0, COUNT1), 2
    )


def test_status_says_why_the_journal_cannot_be_written(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.journal_error = ResourceExhausted(FULL)
    reply = cluster.request(CancelJob(job=job))
    assert isinstance(reply, Accepted) and reply.warning.startswith(FULL)
    assert pair[0].got(CancelTasks) and pair[1].got(CancelTasks)
    assert cluster.request(GetStatus()).journal_problem == FULL
    assert not cluster.state.snapshot(cluster.now, {}).journal_writable
    cluster.journal_error = None
    cluster.report_all(job, "canceled")
    assert cluster.request(GetStatus()).journal_problem == ""
    assert cluster.state.snapshot(cluster.now, {}).journal_writable
    assert pair[0].got(ReleaseJob) and cluster.show(job).state == "canceled"
