"""The chain of a task: operators that hand batches and marks to each other, and the partitions behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from types import FrameType
from typing import Any, Final, Protocol

from minishuffle.counters import OperatorCounters, TaskCounters
from minishuffle.errors import UnserializableRecord, described
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import Part
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.partitioner import Partitioner
from minishuffle.exchange.rowtaps import RowTap
from minishuffle.exchange.sizes import Drop, encode_all
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Emit,
    Idle,
    Mark,
    Operator,
    Output,
    Program,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.operators.chained import ChainedOperator, ForgivingOperator, dropper_of, fatal
from minishuffle.operators.row_copies import own_rows
from minishuffle.operators.state_parts import StatePart
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.packed import SplitPosition

__all__ = ["Chain", "WrittenPartition", "called_by"]

OUTPUTS: Final = "outputs"
"""What stands in a profile for the partitions behind the chain."""


class WrittenPartition(Protocol):
    """What a chain writes to: the side of a :class:`~minishuffle.exchange.partition.ResultPartition` that a
    task thread has to do with."""

    hot_keys: HotKeys

    @property
    def taps(self) -> Sequence[RowTap]:
        """Who looks at the rows that are written."""
        ...

    @property
    def subpartitions(self) -> Sequence[Any]:
        """One for each consumer."""
        ...

    def skips(self, position: int, rows: int) -> bool:
        """Whether what is written for that consumer is dropped."""
        ...

    def hand_over(self, position: int, batch: Batch) -> bool:
        """Give the consumer the batch as it is; False: it is to be written."""
        ...

    def write(self, position: int, rows: int, parts: list[Part]) -> None: ...

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None: ...

    def broadcast_watermark(self, time: int, idle: bool) -> None: ...

    def finish(self) -> None: ...


class _Outlet:
    """The end of a chain: batches go to the partitions, marks to all of their consumers.

    Args:
        partitions: by edge.
        index: of the subtask; the first consumer that it deals to.
        last: of the operator in front.
        drop: what drops rows that cannot be sent; None: they raise.
    """

    def __init__(
        self,
        outputs: list[Output],
        partitions: Mapping[int, WrittenPartition],
        index: int,
        totals: TaskCounters,
        last: OperatorCounters,
        *,
        drop: Drop | None,
    ) -> None:
        self._partitions = partitions
        self._totals = totals
        self._last = last
        self.partitioners = {
            output.edge: _partitioner(output, partitions[output.edge], index) for output in outputs
        }
        """By edge."""
        self._writers = [
            (output.side, _edge_writer(output, partitions[output.edge], self.partitioners[output.edge], drop))
            for output in outputs
        ]
        self._plain = [write for side, write in self._writers if side is None]
        self.watermark = BEGINNING_OF_TIME
        """The last one that was passed on."""

    def take(self, item: Batch | Mark) -> None:
        """What the last operator emits."""
        if not isinstance(item, Mark):
            self._last.records_out += len(item.payload)
            for write in self._plain:
                write(item)
        elif isinstance(item, Side):
            self._last.records_out += len(item.batch)
            self.put_aside(item)
        else:
            self._pass_on(item)

    def put_aside(self, side: Side) -> None:
        """What any operator emits to a side output."""
        for tag, write in self._writers:
            if tag == side.tag:
                write(side.batch)

    def _pass_on(self, mark: Mark) -> None:
        """The end of time is not passed on: consumers receive the end of data instead."""
        match mark:
            case Watermark(time):
                if self.watermark < time < END_OF_TIME:
                    self.watermark = self._totals.watermark = time
                    self._broadcast(idle=False)
            case Idle():
                self._broadcast(idle=True)
            case Active():
                self._broadcast(idle=False)

    def _broadcast(self, *, idle: bool) -> None:
        for partition in self._partitions.values():
            partition.broadcast_watermark(self.watermark, idle)


class Watch(Protocol):
    """Looks for a row that ends the process: see :mod:`minishuffle.worker.tasks.poisonrows`."""

    def take(
        self, place: int, item: Batch | Mark, take: Emit, leave_out: Callable[[str, Batch], None]
    ) -> None:
        """Have the operator at that place take an item, or ``leave_out`` rows of it and say why."""

    def go_in(self, place: int) -> tuple[int, int, int]:
        """The operator at that place is called for no row; gives what :meth:`go_back` takes."""
        ...

    def go_back(self, before: tuple[int, int, int]) -> None:
        """That call has returned."""


class Chain:
    """The operators of one attempt, wired up. They refer to what is behind them and never back, so
    that they and their state go with the last reference to the chain: a worker's garbage collector hardly
    ever runs.

    Args:
        partitions: by edge.
        index: of the subtask.
        kept: numbers of the inputs that the next attempt gets all of again.
        watch: looks for a row that ends the process; None: nothing does.
    """

    def __init__(
        self,
        program: Program,
        partitions: Mapping[int, WrittenPartition],
        index: int,
        totals: TaskCounters,
        kept: Collection[int] = (),
        *,
        watch: Watch | None = None,
    ) -> None:
        self.operators, self._watch = program.operators, watch
        self._index = index
        self._source_shares = program.source is not None and getattr(program.source, "shares", True)
        side = program.operators[0].first_input if program.operators else None
        self._holding = program.operators[side in kept :]
        """Those whose state is lost with the task; the first holds nothing but a side that is kept."""
        self._losing = _overriding("state_rows", self._holding)
        self._timed = _overriding("deadline", program.operators)
        """Those that may wait for the clock."""
        self.counters = [OperatorCounters(operator.name) for operator in program.operators]
        self._keeping = _overriding("state_rows", filter(attrgetter("keeps_rows"), program.operators))
        self.drop = dropper_of(program.operators)
        last = self._before(len(program.operators))
        self._outlet = _Outlet(program.outputs, partitions, index, totals, last, drop=self.drop)
        self.put_aside = self._outlet.put_aside
        self._stages: list[Emit] = [self._outlet.take]
        for number in reversed(range(len(program.operators))):
            self._stages.insert(0, self._stage(number, 0, self._stages[0]))
        self._opened: list[Operator] = []

    # --- open and close --------------------------------------------------------------------------

    def open(self, contexts: Iterable[TaskContext]) -> None:
        """Open the operators, in order, each with a context of its own."""
        for place, (operator, context) in enumerate(zip(self.operators, contexts, strict=True)):
            with self._called(place):
                operator.open(context)
            self._opened.append(operator)

    def close(self, error: BaseException | None) -> list[Any]:
        """Close those that are open; what each gave. If there is an ``error`` already, whatever they raise is
        added to its notes.

        Raises: what was raised first, if there is no ``error``.
        """
        results = []
        first: Exception | None = None
        opened, self._opened = self._opened, []
        for place, operator in enumerate(opened):
            try:
                with self._called(place):
                    results.append(operator.close())
            except Exception as broken:
                first = first or broken
                if error is not None:
                    error.add_note(f"and close() of {operator.name!r} raised {described(broken)}")
        if first is not None and error is None:
            raise first
        return results

    # --- rows and marks --------------------------------------------------------------------------

    def entrance(self, input: int) -> Emit:
        """Where the items of input number ``input`` go in."""
        if input == 0:
            return self._stages[0]
        return self._stage(0, input, self._stages[1])

    def behind(self, number: int) -> Emit:
        """Where the items go that operator number ``number`` emits."""
        return self._stages[number + 1]

    def _stage(self, number: int, input: int, following: Emit) -> Emit:
        operator, counters, before = self.operators[number], self.counters[number], self._before(number)
        shares = self.operators[number - 1].shares if number else self._source_shares
        copies = shares and not operator.only_reads
        put_aside = self._outlet.put_aside

        def take(item: Batch | Mark) -> None:
            if not isinstance(item, Mark):
                rows = len(item.payload)
                before.records_out += rows
                counters.records_in += rows
                operator.process(own_rows(item) if copies else item, input, following)
            elif isinstance(item, Side):
                before.records_out += len(item.batch)
                put_aside(item)
            else:
                operator.on_mark(item, input, following)

        watch = self._watch
        if watch is None:
            return take
        leave_out = partial(_leave_out, operator)
        return lambda item: watch.take(number, item, take, leave_out)

    def _before(self, number: int) -> OperatorCounters:
        """The counters of the operator in front of that one."""
        return self.counters[number - 1] if number else OperatorCounters("")

    def state_rows(self) -> int:
        """Rows of state that would be lost with the task: see :meth:`Operator.state_rows`."""
        return sum([operator.state_rows() for operator in self._losing]) if self._losing else 0

    def rows_kept(self) -> int:
        """Rows of state that stand for rows of which nothing was emitted yet."""
        return sum([operator.state_rows() for operator in self._keeping]) if self._keeping else 0

    # --- state -----------------------------------------------------------------------------------

    def snapshot(
        self, positions: Sequence[SplitPosition] = (), *, of_all: bool = False, frozen: bool = False
    ) -> TaskStateSnapshot:
        """All state between two elements, with the positions of the source. A side that the next attempt gets
        all of again is not in it.

        Args:
            of_all: it is put together with those of the other subtasks: what all of them have alike is in
                that of the first, and what they have on disk is in it too.
            frozen: its parts may be asked for later, between two elements each.

        Raises:
            UnserializableRecord: (with each part) an exchange would not take what an operator holds.
        """
        parts: dict[str, Iterable[StatePart]] = {}
        stored: dict[str, Iterable[StatePart]] = {}
        for operator in filter(attrgetter("id"), self._holding):
            if of_all and (on_disk := operator.stored_state()) is not None:
                stored[operator.id] = on_disk
            if of_all and self._index > 0 and operator.is_copied:
                continue
            held = _parts_of(operator, frozen=frozen)
            if (first := next(held, None)) is not None:
                parts[operator.id] = chain([first], held) if frozen else [first, *held]
        return TaskStateSnapshot(parts, positions, self._outlet.watermark, stored=stored)

    def dealt(self) -> dict[int, int]:
        """Rows that were dealt out in turn, by edge: for a snapshot of a task whose next attempt is to deal
        on where it was."""
        return {edge: each.dealt for edge, each in self._outlet.partitioners.items() if each.dealt}

    def left_out(self, snapshot: TaskStateSnapshot) -> list[str]:
        """The names of operators that hold something of which there is nothing in their snapshot."""
        return [
            operator.name
            for operator in self._losing
            if operator.id not in snapshot.parts and operator.state_rows()
        ]

    def restore(self, snapshot: TaskStateSnapshot) -> None:
        """(After open, before the first element.) Go on with that state, and have consumers go on with its
        event time.

        Raises:
            UsageError: the state is of another format.
        """
        for operator in self._holding:
            if held := snapshot.parts.get(operator.id):
                operator.read_state(held)
        for edge, rows in snapshot.dealt.items():
            self._outlet.partitioners[edge].dealt = rows
        self._outlet.take(Watermark(snapshot.watermark))

    def before_snapshot(self, check: Callable[[], None], *, urgent: bool) -> bool:
        """Have all operators ready for a snapshot, which is taken behind what they emit now. False: one of
        them has to write on first, and nothing was changed. ``urgent``: it closes what it writes, if that
        helps. ``check`` raises if the task was cancelled meanwhile."""
        if any(operator.defers_snapshot(urgent=urgent) for operator in self.operators):
            return False
        for operator, following in self._each():
            check()
            operator.before_snapshot(following)
        return True

    def _each(self) -> Iterator[tuple[Operator, Emit]]:
        """The operators in order, each with what is behind it, to be called before the next is asked for."""
        pairs = zip(self.operators, self._stages[1:], strict=True)
        if self._watch is None:  # with calls that end one by one, on_clock runs for each
            yield from pairs
            return
        for place, pair in enumerate(pairs):
            with self._called(place):
                yield pair

    @contextmanager
    def _called(self, place: int) -> Iterator[None]:
        """The operator at that place is called for no row."""
        before = None if self._watch is None else self._watch.go_in(place)
        yield
        if self._watch is not None and before is not None:
            self._watch.go_back(before)

    # --- clocks and end --------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When :meth:`on_clock` is due; None if no operator waits for the clock."""
        if not self._timed:
            return None
        times = [time for operator in self._timed if (time := operator.deadline()) is not None]
        return min(times, default=None)

    def on_clock(self, now: float) -> None:
        for operator, following in self._each():
            due = operator.deadline()
            if due is not None and due <= now:
                operator.on_clock(now, following)

    def on_barrier(self, check: Callable[[], None]) -> None:
        """A barrier is about to be passed on; ``check`` raises if the task was cancelled meanwhile."""
        for operator, following in self._each():
            check()
            operator.on_barrier(following)

    def finish(self, check: Callable[[], None]) -> None:
        """Every input has ended; ``check`` raises if the task was cancelled meanwhile."""
        for operator, following in self._each():
            check()
            operator.finish(following)


