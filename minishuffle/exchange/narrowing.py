"""Columns that cross a network in fewer bytes.

Most keys, times and counts of a batch lie close together. A column of such integers of 64 bits goes as
unsigned differences of 8, 16 or 32 bits from a number of its own, its base, as databases store such columns
(frame of reference). Floats of 64 bits go as 32 if all of them come back bit by bit, as whole numbers, halves
and NaN do. Texts go as their lengths, mostly of 8 bits, where Arrow has offsets of 32 or 64, and their bytes
one after the other. To look at integers and to convert them twice takes a tenth of what the buffers take that
are saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from minishuffle.limits import ELEMENT_BYTES_MAX, SPILL_ELEMENT_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Narrowed", "narrow", "narrow_schema", "text_bytes", "widen"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

NARROW_ROWS_MIN: Final = 4_096
"""With fewer rows a column fills no buffer, and to look at it takes longer than to send it."""
_BITS: Final = (8, 16, 32)
_FLOATS_TRIED: Final = 64
"""So many floats are tried first: hardly ever do those come back and the ones behind them not."""


class Narrowed(NamedTuple):
    """How a column was narrowed: its number, the bits of what goes for each value, and the number from which
    integers are the differences, or how many bytes the texts have."""

    column: int
    bits: int
    base: int


def narrow(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Narrowed], list[memoryview]]:
    """The batch with narrow columns where that is possible, which those are, and the bytes of texts that went
    from them, in order."""
    import pyarrow as pa

    notes: list[Narrowed] = []
    texts: list[memoryview] = []
    if batch.num_rows < NARROW_ROWS_MIN or batch.nbytes > SPILL_ELEMENT_BYTES:
        return batch, notes, texts  # what is put together in a file is used there
    columns = batch.columns
    for number, (field, column) in enumerate(zip(batch.schema, columns, strict=True)):
        if column.null_count or _is_extension(field):
            continue
        if _text_width(field.type):
            narrowed = _lengths(column, texts)
        elif _is_wide(field.type):
            narrowed = _differences(column)
        else:
            narrowed = _short_floats(column) if field.type == pa.float64() else None
        if narrowed is not None:
            values, base = narrowed
            columns[number] = pa.array(values)
            notes.append(Narrowed(number, 8 * values.itemsize, base))
    if notes:
        batch = pa.RecordBatch.from_arrays(columns, schema=narrow_schema(batch.schema, notes))
    return batch, notes, texts


def _differences(column: pa.Array) -> tuple[Vector, int] | None:
    """The integers' differences, and from what; None: they lie too far apart."""
    values = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
    least, greatest = int(values.min()), int(values.max())
    bits = _bits_of(greatest - least)
    if bits is None:
        return None
    base = 0 if least >= 0 and _bits_of(greatest) == bits else least
    return (values - base if base else values).astype(f"u{bits // 8}"), base


def _short_floats(column: pa.Array) -> tuple[Vector, int] | None:
    """The floats in 32 bits, and 0; None: not all come back."""
    values = np.frombuffer(column.buffers()[1], np.float64, len(column), 8 * column.offset)
    with np.errstate(all="ignore"):
        for some in (values[:_FLOATS_TRIED], values):
            short = some.astype(np.float32)
            if not np.array_equal(short.astype(np.float64).view(np.int64), some.view(np.int64)):
                return None
    return short, 0


def _lengths(column: pa.Array, texts: list[memoryview]) -> tuple[Vector, int] | None:
    """The texts' lengths, and how many bytes they have, which are added to ``texts``; None: a length takes as
    many bits as an offset."""
    from minishuffle.exchange.keys import Texts

    held = Texts(column)
    lengths = held.lengths
    bits = _bits_of(int(lengths.max()))
    if bits is None or bits >= 8 * lengths.itemsize:
        return None
    data = held.data[held.offsets[0] : held.offsets[-1]]
    texts.append(data.data)
    return lengths.astype(f"u{bits // 8}"), len(data)


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
        kind = fields[number].type if number < len(fields) else pa.null()
        if bits == 32 and kind == pa.float64():
            short = np.dtype(np.float32)
        elif bits in _BITS and (_is_wide(kind) or bits < _text_width(kind)):
            short = np.dtype(f"u{bits // 8}")
        else:
            raise ValueError(f"column {number} of {bits} bits")
        fields[number] = fields[number].with_type(pa.from_numpy_dtype(short))
    return pa.schema(fields)


def text_bytes(schema: pa.Schema, notes: Iterable[Narrowed]) -> int:
    """How many bytes of texts went from a batch of that schema.

    Raises:
        ValueError: they would be fewer than none.
    """
    sizes = [
        base for number, _, base in notes if number < len(schema) and _text_width(schema.field(number).type)
    ]
    if any(size < 0 for size in sizes):
        raise ValueError(f"texts of {min(sizes)} bytes")
    return sum(sizes)


def widen(
    batch: pa.RecordBatch, schema: pa.Schema, notes: list[Narrowed], texts: pa.Buffer
) -> pa.RecordBatch:
    """The batch as it was, with that schema; its other columns, and ``texts``, stay where they are.

    Raises:
        ValueError: a narrow column has nulls, the wide ones would be longer than an element may be, or the
            lengths of texts are not those of ``texts``.
    """
    import pyarrow as pa

    if not notes:
        return batch
    if len(notes) * 8 * batch.num_rows > ELEMENT_BYTES_MAX:
        raise ValueError(f"{len(notes)} narrow columns of {batch.num_rows} rows")
    columns = batch.columns
    at = 0
    for number, _, base in notes:
        if columns[number].null_count:
            raise ValueError(f"nulls in column {number}")
        kind, given = schema.field(number).type, columns[number].to_numpy()
        if _text_width(kind):
            buffers = [_buffer(_offsets(given, base, kind)), texts.slice(at, base)]
            at += base
        else:
            values = given.astype(np.float64 if kind == pa.float64() else np.int64)
            if base:
                values += base
            buffers = [_buffer(values)]
        columns[number] = pa.Array.from_buffers(kind, len(given), [None, *buffers])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _offsets(lengths: Vector, size: int, kind: pa.DataType) -> Vector:
    """Where texts of these lengths begin, and where the last one ends. Raises ValueError if that is not at
    ``size``."""
    total = int(lengths.sum(dtype=np.int64))
    if total != size:
        raise ValueError(f"texts of {total} bytes in {size}")
    offsets = np.zeros(len(lengths) + 1, f"i{_text_width(kind) // 8}")
    np.cumsum(lengths, dtype=offsets.dtype, out=offsets[1:])
    return offsets


def _buffer(values: Vector) -> pa.Buffer:
    import pyarrow as pa

    values.flags.writeable = False
    return pa.py_buffer(values)


def _is_wide(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) and bool(kind.bit_width == 64)


def _text_width(kind: pa.DataType) -> int:
    """The bits of an offset of texts or bytes; 0: it is none of these."""
    import pyarrow as pa

    if kind in (pa.string(), pa.binary()):
        return 32
    return 64 if kind in (pa.large_string(), pa.large_binary()) else 0


def _is_extension(field: pa.Field) -> bool:
    """Whether the other end may know the column as of a type that is not known here."""
    return b"ARROW:extension:name" in (field.metadata or {})


def _bits_of(number: int) -> int | None:
    """The fewest bits of those that there are in which the number, at least 0, fits; None: in none."""
    return next((bits for bits in _BITS if number < 1 << bits), None)
