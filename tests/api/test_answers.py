"""Jobs whose answer must not depend on which operators share a thread, nor on how batches are cut."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.exchange import elements
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from minishuffle.operators.base import Aside, TaskContext
from minishuffle.operators.flat_map import FlatMap
from minishuffle.plan.planner import compile_job
from support.cutjobs import Cut, run

CUTS = [Cut(1), Cut(1, seed=3, merges=True), Cut(1, seed=1, rows=1), Cut(2, seed=2, rows=3, merges=True)]


class Splits:
    """Lists of rows, one for each split."""

    bounded = True

    def __init__(self, *splits: list[Any]) -> None:
        self.rows = splits

    def splits(self) -> range:
        return range(len(self.rows))

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield self.rows[split][offset:]


def numbered(rows: list[dict[str, Any]]) -> Stream[Any]:
    return Stream.items(copy.deepcopy(rows)).event_time("t", out_of_order=timedelta(seconds=100))


def in_order(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=repr)


# --- what a function gets is its own -----------------------------------------------------------------


def tagged(joined: tuple[Any, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Changes the rows that it gets, as it may."""
    _, left, right = joined
    left["c"] = right["c"]
    left["tags"].append(right["c"])
    return left


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rows_of_a_join_may_be_changed(cut: Cut) -> None:
    left = numbered([{"k": 1, "t": 0, "tags": [], "id": number} for number in range(2)])
    right = numbered([{"k": 1, "t": 0, "c": c} for c in (1, 2, 3)])
    joined = left.key_by("k").join(right.key_by("k"), within=timedelta(seconds=1)).map(tagged)
    rows = run(joined.collect(), cut).rows
    assert sorted((row["id"], row["c"], row["tags"]) for row in rows) == [
        (number, c, [c]) for number in range(2) for c in (1, 2, 3)
    ]


