"""Channels as they are written, and frames as text."""

from __future__ import annotations

import pytest

from minishuffle.cli.trace import frame_line, parsed_channel
from minishuffle.errors import UsageError
from minishuffle.wire.inquiries import TracedChannel


def test_a_channel_is_written_as_in_a_dump() -> None:
    expected = TracedChannel(producer_operator=0, producer=1, operator=12, index=3)
    assert parsed_channel("0.1:12.3") == expected


@pytest.mark.parametrize(
    "text", ["", "0.1", "0.1:2", "a.1:2.0", "0.1:2.0:3", "-1.0:0.0", "0.1:2.99999999999"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="each as OPERATOR.INDEX, for example 0.1:2.0"):
        parsed_channel(text)


def test_a_frame_is_a_line() -> None:
    frame = {"at": 1.5, "way": "in", "edge": 0, "generation": 2, "frame": "buffer_response", "sequence": 7}
    line = frame_line({**frame, "first_start": 0, "flags": ["starts", "ends"]})
    assert line.endswith("-> buffer_response (generation 2): sequence 7, first start 0, flags starts+ends")
    sent = frame_line(
        {"at": 1.5, "way": "out", "edge": 0, "generation": 2, "frame": "add_credit", "credit": 3}
    )
    assert sent.endswith("<- add_credit (generation 2): credit 3")
    assert frame_line({"frame": "left_out", "count": 1234}).startswith("… 1,234 frames passed faster")