def _leave_out(operator: Operator, why: str, batch: Batch) -> None:
    """Deal with rows that end their process as the operator deals with records for which its function raises.

    Raises:
        FatalRecord: it has no ``on_error``, or that says that the task fails.
    """
    records = batch.payload if isinstance(batch.payload, list) else batch.payload.to_pylist()
    for number, record in enumerate(records):
        error = fatal(operator, why, record)
        if not isinstance(operator, ForgivingOperator) or operator.on_error == "fail":
            raise error
        operator.drop(error, record, None if batch.times is None else batch.times[number : number + 1])


def _parts_of(operator: Operator, *, frozen: bool) -> Iterator[StatePart]:
    try:
        yield from operator.freeze_state() if frozen else operator.write_state()
    except UnserializableRecord as error:
        raise UnserializableRecord(f"what {operator.name!r} holds: {error}") from error


def _overriding(method: str, operators: Iterable[Operator]) -> list[Operator]:
    """The operators that have that method of their own: it is called for each batch, however small."""
    default = getattr(ChainedOperator, method)
    return [each for each in operators if getattr(type(each), method, None) is not default]


def _partitioner(output: Output, partition: WrittenPartition, start: int) -> Partitioner:
    return Partitioner(
        output.partitioner,
        len(partition.subpartitions),
        output.keys,
        output.choose,
        start,
        hot_keys=partition.hot_keys,
        columns=output.columns,
    )


