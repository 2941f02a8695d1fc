"""Rows as bytes: one msgpack value for a whole list, with extension types for what msgpack lacks.

Takes None, bool, int of any size, float, str, bytes, datetime (aware and naive, to the microsecond),
date, timedelta, Decimal, UUID, and lists, tuples and dicts of these. Lists and tuples both arrive as
tuples, bytearrays as bytes, numpy's numbers as Python's, and instances of subclasses (named tuples,
enumerations of int or str) as the plain type. An aware datetime arrives with its offset as a fixed
timezone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal, InvalidOperation
from operator import is_, itemgetter
from typing import Any, Final
from uuid import UUID

import msgpack
import numpy as np

from minishuffle.errors import RemoteProtocolError, UnserializableRecord
from minishuffle.limits import ROW_PREVIEW_CHARS

__all__ = [
    "pack_keyed_rows",
    "pack_result",
    "pack_rows",
    "preview",
    "unpack_keyed_rows",
    "unpack_result",
    "unpack_rows",
]

_AWARE, _NAIVE, _DATE, _TIMEDELTA, _DECIMAL, _UUID, _INT = range(64, 71)
"""msgpack's extension codes."""

_AWARE_BODY: Final = struct.Struct(">qq")
_NAIVE_BODY: Final = struct.Struct(">q")
_DATE_BODY: Final = struct.Struct(">i")
_TIMEDELTA_BODY: Final = struct.Struct(">iii")
_EPOCH: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)

_MISFITS: Final = (TypeError, ValueError, OverflowError, RecursionError)
"""What the packer raises for a value that it cannot take."""
_TAKEN: Final = (
    "None, bool, int, float, str, bytes, datetime, date, timedelta, Decimal, UUID, or lists, tuples and "
    "dicts of these"
)
_MALFORMED: Final = (
    msgpack.UnpackException,
    ValueError,
    TypeError,
    OverflowError,
    struct.error,
    InvalidOperation,
    RecursionError,
)


