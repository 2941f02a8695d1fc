"""Windows that depend on the records: sessions, which end after a gap without any, and windows of so many.

A record is held until the watermark has reached its time. So the records of a key come to sessions in order
of time, whatever the order in which they arrived, and no two sessions ever have to be merged. (Flink:
``EventTimeSessionWindows``, which merges windows, and ``countWindow``, which counts records as they arrive.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.aggregates import input_of
from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Emit,
    Mark,
    Reached,
    Used,
    Watermark,
)
from minishuffle.dataflow.operators.chained import ChainedOperator, OnError, RecordOperator, emit_rows
from minishuffle.dataflow.operators.columns import (
    Outputs,
    grown,
    merge_states,
    pieces_of,
    states_of,
)
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.joincolumns import plain, plain_schema
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import (
    TIME_MAX,
    TIME_MIN,
    Vector,
    datetime_of,
    event_times,
)
from minishuffle.dataflow.operators.timedrows import TimedRows, WaitingRows
from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.operators.windowarrow import MOMENT, SPARE_SLOTS, window_columns
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.keys import canonical_rows
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import (
    StatePart,
    by_columns,
    by_rows,
    chunks,
    greatest,
    key_columns_of,
    keys_of,
    packed,
    unpacked,
)

__all__ = ["Closing", "SessionArrow", "SessionRows", "last_of_session"]

TIME_NEVER: Final = TIME_MAX - TIME_MIN + 1
ROWS_NEVER: Final = 2**63 - 1
_ROW: Final = "row "
"""Before the names of columns, in the state."""


@dataclass(frozen=True, slots=True)
class Closing:
    """When a session ends: ``gap`` microseconds (at least 1) after its last record; or, if there is a
    ``size``, with so many records, and those that are left when the data end make none."""

    gap: int
    size: int = 0

    @property
    def is_by_time(self) -> bool:
        return not self.size

    @property
    def limits(self) -> tuple[int, int]:
        """So far apart, and so many, records of one session never are."""
        return (self.gap, ROWS_NEVER) if self.is_by_time else (TIME_NEVER, self.size)

    @classmethod
    def with_size(cls, size: int) -> Closing:
        """The end of such a session is the moment after its last record."""
        return cls(1, size)


class SessionOperator(ChainedOperator):
    """What sessions of rows and of columns share: which records come too late, and how marks move them."""

    name = "window"
    keeps_rows = True

    def __init__(self, time: EventTime, closing: Closing, late: Late) -> None:
        self.by_channel = time.each
        self._time = time
        self._closing = closing
        self._late = late
        self._own = BEGINNING_OF_TIME
        """The watermark of the producer that the records at hand come from, where that decides."""
        self._watermark = BEGINNING_OF_TIME

    def takes_times(self, input: int, used: Used) -> bool:
        return self._time.is_beside

    def sides_to_read(self) -> Mapping[str, str]:
        return self._late.sides("late")

    def hold(self, batch: Batch, times: Vector) -> None:
        """Keep records, at least one, until the watermark has reached their times."""
        raise NotImplementedError

    def advance(self, emit: Emit) -> None:
        """The watermark is another: sort held records into sessions, and emit those that have ended."""
        raise NotImplementedError

    def forget_open(self) -> None:
        """The data have ended, and what has not is no session."""
        raise NotImplementedError

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        """See :meth:`Operator.process`."""
        times = event_times(self._time, batch)
        late = times <= max(self._watermark, self._own)
        if late.any():
            self._late.take(batch.mask(late), self.context, emit)
            batch, times = batch.mask(~late), times[~late]
        if len(times):
            self.hold(batch, times)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            self._own = mark.time
            return
        if isinstance(mark, Watermark):
            self._watermark = max(mark.time, self._watermark)
            self.advance(emit)
        emit(mark)

    def finish(self, emit: Emit) -> None:
        self._watermark = END_OF_TIME
        self.advance(emit)
        self.forget_open()

    def write_watermark(self) -> StatePart:
        return StatePart("reached", pa.RecordBatch.from_pydict({"watermark": [self._watermark]}))

    def read_watermark(self, part: StatePart) -> None:
        (self._watermark,) = greatest(part, [self._watermark], "watermark")


# --- rows -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenSession:
    """An open session of a key, and the value of its records; microseconds."""

    key: Any
    first: int
    last: int
    rows: int
    value: Any


class SessionRows(SessionOperator, RecordOperator):
    """Emits (key, start, end, value) once the watermark has reached the end; values are made as in
    :class:`~minishuffle.dataflow.operators.windowrows.WindowRows`, in order of the records' times."""

    def __init__(
        self,
        time: EventTime,
        closing: Closing,
        late: Late,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError = "fail",
    ) -> None:
        RecordOperator.__init__(self, add, on_error)
        SessionOperator.__init__(self, time, closing, late)
        self._create = create
        self._waiting: TimeHeap[tuple[Any, Any, Any]] = TimeHeap()
        """Canonical key, key and row."""
        self._open: dict[Any, OpenSession] = {}
        """By canonical key."""
        self._ends: TimeHeap[Any] = TimeHeap()
        """Canonical keys by the last microsecond that their session had when this was noted; if it ends by
        time."""

    def hold(self, batch: Batch, times: Vector) -> None:
        forms = canonical_rows(batch.keys)
        for form, key, row, time in zip(forms, batch.keys, batch.payload, times.tolist(), strict=True):
            self._waiting.push(time, (form, key, row))

    def advance(self, emit: Emit) -> None:
        ended: list[Any] = []
        for time, (form, key, row) in self._waiting.take_until(self._watermark):
            self._end_until(time - 1, ended)
            self._add(time, form, key, row)
            session = self._open.get(form)
            if session is not None and session.rows == self._closing.size:
                ended.append(self._result(form))
        self._end_until(self._watermark, ended)
        emit_rows(ended, emit)

    def forget_open(self) -> None:
        self._open.clear()

    def _add(self, time: int, form: Any, key: Any, row: Any) -> None:
        """A record comes to the session of its key, which has not ended by then, or begins one."""
        session = self._open.get(form)
        try:
            if session is not None:
                session.value, session.last = self.fn(session.value, row), time
                session.rows += 1
                return
            value = row if self._create is None else self.fn(self._create(), row)
        except Exception as error:
            if self.on_error == "fail":
                self.note_failure(error, row)
                raise
            self.drop(error, row)
            return
        self._begin(form, OpenSession(key, time, time, 1, value))

    def _begin(self, form: Any, session: OpenSession) -> None:
        self._open[form] = session
        if self._closing.is_by_time:
            self._ends.push(session.last + self._closing.gap - 1, form)

    def _end_until(self, limit: int, ended: list[Any]) -> None:
        """Move the sessions that end by time, up to ``limit``, to ``ended``."""
        for noted, form in self._ends.take_until(limit):
            last = self._open[form].last + self._closing.gap - 1
            if last > noted:
                self._ends.push(last, form)
            else:
                ended.append(self._result(form))

    def _result(self, form: Any) -> tuple[Any, datetime, datetime, Any]:
        """What an open session has become; it is open no more."""
        session = self._open.pop(form)
        end = datetime_of(session.last + self._closing.gap)
        return (session.key, datetime_of(session.first), end, session.value)

    def state_rows(self) -> int:
        return len(self._waiting) + len(self._open)

    def write_state(self) -> Iterator[StatePart]:
        yield self.write_watermark()
        for some in chunks(self._waiting):
            rows = packed(row for _, (_, _, row) in some)
            yield by_rows("waiting", [key for _, (_, key, _) in some], time=[at for at, _ in some], row=rows)
        for sessions in chunks(self._open.values()):
            yield by_rows(
                "sessions",
                [session.key for session in sessions],
                first=[session.first for session in sessions],
                last=[session.last for session in sessions],
                rows=[session.rows for session in sessions],
                value=packed(session.value for session in sessions),
            )

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "reached":
                self.read_watermark(part)
                continue
            keys, batch = keys_of(part), part.batch
            forms = canonical_rows(keys)
            if part.name == "waiting":
                rows, times = unpacked(batch["row"]), batch["time"].to_pylist()
                for time, *held in zip(times, forms, keys, rows, strict=True):
                    self._waiting.push(time, tuple(held))
                continue
            columns = (batch[name].to_pylist() for name in ("first", "last", "rows"))
            for form, *session in zip(forms, keys, *columns, unpacked(batch["value"]), strict=True):
                self._begin(form, OpenSession(*session))