def with_total(given: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {"v": given["v"] + row["v"]}


def emptied(pair: tuple[Any, dict[str, Any]]) -> tuple[Any, int]:
    value: int = pair[1]["v"]
    pair[1]["v"] = 0
    return pair[0], value


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_values_that_a_reduce_emits_may_be_changed(cut: Cut) -> None:
    rows = Stream.items([{"k": 1, "v": 1} for _ in range(5)])
    found = run(rows.key_by("k").reduce(with_total, "each").map(emptied).collect(), cut).rows
    assert found == [(1, total) for total in range(1, 6)]


def appended(values: list[int], row: int) -> list[int]:
    values.append(row)
    return values


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_fold_emits_its_value_as_it_is_then(cut: Cut) -> None:
    folded = Stream.items(list(range(4))).key_by(lambda row: 0).fold(list, appended, "each")
    expected = [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert run(folded.map(lambda pair: (pair[0], len(pair[1]))).collect(), cut).rows == expected
    whole = run(folded.collect(), cut).rows
    assert [len(value) for _, value in whole] == [1, 2, 3, 4]


def count_in_state(row: Any, context: Any) -> list[dict[str, Any]]:
    context.state["n"] = context.state.get("n", 0) + 1
    return [context.state]


def popped(row: dict[str, Any]) -> int:
    n: int = row.pop("n")
    return n


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_process_may_return_its_state(cut: Cut) -> None:
    counted = Stream.items([7] * 4).key_by(lambda row: row).process(count_in_state).map(popped)
    assert run(counted.collect(), cut).rows == [1, 2, 3, 4]


def with_mark(row: dict[str, Any]) -> dict[str, Any]:
    row["tags"].append(row["id"])
    return row


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_nested_values_of_a_broadcast_join_may_be_changed(cut: Cut) -> None:
    small = Stream.items([{"k": 1, "tags": []}])
    big = Stream.items([{"k": 1, "id": number} for number in range(3)])
    rows = run(big.broadcast_join(small, "k").map(with_mark).collect(), cut).rows
    assert sorted((row["id"], row["tags"]) for row in rows) == [(0, [0]), (1, [1]), (2, [2])]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_that_flat_map_repeats_is_several(cut: Cut) -> None:
    thrice = Stream.items([{"id": 1, "tags": []}]).flat_map(lambda row: [row] * 3).map(with_mark)
    assert [row["tags"] for row in run(thrice.collect(), cut).rows] == [[1]] * 3


def in_one_row(text: str) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    for word in text.split():
        row["w"] = word
        yield row


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_generator_may_change_the_row_that_it_gave(cut: Cut, on_error: Any) -> None:
    rows = Stream.items(["a b", "c"]).flat_map(in_one_row, on_error=on_error)
    kept = rows.filter(lambda row: row["w"] != "b")
    assert in_order(run(kept.collect(), cut).rows) == [
        {"w": "a"},
        {"w": "c"},
    ]


class Neither:
    """Like ``pandas.NA``."""

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_result_of_filter_that_is_neither_true_nor_false_is_an_error_of_its_record(cut: Cut) -> None:
    rows = Stream.items([3, 1, 0, 2])
    outcome = run(rows.filter(lambda row: row != 1 and (row or Neither()), on_error="skip").collect(), cut)
    assert (sorted(outcome.rows), outcome.counters.user_errors) == ([2, 3], {"skip": 1})
    with pytest.raises(TypeError, match="neither true nor false") as raised:
        run(rows.filter(lambda row: row or Neither()).collect(), cut)
    assert any("raised in operator 'filter' by the record 0" in note for note in raised.value.__notes__)


TAGS: dict[str, list[int]] = {"a": [], "b": []}
"""What a function looks up, and does not want changed."""


def looked_up(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "tags": TAGS[row["k"]]}


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_a_function_looks_up_may_be_changed_behind_it(cut: Cut) -> None:
    rows = Stream.items([{"k": "ab"[number % 2], "id": number} for number in range(6)])
    marked = rows.map(looked_up).map(with_mark).filter(lambda row: row["tags"].append(-1) is None)
    tags = {row["id"]: row["tags"] for row in run(marked.collect(), cut).rows}
    assert tags == {number: [number, -1] for number in range(6)}


class Repeating:
    """A source that gives one row again and again."""

    bounded = True

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        row: dict[str, Any] = {"id": 1, "tags": []}
        for _ in range(self._batches):
            yield [row] * (4 // self._batches)


@pytest.mark.parametrize("batches", [1, 2, 4])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_that_a_source_repeats_is_several(cut: Cut, batches: int) -> None:
    rows = run(Stream.source(Repeating(batches)).map(with_mark).collect(), cut).rows
    assert [row["tags"] for row in rows] == [[1]] * 4


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_that_a_collection_repeats_is_several(cut: Cut) -> None:
    row = {"id": 1, "tags": []}
    rows = run(Stream.items([row] * 3).map(with_mark).collect(), cut).rows
    assert [row["tags"] for row in rows] == [[1]] * 3


class Keeper:
    """A sink that changes what it gets."""

    def open(self, context: Any) -> None:
        self.rows: list[Any] = []

    def write(self, batch: Any) -> None:
        for row in batch:
            row[1]["v"] += 100

    def close(self) -> None:
        return None


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_sink_may_change_what_it_gets(cut: Cut) -> None:
    seen: list[Any] = []

    def total(given: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        assert given["v"] < 100, given
        return {"v": given["v"] + row["v"]}

    rows = Stream.items([{"k": 1, "v": 1} for _ in range(5)])
    run(rows.key_by("k").reduce(total, "each").to(Keeper()), cut)
    assert not seen


# --- the end -----------------------------------------------------------------------------------------


def set_first(row: Any, context: Any) -> None:
    if "n" not in context.state:
        context.state["n"] = 0
        context.set_timer(1_000_000)


def set_next(at: Any, context: Any) -> list[Any]:
    context.state["n"] += 1
    if context.state["n"] < 20:
        context.set_timer((context.state["n"] + 1) * 1_000_000)
    return [context.state["n"]]


@pytest.mark.parametrize("seed", range(12))
def test_timers_that_timers_set_fire_as_far_as_event_time_comes(seed: int) -> None:
    """At the end the last watermark comes first, however it and the ends of channels meet."""
    rows = [{"k": 1, "t": second * 1_000_000} for second in range(10)]
    timed = Stream.items(rows).event_time("t").key_by("k").process(set_first, set_next)
    found = run(timed.collect(), Cut(1 + seed % 4, seed, 3, merges=True)).rows
    # Those up to the last watermark, and the one that is set when time ends.
    assert found == list(range(1, 10))


# --- joins -------------------------------------------------------------------------------------------


def as_arrow(rows: list[dict[str, Any]]) -> Table:
    return Table.from_arrow(pa.Table.from_pylist(rows)).event_time("t")


def as_rows(rows: list[dict[str, Any]]) -> Stream[Any]:
    return Stream.items(rows).event_time("t")


@pytest.mark.parametrize("make", [as_arrow, as_rows])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_broadcast_join_with_nothing_gives_nothing(cut: Cut, make: Any) -> None:
    nothing = Stream.items([{"k": 1, "b": 1}]).filter(lambda row: False)
    small = nothing if make is as_rows else nothing.to_table()
    assert run(make([{"k": 1, "t": 0}]).broadcast_join(small, "k").collect(), cut).rows == []


@pytest.mark.parametrize("make", [as_arrow, as_rows])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_three_way_joins_keep_all_columns_apart(cut: Cut, make: Any) -> None:
    one, two, three = ([{"k": 1, "t": 0, "v": value}] for value in (1, 2, 3))
    joined = make(one).broadcast_join(make(two), "k").broadcast_join(make(three), "k")
    (row,) = run(joined.collect(), cut).rows
    assert row == {
        "k": 1, "t": 0, "v": 1, "t_right": 0, "v_right": 2, "t_right_right": 0, "v_right_right": 3
    }  # fmt: skip


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_number_is_no_text_in_any_join(cut: Cut, how: Any) -> None:
    numbers = [{"k": number, "t": 0} for number in range(3)]
    texts = [{"k": str(number), "t": 0, "b": 1} for number in range(3)]
    right = as_rows(texts)
    expected = 3 if how == "left" else 0
    assert len(run(as_rows(numbers).broadcast_join(right, "k", how).collect(), cut).rows) == expected
    joined = as_rows(numbers).key_by("k").join(right.key_by("k"), how)
    assert len(run(joined.collect(), cut).rows) == expected
    mixed = [{"k": [2, "2"][number % 2], "t": 0} for number in range(4)]
    pairs = as_rows(mixed).key_by("k").join(right.key_by("k"), how).collect()
    assert sum(pair[2] is not None for pair in run(pairs, cut).rows) == 2


# --- aggregates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("emit", ["each", "end"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_mean_that_fits_is_given_though_the_sum_does_not(cut: Cut, emit: Any) -> None:
    values = [1_700_000_000_000_000_000 + number for number in range(10)] + [-(2**63)] * 3
    rows = [{"k": number // 10, "v": value} for number, value in enumerate(values)]
    means = Stream.items(rows).to_table().key_by("k").aggregate(emit, m=("v", "mean"))
    found = run(means.collect(), cut).rows
    last = {row["k"]: row["m"] for row in found}
    assert last == {0: pytest.approx(1.7e18, rel=1e-15), 1: -(2.0**63)}


# --- records that on_error drops ---------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_keys_that_cannot_be_are_dropped_with_their_records(cut: Cut) -> None:
    keys: list[Any] = [1, {2}, "a", 1, [3], object]
    counted = Stream.items(list(range(6))).key_by(lambda n: keys[n], on_error="skip").count()
    done = run(counted.collect(), cut)
    assert in_order(done.rows) == in_order([(1, 2), ("a", 1)])
    assert done.counters.user_errors == {"skip": 3}


@pytest.mark.parametrize("on_error", ["skip", "dead_letter"])
@pytest.mark.parametrize("format", ["rows", "arrow"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_records_without_a_time_are_dropped(cut: Cut, format: str, on_error: Any) -> None:
    rows = [{"k": 1, "t": None if number % 3 == 0 else number * 1_000_000} for number in range(9)]
    source: Any = Stream.items(rows)
    if format == "arrow":
        source = Table.from_arrow(pa.Table.from_pylist(rows))
    timed = source.event_time("t", out_of_order=timedelta(seconds=100), on_error=on_error)
    done = run(timed.key_by("k").window(timedelta(seconds=100)).count().collect(), cut)
    assert [tuple_of(row)[-1] for row in done.rows] == [6]
    assert done.counters.user_errors == {on_error: 3}
    assert len(done.log) == (3 if on_error == "dead_letter" else 0)
    assert all("'t': None" in line and line.startswith("dead letter: event_time: ") for line in done.log)


def tuple_of(row: Any) -> tuple[Any, ...]:
    return tuple(row.values()) if isinstance(row, dict) else row


@pytest.mark.parametrize("kind", ["map", "flat_map", "keyed", "fold"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_results_that_cannot_be_sent_are_dropped(cut: Cut, kind: str) -> None:
    """At an exchange; a function that shares the thread may have them."""
    rows = Stream.items(list(range(9)))
    if kind == "map":
        made = rows.map(odd_ones, on_error="skip").rebalance()
    elif kind == "flat_map":
        made = rows.flat_map(lambda n: [odd_ones(n)], on_error="skip").broadcast().map(abs).parallel(1)
    elif kind == "keyed":
        keyed = rows.map(odd_ones, on_error="skip").key_by(lambda row: 1)
        made = (
            keyed.fold(int, lambda n, row: n + 1).map(lambda pair: (pair[1],) * 5).flat_map(list).rebalance()
        )
    else:
        folded = rows.key_by(lambda n: n).fold(int, lambda _, n: odd_ones(n), on_error="skip")
        made = folded.map(lambda pair: pair[1], on_error="skip").rebalance()
    done = run(made.collect(), cut)
    assert in_order(done.rows) == ([5] * 5 if kind == "keyed" else [0, 2, 4, 6, 8])
    assert done.counters.user_errors == {"skip": 4}


def odd_ones(number: int) -> Any:
    return {number} if number % 2 else number


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_uuid_is_a_key_and_a_time_a_value(cut: Cut) -> None:
    rows = [(UUID(int=number % 3), time(number)) for number in range(9)]
    done = run(Stream.items(rows).key_by(lambda row: row[0]).reduce(max).collect(), cut)
    assert dict(done.rows) == {UUID(int=n): (UUID(int=n), time(n + 6)) for n in range(3)}


# --- one step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_a_step_that_is_named_beside_its_late_records_runs_once(turned: bool) -> None:
    rows = [{"k": 1, "t": second * 1_000_000} for second in (0, 100, 1, 101, 200, 5)]
    timed = Stream.items(rows).parallel(1).event_time("t", watermarks="each")
    counted = timed.key_by("k").window(timedelta(seconds=10), late="side").count()
    ends = [counted.name("windows").parallel(3).collect(), counted.late.map(repr).print().name("late")]
    graph = compile_job(Stream.together(*(ends[::-1] if turned else ends)))
    names = [vertex.name for vertex in graph.vertices]
    assert sum("window" in name for name in names) == 1
    assert [vertex.parallelism for vertex in graph.vertices if "windows" in vertex.name] == [3]
    both = Stream.together(
        counted.name("a").collect("a"), counted.name("b").collect("b"), counted.late.to_count()
    )
    with pytest.raises(
        InvalidGraph, match="changed in two ways, 'a' and 'b', and a side output of it is read"
    ):
        compile_job(both)


@pytest.mark.parametrize("format", ["rows", "arrow"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_last_panes_of_windows_are_their_values(cut: Cut, format: str) -> None:
    """Windows that read these are not late: the watermark behind waits for them."""
    rows = [{"k": number % 3, "t": number * 1_000_000} for number in range(90)]
    source: Any = Stream.items(rows) if format == "rows" else Table.from_arrow(pa.Table.from_pylist(rows))
    timed = source.event_time("t")
    ten, early = timedelta(seconds=10), timedelta(seconds=2)
    windows = timed.key_by("k").window(ten, allowed_lateness=ten, early=early).count()
    expected = Counter((row["k"], row["t"] // 10_000_000) for row in rows)
    panes = {
        (k, moment.timestamp() // 10, n): (pane, final)
        for k, moment, *_, n, pane, final in map(tuple_of, run(windows.panes.collect(), cut).rows)
        if final
    }
    assert {(k, start): n for k, start, n in panes} == expected
    assert all(final for _, final in panes.values())
    key: Any = "k" if format == "arrow" else (lambda row: row[0])
    again = run(windows.key_by(key).window(ten).count().collect(), cut)
    assert [tuple_of(row)[-1] for row in again.rows] == [1] * 27
    assert again.counters.records_late == 0


# --- side outputs of functions -----------------------------------------------------------------------


def by_size(n: int) -> Any:
    if n % 5 == 0:
        raise ValueError(f"no {n}")
    return Aside("large", {"n": n}) if n > 20 else n


def all_by_size(n: int) -> list[Any]:
    return [n, by_size(n), Aside("odd", n)] if n % 2 else [by_size(n)]


def with_sums(row: int, context: Any) -> list[Any]:
    """The state is put aside, and goes on to change."""
    sums = context.state.setdefault("sums", [])
    sums.append(row)
    return [row, Aside("sums", sums)]


def tuple_with(kind: str, row: Any) -> tuple[str, Any]:
    return (kind, row)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_functions_put_aside_is_streams(cut: Cut) -> None:
    sized = Stream.items(list(range(1, 41))).map(by_size, sides=["large"], on_error="side").name("sizes")
    flat = Stream.items(list(range(1, 41))).flat_map(all_by_size, sides=["large", "odd"], on_error="skip")
    summed = Stream.items([3, 5, 7]).parallel(1).key_by(lambda n: n % 2).process(with_sums, sides=["sums"])
    ends = {
        "mapped": sized,
        "mapped large": sized.side("large"),
        "errors": sized.errors,
        "flat": flat,
        "flat large": flat.side("large"),
        "odd": flat.side("odd"),
        "summed": summed,
        "sums": summed.side("sums"),
    }
    rows: dict[str, list[Any]] = {kind: [] for kind in ends}
    marked = [end.map(partial(tuple_with, kind)).collect(kind) for kind, end in ends.items()]
    for kind, row in run(Stream.together(*marked), cut).rows:
        rows[kind].append(row)
    good = [n for n in range(1, 41) if n % 5]
    assert sorted(rows["mapped"]) == [n for n in good if n <= 20]
    assert in_order(rows["mapped large"]) == [{"n": n} for n in good if n > 20]
    assert in_order(rows["errors"]) == in_order(
        [{"operator": "sizes", "error": f"ValueError: no {n}", "record": n} for n in range(5, 41, 5)]
    )
    odd = [n for n in good if n % 2]
    assert sorted(rows["flat"]) == sorted([*(n for n in good if n <= 20), *odd])
    assert in_order(rows["flat large"]) == [{"n": n} for n in good if n > 20]
    assert sorted(rows["odd"]) == odd
    assert sorted(rows["summed"]) == [3, 5, 7]
    sums = sorted(rows["sums"], key=len)
    assert sums == [sums[2][:length] for length in (1, 2, 3)]


# --- what values are ---------------------------------------------------------------------------------


class Point(NamedTuple):
    x: int
    tags: list[int]


@pytest.mark.parametrize("exchange", ["forward", "rebalance"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_named_tuples_are_plain_behind_an_exchange_chained_or_not(cut: Cut, exchange: str) -> None:
    points = Stream.items([1, 2]).map(lambda x: Point(x, [x]))
    sent = points.forward() if exchange == "forward" else points.rebalance()
    shown = sent.map(lambda row: (type(row).__name__, row, type(row[1]).__name__))
    assert in_order(run(shown.collect(), cut).rows) == [("tuple", (x, [x]), "list") for x in (1, 2)]
    here = points.map(lambda row: type(row).__name__)
    assert run(here.collect(), cut).rows == ["Point"] * 2


# --- long rows -----------------------------------------------------------------------------------------

LONG = "x" * (1 << 20)


@pytest.mark.parametrize("exchange", ["rebalance", "broadcast", "hash"])
def test_a_batch_of_long_rows_crosses_an_exchange(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them a source or a function gives at once."""
    monkeypatch.setattr(elements, "ELEMENT_BYTES_MAX", 1 << 24)
    rows = Stream.source(Splits(list(range(20)))).map(lambda number: (number, LONG))
    if exchange == "hash":
        lengths = rows.key_by(lambda row: row[0] % 2).fold(int, lambda n, row: n + len(row[1]))
        assert sorted(run(lengths.collect()).rows) == [(0, 10 << 20), (1, 10 << 20)]
    else:
        sent = rows.rebalance() if exchange == "rebalance" else rows.broadcast()
        found = run(sent.map(lambda row: (row[0], len(row[1]))).collect()).rows
        assert sorted(found) == [(number, 1 << 20) for number in range(20)]


def test_flat_map_passes_rows_on_as_soon_as_they_are_many() -> None:
    made = passed = most = 0

    def words(line: int) -> Iterator[str]:
        nonlocal made, most
        for _ in range(10_000):
            made += 1
            yield "word"
        most = max(most, made - passed)

    def take(batch: Any) -> None:
        nonlocal passed
        passed += len(batch)

    operator = FlatMap(words)
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(Batch(list(range(100))), 0, take)
    assert passed == made == 1_000_000
    assert most <= BATCH_ROWS_MAX + 10_000


# --- late records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["rows", "arrow"])
def test_late_records_end_the_job_if_they_are_to(format: str) -> None:
    rows = [{"k": 1, "t": second * 1_000_000} for second in (0, 100, 1)]
    timed = Stream.source(Splits(rows)).event_time("t", watermarks="each")
    keyed: Any = (timed if format == "rows" else timed.to_table({"k": int, "t": int})).key_by("k")
    with pytest.raises(UsageError, match=r"came too late: \{'k': 1, 't': 1000000\} is of"):
        run(keyed.window(timedelta(seconds=10), late="fail").count().collect())
    other = (as_rows if format == "rows" else as_arrow)(rows[:1]).key_by("k")
    with pytest.raises(UsageError, match="came too late"):
        run(keyed.join(other, within=timedelta(seconds=1), late="fail").collect())
    assert len(run(keyed.window(timedelta(seconds=10), late="drop").count().collect()).rows) == 2


@pytest.mark.parametrize("kind", ["window", "aggregate", "join"])
def test_what_is_late_depends_on_the_order_of_each_split_alone(kind: str) -> None:
    """However the records of both splits meet: the third of each comes behind its own second one."""
    splits = [[{"k": key, "t": second * 1_000_000, "s": s} for key in (0, 1) for second in (0, 50, 3, 60)]
              for s in (0, 1)]  # fmt: skip
    found = set()
    for seed in range(20):
        timed = Stream.source(Splits(*copy.deepcopy(splits))).event_time("t", watermarks="each")
        keyed = timed.key_by("k")
        if kind == "join":
            joined = keyed.join(keyed, within=timedelta(seconds=0))
            answer: Any = joined.map(lambda pair: (pair[0], pair[1]["t"], pair[2]["t"]))
        elif kind == "window":
            answer = keyed.window(timedelta(seconds=10)).count()
        else:
            table = timed.to_table({"k": int, "t": int, "s": int})
            windows = table.key_by("k").window(timedelta(seconds=10))
            answer = windows.aggregate(n=("s", "count"))
        done = run(answer.collect(), Cut(2, seed, 2, merges=seed % 2 == 0))
        found.add(repr((in_order(done.rows), done.counters.records_late)))
    assert len(found) == 1, found


# --- types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["inner", "left", "full"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_keys_that_no_one_type_holds_are_compared_exactly(cut: Cut, turned: bool, how: Any) -> None:
    """2**53 + 1 is no float64, 2.5 no int64."""
    schemas = [pa.schema({"k": kind, "t": pa.int64()}) for kind in (pa.int64(), pa.float64())]
    keys = [[2**53 + 1, 2, 7], [2.5, 2.0, 2.0**53]]
    sides = [
        Table.from_arrow(pa.Table.from_pydict({"k": values, "t": [0] * 3}, schema=schema))
        .event_time("t").key_by("k")
        for values, schema in zip(keys, schemas, strict=True)
    ]  # fmt: skip
    one, other = sides[::-1] if turned else sides
    if how == "full":  # where a right record is alone, its key stands in the left's column
        with pytest.raises(UsageError, match="cast"):
            run(one.join(other, how).collect(), cut)
        return
    rows = run(one.join(other, how).collect(), cut).rows
    assert sorted(row["k"] for row in rows if row["t_right"] is not None) == [2]
    assert len(rows) == (3 if how == "left" else 1)


@pytest.mark.parametrize("value", [3, 2.5])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_true_stands_beside_numbers_whoever_made_the_batches(cut: Cut, value: Any, tmp_path: Path) -> None:
    """Batches of booleans alone and of numbers alone meet behind an exchange."""
    truths = Stream.items([{"k": 1, "v": True}]).to_table()
    numbers = Stream.items([{"k": 1, "v": value}]).to_table()
    both = truths.union(numbers).rebalance()
    run(both.to_files(tmp_path / "out").parallel(1), cut)
    found = pa.parquet.read_table(tmp_path / "out").column("v").to_pylist()
    assert sorted(found) == [1, value]
    big = Table.from_arrow(pa.table({"k": [1]})).broadcast_join(truths.union(numbers), "k")
    assert sorted(row["v"] for row in run(big.collect(), cut).rows) == [1, value]


class Sizes:
    """A sink that gives the bytes of the longest batch, and the rows."""

    def open(self, context: Any) -> None:
        self.most = self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self.most = max(self.most, batch.nbytes)
        self.rows += batch.num_rows

    def close(self) -> None:
        SEEN.append((self.most, self.rows))


SEEN: list[tuple[int, int]] = []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["broadcast", "interval", "alone"])
def test_joins_of_long_rows_give_batches_within_bytes(kind: str) -> None:
    """One small row meets many, which share none of its bytes in the result; a run goes out alone."""
    SEEN.clear()
    text = "x" * (1 << 16)
    small = Table.from_arrow(pa.table({"k": [1], "t": [0], "text": [text]})).event_time("t")
    many = Table.from_arrow(pa.table({"k": [1] * 600, "t": [0] * 600, "n": range(600)})).event_time("t")
    if kind == "broadcast":
        joined = many.broadcast_join(small, "k")
    elif kind == "interval":
        joined = many.key_by("k").join(small.key_by("k"))
    else:
        lone = pa.table({"k": [2] * 600, "t": [0] * 600, "text": [text] * 600})
        joined = Table.from_arrow(lone).event_time("t").key_by("k").join(small.key_by("k"), "left")
    run(joined.to(Sizes()))
    ((most, rows),) = SEEN
    assert rows == 600
    assert most <= 2 * BATCH_BYTES_MAX


# --- dictionaries of views, as Polars gives its categories ---------------------------------------------

LETTERS = ["b", "a", None, "b"]
LETTERS_TABLE = pa.table({"k": [1, 1, 2, 2], "t": range(4), "n": range(4)})


def lettered(dictionary: pa.DataType) -> Table:
    letters = pa.array(LETTERS, pa.dictionary(dictionary.index_type, pa.large_string())).cast(dictionary)
    return Table.from_arrow(LETTERS_TABLE.append_column("x", letters)).event_time("t")


def letters_filed(letters: Table, path: Path) -> list[Any]:
    run(letters.to_files(path))
    return run(Table.from_files(path).select("x").collect()).rows


def grouped(rows: list[dict[str, Any]]) -> Counter[Any]:
    return Counter(row["x"] for row in rows)


@pytest.mark.parametrize("index", [pa.int8(), pa.uint32(), pa.uint64()], ids=str)
def test_dictionaries_of_views_are_as_those_of_strings(index: pa.DataType, tmp_path: Path) -> None:
    kind = pa.dictionary(index, pa.string_view())
    letters, x = lettered(kind), pc.field("x")
    all_of_them = Counter({"a": 1, "b": 2, None: 1})
    cut = Cut(2, seed=1, rows=2)

    def rows(table: Table) -> list[Any]:
        return run(table.collect(), cut).rows

    for emit in ("each", "end"):
        counts = rows(letters.key_by("x").count(emit))  # type: ignore[arg-type]
        assert {row["x"]: row["count"] for row in counts} == all_of_them
    assert grouped(rows(letters.rebalance())) == all_of_them
    assert grouped(letters_filed(letters, tmp_path / "direct")) == all_of_them
    assert grouped(letters_filed(letters.rebalance(), tmp_path / "sent")) == all_of_them
    assert letters_filed(letters.filter(pc.field("n") < 0), tmp_path / "none") == []
    assert grouped(rows(letters.filter(x == "b"))) == {"b": 2}
    assert grouped(rows(letters.with_columns(x=x.cast("string")))) == all_of_them
    small = lettered(kind).filter(pc.field("n") < 2).select("x")
    assert grouped(rows(letters.broadcast_join(small, "x"))) == {"a": 1, "b": 2}
    both = rows(letters.key_by("x").join(letters.key_by("x"), within=timedelta(seconds=1)))
    assert grouped(both) == {"a": 1, "b": 4}
    extremes = letters.key_by("k").aggregate(
        low=("x", "min"), high=("x", "max"), kinds=("x", "count_distinct")
    )
    assert sorted((r["k"], r["low"], r["high"], r["kinds"]) for r in rows(extremes)) == [
        (1, "a", "b", 2),
        (2, "b", "b", 1),
    ]
    assert [row["n"] for row in rows(letters.key_by("k").top_n(1, "x").filter(pc.field("k") == 1))] == [0]
    assert grouped(rows(letters.to_rows().to_table({"k": int, "t": int, "n": int, "x": kind}))) == all_of_them


WINDOWED: dict[str, Any] = {
    "window": lambda keyed: keyed.window(timedelta(hours=1)),
    "slide": lambda keyed: keyed.window(timedelta(hours=1), slide=timedelta(minutes=30)),
    "zone": lambda keyed: keyed.window(timedelta(days=1), tz="Etc/GMT+1"),
    "session": lambda keyed: keyed.session_window(timedelta(hours=1)),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_window_that_ends_in_the_year_10000_says_so(kind: str) -> None:
    last = datetime.max.replace(tzinfo=UTC)
    timed = Table.from_arrow(pa.table({"k": [1], "t": [last]})).event_time("t")
    counts = WINDOWED[kind](timed.key_by("k")).count()
    for result in (counts.collect(), counts.to_rows().collect()):
        with pytest.raises(UsageError, match=r"^a window ends at 10000-01-01 .* drop\('window_end'\)"):
            run(result)
    assert run(counts.drop("window_end").select("k", "count").collect()).rows[0] == {"k": 1, "count": 1}
