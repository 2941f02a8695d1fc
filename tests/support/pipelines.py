"""Steps of random pipelines: what each adds to a stream, and what plain Python makes of a list.

Drawn by the tests of random pipelines, and named by those that were recorded.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa

from minishuffle.api.stream import Stream, Table, WindowedStream
from minishuffle.api.stream_base import StreamBase
from support.plainanswers import (
    SECOND,
    Row,
    Rows,
    by_k,
    greatest,
    groups,
    looked_up,
    plain_aggregate,
    plain_as_of,
    plain_by_number,
    plain_fold,
    plain_join,
    plain_reduce,
    plain_sessions,
    plain_sliding,
    plain_window_aggregate,
    plain_windows,
    values,
)

SCHEMA = pa.schema(
    {"k": pa.int64(), "g": pa.string(), "t": pa.int64(), "v": pa.int64(), "x": pa.float64(), "o": pa.int64()}
)
FLOAT_KEYS = SCHEMA.set(0, pa.field("k", pa.float64()))


class Given:
    """A source of rows, or of Arrow, in some splits."""

    bounded = True

    def __init__(self, rows: Rows, splits: int, format: str, schema: pa.Schema) -> None:
        self.rows, self.count, self.format, self.schema = rows, splits, format, schema

    def splits(self) -> range:
        return range(self.count)

    def read(self, split: int, offset: int) -> Iterator[Any]:
        rows = self.rows[split :: self.count][offset:]
        if rows:
            yield rows if self.format == "rows" else pa.RecordBatch.from_pylist(rows, schema=self.schema)


def source(rows: Rows, splits: int, format: str, schema: pa.Schema = SCHEMA) -> Stream[Any]:
    given, late = Given(rows, splits, format, schema), timedelta(seconds=1000)
    if format == "arrow":
        return Table.source(given, schema).event_time("t", out_of_order=late, on_error="skip").to_rows()
    return Stream.source(given).event_time("t", out_of_order=late, on_error="skip")


DECLARED: list[pa.Schema | None] = [None]
"""The last one is that of :func:`columns`."""


@contextmanager
def declared(schema: pa.Schema | None) -> Iterator[None]:
    """Pipelines that are built meanwhile declare that schema where they would declare none."""
    DECLARED.append(schema)
    try:
        yield
    finally:
        DECLARED.pop()


def columns(stream: Stream[Any]) -> Table:
    """Of rows, the columns that aggregates read."""
    if DECLARED[-1] is not None:
        return stream.map(lambda row: {name: row.get(name) for name in "gtvxo"}).to_table(DECLARED[-1])
    return stream.map(lambda row: {name: as_number(row.get(name)) for name in "gtvxo"}).to_table(AGGREGATED)


AGGREGATED = pa.schema([SCHEMA.field(name) for name in "gtvxo"])


def as_number(value: Any) -> Any:
    """A truth value as the number that it equals: a column of numbers takes no other."""
    return int(value) if isinstance(value, bool) else value


def timed(rows: Rows) -> Rows:
    """Those that have a time."""
    return [row for row in rows if row["t"] is not None]


# --- steps of rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    name: str
    add: Callable[[Stream[Any]], Stream[Any]]
    plain: Callable[[Rows], Rows]

    def __repr__(self) -> str:
        return self.name


def doubled(row: Row) -> Row:
    row["v"] = 2 * row["v"]
    return row


def is_kept(row: Row) -> bool:
    return bool(row["v"] % 3)


def repeated(row: Row) -> Rows:
    return [row] * (abs(row["v"]) % 3)


class Pair(NamedTuple):
    row: Row
    tags: list[int]


def as_pair(row: Row) -> Pair:
    return Pair(row, [1])


def row_of_pair(pair: Any) -> Row:
    """Changes what it gets; which is no ``Pair`` behind any exchange."""
    assert type(pair) is tuple, pair
    row: Row = pair[0]
    row["v"] += pair[1].pop()
    return row


def unsendable_if_odd(row: Row) -> Any:
    return {row["v"]} if row["v"] % 2 else row


def all_more(rows: Rows) -> Rows:
    return [{**row, "v": row["v"] + 1} for row in rows]


def all_even(rows: Rows) -> Rows:
    return [row for row in rows if not row["v"] % 2]


def skipping(stream: Stream[Any]) -> Stream[Any]:
    return stream.map(unsendable_if_odd, on_error="skip").rebalance().map(dict)


def all_doubled(rows: Rows) -> Rows:
    return [doubled(dict(row)) for row in rows]


STEPS = [
    Step("map", lambda s: s.map(doubled), all_doubled),
    Step("filter", lambda s: s.filter(is_kept), lambda rows: list(filter(is_kept, rows))),
    Step("flat_map", lambda s: s.flat_map(repeated), lambda rows: sum(map(repeated, rows), [])),
    Step("rebalance", lambda s: s.rebalance().map(doubled), all_doubled),
    Step("partition", lambda s: s.partition(lambda row, n: row["v"] % n).map(doubled), all_doubled),
    Step("forward", lambda s: s.map(as_pair).forward().map(row_of_pair), all_more),
    Step("exchanged", lambda s: s.map(as_pair).rebalance().map(row_of_pair), all_more),
    Step("skip", skipping, all_even),
    Step("union", lambda s: s.union(s.map(doubled)), lambda rows: rows + all_doubled(rows)),
]


# --- steps that bring records together ------------------------------------------------------------------


@dataclass(frozen=True)
class Keyed:
    """``add`` and ``plain`` take both sides, of which only joins read the second. With ``last`` the last
    row of each key is what counts."""

    name: str
    add: Callable[[Stream[Any], Stream[Any]], StreamBase]
    plain: Callable[[Rows, Rows], Rows]
    last: bool = False

    def __repr__(self) -> str:
        return self.name


def summed(given: Row, row: Row) -> Row:
    given["v"] += row["v"]
    given.setdefault("n", []).append(1)
    return {"v": given["v"], "n": given["n"]}


def folded(given: dict[str, Any], row: Row) -> dict[str, Any]:
    given["vs"] = sorted([*given.get("vs", []), row["v"]])
    return given


def total(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Changes what it gets."""
    key, value = pair
    if isinstance(value, dict):
        value = (value.pop("v", 0), len(value.pop("n", [1])), tuple(value.pop("vs", ())))
    return key, value


