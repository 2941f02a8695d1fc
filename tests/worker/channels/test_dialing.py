"""Whom a worker dials, and when; no sockets, no clock."""

from __future__ import annotations

import pytest

from minishuffle.errors import PeerLost
from minishuffle.wire.messages import WorkerAddress
from minishuffle.worker.channels.dialing import LINK_BACKOFF, Dialing

REFUSED = PeerLost("refused")
GOOD_AFTER = 1.0


def address(worker: int, epoch: int = 1) -> WorkerAddress:
    return WorkerAddress(worker=worker, epoch=epoch, host="127.0.0.1", data_port=9000 + worker)


def dialing(worker: int, peer: int) -> Dialing:
    """Worker ``worker``, which knows one peer."""
    found = Dialing(worker, GOOD_AFTER)
    assert found.announce(address(peer))
    return found


def test_the_waits_between_tries_double_up_to_two_seconds() -> None:
    """Case 119, InputChannelTest."""
    waits = [LINK_BACKOFF.seconds(tries) for tries in (1, 2, 3, 4, 5, 6, 1_000)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def tries(peers: Dialing, *, fails: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """When peer 3 is dialed, or asked, from 0 s on, and what is given up."""
    assert peers.want(3, 0.0)
    times, given_up = [0.0], []
    if fails:
        assert not peers.dial_failed(address(3), REFUSED, 0.0)
    while (due := peers.next_deadline()) is not None:
        for worker, error in peers.due(due):
            assert worker == 3
            if error is not None:
                given_up.append((due, str(error)))
                continue
            times.append(due)
            if fails:
                assert not peers.dial_failed(address(3), REFUSED, due)
        peers.validate()
    return times, given_up


@pytest.mark.parametrize("fails", [True, False], ids=["dials", "asks"])
def test_a_peer_is_tried_less_and_less_often_until_the_time_is_up(fails: bool) -> None:
    """Case 71, PartitionRequestClientFactoryTest."""
    times, given_up = tries(dialing(2 if fails else 4, 3), fails=fails)
    assert times == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5, 3.1, 5.1, 7.1, 9.1])
    failure = ": refused" if fails else ""
    assert given_up == [(10.0, f"no connection to worker 3 within 10 s{failure}")]


def test_a_link_that_is_made_and_lost_again_and_again_is_missed() -> None:
    """Until it was there for as long as one that passes nothing is not."""
    peers = dialing(2, 3)
    peers.link_up(3, 0.0)
    peers.link_down(3, PeerLost("silent"), 10.0)
    peers.need(3, 10.0)
    for time in (11.0, 12.0, 13.0):
        peers.link_up(3, time)
        assert peers.unlinked(time + 0.4) == [(address(3), time - 10.0, "silent")], "so long there was none"
        peers.validate()
        peers.link_down(3, PeerLost("silent"), time + 0.6)
        peers.need(3, time + 0.6)
    assert peers.unlinked(14.0) == [(address(3), 4.0, "silent")]
    peers.link_up(3, 14.0)
    peers.link_up(3, 14.9)
    assert peers.unlinked(15.5) == [(address(3), 4.9, "silent")], "another took its place"
    assert peers.unlinked(15.9) == []
    peers.link_down(3, PeerLost("it broke"), 16.0)
    peers.need(3, 16.0)
    assert peers.unlinked(17.0) == [(address(3), 1.0, "it broke")]


def test_a_link_that_is_needed_is_missed_until_it_is_there_or_needed_no_more() -> None:
    peers = dialing(2, 3)
    assert peers.unlinked(0.0) == []
    peers.need(3, 1.0)
    peers.need(3, 2.0)
    assert peers.want(3, 2.0) and not peers.dial_failed(address(3), REFUSED, 2.5)
    assert peers.unlinked(2.5) == [(address(3), 1.5, "refused")]
    peers.link_up(3, 2.6)
    peers.need(3, 3.0)
    assert peers.unlinked(3.6) == []
    peers.link_down(3, PeerLost("it broke"), 4.0)
    peers.need(3, 4.0)
    assert peers.unlinked(4.5) == [(address(3), 0.5, "it broke")]
    peers.spare(3)
    assert peers.unlinked(9.0) == []
    peers.need(3, 5.0)
    assert peers.announce(address(3, epoch=2)) and peers.unlinked(9.0) == []
    peers.need(3, 6.0)
    assert peers.declare_lost(3, 2) and peers.unlinked(9.0) == []
    peers.need(3, 7.0)
    peers.need(4, 7.0)
    assert peers.unlinked(9.0) == []
    peers.validate()


