"""A keyed stream cut into windows of event time: what can be computed for each key and window."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from minishuffle.dataflow.arguments import check_callable, check_late
from minishuffle.dataflow.operators.times import EventTime, LastMoment
from minishuffle.dataflow.schemas import aggregated_schema
from minishuffle.dataflow.stream import Stream, T
from minishuffle.dataflow.stream_base import SideOutput, late_of
from minishuffle.errors import InvalidGraph

if TYPE_CHECKING:
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.columns import Aggregate
    from minishuffle.dataflow.operators.late import LatePolicy
    from minishuffle.dataflow.operators.windows import OpenWindows

__all__ = ["WindowedStream"]

S = TypeVar("S")
"""The value that the rows of a key and window are folded into."""


class WindowedStream(Generic[T]):
    """What :meth:`KeyedStream.window` gives; every method leads back to a :class:`Stream`.

    A window's values go out once, when the watermark has reached its end. From rows come (key, start of
    the window, value) tuples; from Arrow, and from :meth:`aggregate`, batches of the key columns,
    ``window_start``, ``window_end`` (the first microsecond after it) and the values. Their event time is
    the window's last microsecond, so that they may be cut into windows again.
    """

    __slots__ = ("_keyed", "_late", "_size", "_time")

    def __init__(self, keyed: KeyedStream[T], size: int, late: LatePolicy) -> None:
        check_late(late)
        time = keyed._stream._time
        if time is None:
            raise InvalidGraph(
                "window needs the records' event time: call event_time(...) before key_by, and again after a "
                "map that makes other records"
            )
        self._keyed = keyed
        self._size = size
        self._late = late
        self._time = time

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._size / 1_000_000:g} s over {self._keyed!r}>"

    def count(self) -> Stream[Any]:
        """The number of records of each key and window; on Arrow in the column ``count``."""
        from minishuffle.dataflow.operators.columns import RowCount
        from minishuffle.dataflow.operators.windowrows import one_more

        keys = self._keyed._keys
        if keys is None or self._keyed._stream._format != "arrow":
            return self._on_rows("window_count", int, one_more)
        return self._on_arrow("window_count", {"count": (keys[0], "count")}, {"count": RowCount()})

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

    def aggregate(self, **columns: tuple[str, str]) -> Stream[Any]:
        """Columns computed without Python per row, as :meth:`KeyedStream.aggregate` does.

        Raises:
            UsageError: no columns, an unknown function, or two columns of one name.
            UnknownName: the stream's columns are known, and one is not among them.
            InvalidGraph: the key or the event time is a function: aggregates are by column.
        """
        from minishuffle.dataflow.operators.columns import aggregate_named

        self._keyed._check_aggregates(columns)
        aggregates = {
            name: aggregate_named(function, column)  # type: ignore[arg-type]
            for name, (column, function) in columns.items()
        }
        return self._on_arrow("window_aggregate", columns, aggregates)

    # --- making nodes ----------------------------------------------------------------------------

    def _sides(self, format: Literal["rows", "arrow"]) -> dict[str, SideOutput]:
        if self._late != "side":
            return {}
        return {"late": SideOutput.late_of(self._keyed._stream, format)}

    def _windows(self, sides: dict[str, SideOutput]) -> OpenWindows:
        from minishuffle.dataflow.operators.windows import OpenWindows

        return OpenWindows(self._time, self._size, late_of(self._late, sides.get("late")))

    def _on_rows(
        self,
        label: str,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError = "fail",
    ) -> Stream[Any]:
        from minishuffle.dataflow.operators.windowrows import WindowRows

        sides = self._sides("rows")
        stream = self._keyed._on_rows(WindowRows(self._windows(sides), create, add, on_error), label)
        stream._time, stream._sides = EventTime(fn=LastMoment(self._size)), sides
        return stream

    def _on_arrow(
        self, label: str, columns: dict[str, tuple[str, str]], aggregates: dict[str, Aggregate]
    ) -> Stream[Any]:
        from minishuffle.dataflow.operators.windowarrow import WindowArrow

        keys, schema = self._keyed._keys, self._keyed._stream._schema
        assert keys is not None
        if self._time.column is None:
            raise InvalidGraph(
                "aggregate takes Arrow, and the event time is a function of a row: give event_time() the "
                "name of a column, or use fold"
            )
        sides = self._sides("arrow")
        outputs = [(name, columns[name][0], aggregate) for name, aggregate in aggregates.items()]
        operator = WindowArrow(self._windows(sides), keys, outputs)
        result = aggregated_schema(schema, keys, columns, windows=True)
        used = (self._time.column, *(column for column, _ in columns.values()))
        stream = self._keyed._on_arrow(
            operator, tuple(operator.names), result, label=label, used=None if sides else used
        )
        stream._time, stream._sides = EventTime(column="window_end", shift=-1), sides
        return stream
