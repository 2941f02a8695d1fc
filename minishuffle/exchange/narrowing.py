"""Integers of 64 bits that cross a network as fewer.

Most keys, times and counts of a batch lie close together. A column of them goes as unsigned differences of
8, 16 or 32 bits from a number of its own, its base, as databases store such columns (frame of reference). To
look for the least and the greatest and to convert twice takes a tenth of what the saved buffers take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from minishuffle.limits import ELEMENT_BYTES_MAX, SPILL_ELEMENT_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Narrowed", "narrow", "narrow_schema", "widen"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

NARROW_ROWS_MIN: Final = 4_096
"""With fewer rows a column fills no buffer, and to look at it takes longer than to send it."""
_BITS: Final = (8, 16, 32)


class Narrowed(NamedTuple):
    """How a column was narrowed: its number, the bits of its differences, and what they are from."""

    column: int
    bits: int
    base: int


def narrow(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Narrowed]]:
    """The batch with narrow columns where that is possible, and which those are."""
    import pyarrow as pa

    notes: list[Narrowed] = []
    if batch.num_rows < NARROW_ROWS_MIN or batch.nbytes > SPILL_ELEMENT_BYTES:
        return batch, notes  # what is put together in a file is used there
    columns = batch.columns
    for number, column in enumerate(columns):
        if not _is_wide(column.type) or column.null_count or _is_extension(batch.schema.field(number)):
            continue
        values = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
        least, greatest = int(values.min()), int(values.max())
        bits = _bits_of(greatest - least)
        if bits is None:
            continue
        base = 0 if least >= 0 and _bits_of(greatest) == bits else least
        differences = (values - base if base else values).astype(f"u{bits // 8}")
        columns[number] = pa.array(differences)
        notes.append(Narrowed(number, bits, base))
    if notes:
        batch = pa.RecordBatch.from_arrays(columns, schema=narrow_schema(batch.schema, notes))
    return batch, notes


def narrow_schema(schema: pa.Schema, notes: list[Narrowed]) -> pa.Schema:
    """The schema of a batch whose columns were narrowed.

    Raises:
        ValueError: no such column of that schema could have been.
    """
    import pyarrow as pa

    if not notes:
        return schema
    fields = list(schema)
    for number, bits, _ in notes:
        if bits not in _BITS or number >= len(fields) or not _is_wide(fields[number].type):
            raise ValueError(f"column {number} of {bits} bits")
        fields[number] = fields[number].with_type(pa.from_numpy_dtype(f"u{bits // 8}"))
    return pa.schema(fields)


def widen(batch: pa.RecordBatch, schema: pa.Schema, notes: list[Narrowed]) -> pa.RecordBatch:
    """The batch as it was, with that schema; its other columns stay where they are.

    Raises:
        ValueError: a narrow column has nulls, or the wide ones would be longer than an element may be.
    """
    import pyarrow as pa

    if not notes:
        return batch
    if len(notes) * 8 * batch.num_rows > ELEMENT_BYTES_MAX:
        raise ValueError(f"{len(notes)} narrow columns of {batch.num_rows} rows")
    columns = batch.columns
    for number, _, base in notes:
        if columns[number].null_count:
            raise ValueError(f"nulls in column {number}")
        values = columns[number].to_numpy().astype(np.int64)
        if base:
            values += base
        values.flags.writeable = False
        columns[number] = pa.Array.from_buffers(
            schema.field(number).type, len(values), [None, pa.py_buffer(values)]
        )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _is_wide(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) and bool(kind.bit_width == 64)


def _is_extension(field: pa.Field) -> bool:
    """Whether the other end may know the column as of a type that is not known here."""
    return b"ARROW:extension:name" in (field.metadata or {})


def _bits_of(number: int) -> int | None:
    """The fewest bits of those that there are in which the number, at least 0, fits; None: in none."""
    return next((bits for bits in _BITS if number < 1 << bits), None)
