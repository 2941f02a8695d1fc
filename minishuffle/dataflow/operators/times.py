"""Where a record's event time stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["EventTime"]


@dataclass(frozen=True, slots=True)
class EventTime:
    """A column, or a function of the row that gives a datetime or int microseconds; exactly one of both.

    ``shift`` (microseconds) is added to what stands there.
    """

    column: str | None = None
    fn: Callable[[Any], Any] | None = None
    shift: int = 0
