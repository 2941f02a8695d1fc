"""Spark's schemas and Arrow's; needs no JVM."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from minishuffle.api.stream import Table
from minishuffle.errors import UsageError
from minishuffle.plan.schemas import schema_message
from minishuffle.spark.schemas import (
    arrow_schema_of,
    check_same_columns,
    fitted,
    read_schema,
    spark_schema_of,
)

pytestmark = pytest.mark.extra

BOTH_WAYS: list[tuple[t.DataType, pa.DataType]] = [
    (t.LongType(), pa.int64()),
    (t.IntegerType(), pa.int32()),
    (t.ShortType(), pa.int16()),
    (t.ByteType(), pa.int8()),
    (t.DoubleType(), pa.float64()),
    (t.FloatType(), pa.float32()),
    (t.StringType(), pa.string()),
    (t.BooleanType(), pa.bool_()),
    (t.DateType(), pa.date32()),
    (t.TimestampType(), pa.timestamp("us", "UTC")),
    (t.TimestampNTZType(), pa.timestamp("us")),
    (t.DecimalType(10, 2), pa.decimal128(10, 2)),
    (t.BinaryType(), pa.binary()),
    (t.DayTimeIntervalType(), pa.duration("us")),
]
INNER = t.StructType([t.StructField("x", t.LongType(), False), t.StructField("y", t.StringType())])


@pytest.mark.parametrize("spark_type, arrow_type", BOTH_WAYS, ids=lambda found: str(found))
@pytest.mark.parametrize("nullable", [True, False])
def test_every_type_goes_both_ways(spark_type: t.DataType, arrow_type: pa.DataType, nullable: bool) -> None:
    schema = t.StructType([t.StructField("c", spark_type, nullable)])
    arrow = arrow_schema_of(schema)
    assert arrow.field("c").type == arrow_type
    assert arrow.field("c").nullable == nullable
    assert spark_schema_of(arrow) == schema


def test_nested_types_go_both_ways() -> None:
    inner = t.StructType([t.StructField("x", t.LongType()), t.StructField("y", t.StringType())])
    schema = t.StructType([t.StructField("a", t.ArrayType(t.LongType())), t.StructField("s", inner)])
    assert spark_schema_of(arrow_schema_of(schema)) == schema


def test_an_arrow_schema_comes_back_from_its_message() -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    assert read_schema(schema_message(schema)) == schema


def test_types_that_the_other_side_lacks_are_refused_by_column() -> None:
    with pytest.raises(UsageError, match=r"Spark has no type for column 'u' of type .*: cast it in the job"):
        spark_schema_of(pa.schema([("id", pa.int64()), ("u", pa.month_day_nano_interval())]))
    interval = t.StructType([t.StructField("id", t.LongType()), t.StructField("i", t.CalendarIntervalType())])
    with pytest.raises(UsageError, match="column 'i' of type interval does not fit Arrow: cast it"):
        arrow_schema_of(interval)

    with pytest.raises(UsageError, match=r"at most 38 digits, column 'd' is decimal256\(40, 2\): cast it"):
        spark_schema_of(pa.schema([("d", pa.decimal256(40, 2))]))


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None], pa.large_string()),
        pa.array(["a", None], pa.string_view()),
        pa.array(["a", None]).dictionary_encode(),
        pa.array([b"a", None], pa.large_binary()),
        pa.array([b"a", None], pa.binary_view()),
        pa.array([b"aa", None], pa.binary(2)),
        pa.array([255, None], pa.uint8()),
        pa.array([65_535, None], pa.uint16()),
        pa.array([4_294_967_295, None], pa.uint32()),
        pa.array([1.5, None], pa.float32()).cast(pa.float16()),
        pa.array([86_400_000, None], pa.date64()),
        pa.array([Decimal("1.25"), None], pa.decimal256(30, 2)),
        pa.array([["a", None], None], pa.large_list(pa.large_string())),
    ],
    ids=lambda column: str(column.type),
)
def test_types_of_arrow_that_spark_lacks_are_read_as_its_own(column: pa.Array) -> None:
    batch = pa.RecordBatch.from_arrays([column], ["c"])
    plain = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    spark = arrow_schema_of(spark_schema_of(pa.schema([("c", plain)])))
    found = fitted(batch, spark)
    assert found.schema == spark
    assert found.to_pylist() == batch.to_pylist()


def test_a_batch_that_fits_is_passed_on_as_it_is() -> None:
    batch = pa.RecordBatch.from_pydict({"c": [1, 2]})
    assert fitted(batch, batch.schema) is batch


def test_columns_and_values_that_do_not_fit_are_refused() -> None:
    batch = pa.RecordBatch.from_pydict({"c": [1, 300]})
    with pytest.raises(UsageError, match="there are the columns c, and not those that were asked for: d"):
        fitted(batch, pa.schema([("d", pa.int64())]))
    with pytest.raises(UsageError, match="do not fit c: int8: .*300"):
        fitted(batch, pa.schema([("c", pa.int8())]))


@pytest.mark.parametrize("own", [True, False], ids=["by its own schema", "by another"])
def test_nulls_where_none_may_be_are_refused(own: bool) -> None:
    strict = pa.schema([pa.field("c", pa.int64(), nullable=False)])
    column = pa.array([1, None], pa.int64())
    batch = pa.RecordBatch.from_arrays([column], schema=strict if own else pa.schema([("c", pa.int64())]))
    with pytest.raises(UsageError, match="column 'c' has nulls and the stream declares it without: replace"):
        fitted(batch, strict)
    assert fitted(batch.slice(0, 1), strict).to_pylist() == [{"c": 1}]


WANTED = pa.schema([("id", pa.int64()), ("s", pa.string())])


@pytest.mark.parametrize(
    "given, said",
    [
        ([("id", pa.int64())], "takes the columns id, s, the DataFrame has id: select them in that order"),
        (
            [("s", pa.string()), ("id", pa.int64())],
            "takes the columns id, s, the DataFrame has s, id: select them in that order",
        ),
        (
            [("id", pa.int32()), ("s", pa.string())],
            "takes column 'id' as int64, the DataFrame has int32: cast it, or declare it so",
        ),
    ],
)
def test_other_columns_are_refused_with_where_they_differ(
    given: list[tuple[str, pa.DataType]], said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        check_same_columns(pa.schema(given), WANTED, "in")
    assert str(raised.value).startswith("stream 'in' ") and said in str(raised.value)


def test_whether_a_column_may_be_null_makes_no_difference() -> None:
    given = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("s", pa.string())])
    check_same_columns(given, WANTED, "in")


STRICT_INNER = t.StructType([t.StructField("x", t.LongType(), False), t.StructField("y", t.StringType())])
LOOSE_INNER = t.StructType([t.StructField("x", t.LongType()), t.StructField("y", t.StringType())])


@pytest.mark.parametrize(
    "loose, strict, fine, misplaced",
    [
        (LOOSE_INNER, STRICT_INNER, {"x": 1, "y": None}, {"x": None, "y": "a"}),
        (t.ArrayType(t.LongType()), t.ArrayType(t.LongType(), False), [1], [None]),
        (
            t.MapType(t.StringType(), t.IntegerType()),
            t.MapType(t.StringType(), t.IntegerType(), False),
            [("k", 1)],
            [("k", None)],
        ),
        (t.ArrayType(LOOSE_INNER), t.ArrayType(STRICT_INNER), [{"x": 1, "y": None}, None], [{"x": None}]),
    ],
    ids=["struct", "array", "map", "array of structs"],
)
def test_parts_that_may_be_null_are_taken_until_one_is(
    loose: t.DataType, strict: t.DataType, fine: object, misplaced: object
) -> None:
    given, wanted = (arrow_schema_of(t.StructType([t.StructField("c", kind)])) for kind in (loose, strict))
    check_same_columns(given, wanted, "in")
    check_same_columns(wanted, given, "in")
    found = fitted(
        pa.RecordBatch.from_arrays([pa.array([fine], given.field("c").type)], schema=given), wanted
    )
    assert found.schema == wanted
    with pytest.raises(UsageError, match="null"):
        fitted(
            pa.RecordBatch.from_arrays([pa.array([misplaced], given.field("c").type)], schema=given), wanted
        )


def test_other_parts_of_a_column_are_refused() -> None:
    one, other = (pa.schema([("c", pa.struct([(name, pa.int64())]))]) for name in "xy")
    with pytest.raises(
        UsageError, match=r"column 'c' as struct<y: int64>, the DataFrame has struct<x: int64>"
    ):
        check_same_columns(one, other, "in")


@pytest.mark.parametrize(
    "kind",
    [
        *(t.ByteType(), t.ShortType(), t.IntegerType(), t.LongType(), t.FloatType(), t.DoubleType()),
        *(t.DecimalType(38, 18), t.DecimalType(5, 0), t.BooleanType(), t.StringType(), t.BinaryType()),
        *(t.DateType(), t.TimestampType(), t.TimestampNTZType(), t.DayTimeIntervalType(), t.NullType()),
        *(INNER, t.ArrayType(INNER), t.ArrayType(t.LongType(), False)),
        *(t.MapType(t.StringType(), INNER), t.MapType(t.LongType(), t.IntegerType(), False)),
    ],
    ids=lambda kind: kind.simpleString(),
)
def test_what_spark_writes_can_be_declared_in_a_stream(kind: t.DataType) -> None:
    schema = arrow_schema_of(t.StructType([t.StructField("c", kind)]))
    assert Table.from_spark("types", schema).plan.gives.schema == schema
