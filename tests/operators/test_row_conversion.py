"""Conversion between rows and Arrow, and the check of declared schemas."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UnknownName, UsageError, WrongColumns
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import TaskContext
from minishuffle.operators.row_conversion import (
    CheckSchema,
    RowsSchema,
    RowsToArrow,
    ToArrow,
    ToRows,
    rows_of,
    schema_of_rows,
    schema_with_rows,
)
from support.batches import as_batch, collecting

SCHEMA = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())])


def run(operator: Any, *batches: Any) -> list[Any]:
    out: list[Batch] = []
    for batch in batches:
        operator.process(as_batch(batch), 0, collecting(out))
    return out


def inferred(*batches: list[Any]) -> list[pa.RecordBatch]:
    """Rows in the types of all of them, which are found batch by batch."""
    schema: pa.Schema | None = None
    for rows in filter(None, batches):
        schema = schema_with_rows(schema, rows)
    assert schema is not None
    return [RowsToArrow(schema, inferred=True).convert(rows) for rows in batches if rows]


rows_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.integers(-(2**63), 2**63 - 1),
            "f": st.none() | st.floats(allow_nan=False),
            "s": st.none() | st.text(),
            "t": st.lists(st.integers(0, 5)),
        }
    ),
    min_size=1,
    max_size=10,
)


@given(rows=rows_strategy)
def test_dict_rows_survive_both_ways(rows: list[dict[str, Any]]) -> None:
    (batch,) = run(ToArrow(RowsSchema(schema_of_rows(rows), inferred=True)), rows)
    assert batch.schema.names == list(rows[0])
    assert run(ToRows(), batch) == [rows]


def test_empty_batches_vanish() -> None:
    batch = pa.record_batch({"a": [1]})
    assert run(ToArrow(RowsSchema(SCHEMA)), []) == []
    assert run(ToRows(), [], batch.slice(1), batch) == [[{"a": 1}]]
    assert rows_of(Batch(["x"], [1])) == ["x"]


def test_positions_and_names_with_a_schema() -> None:
    expected = [pa.record_batch([pa.array([1, 2]), pa.array(["x", None])], schema=SCHEMA)]
    assert run(ToArrow(RowsSchema(SCHEMA)), [(1, "x"), [2, None]]) == expected
    assert run(ToArrow(RowsSchema(SCHEMA)), [{"b": "x", "a": 1}, {"a": 2}]) == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("x", 1)], r"no column names: declare them with to_table"),
        ([{}], "do not name their columns"),
        ([{1: 2}], "do not name their columns"),
        ([{"a": 1}, (1,)], r"all dicts, or all tuples or lists, and one is \(1,\)"),
        ([(1,), {"a": 1}], "one is {'a': 1}"),
        ([5], "one is 5"),
        ([{"a": 1}, (1,), 5], "one is 5"),
        ([{"a": object()}], "no Arrow type fits the values of column 'a'"),
        (
            [{"a": 1}, {"a": "x"}],
            r"column 'a': the value 'x' does not fit the type int64 \(which other rows have; declare one",
        ),
    ],
)
def test_rows_without_a_schema_that_cannot_be_arrow(rows: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schema_of_rows(rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [(1, "x"), ("one", "y")],
            r"column 'a': the value 'one' does not fit the type int64 \(as declared\)",
        ),
        ([{"a": 2**70, "b": None}], "column 'a': the value 1180591620717411303424 does not fit"),
        ([{"a": 1.5}], "column 'a': the value 1.5 does not fit"),
        ([(1, 7)], "column 'b': the value 7 does not fit the type string"),
        ([{"b": "x"}], "column 'a': the value None does not fit a column that is not nullable"),
        ([(1,)], r"a row has 1 values and the schema 2 columns \(a, b\)"),
        ([{"a": 1}, {"a": 1, "z": 3}], r"column 'z' of the row .* is not in the schema \(a, b\): correct"),
        ([{"a": 1}, 5], "all dicts, or all tuples or lists, and one is 5"),
    ],
)
def test_rows_that_do_not_fit_the_schema(rows: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(ToArrow(RowsSchema(SCHEMA)), rows)


@pytest.mark.parametrize("row", [{"a": 1, "z": 3}, (1,)])
def test_columns_that_no_row_so_far_has_end_the_job(row: Any) -> None:
    operator = ToArrow(RowsSchema(SCHEMA))
    with pytest.raises(WrongColumns) as caught:
        run(operator, [row, row])
    assert caught.value.final and "by the record" in caught.value.__notes__[1]
    fitting = {"a": 1} if isinstance(row, dict) else (1, "x")
    for batches in ([[fitting, row]], [[fitting], [row]]):
        with pytest.raises(UsageError) as caught:
            run(ToArrow(RowsSchema(SCHEMA)), *batches)
        assert not caught.value.final


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_fields_may_be_optional_and_booleans_numbers_wherever_batches_are_cut(turned: bool, cut: int) -> None:
    rows: list[dict[str, Any]] = [{"a": 1}, {"a": True, "b": "x"}, {"a": 2.5, "c": None}]
    rows = rows[::-1] if turned else rows
    batches = inferred(rows[:cut], rows[cut:])
    found = [row for batch in batches for row in batch.to_pylist()]
    wanted = [(row["a"], row.get("b")) for row in rows]
    assert [(row["a"], row.get("b")) for row in found] == wanted
    assert batches[-1].schema.names[0] == "a"
    assert {type(row["a"]) for row in batches[-1].to_pylist()} == {float}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([None, "x"], pa.string()),
        ([1, 2.5, None], pa.float64()),
        ([None, Decimal("1.25"), Decimal("10.5")], pa.decimal128(4, 2)),
        ([[], [1], [2.5]], pa.list_(pa.float64())),
        ([{"x": None}, {"x": "a", "y": 1}], pa.struct({"x": pa.string(), "y": pa.int64()})),
    ],
    ids=str,
)
def test_later_rows_make_a_type_wider(values: list[Any], kind: pa.DataType) -> None:
    for order in (values, values[::-1]):
        batches = inferred(*([{"a": value, "b": 1}] for value in order))
        assert [row["a"] for batch in batches for row in rows_of(as_batch(batch))] == [
            {name: value.get(name) for name in batch.schema.field("a").type.names}
            if isinstance(value, dict)
            else value
            for batch, value in zip(batches, order, strict=True)
        ]
        assert {batch.schema for batch in batches} == {pa.schema({"a": kind, "b": pa.int64()})}
        assert schema_of_rows([{"a": value, "b": 1} for value in order]) == batches[0].schema


@pytest.mark.parametrize(
    ("some", "other"),
    [
        (datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3)),
        ("a", b"b"),
        (datetime.timedelta(1), 5),
        (datetime.datetime(2026, 1, 2), 5),
        ({"at": datetime.date(2026, 1, 2)}, {"at": datetime.datetime(2026, 1, 2, 3)}),
        (["a"], [b"b"]),
    ],
    ids=str,
)
def test_values_without_a_type_in_common_are_refused_in_any_order_and_batch(some: Any, other: Any) -> None:
    for first, then in ((some, other), (other, some)):
        for batches in ([[{"a": first}], [{"a": then}]], [[{"a": first}, {"a": then}]]):
            with pytest.raises(UsageError, match="column 'a'.*declare one with to_table"):
                inferred(*batches)


def test_datetimes_with_and_without_a_time_zone_are_refused_in_any_order_and_batch() -> None:
    naive, aware = datetime.datetime(2026, 1, 2), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    for first, then in ((naive, aware), (aware, naive)):
        rows = [{"a": None}, {"a": first}, {"a": then}]
        for batches in ([rows[:2], rows[2:]], [rows], [rows[:1], rows[1:]]):
            with pytest.raises(UsageError, match="column 'a' has datetimes with a time zone and without"):
                inferred(*batches)
    for alike in (naive, aware):
        (_, later) = inferred([{"a": alike}], [{"a": None}, {"a": alike}])
        assert rows_of(as_batch(later)) == [{"a": None}, {"a": alike}]
    other_zone = aware.astimezone(datetime.timezone(datetime.timedelta(hours=5)))
    assert rows_of(as_batch(inferred([{"a": aware}, {"a": other_zone}])[0])) == [{"a": aware}] * 2


def test_structs_get_the_fields_of_all() -> None:
    rows = [{"p": {"x": 1}}, {"p": {"y": {"z": 2}}}, {"p": {"y": {"w": 3}}}, {"p": {"x": 4}}]
    (*_, last) = inferred(*([row] for row in rows))
    deep = pa.struct({"z": pa.int64(), "w": pa.int64()})
    assert last.schema.field("p").type == pa.struct({"x": pa.int64(), "y": deep})
    (batch,) = inferred(rows)
    assert rows_of(as_batch(batch))[2] == {"p": {"x": None, "y": {"z": None, "w": 3}}}


def test_integers_beside_decimals_wherever_the_batches_are_cut() -> None:
    rows = [{"a": value} for value in (1, Decimal("0.5"), None, 10**17, Decimal("1.25"))]
    for order in (rows, rows[::-1]):
        for cut in range(len(rows)):
            batches = inferred(order[:cut], order[cut:])
            assert [row for batch in batches for row in rows_of(as_batch(batch))] == order


def test_an_integer_that_no_float_equals_is_refused() -> None:
    with pytest.raises(UsageError, match="does not fit the type double"):
        inferred([{"a": 2.5}], [{"a": 2**53 + 1}])
    for rows in ([{"a": 2.5}, {"a": 2**53 + 1}], [{"a": 2**53 + 1}, {"a": 2.5}]):
        with pytest.raises(UsageError, match="9007199254740993 does not fit the type double"):
            schema_of_rows(rows)


MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        (pa.int64(), 2.0, 2),
        (pa.int8(), 1.5, None),
        (pa.int64(), Decimal("1.5"), None),
        (pa.float64(), 3, 3.0),
        (pa.float64(), 2**60 + 1, None),
        (pa.timestamp("us"), MOMENT, MOMENT),
        (pa.timestamp("s"), MOMENT, None),
        (pa.timestamp("s"), MOMENT.replace(microsecond=0), MOMENT.replace(microsecond=0)),
        (pa.time32("s"), MOMENT.time(), None),
        (pa.duration("ms"), datetime.timedelta(microseconds=1), None),
        (pa.duration("ms"), datetime.timedelta(seconds=1), datetime.timedelta(seconds=1)),
        (pa.date32(), MOMENT.date(), MOMENT.date()),
        (pa.list_(pa.int64()), [1.5], None),
        (pa.list_(pa.int64()), [1, None], [1, None]),
        (pa.struct([("x", pa.int64())]), {"x": 1}, {"x": 1}),
        (pa.struct([("x", pa.int64())]), {"x": 1.5}, None),
        (pa.string(), b"\xff", None),
    ],
    ids=str,
)
def test_a_value_is_converted_whole_or_refused(kind: pa.DataType, value: Any, kept: Any) -> None:
    operator = ToArrow(RowsSchema(pa.schema([("a", kind)])))
    if kept is None:
        with pytest.raises(UsageError, match=r"column 'a': the value .* does not fit the type"):
            run(operator, [(None,), (value,)])
    else:
        (batch,) = run(operator, [(value,), (None,)])
        assert rows_of(as_batch(batch)) == [{"a": kept}, {"a": None}]


ODD_ROWS: list[Any] = [(1, "x"), (2.5, "y"), {"a": 3}, (None, "z"), {"a": 4, "c": 0}, None, (5, None)]
ODD = {
    "{'a': 3}": None,
    "(2.5, 'y')": "column 'a': the value 2.5 does not fit the type int64",
    "(None, 'z')": "column 'a': the value None does not fit a column that is not nullable",
    "{'a': 4, 'c': 0}": "column 'c' of the row {'a': 4, 'c': 0} is not in the schema",
    "None": "all tuples or lists, and one is None",
}


def test_rows_that_do_not_fit_go_by_on_error_with_record_column_and_value() -> None:
    """Also where rows of several kinds come, which no batch holds, and those between them are kept."""
    operator, letters = ToArrow(RowsSchema(SCHEMA), on_error="dead_letter"), []
    operator.open(TaskContext("job", "x", 0, 1, 1, log=letters.append))
    found = [row for batch in run(operator, ODD_ROWS) for row in rows_of(as_batch(batch))]
    assert found == [{"a": 1, "b": "x"}, {"a": 3, "b": None}, {"a": 5, "b": None}]
    assert operator.context.counters.user_errors == {"dead_letter": 4}
    for letter, (record, why) in zip(letters, [each for each in ODD.items() if each[1]], strict=True):
        assert why is not None and why in letter and letter.endswith(f"record {record}")


def test_a_row_that_fails_the_task_is_named_and_nothing_of_its_batch_goes_on() -> None:
    out: list[Batch] = []
    with pytest.raises(UsageError, match=r"column 'a': the value 2.5 does not fit") as error:
        rows = [(1, "x"), (2, "x"), (2.5, "y"), (3, "x")]
        ToArrow(RowsSchema(SCHEMA)).process(Batch(rows), 0, out.append)
    assert not out
    assert error.value.__notes__ == ["raised in operator 'to_table' by the record (2.5, 'y')"]


def test_check_passes_what_fits() -> None:
    operator = CheckSchema(SCHEMA)
    swapped = pa.record_batch({"b": ["x"], "a": [1]})
    assert run(operator, swapped) == [pa.record_batch([[1], ["x"]], schema=SCHEMA)]


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"a": [1]}, UnknownName, r"no column 'b' .*the batch has a"),
        ({"a": [1], "b": ["x"], "c": [1]}, UsageError, "column 'c' is not in the declared schema"),
        ({"a": [1.0], "b": ["x"]}, UsageError, "column 'a' has the type double, but int64 is declared"),
        ({"a": pa.array([None], pa.int64()), "b": ["x"]}, UsageError, "column 'a': the value None"),
    ],
)
def test_check_refuses_columns_that_do_not_fit(
    columns: dict[str, Any], error: type[UsageError], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(CheckSchema(SCHEMA), pa.record_batch(columns))


def test_values_that_python_cannot_hold_are_named() -> None:
    moments = pa.array([1], pa.timestamp("ns"))
    with pytest.raises(UsageError, match=r"column 't' of type timestamp\[ns\] does not fit Python values"):
        run(ToRows(), pa.record_batch({"t": moments}))
    whole = pa.record_batch({"t": pa.array([1000], pa.timestamp("ns"))})
    assert run(ToRows(), whole) == [[{"t": datetime.datetime(1970, 1, 1, 0, 0, 0, 1)}]]


def test_nanoseconds_become_microseconds_wherever_they_stand() -> None:
    moment, length = pa.timestamp("ns", "UTC"), pa.duration("ns")
    batch = pa.record_batch(
        {
            "length": pa.array([3000, None], length),
            "list": pa.array([[1000, None], []], pa.list_(moment)),
            "large": pa.array([[1000], None], pa.large_list(length)),
            "pair": pa.array([{"at": 2000, "n": 1}, None], pa.struct({"at": moment, "n": pa.int64()})),
        }
    )
    start = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    micro = datetime.timedelta(microseconds=1)
    (rows,) = run(ToRows(), batch)
    assert rows == [
        {
            "length": 3 * micro,
            "list": [start + micro, None],
            "large": [micro],
            "pair": {"at": start + 2 * micro, "n": 1},
        },
        {"length": None, "list": [], "large": None, "pair": None},
    ]
    assert isinstance(rows, list)
    assert type(rows[0]["length"]) is datetime.timedelta
    assert type(rows[0]["pair"]["at"]) is datetime.datetime


def within(holder: str, value: int, kind: pa.DataType) -> pa.Array:
    """One row with the value in a column of a type that holds others."""
    values, keys = pa.array([value], kind), pa.array(["k"])
    coded = values.dictionary_encode()
    return {
        "time": lambda: values,
        "dictionary": lambda: coded,
        "map": lambda: pa.MapArray.from_arrays([0, 1], keys, values),
        "key": lambda: pa.MapArray.from_arrays([0, 1], values, keys),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(values, 1),
        "list of dictionary": lambda: pa.ListArray.from_arrays([0, 1], coded),
    }[holder]()


@pytest.mark.parametrize("holder", ["time", "dictionary", "map", "key", "fixed", "list of dictionary"])
@pytest.mark.parametrize(
    ("fine", "coarse"),
    [
        (pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC")),
        (pa.duration("ns"), pa.duration("us")),
        (pa.time64("ns"), pa.time64("us")),
    ],
    ids=str,
)
def test_nanoseconds_are_never_cut(holder: str, fine: pa.DataType, coarse: pa.DataType) -> None:
    with pytest.raises(UsageError, match="column 'a' of type .* does not fit Python values"):
        rows_of(Batch(pa.record_batch({"a": within(holder, 1, fine)})))
    expected = [{"a": value} for value in within(holder, 1, coarse).to_pylist()]
    rows = rows_of(Batch(pa.record_batch({"a": within(holder, 1000, fine)})))
    assert rows == expected
    assert "Timestamp" not in repr(rows)
    assert "Timedelta" not in repr(rows)


@pytest.mark.parametrize(
    "column",
    [
        pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([1], pa.timestamp("ns"))),
        pa.array([[1000]], pa.list_view(pa.timestamp("ns"))),
        pa.array([[1000]], pa.large_list_view(pa.timestamp("ns"))),
    ],
    ids=lambda column: str(column.type),
)
def test_nanoseconds_that_no_cast_reaches_are_refused(column: pa.Array) -> None:
    with pytest.raises(UsageError, match="cast it first"):
        rows_of(Batch(pa.record_batch({"a": column})))


def test_columns_of_one_name_are_refused() -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(UsageError, match="two columns of one name"):
        run(ToRows(), twice)
    with pytest.raises(UnknownName, match=r"no column 'a' .*, and one is declared: the batch has a, a"):
        run(CheckSchema(pa.schema({"a": pa.int64()})), twice)


def test_batches_without_columns_keep_their_number_of_rows() -> None:
    assert rows_of(Batch(pa.record_batch({"a": [1, 2]}).select([]))) == [{}, {}]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([400_000_000_000], pa.timestamp("s")),
        pa.array([[2**30]], pa.list_(pa.date32())),
        pa.array([2**62], pa.duration("s")),
        pa.array([253_402_300_799], pa.timestamp("s", "Asia/Tokyo")),
    ],
    ids=str,
)
def test_times_beyond_pythons_calendar_are_told(values: pa.Array) -> None:
    with pytest.raises(UsageError, match="column 'a' (has a time at|of type .* does not fit Python values)"):
        rows_of(Batch(pa.record_batch({"a": values})))


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        (pa.timestamp("us", "UTC"), "10000-01-01 00:00:00.000000Z"),
        (pa.timestamp("s"), "10000-01-01 00:00:00"),
        (pa.date32(), "10000-01-01"),
    ],
    ids=str,
)
def test_what_is_beyond_the_calendar_of_python_is_named(kind: pa.DataType, moment: str) -> None:
    days = pa.array([0, 2_932_897], pa.int32()).cast(pa.date32())
    batch = pa.record_batch([days.cast(pa.timestamp("s")).cast(kind)], ["at"])
    with pytest.raises(
        UsageError, match=rf"column 'at' has a time at {moment}, .* years 1 to 9999: .* drop\('at'\)"
    ):
        rows_of(as_batch(batch))
