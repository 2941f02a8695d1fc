"""``bench operators``: what each operator costs a row, in one thread without a network.

Jobs are built with the public names. What stands before an operator (source, event time, key function,
exchange) runs first and is not measured; then its chain takes the same rows in batches of a given size, with
a watermark after each ``WATERMARK_ROWS``, until the end of input. What it emits is dropped where an exchange
would encode it. Processor time of the process counts, of the best of some runs, each with an operator of its
own that already has state of every key.
"""

from __future__ import annotations

import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.api.stream import Stream, Table
from minishuffle.counters import TaskCounters
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.watermarks import END_OF_TIME
from minishuffle.operators.base import Emit, TaskContext, Watermark
from minishuffle.plan.planner import compile_job
from minishuffle.plan.programs import open_program
from minishuffle.runtime.chain import Chain

__all__ = ["BATCHES", "KEYS", "OPERATORS", "Isolated", "compared", "measure_operators"]

Form: TypeAlias = Literal["rows", "columns"]
Built: TypeAlias = "Callable[[Any, Any], Any]"

BATCHES: Final = (1, 16, 128, 512, 4_096, 65_536)
KEYS: Final = (1_000, 50_000)
SHORT_BATCH_MAX: Final = 16
"""Batches of so many rows have a bar of their own."""
RATIO_MIN: Final = {"long": 0.97, "short": 0.9}
"""Bars for the geometric mean of an operator's ratios, in longer and in shorter batches."""
CELL_RATIO_MIN: Final = 0.85
ROWS: Final = 65_536
"""At most so many are in one run."""
WATERMARK_ROWS: Final = 1_024
WINDOW: Final = timedelta(microseconds=8_192)
"""Rows are one microsecond apart."""
RUNS_MAX: Final = 9
SCHEMA: Final = pa.schema(
    {"k": pa.int64(), "t": pa.int64(), "v": pa.int64(), "x": pa.float64(), "l": pa.list_(pa.int64())}
)


# --- data -----------------------------------------------------------------------------------------------


def _table(keys: int, rows: int) -> pa.Table:
    """The first rows have each key once, and are followed by so many others."""
    dice = np.random.default_rng(keys)
    numbers = np.concatenate([dice.permutation(keys), dice.integers(0, keys, rows)])
    values = dice.integers(0, 1_000, len(numbers))
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(len(numbers) + 1) * 2, pa.int32()), np.repeat(values, 2)
    )
    columns = [numbers, np.arange(len(numbers)), values, values / 4, lists]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), schema=SCHEMA)


@lru_cache(maxsize=2)
def _data(form: Form, keys: int, rows: int) -> Batch:
    table = _table(keys, rows)
    if form == "rows":
        return Batch(table.drop(["l"]).to_pylist())
    return Batch(table.combine_chunks().to_batches()[0])


class _Numbered:
    """One of the two sources, whose rows do not come from it."""

    bounded = True
    shares = False

    def __init__(self, form: Form, side: int) -> None:
        self.format = "rows" if form == "rows" else "arrow"
        self.side = side

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        return iter(())


