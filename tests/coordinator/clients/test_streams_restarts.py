"""Streams whose tasks restart: what the next attempt hears, and what becomes of requests under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Guarantee, JobGraph, JobSettings, Vertex
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
from minishuffle.wire.messages import ErrorInfo, TaskReport
from minishuffle.wire.packed import Cursor, SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import SourcePositions
from minishuffle.wire.requests import Accepted, GetEvents

if TYPE_CHECKING:
    from conftest import FakeCluster

TERM = 7
BOOM = ErrorInfo(code=60, text="boom")
FIRST = ("j1", 0, 0)


def graph(lease: int | None = None, bounded: bool = False, guarantee: Guarantee = "loss") -> JobGraph:
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
    return JobGraph(
        vertices=[source], edges=[], settings=JobSettings(source_lease=lease, guarantee=guarantee)
    )


def opening(partition: int = 0, write: str = "w", **fields: Any) -> OpenUpstream:
    values = {"partitions": 4, "attempt": 1, "schema_message": b"schema", **fields}
    return OpenUpstream(stream="orders", write=write, partition=partition, **values)


def moved(cluster: FakeCluster, worker: Any, *entries: SplitPosition, attempt: int = 1) -> None:
    source = AttemptId.of("j1", 0, 0, attempt)
    cluster.fact(worker, SourcePositions(attempt=source, positions=pack_positions(entries), waits=True))


def position(
    partition: int, rows: int, lease: int = 0, done: bool = False, write: str = "w", checksum: bytes = b""
) -> SplitPosition:
    return SplitPosition(partition, rows, lease, done, Cursor(f"{write}/{partition}", checksum, rows))


def resumed(worker: Any) -> list[SplitPosition]:
    """Where its attempt of subtask 0 goes on."""
    return unpack_positions(worker.tasks[FIRST].positions)


def commit(cluster: FakeCluster, workers: Any, write: str) -> None:
    request = cluster.ask(CommitWrite(stream="orders", write=write, partitions=[0]))
    for worker in workers:
        ticket = worker.got(EndWrite)[-1].ticket
        cluster.send(worker, WriteEnded(term=TERM, ticket=ticket, missing=[]))
    assert cluster.reply(request) == Accepted(job="j1")


# --- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lease", "left"), [(None, 50), (0, 0)])
def test_the_next_attempt_goes_on_behind_the_lease_of_one_that_died(
    cluster: FakeCluster, pair: Any, lease: int | None, left: int
) -> None:
    """Or at the position, if rows may be repeated; what is complete stays so."""
    cluster.submit(graph(lease))
    cluster.ask(opening())
    complete = position(2, 7, done=True, checksum=b"6")
    moved(cluster, pair[0], position(0, 60, lease=50, checksum=b"4"), complete)
    moved(cluster, pair[0], position(0, 100, lease=50, checksum=b"5"))
    cluster.lose(pair[0])
    assert pair[1].tasks[FIRST].attempt == 2
    assert resumed(pair[1]) == [position(0, 100, left, checksum=b"5"), complete]
    assert cluster.show("j1").rows_in_flight == 100 + 50 + 7


def test_the_last_report_of_an_attempt_that_failed_is_exact(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    moved(cluster, pair[0], position(0, 60, lease=50))
    exact = position(0, 80, checksum=b"3")
    cluster.report(pair[0], FIRST, "failed", error=BOOM, positions=pack_positions([exact]))
    assert resumed(pair[0]) == [exact]


def test_reports_of_an_attempt_that_was_replaced_change_nothing(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    cluster.report(pair[0], FIRST, "failed", error=BOOM, positions=pack_positions([position(0, 80)]))
    moved(cluster, pair[0], position(0, 90))
    cluster.lose(pair[0])
    assert resumed(pair[1]) == [position(0, 80)]


# --- what is asked again -------------------------------------------------------------------------


def test_a_writer_is_sent_to_the_attempt_that_takes_the_place(cluster: FakeCluster, pair: Any) -> None:
    """What the attempt before answers late counts for nothing."""
    cluster.submit(graph())
    asked = cluster.ask(opening())
    (old,) = pair[0].got(ExpectUpstream)
    cluster.report(pair[0], FIRST, "failed", error=BOOM)
    (old, new) = pair[0].got(ExpectUpstream)
    assert (old.task_attempt, new.task_attempt) == (1, 2) and new.ticket != old.ticket
    late = UpstreamExpected(term=TERM, ticket=old.ticket, rows=3)
    cluster.send(pair[0], late)
    assert cluster.reply(asked) is None, "that was the attempt before"
    cluster.send(pair[0], UpstreamExpected(term=TERM, ticket=new.ticket, rows=5, base=2))
    opened = cluster.reply(asked)
    assert isinstance(opened, UpstreamOpened)
    assert (opened.ticket, opened.rows, opened.base, opened.worker.worker) == (new.ticket, 5, 2, 1)


def test_a_request_for_a_task_without_a_worker_waits_for_one(make_cluster: Any) -> None:
    cluster = make_cluster()
    pair = [cluster.add(slots=1), cluster.add(slots=1)]
    cluster.submit(graph())
    cluster.ask(opening(1))
    cluster.lose(pair[0])
    waiting = cluster.ask(opening(0, connection=1, sent=9))
    third = cluster.add(slots=1)
    (begin,) = third.got(BeginWrite)
    (expect,) = third.got(ExpectUpstream)
    assert (begin.write, begin.partitions, begin.task_attempt) == ("w", 4, 2)
    assert begin.known == ["w"], "of others that its snapshot has nothing comes any more"
    assert (expect.partition, expect.task_attempt, expect.connection, expect.sent) == (0, 2, 1, 9)
    cluster.send(third, UpstreamExpected(term=TERM, ticket=expect.ticket))
    assert cluster.reply(waiting).worker.worker == third.worker


def test_a_write_begins_although_a_task_restarts_meanwhile(cluster: FakeCluster, pair: Any) -> None:
    cluster.writes_begin = False
    cluster.submit(graph())
    cluster.ask(opening(1))
    begin = pair[1].got(BeginWrite)[-1]
    cluster.send(pair[1], WriteBegun(term=TERM, ticket=begin.ticket))
    assert not pair[1].got(ExpectUpstream)
    cluster.lose(pair[0])
    begin = pair[1].got(BeginWrite)[-1]
    assert (begin.index, begin.task_attempt) == (0, 2)
    cluster.send(pair[1], WriteBegun(term=TERM, ticket=begin.ticket))
    assert [message.partition for message in pair[1].got(ExpectUpstream)] == [1]


def test_a_commit_is_asked_of_the_attempt_that_takes_the_place(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    cluster.ask(opening())
    request = cluster.ask(CommitWrite(stream="orders", write="w", partitions=[0, 1]))
    (end,) = pair[1].got(EndWrite)
    cluster.send(pair[1], WriteEnded(term=TERM, ticket=end.ticket, missing=[]))
    cluster.lose(pair[0])
    end = pair[1].got(EndWrite)[-1]
    assert (end.index, end.task_attempt, end.partitions) == (0, 2, [0])
    assert cluster.reply(request) is None
    cluster.send(pair[1], WriteEnded(term=TERM, ticket=end.ticket, missing=[]))
    assert cluster.reply(request) == Accepted(job="j1")


def test_the_next_attempt_hears_of_writes_that_have_ended_and_of_the_end(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph())
    for write in ("query/1", "query/2"):
        cluster.ask(opening(write=write))
    commit(cluster, pair, "query/1")
    cluster.ask(EndStream(stream="orders"))
    for worker in pair:
        ticket = worker.got(EndWrite)[-1].ticket
        cluster.send(worker, WriteEnded(term=TERM, ticket=ticket, missing=[]))
    pair[1].inbox.clear()
    cluster.lose(pair[0])
    assert [message.write for message in pair[1].got(BeginWrite)] == ["query/1", "query/2"]
    ends = [(message.write, message.last, message.task_attempt) for message in pair[1].got(EndWrite)]
    assert ends == [("query/1", False, 2), ("", True, 2)]


@pytest.mark.parametrize("is_taken_over", [False, True])
@pytest.mark.parametrize("guarantee", ["loss", "at_least_once"])
def test_a_program_is_let_in_again_behind_the_end_of_the_stream_unless_rows_may_be_lost(
    cluster: FakeCluster, pair: Any, guarantee: Guarantee, *, is_taken_over: bool
) -> None:
    cluster.submit(graph(guarantee=guarantee))
    cluster.ask(opening())
    expect = pair[0].got(ExpectUpstream)[-1]
    cluster.send(pair[0], UpstreamExpected(term=TERM, ticket=expect.ticket))
    cluster.ask(EndStream(stream="orders"))
    for worker in pair:
        cluster.send(worker, WriteEnded(term=TERM, ticket=worker.got(EndWrite)[-1].ticket, missing=[]))
    if is_taken_over:
        cluster.lose_coordinator()
        for worker in pair:
            cluster.come_back(worker)
    pair[1].inbox.clear()
    cluster.lose(pair[0])
    (begin,) = pair[1].got(BeginWrite)
    first = opening(connection=1)
    late = "stream 'orders' has ended"
    assert late in cluster.request(opening(2)).text
    if guarantee == "loss":
        assert begin.opened == [] and late in cluster.request(first).text
    else:
        assert begin.opened == [0] and cluster.ask(first)
        assert pair[1].got(ExpectUpstream)[-1].partition == 0


@pytest.mark.parametrize("has_ended", [False, True])
def test_nobody_waits_for_a_bounded_stream_that_has_ended_and_whose_program_is_gone(
    cluster: FakeCluster, pair: Any, *, has_ended: bool
) -> None:
    cluster.submit(graph(bounded=True, guarantee="at_least_once"))
    cluster.report_all("j1", "running")
    cluster.ask(opening())
    if has_ended:
        cluster.ask(EndStream(stream="orders"))
    for _ in range(2):
        cluster.now += 2 * limits.WRITE_IDLE_SECONDS
        connected(cluster, pair[0])
    assert [begun(worker)[-1] for worker in pair] == [("w", has_ended), ("w", has_ended)]


def test_a_lost_task_that_had_finished_has_nothing_to_say_of_a_commit(
    cluster: FakeCluster, pair: Any
) -> None:
    """Its rows were taken by then: nobody asks it again, and the other answers."""
    cluster.submit(graph())
    cluster.ask(opening())
    ended = cluster.ask(EndStream(stream="orders"))
    first, second = (worker.got(EndWrite)[-1] for worker in pair)
    cluster.send(pair[0], WriteEnded(term=TERM, ticket=first.ticket, missing=[]))
    cluster.report(pair[0], FIRST, "finished")
    late = cluster.ask(CommitWrite(stream="orders", write="w", partitions=[0]))
    cluster.lose(pair[0])
    cluster.send(pair[1], WriteEnded(term=TERM, ticket=second.ticket, missing=[]))
    assert cluster.reply(ended) == Accepted(job="j1")
    third = pair[1].got(EndWrite)[-1]
    cluster.send(pair[1], WriteEnded(term=TERM, ticket=third.ticket, missing=[]))
    assert cluster.reply(late) == Accepted(job="j1")


def test_a_batch_that_ended_long_ago_is_complete_for_every_attempt(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    for batch in range(limits.WRITES_KEPT + 2):
        cluster.ask(opening(write=f"query/{batch}"))
        entry = position(0, 1, done=True, write=f"query/{batch}")._replace(split=batch)
        moved(cluster, pair[0], entry)
        commit(cluster, pair, f"query/{batch}")
    cluster.lose(pair[0])
    kept = [entry.split for entry in resumed(pair[1])]
    assert kept[0] != 0 and len(kept) == limits.WRITES_KEPT
    told = [name for message in pair[0].got(BeginWrite) for name in message.forgotten]
    assert told == ["query/0", "query/1"]
    pair[1].inbox.clear()
    opened = cluster.request(opening(write="query/0"))
    assert (opened.complete, opened.rows) == (True, ROWS_FORGOTTEN)
    assert cluster.request(CommitWrite(stream="orders", write="query/0", partitions=[0])) == Accepted(
        job="j1"
    )
    assert not pair[1].inbox


# --- a program that is gone ----------------------------------------------------------------------


def connected(cluster: FakeCluster, worker: Any, *writes: str) -> None:
    """A heartbeat says who is connected to subtask 0."""
    source = AttemptId.of("j1", 0, 0, 1)
    cluster.heartbeat(worker, [TaskReport(attempt=source, counters=TaskCounters(), writes=list(writes))])


def begun(worker: Any) -> list[tuple[str, bool]]:
    return [(message.write, message.idle) for message in worker.got(BeginWrite)]


def test_nobody_waits_for_a_write_whose_program_is_gone_until_it_asks_again(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph())
    cluster.report_all("j1", "running")
    first = next(worker for worker in pair if FIRST in worker.tasks)
    for write in ("gone", "there"):
        cluster.ask(opening(write=write))
    before = {worker.worker: begun(worker) for worker in pair}
    connected(cluster, first, "gone", "there")
    cluster.now += 2 * limits.WRITE_IDLE_SECONDS / 3
    connected(cluster, first, "there")
    assert {worker.worker: begun(worker) for worker in pair} == before
    for _ in range(2):
        cluster.now += 2 * limits.WRITE_IDLE_SECONDS / 3
        connected(cluster, first, "there")
        for worker in pair:
            assert begun(worker) == [*before[worker.worker], ("gone", True)]
    events = [
        event.text for event in cluster.request(GetEvents(job="j1")).events if event.kind == "write idle"
    ]
    assert len(events) == 1 and "write gone of stream 'orders'" in events[0]
    heard = len(first.inbox)
    cluster.ask(opening(write="gone", connection=1))
    *begins, expect = first.inbox[heard:]
    assert isinstance(expect, ExpectUpstream), "it is let in once everybody waits for it again"
    assert [(each.write, each.idle) for each in begins if isinstance(each, BeginWrite)] == (
        [("gone", False)] * len(begins)
    )
    for worker in pair:
        assert begun(worker)[-1] == ("gone", False)


def test_the_next_attempt_hears_which_writes_are_idle(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph())
    cluster.report_all("j1", "running")
    first = next(worker for worker in pair if FIRST in worker.tasks)
    cluster.ask(opening(write="gone"))
    connected(cluster, first)
    cluster.now += 2 * limits.WRITE_IDLE_SECONDS
    connected(cluster, first)
    cluster.report(first, FIRST, "failed", error=BOOM)
    assert first.tasks[FIRST].attempt == 2
    assert begun(first)[-1] == ("gone", True)
