"""Chains of operators: batches, marks, side outputs and clocks find their way, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import FatalRecord
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import ELEMENT_HEADER, decode, read_header
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.rowtaps import RowTap
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import AttemptId, JobId, OperatorId, PartitionId, SubtaskId
from minishuffle.operators.base import (
    END_OF_TIME,
    Active,
    Emit,
    Idle,
    Mark,
    Operator,
    Output,
    Program,
    Side,
    SplitMark,
    TaskContext,
    Watermark,
)
from minishuffle.operators.chained import ChainedOperator, ForgivingOperator
from minishuffle.operators.state_parts import StatePart
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.frames import WATERMARK_EVENT, EventKind
from minishuffle.wire.packed import SplitPosition
from support.batches import as_item


class Noting(ChainedOperator):
    """Passes everything on and notes it."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name, self.seen = name, seen

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self.seen.append((self.name, input, batch.payload))
        emit(batch)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        self.seen.append((self.name, input, mark))
        emit(mark)

    def finish(self, emit: Emit) -> None:
        emit(Batch([f"end of {self.name}"]))


class Late(ChainedOperator):
    """Sends rows below 0 aside."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        emit(Side("late", Batch([row for row in batch.payload if row < 0])))
        emit(Batch([row for row in batch.payload if row >= 0]))


class Alarm(ChainedOperator):
    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        emit(batch)

    def deadline(self) -> float | None:
        return self.times[0] if self.times else None

    def on_clock(self, now: float, emit: Emit) -> None:
        emit(Batch([self.times.pop(0)]))


class Bench:
    """A chain with an output on each edge; ``sides`` are their sides."""

    def __init__(
        self, *operators: Operator, sides: tuple[str | None, ...] = (None,), partitioner: Any = "rebalance"
    ) -> None:
        pool = NetworkBufferPool(64, 256).create_pool("p", 1, 64)

        def acquire() -> Segment:
            segment = pool.request()
            assert segment is not None
            return segment

        self.counters = TaskCounters()
        self.partitions = {
            edge: PipelinedPartition(
                PartitionId(JobId("j1"), edge, 0), range(1), acquire, lambda each: None, TaskCounters()
            )
            for edge in range(len(sides))
        }
        outputs = [Output(edge, partitioner, side=side) for edge, side in enumerate(sides)]
        program = Program(None, list(operators), outputs)
        self.chain = Chain(program, self.partitions, 0, self.counters)
        self.put = self.entrance(0)

    def entrance(self, input: int) -> Callable[[Any], None]:
        """Takes rows and marks of that input."""
        take = self.chain.entrance(input)
        return lambda item: take(as_item(item))

    def out(self, edge: int = 0) -> list[Any]:
        """Everything that the edge's consumer gets: rows, and (watermark, idle)."""
        subpartition: PipelinedSubpartition = self.partitions[edge].subpartitions[0]
        view = subpartition.view or subpartition.attach(1, lambda: None)
        subpartition.flush()
        found: list[Any] = []
        while (piece := view.poll()) is not None:
            payload = bytes(piece.payload)
            if payload[0] == EventKind.WATERMARK and len(payload) == WATERMARK_EVENT.size:
                _, idle, time = WATERMARK_EVENT.unpack(payload)
                found.append((time, bool(idle)))
            else:
                while payload:
                    size, rows, kind = read_header(payload)
                    begin = ELEMENT_HEADER.size
                    batch = decode(kind, rows, payload[begin : begin + size]).payload
                    assert isinstance(batch, list)
                    found += batch
                    payload = payload[begin + size :]
            piece.released()
            subpartition.flush()
        return found


def test_batches_and_marks_go_through_all_operators_in_order() -> None:
    seen: list[Any] = []
    bench = Bench(Noting("a", seen), Noting("b", seen))
    bench.put([1])
    bench.put(Watermark(5))
    bench.put([2])
    bench.put(Idle())
    assert bench.out() == [1, (5, False), 2, (5, True)]
    bench.put(Active())
    bench.put([3])
    assert bench.out() == [(5, False), 3]
    items = ([1], Watermark(5), [2], Idle(), Active(), [3])
    assert seen == [(name, 0, item) for item in items for name in ("a", "b")]
    assert bench.counters.watermark == 5


def test_a_watermark_goes_out_once_and_never_back_and_the_end_of_time_not_at_all() -> None:
    bench = Bench(Noting("a", []))
    for time in (5, 5, 3, 7, END_OF_TIME):
        bench.put(Watermark(time))
        bench.put([time if time != END_OF_TIME else "end"])
    assert bench.out() == [(5, False), 5, 5, 3, (7, False), 7, "end"]


