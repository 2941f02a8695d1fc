"""Wall time by a monotonic clock and an offset, which the journal hears of."""

from __future__ import annotations

from minishuffle.coordinator.clusterclock import ClusterClock


def test_wall_time_never_goes_back_and_what_is_due_then_is_due() -> None:
    wall = ClusterClock(1_700_000_000.0)
    assert wall(5.0) == 1_700_000_005.0
    wall.anchor(1_699_999_990.0)
    assert wall(6.0) == 1_700_000_005.0 and wall(16.0) == 1_700_000_006.0
    assert wall(wall.monotonic(1_700_000_020.3)) >= 1_700_000_020.3


def test_the_journal_hears_of_an_offset_that_has_changed_by_more_than_a_second() -> None:
    wall = ClusterClock(100.0)
    assert (wall.take_offset(), wall.take_offset()) == (100.0, None)
    wall.anchor(100.9)
    assert wall.take_offset() is None
    wall.anchor(101.1)
    assert (wall.take_offset(), wall.take_offset()) == (101.1, None)
    wall.forget_recorded()
    assert wall.take_offset() == 101.1
