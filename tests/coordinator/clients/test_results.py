"""Who is sent where for kept results, what commits give up, and how many jobs' results stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.clients.results import GIVEN_UP
from minishuffle.coordinator.jobs.jobindex import JOBS_KEPT
from minishuffle.counters import TaskCounters
from minishuffle.errors import InvalidGraph, PeerLost, ResourceExhausted, UnknownName, UsageError
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.clients import (
    CommitResult,
    DescribeResult,
    DropResult,
    FreeRows,
    KeptRows,
    OpenResult,
    ResultExpected,
    ResultOpened,
    ServeResult,
)
from minishuffle.wire.messages import ErrorInfo, Shutdown, TaskReport
from minishuffle.wire.requests import Accepted, CancelJob, DrainWorker, SubmitJob
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

TERM = 7
CLIENT = 1_000
FULL = "the journal cannot be written (disk full): make room"


def graph(*sinks: str, subtasks: int = 2, bounded: bool = True, **settings: Any) -> JobGraph:
    """Operator 0 reads, the sinks follow."""
    vertices = [Vertex(name="read", parallelism=1, operators=["read"], is_source=True, program=b"")]
    for sink in sinks:
        vertices.append(
            Vertex(
                name=sink or "count",
                parallelism=subtasks,
                operators=["to_spark"],
                is_source=False,
                bounded=bounded,
                program=b"",
                sink=sink,
                sink_schema=b"schema",
            )
        )
    edges = [Edge(source=0, target=1 + i, partitioner="rebalance") for i in range(len(sinks))]
    return JobGraph(vertices=vertices, edges=edges, settings=JobSettings.model_validate(settings))


def keeps(cluster: FakeCluster, worker: FakeWorker, index: int, rows: int, job: str = "j1") -> None:
    """A heartbeat tells what sink operator 1 has."""
    counters = TaskCounters(rows_kept=rows)
    report = TaskReport(attempt=attempt(1, index, job=job), counters=counters)
    cluster.heartbeat(worker, [report])


def describe(cluster: FakeCluster, job: str, sink: str = "") -> Any:
    return cluster.request(DescribeResult(job=job, sink=sink))


def open_rows(subtask: int = 0, begin: int = 0, end: int = 5) -> OpenResult:
    return OpenResult(job="j1", sink="result", subtask=subtask, begin=begin, end=end)


def commit(*offsets: int) -> CommitResult:
    return CommitResult(job="j1", sink="result", offsets=dict(enumerate(offsets)))


# --- what there is -----------------------------------------------------------------------------------


def test_what_there_is_grows_with_heartbeats_and_is_final_at_the_end(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"))
    keeps(cluster, pair[0], 0, 5)
    found = describe(cluster, "j1")
    assert (found.job, found.name, found.sink, found.state, found.terminal) == (
        "j1",
        "count words",
        "result",
        "created",
        False,
    )
    assert (found.schema_message, found.bounded) == (b"schema", True)
    assert found.subtasks == [KeptRows(subtask=0, begin=0, end=5), KeptRows(subtask=1, begin=0, end=0)]
    cluster.report(pair[1], ("j1", 1, 1), "finished", counters=TaskCounters(rows_kept=9))
    assert describe(cluster, "j1").subtasks[1].end == 9
    cluster.report_all("j1", "finished", counters=TaskCounters(rows_kept=7))
    found = describe(cluster, "j1", "result")
    assert (found.state, found.terminal) == ("finished", True)
    assert [rows.end for rows in found.subtasks] == [7, 9]


def test_a_name_means_the_newest_job_of_it(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"), "same")
    cluster.report_all("j1", "finished")
    cluster.now += 1
    cluster.submit(graph("result"), "same")
    assert describe(cluster, "same").job == "j2"
    assert describe(cluster, "j1").job == "j1"


def test_what_is_not_there_is_told_with_what_is(cluster: FakeCluster, pair: Any) -> None:
    code, text = cluster.refusal(DescribeResult(job="nobody"))
    assert code == UnknownName.code and "there is no job 'nobody'; none was submitted yet" in text
    cluster.submit(graph("", subtasks=1), "plain")
    code, text = cluster.refusal(DescribeResult(job="plain"))
    assert code == UnknownName.code and "end the stream with to_spark()" in text
    cluster.submit(graph("one", "two", subtasks=1), "twice")
    for sink in ("three", ""):
        code, text = cluster.refusal(DescribeResult(job="twice", sink=sink))
        assert code == UnknownName.code and f"no sink {sink!r}: name one of one, two" in text
    assert describe(cluster, "twice", "two").sink == "two"


def test_two_sinks_of_one_name_are_refused(cluster: FakeCluster, pair: Any) -> None:
    message = SubmitJob(name="x", python="3.11", graph=graph("same", "same", subtasks=1).to_bytes())
    code, text = cluster.refusal(message)
    assert code == InvalidGraph.code and "two sinks are named 'same'" in text


def test_a_job_that_failed_says_why(cluster: FakeCluster, pair: Any) -> None:
    fails = JobSettings(restart_strategy="none")
    cluster.submit(graph("result").model_copy(update={"settings": fails}))
    cluster.fail(pair[0], ("j1", 1, 0), 60, "result[0]: boom")
    cluster.report_all("j1", "canceled")
    found = describe(cluster, "j1")
    assert (found.state, found.terminal, found.causes) == (
        "failed",
        True,
        [ErrorInfo(code=60, text="result[0]: boom")],
    )


# --- reading -----------------------------------------------------------------------------------------


def test_a_reader_is_sent_to_the_worker_once_that_expects_it(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"))
    requests = [cluster.ask(open_rows(subtask)) for subtask in (1, 1)]
    first, second = pair[1].got(ServeResult)
    assert first == ServeResult(
        term=TERM, job="j1", operator=1, index=1, task_attempt=1, ticket=first.ticket, begin=0, end=5
    )
    assert second.ticket > first.ticket and not pair[0].got(ServeResult)
    assert cluster.reply(requests[0]) is None
    for _ in range(2):  # the second time nobody waits for it
        cluster.send(pair[1], ResultExpected(term=TERM, ticket=first.ticket, segment_bytes=4096))
    opened = cluster.reply(requests[0])
    assert isinstance(opened, ResultOpened)
    assert (opened.term, opened.ticket, opened.job, opened.segment_bytes) == (TERM, first.ticket, "j1", 4096)
    assert opened.worker.worker == pair[1].worker and opened.worker.data_port == pair[1].about.data_port
    assert cluster.reply(requests[1]) is None


def test_what_the_worker_refuses_is_told(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"))
    request = cluster.ask(open_rows())
    (serve,) = pair[0].got(ServeResult)
    error = ErrorInfo(code=UsageError.code, text="rows 0 to 5 were asked for, and there are 3")
    cluster.send(pair[0], ResultExpected(term=TERM, ticket=serve.ticket, error=error))
    reply = cluster.reply(request)
    assert (reply.code, reply.text) == (error.code, error.text)


def test_a_subtask_that_is_not_there_is_refused(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"))
    for subtask in (2, 7):
        code, text = cluster.refusal(open_rows(subtask))
        assert code == UsageError.code and f"has 2 subtasks, and subtask {subtask} was asked for" in text


def test_a_client_that_is_gone_is_not_answered(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"))
    request = cluster.ask(open_rows())
    (serve,) = pair[0].got(ServeResult)
    cluster.do(cluster.state.link_closed(CLIENT, cluster.now))
    cluster.send(pair[0], ResultExpected(term=TERM, ticket=serve.ticket))
    assert cluster.reply(request) is None


def test_a_worker_whose_link_broke_is_asked_again(cluster: FakeCluster, pair: Any) -> None:
    """What it was asked, or its answer, was on its way."""
    cluster.submit(graph("result"))
    request = cluster.ask(open_rows())
    cluster.break_link(pair[0])
    cluster.come_back(pair[0])
    first, again = pair[0].got(ServeResult)
    assert first == again
    cluster.send(pair[0], ResultExpected(term=TERM, ticket=again.ticket, segment_bytes=4096))
    assert isinstance(cluster.reply(request), ResultOpened)


def test_a_worker_that_is_lost_takes_its_rows(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result"))
    cluster.report_all("j1", "finished", counters=TaskCounters(rows_kept=9))
    request = cluster.ask(open_rows(1))
    cluster.lose(pair[1])
    assert cluster.reply(request).code == PeerLost.code
    replacement = cluster.add(requested_worker=pair[1].worker)
    lost = cluster.request(open_rows(1))
    assert lost.end == 5 and "worker 2, which kept rows of job j1 (count words), is gone" in lost.lost
    assert [rows.lost for rows in describe(cluster, "j1").subtasks] == [0, 9]
    assert not replacement.got(ServeResult)
    cluster.ask(open_rows(0))
    assert len(pair[0].got(ServeResult)) == 1


def test_rows_of_a_job_with_a_guarantee_come_again_while_it_runs(cluster: FakeCluster, pair: Any) -> None:
    job = cluster.submit(graph("result", bounded=False, guarantee="at_least_once"))
    cluster.report_all(job, "running")
    keeps(cluster, pair[1], 1, 9)
    assert describe(cluster, job).subtasks[1] == KeptRows(subtask=1, begin=0, end=9, lost=0)
    cluster.lose(pair[1])
    opened = cluster.request(open_rows(1))
    assert opened.end == 5 and opened.lost and opened.comes_again
    assert [rows.lost for rows in describe(cluster, job).subtasks] == [0, 0]
    assert not cluster.show(job).rows_dropped


# --- commits -----------------------------------------------------------------------------------------


def test_the_last_two_batches_that_were_committed_can_be_read_again(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result", bounded=False))
    keeps(cluster, pair[0], 0, 100)
    begins = []
    for end in (10, 20, 30, 30, 25, 40):
        assert cluster.request(commit(end)) == Accepted(job="j1")
        begins.append(describe(cluster, "j1").subtasks[0].begin)
    assert begins == [0, 0, 10, 10, 10, 20]
    assert [(message.begin, message.read) for message in pair[0].got(FreeRows)] == [
        (0, 10),
        (0, 20),
        (10, 30),
        (20, 40),
    ]
    assert describe(cluster, "j1").subtasks[0] == KeptRows(subtask=0, begin=20, end=100)
    assert not pair[1].got(FreeRows)


def test_only_what_is_there_can_be_committed(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result", bounded=False))
    keeps(cluster, pair[0], 0, 10)
    for offsets in ((11,), (10, 1), (10, 0, 0)):
        code, _ = cluster.refusal(commit(*offsets))
        assert code == UsageError.code
    assert not pair[0].got(FreeRows)


# --- how long ----------------------------------------------------------------------------------------


def test_results_of_the_last_jobs_stay(
    cluster: FakeCluster, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOB_RESULTS_KEPT", 2)
    for number in range(1, 4):
        cluster.submit(graph("result"))
        cluster.report_all(f"j{number}", "finished")
    assert [message.job for message in pair[0].got(DropResult)] == ["j1"]
    assert [message.job for message in pair[1].got(DropResult)] == ["j1"]
    code, text = cluster.refusal(DescribeResult(job="j1"))
    assert code == UsageError.code and "were given up: those of the last 2 jobs are kept" in text
    assert [describe(cluster, job).job for job in ("j2", "j3")] == ["j2", "j3"]


@pytest.mark.slow
def test_results_outlive_the_list_of_jobs_and_what_was_given_up_does_not(
    cluster: FakeCluster, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOB_RESULTS_KEPT", 1)
    for job in ("j1", "j2"):
        cluster.submit(graph("result"), job + "'s name")
        cluster.report_all(job, "finished")
    for number in range(3, JOBS_KEPT + 5):
        cluster.submit(graph("", subtasks=1))
        cluster.report_all(f"j{number}", "finished")
    assert describe(cluster, "j2").job == describe(cluster, "j2's name").job == "j2"
    code, text = cluster.refusal(DescribeResult(job="j1"))
    assert code == UnknownName.code and "there is no job 'j1'" in text


def test_a_job_that_was_cancelled_keeps_its_rows(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("result", bounded=False))
    keeps(cluster, pair[0], 0, 10)
    cluster.request(CancelJob(job="j1"))
    cluster.report_all("j1", "canceled", counters=TaskCounters(rows_kept=12))
    found = describe(cluster, "j1")
    assert (found.state, found.terminal, found.subtasks[0].end) == ("canceled", True, 12)


def test_a_job_that_is_cancelled_for_want_of_room_gives_up_its_rows_when_it_has_ended(
    cluster: FakeCluster, pair: Any
) -> None:
    """They may be what fills the disk of the journal, and then nothing else would ever make room."""
    cluster.submit(graph("result", bounded=False))
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.report_all("j1", "running")
    keeps(cluster, pair[0], 0, 10)
    reply = cluster.request(CancelJob(job="j1"))
    assert reply.warning.startswith(FULL) and reply.warning.endswith(GIVEN_UP)
    assert describe(cluster, "j1").subtasks[0].end == 10 and not pair[0].got(DropResult)
    cluster.report_all("j1", "canceled", counters=TaskCounters(rows_kept=12))
    assert [worker.got(DropResult) for worker in pair] == [[DropResult(term=TERM, job="j1")]] * 2
    code, text = cluster.refusal(DescribeResult(job="j1"))
    assert code == UsageError.code and "were given up: " in text and "while the coordinator's" in text
    code, text = cluster.refusal(CancelJob(job="j1"))
    assert (code, text) == (
        UsageError.code,
        "job j1 (count words) cannot be cancelled: it is canceled already",
    )


def test_a_job_that_ended_before_gives_up_its_rows_if_it_is_cancelled_for_want_of_room(
    cluster: FakeCluster, pair: Any
) -> None:
    settings = JobSettings(restart_strategy="none")
    for job, state in (("j1", "finished"), ("j2", "failed")):
        cluster.submit(graph("result").model_copy(update={"settings": settings}))
        cluster.report_all(job, state)
    assert cluster.refusal(CancelJob(job="j2"))[1].endswith(
        "it is failed already; 'jobs cancel j2 --give-up-results' frees what it keeps"
    )
    cluster.journal_error = ResourceExhausted(FULL)
    cluster.add()
    assert cluster.request(CancelJob(job="j2")).warning.endswith(GIVEN_UP)
    assert [message.job for message in pair[0].got(DropResult)] == ["j2"]
    assert cluster.show("j2").state == "failed" and describe(cluster, "j1").terminal
    assert "it is failed already" in cluster.refusal(CancelJob(job="j2"))[1]


def test_results_that_nobody_wants_are_given_up_whenever_their_job_is_cancelled(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph("result"))
    cluster.report_all("j1", "finished")
    cluster.submit(graph("result", bounded=False))
    keeps(cluster, pair[0], 0, 10, job="j2")
    for job in ("j1", "j2"):
        assert cluster.request(CancelJob(job=job, give_up_results=True)).warning == ""
    assert [message.job for message in pair[0].got(DropResult)] == ["j1"]
    assert cluster.show("j1").state == "finished" and cluster.show("j2").state == "canceling"
    cluster.report_all("j2", "canceled", counters=TaskCounters(rows_kept=12))
    assert [message.job for message in pair[1].got(DropResult)] == ["j1", "j2"]
    assert "with --give-up-results" in cluster.refusal(DescribeResult(job="j1"))[1]
    code, text = cluster.refusal(CancelJob(job="j1", give_up_results=True))
    assert code == UsageError.code and text.endswith("cannot be cancelled: it is finished already")


def test_requests_of_one_client_that_wait_for_workers_are_bounded(
    cluster: FakeCluster, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINK_REQUESTS_MAX", 2)
    cluster.submit(graph("rows"))
    opening = OpenResult(job="j1", sink="rows", subtask=0, begin=0, end=0)
    waiting = [cluster.ask(opening) for _ in range(2)]
    code, text = cluster.refusal(opening)
    assert (code, text) == (
        ResourceExhausted.code,
        "2 requests of this client wait for answers of workers: wait for them",
    )
    assert [cluster.reply(request) for request in waiting] == [None, None]
    other = cluster.ask(opening, link=2_000)
    assert cluster.reply(other, 2_000) is None, "another client's request is not refused"


# --- workers that leave ------------------------------------------------------------------------------


def test_a_worker_that_is_to_leave_waits_until_readers_have_its_rows(cluster: FakeCluster, pair: Any) -> None:
    one, _ = pair
    job = cluster.submit(graph("result"))
    keeps(cluster, one, 0, 5)
    cluster.report_all(job, "running")
    for worker in pair:
        for key in list(worker.tasks):
            counters = TaskCounters(rows_kept=5 if (worker, key[1]) == (one, 1) else 0)
            cluster.report(worker, key, "finished", counters=counters)
    cluster.request(DrainWorker(worker=one.worker))
    cluster.advance(100.0)
    assert cluster.show(job).state == "finished" and not one.got(Shutdown)
    cluster.request(commit(4, 0))
    assert not one.got(Shutdown), "a row is not committed"
    cluster.request(commit(5, 0))
    assert one.got(Shutdown)


def test_rows_that_nobody_has_read_are_lost_with_a_worker_whose_time_is_up(
    cluster: FakeCluster, pair: Any
) -> None:
    one, _ = pair
    job = cluster.submit(graph("result", bounded=False))
    cluster.report_all(job, "running")
    keeps(cluster, one, 0, 5)
    cluster.request(DrainWorker(worker=one.worker, seconds=2.0))
    cluster.advance(4.0)
    assert one.got(Shutdown)
    cluster.send(one, Shutdown(term=TERM, reason="the worker is stopped"))
    assert cluster.show(job).rows_dropped["result_lost"] == 5
