"""The life cycle of jobs, through the machine's verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator import jobs as jobs_module
from minishuffle.coordinator.state import DRAIN_SECONDS, GOODBYE_SECONDS, JOBS_KEPT
from minishuffle.dataflow.graph import JobGraph
from minishuffle.errors import (
    InvalidGraph,
    PeerLost,
    ResourceExhausted,
    TaskCancelled,
    TaskFailed,
    UnknownName,
    UsageError,
)
from minishuffle.wire.messages import (
    Accepted,
    CancelJob,
    CancelTasks,
    DeployTasks,
    Failure,
    GetEvents,
    GetLogs,
    GetRows,
    GetStatus,
    JobInfo,
    ListJobs,
    ReleaseJob,
    ShowJob,
    Shutdown,
    StopCluster,
    SubmitJob,
    WaitJob,
)
from minishuffle.wire.parts import ControlMessage, TaskCountersMessage, TaskReport

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


@pytest.fixture
def pair(cluster: FakeCluster) -> tuple[FakeWorker, FakeWorker]:
    """Two workers; a job of parallelism 2 has subtasks 0 on the first, 1 on the second."""
    return cluster.add(), cluster.add()


def failure(reply: Any) -> tuple[int, str]:
    assert isinstance(reply, Failure), reply
    return reply.code, reply.text


def states(info: JobInfo) -> dict[str, str]:
    return {f"{task.name}[{task.index}]": task.state for task in info.tasks}


def causes(info: JobInfo) -> list[str]:
    return [cause.text for cause in info.causes]


def free_slots(cluster: FakeCluster) -> list[int]:
    return [worker.slots_free for worker in cluster.request(GetStatus()).workers]


def kinds(cluster: FakeCluster, job: str = "j1") -> list[str]:
    return [event.kind for event in cluster.request(GetEvents(job=job)).events]


# --- from submission to end -------------------------------------------------------------------------


def test_a_job_runs_to_its_end(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    assert cluster.submit(make_graph()) == "j1"
    assert cluster.journal == [1]
    for worker, index in zip(pair, (0, 1), strict=True):
        (deploy,) = worker.got(DeployTasks)
        assert [(task.operator, task.index) for task in deploy.tasks] == [(0, index), (1, index)]
    assert (cluster.show("j1").state, free_slots(cluster)) == ("created", [1, 1])
    cluster.report_all("j1", "running")
    assert cluster.show("j1").state == "running"
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[0], COUNT0)):
        cluster.report(worker, key, "finished")
    assert cluster.show("j1").state == "running"
    counters = TaskCountersMessage(records_in=9)
    cluster.report(pair[1], COUNT1, "finished", result=b"\x05", counters=counters)
    info = cluster.show("j1")
    assert (info.state, info.causes, set(states(info).values())) == ("finished", [], {"finished"})
    assert [(task.result, task.counters.records_in) for task in info.tasks][-1] == (b"\x05", 9)
    assert (info.submitted_at, info.ended_at) == (1_000_100.0, 1_000_100.0)
    assert [worker.got(ReleaseJob)[0].job for worker in pair] == ["j1", "j1"]
    assert free_slots(cluster) == [2, 2]
    assert kinds(cluster) == [
        "created",
        *["task running"] * 4,
        "running",
        *["task finished"] * 4,
        "finished",
    ]


def test_a_task_may_finish_before_others_run(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "finished")
    assert cluster.show("j1").state == "created"
    cluster.report(pair[0], COUNT0, "running")
    assert cluster.show("j1").state == "running"
    cluster.report(pair[0], COUNT0, "finished")
    assert cluster.show("j1").state == "finished"


def test_job_numbers_go_on_from_the_journal(make_cluster: Any, make_graph: MakeGraph) -> None:
    cluster: FakeCluster = make_cluster(jobs_submitted=41)
    cluster.add()
    assert cluster.submit(make_graph(1, 1)) == "j42"
    assert cluster.journal == [42]


def test_a_final_state_of_a_task_is_final(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.report(pair[0], READ0, "finished", result=b"\x01")
    ignored = cluster.state.ignored
    for state in ("running", "failed", "canceled", "finished"):
        cluster.report(pair[0], READ0, state, result=b"\x02")
    assert cluster.state.ignored == ignored + 4
    info = cluster.show("j1")
    assert (info.tasks[0].state, info.tasks[0].result, info.state) == ("finished", b"\x01", "created")


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (READ0, {"attempt": 0}),
        (READ0, {"attempt": 2}),
        (READ0, {"term": 6}),
        (READ1, {}),
        (("j1", 9, 0), {}),
        (("j9", 0, 0), {}),
    ],
)
def test_what_is_not_of_a_current_attempt_there_is_ignored(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, key: Any, fields: dict[str, int]
) -> None:
    cluster.submit(make_graph())
    before = cluster.show("j1")
    cluster.report(pair[0], key, "failed", **fields)
    cluster.collect(pair[0], key, b"rows", **fields)
    assert cluster.state.ignored == 2
    assert cluster.show("j1") == before


def test_counters_come_with_heartbeats_until_the_task_is_over(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    def report(records: int) -> TaskReport:
        counters = TaskCountersMessage(records_out=records)
        return TaskReport(job="j1", operator=0, index=0, attempt=1, state="running", counters=counters)

    cluster.submit(make_graph())
    cluster.heartbeat(pair[0], [report(5)])
    assert cluster.show("j1").tasks[0].counters.records_out == 5
    cluster.report(pair[0], READ0, "finished", counters=TaskCountersMessage(records_out=8))
    cluster.heartbeat(pair[0], [report(7)])
    assert cluster.show("j1").tasks[0].counters.records_out == 8
    cluster.heartbeat(pair[1], [report(9)])
    assert (cluster.state.ignored, cluster.show("j1").tasks[0].counters.records_out) == (1, 8)


# --- refused at submission ---------------------------------------------------------------------------


def submit(graph: bytes, name: str = "x", python: str = "3.11") -> SubmitJob:
    return SubmitJob(name=name, python=python, graph=graph)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"python": "3.13"}, UsageError.code, "submit it with Python 3.11"),
        ({"name": ""}, UsageError.code, "choose another --name"),
        ({"name": "é" * 65}, UsageError.code, "choose another --name"),
        ({"graph": b"\xc1"}, InvalidGraph.code, "job graph cannot be read"),
        (
            {"graph": JobGraph(vertices=[], edges=[]).to_bytes()},
            InvalidGraph.code,
            "the job has no operators",
        ),
    ],
)
def test_a_submission_that_makes_no_sense_leaves_nothing_behind(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, change: dict[str, Any], code: int, text: str
) -> None:
    got = failure(cluster.request(submit(**{"graph": make_graph().to_bytes(), **change})))
    assert got[0] == code and text in got[1]
    assert (cluster.request(ListJobs()).jobs, cluster.journal, free_slots(cluster)) == ([], [], [2, 2])
    assert not any(worker.got(DeployTasks) for worker in pair)


def test_a_job_that_needs_more_slots_is_refused_until_they_are_free(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(3, 1))
    code, text = failure(cluster.request(submit(make_graph(2, 2).to_bytes())))
    assert code == ResourceExhausted.code
    assert "job needs 2 slots (greatest parallelism), 1 are free of 4" in text
    cluster.report_all("j1", "finished")
    assert cluster.submit(make_graph(2, 2)) == "j2"


def test_a_job_that_needs_more_buffers_is_refused_until_they_are_free(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    # One worker: a gate of local channels needs 1, an output to one consumer 2.
    worker = cluster.add(slots=8, segments=5)
    cluster.submit(make_graph(1, 1))
    code, text = failure(cluster.request(submit(make_graph(1, 1).to_bytes())))
    assert code == ResourceExhausted.code
    assert "job needs 3 network buffers on worker 1, 2 are free of 5" in text
    assert "0 channels x 2 exclusive + 1 floating = 1" in text
    assert len(worker.got(DeployTasks)) == 1
    cluster.report_all("j1", "finished")
    assert cluster.submit(make_graph(1, 1)) == "j2"


def test_a_job_without_workers_is_refused(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    code, text = failure(cluster.request(submit(make_graph().to_bytes())))
    assert (code, "0 are free of 0" in text) == (ResourceExhausted.code, True)


def test_a_deployment_that_cannot_be_sent_fails_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    (deploy,) = pair[0].got(DeployTasks)
    cluster.do(cluster.state.undeployable(1, deploy, ResourceExhausted("too large"), cluster.now))
    assert cluster.show("j1").state == "failing"
    cluster.report(pair[1], READ1, "canceled")
    cluster.report(pair[1], COUNT1, "canceled")
    info = cluster.show("j1")
    assert (info.state, causes(info)) == ("failed", ["deployment on worker 1: too large"])
    assert free_slots(cluster) == [2, 2]


# --- failures ----------------------------------------------------------------------------------------


def test_a_function_that_raises_fails_the_job(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    cluster.fail(pair[1], COUNT1, TaskFailed.code, "count[1]: ZeroDivisionError: division by zero")
    assert cluster.show("j1").state == "failing"
    assert [worker.got(CancelTasks)[0].job for worker in pair] == ["j1", "j1"]
    cluster.fail(pair[0], COUNT0, PeerLost.code, "count[0]: peer")
    cluster.report(pair[0], READ0, "canceled")
    assert (cluster.show("j1").state, free_slots(cluster)) == ("failing", [1, 1])
    cluster.report(pair[1], READ1, "finished")
    info = cluster.show("j1")
    assert info.state == "failed"
    assert causes(info) == ["count[1]: ZeroDivisionError: division by zero", "count[0]: peer"]
    assert all(len(worker.got(CancelTasks)) == len(worker.got(ReleaseJob)) == 1 for worker in pair)
    assert free_slots(cluster) == [2, 2]
    assert cluster.submit(make_graph(2, 2)) == "j2"


def test_a_lost_worker_fails_the_job_and_is_its_first_cause(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    # The peer notices first.
    cluster.fail(pair[0], COUNT0, PeerLost.code, "count[0]: the connection to worker 2 broke")
    cluster.lose(pair[1])
    assert cluster.show("j1").state == "failing"
    assert (len(pair[0].got(CancelTasks)), len(pair[1].got(CancelTasks))) == (1, 1)
    cluster.fail(pair[0], READ0, TaskCancelled.code, "read[0]: cancelled")
    info = cluster.show("j1")
    assert info.state == "failed"
    assert causes(info) == [
        f"worker 2 (pid {pair[1].about.pid} on 10.0.0.1) was lost: its control link closed; "
        "read[1], count[1] ran there",
        "count[0]: the connection to worker 2 broke",
        "read[0]: cancelled",
    ]
    assert states(info) == {"read[0]": "failed", "read[1]": "lost", "count[0]": "failed", "count[1]": "lost"}
    assert (len(pair[0].got(ReleaseJob)), len(pair[1].got(ReleaseJob))) == (1, 0)
    assert cluster.submit(make_graph(2, 2)) == "j2"


def test_the_loss_of_every_worker_ends_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    for worker in pair:
        cluster.lose(worker)
    info = cluster.show("j1")
    assert (info.state, len(info.causes)) == ("failed", 2)
    assert info.causes[0].text.startswith("worker 1 ")


def test_a_worker_whose_tasks_are_finished_may_go(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(make_graph(2, 1))
    cluster.report(second, READ1, "finished")
    cluster.lose(second)
    assert cluster.show("j1").state == "created"
    cluster.report(first, READ0, "finished")
    cluster.report(first, COUNT0, "finished")
    assert cluster.show("j1").state == "finished"


def test_a_lost_worker_explains_what_others_missed_though_its_own_tasks_were_over(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    for key in (READ1, COUNT1):
        cluster.report(pair[1], key, "finished")
    cluster.fail(pair[0], COUNT0, PeerLost.code, "count[0]: the connection to worker 2 broke")
    cluster.lose(pair[1])
    cluster.report(pair[0], READ0, "canceled")
    info = cluster.show("j1")
    assert (info.state, len(info.causes)) == ("failed", 2)
    assert causes(info)[0].endswith("was lost: its control link closed")


def test_a_worker_that_is_stopped_is_the_cause_though_its_tasks_say_canceled_first(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report(pair[1], READ1, "canceled")
    cluster.send(pair[1], Shutdown(term=7, reason="SIGTERM"))
    assert causes(cluster.show("j1")) == [
        f"worker 2 (pid {pair[1].about.pid} on 10.0.0.1) was lost: it was stopped (SIGTERM); "
        "count[1] ran there",
        "read[1]: the task was canceled although nobody asked for it",
    ]


def test_a_new_process_with_the_id_of_a_lost_one_holds_nothing_of_its_jobs(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.lose(pair[1])
    again = cluster.add(requested_worker=2, slots=1, segments=3)
    assert (cluster.show("j1").state, free_slots(cluster)) == ("failing", [1, 1])
    cluster.report(again, READ1, "finished")
    assert states(cluster.show("j1"))["read[1]"] == "lost"
    cluster.report(pair[0], READ0, "canceled")
    cluster.report(pair[0], COUNT0, "canceled")
    assert cluster.show("j1").state == "failed"
    assert again.got(ReleaseJob) == []


def test_a_task_that_was_cancelled_unasked_fails_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report(pair[0], READ0, "canceled")
    info = cluster.show("j1")
    assert info.state == "failing"
    assert causes(info) == ["read[0]: the task was canceled although nobody asked for it"]


def test_an_abandoned_task_is_over_and_its_slot_written_off(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.request(CancelJob(job="j1"))
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "canceled")
    cluster.report(pair[0], COUNT0, "abandoned")
    assert (cluster.show("j1").state, cluster.show("j1").causes) == ("canceled", [])
    assert free_slots(cluster) == [1, 2]
    text = failure(cluster.request(submit(make_graph(4, 4).to_bytes())))[1]
    assert "job needs 4 slots (greatest parallelism), 3 are free of 3" in text
    # A new process of that id has all its slots.
    cluster.lose(pair[0])
    cluster.add(requested_worker=1)
    assert free_slots(cluster) == [2, 2]


# --- cancel ------------------------------------------------------------------------------------------


def test_a_cancelled_job_ends_when_its_tasks_have(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    assert cluster.request(CancelJob(job="j1")) == Accepted(job="j1")
    assert cluster.request(CancelJob(job="j1")) == Accepted(job="j1")
    assert [len(worker.got(CancelTasks)) for worker in pair] == [1, 1]
    cluster.fail(pair[0], READ0, TaskFailed.code, "read[0]: interrupted")
    cluster.report(pair[0], COUNT0, "finished")
    cluster.report(pair[1], READ1, "canceled")
    assert cluster.show("j1").state == "canceling"
    cluster.lose(pair[1])
    info = cluster.show("j1")
    assert (info.state, info.causes) == ("canceled", [])
    code, text = failure(cluster.request(CancelJob(job="j1")))
    assert code == UsageError.code
    assert text == "job j1 (count words) cannot be cancelled: it is canceled already"


def test_a_failing_job_stays_failing_when_it_is_cancelled(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.fail(pair[0], READ0, TaskFailed.code, "boom")
    assert cluster.request(CancelJob(job="j1")) == Accepted(job="j1")
    assert cluster.show("j1").state == "failing"


# --- rows, logs, results -----------------------------------------------------------------------------


def test_collected_rows_are_kept_for_clients(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.collect(pair[0], COUNT0, b"one")
    cluster.collect(pair[1], COUNT1, b"two")
    reply = cluster.request(GetRows(job="j1"))
    assert (reply.batches, reply.next, reply.over) == ([b"one", b"two"], 2, False)
    cluster.report_all("j1", "finished")
    reply = cluster.request(GetRows(job="j1", after=1))
    assert (reply.batches, reply.next, reply.over) == ([b"two"], 2, True)
    assert cluster.show("j1").collected_batches == 2
    cluster.collect(pair[0], COUNT0, b"late")
    assert cluster.state.ignored == 1


def test_too_many_collected_rows_fail_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COLLECT_BYTES_MAX", 10)
    cluster.submit(make_graph())
    cluster.collect(pair[0], COUNT0, bytes(8))
    cluster.collect(pair[1], COUNT1, bytes(8))
    info = cluster.show("j1")
    assert (info.state, info.collected_batches, info.causes[0].code) == ("failing", 1, ResourceExhausted.code)
    assert causes(info) == [
        "job collected more than 10 bytes of rows: write large results with to_parquet instead of collect"
    ]
    assert info.causes[0].task == "count[1]"


def test_too_large_results_of_sinks_fail_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "RESULT_BYTES_MAX", 10)
    cluster.submit(make_graph())
    cluster.report(pair[0], COUNT0, "finished", result=bytes(8))
    cluster.report(pair[1], COUNT1, "finished", result=bytes(8))
    info = cluster.show("j1")
    assert (info.state, info.causes[0].code) == ("failing", ResourceExhausted.code)
    assert [len(task.result) for task in info.tasks] == [0, 0, 8, 0]


def test_log_lines_are_kept_for_clients(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.log(pair[0], "j1", "hello", "world")
    cluster.log(pair[0], "j9", "nobody's")
    reply = cluster.request(GetLogs(job="j1", after=1))
    assert (reply.lines, reply.next, reply.over) == (["world"], 2, False)
    assert cluster.state.ignored == 1


# --- requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        ShowJob(job="j9"),
        CancelJob(job="j9"),
        GetEvents(job="j9"),
        GetLogs(job="j9"),
        GetRows(job="j9"),
        WaitJob(job="j9", wait_seconds=1),
    ],
)
def test_an_unknown_job_is_named_with_those_that_are_known(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, message: ControlMessage
) -> None:
    code, text = failure(cluster.request(message))
    assert code == UnknownName.code
    assert text.startswith("there is no job 'j9'; none was submitted yet")
    for _ in range(2):
        cluster.submit(make_graph())
    assert "there is no job 'j9'; the latest are j1, j2" in failure(cluster.request(message))[1]


def test_a_wait_is_answered_when_the_job_is_over(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    wait = cluster.ask(WaitJob(job="j1", wait_seconds=5.0))
    cluster.report_all("j1", "running")
    cluster.advance(1.0)
    assert cluster.reply(wait) is None
    cluster.report_all("j1", "finished")
    assert cluster.reply(wait).state == "finished"
    assert cluster.request(WaitJob(job="j1", wait_seconds=5.0)).state == "finished"


def test_a_wait_is_answered_when_its_time_is_up(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    waits = [cluster.ask(WaitJob(job="j1", wait_seconds=seconds)) for seconds in (2.0, 3.0, 1e9)]
    cluster.advance(1.875)
    assert [cluster.reply(wait) for wait in waits] == [None] * 3
    cluster.advance(0.125)
    assert [cluster.reply(wait) is not None for wait in waits] == [True, False, False]
    cluster.advance(58.0)
    assert [cluster.reply(wait).state for wait in waits] == ["created"] * 3
    assert cluster.request(WaitJob(job="j1", wait_seconds=0)).state == "created"


def test_events_and_logs_are_awaited(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    events = cluster.ask(GetEvents(job="j1", after=1, wait_seconds=9.0))
    logs = cluster.ask(GetLogs(job="j1", after=0, wait_seconds=9.0))
    cluster.log(pair[0], "j1", "line")
    assert (cluster.reply(logs).lines, cluster.reply(events)) == (["line"], None)
    cluster.report(pair[0], READ0, "running")
    (event,) = cluster.reply(events).events
    assert (event.number, event.kind, event.operator, event.index, event.worker) == (
        2,
        "task running",
        0,
        0,
        1,
    )
    assert event.at == 1_000_100.0
    assert cluster.request(GetEvents(job="j1", after=0, wait_seconds=9.0)).events[0].kind == "created"
    late = cluster.ask(GetEvents(job="j1", after=99, wait_seconds=9.0))
    cluster.report_all("j1", "finished")
    assert (cluster.reply(late).events, cluster.reply(late).over) == ([], True)


def test_a_client_that_left_is_not_answered(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    gone = cluster.ask(WaitJob(job="j1", wait_seconds=5.0), link=2_000)
    stays = cluster.ask(WaitJob(job="j1", wait_seconds=5.0), link=2_001)
    cluster.do(cluster.state.link_closed(2_000, cluster.now))
    cluster.report_all("j1", "finished")
    assert cluster.reply(gone, 2_000) is None
    assert cluster.reply(stays, 2_001).state == "finished"


def test_more_waits_than_are_kept_are_answered_at_once(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.polls.POLLS_MAX", 2)
    cluster.submit(make_graph())
    asked = [cluster.ask(WaitJob(job="j1", wait_seconds=5.0)) for _ in range(3)]
    assert [cluster.reply(request) is not None for request in asked] == [False, False, True]


def test_a_client_that_sends_what_only_workers_may_is_cut_off(cluster: FakeCluster) -> None:
    cluster.ask(Shutdown(term=7, reason=""))
    assert cluster.closed == {1_000: "a client sent shutdown"}


def test_lists_leave_out_what_sinks_returned(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph(), name="one")
    cluster.submit(make_graph(), name="two")
    cluster.report(pair[0], COUNT0, "finished", result=b"\x01")
    (one, two) = cluster.request(ListJobs()).jobs
    assert [(job.job, job.name, len(job.tasks)) for job in (one, two)] == [("j1", "one", 4), ("j2", "two", 4)]
    assert all(task.result == b"" for task in one.tasks)
    status = cluster.request(GetStatus())
    assert (status.cluster, status.version, status.term, status.pid) == ("test", "0", 7, 99)
    assert status.jobs == [one, two]


def test_the_last_hundred_jobs_that_are_over_are_kept(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    cluster.add()
    running = cluster.submit(make_graph(1, 1))
    for _ in range(JOBS_KEPT + 3):
        cluster.report_all(cluster.submit(make_graph(1, 1)), "finished")
    jobs = [job.job for job in cluster.request(ListJobs()).jobs]
    assert (len(jobs), jobs[0], jobs[1]) == (JOBS_KEPT + 1, running, "j5")


def test_the_snapshot_counts(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph(1, 1))
    cluster.report_all("j1", "finished")
    cluster.submit(make_graph(2, 1))
    cluster.report(pair[1], ("j2", 0, 1), "running")
    cluster.lose(cluster.add())
    cluster.now += 1.5
    snapshot = cluster.state.snapshot(cluster.now, {"secret": 2})
    assert (snapshot.term, snapshot.slots) == (7, {"used": 2, "free": 2})
    assert snapshot.jobs == {"finished": 1, "created": 1}
    assert snapshot.tasks == {"created": 2, "running": 1}
    assert snapshot.connections_refused == {"secret": 2}
    assert [(w.worker, w.state, w.heartbeat_age_seconds) for w in snapshot.workers] == [
        (1, "alive", 1.5),
        (2, "alive", 1.5),
        (3, "lost", 1.5),
    ]
    assert snapshot.workers[0].metrics_port == pair[0].about.metrics_port


# --- shutting down -----------------------------------------------------------------------------------


def test_a_stop_cancels_jobs_then_sends_workers_home(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    wait = cluster.ask(WaitJob(job="j1", wait_seconds=30.0))
    assert cluster.request(StopCluster()) == Accepted()
    assert [len(worker.got(CancelTasks)) for worker in pair] == [1, 1]
    code, text = failure(cluster.request(submit(make_graph().to_bytes())))
    assert (code, "being shut down" in text) == (UsageError.code, True)
    late = cluster.add()
    assert "being shut down" in failure(cluster.replies[late.link, 0])[1]
    assert not any(worker.got(Shutdown) for worker in pair)
    cluster.report_all("j1", "canceled")
    assert cluster.reply(wait).state == "canceled"
    assert [len(worker.got(Shutdown)) for worker in pair] == [1, 1]
    cluster.lose(pair[0])
    assert not cluster.stopped
    cluster.lose(pair[1])
    assert cluster.stopped
    assert [worker.state for worker in cluster.request(GetStatus()).workers] == ["gone", "gone"]


def test_a_stop_is_bounded_when_nobody_answers(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.do(cluster.state.stop(cluster.now))
    patience = cluster.settings.task_cancel_timeout + DRAIN_SECONDS
    cluster.advance(patience - 0.125)
    assert not any(worker.got(Shutdown) for worker in pair)
    cluster.advance(0.125)
    assert all(worker.got(Shutdown) for worker in pair)
    cluster.do(cluster.state.stop(cluster.now))
    cluster.advance(GOODBYE_SECONDS - 0.125)
    assert not cluster.stopped
    cluster.advance(0.125)
    assert cluster.stopped
    assert [len(worker.got(Shutdown)) for worker in pair] == [1, 1]


def test_a_cluster_without_workers_stops_at_once(cluster: FakeCluster) -> None:
    cluster.do(cluster.state.stop(cluster.now))
    assert cluster.stopped
    assert cluster.state.next_deadline() is None
