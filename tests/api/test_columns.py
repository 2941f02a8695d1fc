"""``col``: what its operators and methods give, against plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from minishuffle.api import columns
from minishuffle.api.columns import ColumnExpression, col
from minishuffle.api.stream import Table
from minishuffle.errors import UnknownName, UsageError
from minishuffle.operators.evaluation import computed
from support.cutjobs import run

OSLO = ZoneInfo("Europe/Oslo")
LATE = datetime(2026, 3, 29, 0, 30, 15, tzinfo=UTC)
"""In Oslo the clocks go from 2 to 3 half an hour later."""
ROWS = pa.table(
    {
        "n": [7, -7, None],
        "m": pa.array([2, 2, 2], pa.int8()),
        "x": [7.5, -7.5, None],
        "word": ["  Straße, a", "b,c", None],
        "at": pa.array([LATE, datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC), None], pa.timestamp("us")),
        "there": pa.array([LATE, datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC), None]).cast(
            pa.timestamp("ns", "Europe/Oslo")
        ),
        "user": [{"name": "ann"}, {"name": "bob"}, None],
    }
)
n, m, x, word, at, there = map(col, ("n", "m", "x", "word", "at", "there"))


def naive(*fields: int) -> datetime:
    return datetime(*fields)  # type: ignore[arg-type]


CASES: dict[str, tuple[ColumnExpression, list[Any]]] = {
    "+": (n + 1 + m, [10, -4, None]),
    "reflected": (1 - n, [-6, 8, None]),
    "mixed": (2 * n - pc.field("m"), [12, -16, None]),
    "/": (n / m, [3, -3, None]),
    "//": (n // m, [3, -4, None]),
    "// of a constant": (15 // n, [2, -3, None]),
    "// of floats": (x // 2, [3.0, -4.0, None]),
    "%": (n % m, [1, 1, None]),
    "% of a constant": (15 % n, [1, -6, None]),
    "negative": (-n, [-7, 7, None]),
    "abs": (abs(n), [7, 7, None]),
    "round": (round(x), [8.0, -8.0, None]),
    "==": (n == 7, [True, False, None]),
    "!=": (n != 7, [False, True, None]),
    "order": ((n > -7) | (n <= -8), [True, False, None]),
    "and": (~(n >= 7) & (x < 0), [False, True, None]),
    "constant and": (True & (n >= 7), [True, False, None]),
    "is_in": (n.is_in([7, 8]), [True, False, False]),
    "is_in with None": (n.is_in({7, None}), [True, False, True]),
    "is_in of None": (n.is_in([None]), [False, False, True]),
    "is_in of none": (n.is_in([]), [False, False, False]),
    "is_null": (n.is_null(), [False, False, True]),
    "is_nan": (x.is_nan(), [False, False, None]),
    "fill_null": (n.fill_null(m), [7, -7, 2]),
    "if_else": ((n > 0).if_else("up", word), ["up", "b,c", None]),
    "cast": (n.cast(float), [7.0, -7.0, None]),
    "cast by name": (n.cast("string"), ["7", "-7", None]),
    "cast to Arrow's": (n.cast(pa.int8()), [7, -7, None]),
    "field": (col("user", "name"), ["ann", "bob", None]),
    "lower": (word.str.lower(), ["  straße, a", "b,c", None]),
    "upper": (word.str.upper(), ["  STRAẞE, A", "B,C", None]),
    "len": (word.str.len(), [11, 3, None]),
    "contains": (word.str.contains("ße,"), [True, False, None]),
    "matches": (word.str.matches("^[a-c],"), [False, True, None]),
    "starts_with": (word.str.starts_with("b"), [False, True, None]),
    "ends_with": (word.str.ends_with("a"), [True, False, None]),
    "strip": (word.str.strip(), ["Straße, a", "b,c", None]),
    "strip characters": (word.str.strip(" ac"), ["Straße,", "b,", None]),
    "replace": (word.str.replace(",", "."), ["  Straße. a", "b.c", None]),
    "slice": (word.str.slice(2, 7), ["Straß", "c", None]),
    "slice from the end": (word.str.slice(-1), ["a", "c", None]),
    "split": (word.str.split(","), [["  Straße", " a"], ["b", "c"], None]),
    "split words": (word.str.strip().str.split(), [["Straße,", "a"], ["b,c"], None]),
    "join": (
        word.str.slice(-1).str.join("x", word.str.len().cast(str), separator="-"),
        ["a-x-11", "c-x-3", None],
    ),
    "year": (there.dt.year(), [2026, 2026, None]),
    "month": (at.dt.month(), [3, 12, None]),
    "day": (there.dt.day(), [29, 1, None]),
    "hour": (there.dt.hour(), [1, 0, None]),
    "minute": (at.dt.minute(), [30, 59, None]),
    "second": (at.dt.second(), [15, 59, None]),
    "weekday": (at.dt.weekday(), [6, 2, None]),
    "date": (there.dt.date(), [date(2026, 3, 29), date(2026, 1, 1), None]),
    "date without a zone": (at.dt.date(), [date(2026, 3, 29), date(2025, 12, 31), None]),
    "truncate": (at.dt.truncate("week"), [naive(2026, 3, 23), naive(2025, 12, 29), None]),
    "truncate there": (
        there.dt.truncate("day").cast(pa.timestamp("us", "UTC")),
        [datetime(2026, 3, 28, 23, tzinfo=UTC), datetime(2025, 12, 31, 23, tzinfo=UTC), None],
    ),
    "format": (there.dt.format("%d.%m. %H:%M"), ["29.03. 01:30", "01.01. 00:59", None]),
}


def test_each_expression_gives_in_a_job_what_python_does() -> None:
    """In one job, so that each is packed and opened again."""
    made = {f"c{number}": expression for number, (expression, _) in enumerate(CASES.values())}
    table = Table.from_arrow(ROWS).parallel(1).with_columns(**made)
    rows = run(table.select(*made).collect()).rows
    for name, number in zip(CASES, made, strict=True):
        expected = CASES[name][1]
        assert [row[number] for row in rows] == expected, name
        assert [type(row[number]) for row in rows] == list(map(type, expected)), name


def quotients(kind: pa.DataType, a: Any, b: Any) -> tuple[Any, Any]:
    table = pa.table({"a": pa.array([a], kind), "b": pa.array([b], kind)})
    found = computed(table, [(col("a") // col("b")).expression, (col("a") % col("b")).expression])
    assert found.schema.types == [kind, kind]
    return tuple(column[0].as_py() for column in found.columns)  # type: ignore[return-value]


KINDS = {pa.int8(): (-(2**7), 2**7 - 1), pa.int64(): (-(2**63), 2**63 - 1), pa.uint64(): (0, 2**64 - 1)}


@given(st.data(), st.sampled_from(list(KINDS)))
def test_whole_numbers_are_divided_as_in_python(data: Any, kind: pa.DataType) -> None:
    least, most = KINDS[kind]
    numbers = st.integers(least, most) | st.sampled_from([least, least + 1, most])
    a, b = data.draw(numbers), data.draw(numbers.filter(bool))
    assume((a, b) != (least, -1))  # whose quotient is greater than all of the type
    assert quotients(kind, a, b) == (a // b, a % b)


FLOATS = st.floats(-1e12, 1e12).filter(lambda number: abs(number) > 1e-3)


@given(FLOATS, FLOATS)
@example(1.0, 0.1)
@example(-7.5, 2.0)
def test_floats_are_divided_as_in_python(a: float, b: float) -> None:
    quotient, rest = quotients(pa.float64(), a, b)
    assert quotient == a // b
    assert math.isclose(rest, a % b, rel_tol=1e-12)


@pytest.mark.parametrize("kind", [pa.int32(), pa.float64()])
@pytest.mark.parametrize("use", [lambda a, b: a // b, lambda a, b: a % b])
def test_a_division_by_zero_is_an_error_and_of_null_it_is_null(
    kind: pa.DataType, use: Callable[..., Any]
) -> None:
    expression = use(col("a"), col("b")).expression
    table = pa.table({"a": pa.array([1, None], kind), "b": pa.array([0, 0], kind)})
    with pytest.raises(pa.ArrowInvalid, match="divide by zero"):
        computed(table, [expression])
    assert computed(table.slice(1), [expression]).column(0).to_pylist() == [None]


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: col(), r"col takes the name of a column, such as col\('price'\)"),
        (lambda: col(1), r"not \(1\)"),  # type: ignore[arg-type]
        (lambda: n == None, r"write x\.is_null\(\)"),  # noqa: E711
        (lambda: n != None, r"or ~x\.is_null\(\)"),  # noqa: E711
        (lambda: n > 1 and n < 3, r"\(n > 1\) is true for some rows .* write & \| ~"),
        (lambda: n < None, r"write x\.is_null\(\)"),
        (lambda: n + object(), "<object .* is no column, and no constant that Arrow takes"),
        (lambda: word.is_in("abc"), "is_in takes a list of values of one type, not 'abc': these are the"),
        (lambda: n.is_in([1, "x"]), "is_in takes a list of values of one type, not .*convert 'x'"),
        (lambda: n.cast("number"), "cast: .*number.*give one of Arrow"),
        (lambda: n.cast(datetime), "cast.*timestamp"),
        (lambda: at.dt.truncate("fortnight"), "truncate takes 'second', .*not 'fortnight'"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_answered_where_they_are_written(use: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        use()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("sum", ": it has one value for each row: write key_by(...).aggregate(total=('amount', 'sum'))"),
        ("alias", ": write with_columns(name=...)"),
        ("lower", ": write .str.lower()"),
        ("isnull", ": did you mean 'is_null'?"),
        ("nothing", ""),
    ],
)
def test_methods_of_others_are_answered_with_those_here(name: str, way: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(n, name)
    assert str(raised.value) == f"a column has no attribute {name!r}{way}"


def test_mistakes_of_columns_name_the_step() -> None:
    table = Table.from_arrow(ROWS)
    with pytest.raises(UnknownName, match="filter: there is no column 'wrd'; did you mean 'word'"):
        table.filter(col("wrd").str.len() > 1)
    with pytest.raises(UsageError, match=r"with_columns\(y=.*\.str\.len\(\) takes texts, and col\('n'\) is"):
        table.with_columns(y=n.str.len())


def test_an_expression_shows_what_it_computes() -> None:
    assert repr(n > 1) == "<ColumnExpression (n > 1)>"
    assert str((n + 1).expression) == "add_checked(n, 1)"


def test_an_older_pyarrow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(Expression=pc.Expression)
    monkeypatch.setattr(columns, "pc", older)
    with pytest.raises(UsageError, match="need a newer pyarrow"):
        n % pc.field("m")
