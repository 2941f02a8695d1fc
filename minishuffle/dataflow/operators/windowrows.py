"""Windows of rows: one Python value for each key and window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minishuffle.dataflow.operators.base import END_OF_TIME, Batch, Emit, KeyedRows, Mark, Reached, Watermark
from minishuffle.dataflow.operators.chained import OnError, RecordOperator, emit_rows
from minishuffle.dataflow.operators.keyedstate import (
    StatePart,
    by_rows,
    chunks,
    keys_of,
    packed,
    unpacked,
)
from minishuffle.dataflow.operators.moments import datetime_of
from minishuffle.dataflow.operators.windows import OpenWindows
from minishuffle.exchange.keys import canonical_rows

__all__ = ["WindowRows", "one_more"]


class WindowRows(RecordOperator):
    """Emits (key, start of the window, value) when the window fires, then passes the watermark on.

    ``create()`` makes the first value of a key in a window and ``add(value, row)`` the next ones;
    without ``create`` the first row is the first value. A record whose function raises is dropped or
    fails the task, as ``on_error`` says.
    """

    name = "window"
    keeps_rows = True

    def __init__(
        self,
        windows: OpenWindows,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError = "fail",
    ) -> None:
        super().__init__(add, on_error)
        self._windows = windows
        self.by_channel = windows.time.each
        self._create = create
        self._values: dict[int, dict[Any, list[Any]]] = {}
        """[key as it came first, value] by window start and canonical key."""
        self._held = 0
        """All of these."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        kept, starts = self._windows.admit(batch, self.context, emit)
        assert isinstance(kept, KeyedRows)
        add, create, values = self.fn, self._create, self._values
        forms = canonical_rows(kept.keys)
        for key, form, row, start in zip(kept.keys, forms, kept.rows, starts.tolist(), strict=True):
            window = values.get(start)
            if window is None:
                window = self._window(start)
            entry = window.get(form)
            try:
                if entry is not None:
                    entry[1] = add(entry[1], row)
                else:
                    window[form] = [key, row if create is None else add(create(), row)]
                    self._held += 1
            except Exception as error:
                if self.on_error == "fail":
                    self.note_failure(error, row)
                    raise
                self.drop(error, row)

    def _window(self, start: int) -> dict[Any, list[Any]]:
        if start not in self._values:
            self._values[start] = {}
            self._windows.opened(start)
        return self._values[start]

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            self._windows.own = mark.time
            return
        if isinstance(mark, Watermark):
            self._fire(mark.time, emit)
        emit(mark)

    def finish(self, emit: Emit) -> None:
        self._fire(END_OF_TIME, emit)

    def _fire(self, watermark: int, emit: Emit) -> None:
        for start in self._windows.due(watermark):
            moment, fired = datetime_of(start), self._values.pop(start).values()
            self._held -= len(fired)
            emit_rows([(key, moment, value) for key, value in fired], emit)

    def state_rows(self) -> int:
        return self._held

    def write_state(self) -> Iterator[StatePart]:
        yield self._windows.write_state()
        for start, window in self._values.items():
            for some in chunks(window.values()):
                keys, values = [key for key, _ in some], packed(value for _, value in some)
                yield by_rows("windows", keys, start=[start] * len(some), value=values)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "fired":
                self._windows.read_state(part)
                continue
            keys, values = keys_of(part), unpacked(part.batch["value"])
            starts = part.batch["start"].to_pylist()
            for key, form, value, start in zip(keys, canonical_rows(keys), values, starts, strict=True):
                self._window(start)[form] = [key, value]
            self._held += len(keys)


def one_more(count: int, row: Any) -> int:
    """Counts rows, as ``add`` of a :class:`WindowRows`."""
    return count + 1
