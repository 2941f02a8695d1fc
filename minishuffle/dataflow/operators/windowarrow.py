"""Windows of Arrow batches: aggregates by key and window, without Python per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.aggregates import input_of
from minishuffle.dataflow.operators.base import Emit, Side
from minishuffle.dataflow.operators.columns import (
    Outputs,
    check_result,
    merge_states,
    pieces_of,
    states_of,
)
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.windows import OpenWindows, Starts, WindowOperator
from minishuffle.exchange.batch import Batch, Times
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import StatePart, by_columns, key_columns_of

__all__ = ["MOMENT", "PANE_NAMES", "SPARE_SLOTS", "WindowArrow", "window_columns", "with_panes"]

Vector = np.ndarray[Any, Any]

MOMENT: Final = pa.timestamp("us", "UTC")
"""The type of the columns window_start and window_end."""

PANE_NAMES: Final = ("pane", "final")

SPARE_SLOTS: Final = 4096
"""So many slots of fired windows are not worth making the state smaller."""


def with_panes(schema: pa.Schema | None) -> pa.Schema | None:
    """The schema of the side output of panes, if there is one."""
    if schema is None:
        return None
    fields = zip(PANE_NAMES, (pa.int64(), pa.bool_()), strict=True)
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in fields)])


def window_columns(keys: tuple[str, ...], outputs: Outputs, more: tuple[str, ...] = ()) -> list[str]:
    """The columns of windows by key; ``more`` stand behind them in another place.

    Raises:
        UsageError: two of all these have one name.
    """
    names = [*keys, "window_start", "window_end", *(name for name, _, _ in outputs)]
    check_result([*names, *more])
    return names


class WindowArrow(WindowOperator):
    """Emits the key columns, window_start, window_end and aggregates when a window fires, in order of
    windows; then it passes the watermark on. The side output of panes also has the columns pane and final.

    The start of the window is a further key of one :class:`KeyIndex`. When most slots are of windows
    that have fired, the others are numbered anew, so that the state is as large as what is open.

    Args:
        outputs: (name, input column, aggregate).

    Raises:
        UsageError: two output columns have one name.
    """

    def __init__(self, windows: OpenWindows, keys: tuple[str, ...], outputs: Outputs) -> None:
        self.names = window_columns(keys, outputs, PANE_NAMES if windows.panes.tag else ())
        self.keys = keys
        self.outputs = outputs
        self._windows = windows
        self.by_channel = windows.time.each
        self._index = KeyIndex()
        self._slots: dict[int, list[Vector]] = {}
        """State of each open window, by its start."""
        self._fired_slots = 0
        self._panes = np.zeros(0, dtype=np.int64)
        """By slot how many panes were shown."""
        self._unshown = np.zeros(0, dtype=np.bool_)
        """By slot whether there is a value that was not."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        for kept, starts in self._windows.admit(batch, self.context, emit):
            columns = kept.payload
            for first, rows in pieces_of(columns.num_rows):
                times = None if kept.times is None else kept.times[first : first + rows]
                self._add(columns.slice(first, rows), times, starts[first : first + rows])

    def _add(self, piece: pa.RecordBatch, times: Times | None, starts: Starts) -> None:
        known = len(self._index)
        slots = self._index.lookup([pa.array(starts), *(column_of(piece, name) for name in self.keys)])
        for _, column, aggregate in self.outputs:
            aggregate.grow(len(self._index))
            aggregate.update(slots, input_of(piece, column, aggregate, times))
        if len(self._index) > known:
            self._note_new(slots, starts, known)
        if self._windows.panes.tag:
            self._note_changes(slots, starts)

    def _note_changes(self, slots: Vector, starts: Starts) -> None:
        """There are new values in those slots, of windows that begin so."""
        more = len(self._index) - len(self._panes)
        if more > 0:
            self._panes = np.append(self._panes, np.zeros(more, np.int64))
            self._unshown = np.append(self._unshown, np.zeros(more, np.bool_))
        self._unshown[slots] = True
        for start in np.unique(starts).tolist():
            self._windows.changed(start)

    def _note_new(self, slots: Vector, starts: Starts, known: int) -> None:
        """Write down to which windows the slots from ``known`` on belong."""
        start_of = np.empty(len(self._index) - known, dtype=np.int64)
        is_new = slots >= known
        start_of[slots[is_new] - known] = starts[is_new]
        order = np.argsort(start_of, kind="stable")
        windows, firsts = np.unique(start_of[order], return_index=True)
        for start, group in zip(windows.tolist(), np.split(order + known, firsts[1:]), strict=True):
            if start not in self._slots:
                self._slots[start] = []
                self._windows.opened(start)
            self._slots[start].append(group)

    def state_rows(self) -> int:
        return len(self._index) - self._fired_slots

    def write_state(self) -> Iterator[StatePart]:
        yield self._windows.write_state()
        if len(live := self._live()):
            starts, *keys = self._index.keys(live)
            columns = {"start": starts, **states_of(self.outputs, live)}
            if self._windows.panes.tag:
                columns |= {"panes": pa.array(self._panes[live]), "unshown": pa.array(self._unshown[live])}
            yield from by_columns("windows", keys, columns)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "fired":
                self._windows.read_state(part)
                continue
            known, starts = len(self._index), part.batch["start"]
            slots = self._index.lookup([starts, *key_columns_of(part)])
            merge_states(self.outputs, slots, len(self._index), part.batch)
            self._note_new(slots, starts.to_numpy(), known)
            if self._windows.panes.tag:
                unshown = part.batch["unshown"].to_numpy(zero_copy_only=False)
                self._note_changes(slots[unshown], starts.to_numpy()[unshown])
                self._panes[slots] = part.batch["panes"].to_numpy()

    def _live(self) -> Vector:
        """The slots of open windows, ascending."""
        groups = [group for groups in self._slots.values() for group in groups]
        return np.sort(np.concatenate(groups)) if groups else np.zeros(0, dtype=np.int64)

    def fire(self, starts: list[int], emit: Emit) -> None:
        fired = [slots for start in starts for slots in self._slots.pop(start)]
        if not fired:
            return
        every = np.concatenate(fired)
        for first in range(0, len(every), BATCH_ROWS_MAX):
            some = every[first : first + BATCH_ROWS_MAX]
            result = self._result(some)
            if self._windows.panes.tag:
                self._put_aside(result, some, emit, final=True)
            emit(Batch(result))
        self._fired_slots += len(every)
        if self._fired_slots > max(SPARE_SLOTS, len(self._index) // 2):
            self._compact()

    def show(self, start: int, emit: Emit) -> None:
        if start not in self._slots:
            return
        slots = np.concatenate(self._slots[start])
        slots = slots[self._unshown[slots]]
        for first in range(0, len(slots), BATCH_ROWS_MAX):
            some = slots[first : first + BATCH_ROWS_MAX]
            self._put_aside(self._result(some), some, emit, final=False)
        self._panes[slots] += 1
        self._unshown[slots] = False

    def _put_aside(self, result: pa.RecordBatch, slots: Vector, emit: Emit, *, final: bool) -> None:
        more = [pa.array(self._panes[slots]), pa.repeat(final, len(slots))]
        columns, names = [*result.columns, *more], [*self.names, *PANE_NAMES]
        emit(Side(self._windows.panes.tag, Batch(pa.RecordBatch.from_arrays(columns, names=names))))

    def _result(self, slots: Vector) -> pa.RecordBatch:
        starts, *keys = self._index.keys(slots)
        ends = pa.array(self._windows.assigner.ends(starts.to_numpy()))
        values = [aggregate.at(slots) for _, _, aggregate in self.outputs]
        columns = [*keys, starts.cast(MOMENT), ends.cast(MOMENT), *values]
        return pa.RecordBatch.from_arrays(columns, names=self.names)

    def _compact(self) -> None:
        """Forget the slots of fired windows."""
        live = self._live()
        index = KeyIndex()
        index.lookup(self._index.keys(live))
        self._index = index
        for _, _, aggregate in self.outputs:
            aggregate.keep(live)
        if self._windows.panes.tag:
            self._panes, self._unshown = self._panes[live], self._unshown[live]
        for start, groups in self._slots.items():
            self._slots[start] = [np.searchsorted(live, group) for group in groups]
        self._fired_slots = 0
