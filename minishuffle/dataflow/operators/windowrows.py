"""Windows of rows: one Python value for each key and window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minishuffle.dataflow.operators.base import Emit, Side
from minishuffle.dataflow.operators.chained import OnError, RecordOperator, emit_rows
from minishuffle.dataflow.operators.copies import set_apart
from minishuffle.dataflow.operators.moments import datetime_of
from minishuffle.dataflow.operators.windows import OpenWindows, Starts, WindowOperator
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.keys import canonical_rows
from minishuffle.operators.state_parts import (
    StatePart,
    by_rows,
    chunks,
    keys_of,
    packed,
    unpacked,
)

__all__ = ["WindowRows", "one_more"]


class WindowRows(WindowOperator, RecordOperator):
    """Emits (key, start of the window, value) when the window fires, then passes the watermark on; to the
    side output of panes also the number of the pane and whether it is the last one.

    ``create()`` makes the first value of a key in a window and ``add(value, row)`` the next ones;
    without ``create`` the first row is the first value. A record whose function raises is dropped or
    fails the task, as ``on_error`` says.
    """

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
        self._unshown: dict[int, dict[Any, None]] = {}
        """Keys with values that were not shown, by window start."""
        self._panes: dict[int, Counter[Any]] = {}
        """How many panes were shown of each key, by window start."""
        self._held = 0
        """All of these."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        for kept, starts in self._windows.admit(batch, self.context, emit):
            if self._windows.assigner.per_record > 1:  # Each window has its own, which functions may change.
                kept = Batch(set_apart(kept.payload), kept.keys)
            self._add(kept, starts)

    def _add(self, kept: Batch, starts: Starts) -> None:
        add, create, values = self.fn, self._create, self._values
        has_panes = bool(self._windows.panes.tag)
        forms = canonical_rows(kept.keys)
        for key, form, row, start in zip(kept.keys, forms, kept.payload, starts.tolist(), strict=True):
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
                continue
            if has_panes:
                self._note_change(start, form)

    def _note_change(self, start: int, form: Any) -> None:
        self._unshown.setdefault(start, {})[form] = None
        self._windows.changed(start)

    def _window(self, start: int) -> dict[Any, list[Any]]:
        if start not in self._values:
            self._values[start] = {}
            self._windows.opened(start)
        return self._values[start]

    def fire(self, starts: list[int], emit: Emit) -> None:
        for start in starts:
            moment, fired = datetime_of(start), self._values.pop(start)
            self._held -= len(fired)
            if self._windows.panes.tag:
                shown = self._panes.pop(start, Counter())
                self._unshown.pop(start, None)
                # Before a chained function may change the values.
                self._put_aside(
                    [(key, moment, value, shown[form], True) for form, (key, value) in fired.items()], emit
                )
            emit_rows([(key, moment, value) for key, value in fired.values()], emit)

    def show(self, start: int, emit: Emit) -> None:
        if start not in self._values:
            return
        window, moment = self._values[start], datetime_of(start)
        shown = self._panes.setdefault(start, Counter())
        forms = self._unshown.pop(start)
        self._put_aside(
            [(window[form][0], moment, window[form][1], shown[form], False) for form in forms], emit
        )
        shown.update(forms.keys())

    def _put_aside(self, rows: list[Any], emit: Emit) -> None:
        tag = self._windows.panes.tag
        emit_rows(rows, lambda batch: emit(Side(tag, batch)))

    def state_rows(self) -> int:
        return self._held

    def write_state(self) -> Iterator[StatePart]:
        yield self._windows.write_state()
        for start, window in self._values.items():
            panes, unshown = self._panes.get(start, Counter()), self._unshown.get(start, {})
            for some in chunks(window.items()):
                yield by_rows(
                    "windows",
                    [key for _, (key, _) in some],
                    start=[start] * len(some),
                    value=packed(value for _, (_, value) in some),
                    panes=[panes[form] for form, _ in some],
                    unshown=[form in unshown for form, _ in some],
                )

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "fired":
                self._windows.read_state(part)
                continue
            keys, values = keys_of(part), unpacked(part.batch["value"])
            starts, panes, unshown = (part.batch[name].to_pylist() for name in ("start", "panes", "unshown"))
            entries = zip(keys, canonical_rows(keys), values, starts, panes, unshown, strict=True)
            for key, form, value, start, count, changed in entries:
                self._window(start)[form] = [key, value]
                if count:
                    self._panes.setdefault(start, Counter())[form] = count
                if changed:
                    self._note_change(start, form)
            self._held += len(keys)


def one_more(count: int, row: Any) -> int:
    """Counts rows, as ``add`` of a :class:`WindowRows`."""
    return count + 1
