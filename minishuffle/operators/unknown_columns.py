"""What stands in a draft of a plan, in which some columns are not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.row_objects import as_dicts

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FoundColumns", "UnknownColumns"]


@dataclass(frozen=True, slots=True)
class FoundColumns:
    """The columns of rows or batches. ``are_named``: by these, and not by their positions alone."""

    schema: pa.Schema
    are_named: bool


class UnknownColumns(ChainedOperator):
    """Stands in a plan, which cannot run, behind a step whose schema is not known.

    Args:
        step: the method that added it.
        place: where that was called.
        form: how a schema is given to it, with ``{}`` in its place: ``to_table({})``, ``schema={}``.
    """

    name = "unknown columns"

    def __init__(self, step: str, place: str, form: str) -> None:
        self.step = step
        self.place = place
        self.form = form

    def columns_of(self, batches: Sequence[Batch]) -> FoundColumns | None:
        """Those that hold what comes to it; None: nothing comes.

        Raises:
            UsageError: there are none; names the step and its place.
        """
        try:
            return _of_rows(batches) if self.step == "to_table" else _of_columns(batches)
        except UsageError as error:
            raise UsageError(f"{self.step} at {self.place}: {error}") from error

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        raise InvalidGraph(f"{self.step} at {self.place} has no schema yet: this plan is a draft")


def _of_rows(batches: Sequence[Batch]) -> FoundColumns | None:
    from minishuffle.operators.row_conversion import schema_of_rows

    rows = [as_dicts(row) for batch in batches for row in batch.payload]
    if not rows:
        return None
    lengths = {len(row) if isinstance(row, list) else 0 for row in rows}
    if lengths == {0} or len(lengths) > 1:
        return FoundColumns(schema_of_rows(rows), are_named=True)
    names = [f"column_{number}" for number in range(1, max(lengths) + 1)]
    return FoundColumns(schema_of_rows([dict(zip(names, row, strict=True)) for row in rows]), are_named=False)


def _of_columns(batches: Sequence[Batch]) -> FoundColumns | None:
    from minishuffle.operators.wider_type import wider_schema

    found: pa.Schema | None = None
    for batch in filter(len, batches):
        found = wider_schema(found, batch.payload.schema, "the batches")
    return None if found is None else FoundColumns(found, are_named=True)
