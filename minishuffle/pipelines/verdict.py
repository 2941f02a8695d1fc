"""Whether a result is what Spark computes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

__all__ = ["Verdict", "compare", "wider_type"]

DIFFERENCES_SHOWN: Final = 5
DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
"""Decimal digits of Spark's integers, from the narrowest on."""
DECIMAL_DIGITS_MAX: Final = 38


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rows on both sides, and how many there are on one side only, each counted as often as it stands."""

    rows: int
    rows_spark: int
    only_minishuffle: int
    only_spark: int
    differences: tuple[str, ...] = ()
    """One sentence each: what columns cannot be compared, and the first few rows that differ."""
    widened: tuple[str, ...] = ()
    """Columns of two types, each with the one in which their values were compared."""

    @property
    def equal(self) -> bool:
        return not (self.differences or self.only_minishuffle or self.only_spark)

    def __str__(self) -> str:
        if self.equal:
            return f"EQUAL: {self.rows:,} rows of minishuffle and of Spark"
        return (
            f"NOT EQUAL: {self.rows:,} rows of minishuffle, {self.rows_spark:,} of Spark; "
            f"{self.only_minishuffle:,} only of minishuffle, {self.only_spark:,} only of Spark"
        )


def compare(result: DataFrame, expected: DataFrame) -> Verdict:
    """Equal are the same columns in the same order, and the same rows, equally often, in any order.

    Values of a column that has two types are compared in the :func:`wider_type` of both, and the column is
    named. A column for which there is none, or that one side lacks, is a difference; the others are compared.
    """
    rows, rows_spark = result.count(), expected.count()
    differences = list(_column_differences(result, expected))
    wider = {name: kind for name, kind in _common_types(result, expected).items() if kind is not None}
    widened = tuple(
        f"{_types_text(name, ours, theirs)}, compared as {wider[name].simpleString()}"
        for name, ours, theirs in _types(result, expected)
        if name in wider and ours != theirs
    )
    if not wider:
        return Verdict(rows, rows_spark, rows, rows_spark, tuple(differences))
    ours, theirs = (
        frame.select(*(frame[f"`{name}`"].cast(kind) for name, kind in wider.items()))
        for frame in (result, expected)
    )
    ours, theirs = ours.exceptAll(theirs), theirs.exceptAll(ours)
    only_minishuffle, only_spark = ours.count(), theirs.count()
    shown = [
        *(_first_rows("minishuffle", ours) if only_minishuffle else ()),
        *(_first_rows("Spark", theirs) if only_spark else ()),
    ]
    differences += shown[:DIFFERENCES_SHOWN]
    return Verdict(rows, rows_spark, only_minishuffle, only_spark, tuple(differences), widened)


def wider_type(left: DataType, right: DataType) -> DataType | None:
    """The type that holds all values of both: the wider integer, double of float and double, and a decimal
    with the digits of both, also of an integer. None if there is none, and for all other types."""
    from pyspark.sql.types import DecimalType, DoubleType

    if left == right:
        return left
    names = left.simpleString(), right.simpleString()
    if all(name in DIGITS for name in names):
        return max(left, right, key=lambda kind: DIGITS[kind.simpleString()])
    if set(names) == {"float", "double"}:
        return DoubleType()
    whole = scale = 0
    for kind, name in zip((left, right), names, strict=True):
        if isinstance(kind, DecimalType):
            whole, scale = max(whole, kind.precision - kind.scale), max(scale, kind.scale)
        elif name in DIGITS:
            whole = max(whole, DIGITS[name])
        else:
            return None
    return DecimalType(whole + scale, scale) if whole + scale <= DECIMAL_DIGITS_MAX else None


def _types(result: DataFrame, expected: DataFrame) -> Iterator[tuple[str, str, str]]:
    """Each column with its type on both sides."""
    ours, theirs = dict(result.dtypes), dict(expected.dtypes)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        yield name, ours.get(name, "not there"), theirs.get(name, "not there")


def _types_text(name: str, ours: str, theirs: str) -> str:
    return f"the column {name} is {ours} of minishuffle and {theirs} of Spark"


def _common_types(result: DataFrame, expected: DataFrame) -> dict[str, DataType | None]:
    """The type in which to compare each column that both have."""
    theirs = {field.name: field.dataType for field in expected.schema}
    return {
        field.name: wider_type(field.dataType, theirs[field.name])
        for field in result.schema
        if field.name in theirs
    }


def _column_differences(result: DataFrame, expected: DataFrame) -> Iterator[str]:
    """Names, order, and types that cannot be compared; whether a column may be null does not count."""
    common = _common_types(result, expected)
    for name, ours, theirs in _types(result, expected):
        if common.get(name) is None:
            yield _types_text(name, ours, theirs)
    if set(result.columns) == set(expected.columns) and result.columns != expected.columns:
        yield (
            f"the columns of minishuffle are in the order {', '.join(result.columns)}, those of Spark in "
            f"{', '.join(expected.columns)}"
        )


def _first_rows(side: str, rows: DataFrame) -> Iterator[str]:
    # As Arrow, because times of collect() are in the time zone of this process.
    for row in rows.orderBy(*rows.columns).limit(DIFFERENCES_SHOWN).toArrow().to_pylist():
        yield f"only of {side}: " + ", ".join(f"{name}={value}" for name, value in row.items())
