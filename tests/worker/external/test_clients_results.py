"""Readers at a worker's door: who is expected, what they may ask for, and what is left when they go."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ResourceExhausted,
    ShuffleError,
    UsageError,
)
from minishuffle.exchange.spool import Spool
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.clients import DropResult, FreeRows, ResultExpected, ServeResult
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import ControlMessage
from minishuffle.worker.external.clients import ResultReaders

if TYPE_CHECKING:
    from conftest import Site

ROWS = 20_000


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class FakeLink:
    """A proven connection of client ``ticket``; what is attached is read by the test."""

    def __init__(self, ticket: int) -> None:
        self.peer = SimpleNamespace(worker=ticket)
        self.connection = self
        self.attached: Any = None
        self.refused: ShuffleError | None = None
        self.failed: ShuffleError | None = None
        self.aborted: ShuffleError | None = None

    def attach(self, channel: int, view: Any) -> None:
        self.attached = view

    def refuse(self, channel: int, error: ShuffleError) -> None:
        self.refused = error

    def fail_producer(self, channel: int, error: ShuffleError) -> None:
        self.failed = error

    def abort(self, error: ShuffleError) -> None:
        self.aborted = error

    def available(self, channel: int) -> None: ...

    def flush_soon(self) -> None: ...


class Door:
    """The readers of a worker that keeps 20,000 rows of job j1, operator 0."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.answers: list[ResultExpected] = []
        self.readers: Any = ResultReaders(lambda: 1, site.deployment, site.inbox, self._send)

    def _send(self, message: ControlMessage) -> None:
        assert isinstance(message, ResultExpected)
        self.answers.append(message)

    def expect(self, ticket: int, begin: int = 0, end: int = ROWS, job: str = "j1") -> ResultExpected:
        serve = ServeResult(
            term=1, job=job, operator=0, index=0, task_attempt=1, ticket=ticket, begin=begin, end=end
        )
        self.readers.serve(serve)
        assert self.answers[-1].ticket == ticket
        return self.answers[-1]

    def come(self, ticket: int) -> FakeLink:
        link = FakeLink(ticket)
        self.readers.link_up(link)
        return link

    def ask(self, link: FakeLink, job: str = "j1", producer: int = 0) -> FakeLink:
        self.readers.requested(link, PartitionRequest(PartitionId(JobId(job), 0, producer), 0, channel=1))
        return link

    async def gone(self) -> None:
        """Everything that readers took is back."""
        pool = self.readers.pool
        await self.site.until(lambda: not pool.required)
        await self.site.until(lambda: pool.free == pool.total)


@pytest.fixture
async def door(site: Site) -> AsyncIterator[Door]:
    table = Stream.items([{"n": n} for n in range(ROWS)]).to_table({"n": "int64"})
    (outcome,) = await site.run(table.to_spark())
    assert outcome.state == "finished"
    site.release()
    yield Door(site)
    site.deployment.drop_spools("j1")


async def test_a_reader_gets_its_rows_under_the_bound_of_a_pool(door: Door) -> None:
    assert door.expect(7) == ResultExpected(term=1, ticket=7, segment_bytes=1024)
    link = door.ask(door.come(7))
    size, ended = 0, False
    while not ended:
        await door.site.until(lambda: link.attached.next_type() is not NextType.NONE)
        piece = link.attached.poll()
        ended = not piece.rows and piece.size == 1 and link.attached.next_type() is NextType.NONE
        size += piece.size
        piece.released()
    assert size > 2 * ROWS, "they need 16 bits each"
    door.readers.link_down(link)
    await door.gone()


async def test_a_reader_that_takes_nothing_leaves_nothing(door: Door) -> None:
    door.expect(7)
    link = door.ask(door.come(7))
    await door.site.until(lambda: link.attached.backlog() > 10)
    door.readers.link_down(link)
    door.readers.link_down(link)
    await door.gone()


async def test_a_reader_for_whom_there_is_no_thread_is_refused_and_leaves_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    door.expect(7)
    link = door.come(7)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        door.ask(link)
    assert isinstance(link.refused, ResourceExhausted)
    assert "can't start new thread" in str(link.refused)
    door.readers.link_down(link)
    await door.gone()
    assert door.expect(8).error is None


async def test_a_reader_takes_nothing_of_what_is_promised_to_jobs(door: Door) -> None:
    """The coordinator does not know of it: a job may need all of the network memory."""
    door.expect(7)
    link = door.ask(door.come(7))
    await door.site.until(lambda: link.attached.backlog() > 10)
    pool = door.site.pool
    job = pool.create_pool("job", pool.total, pool.total)
    segments = [segment for _ in range(pool.total) if (segment := job.request()) is not None]
    assert len(segments) == pool.total
    door.expect(8)
    late = door.ask(door.come(8))
    await door.site.until(lambda: late.attached is not None and late.attached.backlog() > 10)
    for each in (link, late):
        door.readers.link_down(each)
    await door.gone()
    for segment in segments:
        job.recycle(segment)
    job.destroy()


