"""Kept results of a sink that restarts: numbers go on, readers follow the parts, what is lost is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph, Vertex
from minishuffle.wire.clients import (
    CommitResult,
    DescribeResult,
    FreeRows,
    KeptRows,
    OpenResult,
    ResultExpected,
    ServeResult,
)
from minishuffle.wire.messages import ErrorInfo, TaskReport
from minishuffle.wire.requests import Accepted

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

TERM = 7
BOOM = ErrorInfo(code=60, text="boom")
FIRST = ("j1", 0, 0)


def graph() -> JobGraph:
    """One vertex: an endless source whose two subtasks keep what they make."""
    vertex = Vertex(
        name="make -> to_spark",
        parallelism=2,
        operators=["to_spark"],
        is_source=True,
        bounded=False,
        program=b"",
        sink="result",
        sink_schema=b"schema",
    )
    return JobGraph(vertices=[vertex], edges=[])


def keeps(cluster: FakeCluster, worker: FakeWorker, rows: int, attempt: int = 1) -> None:
    """A heartbeat tells what subtask 0 has."""
    counters = TaskCounters(rows_kept=rows)
    report = TaskReport(attempt=AttemptId.of("j1", 0, 0, attempt), counters=counters)
    cluster.heartbeat(worker, [report])


def kept(cluster: FakeCluster) -> KeptRows:
    found: KeptRows = cluster.request(DescribeResult(job="j1")).subtasks[0]
    return found


def opened(cluster: FakeCluster, worker: FakeWorker | None, begin: int, end: int) -> Any:
    """The answer to a reader of subtask 0, once the worker expects it; and what that worker was asked."""
    request = cluster.ask(OpenResult(job="j1", sink="result", subtask=0, begin=begin, end=end))
    if worker is None:
        return cluster.reply(request)
    serve = worker.got(ServeResult)[-1]
    cluster.send(worker, ResultExpected(term=TERM, ticket=serve.ticket))
    return cluster.reply(request), serve


def test_the_next_attempt_numbers_on_above_what_readers_know(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    keeps(cluster, pair[0], 70)
    assert kept(cluster).end == 70
    cluster.lose(pair[0])
    assert pair[1].tasks["j1", 0, 0].first_row == 70
    assert kept(cluster) == KeptRows(subtask=0, begin=0, end=70, lost=70), "nothing goes back"
    keeps(cluster, pair[1], 90, attempt=2)
    assert kept(cluster) == KeptRows(subtask=0, begin=0, end=90, lost=70)


def test_what_is_lost_with_a_worker_is_not_lost_with_the_next_of_its_id(cluster: FakeCluster) -> None:
    worker = cluster.add(slots=2, requested_worker=1)
    cluster.add(slots=2, requested_worker=2)
    cluster.submit(graph())
    keeps(cluster, worker, 70)
    for _ in range(3):
        cluster.lose(worker)
        assert cluster.show("j1").rows_dropped == {"result_lost": 70}
        worker = cluster.add(slots=2, requested_worker=1)


def test_what_is_lost_is_said_to_readers_and_the_rest_is_where_the_task_is(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph())
    keeps(cluster, pair[0], 70)
    cluster.lose(pair[0])
    keeps(cluster, pair[1], 90, attempt=2)
    lost = opened(cluster, None, 10, 90)
    assert lost.end == 70 and "worker 1, which kept rows of job j1 (count words), is gone" in lost.lost
    rest, serve = opened(cluster, pair[1], 70, 90)
    assert (rest.end, rest.lost, rest.worker.worker) == (90, "", 2)
    assert (serve.task_attempt, serve.begin, serve.end) == (2, 70, 90)


def test_what_an_attempt_kept_that_failed_can_still_be_read(cluster: FakeCluster, pair: Any) -> None:
    """Its worker lives: the last report says how far it came."""
    cluster.submit(graph())
    keeps(cluster, pair[0], 70)
    cluster.report(pair[0], FIRST, "failed", error=BOOM, counters=TaskCounters(rows_kept=75))
    assert pair[0].tasks["j1", 0, 0].first_row == 75
    keeps(cluster, pair[0], 90, attempt=2)
    first, serve = opened(cluster, pair[0], 10, 90)
    assert (first.end, serve.task_attempt, serve.end) == (75, 1, 75)
    second, serve = opened(cluster, pair[0], 75, 90)
    assert (second.end, serve.task_attempt) == (90, 2)
    assert kept(cluster).lost == 0


def test_a_commit_frees_every_part(cluster: FakeCluster, pair: Any) -> None:
    """And a part that nobody will read again is forgotten."""
    cluster.submit(graph())
    cluster.report(pair[0], FIRST, "failed", error=BOOM, counters=TaskCounters(rows_kept=75))
    keeps(cluster, pair[0], 200, attempt=2)
    for offset in (50, 80, 90, 100):
        accepted = cluster.request(CommitResult(job="j1", sink="result", offsets={0: offset}))
        assert accepted == Accepted(job="j1")
    frees = [(free.task_attempt, free.begin, free.read) for free in pair[0].got(FreeRows)]
    assert frees[:4] == [(1, 0, 50), (2, 0, 50), (1, 0, 80), (2, 0, 80)]
    assert frees[-1] == (2, 80, 100) and (1, 80, 100) in frees
    count = len(frees)
    cluster.request(CommitResult(job="j1", sink="result", offsets={0: 110}))
    assert [free.task_attempt for free in pair[0].got(FreeRows)[count:]] == [2]


@pytest.mark.parametrize(("committed", "lost"), [(0, 70), (30, 40), (70, 0)])
def test_rows_are_counted_as_lost_unless_a_reader_had_dealt_with_them(
    cluster: FakeCluster, pair: Any, committed: int, lost: int
) -> None:
    cluster.submit(graph())
    keeps(cluster, pair[0], 70)
    if committed:
        cluster.request(CommitResult(job="j1", sink="result", offsets={0: committed}))
    cluster.lose(pair[0])
    assert cluster.show("j1").rows_dropped.get("result_lost", 0) == lost
    cluster.lose(pair[1])
    assert cluster.show("j1").rows_dropped.get("result_lost", 0) == lost, "counted once"
