"""The planner: from the logical plan that the user wrote to the job graph that workers run.

First each step gets its number of subtasks and its slot group, then come the rewrites. Steps that these
leave in the thread of their input are one chain with it, a vertex; all other feeds become edges.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minishuffle.errors import InvalidGraph, ResourceExhausted, UsageError
from minishuffle.exchange.schemas import without_dictionary
from minishuffle.limits import CONTROL_PAYLOAD_BYTES_MAX, MIB
from minishuffle.operators.base import Output
from minishuffle.plan.arguments import checked_parallelism
from minishuffle.plan.end_steps import ExternalStep, ScanStep, SinkStep
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, StatefulOperator, Vertex
from minishuffle.plan.guarantee import check_guarantee
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import (
    Exchange,
    Feed,
    Known,
    Node,
    ObjectSchema,
    Partitioning,
    Relation,
    Step,
    inputs_first,
    one_of_each,
    remade,
    running,
    with_own_ids,
)
from minishuffle.plan.pickling import pickle_program
from minishuffle.plan.programs import ProgramSpec
from minishuffle.plan.rewrites import chained, rewritten
from minishuffle.plan.standstill import FeedKey, blocking_feeds, check_waits
from minishuffle.plan.time_steps import EventTimeStep

__all__ = [
    "JobPlan",
    "check_ends",
    "compile_job",
    "logical_plan",
    "plan_job",
    "planned_programs",
    "relation_of",
]


@dataclass(slots=True)
class _Chain:
    """Steps that share a thread, first to last; ``outputs`` grow as its consumers are found."""

    nodes: list[Node]
    parallelism: int
    slot_group: str
    tags: Mapping[Node, Mapping[str, str]]
    outputs: list[Output] = field(default_factory=list)

    def operators(self) -> list[tuple[str, OperatorSpec]]:
        return [
            (node.label, _spec(node, self.tags.get(node, {}))) for node in self.nodes if not node.is_source
        ]

    @property
    def name(self) -> str:
        labels = [node.label for node in self.nodes if not node.is_auxiliary]
        return " -> ".join(labels or [node.label for node in self.nodes])

    def operator_names(self) -> list[str]:
        return [node.label for node in self.nodes]

    def states(self) -> list[StatefulOperator]:
        """Its operators that may hold state, and its source."""
        return [
            StatefulOperator(id=node.id, name=node.label, kind="source", reads=_read_of_source(node))
            if node.is_source
            else _stateful(node, _spec(node, self.tags.get(node, {})))
            for node in self.nodes
            if node.is_source or node.step.has_state
        ]

    def program(self) -> ProgramSpec:
        first = self.nodes[0].step
        source = first.source if isinstance(first, ScanStep) else None
        times = self.nodes[0].needed.times
        return ProgramSpec(source, self.operators(), self.outputs, times=times)


def _spec(node: Node, tags: Mapping[str, str]) -> OperatorSpec:
    spec = node.step.operator(node, tags)
    return replace(spec, id=node.id) if node.step.has_state else spec


def _read_of_source(node: Node) -> dict[str, str]:
    """See :attr:`StatefulOperator.reads`."""
    layout = node.step.split_layout if isinstance(node.step, ScanStep) else ""
    return {"splits": layout} if layout else {}


def _stateful(node: Node, spec: OperatorSpec) -> StatefulOperator:
    keys = [each for each in spec.parameters.get("keys") or () if isinstance(each, str)]
    columns = spec.parameters.get("columns")
    aggregates = dict(columns) if isinstance(columns, Mapping) else {}
    return StatefulOperator(
        id=node.id,
        name=node.label,
        kind=spec.kind,
        keys=keys,
        outputs=[*aggregates] if isinstance(columns, Mapping) else ["count"] if keys else [],
        reads=_read_of(spec, _types_of(node.step), keys, aggregates),
    )


def _types_of(step: Step) -> dict[str, str]:
    """The types of the columns that come to a step with one input, those of categories without these."""
    given: Known | None = getattr(step, "given", None)
    if given is None or isinstance(given.schema, ObjectSchema):
        return {}
    return {field.name: str(without_dictionary(field.type)) for field in given.arrow}


def _read_of(
    spec: OperatorSpec, types: Mapping[str, str], keys: Sequence[str], aggregates: Mapping[str, Any]
) -> dict[str, str]:
    """See :attr:`StatefulOperator.reads`."""
    from minishuffle.operators.aggregates import BY_TIME  # For weight.

    found = {}
    if keys and types.keys() >= set(keys):
        found["keys"] = ", ".join(types[key] for key in keys)
    found |= _cut_of(spec)
    by_time = dict.fromkeys(column for column, function in aggregates.values() if function in BY_TIME)
    for name, (column, function) in aggregates.items():
        text = function if function == "count" or column not in types else f"{function} of {types[column]}"
        # Which of several rows of one time is taken depends on the columns of all of these.
        found[f"aggregate {name}"] = text + (f" by {', '.join(by_time)}" if function in BY_TIME else "")
    return found


def _cut_of(spec: OperatorSpec) -> dict[str, str]:
    """How an operator cuts records into windows, which of them it keeps, and which it joins."""
    given = spec.parameters
    match given:
        case {"assigner": windows} | {"closing": windows}:
            return {"windows": str(windows)}
        case {"bounds": (before, after), "how": how, "times": times}:
            seconds = before / 1_000_000, after / 1_000_000
            apart = (
                ""
                if times[0].is_none
                else ", right rows {:.12g} s before to {:.12g} s after".format(*seconds)
            )
            return {"pairs": f"{how}{apart}"}
        case {"tolerance": int(tolerance)}:
            return {"pairs": f"the last right row of {tolerance / 1_000_000:.12g} s"}
        case {"tolerance": None}:
            return {"pairs": "the last right row"}
    if spec.kind == "top_n":
        which = "greatest" if given["descending"] else "smallest"
        return {"rows": f"the {given['n']:,} {which} by {given['by']}"}
    return {}


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Both plans of a job. ``nodes`` are the logical one, rewritten, inputs first; ``shipped`` is the feed
    behind each edge of the job graph."""

    nodes: list[Node]
    shipped: list[FeedKey]
    graph: JobGraph


