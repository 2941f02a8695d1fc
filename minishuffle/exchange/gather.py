"""Some rows of a batch."""

from __future__ import annotations

from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.exchange.elements import Batch, KeyedRows
from minishuffle.exchange.schemas import with_innermost, without_view

__all__ = ["chosen", "picked", "take", "taken"]


def chosen(batch: Batch, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Batch:
    """The rows for which ``mask`` holds."""
    if isinstance(batch, pa.RecordBatch):
        return taken(batch, np.flatnonzero(mask))
    kept = mask.tolist()
    if isinstance(batch, KeyedRows):
        return KeyedRows(list(compress(batch.keys, kept)), list(compress(batch.rows, kept)))
    return list(compress(batch, kept))


def picked(batch: Batch, rows: np.ndarray[Any, Any]) -> Batch:
    """The rows with those numbers, in the order of ``rows``, of any kind of batch."""
    if isinstance(batch, pa.RecordBatch):
        return taken(batch, rows)
    numbers = rows.tolist()
    if isinstance(batch, KeyedRows):
        return KeyedRows([batch.keys[row] for row in numbers], [batch.rows[row] for row in numbers])
    return [batch[row] for row in numbers]


def take(column: pa.Array, indices: pa.Array) -> pa.Array:
    """``column.take``, also for views of texts and bytes at any depth, which lack it."""
    plain = with_innermost(column.type, without_view)
    if plain == column.type:
        return column.take(indices)
    return column.cast(plain).take(indices).cast(column.type)


def taken(batch: pa.RecordBatch, rows: np.ndarray[Any, Any]) -> pa.RecordBatch:
    """The rows with those numbers, in the order of ``rows``."""
    indices = pa.array(rows)
    columns = [take(column, indices) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
