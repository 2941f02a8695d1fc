"""Whether a result is what Spark computes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Verdict", "compare"]

DIFFERENCES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rows on both sides, and how many there are on one side only, each counted as often as it stands."""

    rows: int
    rows_spark: int
    only_minishuffle: int
    only_spark: int
    differences: tuple[str, ...] = ()
    """The first few, one sentence each; those of the schemas, if they differ."""

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
    """Equal are the same columns of the same types, and the same rows, equally often, in any order."""
    rows, rows_spark = result.count(), expected.count()
    schemas = tuple(_schema_differences(result, expected))
    if schemas:
        return Verdict(rows, rows_spark, rows, rows_spark, schemas[:DIFFERENCES_SHOWN])
    ours, theirs = result.exceptAll(expected), expected.exceptAll(result)
    only_minishuffle, only_spark = ours.count(), theirs.count()
    differences = [
        *(_first_rows("minishuffle", ours) if only_minishuffle else ()),
        *(_first_rows("Spark", theirs) if only_spark else ()),
    ]
    return Verdict(rows, rows_spark, only_minishuffle, only_spark, tuple(differences[:DIFFERENCES_SHOWN]))


def _schema_differences(result: DataFrame, expected: DataFrame) -> Iterator[str]:
    """Names, order and types; whether a column may be null is no part of the data."""
    ours, theirs = dict(result.dtypes), dict(expected.dtypes)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            kind, kind_spark = (side.get(name, "not there") for side in (ours, theirs))
            yield f"the column {name} is {kind} of minishuffle and {kind_spark} of Spark"
    if ours == theirs and result.columns != expected.columns:
        yield (
            f"the columns of minishuffle are in the order {', '.join(result.columns)}, those of Spark in "
            f"{', '.join(expected.columns)}"
        )


def _first_rows(side: str, rows: DataFrame) -> Iterator[str]:
    # As Arrow, because times of collect() are in the time zone of this process.
    for row in rows.orderBy(*rows.columns).limit(DIFFERENCES_SHOWN).toArrow().to_pylist():
        yield f"only of {side}: " + ", ".join(f"{name}={value}" for name, value in row.items())
