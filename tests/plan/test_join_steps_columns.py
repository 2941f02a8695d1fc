"""Joins of tables: columns, partners, and what each mistake is answered with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.operators.broadcast_join import BroadcastJoin
from minishuffle.operators.event_time import BESIDE, EventTime
from minishuffle.operators.interval_join import IntervalJoin
from minishuffle.plan.nodes import Exchange, Node
from support.cutjobs import Cut, run
from support.planned import planned

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
CUTS = (Cut(1), Cut(2, rows=1), Cut(3, seed=5, rows=2, merges=True))


def events(key: str, *given: tuple[str | None, int, int], out_of_order: timedelta = 99 * MINUTE) -> Table:
    schema = pa.schema([(key, pa.string()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64())])
    rows = [{key: ad, "at": START + minute * MINUTE, "n": n} for ad, minute, n in given]
    table = Table.from_arrow(pa.Table.from_pylist(rows, schema)).parallel(1)
    return table.event_time("at", out_of_order=out_of_order)


def shown() -> Table:
    return events("ad", ("tea", 1, 1), ("tea", 30, 2), ("ink", 5, 3), (None, 5, 4))


def clicked() -> Table:
    return events("what", ("tea", 3, 10), ("ink", 50, 20), (None, 5, 30))


def rows(table: Table) -> list[Any]:
    found = [sorted(run(table.collect(), cut).rows, key=repr) for cut in CUTS]
    assert all(each == found[0] for each in found)
    return found[0]


def names(table: Table) -> list[str]:
    assert table.plan.gives.schema is not None
    return list(table.plan.gives.schema.names)


def test_pairs_have_the_keys_once() -> None:
    joined = shown().key_by("ad").join(clicked().key_by("what"), within=10 * MINUTE)
    assert names(joined) == ["ad", "at", "n", "at_right", "n_right"]
    assert [(row["ad"], row["n"], row["n_right"]) for row in rows(joined)] == [("tea", 1, 10)]


def test_names_that_clash_take_the_suffix() -> None:
    joined = shown().key_by("ad").join(clicked().key_by("what"), within=10 * MINUTE, suffix="_of_click")
    assert names(joined) == ["ad", "at", "n", "at_of_click", "n_of_click"]
    assert rows(joined)[0]["n_of_click"] == 10
    with pytest.raises(UsageError, match="suffix is ''"):
        shown().key_by("ad").join(clicked().key_by("what"), suffix="")


def test_an_outer_join_fills_the_keys_from_either_side() -> None:
    joined = shown().key_by("ad").join(clicked().key_by("what"), "full", within=10 * MINUTE)
    assert sorted(((row["ad"], row["n"], row["n_right"]) for row in rows(joined)), key=repr) == [
        ("ink", 3, None), ("ink", None, 20), ("tea", 1, 10), ("tea", 2, None),
        (None, 4, None), (None, None, 30)
    ]  # fmt: skip
    left = shown().key_by("ad").join(clicked().key_by("what"), "left", within=10 * MINUTE)
    assert sorted(row["n"] for row in rows(left)) == [1, 2, 3, 4]


def test_three_tables_join_without_a_clash() -> None:
    two = shown().key_by("ad").join(clicked().key_by("what"), within=10 * MINUTE)
    three = two.key_by("ad").join(clicked().key_by("what"), within=10 * MINUTE)
    assert names(three) == ["ad", "at", "n", "at_right", "n_right", "at_right_right", "n_right_right"]
    assert [row["n_right_right"] for row in rows(three)] == [10]


def test_what_comes_too_late_is_two_tables() -> None:
    early = events("ad", ("tea", 60, 1), ("tea", 1, 2), out_of_order=timedelta(0))
    joined = early.key_by("ad").join(clicked().key_by("what"), late="side")
    assert isinstance(joined.late, Table)
    assert names(joined.late) == ["ad", "at", "n"]
    assert names(joined.late_right) == ["what", "at", "n"]


def test_bounds_need_not_be_the_same_on_both_sides() -> None:
    joined = shown().key_by("ad").join(clicked().key_by("what"), within=HOUR, after=2 * HOUR)
    operator = planned(last(joined))
    assert isinstance(operator, IntervalJoin)
    assert operator.progress.bounds == (3_600_000_000, 7_200_000_000)


@pytest.mark.parametrize("how", ["semi", "anti"])
def test_semi_and_anti_joins_have_the_columns_of_the_left(how: Any) -> None:
    assert names(shown().key_by("ad").join(clicked().key_by("what"), how)) == ["ad", "at", "n"]


def test_an_as_of_join_has_the_columns_of_a_left_join() -> None:
    joined = shown().key_by("ad").asof_join(clicked().key_by("what"), tolerance=HOUR, late="side")
    assert names(joined) == names(shown().key_by("ad").join(clicked().key_by("what"), "left"))
    assert names(joined.late_right) == names(clicked()) and joined.plan.gives.time == BESIDE
    keyed = shown().key_by("ad")
    untimed = Table.from_arrow(pa.table({"what": ["tea"]})).key_by("what")
    with pytest.raises(InvalidGraph, match="asof_join needs the event time of both sides"):
        keyed.asof_join(untimed)
    with pytest.raises(UsageError, match=r"tolerance=...\) takes a datetime.timedelta"):
        keyed.asof_join(clicked().key_by("what"), tolerance=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a KeyedTable, not a Table"):
        keyed.asof_join(clicked())  # type: ignore[arg-type]


def test_an_as_of_join_takes_the_same_row_whatever_is_read_of_it() -> None:
    at, ties = [START] * 2, {"a": [1, 2], "b": [9, 3]}
    left = Table.from_arrow(pa.table({"k": [1], "at": at[:1]})).event_time("at").key_by("k")
    right = Table.from_arrow(pa.table({"k": [1, 1], "at": at, **ties})).event_time("at").key_by("k")
    joined = left.asof_join(right)
    assert [row["b"] for row in rows(joined)] == [9]
    assert rows(joined.select("k", "b")) == [{"k": 1, "b": 9}]


def test_data_with_an_end_are_joined_without_event_time() -> None:
    one, other = (Table.from_arrow(pa.table({"k": [1], "v": [2]})).key_by("k") for _ in range(2))
    joined = one.join(other, "full")
    assert names(joined) == ["k", "v", "v_right"] and joined.plan.gives.time is None
    with pytest.raises(InvalidGraph, match="the left one has none: call event_time"):
        one.join(other, within=HOUR)
    endless = Table.from_spark("clicks", {"k": "int64"}, bounded=False).key_by("k")
    with pytest.raises(InvalidGraph, match="the left one has none: call event_time"):
        endless.join(one)


def test_what_a_join_needs_is_said() -> None:
    keyed = shown().key_by("ad")
    untimed = Table.from_arrow(pa.table({"what": ["tea"]}))
    with pytest.raises(InvalidGraph, match="the right one has none: call event_time"):
        keyed.join(untimed.key_by("what"))
    with pytest.raises(UsageError, match="the same number of columns"):
        keyed.join(clicked().key_by("what", "n"))
    with pytest.raises(UsageError, match="how is 'outer'"):
        keyed.join(clicked().key_by("what"), "outer")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="late is 'no'"):
        keyed.join(clicked().key_by("what"), late="no")  # type: ignore[arg-type]


def test_a_table_joins_no_stream() -> None:
    stream = Stream.items([{"ad": "tea"}])
    keyed, rows_by_key = shown().key_by("ad"), stream.key_by("ad")
    with pytest.raises(
        UsageError, match=r"join of a KeyedTable takes a KeyedTable, not a KeyedStream: call to_t"
    ):
        keyed.join(rows_by_key)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"join of a KeyedStream takes a KeyedStream, not a KeyedTable: call"
    ):
        rows_by_key.join(keyed)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"join of a KeyedTable takes a KeyedTable, not a Table: call key_by"
    ):
        keyed.join(shown())  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="broadcast_join of a Table takes a Table, not a Stream: call to_table"
    ):
        shown().broadcast_join(stream, "ad")  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="broadcast_join of a Stream takes a Stream, not a Table: call to_table"
    ):
        stream.broadcast_join(shown(), "ad")  # type: ignore[arg-type]


def test_a_look_up_in_a_small_table() -> None:
    small = Table.from_arrow(pa.table({"code": ["tea", "ink"], "n": [7, 8]}))
    found = shown().broadcast_join(small, {"ad": "code"}, "left", suffix="_of_ad")
    assert names(found) == ["ad", "at", "n", "n_of_ad"]
    assert sorted(((row["n"], row["n_of_ad"]) for row in rows(found)), key=repr) == [
        (1, 7), (2, 7), (3, 8), (4, None)
    ]  # fmt: skip
    assert found.plan.gives.time == shown().plan.gives.time
    assert sorted(row["n"] for row in rows(shown().broadcast_join(small, {"ad": "code"}))) == [1, 2, 3]


def test_what_a_look_up_cannot_do_is_said() -> None:
    small = Table.from_arrow(pa.table({"code": ["tea"]}))
    for wrong, error, says in (
        (lambda: shown().broadcast_join(small, "ad"), UnknownName, "small side: there is no column 'ad'"),
        (lambda: shown().broadcast_join(small, "ad"), UnknownName, r"write on=\{'ad': COLUMN\}"),
        (lambda: shown().broadcast_join(small, {"add": "code"}), UnknownName, r"write on=\{COLUMN: 'code'\}"),
        (lambda: shown().broadcast_join(small, {"code": "ad"}), UnknownName, r"write on=\{'ad': 'code'\}"),
        (lambda: shown().broadcast_join(small, 3), UsageError, "takes on='column'"),  # type: ignore[arg-type]
        (lambda: shown().broadcast_join(Table.generate(), {"n": "number"}), InvalidGraph, "bound its source"),
        (lambda: shown().broadcast_join(small.rebalance(), {"ad": "code"}), InvalidGraph, "every subtask"),
    ):
        with pytest.raises(error, match=says):
            wrong()


# --- what is known before a job runs ------------------------------------------------------------------


MOMENT = pa.timestamp("us", "UTC")
LEFT = pa.schema({"t": MOMENT, "user": pa.dictionary(pa.int8(), pa.string()), "n": pa.int64()})
RIGHT = pa.schema({"id": pa.string(), "at": MOMENT, "n": pa.int32()})
HOUR = timedelta(hours=1)


def left() -> Table:
    return Table.from_arrow(LEFT.empty_table()).event_time("t")


def right() -> Table:
    return Table.from_arrow(RIGHT.empty_table()).event_time("at")


def last(table: Table) -> Node:
    (node,) = table.plan.ends
    return node


def test_a_join_exchanges_both_sides_by_key() -> None:
    joined = left().key_by("user").join(right().key_by("id"), "left", within=HOUR)
    node = last(joined)
    operator = planned(node)
    assert isinstance(operator, IntervalJoin)
    assert operator.progress.bounds == (3_600_000_000, 3_600_000_000)
    assert [(feed.input, feed.exchange) for feed in node.feeds] == [
        (0, Exchange("hash", keys=("user",))),
        (1, Exchange("hash", keys=("id",))),
    ]
    assert node.label == "join"
    assert joined.plan.gives.schema is not None
    assert joined.plan.gives.schema.equals(
        pa.schema({"user": pa.string(), "t": MOMENT, "n": pa.int64(), "at": MOMENT, "n_right": pa.int32()})
    )
    assert joined.plan.gives.time == BESIDE


def test_outer_joins_have_nullable_columns() -> None:
    def strict(schema: pa.Schema, time: str) -> Table:
        fixed = pa.schema([field.with_nullable(False) for field in schema])
        return Table.from_arrow(fixed.empty_table()).event_time(time)

    def nullable(how: Any) -> list[bool]:
        joined = strict(LEFT, "t").key_by("user").join(strict(RIGHT, "at").key_by("id"), how)
        assert joined.plan.gives.schema is not None
        return [field.nullable for field in joined.plan.gives.schema]

    assert nullable("inner") == [False] * 5
    assert nullable("left") == [False] * 3 + [True] * 2
    assert nullable("full") == [True] * 5


def test_a_broadcast_join_sends_the_small_side_to_all() -> None:
    joined = left().broadcast_join(right(), {"user": "id"}, "left")
    node = last(joined)
    assert isinstance(planned(node), BroadcastJoin)
    assert node.step.first_input == planned(node).first_input == 1
    assert [(feed.input, feed.exchange) for feed in node.feeds] == [(0, None), (1, Exchange("broadcast"))]
    assert joined.plan.gives.schema is not None
    assert joined.plan.gives.schema.names == [*LEFT.names, "at", "n_right"]
    assert joined.plan.gives.schema.field("user").type == LEFT.field("user").type
    assert joined.plan.gives.time == EventTime(column="t")


@pytest.mark.parametrize("how", ["right", "full"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array([True]), pa.array([7])),
        (pa.array([0.5], pa.float32()), pa.array([0.1])),
        (pa.array([0.5], pa.float32()), pa.array([1e300])),
        (pa.array(["0.50"]).cast(pa.decimal128(5, 2)), pa.array([0.125])),
        (pa.array([0.5]), pa.array(["0.1"]).cast(pa.decimal128(5, 2))),
    ],
    ids=str,
)
def test_no_key_becomes_another_where_a_right_row_has_no_partner(
    how: Any, left: pa.Array, right: pa.Array
) -> None:
    keyed = [Table.from_arrow(pa.table({"k": keys})).key_by("k") for keys in (left, right)]
    with pytest.raises(UsageError, match="the key of a right record does not fit .*would be another key"):
        run(keyed[0].join(keyed[1], how=how).collect())


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.decimal128(5, 2)], ids=str)
def test_whole_numbers_are_not_made_to_stand_for_fractions(kind: pa.DataType) -> None:
    whole = Table.from_arrow(pa.table({"k": [1]})).key_by("k")
    other = Table.from_arrow(pa.table({"n": pa.array([1], kind)})).key_by("n")
    for how in ("right", "full"):
        with pytest.raises(
            UsageError, match=rf"join with how='{how}' .* left's column 'k' of type int64, and"
        ):
            whole.join(other, how=how)  # type: ignore[arg-type]
    assert run(whole.join(other, how="left").collect()).rows == [{"k": 1}]
    assert run(other.join(whole, how="full").collect()).rows == [{"n": 1}]


def test_keys_that_are_the_same_in_the_type_of_the_left_stand_for_right_rows() -> None:
    left = Table.from_arrow(pa.table({"k": pa.array([0.5], pa.float32())})).key_by("k")
    right = Table.from_arrow(pa.table({"k": [0.25, float("inf"), None]})).key_by("k")
    found = run(left.join(right, how="right").collect()).rows
    assert sorted(map(str, found)) == ["{'k': 0.25}", "{'k': None}", "{'k': inf}"]
