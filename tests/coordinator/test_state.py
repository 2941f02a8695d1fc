"""The life cycle of jobs, through the machine's verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.journal.journalrecords import Recorder
from minishuffle.coordinator.shutdown import CLOSING_SECONDS, DRAIN_SECONDS
from minishuffle.coordinator.workers import RegistryNumbers
from minishuffle.counters import TaskCounters
from minishuffle.errors import InvalidGraph, ResourceExhausted, TaskFailed, UsageError
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import Acknowledge, CancelTasks, DeployTasks, Shutdown, TaskReport
from minishuffle.wire.packed import PeerRows, pack_traffic
from minishuffle.wire.reports import TaskReleased
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    GetEvents,
    GetRows,
    ListJobs,
    SubmitJob,
)
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


# --- from submission to end -------------------------------------------------------------------------


def test_a_task_may_finish_before_others_run(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "finished")
    assert cluster.show("j1").state == "created"
    cluster.report(pair[0], COUNT0, "running")
    assert cluster.show("j1").state == "running"
    cluster.report(pair[0], COUNT0, "finished")
    assert cluster.show("j1").state == "finished"


def test_a_submission_that_cannot_be_journaled_is_refused_and_nothing_else_changes(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    running = cluster.submit(make_graph(1, 1))
    cluster.journal_error = ResourceExhausted("the journal cannot be written (disk full): make room")
    request = SubmitJob(name="refused", python="3.11", graph=make_graph(1, 1).to_bytes())
    assert cluster.refusal(request) == (
        ResourceExhausted.code,
        f"the job cannot be accepted: {cluster.journal_error}, and submit it again",
    )
    assert [job.job for job in cluster.request(ListJobs()).jobs] == [running]
    assert sum(cluster.free_slots()) == 3
    assert [len(worker.got(DeployTasks)) for worker in pair] == [1, 0]
    cluster.report_all(running, "finished")
    assert cluster.show(running).state == "finished"
    cluster.journal_error = None
    assert cluster.submit(make_graph(1, 1)) == "j2"
    assert cluster.jobs_journaled() == ["j1", "j2"]


def test_job_numbers_go_on_from_the_journal(make_cluster: Any, make_graph: MakeGraph) -> None:
    recorder = Recorder({})
    recorder.counts(41, RegistryNumbers(3, 7))
    records = {key: record for key, record in recorder.take(0.0).items() if record is not None}
    cluster: FakeCluster = make_cluster(records)
    cluster.add()
    assert cluster.submit(make_graph(1, 1)) == "j42"
    assert cluster.jobs_journaled() == ["j42"]


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
        counters = TaskCounters(records_out=records)
        return TaskReport(attempt=attempt(), counters=counters)

    cluster.submit(make_graph())
    cluster.heartbeat(pair[0], [report(5)])
    assert cluster.show("j1").tasks[0].counters.records_out == 5
    cluster.report(pair[0], READ0, "finished", counters=TaskCounters(records_out=8))
    cluster.heartbeat(pair[0], [report(7)])
    assert cluster.show("j1").tasks[0].counters.records_out == 8
    cluster.heartbeat(pair[1], [report(9)])
    assert (cluster.state.ignored, cluster.show("j1").tasks[0].counters.records_out) == (1, 8)


def test_rows_sent_and_received_are_known_until_and_after_the_release(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    def sent(*rows: int) -> bytes:
        return pack_traffic(PeerRows(0, index, 1, n, 0, 1) for index, n in enumerate(rows))

    def shown() -> tuple[int, int]:
        task = cluster.show("j1").tasks[0]
        return task.rows_sent, task.rows_received

    cluster.submit(make_graph())
    assert shown() == (0, 0)
    cluster.heartbeat(pair[0], [TaskReport(attempt=attempt(), counters=TaskCounters(), traffic=sent(1, 2))])
    assert shown() == (3, 2)
    cluster.report(pair[0], READ0, "finished", traffic=sent(2, 2), number=1)
    assert shown() == (4, 2)
    cluster.heartbeat(pair[0], [TaskReport(attempt=attempt(), counters=TaskCounters(), traffic=sent(3, 2))])
    assert shown() == (5, 2), "it sends what it had written"
    cluster.report_all("j1", "finished")
    assert cluster.show("j1").state == "finished_with_loss", "nobody has received them"
    cluster.fact(pair[0], TaskReleased(attempt=attempt(), traffic=sent(4, 2)), 2)
    assert shown() == (6, 2)
    cluster.fact(pair[0], TaskReleased(attempt=attempt(), traffic=sent(9, 9)), 2)
    assert shown() == (6, 2), "it was applied before"
    cluster.fact(pair[1], TaskReleased(attempt=attempt(), traffic=sent(9, 9)), 1)
    assert shown() == (6, 2), "the task was not there"
    assert [message.number for message in pair[0].got(Acknowledge)] == [1, 2, 2]
    huge = pack_traffic([PeerRows(0, 1, 1, 2**64 - 1)] * 2)
    cluster.fact(pair[0], TaskReleased(attempt=attempt(), traffic=huge), 3)
    assert shown() == (2**63 - 1, 0)


def test_rows_dropped_are_known_until_and_after_the_release(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    def dropped(rows: int) -> dict[str, Any]:
        return {"queue_discarded": rows}

    cluster.submit(make_graph())
    cluster.report(pair[0], READ0, "finished", number=1)
    assert cluster.show("j1").rows_dropped == {}
    report = TaskReport(attempt=attempt(), counters=TaskCounters(rows_dropped=dropped(3)))
    cluster.heartbeat(pair[0], [report])
    assert cluster.show("j1").rows_dropped == dropped(3), "its consumer went away"
    cluster.report_all("j1", "finished")
    cluster.fact(pair[0], TaskReleased(attempt=attempt(), traffic=b"", rows_dropped=dropped(5)), 2)
    assert cluster.show("j1").rows_dropped == dropped(5)


# --- refused at submission ---------------------------------------------------------------------------


def submit(graph: bytes, name: str = "x", python: str = "3.11") -> SubmitJob:
    return SubmitJob(name=name, python=python, graph=graph)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"python": "3.13"}, UsageError.code, "submit it with Python 3.11"),
        ({"name": ""}, UsageError.code, "choose another --name"),
        ({"name": " "}, UsageError.code, "choose another --name"),
        ({"name": "two\nlines"}, UsageError.code, r"all printable, not 'two\nlines' (str): choose"),
        ({"name": "\x1b[2J"}, UsageError.code, "choose another --name"),
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
    got = cluster.refusal(submit(**{"graph": make_graph().to_bytes(), **change}))
    assert got[0] == code and text in got[1]
    assert (cluster.request(ListJobs()).jobs, cluster.jobs_journaled(), cluster.free_slots()) == (
        [],
        [],
        [2, 2],
    )
    assert not any(worker.got(DeployTasks) for worker in pair)


def test_a_client_hears_of_workers_with_other_versions(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    cluster.add(releases={"numpy": "2.1.0", "pyarrow": "18.0.0"})
    cluster.add(releases={"numpy": "2.1.0", "pyarrow": "19.0.0"})
    request = submit(make_graph(1, 1).to_bytes())
    same = cluster.request(request.model_copy(update={"releases": {"numpy": "2.1.0"}}))
    assert (same.job, same.warning) == ("j1", "")
    here = {"numpy": "2.1.0", "pyarrow": "18.0.0"}
    other = cluster.request(request.model_copy(update={"releases": here}))
    assert other.job == "j2"
    assert other.warning.splitlines()[1:] == [
        "              pyarrow",
        "this program  18.0.0",
        "worker 1      18.0.0",
        "worker 2      19.0.0",
    ]
    code, text = cluster.refusal(request.model_copy(update={"releases": here | {"numpy": "1.26.0"}}))
    assert (code, "numpy must be of the same release" in text) == (UsageError.code, True)
    assert len(cluster.request(ListJobs()).jobs) == 2


def test_a_job_that_needs_more_slots_is_refused_until_they_are_free(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(3, 1))
    code, text = cluster.refusal(submit(make_graph(2, 2).to_bytes()))
    assert code == ResourceExhausted.code
    assert "job needs 2 slots (greatest parallelism), 1 are free of 4" in text
    cluster.report_all("j1", "finished")
    assert cluster.submit(make_graph(2, 2)) == "j2"


def test_a_job_that_needs_more_buffers_is_refused_until_they_are_free(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    # One worker: a gate with one channel needs 2 + 1, an output to one consumer 2.
    worker = cluster.add(slots=8, segments=9)
    cluster.submit(make_graph(1, 1))
    code, text = cluster.refusal(submit(make_graph(1, 1).to_bytes()))
    assert code == ResourceExhausted.code
    assert "job needs 5 network buffers on worker 1, 4 are free of 9" in text
    assert "1 channels x 2 exclusive + 1 floating = 3" in text
    assert len(worker.got(DeployTasks)) == 1
    cluster.report_all("j1", "finished")
    assert cluster.submit(make_graph(1, 1)) == "j2"


def test_a_job_without_workers_is_refused(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    code, text = cluster.refusal(submit(make_graph().to_bytes()))
    assert (code, "0 are free of 0" in text) == (ResourceExhausted.code, True)


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
    code, text = cluster.refusal(CancelJob(job="j1"))
    assert code == UsageError.code
    assert text == "job j1 (count words) cannot be cancelled: it is canceled already"


def test_a_failing_job_stays_failing_when_it_is_cancelled(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.fail(pair[0], READ0, TaskFailed.code, "boom")
    assert cluster.request(CancelJob(job="j1")) == Accepted(job="j1")
    assert cluster.show("j1").state == "failing"


def test_an_abandoned_task_is_over_and_its_slot_written_off(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.request(CancelJob(job="j1"))
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "canceled")
    cluster.report(pair[0], COUNT0, "abandoned")
    assert (cluster.show("j1").state, cluster.show("j1").causes) == ("canceled", [])
    assert cluster.free_slots() == [1, 2]
    text = cluster.refusal(submit(make_graph(4, 4).to_bytes()))[1]
    assert "job needs 4 slots (greatest parallelism), 3 are free of 3 (written off: 1 of worker 1, " in text
    cluster.heartbeat(pair[0], stuck={"j1": [0]})
    assert cluster.free_slots() == [1, 2]
    cluster.heartbeat(pair[0])
    assert cluster.free_slots() == [2, 2], "the thread has ended"
    # A new process of that id has all its slots.
    cluster.lose(pair[0])
    cluster.add(requested_worker=1)
    assert cluster.free_slots() == [2, 2]


# --- shutting down -----------------------------------------------------------------------------------


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
    cluster.advance(CLOSING_SECONDS - 0.125)
    assert not cluster.stopped
    cluster.advance(0.125)
    assert cluster.stopped
    assert [len(worker.got(Shutdown)) for worker in pair] == [1, 1]


def test_a_cluster_without_workers_stops_at_once(cluster: FakeCluster) -> None:
    cluster.do(cluster.state.stop(cluster.now))
    assert cluster.stopped
    assert cluster.timers is None


# --- reports that are acknowledged ----------------------------------------------------------------------


def test_each_report_is_applied_once_and_acknowledged(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: Callable[..., JobGraph]
) -> None:
    job = cluster.submit(make_graph())
    first, second = pair
    for number in (1, 2, 2, 1, 3):
        cluster.collect(first, (job, 1, 0), f"rows {number}".encode(), number=number)
    cluster.collect(second, (job, 1, 1), b"of another worker", number=1)
    rows = cluster.request(GetRows(job=job))
    assert rows.batches == [b"rows 1", b"rows 2", b"rows 3", b"of another worker"]
    assert [message.number for message in first.got(Acknowledge)] == [1, 2, 2, 1, 3]
    assert [message.number for message in second.got(Acknowledge)] == [1]
    cluster.report(first, (job, 0, 0), "finished", number=4)
    cluster.report(first, (job, 0, 0), "failed", number=4)
    assert [task.state for task in cluster.show(job).tasks][0] == "finished"


def test_reports_of_a_job_that_is_not_known_are_acknowledged(cluster: FakeCluster) -> None:
    worker = cluster.add()
    cluster.collect(worker, ("j9", 1, 0), b"rows", number=1)
    assert [message.number for message in worker.got(Acknowledge)] == [1]


def test_that_a_worker_cannot_retain_rows_on_its_disk_is_an_event_of_the_jobs_there(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(1, 1))
    cluster.report_all("j1", "running")
    idle = cluster.add()
    for problem in ("", "No space left on device", "No space left on device", ""):
        for worker in (pair[0], idle):
            cluster.heartbeat(worker, disk_problem=problem)
    texts = [each.text for each in cluster.request(GetEvents(job="j1")).events if "disk" in each.kind]
    assert texts == [
        "worker 1 retains rows in memory alone, and tasks wait while that is full: No space left on device",
        "worker 1 can retain rows on its disk again",
    ]
