"""Elements: what an exchange carries, a header and one batch of rows or of Arrow columns.

The header (:data:`ELEMENT_HEADER`) has the payload's bytes, the rows, the format, the version of the header
and flags. An element of another version, or with a flag that is not known, is refused in words: what comes
after its header may be something else. The only flag says that event times follow at the end of the payload:
1, 2, 4 or 8 bytes a row (unsigned, little-endian), what is added to each of them (i64), and how many bytes a
row has (u8). The formats:

* ``ROWS``: a msgpack list of the rows: see ``rowformat``.
* ``KEYED_ROWS``: a msgpack list of two: the keys and the rows.
* ``ARROW``: the length of an Arrow IPC schema message and the number of columns that were narrowed (u32 each,
  big-endian), that message, zeros up to a multiple of 8, of each narrowed column its number, its bits (u32
  each) and its base (i64), an Arrow IPC record batch message, and the bytes of the texts in narrowed columns.
  Each element stands for itself; these texts, and columns that were not narrowed (see ``narrowing``), are
  used in place.
* ``STATE``: a part of a task's state, which no operator is given: see ``worker/tasks/statehandover.py``.
* ``SNAPSHOT``: a marker between snapshots of a task's state: see ``worker/tasks/snapshotstream.py``.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from minishuffle.errors import RemoteProtocolError, ResourceExhausted, UsageError
from minishuffle.exchange.batch import Batch, Times
from minishuffle.exchange.narrowing import Narrowed, narrow, narrow_schema, text_bytes, widen
from minishuffle.exchange.rows import pack_keyed_rows, pack_rows, unpack_keyed_rows, unpack_rows
from minishuffle.exchange.schemas import decoded, with_types
from minishuffle.limits import ELEMENT_BYTES_MAX, SPILL_ELEMENT_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Assembler",
    "AssemblyBudget",
    "ByteBudget",
    "ELEMENT_HEADER",
    "ElementFormat",
    "Part",
    "decode",
    "encode",
    "pack_header",
    "pack_rows",
    "payload_of",
    "read_header",
    "may_change",
    "unpinned",
    "unpack_rows",
    "with_header",
]


# --- assembly -------------------------------------------------------------------------------------
#
# Elements are put together from the buffers of a channel: header by header, payload by payload.
#
# A payload that lies in one buffer is copied out at once. One that spans buffers is put together in
# memory as long as it is not too long and the worker's budget has room, else in an unlinked file that is
# mapped into memory.


ELEMENT_HEADER: Final = struct.Struct(">IIBBBx")
"""Payload bytes, rows, format, version, flags. Every version has the version where this one has it."""
ELEMENT_VERSION: Final = 1
_TIMED_FLAG: Final = 1


class ElementFormat(IntEnum):
    """How the payload of an element is written."""

    ROWS = 1
    KEYED_ROWS = 2
    ARROW = 3
    STATE = 4
    SNAPSHOT = 5


_FORMATS: Final = frozenset(map(int, ElementFormat))
TIMED: Final = _TIMED_FLAG << 8
"""Added to a format: event times follow. The flags of a header are above the format here."""
WHOLE: Final = 0
"""Instead of a format: the payload is the batch itself. No element has it on a wire."""
_NOTHING: Final = memoryview(b"")
_BYTE: Final = np.dtype(np.uint8)
"""An array of a ``dtype`` is made faster than one of a type that numpy has to look up."""


class ByteBudget:
    """How many bytes of something a worker may hold.

    Shared by all task threads without a lock: each holder has an entry of its own, and those that look at
    the same time may each take the last room, so the limit is exact within what they reserve at that moment.

    Args:
        limit_bytes: the bound.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[int, int] = {}
        self._reserved = 0
        """At least ``used``: what was held when it was last added up, and all that was reserved since."""

    @property
    def used(self) -> int:
        """Bytes that are held."""
        return sum(self._held.values())

    def reserve(self, holder: int, size: int, before: int = 0) -> bool:
        """Take ``size`` bytes for ``holder`` (an id) beside those ``before``; False if there is no room."""
        if self._reserved + size > self.limit_bytes:
            self._reserved = used = self.used  # adding up takes as long as there are holders
            if used + size > self.limit_bytes:
                return False
        self._reserved += size
        self._held[holder] = before + size
        return True

    def extend(self, holder: int, size: int) -> bool:
        """Take ``size`` bytes more for ``holder``; False if there is no room."""
        return self.reserve(holder, size, self._held.get(holder, 0))

    def release(self, holder: int) -> None:
        """Give back what ``holder`` took, if anything."""
        self._held.pop(holder, None)


