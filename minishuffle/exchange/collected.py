"""What a ``collect`` sink sends to the client: rows as msgpack, columns as an Arrow IPC stream of one batch.

The first bytes say which: no list begins with those of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.schemas import (
    decoded,
    with_columns_of,
    with_innermost,
    with_types,
    without_dictionary,
    without_view,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.exchange.batch import Payload

__all__ = ["pack_collected", "table_of", "unpack_collected"]

_STREAM_BEGINS: Final = b"\xff\xff\xff\xff"
"""The mark before each message of Arrow IPC."""


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
    kinds = [
        kind if all(batch.schema.types[number] == kind for batch in batches) else _plain(kind)
        for number, kind in enumerate(first.types)
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
