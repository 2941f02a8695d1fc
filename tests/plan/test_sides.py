"""Side outputs of late records: what is known of them, and what reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import InvalidGraph
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.nodes import inputs_first
from support.planned import HOUR, SCHEMA, last, rows, table, timed


def test_late_records_are_a_stream_of_their_own() -> None:
    windows = table().event_time("t").key_by("user").window(HOUR, late="side")
    counts, totals = windows.count(), windows.aggregate(n=("n", "sum"))
    (one,), (other,) = counts.late.plan.feeds, totals.late.plan.feeds
    assert one.node is last(counts)
    assert one.side == other.side == "late"
    assert one.node is not other.node
    assert totals.late.plan.gives.schema == SCHEMA
    assert totals.late.plan.gives.time == EventTime(column="t")
    renamed = totals.name("totals").parallel(3)
    assert [feed.node for feed in renamed.late.plan.feeds] == list(renamed.plan.ends)


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


def test_streams_without_late_records_say_so() -> None:
    counts = timed().key_by("user").window(HOUR, late="side").count()
    for stream in (rows(), timed().key_by("user").window(HOUR).count(), counts.filter(bool)):
        with pytest.raises(InvalidGraph, match=r"\.late must directly follow .* late='side'"):
            _ = stream.late
    with pytest.raises(InvalidGraph, match=r"\.panes must directly follow .* allowed_lateness or early"):
        _ = timed().key_by("user").window(HOUR).count().panes
    with pytest.raises(InvalidGraph, match=r"\.late_right must directly follow"):
        _ = counts.late_right
