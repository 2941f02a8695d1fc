"""Windows that depend on the records: sessions, which end after a gap without any, and windows of so many.

A record waits until the watermark has reached its time. So the records of a key come to sessions in order of
time, whatever the order in which they arrived, and no two sessions ever have to be merged.
:class:`SessionOperator` is the operator, of rows and of columns; how records in order of time become sessions
is said by its :class:`SessionValues`. (Flink: ``EventTimeSessionWindows``, which merges windows, and
``countWindow``, which counts records as they arrive.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.keys import canonical_rows
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import Outputs, grown, merge_states, pieces_of, states_of
from minishuffle.operators.aggregates import input_of
from minishuffle.operators.base import Emit
from minishuffle.operators.batch_times import TIME_MAX, TIME_MIN, datetime_of
from minishuffle.operators.chained import Failed, OnError, emit_rows
from minishuffle.operators.column_store import Vector
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import EventTimeOperator, Late
from minishuffle.operators.join_columns import plain, plain_schema
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.row_store import ABSENT
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records
from minishuffle.operators.time_heap import TimeHeap
from minishuffle.operators.waiting_batches import WaitingBatches
from minishuffle.operators.windows import MOMENT, window_columns

__all__ = ["Closing", "SessionAggregation", "SessionFold", "SessionOperator", "last_of_session"]

TIME_NEVER: Final = TIME_MAX - TIME_MIN + 1
ROWS_NEVER: Final = 2**63 - 1
_KEY, _FIRST, _LAST, _ROWS, _VALUE = range(5)
"""What a session of rows has in keyed state: its key as its first record brought it, the times of its first
and its last record (microseconds), how many it has, and their value."""
SPARE_SESSIONS: Final = 4096
"""So many numbers of sessions that have ended are not worth numbering the others anew."""


@dataclass(frozen=True, slots=True)
class Closing:
    """When a session ends: ``gap`` microseconds (at least 1) after its last record; or, if there is a
    ``size``, with so many records, and those that are left when the data end make none."""

    gap: int
    size: int = 0

    def __str__(self) -> str:
        if self.is_by_time:
            return f"sessions with gaps of {self.gap / 1_000_000:g} s"
        return f"windows of {self.size:,} records"

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


class SessionValues:
    """How records in order of time become sessions and their values."""

    fn: Any = None
    """The function of the user that is called for each record, if there is one."""

    def __init__(self, closing: Closing) -> None:
        self.closing = closing

    def to_hold(self, batch: Batch) -> Batch:
        """A batch as it waits."""
        return batch

    def keys_of(self, batch: Batch) -> Any:
        """The keys of a batch that waits: objects, or columns."""
        raise NotImplementedError

    def add(self, batch: Batch, failed: Failed) -> None:
        """Sort records, at least one, into sessions; they are in order of time, and behind all before."""
        raise NotImplementedError

    def end(self, watermark: int, emit: Emit) -> None:
        """Emit the sessions that have ended by then, in order of their ends, and forget them."""
        raise NotImplementedError

    def forget(self) -> None:
        """The data have ended, and the sessions that have not are none."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many sessions have not ended."""
        raise NotImplementedError

    def holdings(self) -> dict[str, Holding]:
        """What is no value of a key in keyed state."""
        return {}

    def write(self, *, frozen: bool = False) -> Iterator[StatePart]:
        """What is in keyed state; ``frozen`` as in :meth:`EventTimeOperator.freeze_state`."""
        return iter(())

    def read(self, parts: Sequence[StatePart]) -> None:
        """Go on with such parts."""


class SessionOperator(EventTimeOperator):
    """Emits the sessions of each key once the watermark has reached their end, in order of their ends."""

    name = "window"

    def __init__(
        self, sessions: SessionValues, time: EventTime, late: Late, on_error: OnError = "fail"
    ) -> None:
        super().__init__((time,), (late,), sessions.fn, on_error)
        self._sessions = sessions
        self._waiting = WaitingBatches()

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        self._waiting.add(self._sessions.to_hold(batch))

    def on_watermark(self, emit: Emit) -> int:
        (reached,) = self.progress.watermarks
        due = self._waiting.take_until(reached)
        if due is not None:
            self._sessions.add(due, self.failed)
        self._sessions.end(reached, emit)
        return reached

    def on_end(self, emit: Emit) -> None:
        self._sessions.forget()

    # --- state --------------------------------------------------------------------------------------

    def state_rows(self) -> int:
        return len(self._waiting) + len(self._sessions)

    def holdings(self) -> dict[str, Holding]:
        waiting = Holding("key", self._write_waiting, self._read_waiting)
        return {**super().holdings(), "waiting": waiting, **self._sessions.holdings()}

    def write_keyed(self, *, frozen: bool = False) -> Iterator[StatePart]:
        return self._sessions.write(frozen=frozen)

    def read_keyed(self, parts: Sequence[StatePart]) -> None:
        self._sessions.read(parts)

    def _write_waiting(self) -> Iterator[Records]:
        for batch in self._waiting:
            yield Records(batch.payload, self._sessions.keys_of(batch), {"time": pa.array(batch.times)})

    def _read_waiting(self, records: Records) -> None:
        batch = Batch(records.payload, records.keys, records.marks["time"].to_numpy())
        self._waiting.add(self._sessions.to_hold(batch))


