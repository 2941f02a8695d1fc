"""Streams that are written while their coordinator is lost, and the next one takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minishuffle import limits
from minishuffle.plan.graph import JobGraph, JobSettings, Vertex
from minishuffle.wire.clients import (
    ROWS_FORGOTTEN,
    BeginWrite,
    CommitWrite,
    EndStream,
    EndWrite,
    ExpectUpstream,
    OpenUpstream,
    UpstreamExpected,
    UpstreamOpened,
    WriteBegun,
    WriteEnded,
)
from minishuffle.wire.requests import Accepted

if TYPE_CHECKING:
    from conftest import FakeCluster


def graph(bounded: bool = False) -> JobGraph:
    """Two subtasks read a stream, and that is all."""
    source = Vertex(
        name="from_spark orders",
        parallelism=2,
        operators=["from_spark"],
        is_source=True,
        bounded=bounded,
        program=b"",
        stream="orders",
        stream_schema=b"schema",
    )
    return JobGraph(vertices=[source], edges=[], settings=JobSettings(restart_strategy="individual"))


def opening(partition: int = 0, write: str = "w") -> OpenUpstream:
    return OpenUpstream(
        stream="orders", write=write, partition=partition, partitions=4, attempt=1, schema_message=b"schema"
    )


def committing(write: str = "w", *partitions: int) -> CommitWrite:
    return CommitWrite(stream="orders", write=write, partitions=list(partitions))


def answer_ends(cluster: FakeCluster, pair: Any) -> None:
    for worker in pair:
        ticket = worker.got(EndWrite)[-1].ticket
        cluster.send(worker, WriteEnded(term=cluster.term, ticket=ticket, missing=[]))


def take_over(cluster: FakeCluster, pair: Any) -> None:
    """The coordinator is killed, and the workers come back to the next one."""
    before = {key: record for key, record in cluster.journal.items() if key[0] == "stream"}
    assert before
    cluster.lose_coordinator()
    assert before.items() <= cluster.journal.items(), "it remembers the same"
    for worker in pair:
        worker.inbox.clear()
        cluster.come_back(worker)


def begins(worker: Any) -> list[tuple[str, int]]:
    return [(message.write, message.task_attempt) for message in worker.got(BeginWrite)]


def test_a_write_goes_on_and_is_committed(cluster: FakeCluster, pair: Any) -> None:
    """Each subtask hears of it again: the message to a new attempt may have been lost."""
    cluster.submit(graph())
    cluster.ask(opening())
    take_over(cluster, pair)
    assert [begins(worker) for worker in pair] == [[("w", 1)], [("w", 1)]]
    asked = cluster.ask(opening(1))
    (expect,) = pair[1].got(ExpectUpstream)
    assert len(pair[0].got(BeginWrite)) == 1, "it has begun"
    cluster.send(pair[1], UpstreamExpected(term=cluster.term, ticket=expect.ticket, rows=5))
    assert isinstance(cluster.reply(asked), UpstreamOpened) and cluster.reply(asked).rows == 5
    commit = cluster.ask(committing("w", 0, 1))
    answer_ends(cluster, pair)
    assert cluster.reply(commit) == Accepted(job="j1")


def test_a_write_that_had_not_begun_everywhere_begins_before_rows_of_it_come(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.writes_begin = False
    cluster.submit(graph())
    cluster.ask(opening())
    take_over(cluster, pair)
    asked = cluster.ask(opening())
    assert not pair[0].got(ExpectUpstream)
    for worker in pair:
        ticket = worker.got(BeginWrite)[-1].ticket
        cluster.send(worker, WriteBegun(term=cluster.term, ticket=ticket))
    (expect,) = pair[0].got(ExpectUpstream)
    cluster.send(pair[0], UpstreamExpected(term=cluster.term, ticket=expect.ticket))
    assert isinstance(cluster.reply(asked), UpstreamOpened)


def test_a_bounded_stream_ends_although_its_end_was_on_the_way(cluster: FakeCluster, pair: Any) -> None:
    """All partitions are there, and no subtask has heard that nothing more comes."""
    cluster.submit(graph(bounded=True))
    cluster.ask(opening())
    cluster.ask(committing("w", 0))
    answer_ends(cluster, pair)
    assert [worker.got(EndWrite)[-1].last for worker in pair] == [True, True]
    take_over(cluster, pair)
    assert [worker.got(EndWrite)[-1].last for worker in pair] == [True, True]
    assert cluster.request(committing("w", 0)) == Accepted(job="j1"), "asked again, since no answer came"
    assert "it was committed already" in cluster.refusal(opening(write="another"))[1]


def test_a_bounded_stream_stays_that_of_the_save_that_writes_it(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph(bounded=True))
    cluster.ask(opening())
    take_over(cluster, pair)
    assert "is being written by another save" in cluster.refusal(opening(write="another"))[1]


def test_a_task_that_was_lost_meanwhile_hears_of_writes_that_ended_before(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph())
    for write in ("query/1", "query/2"):
        cluster.ask(opening(write=write))
    commit = cluster.ask(committing("query/1", 0))
    answer_ends(cluster, pair)
    assert cluster.reply(commit) == Accepted(job="j1")
    cluster.ask(EndStream(stream="orders"))
    take_over(cluster, [pair[1]])
    cluster.advance(cluster.settings.heartbeat_timeout + 0.5)
    assert [each for each in begins(pair[1]) if each[1] == 2] == [("query/1", 2), ("query/2", 2)]
    ends = [(end.write, end.last) for end in pair[1].got(EndWrite) if end.task_attempt == 2]
    assert ends == [("query/1", False), ("", True)]


def test_batches_of_long_ago_stay_complete(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    for batch in range(limits.WRITES_KEPT + 2):
        cluster.ask(opening(write=f"query/{batch}"))
        commit = cluster.ask(committing(f"query/{batch}"))
        answer_ends(cluster, pair)
        assert cluster.reply(commit) == Accepted(job="j1")
    take_over(cluster, pair)
    opened = cluster.request(opening(write="query/0"))
    assert (opened.complete, opened.rows) == (True, ROWS_FORGOTTEN)


def test_how_a_stream_ended_is_still_known(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    cluster.report_all("j1", "running")
    cluster.ask(EndStream(stream="orders"))
    cluster.report_all("j1", "finished")
    take_over(cluster, pair)
    assert "stream 'orders' has ended: its job j1 (count words) is finished" in cluster.refusal(opening())[1]
    assert cluster.request(committing("w")) == Accepted(job="j1"), "the last commit of a query"
