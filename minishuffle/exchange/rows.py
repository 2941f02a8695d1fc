"""Rows as bytes: one msgpack value for a whole list, with extension types for what msgpack lacks.

Takes None, bool, int of any size, float, str, bytes, datetime (aware and naive, to the microsecond),
date, time, timedelta, Decimal, UUID, and lists, tuples and dicts of these. Lists arrive as lists and
tuples as tuples, bytearrays as bytes, numpy's numbers as Python's, and instances of subclasses (named
tuples, enumerations of int or str) as the plain type. An aware datetime arrives with its offset as a fixed
timezone. A time with nanoseconds (of pandas) is refused rather than cut.

msgpack has one kind of array. In a value without a mark arrays are tuples, as they are in nearly all
rows; otherwise :data:`_MARK` stands in front of it, and a letter that says what arrays are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from itertools import chain
from operator import is_, itemgetter
from types import NoneType
from typing import Any, Final
from uuid import UUID

import msgpack
import numpy as np

from minishuffle.errors import RemoteProtocolError, UnserializableRecord, WrongResult
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import ROW_PREVIEW_CHARS

__all__ = [
    "SCALARS",
    "pack_each",
    "pack_keyed_rows",
    "pack_result",
    "pack_rows",
    "preview",
    "unpack_keyed_rows",
    "unpack_result",
    "unpack_rows",
]

_AWARE, _NAIVE, _DATE, _TIMEDELTA, _DECIMAL, _UUID, _INT, _TIME, _TUPLE = range(64, 73)
"""msgpack's extension codes."""
_MARK: Final = 0xC1
"""The one byte with which no msgpack value begins."""
_LISTS, _ROWS, _MIXED, _KEYED = b"LRMK"
"""After the mark: arrays are lists; so they are but for the rows, which are tuples; arrays are lists, and
tuples an extension; keys (or their place) and rows are an array of two values as these."""

_ITSELF: Final = -1
"""The place of keys that are the rows themselves."""

_AWARE_BODY: Final = struct.Struct(">qq")
_NAIVE_BODY: Final = struct.Struct(">q")
_DATE_BODY: Final = struct.Struct(">i")
_TIMEDELTA_BODY: Final = struct.Struct(">iii")
_TIME_BODY: Final = struct.Struct(">BBBI?q")
"""Hour, minute, second, microsecond, whether there is an offset, and that in microseconds."""
_EPOCH: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)

_MISFITS: Final = (TypeError, ValueError, OverflowError, RecursionError)
"""What the packer raises for a value that it cannot take."""
_TAKEN: Final = (
    "None, bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal, UUID, or lists, tuples "
    "and dicts of these"
)
SCALARS: Final = frozenset(
    (NoneType, bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal, UUID)
)
"""The types of values that hold no others and cannot be changed."""
_PLAIN: Final = SCALARS | {list, tuple, dict}
"""Those of values that come back as they are."""
_NESTED_MAX: Final = 512
"""msgpack refuses what is nested deeper."""
_COUNTED_MIN: Final = 32
"""From so many rows on, a compiled loop counts the arrays in what they are packed to, to see whether they
hold any. That takes a tenth of a look at the types of all values; with fewer rows, the call takes longer."""
_MALFORMED: Final = (
    msgpack.UnpackException,
    ValueError,
    TypeError,
    OverflowError,
    struct.error,
    InvalidOperation,
    RecursionError,
)


def _check_whole(value: datetime | timedelta) -> None:
    """
    Raises:
        ValueError: a value of pandas has nanoseconds, or is no time at all.
    """
    if value != value:
        raise ValueError("NaT is no time: put None there")
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise ValueError(
            f"{value!r} has nanoseconds and Python's times have none: round it to microseconds, "
            "or keep it in an Arrow column"
        )


def _datetime_extension(value: datetime) -> msgpack.ExtType:
    _check_whole(value)
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
        case time():
            return _time_extension(value)
        case timedelta():
            _check_whole(value)
            body = _TIMEDELTA_BODY.pack(value.days, value.seconds, value.microseconds)
            return msgpack.ExtType(_TIMEDELTA, body)
        case Decimal():
            return msgpack.ExtType(_DECIMAL, str(value).encode())
        case UUID():
            return msgpack.ExtType(_UUID, value.bytes)
        case int():
            size = value.bit_length() // 8 + 1
            return msgpack.ExtType(_INT, value.to_bytes(size, "big", signed=True))
        case np.timedelta64():
            pass  # a signed integer, says numpy
        case np.bool_() | np.integer() | np.floating():
            plain = value.item()
            if isinstance(plain, bool | int | float):
                return plain
    raise TypeError(type(value).__name__)