class AssemblyBudget(ByteBudget):
    """The bytes of half elements: what their assemblers hold.

    Args:
        directory: where long elements are put together; None for the system's temporary directory.
    """

    def __init__(self, limit_bytes: int, directory: str | None = None) -> None:
        super().__init__(limit_bytes)
        self.directory = directory


class Assembler:
    """The element under way of one channel.

    Args:
        budget: the worker's.
    """

    __slots__ = (
        "_at",
        "_begun",
        "_budget",
        "_filled",
        "_format",
        "_header",
        "_rows",
        "_target",
        "_view",
        "_whole",
    )

    def __init__(self, budget: AssemblyBudget) -> None:
        self._budget = budget
        self._view = _NOTHING
        self._at = 0
        self._begun = 0
        """Rows that begin in the buffers fed so far and whose header was not read yet."""
        self._header = b""
        """The part of a header that has come."""
        self._target: memoryview | None = None
        """The payload under way, which is complete up to ``_filled``."""
        self._filled = 0
        self._format = 0
        self._rows = 0
        self._whole: tuple[int, int, Any] | None = None

    @property
    def exhausted(self) -> bool:
        """True once every byte that was fed has been copied out; nothing refers to the view then."""
        return self._at == len(self._view)

    @property
    def partial(self) -> bool:
        """True while a part of an element has come, if only of its header."""
        return bool(self._header) or self._target is not None

    def feed(self, view: memoryview, rows: int) -> None:
        """The payload of the channel's next buffer, in which ``rows`` rows begin. The one before must be
        exhausted."""
        assert self.exhausted
        self._begun += rows
        self._view = view
        self._at = 0

    def put(self, batch: Batch, rows: int) -> None:
        """A batch that came as it is, behind whole elements."""
        assert self.exhausted and not self.partial
        self._whole = WHOLE, rows, batch

    def next(self) -> tuple[int, int, Any] | None:
        """The next whole element as (format, rows, payload), or None when more bytes are needed.

        The payload (bytes or a memoryview) owns its memory, which is aligned to 8 bytes or more.

        Raises:
            RemoteProtocolError: a header that cannot be; nothing was allocated for it.
            ResourceExhausted: a long element cannot be written to the directory of the budget.
        """
        if self._whole is not None:
            element, self._whole = self._whole, None
            return element
        target = self._target
        if target is None:
            size = self._next_header()
            if size is None:
                return None
            end = self._at + size
            if end <= len(self._view):
                payload = bytes(self._view[self._at : end])
                self._advance(end)
                return self._format, self._rows, payload
            target = self._target = self._allocate(size)
            self._filled = 0
        filled, at = self._filled, self._at
        missing, there = len(target) - filled, len(self._view) - at
        if there < missing:
            target[filled : filled + there] = self._view[at:]
            self._filled = filled + there
            self._view, self._at = _NOTHING, 0
            return None
        target[filled:] = self._view[at : at + missing]
        self._advance(at + missing)
        self._target = None
        self._budget.release(id(self))
        return self._format, self._rows, target

    def clear(self) -> int:
        """Throw away the half element and the rest of the view; returns the rows that are lost with them.

        Those of an element whose header is incomplete are what its buffer said.
        """
        rows = self._rows if self._target is not None else 0
        if self.partial or not self.exhausted:
            rows += max(0, self._begun)
        self._begun = 0
        self._target = None
        self._header = b""
        self._advance(len(self._view))
        self._budget.release(id(self))
        return rows

    def _advance(self, at: int) -> None:
        self._at = at
        if at == len(self._view):
            self._view = _NOTHING
            self._at = 0

    def _next_header(self) -> int | None:
        """Read a header; returns the payload's size, or None if a part of the header is missing."""
        begin, end = self._at, self._at + ELEMENT_HEADER.size - len(self._header)
        if end > len(self._view):
            self._header += bytes(self._view[begin:])
            self._advance(len(self._view))
            return None
        if self._header:
            size, rows, kind = read_header(self._header + bytes(self._view[begin:end]))
            self._header = b""
        else:
            size, rows, kind = read_header(self._view, begin)
        self._at = end
        self._rows, self._format = rows, kind
        self._begun -= rows
        return size

    def _allocate(self, size: int) -> memoryview:
        if size <= SPILL_ELEMENT_BYTES and self._budget.reserve(id(self), size):
            return np.empty(size, _BYTE).data
        return memoryview(_map_file(size, self._budget.directory))


