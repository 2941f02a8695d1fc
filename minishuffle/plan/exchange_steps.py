"""Steps that are no operators: unions, exchanges, and several sinks as one job.

They are parts of the ways between the steps that run, which become edges of the job graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, get_args

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.plan.arguments import check_callable
from minishuffle.plan.graph import PartitionKind
from minishuffle.plan.knownrows import all_known
from minishuffle.plan.nodes import Exchange, Known, Needed, Node, ObjectSchema, Relation, Step

__all__ = ["ExchangeStep", "TogetherStep", "UnionStep", "exchanged", "fed", "hashed", "together", "united"]


@dataclass(frozen=True, eq=False)
class ExchangeStep(Step):
    """The same records, of which each goes to the subtask that the exchange chooses, in partitions of its
    kind. ``before``: what is said already of the ways on which they come."""

    given: Known
    exchange: Exchange
    before: tuple[Exchange, ...] = ()
    runs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        chosen, kind = self.exchange.partitioner, self.exchange.kind
        if (chosen is None or kind is not None) and kind not in get_args(PartitionKind):
            kinds = ", ".join(get_args(PartitionKind))
            raise UsageError(f"exchange is {kind!r:.80}: write one of {kinds}")
        if chosen == "custom":
            check_callable(self.exchange.choose, "partition")
        if chosen is not None and any(each.is_chosen for each in self.before):
            if chosen == "hash":
                raise InvalidGraph("key_by itself chooses the subtasks: leave out the choice before it")
            raise InvalidGraph(f"{self.label}() follows another choice of subtasks: leave one of them out")
        if kind is not None and any(each.kind is not None for each in self.before):
            raise InvalidGraph(f"exchange({kind!r}) follows another exchange(...): leave one of them out")

    @property
    def label(self) -> str:
        chosen = self.exchange.partitioner
        return {None: "exchange", "hash": "key_by", "custom": "partition"}.get(chosen, str(chosen))

    @property
    def gives(self) -> Known:
        return self.given

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.also(*(self.exchange.keys or ()))

    def route(self, beyond: Exchange | None) -> Exchange | None:
        return self.exchange.and_then(beyond)


@dataclass(frozen=True, eq=False)
class UnionStep(Step):
    """The records of all inputs, tables in the types of the first.

    There is event time if all have it in the same place, and columns of rows are known if all have the same.
    """

    given: tuple[Known, ...]
    label: ClassVar[str] = "union"
    runs: ClassVar[bool] = False

    @cached_property
    def gives(self) -> Known:
        first, *others = self.given
        time = first.time if all(other.time == first.time for other in others) else None
        if not isinstance(first.schema, ObjectSchema):
            return Known(first.schema, time)
        columns = first.columns if all(other.columns == first.columns for other in others) else None
        return Known(ObjectSchema(columns, all_known(each.origins for each in self.given)), time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted


@dataclass(frozen=True, eq=False)
class TogetherStep(Step):
    """Sinks of one job."""

    first: str
    """The name of the first."""
    runs: ClassVar[bool] = False
    is_sink: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return self.first

    @property
    def gives(self) -> Known:
        return Known(ObjectSchema())


def exchanged(relation: Relation, exchange: Exchange) -> Relation:
    """The same records behind an exchange.

    Raises:
        InvalidGraph: they end in a sink, or an exchange before says the same.
    """
    before = tuple(feed.exchange for feed in relation.feeds if feed.exchange is not None)
    return relation.then(ExchangeStep(relation.gives, exchange, before))


def hashed(relation: Relation, keys: tuple[str, ...]) -> Relation:
    """The rows of a table, those of a key in one subtask; raises as :func:`exchanged` does."""
    return exchanged(relation, Exchange("hash", keys=keys))


def united(relations: Sequence[Relation]) -> Relation:
    """The records of all of these; tables are of one schema.

    Raises:
        InvalidGraph: one ends in a sink.
    """
    if len(relations) == 1:
        return relations[0]
    return Relation.of(UnionStep(tuple(each.gives for each in relations)), *relations)


def together(sinks: Sequence[Relation]) -> Relation:
    """Sinks as one job.

    Raises:
        InvalidGraph: there is none.
    """
    if not sinks:
        raise InvalidGraph("together takes at least one stream")
    step = TogetherStep(sinks[0].node.label)
    return Relation(Node(step, tuple(sinks), step.label))


def fed(parts: Sequence[tuple[Relation, Exchange | None]]) -> Relation:
    """The records of all parts, each behind its exchange; behind one if that is the same."""
    first = parts[0][1]
    if all(exchange is first for _, exchange in parts):
        relation = united([part for part, _ in parts])
        return relation if first is None else exchanged(relation, first)
    return united([part if exchange is None else exchanged(part, exchange) for part, exchange in parts])