async def test_the_end_of_the_worker_ends_its_readers(door: Door) -> None:
    door.expect(7)
    link = door.ask(door.come(7))
    (thread,) = door.readers.close()
    await door.site.until(lambda: not thread.is_alive())
    door.readers.link_down(link)
    await door.gone()


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"job": "j2"}, PeerLost, "keeps no results of job j2"),
        ({"end": ROWS + 1}, UsageError, "rows 0 to 20001 were asked for, and there are 20000"),
    ],
)
async def test_what_is_not_there_is_refused(
    door: Door, asked: dict[str, Any], kind: type[ShuffleError], text: str
) -> None:
    error = door.expect(7, **asked).error
    assert error is not None and error.code == kind.code and text in error.text
    assert not door.readers.ticket(7)


async def test_readers_are_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESULT_READERS_MAX", 2)
    door.expect(1)
    door.expect(2)
    links = [door.ask(door.come(1)), door.come(2)]
    error = door.expect(3).error
    assert error is not None and error.code == ResourceExhausted.code
    for link in links:
        door.readers.link_down(link)
    assert door.expect(4).error is None
    await door.gone()


@pytest.mark.parametrize("asked", [{"job": "j2"}, {"producer": 1}])
async def test_another_partition_than_the_tickets_is_refused(door: Door, asked: dict[str, Any]) -> None:
    door.expect(7)
    link = door.ask(door.come(7), **asked)
    assert isinstance(link.refused, RemoteProtocolError) and link.attached is None
    await door.gone()


async def test_a_ticket_is_good_for_one_connection_and_one_request(door: Door) -> None:
    door.expect(7)
    link = door.ask(door.come(7))
    assert isinstance(door.come(7).aborted, PeerLost)
    assert isinstance(door.ask(link).refused, RemoteProtocolError)
    door.readers.link_down(link)
    await door.gone()


async def test_rows_that_are_given_up_meanwhile_fail_the_reader(door: Door) -> None:
    door.expect(7)
    door.readers.serve(FreeRows(term=1, job="j1", operator=0, index=0, task_attempt=1, begin=5, read=5))
    link = door.ask(door.come(7))
    await door.site.until(lambda: link.failed)
    assert isinstance(link.failed, UsageError) and "below 5 were given up" in str(link.failed)
    door.readers.link_down(link)
    await door.gone()


@pytest.mark.parametrize("kind", [MemoryError, OSError])
async def test_a_reader_is_told_whatever_keeps_its_rows_from_it(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    def read(spool: Spool, begin: int, end: int) -> Iterator[Any]:
        raise kind("no more")
        yield

    monkeypatch.setattr(Spool, "read", read)
    door.expect(7)
    link = door.ask(door.come(7))
    await door.site.until(lambda: link.failed)
    assert isinstance(link.failed, ResourceExhausted)
    assert f"the rows cannot be read: {kind.__name__}: no more" in str(link.failed)
    assert "the rows of client 7 cannot be read" in caplog.text
    caplog.clear()  # the traceback there holds the spool
    door.readers.link_down(link)
    await door.gone()


async def test_a_result_that_is_dropped_is_there_for_nobody_new(door: Door) -> None:
    door.expect(7)
    door.readers.serve(DropResult(term=1, job="j1"))
    assert not door.site.deployment.spools
    link = door.ask(door.come(7))
    assert isinstance(link.refused, PeerLost)
    assert door.expect(8).error is not None
    await door.gone()


async def test_a_result_that_is_dropped_takes_no_room_also_while_its_attempt_is_there(site: Site) -> None:
    table = Stream.items([{"n": n} for n in range(ROWS)]).to_table({"n": "int64"})
    before = open_files()
    await site.run(table.to_spark())
    assert site.deployment.attempts and len(open_files() - before) == 1
    site.deployment.drop_spools("j1")
    await site.until(lambda: open_files() <= before)
    assert site.deployment.attempts


async def test_readers_that_never_come_are_forgotten(
    door: Door, monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setattr(limits, "EXTERNAL_TICKETS_MAX", 2)
    for ticket in (1, 2, 3):
        door.expect(ticket)
    assert [door.readers.ticket(ticket) is not None for ticket in (1, 2, 3)] == [False, True, True]
