"""A keyed stream cut into windows of event time: what can be computed for each key and window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar

from minishuffle.dataflow.arguments import check_callable, check_late, checked_duration
from minishuffle.dataflow.bridges import refuse_column_method
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.stream import Stream, T
from minishuffle.dataflow.stream_base import SideOutput, StreamBase, late_of
from minishuffle.errors import UsageError
from minishuffle.limits import WINDOWS_PER_RECORD_MAX

if TYPE_CHECKING:
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.base import Operator
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.columns import Outputs
    from minishuffle.dataflow.operators.windowassigner import WindowAssigner
    from minishuffle.operators.event_time_operator import Late, LatePolicy
    from minishuffle.operators.sessions import Closing
    from minishuffle.operators.windows import Panes

__all__ = ["Windowable", "WindowedStream", "Windowing"]

Sides: TypeAlias = "dict[str, SideOutput]"
CalendarUnit: TypeAlias = Literal["month", "quarter", "year"]

DAYS_OF_MONTH: Final = timedelta(days=28)
"""Every month has so many."""
_MONTHS: Final = {"month": 1, "quarter": 3, "year": 12}

S = TypeVar("S")
"""The value that the rows of a key and window are folded into."""
W = TypeVar("W")
"""The windows of a stream or of a table."""


@dataclass(frozen=True, slots=True)
class Windowing:
    """How a stream or table is cut into windows; microseconds."""

    late: LatePolicy
    time: EventTime

    def on_rows(
        self,
        stream: StreamBase,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError,
    ) -> tuple[Operator, EventTime, Sides]:
        """The operator on rows, the event time of its results, and its side outputs."""
        raise NotImplementedError

    def on_columns(
        self, stream: StreamBase, keys: tuple[str, ...], outputs: Outputs, panes: SideOutput
    ) -> tuple[Operator, Sides]:
        """The operator on columns and its side outputs, ``panes`` among them if there are any."""
        raise NotImplementedError

    def _late(self, stream: StreamBase) -> tuple[Late, Sides]:
        """What becomes of late records, and the side output to which they go."""
        sides = {} if self.late != "side" else {"late": SideOutput.late_of(stream)}
        return late_of(self.late, sides.get("late")), sides


@dataclass(frozen=True, slots=True)
class TimeWindows(Windowing):
    """Windows that do not depend on the records."""

    size: str
    assigner: WindowAssigner
    lateness: int
    early: int

    def __str__(self) -> str:
        return self.size

    @classmethod
    def of(
        cls,
        stream: StreamBase,
        size: timedelta | CalendarUnit,
        slide: timedelta | None,
        offset: timedelta,
        tz: str | None,
        late: LatePolicy,
        allowed_lateness: timedelta,
        early: timedelta | None,
    ) -> TimeWindows:
        """As ``window`` was given it, checked."""
        begins = checked_duration(offset, "window(offset=...)")
        if isinstance(size, str):
            assigner, least, shown = _months(size, begins, tz, slide), DAYS_OF_MONTH, f"a {size}"
        else:
            micros = checked_duration(size, "window", positive=True)
            assigner = _sliding(micros, slide, begins) if tz is None else _days(size, begins, tz, slide)
            least, shown = size, f"{micros / 1_000_000:g} s"
        check_late(late)
        lateness = checked_duration(allowed_lateness, "window(allowed_lateness=...)")
        between = 0 if early is None else checked_duration(early, "window(early=...)", positive=True)
        if early is not None and early >= least:
            raise UsageError(
                f"window(early=...) takes a time below the window's size of {least}, not {early}"
            )
        time = stream._needed_time("window needs the event time of the records")
        return cls(late, time, shown, assigner, lateness, between)

    def on_rows(
        self,
        stream: StreamBase,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError,
    ) -> tuple[Operator, EventTime, Sides]:
        from minishuffle.dataflow.operators.windowassigner import LastMoment
        from minishuffle.operators.windows import WindowFold, WindowOperator

        late, shown, sides = self._aside(stream, SideOutput.made("panes"))
        values = WindowFold(self.assigner, add, create, shown)
        operator = WindowOperator(values, self.time, late, on_error)
        return operator, EventTime(fn=LastMoment(self.assigner)), sides

    def on_columns(
        self, stream: StreamBase, keys: tuple[str, ...], outputs: Outputs, panes: SideOutput
    ) -> tuple[Operator, Sides]:
        from minishuffle.operators.windows import WindowAggregation, WindowOperator

        late, shown, sides = self._aside(stream, panes)
        values = WindowAggregation(self.assigner, keys, outputs, shown)
        return WindowOperator(values, self.time, late), sides

    def _aside(self, stream: StreamBase, panes: SideOutput) -> tuple[Late, Panes, Sides]:
        """What becomes of late records, which values are shown before the last ones, and the side outputs to
        which both go."""
        from minishuffle.operators.windows import Panes

        late, sides = self._late(stream)
        if self.lateness or self.early:
            sides["panes"] = panes
        return late, Panes(panes.tag if "panes" in sides else "", self.lateness, self.early), sides


@dataclass(frozen=True, slots=True)
class SessionWindows(Windowing):
    """Windows that end a gap after the last record of a key, or with so many."""

    closing: Closing

    def __str__(self) -> str:
        if self.closing.is_by_time:
            return f"sessions with gaps of {self.closing.gap / 1_000_000:g} s"
        return f"windows of {self.closing.size:,} records"

    def on_rows(
        self,
        stream: StreamBase,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError,
    ) -> tuple[Operator, EventTime, Sides]:
        from minishuffle.operators.sessions import SessionFold, SessionOperator, last_of_session

        late, sides = self._late(stream)
        sessions = SessionFold(self.closing, add, create)
        operator = SessionOperator(sessions, self.time, late, on_error)
        return operator, EventTime(fn=last_of_session), sides

    def on_columns(
        self, stream: StreamBase, keys: tuple[str, ...], outputs: Outputs, panes: SideOutput
    ) -> tuple[Operator, Sides]:
        from minishuffle.operators.sessions import SessionAggregation, SessionOperator

        late, sides = self._late(stream)
        sessions = SessionAggregation(self.closing, keys, outputs)
        return SessionOperator(sessions, self.time, late), sides


def _sliding(size: int, slide: timedelta | None, offset: int) -> WindowAssigner:
    """Raises UsageError if windows would leave gaps, or a record be in too many."""
    from minishuffle.dataflow.operators.windowassigner import SlidingWindows

    between = size if slide is None else checked_duration(slide, "window(slide=...)", positive=True)
    if between > size:
        raise UsageError(
            f"window(slide=...) takes at most the window's size, so that no record is lost, not {slide}"
        )
    if size > between * WINDOWS_PER_RECORD_MAX:
        raise UsageError(
            f"window: each record would be in {-(-size // between):,} windows, and "
            f"{WINDOWS_PER_RECORD_MAX:,} are possible: raise slide= or make the windows smaller"
        )
    if offset >= between:
        raise UsageError("window(offset=...) takes a time below that from one window to the next")
    return SlidingWindows(size, between, offset)


def _days(size: timedelta, offset: int, tz: str, slide: timedelta | None) -> WindowAssigner:
    """Raises UsageError unless these are whole days of a time zone."""
    if size % timedelta(days=1):
        raise UsageError(
            "window(tz=...) takes a size of whole days, or 'month', 'quarter' or 'year': leave out tz= for "
            "windows of hours"
        )
    return _calendar(tz, offset, size, slide, days=size // timedelta(days=1))


def _months(size: str, offset: int, tz: str | None, slide: timedelta | None) -> WindowAssigner:
    """Raises UsageError unless these are months, quarters or years."""
    if size not in _MONTHS:
        raise UsageError(
            f"window takes a datetime.timedelta, or 'month', 'quarter' or 'year', not {size!r:.80}"
        )
    return _calendar("UTC" if tz is None else tz, offset, DAYS_OF_MONTH, slide, months=_MONTHS[size])


def _calendar(
    tz: str,
    offset: int,
    least: timedelta,
    slide: timedelta | None,
    *,
    days: int = 1,
    months: int = 0,
) -> WindowAssigner:
    """Windows on the clocks of a time zone, of ``least`` at least.

    Raises:
        UsageError: an argument does not go with them.
    """
    from minishuffle.dataflow.operators.windowassigner import CalendarWindows

    if slide is not None:
        raise UsageError(
            "window: days of a time zone, months, quarters and years follow each other: leave out slide="
        )
    if not isinstance(tz, str):
        raise UsageError(
            f"window(tz=...) takes the name of a time zone, such as 'Europe/Zurich', not {tz!r:.80}"
        )
    if timedelta(microseconds=offset) >= least:
        raise UsageError(
            f"window(offset=...) takes less than {24 * least.days} hours, the size of the shortest window"
        )
    windows = CalendarWindows(tz, days, months, offset)
    windows.check()
    return windows


class Windowable(Generic[W]):
    """Records by key, which may be cut into windows."""

    __slots__ = ()

    def window(
        self,
        size: timedelta | CalendarUnit,
        *,
        slide: timedelta | None = None,
        offset: timedelta = timedelta(0),
        tz: str | None = None,
        late: LatePolicy = "drop",
        allowed_lateness: timedelta = timedelta(0),
        early: timedelta | None = None,
    ) -> W:
        """Cut the records of each key into windows of event time, aligned to 1970 UTC: tumbling ones, or with
        ``slide`` overlapping ones.

        A window's values go out when the watermark has reached its end. A record all of whose windows have
        gone out is late: it is counted (``records_late``) and dropped, or with ``"side"`` put into the stream
        or table ``late`` of what follows, or with ``"fail"`` fails the task.

        Args:
            size: of each window; with "month", "quarter" and "year" windows are those of the calendar.
            slide: so long after a window the next one begins; each record is in all that have its time.
            offset: windows begin so much after 1970, and any number of slides before and after that. Those of
                ``tz``, or of months, begin when the clocks there show midnight and so much more: at the first
                moment after that if it is left out when they change, at the first of two. Below 28 days where
                the size is "month", "quarter" or "year".
            tz: windows are whole days of this time zone (or months and so on, which are otherwise those of
                UTC), whatever hours they have.
            allowed_lateness: so much longer a window takes records, and keeps its values, which go out then.
                What they are at its end, and after each later record, is in ``panes`` of what follows.
            early: so often, in event time, what has changed in a window goes to ``panes`` before its end.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
            UsageError: an argument is wrong, or does not go with another.
        """
        windowing = TimeWindows.of(self._unkeyed(), size, slide, offset, tz, late, allowed_lateness, early)
        return self._windowed(windowing)

    def session_window(self, gap: timedelta, *, late: LatePolicy = "drop") -> W:
        """Cut the records of each key into sessions: a record less than ``gap`` after another one is in the
        session of that one.

        A session's values go out when the watermark has reached its end, ``gap`` after its last record. A
        record is late if its time is not after the watermark, and treated as those of :meth:`window`.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
            UsageError: an argument is wrong.
        """
        from minishuffle.operators.sessions import Closing

        closing = Closing(checked_duration(gap, "session_window", positive=True))
        check_late(late)
        time = self._unkeyed()._needed_time("session_window needs the event time of the records")
        return self._windowed(SessionWindows(late, time, closing))

    def count_window(self, size: int, *, late: LatePolicy = "drop") -> W:
        """Cut the records of each key into windows of ``size`` records, in order of event time; those of one
        time as they came.

        A window's values go out when the watermark has reached its last record. Records of a key that are
        fewer when the data end make no window, and nothing of them goes out. A record is late if its time is
        not after the watermark, and treated as those of :meth:`window`.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
            UsageError: an argument is wrong.
        """
        from minishuffle.operators.sessions import Closing

        if type(size) is not int or size < 1:
            raise UsageError(f"count_window takes a whole number from 1 on, not {size!r:.80}")
        check_late(late)
        time = self._unkeyed()._needed_time("count_window needs the event time of the records")
        return self._windowed(SessionWindows(late, time, Closing.with_size(size)))

    def _unkeyed(self) -> StreamBase:
        """The records before :meth:`key_by`."""
        raise NotImplementedError

    def _windowed(self, windowing: Windowing) -> W:
        """The records of each key cut so."""
        raise NotImplementedError


class WindowedStream(Generic[T]):
    """What :meth:`KeyedStream.window` and :meth:`~KeyedStream.session_window` give; every method leads
    back to a :class:`Stream`.

    A window's values go out once, when the watermark has reached its end, or is ``allowed_lateness`` past it:
    (key, start of the window, value) tuples. Their event time is the window's last microsecond, so that they
    may be cut into windows again. In :attr:`Stream.panes` the tuples end in the pane and whether it is final.
    Sessions and windows of so many records give (key, start, end, value).
    """

    __slots__ = ("_keyed", "_windowing")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_column_method(self, name)

    def __init__(self, keyed: KeyedStream[T], windowing: Windowing) -> None:
        self._keyed = keyed
        self._windowing = windowing

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._windowing} over {self._keyed!r}>"

    def count(self) -> Stream[Any]:
        """The number of records of each key and window."""
        from minishuffle.operators.windows import one_more

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
        operator, time, sides = self._windowing.on_rows(self._keyed._stream, create, add, on_error)
        stream = self._keyed._on_rows(operator, label)
        stream._time, stream._sides = time, sides
        return stream
