"""The codec of the journal's records, by the annotations of their types. Pure.

The kinds of records are listed in :mod:`~minishuffle.coordinator.journal.journalrecords`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

import msgpack
from pydantic import BaseModel, TypeAdapter, ValidationError

from minishuffle.errors import ShuffleError
from minishuffle.ids import RecordKey
from minishuffle.wire.control import what_does_not_fit

__all__ = ["FORMAT", "OtherFormat", "Record", "pack_record", "require_format", "unpack_record"]

FORMAT: Final = 3
"""The first byte of each record. A release that changes the contents of records uses the next number.
``tests/coordinator/journal/journals`` has a journal of each format."""
FORMATS_MAX: Final = 31
"""Greater first bytes are damage, not future formats."""
Fact = TypeVar("Fact")


class Record:
    """Base class of the dataclasses that are records or parts of them: an unknown field is an error."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


class OtherFormat(ShuffleError):
    """The journal was written by another release."""


def require_format(records: Mapping[RecordKey, bytes]) -> None:
    """Raises OtherFormat: another release of minishuffle wrote some of these records."""
    for record in records.values():
        if record and record[0] != FORMAT and 0 < record[0] <= FORMATS_MAX:
            raise OtherFormat(f"it has format {record[0]}, this release reads format {FORMAT}")


class _Adapters(dict[type[Any], TypeAdapter[Any]]):
    def __missing__(self, kind: type[Any]) -> TypeAdapter[Any]:
        adapter = self[kind] = TypeAdapter(kind)
        return adapter


_ADAPTERS: Final = _Adapters()


def pack_record(fact: Record | BaseModel) -> bytes:
    """Pack a fact as bytes. Its parts are records, models, or types of msgpack, but no sets."""
    fields = _ADAPTERS[type(fact)].serializer.to_python(fact)
    packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="backslashreplace")
    return bytes((FORMAT,)) + packed


def unpack_record(kind: type[Fact], key: RecordKey, record: bytes) -> Fact:
    """The fact packed by :func:`pack_record`.

    Raises:
        ShuffleError: the bytes do not fit the type.
    """
    try:
        if record[:1] != bytes((FORMAT,)):
            raise ValueError(f"it has format {record[:1].hex() or 'none'}, not {FORMAT:02x}")
        fact: Fact = _ADAPTERS[kind].validate_python(msgpack.unpackb(record[1:], strict_map_key=False))
    except ValidationError as error:
        raise ShuffleError(f"record {_shown(key)} cannot be read: {what_does_not_fit(error)}") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ShuffleError(f"record {_shown(key)} cannot be read: {error}") from error
    return fact


def _shown(key: RecordKey) -> str:
    return " ".join(filter(None, key))
