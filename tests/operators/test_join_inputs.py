"""How far both inputs of a join are; late records and marks are in the tests of the joins."""

from __future__ import annotations

from minishuffle.dataflow.operators.base import BEGINNING_OF_TIME, END_OF_TIME, Active, Idle, Watermark
from minishuffle.operators.join_inputs import LEFT, RIGHT, Bounds, JoinProgress


def test_an_idle_side_does_not_follow_one_that_has_ended_or_is_idle_too() -> None:
    progress = JoinProgress("inner", Bounds(0, 0))
    progress.take(Watermark(50), LEFT)
    progress.take(Idle(), RIGHT)
    assert progress.watermarks == (50, 50)
    assert not progress.idle
    progress.take(Watermark(END_OF_TIME), LEFT)
    assert progress.watermarks == (END_OF_TIME, 50)
    assert progress.idle
    progress.take(Active(), RIGHT)
    assert not progress.idle
    both_idle = JoinProgress("inner", Bounds(0, 0))
    both_idle.take(Watermark(50), LEFT)
    both_idle.take(Idle(), LEFT)
    both_idle.take(Idle(), RIGHT)
    assert both_idle.watermarks == (50, BEGINNING_OF_TIME)
    assert both_idle.idle


def test_a_join_goes_on_where_the_subtask_that_is_farthest_was() -> None:
    first, second, after = (JoinProgress("inner", Bounds(0, 0)) for _ in range(3))
    first.take(Watermark(50), LEFT)
    second.take(Watermark(20), LEFT)
    second.take(Watermark(70), RIGHT)
    for progress in (first, second):
        for records in progress.write():
            after.read(records)
    assert after.watermarks == (50, 70)
    assert after.last == 70