def last_of_session(row: tuple[Any, datetime, datetime, Any]) -> datetime:
    """The event time of (key, start, end, value): the last microsecond of the session."""
    return row[2] - timedelta(microseconds=1)


# --- columns --------------------------------------------------------------------------------------


class SessionArrow(SessionOperator):
    """Emits the key columns, window_start, window_end and aggregates of sessions once the watermark has
    reached their end, in order of their ends.

    Sessions are numbered; the numbers are the slots of the aggregates. When most of them have ended, the
    others are numbered anew.

    Args:
        outputs: (name, input column, aggregate).

    Raises:
        UsageError: two output columns have one name.
    """

    def __init__(
        self, time: EventTime, closing: Closing, late: Late, keys: tuple[str, ...], outputs: Outputs
    ) -> None:
        super().__init__(time, closing, late)
        self.names = window_columns(keys, outputs)
        self.keys = keys
        self.outputs = outputs
        self._waiting = WaitingRows()
        self._given: pa.Schema | None = None
        self._plain: pa.Schema | None = None
        """The schema of the last batch, and that of rows that wait, without the dictionaries that exchanges
        decode."""
        self._index = KeyIndex()
        self._current = np.empty(0, dtype=np.int64)
        """By slot of a key the number of its latest session, or -1."""
        self._owners = self._firsts = self._lasts = np.empty(0, dtype=np.int64)
        """By session the slot of its key, and the times of its first and its last record."""
        self._counts = np.empty(0, dtype=np.int64)
        """By session how many records it has."""
        self._known = 0
        """Sessions that have a number."""
        self._open = np.empty(0, dtype=np.int64)
        """The numbers of those that have not ended."""

    def hold(self, batch: Batch, times: Vector) -> None:
        given = batch.payload.schema
        if self._plain is None or not given.equals(self._given):
            self._given, self._plain = given, plain_schema(given)
        self._waiting.add(TimedRows(plain(batch.payload, self._plain), times))

    def advance(self, emit: Emit) -> None:
        due = self._waiting.take_until(self._watermark)
        if due is not None:
            self._add(due.batch, due.times)
        self._end(emit)

    def forget_open(self) -> None:
        self._open = self._open[:0]

    def _add(self, batch: pa.RecordBatch, times: Vector) -> None:
        """Sort records into sessions; they are in order of time."""
        slots = self._index.lookup([column_of(batch, name) for name in self.keys])
        self._make_room(len(times))
        sessions, before = np.empty(len(times), dtype=np.int64), self._known
        state = (self._current, self._firsts, self._lasts, self._owners, self._counts)
        self._known = kernel("assign_sessions")(
            times, slots, *state, before, *self._closing.limits, sessions, len(times)
        )
        self._open = np.concatenate([self._open, np.arange(before, self._known)])
        for first, rows in pieces_of(len(times)):
            piece, mine = batch.slice(first, rows), sessions[first : first + rows]
            before = max(before, int(mine.max()) + 1)
            for _, column, aggregate in self.outputs:
                aggregate.grow(before)
                aggregate.update(mine, input_of(piece, column, aggregate, times[first : first + rows]))

    def _make_room(self, more: int) -> None:
        """Room for the sessions of all keys, and for so many more."""
        self._current = grown(self._current, len(self._index), -1)
        size = self._known + more
        self._owners, self._counts = grown(self._owners, size, 0), grown(self._counts, size, 0)
        self._firsts, self._lasts = grown(self._firsts, size, 0), grown(self._lasts, size, 0)

    def _end(self, emit: Emit) -> None:
        """Emit what has ended."""
        closing, ends = self._closing, self._lasts[self._open] + (self._closing.gap - 1)
        full = self._counts[self._open] == closing.size
        ended = ends <= self._watermark if closing.is_by_time else full
        if not ended.any():
            return
        sessions, self._open = self._open[ended], self._open[~ended]
        sessions = sessions[np.argsort(ends[ended], kind="stable")]
        for first in range(0, len(sessions), BATCH_ROWS_MAX):
            emit(Batch(self._result(sessions[first : first + BATCH_ROWS_MAX])))
        if self._known - len(self._open) > max(SPARE_SLOTS, self._known // 2):
            self._compact()

    def _result(self, sessions: Vector) -> pa.RecordBatch:
        keys = self._index.keys(self._owners[sessions])
        moments = (self._firsts[sessions], self._lasts[sessions] + self._closing.gap)
        values = [aggregate.at(sessions) for _, _, aggregate in self.outputs]
        columns = [*keys, *(pa.array(times).cast(MOMENT) for times in moments), *values]
        return pa.RecordBatch.from_arrays(columns, names=self.names)

    def _compact(self) -> None:
        """Forget the sessions that have ended, and keys that have no other. (A key has one open at most.)"""
        live, index = self._open, KeyIndex()
        self._owners = index.lookup(self._index.keys(self._owners[live]))
        self._index = index
        self._firsts, self._lasts, self._counts = self._firsts[live], self._lasts[live], self._counts[live]
        self._current, self._open = np.arange(len(live)), np.arange(len(live))
        self._known = len(live)
        for _, _, aggregate in self.outputs:
            aggregate.keep(live)

    def state_rows(self) -> int:
        return len(self._waiting) + len(self._open)

    def write_state(self) -> Iterator[StatePart]:
        yield self.write_watermark()
        for waiting in self._waiting:
            batch = waiting.batch
            rows = {"time": pa.array(waiting.times)}
            rows |= {f"{_ROW}{name}": column for name, column in zip(batch.schema.names, batch, strict=True)}
            yield from by_columns("waiting", [column_of(batch, name) for name in self.keys], rows)
        if len(live := self._open):
            columns = {"first": pa.array(self._firsts[live]), "last": pa.array(self._lasts[live])}
            columns["rows"] = pa.array(self._counts[live])
            columns |= states_of(self.outputs, live)
            yield from by_columns("sessions", self._index.keys(self._owners[live]), columns)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "reached":
                self.read_watermark(part)
            elif part.name == "waiting":
                names = [name for name in part.batch.schema.names if name.startswith(_ROW)]
                columns = [part.batch.column(name) for name in names]
                names = [name.removeprefix(_ROW) for name in names]
                batch = Batch(pa.RecordBatch.from_arrays(columns, names))
                self.hold(batch, part.batch["time"].to_numpy())
            else:
                self._read_sessions(part)

    def _read_sessions(self, part: StatePart) -> None:
        owners = self._index.lookup(key_columns_of(part))
        self._make_room(len(owners))
        sessions = np.arange(self._known, self._known + len(owners))
        self._current[owners], self._owners[sessions] = sessions, owners
        self._firsts[sessions] = part.batch["first"].to_numpy()
        self._lasts[sessions] = part.batch["last"].to_numpy()
        self._counts[sessions] = part.batch["rows"].to_numpy()
        self._known += len(owners)
        merge_states(self.outputs, sessions, self._known, part.batch)
        self._open = np.concatenate([self._open, sessions])
