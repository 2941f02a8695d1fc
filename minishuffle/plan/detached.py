"""A plan apart from the world outside: its sources give what is pushed, and its sinks keep what reaches them.

Nothing that the plan reads from or writes to is opened. Each step has one subtask. A watermark follows each
record, so that which of them are late depends on their order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from minishuffle.connectors.pushed import PushedSource, TakenSink
from minishuffle.errors import UsageError
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
    pass

__all__ = ["DetachedPlan", "TakenEnd", "detached"]

REWRITES_MADE: Final = ("combining", "chaining")
"""Those that leave all columns to the steps behind: a record that is dropped is shown whole."""
END: Final = "collect"
"""The name of the end of a plan without a sink."""


@dataclass(frozen=True, slots=True)
class TakenEnd:
    """A sink, and the schema of what reaches it."""

    sink: TakenSink
    schema: Schema


@dataclass(frozen=True, slots=True)
class DetachedPlan:
    """The chains of a plan with their names, those in front first, the edges between them, and by name what
    is pushed and taken."""

    programs: list[tuple[str, ProgramSpec]]
    edges: list[Edge]
    sources: dict[str, PushedSource]
    ends: dict[str, TakenEnd]


@dataclass(slots=True)
class _Ends:
    """What takes the place of sources and sinks, by name."""

    sources: dict[str, PushedSource] = field(default_factory=dict)
    ends: dict[str, TakenEnd] = field(default_factory=dict)

    def detach(self, node: Node, made: Node) -> Node:
        """The node with a step that opens nothing."""
        step = made.step
        if isinstance(step, SourceStep):
            step = self._source(made.label, step)
        elif isinstance(step, SinkStep):
            step = self._sink(made, step)
        elif isinstance(step, EventTimeStep):
            step = replace(step, watermarks="each")
        return replace(made, step=step, parallelism=None, slot_group=None)

    def _source(self, label: str, step: SourceStep) -> ScanStep:
        if label in self.sources:
            raise UsageError(f"two sources of the job are named {label!r}: give each its own, name('...')")
        known = step.gives.schema
        schema = None if isinstance(known, ObjectSchema) else known
        source = self.sources[label] = PushedSource(label, schema, bounded=step.bounded)
        return ScanStep(label, source, known)

    def _sink(self, node: Node, step: SinkStep) -> SinkStep:
        label = step.collects or node.label
        if label in self.ends:
            raise UsageError(f"two sinks of the job are named {label!r}: give each its own, name('...')")
        sink = TakenSink(sends=bool(step.collects))
        self.ends[label] = TakenEnd(sink, node.inputs[0].gives.schema)
        return replace(step, sink=sink, boundary=None)


def detached(stream: Any) -> DetachedPlan:
    """The plan of a stream or table, with a sink or without.

    Raises:
        InvalidGraph: the stream would store what has no end, or would wait for itself.
        UsageError: it is none; sources or sinks share a name, or nothing reads a side output.
    """
    relation = relation_of(stream)
    if not relation.node.is_sink:
        relation = relation.then(SinkStep(END, TakenSink(sends=True), collects=END))
    replaced = _Ends()
    nodes: Sequence[Node] = list(inputs_first(one_of_each(relation.ends)))
    nodes = remade(nodes, replaced.detach)
    check_waits(running(nodes))
    check_ends(nodes)
    programs, edges = planned_programs(with_own_ids(nodes), REWRITES_MADE)
    return DetachedPlan(programs, edges, replaced.sources, replaced.ends)
