"""A tap: copies, as text, of the first rows that a producer subtask writes for one edge.

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
from minishuffle.exchange.rows import preview

__all__ = ["RowTap", "TappedFields"]

TappedFields: TypeAlias = dict[str, Any]
"""One row, of values that are JSON: ``at``, seconds since 1970; ``consumer``, its subtask, None: all of them;
``time``, event time in microseconds since 1970, or None; ``key``, as text, or None; ``columns``, their names,
none of rows that are Python objects; ``values``, a text for each column, or one for the row."""
_PLAIN = (date, time, timedelta, Decimal)
"""What ``str`` shows better than ``repr``."""


class RowTap:
    """The first ``limits.TAP_ROWS`` rows that one attempt writes for one edge since the tap was opened.

    The task thread alone puts rows in, and the loop alone takes them out.

    Args:
        wall: seconds since 1970.
    """

    __slots__ = ("_given", "_rows", "_wall")

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._rows: list[TappedFields] = []
        self._given = 0

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
                    "consumer": consumer,
                    "time": int(some.times[number]) if some.times is not None else None,
                    "key": _shown(keys[number]) if keys is not None else None,
                    "columns": columns,
                    "values": texts,
                }
            )

    def take(self) -> list[TappedFields]:
        """(Loop.) The rows since it was called last."""
        rows = self._rows[self._given :]
        self._given += len(rows)
        return rows


def _texts(payload: Any) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, if they are, and the texts of each row."""
    if isinstance(payload, list):
        return [], [[_shown(row)] for row in payload]
    names = payload.schema.names[: limits.TAP_COLUMNS_MAX]
    columns = [_column_texts(payload.column(number)) for number in range(len(names))]
    return names, [[texts[row] for texts in columns] for row in range(payload.num_rows)]


def _column_texts(column: Any) -> list[str]:
    try:
        return list(map(_value_text, column.to_pylist()))
    except Exception as error:  # of a type that has no values in Python, such as nanoseconds
        return [f"a {column.type} that cannot be shown: {described(error)}"] * len(column)


def _value_text(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return str(value)
    return "null" if value is None else _shown(value)


def _shown(value: Any) -> str:
    """Its repr, cut, and without what control messages and terminals do not take."""
    return clipped(preview(value, limits.TAP_VALUE_CHARS), limits.TAP_VALUE_CHARS + 1)