def compile_job(
    stream: Any,
    *,
    parallelism: int = 1,
    settings: JobSettings | None = None,
    optimise: Collection[str] | None = None,
) -> JobGraph:
    """The job graph alone of :func:`plan_job`."""
    return plan_job(stream, parallelism=parallelism, settings=settings, optimise=optimise).graph


def plan_job(
    stream: Any,
    *,
    parallelism: int = 1,
    settings: JobSettings | None = None,
    optimise: Collection[str] | None = None,
    whole: bool = True,
) -> JobPlan:
    """The plans of a stream or table that ends in a sink, with pickled programs.

    Args:
        parallelism: of every operator for which the stream does not say another.
        optimise: the names of the rewrites to make, see ``rewrites``; None: all but those on demand.
        whole: False: it may go on, and is to be looked at only.

    Raises:
        InvalidGraph: the stream has no sink, forwards between different parallelisms, would store what has no
            end, or has what its guarantee refuses.
        UsageError: a function cannot be pickled, or ``parallelism`` is no number of subtasks.
        ResourceExhausted: what the job carries does not fit into a submission.
    """
    parallelism = checked_parallelism(parallelism, "parallelism")
    nodes = _rewritten(logical_plan(stream, whole=whole), parallelism, optimise)
    chains, edges, shipped = _chains_and_edges(running(nodes))
    graph = JobGraph(
        vertices=[_vertex(chain) for chain in chains], edges=edges, settings=settings or JobSettings()
    )
    _check_size(graph)
    check_guarantee(graph)
    return JobPlan(nodes, shipped, graph)


def planned_programs(
    nodes: Sequence[Node], optimise: Collection[str] | None
) -> tuple[list[tuple[str, ProgramSpec]], list[Edge]]:
    """The chains of a logical plan, each with one subtask: their names and programs, those in front first,
    and the edges between them."""
    chains, edges, _ = _chains_and_edges(running(_rewritten(nodes, 1, optimise)))
    return [(chain.name, chain.program()) for chain in chains], edges


def _rewritten(nodes: Sequence[Node], parallelism: int, optimise: Collection[str] | None) -> list[Node]:
    """Placed, rewritten, and with each step chained that must be."""
    return chained(rewritten(placed(nodes, parallelism), optimise), lambda node: node.step.joins_input)


def relation_of(stream: Any) -> Relation:
    """What a stream or table stands for.

    Raises:
        UsageError: it is none.
    """
    relation = getattr(stream, "plan", None)
    if not isinstance(relation, Relation):
        kind, way = type(stream).__name__, "end it with collect()"
        if kind.startswith(("Keyed", "Windowed")):
            way = "say what to compute for each key, such as count()"
        elif inspect.isroutine(stream):
            way = f"call it: {stream.__name__}(...)"
        raise UsageError(f"a job is a Stream or a Table, not a {kind}: {way}")
    return relation