def _map_file(size: int, directory: str | None) -> mmap.mmap:
    """``size`` bytes of a new file without a name; its blocks are reserved, so that writing cannot fail."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="minishuffle-element-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        where = directory or tempfile.gettempdir()
        raise ResourceExhausted(
            f"an element of {size} bytes cannot be put together in {where} ({error.strerror}): "
            "free space there, or emit smaller batches"
        ) from error


# --- elements -------------------------------------------------------------------------------------


def pack_header(size: int, rows: int, kind: int) -> bytes:
    """The header of an element whose payload takes ``size`` bytes."""
    return ELEMENT_HEADER.pack(size, rows, kind & 0xFF, ELEMENT_VERSION, kind >> 8)


def read_header(data: bytes | memoryview, at: int = 0) -> tuple[int, int, int]:
    """Payload bytes, rows and format, with ``TIMED`` or without, of the element that begins at ``at``.

    Raises:
        RemoteProtocolError: it is of another version, has flags that this one does not know, or cannot be.
    """
    size, rows, kind, version, flags = ELEMENT_HEADER.unpack_from(data, at)
    if version != ELEMENT_VERSION or flags > _TIMED_FLAG:
        raise RemoteProtocolError(
            f"an element whose header has version {version} and flags {flags:#04x}: this process reads "
            f"version {ELEMENT_VERSION} and flags up to {_TIMED_FLAG:#04x}; run the same release of "
            "minishuffle everywhere"
        )
    if kind not in _FORMATS or size > ELEMENT_BYTES_MAX:
        raise RemoteProtocolError(
            f"an element of {size} bytes, {rows} rows and format {kind}: the formats are 1 to "
            f"{max(_FORMATS)}, and the limit is {ELEMENT_BYTES_MAX} bytes"
        )
    return size, rows, kind | flags << 8


Part: TypeAlias = "bytes | memoryview"
PINNED_RATIO_MAX: Final = 1.25
"""A batch that stays in its process is copied if the memory that it keeps is larger than itself by more."""
_ARROW_HEADER: Final = struct.Struct(">II")
"""Bytes of the schema message, narrowed columns."""
_NARROWED: Final = struct.Struct(">IIq")
_SCHEMAS_KEPT: Final = 256
_schemas: dict[bytes, Any] = {}
"""Schemas that were read before, by their messages."""


def encode(batch: Batch, *, narrows: bool = True) -> tuple[int, list[Part]]:
    """A batch as one element: its rows, and the parts whose bytes in order are header and payload.

    Args:
        narrows: it may take fewer bytes than the batch does: see ``narrowing``.

    Raises:
        UnserializableRecord: the row format cannot carry a row; names it.
        UsageError: the element would be longer than ``ELEMENT_BYTES_MAX``.
    """
    rows = len(batch.payload)
    return rows, with_header(rows, *payload_of(batch, narrows=narrows))


def payload_of(batch: Batch, *, narrows: bool = True) -> tuple[int, list[Part]]:
    """The payload of a batch's element, and its format. Raises UnserializableRecord as :func:`encode`."""
    if batch.times is not None:
        kind, parts = payload_of(Batch(batch.payload, batch.keys), narrows=narrows)
        return kind | TIMED, [*parts, *_encode_times(batch.times)]
    payload, keys = batch.payload, batch.keys
    if not isinstance(payload, list):
        return ElementFormat.ARROW, _encode_arrow(payload, narrows)
    if keys is None:
        return ElementFormat.ROWS, [pack_rows(payload)]
    return ElementFormat.KEYED_ROWS, [pack_keyed_rows(keys, payload)]


def with_header(rows: int, kind: int, body: list[Part]) -> list[Part]:
    """The parts of an element. Raises UsageError as :func:`encode`."""
    size = sum(map(len, body))
    if size > ELEMENT_BYTES_MAX:
        what = "a row" if rows == 1 else f"a batch of {rows} rows"
        raise UsageError(
            f"{what} takes {size} bytes, and at most {ELEMENT_BYTES_MAX} can be sent at once: keep such "
            "values in a file, and write its path instead"
        )
    return [pack_header(size, rows, kind), *body]


def decode(kind: int, rows: int, payload: Any) -> Batch:
    """The batch of an element. Columns lie in ``payload``, which they keep alive, and come without keys.

    Raises:
        RemoteProtocolError: the payload is not what ``kind`` and ``rows`` say.
    """
    if kind & TIMED:
        times, end = _decode_times(rows, payload)
        timed = decode(kind & ~TIMED, rows, memoryview(payload)[:end])
        timed.times = times
        return timed
    if kind == ElementFormat.ROWS:
        batch = Batch(unpack_rows(payload))
    elif kind == ElementFormat.KEYED_ROWS:
        keys, unpacked = unpack_keyed_rows(payload)
        batch = Batch(unpacked, keys)
    elif kind == ElementFormat.ARROW:
        batch = Batch(_decode_arrow(payload))
    elif kind == WHOLE:
        batch = payload
    else:
        raise RemoteProtocolError(f"an element of unknown format {kind}")
    if len(batch.payload) != rows:
        raise RemoteProtocolError(f"an element of {rows} rows holds {len(batch)}")
    return batch