def _time_extension(value: time) -> msgpack.ExtType:
    offset = value.utcoffset()
    if value.tzinfo is not None and offset is None:
        raise ValueError(f"{value!r} has a time zone whose offset depends on the day")
    micros = 0 if offset is None else offset // _MICROSECOND
    whole = (value.hour, value.minute, value.second, value.microsecond, offset is not None, micros)
    return msgpack.ExtType(_TIME, _TIME_BODY.pack(*whole))


def _replace_strictly(value: Any) -> Any:
    """(For the packer that takes no subclass for its base, nor a tuple for a list.)"""
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, _pack_strictly(list(value)))
        case list():
            return list(value)
        case dict():
            return dict(value)
        case str():
            return str.__str__(value)
        case bytes():
            return bytes(value)
        case float():
            return float.__float__(value)
        case int() if -(1 << 63) <= value < 1 << 64:
            return int.__int__(value)
    return _replace(value)


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
    if code == _TIME:
        hour, minute, second, micros, is_aware, offset = _TIME_BODY.unpack(body)
        found = time(hour, minute, second, micros)
        return found.replace(tzinfo=timezone(timedelta(microseconds=offset))) if is_aware else found
    if code == _TUPLE:
        return tuple(_value(body, use_list=True))
    return msgpack.ExtType(code, body)


def preview(row: Any, chars: int = ROW_PREVIEW_CHARS) -> str:
    """The row's repr, cut at so many characters."""
    try:
        text = repr(row)
    except Exception as error:  # a repr of the user's; the record must be named even so
        return f"a {type(row).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= chars else text[:chars] + "…"


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


def _pack_strictly(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_replace_strictly, strict_types=True)
    return packed


def _form_of(rows: Sequence[Any]) -> int:
    """The letter of what :data:`_MARK` says of these rows; 0 if none is needed."""
    return 0 if _are_flat(rows) else _form(rows, _types_in(rows))


def _are_flat(rows: Sequence[Any]) -> bool:
    """Whether they are scalars, or tuples of such."""
    outer = set(map(type, rows))
    return outer <= SCALARS or (outer == {tuple} and SCALARS.issuperset(map(type, chain.from_iterable(rows))))


def _types_in(rows: Sequence[Any]) -> list[set[type]]:
    """The types of the rows, of what these hold, and so on, as far as there are others than scalars."""
    level: Sequence[Any] = rows
    found: list[set[type]] = []
    for _ in range(_NESTED_MAX):
        kinds = set(map(type, level))
        if kinds <= SCALARS:
            break
        found.append(kinds)
        arrays = tuple(kind for kind in kinds if issubclass(kind, list | tuple))
        maps = tuple(kind for kind in kinds if issubclass(kind, dict))
        inner: list[Any] = []
        if arrays:
            some = (
                level if len(arrays) == len(kinds) else [each for each in level if isinstance(each, arrays)]
            )
            inner.extend(chain.from_iterable(some))
        if maps:
            some = level if len(maps) == len(kinds) else [each for each in level if isinstance(each, maps)]
            inner.extend(chain.from_iterable(some))
            inner.extend(chain.from_iterable(map(dict.values, some)))
        level = inner
    return found


def _form(rows: Sequence[Any], levels: Sequence[set[type]]) -> int:
    """As :func:`_form_of`, of rows with these types."""
    found = [
        {list if issubclass(kind, list) else tuple for kind in kinds if issubclass(kind, list | tuple)}
        for kinds in levels
    ]
    if not any(list in kinds for kinds in found):
        return 0
    if not any(tuple in kinds for kinds in found):
        return _LISTS
    rows_are_tuples = all(isinstance(row, tuple) for row in rows)
    return _ROWS if rows_are_tuples and not any(tuple in kinds for kinds in found[1:]) else _MIXED


def _arrays_in(packed: bytes) -> int:
    return kernel("count_arrays")(np.frombuffer(packed, np.uint8), len(packed))