def _edge_writer(
    output: Output,
    partition: WrittenPartition,
    partitioner: Partitioner,
    drop: Drop | None,
) -> Callable[[Batch], None]:
    consumers = len(partition.subpartitions)
    broadcast, has_times = output.partitioner == "broadcast", output.times

    def write(batch: Batch) -> None:
        count = len(batch.payload)
        if not count:
            return
        if batch.times is not None and not has_times:
            batch = Batch(batch.payload, batch.keys)
        taps = partition.taps
        if broadcast:
            to = [position for position in range(consumers) if not partition.skips(position, count)]
            if to:
                for tap in taps:
                    tap.put(batch, None)
                for rows, parts in encode_all(batch, drop):
                    partition.broadcast(to, rows, parts)
            return
        for position, piece in partitioner.split(batch):
            if partition.skips(position, len(piece.payload)):
                continue
            for tap in taps:
                tap.put(piece, partition.subpartitions[position].consumer)
            if not partition.hand_over(position, piece):
                for rows, parts in encode_all(piece, drop):
                    partition.write(position, rows, parts)

    return write


_OUTLETS: Final = frozenset({_Outlet.take.__code__, _Outlet.put_aside.__code__})


def called_by(frame: FrameType) -> str | None:
    """The name of the operator that this frame of a task's stack calls, or OUTPUTS; None: it is no frame of a
    chain, or calls none."""
    if frame.f_code.co_filename != _FILE:
        return None
    if frame.f_code in _OUTLETS:
        return OUTPUTS
    operator: Operator | None = frame.f_locals.get("operator")
    return None if operator is None else operator.name


_FILE: Final = called_by.__code__.co_filename