_TIMES_END: Final = struct.Struct("<qB")
"""What is added to each number, and how many bytes it has."""
_NUMBERS: Final = {width: np.dtype(f"<u{width}") for width in (1, 2, 4)} | {8: np.dtype("<i8")}


def _encode_times(times: Times) -> list[Part]:
    if not len(times):
        return [_TIMES_END.pack(0, 1)]
    base = int(times.min())
    span = int(times.max()) - base
    width = next(width for width in (1, 2, 4, 8) if span < 1 << 8 * width)
    if width == 8:
        return [times.tobytes(), _TIMES_END.pack(0, 8)]
    return [(times - base).astype(_NUMBERS[width]).tobytes(), _TIMES_END.pack(base, width)]


def _decode_times(rows: int, payload: Any) -> tuple[Times, int]:
    """The times at the end of a payload, and where they begin."""
    view = memoryview(payload)
    try:
        base, width = _TIMES_END.unpack_from(view, len(view) - _TIMES_END.size)
        begin = len(view) - _TIMES_END.size - rows * width
        numbers = np.frombuffer(view[begin : begin + rows * width], _NUMBERS[width])
        if begin < 0:
            raise ValueError(f"{rows} times of {width} bytes in {len(view)}")
    except (struct.error, KeyError, ValueError) as error:
        raise RemoteProtocolError(f"event times cannot be read: {error}") from error
    return numbers + np.int64(base) if width == 8 else numbers.astype(np.int64) + base, begin


def _encode_arrow(batch: pa.RecordBatch, narrows: bool) -> list[Part]:
    batch = _without_dictionaries(batch)
    schema = batch.schema.serialize().to_pybytes()
    narrowed, notes, texts = narrow(batch) if narrows else (batch, [], [])
    start = _ARROW_HEADER.pack(len(schema), len(notes)) + schema + bytes(-len(schema) % 8)
    start += b"".join(_NARROWED.pack(*note) for note in notes)
    return [start, memoryview(narrowed.serialize()).cast("B"), *texts]


def unpinned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as the other end of an exchange gets it: without dictionaries, and in memory that holds
    hardly anything else and that nobody can write to: a function may use an array of numpy again."""
    import pyarrow as pa

    batch = _without_dictionaries(batch)
    pins = batch.get_total_buffer_size() > batch.nbytes * PINNED_RATIO_MAX
    if not pins and not may_change(batch):
        return batch
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def may_change(batch: pa.RecordBatch) -> bool:
    """Whether somebody can write to its memory, that of dictionaries aside."""
    return any(
        buffer is not None and buffer.is_mutable for column in batch.columns for buffer in column.buffers()
    )


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Dictionaries are state of a stream; an element stands for itself."""
    import pyarrow as pa

    columns = list(map(decoded, batch.columns))
    kinds = [column.type for column in columns]
    if kinds == batch.schema.types:
        return batch
    return pa.RecordBatch.from_arrays(columns, schema=with_types(batch.schema, kinds))


def _decode_arrow(payload: Any) -> pa.RecordBatch:
    import pyarrow as pa

    view = memoryview(payload)
    try:
        length, count = _ARROW_HEADER.unpack_from(view)
        begin = _ARROW_HEADER.size
        message = bytes(view[begin : begin + length])
        schema = _schemas.get(message)
        if schema is None:
            schema = pa.ipc.read_schema(pa.py_buffer(message))
            if len(_schemas) >= _SCHEMAS_KEPT:
                _schemas.clear()
            _schemas[message] = schema
        begin += length + -length % 8
        body = begin + count * _NARROWED.size
        notes = [Narrowed(*fields) for fields in _NARROWED.iter_unpack(view[begin:body])]
        end = len(view) - text_bytes(schema, notes)
        if end < body:
            raise ValueError(f"texts of {len(view) - end} bytes in {len(view)}")
        batch = pa.ipc.read_record_batch(pa.py_buffer(view[body:end]), narrow_schema(schema, notes))
        batch.validate()
        batch = widen(batch, schema, notes, pa.py_buffer(view[end:]))
    except (struct.error, pa.ArrowException, OSError, EOFError, ValueError, IndexError) as error:
        raise RemoteProtocolError(f"Arrow columns cannot be read: {error}") from error
    return batch
