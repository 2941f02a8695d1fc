"""Two streams become one: the joins behind :meth:`KeyedStream.join` and :meth:`Stream.broadcast_join`, and
what those of tables check in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from minishuffle.dataflow.arguments import check_columns, check_late, checked_duration
from minishuffle.dataflow.bridges import refuse_mixture
from minishuffle.dataflow.drafts import draft_in
from minishuffle.dataflow.nodes import Exchange, Feed, Node, Reads, inputs_first
from minishuffle.dataflow.operators.base import Operator
from minishuffle.dataflow.operators.times import BESIDE, EventTime
from minishuffle.dataflow.standstill import check_waits
from minishuffle.dataflow.stream import Stream
from minishuffle.dataflow.stream_base import Feeds, SideOutput, StreamBase, late_of
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.operators.event_time_operator import Late, LatePolicy
    from minishuffle.operators.join_inputs import Bounds, How

__all__ = ["Apart", "On", "broadcast_join", "interval_join", "interval_of", "look_up_feeds", "look_up_node"]


HOWS: Final = ("inner", "left", "right", "full", "semi", "anti")
On: TypeAlias = str | Sequence[str] | Mapping[str, str]
"""Columns of one name on both sides, or the small side's name by the other's."""
Keys: TypeAlias = Sequence[str] | None


class Interval(NamedTuple):
    """What an interval join was given: its bounds, and of both sides where event times stand and what becomes
    of late records."""

    bounds: Bounds
    times: tuple[EventTime, EventTime]
    late: tuple[Late, Late]
    sides: dict[str, SideOutput]


Apart: TypeAlias = timedelta | None


def interval_of(
    inputs: tuple[StreamBase, StreamBase],
    keys: tuple[Keys, Keys],
    how: How,
    apart: tuple[Apart, Apart, Apart],
    late: LatePolicy,
    method: str = "join",
) -> Interval:
    """``apart`` are ``within``, ``before`` and ``after``; see :func:`interval_join`."""
    from minishuffle.operators.join_inputs import Bounds

    left, right = inputs
    if how not in HOWS:
        raise UsageError(f"how is {how!r}: write one of {', '.join(map(repr, HOWS))}")
    check_late(late)
    within, before, after = apart
    both = timedelta(0) if within is None else within
    checked_duration(both, "join(within=...)")
    bounds = Bounds(
        checked_duration(both if before is None else before, "join(before=...)"),
        checked_duration(both if after is None else after, "join(after=...)"),
    )
    times = _times_of(left, right, method, is_bound=any(each is not None for each in apart))
    left_keys, right_keys = keys
    if left_keys is not None and right_keys is not None and len(left_keys) != len(right_keys):
        raise UsageError(
            f"{method}: the left key is ({', '.join(left_keys)}) and the right one "
            f"({', '.join(right_keys)}): give both key_by() the same number of columns"
        )
    sides = {}
    if late == "side":
        sides = {"late": SideOutput.late_of(left), "late_right": SideOutput.late_of(right)}
    put = (late_of(late, sides.get("late")), late_of(late, sides.get("late_right")))
    return Interval(bounds, times, put, sides)


def _times_of(
    left: StreamBase, right: StreamBase, method: str, *, is_bound: bool
) -> tuple[EventTime, EventTime]:
    """Where the event times of both sides stand. Neither need have any if both have an end: all records of a
    key match then, if nothing is said of how far they may be apart.

    Raises:
        InvalidGraph: only one side has event time, or neither, and a side has no end or there is a bound.
    """
    is_bounded = all(feed.node.bounded for feed in (*left._feeds, *right._feeds))
    if left._time is None and right._time is None and is_bounded and not is_bound:
        return EventTime(), EventTime()
    needed = method + " needs the event time of both sides, and the {} one has none"
    return left._needed_time(needed.format("left")), right._needed_time(needed.format("right"))


def interval_join(
    left: KeyedStream[Any],
    right: KeyedStream[Any],
    how: How = "inner",
    apart: tuple[Apart, Apart, Apart] = (None, None, None),
    late: LatePolicy = "drop",
) -> Stream[Any]:
    """See :meth:`KeyedStream.join`; ``apart`` are ``within``, ``before`` and ``after``.

    Raises:
        InvalidGraph: a stream has no event time, and one has no end.
        UsageError: another argument is wrong, or the keys have different numbers of columns.
    """
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.operators.interval_join import IntervalJoin
    from minishuffle.operators.join_results import JoinedTime, RowResults, gives_times

    draft: Stream[Any] | None = draft_in([right])
    if draft is not None:
        return draft
    if not isinstance(right, KeyedStream):
        refuse_mixture("join", "KeyedStream", right)
    interval = interval_of((left._stream, right._stream), (left._keys, right._keys), how, apart, late)
    times = interval.times
    operator = IntervalJoin(RowResults(how), interval.bounds, times, interval.late)
    node = Node(operator.name, (*left._rows_by_key(), *right._rows_by_key(1)), operators=(operator,))
    time: EventTime | None = EventTime(fn=JoinedTime(*times))
    if times[0].is_none:
        time = None
    elif gives_times(how, times):
        time = BESIDE
    elif how in ("semi", "anti"):
        time = left._stream._time
    return Stream((Feed(node),), time=time, sides=interval.sides)


def broadcast_join(big: Stream[Any], small: Stream[Any], on: On, how: str = "inner") -> Stream[Any]:
    """Each record of ``big`` with the records of ``small`` whose columns ``on`` are equal.

    ``small`` is read to its end first and kept whole in every subtask; then ``big`` streams through
    where it is. Rows are dicts: what comes has the columns of ``big`` and the other ones of ``small``, with
    ``_right`` after a name that ``big`` has. With ``"left"`` a record without a partner goes out with None.
    Event time and watermarks are those of ``big``.

    Raises:
        InvalidGraph: ``small`` has no end, or both read one source, which would wait for itself.
        UsageError: an argument is wrong.
        UnknownName: a stream's columns are known, and one of ``on`` is not among them.
    """
    from minishuffle.operators.broadcast_join import BroadcastColumns, BroadcastJoin, SmallRows

    draft: Stream[Any] | None = draft_in([small])
    if draft is not None:
        return draft
    if not isinstance(small, Stream):
        refuse_mixture("broadcast_join", "Stream", small)
    pairs, feeds = look_up_feeds(big, small, on, how)
    columns = BroadcastColumns(tuple(pairs), tuple(pairs.values()), is_left=how == "left")
    names: tuple[str, ...] | None = None
    if big._columns is not None and small._columns is not None:
        names = tuple(columns.names(big._columns, small._columns))
    node = look_up_node(BroadcastJoin(SmallRows(columns, small._columns)), feeds)
    return Stream((Feed(node),), None, names, big._time)


def look_up_feeds(big: StreamBase, small: StreamBase, on: On, how: str) -> tuple[dict[str, str], Feeds]:
    """The small side's columns by the big side's, and both as inputs 0 and 1; see :func:`broadcast_join`."""
    if how not in ("inner", "left"):
        raise UsageError(f"how is {how!r}: write 'inner' or 'left'")
    pairs = _column_pairs(on)
    check_columns(list(pairs), big._columns, "broadcast_join")
    check_columns(list(pairs.values()), small._columns, "broadcast_join, small side")
    big_feeds, small_feeds = big._open_feeds("broadcast_join"), small._open_feeds("broadcast_join")
    _check_readable_first(small_feeds)
    everywhere = (feed.exchanged(Exchange("broadcast"), 1) for feed in small_feeds)
    return pairs, (*big_feeds, *everywhere)


def look_up_node(operator: Operator, feeds: Feeds, reads: Reads | None = None) -> Node:
    """The step that looks records up. Raises InvalidGraph if a source would wait for itself."""
    node = Node(operator.name, feeds, operators=(operator,), follows=True, reads=reads)
    check_waits(list(inputs_first([node])))
    return node


def _column_pairs(on: On) -> dict[str, str]:
    """The small side's columns by the big side's."""
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


def _check_readable_first(small: tuple[Feed, ...]) -> None:
    """Raises InvalidGraph if the small side of a broadcast_join has no end, or its subtasks are chosen."""
    if not all(feed.node.bounded for feed in small):
        raise InvalidGraph(
            "broadcast_join reads the small side to its end first, and it has none: bound its source, or use "
            "key_by(...).join(...)"
        )
    if any(feed.is_chosen for feed in small):
        raise InvalidGraph(
            "broadcast_join sends the small side to every subtask: leave out the choice before it"
        )