AGGREGATES = {
    "n": ("x", "count"), "low": ("x", "min"), "high": ("v", "max"), "all": ("v", "sum"), "mid": ("x", "mean"),
    "some": ("o", "sum"), "wide": ("x", "std"), "kinds": ("v", "count_distinct"), "early": ("x", "first"),
    "late": ("v", "last"),
}  # fmt: skip


EXTREMES: dict[str, tuple[str, str]] = {name: AGGREGATES[name] for name in ("n", "low", "high")}
"""Those that are combined before an exchange."""


def as_tuple(row: Any) -> tuple[Any, ...]:
    """What Arrow gives for a window, as rows give it."""
    return (row["k"], row["window_start"], row["count"]) if isinstance(row, dict) else row


def sides(row: Row) -> tuple[Any, ...]:
    return row["v"], row.get("v_right"), row["t"], row.get("t_right")


def flat(joined: Any) -> tuple[Any, ...]:
    """Changes the rows that it gets; from Arrow they come as one, in which ``v`` is null where a side is."""
    if isinstance(joined, dict) and "v_right" not in joined:  # of a semi or anti join
        return joined["k"], joined["v"] + 1, joined["t"]
    if isinstance(joined, dict):
        left = None if joined["v"] is None else (joined["v"] + 1, joined["t"], 1)
        right = None if joined["v_right"] is None else (joined["v_right"] + 1, joined["t_right"], 1)
        return joined["k"], left, right
    key, left, right = joined
    for row in (left, right):
        if row is not None:
            row["v"] += 1
            row.setdefault("l", []).append(2)
    return key, *(None if row is None else (row["v"], row["t"], len(row["l"])) for row in (left, right))


def plain_flat(rows: Rows) -> Rows:
    return [flat(copy.deepcopy(row)) for row in rows]


def remember(row: Row, context: Any) -> list[Any]:
    context.state.setdefault("vs", []).append(row["v"])
    context.state["vs"].sort()
    context.set_timer(1000 * SECOND)
    return []


def tell(at: datetime, context: Any) -> list[Any]:
    return [(context.key, context.state["vs"])]


