"""A tap: copies, as text, of the first rows that producer subtasks on one worker write for one edge.

A result partition has none unless somebody looks. What is copied is text of a bounded size, so that a tap
keeps nothing alive of what it has seen: neither rows nor the buffers that columns lie in.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, TypeAlias

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
_PLAIN = (date, time, timedelta, Decimal)
"""What ``str`` shows better than ``repr``."""


class RowTap:
    """Copies the rows that one attempt writes for one edge, until there are ``limits.TAP_ROWS`` of all
    producers beside it.

    Args:
        rows: where the copies go. Several task threads append to it, and the loop reads it: each append is
            one step of the interpreter. Those that copy at once may exceed the limit a little.
        wall: seconds since 1970.
    """

    __slots__ = ("_attempt", "_rows", "_wall")

    def __init__(self, attempt: AttemptId, rows: list[TappedFields], wall: Callable[[], float]) -> None:
        self._attempt = attempt
        self._rows = rows
        self._wall = wall

    def put(self, batch: Batch, consumer: int | None) -> None:
        """(Task.) These rows are about to be written. Raises nothing, whatever the rows do."""
        left = limits.TAP_ROWS - len(self._rows)
        if left <= 0:
            return
        some, at = batch.slice(0, left), self._wall()
        columns, values = _texts(some.payload)
        keys = some.keys if isinstance(some.keys, list) and some.keys is not some.payload else None
        for number, texts in enumerate(values):
            self._rows.append(
                {
                    "at": at,
                    "producer": self._attempt.subtask.index,
                    "attempt": self._attempt.attempt,
                    "consumer": consumer,
                    "time": int(some.times[number]) if some.times is not None else None,
                    "key": _shown(keys[number], limits.TAP_VALUE_CHARS) if keys is not None else None,
                    "columns": columns,
                    "values": texts,
                }
            )


def _texts(payload: Any) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, if they are, and the texts of each row."""
    if isinstance(payload, list):
        return [], [[_shown(row, limits.TAP_VALUE_CHARS)] for row in payload]
    names = payload.schema.names[: limits.TAP_COLUMNS_MAX]
    chars = min(limits.TAP_VALUE_CHARS, limits.TAP_ROW_CHARS // max(1, len(names)))
    columns = [_column_texts(payload.column(number), chars) for number in range(len(names))]
    heads = [clipped(name, chars) for name in names]
    return heads, [[texts[row] for texts in columns] for row in range(payload.num_rows)]


def _column_texts(column: Any, chars: int) -> list[str]:
    try:
        return [_value_text(value, chars) for value in column.to_pylist()]
    except Exception as error:  # of a type that has no values in Python, such as nanoseconds
        why = f"a {column.type} that cannot be shown: {described(error)}"
        return [clipped(why, limits.TAP_VALUE_CHARS)] * len(column)


def _value_text(value: Any, chars: int) -> str:
    if isinstance(value, _PLAIN):
        return str(value)
    return "null" if value is None else _shown(value, chars)


def _shown(value: Any, chars: int) -> str:
    """Its repr, cut, and without what control messages and terminals do not take."""
    some = value[: chars + 1] if type(value) in (str, bytes) else value
    try:
        text = str.__str__(repr(some))  # A subclass of str may lie about itself.
    except BaseException as error:  # SystemExit included: who looks at rows ends no task
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return clipped(text if len(text) <= chars else f"{text[:chars]}…", chars + 1)
