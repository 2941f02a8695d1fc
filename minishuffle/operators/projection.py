"""Columns of tables chosen, computed and cast, without Python per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import WrongColumns
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.evaluation import evaluated
from minishuffle.operators.wider_type import in_schema

__all__ = ["Conform", "Projection"]

Value: TypeAlias = "str | pc.Expression"
"""An input column by name, or what an expression gives."""


class Projection(ChainedOperator):
    """Emits the columns ``outputs``, by name, of each batch.

    Args:
        label: the method's name, for tables and errors.
        outputs: what each column is. None: all columns that are there, then those of ``added``.
        added: columns that replace those of their name, or follow the others.
        dropped: columns that are left out, with ``outputs`` None.
        untyped: the types of those of ``added`` that read columns of type null.

    Raises:
        WrongColumns: one of ``untyped`` has another type.
        UsageError: an expression fails, by an overflow for example.
    """

    def __init__(
        self,
        label: str,
        outputs: Mapping[str, Value] | None,
        added: Mapping[str, Value] | None = None,
        dropped: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        *,
        untyped: Mapping[str, pa.DataType] | None = None,
    ) -> None:
        self.name = label
        self._outputs = None if outputs is None else dict(outputs)
        self._added = dict(added or {})
        self._dropped = frozenset(dropped)
        self._renamed = dict(renamed or {})
        self._untyped = dict(untyped or {})

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given = batch.payload
        if not given.num_rows:
            return
        wanted = self._wanted(given.schema.names)
        computed = {name: value for name, value in wanted.items() if not isinstance(value, str)}
        values = dict(zip(computed, evaluated(given, list(computed.values()), self.name), strict=True))
        values |= {name: self._typed(name, values[name]) for name in self._untyped}
        arrays = [values[name] if name in values else given.column(wanted[name]) for name in wanted]
        emit(Batch(pa.RecordBatch.from_arrays(arrays, names=list(wanted)), None, batch.times))

    def _typed(self, name: str, values: pa.Array) -> pa.Array:
        kind = self._untyped[name]
        if values.type == kind:
            return values
        if values.null_count < len(values):
            raise WrongColumns(
                f"{self.name}({name}=...) reads a column without values, so that the type of its result is "
                "not known: declare the column with to_table(schema), or cast the result"
            )
        return pa.nulls(len(values), kind)

    def _wanted(self, given: Sequence[str]) -> dict[str, Any]:
        """What each output column is, of a batch that has the columns ``given``."""
        if self._outputs is not None:
            return self._outputs
        kept = {self._renamed.get(name, name): name for name in given if name not in self._dropped}
        return {**kept, **self._added}


class Conform(ChainedOperator):
    """Emits batches in a schema that holds their values; columns that they lack are null.

    Raises:
        UsageError: a value does not fit its type whole.
    """

    name = "union"

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        emit(Batch(in_schema(batch.payload, self._schema, "the union"), None, batch.times))