def test_a_tap_sees_each_row_before_it_is_written_and_its_consumer() -> None:
    for partitioner, consumer in (("rebalance", 0), ("broadcast", None)):
        bench = Bench(partitioner=partitioner)
        bench.put(["before"])
        rows: list[Any] = []
        attempt = AttemptId(SubtaskId(JobId("j1"), OperatorId(0), 0), 1)
        bench.partitions[0].taps = (RowTap(attempt, rows, lambda: 1.0),)
        bench.put(["seen"])
        bench.partitions[0].taps = ()
        bench.put(["behind"])
        assert bench.out() == ["before", "seen", "behind"]
        assert [(row["values"], row["consumer"]) for row in rows] == [(["'seen'"], consumer)]


def test_side_outputs_pass_by_the_operators_behind_and_reach_their_edges_only() -> None:
    seen: list[Any] = []
    bench = Bench(Late(), Noting("behind", seen), sides=(None, "late", "other"))
    bench.put([1, -2, 3, -4])
    bench.put(Watermark(9))
    assert bench.out(0) == [1, 3, (9, False)]
    assert bench.out(1) == [-2, -4, (9, False)]
    assert bench.out(2) == [(9, False)]
    assert seen == [("behind", 0, [1, 3]), ("behind", 0, Watermark(9))]


def test_split_marks_end_with_the_chain() -> None:
    bench = Bench(Noting("a", []))
    bench.put(SplitMark(3, "open"))
    assert bench.out() == []


def test_other_inputs_enter_at_the_first_operator_under_their_number() -> None:
    seen: list[Any] = []
    bench = Bench(Noting("a", seen), Noting("b", seen))
    bench.entrance(1)(["other"])
    bench.entrance(1)(Watermark(1))
    assert seen == [
        ("a", 1, ["other"]),
        ("b", 0, ["other"]),
        ("a", 1, Watermark(1)),
        ("b", 0, Watermark(1)),
    ]


def test_operators_are_called_when_their_time_has_come_and_not_before() -> None:
    bench = Bench(Alarm(7.0, 9.0), Alarm(8.0))
    assert bench.chain.deadline() == 7.0
    bench.chain.on_clock(6.9)
    assert bench.out() == []
    bench.chain.on_clock(8.0)
    assert bench.out() == [7.0, 8.0]
    assert bench.chain.deadline() == 9.0
    bench.chain.on_clock(9.5)
    assert bench.chain.deadline() is None


def test_finish_lets_each_operator_see_what_the_one_before_kept_back() -> None:
    seen: list[Any] = []
    bench = Bench(Noting("a", seen), Noting("b", seen))
    checks: list[None] = []
    bench.chain.finish(lambda: checks.append(None))
    assert bench.out() == ["end of a", "end of b"]
    assert seen == [("b", 0, ["end of a"])]
    assert len(checks) == 2


def test_each_operator_counts_what_it_takes_and_emits() -> None:
    bench = Bench(Alarm(), Late(), Alarm(), sides=(None, "late"))
    bench.put([1, -1, 2, -2, -3])
    bench.put(Watermark(5))
    found = [(each.records_in, each.records_out) for each in bench.chain.counters]
    assert found == [(5, 5), (5, 5), (2, 2)], "rows put aside are emitted too, and taken by no operator"


def test_each_input_counts_for_the_first_operator() -> None:
    bench = Bench(Noting("join", []), Noting("b", []))
    bench.put([1, 2])
    bench.entrance(1)([3])
    assert [(each.records_in, each.records_out) for each in bench.chain.counters] == [(3, 3), (3, 3)]


# --- state ------------------------------------------------------------------------------------------


class Sum(ChainedOperator):
    """Emits the sum of all rows so far."""

    def __init__(self, id: str) -> None:
        self.id, self.total = id, 0

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self.total += sum(batch.payload)
        emit(Batch([self.total]))

    def write_state(self) -> Iterator[StatePart]:
        if self.total:
            yield StatePart("total", pa.RecordBatch.from_pydict({"total": [self.total]}))

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self.total += sum(part.batch["total"][0].as_py() for part in parts)


def test_a_chain_goes_on_with_the_state_and_the_event_time_of_another() -> None:
    bench = Bench(Sum("first"), Sum(""), Sum("last"))
    bench.put([1, 2])
    bench.put(Watermark(7))
    taken = bench.chain.snapshot([SplitPosition(0, 2)])
    bench.put([100])
    assert {id: len(parts) for id, parts in taken.parts.items()} == {"first": 1, "last": 1}
    assert (taken.watermark, taken.positions) == (7, [SplitPosition(0, 2)])
    other = Bench(Sum("first"), Sum(""), Sum("last"))
    other.chain.restore(taken)
    other.put(Watermark(6))
    other.put([10])
    assert other.out() == [(7, False), 3 + 13]  # The one without an id begins anew.


