"""A keyed stream cut into windows of event time: what can be computed for each key and window."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minishuffle.dataflow.arguments import check_callable, check_late
from minishuffle.dataflow.bridges import refuse_column_method
from minishuffle.dataflow.operators.times import EventTime, LastMoment
from minishuffle.dataflow.stream import Stream, T
from minishuffle.dataflow.stream_base import SideOutput, late_of

if TYPE_CHECKING:
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.late import LatePolicy

__all__ = ["WindowedStream"]

S = TypeVar("S")
"""The value that the rows of a key and window are folded into."""


class WindowedStream(Generic[T]):
    """What :meth:`KeyedStream.window` gives; every method leads back to a :class:`Stream`.

    A window's values go out once, when the watermark has reached its end: (key, start of the window, value)
    tuples. Their event time is the window's last microsecond, so that they may be cut into windows again.
    """

    __slots__ = ("_keyed", "_late", "_size", "_time")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_column_method(self, name)

    def __init__(self, keyed: KeyedStream[T], size: int, late: LatePolicy) -> None:
        check_late(late)
        self._keyed = keyed
        self._size = size
        self._late = late
        self._time = keyed._stream._needed_time("window needs the records' event time")

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._size / 1_000_000:g} s over {self._keyed!r}>"

    def count(self) -> Stream[Any]:
        """The number of records of each key and window."""
        from minishuffle.dataflow.operators.windowrows import one_more

        return self._on_rows("window_count", int, one_more)

    def reduce(self, fn: Callable[[T, T], T], *, on_error: OnError = "fail") -> Stream[tuple[Any, Any, T]]:
        """Combine the rows of each key and window: ``fn(value, row)``; the first row is the first value."""
        check_callable(fn, "reduce")
        return self._on_rows("window_reduce", None, fn, on_error)

    def fold(
        self, create: Callable[[], S], add: Callable[[S, T], S], *, on_error: OnError = "fail"
    ) -> Stream[tuple[Any, Any, S]]:
        """Any Python value: ``create()`` makes it, ``add(value, row)`` returns the next one."""
        check_callable(create, "fold")
        check_callable(add, "fold")
        return self._on_rows("window_fold", create, add, on_error)

    # --- making nodes ----------------------------------------------------------------------------

    def _on_rows(
        self,
        label: str,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError = "fail",
    ) -> Stream[Any]:
        from minishuffle.dataflow.operators.windowrows import WindowRows
        from minishuffle.dataflow.operators.windows import OpenWindows

        sides = {} if self._late != "side" else {"late": SideOutput.late_of(self._keyed._stream)}
        windows = OpenWindows(self._time, self._size, late_of(self._late, sides.get("late")))
        stream = self._keyed._on_rows(WindowRows(windows, create, add, on_error), label)
        stream._time, stream._sides = EventTime(fn=LastMoment(self._size)), sides
        return stream
