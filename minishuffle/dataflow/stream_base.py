"""What :class:`~minishuffle.dataflow.stream.Stream` and :class:`~minishuffle.dataflow.table.Table` share:
what is known of the records, how steps are added, and who gets which record next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias, get_args

from minishuffle.dataflow.arguments import checked_duration, checked_name, checked_parallelism
from minishuffle.dataflow.graph import PartitionKind
from minishuffle.dataflow.knownrows import ErrorRows, KnownRows
from minishuffle.dataflow.nodes import (
    Boundary,
    Exchange,
    Feed,
    Node,
    Reads,
    check_not_sinks,
    known_rows,
    with_last_step,
)
from minishuffle.dataflow.operators.base import Operator, Source
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.pruning import reads_also
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.operators.chained import Emission, ForgivingOperator, OnError, RecordOperator
    from minishuffle.dataflow.operators.eventtime import Watermarks
    from minishuffle.operators.event_time_operator import Late, LatePolicy

__all__ = [
    "Columns",
    "Feeds",
    "SideOutput",
    "StreamBase",
    "checked_emission",
    "errors_aside",
    "errors_of",
    "late_of",
    "side_outputs",
]

Columns: TypeAlias = tuple[str, ...] | None
Feeds: TypeAlias = tuple[Feed, ...]


@dataclass(frozen=True, slots=True)
class SideOutput:
    """Records that a step gives beside its stream, under a tag that no other step of the job has."""

    tag: str
    schema: pa.Schema | None = None
    columns: Columns = None
    time: EventTime | None = None

    @classmethod
    def late_of(cls, stream: StreamBase) -> SideOutput:
        """For late records of ``stream``, with a tag of their own."""
        return cls.made("late", stream._schema, stream._columns, stream._time)

    @classmethod
    def made(
        cls,
        kind: str,
        schema: pa.Schema | None = None,
        columns: Columns = None,
        time: EventTime | None = None,
    ) -> SideOutput:
        """With a tag of its own."""
        return cls(f"{kind}-{next(_TAGS)}", schema, columns, time)


_TAGS = count(1)
_SIDE_STEPS = {
    "late": "a window or join with late='side'",
    "late_right": "a join with late='side'",
    "panes": "a window with allowed_lateness or early",
    "errors": "map, map_async, filter, flat_map, process or to_table with on_error='side'",
}
"""What gives the side outputs that are not the user's own."""


def late_of(policy: LatePolicy, side: SideOutput | None) -> Late:
    """What becomes of late records, of which ``side`` are those that are put aside."""
    from minishuffle.operators.event_time_operator import Late

    return Late(policy, "" if side is None else side.tag)


def side_outputs(
    operator: RecordOperator, names: Sequence[str], time: EventTime | None
) -> dict[str, SideOutput]:
    """The side outputs of a step that calls a function: those of these names, and that of records for
    which the function raised.

    Raises:
        UsageError: there is something else than names, or one that is taken.
    """
    if isinstance(names, str):
        raise UsageError(f"sides takes a list of names: write [{names!r}]")
    sides = {checked_name(name, "sides"): SideOutput.made("side", time=time) for name in names}
    if taken := sorted(_SIDE_STEPS.keys() & sides.keys()):
        raise UsageError(f"{taken[0]!r} is not a name for a side output of your own: choose another one")
    operator.side_tags = {name: side.tag for name, side in sides.items()}
    return sides | errors_aside(operator, time)


def errors_aside(operator: ForgivingOperator, time: EventTime | None = None) -> dict[str, SideOutput]:
    """The side output of records that something is wrong with, if they go there, with the times of these if
    they are beside them."""
    if operator.on_error != "side":
        return {}
    beside = time if time is not None and time.is_beside else None
    side = SideOutput.made("errors", time=beside)
    operator.errors_tag = side.tag
    return {"errors": side}


def errors_of(operator: ForgivingOperator, feeds: Feeds) -> tuple[str, ErrorRows] | None:
    """What a step that takes the rows of ``feeds`` says of its side output of errors, if it has one."""
    return (operator.errors_tag, ErrorRows(known_rows(feeds))) if operator.errors_tag else None


def checked_emission(emit: Emission | None, feeds: Feeds) -> Emission:
    """When values by key go out; by default ``"end"`` if all ``feeds`` have one, else ``"batch"``."""
    bounded = all(feed.node.bounded for feed in feeds)
    if emit is None:
        return "end" if bounded else "batch"
    if emit not in ("each", "batch", "end"):
        raise UsageError(f"emit is {emit!r}: write 'each', 'batch' or 'end'")
    if emit == "end" and not bounded:
        raise InvalidGraph(
            "emit='end' on a source without end would never emit: write 'batch' or 'each', or bound it"
        )
    return emit


