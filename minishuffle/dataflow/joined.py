"""Two streams become one: the joins behind :meth:`KeyedStream.join` and :meth:`Stream.broadcast_join`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from minishuffle.dataflow.arguments import check_columns, check_late, checked_duration
from minishuffle.dataflow.bridges import refuse_mixture
from minishuffle.dataflow.nodes import Exchange, Feed, Node, check_waits, inputs_first
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.stream import Stream
from minishuffle.dataflow.stream_base import SideOutput, late_of
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.base import Operator
    from minishuffle.dataflow.operators.joins import How
    from minishuffle.dataflow.operators.late import Late, LatePolicy

__all__ = ["On", "broadcast_join", "check_readable_first", "column_pairs", "interval_join"]


On: TypeAlias = str | Sequence[str] | Mapping[str, str]
"""Columns of one name on both sides, or the small side's name by the other's."""


def interval_join(
    left: KeyedStream[Any],
    right: KeyedStream[Any],
    how: How = "inner",
    within: timedelta = timedelta(0),
    late: LatePolicy = "drop",
) -> Stream[Any]:
    """Pairs of records of one key whose event times are at most ``within`` apart.

    From two Arrow streams keyed by column come the key columns (the left one's names), the left's other
    columns and the right's, with ``_right`` after a name that the left has; else (key, left row, right
    row) tuples. Where a record has no partner there is null or None; a key that is null or has a null in
    it has none. The event time is the left record's; that of a right one without a partner is its own,
    and stands in the left's column.

    Raises:
        InvalidGraph: a stream has no event time, or an outer join of Arrow does not know the columns of
            the side that may be absent.
        UsageError: another argument is wrong, or the keys have different numbers of columns.
    """
    from minishuffle.dataflow.keyed import KeyedStream

    if not isinstance(right, KeyedStream):
        refuse_mixture("join", "KeyedStream", right)
    if how not in ("inner", "left", "full"):
        raise UsageError(f"how is {how!r}: write 'inner', 'left' or 'full'")
    check_late(late)
    micros = checked_duration(within, "join(within=...)")
    times = (_time_of(left, "left"), _time_of(right, "right"))
    if left._keys is not None and right._keys is not None and len(left._keys) != len(right._keys):
        raise UsageError(
            f"join: the left key is ({', '.join(left._keys)}) and the right one ({', '.join(right._keys)}): "
            "give both key_by() the same number of columns"
        )
    if _is_arrow(left) and _is_arrow(right):
        return _joined_arrow(left, right, how, micros, late, times)
    return _joined_rows(left, right, how, micros, late, times)


def _time_of(keyed: KeyedStream[Any], side: str) -> EventTime:
    time = keyed._stream._time
    if time is None:
        raise InvalidGraph(
            f"join needs the event time of both streams, and the {side} one has none: call event_time(...) "
            "before its key_by, and again after a map that makes other records"
        )
    return time


def _is_arrow(keyed: KeyedStream[Any]) -> bool:
    time = keyed._stream._time
    by_column = keyed._keys is not None and time is not None and time.column is not None
    return by_column and keyed._stream._format == "arrow"


def _late_sides(
    left: KeyedStream[Any], right: KeyedStream[Any], late: LatePolicy, format: Literal["rows", "arrow"]
) -> dict[str, SideOutput]:
    if late != "side":
        return {}
    return {
        "late": SideOutput.late_of(left._stream, format),
        "late_right": SideOutput.late_of(right._stream, format),
    }


def _late(late: LatePolicy, sides: dict[str, SideOutput]) -> tuple[Late, Late]:
    return late_of(late, sides.get("late")), late_of(late, sides.get("late_right"))


# --- rows -----------------------------------------------------------------------------------------


def _joined_rows(
    left: KeyedStream[Any],
    right: KeyedStream[Any],
    how: How,
    within: int,
    late: LatePolicy,
    times: tuple[EventTime, EventTime],
) -> Stream[Any]:
    from minishuffle.dataflow.operators.joinrows import JoinedTime, JoinRows

    sides = _late_sides(left, right, late, "rows")
    operator = JoinRows(how, within, times, _late(late, sides))
    node = Node(operator.name, (left._rows_by_key(), right._rows_by_key(1)), operators=(operator,))
    return Stream((Feed(node),), "rows", time=EventTime(fn=JoinedTime(*times)), sides=sides)


# --- Arrow ----------------------------------------------------------------------------------------


def _joined_arrow(
    left: KeyedStream[Any],
    right: KeyedStream[Any],
    how: How,
    within: int,
    late: LatePolicy,
    times: tuple[EventTime, EventTime],
) -> Stream[Any]:
    from minishuffle.dataflow.operators.joinarrow import JoinArrow
    from minishuffle.dataflow.operators.joincolumns import JoinColumns

    if how != "inner":
        _check_known(right, "right", how)
    if how == "full":
        _check_known(left, "left", how)
    assert left._keys is not None
    assert right._keys is not None
    assert times[0].column is not None
    schemas = (left._stream._schema, right._stream._schema)
    columns = JoinColumns(left._keys, right._keys, how, times[0])
    sides = _late_sides(left, right, late, "arrow")
    operator = JoinArrow(columns, within, times, schemas, _late(late, sides))
    schema: pa.Schema | None = None
    names: tuple[str, ...] | None = None
    if schemas[0] is not None and schemas[1] is not None:
        schema = columns.result(schemas[0], schemas[1])
    elif left._stream._columns is not None and right._stream._columns is not None:
        names = tuple(columns.names(left._stream._columns, right._stream._columns))
    feeds = (*_arrow_feeds(left, 0), *_arrow_feeds(right, 1))
    node = Node(operator.name, feeds, operators=(operator,))
    time = times[0] if how != "full" or _holds_both_times(left._keys, right._keys, times) else None
    return Stream((Feed(node),), "arrow", schema, names, time, sides)


def _check_known(keyed: KeyedStream[Any], side: str, how: str) -> None:
    if keyed._stream._schema is None:
        raise InvalidGraph(
            f"join(how={how!r}) has to know the {side} side's columns, for records without a partner there: "
            "declare them with .schema(...) before event_time()"
        )


def _arrow_feeds(keyed: KeyedStream[Any], input: int) -> tuple[Feed, ...]:
    if any(feed.exchange is not None for feed in keyed._feeds):
        raise InvalidGraph("key_by itself chooses the subtasks: leave out the choice before it")
    return tuple(
        Feed(feed.node, Exchange("hash", keys=keyed._keys), input, feed.side) for feed in keyed._feeds
    )


def _holds_both_times(
    left_keys: tuple[str, ...], right_keys: tuple[str, ...], times: tuple[EventTime, EventTime]
) -> bool:
    """Whether the left's time column can hold the right's time: a key's column holds the right's key."""
    left, right = times
    if left.column not in left_keys:
        return True
    return (right_keys[left_keys.index(left.column)], left.shift) == (right.column, right.shift)


# --- broadcast ------------------------------------------------------------------------------------


def broadcast_join(big: Stream[Any], small: Stream[Any], on: On, how: str = "inner") -> Stream[Any]:
    """Each record of ``big`` with the records of ``small`` whose columns ``on`` are equal.

    ``small`` is read to its end first and kept whole in every subtask; then ``big`` streams through
    where it is. From Arrow comes Arrow: the columns of ``big`` and the other ones of ``small``, with
    ``_right`` after a name that ``big`` has; else dict rows of the same names. With ``"left"`` a record
    without a partner goes out with nulls. Event time and watermarks are those of ``big``.

    Raises:
        InvalidGraph: ``small`` has no end, or both read one source, which would wait for itself.
        UsageError: an argument is wrong.
        UnknownName: a stream's columns are known, and one of ``on`` is not among them.
    """
    if not isinstance(small, Stream):
        refuse_mixture("broadcast_join", "Stream", small)
    if how not in ("inner", "left"):
        raise UsageError(f"how is {how!r}: write 'inner' or 'left'")
    pairs = column_pairs(on)
    check_columns(list(pairs), big._columns, "broadcast_join")
    check_columns(list(pairs.values()), small._columns, "broadcast_join, small side")
    big_feeds, small_feeds = big._open_feeds("broadcast_join"), small._open_feeds("broadcast_join")
    check_readable_first(small_feeds)
    is_arrow = big._format == "arrow"
    convert = small._to_arrow() if is_arrow else small._to_rows()
    if convert:
        before = Node("to_arrow" if is_arrow else "to_rows", small_feeds, operators=convert)
        small_feeds = (Feed(before),)
    if not is_arrow:
        big = big._as_rows("broadcast_join")
        big_feeds = big._feeds
    feeds = (
        *(Feed(feed.node, feed.exchange, 0, feed.side) for feed in big_feeds),
        *(Feed(feed.node, Exchange("broadcast"), 1, feed.side) for feed in small_feeds),
    )
    return _broadcast(big, small, pairs, how, feeds)


def _broadcast(
    big: Stream[Any], small: Stream[Any], pairs: dict[str, str], how: str, feeds: tuple[Feed, ...]
) -> Stream[Any]:
    from minishuffle.dataflow.operators.broadcast import BroadcastArrow, BroadcastColumns, BroadcastRows

    columns = BroadcastColumns(tuple(pairs), tuple(pairs.values()), is_left=how == "left")
    schema: pa.Schema | None = None
    operator: Operator
    if big._format == "arrow":
        operator = BroadcastArrow(columns, small._schema)
        if big._schema is not None and small._schema is not None:
            schema = columns.result(big._schema, small._schema)
    else:
        operator = BroadcastRows(columns, small._columns)
    node = Node(operator.name, feeds, operators=(operator,), follows=True)
    check_waits(inputs_first([node]))
    names: tuple[str, ...] | None = None
    if schema is None and big._columns is not None and small._columns is not None:
        names = tuple(columns.names(big._columns, small._columns))
    return Stream((Feed(node),), big._format, schema, names, big._time)


def column_pairs(on: On) -> dict[str, str]:
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


def check_readable_first(small: tuple[Feed, ...]) -> None:
    """Raises InvalidGraph if the small side of a broadcast_join has no end, or its subtasks are chosen."""
    if not all(feed.node.bounded for feed in small):
        raise InvalidGraph(
            "broadcast_join reads the small side to its end first, and it has none: bound its source, or use "
            "key_by(...).join(...)"
        )
    if any(feed.exchange is not None for feed in small):
        raise InvalidGraph(
            "broadcast_join sends the small side to every subtask: leave out the choice before it"
        )
