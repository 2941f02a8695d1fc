"""Steps that bring two inputs together: interval joins, as-of joins and look-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.operators.event_time import BESIDE, EventTime
from minishuffle.plan.arguments import check_columns, check_late, checked_duration
from minishuffle.plan.exchange_steps import exchanged
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import (
    Exchange,
    Known,
    Needed,
    Node,
    ObjectSchema,
    Relation,
    Step,
    inputs_first,
    running,
)
from minishuffle.plan.sides import late_records
from minishuffle.plan.standstill import check_waits

if TYPE_CHECKING:
    from minishuffle.operators.event_time_operator import LatePolicy
    from minishuffle.operators.join_columns import JoinColumns
    from minishuffle.operators.join_inputs import Bounds, How

__all__ = [
    "Apart",
    "AsOfStep",
    "Interval",
    "JoinColumnsStep",
    "JoinRowsStep",
    "LookUpColumnsStep",
    "LookUpRowsStep",
    "On",
    "column_pairs",
    "look_up",
]


HOWS: Final = ("inner", "left", "right", "full", "semi", "anti")
On: TypeAlias = str | Sequence[str] | Mapping[str, str]
"""Columns of one name on both sides, or the small side's name by the other's."""
NO_TIMES: Final = (EventTime(), EventTime())


class Apart(NamedTuple):
    """How far the event times of both records may be apart: ``within``, or ``before`` and ``after`` the left
    one."""

    within: timedelta | None = None
    before: timedelta | None = None
    after: timedelta | None = None


@dataclass(frozen=True)
class Interval:
    """What an interval join goes by: its bounds, where the event times of both sides stand, and what becomes
    of late records."""

    bounds: Bounds
    times: tuple[EventTime, EventTime]
    late: LatePolicy

    @classmethod
    def of(
        cls, left: Relation, right: Relation, apart: Apart, late: LatePolicy, method: str = "join"
    ) -> Interval:
        """As ``method`` was given it, checked.

        Neither side need have event time if both have an end: all records of a key match then, if nothing is
        said of how far they may be apart.

        Raises:
            InvalidGraph: only one side has event time, or neither, and a side has no end or there is a bound.
            UsageError: another argument is wrong.
        """
        from minishuffle.operators.join_inputs import Bounds

        check_late(late)
        both = timedelta(0) if apart.within is None else apart.within
        checked_duration(both, "join(within=...)")
        bounds = Bounds(
            checked_duration(both if apart.before is None else apart.before, "join(before=...)"),
            checked_duration(both if apart.after is None else apart.after, "join(after=...)"),
        )
        is_bound = any(each is not None for each in apart)
        timeless = left.gives.time is None and right.gives.time is None
        if timeless and not is_bound and left.bounded and right.bounded:
            return cls(bounds, NO_TIMES, late)
        needed = method + " needs the event time of both sides, and the {} one has none"
        times = (
            left.gives.needed_time(needed.format("left")),
            right.gives.needed_time(needed.format("right")),
        )
        return cls(bounds, times, late)

    def needs(self, input: int) -> Needed:
        """All columns of an input, and its times if they are beside the records."""
        return Needed(None, times=self.times[input].is_beside)

    def parameters(self, node: Node, tags: Mapping[str, str]) -> dict[str, Any]:
        """Parameters of an operator that joins so."""
        late = tuple((self.late, tags.get(name, "")) for name in ("late", "late_right"))
        return {"times": self.times, "late": late, "gives_times": node.needed.times}


def check_how(how: Any) -> None:
    """Raises UsageError unless it is a kind of join."""
    if how not in HOWS:
        raise UsageError(f"how is {how!r}: write one of {', '.join(map(repr, HOWS))}")


def _check_keys(method: str, left: Sequence[str] | None, right: Sequence[str] | None) -> None:
    """Raises UsageError if the keys have different numbers of columns."""
    if left is not None and right is not None and len(left) != len(right):
        raise UsageError(
            f"{method}: the left key is ({', '.join(left)}) and the right one ({', '.join(right)}): give "
            "both key_by() the same number of columns"
        )


def _check_suffix(suffix: Any) -> None:
    if not isinstance(suffix, str) or not suffix:
        raise UsageError(f"suffix is {suffix!r:.80}: give a text such as '_right'")


class TimedJoinStep(Step):
    """Joins two inputs by key and event time. Subclasses are dataclasses with these fields."""

    left: Known
    right: Known
    interval: Interval
    has_state = True

    @cached_property
    def sides(self) -> Mapping[str, Known]:
        return late_records(self.interval.late, late=self.left, late_right=self.right)

    @property
    def must_be_read(self) -> frozenset[str]:
        return frozenset(self.sides)


@dataclass(frozen=True, eq=False)
class JoinRowsStep(TimedJoinStep):
    """Pairs of records of one key whose event times are near each other."""

    left: Known
    right: Known
    keys: tuple[Sequence[str] | None, Sequence[str] | None]
    how: How
    interval: Interval
    label: ClassVar[str] = "join"

    def __post_init__(self) -> None:
        check_how(self.how)
        _check_keys("join", *self.keys)

    @cached_property
    def gives(self) -> Known:
        from minishuffle.operators.join_results import JoinedTime, gives_times

        times = self.interval.times
        time: EventTime | None = EventTime(fn=JoinedTime(*times))
        if times[0].is_none:
            time = None
        elif gives_times(self.how, times):
            time = BESIDE
        elif self.how in ("semi", "anti"):
            time = self.left.time
        return Known(ObjectSchema(), time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return self.interval.needs(input)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "how": self.how,
            "bounds": tuple(self.interval.bounds),
            **self.interval.parameters(node, tags),
        }
        return OperatorSpec("join_rows", parameters)


@dataclass(frozen=True, eq=False)
class JoinColumnsStep(TimedJoinStep):
    """Pairs of rows of one key whose event times are near each other, in columns of both."""

    left: Known
    right: Known
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    how: How
    interval: Interval
    suffix: str = "_right"
    label: ClassVar[str] = "join"

    def __post_init__(self) -> None:
        check_how(self.how)
        _check_keys(self.label, *self.keys)
        _check_suffix(self.suffix)
        self._columns.check_keys(self.left.arrow, self.right.arrow)
        self.gives  # noqa: B018 - two columns may have one name

    @cached_property
    def _columns(self) -> JoinColumns:
        from minishuffle.operators.join_columns import JoinColumns

        return JoinColumns(*self.keys, self.how, self.suffix)

    @cached_property
    def gives(self) -> Known:
        schema = self._columns.result(self.left.arrow, self.right.arrow)
        return Known(schema, self._time())

    def _time(self) -> EventTime | None:
        """Times that are keys of each other are equal: a function of batches is shown the one there."""
        if self.interval.times[0].is_none:
            return None
        own = self.left.time_column, self.right.time_column
        both = [one for one, other in zip(*self.keys, strict=True) if (one, other) == own]
        return EventTime(column=both[0]) if both else BESIDE

    def needs(self, wanted: Needed, input: int) -> Needed:
        return _joined_needs(self._columns, wanted, input, (self.left, self.right), self.interval)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "keys": self.keys,
            "how": self.how,
            "suffix": self.suffix,
            "schemas": (self.left.arrow, self.right.arrow),
            "takes": _takes(node),
            "bounds": tuple(self.interval.bounds),
            **self.interval.parameters(node, tags),
        }
        return OperatorSpec("join_columns", parameters)


@dataclass(frozen=True, eq=False)
class AsOfStep(TimedJoinStep):
    """Each left row with the latest right one of its key that is not after it, at most ``tolerance``
    (microseconds) before it."""

    left: Known
    right: Known
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    tolerance: int | None
    interval: Interval
    suffix: str = "_right"
    label: ClassVar[str] = "asof_join"

    def __post_init__(self) -> None:
        _check_keys("asof_join", *self.keys)
        _check_suffix(self.suffix)
        self._columns.check_keys(self.left.arrow, self.right.arrow)
        self.gives  # noqa: B018 - two columns may have one name

    @cached_property
    def _columns(self) -> JoinColumns:
        from minishuffle.operators.asof_join import AsOfColumns

        return AsOfColumns(*self.keys, self.suffix)

    @cached_property
    def gives(self) -> Known:
        return Known(self._columns.result(self.left.arrow, self.right.arrow), BESIDE)

    def needs(self, wanted: Needed, input: int) -> Needed:
        if input:  # Which of several right rows is taken goes by all of their columns.
            return self.interval.needs(input)
        return _joined_needs(self._columns, wanted, input, (self.left, self.right), self.interval)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "keys": self.keys,
            "suffix": self.suffix,
            "tolerance": self.tolerance,
            "schemas": (self.left.arrow, self.right.arrow),
            "takes": _takes(node),
            **self.interval.parameters(node, tags),
        }
        return OperatorSpec("asof_join", parameters)


def _joined_needs(
    columns: JoinColumns,
    wanted: Needed,
    input: int,
    sides: tuple[Known, Known],
    interval: Interval | None = None,
) -> Needed:
    """What is read of one side of a join: its keys, the column of its event times, what is wanted of it."""
    left, right = (side.arrow.names for side in sides)
    times = NO_TIMES if interval is None else interval.times
    reads = columns.fix(left, right, times)
    return Needed(reads(wanted.columns, input), times[input].is_beside)


def _takes(node: Node) -> dict[int, tuple[str, ...] | None]:
    return {input: None if names is None else tuple(sorted(names)) for input, names in node.takes.items()}


# --- look-ups -------------------------------------------------------------------------------------

BIG, SMALL = 0, 1


@dataclass(frozen=True, eq=False)
class LookUpRowsStep(Step):
    """Each record of the big side with the records of the small side whose columns are equal."""

    left: Known
    right: Known
    pairs: Mapping[str, str]
    is_left: bool
    label: ClassVar[str] = "broadcast_join"
    follows: ClassVar[bool] = True
    has_state: ClassVar[bool] = True
    first_input: ClassVar[int | None] = SMALL

    @cached_property
    def gives(self) -> Known:
        from minishuffle.operators.broadcast_join import BroadcastColumns

        big, small = self.left.columns, self.right.columns
        names: tuple[str, ...] | None = None
        if big is not None and small is not None:
            keys = tuple(self.pairs), tuple(self.pairs.values())
            names = tuple(BroadcastColumns(*keys, is_left=self.is_left).names(big, small))
        return Known(ObjectSchema(names), self.left.time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return Needed(None, wanted.times and input == BIG)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        keys = tuple(self.pairs), tuple(self.pairs.values())
        parameters = {"keys": keys, "is_left": self.is_left, "names": self.right.columns}
        return OperatorSpec("look_up_rows", parameters)


@dataclass(frozen=True, eq=False)
class LookUpColumnsStep(Step):
    """The same of columns."""

    left: Known
    right: Known
    pairs: Mapping[str, str]
    is_left: bool
    suffix: str = "_right"
    label: ClassVar[str] = "broadcast_join"
    follows: ClassVar[bool] = True
    has_state: ClassVar[bool] = True
    first_input: ClassVar[int | None] = SMALL

    def __post_init__(self) -> None:
        _check_suffix(self.suffix)
        self._columns.check_keys(self.left.arrow, self.right.arrow)
        self.gives  # noqa: B018 - two columns may have one name

    @cached_property
    def _columns(self) -> JoinColumns:
        from minishuffle.operators.broadcast_join import BroadcastColumns

        keys = tuple(self.pairs), tuple(self.pairs.values())
        return BroadcastColumns(*keys, is_left=self.is_left, suffix=self.suffix)

    @cached_property
    def gives(self) -> Known:
        return Known(self._columns.result(self.left.arrow, self.right.arrow), self.left.time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        needed = _joined_needs(self._columns, wanted, input, (self.left, self.right))
        return needed.timed(wanted.times and input == BIG)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "keys": (tuple(self.pairs), tuple(self.pairs.values())),
            "is_left": self.is_left,
            "suffix": self.suffix,
            "schemas": (self.left.arrow, self.right.arrow),
            "takes": _takes(node),
        }
        return OperatorSpec("look_up_columns", parameters)


def look_up(big: Relation, small: Relation, step: Step) -> Relation:
    """What a look-up gives: the small side goes to each subtask, and is read to its end first.

    Raises:
        InvalidGraph: the small side has no end, its subtasks are chosen, or a source would wait for itself.
    """
    for side in (big, small):
        side.check_open("broadcast_join")
    if not small.bounded:
        raise InvalidGraph(
            "broadcast_join reads the small side to its end first, and it has none: bound its source, or use "
            "key_by(...).join(...)"
        )
    if any(feed.is_chosen for feed in small.feeds):
        raise InvalidGraph(
            "broadcast_join sends the small side to every subtask: leave out the choice before it"
        )
    joined = Relation.of(step, big, exchanged(small, Exchange("broadcast")).at(SMALL))
    check_waits(running(inputs_first([joined.node])))
    return joined


def column_pairs(on: On, how: Any, big: Known, small: Known) -> dict[str, str]:
    """The small side's columns by the big side's.

    Raises:
        UsageError: these are no columns, or there is no such look-up.
        UnknownName: a side has no such column.
    """
    if how not in ("inner", "left"):
        raise UsageError(f"how is {how!r}: write 'inner' or 'left'")
    pairs = _pairs(on)
    for here, there in pairs.items():
        way = _named_apart(here, there, big.columns or (), small.columns or ())
        check_columns([here], big.columns, "broadcast_join", way)
        check_columns([there], small.columns, "broadcast_join, small side", way)
    return pairs


def _named_apart(here: str, there: str, big: Sequence[str], small: Sequence[str]) -> str:
    """What to write if one of the two is no column of its side."""
    if here in small and there in big:
        return f": the column of this side comes first: write on={{{there!r}: {here!r}}}"
    if here in big:
        return f": where the small side names it differently write on={{{here!r}: COLUMN}}, with its COLUMN"
    if there in small:
        return f": where this side names it differently write on={{COLUMN: {there!r}}}, with its COLUMN"
    return ""


def _pairs(on: On) -> dict[str, str]:
    if isinstance(on, str):
        return {on: on}
    pairs = dict(on) if isinstance(on, Mapping) else None
    if pairs is None and isinstance(on, list | tuple):
        pairs = {name: name for name in on}
        if len(pairs) < len(on):
            raise UsageError(f"broadcast_join names a column twice: {', '.join(map(str, on))}")
    if not pairs or not all(isinstance(name, str) for name in (*pairs, *pairs.values())):
        raise UsageError(
            f"broadcast_join takes on='column', a list of columns, or a dict of the columns of this stream "
            f"to those of the small one, not {on!r:.80}"
        )
    return pairs
