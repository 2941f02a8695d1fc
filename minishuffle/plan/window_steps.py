"""Steps on the records of a key and a window of event time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo

from minishuffle.errors import UsageError
from minishuffle.limits import WINDOWS_PER_RECORD_MAX
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.arguments import check_callable, check_late, check_on_error, checked_duration
from minishuffle.plan.keyed_steps import Aggregates, check_aggregates
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import Known, Needed, Node, ObjectSchema, Schema, Step
from minishuffle.plan.schemas import aggregated_schema, check_result
from minishuffle.plan.sides import late_records

if TYPE_CHECKING:
    from minishuffle.operators.chained import OnError
    from minishuffle.operators.event_time_operator import LatePolicy
    from minishuffle.operators.sessions import Closing
    from minishuffle.operators.window_assigner import WindowAssigner

__all__ = [
    "CalendarUnit",
    "SessionWindows",
    "TimeWindows",
    "WindowAggregateStep",
    "WindowFoldStep",
    "Windowing",
]

CalendarUnit: TypeAlias = Literal["month", "quarter", "year"]

DAYS_OF_MONTH: Final = timedelta(days=28)
"""Every month has so many."""
_MONTHS: Final = {"month": 1, "quarter": 3, "year": 12}
_DURATIONS: Final = {"minute": "minutes=1", "hour": "hours=1", "day": "days=1", "week": "days=7"}
"""What to write for units that are no size."""


@dataclass(frozen=True)
class Windowing:
    """How the records of a key are cut into windows, and what becomes of late ones; microseconds."""

    late: LatePolicy
    kind: ClassVar[str]
    """Begins the kind of the operator: "windows" or "sessions"."""

    @property
    def zone(self) -> str:
        """The time zone in which their start and end are shown."""
        return "UTC"

    @property
    def shows_panes(self) -> bool:
        """Whether values also go to a side output before they are final."""
        return False

    def last_moment(self) -> Callable[[Any], Any]:
        """The event time of a row that windows give."""
        raise NotImplementedError

    def parameters(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Parameters of the operator that are not about its values."""
        raise NotImplementedError