# --- rows -----------------------------------------------------------------------------------------------


class SessionFold(SessionValues):
    """One Python value for each session. What is emitted are (key, start, end, value); values are made as in
    :class:`~minishuffle.operators.windows.WindowFold`, in order of the records' times."""

    def __init__(
        self, closing: Closing, add: Callable[[Any, Any], Any], create: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(closing)
        self.fn = add
        self._create = create
        self._state = KeyedState(packs=False, name="sessions")
        self._ends: TimeHeap[tuple[int, Any, list[Any]]] = TimeHeap()
        """Numbers of sessions, canonical keys and the sessions, by the last microsecond that the session had
        when this was noted; if it ends by time. Those of one end go out in the order in which they began."""
        self._begun = 0
        """How many sessions have a number."""
        self._ended: list[Any] = []
        """What goes out of sessions that have ended."""

    def keys_of(self, batch: Batch) -> Any:
        return batch.keys

    def add(self, batch: Batch, failed: Failed) -> None:
        fn, create, closing, ends = self.fn, self._create, self.closing, self._ends
        by_time = closing.is_by_time
        held, places, _ = self._state.take(batch.keys)
        assert batch.times is not None
        times = batch.times.tolist()
        # Values are not packed: the place of a key is its canonical form.
        for time, form, key, row in zip(times, places, batch.keys, batch.payload, strict=True):
            if ends.earliest < time:
                self._end_until(time - 1)
            session = held[form]
            try:
                if session is not ABSENT:
                    value = fn(session[_VALUE], row)
                else:
                    value = row if create is None else fn(create(), row)
            except Exception as error:
                failed(error, row)
                continue
            if session is ABSENT:
                held[form] = session = [key, time, time, 0, value]
                if by_time:
                    self._begin(form, session)
            session[_LAST], session[_VALUE] = time, value
            session[_ROWS] += 1
            if session[_ROWS] == closing.size:
                self._close(form, session)

    def end(self, watermark: int, emit: Emit) -> None:
        self._end_until(watermark)
        ended, self._ended = self._ended, []
        emit_rows(ended, emit)

    def _end_until(self, limit: int) -> None:
        """The sessions have ended whose last microsecond is up to ``limit``."""
        for noted, (number, form, session) in self._ends.take_until(limit):
            last = session[_LAST] + self.closing.gap - 1
            if last > noted:
                self._ends.push(last, (number, form, session), number)
            else:
                self._close(form, session)

    def _begin(self, form: Any, session: list[Any]) -> None:
        """Note when a session ends by time."""
        number = self._begun
        self._begun += 1
        self._ends.push(session[_LAST] + self.closing.gap - 1, (number, form, session), number)

    def _close(self, form: Any, session: list[Any]) -> None:
        self._state.discard(form)
        end = datetime_of(session[_LAST] + self.closing.gap)
        self._ended.append((session[_KEY], datetime_of(session[_FIRST]), end, session[_VALUE]))

    def forget(self) -> None:
        self._state.pop()

    def __len__(self) -> int:
        return len(self._state)

    def write(self, *, frozen: bool = False) -> Iterator[StatePart]:
        return self._state.write(frozen=frozen)

    def read(self, parts: Sequence[StatePart]) -> None:
        self._state.read(parts)
        if self.closing.is_by_time:
            pairs = list(self._state.items())
            forms = canonical_rows([key for key, _ in pairs])
            for form, (_, session) in zip(forms, pairs, strict=True):
                self._begin(form, session)


def last_of_session(row: tuple[Any, datetime, datetime, Any]) -> datetime:
    """The event time of (key, start, end, value): the last microsecond of the session."""
    return row[2] - timedelta(microseconds=1)


# --- columns --------------------------------------------------------------------------------------------


class SessionAggregation(SessionValues):
    """Aggregates of columns by session. What is emitted are the key columns, window_start, window_end and one
    column for each aggregate.

    Sessions are numbered; the numbers are the slots of the aggregates. (One batch may begin and end many of a
    key, so that the slot of a key, which keyed state has, is none of theirs.) When most of them have ended,
    the others are numbered anew.

    Args:
        keys: names of the key columns.
        outputs: (name, input column, aggregate).
    """

    def __init__(self, closing: Closing, keys: tuple[str, ...], outputs: Outputs) -> None:
        super().__init__(closing)
        self._names = window_columns(keys, outputs)
        self._keys = keys
        self._outputs = outputs
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

    def __len__(self) -> int:
        return len(self._open)

    def to_hold(self, batch: Batch) -> Batch:
        given = batch.payload.schema
        if self._plain is None or not given.equals(self._given):
            self._given, self._plain = given, plain_schema(given)
        return Batch(plain(batch.payload, self._plain), None, batch.times)

    def keys_of(self, batch: Batch) -> Any:
        return [batch.payload.column(name) for name in self._keys]

    def add(self, batch: Batch, failed: Failed) -> None:
        times = batch.times
        assert times is not None
        slots = self._index.lookup(self.keys_of(batch))
        self._make_room(len(times))
        sessions, before = np.empty(len(times), dtype=np.int64), self._known
        state = (self._current, self._firsts, self._lasts, self._owners, self._counts)
        self._known = kernel("assign_sessions")(
            times, slots, *state, before, *self.closing.limits, sessions, len(times)
        )
        self._open = np.concatenate([self._open, np.arange(before, self._known)])
        for first, rows in pieces_of(len(times)):
            piece, mine = batch.slice(first, first + rows), sessions[first : first + rows]
            before = max(before, int(mine.max()) + 1)
            for _, column, aggregate in self._outputs:
                aggregate.grow(before)
                aggregate.update(mine, input_of(piece.payload, column, aggregate, piece.times))

    def _make_room(self, more: int) -> None:
        """Room for the sessions of all keys, and for so many more."""
        self._current = grown(self._current, len(self._index), -1)
        size = self._known + more
        self._owners, self._counts = grown(self._owners, size, 0), grown(self._counts, size, 0)
        self._firsts, self._lasts = grown(self._firsts, size, 0), grown(self._lasts, size, 0)

    def end(self, watermark: int, emit: Emit) -> None:
        closing, ends = self.closing, self._lasts[self._open] + (self.closing.gap - 1)
        full = self._counts[self._open] == closing.size
        ended = ends <= watermark if closing.is_by_time else full
        if not ended.any():
            return
        sessions, self._open = self._open[ended], self._open[~ended]
        sessions = sessions[np.argsort(ends[ended], kind="stable")]
        for first in range(0, len(sessions), BATCH_ROWS_MAX):
            emit(Batch(self._result(sessions[first : first + BATCH_ROWS_MAX])))
        if self._known - len(self._open) > max(SPARE_SESSIONS, self._known // 2):
            self._compact()

    def _result(self, sessions: Vector) -> pa.RecordBatch:
        keys = self._index.keys(self._owners[sessions])
        moments = (self._firsts[sessions], self._lasts[sessions] + self.closing.gap)
        values = [aggregate.at(sessions) for _, _, aggregate in self._outputs]
        columns = [*keys, *(pa.array(times).cast(MOMENT) for times in moments), *values]
        return pa.RecordBatch.from_arrays(columns, names=self._names)

    def _compact(self) -> None:
        """Forget the sessions that have ended, and keys that have no other. (A key has one open at most.)"""
        live, index = self._open, KeyIndex()
        self._owners = index.lookup(self._index.keys(self._owners[live]))
        self._index = index
        self._firsts, self._lasts, self._counts = self._firsts[live], self._lasts[live], self._counts[live]
        self._current, self._open = np.arange(len(live)), np.arange(len(live))
        self._known = len(live)
        for _, _, aggregate in self._outputs:
            aggregate.keep(live)

    def forget(self) -> None:
        self._open = self._open[:0]

    def holdings(self) -> dict[str, Holding]:
        return {"sessions": Holding("key", self._write_sessions, self._read_sessions)}

    def _write_sessions(self) -> Iterator[Records]:
        live = self._open
        if not len(live):
            return
        columns = {"first": pa.array(self._firsts[live]), "last": pa.array(self._lasts[live])}
        columns |= {"rows": pa.array(self._counts[live]), **states_of(self._outputs, live)}
        yield Records(pa.RecordBatch.from_pydict(columns), self._index.keys(self._owners[live]))

    def _read_sessions(self, records: Records) -> None:
        keys, columns = records.keys, records.payload
        owners = self._index.lookup(keys)
        self._make_room(len(owners))
        sessions = np.arange(self._known, self._known + len(owners))
        self._current[owners], self._owners[sessions] = sessions, owners
        self._firsts[sessions] = columns["first"].to_numpy()
        self._lasts[sessions] = columns["last"].to_numpy()
        self._counts[sessions] = columns["rows"].to_numpy()
        self._known += len(owners)
        merge_states(self._outputs, sessions, self._known, columns)
        self._open = np.concatenate([self._open, sessions])
