from __future__ import annotations

import pytest

from minishuffle.coordinator.shutdown import CLOSING_SECONDS, DRAIN_SECONDS, OrderlyStop


def test_each_step_follows_once_the_one_before_is_done() -> None:
    stop = OrderlyStop(3.0)
    assert not stop.drained(0.0, False) and not stop.closed(0.0, False) and stop.next_deadline() is None
    assert stop.begin(1.0) and not stop.begin(1.0)
    assert not stop.drained(1.0, True)
    assert stop.drained(1.5, False) and not stop.drained(1.5, False)
    assert not stop.closed(1.5, True)
    assert stop.closed(1.75, False) and not stop.closed(1.75, False)
    assert (stop.phase, stop.next_deadline()) == ("stopped", None)


def test_no_step_takes_longer_than_its_time() -> None:
    stop = OrderlyStop(3.0)
    stop.begin(1.0)
    due = stop.next_deadline()
    assert due == pytest.approx(1.0 + 3.0 + DRAIN_SECONDS)
    assert not stop.drained(due - 0.1, True) and stop.drained(due, True)
    later = stop.next_deadline()
    assert later == pytest.approx(due + CLOSING_SECONDS)
    assert not stop.closed(later - 0.1, True) and stop.closed(later, True)
