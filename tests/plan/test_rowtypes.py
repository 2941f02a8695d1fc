"""Schemas from classes with fields, and from what functions say that they return."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Awaitable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NewType, Required
from uuid import UUID

import pyarrow as pa
import pydantic
import pytest
from typing_extensions import TypedDict

from minishuffle.api.columns import col
from minishuffle.api.stream import Stream
from minishuffle.errors import UsageError
from minishuffle.operators.base import Aside
from minishuffle.plan.rowtypes import named_type, returned_row, unread_annotation
from minishuffle.plan.schemas import arrow_schema


class Typed(TypedDict, total=False):
    n: Required[int]
    tags: list[str]
    at: Annotated[datetime, pa.timestamp("us", "UTC")] | None


class Named(NamedTuple):
    n: int
    kind: Literal["a", "b"] | None = None


@dataclasses.dataclass
class Data:
    typed: Typed
    many: tuple[Named, ...]
    by_name: dict[str, float]
    count: ClassVar[int] = 0


Order = NewType("Order", int)


class Model(pydantic.BaseModel):
    d: date
    t: time
    length: timedelta
    b: bool
    raw: bytes
    digits: Annotated[Decimal, pa.decimal128(9, 2)]
    id: UUID
    order: Order | None


TYPED = [("n", pa.int64()), ("tags", pa.list_(pa.string())), ("at", pa.timestamp("us", "UTC"))]
NAMED = [("n", pa.int64()), ("kind", pa.string())]
SCHEMAS: dict[Any, Any] = {
    Typed: TYPED,
    Named: NAMED,
    Data: [
        ("typed", pa.struct(TYPED)),
        ("many", pa.list_(pa.struct(NAMED))),
        ("by_name", pa.map_(pa.string(), pa.float64())),
    ],
    Model: [
        ("d", pa.date32()),
        ("t", pa.time64("us")),
        ("length", pa.duration("us")),
        ("b", pa.bool_()),
        ("raw", pa.binary()),
        ("digits", pa.decimal128(9, 2)),
        ("id", pa.uuid()),
        ("order", pa.int64()),
    ],
}


@pytest.mark.parametrize("given", SCHEMAS)
def test_a_class_with_fields_is_a_schema(given: Any) -> None:
    assert arrow_schema(given) == pa.schema(SCHEMAS[given])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            datetime,
            r"column 'x' is a datetime, .* choose from pa.timestamp\('us'\) .* pa.timestamp\('us', 'UTC'\)",
        ),
        (Decimal | None, r"column 'x' is a Decimal, .* pa.decimal128\(digits, scale\), .* pa.decimal256"),
        (list[datetime], "column 'x' is a datetime"),
        (None, "is no type for the column 'x'"),
        (Annotated[None, pa.null()], "is no type for the column 'x'"),
        (int | str, "is no type"),
        (Any, "is no type"),
        (set[int], "is no type"),
        (tuple[int, str], "is no type"),
    ],
)
def test_a_type_that_is_none_or_leaves_a_choice_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arrow_schema({"x": kind})
    with pytest.raises(UsageError, match=message):
        arrow_schema(dataclasses.make_dataclass("Row", [("x", kind)]))


def test_classes_without_types_are_refused() -> None:
    with pytest.raises(UsageError, match="Empty has no fields with types"):
        arrow_schema(dataclasses.make_dataclass("Empty", []))
    hidden = dataclasses.make_dataclass("Hidden", [("x", "Nowhere")])
    with pytest.raises(UsageError, match="annotations of Hidden cannot be read: name 'Nowhere'"):
        arrow_schema(hidden)
    with pytest.raises(UsageError, match="schema takes a pyarrow.Schema, a dict"):
        arrow_schema(int)


def row(given: Any) -> Typed: ...  # type: ignore[empty-body]
def row_or_aside(given: Any) -> Named | Aside: ...  # type: ignore[empty-body]
def rows(given: Any) -> Iterator[Data]: ...  # type: ignore[empty-body]
def maybe_rows(given: Any, context: Any) -> list[Named | Aside] | None: ...
async def awaited(given: Any) -> Model: ...  # type: ignore[empty-body]
def awaitable(given: Any) -> Awaitable[Model]: ...  # type: ignore[empty-body]
def other(given: Any) -> dict[str, int]: ...  # type: ignore[empty-body]
def hidden(given: Any) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821


def of_hidden(given: Nowhere) -> Typed: ...  # type: ignore[empty-body, name-defined]  # noqa: F821


class Called:
    def __call__(self, given: Any) -> Named: ...  # type: ignore[empty-body]

    def method(self, given: Any) -> Data: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("fn", "returns", "expected"),
    [
        (row, "row", Typed),
        (functools.partial(row), "row", Typed),
        (of_hidden, "row", Typed),
        (row_or_aside, "row", Named),
        (Called(), "row", Named),
        (Called().method, "row", Data),
        (Named, "row", Named),
        (rows, "rows", Data),
        (maybe_rows, "rows", Named),
        (awaited, "awaited", Model),
        (awaitable, "awaited", Model),
        (row, "rows", None),
        (rows, "row", None),
        (row, "awaited", None),
        (other, "row", None),
        (hidden, "row", None),
        (lambda row: row, "row", None),
        (dict, "row", None),
        (str.split, "rows", None),
    ],
)
def test_the_annotation_of_what_is_returned_counts(fn: Any, returns: Any, expected: Any) -> None:
    assert returned_row(fn, returns) is expected


def made_elsewhere(later: bool = False) -> Any:
    class Inner(NamedTuple):
        n: int

    def uses_it(row: Any) -> Inner:
        return Inner(unset) if later else Inner(row)

    if later:
        unset = 1
    return uses_it


def test_a_class_that_a_closure_uses_is_known_after_its_function_has_returned() -> None:
    for later in (False, True):
        found = returned_row(made_elsewhere(later), "row")
        assert found is not None and found.__name__ == "Inner"


def test_what_cannot_be_read_is_named() -> None:
    def odd(row: Any) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        return row

    assert returned_row(odd, "row") is None
    told = unread_annotation(functools.partial(odd, 1))
    assert told == "what odd is annotated to return cannot be read: name 'Missing' is not defined"
    for fn in (made_elsewhere(), len, str, lambda row: row, functools.partial(made_elsewhere)):
        assert unread_annotation(fn) is None


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.timestamp("us"), pa.timestamp("ms", "Europe/Zurich"), pa.string()]
)
def test_a_type_is_read_by_the_name_that_arrow_prints(kind: pa.DataType) -> None:
    assert named_type(str(kind)) == kind
    table = Stream.items([{"x": None}]).to_table({"x": str(kind)})
    assert table.schema.field("x").type == kind
    assert table.with_columns(x=col("x").cast(str(kind))).schema == table.schema


@pytest.mark.parametrize("name", ["datetime", "timestamp[us, tz=]", "timestamp[h, tz=UTC]"])
def test_a_name_of_no_type_is_refused_as_it_was_written(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{name!r} is no type")):
        Stream.items([{"x": None}]).to_table({"x": name})
    with pytest.raises(UsageError, match=re.escape(f"{name!r} is no type")):
        col("x").cast(name)
