"""What a method of texts or times says of a column of another type, and what to write."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.columns import ColumnExpression, col
from minishuffle.operators.evaluation import computed
from minishuffle.operators.expression_errors import refusal_text

TABLE = pa.table(
    {
        "n": [1],
        "small": pa.array([1], pa.int32()),
        "s": ["2026-01-31 12:00:00"],
        "long": pa.array(["x"], pa.large_string()),
        "day": pa.array([1], pa.date32()),
        "at": pa.array([1], pa.timestamp("us")),
        "zoned": pa.array([1], pa.timestamp("us", "UTC")),
        "list": [[1]],
    }
)
INT_TEXT = "takes texts, and col('n') is int64: write col('n').cast('string')"
INT_TIME = "is int64: write col('n').cast('timestamp[s]')"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (col("n").str.upper(), f".str.upper() {INT_TEXT}.str.upper(...)"),
        (col("n").str.contains("a"), f".str.contains() {INT_TEXT}.str.contains(...)"),
        (col("n").str.slice(1, 2), f".str.slice() {INT_TEXT}.str.slice(...)"),
        (col("s").str.join(col("n")), f".str.join() {INT_TEXT}"),
        (
            col("s").str.join(col("zoned")),
            "col('zoned') is timestamp[us, tz=UTC]: write col('zoned').",
        ),
        (col("s").str.upper() == col("n").str.upper(), "and this is int64: n; (utf8_upper(s) == utf8_upper("),
        (col("s").str.upper() == (col("n") + 1).str.upper(), "and this is int64: n; (utf8_upper(s) == utf8_"),
        (
            col("at").str.len(),
            ".str.len() takes texts, and col('at') is timestamp[us]: write col('at').cast(",
        ),
        (col("list").str.len(), ".str.len() takes texts, and col('list') is list<item: int64>"),
        (
            (col("n") + 1).str.upper(),
            "takes texts, and this is int64: n; utf8_upper(add_checked(n, 1)): write .cast(",
        ),
        (col("n").dt.date(), f".dt.date() takes times and dates, and col('n') {INT_TIME}.dt.date(...) if it"),
        (col("n").dt.truncate("day"), f"{INT_TIME}.dt.truncate(...) if it counts seconds since 1970"),
        (
            col("small").dt.year(),
            "is int32: write col('small').cast('int64').cast('timestamp[s]').dt.year(...)",
        ),
        (
            col("s").dt.hour(),
            ".dt.hour() takes times, and col('s') is string: write col('s').cast('timestamp[us]')",
        ),
        (col("day").dt.hour(), ".dt.hour() takes times, and col('day') is date32[day]"),
        (
            col("s") + 1,
            "input types (string, int8): cast one of them to the type of the other, as in col('x')",
        ),
        (col("s") * col("s"), "multiply_checked(s, s): Function 'multiply_checked' has no kernel"),
    ],
)
def test_it_names_the_column_its_type_the_method_and_the_cast(given: ColumnExpression, text: str) -> None:
    with pytest.raises(pa.ArrowNotImplementedError) as refused:
        computed(TABLE, [given.expression])
    assert text in refusal_text([pc.field("n"), given.expression], refused.value)


@pytest.mark.parametrize(
    "given",
    [
        col("n").cast("string").str.upper(),
        col("n").cast("timestamp[s]").dt.date(),
        col("small").cast("int64").cast("timestamp[s]").dt.year(),
        col("s").cast("timestamp[us]").dt.hour(),
    ],
)
def test_the_casts_that_it_names_help(given: ColumnExpression) -> None:
    assert computed(TABLE, [given.expression]).num_rows == 1
