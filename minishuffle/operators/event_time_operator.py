"""The run loop of operators that go by event time: their inputs' watermarks, and records that come late.

An operator says which records are late, by its own rule; here they are counted, and dropped or sent aside, or
they fail the task:

=====================  ===================================================================================
operator               a record is late if
=====================  ===================================================================================
window                 the last microsecond of the latest window that it is in, and the allowed lateness
                       after that, are at or before the watermark
session, count_window  its time is at or before the watermark
interval, as-of join   its time is at or before the watermark of its own input
process                never: its functions see ``context.time`` and ``context.watermark``
=====================  ===================================================================================

With ``watermarks="each"`` the watermark of the record's producer counts where it is ahead.

Of two inputs the lesser watermark counts. While one input is idle and the other is not, it counts as far as
the other; what it still sends of that time is late. (Flink: ``WindowOperator.isElementLate``, ``sideOutput``;
``IntervalJoinOperator``, where a record is late by the lesser watermark of both.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from minishuffle.errors import LateRecord
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Emit,
    Idle,
    Mark,
    Reached,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.operators.batch_times import Vector, datetime_of, event_times
from minishuffle.operators.chained import OnError, RecordOperator, preview
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.row_conversion import rows_of
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records, TaskState

__all__ = [
    "DROPPED",
    "EventTimeOperator",
    "EventTimeProgress",
    "InputProgress",
    "Late",
    "LatePolicy",
]

LatePolicy: TypeAlias = Literal["drop", "side", "fail"]
"""Late records are dropped, go to a side output, or end the job with an error."""


@dataclass(frozen=True, slots=True)
class Late:
    """What becomes of late records; they are counted in any case. ``tag`` is that of the side output."""

    policy: LatePolicy = "drop"
    tag: str = ""

    def take(self, batch: Batch, context: TaskContext, emit: Emit) -> None:
        """Some records (at least one) are late."""
        context.counters.note_late(len(batch), dropped=self.policy == "drop")
        if self.policy == "side":
            emit(Side(self.tag, Batch(batch.payload, None, batch.times)))


def _late_record(batch: Batch, time: int, reached: int) -> LateRecord:
    """What the first record of a batch, of that time, is where the watermark is at ``reached``."""
    (first,) = rows_of(batch.slice(0, 1))
    at, until = (datetime_of(each).replace(tzinfo=None) for each in (time, reached + 1))
    return LateRecord(
        f"a record came too late: {preview(first)} is of {at} (UTC), and the watermark says that all before "
        f"{until} have come, {until - at} later: raise out_of_order= of event_time() by that much, give a "
        "window allowed_lateness=, or write late='drop', which counts such records, or late='side', which "
        "has them in .late"
    )


DROPPED: Final = Late()


@dataclass(slots=True)
class InputProgress:
    """How far event time is at one input; microseconds."""

    watermark: int = BEGINNING_OF_TIME
    """Never goes back."""
    own: int = BEGINNING_OF_TIME
    """The watermark of the producer that the records at hand come from, where that decides."""
    last: int = BEGINNING_OF_TIME
    """What the input had reached before its end."""
    is_idle: bool = False

    @property
    def reached(self) -> int:
        """What decides whether a record is late."""
        return max(self.watermark, self.own)

    def take(self, mark: Watermark | Idle | Active) -> None:
        """A watermark has come, or the end, or whether the input is idle."""
        self.is_idle = isinstance(mark, Idle)
        if isinstance(mark, Watermark):
            self.advance(mark.time)
            if mark.time != END_OF_TIME:
                self.last = self.watermark

    def advance(self, time: int) -> None:
        """Be so far at least."""
        self.watermark = max(time, self.watermark)

    def set_producer_watermark(self, time: int) -> None:
        """The records that follow come from a producer that is so far."""
        self.own = time

    def restore(self, reached: int, last: int) -> None:
        """Be at least as far as an input was."""
        self.advance(reached)
        self.last = max(last, self.last)


class EventTimeProgress:
    """How far event time is at all inputs of an operator."""

    def __init__(self, inputs: int) -> None:
        self.inputs = tuple(InputProgress() for _ in range(inputs))

    @property
    def watermarks(self) -> tuple[int, ...]:
        """By input."""
        return tuple([input.watermark for input in self.inputs])

    @property
    def ended(self) -> bool:
        """Whether all inputs have ended."""
        return min(self.watermarks) == END_OF_TIME

    @property
    def idle(self) -> bool:
        """Whether there is nothing but idle and ended inputs."""
        return not self.ended and all(
            input.is_idle or input.watermark == END_OF_TIME for input in self.inputs
        )

    @property
    def last(self) -> int:
        """What the inputs had reached before they ended."""
        return max(input.last for input in self.inputs)

    def take(self, mark: Watermark | Idle | Active, input: int) -> bool:
        """A watermark of an input, its end, or its idleness has come. Whether event time may have gone on."""
        before = self.watermarks
        self.inputs[input].take(mark)
        active = [
            other.watermark for other in self.inputs if not other.is_idle and other.watermark != END_OF_TIME
        ]
        for other in self.inputs if active else ():
            if other.is_idle:
                other.advance(min(active))
        return isinstance(mark, Watermark) or self.watermarks != before

    def write(self) -> Iterator[Records]:
        """How far all inputs are."""
        last = [input.last for input in self.inputs]
        columns = {"reached": pa.array(self.watermarks), "last": pa.array(last)}
        yield Records(pa.RecordBatch.from_pydict(columns))

    def read(self, records: Records) -> None:
        """Be at least as far as a subtask that has written this."""
        reached, last = (column.to_pylist() for column in records.payload)
        for input, own in enumerate(self.inputs):
            own.restore(reached[input], last[input])


class EventTimeOperator(RecordOperator):
    """Takes the records that are not late, and moves with the watermarks. A subclass says what it does then.

    Args:
        times: where the records' times stand, by input; ``is_none``: they have none.
        lateness: what becomes of late records, by input.
        fn: the function of the user that is called for each record; None: there is none.
    """

    keeps_rows = True

    def __init__(
        self,
        times: Sequence[EventTime],
        lateness: Sequence[Late],
        fn: Any = None,
        on_error: OnError = "fail",
    ) -> None:
        super().__init__(fn, on_error)
        self.times = tuple(times)
        self.progress = EventTimeProgress(len(times))
        self.by_channel = any(time.each for time in times)
        self.lateness = tuple(lateness)
        self._emitted = BEGINNING_OF_TIME
        """The last watermark that was passed on, and whether idleness was after it."""
        self._emitted_idle = False

    # --- what a subclass does -----------------------------------------------------------------------

    def late(self, batch: Batch, progress: InputProgress) -> Mask | None:
        """Which records of an input are late; None: none of them. The batch has the records' times.

        By default those whose time is at or before what the input has reached.
        """
        assert batch.times is not None
        late: Mask = batch.times <= progress.reached
        return late

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        """Take records of an input, at least one, with their times; none of them is late."""
        raise NotImplementedError

    def on_watermark(self, emit: Emit) -> int:
        """Event time may have gone on, see ``progress``. The watermark to pass on behind what is emitted now:
        nothing that is emitted later has a time up to it."""
        raise NotImplementedError

    def on_end(self, emit: Emit) -> None:
        """All inputs have ended, and :meth:`on_watermark` was called."""

    # --- records and marks --------------------------------------------------------------------------

    def timed(self, batch: Batch, input: int) -> Batch:
        """Records of an input with their times; as they are if they have none."""
        time = self.times[input]
        if time.is_none:
            return batch
        times = event_times(time, batch)
        return batch if times is batch.times else Batch(batch.payload, batch.keys, times)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if not len(batch.payload):
            return
        timed = self.timed(batch, input)
        late = self.late(timed, self.progress.inputs[input])
        if late is not None and late.any():
            assert timed.times is not None
            again = self.context.repeats_from()
            late_itself = late if again is None else late & (timed.times < again)
            if late_itself.any():
                self._take_late(batch.mask(late_itself), timed.times[late_itself], input, emit)
            timed = timed.mask(~late)
            if not len(timed):
                return
        self.take(timed, input, emit)

    def _take_late(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        """
        Raises:
            LateRecord: there are to be none.
        """
        lateness = self.lateness[input]
        lateness.take(batch, self.context, emit)
        if lateness.policy == "fail":
            raise _late_record(batch, int(times[0]), self.progress.inputs[input].reached)
        if lateness.policy == "drop" and self.context.left_out is not None:
            self.context.left_out("late_right" if input else "late", batch)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            own = mark.time if self.times[input].each else BEGINNING_OF_TIME
            self.progress.inputs[input].set_producer_watermark(own)
        elif isinstance(mark, Watermark | Idle | Active):
            if self.progress.take(mark, input):
                time = self.on_watermark(emit)
                if self.progress.ended:
                    self.on_end(emit)
                self.pass_on(time, emit)
            if self.progress.idle != self._emitted_idle:
                self._emitted_idle = self.progress.idle
                emit(Idle() if self._emitted_idle else Active())
        else:
            emit(mark)

    def pass_on(self, time: int, emit: Emit) -> None:
        """Pass a watermark on, if it is later than the last one."""
        if time > self._emitted:
            self._emitted, self._emitted_idle = time, False
            emit(Watermark(time))

    # --- state --------------------------------------------------------------------------------------

    def holdings(self) -> dict[str, Holding]:
        """What is no value of a key."""
        return {"progress": Holding("all", self.progress.write, self.progress.read)}

    def write_keyed(self, *, frozen: bool = False) -> Iterator[StatePart]:
        """What is in keyed state; ``frozen`` as in :meth:`freeze_state`."""
        return iter(())

    def read_keyed(self, parts: Sequence[StatePart]) -> None:
        """Go on with such parts, after what is no value of a key."""

    def write_state(self) -> Iterator[StatePart]:
        yield from TaskState(self.holdings()).write(self.context.index)
        yield from self.write_keyed()

    def freeze_state(self) -> Iterator[StatePart]:
        others = TaskState(self.holdings()).freeze(self.context.index)
        return chain(others, self.write_keyed(frozen=True))

    def read_state(self, parts: Iterable[StatePart]) -> None:
        kept = list(parts)
        TaskState(self.holdings()).read(kept)
        self.read_keyed(kept)
