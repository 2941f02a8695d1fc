"""Batches by bytes: how long rows are, judged by a few of them, and cutting what is too long.

Weighing every row would cost as much as packing it. So a batch is cut by the weight of a few rows, and what
turns out to be longer once it is packed is cut again (:func:`encode_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from minishuffle.errors import UnserializableRecord
from minishuffle.exchange.batch import Batch, Payload, Times
from minishuffle.exchange.elements import Part, payload_of, with_header
from minishuffle.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX

__all__ = [
    "FIRST_ROWS",
    "Drop",
    "ListedTimes",
    "RowsOut",
    "Stamps",
    "encode_all",
    "payload_bytes",
    "pieces",
    "row_bytes",
    "rows_that_fit",
    "sendable",
]

Drop: TypeAlias = "Callable[[Exception, Any, Times | None], None]"
"""Takes what is wrong with a row, the row, and its event time if it has one: a vector of one."""

SAMPLES: Final = 4
"""Rows, and values in each of them, that are weighed."""
FIRST_ROWS: Final = 64
"""Rows that are gathered before they are weighed for the first time. Fewer never are: weighing would take as
long as packing."""
_DEPTH_MAX: Final = 4
_VALUE_BYTES: Final = 9
"""What a number takes, and any value with none that are weighed in it."""
_TEXTS: Final = frozenset((str, bytes, bytearray))
_HOLDING: Final = (dict, list, tuple)


def _weight(value: Any, depth: int) -> int:
    kind = type(value)
    if kind in _TEXTS:
        return len(value) + _VALUE_BYTES
    if not issubclass(kind, _HOLDING):
        return _VALUE_BYTES
    if depth == _DEPTH_MAX:
        return _VALUE_BYTES * len(value)
    if issubclass(kind, dict):
        return _weight_of_all(list(value), depth) + _weight_of_all(list(value.values()), depth)
    return _weight_of_all(value, depth)


def _weight_of_all(values: Sequence[Any], depth: int) -> int:
    step = len(values) // SAMPLES
    some = values[: step * SAMPLES : step] if step > 1 else values
    total = 0
    for value in some:
        total += _weight(value, depth + 1)
    return total * len(values) // max(1, len(some))


def payload_bytes(payload: Payload) -> int:
    """About how many bytes some rows, at least one, take; of Arrow exactly what its columns do."""
    return _weight_of_all(payload, 0) if isinstance(payload, list) else int(payload.nbytes)


def pieces(batch: Batch) -> Iterator[Batch]:
    """The batch, or slices of it, in order, of about ``BATCH_BYTES_MAX`` each; a longer row by itself."""
    rows = len(batch.payload)
    if rows < FIRST_ROWS or (size := payload_bytes(batch.payload)) <= BATCH_BYTES_MAX:
        yield batch
        return
    step = max(1, rows * BATCH_BYTES_MAX // size)
    for begin in range(0, rows, step):
        yield batch.slice(begin, min(begin + step, rows))


def row_bytes(payload: Payload) -> float:
    """About how many bytes a row of columns takes; 0 of a list, which is put together without a copy."""
    return 0.0 if isinstance(payload, list) else payload.nbytes / max(1, payload.num_rows)


def rows_that_fit(weight: float) -> int:
    """How many rows of so many bytes fit into one batch."""
    return max(1, min(BATCH_ROWS_MAX, int(BATCH_BYTES_MAX / max(1.0, weight))))


def encode_all(batch: Batch, drop: Drop | None = None) -> Iterator[tuple[int, list[Part]]]:
    """A batch as elements, in order: see ``elements.encode``. None has more than twice ``BATCH_BYTES_MAX``,
    but one of a single row that is longer.

    Raises: as ``encode``; but rows that no element takes are given to ``drop``, if there is one.
    """
    pending = [batch] if len(batch.payload) < FIRST_ROWS else list(pieces(batch))[::-1]
    while pending:
        piece = pending.pop()
        rows = len(piece.payload)
        try:
            kind, body = payload_of(piece)
        except UnserializableRecord:
            if drop is None:
                raise
            pending += [kept for kept in [sendable(piece, drop)] if len(kept.payload)]
            continue
        if rows > 1 and sum(map(len, body)) > 2 * BATCH_BYTES_MAX:
            pending += [piece.slice(rows // 2, rows), piece.slice(0, rows // 2)]
        else:
            yield rows, with_header(rows, kind, body)


def sendable(batch: Batch, drop: Drop) -> Batch:
    """The batch, of rows, without those that no element takes, which ``drop`` gets with the errors."""
    fits = np.ones(len(batch), np.bool_)
    for number in range(len(batch)):
        one = batch.slice(number, number + 1)
        try:
            payload_of(one)
        except UnserializableRecord as error:
            fits[number] = False
            drop(error, one.payload[0], one.times)
    return batch.mask(fits)


class Stamps(Protocol):
    """The event times of rows that are gathered."""

    def take(self, rows: int) -> Times:
        """Those of the next so many rows."""


class ListedTimes:
    """Event times that are noted one by one, or as a list."""

    __slots__ = ("times",)

    def __init__(self, times: list[int] | None = None) -> None:
        self.times = times or []

    def take(self, rows: int) -> Times:
        """Those of the next so many rows."""
        some, self.times = self.times[:rows], self.times[rows:]
        return np.array(some, np.int64)


class RowsOut:
    """Gathers rows and emits them in batches within ``BATCH_ROWS_MAX`` and about ``BATCH_BYTES_MAX``, with
    their event times if there are ``stamps``.

    Whoever extends or appends to ``rows`` calls :meth:`look` once there are ``room`` of them, and
    :meth:`flush` at last.
    """

    __slots__ = ("_emit", "_stamps", "room", "rows")

    def __init__(self, emit: Callable[[Batch], None], stamps: Stamps | None = None) -> None:
        self._emit = emit
        self._stamps = stamps
        self.rows: list[Any] = []
        self.room = FIRST_ROWS

    def extend(self, rows: list[Any]) -> None:
        """Take more rows: the list itself, which is the caller's no more, if there are none yet."""
        if self.rows:
            self.rows += rows
        else:
            self.rows = rows

    def look(self) -> None:
        """Emit the rows, if there are as many as fit."""
        rows = self.rows
        if len(rows) >= self.room:
            fitting = len(rows) * BATCH_BYTES_MAX // payload_bytes(rows)
            self.room = max(1, min(BATCH_ROWS_MAX, fitting))
            if len(rows) >= self.room:
                self.flush()

    def flush(self) -> None:
        """Emit what there is."""
        rows, self.rows = self.rows, []
        if len(rows) <= self.room:
            if rows:
                self._hand_on(rows)
            return
        for begin in range(0, len(rows), self.room):
            self._hand_on(rows[begin : begin + self.room])

    def _hand_on(self, rows: list[Any]) -> None:
        stamps = self._stamps
        self._emit(Batch(rows) if stamps is None else Batch(rows, None, stamps.take(len(rows))))
