"""Windows of Arrow batches: aggregates by key and window, without Python per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.aggregate import PIECE_ROWS
from minishuffle.dataflow.operators.base import END_OF_TIME, Batch, Emit, Mark, Reached, Watermark
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.columns import Outputs, merge_states, states_of
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.keyedstate import StatePart, by_columns, key_columns_of
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.windows import OpenWindows, Starts
from minishuffle.errors import UsageError
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = ["MOMENT", "WindowArrow"]

Vector = np.ndarray[Any, Any]

MOMENT: Final = pa.timestamp("us", "UTC")
"""The type of the columns window_start and window_end."""

SPARE_SLOTS: Final = 4096
"""So many slots of fired windows are not worth making the state smaller."""


class WindowArrow(ChainedOperator):
    """Emits the key columns, window_start, window_end and aggregates when a window fires, in order of
    windows; then it passes the watermark on.

    The start of the window is a further key of one :class:`KeyIndex`. When most slots are of windows
    that have fired, the others are numbered anew, so that the state is as large as what is open.

    Args:
        outputs: (name, input column, aggregate).

    Raises:
        UsageError: two output columns have one name.
    """

    name = "window"
    keeps_rows = True

    def __init__(self, windows: OpenWindows, keys: tuple[str, ...], outputs: Outputs) -> None:
        self.names = [*keys, "window_start", "window_end", *(name for name, _, _ in outputs)]
        if len(set(self.names)) < len(self.names):
            raise UsageError(f"two output columns have one name: rename some of {', '.join(self.names)}")
        self.keys = keys
        self.outputs = outputs
        self._windows = windows
        self.by_channel = windows.time.each
        self._index = KeyIndex()
        self._slots: dict[int, list[Vector]] = {}
        """State of each open window, by its start."""
        self._fired_slots = 0

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        kept, starts = self._windows.admit(batch, self.context, emit)
        assert isinstance(kept, pa.RecordBatch)
        for first in range(0, kept.num_rows, PIECE_ROWS):
            self._add(kept.slice(first, PIECE_ROWS), starts[first : first + PIECE_ROWS])

    def _add(self, piece: pa.RecordBatch, starts: Starts) -> None:
        known = len(self._index)
        slots = self._index.lookup([pa.array(starts), *(column_of(piece, name) for name in self.keys)])
        for _, column, aggregate in self.outputs:
            aggregate.grow(len(self._index))
            aggregate.update(slots, column_of(piece, column))
        if len(self._index) > known:
            self._note_new(slots, starts, known)

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

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            self._windows.own = mark.time
            return
        if isinstance(mark, Watermark):
            self._fire(mark.time, emit)
        emit(mark)

    def finish(self, emit: Emit) -> None:
        self._fire(END_OF_TIME, emit)

    def state_rows(self) -> int:
        return len(self._index) - self._fired_slots

    def write_state(self) -> Iterator[StatePart]:
        yield self._windows.write_state()
        if len(live := self._live()):
            starts, *keys = self._index.keys(live)
            yield from by_columns("windows", keys, {"start": starts, **states_of(self.outputs, live)})

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "fired":
                self._windows.read_state(part)
                continue
            known, starts = len(self._index), part.batch["start"]
            slots = self._index.lookup([starts, *key_columns_of(part)])
            merge_states(self.outputs, slots, len(self._index), part.batch)
            self._note_new(slots, starts.to_numpy(), known)

    def _live(self) -> Vector:
        """The slots of open windows, ascending."""
        groups = [group for groups in self._slots.values() for group in groups]
        return np.sort(np.concatenate(groups)) if groups else np.zeros(0, dtype=np.int64)

    def _fire(self, watermark: int, emit: Emit) -> None:
        fired = [slots for start in self._windows.due(watermark) for slots in self._slots.pop(start)]
        if not fired:
            return
        every = np.concatenate(fired)
        for first in range(0, len(every), BATCH_ROWS_MAX):
            emit(self._result(every[first : first + BATCH_ROWS_MAX]))
        self._fired_slots += len(every)
        if self._fired_slots > max(SPARE_SLOTS, len(self._index) // 2):
            self._compact()

    def _result(self, slots: Vector) -> pa.RecordBatch:
        starts, *keys = self._index.keys(slots)
        ends = pa.array(starts.to_numpy() + self._windows.size)
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
        for start, groups in self._slots.items():
            self._slots[start] = [np.searchsorted(live, group) for group in groups]
        self._fired_slots = 0
