"""Which one-way connections there are, who dials them, and when they end, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from minishuffle.counters import ConnectionCounters, OneWayCounts
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.connection import Connection
from minishuffle.transport.tcp import DataLink, Measured
from minishuffle.wire.frames import OneWay, PartitionRequest, Role
from minishuffle.wire.handshake import Identity
from minishuffle.worker.channels.onewaylinks import (
    LOOK_SECONDS,
    RETRANSMITS_MAX,
    Inlet,
    OneWayLinks,
    SenderStages,
)
from support.producers import Producer
from support.reader import Reader


class FakeLink:
    """A ``DataLink`` that does nothing, but for what is asked of it."""

    def __init__(self, worker: int, machine: Any, one_way: OneWay | None = None) -> None:
        self.peer = Identity(Role.WORKER, "c", worker, 1)
        self.machine = self.connection = machine
        self.one_way = one_way
        self.paused = False
        self.flushes = self.steps = 0
        self.closed = False
        self.error: ShuffleError | None = None
        self.on_written: Callable[[], None] = lambda: None
        self.now = Measured()

    def measured(self) -> Measured:
        return self.now

    def flush_soon(self) -> None:
        self.flushes += 1

    def stepped(self) -> None:
        self.steps += 1

    def close(self) -> None:
        self.closed = True

    def abort(self, error: ShuffleError) -> None:
        self.error = error


class Worker:
    """Worker 5, which has an ordinary link to ``peer`` and dials the greater ones."""

    def __init__(self, peer: int) -> None:
        self.pair = self.new_pair(peer)
        self.dialed: list[OneWay] = []
        self.refuses: ShuffleError | None = None
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.links = OneWayLinks(
            ConnectionCounters(),
            lambda worker, epoch: self.pair if (worker, epoch) == (peer, 1) else None,
            lambda worker: worker > 5,
            self.dial,
            self.run,
            now=lambda: self.now,
            call_at=lambda at, call: self.timers.append((at, call)),
        )

    @staticmethod
    def new_pair(peer: int) -> DataLink:
        connection = Connection(dialer=peer > 5, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        return cast(DataLink, FakeLink(peer, connection))

    async def dial(self, worker: int, epoch: int, purpose: OneWay) -> DataLink:
        self.dialed.append(purpose)
        if self.refuses is not None:
            raise self.refuses
        return self.pair

    def run(self, work: Coroutine[None, None, None], name: str) -> None:
        _run(work)

    def connect(self, purpose: OneWay, *, dialer: bool) -> FakeLink:
        """The connection is there."""
        machine = self.links.machine(self.pair.peer, purpose, dialer)
        assert machine is not None
        link = FakeLink(self.pair.peer.worker, machine, purpose)
        self.links.link_up(cast(DataLink, link))
        return link

    def request(self, inlet: Inlet, number: int = 0) -> Reader:
        reader = Reader()
        request = PartitionRequest(PartitionId(JobId("j1"), inlet.purpose.edge, number), 0)
        inlet.connection.request_partition(reader.channel, request)
        inlet.flush_soon()
        return reader


def _run(work: Coroutine[None, None, None]) -> None:
    """A coroutine that waits for nothing."""
    with pytest.raises(StopIteration):
        work.send(None)


def requested(worker: Worker, number: int, channel: int = 1) -> PartitionRequest:
    request = PartitionRequest(PartitionId(JobId("j1"), 2, 0), 0, channel=channel, one_way=number)
    worker.pair.connection.producers.expect(request)
    return request


@pytest.mark.parametrize(("peer", "dials"), [(9, True), (3, False)])
def test_an_edge_has_one_connection_and_the_lower_worker_dials_it(peer: int, dials: bool) -> None:
    worker = Worker(peer)
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    purpose = OneWay("j1", 2, not dials, 1)
    assert inlet.purpose == purpose and worker.dialed == [purpose] * dials
    worker.request(inlet)
    assert worker.links.inlet(worker.pair, "j1", 2) is inlet
    others = [worker.links.inlet(worker.pair, job, edge) for job, edge in (("j1", 3), ("j2", 2))]
    assert [each.purpose.number for each in others] == [2, 3]
    assert worker.links.counts() == OneWayCounts()
    worker.connect(purpose, dialer=dials)
    assert worker.links.counts() == OneWayCounts(reading=1)


def test_when_its_last_channel_has_ended_the_next_one_has_another_connection() -> None:
    worker = Worker(9)
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    reader = worker.request(inlet)
    link = worker.connect(inlet.purpose, dialer=True)
    inlet.connection.touched = True
    inlet.connection.cancel(reader.channel)
    inlet.flush_soon()
    assert link.error is None, "the producer's side closes it once it has heard"
    assert worker.links.inlet(worker.pair, "j1", 2).purpose.number == 2
    worker.links.link_down(cast(DataLink, link))
    assert [number for _, number in worker.links.inlets] == [2]


@pytest.mark.parametrize("failed", [True, False])
def test_the_consumers_side_closes_what_the_producers_side_will_not(failed: bool) -> None:
    worker = Worker(9)
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    reader = worker.request(inlet)
    link = worker.connect(inlet.purpose, dialer=True)
    inlet.connection.touched = inlet.connection.failed = failed
    inlet.connection.cancel(reader.channel)
    inlet.flush_soon()
    assert isinstance(link.error, PeerLost)


def test_a_new_ordinary_link_has_new_one_way_ones() -> None:
    worker = Worker(9)
    before = worker.links.inlet(worker.pair, "j1", 2)
    after = worker.links.inlet(worker.new_pair(9), "j1", 2)
    assert after is not before and after.purpose.number == 2


def test_one_that_is_not_wanted_any_more_is_not_made() -> None:
    worker = Worker(9)
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    inlet.connection.cancel(worker.request(inlet).channel)
    inlet.flush_soon()
    assert worker.links.machine(worker.pair.peer, inlet.purpose, True) is None and not worker.links.inlets


def test_the_producers_side_closes_it_behind_the_last_channel() -> None:
    worker = Worker(3)
    first, second = requested(worker, 7), requested(worker, 7, channel=2)
    outlet = worker.links.outlet(worker.pair, first)
    assert outlet.paused and not worker.dialed
    link = worker.connect(OneWay("j1", 2, False, 7), dialer=False)
    assert not outlet.paused and worker.links.outlet(worker.pair, second) is outlet
    worker.pair.connection.refuse(1, PeerLost("no"))
    worker.links.released(worker.pair)
    assert not link.closed, "there is another request"
    worker.pair.connection.refuse(2, PeerLost("no"))
    worker.links.released(worker.pair)
    assert link.closed and not worker.links.outlets


def test_a_connection_may_come_before_the_request_that_it_is_for() -> None:
    worker = Worker(3)
    purpose = OneWay("j1", 2, False, 7)
    assert worker.links.refusal(worker.pair.peer, purpose) is None
    link = worker.connect(purpose, dialer=False)
    worker.links.released(worker.pair)  # something else was
    assert not link.closed
    outlet = worker.links.outlet(worker.pair, requested(worker, 7))
    assert outlet.link is not None
    assert "there already" in str(worker.links.refusal(worker.pair.peer, purpose))


def test_what_a_consumer_resumes_is_sent_though_its_writer_waits() -> None:
    """The word comes over the ordinary link."""
    worker, producer = Worker(3), Producer()
    outlet = worker.links.outlet(worker.pair, requested(worker, 7))
    link = worker.connect(OneWay("j1", 2, False, 7), dialer=False)
    view = producer.attach()
    producer.partition.broadcast_barrier(1)
    producer.write(1, 16)
    outlet.connection.attach(1, view)
    outlet.connection.data_to_send(16)
    flushes = link.flushes
    assert not outlet.connection.wants_to_send
    worker.pair.connection.producers.on_resume(1, view.generation, 1)
    assert outlet.connection.wants_to_send and link.flushes == flushes + 1


def test_what_nobody_asked_for_is_refused() -> None:
    worker = Worker(3)
    peer = worker.pair.peer
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    worker.request(inlet)
    assert worker.links.refusal(peer, inlet.purpose) is None
    for purpose in (OneWay("j1", 3, True, 1), OneWay("j2", 2, True, 1), OneWay("j1", 2, True, 8)):
        assert "nothing reads edge" in str(worker.links.refusal(peer, purpose))
    worker.links.outlet(worker.pair, requested(worker, 7))
    assert worker.links.refusal(peer, OneWay("j2", 2, False, 7)) is not None
    stranger = Identity(Role.WORKER, "c", 3, 2)
    assert "no ordinary connection" in str(worker.links.refusal(stranger, inlet.purpose))
    assert Worker(9).links.refusal(Worker(9).pair.peer, inlet.purpose) is not None, "that one is dialed"


def test_dials_are_tried_again_and_given_up_with_their_channels() -> None:
    worker = Worker(9)
    worker.refuses = PeerLost("nobody answers")
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    reader = worker.request(inlet)
    while worker.timers:
        ((worker.now, again),) = worker.timers
        worker.timers.clear()
        again()
    assert 6 <= len(worker.dialed) <= 12 and worker.now <= 10.0
    assert isinstance(reader.error, PeerLost) and not worker.links.inlets
    other = worker.links.outlet(worker.pair, requested(worker, 7))
    ((_, again),) = worker.timers
    worker.links.forget("j1")
    again()
    assert not worker.timers[1:] and other.connection.channels == {}


@pytest.mark.parametrize("how", ["pair", "job"])
def test_all_end_with_the_ordinary_link_or_the_job(how: str) -> None:
    worker = Worker(9)
    inlet = worker.links.inlet(worker.pair, "j1", 2)
    reader = worker.request(inlet)
    links = [worker.connect(inlet.purpose, dialer=True)]
    outlet = worker.links.outlet(worker.pair, requested(worker, 7))
    links.append(worker.connect(outlet.purpose, dialer=True))
    if how == "pair":
        worker.links.pair_down(worker.new_pair(9), PeerLost("of another time"))
        assert worker.links.inlets and worker.links.outlets
        worker.links.pair_down(worker.pair, PeerLost("gone"))
    else:
        worker.links.forget("j2")
        assert worker.links.inlets and worker.links.outlets
        worker.links.forget("j1")
    assert not worker.links.inlets and not worker.links.outlets
    assert all(isinstance(link.error, PeerLost) for link in links) and isinstance(reader.error, PeerLost)


@pytest.mark.parametrize("retransmits", [RETRANSMITS_MAX - 1, RETRANSMITS_MAX])
def test_a_connection_over_which_nothing_gets_through_ends(retransmits: int) -> None:
    worker = Worker(9)
    outlet = worker.links.outlet(worker.pair, requested(worker, 7))
    link = worker.connect(outlet.purpose, dialer=True)
    link.now = Measured(retransmits=retransmits)
    worker.links.check()
    assert isinstance(link.error, PeerLost) == (retransmits == RETRANSMITS_MAX)


def test_stages_of_a_sender_are_said_in_their_order_and_once_to_each() -> None:
    stages, hit = SenderStages(), list[str]()
    stages.listen(hit.append)
    stages.look(10.0, 3.0, True)  # not by the window: the socket was full for a moment
    stages.look(10.002, 3.002, True)  # too soon to tell
    stages.look(10.02, 3.009, True)
    assert hit == [] and stages.awaited
    stages.look(10.03, 3.015, False)
    assert hit == ["window"] and stages.awaited
    stages.listen(hit.append)  # of another task
    stages.look(10.032, 3.015, True)
    assert hit == ["window", "transport"] and stages.awaited
    stages.look(10.04, 3.025, True)
    assert hit == ["window", "transport"] * 2 and not stages.awaited


def test_a_connection_is_looked_at_while_something_is_unsent_and_somebody_waits_to_hear() -> None:
    worker, hit = Worker(9), list[str]()
    outlet = worker.links.outlet(worker.pair, requested(worker, 7))
    link = worker.connect(outlet.purpose, dialer=True)
    link.on_written()
    assert worker.timers == [], "nobody listens"
    outlet.stages.listen(hit.append)
    worker.now = 1.0
    link.on_written()
    assert worker.timers == [], "everything was sent"
    link.now = Measured(unsent=1)
    link.on_written()
    link.on_written()
    ((at, again),) = worker.timers
    worker.timers.clear()
    worker.now = at
    assert at == 1.0 + LOOK_SECONDS
    link.now = Measured(unsent=1, window_closed=LOOK_SECONDS)
    again()
    assert hit == ["window"] and len(worker.timers) == 1
    assert worker.links.counts() == OneWayCounts(sending=1, window_closed_seconds=LOOK_SECONDS)
    link.paused = True
    link.on_written()  # at once, and no second timer
    assert hit == ["window", "transport"] and len(worker.timers) == 1
    worker.timers.pop()[1]()
    assert worker.timers == []
    assert worker.links.counts() == OneWayCounts(paused=1, window_closed_seconds=LOOK_SECONDS)
    worker.links.link_down(cast(DataLink, link))
    link.on_written()
    assert worker.timers == [] and worker.links.counts() == OneWayCounts()
