"""What the watermarks of both inputs say of the records that a join holds."""

from __future__ import annotations

import pytest

from minishuffle.operators.base import BEGINNING_OF_TIME, END_OF_TIME, Watermark
from minishuffle.operators.join_inputs import LEFT, RIGHT, Bounds, How, JoinProgress


def at(how: How, left: int, right: int) -> JoinProgress:
    progress = JoinProgress(how, Bounds(3, 5))
    for input, time in ((LEFT, left), (RIGHT, right)):
        progress.take(Watermark(time), input)
    return progress


def test_a_record_is_held_until_no_partner_can_come() -> None:
    progress = at("inner", 50, 70)
    assert (progress.limit(LEFT), progress.limit(RIGHT)) == (65, 47)
    assert at("inner", END_OF_TIME, 70).limit(RIGHT) == END_OF_TIME
    assert JoinProgress("inner", Bounds(3, 5)).limit(LEFT) == BEGINNING_OF_TIME


@pytest.mark.parametrize(
    ("how", "watermark"), [("inner", 50), ("left", 41), ("anti", 41), ("right", 29), ("full", 29)]
)
def test_records_that_go_out_alone_hold_the_watermark_back(how: How, watermark: int) -> None:
    assert at(how, 50, 70).watermark((42, 30)) == watermark
    assert at(how, END_OF_TIME, END_OF_TIME).watermark((END_OF_TIME, END_OF_TIME)) == END_OF_TIME