def logical_plan(stream: Any, *, whole: bool = True) -> list[Node]:
    """The nodes of a stream or table that ends in a sink, or need not if it is not ``whole``, inputs first,
    as the user wrote them.

    Raises:
        InvalidGraph: the stream has no sink, would store what has no end, or would wait for itself.
        UsageError: it is none; sinks share a name or a target, or nothing reads a side output.
    """
    relation = relation_of(stream)
    if relation.node.is_sink:
        nodes = list(inputs_first(one_of_each(relation.ends)))
    elif whole:
        raise InvalidGraph(
            f"the stream ends with {relation.ends[0].label!r} and goes nowhere: end it with collect(), "
            "to_count(), print(), to_files(path) or to(sink)"
        )
    else:
        nodes = list(inputs_first(one_of_each([relation.node])))
    check_waits(running(nodes))
    if relation.node.is_sink:
        check_ends(nodes)
    return with_own_ids(nodes)


def check_ends(nodes: list[Node]) -> None:
    """Raises UsageError if sinks share a name or a target, or nothing reads a side output."""
    _check_sinks([node.step for node in nodes if isinstance(node.step, SinkStep)])
    read = {(feed.node, feed.side) for node in nodes for feed in node.feeds}
    for node in nodes:
        _check_errors_are_read(node, read)
        _check_sides_are_read(node, read)


def _check_sinks(sinks: list[SinkStep]) -> None:
    collected = Counter(sink.collects for sink in sinks if sink.collects)
    for name, count in collected.items():
        if count > 1:
            raise UsageError(
                f"{count} sinks of the job are named {name!r}: give each its own, collect('...')"
            )
    claimed: set[str] = set()
    for sink in sinks:
        target = sink.claim()
        if target in claimed:
            raise UsageError(f"two sinks of the job write to {target}: give each its own")
        if target is not None:
            claimed.add(target)


def _check_errors_are_read(node: Node, read: Collection[tuple[Node, str | None]]) -> None:
    if node.step.on_error != "side":
        return
    if "errors" not in node.step.sides:
        raise UsageError(
            f"{node.label} has no side output of errors, only map, map_async, filter, flat_map, process "
            "and to_table have: write on_error='dead_letter'"
        )
    if (node, "errors") not in read:
        raise UsageError(
            f"nothing reads the errors of {node.label}: give .errors right after it a sink, or write "
            "on_error='skip'"
        )


def _check_sides_are_read(node: Node, read: Collection[tuple[Node, str | None]]) -> None:
    for name in node.step.sides:
        if name not in node.step.must_be_read or (node, name) in read:
            continue
        if name in ("late", "late_right"):
            raise UsageError(
                f"nothing reads the late records of {node.label}: give .{name} right after it a sink, or "
                "write late='drop', which counts them"
            )
        raise UsageError(
            f"nothing reads the side output {name!r} of {node.label}: give .side({name!r}) right after it "
            "a sink, or take it out of sides= if no row goes there"
        )


def placed(nodes: Sequence[Node], parallelism: int) -> list[Node]:
    """The nodes, inputs first, with the number of subtasks of each and its slot group: as said, or as its
    inputs have it. (Flink: ``StreamGraphGenerator.determineSlotSharingGroup``.)"""

    def of_inputs(node: Node, made: Node) -> Node:
        if not node.step.runs:
            return made
        feeds = made.feeds
        groups = {feed.node.slot_group for feed in feeds}
        inherited = groups.pop() if len(groups) == 1 else ""
        return replace(
            made,
            parallelism=_subtasks(made, feeds, parallelism),
            slot_group=inherited if node.slot_group is None else node.slot_group,
        )

    return remade(nodes, of_inputs)


def _subtasks(node: Node, feeds: Sequence[Feed], default: int) -> int:
    main = [feed for feed in feeds if feed.input == 0]
    before = {_width(feed.node) for feed in main}
    if node.parallelism is not None:
        return node.parallelism
    if node.step.follows and len(before) == 1 and all(feed.stays for feed in main):
        return before.pop()
    return default


def _width(node: Node) -> int:
    """How many subtasks run of a node that is placed."""
    assert node.parallelism is not None
    return node.parallelism


