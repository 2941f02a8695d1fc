"""Categories that have an order: whatever would take that of their texts for it refuses them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import WrongColumns
from minishuffle.operators.ordered_categories import refuse_order_in
from support.cutjobs import run

HOUR = timedelta(hours=1)
REFUSED = r"the categories of column '(s\.)?size' have an order .* compare their codes"


def sizes(*, ordered: bool = True, view: bool = False) -> pa.Table:
    """S < M < L, of which the greatest text is S."""
    kind = pa.dictionary(pa.int8(), pa.string(), ordered)
    size = pa.DictionaryArray.from_arrays(pa.array([0, 2, 1], pa.int8()), ["S", "M", "L"], ordered=ordered)
    if view:
        kind = pa.dictionary(pa.int8(), pa.string_view(), ordered)
        size = size.cast(kind)
    nested = pa.StructArray.from_arrays([size], ["size"])
    assert size.type == kind
    return pa.table({"k": [1, 1, 1], "t": [0, 1, 2], "size": size, "s": nested, "m": ["M", "M", "M"]})


SIZE = pc.field("size")
BY_ORDER: dict[str, Callable[[Table], Table]] = {
    "min": lambda table: table.key_by("k").aggregate(least=("size", "min")),
    "max": lambda table: table.key_by("k").aggregate(greatest=("size", "max")),
    "max of windows": lambda table: table.key_by("k").window(HOUR).aggregate(greatest=("size", "max")),
    "max of sessions": lambda table: table.key_by("k").session_window(HOUR).aggregate(most=("size", "max")),
    "top_n": lambda table: table.key_by("k").top_n(1, "size"),
    "less": lambda table: table.filter(SIZE < "M"),
    "between": lambda table: table.filter((SIZE > "L") & (pc.field("m") >= SIZE)),
    "with_columns": lambda table: table.with_columns(is_small=SIZE >= "M"),
    "nested": lambda table: table.filter(pc.field("s", "size") > "M"),
}


@pytest.mark.parametrize("view", [False, True], ids=["strings", "views"])
@pytest.mark.parametrize("case", BY_ORDER)
def test_ordered_categories_are_refused_where_that_is_written(case: str, view: bool) -> None:
    table = Table.from_arrow(sizes(view=view)).event_time("t")
    with pytest.raises(WrongColumns, match=REFUSED):
        BY_ORDER[case](table)
    BY_ORDER[case](Table.from_arrow(sizes(ordered=False, view=view)).event_time("t"))


@pytest.mark.parametrize("case", [case for case in BY_ORDER if case != "nested"])
def test_nor_does_an_exchange_or_a_choice_of_columns_hide_them(case: str) -> None:
    table = Table.from_arrow(sizes()).event_time("t").rebalance()
    table = table.rename({"size": "old"}).select("k", "t", "old", "m")
    table = (
        table.with_columns(l=pc.scalar([1]))
        .rebalance()
        .explode("l")
        .rename({"old": "size"})
        .filter(pc.field("k") == 1)
    )
    with pytest.raises(WrongColumns, match=REFUSED):
        BY_ORDER[case](table)


def test_what_the_refusal_suggests_gives_the_right_value() -> None:
    codes = pc.index_in(SIZE, value_set=pa.array(["S", "M", "L"]))
    for table in (
        Table.from_arrow(sizes()),
        Table.from_arrow(sizes(view=True)),
        Table.from_arrow(sizes()).rebalance(),
    ):
        coded = table.with_columns(code=codes).key_by("k").aggregate(most=("code", "max"))
        assert run(coded.collect()).rows == [{"k": 1, "most": 2}]
        texts = table.with_columns(size=SIZE.cast("string"))
        greatest = texts.key_by("k").aggregate(most=("size", "max"))
        assert run(greatest.collect()).rows == [{"k": 1, "most": "S"}]
        assert [row["size"] for row in run(texts.filter(SIZE < "M").collect()).rows] == ["L"]


def test_equality_keys_and_counts_take_them() -> None:
    table = Table.from_arrow(sizes()).event_time("t")
    assert len(run(table.filter(SIZE == "M").collect()).rows) == 1
    assert len(run(table.filter(SIZE.isin(["S", "L"])).collect()).rows) == 2
    assert len(run(table.key_by("size").count().collect()).rows) == 3
    kinds = table.key_by("k").aggregate(kinds=("size", "count_distinct"), last=("size", "last"))
    assert run(kinds.collect()).rows == [{"k": 1, "kinds": 3, "last": "M"}]


@pytest.mark.parametrize("sent", [False, True])
def test_files_have_no_order_any_more(sent: bool, tmp_path: Path) -> None:
    table = Table.from_arrow(sizes())
    run((table.rebalance() if sent else table).select("k", "size").to_files(tmp_path))
    schema = pq.read_schema(next(tmp_path.glob("*.parquet")))
    assert schema.field("size").type == pa.string()
    greatest = Table.from_files(tmp_path).key_by("k").aggregate(most=("size", "max"))
    assert run(greatest.collect()).rows == [{"k": 1, "most": "S"}]


def test_an_expression_may_read_what_is_not_there() -> None:
    """Whoever computes it says so."""
    for path in (("nowhere",), ("s", "nowhere"), ("size", "x")):
        refuse_order_in("filter", sizes().schema, [pc.field(*path) < "M"])
