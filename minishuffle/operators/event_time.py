"""Where a record's event time stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["BESIDE", "EVENT_TIME", "EventTime"]

EVENT_TIME: Final = "__event_time"
"""The column of event times for functions that ask for it: see :meth:`Table.map_batches`."""


@dataclass(frozen=True, slots=True)
class EventTime:
    """A column, or a function of the row that gives a datetime or int microseconds; or it is beside the rows,
    in ``Batch.times``. At most one of the three.

    ``shift`` (microseconds) is added to what stands there. With ``each`` a watermark follows each record, and
    the order of its producer's records alone says which of them is late.
    """

    column: str | None = None
    fn: Callable[[Any], Any] | None = None
    shift: int = 0
    each: bool = field(default=False, compare=False)
    is_beside: bool = False

    @property
    def is_none(self) -> bool:
        """Whether there is no time at all, as in joins of bounded data."""
        return self.column is None and self.fn is None and not self.is_beside

    def beside(self) -> EventTime:
        """Where it stands once batches have it beside their rows."""
        return EventTime(is_beside=True, each=self.each)


BESIDE: Final = EventTime(is_beside=True)
