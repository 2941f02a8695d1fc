"""Every operator with state, and inputs for it; run as a program, it goes on with states that another process
has written, and writes its own.

``python -m support.stateful FOLDER`` reads a pickled :class:`Given` from the file "given" there, and writes a
pickled ``tuple[dict[tuple[str, str], list[str]], WrittenState]`` to "made": what :func:`tail` gives behind
each state, by case and file, and the states that are written after :func:`head` here.
"""

from __future__ import annotations

import importlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from typing import Any

import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.asof_join import AsOfColumns, AsOfJoin
from minishuffle.operators.assign_event_time import AssignEventTime
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Mark,
    Operator,
    Side,
    SplitMark,
    TaskContext,
    Watermark,
)
from minishuffle.operators.broadcast_join import (
    BIG,
    SMALL,
    BroadcastColumns,
    BroadcastJoin,
    SmallColumns,
    SmallRows,
)
from minishuffle.operators.combining import CombinedAggregation
from minishuffle.operators.distinct import Distinct
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.interval_join import IntervalJoin
from minishuffle.operators.join_columns import JoinColumns
from minishuffle.operators.join_inputs import Bounds
from minishuffle.operators.join_results import ColumnResults, RowResults
from minishuffle.operators.keyed_process import ProcessRows
from minishuffle.operators.reductions import KeyedReduction
from minishuffle.operators.row_conversion import rows_of
from minishuffle.operators.row_functions import keys_alone
from minishuffle.operators.sessions import Closing, SessionAggregation, SessionFold, SessionOperator
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.top_n import TopN
from minishuffle.operators.window_assigner import SlidingWindows, WindowAssigner, tumbling
from minishuffle.operators.windows import Panes, WindowAggregation, WindowFold, WindowOperator, one_more
from minishuffle.snapshots.sealedmanifest import WrittenState
from minishuffle.snapshots.segmentindex import StateSegment, read_index
from minishuffle.snapshots.statefile import TaskStateWriter, read_parts
from minishuffle.snapshots.storage import Folder, folder_at
from support.batches import as_batch
from support.reducing import aggregating, counting, counting_columns, folding, reducing

__all__ = [
    "AGGREGATES",
    "CASES",
    "DIVIDED",
    "T",
    "Case",
    "Given",
    "Run",
    "compacted",
    "goes_on",
    "head",
    "load",
    "record",
    "save",
    "tail",
]

T = EventTime(column="t")
KEYS = [0, 1, True, 2.0, 2.5, "a", None, (1, "b"), b"x", datetime(2026, 1, 1, tzinfo=UTC)]
KEYS += [f"word {number}" for number in range(12)]
SCHEMA = pa.schema(
    {"k": pa.string(), "g": pa.int64(), "t": pa.int64(), "v": pa.int64(), "x": pa.float64(),
     "d": pa.decimal128(9, 2), "b": pa.bool_(), "n": pa.null()}
)  # fmt: skip
RIGHT = pa.schema([field.with_name(f"{field.name}2") for field in SCHEMA])
AGGREGATES = (
    {
        f"{function}_{column}": (column, function)
        for function in ("sum", "count", "min", "max", "mean", "first", "last", "count_distinct")
        for column in ("v", "x", "d", "b")
        if (function, column) != ("mean", "d")
    }
    | {"std_b": ("b", "std"), "last_k": ("k", "last")}
    | {"none": ("n", "max"), "last_text": ("k", "max")}
)
EACH_KIND: Any = {
    name: AGGREGATES[name]
    for name in (
        "sum_d", "count_x", "min_b", "mean_v", "std_b", "first_x", "last_k", "count_distinct_v", "none",
        "last_text",
    )
}  # fmt: skip
"""One aggregate for each kind of state. An aggregation without windows has them all in its state; to bring
all forward in each window takes four times as long."""


# --- records --------------------------------------------------------------------------------------------