def test_a_worker_that_has_another_address_by_now_is_dialed_there() -> None:
    peers = dialing(2, 3)
    moved = address(3).model_copy(update={"host": "10.0.0.3"})
    assert not peers.announce(moved) and peers.address(3) == moved
    peers.link_up(3, 0.0)
    assert not peers.announce(address(3)) and peers.is_up(3)
    assert not peers.announce(address(3, epoch=0)) and peers.address(3) == address(3)
    peers.validate()


def test_a_link_ends_the_tries_and_one_that_breaks_is_tried_for_like_a_new_one() -> None:
    peers = dialing(2, 3)
    assert peers.want(3, 0.0) and not peers.want(3, 0.0)
    peers.link_up(3, 0.0)
    assert (peers.is_up(3), peers.next_deadline()) == (True, None)
    peers.link_down(3, REFUSED, 0.0)
    assert not peers.is_up(3)
    assert peers.want(3, 5.0)
    assert not peers.dial_failed(address(3), REFUSED, 5.0)
    assert peers.next_deadline() == pytest.approx(5.1)
    peers.validate()


@pytest.mark.parametrize("dials", [True, False], ids=["lower id", "higher id"])
def test_the_one_that_dials_makes_a_link_again_that_is_gone(dials: bool) -> None:
    """Case 76, PartitionRequestClientFactoryTest."""
    peers = dialing(2 if dials else 4, 3)
    peers.restore(3, 0.0)
    assert peers.next_deadline() is None, "there was none"
    peers.link_up(3, 0.0)
    peers.link_down(3, REFUSED, 0.0)
    peers.restore(3, 1.0)
    peers.validate()
    if not dials:
        assert peers.next_deadline() is None
        return
    assert not peers.want(3, 1.0), "that waits for the same dial"
    times, given_up = [], []
    while (due := peers.next_deadline()) is not None and due < 22.0:
        for _, error in peers.due(due):
            if error is None:
                times.append(due)
                peers.dial_failed(address(3), REFUSED, due)
            else:
                given_up.append(due)
                peers.restore(3, due)
            peers.validate()
    assert times[0] == pytest.approx(1.1) and times[-1] > 20.0
    assert given_up == pytest.approx([11.0, 21.0]), "whoever waits for it is told"
    peers.declare_lost(3, 1)
    peers.restore(3, 23.0)
    assert peers.next_deadline() is None


def test_a_dial_that_fails_late_is_not_the_last_one() -> None:
    peers = dialing(2, 3)
    peers.link_up(3, 0.0)
    peers.link_down(3, REFUSED, 0.0)
    peers.restore(3, 0.0)
    assert list(peers.due(0.1)) == [(3, None)]
    ((_, error),) = peers.due(10.0)
    assert error is not None, "what waits for it fails"
    peers.restore(3, 10.0)
    assert not peers.dial_failed(address(3), REFUSED, 10.5)
    assert peers.next_deadline() == pytest.approx(10.6)


def test_a_peer_that_was_declared_lost_is_not_dialed_until_it_comes_with_a_later_epoch() -> None:
    peers = dialing(2, 3)
    assert peers.want(3, 0.0)
    assert not peers.declare_lost(3, 0), "the verdict on a process before"
    assert peers.declare_lost(3, 1) and not peers.declare_lost(3, 1)
    assert (peers.is_lost(3), peers.next_deadline()) == (True, None)
    assert not peers.want(3, 1.0)
    assert not peers.announce(address(3))
    assert peers.announce(address(3, epoch=2)) and not peers.is_lost(3)
    assert peers.want(3, 2.0)
    peers.validate()


def test_a_worker_that_was_never_announced_counts_as_lost() -> None:
    peers = Dialing(2, GOOD_AFTER)
    assert peers.is_lost(7) and not peers.want(7, 0.0) and not peers.declare_lost(7, 1)
    assert peers.announced(7) == 0
