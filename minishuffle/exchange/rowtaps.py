"""A tap: copies, as text, of the first rows that producer subtasks on one worker write for one edge.

A result partition has none unless somebody looks. What is copied is text of a bounded size, so that a tap
keeps nothing alive of what it has seen: neither rows nor the buffers that columns lie in. The task's thread
makes it, so no code of the user's runs for it: a row is shown as the plain types that cross the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias
from uuid import UUID

import numpy as np

from minishuffle import limits
from minishuffle.errors import clipped, described
from minishuffle.exchange.batch import Batch
from minishuffle.ids import AttemptId

__all__ = ["RowTap", "TappedFields"]

TappedFields: TypeAlias = dict[str, Any]
"""One row, of values that are JSON: ``at``, seconds since 1970; ``producer`` and ``attempt``, which wrote it;
``consumer``, its subtask, None: all of them; ``time``, event time in microseconds since 1970, or None;
``key``, as text, or None; ``columns``, their names, none of rows that are Python objects; ``values``, a text
for each column, or one for the row."""
_PLAIN: Final = (date, time, timedelta, Decimal)
"""What ``str`` shows better than ``repr``."""
_SCALARS: Final = (bool, int, float, datetime, *_PLAIN, UUID)
_KINDS: Final[tuple[type[Any], ...]] = (*_SCALARS, str, bytes, list, tuple, dict)
"""The first of these that a value's type is, or inherits from, is the one as which it crosses an exchange."""
_VALUE_BYTES_MAX: Final = limits.MIB
"""A longer value of a column is not turned into one of Python."""


class RowTap:
    """Copies the rows that one attempt writes for one edge, until there are ``limits.TAP_ROWS`` of all
    producers beside it, or what it has copied has taken ``limits.TAP_TASK_SECONDS_MAX`` of the task's time.

    Args:
        rows: where the copies go. Several task threads append to it, and the loop reads it: each append is
            one step of the interpreter. Those that copy at once may exceed the limit a little.
        wall: seconds since 1970.
    """

    __slots__ = ("_attempt", "_rows", "_seconds_left", "_wall")

    def __init__(self, attempt: AttemptId, rows: list[TappedFields], wall: Callable[[], float]) -> None:
        self._attempt = attempt
        self._rows = rows
        self._wall = wall
        self._seconds_left = limits.TAP_TASK_SECONDS_MAX

    def put(self, batch: Batch, consumer: int | None) -> None:
        """(Task.) These rows are about to be written. Raises nothing, whatever the rows do."""
        for position in range(min(len(batch.payload), limits.TAP_ROWS - len(self._rows))):
            if self._seconds_left <= 0:
                return
            at = self._wall()
            self._rows.append(self._copy(batch.slice(position, position + 1), consumer, at))
            self._seconds_left -= self._wall() - at

    def _copy(self, row: Batch, consumer: int | None, at: float) -> TappedFields:
        """The text of a batch of one row."""
        columns, values = _texts(row.payload)
        keys = row.keys if isinstance(row.keys, list) and row.keys is not row.payload else None
        return {
            "at": at,
            "producer": self._attempt.subtask.index,
            "attempt": self._attempt.attempt,
            "consumer": consumer,
            "time": int(row.times[0]) if row.times is not None else None,
            "key": _shown(keys[0], limits.TAP_VALUE_CHARS) if keys is not None else None,
            "columns": columns,
            "values": values,
        }


def _texts(payload: Any) -> tuple[list[str], list[str]]:
    """The names of the columns, if they are, and the texts of the one row."""
    if isinstance(payload, list):
        return [], [_shown(payload[0], limits.TAP_VALUE_CHARS)]
    names = payload.schema.names[: limits.TAP_COLUMNS_MAX]
    chars = min(limits.TAP_VALUE_CHARS, limits.TAP_ROW_CHARS // max(1, len(names)))
    texts = [_column_text(payload.column(number), chars) for number in range(len(names))]
    return [clipped(name, chars) for name in names], texts


def _column_text(column: Any, chars: int) -> str:
    """The text of the one value of a column."""
    import pyarrow as pa

    try:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.nbytes > _VALUE_BYTES_MAX:
            return clipped(f"a {column.type} of {column.nbytes:,} bytes", limits.TAP_VALUE_CHARS)
        (value,) = column.to_pylist()
    except Exception as error:  # of a type that has no values in Python, such as nanoseconds
        return clipped(f"a {column.type} that cannot be shown: {described(error)}", limits.TAP_VALUE_CHARS)
    if isinstance(value, _PLAIN):
        return str(value)
    return "null" if value is None else _shown(value, chars)


def _shown(value: Any, chars: int) -> str:
    """Its text, cut, and without what control messages and terminals do not take."""
    text = ""
    try:
        for piece in _pieces(value, chars):
            text += piece
            if len(text) > chars:
                text = f"{text[:chars]}…"
                break
    except Exception as error:  # of an int with too many digits, or a dict that another thread changes
        text = f"a value of {type(value).__name__} that cannot be shown: {described(error)}"
    return clipped(text, chars + 1)


def _pieces(value: Any, chars: int) -> Iterator[str]:
    """The ``repr`` of a value as the type that crosses the exchange, piece by piece."""
    kind: Any = next((kind for kind in _KINDS if issubclass(type(value), kind)), None)
    if kind is list or kind is tuple:
        yield "[" if kind is list else "("
        for number, each in enumerate(kind.__iter__(value)):
            yield ", " if number else ""
            yield from _pieces(each, chars)
        yield "]" if kind is list else ",)" if tuple.__len__(value) == 1 else ")"
    elif kind is dict:
        yield "{"
        for number, (key, each) in enumerate(dict.items(value)):
            yield ", " if number else ""
            yield from _pieces(key, chars)
            yield ": "
            yield from _pieces(each, chars)
        yield "}"
    elif kind is str or kind is bytes:
        yield repr(kind.__getitem__(value, slice(chars + 1)))
    elif kind is not None:
        yield kind.__repr__(value)
    elif issubclass(type(value), np.generic):
        yield repr(np.generic.item(value))
    else:
        yield "None" if value is None else f"a value of {type(value).__name__}"
