"""A keyed stream cut into windows of event time: what can be computed for each key and window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minishuffle.dataflow.arguments import check_callable, check_late, checked_duration
from minishuffle.dataflow.bridges import refuse_column_method
from minishuffle.dataflow.operators.times import EventTime, LastMoment
from minishuffle.dataflow.stream import Stream, T
from minishuffle.dataflow.stream_base import SideOutput, StreamBase, late_of
from minishuffle.errors import UsageError

if TYPE_CHECKING:
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.late import LatePolicy
    from minishuffle.dataflow.operators.windows import OpenWindows

__all__ = ["Windowable", "WindowedStream", "Windowing"]

S = TypeVar("S")
"""The value that the rows of a key and window are folded into."""
W = TypeVar("W")
"""The windows of a stream or of a table."""


@dataclass(frozen=True, slots=True)
class Windowing:
    """How a stream or table is cut into windows; microseconds."""

    size: int
    late: LatePolicy
    lateness: int
    early: int
    time: EventTime

    @classmethod
    def of(
        cls,
        stream: StreamBase,
        size: timedelta,
        late: LatePolicy,
        allowed_lateness: timedelta,
        early: timedelta | None,
    ) -> Windowing:
        """As ``window`` was given it, checked."""
        micros = checked_duration(size, "window", positive=True)
        check_late(late)
        lateness = checked_duration(allowed_lateness, "window(allowed_lateness=...)")
        between = 0 if early is None else checked_duration(early, "window(early=...)", positive=True)
        if between >= micros:
            raise UsageError(f"window(early=...) takes a time below the window's size of {size}, not {early}")
        time = stream._needed_time("window needs the event time of the records")
        return cls(micros, late, lateness, between, time)

    def opened(self, stream: StreamBase, panes: SideOutput) -> tuple[OpenWindows, dict[str, SideOutput]]:
        """The windows, of which ``panes`` are put aside if there are any, and all their side outputs."""
        from minishuffle.dataflow.operators.windows import OpenWindows, Panes

        sides = {} if self.late != "side" else {"late": SideOutput.late_of(stream)}
        put = late_of(self.late, sides.get("late"))
        if self.lateness or self.early:
            sides["panes"] = panes
        shown = Panes(panes.tag if "panes" in sides else "", self.lateness, self.early)
        return OpenWindows(self.time, self.size, put, shown), sides


class Windowable(Generic[W]):
    """Records by key, which may be cut into windows."""

    __slots__ = ()

    def window(
        self,
        size: timedelta,
        *,
        late: LatePolicy = "drop",
        allowed_lateness: timedelta = timedelta(0),
        early: timedelta | None = None,
    ) -> W:
        """Cut the records of each key into tumbling windows of event time, aligned to 1970 UTC.

        A window's values go out when the watermark has reached its end. A record that comes after that is
        late: it is counted (``records_late``) and dropped, or with ``"side"`` put into the stream or table
        ``late`` of what follows, or with ``"fail"`` fails the task.

        Args:
            allowed_lateness: so much longer a window takes records, and keeps its values, which go out then.
                What they are at its end, and after each later record, is in ``panes`` of what follows.
            early: so often, in event time, what has changed in a window goes to ``panes`` before its end.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
        """
        return self._windowed(Windowing.of(self._unkeyed(), size, late, allowed_lateness, early))

    def _unkeyed(self) -> StreamBase:
        """The records before :meth:`key_by`."""
        raise NotImplementedError

    def _windowed(self, windowing: Windowing) -> W:
        """The records of each key cut so."""
        raise NotImplementedError


class WindowedStream(Generic[T]):
    """What :meth:`KeyedStream.window` gives; every method leads back to a :class:`Stream`.

    A window's values go out once, when the watermark has reached its end, or is ``allowed_lateness`` past it:
    (key, start of the window, value) tuples. Their event time is the window's last microsecond, so that they
    may be cut into windows again. In :attr:`Stream.panes` the tuples end in the pane and whether it is final.
    """

    __slots__ = ("_keyed", "_windowing")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_column_method(self, name)

    def __init__(self, keyed: KeyedStream[T], windowing: Windowing) -> None:
        self._keyed = keyed
        self._windowing = windowing

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._windowing.size / 1_000_000:g} s over {self._keyed!r}>"

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

        windows, sides = self._windowing.opened(self._keyed._stream, SideOutput.made("panes"))
        stream = self._keyed._on_rows(WindowRows(windows, create, add, on_error), label)
        stream._time, stream._sides = EventTime(fn=LastMoment(windows.size)), sides
        return stream
