"""Functions of the user's own with state and timers for each key. (Flink: ``KeyedProcessFunction``.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import repeat
from typing import Any, Final, Generic, Literal, TypeAlias

import numpy as np
from typing_extensions import TypeVar

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.rows import SCALARS
from minishuffle.exchange.sizes import ListedTimes, RowsOut
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Aside,
    Emit,
    TaskContext,
    refuse_as_rows,
)
from minishuffle.operators.batch_times import TIME_MAX, TIME_MIN, datetime_of, microseconds
from minishuffle.operators.chained import OnError, fatal, preview
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import DROPPED, EventTimeOperator, InputProgress
from minishuffle.operators.key_timers import KeyTimers
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.row_copies import copied
from minishuffle.operators.row_store import ABSENT
from minishuffle.operators.state_parts import StatePart

__all__ = ["ProcessContext", "ProcessRows"]

K = TypeVar("K", default=Any, covariant=True)
"""A key."""
Clock: TypeAlias = Literal["event", "wall"]
Function: TypeAlias = "Callable[[Any, ProcessContext], Iterable[Any] | None]"

MICROSECONDS: Final = 1_000_000
SWEEP_KEYS: Final = 1000
"""Keys whose age is looked at in one go, so that a sweep holds nothing up."""
SWEEPS_PER_TTL: Final = 10


class ProcessContext(Generic[K]):
    """What ``on_record`` and ``on_timer`` know, of the record's or timer's key."""

    __slots__ = ("_form", "_is_new", "_key", "_keyed", "_operator", "_state", "time")
    _form: Any
    """The key's canonical form."""
    _key: Any
    """The key as the record brought it."""
    _is_new: bool
    """Whether nothing was kept of the key before the call."""
    _state: dict[Any, Any]

    def __init__(self, operator: ProcessRows, keyed: KeyedState) -> None:
        self._operator = operator
        self._keyed = keyed
        self.time: datetime | None = None
        """The record's event time (None without :meth:`Stream.event_time`), or the timer's."""

    @property
    def key(self) -> K:
        """As the first record of this key brought it, of those since its state was last gone."""
        key: K = self._key if self._is_new else self._keyed.key(self._form)
        return key

    @property
    def state(self) -> dict[Any, Any]:
        """The key's own, to be changed in place; while it is empty nothing is kept."""
        return self._state

    @property
    def watermark(self) -> datetime | None:
        """None before the first, and when time has ended."""
        reached = self._operator.reached
        return datetime_of(reached) if TIME_MIN <= reached <= TIME_MAX else None

    def set_timer(self, at: datetime | int, clock: Clock = "event") -> None:
        """Have ``on_timer`` called when the watermark, or the wall clock, has reached ``at``.

        ``at`` is a datetime (without a time zone: in UTC) or int microseconds since 1970; one that has
        passed already fires at the next watermark or look at the clock. A second timer of the same key,
        time and clock is the first. Once the input has ended no timer is set any more.

        Raises:
            UsageError: there is no ``on_timer``, an argument is wrong, or a timer sets one that is not
                after itself.
        """
        self._operator.set_timer(self._form, _checked_time(at), clock)

    def delete_timer(self, at: datetime | int, clock: Clock = "event") -> None:
        """Forget a timer; nothing happens if there is none."""
        self._operator.delete_timer(self._form, _checked_time(at), clock)


def _checked_time(at: datetime | int) -> int:
    try:
        time = microseconds(at)
    except TypeError as error:
        raise UsageError(
            f"a timer takes a datetime or whole microseconds since 1970, not {at!r:.80}"
        ) from error
    if not TIME_MIN <= time <= TIME_MAX:
        raise UsageError(f"a timer at {at} is outside the years 1 to 9999: give microseconds since 1970")
    return time


class _Given(ProcessContext):
    """The same, as the operator has it: it turns to the key of each record or timer, and keeps its state."""

    __slots__ = ()

    def turn_to(self, form: Any, state: Any, key: Any, time: datetime | None) -> None:
        """What is called next is of this canonical key; ``state`` is ABSENT if nothing is kept of it."""
        self._form, self._key, self.time = form, key, time
        self._is_new = state is ABSENT
        self._state = {} if state is ABSENT else state

    def keep(self, now: float | None) -> None:
        """After a call at ``now`` (None: nobody asks for ages): what is kept of a key without state and timer
        is nothing."""
        if self._state or self._operator.has_timer(self._form):
            if self._is_new:
                self._keyed.begin(self._key, self._form, self._state)
            if now is not None:
                self._keyed.touch(self._form, now)
        elif not self._is_new:
            self._keyed.discard(self._form)


