"""Python values as Arrow arrays, whole or not at all.

``pyarrow.array`` cuts 1.5 down to an int64, a datetime to a date and a microsecond to a second without a
word; it drops the keys that a struct has no field for, and takes bytes for text and True for 1.0. So the
Python types are looked at too. Those that a type holds whole, as nearly all do, need no more than that.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.errors import WrongColumns
from minishuffle.exchange.keys import BOOL8
from minishuffle.exchange.schemas import converted, with_innermost, with_long_dictionary
from minishuffle.operators.wider_type import wider

__all__ = ["MISFITS", "array_of", "check_made", "type_of"]

MISFITS: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What ``array_of`` and pyarrow raise for a value that they cannot convert."""

_is = pa.types
_TEXT: Final = (_is.is_string, _is.is_large_string, _is.is_string_view)
_BINARY: Final = (_is.is_binary, _is.is_large_binary, _is.is_fixed_size_binary, _is.is_binary_view)
_LISTS: Final = (
    _is.is_list,
    _is.is_large_list,
    _is.is_fixed_size_list,
    _is.is_list_view,
    _is.is_large_list_view,
)
_FAMILIES: Final[dict[str, tuple[Callable[[pa.DataType], bool], ...]]] = {
    "null": (_is.is_null,),
    "boolean": (_is.is_boolean,),
    "integer": (_is.is_integer,),
    "float": (_is.is_floating,),
    "decimal": (_is.is_decimal,),
    "text": _TEXT,
    "binary": _BINARY,
    "date": (_is.is_date,),
    "timestamp": (_is.is_timestamp,),
    "time": (_is.is_time,),
    "duration": (_is.is_duration,),
}
_WHOLE: Final[dict[str, set[type]]] = {
    "boolean": {bool},
    "integer": {int},
    "float": {float, int},
    "decimal": {Decimal, int},
    "text": {str},
    "binary": {bytes, uuid.UUID},
    "date": {datetime.date},
    "timestamp": {datetime.datetime},
    "time": {datetime.time},
    "duration": {datetime.timedelta},
}
"""The Python types that ``pyarrow.array`` converts to each family whole, or raises."""
_ALSO_TAKES: Final = {"integer": {"float", "decimal"}, "float": {"integer"}, "decimal": {"integer"}}
_MAY_CUT: Final = {"integer", "date", "timestamp", "time", "duration"}
"""The families of which ``pyarrow.array`` makes less than was given, while its casts do not."""


def array_of(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Values as an Arrow array; raises one of ``MISFITS`` rather than lose a part of a value."""
    plain = pa.bool_() if kind == BOOL8 else with_innermost(kind, with_long_dictionary)
    array = pa.array(values, type=plain)
    _check(kind, values)
    return converted(array, kind)


def check_made(field: pa.Field) -> None:
    """Raises WrongColumns if pyarrow makes no column of that type of Python values."""
    if not _is_made(field.type):
        raise WrongColumns(
            f"column {field.name!r} of type {field.type} cannot be made of Python values: declare the type "
            "of what it holds, and cast it with with_columns() or map_batches()"
        )


def _is_made(kind: pa.DataType) -> bool:
    if any(_holds_extension(kind.field(place).type) for place in range(kind.num_fields)):
        return False
    try:
        pa.array([], with_innermost(kind, with_long_dictionary))
    except pa.ArrowException:
        return False
    return True


def _holds_extension(kind: pa.DataType) -> bool:
    """Whether it is one that pyarrow knows in no other type, or has such a part."""
    if isinstance(kind, pa.BaseExtensionType):
        return True
    return any(_holds_extension(kind.field(place).type) for place in range(kind.num_fields))


def type_of(values: Sequence[Any]) -> pa.DataType:
    """The Arrow type for the values, whatever their order; raises one of ``MISFITS`` if there is none.

    Values of several Python types get the type that holds them all. If there is no such type it is that of
    the first of them, to which ``array_of`` does not convert the others.
    """
    kind = pa.null()
    python = list(dict.fromkeys(map(type, values)))
    for one in python:
        mine = values if len(python) == 1 else [value for value in values if type(value) is one]
        wide = wider(kind, _type_of_like(one, mine))
        if wide is None:
            return kind
        kind = wide
    return kind


def _type_of_like(python: type, values: Sequence[Any]) -> pa.DataType:
    if issubclass(python, list | tuple):
        return pa.list_(type_of(list(chain.from_iterable(values))))
    if issubclass(python, dict):
        names = dict.fromkeys(chain.from_iterable(values))
        return pa.struct([(name, type_of([value.get(name) for value in values])) for name in names])
    return pa.infer_type(values)


def _check(kind: pa.DataType, values: Sequence[Any]) -> None:
    """Raise one of ``MISFITS`` if the type does not hold all of the values whole."""
    python = set(map(type, values)) - {NoneType}
    if not python:
        return
    if _is.is_nested(kind) or _is.is_dictionary(kind) or _is.is_run_end_encoded(kind):
        _check_nested(kind, python, values)
        return
    family = _family(kind)
    if family is None:
        return  # pyarrow knows of no other conversion to an interval or an extension
    whole = _WHOLE.get(family, set())
    if getattr(kind, "unit", "") in ("s", "ms"):
        whole = set()
    for odd in python - whole:
        _check_odd(kind, family, [value for value in values if type(value) is odd])
    if family == "float" and kind.bit_width < 64:
        _check_range(kind, values)


def _family(kind: pa.DataType) -> str | None:
    return next((name for name, tests in _FAMILIES.items() if any(is_a(kind) for is_a in tests)), None)


def _check_odd(kind: pa.DataType, family: str, values: list[Any]) -> None:
    """Check values of one Python type, which is not the usual one."""
    theirs = _family(pa.infer_type(values))
    if theirs not in {"null", family} | _ALSO_TAKES.get(family, set()):
        raise TypeError(f"{type(values[0]).__name__} is no {family}")
    if family in _MAY_CUT:
        pa.array(values).cast(kind)


def _check_range(kind: pa.DataType, values: Sequence[Any]) -> None:
    given = np.array([value for value in values if value is not None], np.float64)
    with np.errstate(over="ignore"):
        narrow = given.astype(kind.to_pandas_dtype())
    if (np.isinf(narrow) & ~np.isinf(given)).any():
        raise OverflowError(f"a number is beyond {kind}")


def _check_nested(kind: pa.DataType, python: set[type], values: Sequence[Any]) -> None:
    held = [value for value in values if value is not None]
    if _is.is_dictionary(kind) or _is.is_run_end_encoded(kind):
        _check(kind.value_type, values)
    elif _is.is_struct(kind):
        _expect(all(issubclass(one, dict) for one in python), kind)
        _expect({field.name for field in kind}.issuperset(chain.from_iterable(held)), kind)
        for field in kind:
            _check(field.type, [value.get(field.name) for value in held])
    elif _is.is_map(kind):
        pairs = [pair for value in held for pair in (value.items() if isinstance(value, dict) else value)]
        _check(kind.key_type, [key for key, _ in pairs])
        _check(kind.item_type, [item for _, item in pairs])
    elif any(is_a(kind) for is_a in _LISTS):
        _expect(not any(issubclass(one, str | bytes | bytearray | memoryview | dict) for one in python), kind)
        _check(kind.value_type, list(chain.from_iterable(map(_items, held))))


def _expect(fits: bool, kind: pa.DataType) -> None:
    if not fits:
        raise TypeError(f"the values are no {kind}")


def _items(value: Iterable[Any]) -> Iterable[Any]:
    """The values of a list; a numpy array's as Python's where those are the same and quick to get."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value
