"""Rewrites of a logical plan: functions from nodes, inputs first, to nodes that give the same.

Each can be left out: a plan that is not rewritten reads and ships more, runs in more threads, and gives the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from minishuffle.errors import UsageError
from minishuffle.plan.combine_steps import combining, combining_everywhere
from minishuffle.plan.end_steps import ScanStep
from minishuffle.plan.nodes import Feed, Needed, Node, Relation, remade, running
from minishuffle.plan.row_steps import ForwardStep

__all__ = ["REWRITES", "Rewrite", "chained", "rewritten"]

Rewrite: TypeAlias = Callable[[Sequence[Node]], list[Node]]


# --- what is read ---------------------------------------------------------------------------------


def needed_columns(nodes: Sequence[Node]) -> list[Node]:
    """Nodes that say what is read of their feeds and of what they give: no other column, and no event time,
    is shipped.

    Found backwards from the sinks: a step says what it needs of its inputs for what is read of what it gives.
    """
    needs = _Needs(running(nodes))

    def noted(node: Node, made: Node) -> Node:
        if not node.step.runs:
            return made
        reads = tuple(needs.of_feeds[node, number] for number in range(len(node.feeds)))
        return replace(made, reads=reads, needed=needs.of_node(node))

    return remade(nodes, noted)


class _Needs:
    """The columns and event times that are read of each feed, and of the output of each node; found from the
    sinks back."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.of_feeds: dict[tuple[Node, int], Needed] = {}
        self._columns: dict[Node, frozenset[str] | None] = {}
        """What is read of nodes, side outputs aside; None: all columns."""
        self._timed: set[Node] = set()
        """Nodes with event times that are read, beside what they give or put aside."""
        self._aside: set[Node] = set()
        """Nodes with a side output of input records that somebody reads: they need all columns."""
        for node in reversed(nodes):
            for number, feed in enumerate(node.feeds):
                self._note(node, number, feed)

    def of_node(self, node: Node) -> Needed:
        """What is read of what it gives."""
        return Needed(self._columns.get(node), node in self._timed)

    def _note(self, node: Node, number: int, feed: Feed) -> None:
        needed = node.step.needs(self.of_node(node), feed.input)
        if node in self._aside:
            needed = needed.all_columns()
        keys = (feed.exchange and feed.exchange.keys) or ()
        # A batch without columns would have no rows.
        needed = replace(needed.also(*keys), columns=needed.also(*keys).columns or None)
        self.of_feeds[node, number] = needed
        before = feed.node
        if needed.times:
            self._timed.add(before)
        if feed.side is not None:
            self._aside.add(before)
        elif before in self._columns:
            others = self._columns[before]
            both = None if needed.columns is None or others is None else needed.columns | others
            self._columns[before] = both
        else:
            self._columns[before] = needed.columns


def projected_scans(nodes: Sequence[Node]) -> list[Node]:
    """Sources that read the columns alone that are needed of them, if they can: behind ``needed_columns``."""

    def projected(node: Node, made: Node) -> Node:
        columns = node.needed.columns
        if columns is None or not isinstance(node.step, ScanStep):
            return made
        return replace(made, step=node.step.projected(columns))

    return remade(nodes, projected)


# --- threads --------------------------------------------------------------------------------------


def chaining(nodes: Sequence[Node]) -> list[Node]:
    """Steps run in the thread of their input, wherever that is their only one, is read by nobody else, and no
    exchange or other number of subtasks or slot group comes between."""
    return chained(nodes, lambda node: True)


def chained(nodes: Sequence[Node], may_chain: Callable[[Node], bool]) -> list[Node]:
    """The same for those nodes alone that ``may_chain``; how many subtasks run of each is known."""
    readers = Counter(feed.node for node in running(nodes) for feed in node.feeds)

    def joined(node: Node, made: Node) -> Node:
        feeds = node.feeds
        if not node.step.runs or node.is_chained or len(feeds) != 1 or not may_chain(node):
            return made
        (feed,) = feeds
        if readers[feed.node] > 1 or not _may_follow(node, feed):
            return made
        return replace(made, inputs=_left(made, feed), is_chained=True)

    return remade(nodes, joined)


def _may_follow(node: Node, feed: Feed) -> bool:
    before = feed.node
    stays = feed.stays and feed.side is None and feed.kind != "blocking"
    return stays and (before.parallelism, before.slot_group) == (node.parallelism, node.slot_group)


def _left(node: Node, feed: Feed) -> tuple[Relation, ...]:
    """The input of a node that is left in the thread it comes from: where ``forward()`` says so a step
    stands for the exchange that is none."""
    before = Relation(node.feeds[0].node)
    if not feed.is_chosen:
        return (before,)
    forward = Node.of(ForwardStep(feed.gives), before)
    placed = replace(forward, parallelism=node.parallelism, slot_group=node.slot_group, is_chained=True)
    return (Relation(replace(placed, needed=feed.needed, reads=node.reads)),)


# --- all of them ----------------------------------------------------------------------------------

REWRITES: Final[Mapping[str, Rewrite]] = {
    "combining": combining,
    "combining_everywhere": combining_everywhere,
    "needed_columns": needed_columns,
    "projected_scans": projected_scans,
    "chaining": chaining,
}
"""By name, in the order in which they run."""
ON_DEMAND: Final = frozenset({"combining_everywhere"})
"""Those that are not made unless they are asked for."""


def rewritten(nodes: Sequence[Node], optimise: Collection[str] | None = None) -> list[Node]:
    """The nodes after these rewrites (None: all but those on demand).

    Raises:
        UsageError: there is no such rewrite.
    """
    chosen = REWRITES.keys() - ON_DEMAND if optimise is None else frozenset(optimise)
    if unknown := sorted(chosen - REWRITES.keys()):
        raise UsageError(f"there is no rewrite {unknown[0]!r}: write some of {', '.join(REWRITES)}")
    found = list(nodes)
    for name, rewrite in REWRITES.items():
        if name in chosen:
            found = rewrite(found)
    return found