@dataclass(frozen=True)
class TimeWindows(Windowing):
    """Windows that do not depend on the records. ``lateness`` longer they take records; each ``early`` (0:
    never) of event time they show what has changed."""

    size: str
    assigner: WindowAssigner
    lateness: int
    early: int
    kind: ClassVar[str] = "windows"

    def __str__(self) -> str:
        return self.size

    @classmethod
    def of(
        cls,
        given: Known,
        size: timedelta | CalendarUnit,
        *,
        slide: timedelta | None,
        offset: timedelta,
        tz: str | ZoneInfo | None,
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
        given.needed_time("window needs the event time of the records")
        return cls(late, shown, assigner, lateness, between)

    @property
    def zone(self) -> str:
        return self.assigner.zone

    @property
    def shows_panes(self) -> bool:
        return bool(self.lateness or self.early)

    def last_moment(self) -> Callable[[Any], Any]:
        from minishuffle.operators.window_assigner import LastMoment

        return LastMoment(self.assigner)

    def parameters(self, tags: Mapping[str, str]) -> dict[str, Any]:
        return {
            "assigner": self.assigner,
            "late": (self.late, tags.get("late", "")),
            "panes": (tags.get("panes", ""), self.lateness, self.early),
        }


@dataclass(frozen=True)
class SessionWindows(Windowing):
    """Windows that end a gap after the last record of a key, or with so many."""

    closing: Closing
    kind: ClassVar[str] = "sessions"

    def __str__(self) -> str:
        return str(self.closing)

    @classmethod
    def with_gap(cls, given: Known, gap: timedelta, late: LatePolicy) -> SessionWindows:
        """As ``session_window`` was given them, checked."""
        from minishuffle.operators.sessions import Closing

        closing = Closing(checked_duration(gap, "session_window", positive=True))
        check_late(late)
        given.needed_time("session_window needs the event time of the records")
        return cls(late, closing)

    @classmethod
    def with_size(cls, given: Known, size: int, late: LatePolicy) -> SessionWindows:
        """As ``count_window`` was given them, checked."""
        from minishuffle.operators.sessions import Closing

        if type(size) is not int or size < 1:
            raise UsageError(f"count_window takes a whole number from 1 on, not {size!r:.80}")
        check_late(late)
        given.needed_time("count_window needs the event time of the records")
        return cls(late, Closing.with_size(size))

    def last_moment(self) -> Callable[[Any], Any]:
        from minishuffle.operators.sessions import last_of_session

        return last_of_session

    def parameters(self, tags: Mapping[str, str]) -> dict[str, Any]:
        return {"closing": self.closing, "late": (self.late, tags.get("late", ""))}


def _sliding(size: int, slide: timedelta | None, offset: int) -> WindowAssigner:
    """Raises UsageError if windows would leave gaps, or a record be in too many."""
    from minishuffle.operators.window_assigner import SlidingWindows

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


def _days(size: timedelta, offset: int, tz: str | ZoneInfo, slide: timedelta | None) -> WindowAssigner:
    """Raises UsageError unless these are whole days of a time zone."""
    if size % timedelta(days=1):
        raise UsageError(
            "window(tz=...) takes a size of whole days, or 'month', 'quarter' or 'year': leave out tz= for "
            "windows of hours"
        )
    return _calendar(tz, offset, size, slide, days=size // timedelta(days=1))


def _months(size: str, offset: int, tz: str | ZoneInfo | None, slide: timedelta | None) -> WindowAssigner:
    """Raises UsageError unless these are months, quarters or years."""
    if size not in _MONTHS:
        way = f": write timedelta({_DURATIONS[size]})" if size in _DURATIONS else ""
        raise UsageError(
            f"window takes a datetime.timedelta, or 'month', 'quarter' or 'year', not {size!r:.80}{way}"
        )
    return _calendar("UTC" if tz is None else tz, offset, DAYS_OF_MONTH, slide, months=_MONTHS[size])


def _calendar(
    tz: str | ZoneInfo,
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
    from minishuffle.operators.window_assigner import CalendarWindows

    if slide is not None:
        raise UsageError(
            "window: days of a time zone, months, quarters and years follow each other: leave out slide="
        )
    zone = tz.key if isinstance(tz, ZoneInfo) else tz
    if not isinstance(zone, str):
        raise UsageError(
            f"window(tz=...) takes the name of a time zone, such as 'Europe/Zurich', not {tz!r:.80}"
        )
    if timedelta(microseconds=offset) >= least:
        raise UsageError(
            f"window(offset=...) takes less than {24 * least.days} hours, the size of the shortest window"
        )
    windows = CalendarWindows(zone, days, months, offset)
    windows.check()
    return windows


class WindowStep(Step):
    """Values of each key's windows, with their side outputs. Subclasses are dataclasses with these fields."""

    given: Known
    windowing: Windowing
    has_state: ClassVar[bool] = True

    @property
    def _pane(self) -> Schema:
        """The schema of panes."""
        raise NotImplementedError

    @cached_property
    def sides(self) -> Mapping[str, Known]:
        panes = {"panes": Known(self._pane)} if self.windowing.shows_panes else {}
        return {**late_records(self.windowing.late, late=self.given), **panes}

    @property
    def must_be_read(self) -> frozenset[str]:
        return frozenset(self.sides) - {"panes"}


@dataclass(frozen=True, eq=False)
class WindowFoldStep(WindowStep):
    """One Python value for each key and window: ``create`` makes it (None: the first row is it), and ``add``
    brings it forward."""

    given: Known
    windowing: Windowing
    name: str
    create: Callable[[], Any] | None
    add: Callable[[Any, Any], Any]
    on_error: OnError = "fail"

    def __post_init__(self) -> None:
        method = self.name.removeprefix("window_")
        if self.create is not None:
            check_callable(self.create, method)
        check_callable(self.add, method)
        check_on_error(self.on_error)

    @property
    def label(self) -> str:
        return self.name

    @cached_property
    def gives(self) -> Known:
        return Known(ObjectSchema(), EventTime(fn=self.windowing.last_moment()))

    @property
    def _pane(self) -> Schema:
        return ObjectSchema()

    def needs(self, wanted: Needed, input: int) -> Needed:
        time = self.given.time
        return Needed(None, times=time is not None and time.is_beside)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            **self.windowing.parameters(tags),
            "time": self.given.time,
            "create": self.create,
            "fn": self.add,
            "on_error": self.on_error,
        }
        return OperatorSpec(f"{self.windowing.kind}_of_rows", parameters)


@dataclass(frozen=True, eq=False)
class WindowAggregateStep(WindowStep):
    """Columns of each key's and window's rows. ``columns`` None: the number of rows."""

    given: Known
    keys: tuple[str, ...]
    windowing: Windowing
    columns: Aggregates | None

    @property
    def label(self) -> str:
        return "window_count" if self.columns is None else "window_aggregate"

    @property
    def _columns(self) -> Aggregates:
        return {"count": (self.keys[0], "count")} if self.columns is None else self.columns

    def __post_init__(self) -> None:
        from minishuffle.operators.aggregates import outputs_of
        from minishuffle.operators.windows import PANE_NAMES

        if self.columns is not None:
            check_aggregates(self.columns, self.given)
        outputs_of(self._columns, self.given.time)  # type: ignore[arg-type]
        self.gives  # noqa: B018 - finds types that cannot be aggregated so
        panes = PANE_NAMES if self.windowing.shows_panes else ()
        check_result([*self.keys, "window_start", "window_end", *self._columns, *panes])

    @cached_property
    def gives(self) -> Known:
        schema = aggregated_schema(self.given.arrow, self.keys, self._columns, windows_in=self.windowing.zone)
        return Known(schema, EventTime(column="window_end", shift=-1))

    @property
    def _pane(self) -> Schema:
        from minishuffle.operators.windows import with_panes

        return with_panes(self.gives.arrow)

    def needs(self, wanted: Needed, input: int) -> Needed:
        time = self.given.time
        assert time is not None
        columns = (column for column, _ in self._columns.values())
        return wanted.only(*self.keys, time.column, *columns).timed(time.is_beside)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            **self.windowing.parameters(tags),
            "time": self.given.time,
            "keys": self.keys,
            "columns": None if self.columns is None else dict(self.columns),
        }
        return OperatorSpec(f"{self.windowing.kind}_of_columns", parameters)
