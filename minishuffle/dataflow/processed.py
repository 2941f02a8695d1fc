"""Functions of the user's own with state and timers: what is behind :meth:`KeyedStream.process`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from minishuffle.dataflow.arguments import check_callable, checked_duration
from minishuffle.dataflow.knownrows import ReturnedRows
from minishuffle.dataflow.nodes import Feed, Node
from minishuffle.dataflow.stream import Stream
from minishuffle.dataflow.stream_base import errors_of, side_outputs

if TYPE_CHECKING:
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.process import ProcessContext

__all__ = ["keyed_process"]


def keyed_process(
    keyed: KeyedStream[Any],
    on_record: Callable[[Any, ProcessContext], Iterable[Any] | None],
    on_timer: Callable[[datetime, ProcessContext], Iterable[Any] | None] | None = None,
    *,
    ttl: timedelta | None = None,
    sides: Sequence[str] = (),
    on_error: OnError = "fail",
) -> Stream[Any]:
    """Rows that ``on_record(row, context)`` and ``on_timer(at, context)`` return, of each key's state.

    Args:
        on_record: returns an iterable of rows, or None; ``context`` is a ``ProcessContext``.
        on_timer: likewise, for a timer that ``context.set_timer`` set.
        sides: side outputs, to which rows given as ``Aside(name, row)`` go.
        ttl: the state of a key that was not touched for so long (by the wall clock) is gone.

    Raises:
        UsageError: an argument is wrong.
    """
    from minishuffle.dataflow.operators.process import ProcessRows

    check_callable(on_record, "process")
    if on_timer is not None:
        check_callable(on_timer, "process")
    seconds = None
    if ttl is not None:
        seconds = checked_duration(ttl, "process(ttl=...)", positive=True) / 1_000_000
    time = keyed._stream._time
    operator = ProcessRows(on_record, on_timer, time, seconds, on_error)
    feeds, time = keyed._rows_by_key(), time and time.beside()
    aside = side_outputs(operator, sides, time)
    returned = tuple(ReturnedRows(fn, "rows") for fn in (on_record, on_timer) if fn is not None)
    node = Node(
        operator.name,
        feeds,
        operators=(operator,),
        rows=returned,
        errors=errors_of(operator, keyed._stream._feeds),
    )
    return Stream((Feed(node),), time=time, sides=aside)