def joins(how: Any, before: int, after: int | None = None) -> Keyed:
    join = plain_join(how, before, after)

    def add(s: Stream[Any], o: Stream[Any]) -> Stream[Any]:
        ahead = None if after is None else timedelta(seconds=after)
        return s.key_by("k").join(o.key_by("k"), how, timedelta(seconds=before), after=ahead).map(flat)

    return Keyed(f"{how}_join", add, lambda rows, others: plain_flat(join(rows, others)))


def lookups(how: Any) -> Keyed:
    return Keyed(f"broadcast_{how}", lambda s, o: s.broadcast_join(o, "g", how).map(sides), looked_up(how))


def emitting(emit: Any) -> list[Keyed]:
    """What gives values by key, when ``emit`` says."""
    last = emit != "end"
    return [
        Keyed(
            f"count_{emit}",
            lambda s, o: s.key_by(by_k).count(emit),
            lambda rows, o: [(key, len(some)) for key, some in groups(rows, by_k).items()],
            last,
        ),
        Keyed(
            f"reduce_{emit}",
            lambda s, o: s.key_by("k").reduce(summed, emit).map(total),
            lambda rows, o: plain_reduce(rows),
            last,
        ),
        Keyed(
            f"fold_{emit}",
            lambda s, o: s.key_by(by_k).fold(dict, folded, emit).map(total),
            lambda rows, o: plain_fold(rows),
            last,
        ),
        Keyed(
            f"aggregate_{emit}",
            lambda s, o: columns(s).key_by("g").aggregate(emit, **AGGREGATES),
            lambda rows, o: plain_aggregate(rows),
            last,
        ),
    ]


def windows(stream: Stream[Any], key: str) -> WindowedStream[Any, Any, Any]:
    return stream.key_by(key).window(timedelta(seconds=10))


def sliding(stream: Any) -> Any:
    return stream.key_by("k").window(timedelta(seconds=10), slide=timedelta(seconds=4)).count()


def sessions(stream: Any) -> Any:
    return stream.key_by("k").session_window(timedelta(seconds=7)).count()


def by_number(stream: Any) -> Any:
    return stream.key_by("k").count_window(3).count()


KEYED = [
    Keyed("nothing", lambda s, o: s, lambda rows, o: rows),
    *(keyed for emit in ("each", "batch", "end") for keyed in emitting(emit)),
    Keyed("window", lambda s, o: windows(s, "k").count().map(as_tuple), lambda rows, o: plain_windows(rows)),
    Keyed("sessions", lambda s, o: sessions(s), lambda rows, o: plain_sessions(rows)),
    Keyed("by_number", lambda s, o: by_number(s), lambda rows, o: plain_by_number(rows)),
    Keyed("sliding", lambda s, o: sliding(s).map(as_tuple), lambda rows, o: plain_sliding(rows)),
    Keyed(
        "window_aggregate",
        lambda s, o: columns(s).key_by("g").window(timedelta(seconds=10)).aggregate(**AGGREGATES),
        lambda rows, o: plain_window_aggregate(rows),
    ),
    Keyed(
        "process",
        lambda s, o: s.key_by("k").process(remember, tell),
        lambda rows, o: [(key, sorted(values(some, "v"))) for key, some in groups(rows, by_k).items()],
    ),
    *(joins(how, within) for how, within in (("inner", 5), ("left", 0), ("full", 5))),
    *(joins(how, 2, 9) for how in ("right", "semi", "anti")),
    *(lookups(how) for how in ("inner", "left")),
]


def table_joins(how: Any, before: int, after: int, other: pa.Schema = SCHEMA) -> Keyed:
    join = plain_join(how, before, after)
    bounds = {"before": timedelta(seconds=before), "after": timedelta(seconds=after)}

    def add(s: Stream[Any], o: Stream[Any]) -> Stream[Any]:
        left, right = s.to_table(SCHEMA).key_by("k"), o.to_table(other).key_by("k")
        return left.join(right, how, **bounds).to_rows().map(flat)

    return Keyed(f"table_{how}_join", add, lambda rows, others: plain_flat(join(rows, others)))


def as_of(s: Stream[Any], o: Stream[Any]) -> Stream[Any]:
    left, right = s.to_table(SCHEMA).key_by("k"), o.to_table(SCHEMA).select("k", "t").key_by("k")
    joined = left.asof_join(right, tolerance=timedelta(seconds=9))
    return joined.to_rows().map(lambda row: (row["k"], row["v"], row["t"], row["t_right"]))