# --- the operators --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """An operator of one form. ``build`` takes both sides and gives a stream or table.

    ``timed``: with event time or without. ``keyed``: it has state of keys. Of two sides without event time
    the first has each key once, and only the second gets the other rows.
    """

    name: str
    form: Form
    build: Built
    timed: tuple[bool, ...] = (False, True)
    keyed: bool = True


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "t": row["t"], "v": 2 * row["v"]}


def _is_even(row: dict[str, Any]) -> bool:
    return not row["k"] & 1


def _twice(row: Any) -> list[Any]:
    return [row, row]


def _once(row: Any) -> list[Any]:
    return [row]


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _key(row: dict[str, Any]) -> int:
    number: int = row["k"]
    return number


def _added(total: int, row: dict[str, Any]) -> int:
    total += row["v"]
    return total


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"k": one["k"], "t": other["t"], "v": one["v"] + other["v"]}


def _counted(row: Any, context: Any) -> list[int]:
    context.state["n"] = context.state.get("n", 0) + 1
    return [context.state["n"]]


_TOTALS: Final = {"n": ("v", "count"), "total": ("v", "sum"), "low": ("x", "min"), "mean": ("x", "mean")}


def _on_rows() -> Iterator[Subject]:
    def each(name: str, build: Callable[[Any], Any], **options: Any) -> Subject:
        return Subject(name, "rows", lambda left, right: build(left), **options)

    yield each("map", lambda s: s.rebalance().map(_doubled), keyed=False)
    yield each("filter", lambda s: s.rebalance().filter(_is_even), keyed=False)
    yield each("flat_map", lambda s: s.rebalance().flat_map(_twice), keyed=False)
    yield each(
        "map, filter, flat_map",
        lambda s: s.rebalance().map(_doubled).filter(_is_even).flat_map(_once),
        keyed=False,
    )
    yield each("event_time", lambda s: s.rebalance().event_time("t"), keyed=False, timed=(True,))
    yield each("map, key_by", lambda s: s.rebalance().map(_doubled).key_by(_key).count(), keyed=False)
    yield each("conversion", lambda s: s.rebalance().to_table(SCHEMA), keyed=False)
    yield each("count each", lambda s: s.key_by("k").count("each"), timed=(False,))
    yield each("count batch", lambda s: s.key_by("k").count("batch"), timed=(False,))
    yield each("count end", lambda s: s.key_by("k").count("end"), timed=(False,))
    for emit in ("each", "batch", "end"):
        yield each(f"reduce {emit}", lambda s, e=emit: s.key_by("k").reduce(_sum, e))  # type: ignore[misc]
        yield each(f"fold {emit}", lambda s, e=emit: s.key_by("k").fold(int, _added, e))  # type: ignore[misc]
    yield each("process", lambda s: s.key_by("k").process(_counted))
    yield each("window count", lambda s: s.key_by("k").window(WINDOW).count(), timed=(True,))
    yield each("window fold", lambda s: s.key_by("k").window(WINDOW).fold(int, _added), timed=(True,))
    yield each(
        "sliding window fold",
        lambda s: s.key_by("k").window(WINDOW, slide=WINDOW / 2).fold(int, _added),
        timed=(True,),
    )
    yield each("session", lambda s: s.key_by("k").session_window(WINDOW / 16).count(), timed=(True,))
    yield each("count_window", lambda s: s.key_by("k").count_window(4).count(), timed=(True,))
    yield from _joins("rows")


def _on_columns() -> Iterator[Subject]:
    def each(name: str, build: Callable[[Any], Any], **options: Any) -> Subject:
        return Subject(name, "columns", lambda left, right: build(left), **options)

    yield each(
        "with_columns", lambda t: t.rebalance().with_columns(v=pc.multiply(pc.field("v"), 2)), keyed=False
    )
    yield each("select", lambda t: t.rebalance().select("k", "t", "v"), keyed=False)
    yield each("filter", lambda t: t.rebalance().filter(pc.field("v") < 500), keyed=False)
    yield each("flat_map", lambda t: t.rebalance().explode("l"), keyed=False)
    yield each("map_batches", lambda t: t.rebalance().map_batches(_same, schema=SCHEMA), keyed=False)
    yield each("event_time", lambda t: t.rebalance().event_time("t"), keyed=False, timed=(True,))
    yield each("conversion", lambda t: t.rebalance().to_rows(), keyed=False)
    for emit in ("each", "batch", "end"):
        yield each(f"count {emit}", lambda t, e=emit: t.key_by("k").count(e), timed=(False,))  # type: ignore[misc]
        yield each(
            f"aggregate {emit}",
            lambda t, e=emit: t.key_by("k").aggregate(e, **_TOTALS),  # type: ignore[misc]
            timed=(False,),
        )
    yield each(
        "aggregate first",
        lambda t: t.key_by("k").aggregate("end", early=("v", "first"), late=("v", "last")),
        timed=(True,),
    )
    yield each("distinct", lambda t: t.key_by("k").distinct(), timed=(False,))
    yield each("top_n", lambda t: t.key_by("k").top_n(2, "v"), timed=(False,))
    yield each("window count", lambda t: t.key_by("k").window(WINDOW).count(), timed=(True,))
    yield each("window aggregate", lambda t: t.key_by("k").window(WINDOW).aggregate(**_TOTALS), timed=(True,))
    yield each(
        "sliding window aggregate",
        lambda t: t.key_by("k").window(WINDOW, slide=WINDOW / 2).aggregate(**_TOTALS),
        timed=(True,),
    )
    yield each("session", lambda t: t.key_by("k").session_window(WINDOW / 16).count(), timed=(True,))
    yield each("count_window", lambda t: t.key_by("k").count_window(4).count(), timed=(True,))
    yield Subject(
        "asof_join",
        "columns",
        lambda one, two: one.key_by("k").asof_join(two.key_by("k")),
        timed=(True,),
    )
    yield from _joins("columns")


def _joins(form: Form) -> Iterator[Subject]:
    for how in ("inner", "left", "semi"):
        yield Subject(f"join {how}", form, lambda one, two, h=how: one.key_by("k").join(two.key_by("k"), h))  # type: ignore[misc]
    for how in ("inner", "left"):
        yield Subject(
            f"broadcast_join {how}",
            form,
            lambda one, two, h=how: two.rebalance().broadcast_join(one, "k", h),  # type: ignore[misc]
            timed=(False,),
        )


OPERATORS: Final = (*_on_rows(), *_on_columns())


# --- running one ----------------------------------------------------------------------------------------


class _Taken:
    """A partition that keeps what it gets."""

    def __init__(self, batches: list[Batch] | None) -> None:
        self.subpartitions = [None]
        self.hot_keys = HotKeys()
        self.taps = ()
        self._batches = batches

    def skips(self, position: int, rows: int) -> bool:
        return False

    def hand_over(self, position: int, batch: Batch) -> bool:
        if self._batches is not None:
            self._batches.append(batch)
        return True

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        pass


class Isolated:
    """The compiled job of one operator, and the batches that come to it from each side."""

    def __init__(self, measured: Subject, timed: bool, keys: int, rows: int) -> None:
        make: Any = Stream if measured.form == "rows" else Table
        schema = {} if measured.form == "rows" else {"schema": SCHEMA}
        sides = [make.source(_Numbered(measured.form, side), **schema) for side in range(2)]
        if timed and measured.name != "event_time":
            sides = [side.event_time("t") for side in sides]
        job = measured.build(*sides)
        emitted = job.rebalance()  # Behind which a table's columns are all read.
        made = emitted.to_rows() if isinstance(emitted, Table) else emitted
        graph = compile_job(made.to_count())
        self._programs = [vertex.program for vertex in graph.vertices]
        self._operator = next(number for number, vertex in enumerate(graph.vertices) if not vertex.is_source)
        self.came: dict[int, Batch] = {}
        """By side, what comes in of the data."""
        self._inputs: dict[int, int] = {}
        """By side, the number of the input."""
        for edge in (graph.edges[number] for number in graph.inputs_of(self._operator)):
            taken: list[Batch] = []
            chain, side = self._chain(edge.source, taken)
            chain.entrance(0)(_data(measured.form, keys, rows))
            (self.came[side],) = taken
            self._inputs[side] = edge.input

    def opened(self) -> tuple[Chain, dict[int, Emit]]:
        """The operator, and by side where its batches go in."""
        chain, _ = self._chain(self._operator, None)
        return chain, {side: chain.entrance(input) for side, input in sorted(self._inputs.items())}

    def _chain(self, vertex: int, taken: list[Batch] | None) -> tuple[Chain, int]:
        program = open_program(self._programs[vertex], cloudpickle.loads)
        context = TaskContext(job="j1", name="bench", index=0, parallelism=1, attempt=1)
        for operator in program.operators:
            operator.open(context)
        for output in program.outputs:
            if output.partitioner == "broadcast":  # Those are encoded at once.
                output.partitioner = "rebalance"
        partitions: Any = {output.edge: _Taken(taken) for output in program.outputs}
        side = program.source.side if isinstance(program.source, _Numbered) else -1
        return Chain(program, partitions, 0, TaskCounters()), side


def _rows_of_run(batch: int) -> int:
    return min(ROWS, max(512, 128 * batch))


@dataclass(frozen=True)
class _Cell:
    """One measurement."""

    measured: Subject
    timed: bool
    batch: int
    keys: int

    @property
    def rows(self) -> int:
        """How many are in one run: fewer in short batches."""
        return _rows_of_run(self.batch)

    def pieces(self, whole: Batch, begin: int, end: int, batch: int) -> list[Batch]:
        return [whole.slice(at, min(at + batch, end)) for at in range(begin, end, batch)]

    def feed(self, job: Isolated) -> tuple[Chain, list[tuple[Emit, Batch | Watermark]]]:
        """An operator that has seen each key, and what it gets."""
        chain, ways = job.opened()
        first, *others = ways
        if self.measured.keyed:
            for side, emit in ways.items():
                if side == first or self.timed:
                    for piece in self.pieces(job.came[side], 0, self.keys, max(BATCHES)):
                        emit(piece)
        if others and not self.timed:
            ways.pop(first)(Watermark(END_OF_TIME))
        items: list[tuple[Emit, Batch | Watermark]] = []
        step = max(1, WATERMARK_ROWS // self.batch) * self.batch
        for begin in range(self.keys, self.keys + self.rows, step):
            end = min(begin + step, self.keys + self.rows)
            cut = [self.pieces(job.came[side], begin, end, self.batch) for side in ways]
            items += [
                (emit, piece)
                for pieces in zip(*cut, strict=True)
                for emit, piece in zip(ways.values(), pieces, strict=True)
            ]
            if self.timed:
                items += [(emit, Watermark(end - 1)) for emit in ways.values()]
        items += [(emit, Watermark(END_OF_TIME)) for emit in ways.values()]
        return chain, items

    def nanoseconds(self, job: Isolated) -> float:
        """What each row costs in one run."""
        chain, items = self.feed(job)
        begin = time.process_time_ns()
        for emit, item in items:
            emit(item)
        chain.finish(lambda: None)
        spent: int = time.process_time_ns() - begin
        rows: int = sum(len(item) for _, item in items if not isinstance(item, Watermark))
        return spent / rows

    def bytes_a_key(self, job: Isolated, seconds: float) -> float:
        """What an operator holds that has seen each key once, or as many as come in that time."""
        chain, ways = job.opened()
        sides = ways if self.timed else dict([next(iter(ways.items()))])
        cut = [self.pieces(job.came[side], 0, self.keys, self.batch) for side in sides]
        deadline, seen = time.monotonic() + seconds, 0
        tracemalloc.start()
        try:
            arrow = pa.total_allocated_bytes()
            for pieces in zip(*cut, strict=True):
                for emit, piece in zip(sides.values(), pieces, strict=True):
                    emit(piece)
                seen += len(pieces[0])
                if time.monotonic() > deadline:
                    break
            held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
        finally:
            tracemalloc.stop()
        assert chain.operators
        return float(held / seen)

    def measure(self, job: Isolated, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        held = round(self.bytes_a_key(job, seconds / 4), 1) if self.measured.keyed else None
        runs: list[float] = []
        while not runs or (len(runs) < RUNS_MAX and time.monotonic() < deadline):
            gc.collect(0)
            runs.append(self.nanoseconds(job))
        return {
            "operator": self.measured.name,
            "form": self.measured.form,
            "event_time": self.timed,
            "batch": self.batch,
            "keys": self.keys,
            "ns_per_row": round(min(runs), 2),
            "bytes_per_key": held,
        }


def _cells(operators: Sequence[str], batches: Sequence[int], keys: Sequence[int]) -> list[_Cell]:
    unknown = set(operators) - {each.name for each in OPERATORS}
    if unknown:
        there = ", ".join(dict.fromkeys(each.name for each in OPERATORS))
        raise UsageError(f"no operator is named {min(unknown)!r}: there are {there}")
    chosen = [each for each in OPERATORS if not operators or each.name in operators]
    return [
        _Cell(measured, timed, batch, number)
        for number in keys
        for form in ("rows", "columns")
        for measured in chosen
        if measured.form == form
        for timed in measured.timed
        for batch in batches
    ]


def measure_operators(
    operators: Sequence[str] = (),
    batches: Sequence[int] = BATCHES,
    keys: Sequence[int] = KEYS,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Every operator of that name (none: all) in batches of so many rows, with so many keys.

    Args:
        seconds: for all of it, about: each is measured once at least, however long that takes.

    Raises:
        UsageError: there is no operator of that name.
    """
    cells = _cells(operators, batches, keys)
    end, made, found = time.monotonic() + seconds, None, []
    job: Isolated | None = None
    collects = gc.isenabled()
    gc.disable()  # As in workers, where it hardly ever runs.
    try:
        for number, cell in enumerate(cells):
            if (cell.measured, cell.timed, cell.keys) != made:
                made = (cell.measured, cell.timed, cell.keys)
                job = Isolated(*made, rows=_rows_of_run(max(batches)))
            assert job is not None
            left = max(0.0, end - time.monotonic())
            found.append(cell.measure(job, left / (len(cells) - number)))
    finally:
        if collects:
            gc.enable()
        _data.cache_clear()
    return {"cells": found}


