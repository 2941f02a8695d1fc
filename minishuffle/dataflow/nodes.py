"""What a :class:`~minishuffle.dataflow.stream.Stream` is made of: immutable nodes that point at their inputs.

A node is one step that the user wrote: a source, or operators that run one after the other. Nodes
know nothing of chains, threads or edge numbers: ``compile`` finds those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from minishuffle.dataflow.graph import PartitionKind
from minishuffle.dataflow.knownrows import ErrorRows, KnownRows, all_known
from minishuffle.dataflow.operators.base import Operator, Source
from minishuffle.errors import InvalidGraph

__all__ = [
    "Boundary",
    "Exchange",
    "Feed",
    "Names",
    "Node",
    "Partitioning",
    "Reads",
    "check_not_sinks",
    "inputs_first",
    "known_rows",
    "named_step",
    "one_of_each",
    "with_last_step",
]

Names: TypeAlias = "frozenset[str] | None"
"""Names of columns; None: all."""
Reads: TypeAlias = "Callable[[Names, int], Names]"
"""The columns that a step reads of an input, by its number, for those that are wanted of what it gives; among
them ``EVENT_TIME`` if the event times beside that are."""
Partitioning: TypeAlias = Literal["hash", "rebalance", "rescale", "forward", "broadcast", "custom"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """How records find their subtask; the fields are those of ``operators.base.Output``.

    Without a partitioner only the kind of the edge is said, and the next step chooses how.
    """

    partitioner: Partitioning | None
    keys: tuple[str, ...] | None = None
    choose: Callable[[Any, int], int] | None = None
    kind: PartitionKind | None = None
    """None: ``pipelined_bounded``."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where records come from another program, or are kept for one to read.

    ``name`` is the stream's or the sink's, ``schema_message`` an Arrow schema as an IPC message.
    """

    name: str
    schema_message: bytes
    bounded: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One step. A source has no feeds and no operators, every other node has both."""

    label: str
    feeds: tuple[Feed, ...] = ()
    source: Source | None = None
    boundary: Boundary | None = None
    """The stream that external clients write, for a source without ``source``; what they read, for a sink."""
    operators: tuple[Operator, ...] = ()
    parallelism: int | None = None
    """None: the job's, or with ``follows`` the input's."""
    slot_group: str | None = None
    """None: that of its inputs, if they are of one."""
    follows: bool = False
    """Runs where its only input runs, unless the user says otherwise."""
    is_auxiliary: bool = False
    """Serves the step after it (``key_by``) and is left out of names."""
    is_sink: bool = False
    collects: str = ""
    """The name of a sink whose rows the client gets; no other sink of the job has it."""
    reads: Reads | None = None
    """None: all columns."""
    rows: tuple[KnownRows, ...] = ()
    """What the rows that it gives may be, if all is known; nothing of columns."""
    errors: tuple[str, ErrorRows] | None = None
    """The tag of its side output of errors, and what those are."""
    changed: Node | None = None
    """The same step before it was named or made parallel: where both are read, it still is one."""

    @property
    def bounded(self) -> bool:
        """Whether its data come to an end: those of every source before it do."""
        return all(getattr(node.source or node.boundary, "bounded", True) for node in inputs_first([self]))

    @property
    def is_source(self) -> bool:
        return not self.feeds

    def named(self, label: str) -> Node:
        """The same under another name, which errors and the job's tables show."""
        if not self.operators:
            return replace(self, label=label)
        last = copy.copy(self.operators[-1])
        last.name = label
        return replace(self, label=label, operators=(*self.operators[:-1], last))


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """One input of a node. Without an exchange records stay where they are, if they can.

    ``input`` is the number under which the node's operator takes it. With ``side``, it is that side
    output of ``node`` that is read, not its records.
    """

    node: Node
    exchange: Exchange | None = None
    input: int = 0
    side: str | None = None
    columns: Names = None
    """Those that are read; found when a job is compiled."""
    times: bool = False
    """Event times beside the records are read; found likewise."""

    @property
    def is_chosen(self) -> bool:
        """Whether it is said who gets which record."""
        return self.exchange is not None and self.exchange.partitioner is not None

    @property
    def kind(self) -> PartitionKind | None:
        """The kind of the edge, where one is said."""
        return None if self.exchange is None else self.exchange.kind

    def exchanged(self, exchange: Exchange, input: int = 0) -> Feed:
        """The same, with that exchange, of the kind that is said already."""
        return replace(self, exchange=replace(exchange, kind=self.kind), input=input)