def test_nothing_held_is_nothing_taken_and_nothing_passed_on() -> None:
    bench = Bench(Sum("first"))
    taken = bench.chain.snapshot()
    assert taken == TaskStateSnapshot()
    bench.chain.restore(taken)
    assert bench.out() == []


def test_a_side_that_comes_again_is_not_taken() -> None:
    class Side(Sum):
        first_input: int | None = 1

    chains = [
        Chain(Program(None, [Side("join"), Sum("sum")], []), {}, 0, TaskCounters(), kept)
        for kept in ([], [1])
    ]
    for chain in chains:
        chain.entrance(0)(Batch([3]))
    assert [[*chain.snapshot().parts] for chain in chains] == [["join", "sum"], ["sum"]]


def test_what_all_subtasks_have_alike_is_in_the_snapshot_of_each_and_once_in_that_of_all() -> None:
    class Copied(Sum):
        is_copied = True

    for index, of_all in enumerate([["copied", "sum"], ["sum"]]):
        program = Program(None, [Copied("copied"), Sum("sum")], [])
        chain = Chain(program, {}, index, TaskCounters())
        chain.entrance(0)(Batch([3]))
        assert [*chain.snapshot().parts] == ["copied", "sum"]
        assert [*chain.snapshot(of_all=True).parts] == of_all


class Watching:
    """Notes which operator was called last and has not returned, and leaves out what comes to one of them."""

    def __init__(self, leaves_out: int | None = None) -> None:
        self.place, self._leaves_out = -1, leaves_out

    def take(
        self, place: int, item: Batch | Mark, take: Emit, leave_out: Callable[[str, Batch], None]
    ) -> None:
        if place == self._leaves_out and not isinstance(item, Mark):
            leave_out("took it", item)
            return
        before = self.go_in(place)
        take(item)
        self.go_back(before)

    def go_in(self, place: int) -> tuple[int, int, int]:
        before, self.place = self.place, place
        return before, 0, 0

    def go_back(self, before: tuple[int, int, int]) -> None:
        self.place = before[0]


def test_the_operator_that_is_called_is_noted() -> None:
    watch, seen = Watching(), list[Any]()

    class Looking(Noting):
        def note(self, call: str) -> None:
            self.seen.append((self.name, call, watch.place))

        def open(self, context: TaskContext) -> None:
            self.note("open")

        def process(self, batch: Batch, input: int, emit: Emit) -> None:
            self.note("process")
            emit(batch)
            self.note("went on")

        def on_barrier(self, emit: Emit) -> None:
            self.note("barrier")

        def finish(self, emit: Emit) -> None:
            self.note("finish")
            emit(Batch([1]))

        def close(self) -> None:
            self.note("close")

    program = Program(None, [Looking("a", seen), Looking("b", seen)], [])
    chain = Chain(program, {}, 0, TaskCounters(), watch=watch)
    chain.open(TaskContext("j1", "t", 0, 1, 1) for _ in range(2))
    chain.entrance(0)(Batch([1]))
    chain.on_barrier(lambda: None)
    chain.finish(lambda: None)
    chain.close(None)
    assert [place for name, _, place in seen] == ["ab".index(name) for name, _, _ in seen]
    assert {call for _, call, _ in seen} == {"open", "process", "went on", "barrier", "finish", "close"}
    assert watch.place == -1


@pytest.mark.parametrize(
    ("payload", "shown"), [([3, 4], "34"), (pa.record_batch({"n": [3, 4]}), ["{'n': 3}", "{'n': 4}"])]
)
def test_rows_that_end_their_process_are_dropped_as_their_operator_drops_others(
    payload: Any, shown: Any
) -> None:
    class Forgiving(ForgivingOperator):
        name = "forgiving"

        def process(self, batch: Batch, input: int, emit: Emit) -> None:
            raise AssertionError

    def take(operators: list[Operator], place: int) -> tuple[list[str], TaskCounters]:
        lines, counters = list[str](), TaskCounters()
        chain = Chain(Program(None, operators, []), {}, 0, counters, watch=Watching(place))
        chain.open(TaskContext("j1", "t", 0, 1, 1, counters, log=lines.append) for _ in operators)
        chain.entrance(0)(Batch(payload))
        return lines, counters

    seen: list[Any] = []
    for on_error in ("skip", "dead_letter"):
        lines, counters = take([Noting("a", seen), Forgiving(on_error)], 1)
        assert counters.user_errors == {on_error: 2} and seen.pop() == ("a", 0, payload)
        letters = [f"dead letter: forgiving: FatalRecord: the function took it: record {x}" for x in shown]
        assert lines == (letters if on_error == "dead_letter" else [])
    for place, name in [(0, "a"), (1, "forgiving")]:
        with pytest.raises(FatalRecord, match=rf"the function of '{name}' took it: .*record {shown[0]}"):
            take([Noting("a", seen), Forgiving("fail")], place)
