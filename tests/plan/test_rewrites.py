"""Only columns that something later reads are shipped, and that changes no answer."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import UsageError, WrongColumns
from minishuffle.operators.base import Program
from minishuffle.plan.graph import JobGraph
from minishuffle.plan.planner import compile_job
from minishuffle.plan.programs import open_program
from support.cutjobs import Cut, run

HOUR = timedelta(hours=1)
SECOND = 1_000_000
ROWS = 400
LEFT = pa.table(
    {
        "k": [number % 5 for number in range(ROWS)],
        "t": [number * SECOND for number in range(ROWS)],
        "n": range(ROWS),
        "l": [[number, 1] for number in range(ROWS)],
        "u": [f"u{number}" for number in range(ROWS)],
    }
)
RIGHT = pa.table({"k": range(4), "t": [SECOND] * 4, "n": range(4), "u": ["a", "b", "c", "d"], "w": range(4)})
n, k = pc.field("n"), pc.field("k")


def left() -> Table:
    return Table.from_arrow(LEFT).event_time("t", out_of_order=HOUR)


def right() -> Table:
    return Table.from_arrow(RIGHT).event_time("t", out_of_order=HOUR)


def shipped(stream: StreamBase) -> list[frozenset[str] | None]:
    """The columns of each edge, in their order."""
    graph: JobGraph = compile_job(stream, parallelism=2)
    programs: list[Program] = [open_program(vertex.program, cloudpickle.loads) for vertex in graph.vertices]
    outputs = sorted((output for program in programs for output in program.outputs), key=lambda o: o.edge)
    return [output.columns for output in outputs]


def columns(*names: str) -> frozenset[str]:
    return frozenset(names)


@pytest.mark.slow
def test_of_200_columns_one_that_is_used_costs_what_it_costs_alone() -> None:
    wide = pa.table({f"c{number}": range(5_000) for number in range(200)})
    table = Table.from_arrow(wide)
    pruned, selected = (
        run(given.key_by("c0").aggregate(total=("c7", "sum")).collect(), Cut(2))
        for given in (table, table.select("c0", "c7"))
    )
    assert 0 < pruned.bytes_shipped <= 1.1 * selected.bytes_shipped
    whole = table.map_batches(lambda batch: batch).key_by("c0").top_n(1, by="c7").collect()
    assert run(whole, Cut(2)).bytes_shipped > 20 * pruned.bytes_shipped


JOBS: dict[str, tuple[Callable[[], Table], list[frozenset[str] | None]]] = {
    "count": (lambda: left().key_by("k").count(), [columns("k")]),
    "distinct": (lambda: left().key_by("u").distinct(), [columns("u")]),
    "top_n": (lambda: left().key_by("k").top_n(1, by="n").select("n"), [None]),
    "windows": (lambda: left().key_by("k").window(HOUR).aggregate(s=("n", "sum")), [columns("k", "t", "n")]),
    "filter": (
        lambda: left().rebalance().filter(n > 3).key_by("k").count(),
        [columns("k", "n"), columns("k")],
    ),
    "with_columns": (
        lambda: left().rebalance().with_columns(n=n + k, m=k).key_by("n").aggregate(s=("m", "sum")),
        [columns("k", "n"), columns("n", "m")],
    ),
    "rename": (
        lambda: left().rebalance().rename({"n": "number", "u": "v"}).key_by("number").count(),
        [columns("n", "u"), columns("number")],
    ),
    "drop": (lambda: left().rebalance().drop("u").key_by("k").count(), [columns("k", "u"), columns("k")]),
    "explode": (
        lambda: left().rebalance().explode("l").key_by("k").aggregate(s=("l", "sum")),
        [columns("k", "l"), columns("k", "l")],
    ),
    "map_batches": (
        lambda: left().rebalance().map_batches(lambda batch: batch, columns=["n"]).select("n"),
        [columns("n")],
    ),
    "union": (lambda: left().union(left().filter(n > 7)).key_by("k").count(), [columns("k")] * 2),
    "join": (
        lambda: left().key_by("k").join(right().key_by("k"), "left", within=HOUR).select("k", "n_right"),
        [columns("k", "t"), columns("k", "t", "n")],
    ),
    "full join": (
        lambda: left().key_by("k").join(right().key_by("k"), "full", within=HOUR).select("k", "w", "u"),
        [columns("k", "t", "u"), columns("k", "t", "w")],
    ),
    "look-up": (
        lambda: left().rebalance().broadcast_join(right(), "k", "left").select("n", "u_right"),
        [columns("k", "n"), columns("k", "u")],
    ),
    "twice": (
        lambda: left().filter(n > 3).rebalance().union(left().select("k", "n").rebalance()).filter(k > 1),
        [None] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_rewrites_change_no_answer(name: str) -> None:
    make, expected = JOBS[name]
    table = make()
    if expected:
        found = shipped(table.collect())
        assert sorted(map(str, map(sorted_names, found))) == sorted(map(str, map(sorted_names, expected)))
    pruned = [run(table.collect(), cut).rows for cut in (Cut(1), Cut(2, seed=3, rows=50, merges=True))]
    whole = run(table.collect(), Cut(1, optimise=())).rows
    assert whole
    for rows in pruned:
        assert sorted(map(repr, rows)) == sorted(map(repr, whole))


def sorted_names(names: frozenset[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def test_late_rows_keep_all_columns() -> None:
    dropping = left().key_by("k").window(HOUR).count()
    assert shipped(dropping.collect()) == [columns("k", "t")]
    counted = left().key_by("k").window(HOUR, late="side").count()
    both = Stream.together(counted.collect(), counted.late.collect("late"))
    assert shipped(both)[0] is None


def test_a_column_that_rows_lack_is_null_in_them() -> None:
    rows: list[dict[str, Any]] = [{"k": 1}, {"k": 1, "v": 2}, {"k": 2}, {"v": 5}]
    table = Stream.items(rows).to_table().key_by("k").aggregate(s=("v", "sum"))
    for cut in (Cut(1), Cut(1, rows=1), Cut(2, rows=1)):
        found = run(table.collect(), cut).rows
        assert sorted(found, key=repr) == [{"k": 1, "s": 2}, {"k": 2, "s": None}, {"k": None, "s": 5}]


ASKING: dict[str, Callable[[Table], Table]] = {
    "filter": lambda table: table.filter(pc.field("v") > 1),
    "function of texts": lambda table: table.filter(pc.utf8_upper(pc.field("s")) == "X"),
    "with_columns": lambda table: table.with_columns(w=pc.coalesce(pc.utf8_upper(pc.field("s")), "none")),
    "rename": lambda table: table.rename({"v": "w"}).filter(pc.field("w") > 1),
    "drop": lambda table: table.drop("v").filter(pc.field("k") > 0),
    "explode": lambda table: table.explode("l"),
    "behind a filter": lambda table: table.filter(pc.field("k") > 0).key_by("k").aggregate(s=("v", "sum")),
    "top_n": lambda table: table.key_by("k").top_n(1, by="v").select("k", "v"),
    "look-up": lambda table: table.broadcast_join(Table.from_arrow(pa.table({"v": [2]})), "v", "left"),
    "texts": lambda table: table.filter(pc.field("s").isin(["x"])),
    "declared behind": lambda table: table.map_batches(
        lambda batch: batch, columns=["k", "v"], schema={"k": int, "v": int}
    ),
    "of a function": lambda table: table.map_batches(lambda batch: batch, columns=["k", "v"]),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_column_of_later_rows_alone_gives_the_same_answer_however_they_are_cut(name: str) -> None:
    rows: list[dict[str, Any]] = [
        {"k": 1},
        {"k": 2},
        {"k": 1, "v": 2, "s": "x", "l": [1, 2]},
        {"k": 1, "v": 3},
    ]
    table = ASKING[name](Stream.items(rows).to_table())
    answers = []
    for cut in (Cut(1), Cut(1, rows=1), Cut(2, rows=1), Cut(1, rows=2)):
        found = run(table.collect(), cut).rows
        answers.append(sorted(repr(sorted((n, v) for n, v in row.items() if v is not None)) for row in found))
    assert answers[0]
    assert answers.count(answers[0]) == len(answers)


UNKNOWN: dict[str, Callable[[Table], Table]] = {
    "division": lambda table: table.with_columns(z=pc.coalesce(pc.field("n"), 7) / 2),
    "date": lambda table: table.with_columns(z=pc.coalesce(pc.field("n"), datetime.date(2026, 1, 1))),
    "field of a struct": lambda table: table.filter(pc.field("n", "a") == 1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_a_type_that_is_not_known_is_no_answer(name: str) -> None:
    with pytest.raises(
        WrongColumns,
        match=r"no row has a value in 'n', .*: give it one, as in with_columns\(n=col\('n'\)",
    ):
        UNKNOWN[name](Stream.items([{"k": 1, "n": None}]).to_table())


KNOWN: dict[str, tuple[pc.Expression, Any]] = {
    "number": (pc.coalesce(pc.field("n"), 7), 7),
    "text": (pc.coalesce(pc.utf8_upper(pc.field("n")), "none"), "none"),
    "texts": (pc.field("n").isin(["a"]), False),
    "other column": (pc.coalesce(pc.field("n"), pc.field("k")), 2**60 + 1),
    "condition": (pc.case_when(pc.make_struct(pc.field("n"), field_names=["n"]), "y", "n"), "n"),
    "null": (pc.year(pc.field("n")), None),
    "not a number": (pc.if_else(pc.field("n").is_null(), pc.scalar(float("nan")), 1.0), None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_the_same_whatever_a_type_turns_out_to_be_is_an_answer(name: str) -> None:
    expression, value = KNOWN[name]
    rows = [{"k": 2**60 + 1, "n": None}]
    (row,) = run(Stream.items(rows).to_table().with_columns(z=expression).collect(), Cut(1)).rows
    assert row["z"] == value or name == "not a number" and math.isnan(row["z"])


def test_a_result_has_one_type_also_where_no_type_of_what_it_reads_is_known() -> None:
    rows = Stream.items([{"k": k, "n": None, "t": k} for k in (1, 9)]).to_table().event_time("t")
    some = pc.if_else(pc.field("k") > 3, pc.field("n") > 1, pc.field("n").is_null())
    table = rows.with_columns(z=some, one=pc.scalar(1)).key_by("one").aggregate(z=("z", "last"))
    assert run(table.collect(), Cut(1, rows=1)).rows == [{"one": 1, "z": None}]
    odd = rows.with_columns(z=pc.if_else(pc.field("k") > 3, pc.coalesce(pc.field("n"), 7), pc.field("n")))
    with pytest.raises(WrongColumns, match=r"with_columns\(z=...\) reads a column without values"):
        run(odd.collect(), Cut(1, rows=1))


def test_each_expression_finds_the_types_of_its_own_columns() -> None:
    rows: list[dict[str, Any]] = [{"k": 1}, {"k": 2, "s": "x", "at": datetime.datetime(2026, 1, 1)}]
    table = Stream.items(rows).to_table()
    table = table.with_columns(u=pc.utf8_upper(pc.field("s")), y=pc.year(pc.field("at")), one=pc.scalar(1))
    found = run(table.select("u", "y", "one").collect(), Cut(1, rows=1)).rows
    assert found == [{"u": None, "y": None, "one": 1}, {"u": "X", "y": 2026, "one": 1}]


def test_files_are_read_for_the_columns_alone(tmp_path: Path) -> None:
    pq.write_table(LEFT, tmp_path / "1.parquet")
    pq.write_table(RIGHT.select(["t", "u"]), tmp_path / "2.parquet")
    table = Table.from_files(tmp_path).key_by("k").aggregate(s=("n", "sum"))
    graph = compile_job(table.collect(), parallelism=1)
    program: Program = open_program(graph.vertices[0].program, cloudpickle.loads)
    assert program.source is not None
    assert program.source.columns == ["k", "n"]  # type: ignore[attr-defined]
    rows = run(table.collect(), Cut(2)).rows
    assert {row["k"]: row["s"] for row in rows} == {
        None: None, **{key: sum(range(key, ROWS, 5)) for key in range(5)}
    }  # fmt: skip


def test_each_rewrite_can_be_left_out(tmp_path: Path) -> None:
    pq.write_table(LEFT, tmp_path / "1.parquet")
    table = Table.from_files(tmp_path).filter(n > 3).key_by("k").count().collect()

    def read(*optimise: str) -> tuple[list[str], Any]:
        graph = compile_job(table, parallelism=2, optimise=optimise)
        program = open_program(graph.vertices[0].program, cloudpickle.loads)
        return [vertex.name for vertex in graph.vertices], program.source.columns  # type: ignore[union-attr]

    chained = ["parquet -> filter", "count -> collect"]
    apart = ["parquet", "filter", "count", "collect"]
    assert read("needed_columns", "projected_scans", "chaining") == (chained, ["k", "n"])
    assert read("needed_columns", "projected_scans") == (apart, ["k", "n"])
    assert read("needed_columns", "chaining") == read("chaining") == (chained, None)
    with pytest.raises(
        UsageError, match="no rewrite 'prune': write some of combining, combining_everywhere, needed_co"
    ):
        compile_job(table, optimise=["prune"])


# --- event times ----------------------------------------------------------------------------------------


def calls() -> Stream[Any]:
    rows = [{"user": "ann", "t": 1}, {"user": "bob", "t": 2}]
    return Stream.items(rows).event_time(lambda row: row["t"])


def named(row: Any) -> Any:
    return row["user"]


HOUR = timedelta(hours=1)
TIMED: dict[str, tuple[Callable[[], StreamBase], list[bool]]] = {
    "nobody reads them": (lambda: calls().rebalance().map(named).rebalance().collect(), [False, False]),
    "a window": (lambda: calls().map(named).key_by(str).window(HOUR).count().collect(), [True]),
    "behind a window": (
        lambda: calls().map(named).key_by(str).window(HOUR).count().rebalance().map(str).collect(),
        [True, False],
    ),
    "no window": (lambda: calls().map(named).key_by(str).fold(int, lambda n, _: n + 1).collect(), [False]),
    "they stand in the rows": (
        lambda: (
            Stream.items([{"user": "ann", "t": 1}])
            .event_time("t")
            .filter(bool)
            .key_by("user")
            .window(HOUR)
            .count()
            .collect()
        ),
        [False],
    ),
    "a function of time": (
        lambda: calls().key_by("user").process(lambda row, context: []).rebalance().collect(),
        [True, False],
    ),
    "columns": (lambda: calls().rebalance().map(named).to_table({"v": str}).collect(), [False]),
    "event time again": (
        lambda: calls().rebalance().map(dict).event_time("t").key_by("user").window(HOUR).count().collect(),
        [False, False],
    ),
    "a side output": (
        lambda: (
            calls().rebalance().map(named, sides=["a"]).side("a").key_by(str).window(HOUR).count().collect()
        ),
        [True, True, True],
    ),
}


@pytest.mark.parametrize("name", TIMED)
def test_event_times_are_shipped_where_they_are_read(name: str) -> None:
    make, expected = TIMED[name]
    graph = JobGraph.from_bytes(compile_job(make()).to_bytes())
    outputs = [
        output
        for vertex in graph.vertices
        for output in open_program(vertex.program, cloudpickle.loads).outputs
    ]
    assert [output.times for output in sorted(outputs, key=lambda output: output.edge)] == expected


def timed_table() -> Table:
    return Table.from_arrow(pa.table({"k": [1], "t": [1], "n": [2]})).event_time("t").rebalance()


TABLES: dict[str, tuple[Callable[[], StreamBase], list[tuple[list[str] | None, bool]]]] = {
    "a window": (
        lambda: timed_table().drop("t").key_by("k").window(HOUR).count().collect(),
        [(["k", "t"], True), (["k"], True)],
    ),
    "nobody reads them": (
        lambda: timed_table().drop("t").key_by("k").count().collect(),
        [(["k", "t"], False), (["k"], False)],
    ),
    "the first by time": (
        lambda: timed_table().select("k", "n").key_by("k").aggregate(a=("n", "first")).collect(),
        [(["k", "n"], True), (["k", "n"], True)],
    ),
    "they stand in a column": (
        lambda: timed_table().filter(n > 3).key_by("k").window(HOUR).count().collect(),
        [(["k", "n", "t"], False), (["k", "t"], False)],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_event_times_of_tables_are_shipped_where_they_are_read(name: str) -> None:
    make, expected = TABLES[name]
    graph = JobGraph.from_bytes(compile_job(make()).to_bytes())
    outputs = [
        output
        for vertex in graph.vertices
        for output in open_program(vertex.program, cloudpickle.loads).outputs
    ]
    found = [(sorted_names(each.columns), each.times) for each in sorted(outputs, key=lambda each: each.edge)]
    assert found[: len(expected)] == expected


def test_where_one_of_two_reads_them_the_other_gets_none() -> None:
    users = calls().map(named)
    both = Stream.together(
        users.key_by(str).window(HOUR).count().collect("a"), users.rebalance().collect("b")
    )
    graph = JobGraph.from_bytes(compile_job(both).to_bytes())
    outputs = [
        output
        for vertex in graph.vertices
        for output in open_program(vertex.program, cloudpickle.loads).outputs
    ]
    assert Counter(output.times for output in outputs) == {True: 2, False: 1}