def _datetime_extension(value: datetime) -> msgpack.ExtType:
    micros = (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND
    offset = value.utcoffset()
    if offset is None:
        return msgpack.ExtType(_NAIVE, _NAIVE_BODY.pack(micros))
    return msgpack.ExtType(_AWARE, _AWARE_BODY.pack(micros, offset // _MICROSECOND))


def _replace(value: Any) -> Any:
    """(For the packer.) What stands for a value that msgpack itself does not take."""
    match value:
        case datetime():
            return _datetime_extension(value)
        case date():
            return msgpack.ExtType(_DATE, _DATE_BODY.pack(value.toordinal()))
        case timedelta():
            body = _TIMEDELTA_BODY.pack(value.days, value.seconds, value.microseconds)
            return msgpack.ExtType(_TIMEDELTA, body)
        case Decimal():
            return msgpack.ExtType(_DECIMAL, str(value).encode())
        case UUID():
            return msgpack.ExtType(_UUID, value.bytes)
        case int():
            size = value.bit_length() // 8 + 1
            return msgpack.ExtType(_INT, value.to_bytes(size, "big", signed=True))
        case np.bool_() | np.integer() | np.floating():
            plain = value.item()
            if isinstance(plain, bool | int | float):
                return plain
    raise TypeError(type(value).__name__)


def _restore(code: int, body: bytes) -> Any:
    """(For the unpacker.) The value of an extension."""
    if code == _NAIVE:
        return _EPOCH + timedelta(microseconds=_NAIVE_BODY.unpack(body)[0])
    if code == _AWARE:
        micros, offset = _AWARE_BODY.unpack(body)
        zone = timezone(timedelta(microseconds=offset))
        return (_EPOCH + timedelta(microseconds=micros)).replace(tzinfo=zone)
    if code == _DATE:
        return date.fromordinal(_DATE_BODY.unpack(body)[0])
    if code == _TIMEDELTA:
        return timedelta(*_TIMEDELTA_BODY.unpack(body))
    if code == _DECIMAL:
        return Decimal(body.decode())
    if code == _UUID:
        return UUID(bytes=body)
    if code == _INT:
        return int.from_bytes(body, "big", signed=True)
    return msgpack.ExtType(code, body)


def preview(row: Any) -> str:
    """The row's repr, cut at ``ROW_PREVIEW_CHARS``."""
    try:
        text = repr(row)
    except Exception as error:  # a repr of the user's; the record must be named even so
        return f"a {type(row).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= ROW_PREVIEW_CHARS else text[:ROW_PREVIEW_CHARS] + "…"


def _refusal(records: Sequence[Any], what: str) -> UnserializableRecord | None:
    """The error for the first of ``records`` that cannot be packed, if there is one."""
    for number, record in enumerate(records):
        try:
            msgpack.packb([[record]], default=_replace)
        except _MISFITS as error:
            reason = f"it holds a {error}" if type(error) is TypeError else f"{error}"
            return UnserializableRecord(
                f"{what} {number} of a batch cannot cross an exchange: {preview(record)} "
                f"({type(record).__name__}): {reason}; map it to {_TAKEN}"
            )
    return None


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_replace)
    return packed


def pack_rows(rows: Sequence[Any]) -> bytes:
    """Rows as one value.

    Raises:
        UnserializableRecord: names the first row that does not fit, the type at fault, and the fix.
    """
    try:
        return _pack(rows)
    except _MISFITS as error:
        raise _refusal(rows, "row") or UnserializableRecord(f"rows cannot be packed: {error}") from error


def pack_result(result: Any) -> bytes:
    """What a sink's ``close()`` gave.

    Raises:
        UnserializableRecord: names the type at fault, and the fix.
    """
    try:
        return _pack(result)
    except _MISFITS as error:
        reason = f"it holds a {error}" if type(error) is TypeError else f"{error}"
        raise UnserializableRecord(
            f"what close() of the sink gave cannot be sent: {preview(result)} ({type(result).__name__}): "
            f"{reason}; give {_TAKEN}"
        ) from error


def pack_keyed_rows(keys: Sequence[Any], rows: Sequence[Any]) -> bytes:
    """Keys and rows, equally many, as one value. Raises as :func:`pack_rows`.

    Where every key is the very object at one place of its row, that place goes instead of the keys.
    """
    try:
        place = _place_of_keys(keys, rows)
        return _pack((keys if place is None else place, rows))
    except _MISFITS as error:
        refusal = _refusal(keys, "the key of row") or _refusal(rows, "row")
        raise refusal or UnserializableRecord(f"rows cannot be packed: {error}") from error


def _place_of_keys(keys: Sequence[Any], rows: Sequence[Any]) -> int | None:
    """Where in each row its key stands, if it is the same place in all of them."""
    if not rows or type(rows[0]) is not tuple:
        return None
    place = next((number for number, value in enumerate(rows[0]) if value is keys[0]), None)
    if place is None or set(map(type, rows)) != {tuple}:
        return None
    try:
        return place if all(map(is_, keys, map(itemgetter(place), rows))) else None
    except IndexError:
        return None


def _value(data: Any) -> Any:
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False, ext_hook=_restore)
    except _MALFORMED as error:
        raise RemoteProtocolError(f"rows cannot be unpacked: {error}") from error


def _unpack(data: Any) -> tuple[Any, ...]:
    value = _value(data)
    if not isinstance(value, tuple):
        raise RemoteProtocolError(f"rows cannot be unpacked: a {type(value).__name__} instead of a list")
    return value


def unpack_rows(data: Any) -> list[Any]:
    """Rows from bytes (or a view) that :func:`pack_rows` wrote.

    Raises:
        RemoteProtocolError: the bytes are no such value.
    """
    return list(_unpack(data))


def unpack_result(data: Any) -> Any:
    """What :func:`pack_result` was given. Raises as :func:`unpack_rows`."""
    return _value(data)


def unpack_keyed_rows(data: Any) -> tuple[list[Any], list[Any]]:
    """Keys and rows from bytes that :func:`pack_keyed_rows` wrote. Raises as :func:`unpack_rows`."""
    match _unpack(data):
        case (tuple() as keys, tuple() as rows) if len(keys) == len(rows):
            return list(keys), list(rows)
        case (int() as place, tuple() as rows) if place >= 0:
            try:
                return list(map(itemgetter(place), rows)), list(rows)
            except (IndexError, TypeError, KeyError):
                raise RemoteProtocolError(f"keyed rows cannot be unpacked: no key at place {place}") from None
    raise RemoteProtocolError("keyed rows cannot be unpacked: not one key for each row")
