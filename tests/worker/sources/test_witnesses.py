"""Who is asked, who answers, and what a coordinator hears of it."""

from __future__ import annotations

import pytest

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError
from minishuffle.wire.control import pack_message
from minishuffle.wire.frames import Message
from minishuffle.wire.messages import WitnessedPositions, WorkerLost
from minishuffle.wire.packed import SplitPosition, pack_positions
from minishuffle.wire.reports import SourcePositions
from minishuffle.worker.sources.witnesses import Witnesses
from support.attempts import attempt


class Peers:
    """Workers 1 to ``count``, each linked with all others; what they send is delivered by :meth:`settle`."""

    def __init__(self, count: int) -> None:
        self.wire: list[tuple[int, int, Message]] = []
        """Sender, receiver and message."""
        self.went_on: list[SourcePositions] = []
        """Of worker 1."""
        self.heard: list[tuple[int, int]] = []
        """By the coordinator: from which worker, number."""
        self.workers = {number: self._worker(number, count) for number in range(1, count + 1)}

    def _worker(self, number: int, count: int) -> Witnesses:
        return Witnesses(
            number,
            10 + number,
            linked=lambda: set(range(1, count + 1)) - {number},
            send=lambda to, message: self.wire.append((number, to, message)),
            hand_on=lambda said: self.heard.append((number, said.last_report)),
            go_on=self.went_on.append,
        )

    def settle(self) -> None:
        while self.wire:
            sender, to, message = self.wire.pop(0)
            if (answer := self.workers[to].received(sender, message)) is not None:
                self.wire.append((to, sender, answer))


def at(position: int) -> SourcePositions:
    return SourcePositions(attempt=attempt(0), positions=pack_positions([SplitPosition(0, position, 10)]))


def test_a_source_goes_on_once_one_peer_has_all_that_the_coordinator_may_not_have() -> None:
    peers = Peers(5)
    peers.workers[1].ask([at(20)], [at(10), at(20)], last=7)
    assert [to for _, to, _ in peers.wire] == [2, 3, 4] and peers.went_on == []
    peers.wire[:] = [peers.wire[1]]
    peers.settle()
    [kept] = peers.workers[3].kept()
    assert (kept.worker, kept.epoch, kept.last_report) == (1, 11, 7)
    assert [each.positions for each in kept.sources] == [at(10).positions, at(20).positions]
    assert peers.went_on == [at(20)]
    peers.workers[1].received(2, Message(1, b""))  # A further answer.
    assert peers.went_on == [at(20)]


def test_what_is_kept_for_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(3)
    peers.workers[1].ask([at(10)], [at(10)], last=1)
    small = len(peers.wire[0][2].body)
    monkeypatch.setattr(limits, "WITNESSED_BYTES_MAX", small + 1_024 + small // 2)
    peers.workers[2].ask([], [at(10)], last=1)
    peers.settle()
    assert [each.worker for each in peers.workers[3].kept()] == [1] and (3, 1) in peers.heard
    monkeypatch.setattr(limits, "WITNESSED_BYTES_MAX", 1)
    peers.workers[1].ask([at(20)], [at(20)], last=2)
    assert peers.went_on == [at(10), at(20)], "it is too long to be sent"


def test_nobody_waits_for_a_peer_whose_link_is_gone() -> None:
    alone = Peers(1)
    alone.workers[1].ask([at(10)], [at(10)], last=1)
    assert alone.went_on == [at(10)]
    peers = Peers(3)
    peers.workers[1].ask([at(10)], [at(10)], last=1)
    peers.workers[1].ask([at(20)], [at(20)], last=2)
    peers.workers[1].peer_lost(2)
    assert peers.went_on == []
    peers.workers[1].peer_lost(3)
    assert peers.went_on == [at(10), at(20)]


def test_a_coordinator_hears_at_once_and_on_each_registration_until_it_has_it() -> None:
    peers = Peers(2)
    peers.workers[1].ask([at(10)], [at(10)], last=1)
    peers.settle()
    assert peers.heard == [(2, 1)]
    said = peers.workers[2].kept()  # What it says when it registers, and what comes before the answer.
    peers.workers[1].ask([at(20)], [at(20)], last=2)
    peers.settle()
    peers.workers[2].handed_on(said)
    assert peers.heard == [(2, 1), (2, 2), (2, 2)]
    peers.workers[2].handed_on(peers.workers[2].kept())
    assert peers.workers[2].kept() == [] and len(peers.heard) == 3


@pytest.mark.parametrize(
    "message",
    [WorkerLost(term=1, worker=1, epoch=1), WitnessedPositions(worker=3, epoch=1, last_report=1, sources=[])],
    ids=["another message", "of another worker"],
)
def test_a_peer_speaks_of_its_own_sources_alone(message: WorkerLost | WitnessedPositions) -> None:
    with pytest.raises(RemoteProtocolError, match="worker 1 sent"):
        Peers(3).workers[2].received(1, Message(1, pack_message(message)))
