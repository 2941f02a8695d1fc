"""What a ``collect`` sink sends to the client: rows as msgpack, columns as an Arrow IPC stream of one batch.

The first bytes say which: no list begins with those of a stream. A stream carries its schema, which takes
more than a few rows do: small batches are put together, see :func:`gatherable`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.elements import may_change
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.schemas import (
    decoded,
    has_ordered_categories,
    with_columns_of,
    with_innermost,
    with_types,
    without_dictionary,
    without_view,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.exchange.batch import Payload

__all__ = ["gatherable", "pack_collected", "pack_gathered", "table_of", "unpack_collected"]

_STREAM_BEGINS: Final = b"\xff\xff\xff\xff"
"""The mark before each message of Arrow IPC."""
_COLUMN_BYTES: Final = 128
"""What a column takes besides its values, in memory and on its way."""


def pack_collected(payload: Payload) -> bytes:
    """Rows or columns as bytes. Raises UnserializableRecord as ``pack_rows``."""
    if isinstance(payload, list):
        return pack_rows(payload)
    import pyarrow as pa

    columns = list(map(_sent, payload.columns))
    schema = with_types(payload.schema.remove_metadata(), [column.type for column in columns])
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    packed: bytes = stream.getvalue().to_pybytes()
    return packed


def gatherable(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int] | None:
    """The batch, if it is small, in memory of its own that nobody writes to, and about how many bytes it
    takes. None: it is to be sent alone. Categories in an order of their own are too, which may differ from
    that of other batches."""
    kinds = batch.schema.types
    overhead = _COLUMN_BYTES * (1 + len(kinds))
    size_max = limits.GATHERED_BYTES // 4 - overhead
    if any(map(has_ordered_categories, kinds)):
        return None
    size = batch.get_total_buffer_size()
    if size > size_max or may_change(batch) or any(_plain(kind) != kind for kind in kinds):
        if batch.nbytes > size_max:
            return None
        batch = unpack_collected(pack_collected(batch))
        size = batch.get_total_buffer_size()
    return (batch, size + overhead) if size <= size_max else None


def pack_gathered(batches: Sequence[pa.RecordBatch]) -> tuple[bytes, int]:
    """Batches of one schema, at least one, as bytes, and how many these are: the first ones. It is not all
    where the entries of their dictionaries are more than their type of indices has numbers for."""
    import pyarrow as pa

    count = len(batches)
    while True:
        try:
            return pack_collected(pa.concat_batches(batches[:count])), count
        except pa.ArrowInvalid:
            if count == 1:
                raise
            count //= 2


def unpack_collected(data: bytes) -> Payload:
    """What :func:`pack_collected` was given.

    Raises:
        RemoteProtocolError: the bytes are no rows or columns.
    """
    if not data.startswith(_STREAM_BEGINS):
        return unpack_rows(data)
    import pyarrow as pa

    try:
        batch: pa.RecordBatch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
        batch.validate()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise RemoteProtocolError(f"collected columns cannot be read: {error}") from error
    return batch


def table_of(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """The batches of one sink, at least one, as a table. A column that is a dictionary in some of them alone
    is plain in all."""
    import pyarrow as pa

    first = batches[0].schema
    kinds = first.types
    for other in batches:
        if not other.schema.equals(first):
            kinds = [
                kind if kind == type_there else _plain(kind)
                for kind, type_there in zip(kinds, other.schema.types, strict=True)
            ]
    return pa.Table.from_batches(
        [with_columns_of(batch, kinds) for batch in batches], schema=with_types(first, kinds)
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    return with_innermost(kind, without_dictionary)


def _sent(column: pa.Array) -> pa.Array:
    """The column as it is sent. A batch carries its dictionaries whole: one with more entries than there are
    rows is sent with those in use, unless their order counts."""
    import pyarrow as pa

    kind = column.type
    if with_innermost(kind, _readable) != kind:
        return decoded(column)
    if not pa.types.is_dictionary(kind) or kind.ordered or len(column.dictionary) <= len(column):
        return column
    is_view = (
        with_innermost(kind.value_type, without_view) != kind.value_type
    )  # which pyarrow takes no rows of
    return column if is_view else _with_used(column)


def _with_used(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """The same with those entries of its dictionary alone that stand in it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    used = pc.unique(column.indices).drop_null()
    numbers = pc.index_in(column.indices, used).cast(column.type.index_type)
    return pa.DictionaryArray.from_arrays(numbers, column.dictionary.take(used))


def _readable(kind: pa.DataType) -> pa.DataType:
    """Plain for a dictionary of dictionaries or of extension types, which no stream has in one;
    any other type is itself."""
    import pyarrow as pa

    return without_dictionary(kind) if pa.types.is_dictionary(kind) and _is_odd(kind.value_type) else kind


def _is_odd(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        return True
    return any(_is_odd(kind.field(number).type) for number in range(kind.num_fields))
