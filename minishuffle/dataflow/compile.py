"""From what the user wrote to the job graph: chains become vertices, everything else edges.

A step joins the chain of its input when it has no other input, nothing else reads that input, both
run as many subtasks, and no exchange stands between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from minishuffle.dataflow.arguments import checked_parallelism
from minishuffle.dataflow.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.dataflow.nodes import Exchange, Feed, Node, Partitioning, inputs_first, one_of_each
from minishuffle.dataflow.operators.base import Operator, Output, Program
from minishuffle.dataflow.operators.chained import ChainedOperator, ForgivingOperator
from minishuffle.dataflow.pickling import pickle_program
from minishuffle.dataflow.pruning import pruned
from minishuffle.dataflow.standstill import FeedKey, blocking_feeds, check_waits
from minishuffle.dataflow.stream_base import StreamBase
from minishuffle.errors import InvalidGraph, ResourceExhausted, UsageError
from minishuffle.limits import CONTROL_PAYLOAD_BYTES_MAX, MIB

__all__ = ["compile_job"]


@dataclass(slots=True)
class _Chain:
    """Steps that share a thread, first to last; ``outputs`` grow as its consumers are found."""

    nodes: list[Node]
    parallelism: int
    slot_group: str
    outputs: list[Output] = field(default_factory=list)

    @property
    def operators(self) -> list[Operator]:
        return [operator for node in self.nodes for operator in node.operators]

    @property
    def name(self) -> str:
        labels = [node.label for node in self.nodes if not node.is_auxiliary]
        return " -> ".join(labels or [node.label for node in self.nodes])

    def operator_names(self) -> list[str]:
        sources = [node.label for node in self.nodes if node.is_source]
        return [*sources, *(operator.name for operator in self.operators)]


def compile_job(stream: StreamBase, *, parallelism: int = 1, settings: JobSettings | None = None) -> JobGraph:
    """The job graph of a stream or table that ends in a sink, with pickled programs.

    ``parallelism`` is that of every operator for which the stream does not say another.

    Raises:
        InvalidGraph: the stream has no sink, forwards between different parallelisms, or would store what has
            no end.
        UsageError: a function cannot be pickled, or ``parallelism`` is no number of subtasks.
        ResourceExhausted: what the job carries does not fit into a submission.
    """
    if not isinstance(stream, StreamBase):
        raise UsageError(
            f"a job is a Stream or a Table, not a {type(stream).__name__}: end it with collect()"
        )
    ends = stream.ends
    for end in ends:
        if not end.is_sink:
            raise InvalidGraph(
                f"the stream ends with {end.label!r} and goes nowhere: end it with collect(), to_count(), "
                "print(), to_files(path) or to(sink)"
            )
    nodes = list(inputs_first(one_of_each(ends)))
    check_waits(nodes)
    _check_claims(nodes)
    nodes = pruned(nodes)
    widths = _parallelisms(nodes, checked_parallelism(parallelism, "parallelism"))
    chains, edges = _chains_and_edges(nodes, widths)
    graph = JobGraph(
        vertices=[_vertex(chain) for chain in chains], edges=edges, settings=settings or JobSettings()
    )
    _check_size(graph)
    return graph


def _check_claims(nodes: list[Node]) -> None:
    collected = Counter(node.collects for node in nodes if node.collects)
    for name, count in collected.items():
        if count > 1:
            raise UsageError(
                f"{count} sinks of the job are named {name!r}: give each its own, collect('...')"
            )
    claimed: set[str] = set()
    read = {feed.side for node in nodes for feed in node.feeds}
    for operator in (operator for node in nodes for operator in node.operators):
        if isinstance(operator, ForgivingOperator) and operator.on_error == "side":
            _check_errors_are_read(operator, read)
        if isinstance(operator, ChainedOperator):
            _check_sides_are_read(operator, read)
        target = operator.claim() if isinstance(operator, ChainedOperator) else None
        if target in claimed:
            raise UsageError(f"two sinks of the job write to {target}: give each its own")
        if target is not None:
            claimed.add(target)


def _check_errors_are_read(operator: ForgivingOperator, read: Collection[str | None]) -> None:
    if not operator.errors_tag:
        raise UsageError(
            f"{operator.name} has no side output of errors, only map, map_async, filter, flat_map, process "
            "and to_table have: write on_error='dead_letter'"
        )
    if operator.errors_tag not in read:
        raise UsageError(
            f"nothing reads the errors of {operator.name}: give .errors right after it a sink, or write "
            "on_error='skip'"
        )


def _check_sides_are_read(operator: ChainedOperator, read: Collection[str | None]) -> None:
    for name, tag in operator.sides_to_read().items():
        if tag in read:
            continue
        if name in ("late", "late_right"):
            raise UsageError(
                f"nothing reads the late records of {operator.name}: give .{name} right after it a sink, or "
                "write late='drop', which counts them"
            )
        raise UsageError(
            f"nothing reads the side output {name!r} of {operator.name}: give .side({name!r}) right after it "
            "a sink, or take it out of sides= if no row goes there"
        )


def _parallelisms(nodes: list[Node], default: int) -> dict[Node, int]:
    """The number of subtasks of each node; ``nodes`` are inputs first."""
    widths: dict[Node, int] = {}
    for node in nodes:
        main = [feed for feed in node.feeds if feed.input == 0]
        inputs = {widths[feed.node] for feed in main}
        if node.parallelism is not None:
            widths[node] = node.parallelism
        elif node.follows and len(inputs) == 1 and all(_stays(feed) for feed in main):
            widths[node] = inputs.pop()
        else:
            widths[node] = default
    return widths


def _slot_groups(nodes: list[Node]) -> dict[Node, str]:
    """That of each node, as named or as all of its inputs have it; ``nodes`` are inputs first. (Flink:
    ``StreamGraphGenerator.determineSlotSharingGroup``.)"""
    groups: dict[Node, str] = {}
    for node in nodes:
        before = {groups[feed.node] for feed in node.feeds}
        inherited = before.pop() if len(before) == 1 else ""
        groups[node] = inherited if node.slot_group is None else node.slot_group
    return groups


def _stays(feed: Feed) -> bool:
    return feed.exchange is None or feed.exchange.partitioner in (None, "forward")


def _chains_and_edges(nodes: list[Node], widths: dict[Node, int]) -> tuple[list[_Chain], list[Edge]]:
    readers = Counter(feed.node for node in nodes for feed in node.feeds)
    chains: list[_Chain] = []
    chain_of: dict[Node, int] = {}
    edges: list[Edge] = []
    groups = _slot_groups(nodes)
    blocking = blocking_feeds(nodes)
    numbers: dict[FeedKey, int] = {}
    for node in nodes:
        alone = len(node.feeds) == 1 and readers[node.feeds[0].node] == 1
        if alone and groups[node] == groups[node.feeds[0].node] and _chains(node, widths):
            chain_of[node] = chain_of[node.feeds[0].node]
            if node.feeds[0].is_chosen:
                chains[chain_of[node]].nodes.append(_forwarding())
            chains[chain_of[node]].nodes.append(node)
            continue
        chain_of[node] = target = len(chains)
        chains.append(_Chain([node], widths[node], groups[node]))
        for number, feed in enumerate(node.feeds):
            source = chain_of[feed.node]
            exchange = feed.exchange or Exchange(None)
            partitioner = exchange.partitioner or _default_partitioner(widths[feed.node], widths[node])
            if partitioner == "forward":
                _check_forward(feed.node, node, widths)
            chains[source].outputs.append(
                Output(
                    len(edges),
                    partitioner,
                    exchange.keys,
                    exchange.choose,
                    feed.side,
                    feed.columns,
                    feed.times,
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
    return chains, edges


def _forwarding() -> Node:
    """What an exchange does to rows, where none is."""
    from minishuffle.dataflow.operators.functions import Forwarded

    return Node("forward", operators=(Forwarded(),), is_auxiliary=True)


def _chains(node: Node, widths: dict[Node, int]) -> bool:
    feed = node.feeds[0]
    stays = _stays(feed) and feed.side is None and feed.kind != "blocking"
    return stays and widths[feed.node] == widths[node]


def _default_partitioner(producers: int, consumers: int) -> Partitioning:
    return "forward" if producers == consumers else "rebalance"


def _check_forward(source: Node, target: Node, widths: dict[Node, int]) -> None:
    if widths[source] != widths[target]:
        raise InvalidGraph(
            f"forward() from {source.label!r} with parallelism {widths[source]} to {target.label!r} with "
            f"parallelism {widths[target]}: make them equal with parallel(), or write rescale()"
        )


def _vertex(chain: _Chain) -> Vertex:
    first, last = chain.nodes[0], chain.nodes[-1]
    program = Program(source=first.source, operators=chain.operators, outputs=chain.outputs)
    stream = first.boundary if first.is_source else None
    sink = last.boundary if last.is_sink else None
    return Vertex(
        name=chain.name,
        parallelism=chain.parallelism,
        operators=chain.operator_names(),
        is_source=first.is_source,
        bounded=first.bounded,
        slot_group=chain.slot_group,
        program=pickle_program(program, chain.name),
        stream=stream.name if stream else "",
        sink=sink.name if sink else "",
        stream_schema=stream.schema_message if stream else b"",
        sink_schema=sink.schema_message if sink else b"",
        collects=last.collects,
    )


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
