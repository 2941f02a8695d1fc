"""A plan apart from the world outside: its sinks are not opened, and keep what reaches them.

Each step has one subtask. Its sources give what is pushed (:func:`detached`), or the first of their records
(:func:`limited`, :func:`limited_before`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from minishuffle.connectors.items import ArrowItemsSource, ItemsSource
from minishuffle.connectors.limited import Limit, LimitedSource
from minishuffle.connectors.pushed import PushedSource, TakenSink
from minishuffle.errors import UsageError
from minishuffle.limits import DURATION_MAX
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
from minishuffle.plan.pickling import copied_program
from minishuffle.plan.planner import check_ends, planned_programs, relation_of
from minishuffle.plan.programs import ProgramSpec
from minishuffle.plan.standstill import check_waits
from minishuffle.plan.time_steps import EventTimeStep

if TYPE_CHECKING:
    from minishuffle.operators.assign_event_time import Watermarks

__all__ = ["DetachedPlan", "TakenEnd", "detached", "limited", "limited_before"]

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
    none_is_late: bool = False
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
        elif isinstance(step, EventTimeStep):
            out_of_order = DURATION_MAX if self.none_is_late else step.out_of_order
            watermarks = self.watermarks or step.watermarks
            step = replace(step, out_of_order=out_of_order, watermarks=watermarks)
        return replace(made, step=step, parallelism=None, slot_group=None)

    def _sink(self, node: Node, step: SinkStep) -> SinkStep:
        label = step.collects or node.label
        if label in self.ends:
            raise UsageError(f"two sinks of the job are named {label!r}: give each its own, name('...')")
        sink = TakenSink(sends=self.sends and bool(step.collects))
        self.ends[label] = TakenEnd(sink, node.inputs[0].gives.schema)
        return replace(step, sink=sink, boundary=None)

    def plan(self, nodes: Sequence[Node], optimise: Collection[str] | None) -> DetachedPlan[S]:
        """That of nodes which were replaced."""
        programs, edges = planned_programs(with_own_ids(nodes), optimise)
        return DetachedPlan(programs, edges, self.sources, self.ends)


def detached(stream: Any) -> DetachedPlan[PushedSource]:
    """The plan of a stream or table, with a sink or without, whose sources give what is pushed.

    A watermark follows each record, so that which of them are late depends on their order alone.

    Raises:
        InvalidGraph: the stream would store what has no end, or would wait for itself.
        UsageError: it is none; sinks share a name, or nothing reads a side output.
    """
    return _planned(stream, _Replacing(_pushed, "each", sends=True), PUSHED_REWRITES)


def _pushed(label: str, step: SourceStep) -> PushedSource:
    known = step.gives.schema
    schema = None if isinstance(known, ObjectSchema) else known
    return PushedSource(label, schema, bounded=step.bounded, held=_held(step))


def _held(step: SourceStep) -> Any:
    """The rows or the table that a source has in memory; None: it has none there."""
    source = step.source if isinstance(step, ScanStep) else None
    if isinstance(source, ItemsSource):
        return source.items
    return source.table if isinstance(source, ArrowItemsSource) else None


def limited(stream: Any, records: int) -> DetachedPlan[LimitedSource]:
    """The plan of a stream or table whose sources give at most so many records each, and end there. Functions
    and sources of the user are copies, so that the job does not begin with what they hold afterwards.

    Raises:
        InvalidGraph: the stream would store what has no end, or would wait for itself.
        UsageError: it is none; what Spark writes would come to it; a function cannot be pickled; or as
            :func:`detached`.
    """
    plan = _planned(stream, _Replacing(partial(_first, records), None, sends=False), None)
    return replace(plan, programs=[(name, _copied(name, spec)) for name, spec in plan.programs])


def _copied(name: str, spec: ProgramSpec) -> ProgramSpec:
    """The program with copies of its functions; its source, and its sink, the last, stay themselves."""
    functions = [each for each in spec.operators if each[1].kind != "sink"]
    copy = copied_program(replace(spec, source=None, operators=functions), name)
    sinks = spec.operators[len(functions) :]
    return replace(copy, source=spec.source, operators=[*copy.operators, *sinks])


def limited_before(step: Node, records: int) -> DetachedPlan[LimitedSource]:
    """The same for what comes to a step of a plan, in whose order no record is late; functions are no copies.

    Raises:
        UsageError: what Spark writes would come to it.
    """
    end = Node.of(SinkStep(END, TakenSink(sends=False)), *step.inputs)
    replacing = _Replacing(partial(_first, records), None, sends=False, none_is_late=True)
    nodes = remade(list(inputs_first(one_of_each([end]))), replacing.replace)
    return replacing.plan(nodes, None)


def _first(records: int, label: str, step: SourceStep) -> LimitedSource:
    if not isinstance(step, ScanStep):
        raise UsageError(
            f"{label} gives rows while a job runs alone, so that there is nothing to read here: declare "
            "the schemas behind it by hand, or give it rows with minishuffle.testing.run(...)"
        )
    source = step.source
    if not isinstance(source, ItemsSource | ArrowItemsSource):  # in which no run changes anything
        source = copied_program(ProgramSpec(source), label).source
    return LimitedSource(source, Limit(records))


def _planned(stream: Any, replacing: _Replacing[S], optimise: Collection[str] | None) -> DetachedPlan[S]:
    relation = relation_of(stream)
    if not relation.node.is_sink:
        relation = relation.then(SinkStep(END, TakenSink(sends=True), collects=END))
    nodes = remade(list(inputs_first(one_of_each(relation.ends))), replacing.replace)
    check_waits(running(nodes))
    check_ends(nodes)
    return replacing.plan(nodes, optimise)
