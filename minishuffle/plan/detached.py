"""A plan apart from the world outside: its sinks are not opened, and keep what reaches them.

Each step has one subtask. Its sources give what is pushed (:func:`detached`), or the first of their records
(:func:`limited`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from minishuffle.connectors.limited import Limit, LimitedSource
from minishuffle.connectors.pushed import PushedSource, TakenSink
from minishuffle.errors import UsageError
from minishuffle.operators.base import Source
from minishuffle.plan.end_steps import ScanStep, SinkStep
from minishuffle.plan.graph import Edge
from minishuffle.plan.nodes import (
    Node,
    ObjectSchema,
    Schema,
    SourceStep,
    inputs_first,
    one_of_each,
    remade,
    running,
    with_own_ids,
)
from minishuffle.plan.planner import check_ends, planned_programs, relation_of
from minishuffle.plan.programs import ProgramSpec
from minishuffle.plan.standstill import check_waits
from minishuffle.plan.time_steps import EventTimeStep

if TYPE_CHECKING:
    from minishuffle.operators.assign_event_time import Watermarks

__all__ = ["DetachedPlan", "TakenEnd", "detached", "limited"]

S = TypeVar("S", bound=Source)

PUSHED_REWRITES: Final = ("combining", "chaining")
"""Those that leave all columns to the steps behind: a record that is dropped is shown whole."""
END: Final = "collect"
"""The name of the end of a plan without a sink."""


@dataclass(frozen=True, slots=True)
class TakenEnd:
    """A sink, and the schema of what reaches it."""

    sink: TakenSink
    schema: Schema


@dataclass(frozen=True, slots=True)
class DetachedPlan(Generic[S]):
    """The chains of a plan with their names, those in front first, the edges between them, what takes the
    place of its sources, and by name that of its sinks."""

    programs: list[tuple[str, ProgramSpec]]
    edges: list[Edge]
    sources: list[S]
    ends: dict[str, TakenEnd]


@dataclass(slots=True)
class _Replacing(Generic[S]):
    """Puts other sources and sinks into the place of those of a plan."""

    source: Callable[[str, SourceStep], S]
    """Makes the source that takes the place of one with that name."""
    watermarks: Watermarks | None
    """When watermarks go out; None: as each step says."""
    sends: bool
    """See :class:`TakenSink`."""
    sources: list[S] = field(default_factory=list)
    ends: dict[str, TakenEnd] = field(default_factory=dict)

    def replace(self, node: Node, made: Node) -> Node:
        """The node with a step that opens nothing of the world outside."""
        step = made.step
        if isinstance(step, SourceStep):
            source = self.source(made.label, step)
            self.sources.append(source)
            step = ScanStep(made.label, source, step.gives.schema)
        elif isinstance(step, SinkStep):
            step = self._sink(made, step)
        elif isinstance(step, EventTimeStep) and self.watermarks is not None:
            step = replace(step, watermarks=self.watermarks)
        return replace(made, step=step, parallelism=None, slot_group=None)

    def _sink(self, node: Node, step: SinkStep) -> SinkStep:
        label = step.collects or node.label
        if label in self.ends:
            raise UsageError(f"two sinks of the job are named {label!r}: give each its own, name('...')")
        sink = TakenSink(sends=self.sends and bool(step.collects))
        self.ends[label] = TakenEnd(sink, node.inputs[0].gives.schema)
        return replace(step, sink=sink, boundary=None)


def detached(stream: Any) -> DetachedPlan[PushedSource]:
    """The plan of a stream or table, with a sink or without, whose sources give what is pushed.

    A watermark follows each record, so that which of them are late depends on their order alone.

    Raises:
        InvalidGraph: the stream would store what has no end, or would wait for itself.
        UsageError: it is none; sources or sinks share a name, or nothing reads a side output.
    """
    return _planned(stream, _Replacing(_pushed, "each", sends=True), PUSHED_REWRITES)


def _pushed(label: str, step: SourceStep) -> PushedSource:
    known = step.gives.schema
    schema = None if isinstance(known, ObjectSchema) else known
    return PushedSource(label, schema, bounded=step.bounded)


def limited(stream: Any, records: int) -> DetachedPlan[LimitedSource]:
    """The plan of a stream or table whose sources give at most so many records each, and end there.

    Raises:
        InvalidGraph: the stream would store what has no end, or would wait for itself.
        UsageError: it is none; what Spark writes would come to it; or as :func:`detached`.
    """

    def first(label: str, step: SourceStep) -> LimitedSource:
        if not isinstance(step, ScanStep):
            raise UsageError(
                f"{label} gives rows while a job runs alone: there is nothing to read; give it rows of your "
                "own with minishuffle.testing.run(...)"
            )
        return LimitedSource(step.source, Limit(records))

    return _planned(stream, _Replacing(first, None, sends=False), None)


def _planned(stream: Any, replacing: _Replacing[S], optimise: Collection[str] | None) -> DetachedPlan[S]:
    relation = relation_of(stream)
    if not relation.node.is_sink:
        relation = relation.then(SinkStep(END, TakenSink(sends=True), collects=END))
    nodes: Sequence[Node] = list(inputs_first(one_of_each(relation.ends)))
    nodes = remade(nodes, replacing.replace)
    check_waits(running(nodes))
    check_ends(nodes)
    programs, edges = planned_programs(with_own_ids(nodes), optimise)
    return DetachedPlan(programs, edges, replacing.sources, replacing.ends)
