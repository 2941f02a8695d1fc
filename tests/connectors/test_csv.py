"""CSV files as Arrow: types, nulls, quoting, and what each mistake in a file is answered with."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.connectors.csv import CsvSource
from minishuffle.errors import UnknownName, UsageError, WrongInput
from minishuffle.limits import BATCH_ROWS_MAX, CSV_BLOCK_BYTES

SCHEMA = pa.schema(
    [
        ("price", pa.decimal128(4, 2)),
        pa.field("n", pa.int64()),
        ("s", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


def written(directory: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(source: CsvSource, offset: int = 0) -> list[dict[str, Any]]:
    return [row for split in source.splits() for b in source.read(split, offset) for row in b.to_pylist()]


def test_columns_have_the_declared_types_and_order(tmp_path: Path) -> None:
    text = 'n,price,s,more,at\n1,0.10,"NA",x,2013-01-01T06:00:00Z\nNA,NA,NA,y,NA\n3,1,"a,\nb",z,NA\n'
    source = CsvSource(written(tmp_path, b"\xef\xbb\xbf" + text.encode()), SCHEMA, nulls=["NA"])
    (batch,) = source.read(source.splits()[0], 0)
    assert batch.schema.equals(SCHEMA)
    at = datetime(2013, 1, 1, 6, tzinfo=UTC)
    assert batch.to_pylist() == [
        {"price": Decimal("0.10"), "n": 1, "s": "NA", "at": at},
        {"price": None, "n": None, "s": None, "at": None},
        {"price": Decimal("1.00"), "n": 3, "s": "a,\nb", "at": None},
    ]


def test_without_a_header_the_schema_names_the_columns(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    source = CsvSource(written(tmp_path, "1;x\n;\n"), schema, header=False, delimiter=";")
    assert read(source) == [{"a": 1, "b": "x"}, {"a": None, "b": None}]


def test_reading_goes_on_at_an_offset_and_in_batches_of_bounded_length(tmp_path: Path) -> None:
    rows = BATCH_ROWS_MAX * 2 + 5
    path = written(tmp_path, "a\n" + "".join(f"{number}\n" for number in range(rows)))
    source = CsvSource(path, pa.schema([("a", pa.int64())]))
    for offset in (0, 1, BATCH_ROWS_MAX + 1, rows - 1, rows, rows + 1, 9 * rows):
        batches = list(source.read(str(path), offset))
        assert all(0 < batch.num_rows <= BATCH_ROWS_MAX for batch in batches)
        assert [v for batch in batches for v in batch.column(0).to_pylist()] == list(range(offset, rows))


def test_each_file_is_a_split_and_may_be_empty(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    for name, text in (("1.csv", "a\n1\n"), ("2.csv", ""), ("3.csv", "a\n"), ("4.csv", "b,a\n0,4\n")):
        written(tmp_path, text, name)
    source = CsvSource(tmp_path, schema)
    assert len(source.splits()) == 4
    assert read(source) == [{"a": 1}, {"a": 4}]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("last", "value"),
    [('1,"a",', None), ('1,"a",""', ""), ('1,"a","b"', "b"), ("1,a,b", "b"), ("1,a,", None)],
)
@pytest.mark.parametrize("header", [True, False])
def test_the_last_line_needs_no_line_end(
    last: str, value: str | None, header: bool, line_end: str, tmp_path: Path
) -> None:
    schema = pa.schema([("i", pa.int64()), ("s", pa.string()), ("f", pa.string())])
    text = ("i,s,f" + line_end if header else "") + last
    bare, ended = written(tmp_path, text, "bare.csv"), written(tmp_path, text + line_end, "ended.csv")
    for path in (bare, ended):
        assert read(CsvSource(path, schema, header=header)) == [{"i": 1, "s": "a", "f": value}]


def test_a_last_value_that_is_empty_is_null_for_numbers_too(tmp_path: Path) -> None:
    schema = pa.schema([("s", pa.string()), ("f", pa.float64())])
    assert read(CsvSource(written(tmp_path, 's,f\n"a",'), schema)) == [{"s": "a", "f": None}]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_last_line_that_ends_a_block_needs_no_line_end(more: int, tmp_path: Path) -> None:
    schema = pa.schema([("s", pa.string()), ("f", pa.string())])
    text = "s,f\n" + ("x" * 1000 + ',"y"\n') * (CSV_BLOCK_BYTES // 1100)
    last = "z" * (CSV_BLOCK_BYTES + more - len(text) - len('"",'))
    rows = read(CsvSource(written(tmp_path, f'{text}"{last}",'), schema))
    assert rows[-1] == {"s": last, "f": None}


def test_a_header_alone_needs_no_line_end(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    assert read(CsvSource(written(tmp_path, "a,b"), schema)) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "x,1,y,",
            "column 'n' has 'x', which does not fit int64: 'x,1,y,': correct the file or the schema, ",
        ),
        ("1,1.234,y,", r"column 'price' has '1\.234', which does not fit decimal128\(4, 2\): .* schema, "),
        ("1,123.4,y,", r"column 'price' has '123\.4', which does not fit decimal128\(4, 2\): .* schema, "),
        ("1,1,y,2013-01-01", r"column 'at' has '2013-01-01', which does not fit timestamp\[us, tz=UTC\]: "),
        (
            "NA,1,y,",
            r"column 'n' has 'NA', .* schema, name what stands for null, as in nulls=\('NA',\), or l",
        ),
        ('"",1,y,', r"column 'n' has '', .* schema: what stands in quotation marks is no null, or leave"),
        ("1,1", "it has 2 values for 4 columns: '1,1': correct the file, or leave such records out: "),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_with_file_and_line(tmp_path: Path, line: str, told: str) -> None:
    path = written(tmp_path, f"n,price,s,at\n1,1,x,\n{line}\n")
    with pytest.raises(WrongInput, match=rf"a\.csv, line 3: {told}.*on_error='skip' or 'dead_letter'"):
        read(CsvSource(path, SCHEMA))


def test_a_null_in_a_column_without_nulls_is_told(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    with pytest.raises(WrongInput, match=r"a\.csv, line 3: column 'a' has null, .* not fit int64, not null"):
        read(CsvSource(written(tmp_path, "a,b\n1,1\n,1\n"), schema))


def test_bytes_that_are_not_utf8_are_told(tmp_path: Path) -> None:
    path = written(tmp_path, b"a\n\xff\n")
    with pytest.raises(WrongInput, match=r"a\.csv, line 2: column 'a' has '\ufffd', .* not fit string: "):
        read(CsvSource(path, pa.schema([("a", pa.string())])))


def test_a_table_of_csv_knows_its_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "n,price,s,at\n")
    table = Table.from_files(path, format="csv", schema=SCHEMA, nulls=("NA",))
    with pytest.raises(UnknownName, match="no column 'm'; there are price, n, s, at"):
        table.key_by("m")
    with pytest.raises(UnknownName, match=r"no column 'x' in .*a\.csv: its first line has n, price, s, at"):
        Table.from_files(path, format="csv", schema={"x": int})
    with pytest.raises(UnknownName, match=r"no file .*b\.csv"):
        Table.from_files(tmp_path / "b.csv", format="csv", schema={"x": int})
    with pytest.raises(UsageError, match=r"write nulls=\['NA'\]"):
        Table.from_files(path, format="csv", schema=SCHEMA, nulls="NA")


def test_hexadecimal_digits_are_texts_unless_declared(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,c\n0x10,1,0Xf\n,2,0xg\n7,3,\n")
    source = CsvSource(path)
    assert source.schema == pa.schema({"a": pa.string(), "b": pa.int64(), "c": pa.string()})
    assert read(source)[0] == {"a": "0x10", "b": 1, "c": "0Xf"}
    assert [row["a"] for row in read(CsvSource(path, pa.schema({"a": pa.int64()})))] == [16, None, 7]


def test_a_value_may_be_long_and_a_line_too_long_says_so(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    long = "x" * 3_000_000
    assert read(CsvSource(written(tmp_path, f"a,b\n1,{long}\n2,y\n"), schema)) == [
        {"a": 1, "b": long},
        {"a": 2, "b": "y"},
    ]
    too_long = written(tmp_path, "a,b\n1," + "x" * (2 * CSV_BLOCK_BYTES) + "\n2,y\n", "b.csv")
    with pytest.raises(UsageError, match=r"b.csv, line 2: a record has more than 8 MiB, or a quotation mark"):
        read(CsvSource(too_long, schema))


@pytest.mark.parametrize("delimiter", [";;", "", "é", '"', "\n", "\r"])
def test_a_delimiter_is_one_character_of_ascii(delimiter: str, tmp_path: Path) -> None:
    path = written(tmp_path, "a\n1\n")
    with pytest.raises(UsageError, match="one character, not .*: write one of ASCII"):
        CsvSource(path, pa.schema([("a", pa.int64())]), delimiter=delimiter)


@pytest.mark.parametrize("header", ["a,b\r", '"a",b\r', "a,b\r\n"])
def test_lines_may_end_with_a_carriage_return(header: str, tmp_path: Path) -> None:
    schema = pa.schema([("b", pa.string()), ("a", pa.int64())])
    source = CsvSource(written(tmp_path, header + "1,x\r2,\r"), schema)
    assert read(source) == [{"b": "x", "a": 1}, {"b": None, "a": 2}]


def test_a_name_in_the_header_may_hold_line_ends_and_quotation_marks(tmp_path: Path) -> None:
    name = 'first\nsecond\r\n"third"'
    quoted = name.replace('"', '""')
    source = CsvSource(written(tmp_path, f'"{quoted}",b\n1,x\n'), pa.schema([(name, pa.int64())]))
    assert read(source) == [{name: 1}]


def test_columns_of_one_name_are_refused_unless_nobody_reads_them(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,b\n1,2,3\n")
    for schema in (None, pa.schema([("b", pa.int64())])):
        with pytest.raises(UsageError, match=r"a\.csv: its first line names several columns 'b', .*own$"):
            CsvSource(path, schema)
    assert read(CsvSource(path, pa.schema([("a", pa.int64())]))) == [{"a": 1}]


def test_each_column_without_a_name_has_its_own_values(tmp_path: Path) -> None:
    source = CsvSource(written(tmp_path, "a,,,b\n1,7,8,\n2,9,inf,x\n"))
    (batch,) = source.read(source.splits()[0], 0)
    assert [column.to_pylist() for column in batch.columns] == [
        [1, 2],
        [7.0, 9.0],
        [8.0, float("inf")],
        [None, "x"],
    ]
    bad = CsvSource(written(tmp_path, "a,,,b\n1,7,8,\n2,9,1e400,x\n"), on_error="skip")
    (portion,) = bad.read(bad.splits()[0], 0)
    assert (portion.records, portion.batch["a"].to_pylist()) == (2, [1])


@pytest.mark.parametrize(
    ("header", "delimiter", "way"),
    [("n;m,k;o", ",", ";"), ("n\tm;o\tp", ",", "\t"), ("n|m", ",", "|"), ("n,m", ";", ",")],
)
def test_a_header_that_another_delimiter_parts_says_which(
    header: str, delimiter: str, way: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"{header.replace(delimiter, '.')}\n1{way}2,5\n")
    written = re.escape(f": write delimiter={way!r}")
    with pytest.raises(UsageError, match=f"a.csv: its first line names one column, .*{written}; if that is"):
        CsvSource(str(file), delimiter=delimiter)
    with pytest.raises(UnknownName, match=f"no column 'x' in .*: its first line has .*{written}"):
        CsvSource(str(file), pa.schema([("x", pa.string())]), delimiter=delimiter)
    name = header.replace(delimiter, ".")
    assert CsvSource(str(file), pa.schema([(name, pa.string())]), delimiter=delimiter).schema.names == [name]


def test_a_delimiter_in_quotation_marks_parts_no_header(tmp_path: Path) -> None:
    path = written(tmp_path, '"last, first"\n"Doe, Jane"\n')
    assert CsvSource(path).schema.names == ["last, first"]
    with pytest.raises(UnknownName, match=r"its first line has last, first\n"):
        CsvSource(path, pa.schema([("x", pa.string())]))


def test_a_header_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, '"' + "x" * 200_000)
    with pytest.raises(
        UsageError, match=r"a\.csv: its header cannot be read \(field larger.*correct the file"
    ):
        CsvSource(path, pa.schema([("a", pa.int64())]))


@pytest.mark.parametrize("header", [True, False])
def test_a_file_of_a_byte_order_mark_alone_is_empty(header: bool, tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf")
    assert read(CsvSource(path, pa.schema([("a", pa.int64())]), header=header)) == []


def test_a_number_that_no_short_float_holds_is_refused_and_infinity_is_not(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.float32())])
    found = read(CsvSource(written(tmp_path, "a\n1.5\ninf\n-3e38\n"), schema))
    assert [row["a"] for row in found] == [1.5, float("inf"), pytest.approx(-3e38, rel=1e-6)]
    with pytest.raises(UsageError, match=r"line 3: column 'a' has '1e300', which does not fit float: "):
        read(CsvSource(written(tmp_path, "a\n1\n1e300\n"), schema))