def _chains_and_edges(nodes: list[Node]) -> tuple[list[_Chain], list[Edge], list[FeedKey]]:
    """The chains and edges of a job, and which feed each edge is; ``nodes`` are those that run."""
    chains: list[_Chain] = []
    tags = _side_tags(nodes)
    chain_of: dict[Node, int] = {}
    edges: list[Edge] = []
    blocking = blocking_feeds(nodes)
    numbers: dict[FeedKey, int] = {}
    for node in nodes:
        feeds = node.feeds
        if node.is_chained:
            chain_of[node] = chain_of[feeds[0].node]
            chains[chain_of[node]].nodes.append(node)
            continue
        chain_of[node] = target = len(chains)
        chains.append(_Chain([node], _width(node), node.slot_group or "", tags))
        for number, feed in enumerate(feeds):
            source = chain_of[feed.node]
            exchange = feed.exchange or Exchange(None)
            partitioner = exchange.partitioner or _default_partitioner(_width(feed.node), _width(node))
            if partitioner == "forward":
                _check_forward(feed.node, node)
            chains[source].outputs.append(
                Output(
                    len(edges),
                    partitioner,
                    exchange.keys,
                    exchange.choose,
                    None if feed.side is None else tags[feed.node][feed.side],
                    feed.needed.columns,
                    feed.needed.times,
                )
            )
            numbers[node, number] = len(edges)
            kind = "blocking" if (node, number) in blocking else exchange.kind or "pipelined_bounded"
            edges.append(
                Edge(source=source, target=target, input=feed.input, partitioner=partitioner, kind=kind)
            )
    for implied, cause in blocking.items():
        if cause is not None:
            edge = numbers[implied]
            edges[edge] = edges[edge].model_copy(update={"because_of": numbers[cause]})
    return chains, edges, list(numbers)


def _side_tags(nodes: list[Node]) -> dict[Node, dict[str, str]]:
    """The tags of side outputs by name, for nodes that have some; no two of a job are the same."""
    return {
        node: {name: f"{number}-{name}" for name in node.step.sides}
        for number, node in enumerate(nodes)
        if node.step.sides
    }


def _default_partitioner(producers: int, consumers: int) -> Partitioning:
    return "forward" if producers == consumers else "rebalance"


def _check_forward(source: Node, target: Node) -> None:
    if source.parallelism != target.parallelism:
        raise InvalidGraph(
            f"forward() from {source.label!r} with parallelism {source.parallelism} to {target.label!r} with "
            f"parallelism {target.parallelism}: make them equal with parallel(), or write rescale()"
        )


def _vertex(chain: _Chain) -> Vertex:
    first, last = chain.nodes[0], chain.nodes[-1]
    scan = first.step if isinstance(first.step, ScanStep) else None
    stream = first.step.boundary if isinstance(first.step, ExternalStep) else None
    sink = last.step if isinstance(last.step, SinkStep) else None
    kept = None if sink is None else sink.boundary
    return Vertex(
        name=chain.name,
        parallelism=chain.parallelism,
        operators=chain.operator_names(),
        is_source=first.is_source,
        bounded=first.bounded,
        replayable=scan.replayable if scan is not None else True,
        acknowledges=scan is not None and scan.acknowledges,
        by_order=all(_goes_by_order(node.step) for node in chain.nodes),
        in_turn=scan is not None and not scan.same_batches and _in_turn(chain),
        slot_group=chain.slot_group,
        program=pickle_program(chain.program(), chain.name),
        stream=stream.name if stream else "",
        sink=kept.name if kept else "",
        stream_schema=stream.schema_message if stream else b"",
        sink_schema=kept.schema_message if kept else b"",
        collects=sink.collects if sink else "",
        keeps=sink.name if sink and sink.sink.keeps_in_process else "",
        states=chain.states(),
    )


def _goes_by_order(step: Step) -> bool:
    """Whether it makes the same of the same rows. Not if it leaves out records for which a function raises:
    the next time it may not, as where it asks a service."""
    return step.by_order and step.on_error == "fail"


def _in_turn(chain: _Chain) -> bool:
    """Whether its source's splits are read in turn: see :class:`~minishuffle.runtime.reader.SourceReader`."""
    return not chain.nodes[0].bounded or any(isinstance(node.step, EventTimeStep) for node in chain.nodes)


def _check_size(graph: JobGraph) -> None:
    size = sum(len(vertex.program) for vertex in graph.vertices)
    bound = CONTROL_PAYLOAD_BYTES_MAX
    if size > bound:
        largest = max(graph.vertices, key=lambda vertex: len(vertex.program))
        raise ResourceExhausted(
            f"the job carries {size / MIB:.1f} MiB and at most {bound / MIB:.0f} MiB fit; "
            f"{len(largest.program) / MIB:.1f} MiB of it in {largest.name!r}: write large data to a file "
            "and read it with Table.from_files or Stream.text, make it on the workers with Stream.generate, "
            "or read it there with Stream.source"
        )