def _arrays_of(rows: Sequence[Any], kinds: set[type]) -> int:
    """How many arrays rows of these types pack to, if there are no lists and none of the rows holds an
    array; else they pack to more."""
    tuples = {kind for kind in kinds if issubclass(kind, tuple) and not issubclass(kind, msgpack.ExtType)}
    if len(tuples) == len(kinds):
        return 1 + len(rows)
    return 1 + (sum(type(row) in tuples for row in rows) if tuples else 0)


def _pack_marked(rows: Sequence[Any]) -> bytes:
    if len(rows) >= _COUNTED_MIN:
        packed = _pack(rows)
        if _arrays_in(packed) == _arrays_of(rows, set(map(type, rows))):
            return packed
    form = _form_of(rows)
    if not form:
        return _pack(rows)
    return bytes((_MARK, form)) + (_pack_strictly(list(rows)) if form == _MIXED else _pack(rows))


def pack_rows(rows: Sequence[Any]) -> bytes:
    """Rows as one value.

    Raises:
        UnserializableRecord: names the first row that does not fit, the type at fault, and the fix.
    """
    try:
        return _pack_marked(rows)
    except _MISFITS as error:
        raise _refusal(rows, "row") or UnserializableRecord(f"rows cannot be packed: {error}") from error


def pack_each(values: Sequence[Any], *, alike: bool = False) -> list[bytes]:
    """Each value in a way that :func:`unpack_rows` gives it back alone, in a fifth of the time of
    :func:`pack_rows`, unless some of them hold tuples and some lists.

    Args:
        alike: refuse what would come back as another type: a Counter as a dict, a named tuple as a tuple.
            (numpy's numbers may come back as Python's.)

    Raises:
        UnserializableRecord: as :func:`pack_rows`; or for what ``alike`` refuses.
    """
    levels = [] if _are_flat(values) else _types_in(values)
    packed = _packed_each(values, _form(values, levels))
    if alike and (changed := {kind for kinds in levels for kind in kinds if _base_of(kind)}):
        raise _changed(values, changed)
    return packed


def _packed_each(values: Sequence[Any], form: int) -> list[bytes]:
    if form in (0, _LISTS):
        mark, pack = bytes((_MARK, form) if form else ()), msgpack.Packer(default=_replace).pack
        try:
            return [mark + pack((value,)) for value in values]
        except _MISFITS:  # what pack_rows says of it
            pass
    return [pack_rows([value]) for value in values]


def _base_of(kind: type) -> type | None:
    """The type as which instances of a subclass come back; None: as their own, or not at all."""
    if kind is bytearray:
        return bytes
    if kind in _PLAIN or issubclass(kind, np.generic):
        return None
    return next((base for base in kind.__mro__ if base in _PLAIN), None)


def _changed(values: Sequence[Any], changed: set[type]) -> UnserializableRecord:
    """The error for the first of ``values`` in which there is one of these types."""
    value = next(each for each in values if not changed.isdisjoint(chain.from_iterable(_types_in([each]))))
    kinds = {kind for kind in chain.from_iterable(_types_in([value])) if kind in changed}
    kind = min(kinds, key=lambda each: each.__name__)
    base = _base_of(kind)
    assert base is not None
    return UnserializableRecord(
        f"{preview(value)} holds a {kind.__name__}, which would be of type {base.__name__} after a restart: "
        f"keep a plain {base.__name__} there"
    )


def pack_result(result: Any) -> bytes:
    """What a sink's ``close()`` gave.

    Raises:
        WrongResult: names the type at fault, and the fix.
    """
    try:
        return _pack_marked([result]) if _form_of([result]) else _pack(result)
    except _MISFITS as error:
        reason = f"it holds a {error}" if type(error) is TypeError else f"{error}"
        raise WrongResult(
            f"what close() of the sink gave cannot be sent: {preview(result)} ({type(result).__name__}): "
            f"{reason}; give {_TAKEN}"
        ) from error


