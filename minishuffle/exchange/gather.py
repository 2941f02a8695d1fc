"""Some rows of columns: numbers and texts without nulls by loops of numpy's and our own."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.exchange.keys import Texts, fixed_values
from minishuffle.exchange.schemas import with_innermost, without_view
from minishuffle.kernels.machinecode import TEXT_SLACK, text_kernel

__all__ = ["take", "taken"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_WORDS: Final = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
"""By the bits of a fixed-width value, what can stand for it."""
_TEXTS: Final = frozenset({pa.string(), pa.binary(), pa.large_string(), pa.large_binary()})


def take(column: pa.Array, rows: Vector) -> pa.Array:
    """The values in those rows (int64), in their order; also of views of texts and bytes at any depth, which
    Arrow's own ``take`` lacks."""
    kind = column.type
    if not column.null_count:
        if pa.types.is_primitive(kind) and kind.bit_width in _WORDS:
            values = fixed_values(column, _WORDS[kind.bit_width]).take(rows)
            return pa.Array.from_buffers(kind, len(rows), [None, _buffer(values)])
        if kind in _TEXTS:
            return _take_texts(column, rows)
    plain = with_innermost(kind, without_view)
    indices = pa.array(rows)
    if plain == kind:
        return column.take(indices)
    return column.cast(plain).take(indices).cast(kind)


def _take_texts(column: pa.Array, rows: Vector) -> pa.Array:
    """Arrow copies each text by a call; most are a few words long."""
    texts, count = Texts(column), len(rows)
    offsets: Vector = np.empty(count + 1, texts.offsets.dtype)
    size = text_kernel("sum_lengths", offsets)(texts.offsets, rows, offsets, count)
    if size > np.iinfo(offsets.dtype).max:
        return column.take(pa.array(rows))  # which says that it is too much
    data = np.empty(size + TEXT_SLACK, np.uint8)
    text_kernel("copy_texts", offsets)(texts.offsets, texts.data, len(texts.data), rows, offsets, data, count)
    return pa.Array.from_buffers(column.type, count, [None, _buffer(offsets), _buffer(data[:size])])


def _buffer(values: Vector) -> pa.Buffer:
    """The memory of an array that nobody writes to any more: what may change is copied at a hand-over."""
    values.flags.writeable = False
    return pa.py_buffer(values)


def taken(batch: pa.RecordBatch, rows: Vector) -> pa.RecordBatch:
    """The rows with those numbers (int64), in the order of ``rows``."""
    columns = [take(column, rows) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
