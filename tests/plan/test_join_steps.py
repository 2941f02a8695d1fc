"""Joins and process functions: what a user may write, what is known afterwards, what each mistake is told."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import KeyedStream, Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.operators.broadcast_join import BroadcastJoin
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.interval_join import IntervalJoin
from minishuffle.operators.join_results import JoinedTime
from minishuffle.plan.nodes import Exchange, Node
from minishuffle.plan.planner import compile_job
from support.planned import planned

MOMENT = pa.timestamp("us", "UTC")
LEFT = pa.schema({"t": MOMENT, "user": pa.dictionary(pa.int8(), pa.string()), "n": pa.int64()})
RIGHT = pa.schema({"id": pa.string(), "at": MOMENT, "n": pa.int32()})
HOUR = timedelta(hours=1)


def left() -> Stream[Any]:
    return Table.from_arrow(LEFT.empty_table()).to_rows().event_time("t")


def right() -> Stream[Any]:
    return Table.from_arrow(RIGHT.empty_table()).to_rows().event_time("at")


def timed() -> KeyedStream[Any]:
    return left().key_by("user")


def rows() -> Stream[Any]:
    return Stream.items([{"user": "a", "t": 1}]).event_time("t")


def last(stream: Stream[Any]) -> Node:
    (node,) = stream.plan.ends
    return node


def test_two_streams_give_rows() -> None:
    for one, other in ((timed(), timed()), (timed(), right().key_by(lambda row: row["id"]))):
        joined = one.join(other)
        assert isinstance(planned(last(joined)), IntervalJoin)
        assert [feed.input for feed in last(joined).feeds] == [0, 1]
        assert joined.plan.gives.time is not None
        assert isinstance(joined.plan.gives.time.fn, JoinedTime)


def test_the_time_of_joined_rows_is_the_greater_one() -> None:
    time = JoinedTime(EventTime(column="t", shift=-1), EventTime(fn=lambda row: row[0]))
    moment = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert time((1, {"t": moment}, (5,))) == time((1, {"t": moment}, None)) == 999_999
    assert time((1, {"t": moment}, (1_000_000,))) == 1_000_000
    assert time((1, None, (5,))) == 5


def test_late_records_of_both_sides_are_streams() -> None:
    joined = left().key_by("user").join(right().key_by("id"), late="side")
    (late,), (late_right,) = joined.late.plan.feeds, joined.late_right.plan.feeds
    operator = planned(last(joined))
    assert isinstance(operator, IntervalJoin)
    assert tuple(each.tag for each in operator.lateness) == (late.side, late_right.side)
    assert late.side != late_right.side
    assert joined.late.plan.gives.columns == tuple(LEFT.names)
    assert joined.late_right.plan.gives.columns == tuple(RIGHT.names)
    assert joined.late_right.plan.gives.time == EventTime(column="at")
    with pytest.raises(InvalidGraph, match=r"\.late must directly follow"):
        _ = left().key_by("user").join(right().key_by("id")).late


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"how": "outer"}, "how is 'outer': write one of 'inner', 'left', 'right', 'full', 'semi', 'anti'"),
        ({"late": "keep"}, "late is 'keep': write 'drop', 'side' or 'fail'"),
        ({"within": 5}, r"join\(within=...\) takes a datetime.timedelta, not 5"),
        ({"within": -HOUR}, "takes a time from 0"),
        ({"other": right()}, r"takes a KeyedStream, not a Stream: call key_by\(\) first"),
        (
            {"other": right().key_by("id", "n")},
            r"the left key is \(user\) and the right one \(id, n\): give both key_by\(\) the same number",
        ),
    ],
    ids=str,
)
def test_wrong_joins_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        left().key_by("user").join(**{"other": right().key_by("id"), **options})


def test_a_join_needs_times() -> None:
    untimed = Stream.items([{"id": 1}]).key_by("id")
    with pytest.raises(InvalidGraph, match="and the right one has none: call event_time"):
        timed().join(untimed)
    with pytest.raises(InvalidGraph, match="and the left one has none: call event_time"):
        untimed.join(timed())


# --- broadcast ------------------------------------------------------------------------------------


def test_a_broadcast_join_of_rows_sends_the_small_side_to_all() -> None:
    joined = left().broadcast_join(right(), {"user": "id"})
    node = last(joined)
    assert isinstance(planned(node), BroadcastJoin)
    assert [(feed.input, feed.exchange) for feed in node.feeds] == [(0, None), (1, Exchange("broadcast"))]
    assert joined.plan.gives.columns == (*LEFT.names, "at", "n_right")
    assert joined.plan.gives.time == EventTime(column="t")


def test_broadcast_joins_whose_sources_would_wait_for_each_other_are_refused() -> None:
    one, other, third = (Stream.items([{"user": name}]).name(name) for name in "abc")
    first, second = one.broadcast_join(other, "user"), other.broadcast_join(third, "user")
    assert compile_job(Stream.together(first.to_count(), second.to_count()))
    ring = Stream.together(first.to_count(), second.to_count(), third.broadcast_join(one, "user").to_count())
    with pytest.raises(
        InvalidGraph, match=r"here '.' would wait for .*: make one of these sources"
    ) as raised:
        compile_job(ring)
    names = re.findall(r"'(.)'", str(raised.value))
    assert "".join(names) in ("abca", "bcab", "cabc")


def test_what_a_broadcast_join_refuses() -> None:
    endless = Stream.generate(lambda start, count: [{"user": "a"}] * count, rate=1)
    with pytest.raises(InvalidGraph, match="reads the small side to its end first, and it has none"):
        rows().broadcast_join(endless, "user")
    assert endless.broadcast_join(rows(), "user")
    source = Stream.items([{"user": "a"}])
    with pytest.raises(InvalidGraph, match="both come from 'items', which would wait for itself"):
        source.filter(bool).broadcast_join(source.map(dict), "user")
    with pytest.raises(InvalidGraph, match="leave out the choice before it"):
        rows().broadcast_join(source.rebalance(), "user")
    with pytest.raises(UnknownName, match="did you mean 'user'"):
        left().broadcast_join(right(), {"usr": "id"})
    with pytest.raises(UnknownName, match="small side: there is no column 'user'"):
        left().broadcast_join(right(), "user")
    with pytest.raises(UsageError, match="names a column twice: user, user"):
        left().broadcast_join(right(), ["user", "user"])
    wrong: list[Any] = [[], {}, 5, [1]]
    for nothing in wrong:
        with pytest.raises(
            UsageError, match="broadcast_join takes on='column', a list of columns, or a dict"
        ):
            left().broadcast_join(right(), nothing)
    with pytest.raises(UsageError, match="how is 'full': write 'inner' or 'left'"):
        left().broadcast_join(right(), {"user": "id"}, "full")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="broadcast_join of a Stream takes a Stream, not a KeyedStream"):
        left().broadcast_join(right().key_by("id"), "user")  # type: ignore[arg-type]
