"""What stands in a draft of a plan, in which some columns are not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minishuffle.dataflow.operators.base import Emit
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.rowobjects import as_dicts
from minishuffle.dataflow.operators.times import HIDDEN_TIME
from minishuffle.errors import InvalidGraph
from minishuffle.exchange.batch import Batch

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["UnknownColumns"]


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

    @staticmethod
    def columns_of(batches: Sequence[Batch]) -> pa.Schema | None:
        """Those that hold what comes to it; None: nothing comes.

        Raises:
            UsageError: there are none.
        """
        from minishuffle.dataflow.operators.convert import schema_of_rows
        from minishuffle.dataflow.operators.widertype import wider_schema

        rows: list[Any] = []
        found: pa.Schema | None = None
        for batch in batches:
            if isinstance(batch.payload, list):
                rows += map(as_dicts, batch.payload)
            else:
                found = wider_schema(found, batch.payload.schema, "the batches")
        if rows:
            return schema_of_rows(rows)
        if found is None or HIDDEN_TIME not in found.names:
            return found
        return found.remove(found.get_field_index(HIDDEN_TIME))

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        raise InvalidGraph(f"{self.step} at {self.place} has no schema yet: this plan is a draft")
