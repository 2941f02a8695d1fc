"""Steps that say where the event time of records stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from minishuffle.errors import UsageError
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.arguments import (
    check_callable,
    check_columns,
    check_on_error,
    check_time_type,
    checked_duration,
)
from minishuffle.plan.end_steps import ScanStep
from minishuffle.plan.exchange_steps import fed
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import Known, Needed, Node, ObjectSchema, Relation, Step

if TYPE_CHECKING:
    from minishuffle.operators.assign_event_time import Watermarks
    from minishuffle.operators.chained import OnError

__all__ = ["EventTimeStep", "HoldTimesStep", "check_brought", "held"]


@dataclass(frozen=True, eq=False)
class EventTimeStep(Step):
    """The same records with watermarks that follow from their times; those that a function gives are beside
    the rows from here on."""

    given: Known
    place: Any = None
    """A column, or a function of the row; None: they come beside the records."""
    out_of_order: timedelta = timedelta(0)
    idle_after: timedelta | None = None
    watermarks: Watermarks = "batch"
    on_error: OnError = "fail"
    label: ClassVar[str] = "event_time"
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True
    has_state: ClassVar[bool] = True
    by_order: ClassVar[bool] = True
    joins_input: ClassVar[bool] = True
    """The splits of a source are kept apart in the source's own chain alone."""

    def __post_init__(self) -> None:
        if self.place is not None:
            self._check_place()
        checked_duration(self.out_of_order, "event_time(out_of_order=...)")
        if self.idle_after is not None:
            checked_duration(self.idle_after, "event_time(idle_after=...)", positive=True)
        check_on_error(self.on_error)
        if self.watermarks not in ("batch", "each"):
            raise UsageError(f"watermarks is {self.watermarks!r}: write 'batch' or 'each'")

    def _check_place(self) -> None:
        if not isinstance(self.given.schema, ObjectSchema):
            self._check_column()
        elif isinstance(self.place, str):
            check_columns([self.place], self.given.columns, "event_time")
        else:
            check_callable(self.place, "event_time")

    def _check_column(self) -> None:
        if not isinstance(self.place, str):
            raise UsageError(
                f"event_time takes the name of a column, not {self.place!r:.80}: make one with "
                "with_columns(), or call to_rows() first"
            )
        check_columns([self.place], self.given.columns, "event_time")
        check_time_type(self.given.schema, self.place)

    @cached_property
    def time(self) -> EventTime:
        """Where the times of the records that come stand."""
        is_column = isinstance(self.place, str)
        return EventTime(
            column=self.place if is_column else None,
            fn=None if is_column else self.place,
            each=self.watermarks == "each",
            is_beside=self.place is None,
        )

    @cached_property
    def gives(self) -> Known:
        return Known(self.given.schema, self.time if self.time.fn is None else self.time.beside())

    def needs(self, wanted: Needed, input: int) -> Needed:
        if self.time.fn is not None:
            wanted = wanted.all_columns()
        return wanted.also(self.time.column).timed(self.time.is_beside)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        idle = self.idle_after
        parameters = {
            "time": self.time,
            "out_of_order": self.out_of_order // timedelta(microseconds=1),
            "idle_after": None if idle is None else idle / timedelta(seconds=1),
            "watermarks": self.watermarks,
            "on_error": self.on_error,
            "gives_times": node.needed.times,
        }
        return OperatorSpec("event_time", parameters)


@dataclass(frozen=True, eq=False)
class HoldTimesStep(Step):
    """The same records with their event times beside them, where steps behind may leave out or change what
    shows them."""

    given: Known
    label: ClassVar[str] = "event_time"
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    @cached_property
    def gives(self) -> Known:
        return self.given.held()

    def needs(self, wanted: Needed, input: int) -> Needed:
        if isinstance(self.given.schema, ObjectSchema):
            wanted = wanted.all_columns()
        elif wanted.times:
            wanted = wanted.also(self.given.time_column)
        return wanted.timed(False)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("hold_times", {"time": self.given.time if node.needed.times else None})


def check_brought(relation: Relation) -> None:
    """Raises UsageError unless all records come from a source that may bring their times, with nothing in
    between, or have them beside them already."""
    for feed in relation.feeds:
        time, node = feed.gives.time, feed.node
        while node.step.is_auxiliary and not isinstance(node.step, EventTimeStep):
            node = node.inputs[0].node
        is_source = isinstance(node.step, ScanStep) and node.step.brings_times
        if not (is_source or (time is not None and time.is_beside)):
            raise UsageError(
                "event_time() without a column or function takes the times that a source of your own brings, "
                f"with TimedBatch(batch, times), and follows it: behind {feed.node.label!r} write "
                "event_time('at'), or another column"
            )


def held(relation: Relation) -> Relation:
    """The same records with their event times beside them; as they are if they have none, or there already.

    A choice of subtasks stays the last step: it is about those of the step that comes next.
    """
    time = relation.gives.time
    if time is None or time.is_beside:
        return relation
    relation.check_open("event_time")
    parts = []
    for feed in relation.feeds:
        step = HoldTimesStep(Known(feed.gives.schema, time))
        parts.append((Relation(feed.node, feed.side).then(step), feed.exchange))
    return fed(parts)
