"""Steps at the ends of a plan: sources and sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from minishuffle.operators.base import AnySource
from minishuffle.plan.arguments import discovery_seconds
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import Boundary, Known, Node, ObjectSchema, Relation, Schema, SourceStep, Step

if TYPE_CHECKING:
    from minishuffle.operators.chained import ChainedOperator

__all__ = ["ExternalStep", "KeepingStep", "ScanStep", "SinkStep", "collected_schemas"]


@dataclass(frozen=True, eq=False)
class ScanStep(SourceStep):
    """What a source reads."""

    name: str
    source: AnySource
    schema: Schema
    brings_times: bool = False
    """Its batches may come with event times."""

    @property
    def label(self) -> str:
        return self.name

    @property
    def bounded(self) -> bool:
        return bool(getattr(self.source, "bounded", True))

    @property
    def replayable(self) -> bool:
        """Whether all of it can be read again: what precedes acknowledged positions may be gone."""
        return bool(getattr(self.source, "replayable", True)) and not self.acknowledges

    @property
    def split_layout(self) -> str:
        """Which records are in which split, of a source that deals them by number; one that deals them
        otherwise cannot go on from its positions."""
        return str(getattr(self.source, "split_layout", ""))

    @property
    def acknowledges(self) -> bool:
        return hasattr(self.source, "acknowledge")

    @property
    def by_order(self) -> bool:
        return discovery_seconds(self.source) is None

    @property
    def same_batches(self) -> bool:
        """Each split gives the same batches wherever a read begins between two of them, and at no time none:
        so whoever reads several splits in turn gets their records in the same order each time."""
        return bool(getattr(self.source, "same_batches", False))

    @property
    def gives(self) -> Known:
        return Known(self.schema)

    def projected(self, columns: frozenset[str]) -> ScanStep:
        """The same for these columns, if the source can leave others out."""
        project = getattr(self.source, "projected", None)
        return self if project is None else replace(self, source=project(columns))


@dataclass(frozen=True, eq=False)
class ExternalStep(SourceStep):
    """What another program writes while the job runs."""

    name: str
    boundary: Boundary
    schema: Schema

    @property
    def label(self) -> str:
        return self.name

    @property
    def bounded(self) -> bool:
        return self.boundary.bounded

    @property
    def gives(self) -> Known:
        return Known(self.schema)


@dataclass(frozen=True, eq=False)
class SinkStep(Step):
    """Where records go: a sink of the library or of the user.

    ``boundary``: what other programs read there; ``collects``: the name of the sink whose rows the client
    gets, which no other sink of the job has.
    """

    name: str
    sink: ChainedOperator
    boundary: Boundary | None = None
    collects: str = ""
    follows = True
    is_sink = True

    @property
    def label(self) -> str:
        return self.name

    @property
    def gives(self) -> Known:
        return Known(ObjectSchema())

    def claim(self) -> str | None:
        """What it writes to and no other sink may. Checks again what may have changed since it was made."""
        return self.sink.claim()

    def operator(self, node: Node, tags: Any) -> OperatorSpec:
        return OperatorSpec("sink", {"sink": self.sink})


class KeepingStep(SinkStep):
    """A sink that keeps rows for other programs, which a snapshot of the whole job has for them."""

    has_state: ClassVar[bool] = True


def collected_schemas(sinks: Relation) -> dict[str, Schema]:
    """By the name of each ``collect`` sink the schema of what it takes."""
    return {
        node.step.collects: node.inputs[0].gives.schema
        for node in sinks.ends
        if isinstance(node.step, SinkStep) and node.step.collects
    }
