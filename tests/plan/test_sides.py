"""Side outputs of late records: what is known of them, and what reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import InvalidGraph
from minishuffle.plan.nodes import inputs_first
from support.planned import HOUR, timed


@pytest.mark.parametrize(
    "follow",
    [
        lambda late: late.rebalance(),
        lambda late: late.broadcast().flat_map(list),
        lambda late: late.partition(lambda row, count: 0),
        lambda late: late.key_by("user").count(),
        lambda late: late.to_table({"user": str, "t": int}).key_by("user").aggregate(n=("t", "count")),
        lambda late: late.event_time("t"),
        lambda late: late.event_time("t").key_by("user").window(HOUR).count(),
        lambda late: late.map(str).name("texts").parallel(2),
    ],
    ids=["rebalance", "broadcast", "partition", "count", "aggregate", "time", "windows", "map"],
)
def test_what_follows_late_records_reads_them_and_not_the_windows(
    follow: Callable[[Stream[Any]], StreamBase],
) -> None:
    windows = timed().key_by("user").window(HOUR, late="side").count()
    following = follow(windows.late)
    feeds = [feed for node in inputs_first(following.plan.ends) for feed in node.feeds] + list(
        following.plan.feeds
    )
    sides = [feed.side for feed in feeds if feed.node in windows.plan.ends]
    assert sides and all(side is not None for side in sides)


@pytest.mark.parametrize("change", ["name", "parallel"])
def test_late_records_have_neither_name_nor_width_of_their_own(change: str) -> None:
    late = timed().key_by("user").window(HOUR, late="side").count().late
    for stream in (late, late.event_time("t")):
        with pytest.raises(InvalidGraph, match=rf"{change}\(\) cannot follow \.late"):
            stream.name("x") if change == "name" else stream.parallel(1)
