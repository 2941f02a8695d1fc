"""Types of columns that nobody declares, by the literals of all files that are read.

A number whose literal has digits only is an integer. A column of integers is int64, uint64 or
decimal128(38, 0), whichever is the first to hold all of them; where one has a plus, float64 or
decimal128(38, 0). A column with fractions is float64, if that holds its integers too. Texts that are all
times with an offset from UTC are timestamp[us, UTC], those that are all times without one timestamp[us],
and those that are all dates timestamp[s]. The same goes for fields of structs and for items of lists.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError
from minishuffle.operators.wider_type import DIGITS_MAX, common_schema

__all__ = ["InferredTypes", "Part", "UnfitNumber", "parts_of"]

Part: TypeAlias = tuple[str, ...]
"""A column, or a field in it; ``ITEM`` stands for the items of a list."""

ITEM: Final = "[]"
_INTEGER: Final = re.compile("[+-]?[0-9]+")
_TIME: Final = r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?"
_MOMENTS: Final = {
    r"^\d{4}-\d{2}-\d{2}$": pa.timestamp("s"),
    f"^{_TIME}$": pa.timestamp("us"),
    rf"^{_TIME}(Z|[+-]\d{{2}}:?\d{{2}})$": pa.timestamp("us", "UTC"),
}
"""Types of texts by their form."""
_HELD_MAX: Final = 2**53
"""Every integer up to it is a float64, and above it not every one."""
_INT64: Final = range(-(2**63), 2**63)
_UINT64_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Place:
    """A literal in a file."""

    path: str
    part: Part
    literal: str

    @property
    def name(self) -> str:
        """The column, and the field in it."""
        return ".".join(name for name in self.part if name != ITEM)


class UnfitNumber(UsageError):
    """No type holds a number beside the others of its column whole."""

    def __init__(self, place: Place, why: str) -> None:
        super().__init__(why)
        self.place = place


@dataclass(slots=True)
class _Numbers:
    """Those of one part, in all files."""

    has_fraction: bool = False
    is_signed: bool = False
    """An integer has a sign, which unsigned types do not take."""
    has_plus: bool = False
    """An integer begins with a plus, which pyarrow reads for floats and decimals alone."""
    least: int = 0
    most: int = 0
    rounded: Place | None = None
    """The first integer that no float64 holds."""
    too_long: Place | None = None
    """The first integer of more than DIGITS_MAX digits."""

    def add(self, place: Place) -> None:
        literal = place.literal.strip()
        if not _INTEGER.fullmatch(literal):
            self.has_fraction = True
            return
        digits = literal.lstrip("+-").lstrip("0") or "0"
        self.is_signed = self.is_signed or not literal[0].isdigit()
        self.has_plus = self.has_plus or literal[0] == "+"
        if self.rounded is None and len(digits) >= len(str(_HELD_MAX)):
            self.rounded = place if Decimal(float(digits)) != Decimal(digits) else None
        if len(digits) > DIGITS_MAX:
            self.too_long = self.too_long or place
        else:
            value = -int(digits) if literal[0] == "-" else int(digits)
            self.least, self.most = min(self.least, value), max(self.most, value)

    def add_int64(self, path: str, part: Part, values: pa.ChunkedArray) -> None:
        ends = pc.min_max(values).as_py()
        if ends["min"] is None:
            return
        self.is_signed = self.is_signed or ends["min"] < 0
        self.least, self.most = min(self.least, ends["min"]), max(self.most, ends["max"])
        if self.rounded is None and max(-ends["min"], ends["max"]) > _HELD_MAX:
            rounded = next((value for value in map(_first_rounded, values.chunks) if value is not None), None)
            self.rounded = None if rounded is None else Place(path, part, str(rounded))

    def add_float64(self, values: pa.ChunkedArray) -> bool:
        """False, and nothing is added, if a value is so large that it may have been rounded."""
        if pc.any(pc.greater_equal(pc.abs(values), float(_HELD_MAX))).as_py():
            return False
        self.has_fraction = True
        return True

    def kind(self) -> pa.DataType:
        """The type for all. Raises UnfitNumber: there is none."""
        if self.has_fraction:
            if self.rounded is not None:
                raise UnfitNumber(self.rounded, "an integer that no float64 holds, beside fractions")
            return pa.float64()
        if self.too_long is not None:
            raise UnfitNumber(self.too_long, f"an integer of more than {DIGITS_MAX} digits")
        if self.has_plus:
            return pa.float64() if self.rounded is None else pa.decimal128(DIGITS_MAX, 0)
        if self.least in _INT64 and self.most in _INT64:
            return pa.int64()
        if self.most <= _UINT64_MAX and not self.is_signed:
            return pa.uint64()
        return pa.decimal128(DIGITS_MAX, 0)


def _moment_type(texts: pa.ChunkedArray) -> pa.DataType:
    """The type of texts (at least one) that are all of one form of dates or times; string for others."""
    present = texts.drop_null()
    form = next((form for form in _MOMENTS if re.search(form, present[0].as_py(), re.ASCII)), None)
    if form is None or not pc.all(pc.match_substring_regex(present, form)).as_py():
        return pa.string()
    kind = _MOMENTS[form]
    try:
        years = pc.min_max(pc.year(present.cast(kind).cast(pa.timestamp("us")))).as_py()
    except pa.ArrowInvalid:  # the 30th of February
        return pa.string()
    return kind if years["min"] >= datetime.MINYEAR and years["max"] <= datetime.MAXYEAR else pa.string()


def _first_rounded(values: pa.Array) -> int | None:
    numbers = values.drop_null().to_numpy()
    with np.errstate(invalid="ignore"):  # 2**63, which the greatest become, is no int64.
        rounded = numbers.astype(np.float64).astype(np.int64) != numbers
    return int(numbers[rounded.argmax()]) if rounded.any() else None


@dataclass(slots=True)
class InferredTypes:
    """Collects the types that pyarrow infers of each file, and makes them those of the literals."""

    finds_times: bool
    """Texts may be times."""
    _schemas: dict[str, pa.Schema] = field(default_factory=dict)
    _numbers: dict[Part, _Numbers] = field(default_factory=dict)
    _texts: dict[Part, pa.DataType] = field(default_factory=dict)
    """Their types."""

    def add(self, path: str, table: pa.Table) -> list[Part]:
        """Takes a file that was read whole, with texts for times. Gives the parts with numbers that may have
        been rounded, for :meth:`tell`."""
        self._schemas[path] = table.schema
        unclear = []
        for part, values in parts_of(table):
            numbers = self._numbers.setdefault(part, _Numbers())
            if pa.types.is_string(values.type):
                kind = _moment_type(values) if self.finds_times else pa.string()
                self._texts[part] = kind if self._texts.get(part, kind) == kind else pa.string()
            elif pa.types.is_int64(values.type):
                numbers.add_int64(path, part, values)
            elif pa.types.is_float64(values.type) and not numbers.add_float64(values):
                unclear.append(part)
        return unclear

    def tell(self, path: str, literals: Iterable[tuple[Part, int, str]]) -> None:
        """Takes the literals of such parts, each with a line."""
        for part, _, literal in literals:
            self._numbers[part].add(Place(path, part, literal))

    def own(self) -> dict[str, pa.Schema]:
        """The schema that each file is parsed in.

        Raises:
            UnfitNumber: no type holds all numbers of a column.
        """
        return {
            path: self._typed(schema, (pa.float64(), pa.string())) for path, schema in self._schemas.items()
        }

    def common(self) -> pa.Schema:
        """The schema that holds the values of all files, without columns if there are none.

        Raises:
            UsageError: a column has types with none in common.
        """
        replaced = (pa.int64(), pa.float64(), pa.string())
        schemas = {path: self._typed(schema, replaced) for path, schema in self._schemas.items()}
        return common_schema(schemas) if schemas else pa.schema([])

    def _typed(self, schema: pa.Schema, replaced: Collection[pa.DataType]) -> pa.Schema:
        return pa.schema(each.with_type(self._type_of(each.type, (each.name,), replaced)) for each in schema)

    def _type_of(self, kind: pa.DataType, part: Part, replaced: Collection[pa.DataType]) -> pa.DataType:
        if pa.types.is_struct(kind):
            return pa.struct(
                each.with_type(self._type_of(each.type, (*part, each.name), replaced)) for each in kind
            )
        if pa.types.is_list(kind):
            inner = self._type_of(kind.value_type, (*part, ITEM), replaced)
            return pa.list_(kind.value_field.with_type(inner))
        if kind not in replaced:
            return kind
        return self._texts[part] if pa.types.is_string(kind) else self._numbers[part].kind()


def parts_of(table: pa.Table) -> Iterator[tuple[Part, pa.ChunkedArray]]:
    """All that holds no other parts, without what lies under a null."""
    for each, column in zip(table.schema, table.columns, strict=True):
        yield from _inner_parts((each.name,), each.type, column.chunks)


def _inner_parts(
    part: Part, kind: pa.DataType, chunks: Sequence[Any]
) -> Iterator[tuple[Part, pa.ChunkedArray]]:
    if pa.types.is_struct(kind):
        flat = [chunk.flatten() for chunk in chunks]
        for number, each in enumerate(kind):
            yield from _inner_parts((*part, each.name), each.type, [fields[number] for fields in flat])
    elif pa.types.is_list(kind):
        yield from _inner_parts((*part, ITEM), kind.value_type, [chunk.flatten() for chunk in chunks])
    else:
        yield part, pa.chunked_array(chunks, kind)
