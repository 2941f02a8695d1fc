"""Schemas from Python's types: the fields of a TypedDict, NamedTuple, dataclass or pydantic model, and what
a function says that it returns."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
import typing
from collections import abc
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args, get_origin
from uuid import UUID

import typing_extensions

from minishuffle.errors import UsageError
from minishuffle.operators.base import Aside
from minishuffle.operators.row_objects import field_names

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Returns",
    "column_type",
    "fields_of",
    "named_type",
    "no_type",
    "returned_row",
    "unread_annotation",
]

Returns: TypeAlias = Literal["row", "rows", "awaited"]
"""What a function gives: a row, an iterable of rows, or an awaitable of a row."""

_CHOICES: Final[dict[Any, str]] = {
    datetime: "pa.timestamp('us') (times without a zone) and pa.timestamp('us', 'UTC')",
    Decimal: "pa.decimal128(digits, scale), up to 38 digits, and pa.decimal256(digits, scale), up to 76",
}
"""Python types of which several Arrow types hold the values, and which those are."""
_ZONED: Final = re.compile(r"timestamp\[(s|ms|us|ns), ?tz=([^\]]+)\]")
"""The name of a type that Arrow prints and does not read."""
_LISTS: Final = (list, tuple, abc.Sequence, abc.MutableSequence)
_MAPS: Final = (dict, abc.Mapping, abc.MutableMapping)
_MARKS: Final = (
    typing.Required,
    typing.NotRequired,
    typing.Final,
    typing_extensions.Required,
    typing_extensions.NotRequired,
    typing_extensions.ReadOnly,
)
"""What stands around the type of a field and says nothing about its values."""
_ITERABLES: Final = (
    list,
    tuple,
    set,
    frozenset,
    abc.Iterable,
    abc.Iterator,
    abc.Generator,
    abc.Sequence,
    abc.Collection,
    abc.MutableSequence,
)


def fields_of(given: Any) -> dict[str, Any] | None:
    """The types of the fields by name; None: it is no TypedDict, NamedTuple, dataclass or pydantic model.

    Raises:
        UsageError: an annotation names what is not there, or it has no fields.
    """
    names = field_names(given)
    if names is None:
        return None
    try:
        hints = typing_extensions.get_type_hints(given, include_extras=True)
    except (NameError, TypeError) as error:
        raise UsageError(f"schema: the annotations of {given.__name__} cannot be read: {error}") from error
    if not names or not all(name in hints for name in names):
        raise UsageError(f"schema: {given.__name__} has no fields with types: annotate each")
    return {name: hints[name] for name in names}


def column_type(name: str, kind: Any) -> pa.DataType:
    """The Arrow type that holds the values of a Python type whole; the one in
    ``Annotated[datetime, pa.timestamp("us")]``. Every column may have nulls, ``Optional`` or not.

    Raises:
        UsageError: there is none, or a choice.
    """
    import pyarrow as pa

    origin, arguments = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        chosen = next((each for each in arguments[1:] if isinstance(each, pa.DataType)), None)
        found = column_type(name, arguments[0]) if chosen is None else chosen
    elif origin in _MARKS:
        found = column_type(name, arguments[0])
    elif origin in (typing.Union, types.UnionType):
        found = _of_union(name, kind, [each for each in arguments if each is not types.NoneType])
    elif origin is Literal:
        found = _of_union(
            name, kind, list(dict.fromkeys(type(each) for each in arguments if each is not None))
        )
    elif origin in _LISTS and _items_alike(origin, arguments):
        found = pa.list_(column_type(name, arguments[0]))
    elif origin in _MAPS:
        found = pa.map_(column_type(name, arguments[0]), column_type(name, arguments[1]))
    elif isinstance(kind, typing.NewType):
        found = column_type(name, kind.__supertype__)
    elif (fields := fields_of(kind)) is not None:
        found = pa.struct([(each, column_type(f"{name}.{each}", its)) for each, its in fields.items()])
    else:
        found = _of_plain(name, kind)
    if pa.types.is_null(found):
        raise no_type(name, kind)
    return found


def _items_alike(origin: Any, arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 1 if origin is not tuple else len(arguments) == 2 and arguments[1] is Ellipsis


def _of_union(name: str, kind: Any, others: list[Any]) -> pa.DataType:
    if len(others) != 1:
        raise no_type(name, kind)
    return column_type(name, others[0])


def _of_plain(name: str, kind: Any) -> pa.DataType:
    import pyarrow as pa

    python = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        bool: pa.bool_(),
        bytes: pa.binary(),
        date: pa.date32(),
        time: pa.time64("us"),
        timedelta: pa.duration("us"),
        UUID: pa.uuid(),
    }
    choices = _CHOICES.get(kind) if isinstance(kind, type) else None
    if choices is not None:
        raise UsageError(
            f"schema: the column {name!r} is a {kind.__name__}, which several types hold: choose from "
            f"{choices}, and write it in a dict or pa.Schema, or as Annotated[{kind.__name__}, that type]"
        )
    found = python.get(kind) if isinstance(kind, type) else None
    if found is None:
        raise no_type(name, kind)
    return found


def named_type(name: str) -> pa.DataType:
    """The type of that name, as Arrow prints it: ``int64``, ``timestamp[us, tz=Europe/Zurich]``.

    Raises:
        ValueError: there is none.
    """
    import pyarrow as pa

    if zoned := _ZONED.fullmatch(name):
        return pa.timestamp(zoned[1], zoned[2])
    return pa.type_for_alias(name)


def no_type(name: Any, kind: Any) -> UsageError:
    """The error for what is no type of a column."""
    return UsageError(
        f"schema: {kind!r:.80} is no type for the column {name!r}: write a pyarrow type, its name such as "
        "'int64', or int, float, str, bool, bytes"
    )


# --- what a function returns ----------------------------------------------------------------------------


def returned_row(fn: Any, returns: Returns) -> type | None:
    """The class with fields of which a function says that its rows are; None: it says nothing, or another.

    A class that is called for each row says itself. An :class:`Aside` among what it may give goes elsewhere.
    """
    fn = _called(fn)
    said: Any = fn
    if not isinstance(fn, type):
        try:
            said = _said(fn)
        except _UNREAD:
            return None
    if returns == "awaited" and not _is_coroutine(fn):
        said = _argument(said, (abc.Awaitable, abc.Coroutine), -1)
    elif returns == "rows":
        said = _argument(_only(said), _ITERABLES, 0)
    said = _only(said)
    return said if field_names(said) is not None else None


def unread_annotation(fn: Any) -> str | None:
    """Why nobody knows what a function is annotated to return, as half a sentence; None: one knows."""
    fn = _called(fn)
    if not isinstance(fn, type):
        try:
            _said(fn)
        except _UNREAD as error:
            return f"what {getattr(fn, '__name__', repr(fn))} is annotated to return cannot be read: {error}"
    return None


_UNREAD: Final = (NameError, TypeError, AttributeError)
"""What an annotation raises that names what is there for type checkers alone."""


def _called(fn: Any) -> Any:
    """What runs when ``fn`` is called: a class, or a function or method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if isinstance(fn, type) or inspect.isroutine(fn) else type(fn).__call__


