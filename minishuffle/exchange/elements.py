"""Elements: what an exchange carries, a header and one batch of rows or of Arrow columns.

The header (:data:`ELEMENT_HEADER`) has the payload's bytes, the rows, and the format:

* ``ROWS``: a msgpack list of the rows: see ``rowformat``.
* ``KEYED_ROWS``: a msgpack list of two: the keys and the rows.
* ``ARROW``: the length of an Arrow IPC schema message (u32, big-endian), 4 zero bytes, that message,
  zeros up to a multiple of 8, and an Arrow IPC record batch message. Each element stands for itself;
  its columns are used in place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from minishuffle.errors import RemoteProtocolError, UsageError
from minishuffle.exchange.assembly import ELEMENT_HEADER, Assembler, AssemblyBudget, ElementFormat
from minishuffle.exchange.nesting import with_innermost, without_dictionary
from minishuffle.exchange.rowformat import (
    pack_keyed_rows,
    pack_rows,
    unpack_keyed_rows,
    unpack_rows,
)
from minishuffle.limits import ELEMENT_BYTES_MAX

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ELEMENT_HEADER",
    "Assembler",
    "AssemblyBudget",
    "Batch",
    "ElementFormat",
    "KeyedRows",
    "decode",
    "encode",
    "pack_rows",
    "unpack_rows",
]


@dataclass(slots=True)
class KeyedRows:
    """Rows with the key of each, so that a key function runs once per record."""

    keys: list[Any]
    rows: list[Any]

    def __len__(self) -> int:
        return len(self.rows)


Batch: TypeAlias = "list[Any] | KeyedRows | pa.RecordBatch"
Part: TypeAlias = "bytes | memoryview"

_SCHEMA_LENGTH: Final = struct.Struct(">I4x")
_SCHEMAS_KEPT: Final = 256
_schemas: dict[bytes, Any] = {}
"""Schemas that were read before, by their messages."""


def encode(batch: Batch) -> tuple[int, list[Part]]:
    """A batch as one element: its rows, and the parts whose bytes in order are header and payload.

    Raises:
        UnserializableRecord: the row format cannot carry a row; names it.
        UsageError: the element would be longer than ``ELEMENT_BYTES_MAX``.
    """
    rows = len(batch)
    body: list[Part]
    if isinstance(batch, list):
        kind, body = ElementFormat.ROWS, [pack_rows(batch)]
    elif isinstance(batch, KeyedRows):
        kind, body = ElementFormat.KEYED_ROWS, [pack_keyed_rows(batch.keys, batch.rows)]
    else:
        kind, body = ElementFormat.ARROW, _encode_arrow(batch)
    size = sum(map(len, body))
    if size > ELEMENT_BYTES_MAX:
        raise UsageError(
            f"a batch of {rows} rows takes {size} bytes, and an element at most {ELEMENT_BYTES_MAX}: "
            "emit smaller batches"
        )
    return rows, [ELEMENT_HEADER.pack(size, rows, kind), *body]


def decode(kind: int, rows: int, payload: Any) -> Batch:
    """The batch of an element; Arrow columns lie in ``payload``, which they keep alive.

    Raises:
        RemoteProtocolError: the payload is not what ``kind`` and ``rows`` say.
    """
    batch: Batch
    if kind == ElementFormat.ROWS:
        batch = unpack_rows(payload)
    elif kind == ElementFormat.KEYED_ROWS:
        batch = KeyedRows(*unpack_keyed_rows(payload))
    elif kind == ElementFormat.ARROW:
        batch = _decode_arrow(payload)
    else:
        raise RemoteProtocolError(f"an element of unknown format {kind}")
    if len(batch) != rows:
        raise RemoteProtocolError(f"an element of {rows} rows holds {len(batch)}")
    return batch


def _encode_arrow(batch: pa.RecordBatch) -> list[Part]:
    batch = _without_dictionaries(batch)
    schema = batch.schema.serialize().to_pybytes()
    start = _SCHEMA_LENGTH.pack(len(schema)) + schema + bytes(-len(schema) % 8)
    return [start, memoryview(batch.serialize()).cast("B")]


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Dictionaries are state of a stream; an element stands for itself."""
    import pyarrow as pa

    kinds = batch.schema.types
    plain = [with_innermost(kind, without_dictionary) for kind in kinds]
    if plain == kinds:
        return batch
    fields = [field.with_type(kind) for field, kind in zip(batch.schema, plain, strict=True)]
    return batch.cast(pa.schema(fields, batch.schema.metadata))


def _decode_arrow(payload: Any) -> pa.RecordBatch:
    import pyarrow as pa

    view = memoryview(payload)
    try:
        (length,) = _SCHEMA_LENGTH.unpack_from(view)
        begin = _SCHEMA_LENGTH.size
        message = bytes(view[begin : begin + length])
        schema = _schemas.get(message)
        if schema is None:
            schema = pa.ipc.read_schema(pa.py_buffer(message))
            if len(_schemas) >= _SCHEMAS_KEPT:
                _schemas.clear()
            _schemas[message] = schema
        body = pa.py_buffer(view).slice(begin + length + -length % 8)
        batch = pa.ipc.read_record_batch(body, schema)
        batch.validate()
    except (struct.error, pa.ArrowException, OSError, EOFError, ValueError, IndexError) as error:
        raise RemoteProtocolError(f"Arrow columns cannot be read: {error}") from error
    return batch
