"""Kept results whose coordinator is lost: where they are, what was read, and what readers have heard of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph, JobSettings, Vertex
from minishuffle.wire.clients import (
    CommitResult,
    DescribeResult,
    DropResult,
    KeptRows,
    OpenResult,
    ServeResult,
)
from minishuffle.wire.messages import ErrorInfo, TaskReport
from minishuffle.wire.requests import Accepted, CancelJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

BOOM = ErrorInfo(code=60, text="boom")


def graph(bounded: bool = False) -> JobGraph:
    """One vertex: a source whose two subtasks keep what they make."""
    vertex = Vertex(
        name="make -> to_spark",
        parallelism=2,
        operators=["to_spark"],
        is_source=True,
        bounded=bounded,
        program=b"",
        sink="result",
        sink_schema=b"schema",
    )
    return JobGraph(vertices=[vertex], edges=[], settings=JobSettings(restart_strategy="individual"))


def keeps(cluster: FakeCluster, worker: FakeWorker, rows: int, attempt: int = 1) -> None:
    """A heartbeat tells what subtask 0 has."""
    counters = TaskCounters(rows_kept=rows)
    report = TaskReport(attempt=AttemptId.of("j1", 0, 0, attempt), counters=counters)
    cluster.heartbeat(worker, [report])


def kept(cluster: FakeCluster) -> KeptRows:
    found: KeptRows = cluster.request(DescribeResult(job="j1")).subtasks[0]
    return found


def committing(offset: int) -> CommitResult:
    return CommitResult(job="j1", sink="result", offsets={0: offset})


def take_over(cluster: FakeCluster, workers: Any) -> None:
    """The coordinator is killed, and the workers come back to the next one, with no heartbeat so far."""
    before = {key: record for key, record in cluster.journal.items() if key[0] == "result"}
    assert before
    cluster.lose_coordinator()
    assert before.items() <= cluster.journal.items(), "it remembers the same"
    for worker in workers:
        cluster.come_back(worker)


def test_an_end_that_readers_have_heard_of_does_not_go_back(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    keeps(cluster, pair[0], 70)
    assert kept(cluster).end == 70
    keeps(cluster, pair[0], 80)
    take_over(cluster, pair)
    assert kept(cluster) == KeptRows(subtask=0, begin=0, end=70)
    assert cluster.request(committing(70)) == Accepted(job="j1")
    keeps(cluster, pair[0], 90)
    assert kept(cluster).end == 90


def test_a_task_that_was_lost_meanwhile_numbers_on_above_what_readers_know(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph())
    cluster.report_all("j1", "running")
    keeps(cluster, pair[0], 70)
    kept(cluster)
    take_over(cluster, [pair[1]])
    cluster.advance(cluster.settings.heartbeat_timeout + 0.5)
    assert pair[1].tasks["j1", 0, 0].first_row == 70
    assert kept(cluster) == KeptRows(subtask=0, begin=0, end=70, lost=70)
    assert cluster.show("j1").rows_dropped == {"result_lost": 70}


def test_what_was_committed_stays_so_and_the_rest_is_where_it_was(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    failed = TaskCounters(rows_kept=75)
    cluster.report(pair[0], ("j1", 0, 0), "failed", error=BOOM, counters=failed)
    keeps(cluster, pair[0], 200, attempt=2)
    for offset in (10, 20, 30):
        cluster.request(committing(offset))
    before = kept(cluster)
    take_over(cluster, pair)
    assert kept(cluster) == before == KeptRows(subtask=0, begin=10, end=200)
    for begin, attempt in ((40, 1), (100, 2)):
        cluster.ask(OpenResult(job="j1", sink="result", subtask=0, begin=begin, end=200))
        assert pair[0].got(ServeResult)[-1].task_attempt == attempt


def test_results_of_jobs_that_have_ended_are_given_up_in_the_order_of_their_ends(
    cluster: FakeCluster, pair: Any
) -> None:
    """The one that was submitted first ended last."""
    first = cluster.submit(graph(bounded=True))
    for _ in range(limits.JOB_RESULTS_KEPT):
        job = cluster.submit(graph(bounded=True))
        cluster.report_all(job, "running")
        cluster.report_all(job, "finished")
        cluster.advance(0.1)
    cluster.report_all(first, "running")
    cluster.report_all(first, "finished")
    take_over(cluster, pair)
    assert cluster.request(DescribeResult(job=first)).terminal
    assert "were given up" in cluster.refusal(DescribeResult(job="j2"))[1]


def test_what_was_given_up_stays_so_and_a_worker_that_was_away_hears_of_it(
    cluster: FakeCluster, pair: Any
) -> None:
    job = cluster.submit(graph())
    cluster.journal_error = ResourceExhausted("the disk is full")
    cluster.report_all(job, "running")
    cluster.request(CancelJob(job=job))
    cluster.report(pair[0], (job, 0, 0), "canceled")
    cluster.report(pair[1], (job, 0, 1), "canceled")
    assert all(worker.got(DropResult) for worker in pair)
    cluster.journal_error = None
    cluster.write_again()
    take_over(cluster, pair)
    assert "were given up" in cluster.refusal(DescribeResult(job=job))[1]
    assert pair[0].got(DropResult)[1:] == [DropResult(term=cluster.term, job=job)]
