"""Rewrites of a logical plan: functions from nodes, inputs first, to nodes that give the same.

Each can be left out: a plan that is not rewritten reads and ships more, and gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from minishuffle.errors import UsageError
from minishuffle.plan.end_steps import ScanStep
from minishuffle.plan.nodes import Feed, Needed, Node

__all__ = ["CHAINING", "REWRITES", "Rewrite", "rewritten"]

Rewrite: TypeAlias = Callable[[Sequence[Node]], list[Node]]


def needed_columns(nodes: Sequence[Node]) -> list[Node]:
    """Feeds and nodes that say what is read of them: no other column, and no event time, is shipped.

    Found backwards from the sinks: a step says what it needs of its inputs for what is read of what it gives.
    """
    needs = _Needs(nodes)
    made: dict[Node, Node] = {}
    for node in nodes:
        feeds = tuple(
            replace(feed, node=made[feed.node], needed=needs.of_feeds[node, number])
            for number, feed in enumerate(node.feeds)
        )
        made[node] = replace(node, feeds=feeds, needed=needs.of_node(node))
    return list(made.values())


class _Needs:
    """What is read of the feeds of nodes, and of what nodes give."""

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
    made: dict[Node, Node] = {}
    for node in nodes:
        feeds = tuple(replace(feed, node=made[feed.node]) for feed in node.feeds)
        step, columns = node.step, node.needed.columns
        if isinstance(step, ScanStep) and columns is not None:
            step = step.projected(columns)
        made[node] = replace(node, step=step, feeds=feeds)
    return list(made.values())


CHAINING: Final = "chaining"
"""Steps run in the thread of their input; done where chains are made, in ``planner``."""

REWRITES: Final[Mapping[str, Rewrite]] = {
    "needed_columns": needed_columns,
    "projected_scans": projected_scans,
}
"""By name, in the order in which they run."""


def rewritten(nodes: Sequence[Node], optimise: Collection[str] | None = None) -> list[Node]:
    """The nodes after these rewrites (None: all).

    Raises:
        UsageError: there is no such rewrite.
    """
    chosen: Collection[Any] = REWRITES if optimise is None else optimise
    names = (*REWRITES, CHAINING)
    if unknown := sorted(set(chosen) - set(names)):
        raise UsageError(f"there is no rewrite {unknown[0]!r}: write some of {', '.join(names)}")
    found = list(nodes)
    for name, rewrite in REWRITES.items():
        if name in chosen:
            found = rewrite(found)
    return found
