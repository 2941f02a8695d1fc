"""What a task reads from its gates: batches and marks, by input number and in order. Nothing here blocks.

Each batch is work for the task and for its operators, however few rows it has. So small batches that wait in
one gate, with no mark between them, are taken as one. A task that is slow has more of them waiting, and then
less to do for each row (as Apache DataFusion's CoalesceBatchesExec does for whole queries). Nothing is waited
for, and where rows themselves take long, each batch comes alone: see :meth:`Inputs.took`. Latency
markers count as passed once they are read, up to ``limits.TAKEN_SECONDS`` early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.elements import WHOLE, decode
from minishuffle.exchange.gate import Element, SplitChange
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME, END_OF_TIME, WatermarkValve
from minishuffle.limits import TAKEN_BYTES, TAKEN_ROWS, TAKEN_SECONDS
from minishuffle.operators.base import (
    Active,
    Idle,
    Mark,
    Program,
    Reached,
    SplitMark,
    Watermark,
)

__all__ = ["Inputs", "Item", "ReadGate"]


Item: TypeAlias = "Batch | Mark"


class ReadGate(Protocol):
    """The side of an :class:`~minishuffle.exchange.gate.InputGate` that a task thread reads."""

    edge: int
    input: int
    valve: WatermarkValve
    marked: bool

    @property
    def split_changes(self) -> deque[SplitChange] | None: ...

    @property
    def kept(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    def poll(self) -> Element | None: ...

    def late_from(self, channel: InputChannel) -> int | None: ...

    def is_aligned(self, barrier: int) -> bool: ...

    def is_held(self, barrier: int) -> bool: ...


@dataclass(slots=True)
class _Input:
    """All gates of one input number."""

    number: int
    valve: WatermarkValve
    emitted: tuple[int, bool]
    """Watermark and idleness that the operator has received."""
    reached: int = BEGINNING_OF_TIME
    """How far the producer of the last batch was, as the operator has received it."""


@dataclass(slots=True, eq=False)
class _Gate:
    gate: ReadGate
    input: _Input
    position: int
    """The gate's number in its input's valve."""
    split: int = -1
    """The split of the last batch, if the channels of the gate are splits."""
    ended: bool = False


@dataclass(slots=True)
class _Run:
    """Batches, at least one, that are taken as one."""

    batches: list[Batch]
    late_from: int | None
    """See :class:`Inputs`."""
    rows: int
    bytes: int

    def takes(self, batch: Batch, late_from: int | None) -> bool:
        """Whether that batch is alike, and may be the next one."""
        first = self.batches[0]
        if (
            self.late_from != late_from
            or (first.times is None) != (batch.times is None)
            or (first.keys is None) != (batch.keys is None)
        ):
            return False
        if isinstance(first.payload, list):
            return isinstance(batch.payload, list)
        return not isinstance(batch.payload, list) and bool(first.payload.schema == batch.payload.schema)

    def concat(self) -> list[Batch]:
        """One batch, or all of them where pyarrow does not put their columns together."""
        try:
            return [Batch.concat(self.batches)]
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            # Views, in versions before 20; dictionaries with more values together than indices.
            return self.batches


def _small_bytes(element: Element, batch: Batch) -> int | None:
    """The size of a small batch; None: it is none."""
    if len(batch.payload) >= TAKEN_ROWS // 4:
        return None
    size: int = batch.payload.nbytes if element.format == WHOLE else len(element.payload)
    return size if size <= TAKEN_BYTES // 32 else None


class Inputs:
    """Takes turns between gates: an element each, or small batches together.

    Args:
        gates: all of a task.
        first_input: while gates of that input have not ended no other is read; None: all in turn.
        by_channel: say of each batch how far its producer is (:class:`Reached`).
    """

    def __init__(self, gates: Sequence[ReadGate], first_input: int | None, by_channel: bool = False) -> None:
        inputs: dict[int, _Input] = {}
        self._gates: list[_Gate] = []
        for gate in gates:
            valve = WatermarkValve()
            each = inputs.setdefault(gate.input, _Input(gate.input, valve, (valve.watermark, valve.idle)))
            self._gates.append(_Gate(gate, each, each.valve.add()))
        self._turns = [each for each in self._gates if each.input.number == first_input] or [*self._gates]
        """Gates that are read now, and have not ended; the next one is first."""
        self._by_channel = by_channel
        self.repeated = {gate.input for gate in gates if gate.kept}
        """Numbers of inputs that the next attempt gets all of again."""
        self.late_from: int | None = None
        """Records of the last batch that are late, and not before that time, are so since their producer has
        restarted; None: none are."""
        self.drained = False
        """The last :meth:`poll` has looked into the one gate that is read, and left nothing there."""
        self._ready: deque[tuple[int, Mark | _Run]] = deque()
        self._rows_together = 0
        """So many rows are taken together at most."""

    @classmethod
    def of(cls, program: Program, gates: Sequence[ReadGate]) -> Inputs:
        """As the first operator wants them."""
        if not program.operators:
            return cls(gates, None)
        first = program.operators[0]
        return cls(gates, first.first_input, first.by_channel)

    @property
    def finished(self) -> bool:
        """Every gate has ended, and everything was taken."""
        return self.is_between and not self._turns

    @property
    def is_between(self) -> bool:
        """Whatever was read from gates was taken: the task stands between two elements of these."""
        return not self._ready

    def poll(self) -> tuple[int, Item] | None:
        """The next batch or mark and the number of its input; None if there is nothing now.

        Raises:
            ShuffleError: a channel failed.
        """
        ready = self._ready
        if ready:
            self.drained = False
        else:
            self._read()
            if not ready:
                return None
        number, item = ready.popleft()
        if isinstance(item, Mark):
            return number, item
        self.late_from = item.late_from
        if len(item.batches) == 1:
            return number, item.batches[0]
        first, *others = item.concat()
        ready.extendleft((number, _Run([each], item.late_from, len(each), 0)) for each in reversed(others))
        return number, first

    def took(self, seconds: float, rows: int) -> None:
        """The task has taken so long for the last batch, of so many rows: as many as it takes within
        ``limits.TAKEN_SECONDS`` may come together from now on."""
        self._rows_together = min(TAKEN_ROWS, int(TAKEN_SECONDS * rows / max(seconds, 1e-6)))

    def is_aligned(self, barrier: int) -> bool:
        """Whether all that was written before that barrier, for the inputs that are read now, was taken."""
        return self.is_between and all(each.gate.is_aligned(barrier) for each in self._turns)

    def is_held(self, barrier: int) -> bool:
        """Whether a channel of those that are read now is held back behind that barrier."""
        return any(each.gate.is_held(barrier) for each in self._turns)

    def unread(self) -> list[int]:
        """Edges of inputs that are read later, once others have ended."""
        return [each.gate.edge for each in self._gates if not (each.ended or each in self._turns)]

    def rows_left(self) -> int:
        """Rows of batches that were read from a gate and not taken from here, and nobody gets again."""
        return sum(
            item.rows
            for number, item in self._ready
            if isinstance(item, _Run) and number not in self.repeated
        )

    def _read(self) -> None:
        """Give each gate its turn until one has something: that one is last from now on."""
        for each in [*self._turns]:
            self._read_gate(each)
            if self._ready:
                if len(self._turns) > 1 and not each.ended:
                    self._turns.remove(each)
                    self._turns.append(each)
                break

    def _read_gate(self, each: _Gate) -> None:
        """An element of a gate, or small ones together up to the next mark, with their marks."""
        run: _Run | None = None
        while True:
            found = self._read_element(each)
            if found is None or (run is not None and found is not run):
                return
            run = found

    def _read_element(self, each: _Gate) -> _Run | None:
        """Read what comes next of a gate. The batches that its element went to, if more may come to them."""
        gate, number, changes = each.gate, each.input.number, each.gate.split_changes
        element = gate.poll()
        self.drained = element is None and len(self._turns) == 1
        if changes is not None:
            while changes:
                split, state = changes.popleft()
                self._ready.append((number, SplitMark(split, state)))
        elif gate.marked:
            gate.marked = False
            if gate.valve.watermark == END_OF_TIME:
                each.input.valve.update(each.position, gate.valve.greatest, False)
            each.input.valve.update(each.position, gate.valve.watermark, gate.valve.idle)
            self._emit_marks(each.input)
        run = None if element is None else self._take_element(each, element)
        if gate.finished:
            each.ended, self.drained = True, False
            self._turns.remove(each)
            if not self._turns:
                self._turns = [other for other in self._gates if not other.ended]
            each.input.valve.end(each.position)
            self._emit_marks(each.input)
            return None
        return run

    def _take_element(self, each: _Gate, element: Element) -> _Run | None:
        gate, number = each.gate, each.input.number
        are_splits = gate.split_changes is not None
        if are_splits and element.channel.producer != each.split:
            each.split = element.channel.producer
            self._ready.append((number, SplitMark(each.split, "current")))
        if (
            self._by_channel
            and not are_splits
            and (time := gate.valve.time_of(element.channel.number)) != each.input.reached
        ):
            each.input.reached = time
            self._ready.append((number, Reached(time)))
        late_from = None if are_splits else gate.late_from(element.channel)
        batch = decode(element.format, element.rows, element.payload)
        if element.skip:
            batch = batch.slice(element.skip, element.rows)
        size = None if are_splits else _small_bytes(element, batch)
        run = self._ready[-1][1] if size is not None and self._ready else None
        if isinstance(run, _Run) and run.takes(batch, late_from):
            run.batches.append(batch)
            run.rows += len(batch)
            run.bytes += size or 0
        else:
            run = _Run([batch], late_from, len(batch), size or 0)
            self._ready.append((number, run))
        more = size is not None and run.rows < self._rows_together and run.bytes < TAKEN_BYTES
        return run if more else None

    def _emit_marks(self, each: _Input) -> None:
        """Have the operator receive what has changed of its input's watermark."""
        time, idle = each.valve.watermark, each.valve.idle
        last_time, was_idle = each.emitted
        if time == END_OF_TIME and last_time < each.valve.greatest:
            # However channels' ends and their last watermarks meet, this comes before the end.
            self._ready.append((each.number, Watermark(each.valve.greatest)))
        if time > last_time:
            self._ready.append((each.number, Watermark(time)))
        elif was_idle and not idle:
            self._ready.append((each.number, Active()))
        if idle and (not was_idle or time > last_time):
            self._ready.append((each.number, Idle()))
        each.emitted = (time, idle)
