"""Combining before an exchange: an aggregation that emits at the end is split in two.

The first half, ``id/partial``, combines the rows of each batch and holds nothing; the second half adds up
what comes of it, and keeps the id. Only aggregates are split whose value does not depend on how rows are
grouped: counts, minima, maxima, and sums of integers of at most 32 bits, which never leave the range of
int64.

What is in flight to a task that dies is lost and counted by rows. A combined row stands for many, of which
one would be counted. So :func:`combining` splits where nothing is lost, in front of blocking exchanges, and
:func:`combining_everywhere` has to be asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from minishuffle.exchange.schemas import without_dictionary
from minishuffle.plan.exchange_steps import fed
from minishuffle.plan.keyed_steps import AggregateStep, CountColumnsStep
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import (
    Exchange,
    Feed,
    Known,
    Needed,
    Node,
    Relation,
    Step,
    remade,
    running,
)
from minishuffle.plan.standstill import FeedKey, blocking_feeds

__all__ = ["CombineStep", "CombinedStep", "combining", "combining_everywhere"]

Whole: TypeAlias = "AggregateStep | CountColumnsStep"


@dataclass(frozen=True, eq=False)
class CombineStep(Step):
    """The first half of an aggregation: of each batch its rows, or the states of their keys."""

    given: Known
    whole: Whole
    prefix: str
    """The names of columns of states begin with it, and those of no columns of rows."""
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True
    joins_input: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"{self.whole.label}/partial"

    @cached_property
    def gives(self) -> Known:
        """The columns of both."""
        import pyarrow as pa

        from minishuffle.operators.combining import state_names

        read = self.needs(Needed(), 0).columns or frozenset()
        rows = [field for field in self.given.arrow if field.name in read]
        results = [field for field in self.whole.gives.arrow if field.name not in self.whole.keys]
        names = state_names(self.prefix, (field.name for field in results))
        states = [field.with_name(name) for field, name in zip(results, names, strict=True)]
        return Known(pa.schema([*rows, *states]))

    def needs(self, wanted: Needed, input: int) -> Needed:
        return self.whole.needs(wanted, input)

    def operator(self, node: Node, tags: Any) -> OperatorSpec:
        return OperatorSpec("combine", _parameters(self.whole, self.prefix))


@dataclass(frozen=True, eq=False)
class CombinedStep(Step):
    """The second half of an aggregation; ``given`` is what the first gives."""

    given: Known
    whole: Whole
    prefix: str
    has_state: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return self.whole.label

    @property
    def gives(self) -> Known:
        return self.whole.gives

    def needs(self, wanted: Needed, input: int) -> Needed:
        return Needed(frozenset(self.given.arrow.names), times=False)

    def operator(self, node: Node, tags: Any) -> OperatorSpec:
        return OperatorSpec("combined", _parameters(self.whole, self.prefix))


def _parameters(whole: Whole, prefix: str) -> dict[str, Any]:
    columns = dict(whole.columns) if isinstance(whole, AggregateStep) else None
    return {"keys": whole.keys, "columns": columns, "prefix": prefix}


def combining(nodes: Sequence[Node]) -> list[Node]:
    """Aggregations behind blocking exchanges are split."""
    return _split(nodes, blocking_feeds(running(nodes)))


def combining_everywhere(nodes: Sequence[Node]) -> list[Node]:
    """All aggregations are split, also where a lost row may then stand for many."""
    every = [(node, number) for node in running(nodes) for number in range(len(node.feeds))]
    return _split(nodes, frozenset(every))


def _split(nodes: Sequence[Node], where: Container[FeedKey]) -> list[Node]:
    """Aggregations all of whose feeds are among those, are chosen by key and could be of one chain with the
    first half, are split."""
    readers = Counter(feed.node for node in running(nodes) for feed in node.feeds)

    def split(node: Node, made: Node) -> Node:
        step = node.step
        if not isinstance(step, AggregateStep | CountColumnsStep) or not _can_be_split(step):
            return made
        for number, feed in enumerate(node.feeds):
            if (node, number) not in where or feed.side is not None or readers[feed.node] > 1:
                return made
        prefix = "partial "
        while any(name.startswith(prefix) for name in step.given.arrow.names):
            prefix = f"_{prefix}"
        parts = [_first_half(feed, made, step, prefix) for feed in made.feeds]
        relation = fed(parts)
        return replace(made, step=CombinedStep(relation.gives, step, prefix), inputs=(relation,))

    return remade(nodes, split)


def _first_half(feed: Feed, node: Node, whole: Whole, prefix: str) -> tuple[Relation, Exchange | None]:
    """It, where a feed comes from, and the exchange behind it."""
    before = feed.node
    half = Node.of(CombineStep(feed.gives, whole, prefix), Relation(before))
    placed = replace(half, parallelism=before.parallelism, slot_group=before.slot_group)
    return Relation(replace(placed, id=f"{node.id}/partial")), feed.exchange


def _can_be_split(step: Whole) -> bool:
    if step.emission != "end":
        return False
    if isinstance(step, CountColumnsStep):
        return True
    return all(
        function in ("count", "min", "max") or (function == "sum" and _sums_exactly(step, column))
        for column, function in step.columns.values()
    )


def _sums_exactly(step: AggregateStep, column: str) -> bool:
    """Whether no sum of so many values as there may be leaves the range of int64."""
    import pyarrow as pa

    kind = without_dictionary(step.given.arrow.field(column).type)
    return bool(pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind.bit_width <= 32))
