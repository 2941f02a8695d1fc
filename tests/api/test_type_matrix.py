"""Every type of Arrow, by itself and inside of others, in every operator of the Table API.

A cell (operator, type, nesting) gives what plain Python makes of the values, or is refused where the job is
written, and then stands in ``refused_types.json``, which may only become shorter. Columns of all types go
through one job where they stand side by side; where one chooses which rows meet, each has a job of its own.
``MINISHUFFLE_SOAK=1`` cuts every job in more ways, with random values.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, get_args
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.exchange.schemas import batch_without_rows
from minishuffle.operators.aggregates import Function
from support.cutjobs import Cut, run
from support.soak import SOAK, examples

pytestmark = pytest.mark.slow

CUTS = [Cut(1), *(Cut(parts, seed=seed, rows=2, merges=True) for parts in (2, 3) for seed in range(4))]
HOUR = timedelta(hours=1)

# --- types and values ---------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A type with values, none of which is null; ``stored`` are those that an extension holds."""

    type: pa.DataType
    values: tuple[Any, ...]
    stored: tuple[Any, ...] = ()


SIGNED, UNSIGNED, FLOATS = (-2, 0, 3), (0, 1, 255), (-1.5, 0.25, 2.0)
DECIMALS = (Decimal("-1.25"), Decimal("0.50"), Decimal("99.99"))
TIMES, SPANS = (time(0), time(1, 2, 3), time(23, 59, 59)), (timedelta(-1), timedelta(0), timedelta(seconds=5))
DATES = (date(1969, 12, 31), date(1970, 1, 1), date(2026, 3, 29))
NAIVE = tuple(datetime.combine(day, time(1, 30)) for day in DATES)
MOMENTS = tuple(moment.replace(tzinfo=UTC) for moment in NAIVE)
TEXTS, BYTES = ("", "a", "é" * 40), (b"", b"\0", b"z" * 70)
LISTS, STRUCTS = ([], [1, None], [2]), ({"a": -1}, {"a": None}, {"a": 2})
MAPS = ([], [("k", 1)], [("k", 1), ("l", None)])
NAMES = (UUID(int=0), UUID(int=5), UUID(int=1 << 127))
UNITS = ("s", "ms", "us", "ns")