class StreamBase:
    """What is known of the records: columns as far as known, where the event time stands.

    A stream's batches are lists of rows and have no schema; a table's are Arrow. ``sides`` are the side
    outputs of the step before, by the name of the property that gives them.
    """

    __slots__ = ("_columns", "_feeds", "_schema", "_sides", "_time")

    _time_hint: ClassVar[str]
    """How its records get an event time, and keep it."""

    def __init__(
        self,
        feeds: Feeds,
        schema: pa.Schema | None = None,
        columns: Columns = None,
        time: EventTime | None = None,
        sides: Mapping[str, SideOutput] | None = None,
    ) -> None:
        self._feeds = feeds
        self._schema = schema
        self._columns = columns if schema is None else tuple(schema.names)
        self._time = time
        self._sides = dict(sides or {})

    def __repr__(self) -> str:
        labels = ", ".join(feed.node.label for feed in self._feeds)
        return f"<{type(self).__name__} {labels}>"

    @property
    def ends(self) -> tuple[Node, ...]:
        """The nodes that this stream ends with: one, or several after union or together."""
        return tuple(dict.fromkeys(feed.node for feed in self._feeds))

    @property
    def late(self) -> Self:
        """The records that came too late for the window or join before this, made with ``late="side"``.

        Of a join, those of its left side. They keep their columns and event time.

        Raises:
            InvalidGraph: the step before this gives no late records aside.
        """
        return self._side("late")

    @property
    def late_right(self) -> Self:
        """Like :attr:`late`, of the right side of a join."""
        return self._side("late_right")

    @property
    def panes(self) -> Self:
        """What the windows before this show before they are final, and at last: with ``allowed_lateness`` or
        ``early``. Each value has ``pane``, its number from 0 on for its key and window, and ``final``; a
        later pane replaces the earlier ones. They have no event time.

        Raises:
            InvalidGraph: there are no such windows directly before this.
        """
        return self._side("panes")

    def _side(self, name: str) -> Self:
        if name not in self._sides:
            is_own = name not in _SIDE_STEPS
            what = f".side({name!r:.80})" if is_own else f".{name}"
            way = f"a function with sides=[{name!r:.80}]" if is_own else _SIDE_STEPS[name]
            raise InvalidGraph(f"{what} must directly follow a step that gives such records: {way}")
        side = self._sides[name]
        feeds = tuple(Feed(feed.node, side=side.tag) for feed in self._feeds)
        return type(self)(feeds, side.schema, side.columns, side.time)

    # --- who gets which record -------------------------------------------------------------------

    def rebalance(self) -> Self:
        """Deal records to all subtasks of the next operator in turn."""
        return self._exchanged("rebalance", Exchange("rebalance"))

    def rescale(self) -> Self:
        """Like :meth:`rebalance`, but each subtask deals to a few neighbours only."""
        return self._exchanged("rescale", Exchange("rescale"))

    def forward(self) -> Self:
        """Leave records on the subtask of the same number; both operators must be equally parallel."""
        return self._exchanged("forward", Exchange("forward"))

    def broadcast(self) -> Self:
        """Give every record to every subtask of the next operator."""
        return self._exchanged("broadcast", Exchange("broadcast"))

    def exchange(self, kind: PartitionKind) -> Self:
        """Hold what goes to the next operator in partitions of that kind, whoever gets which record.

        ``pipelined_bounded`` is the default: consumers read while producers write, and those who write
        ahead of a consumer wait. With ``pipelined`` they may go ahead by all of the memory that nobody else
        uses. A ``blocking`` exchange stores all records, on the disk if there are many, and gives them out
        once they are complete: a consumer that is lost reads them again, and no producer restarts.

        Raises:
            UsageError: there is no such kind.
            InvalidGraph: another kind is said already.
        """
        if kind not in get_args(PartitionKind):
            kinds = ", ".join(get_args(PartitionKind))
            raise UsageError(f"exchange is {kind!r:.80}: write one of {kinds}")
        feeds = self._open_feeds("exchange")
        if any(feed.kind is not None for feed in feeds):
            raise InvalidGraph(f"exchange({kind!r}) follows another exchange(...): leave one of them out")
        of_kind = tuple(
            replace(feed, exchange=replace(feed.exchange or Exchange(None), kind=kind)) for feed in feeds
        )
        return self._same_records(of_kind)

    # --- what is known of the operator before ----------------------------------------------------

    def parallel(self, count: int) -> Self:
        """Run the operator before this as ``count`` subtasks, whatever the job's parallelism is."""
        count = checked_parallelism(count, "parallel")
        return self._with_last_step("parallel", lambda node: replace(node, parallelism=count))

    def name(self, label: str) -> Self:
        """Name the operator before this, for tables, metrics and errors."""
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise UsageError(f"name takes a text of characters that can all be printed, not {label!r:.80}")
        return self._with_last_step("name", lambda node: node.named(label))

    def slot_group(self, name: str) -> Self:
        """Run the operator before this in slots that it shares with operators of that group alone.

        Those that follow are of the same group until another is named. The job then needs, of each group, as
        many slots as its most parallel operator has subtasks.
        """
        name = checked_name(name, "slot_group")
        return self._with_last_step("slot_group", lambda node: replace(node, slot_group=name))

    # --- new streams -----------------------------------------------------------------------------

    @classmethod
    def _from_source(
        cls, label: str, source: Source, schema: pa.Schema | None = None, *, rows: KnownRows | None = None
    ) -> Self:
        known = () if rows is None else (rows,)
        return cls((Feed(Node(label, source=source, rows=known)),), schema)

    def _timed(
        self,
        time: EventTime,
        out_of_order: timedelta,
        idle_after: timedelta | None,
        watermarks: Watermarks,
        on_error: OnError,
    ) -> Self:
        """The same records with watermarks that follow from their times."""
        from minishuffle.dataflow.operators.eventtime import AssignEventTime

        late_by = checked_duration(out_of_order, "event_time(out_of_order=...)")
        idle = None
        if idle_after is not None:
            idle = checked_duration(idle_after, "event_time(idle_after=...)", positive=True) / 1_000_000
        operator = AssignEventTime(time, late_by, idle, watermarks, on_error)
        reads = None if time.column is None else reads_also(time.column)
        timed = self._beside("event_time", operator, reads)
        timed._time = operator.time_of_output
        return timed

    def _same_records(self, feeds: Feeds) -> Self:
        """The same records from elsewhere."""
        return type(self)(feeds, self._schema, self._columns, self._time)

    # --- making nodes ----------------------------------------------------------------------------

    def _open_feeds(self, method: str) -> Feeds:
        check_not_sinks(self._feeds, method)
        return self._feeds

    def _needed_time(self, what: str) -> EventTime:
        """Where the event time stands. Raises InvalidGraph that says ``what`` needs it, if there is none."""
        if self._time is None:
            raise InvalidGraph(f"{what}: call {self._time_hint}")
        return self._time

    def _beside(
        self,
        method: str,
        operator: Operator,
        reads: Reads | None = None,
        *,
        rows: tuple[KnownRows, ...] | None = None,
    ) -> Self:
        """A step that runs where its input does and changes no column. ``rows``: what it makes of rows, if it
        is not what comes in."""
        feeds = self._open_feeds(method)
        node = Node(
            operator.name,
            feeds,
            operators=(operator,),
            follows=True,
            is_auxiliary=True,
            reads=reads,
            rows=known_rows(feeds) if rows is None else rows,
        )
        return self._same_records((Feed(node),))

    def _represented(self, operator: Operator, reads: Reads | None = None) -> Feeds:
        """The same records in another form. A choice of subtasks stays the last step: it is about those of
        the step that comes next."""
        feeds = []
        for feed in self._open_feeds(operator.name):
            inner = (replace(feed, exchange=None),)
            node = Node(
                operator.name,
                inner,
                operators=(operator,),
                follows=True,
                is_auxiliary=True,
                reads=reads,
                rows=known_rows(inner),
            )
            feeds.append(Feed(node, feed.exchange))
        return tuple(feeds)

    def _sink(
        self, label: str, sink: Operator, boundary: Boundary | None = None, *, collects: str = ""
    ) -> Self:
        feeds = self._open_feeds(label)
        node = Node(
            label,
            feeds,
            boundary=boundary,
            operators=(sink,),
            follows=True,
            is_sink=True,
            collects=collects,
        )
        return type(self)((Feed(node.named(label)),))

    def _exchanged(self, method: str, exchange: Exchange) -> Self:
        feeds = self._open_feeds(method)
        if any(feed.is_chosen for feed in feeds):
            raise InvalidGraph(f"{method}() follows another choice of subtasks: leave one of them out")
        chosen = tuple(feed.exchanged(exchange) for feed in feeds)
        return self._same_records(chosen)

    def _with_last_step(self, method: str, change: Callable[[Node], Node]) -> Self:
        if len(self._feeds) > 1 or self._feeds[0].exchange is not None:
            raise InvalidGraph(f"{method}() must directly follow the operator that it is about")
        changed = self._same_records((with_last_step(self._feeds[0], method, change),))
        changed._sides = self._sides
        return changed