def known_rows(feeds: Sequence[Feed]) -> tuple[KnownRows, ...]:
    """What the rows of all feeds may be; nothing if it is not known of one."""
    return all_known(map(_known_of, feeds))


def _known_of(feed: Feed) -> tuple[KnownRows, ...]:
    if feed.side is None:
        return feed.node.rows
    errors = feed.node.errors
    return (errors[1],) if errors is not None and errors[0] == feed.side else ()


def inputs_first(ends: Sequence[Node]) -> Iterator[Node]:
    """Every node that leads to ``ends``, once, each after its inputs."""
    seen: set[Node] = set()
    stack = [(node, False) for node in reversed(ends)]
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((feed.node, False) for feed in reversed(node.feeds))


def named_step(node: Node) -> str:
    """The name of a step, or for one that only serves the next that of the step before it."""
    while node.is_auxiliary and len(node.feeds) == 1:
        node = node.feeds[0].node
    return node.label


def with_last_step(feed: Feed, method: str, change: Callable[[Node], Node]) -> Feed:
    """``feed`` with the last step that the user wrote changed, under the auxiliary ones after it.

    Raises:
        InvalidGraph: that step has given a side output, which is nothing that ``method`` could be about.
    """
    if feed.side is not None:
        raise InvalidGraph(
            f"{method}() cannot follow .late, .panes, .errors or .side(...), which are no operators: call it "
            "before, or after the next one"
        )
    node = feed.node
    if node.is_auxiliary and len(node.feeds) == 1 and node.feeds[0].exchange is None:
        before = with_last_step(node.feeds[0], method, change)
        return replace(feed, node=replace(node, feeds=(before,), changed=node))
    return replace(feed, node=replace(change(node), changed=node))


def one_of_each(ends: Sequence[Node]) -> list[Node]:
    """The ends with every step once: one of which a side output is read beside its named or parallel self
    is that self.

    Raises:
        InvalidGraph: it was changed in two ways.
    """
    nodes = list(inputs_first(ends))
    aside = {_origin(feed.node) for node in nodes for feed in node.feeds if feed.side is not None}
    versions: dict[Node, Node] = {}
    for node in nodes:
        origin = _origin(node)
        if origin in aside:
            before = versions.setdefault(origin, node)
            if before in _history(node):
                versions[origin] = node
            elif node not in _history(before):
                raise InvalidGraph(
                    f"the step {origin.label!r} is changed in two ways, {before.label!r} and {node.label!r}, "
                    "and a side output of it is read: call name() and parallel() once, and use what they give"
                )
    if not versions:
        return list(ends)
    made: dict[Node, Node] = {}

    def remade(node: Node) -> Node:
        node = versions.get(_origin(node), node)
        if node not in made:
            made[node] = replace(
                node, feeds=tuple(replace(feed, node=remade(feed.node)) for feed in node.feeds)
            )
        return made[node]

    return list(map(remade, ends))


def _history(node: Node) -> list[Node]:
    """The step and what it was before."""
    return [node] if node.changed is None else [node, *_history(node.changed)]


def _origin(node: Node) -> Node:
    return _history(node)[-1]


def check_not_sinks(feeds: Sequence[Feed], method: str) -> None:
    """Raises InvalidGraph if a sink would have to give records to ``method``."""
    for feed in feeds:
        if feed.node.is_sink:
            raise InvalidGraph(
                f"{method} cannot follow the sink {feed.node.label!r}: call it on the stream before the sink "
                "(a stream may be used more than once)"
            )