FACTORIES: dict[str, list[Kind]] = {
    "null": [Kind(pa.null(), (None,))],
    "bool_": [Kind(pa.bool_(), (False, True))],
    **{f"int{bits}": [Kind(getattr(pa, f"int{bits}")(), SIGNED)] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": [Kind(getattr(pa, f"uint{bits}")(), UNSIGNED)] for bits in (8, 16, 32, 64)},
    **{f"float{bits}": [Kind(getattr(pa, f"float{bits}")(), FLOATS)] for bits in (16, 32, 64)},
    **{
        f"decimal{bits}": [Kind(getattr(pa, f"decimal{bits}")(8, 2), DECIMALS)] for bits in (32, 64, 128, 256)
    },
    "time32": [Kind(pa.time32(unit), TIMES) for unit in UNITS[:2]],
    "time64": [Kind(pa.time64(unit), TIMES) for unit in UNITS[2:]],
    "timestamp": [
        *(Kind(pa.timestamp(unit), NAIVE) for unit in UNITS),
        *(Kind(pa.timestamp(unit, zone), MOMENTS) for unit in UNITS for zone in ("UTC", "Asia/Tokyo")),
    ],
    "duration": [Kind(pa.duration(unit), SPANS) for unit in UNITS],
    "date32": [Kind(pa.date32(), DATES)],
    "date64": [Kind(pa.date64(), DATES)],
    "month_day_nano_interval": [Kind(pa.month_day_nano_interval(), ((1, 2, 3000), (0, 0, 0)))],
    **{name: [Kind(getattr(pa, name)(), TEXTS)] for name in ("string", "utf8", "large_string", "large_utf8")},
    "string_view": [Kind(pa.string_view(), TEXTS)],
    "binary": [Kind(pa.binary(), BYTES), Kind(pa.binary(2), (b"\0\0", b"ab", b"zz"))],
    "large_binary": [Kind(pa.large_binary(), BYTES)],
    "binary_view": [Kind(pa.binary_view(), BYTES)],
    "list_": [Kind(pa.list_(pa.int64()), LISTS), Kind(pa.list_(pa.int8(), 1), ([1], [None]))],
    **{
        name: [Kind(getattr(pa, name)(pa.int32()), LISTS)]
        for name in ("large_list", "list_view", "large_list_view")
    },
    "map_": [Kind(pa.map_(pa.string(), pa.int64()), MAPS)],
    "struct": [Kind(pa.struct({"a": pa.int64()}), STRUCTS)],
    "dictionary": [
        Kind(pa.dictionary(index, held), values)
        for index in (pa.int8(), pa.uint64())
        for held, values in ((pa.string(), TEXTS), (pa.string_view(), TEXTS), (pa.binary_view(), BYTES))
    ],
    "uuid": [Kind(pa.uuid(), NAMES, tuple(name.bytes for name in NAMES))],
    "bool8": [Kind(pa.bool8(), (False, True), (0, 1))],
    "json_": [Kind(pa.json_(), ("1", "[2]"), ("1", "[2]"))],
    "opaque": [Kind(pa.opaque(pa.int8(), "of", "nobody"), (1, 2), (1, 2))],
    "fixed_shape_tensor": [Kind(pa.fixed_shape_tensor(pa.int8(), [2]), ([1, 2], [3, 4]), ([1, 2], [3, 4]))],
    "run_end_encoded": [Kind(pa.run_end_encoded(pa.int32(), pa.int64()), (1, 2))],
    **{
        name: [Kind(getattr(pa, name)([pa.field("a", pa.int8())]), (1, 2))]
        for name in ("sparse_union", "dense_union")
    },
    "union": [Kind(pa.union([pa.field("a", pa.int8())], "sparse"), (1, 2))],
}
NO_TYPES: Final = {"array", "field", "from_numpy_dtype", "nulls", "scalar", "schema"}
"""What pyarrow's other functions of that kind create."""
KINDS: dict[str, Kind] = {str(kind.type): kind for kinds in FACTORIES.values() for kind in kinds}
NESTINGS: Final = ("alone", "in a struct", "in a list", "in a dictionary")
Places: TypeAlias = "tuple[int | None, ...]"
PLACES: Places = (1, 0, None, 1, 2, 0)
"""Which value each row has; None: null."""
GROUPS, AT = (0, 0, 0, 1, 1, 1), (3, 1, 2, 6, 4, 5)


def test_every_factory_of_pyarrow_is_here() -> None:
    def makes_types(name: str) -> bool:
        text = getattr(pa, name).__doc__ or ""
        is_function = callable(getattr(pa, name)) and not isinstance(getattr(pa, name), type)
        return (
            is_function
            and bool(re.search(r"^\s*(Create|Alias for)\b", text, re.M))
            and "type" in text[:400].lower()
        )

    assert {name for name in dir(pa) if name[0] != "_" and makes_types(name)} - NO_TYPES == FACTORIES.keys()


def array_of(kind: Kind, places: Places) -> pa.Array:
    """The values in those places."""

    def chosen(values: tuple[Any, ...]) -> list[Any]:
        return [None if place is None else values[place % len(values)] for place in places]

    type_, values = kind.type, chosen(kind.values)
    if kind.stored:
        return pa.ExtensionArray.from_storage(type_, pa.array(chosen(kind.stored), type_.storage_type))
    if pa.types.is_run_end_encoded(type_):
        return pc.run_end_encode(pa.array(values))
    if pa.types.is_union(type_):
        tags, parts = pa.array([0] * len(values), pa.int8()), [pa.array(values, pa.int8())]
        if type_.mode == "sparse":
            return pa.UnionArray.from_sparse(tags, parts, ["a"])
        return pa.UnionArray.from_dense(tags, pa.array(range(len(values)), pa.int32()), parts, ["a"])
    if pa.types.is_dictionary(type_):
        long = pa.large_binary() if type_.value_type == pa.binary_view() else pa.large_string()
        return pa.array(values, pa.dictionary(type_.index_type, long)).cast(type_)
    return pa.array(values, type_)


@dataclass(frozen=True)
class Column:
    """A column of one type in one nesting, and what Python has for its rows."""

    kind: str
    nesting: str

    @property
    def name(self) -> str:
        return f"x{list(KINDS).index(self.kind)}_{NESTINGS.index(self.nesting)}"

    def array(self, places: Places = PLACES) -> pa.Array:
        kind = KINDS[self.kind]
        if self.nesting == "in a dictionary":
            distinct = array_of(kind, (0, 1, 2))
            indices = pa.array([None if place is None else place % 3 for place in places], pa.int8())
            return pa.DictionaryArray.from_arrays(indices, distinct)
        array = array_of(kind, places)
        if self.nesting == "in a struct":
            return pa.StructArray.from_arrays([array], ["v"])
        if self.nesting == "in a list":
            return pa.ListArray.from_arrays(pa.array(range(len(array) + 1), pa.int32()), array)
        return array

    def values(self, places: Places = PLACES) -> list[Any]:
        held = KINDS[self.kind].values
        plain = [None if place is None else held[place % len(held)] for place in places]
        if self.nesting == "in a struct":
            return [{"v": value} for value in plain]
        return [[value] for value in plain] if self.nesting == "in a list" else plain


def possible(column: Column) -> bool:
    """Whether pyarrow makes such a column at all."""
    try:
        column.array().validate()
    except (pa.ArrowException, TypeError):
        return False
    return True


COLUMNS = [column for kind in KINDS for nesting in NESTINGS if possible(column := Column(kind, nesting))]


def table_of(columns: list[Column], places: Places) -> pa.Table:
    times = pa.array([moment * 1_000_000 for moment in AT], pa.timestamp("us", "UTC"))
    fixed = {"g": pa.array(GROUPS), "t": times, "i": pa.array(range(len(PLACES)))}
    return pa.table({**fixed, **{column.name: column.array(places) for column in columns}})


def timed(columns: list[Column], places: Places = PLACES) -> Table:
    return Table.from_arrow(table_of(columns, places)).event_time("t", out_of_order=HOUR)


# --- operators that columns pass side by side -------------------------------------------------------------

Values: TypeAlias = "list[Any]"
By: TypeAlias = "dict[Any, Any]"


@dataclass(frozen=True)
class Wide:
    """An operator on all columns at once. ``rows`` runs it on a table; a row is known by its column ``key``,
    and has, of a column ``x``, ``result.format("x")``, which is what ``expected`` makes of the values."""

    rows: Callable[[Table, list[str], Cut], Iterator[Any]]
    expected: Callable[[Values], By]
    key: str = "i"
    result: str = "{}"
    most: int = 1000
    """Columns in one job."""


def itself(values: Values) -> By:
    return dict(enumerate(values))


def wide(
    build: Callable[[Table, list[str]], Table],
    expected: Callable[[Values], By] = itself,
    key: str = "i",
    result: str = "{}",
) -> Wide:
    def rows(table: Table, names: list[str], cut: Cut) -> Iterator[Any]:
        job = build(table, names).collect()
        yield
        yield run(job, cut).rows

    return Wide(rows, expected, key, result)


def through_files(table: Table, names: list[str], cut: Cut) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made")
        job = table.to_files(path)
        yield
        run(job, cut)
        yield run(Table.from_files(path).collect(), cut).rows


def grouped(fold: Callable[[Values], Any]) -> Callable[[Values], By]:
    """What ``fold`` makes of the values of each group, nulls left out."""

    def expected(values: Values) -> By:
        found: By = {}
        for group in set(GROUPS):
            mine = [
                value for value, its in zip(values, GROUPS, strict=True) if its == group and value is not None
            ]
            found[group] = fold(mine)
        return found

    return expected


def at_time(which: Callable[..., Any]) -> Callable[[Values], By]:
    def expected(values: Values) -> By:
        rows = list(zip(GROUPS, AT, values, strict=True))
        return {
            group: which((at, n) for n, (its, at, _) in enumerate(rows) if its == group)[1]
            for group in set(GROUPS)
        }

    return lambda values: {group: values[row] for group, row in expected(values).items()}


def mean(values: Values) -> float | None:
    return float(sum(map(Fraction, values)) / len(values)) if values else None


def spread(values: Values) -> float | None:
    return statistics.stdev(map(float, values)) if len(values) > 1 else None


FOLDS: dict[str, Callable[[Values], By]] = {
    "count": grouped(len),
    "count_distinct": grouped(lambda values: len(set(map(repr, values)))),
    "sum": grouped(lambda values: sum(values[1:], values[0] + 0) if values else None),
    "min": grouped(lambda values: min(values, default=None)),
    "max": grouped(lambda values: max(values, default=None)),
    "mean": grouped(mean),
    "std": grouped(spread),
    "first": at_time(min),
    "last": at_time(max),
}


def folded(function: str, *, windows: bool) -> Wide:
    def build(table: Table, names: list[str]) -> Table:
        keyed = table.key_by("g")
        wanted: Any = {name: (name, function) for name in names}
        return keyed.window(HOUR).aggregate(**wanted) if windows else keyed.aggregate(**wanted)

    made = wide(build, FOLDS[function], "g")
    # Those of one job hold each other's columns.
    return replace(made, most=4) if function in ("first", "last") else made


def other(table: Table, names: list[str]) -> Table:
    return table.select("i", "g", "t", *names)


def is_there(values: Values) -> By:
    return {n: value is not None for n, value in enumerate(values)}


WIDE: dict[str, Wide] = {
    "nothing": wide(lambda table, names: table),
    "rebalance": wide(lambda table, names: table.rebalance()),
    "select": wide(other),
    "rename": wide(lambda table, names: table.rename({name: f"y{name}" for name in names}), result="y{}"),
    "filter": wide(lambda table, names: table.filter(pc.field("i") >= 0)),
    "with_columns": wide(
        lambda table, names: table.with_columns(**{f"y{name}": pc.field(name) for name in names}),
        result="y{}",
    ),
    "is_valid": wide(
        lambda table, names: table.with_columns(**{name: pc.field(name).is_valid() for name in names}),
        is_there,
    ),
    "equality": wide(
        lambda table, names: table.with_columns(**{name: pc.field(name) == pc.field(name) for name in names}),
        lambda values: {n: None if value is None else True for n, value in enumerate(values)},
    ),
    "map_batches": wide(
        lambda table, names: table.map_batches(lambda batch: batch, schema=table.plan.gives.schema)
    ),
    "union": wide(
        lambda table, names: table.union(table.filter(pc.field("i") < 0).with_columns(more=pc.scalar(1)))
    ),
    "key_by others": wide(lambda table, names: table.key_by("i").top_n(1, "g")),
    "top_n of others": wide(lambda table, names: table.key_by("g").top_n(3, "i")),
    "join of others": wide(
        lambda table, names: table.key_by("i").join(other(table, names).key_by("i"), "left", within=HOUR),
        result="{}_right",
    ),
    "asof_join of others": wide(
        lambda table, names: table.key_by("i").asof_join(other(table, names).key_by("i")), result="{}_right"
    ),
    "to_rows": wide(lambda table, names: table.to_rows()),  # type: ignore[arg-type,return-value]
    "to_table": wide(lambda table, names: table.to_rows().to_table(table.plan.gives.schema)),
    "to_files": Wide(through_files, itself),
    **{f"aggregate {function}": folded(function, windows=False) for function in FOLDS},
    **{f"window {function}": folded(function, windows=True) for function in FOLDS},
}

# --- operators of which one column decides which rows meet --------------------------------------------


def by_value(values: Values, *, nulls: bool = True) -> Counter[str]:
    return Counter(as_text(value) for value in values if nulls or value is not None)


def as_text(value: Any) -> str:
    """Equal for what is equal, in whatever time zone."""
    return repr(value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value)


def counted(rows: list[Any], name: str) -> Counter[str]:
    return Counter({as_text(row[name]): row["count"] for row in rows})


def shown(rows: list[Any], name: str) -> Counter[str]:
    return Counter(as_text(row[name]) for row in rows)


def greatest(values: Values) -> Counter[str]:
    """The two greatest of each group, a null below all; of equal ones the earlier."""
    found: Counter[str] = Counter()
    for group in set(GROUPS):
        mine = [n for n, its in enumerate(GROUPS) if its == group]
        there = sorted((n for n in mine if values[n] is not None), key=lambda n: AT[n])
        there.sort(key=lambda n: values[n], reverse=True)
        found.update(as_text(values[n]) for n in (there + [n for n in mine if values[n] is None])[:2])
    return found


class Narrow(NamedTuple):
    """An operator by one column: its job, what is looked at of the rows, and what that is to be."""

    build: Callable[[Table, str, Table], Table]
    found: Callable[[list[Any], str], Counter[str]]
    expected: Callable[[Values], Counter[str]]


def squares(values: Values) -> Counter[str]:
    return Counter({key: count**2 for key, count in by_value(values, nulls=False).items()})


def both_alone(values: Values) -> Counter[str]:
    return squares(values) + Counter({"None": 2 * values.count(None)})


def without_nulls(values: Values) -> Counter[str]:
    return by_value(values, nulls=False)


def once(values: Values) -> Counter[str]:
    return Counter(dict.fromkeys(by_value(values), 1))


NARROW: dict[str, Narrow] = {
    "key_by count": Narrow(lambda table, x, small: table.key_by(x).count(), counted, by_value),
    "key_by several": Narrow(lambda table, x, small: table.key_by(x, "i").count(), shown, by_value),
    "distinct": Narrow(lambda table, x, small: table.key_by(x).distinct(), shown, once),
    "top_n": Narrow(lambda table, x, small: table.key_by(x).top_n(1, "i"), shown, once),
    "window": Narrow(lambda table, x, small: table.key_by(x).window(HOUR).count(), counted, by_value),
    "session_window": Narrow(
        lambda table, x, small: table.key_by(x).session_window(HOUR).count(), counted, by_value
    ),
    "count_window": Narrow(lambda table, x, small: table.key_by(x).count_window(1).count(), shown, by_value),
    "join": Narrow(
        lambda table, x, small: table.key_by(x).join(table.key_by(x), within=HOUR), shown, squares
    ),
    "full join": Narrow(
        lambda table, x, small: table.key_by(x).join(table.key_by(x), "full", within=HOUR), shown, both_alone
    ),
    "asof_join": Narrow(lambda table, x, small: table.key_by(x).asof_join(table.key_by(x)), shown, by_value),
    "broadcast_join": Narrow(lambda table, x, small: table.broadcast_join(small, x), shown, without_nulls),
    "top_n by it": Narrow(lambda table, x, small: table.key_by("g").top_n(2, x), shown, greatest),
    "explode": Narrow(
        lambda table, x, small: table.explode(x),
        shown,
        lambda values: Counter(as_text(each) for value in values if value is not None for each in value),
    ),
}


def small_of(column: Column) -> Table:
    return Table.from_arrow(
        pa.table({column.name: column.array((0, 1, 2)[: len(KINDS[column.kind].values)])})
    )


# --- the matrix ---------------------------------------------------------------------------------------

Cell: TypeAlias = "tuple[str, str, str]"
"""Operator, nesting, type."""
REFUSED_FILE = Path(__file__).with_name("refused_types.json")
REFUSED_MAX = 5_735
"""How many cells are refused: fewer, never more, but for those of a new operator."""


def expand(listed: dict[str, dict[str, Any]]) -> set[Cell]:
    there = {(column.nesting, column.kind) for column in COLUMNS}
    return {
        (operator, nesting, kind)
        for operator, nestings in listed.items()
        for nesting, kinds in nestings.items()
        for kind in ([kind for its, kind in there if its == nesting] if kinds == "all" else kinds)
    }


def contract(cells: set[Cell]) -> dict[str, dict[str, Any]]:
    """As the file has them."""
    found: dict[str, dict[str, Any]] = {}
    for operator in sorted({operator for operator, _, _ in cells}):
        for nesting in NESTINGS:
            kinds = sorted(kind for its, how, kind in cells if (its, how) == (operator, nesting))
            every = len(kinds) == sum(column.nesting == nesting for column in COLUMNS)
            if kinds:
                found.setdefault(operator, {})[nesting] = "all" if every else kinds
    return found


def is_refused(build: Callable[..., Any], *given: Any) -> bool:
    """Whether that job cannot be written. Any other error than ours is none of a user."""
    try:
        build(*given)
    except UsageError:
        return True
    return False


def first_step(operator: str, table: Table, column: Column) -> None:
    next(WIDE[operator].rows(table, [column.name], Cut()))


def build_narrow(operator: str, table: Table, column: Column) -> None:
    NARROW[operator].build(table, column.name, small_of(column)).collect()


@cache
def refused() -> frozenset[Cell]:
    """The cells that are refused where the job is written."""
    found: set[Cell] = set()
    for column in COLUMNS:
        place = (column.nesting, column.kind)
        if is_refused(timed, [column]):
            found.update((operator, *place) for operator in (*WIDE, *NARROW))
            continue
        table = timed([column])
        found.update((name, *place) for name in WIDE if is_refused(first_step, name, table, column))
        found.update((name, *place) for name in NARROW if is_refused(build_narrow, name, table, column))
    return frozenset(found)


@cache
def listed() -> frozenset[Cell]:
    """The cells that are refused, as the file has them."""
    return frozenset(expand(json.loads(REFUSED_FILE.read_text())))


def test_what_is_refused_is_listed_and_becomes_less() -> None:
    more = refused() - listed()
    assert not more, (
        "refused now: take these types, or, if the operator is new, add this to the list, and raise "
        f"REFUSED_MAX: {json.dumps(contract(set(more)))}"
    )
    assert sorted(listed() - refused()) == [], "taken now: take it from the list, and lower REFUSED_MAX"
    assert len(listed()) == REFUSED_MAX


def test_the_matrix_has_its_size_and_each_aggregation() -> None:
    assert FOLDS.keys() == set(get_args(Function))
    assert len(KINDS) >= 60
    assert len(COLUMNS) == len(KINDS) * len(NESTINGS)
    assert len(COLUMNS) * len({*WIDE, *NARROW}) > 13_000


def taken(operator: str, nestings: Collection[str] = NESTINGS) -> list[Column]:
    return [
        column
        for column in COLUMNS
        if column.nesting in nestings and (operator, column.nesting, column.kind) not in listed()
    ]


def wrong(operator: str, columns: list[Column], cut: Cut, places: Places = PLACES) -> list[str]:
    """The columns of which the operator gives something else, with what; those that raise by themselves."""
    each = WIDE[operator]
    untyped = [column for column in columns if column.kind == "null"]
    if 0 < len(untyped) < len(columns):  # Expressions take longer where there are such.
        pieces = [untyped, [column for column in columns if column.kind != "null"]]
    else:
        pieces = [columns[at : at + each.most] for at in range(0, len(columns), each.most)]
    if len(pieces) != 1:
        return [line for some in pieces for line in wrong(operator, some, cut, places)]
    try:
        steps = each.rows(timed(columns, places), [column.name for column in columns], cut)
        next(steps)
        rows = next(steps)
    except Exception as error:
        if len(columns) == 1:
            return [f"{columns[0]}: {error!r:.300}"]
        half = len(columns) // 2
        pieces = [columns[:half], columns[half:]]
        return [line for some in pieces for line in wrong(operator, some, cut, places)]
    problems = []
    for column in columns:
        found = {row[each.key]: row[each.result.format(column.name)] for row in rows}
        expected = each.expected(column.values(places))
        if not same(found, expected) or len(rows) != len(expected):
            problems.append(f"{column}: {found!r:.300}, not {expected!r:.300}")
    return problems


def same(found: By, expected: By) -> bool:
    """Sums of floats and of their squares are added up in another order."""
    return found.keys() == expected.keys() and all(
        math.isclose(found[key], value, rel_tol=1e-14)
        if isinstance(value, float) and isinstance(found[key], float)
        else found[key] == value
        for key, value in expected.items()
    )


@pytest.mark.parametrize("operator", WIDE)
def test_columns_pass_side_by_side(operator: str) -> None:
    for cut in CUTS if SOAK else CUTS[1:2]:
        assert wrong(operator, taken(operator), cut) == []


def told_apart(table: Table, operator: str, x: str) -> Any:
    """Its rows with the column under the operator's name: those of all sinks of a run come together."""
    names = [x, "count"] if "count" in (table.plan.gives.columns or ()) else [x]
    return table.select(*names).rename({x: operator}).collect(operator)


def misjoined(column: Column, operators: list[str], cut: Cut, places: Places = PLACES) -> list[str]:
    """The operators that give something else by that column."""
    table, x = timed([column], places), column.name
    results = {name: NARROW[name].build(table, x, small_of(column)) for name in operators}
    try:
        jobs = [told_apart(result, name, x) for name, result in results.items()]
        rows = run(jobs[0] if len(jobs) == 1 else Stream.together(*jobs), cut).rows
    except Exception as error:
        if len(operators) == 1:
            return [f"{operators[0]} {column}: {error!r:.300}"]
        return [line for name in operators for line in misjoined(column, [name], cut, places)]
    problems = []
    for name in operators:
        found = NARROW[name].found([row for row in rows if name in row], name)
        expected = NARROW[name].expected(column.values(places))
        if found != expected:
            problems.append(f"{name} {column}: {found!r:.300}, not {expected!r:.300}")
    return problems


DECODED: Final = ("key_by count", "join", "broadcast_join", "top_n by it")
"""What is asked of dictionaries outside of the soak: exchanges decode them, so others hardly differ."""


def operators_by(column: Column) -> list[str]:
    operators = DECODED if column.nesting == "in a dictionary" and not SOAK else NARROW
    return [name for name in operators if (name, column.nesting, column.kind) not in listed()]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_rows_meet_by_a_column(nesting: str, half: int) -> None:
    problems = []
    for column in [column for column in COLUMNS if column.nesting == nesting][half::2]:
        if operators := operators_by(column):
            for cut in CUTS[:3] if SOAK else CUTS[nesting == "alone" :][:1]:
                problems += misjoined(column, operators, cut)
    assert problems == []


def test_a_function_of_batches_may_be_called_without_rows_whatever_the_types() -> None:
    table = table_of([column for column in COLUMNS if not re.search("run_end|union", column.kind)], PLACES)
    empty = batch_without_rows(table.schema)
    assert (empty.num_rows, empty.schema) == (0, table.schema)


# --- random values ---------------------------------------------------------------------------------------


@settings(max_examples=examples(10))
@given(
    data=st.data(),
    places=st.tuples(*[st.sampled_from([None, 0, 1, 2])] * len(PLACES)),
    seed=st.integers(0, 99),
)
def test_random_values_in_random_columns(data: st.DataObject, places: Places, seed: int) -> None:
    cut = Cut(1 + seed % 3, seed=seed, rows=1 + seed % 4, merges=True)
    operator = data.draw(st.sampled_from([*WIDE, *NARROW]))
    columns = data.draw(st.lists(st.sampled_from(taken(operator)), min_size=1, max_size=5, unique=True))
    if operator in WIDE:
        assert wrong(operator, columns, cut, places) == []
    else:
        assert misjoined(columns[0], [operator], cut, places) == []
