"""A stream whose records are grouped by key: what can be computed for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minishuffle.dataflow.arguments import check_callable, check_columns, checked_duration
from minishuffle.dataflow.nodes import Exchange, Feed, Format, Node
from minishuffle.dataflow.operators.base import Operator
from minishuffle.dataflow.schemas import aggregated_schema
from minishuffle.dataflow.stream import Stream, T
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.operators.chained import Emission, OnError
    from minishuffle.dataflow.operators.joins import How
    from minishuffle.dataflow.operators.late import LatePolicy
    from minishuffle.dataflow.operators.process import ProcessContext
    from minishuffle.dataflow.windowed import WindowedStream

__all__ = ["KeyedStream"]

S = TypeVar("S")
"""The value that a key's rows are folded into."""


class KeyedStream(Generic[T]):
    """What :meth:`Stream.key_by` gives; every method leads back to a :class:`Stream`.

    ``emit`` says when a key's value goes out: ``"each"`` after every record, ``"batch"`` once for each
    key of a batch, ``"end"`` once for each key when the data end. By default ``"end"`` if they do
    end, else ``"batch"``.

    From rows come (key, value) tuples; from Arrow, and from :meth:`aggregate`, batches of the key
    columns and the values.
    """

    __slots__ = ("_feeds", "_fn", "_keys", "_on_error", "_stream")

    def __init__(
        self,
        stream: Stream[T],
        feeds: tuple[Feed, ...],
        keys: tuple[str, ...] | None,
        fn: Callable[[T], Any] | None,
        on_error: OnError,
    ) -> None:
        self._stream = stream
        self._feeds = feeds
        self._keys = keys
        self._fn = fn
        self._on_error = on_error

    def __repr__(self) -> str:
        key = "a function" if self._keys is None else ", ".join(self._keys)
        return f"<KeyedStream by {key} of {self._stream!r}>"

    def count(self, emit: Emission | None = None) -> Stream[Any]:
        """The number of records of each key; on Arrow in the column ``count``."""
        from minishuffle.dataflow.operators.keyed import CountArrow, CountRows

        when = self._emission(emit)
        if self._keys is not None and self._stream._format == "arrow":
            columns, counted = (*self._keys, "count"), {"count": (self._keys[0], "count")}
            schema = aggregated_schema(self._stream._schema, self._keys, counted, at_end=when == "end")
            return self._on_arrow(CountArrow(self._keys, when, "count"), columns, schema)
        return self._on_rows(CountRows(when))

    def reduce(
        self, fn: Callable[[T, T], T], emit: Emission | None = None, *, on_error: OnError = "fail"
    ) -> Stream[tuple[Any, T]]:
        """Combine the rows of each key: ``fn(value, row)``, the first row being the first value."""
        from minishuffle.dataflow.operators.keyed import ReduceRows

        check_callable(fn, "reduce")
        return self._on_rows(ReduceRows(fn, self._emission(emit), on_error))

    def fold(
        self,
        create: Callable[[], S],
        add: Callable[[S, T], S],
        emit: Emission | None = None,
        *,
        on_error: OnError = "fail",
    ) -> Stream[tuple[Any, S]]:
        """Any Python value for each key: ``create()`` makes it, ``add(value, row)`` returns the next one, or
        the same changed."""
        from minishuffle.dataflow.operators.keyed import FoldRows

        check_callable(create, "fold")
        check_callable(add, "fold")
        return self._on_rows(FoldRows(create, add, self._emission(emit), on_error), "fold")

    def aggregate(self, emit: Emission | None = None, **columns: tuple[str, str]) -> Stream[Any]:
        """Columns computed without Python per row: ``total=("amount", "sum"), n=("amount", "count")``.

        The functions are sum, count, min, max and mean; nulls count for nothing. Rows become Arrow
        before they are exchanged, see :meth:`Stream.schema`. A column that comes in several types counts
        in the wider one: integers beside floats as float64, rounded beyond 2**53. A column that a row lacks
        is null there; its keys it must have.

        Raises:
            UsageError: no columns, an unknown function, or two columns of one name.
            UnknownName: the stream's columns are known, and one is not among them.
            InvalidGraph: the key is a function: aggregates are by column.
        """
        from minishuffle.dataflow.operators.keyed import AggregateArrow

        keys, when = self._check_aggregates(columns), self._emission(emit)
        operator = AggregateArrow(keys, columns, when)  # type: ignore[arg-type]
        schema = aggregated_schema(self._stream._schema, keys, columns, at_end=when == "end")
        used = tuple(column for column, _ in columns.values())
        return self._on_arrow(operator, (*keys, *columns), schema, used=used)

    def window(self, size: timedelta, *, late: LatePolicy = "drop") -> WindowedStream[T]:
        """Cut the records of each key into tumbling windows of event time, aligned to 1970 UTC.

        A window's values go out when the watermark has reached its end. A record that comes after that
        is late: it is counted (``records_late``) and dropped, or with ``"side"`` put into the stream
        :attr:`Stream.late` of what follows, or with ``"fail"`` ends the job with an error.

        Raises:
            InvalidGraph: the records have no event time: see :meth:`Stream.event_time`.
        """
        from minishuffle.dataflow.windowed import WindowedStream

        return WindowedStream(self, checked_duration(size, "window", positive=True), late)

    def join(
        self,
        other: KeyedStream[Any],
        how: How = "inner",
        within: timedelta = timedelta(0),
        late: LatePolicy = "drop",
    ) -> Stream[Any]:
        """Pairs of records of one key whose event times are at most ``within`` apart.

        From two Arrow streams keyed by column come the key columns (this one's names), this one's other
        columns and the other's, with ``_right`` after a name that is taken; else (key, left row, right
        row) tuples. ``"left"`` and ``"full"`` also give records without a partner, with nulls or None;
        a key that is null has none. The event time is the left record's, or that of a right one alone.

        A record is late if it is not after its own side's watermark: it is counted (``records_late``)
        and dropped, with ``"side"`` put into :attr:`Stream.late` or :attr:`Stream.late_right`, or with
        ``"fail"`` ends the job with an error.

        Raises:
            InvalidGraph: a stream has no event time, or an outer join of Arrow does not know the columns
                of the side that may be absent.
            UsageError: another argument is wrong, or the keys have different numbers of columns.
        """
        from minishuffle.dataflow.joined import interval_join

        return interval_join(self, other, how, within, late)

    def process(
        self,
        on_record: Callable[[T, ProcessContext], Iterable[Any] | None],
        on_timer: Callable[[datetime, ProcessContext], Iterable[Any] | None] | None = None,
        *,
        ttl: timedelta | None = None,
        on_error: OnError = "fail",
    ) -> Stream[Any]:
        """Functions of your own with state and timers for each key.

        ``on_record(row, context)`` and ``on_timer(at, context)`` return an iterable of rows or None. The
        context has ``key``, ``time``, ``watermark``, ``state`` (a dict), ``set_timer(at)`` and
        ``delete_timer(at)``. Timers of event time fire when the watermark has passed them, in order;
        with ``clock="wall"`` when the clock has. State that was not touched for ``ttl`` is gone.

        Raises:
            UsageError: an argument is wrong.
        """
        from minishuffle.dataflow.processed import keyed_process

        return keyed_process(self, on_record, on_timer, ttl=ttl, on_error=on_error)

    def _check_aggregates(self, columns: dict[str, tuple[str, str]]) -> tuple[str, ...]:
        """The key columns, if these aggregates can be made by them."""
        if self._keys is None:
            raise InvalidGraph(
                "aggregate needs the key in columns: write key_by('column'), after a map that makes "
                "the column, or use fold"
            )
        if not columns:
            raise UsageError("aggregate takes at least one column, such as total=('amount', 'sum')")
        for name, wanted in columns.items():
            is_pair = isinstance(wanted, tuple | list) and len(wanted) == 2
            if not is_pair or not all(isinstance(part, str) for part in wanted):
                raise UsageError(f"aggregate: {name}={wanted!r:.80}: write {name}=('column', 'sum')")
        check_columns([column for column, _ in columns.values()], self._stream._columns, "aggregate")
        return self._keys

    def _emission(self, emit: Emission | None) -> Emission:
        bounded = all(feed.node.bounded for feed in self._feeds)
        if emit is None:
            return "end" if bounded else "batch"
        if emit not in ("each", "batch", "end"):
            raise UsageError(f"emit is {emit!r}: write 'each', 'batch' or 'end'")
        if emit == "end" and not bounded:
            raise InvalidGraph(
                "emit='end' on a source without end would never emit: write 'batch' or 'each', or bound "
                "the source"
            )
        return emit

    def _on_rows(self, operator: Operator, label: str | None = None) -> Stream[Any]:
        node = Node(operator.name, (self._rows_by_key(),), operators=(operator,))
        return self._stream_of(node.named(label) if label else node, "rows", None)

    def _rows_by_key(self, input: int = 0) -> Feed:
        """Keys are computed before the exchange and travel with the rows, so that each is computed once."""
        from minishuffle.dataflow.operators.functions import KeyRows, KeyRowsByColumns

        keying: Operator
        if self._keys is None:
            assert self._fn is not None
            keying = KeyRows(self._fn, self._on_error)
        else:
            keying = KeyRowsByColumns(self._keys)
        before = self._auxiliary("key_by", (*self._stream._to_rows(), keying))
        return Feed(before, Exchange("hash"), input)

    def _on_arrow(
        self,
        operator: Operator,
        columns: tuple[str, ...],
        schema: pa.Schema | None,
        *,
        label: str | None = None,
        used: tuple[str, ...] | None = None,
    ) -> Stream[Any]:
        """``used`` are the columns of rows that the operator reads, beside the keys; None: all."""
        exchange = Exchange("hash", keys=self._keys)
        convert = self._stream._to_arrow(self._keys or (), used)
        if convert:
            feeds: tuple[Feed, ...] = (Feed(self._auxiliary("to_arrow", convert), exchange),)
        elif any(feed.exchange is not None for feed in self._feeds):
            raise InvalidGraph("key_by itself chooses the subtasks: leave out the choice before it")
        else:
            feeds = tuple(replace(feed, exchange=exchange) for feed in self._feeds)
        node = Node(operator.name, feeds, operators=(operator,))
        return self._stream_of(node.named(label) if label else node, "arrow", columns, schema)

    def _auxiliary(self, label: str, operators: tuple[Operator, ...]) -> Node:
        return Node(label, self._feeds, operators=operators, follows=True, is_auxiliary=True)

    @staticmethod
    def _stream_of(
        node: Node, format: Format, columns: tuple[str, ...] | None, schema: pa.Schema | None = None
    ) -> Stream[Any]:
        return Stream((Feed(node),), format, schema, columns)
