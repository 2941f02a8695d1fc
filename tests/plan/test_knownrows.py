"""The schema that a stream's rows are known to have when the plan is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UsageError, WrongColumns
from minishuffle.exchange.batch import Batch
from minishuffle.operators.row_conversion import RowsSchema, ToArrow
from support.cutjobs import Cut, run


class Point(NamedTuple):
    x: int
    name: str


def point(row: Any) -> Point:
    return Point(row["x"], "p")


def points(row: Any, context: Any = None) -> Iterator[Point]:
    yield Point(row["x"], "p")
    yield Point(row["x"], "q")


@dataclass
class Place:
    at: datetime
    point: Point
    near: list[Point]


async def awaited(row: Any) -> Point:
    return Point(row["x"], "p")


ITEMS = [{"x": 1}, {"x": True, "y": None}, {"x": 2.5, "z": "t"}]
OF_ITEMS = pa.schema({"x": pa.float64(), "y": pa.null(), "z": pa.string()})
POINT = pa.schema({"x": pa.int64(), "name": pa.string()})
PLACED = pa.struct(list(POINT))
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SMALL = pa.schema({"x": pa.int8()})


def items() -> Stream[Any]:
    return Stream.items(ITEMS)


def small() -> Stream[Any]:
    return Table.from_arrow(pa.table({"x": [1, 2]}, schema=SMALL)).to_rows()


KNOWN: dict[str, tuple[Callable[[], Stream[Any]], pa.Schema]] = {
    "items": (items, OF_ITEMS),
    "items of a class": (
        lambda: Stream.items([Place(NOON, Point(1, "p"), [Point(2, "q")])]).filter(bool),
        pa.schema({"at": pa.timestamp("us", "UTC"), "point": PLACED, "near": pa.list_(PLACED)}),
    ),
    "behind": (
        lambda: items().filter(bool).parallel(2).name("x").event_time("x").rebalance(),
        OF_ITEMS,
    ),
    "union": (
        lambda: Stream.items([{"x": True}]).union(Stream.items([{"x": 2}])),
        pa.schema({"x": pa.int64()}),
    ),
    "table": (lambda: small().filter(bool).broadcast(), SMALL),
    "both": (
        lambda: items().union(small()),
        pa.schema({"x": pa.float64(), "y": pa.null(), "z": pa.string()}),
    ),
    "map": (lambda: items().map(point).filter(bool), POINT),
    "map, paired": (lambda: small().event_time("x").map(point), POINT),
    "flat_map": (lambda: small().flat_map(points), POINT),
    "map_async": (lambda: small().map_async(awaited, concurrency=1), POINT),
    "process": (lambda: small().key_by("x").process(points), POINT),
    "errors": (
        lambda: small().filter(bool, on_error="side").errors,
        pa.schema({"operator": pa.string(), "error": pa.string(), "record": pa.struct(list(SMALL))}),
    ),
    "errors of to_table": (
        lambda: items().to_table({"x": int}, on_error="side").errors,
        pa.schema({"operator": pa.string(), "error": pa.string(), "record": pa.struct(list(OF_ITEMS))}),
    ),
    "errors of process": (
        lambda: small().key_by("x").process(points, on_error="side").errors,
        pa.schema({"operator": pa.string(), "error": pa.string(), "record": pa.struct(list(SMALL))}),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_columns_are_known_without_a_schema(name: str) -> None:
    make, expected = KNOWN[name]
    table = make().to_table()
    assert table.plan.gives.schema is not None
    assert table.plan.gives.schema.equals(expected)


UNKNOWN: dict[str, Callable[[], Stream[Any]]] = {
    "a lambda": lambda: items().map(lambda row: row),
    "one of a union": lambda: items().union(small().map(lambda row: row)),
    "a timer": lambda: small().key_by("x").process(points, lambda at, context: []),
    "generate": lambda: Stream.generate(records=1),
    "count": lambda: small().key_by("x").count(),
    "side": lambda: small().map(point, sides=["odd"]).side("odd"),
    "errors of rows that are not known": lambda: Stream.generate(records=1).map(str, on_error="side").errors,
    "errors of items without columns": lambda: Stream.items([1]).map(str, on_error="side").errors,
    "no items": lambda: Stream.items([]),
    "text and dicts": lambda: Stream.text(__file__).union(items()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_columns_are_not_known_behind_other_steps(name: str) -> None:
    stream = UNKNOWN[name]()
    with pytest.raises(InvalidGraph, match=r"to_table at tests/plan/test_knownrows.py:\d+: nothing says"):
        stream.to_table()


def test_lines_of_text_are_the_column_value(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be\nor not\n")
    lines = Stream.text(tmp_path / "a.txt").filter(lambda line: "n" in line)
    table = lines.to_table()
    assert table.plan.gives.schema == pa.schema({"value": pa.string()})
    assert run(table.collect(), Cut()).rows == [{"value": "or not"}]
    errors = lines.map(int, on_error="side").errors.to_table()
    (row,) = run(errors.collect(), Cut()).rows
    assert (row["operator"], row["record"]) == ("map", "or not")


def test_lines_of_text_are_the_only_column_of_a_declared_schema(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("2\nx\n3\n")
    lines = Stream.text(tmp_path / "a.txt").filter(bool)
    assert run(lines.to_table({"line": str}).filter(pc.field("line") > "3").collect(), Cut()).rows == [
        {"line": "x"}
    ]
    two = r"the rows are texts, and the schema has 2 columns \(a, b\): declare one, or map the rows"
    with pytest.raises(UsageError, match=two):
        lines.to_table({"a": str, "b": str})
    with pytest.raises(UsageError, match="'x' does not fit") as failed:
        ran = ToArrow(RowsSchema(pa.schema({"n": pa.uint8()}), are_values=True))
        ran.process(Batch([2, 3, "x"]), 0, lambda batch: None)
    assert failed.value.__notes__ == ["raised in operator 'to_table' by the record 'x'"]


@pytest.mark.parametrize(
    ("items", "error", "says"),
    [
        (
            [{"a": 1}, 5],
            UsageError,
            "Arrow takes rows that are all dicts, or all tuples or lists, and one is 5",
        ),
        (
            [{"a": 1}, {"a": "x"}],
            UsageError,
            "the value 'x' does not fit the type int64 .which other rows have",
        ),
        ([(1, 2)], WrongColumns, "rows like .1, 2. have no column names"),
    ],
)
def test_items_that_make_no_columns_are_an_error_with_its_line(
    items: list[Any], error: type[UsageError], says: str
) -> None:
    with pytest.raises(error, match=rf"^to_table at tests/plan/test_knownrows.py:\d+: .*{says}") as raised:
        Stream.items(items).to_table()
    assert type(raised.value) is error


def test_a_class_of_the_function_that_makes_the_job_is_known() -> None:
    class Inner(NamedTuple):
        x: int

    def inner(row: Any) -> Inner:
        return Inner(row["x"])

    assert small().map(inner).to_table().plan.gives.schema == pa.schema({"x": pa.int64()})


def test_an_annotation_that_cannot_be_read_is_named() -> None:
    def odd(row: Any) -> NotThere:  # type: ignore[name-defined]  # noqa: F821
        return row

    told = "what odd is annotated to return cannot be read: name 'NotThere' is not defined: write to_table"
    with pytest.raises(
        InvalidGraph, match=f"{told}.schema., or define or import that class at the top of the"
    ):
        small().map(odd).to_table()


def test_items_have_their_values_in_the_types_of_all() -> None:
    rows = run(items().to_table().collect(), Cut(2, rows=1)).rows
    assert sorted(rows, key=lambda row: row["x"]) == [
        {"x": 1.0, "y": None, "z": None},
        {"x": 1.0, "y": None, "z": None},
        {"x": 2.5, "y": None, "z": "t"},
    ]


def test_objects_of_classes_and_tuples_of_them_become_columns() -> None:
    table = small().flat_map(points).to_table()
    found = run(table.collect(), Cut(2)).rows
    assert sorted((row["x"], row["name"]) for row in found) == [(1, "p"), (1, "q"), (2, "p"), (2, "q")]


def test_items_of_a_class_become_columns_with_those_inside_them() -> None:
    places = Stream.items([Place(NOON, Point(1, "p"), []), Place(NOON, Point(2, "q"), [Point(3, "r")])])
    found = run(places.to_table().collect(), Cut(2)).rows
    assert sorted((row["point"]["x"], row["near"]) for row in found) == [
        (1, []),
        (2, [{"x": 3, "name": "r"}]),
    ]
