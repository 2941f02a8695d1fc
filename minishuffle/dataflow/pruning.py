"""Which columns and event times each step of a job reads, so that no others are read from files or shipped.

Found backwards from the sinks: a step says which columns of its inputs it needs for those that are wanted of
what it gives (:attr:`Node.reads`); one that does not say needs all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minishuffle.dataflow.nodes import Feed, Names, Node, Reads
from minishuffle.dataflow.operators.base import Used
from minishuffle.dataflow.operators.times import EVENT_TIME

__all__ = ["pruned", "reads_also", "reads_only"]


def reads_also(*names: str) -> Reads:
    """What a step reads that passes columns on, and looks at these too."""
    return lambda wanted, input: None if wanted is None else wanted | frozenset(names)


def reads_only(*names: str) -> Reads:
    """What a step reads that looks at these, whatever is wanted."""
    return lambda wanted, input: frozenset(names)


def pruned(nodes: Sequence[Node]) -> list[Node]:
    """The same steps, inputs first, whose sources, operators and feeds give the columns alone that are
    read."""
    wanted = _Wanted(nodes)
    made: dict[Node, Node] = {}
    for node in nodes:
        feeds = tuple(
            replace(
                feed,
                node=made[feed.node],
                columns=wanted.of_feeds[node, number],
                times=wanted.of_feed_times[node, number],
            )
            for number, feed in enumerate(node.feeds)
        )
        takes = {feed.input: feed.columns for feed in feeds}
        made[node] = _narrowed(node, feeds, Used(wanted.of_nodes.get(node), takes, wanted.times[node]))
    return list(made.values())


class _Wanted:
    """The columns that are wanted of each feed of a node, and of what a node gives."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.of_feeds: dict[tuple[Node, int], Names] = {}
        self.of_nodes: dict[Node, Names] = {}
        self.of_feed_times: dict[tuple[Node, int], bool] = {}
        self.times: dict[Node, bool] = defaultdict(bool)
        """Whether something reads the event times beside what a node gives, side outputs included."""
        self._aside: set[Node] = set()
        """Nodes with a side output of input records that somebody reads."""
        for node in reversed(nodes):
            for number, feed in enumerate(node.feeds):
                self._note(node, number, feed)

    def _note(self, node: Node, number: int, feed: Feed) -> None:
        self.of_feed_times[node, number] = reads_times = self._reads_times(node, feed.input)
        self.times[feed.node] |= reads_times
        keys = frozenset((feed.exchange and feed.exchange.keys) or ())
        wanted = None
        if node.reads is not None and node not in self._aside:
            gives = self.of_nodes.get(node)
            if gives is not None and self.times[node]:
                gives |= {EVENT_TIME}
            wanted = node.reads(gives, feed.input)
            wanted = None if wanted is None else wanted - {EVENT_TIME}
        # A batch without columns would have no rows.
        wanted = wanted | keys or None if wanted is not None else None
        self.of_feeds[node, number] = wanted
        if feed.side is not None:
            self._aside.add(feed.node)
        elif feed.node in self.of_nodes:
            others = self.of_nodes[feed.node]
            self.of_nodes[feed.node] = None if wanted is None or others is None else wanted | others
        else:
            self.of_nodes[feed.node] = wanted

    def _reads_times(self, node: Node, input: int) -> bool:
        gives, reads = self.of_nodes.get(node), self.times[node]
        for operator in reversed(node.operators):
            reads = operator.takes_times(input, Used(gives, {}, reads))
        return reads


def _narrowed(node: Node, feeds: tuple[Feed, ...], used: Used) -> Node:
    """The node on those feeds, its source and operators made for the columns that are left."""
    source: Any = node.source
    if used.gives is not None and hasattr(source, "for_columns"):
        source = source.for_columns(used.gives)
    operators = []
    for operator in node.operators:
        narrowing: Any = getattr(operator, "for_columns", None)
        operators.append(operator if narrowing is None else narrowing(used))
    return replace(node, feeds=feeds, source=source, operators=tuple(operators))