# --- comparing ------------------------------------------------------------------------------------------


def _mean(ratios: Sequence[float]) -> float | None:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4) if ratios else None


def compared(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """How fast each operator is, as a share of what it was: geometric means over the cells that both have.

    Raises:
        UsageError: they have no cell in common.
    """

    def by_cell(measured: Mapping[str, Any]) -> dict[tuple[Any, ...], float]:
        names = ("operator", "form", "event_time", "batch", "keys")
        return {tuple(cell[name] for name in names): cell["ns_per_row"] for cell in measured["cells"]}

    before, after = by_cell(earlier), by_cell(now)
    ratios = {cell: before[cell] / spent for cell, spent in after.items() if cell in before}
    if not ratios:
        raise UsageError("the earlier measurement has none of these cells: choose others, or another file")
    operators = []
    for name in dict.fromkeys(cell[0] for cell in ratios):
        line: dict[str, Any] = {"operator": name}
        for kind, bar in RATIO_MIN.items():
            mine = [
                ratio
                for cell, ratio in ratios.items()
                if cell[0] == name and (cell[3] <= SHORT_BATCH_MAX) == (kind == "short")
            ]
            line[kind] = _mean(mine)
            line[f"{kind}_is_met"] = not mine or math.prod(mine) >= bar ** len(mine)
        operators.append(line)
    slow = [
        {
            "operator": name,
            "form": form,
            "event_time": timed,
            "batch": batch,
            "keys": keys,
            "ratio": round(ratio, 3),
        }
        for (name, form, timed, batch, keys), ratio in ratios.items()
        if ratio < CELL_RATIO_MIN
    ]
    is_met = all(line[f"{kind}_is_met"] for line in operators for kind in RATIO_MIN)
    return {"operators": operators, "slow_cells": slow, "is_met": is_met}
