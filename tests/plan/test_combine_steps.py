"""Aggregations that are split in two before an exchange: which, where, and what they give then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.operators import combining
from minishuffle.plan.planner import plan_job
from support.cutjobs import Cut, run

SALES = pa.table(
    {
        "k": pa.array([1, 2, 1, None] * 50, pa.int8()),
        "n": pa.array([*range(199), None], pa.int32()),
        "w": pa.array(range(200), pa.int64()),
        "x": pa.array(range(200), pa.float64()),
    }
)
EVERYWHERE = ("combining_everywhere", "needed_columns", "chaining")
ALL: Any = {"n": ("n", "sum"), "low": ("x", "min"), "high": ("x", "max"), "count": ("n", "count")}


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "SHORT_ROWS", 1)


def sales() -> Table:
    return Table.from_arrow(SALES)


def steps(table: Table, *, optimise: tuple[str, ...] | None = None) -> list[str]:
    return [node.label for node in plan_job(table.collect(), parallelism=2, optimise=optimise).nodes]


def answer(table: Table, cut: Cut) -> Counter[str]:
    return Counter(map(str, run(table.collect(), cut).rows))


def test_an_aggregation_behind_a_blocking_exchange_is_two_steps() -> None:
    counted = sales().exchange("blocking").key_by("k").count().name("counts")
    plan = plan_job(counted.collect(), parallelism=2)
    assert [(node.label, node.id) for node in plan.nodes][1:4] == [
        ("count/partial", "counts/partial"),
        ("key_by", ""),
        ("counts", "counts"),
    ]
    assert [vertex.operators for vertex in plan.graph.vertices] == [
        ["from_arrow", "count/partial"],
        ["counts", "collect"],
    ]
    assert plan.graph.edges[0].kind == "blocking"
    assert [vertex.name for vertex in plan.graph.vertices] == ["from_arrow", "counts -> collect"]
    assert "ships k (key of counts), partial count (counts)" in counted.explain(parallelism=2)


def test_where_a_lost_row_would_stand_for_many_it_is_split_on_demand_alone() -> None:
    counted = sales().key_by("k").count()
    assert "count/partial" not in steps(counted)
    assert "count/partial" in steps(counted, optimise=EVERYWHERE)
    assert "count/partial" not in steps(sales().exchange("blocking").key_by("k").count(), optimise=())


@pytest.mark.parametrize(
    ("column", "function", "splits"),
    [
        ("n", "sum", True),
        ("w", "sum", False),
        ("x", "sum", False),
        ("w", "min", True),
        ("x", "max", True),
        ("x", "count", True),
        ("n", "mean", False),
        ("n", "count_distinct", False),
    ],
)
def test_what_depends_on_how_rows_are_grouped_stays_whole(column: str, function: str, splits: bool) -> None:
    table = sales().key_by("k").aggregate(r=(column, function), c=("n", "count"))
    assert ("aggregate/partial" in steps(table, optimise=EVERYWHERE)) is splits


def test_what_emits_before_the_end_or_shares_its_input_stays_whole() -> None:
    table = sales()
    assert "count/partial" not in steps(table.key_by("k").count("batch"), optimise=EVERYWHERE)
    both = Stream.together(table.key_by("k").count().collect(), table.to_count())
    nodes = plan_job(both, parallelism=2, optimise=EVERYWHERE).nodes
    assert "count/partial" not in [node.label for node in nodes]


@pytest.mark.parametrize(("parallelism", "rows"), [(1, None), (3, 7)])
@pytest.mark.parametrize(
    "build",
    [
        lambda table: table.key_by("k").aggregate(**ALL),
        lambda table: table.union(table.filter(pc.field("n") > 9)).key_by("k", "x").count(),
        lambda table: table.rename({"k": "partial k"}).key_by("partial k").aggregate(**ALL),
        lambda table: table.key_by("k").aggregate(**ALL).key_by("n").count(),
        lambda table: table.filter(pc.field("n") > 999).key_by("k").aggregate(**ALL),
    ],
)
def test_answers_are_equal_whatever_is_split(build: Any, parallelism: int, rows: int | None) -> None:
    whole = answer(build(sales()), Cut(parallelism, optimise=()))
    cut = Cut(parallelism, 3, rows)
    assert answer(build(sales().exchange("blocking")), cut) == whole
    for optimise in (EVERYWHERE, ("combining_everywhere",)):
        assert answer(build(sales()), replace(cut, optimise=optimise)) == whole


def test_less_is_shipped() -> None:
    counted = sales().select("k").key_by("k").count().collect()
    without, combined = (run(counted, Cut(optimise=each)).bytes_shipped for each in ((), EVERYWHERE))
    assert combined * 2 < without