def _said(fn: Any) -> Any:
    """What a function is annotated to return; raises one of ``_UNREAD``."""
    fn = inspect.unwrap(fn)
    said = {name: kind for name, kind in getattr(fn, "__annotations__", {}).items() if name == "return"}
    alone = types.SimpleNamespace(__annotations__=said)  # Those of arguments need not be there.
    names = getattr(fn, "__globals__", {})
    return typing_extensions.get_type_hints(alone, names, _outer_names(fn), include_extras=True).get("return")


def _outer_names(fn: Any) -> dict[str, Any]:
    """The variables of the function around the definition of ``fn``: all of them while it is running, else
    only the captured ones."""
    outer, _, _ = getattr(fn, "__qualname__", "").rpartition(".<locals>.")
    if not outer or not inspect.isfunction(fn):
        return {}
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_qualname == outer and frame.f_globals is fn.__globals__):
        frame = frame.f_back
    found = {} if frame is None else dict(frame.f_locals)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # It has no value yet.
            found[name] = cell.cell_contents
    return found


def _is_coroutine(fn: Any) -> bool:
    return any(map(inspect.iscoroutinefunction, (fn, type(fn).__call__)))


def _argument(kind: Any, origins: tuple[Any, ...], number: int) -> Any:
    """An argument of a generic type of one of those."""
    origin, arguments = get_origin(kind), get_args(kind)
    fits = isinstance(origin, type) and any(origin is each or issubclass(origin, each) for each in origins)
    if not fits or not arguments or (origin is tuple and not _items_alike(tuple, arguments)):
        return None
    return arguments[number]


def _only(kind: Any) -> Any:
    """What is left of a union without None and what goes to side outputs."""
    if get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    others = [each for each in get_args(kind) if each not in (types.NoneType, Aside)]
    return others[0] if len(others) == 1 else None
