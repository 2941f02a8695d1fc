"""A stream whose records are grouped by key: what can be computed for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minishuffle.dataflow.arguments import check_callable
from minishuffle.dataflow.bridges import refuse_column_method
from minishuffle.dataflow.nodes import Exchange, Feed, Node
from minishuffle.dataflow.operators.base import Operator
from minishuffle.dataflow.stream import Stream, T
from minishuffle.dataflow.stream_base import Feeds, checked_emission
from minishuffle.dataflow.windowed import Windowable, WindowedStream, Windowing

if TYPE_CHECKING:
    from minishuffle.dataflow.operators.chained import Emission, OnError
    from minishuffle.dataflow.operators.process import ProcessContext
    from minishuffle.operators.event_time_operator import LatePolicy
    from minishuffle.operators.join_inputs import How

__all__ = ["KeyedStream"]

S = TypeVar("S")
"""The value that a key's rows are folded into."""


class KeyedStream(Windowable[WindowedStream[T]], Generic[T]):
    """What :meth:`Stream.key_by` gives; every method leads back to a :class:`Stream`.

    ``emit`` says when a key's value goes out: ``"each"`` after every record, ``"batch"`` once for each
    key of a batch, ``"end"`` once for each key when the data end. By default ``"end"`` if they do
    end, else ``"batch"``.

    What comes are (key, value) tuples.
    """

    __slots__ = ("_fn", "_keys", "_on_error", "_stream")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_column_method(self, name)

    def __init__(
        self,
        stream: Stream[T],
        keys: tuple[str, ...] | None,
        fn: Callable[[T], Any] | None,
        on_error: OnError,
    ) -> None:
        self._stream = stream
        self._keys = keys
        self._fn = fn
        self._on_error = on_error

    def __repr__(self) -> str:
        key = "a function" if self._keys is None else ", ".join(self._keys)
        return f"<KeyedStream by {key} of {self._stream!r}>"

    def count(self, emit: Emission | None = None) -> Stream[Any]:
        """The number of records of each key."""
        from minishuffle.operators.reductions import KeyCount, KeyedReduction

        counting = KeyedReduction(KeyCount(), checked_emission(emit, self._stream._feeds))
        feeds = self._rows_by_key(alone=True)
        return Stream((Feed(Node(counting.name, feeds, operators=(counting,))),))

    def reduce(
        self, fn: Callable[[T, T], T], emit: Emission | None = None, *, on_error: OnError = "fail"
    ) -> Stream[tuple[Any, T]]:
        """Combine the rows of each key: ``fn(value, row)``, the first row being the first value."""
        from minishuffle.operators.reductions import KeyedReduction, RowFold

        check_callable(fn, "reduce")
        when = checked_emission(emit, self._stream._feeds)
        return self._on_rows(KeyedReduction(RowFold(fn), when, on_error))

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
        from minishuffle.operators.reductions import KeyedReduction, RowFold

        check_callable(create, "fold")
        check_callable(add, "fold")
        when = checked_emission(emit, self._stream._feeds)
        return self._on_rows(KeyedReduction(RowFold(add, create), when, on_error), "fold")

    def _unkeyed(self) -> Stream[T]:
        return self._stream

    def _windowed(self, windowing: Windowing) -> WindowedStream[T]:
        return WindowedStream(self, windowing)

    def join(
        self,
        other: KeyedStream[Any],
        how: How = "inner",
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[Any]:
        """Pairs of records of one key whose event times are at most ``within`` apart, by default equal.

        What comes are (key, left row, right row) tuples. ``"left"``, ``"right"`` and ``"full"`` also give
        records of that side, or of both, without a partner, with None; ``"semi"`` and ``"anti"`` give the
        left rows that have a partner, or have none. A key that is None has none. The event time is the
        greater one of both records. If neither stream has event time, and both have an end, all records of a
        key match.

        A record is late if it is not after its own side's watermark: it is counted (``records_late``)
        and dropped, with ``"side"`` put into :attr:`Stream.late` or :attr:`Stream.late_right`, or with
        ``"fail"`` fails the task.

        Args:
            before: how far the right record may be before the left one, instead of ``within``.
            after: how far it may be after it.

        Raises:
            InvalidGraph: a stream has no event time, and one has no end.
            UsageError: another argument is wrong, or the keys have different numbers of columns.
        """
        from minishuffle.dataflow.joined import interval_join

        return interval_join(self, other, how, (within, before, after), late)

    def process(
        self,
        on_record: Callable[[T, ProcessContext], Iterable[Any] | None],
        on_timer: Callable[[datetime, ProcessContext], Iterable[Any] | None] | None = None,
        *,
        ttl: timedelta | None = None,
        sides: Sequence[str] = (),
        on_error: OnError = "fail",
    ) -> Stream[Any]:
        """Functions of your own with state and timers for each key.

        ``on_record(row, context)`` and ``on_timer(at, context)`` return an iterable of rows or None. The
        context has ``key``, ``time``, ``watermark``, ``state`` (a dict), ``set_timer(at)`` and
        ``delete_timer(at)``. Timers of event time fire when the watermark has passed them, in order;
        with ``clock="wall"`` when the clock has. State that was not touched for ``ttl`` is gone. Rows given
        as ``Aside(name, row)`` go to :meth:`Stream.side`.

        Raises:
            UsageError: an argument is wrong.
        """
        from minishuffle.dataflow.processed import keyed_process

        return keyed_process(self, on_record, on_timer, ttl=ttl, sides=sides, on_error=on_error)

    def _on_rows(self, operator: Operator, label: str | None = None) -> Stream[Any]:
        node = Node(operator.name, self._rows_by_key(), operators=(operator,))
        return Stream((Feed(node.named(label) if label else node),))

    def _rows_by_key(self, input: int = 0, *, alone: bool = False) -> Feeds:
        """Keys are computed before the exchange and travel with the rows, so that each is computed once; or
        ``alone``.

        In a step of its own for each part of a union: where one took in all of them the order of their
        arrival would say which records are late."""
        from minishuffle.dataflow.operators.functions import KeyRows, KeyRowsByColumns

        stream = self._stream
        keying: KeyRows | KeyRowsByColumns
        if self._keys is None:
            assert self._fn is not None
            keying = KeyRows(self._fn, self._on_error, alone=alone)
        else:
            keying = KeyRowsByColumns(self._keys, alone=alone)
        feeds = []
        for feed in stream._feeds:
            # A kind without a choice is about the exchange by key, a choice one of its own before it.
            inner = feed if feed.is_chosen else replace(feed, exchange=None)
            kind = None if feed.is_chosen else feed.kind
            node = Node("key_by", (inner,), operators=(keying,), follows=True, is_auxiliary=True)
            feeds.append(Feed(node, Exchange("hash", kind=kind), input))
        return tuple(feeds)