def record(dice: random.Random, number: int) -> dict[str, Any]:
    return {
        "k": dice.choice(["a", "b", "c", None, "x" * 80]),
        "g": dice.randint(0, 3),
        "t": number + dice.randint(0, 20),
        "v": dice.choice([None, dice.randint(-9, 9), 2**62 // 50]),
        "x": dice.choice([None, dice.randint(-40, 40) / 4]),
        "d": dice.choice([None, Decimal(dice.randint(-900, 900)) / 100]),
        "b": dice.choice([None, True, False]),
        "n": None,
    }


Records = list[dict[str, Any]]


def rows(records: Records, dice: random.Random, side: int) -> Any:
    """With more kinds of keys than columns have, and some that are one key."""
    return Batch(records, [dice.choice(KEYS) for _ in records])


def words(records: Records, dice: random.Random, side: int) -> Any:
    return Batch(records, [f"word {dice.randint(0, 300)}" for _ in records])


def own_rows(records: Records, dice: random.Random, side: int) -> Any:
    """Dicts without a key beside them."""
    return Batch(records)


def arrow(records: Records, dice: random.Random, side: int) -> Any:
    batch = pa.RecordBatch.from_pylist(records, schema=SCHEMA)
    return batch.rename_columns(RIGHT.names) if side else batch


# --- functions of users ---------------------------------------------------------------------------------


def merged(given: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {"v": (given["v"] or 0) + (row["v"] or 0), "seen": [*given.get("seen", [1]), 1]}


def listed(given: list[Any], row: dict[str, Any]) -> list[Any]:
    return sorted([*given, row["t"]])


def refusing(given: list[Any], row: dict[str, Any]) -> list[Any]:
    """Raises for every third row."""
    if row["t"] % 3 == 0:
        raise ValueError("a multiple of 3")
    return [row["t"], len(given)]


def remember(row: dict[str, Any], context: Any) -> list[Any]:
    seen = context.state.setdefault("seen", {})
    seen[row["t"]] = seen.get(row["t"], 0) + 1
    context.set_timer(row["t"] + 5)
    context.set_timer(10**9)
    context.delete_timer(row["t"] + 4)
    return []


def tell(at: datetime, context: Any) -> list[Any]:
    return [(context.key, at, dict(sorted(context.state["seen"].items())))]


def by_both_clocks(row: dict[str, Any], context: Any) -> list[Any]:
    """Timers of many keys at one time, some deleted; keys whose state goes and comes again."""
    context.state[row["t"] % 4] = row["g"]
    context.set_timer(row["t"] // 8 * 8 + 30)
    context.set_timer((row["t"] // 16 * 16 + 40) * 10**6, "wall")
    if row["g"] == 1:
        context.delete_timer(row["t"] // 8 * 8 + 30)
    if row["g"] == 2:
        context.state.clear()
    return [(context.key, row["t"], list(context.state))]


def tell_all(at: datetime, context: Any) -> list[Any]:
    return [(context.key, at, list(context.state.items()))]


# --- operators ------------------------------------------------------------------------------------------


def outputs() -> list[Any]:
    return outputs_of(EACH_KIND, T)


def join_rows(how: Any) -> IntervalJoin:
    return IntervalJoin(RowResults(how), Bounds(5, 5), (T, T))


def join_columns(how: Any) -> IntervalJoin:
    results = ColumnResults(JoinColumns(("k", "g"), ("k2", "g2"), how), (SCHEMA, RIGHT))
    return IntervalJoin(results, Bounds(5, 3), (T, EventTime(column="t2")))


NO_PANES, PANES = Panes(), Panes("panes", lateness=3, early=2)
SLOW_PANES = Panes("panes", lateness=300, early=50)


def windows(assigner: WindowAssigner, panes: Panes = NO_PANES, add: Any = listed) -> WindowOperator:
    on_error: Any = "skip" if add is refusing else "fail"
    return WindowOperator(WindowFold(assigner, add, list, panes), T, on_error=on_error)


def windows_arrow(assigner: WindowAssigner, panes: Panes = NO_PANES) -> WindowOperator:
    return WindowOperator(WindowAggregation(assigner, ("k", "g"), outputs(), panes), T)


def sessions(closing: Closing) -> SessionOperator:
    return SessionOperator(SessionFold(closing, listed, list), T, Late())


def sessions_arrow(closing: Closing) -> SessionOperator:
    return SessionOperator(SessionAggregation(closing, ("k", "g"), outputs()), T, Late())


def as_of() -> AsOfJoin:
    columns = AsOfColumns(("k", "g"), ("k2", "g2"))
    return AsOfJoin(ColumnResults(columns, (SCHEMA, RIGHT)), 9, (T, EventTime(column="t2")))


def combined() -> KeyedReduction:
    outputs = outputs_of({"sum_v": ("v", "sum"), "count_x": ("x", "count")})
    return KeyedReduction(CombinedAggregation(("k", "g"), outputs, "state "), "batch")


@dataclass(frozen=True)
class Case:
    make: Callable[[], Operator]
    batch: Callable[[Records, random.Random, int], Any]
    keys: tuple[tuple[str, ...] | None, ...] = (None,)
    """Columns by which the batches of each input are partitioned; None: rows with keys."""
    sizes: tuple[int, ...] = (1, 5, 20, 60)
    """Rows of a batch, one of these."""
    records: int = 200
    """In front of the state, and as many behind."""
    by_batch: bool = False
    """What comes out, or its order, depends on how the input is cut into batches."""


KEYED: Any = (("k", "g"),)
BOTH_KEYED: Any = (("k", "g"), ("k2", "g2"))
HOWS = ("inner", "left", "right", "full", "semi", "anti")

DIVIDED = {
    "count": Case(lambda: counting("end"), rows),
    "reduce": Case(lambda: reducing(merged, "end"), rows),
    "fold": Case(lambda: folding(list, listed, "end"), rows),
    "fold each": Case(lambda: folding(list, listed, "each"), rows),
    "fold with errors": Case(lambda: folding(list, refusing, "end", "skip"), rows),
    "window": Case(lambda: windows(tumbling(7)), rows),
    "window panes": Case(lambda: windows(tumbling(7), PANES), rows),
    "slow panes": Case(lambda: windows(SlidingWindows(200, 50), SLOW_PANES), rows),
    "slow panes arrow": Case(lambda: windows_arrow(SlidingWindows(200, 50), SLOW_PANES), arrow, KEYED),
    "window with errors": Case(lambda: windows(tumbling(40), PANES, refusing), rows),
    "window panes arrow": Case(lambda: windows_arrow(tumbling(7), PANES), arrow, KEYED),
    "sliding panes arrow": Case(lambda: windows_arrow(SlidingWindows(7, 3), PANES), arrow, KEYED),
    "window count": Case(lambda: WindowOperator(WindowFold(tumbling(7), one_more, int), T), rows),
    "sliding": Case(lambda: windows(SlidingWindows(7, 3)), rows),
    "sessions": Case(lambda: sessions(Closing(3)), rows),
    "counted": Case(lambda: sessions(Closing.with_size(3)), rows),
    "sessions arrow": Case(lambda: sessions_arrow(Closing(3)), arrow, KEYED),
    "counted arrow": Case(lambda: sessions_arrow(Closing.with_size(3)), arrow, KEYED),
    "process": Case(lambda: ProcessRows(remember, tell, T), rows),
    "join": Case(lambda: join_rows("full"), rows, (None, None), by_batch=True),
    "count arrow": Case(lambda: counting_columns(("k",), "end"), arrow, (("k",),)),
    "aggregate": Case(lambda: aggregating(("k", "g"), AGGREGATES, "end", T), arrow, KEYED),
    "window arrow": Case(lambda: windows_arrow(tumbling(7)), arrow, KEYED),
    "distinct": Case(lambda: Distinct(("k", "g")), arrow, KEYED),
    "top_n": Case(lambda: TopN(("k", "g"), 2, "v", True), arrow, KEYED),
    "inner join arrow": Case(lambda: join_columns("inner"), arrow, BOTH_KEYED),
    "semi join arrow": Case(lambda: join_columns("semi"), arrow, BOTH_KEYED, by_batch=True),
    "as of": Case(as_of, arrow, BOTH_KEYED),
    "full join arrow": Case(lambda: join_columns("full"), arrow, BOTH_KEYED, by_batch=True),
}
"""Those whose state any other number of subtasks goes on with."""


# --- states that are laid out in another way than they are read -----------------------------------------


def alone(records: Records, dice: random.Random, side: int) -> Any:
    return keys_alone([f"word {dice.randint(0, 300)}" for _ in records])


def added(total: int, row: dict[str, Any]) -> int:
    """Raises for every third row."""
    if row["t"] % 3 == 0:
        raise ValueError("a multiple of 3")
    return total + row["t"]


def broadcast(kind: str) -> BroadcastJoin:
    columns = BroadcastColumns(("g",), ("g",), is_left=True)
    return BroadcastJoin(SmallRows(columns) if kind == "rows" else SmallColumns(columns, SCHEMA))


CASES = DIVIDED | {
    "many distinct": Case(lambda: Distinct(("k", "g", "v")), arrow, (("k", "g", "v"),)),
    "long sessions": Case(lambda: sessions(Closing(150)), words),
    "long sessions arrow": Case(lambda: sessions_arrow(Closing(30)), arrow, KEYED),
    "reduce batch": Case(lambda: reducing(merged, "batch"), rows, by_batch=True),
    "count batch": Case(lambda: counting("batch"), rows, by_batch=True),
    "sums": Case(lambda: folding(int, lambda total, row: total + row["t"], "end"), words),
    "sums with errors": Case(lambda: folding(int, added, "end", "skip"), words),
    "sums by window": Case(lambda: windows(tumbling(10**9), NO_PANES, refusing), words),
    "keys alone": Case(lambda: counting("end"), alone, sizes=(10, 2_500), records=4_000),
    "aggregate batch": Case(
        lambda: aggregating(("k", "g"), EACH_KIND, "batch", T), arrow, KEYED, by_batch=True
    ),
    "aggregate each": Case(lambda: aggregating(("k", "g"), EACH_KIND, "each", T), arrow, KEYED),
    "combined": Case(combined, arrow, KEYED, by_batch=True),
    "clocks": Case(lambda: ProcessRows(by_both_clocks, tell_all, T), rows),
    "clocks and ages": Case(lambda: ProcessRows(by_both_clocks, tell_all, T, ttl=50.0), rows),
    "event time": Case(lambda: AssignEventTime(T, 5), own_rows, by_batch=True),
    "event time each": Case(lambda: AssignEventTime(T, 5, watermarks="each"), own_rows),
    "broadcast rows": Case(lambda: broadcast("rows"), own_rows, (None, None)),
    "broadcast columns": Case(lambda: broadcast("columns"), arrow, (("g",), ("g",))),
    **{
        f"{how} join{kind}": Case(
            lambda how=how, make=make: make(how), batch, keys, by_batch=how not in ("inner", "anti")
        )
        for kind, make, batch, keys in (
            ("", join_rows, rows, (None, None)),
            (" arrow", join_columns, arrow, BOTH_KEYED),
        )
        for how in HOWS
    },
}


@dataclass(frozen=True)
class Given:
    """States by file, the parts of all cases in each, and the watermark that each case had passed on."""

    states: dict[str, WrittenState]
    told: dict[str, int]


# --- inputs, and what comes out -------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """The clock is at so many seconds."""

    time: int


def head(name: str) -> list[tuple[Any, int]]:
    """What comes in front of the state: batches, marks and :class:`Clock`, with the number of their input."""
    case, found = CASES[name], list[tuple[Any, int]]()
    if isinstance(case.make(), AssignEventTime):
        found = [(SplitMark(0, "open"), 0), (SplitMark(0, "current"), 0)] if "each" in name else []
    return found + _items(name, 0)


def tail(name: str) -> list[tuple[Any, int]]:
    """What comes behind it, to the end."""
    case = CASES[name]
    ends = [(Watermark(END_OF_TIME), side) for side in range(len(case.keys))]
    return _items(name, case.records) + ends


def _items(name: str, first: int) -> list[tuple[Any, int]]:
    case, dice, found = CASES[name], random.Random(f"{name} {first}"), list[tuple[Any, int]]()
    at, sides = first, list(range(len(case.keys)))
    if name.startswith("broadcast"):
        sides = [BIG] if first else [SMALL]
    while at < first + case.records:
        size = min(dice.choice(case.sizes), first + case.records - at)
        for side in sides:
            records = [record(dice, at + number) for number in range(size)]
            found.append((case.batch(records, dice, side), side))
            if dice.random() < 0.5:
                found.append((Watermark(at - dice.choice([0, 10, 60])), side))
        at += size
        found.append((Clock(at), 0))
    return found


class Run:
    """One operator, and what it emits: rows as text, and watermarks; by itself for each side output."""

    def __init__(
        self, name: str, parts: Iterable[StatePart] | None = None, told: int = BEGINNING_OF_TIME
    ) -> None:
        self.operator = CASES[name].make()
        self.out: dict[str, list[str]] = {"": [], "panes": []}
        self.told = told
        """The last watermark that was passed on."""
        self._time = 0 if parts is None else CASES[name].records
        context = TaskContext("job", "task", 0, 1, 1, now=self._now, wall=self._now)
        self.operator.open(context)
        if parts is not None:
            self.operator.read_state(parts)

    def _now(self) -> float:
        return float(self._time)

    def take(self, given: Iterable[tuple[Any, int]]) -> None:
        for item, input in given:
            if isinstance(item, Mark):
                self.operator.on_mark(item, input, self._emit)
            elif not isinstance(item, Clock):
                self.operator.process(as_batch(item), input, self._emit)
                continue
            else:
                self._time = item.time
            due = self.operator.deadline()
            if due is not None and due <= self._now():
                self.operator.on_clock(self._now(), self._emit)

    def finish(self) -> list[str]:
        """The data have ended; what came out since the beginning, or :meth:`forget`."""
        self.operator.finish(self._emit)
        return [f"{tag}: {what}" for tag, out in self.out.items() for what in out]

    def forget(self) -> None:
        """What came out so far."""
        for out in self.out.values():
            out.clear()

    def _emit(self, item: Any) -> None:
        batch = item.batch if isinstance(item, Side) else item
        if isinstance(item, Watermark):
            if item.time > self.told:
                self.told = item.time
                for out in self.out.values():
                    out.append(repr(item))
        elif not isinstance(batch, Mark):
            out = self.out[item.tag if isinstance(item, Side) else ""]
            times = [None] * len(batch) if batch.times is None else batch.times.tolist()
            out += [f"{row!r} at {time}" for row, time in zip(rows_of(batch), times, strict=True)]


def compacted(parts: Iterable[StatePart]) -> list[StatePart]:
    """The parts of one name as one, the last name first; as several if not all have the same columns."""
    found: dict[str, list[pa.RecordBatch]] = {}
    for part in parts:
        found.setdefault(part.name, []).append(part.batch)
    return [
        StatePart(name, pa.concat_batches(same))
        for name, batches in reversed(found.items())
        for _, same in groupby(batches, lambda batch: batch.schema)
    ]


def save(folder: Folder, file: str, states: Mapping[str, Iterable[StatePart]]) -> WrittenState:
    """Write states by name as those of operators of one task."""
    writer = TaskStateWriter(folder, file)
    for name, parts in states.items():
        for part in parts:
            writer.write(name, part)
    return writer.close()


def load(folder: Folder, written: WrittenState) -> dict[str, list[StatePart]]:
    """The states of all cases that :func:`save` has written."""
    segments: dict[str, list[StateSegment]] = {name: [] for name in CASES}
    for segment in read_index(folder, written):
        segments[segment.operator].append(segment)
    return {name: list(read_parts(folder, written.file, some)) for name, some in segments.items()}


def goes_on(name: str, parts: Iterable[StatePart], told: int, *, is_cut: bool = False) -> list[str]:
    """What the tail of a case gives behind such a state. ``is_cut``: in shorter batches, if that is to change
    nothing."""
    run = Run(name, parts, told)
    run.take(cut(tail(name)) if is_cut and not CASES[name].by_batch else tail(name))
    return run.finish()


def cut(given: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
    """The same in shorter batches."""
    for item, input in given:
        if isinstance(item, Mark | Clock):
            yield item, input
            continue
        batch = as_batch(item)
        for begin in range(0, len(batch), 7):
            yield batch.slice(begin, min(begin + 7, len(batch))), input


def main(place: str) -> None:
    folder = folder_at(place)
    given: Given = pickle.loads(folder.read("given"))
    found = {
        (name, file): goes_on(name, parts, given.told[name], is_cut=file == "again")
        for file, written in given.states.items()
        for name, parts in load(folder, written).items()
    }
    runs = {name: Run(name) for name in CASES}
    for name, run in runs.items():
        run.take(head(name))
    own = save(folder, "own", {name: run.operator.write_state() for name, run in runs.items()})
    folder.publish("made", pickle.dumps((found, own)))


if __name__ == "__main__":
    # Under its name, by which what it reads was pickled.
    importlib.import_module("support.stateful").main(*sys.argv[1:])
