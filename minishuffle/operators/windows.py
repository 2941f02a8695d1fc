"""Windows of event time: which are open, when their values go out, and how records bring these forward.

:class:`WindowOperator` is the operator, of rows and of columns. How a batch brings the values of its keys and
windows forward is said by its :class:`WindowValues`: for rows by a loop that calls a function of the user
(:class:`WindowFold`), for columns by compiled loops over the slots of keyed state
(:class:`WindowAggregation`). (Flink: ``WindowOperator``, ``EventTimeTrigger``,
``ContinuousEventTimeTrigger``.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, pairwise, repeat
from operator import length_hint
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch, Mask, Times
from minishuffle.exchange.keys import canonical_rows
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import Aggregate, Outputs, grown, pieces_of
from minishuffle.operators.aggregates import input_of
from minishuffle.operators.base import BEGINNING_OF_TIME, END_OF_TIME, Emit, Side
from minishuffle.operators.batch_times import datetime_of
from minishuffle.operators.chained import Failed, OnError, emit_rows
from minishuffle.operators.column_store import Columns, Vector
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import DROPPED, EventTimeOperator, InputProgress, Late
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.row_copies import set_apart
from minishuffle.operators.row_store import ABSENT
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.time_heap import TimeHeap
from minishuffle.operators.window_assigner import WindowAssigner

__all__ = [
    "MOMENT",
    "Panes",
    "WindowAggregation",
    "WindowFold",
    "WindowOperator",
    "one_more",
    "window_columns",
    "with_panes",
]

Starts: TypeAlias = Times
"""Where each record's window begins, microseconds since 1970."""

MOMENT: Final = pa.timestamp("us", "UTC")
"""The type of the columns window_start and window_end, unless windows are those of a time zone."""
PANE_NAMES: Final = ("pane", "final")

_FEW: Final = 64
"""The least and the greatest of fewer times are found sooner in a list."""
_RUN_ROWS_MIN: Final = 32
"""Rows that follow each other in one window from which on, on average, it pays to look the window up once."""


@dataclass(frozen=True, slots=True)
class Panes:
    """Values of a window before the last ones, for the side output ``tag`` ("": none); microseconds.

    A window takes records until the watermark is ``lateness`` past its end. What has changed in it is shown
    at the first watermark in each ``early`` of it (0: not before its end), at its end, and at each watermark
    after that.
    """

    tag: str = ""
    lateness: int = 0
    early: int = 0


_NO_PANES: Final = Panes()