def in_windows(table: Table) -> Stream[Any]:
    """Counts by key and window of event time, whose column is not there any more."""
    return table.select("k").key_by("k").window(timedelta(seconds=10)).count().to_rows().map(as_tuple)


def windows_of_joins(how: Any, within: int) -> Keyed:
    join = plain_join(how, within)

    def add(s: Stream[Any], o: Stream[Any]) -> Stream[Any]:
        left, right = s.to_table(SCHEMA).key_by("k"), o.to_table(SCHEMA).key_by("k")
        return in_windows(left.join(right, how, within=timedelta(seconds=within)))

    def plain(rows: Rows, others: Rows) -> Rows:
        joined = join(rows, others)
        greater = [max(row["t"] for row in (left, right) if row) for _, left, right in joined]
        return plain_windows([{"k": pair[0], "t": t} for pair, t in zip(joined, greater, strict=True)])

    return Keyed(f"windows_of_{how}_join", add, plain)


def table_lookups(how: Any) -> Keyed:
    def add(s: Stream[Any], o: Stream[Any]) -> Stream[Any]:
        return s.to_table(SCHEMA).broadcast_join(o.to_table(SCHEMA), "g", how).to_rows().map(sides)

    return Keyed(f"table_broadcast_{how}", add, looked_up(how))


def counted(s: Stream[Any], o: Stream[Any]) -> Stream[Any]:
    return s.to_table(SCHEMA).key_by("k").count().to_rows().map(lambda row: (row["k"], row["count"]))


TABLES = [
    Keyed(
        "table_sessions",
        lambda s, o: sessions(s.to_table(SCHEMA)).to_rows().map(lambda row: tuple(row.values())),
        lambda rows, o: plain_sessions(rows),
    ),
    Keyed(
        "table_by_number",
        lambda s, o: by_number(s.to_table(SCHEMA)).to_rows().map(lambda row: tuple(row.values())),
        lambda rows, o: plain_by_number(rows),
    ),
    Keyed(
        "table_sliding",
        lambda s, o: sliding(s.to_table(SCHEMA)).to_rows().map(as_tuple),
        lambda rows, o: plain_sliding(rows),
    ),
    Keyed("hidden_time", lambda s, o: in_windows(s.to_table(SCHEMA)), lambda rows, o: plain_windows(rows)),
    *(windows_of_joins(how, within) for how, within in (("inner", 5), ("left", 5), ("full", 5))),
    *(table_joins(how, within, within) for how, within in (("inner", 5), ("left", 0), ("full", 5))),
    *(table_joins(how, 2, 9) for how in ("right", "semi", "anti")),
    Keyed("as_of", as_of, lambda rows, others: plain_as_of(rows, others)),
    *(table_lookups(how) for how in ("inner", "left")),
    Keyed(
        "table_count",
        counted,
        lambda rows, o: [(key, len(some)) for key, some in groups(rows, by_k).items()],
    ),
    Keyed(
        "table_extremes",
        lambda s, o: columns(s).key_by("g").aggregate(**EXTREMES),
        lambda rows, o: [{name: row[name] for name in ("g", *EXTREMES)} for row in plain_aggregate(rows)],
    ),
    Keyed(
        "distinct",
        lambda s, o: s.to_table(SCHEMA).key_by("k").distinct(),
        lambda rows, o: [{"k": key} for key in groups(rows, by_k)],
    ),
    Keyed(
        "top_n",
        lambda s, o: s.to_table(SCHEMA).key_by("k").top_n(1, by="v").select("k", "v"),
        lambda rows, o: greatest(rows),
    ),
]
"""For rows that all have the columns of SCHEMA."""
APART = [table_joins(how, within, within, FLOAT_KEYS) for how, within in (("inner", 5), ("left", 0))]
"""For such whose keys no one type holds."""


# --- comparing ----------------------------------------------------------------------------------------


def form(value: Any) -> Any:
    """Numbers of one value alike, floats to 1e-9."""
    if isinstance(value, dict):
        return tuple(sorted((name, form(each)) for name, each in value.items() if each is not None))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(form, value))
    if isinstance(value, bool | int | float):
        return repr(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.9g}"
    return repr(value)


def answer(rows: Rows, last: bool) -> Counter[Any]:
    if last:
        latest = {form(row["g"] if isinstance(row, dict) else row[0]): row for row in rows}
        rows = list(latest.values())
    return Counter(map(form, rows))
