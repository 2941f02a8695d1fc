"""What ``Stream`` and ``Table`` share: their place in the plan, and who gets which record next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from minishuffle import limits
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.plan.arguments import checked_name, checked_parallelism
from minishuffle.plan.exchange_steps import exchanged
from minishuffle.plan.graph import PartitionKind
from minishuffle.plan.nodes import Exchange, Known, Relation, Step, schema_text
from minishuffle.plan.sides import SIDE_STEPS
from minishuffle.plan.time_steps import EventTimeStep, check_brought, held

if TYPE_CHECKING:
    from minishuffle.operators.assign_event_time import Watermarks
    from minishuffle.operators.chained import OnError

__all__ = ["SideOutputs", "StreamBase"]

COLUMNS_SHOWN = 6
"""By ``repr``."""

Others = TypeVar("Others")
"""A stream of rows of another type, or a table."""


class StreamBase:
    """Records in a plan. ``plan`` says which node gives them, and what is known of them."""

    __slots__ = ("plan",)

    def __init__(self, plan: Relation) -> None:
        self.plan = plan

    def __repr__(self) -> str:
        labels = ", ".join(feed.node.label for feed in self.plan.feeds)
        if self.plan.node.is_sink:
            return f"<{type(self).__name__} {labels}>"
        return f"<{type(self).__name__} {labels} [{schema_text(self.plan.gives.schema, COLUMNS_SHOWN)}]>"

    def _side(self, name: str) -> Relation:
        side = self.plan.put_aside(name)
        if side is None:
            is_own = name not in SIDE_STEPS
            what = f".side({name!r:.80})" if is_own else f".{name}"
            way = f"a function with sides=[{name!r:.80}]" if is_own else SIDE_STEPS[name]
            raise InvalidGraph(f"{what} must directly follow a step that gives such records: {way}")
        return side

    # --- who gets which record -------------------------------------------------------------------

    def rebalance(self) -> Self:
        """Deal records to all subtasks of the next operator in turn: those of a stream one by one, those of a
        table by short blocks."""
        return self._exchanged(Exchange("rebalance"))

    def rescale(self) -> Self:
        """Like :meth:`rebalance`, but each subtask deals to a few neighbours only."""
        return self._exchanged(Exchange("rescale"))

    def forward(self) -> Self:
        """Leave records on the subtask of the same number; both operators must be equally parallel."""
        return self._exchanged(Exchange("forward"))

    def broadcast(self) -> Self:
        """Give every record to every subtask of the next operator."""
        return self._exchanged(Exchange("broadcast"))

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
        return self._exchanged(Exchange(None, kind=kind))

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

    def explain(self, *, parallelism: int = 1, optimise: Collection[str] | None = None) -> str:
        """Both plans of a job that ends here, as text: the logical one, with the schema of each step, where
        event time stands, and the id of its state; and the physical one, with what each exchange ships and
        why. Without a sink it is what there is of them so far.

        Args:
            parallelism: of the job.
            optimise: the rewrites to make; None: those that a submitted job has.
        """
        from minishuffle.plan.explain import plan_lines
        from minishuffle.plan.planner import plan_job

        return "\n".join(plan_lines(plan_job(self, parallelism=parallelism, optimise=optimise, whole=False)))

    def show(self, n: int = limits.SHOWN_ROWS) -> None:
        """Print the first rows, and a table's schema: each source is read until there are ``n`` rows, or
        10,000 of it are read, or 10 seconds have passed, and ends there.

        It runs in this process, on copies of functions and sources, with one subtask for each operator. No
        sink is opened, and no dead letter is written. Unless every source was read to its end, that is said:
        counts, joins and windows are those of what was read. A source or function that does not return is
        waited for.

        Raises:
            UsageError: what Spark writes would have to be read, a function cannot be pickled, or ``n`` is no
                number of rows.
            Exception: what a source or a function raises.
        """
        from minishuffle.api.firstrows import print_first_rows

        print_first_rows(self, n)

    # --- making nodes ----------------------------------------------------------------------------

    def _given(self, method: str) -> Known:
        """What is known of the records. Raises InvalidGraph if ``method`` would follow a sink."""
        self.plan.check_open(method)
        return self.plan.gives

    def _then(self, step: Step) -> Self:
        return type(self)(self.plan.then(step))

    def _timed(
        self,
        place: Any,
        out_of_order: timedelta,
        idle_after: timedelta | None,
        watermarks: Watermarks,
        on_error: OnError,
    ) -> Self:
        """The same records with watermarks that follow from their times."""
        given = self._given("event_time")
        if place is None:
            check_brought(self.plan)
        return self._then(EventTimeStep(given, place, out_of_order, idle_after, watermarks, on_error))

    def _held(self, *, stays: bool = False) -> Relation:
        """The same records with their event times beside them, unless the column with these ``stays``."""
        return self.plan if stays else held(self.plan)

    def _exchanged(self, exchange: Exchange) -> Self:
        return type(self)(exchanged(self.plan, exchange))

    def _with_last_step(self, method: str, change: Any) -> Self:
        return type(self)(self.plan.with_last_step(method, change))


class SideOutputs(StreamBase, Generic[Others]):
    """What the windows or the join before this gives aside."""

    __slots__ = ()

    @property
    def late(self) -> Others:
        """The records that came too late for the window or join before this, made with ``late="side"``.

        Of a join, those of its left side. They keep their columns and event time.

        Raises:
            InvalidGraph: the step before this gives no late records aside.
        """
        return self._others("late")

    @property
    def late_right(self) -> Others:
        """Like :attr:`late`, of the right side of a join."""
        return self._others("late_right")

    @property
    def panes(self) -> Others:
        """What the windows before this show before they are final, and at last: with ``allowed_lateness`` or
        ``early``. Each value has ``pane``, its number from 0 on for its key and window, and ``final``; a
        later pane replaces the earlier ones. They have no event time.

        Raises:
            InvalidGraph: there are no such windows directly before this.
        """
        return self._others("panes")

    def _others(self, side: str) -> Others:
        return cast("Others", type(self)(self._side(side)))