class ProcessRows(EventTimeOperator):
    """Emits the rows that ``on_record`` and ``on_timer`` return.

    Timers of event time fire in order when the watermark has reached them, and before it goes on; all
    of them when time ends. Those of the wall clock that are not due when the input ends are dropped, and
    so are those that a timer sets then.

    A record or timer whose function raises fails the task, or is dropped as ``on_error`` says; what it
    changed in the state before stays.

    Args:
        time: where the records' times stand; what is emitted has them beside it. None: they have none.
        ttl: seconds without a call for a key after which its state is gone. Its timers are not.
        gives_times: something reads the times beside what it emits.
    """

    name = "process"
    keeps_rows = False

    def __init__(
        self,
        on_record: Callable[[Any, ProcessContext], Iterable[Any] | None],
        on_timer: Callable[[datetime, ProcessContext], Iterable[Any] | None] | None = None,
        time: EventTime | None = None,
        ttl: float | None = None,
        on_error: OnError = "fail",
        *,
        gives_times: bool = True,
    ) -> None:
        super().__init__((EventTime() if time is None else time,), (DROPPED,), on_record, on_error)
        self.by_channel = False  # No record is late.
        self.on_timer = on_timer
        self.ttl = math.inf if ttl is None else ttl
        self._ages = ttl is not None
        self._firing: tuple[Clock, int, int] | None = None
        """The timer that is being fired, and when it was due."""
        self._stamp: int | None = None
        """The event time of what is made now."""
        self._gives_times = gives_times and time is not None
        self._swept_at = 0.0

    @property
    def reached(self) -> int:
        """The watermark."""
        return self.progress.inputs[0].watermark

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._timers: dict[str, KeyTimers] = {"event": KeyTimers(), "wall": KeyTimers(self._due_by_lead)}
        self._state = KeyedState(timers=self._timers, ages=self._ages, packs=False)
        self._given = _Given(self, self._state)
        self._swept_at = self._running()

    def _running(self) -> float:
        """The wall clock without the time for which the task has stood in a pause: ``ttl`` goes by it, and so
        does ``touched``, but in a state that was written."""
        return self.context.wall() - self.context.paused_seconds()

    def state_rows(self) -> int:
        return len(self._state)

    def write_keyed(self, *, frozen: bool = False) -> Iterator[StatePart]:
        return self._state.write(self.context.paused_seconds(), frozen=frozen)

    def read_keyed(self, parts: Sequence[StatePart]) -> None:
        self._state.read(parts, self.context.paused_seconds(), self._running())

    # --- records and timers ---------------------------------------------------------------------------

    def late(self, batch: Batch, progress: InputProgress) -> None:
        """None is: functions see ``context.time`` and ``context.watermark``."""

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        times = [None] * len(rows)
        if batch.times is not None and not self.times[0].is_none:
            times = batch.times.tolist()
        now, ages = self._running(), self._ages
        out, stamps = self._gathered(emit)
        held, forms = self._state.held(batch.keys)
        turn_to = self._given.turn_to
        for key, form, row, time in zip(batch.keys, forms, rows, times, strict=True):
            if ages and self._state.is_older(form, now - self.ttl):
                self._state.discard(form)
            self._stamp = time
            turn_to(form, held[form], key, None if time is None else datetime_of(time))
            self._call(self.fn, row, now, out.rows)
            if stamps is not None:
                stamps.times += repeat(time, len(out.rows) - len(stamps.times))  # type: ignore[arg-type]
            if len(out.rows) >= out.room:
                out.look()
        out.flush()
        self._sweep(now)

    def _gathered(self, emit: Emit) -> tuple[RowsOut, ListedTimes | None]:
        """Where the rows go that functions give, and their times, if something reads these."""
        stamps = ListedTimes() if self._gives_times else None
        return RowsOut(self.parted(emit), stamps), stamps

    def _call(self, fn: Function, what: Any, now: float, out: list[Any]) -> None:
        """Call a function for a record, or for the time of a timer, of the key that was turned to."""
        given = self._given
        try:
            if self._firing is not None and self.context.alone is not None:
                self._look_at_timer(self.context.alone, self._firing)
            rows = fn(what, given)
            if isinstance(rows, dict | str | bytes | Aside):
                refuse_as_rows(rows)
            if rows is not None:
                # Copies: of the state, say, which goes on from here.
                out.extend([row if type(row) in SCALARS else copied(row) for row in rows])
        except Exception as error:
            if self.on_error == "fail" or isinstance(error, UsageError):
                self.note_failure(error, what)
                raise
            self.drop(error, what, None if self._stamp is None else np.array([self._stamp], np.int64))
        finally:
            given.keep(now if self._ages else None)

    def _look_at_timer(self, alone: Callable[[Any], str | None], timer: tuple[Clock, int, int]) -> None:
        """Raises FatalRecord if the timer that is fired has ended the process of earlier attempts."""
        clock, time, _ = timer
        key = self._given.key
        if (why := alone(["timer", clock, key, time])) is not None:
            what = f", for a timer of the {clock} clock of key {preview(key)},"
            raise fatal(self, why, datetime_of(time), what)

    def has_timer(self, form: Any) -> bool:
        """Whether a canonical key has any timer."""
        return self._timers["event"].has_key(form) or self._timers["wall"].has_key(form)

    def set_timer(self, form: Any, time: int, clock: Clock) -> None:
        """See :meth:`ProcessContext.set_timer`."""
        if self.on_timer is None:
            raise UsageError("set_timer needs a function for timers: process(on_record, on_timer)")
        if self._firing is not None and self._firing[0] == clock and time <= self._firing[1]:
            raise UsageError("on_timer sets a timer that is not after its own: it would fire for ever")
        timers = self._timers_of(clock)
        if self.reached != END_OF_TIME:
            timers.set(form, time, self._due_by_firing(time) if clock == "wall" else time)

    def _due_by_lead(self, time: int) -> int:
        """When a time of the system clock as it is now has come by the clock of the operator."""
        return time - round(self.context.lead() * MICROSECONDS)

    def _due_by_firing(self, time: int) -> int:
        """The same of a timer that is set. Its time may also go by that of the timer that is being fired. If
        the system clock was set these differ: it is the one that is nearer to now."""
        due = self._due_by_lead(time)
        if self._firing is not None and self._firing[0] == "wall":
            _, its, was_due = self._firing
            now = self.context.wall() * MICROSECONDS
            due = min(due, time - its + was_due, key=lambda each: abs(each - now))
        return due

    def delete_timer(self, form: Any, time: int, clock: Clock) -> None:
        """See :meth:`ProcessContext.delete_timer`."""
        self._timers_of(clock).delete(form, time)

    def _timers_of(self, clock: Clock) -> KeyTimers:
        if clock not in self._timers:
            raise UsageError(f"clock is {clock!r}: write 'event' or 'wall'")
        return self._timers[clock]

    def _fire(self, clock: Clock, until: int, emit: Emit) -> None:
        now = self._running()
        out, stamps = self._gathered(emit)
        for form, time, due in self._timers[clock].take_until(until):
            if self._ages and self._state.is_older(form, now - self.ttl):
                self._forget(form)
            held, _ = self._state.held([form])
            at = datetime_of(time)
            self._given.turn_to(form, held[form], None, at)
            self._stamp = self._stamp_of(clock, time)
            self._firing = (clock, time, due)
            assert self.on_timer is not None
            self._call(self.on_timer, at, now, out.rows)
            if stamps is not None:
                stamps.times += repeat(self._stamp, len(out.rows) - len(stamps.times))  # type: ignore[arg-type]
            self._firing = None
            if len(out.rows) >= out.room:
                out.look()
        out.flush()

    def _stamp_of(self, clock: Clock, time: int) -> int | None:
        """The event time of what a timer's function gives: the timer's, or the first that is not late."""
        if self.times[0].is_none:
            return None
        return time if clock == "event" or self.reached == BEGINNING_OF_TIME else self.reached + 1

    # --- marks and the clock --------------------------------------------------------------------------

    def on_watermark(self, emit: Emit) -> int:
        self._fire("event", self.reached, emit)
        return self.reached

    def on_end(self, emit: Emit) -> None:
        self._timers["wall"].clear()

    def deadline(self) -> float | None:
        left = []
        due = self._timers["wall"].earliest
        if due is not None:
            left.append(due / MICROSECONDS - self.context.wall())
        if self._ages and len(self._state):
            left.append(self._swept_at + self.ttl / SWEEPS_PER_TTL - self._running())
        if not left:
            return None
        return self.context.now() + min(left) if min(left) > 0.0 else 0.0

    def on_clock(self, now: float, emit: Emit) -> None:
        self._fire("wall", math.ceil(self.context.wall() * MICROSECONDS), emit)
        self._sweep(self._running())

    def _sweep(self, now: float) -> None:
        """Free the state of keys that were not touched for ``ttl``, the oldest first, some at a time."""
        if now < self._swept_at + self.ttl / SWEEPS_PER_TTL:
            return
        for form, touched in self._state.oldest(SWEEP_KEYS):
            if now - touched < self.ttl:
                break
            if self.has_timer(form):
                self._forget(form)
                self._state.touch(form, now)
            else:
                self._state.discard(form)
        else:
            if len(self._state):
                return  # There may be more: go on at the next look at the clock.
        self._swept_at = now

    def _forget(self, form: Any) -> None:
        """A key with timers has no state any more."""
        self._state.begin(self._state.key(form), form, {})
