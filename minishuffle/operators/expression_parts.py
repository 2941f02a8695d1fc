"""What a ``pyarrow.compute.Expression`` is made of: the columns that it reads, and those that it orders by.

pyarrow shows that nowhere but in what it pickles an expression as: a schema whose metadata have the parts in
order, a column as ``field_ref``, a field of a struct as ``nested_field_ref``, with the length of its path,
and the names of the path; a function as ``call``, its arguments, its options and ``end``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError

__all__ = ["columns_in_order", "names_in"]

Path: TypeAlias = "tuple[str | int, ...]"
"""A column, then fields of structs by name or number; 0 for the values of a list."""

_PICKLED: Final = re.compile(
    r"(call|end|field_ref|literal|nested_field_ref|options): '(.*?)'"
    r"(?=\n(?:call|end|field_ref|literal|nested_field_ref|options): '|\Z)",
    re.DOTALL,
)
"""An entry of the metadata, after the line that stands before them."""
_METADATA: Final = "-- schema metadata --\n"
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
"""One step of the path of ``struct_field``."""

_BY_ORDER: Final = frozenset(
    {"greater", "greater_equal", "less", "less_equal", "max_element_wise", "min_element_wise"}
)
_PASS_ON: Final = frozenset({"case_when", "choose", "coalesce", "if_else"})
"""What these give is one of their arguments."""


class _Pickled(NamedTuple):
    parts: list[tuple[str, str]]
    values: pa.Table
    """The options and literals, each in the column that its part names."""


def _pickled(expression: pc.Expression) -> _Pickled:
    """
    Raises:
        UsageError: it reads a column by its number.
    """
    try:
        _, (pickled, *_) = expression.__reduce__()
    except pa.ArrowNotImplementedError as error:
        raise UsageError(f"{expression!s:.200} reads a column by its number: write its name") from error
    with pa.ipc.open_file(pickled) as file:
        shown = file.schema.to_string(show_schema_metadata=True, truncate_metadata=False)
        return _Pickled(_PICKLED.findall(shown.partition(_METADATA)[2]), file.read_all())


def _paths_in(parts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str, Path]]:
    """The parts, with the path of each column; those of its fields are left out."""
    for kind, value in parts:
        if kind == "nested_field_ref":
            yield "field_ref", value, tuple(name for _, name in islice(parts, int(value)))
        else:
            yield kind, value, (value,)


def names_in(expression: pc.Expression) -> frozenset[str]:
    """The columns that an expression reads, of which nothing need be known.

    Raises:
        UsageError: it reads a column by its number.
    """
    parts = _paths_in(iter(_pickled(expression).parts))
    return frozenset(str(path[0]) for kind, _, path in parts if kind == "field_ref")


def columns_in_order(expression: pc.Expression) -> list[Path]:
    """The columns that it compares by their order, as they are, one with the other or with a constant.

    Raises:
        UsageError: it reads a column by its number.
    """
    pickled = _pickled(expression)
    found: list[Path] = []
    arguments: list[list[Path]] = [[]]
    """The columns that each function which has begun gets as they are."""
    for kind, value, path in _paths_in(iter(pickled.parts)):
        if kind == "field_ref":
            arguments[-1].append(path)
        elif kind == "call":
            arguments.append([])
        elif kind == "options":
            arguments[-1] = [(*each, *_steps(pickled.values, value)) for each in arguments[-1]]
        elif kind == "end":
            given = arguments.pop()
            if value in _BY_ORDER:
                found += given
            elif value == "list_element":
                arguments[-1] += [(*each, 0) for each in given]
            elif value in _PASS_ON or value == "struct_field":
                arguments[-1] += given
    return found


def _steps(values: pa.Table, number: str) -> Path:
    """The path in the options of ``struct_field``, which are row 0 of column ``number`` of ``values``: names
    or numbers of fields. Empty for the options of other functions."""
    options = values.column(int(number))[0].as_py()
    shown = options.get("field_ref") if isinstance(options, dict) else None
    if not isinstance(shown, str):
        return ()
    return tuple(name or int(place) for name, place in _STEP.findall(shown))
