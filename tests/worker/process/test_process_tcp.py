"""Jobs with TCP flow control on two workers: which connections there are, what stops, and what goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import PeerLost
from minishuffle.exchange.elements import unpack_rows
from minishuffle.plan.graph import JobSettings
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.transport.tls import TlsStream
from minishuffle.wire.messages import CancelTasks, ReleaseJob
from minishuffle.wire.reports import Collected
from support.certificates import credentials

if TYPE_CHECKING:
    from conftest import Coordinator

TCP = JobSettings(
    flow_control="tcp", restart_strategy="none", buffers_per_channel=1, floating_buffers_per_gate=1
)
ROWS = 4_000
LONG = "x" * 2_000


class Gate:
    open = threading.Event()
    passed: Counter[int] = Counter()


def slow(row: tuple[int, Any]) -> tuple[int, Any]:
    """The rows of consumer 0 wait for the test."""
    if row[0] == 0:
        Gate.open.wait(60.0)
    Gate.passed[row[0]] += 1
    return row


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    Gate.open, Gate.passed = threading.Event(), Counter()
    yield
    Gate.open.set()


@pytest.fixture
def ever() -> list[DataLink]:
    """All that have been in ``one_way``."""
    return []


@pytest.fixture
def one_way(monkeypatch: pytest.MonkeyPatch, ever: list[DataLink]) -> list[DataLink]:
    """The one-way connections of both workers that are there, both ends."""
    there: list[DataLink] = []
    settled, closed = DataEndpoint.settled, DataEndpoint.closed

    def up(self: DataEndpoint, link: DataLink) -> None:
        settled(self, link)
        if link.one_way is not None:
            there.append(link)
            ever.append(link)

    def down(self: DataEndpoint, link: DataLink) -> None:
        closed(self, link)
        if link in there:
            there.remove(link)

    monkeypatch.setattr(DataEndpoint, "settled", up)
    monkeypatch.setattr(DataEndpoint, "closed", down)
    return there


def rows_for_each(payload: str = LONG, rows: int = ROWS) -> Stream[Any]:
    items = Stream.items([(number % 2, payload) for number in range(rows)])
    return items.partition(lambda row, consumers: row[0]).map(slow).collect()


def collected(coordinator: Coordinator) -> Counter[Any]:
    return Counter(row[0] for message in coordinator.said(Collected) for row in unpack_rows(message.payload))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "tls"), [(1, False), (2, True)], ids=["the producer dials", "the consumer dials, with TLS"]
)
async def test_a_consumer_that_stands_still_stops_its_sibling(
    coordinator: Coordinator, one_way: list[DataLink], producer: int, tls: bool
) -> None:
    """Subtasks of the source are on one worker, all consumers on the other."""
    if tls:
        await coordinator.lose()
        coordinator.tls = credentials()
        await coordinator.start_again()
    workers = {number: await coordinator.worker(number) for number in (1, 2)}
    consumer = 3 - producer
    stream = Stream.items([(number % 2, LONG) for number in range(ROWS)]).parallel(1)
    job = stream.partition(lambda row, consumers: 1 + row[0]).map(slow).parallel(3).collect()
    coordinator.deploy(job, {0: producer, 1: consumer, 2: consumer}, settings=TCP)
    await coordinator.until(lambda: workers[consumer].snapshot().one_way.stopped)
    found = workers[consumer].snapshot().one_way
    assert found[:2] == (0, 1) and found.held_bytes > 0 and found[3:] == (0, 0, 0.0)
    assert len(one_way) == 2 and {link.one_way.edge for link in one_way if link.one_way} == {0}
    assert {link.one_way.produces for link in one_way if link.one_way} == {producer == 1}
    assert [isinstance(link._connected, TlsStream) for link in one_way] == [tls, tls]
    # The sibling has had all that came before, and there is far more of its rows behind the head.
    await coordinator.until(lambda: Gate.passed[1] > 0)
    await coordinator.until(lambda: workers[producer].snapshot().one_way.window_closed_seconds)
    await coordinator.until(lambda: workers[producer].snapshot().one_way.paused)
    assert workers[producer].snapshot().one_way[:5] == (0, 0, 0, 0, 1)
    Gate.open.set()
    await coordinator.until(lambda: sum(collected(coordinator).values()) == ROWS)
    await coordinator.until(lambda: len(coordinator.ended()) == 4)
    coordinator.send(ReleaseJob(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: not one_way)
    await coordinator.until(lambda: not any(each.snapshot().tasks for each in workers.values()))
    assert collected(coordinator) == {0: ROWS // 2, 1: ROWS // 2}
    frames = workers[consumer].snapshot().remote
    assert "backlog_announcement" not in frames.frames_in and "add_credit" not in frames.frames_out
    assert frames.frames_out["cancel_partition_request"] == 2  # requests and receipts go the ordinary way
    await coordinator.close()


async def test_a_job_that_stands_still_is_cancelled_at_once(
    coordinator: Coordinator, one_way: list[DataLink]
) -> None:
    workers = [await coordinator.worker(number) for number in (1, 2)]
    coordinator.deploy(rows_for_each(), {0: 1, 1: 2}, settings=TCP)
    job = "j2"
    stuck = (
        Stream.items([(0, LONG)] * ROWS).parallel(1).partition(lambda row, consumers: 1).map(slow).collect()
    )
    coordinator.deploy(stuck, {0: 1, 1: 2}, job=job, settings=TCP)
    await coordinator.until(lambda: workers[1].snapshot().one_way.stopped == 1)
    Gate.open.set()  # threads end when they are cancelled: what is in the connection goes with its channel
    coordinator.send(CancelTasks(term=coordinator.term, job=job))
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended(job)) >= 2)
    for each in ("j1", job):
        coordinator.send(ReleaseJob(term=coordinator.term, job=each))
    await coordinator.until(lambda: not one_way)
    await coordinator.until(lambda: all(not each.snapshot().tasks for each in workers))
    await coordinator.close()


async def test_a_connection_that_breaks_has_its_own_channels_attached_again(
    coordinator: Coordinator, one_way: list[DataLink], ever: list[DataLink]
) -> None:
    for number in (1, 2):
        await coordinator.worker(number)
    settings = TCP.model_copy(update={"restart_strategy": "individual", "on_unavailable": "wait"})
    items = Stream.items([(0, LONG)] * ROWS).parallel(1)
    job = items.partition(lambda row, consumers: 1).map(slow).partition(lambda row, consumers: 0)
    tasks = coordinator.deploy(job.map(lambda row: row).collect(), {0: 1, 1: 2}, settings=settings)
    await coordinator.until(lambda: len(one_way) == 6)
    broken = [link for link in one_way if link.one_way and link.one_way.edge == 0]
    assert len(broken) == 2, "edge 1 has a connection each way"
    broken[0].abort(PeerLost("the test broke it"))
    await coordinator.until(lambda: not set(broken) & set(one_way))
    Gate.open.set()  # the task reads that the connection is gone before it is attached again
    await coordinator.until(lambda: len(ever) == 8)
    assert [link.one_way.edge for link in ever[6:] if link.one_way] == [0, 0]
    await coordinator.until(lambda: coordinator.ended() == ["finished"] * tasks)
    coordinator.send(ReleaseJob(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: not one_way)
    await coordinator.close()