def pack_keyed_rows(keys: Sequence[Any], rows: Sequence[Any]) -> bytes:
    """Keys and rows, equally many, as one value. Raises as :func:`pack_rows`.

    Where every key is the very object at one place of its row, that place goes instead of the keys; where it
    is the row, :data:`_ITSELF` does.
    """
    try:
        kinds = set(map(type, rows))
        place = _place_of_keys(keys, rows, kinds)
        if len(rows) >= _COUNTED_MIN:
            packed = _pack((keys if place is None else place, rows))
            expected = 1 + _arrays_of(rows, kinds)
            if place is None:
                expected += _arrays_of(keys, set(map(type, keys)))
            if _arrays_in(packed) == expected:
                return packed
        if not _form_of(rows) and (place is not None or not _form_of(keys)):
            return _pack((keys if place is None else place, rows))
        both = (_pack_marked(keys) if place is None else place, _pack_marked(rows))
        return bytes((_MARK, _KEYED)) + _pack(both)
    except _MISFITS as error:
        refusal = _refusal(keys, "the key of row") or _refusal(rows, "row")
        raise refusal or UnserializableRecord(f"rows cannot be packed: {error}") from error


def _place_of_keys(keys: Sequence[Any], rows: Sequence[Any], kinds: set[type]) -> int | None:
    """Where in each row its key stands, if it is the same place in all of them."""
    if rows and (keys is rows or all(map(is_, keys, rows))):
        return _ITSELF
    if kinds != {tuple}:
        return None
    place = next((number for number, value in enumerate(rows[0]) if value is keys[0]), None)
    if place is None:
        return None
    try:
        return place if all(map(is_, keys, map(itemgetter(place), rows))) else None
    except IndexError:
        return None


def _value(data: Any, *, use_list: bool = False) -> Any:
    try:
        return msgpack.unpackb(data, use_list=use_list, strict_map_key=False, ext_hook=_restore)
    except _MALFORMED as error:
        raise RemoteProtocolError(f"rows cannot be unpacked: {error}") from error


def _mark_of(data: Any) -> int:
    """The letter after the mark; 0 if there is no mark."""
    view = memoryview(data)
    return view[1] if len(view) > 1 and view[0] == _MARK else 0


def _unpack(data: Any) -> Sequence[Any]:
    form = _mark_of(data)
    if form not in (0, _LISTS, _ROWS, _MIXED):
        raise RemoteProtocolError(f"rows cannot be unpacked: an unknown form {form}")
    value = _value(memoryview(data)[2:], use_list=True) if form else _value(data)
    if not isinstance(value, list | tuple):
        raise RemoteProtocolError(f"rows cannot be unpacked: a {type(value).__name__} instead of a list")
    if form == _ROWS:
        try:
            return list(map(tuple, value))
        except TypeError as error:
            raise RemoteProtocolError(f"rows cannot be unpacked: {error}") from error
    return value


def unpack_rows(data: Any) -> list[Any]:
    """Rows from bytes (or a view) that :func:`pack_rows` wrote.

    Raises:
        RemoteProtocolError: the bytes are no such value.
    """
    return list(_unpack(data))


def unpack_result(data: Any) -> Any:
    """What :func:`pack_result` was given. Raises as :func:`unpack_rows`."""
    if not _mark_of(data):
        return _value(data)
    match _unpack(data):
        case [result]:
            return result
    raise RemoteProtocolError("a result cannot be unpacked: not one value")


def unpack_keyed_rows(data: Any) -> tuple[list[Any], list[Any]]:
    """Keys and rows from bytes that :func:`pack_keyed_rows` wrote. Raises as :func:`unpack_rows`."""
    if _mark_of(data) == _KEYED:
        match _value(memoryview(data)[2:]):
            case (bytes() | int() as packed, bytes() as rows):
                return _with_keys(packed if isinstance(packed, int) else _unpack(packed), _unpack(rows))
    else:
        match _unpack(data):
            case (tuple() | int() as keys, tuple() as unpacked):
                return _with_keys(keys, unpacked)
    raise RemoteProtocolError("keyed rows cannot be unpacked: not keys and rows")


def _with_keys(keys: Sequence[Any] | int, rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    if not isinstance(keys, int):
        if len(keys) != len(rows):
            raise RemoteProtocolError("keyed rows cannot be unpacked: not one key for each row")
        return list(keys), list(rows)
    if keys == _ITSELF:
        both = list(rows)
        return both, both
    try:
        if keys < 0:
            raise IndexError
        return list(map(itemgetter(keys), rows)), list(rows)
    except (IndexError, TypeError, KeyError):
        raise RemoteProtocolError(f"keyed rows cannot be unpacked: no key at place {keys}") from None
