"""What would stand still for ever: steps that wait for each other, through inputs that are read first or
through blocking exchanges.

A blocking exchange gives nothing out before it is complete. Where what is before it and what is behind it are
joined by pipelined exchanges as well, they run at one time, and the ones would wait for the others to finish,
which wait for the ones to read. So the last pipelined exchange of each such way is made blocking too::

                   .-- map --blocking--.                           .-- map --blocking--.
    a diamond:  items                 join     becomes          items                 join
                   '-- filter ---------'                           '-- filter -blocking-'

*Behind* an exchange is its step and all that this leads to. What a pipelined exchange joins with the step
before, not through anything that is behind, must enter by blocking exchanges alone. A source that is joined
with what is behind only need not: it waits to be read until the other side is there. (Flink has the user or
its planner set the exchange, and deploys as one region what cycles connect:
``SchedulingPipelinedRegionComputeUtil.mergeRegionsOnCycles``. See also ``stages``.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from minishuffle.errors import InvalidGraph
from minishuffle.plan.nodes import Node, inputs_first, named_step

__all__ = ["FeedKey", "blocking_feeds", "check_waits"]

FeedKey: TypeAlias = tuple[Node, int]
"""A node, and which of its feeds."""


def blocking_feeds(nodes: Sequence[Node]) -> dict[FeedKey, FeedKey | None]:
    """The feeds whose exchange is blocking, each with the one for whose sake it is, if the user did not ask
    for it; ``nodes`` are those that run, inputs first.

    Raises:
        InvalidGraph: what is to be stored has no end.
    """
    found: dict[FeedKey, FeedKey | None] = {
        (node, number): None
        for node in nodes
        for number, feed in enumerate(node.feeds)
        if feed.kind == "blocking"
    }
    for node, number in found:
        _check_bounded(node, number, None)
    waiting = list(found)
    while waiting:
        cause = waiting.pop()
        for each in _to_cut(nodes, cause, found):
            _check_bounded(*each, cause)
            found[each] = cause
            waiting.append(each)
    return found


def _to_cut(nodes: Sequence[Node], cause: FeedKey, blocking: Mapping[FeedKey, object]) -> list[FeedKey]:
    """The pipelined feeds by which what runs with the step before a blocking exchange leads behind it."""
    last, number = cause
    behind = {last}
    for node in nodes:
        if any(feed.node in behind for feed in node.feeds):
            behind.add(node)
    beside: dict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        for each, feed in enumerate(node.feeds):
            if node not in behind and (node, each) not in blocking:
                beside[node].append(feed.node)
                beside[feed.node].append(node)
    first = last.feeds[number].node
    joined, stack = {first}, [first]
    while stack:
        fresh = [node for node in beside[stack.pop()] if node not in joined]
        joined.update(fresh)
        stack += fresh
    return [
        (node, each)
        for node in nodes
        if node in behind
        for each, feed in enumerate(node.feeds)
        if feed.node in joined and (node, each) not in blocking
    ]


def _check_bounded(node: Node, number: int, cause: FeedKey | None) -> None:
    before = node.feeds[number].node
    sources = (each for each in inputs_first([before]) if each.is_source and not each.bounded)
    source = next(sources, None)
    if source is None:
        return
    if cause is None:
        raise InvalidGraph(
            f"exchange('blocking') from {named_step(before)!r} to {node.label!r} would never be complete: "
            f"{source.label!r} has no end. Bound that source, or leave the exchange out"
        )
    last, of_last = cause
    raise InvalidGraph(
        f"exchange('blocking') from {named_step(last.feeds[of_last].node)!r} to {last.label!r} needs the "
        f"exchange from {named_step(before)!r} to {node.label!r} to be blocking too, which joins what is "
        f"before and behind, and {source.label!r} before it has no end: bound that source, or leave "
        "exchange('blocking') out"
    )


def check_waits(nodes: Sequence[Node]) -> None:
    """Raises InvalidGraph if sources would wait for each other, through steps that read one input first;
    ``nodes`` are those that run, inputs first.

    Until that input has ended they take nothing of the others, whose sources stand still once the buffers
    are full. What is stored is not waited for: behind a blocking exchange it is its reader that stands still.
    """
    blocking: Mapping[FeedKey, object] = blocking_feeds(nodes)
    waits: dict[Node, set[Node]] = {}
    for node in nodes:
        first = node.step.first_input
        if first is None:
            continue
        numbered = list(enumerate(node.feeds))
        before = _heads((feed.node for _, feed in numbered if feed.input == first), blocking, through=True)
        others = (feed.node for n, feed in numbered if feed.input != first and (node, n) not in blocking)
        for source in _heads(others, blocking):
            waits.setdefault(source, set()).update(before)
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        *waiting, last = (node.label for node in reversed(error.args[1]))
        if len(waiting) == 1:
            reason = f"both come from {last!r}, which would wait for itself: make that source twice"
        else:
            ring = ", which would wait for ".join(repr(label) for label in (*waiting[1:], last))
            reason = f"here {waiting[0]!r} would wait for {ring}: make one of these sources twice"
        raise InvalidGraph(
            f"broadcast_join reads the small side to its end before the other, and {reason}, or write "
            "exchange('blocking') right before the join, on the other side"
        ) from None


def _heads(ends: Iterable[Node], blocking: Mapping[FeedKey, object], *, through: bool = False) -> set[Node]:
    """Where what comes to these begins: at sources, and at steps that read a blocking exchange; ``through``
    these exchanges too."""
    heads, seen, stack = set(), set(), list(ends)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stored = [feed.node for n, feed in enumerate(node.feeds) if (node, n) in blocking]
        if node.is_source or stored:
            heads.add(node)
        stack += [feed.node for feed in node.feeds if through or feed.node not in stored]
    return heads
