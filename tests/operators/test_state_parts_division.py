"""State written by one subtask, read by three, written by these and read by two: nothing is lost or twice,
and what each key gives is in the same order.

Each operator with state takes a third of the records before, between and after, in whichever subtask the
exchange gives each record to, and gives what one subtask gives that has seen all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from typing import Any, get_args

import pyarrow as pa
import pytest

from minishuffle import operators
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.keys import canonical_rows
from minishuffle.exchange.partitioner import Partitioner
from minishuffle.operators.aggregates import Function
from minishuffle.operators.assign_event_time import AssignEventTime
from minishuffle.operators.base import (
    END_OF_TIME,
    Mark,
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
    SmallSide,
)
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.row_conversion import rows_of
from minishuffle.operators.state_parts import StatePart, divided
from support.batches import as_batch, collecting
from support.stateful import AGGREGATES, CASES, DIVIDED, Case, T, record


def key_of(row: Any) -> Any:
    """That of a row that an operator emits; None if it has none."""
    if isinstance(row, dict):
        return row.get("k", row.get("k2")), row.get("g", row.get("g2"))
    return canonical_rows([row[0]])[0] if isinstance(row, tuple) else None


def by_key(out: list[tuple[Any, str]]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for key, row in out:
        found.setdefault(key, []).append(row)
    return found


class Subtasks:
    """As many of one operator; what they emit."""

    def __init__(self, case: Case, count: int, parts: list[StatePart]) -> None:
        self.case = case
        self.operators = [case.make() for _ in range(count)]
        self.out: list[tuple[Any, str]] = []
        """(Side output and key, row as text)."""
        for index, operator in enumerate(self.operators):
            operator.open(TaskContext("job", "task", index, count, 1))
            operator.read_state(divided(parts, index, count))
        self._partitioners = [Partitioner("hash", count, keys, None, 0) for keys in case.keys]

    def emit(self, item: Any) -> None:
        batch, tag = (item.batch, item.tag) if isinstance(item, Side) else (item, "")
        if not isinstance(batch, Mark):
            self.out += [((tag, key_of(row)), repr(row)) for row in rows_of(batch)]

    def take(self, item: Any, input: int) -> None:
        if isinstance(item, Mark):
            for operator in self.operators:
                operator.on_mark(item, input, self.emit)
            return
        for index, piece in self._partitioners[input].split(as_batch(item)):
            self.operators[index].process(piece, input, self.emit)

    def finish(self) -> None:
        for operator in self.operators:
            operator.finish(self.emit)

    def parts(self) -> Iterator[StatePart]:
        """What all have written, as it would come from a file."""
        for operator in self.operators:
            for part in operator.write_state():
                buffer = part.batch.serialize()
                batch = pa.ipc.read_record_batch(buffer, part.batch.schema)
                yield StatePart(part.name, batch)


def items(case: Case, dice: random.Random) -> list[tuple[Any, int]]:
    """Batches and watermarks with the number of the input that they come by."""
    found: list[tuple[Any, int]] = []
    for start in range(0, 120, 6):
        for side in range(len(case.keys)):
            found.append((case.batch([record(dice, start + n) for n in range(6)], dice, side), side))
            if dice.random() < 0.5:
                found.append((Watermark(start), side))
    return found


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_state_goes_from_one_subtask_to_three_and_to_two(name: str, seed: int) -> None:
    case, dice = DIVIDED[name], random.Random(f"{name} {seed}")
    given = items(case, dice)
    ends = [(Watermark(END_OF_TIME), side) for side in range(len(case.keys))]
    whole = Subtasks(case, 1, [])
    for item in given + ends:
        whole.take(*item)
    whole.finish()
    third = len(given) // 3
    parts: list[StatePart] = []
    out: list[tuple[Any, str]] = []
    for count, some in ((1, given[:third]), (3, given[third : 2 * third]), (2, given[2 * third :] + ends)):
        tasks = Subtasks(case, count, parts)
        for item in some:
            tasks.take(*item)
        if count == 2:
            tasks.finish()
        parts, out = list(tasks.parts()), out + tasks.out
    assert whole.out, "the case shows nothing"
    assert by_key(out) == by_key(whole.out)


def test_three_subtasks_have_each_key_once_between_them() -> None:
    counting = Subtasks(DIVIDED["count"], 1, [])
    counting.take(Batch(list(range(100)), list(range(100))), 0)
    (part,) = counting.parts()
    shares = [list(divided([part], index, 3)) for index in range(3)]
    assert [len(share) for share in shares] == [1, 1, 1]
    assert sorted(share[0].batch.num_rows for share in shares)[0] > 15
    assert sum(share[0].batch.num_rows for share in shares) == 100


def test_each_aggregation_is_divided_here() -> None:
    assert {function for _, function in AGGREGATES.values()} == set(get_args(Function))


def with_state(kind: type) -> Iterator[type]:
    if "write_state" in vars(kind) and kind is not ChainedOperator:
        yield kind
    for below in kind.__subclasses__():
        yield from with_state(below)


def test_every_operator_with_state_is_divided_here() -> None:
    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(module.name)
    kinds = {kind for kind in with_state(ChainedOperator) if kind.__module__.startswith(operators.__name__)}
    shown = {type(case.make()) for case in CASES.values()}
    missing = [kind.__name__ for kind in kinds if not any(issubclass(each, kind) for each in shown)]
    assert kinds and not missing, "add a case of it to CASES"


def test_an_operator_without_state_writes_none() -> None:
    plain = ChainedOperator()
    assert list(plain.write_state()) == []
    plain.read_state([])


def test_the_event_time_of_splits_goes_with_them() -> None:
    """Whichever subtask reads a split: it does not fall back behind what was emitted of it."""
    before = AssignEventTime(T)
    before.open(TaskContext("job", "task", 0, 1, 1))
    for split, time in ((0, 70), (1, 50), (2, 90)):
        before.on_mark(SplitMark(split, "open"), 0, ignore)
        before.on_mark(SplitMark(split, "current"), 0, ignore)
        before.process(Batch([{"t": time}]), 0, ignore)
    before.on_mark(SplitMark(1, "done"), 0, ignore)
    parts = list(before.write_state())
    told = []
    for index, split in enumerate((0, 2)):
        marks: list[Any] = []
        after = AssignEventTime(T)
        after.open(TaskContext("job", "task", index, 2, 2))
        after.read_state(divided(parts, index, 2))
        after.on_mark(SplitMark(split, "open"), 0, ignore)
        after.on_mark(Watermark(END_OF_TIME), 0, collecting(marks))
        told.append(marks)
    assert told == [[Watermark(time), Watermark(END_OF_TIME)] for time in (69, 89)]


@pytest.mark.parametrize("has_splits", [False, True])
def test_the_event_time_of_a_stream_without_splits_goes_on_until_it_has_some(has_splits: bool) -> None:
    parts: list[StatePart] = []
    for index, time in enumerate((70, 50)):
        before = AssignEventTime(T)
        before.open(TaskContext("job", "task", index, 2, 1))
        before.process(Batch([{"t": time}]), 0, ignore)
        parts += before.write_state()
    after, marks = AssignEventTime(T), list[Any]()
    after.open(TaskContext("job", "task", 0, 1, 2))
    after.read_state(divided(parts, 0, 1))
    for mark in (SplitMark(0, "open"), SplitMark(0, "current")) if has_splits else ():
        after.on_mark(mark, 0, ignore)
    after.process(Batch([{"t": 40}]), 0, collecting(marks))
    assert [mark.time for mark in marks if isinstance(mark, Watermark)] == [39 if has_splits else 49]


def ignore(item: Any) -> None:
    """What is emitted is not looked at."""


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("has_begun", [False, True], ids=["before the big side", "behind it"])
def test_the_small_side_of_a_broadcast_join_goes_on_in_every_subtask(kind: str, has_begun: bool) -> None:
    by_key = BroadcastColumns(("k",), ("k",), is_left=True)
    small = [{"k": key, "n": number} for number, key in enumerate([2, 1, None, 2])]
    schema = pa.schema({"k": pa.int64(), "n": pa.int64()})

    def batch(given: list[dict[str, Any]]) -> Batch:
        return Batch(given if kind == "rows" else pa.RecordBatch.from_pylist(given))

    def operator(index: int) -> BroadcastJoin:
        side: SmallSide = SmallRows(by_key) if kind == "rows" else SmallColumns(by_key, schema)
        made = BroadcastJoin(side)
        made.open(TaskContext("job", "task", index, 3, 1))
        return made

    before = [operator(index) for index in range(3)]
    for each in before:
        for begin in (0, 2):
            each.process(batch(small[begin : begin + 2]), SMALL, ignore)
        if has_begun:
            each.process(batch([{"k": 1}]), BIG, ignore)
    parts = [*before[0].write_state()]  # A snapshot of all has them once.
    for index in range(2):
        after = operator(index)
        after.read_state(divided(parts, index, 2))
        out: list[Any] = []
        after.process(batch([{"k": 2}, {"k": 1}, {"k": None}]), BIG, out.append)
        found = [(row["k"], row["n"]) for each in out for row in rows_of(each)]
        assert found == [(2, 0), (2, 3), (1, 1), (None, None)]


def test_the_columns_of_the_small_sides_rows_stay_in_their_order() -> None:
    before, after = (BroadcastJoin(SmallRows(BroadcastColumns(("k",), ("k",), is_left=False))) for _ in "12")
    small = [{"k": 1, "a": 0}, {"k": None, "b": 1}, {"k": 2, "c": 2}, {"k": 1, "d": 3}]
    found = []
    for each in (before, after):
        each.open(TaskContext("job", "task", 0, 1, 1))
        out: list[Any] = []
        if each is before:
            each.process(Batch(small), SMALL, ignore)
        else:
            each.read_state(before.write_state())
        each.process(Batch([{"k": 1}]), BIG, out.append)
        found.append([list(row.items()) for item in out for row in rows_of(item)])
    assert found[0] == found[1]
    assert [name for name, _ in found[0][0]] == ["k", "a", "b", "c", "d"]