class OpenWindows:
    """The windows that hold records and have not fired, and those of which a pane is to be shown.

    A window fires when the watermark has reached its last microsecond, or is so much past it as records may
    be late.

    Args:
        progress: how far the watermark is.
    """

    def __init__(self, assigner: WindowAssigner, panes: Panes, progress: InputProgress) -> None:
        self._assigner = assigner
        self._panes = panes
        self._progress = progress
        self._open: TimeHeap[int] = TimeHeap()
        """Starts by last microsecond."""
        self._to_show: TimeHeap[int] = TimeHeap()
        """Starts of windows that have changed, by the watermark at which that is shown."""
        self._changed: set[int] = set()
        """The starts in ``_to_show``, each of which stands there once."""

    def closed(self, watermark: int) -> int:
        """The last microsecond of the latest windows that have fired at a watermark, or would have."""
        return max(watermark - self._panes.lateness, BEGINNING_OF_TIME)

    def opened(self, start: int) -> None:
        """A window has its first record."""
        self._open.push(self._assigner.last(start), start)

    def due(self) -> list[int]:
        """The starts of the windows that fire now, ascending; they are open no more."""
        limit = self._progress.watermark - self._panes.lateness
        return [start for _, start in self._open.take_until(limit)]

    def changed(self, start: int) -> None:
        """A window has a value that was not shown; for windows with panes."""
        if start not in self._changed:
            self._changed.add(start)
            self._to_show.push(self._next_pane(start), start)

    def _next_pane(self, start: int) -> int:
        """The first watermark from now on at which a window is shown."""
        last, early, reached = self._assigner.last(start), self._panes.early, self._progress.watermark
        if reached >= last:
            return reached + 1
        if not early:
            return last
        return min(last, start - 1 + (max(reached - start + 1, 0) // early + 1) * early)

    def to_show(self) -> Iterator[int]:
        """The starts of windows of which a pane is due, by when that is, then ascending; some have fired."""
        for _, start in sorted(self._to_show.take_until(self._progress.watermark)):
            self._changed.discard(start)
            yield start

    def passed_on(self) -> int:
        """The watermark behind the windows: what they emit has the time of their end."""
        watermark = self._progress.watermark
        return watermark if watermark == END_OF_TIME else self.closed(watermark)


class WindowValues:
    """How records bring the values of their keys and windows forward; the values are in ``state``, by the
    start of the window."""

    fn: Any = None
    """The function of the user that is called for each record, if there is one."""
    state: KeyedState

    def __init__(self, assigner: WindowAssigner, panes: Panes) -> None:
        self.assigner = assigner
        self.panes = panes

    def bring(self, batch: Batch, starts: Starts | int, failed: Failed) -> Iterable[int]:
        """Fold each record into the value of its key and window.

        Args:
            starts: the window of each record; or that of all of them.

        Gives the starts of windows with a value that was not shown, if there are panes.
        """
        raise NotImplementedError

    def fire(self, starts: list[int], emit: Emit) -> None:
        """Emit the values of these windows, to the side output of panes too if there are any, and forget
        them."""
        raise NotImplementedError

    def show(self, start: int, emit: Emit) -> None:
        """Emit the values of a window that were not shown, to the side output of panes."""
        raise NotImplementedError

    def write(self, *, frozen: bool = False) -> Iterator[StatePart]:
        """See :meth:`KeyedState.write`. Panes are marked without a batch, so theirs are not made later on."""
        parts = self.state.write(frozen=frozen and not self.panes.tag)
        return iter(list(parts)) if frozen and self.panes.tag else parts

    def read(self, parts: Sequence[StatePart]) -> Iterable[int]:
        """Go on with such parts. Gives what :meth:`bring` does."""
        raise NotImplementedError


class WindowOperator(EventTimeOperator):
    """Emits the values of a window when it fires, windows in order, then passes the watermark on; to the side
    output of panes also the number of the pane and whether it is the last one.

    A record is in all windows that the assigner says and that have not fired. One whose function raises is
    dropped or fails the task, as ``on_error`` says.
    """

    name = "window"

    def __init__(
        self, values: WindowValues, time: EventTime, late: Late = DROPPED, on_error: OnError = "fail"
    ) -> None:
        super().__init__((time,), (late,), values.fn, on_error)
        self._values = values
        self._assigner = values.assigner
        (self._reached,) = self.progress.inputs
        self._windows = OpenWindows(values.assigner, values.panes, self._reached)

    def late(self, batch: Batch, progress: InputProgress) -> Mask | None:
        """Windows fire in order: with its latest one all of a record have."""
        times, assigner, closed = batch.times, self._assigner, self._windows.closed(progress.reached)
        assert times is not None
        least = _least(times)
        if least > closed or assigner.last(assigner.latest(least)) > closed:
            return None
        late: Mask = assigner.ends(_latest(assigner, times)) - 1 <= closed
        return late

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        times, assigner = batch.times, self._assigner
        assert times is not None
        if assigner.per_record > 1:
            step = max(1, BATCH_ROWS_MAX // assigner.per_record)
            for begin in range(0, len(times), step):
                self._bring(*self._placed(batch if len(times) <= step else batch.slice(begin, begin + step)))
            return
        start = assigner.latest(_least(times))
        if assigner.last(start) >= _greatest(times):
            self._bring(batch, start)
        else:
            self._bring(batch, _latest(assigner, times))

    def _placed(self, batch: Batch) -> tuple[Batch, Starts]:
        """Records, each as often as it is in windows that have not fired, in the order in which they came;
        and where these begin."""
        assert batch.times is not None
        starts = np.empty((len(batch.times), self._assigner.per_record), dtype=np.int64)
        outside: list[tuple[int, Mask]] = []
        for number, (each, within) in enumerate(self._assigner.assigned(batch.times)):
            starts[:, number] = each
            if within is not None:
                outside.append((number, ~within))
        kept = self._assigner.ends(starts) - 1 > self._windows.closed(self._reached.reached)
        for number, mask in outside:
            kept[mask, number] = False
        return batch.take(kept.ravel().nonzero()[0] // kept.shape[1]), starts[kept]

    def _bring(self, batch: Batch, starts: Starts | int) -> None:
        self._note(self._values.bring(batch, starts, self.failed))

    def _note(self, changed: Iterable[int]) -> None:
        """Windows have come, and those that ``changed`` have a value that was not shown."""
        for start in self._values.state.arrived():
            assert start is not None
            self._windows.opened(start)
        for start in changed:
            self._windows.changed(start)

    def on_watermark(self, emit: Emit) -> int:
        if due := self._windows.due():
            self._values.fire(due, emit)
        for start in self._windows.to_show():
            if start in self._values.state:
                self._values.show(start, emit)
        return self._windows.passed_on()

    def state_rows(self) -> int:
        return len(self._values.state)

    def write_keyed(self, *, frozen: bool = False) -> Iterator[StatePart]:
        return self._values.write(frozen=frozen)

    def read_keyed(self, parts: Sequence[StatePart]) -> None:
        self._note(self._values.read(parts))


def _latest(assigner: WindowAssigner, times: Times) -> Starts:
    """Where the latest window of each record begins."""
    return next(assigner.assigned(times))[0]


def _least(times: Times) -> int:
    return min(times.tolist()) if len(times) < _FEW else int(times.min())


def _greatest(times: Times) -> int:
    return max(times.tolist()) if len(times) < _FEW else int(times.max())


# --- rows -----------------------------------------------------------------------------------------------


class WindowFold(WindowValues):
    """One Python value for each key and window. What is emitted are (key, start of the window, value); panes
    end in the number of the pane and whether it is the last one.

    Args:
        add: ``add(value, row)`` gives the next value, or the same changed in place.
        create: makes the first value; without it the first row is.
    """

    def __init__(
        self,
        assigner: WindowAssigner,
        add: Callable[[Any, Any], Any],
        create: Callable[[], Any] | None = None,
        panes: Panes = _NO_PANES,
    ) -> None:
        super().__init__(assigner, panes)
        self.fn = add
        self.state = KeyedState()
        self._create = create
        self._shown: dict[int, Counter[Any]] = {}
        """How many panes were shown of each canonical key, by window."""
        self._unshown: dict[int, dict[Any, None]] = {}
        """Canonical keys with values that were not shown, by window."""

    def bring(self, batch: Batch, starts: Starts | int, failed: Failed) -> Iterable[int]:
        if isinstance(starts, int):
            return self._bring_to_one(batch, starts, failed)
        if self.assigner.per_record > 1:  # Each window has its own, which functions may change.
            batch = Batch(set_apart(batch.payload), batch.keys)
            return self._bring_each(batch, starts, failed)
        cuts = np.flatnonzero(starts[1:] != starts[:-1]) + 1
        if len(cuts) * _RUN_ROWS_MIN > len(starts):
            return self._bring_each(batch, starts, failed)
        changed: list[int] = []
        for begin, end in pairwise([0, *cuts.tolist(), len(starts)]):
            changed += self._bring_to_one(batch.slice(begin, end), int(starts[begin]), failed)
        return changed

    def _bring_each(self, batch: Batch, starts: Starts, failed: Failed) -> Iterable[int]:
        """Fold each record into the value of its key in its own window; gives as :meth:`bring`."""
        listed = starts.tolist()
        held, places, forms = self.state.take_each(batch.keys, listed)
        dropped = self._advance(held, places, batch.payload, failed)
        return self._noted(listed, forms, dropped)

    def _bring_to_one(self, batch: Batch, start: int, failed: Failed) -> Iterable[int]:
        """Fold the records, all in the window that begins at ``start`` (microseconds), into the values of
        their keys; gives ``start`` if there are panes and a value has changed, else nothing."""
        held, places, forms = self.state.take(batch.keys, start)
        dropped = self._advance(repeat(held, len(forms)), places, batch.payload, failed)
        return self._noted(repeat(start, len(forms)), forms, dropped)

    def _advance(
        self, held: Iterable[Any], places: Iterable[Any], rows: list[Any], failed: Failed
    ) -> set[int]:
        """Fold the rows one by one, each into ``values[place]``, with ``values`` from ``held``, which may be
        endless, and ``place`` from ``places``. A row whose function raises goes to ``failed``.

        Gives the positions in ``rows`` of such rows.
        """
        add, create, absent = self.fn, self._create, ABSENT
        dropped: set[int] = set()
        left = iter(rows)
        for values, place, row in zip(held, places, left):  # noqa: B905 - held may have no end
            try:
                value = values[place]
                if value is not absent:
                    values[place] = add(value, row)
                else:
                    values[place] = row if create is None else add(create(), row)
            except Exception as error:
                failed(error, row)
                dropped.add(len(rows) - length_hint(left) - 1)
        self.state.put(None, dropped)
        return dropped

    def _noted(self, starts: Iterable[int], forms: list[Any], dropped: set[int]) -> Iterable[int]:
        """There are new values of these windows and keys, but of those records that were dropped."""
        if not self.panes.tag:
            return ()
        changed: dict[int, None] = {}
        for number, (start, form) in enumerate(zip(starts, forms, strict=True)):
            if number not in dropped:
                self._unshown.setdefault(start, {})[form] = None
                changed[start] = None
        return changed

    def fire(self, starts: list[int], emit: Emit) -> None:
        for start in starts:
            moment, pairs = self._moment(start), list(self.state.pop(start))
            if self.panes.tag:
                shown = self._shown.pop(start, Counter())
                self._unshown.pop(start, None)
                forms = canonical_rows([key for key, _ in pairs])
                # Before a chained function may change the values.
                self._put_aside(
                    [
                        (key, moment, value, shown[form], True)
                        for form, (key, value) in zip(forms, pairs, strict=True)
                    ],
                    emit,
                )
            emit_rows([(key, moment, value) for key, value in pairs], emit)

    def show(self, start: int, emit: Emit) -> None:
        shown, moment = self._shown.setdefault(start, Counter()), self._moment(start)
        forms = list(self._unshown.pop(start))
        pairs = self.state.pairs(forms, start)
        self._put_aside(
            [
                (key, moment, value, shown[form], False)
                for form, (key, value) in zip(forms, pairs, strict=True)
            ],
            emit,
        )
        shown.update(forms)

    def _moment(self, start: int) -> datetime:
        return datetime_of(start, self.assigner.zone)

    def _put_aside(self, rows: list[Any], emit: Emit) -> None:
        tag = self.panes.tag
        emit_rows(rows, lambda batch: emit(Side(tag, batch)))

    def write(self, *, frozen: bool = False) -> Iterator[StatePart]:
        return chain(self.state.write(frozen=frozen), list(self._write_panes()))

    def _write_panes(self) -> Iterator[StatePart]:
        panes = _panes_state()
        for start in self.state:
            assert start is not None
            shown, unshown = self._shown.get(start, Counter()), self._unshown.get(start, {})
            forms = list(dict.fromkeys([*unshown, *shown]))  # The ones in the order in which they will be.
            if forms:
                held, places, _ = panes.take(list(self.state.shown(forms, start)), start)
                for place, form in zip(places, forms, strict=True):
                    held[place] = [shown[form], form in unshown]
        yield from panes.write()

    def read(self, parts: Sequence[StatePart]) -> Iterable[int]:
        self.state.read(parts)
        panes = _panes_state()
        panes.read(parts)
        for start in panes:
            assert start is not None
            pairs = list(panes.items(start))
            forms = canonical_rows([key for key, _ in pairs])
            for form, (_, (count, is_unshown)) in zip(forms, pairs, strict=True):
                if count:
                    self._shown.setdefault(start, Counter())[form] = count
                if is_unshown:
                    self._unshown.setdefault(start, {})[form] = None
        return list(self._unshown)


def _panes_state() -> KeyedState:
    """How panes of keys are written, by window: how many were shown, and whether a value was not."""
    return KeyedState(packs=False, name="panes")


def one_more(count: int, row: Any) -> int:
    """Counts rows, as ``add`` of a :class:`WindowFold`."""
    return count + 1


# --- columns --------------------------------------------------------------------------------------------


def with_panes(schema: pa.Schema) -> pa.Schema:
    """The schema of panes of windows that give that one."""
    fields = zip(PANE_NAMES, (pa.int64(), pa.bool_()), strict=True)
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in fields)])


def window_columns(keys: tuple[str, ...], outputs: Outputs) -> list[str]:
    """The columns of windows by key."""
    return [*keys, "window_start", "window_end", *(name for name, _, _ in outputs)]


class PaneMarks(Aggregate):
    """By slot how many panes were shown, and whether there is a value that was not. Its value is the number
    of the next pane."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)
        self._are_new = np.zeros(0, dtype=np.bool_)

    def grow(self, size: int) -> None:
        self._counts = grown(self._counts, size, 0)
        self._are_new = grown(self._are_new, size, fill=False)

    def update(self, slots: Vector, column: pa.Array) -> None:
        self._are_new[slots] = True

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        self.update(slots, column)
        return self.at(slots)

    def at(self, slots: Vector | slice) -> pa.Array:
        return pa.array(self._counts[slots])

    def keep(self, slots: Vector) -> None:
        self._counts, self._are_new = self._counts.take(slots), self._are_new.take(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self.at(slots), pa.array(self._are_new[slots])]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        counts, are_new = columns
        self._counts[slots] = counts.to_numpy()
        self._are_new[slots] = are_new.to_numpy(zero_copy_only=False)

    def unshown(self, slots: Vector) -> Vector:
        """Those of some slots that have a value that was not shown."""
        found: Vector = slots[self._are_new[slots]]
        return found

    def show(self, slots: Vector) -> None:
        """A pane of each of these slots is shown."""
        self._counts[slots] += 1
        self._are_new[slots] = False


class WindowAggregation(WindowValues):
    """Aggregates of columns by key and window, without Python per row. What is emitted are the key columns,
    window_start, window_end and one column for each aggregate; panes also have the columns pane and final.

    Args:
        keys: names of the key columns.
        outputs: (name, input column, aggregate).

    Raises:
        UsageError: two output columns have one name.
    """

    def __init__(
        self,
        assigner: WindowAssigner,
        keys: tuple[str, ...],
        outputs: Outputs,
        panes: Panes = _NO_PANES,
    ) -> None:
        super().__init__(assigner, panes)
        self._names = window_columns(keys, outputs)
        self._keys = keys
        self._marks = PaneMarks()
        """The last of the outputs, if there are panes."""
        self._outputs: Outputs = [*outputs, ("pane", keys[0], self._marks)] if panes.tag else outputs
        self.state = KeyedState(self._outputs)

    def bring(self, batch: Batch, starts: Starts | int, failed: Failed) -> Iterable[int]:
        count = len(batch)
        if isinstance(starts, int):
            starts = np.full(count, starts)
        for begin, rows in pieces_of(count):
            piece = batch if rows == count else batch.slice(begin, begin + rows)
            keys = [piece.payload.column(name) for name in self._keys]
            slots = self.state.take_columns(keys, starts[begin : begin + rows])
            for _, column, aggregate in self._outputs:
                aggregate.update(slots, input_of(piece.payload, column, aggregate, piece.times))
        changed: list[int] = np.unique(starts).tolist() if self.panes.tag else []
        return changed

    def fire(self, starts: list[int], emit: Emit) -> None:
        for columns in self.state.pop_columns(starts):
            if self.panes.tag:
                self._put_aside(columns, emit, final=True)
            emit(Batch(self._result(columns)))

    def show(self, start: int, emit: Emit) -> None:
        slots = self._marks.unshown(self.state.slots_of([start]))
        for columns in self.state.columns_at(slots):
            self._put_aside(columns, emit, final=False)
        self._marks.show(slots)

    def _put_aside(self, columns: Columns, emit: Emit, *, final: bool) -> None:
        result, numbers = self._result(columns), columns[2][-1]
        arrays = [*result.columns, numbers, pa.repeat(final, len(numbers))]
        pane = pa.RecordBatch.from_arrays(arrays, names=[*self._names, *PANE_NAMES])
        emit(Side(self.panes.tag, Batch(pane)))

    def _result(self, columns: Columns) -> pa.RecordBatch:
        starts, keys, values = columns
        assert starts is not None
        kind = pa.timestamp("us", self.assigner.zone)
        moments = [pa.array(times).cast(kind) for times in (starts, self.assigner.ends(starts))]
        arrays = [*keys, *moments, *values]
        return pa.RecordBatch.from_arrays(arrays[: len(self._names)], names=self._names)

    def read(self, parts: Sequence[StatePart]) -> Iterable[int]:
        self.state.read(parts)
        if not self.panes.tag:
            return []
        starts = [start for start in self.state if start is not None]
        return [start for start in starts if len(self._marks.unshown(self.state.slots_of([start])))]
