"""Records that cannot be read: which they are, what is said of them, and that nothing else moves."""

from __future__ import annotations

import gzip
import json
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Table
from minishuffle.connectors import recordfiles
from minishuffle.connectors.csv import CsvSource
from minishuffle.connectors.json import JsonSource
from minishuffle.connectors.text import TextSource
from minishuffle.errors import UsageError, WrongInput
from minishuffle.operators.base import Portion
from minishuffle.runtime.reader import SourceReader
from minishuffle.wire.packed import SplitPosition
from support.cutjobs import Cut, run

Format = Literal["csv", "json"]
SCHEMA = pa.schema({"n": pa.int64(), "s": pa.string()})
LETTER = re.compile(r"(?s)(.*), record (\d+), byte (\d+): (.*): text '(.*)'")


def source_of(path: Path, schema: pa.Schema | None = SCHEMA, on_error: Any = "dead_letter") -> Any:
    make = CsvSource if path.name.split(".")[1] == "csv" else JsonSource
    return make(path, schema, on_error=on_error)


def read(source: Any, offset: int = 0) -> tuple[list[Any], list[str], int]:
    """The rows, the letters, and how many records both are of."""
    rows, letters, records = [], [], 0
    for split in source.splits():
        for given in source.read(split, offset):
            batch = given.batch if isinstance(given, Portion) else given
            rows += batch.to_pylist()
            letters += given.letters if isinstance(given, Portion) else ()
            records += given.records if isinstance(given, Portion) else batch.num_rows
    return rows, letters, records


def good(format: Format, number: int) -> str:
    """A record; every third is longer, and in CSV has a line end in it."""
    text = f"{number}" + ("\n" if format == "csv" else " ") * (number % 3 == 0)
    return f'{number},"{text}"' if format == "csv" else json.dumps({"n": number, "s": text})


def bad(format: Format, number: int) -> str:
    """One that is wrong in some way."""
    if format == "csv":
        return (f"x{number},b", f"{number}", f"{number},b,c", f'"{number}\n","x"')[number % 4]
    return (f'{{"n": "x{number}"}}', f'{{"n": {number}', "[]", f'{{"n": {number}, "n": 1}}', "7")[number % 5]


def records_of(format: Format, *wrong: int, count: int) -> list[str]:
    return [bad(format, number) if number in wrong else good(format, number) for number in range(count)]


PATTERNS: dict[str, tuple[int, ...]] = {
    "none": (),
    "two": (10, 25),
    "behind a quoted line end": (4, 7, 10),
    "the ends": (0, 29),
    "a block": tuple(range(8, 25)),
    "every other": tuple(range(1, 30, 2)),
    "all": tuple(range(30)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line_end", "wrong"),
    [
        *(("\n", wrong) for wrong in PATTERNS.values()),
        ("\r\n", PATTERNS["two"]),
        ("\n\n", PATTERNS["a block"]),
    ],
    ids=[*PATTERNS, "two and CRLF", "a block and empty lines"],
)
@pytest.mark.parametrize("format", ["csv", "json"])
def test_positions_do_not_depend_on_what_was_left_out(
    format: Format,
    line_end: str,
    wrong: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever goes on between two such records, as another attempt does, gets what is left, and no more."""
    records = records_of(format, *wrong, count=30)
    text = ("n,s" + line_end if format == "csv" else "") + line_end.join(records)
    path = tmp_path / f"a.{format}"
    path.write_bytes(text.encode())
    source = source_of(path)
    letters_at = {}
    for block, judged in ((60, 1024), (10**6, 5), (10**6, 1024)):
        monkeypatch.setattr(recordfiles, "CSV_BLOCK_BYTES", block)
        monkeypatch.setattr(recordfiles, "_JUDGED_MAX", judged)
        for offset in (0, 1, *wrong[:2], *(number + 1 for number in wrong[:2]), 30, 99):
            rows, letters, count = read(source, offset)
            assert [row["n"] for row in rows] == [n for n in range(offset, 30) if n not in wrong]
            assert count == max(0, 30 - offset)
            letters_at.setdefault(offset, letters)
            assert letters_at[offset] == letters
    numbers = []
    for letter in letters_at[0]:
        name, number, byte, _, shown = LETTER.fullmatch(letter).groups()  # type: ignore[union-attr]
        numbers.append(int(number) - 1)
        assert name == str(path)
        assert shown.replace("\\n", "\n") == records[numbers[-1]]
        assert text.encode()[int(byte) :].startswith(records[numbers[-1]].encode())
    assert numbers == list(wrong)
    assert letters_at[30] == []


@pytest.mark.parametrize("format", ["csv", "json"])
def test_skipped_records_are_counted_and_of_those_that_fail_the_first_is_named(
    format: Format, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{format}"
    lines = ["n,s"] * (format == "csv") + [*records_of(format, 5, 8, count=10), ""]
    path.write_text("\n".join(lines))
    (portion,) = source_of(path, on_error="skip").read(str(path), 0)
    assert (portion.records, portion.policy, portion.letters) == (10, "skip", ["", ""])
    line = 2 + 5 + 2 if format == "csv" else 6
    with pytest.raises(WrongInput, match=rf"a\.{format}, line {line}: .*on_error='skip' or 'dead_letter'"):
        read(source_of(path, on_error="fail"))
    with pytest.raises(UsageError, match="on_error is 'drop': write 'fail', 'skip' or 'dead_letter'"):
        source_of(path, on_error="drop")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.json", '[{"n":1},{"n":2}]', r"line 1: it begins an array: .*: write one object a line, as jq -c"),
        ("a.json", '[\n  {"n":1}\n]\n', r"line 1: it begins an array: '\[': write one object a line"),
        (
            "a.json",
            '{"n":1}\n\n{"n":1,"n":2}\n',
            "line 3: it has the field 'n' twice: .*: correct the file, ",
        ),
        ("a.json", '{"n":1}\n{"n":', "line 2: it is no JSON object .Expecting value at character 6 of the l"),
        ("a.json", '{"n":1e400}', "line 1: it has 1e400, which no float64 holds: "),
        (
            "a.json",
            '{"n":1}\n{"n":2}{"n":3}\nnothing\n',
            "line 2: there is more in the line than one object: ",
        ),
        ("a.json", '{"n":1}\n'.encode("utf-16"), "line 1: the file is UTF-16: .*: convert it to UTF-8"),
        ("a.json", '{"n":1}\n{"n":-Inf}\n', "line 2: it is no JSON object .Expecting value at character 6 "),
        (
            "a.json",
            '{"n":1}\n{"s":"\\ud800"}\n',
            "line 2: it has one half of a surrogate pair without the other",
        ),
        (
            "a.json",
            '{"n":1}\n{"s":"a\0b"}\n',
            "line 2: it is no JSON object .Invalid control character at ch",
        ),
        ("a.json", '{"n":1}\v\n{"n":2}\n', "line 1: there is more in the line than one object: "),
        ("a.json", '{"n":1}\n\f\n', "line 2: it is no JSON object "),
        ("a.json", 'null\n{"n":1}\n', "line 1: it is no JSON object: "),
        ("a.json", '{"n":1}\nnull\n', "line 2: it is no JSON object: "),
        ("a.json", '"n"\n', "line 1: it is no JSON object: "),
        ("a.csv", "n,s\n1,x\n2\n", "line 3: it has 1 values for 2 columns: '2': correct the file, or leave"),
        ("a.csv", 'n,s\n1,"x\ny"\n2,3,4\n', "line 4: it has 3 values for 2 columns: '2,3,4': "),
    ],
)
@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_what_can_be_read_in_no_types_is_refused_with_or_without_a_schema(
    name: str, text: str | bytes, why: str, schema: pa.Schema | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WrongInput, match=rf"{name}, {why}") as caught:
        read(source_of(tmp_path / name, schema, "fail"))
    assert caught.value.final
    assert "schema" not in str(caught.value)


@pytest.mark.parametrize("schema", [None, pa.schema({"n": pa.float64()}), pa.schema({"n": pa.float32()})])
def test_a_number_of_csv_that_no_float_holds_is_left_out_and_infinity_is_not(
    schema: pa.Schema | None, tmp_path: Path
) -> None:
    literals = ["1.5", "1e400", "inf", "", "-Infinity", "nan", "-1e999", "1" * 400 + ".0"]
    (tmp_path / "a.csv").write_text("\n".join(["n,k", *(f"{literal},k" for literal in literals)]))
    source = source_of(tmp_path / "a.csv", schema)
    rows, letters, count = read(source)
    assert [str(row["n"]) for row in rows] == ["1.5", "inf", "None", "-inf", "nan"]
    assert [re.search("record .* has '.....", letter)[0] for letter in letters] == [  # type: ignore[index]
        f"record {number}, byte {byte}: column 'n' has '{shown}"
        for number, byte, shown in ((2, 10, "1e400"), (7, 45, "-1e99"), (8, 54, "11111"))
    ]
    assert count == len(literals)
    with pytest.raises(WrongInput, match=r"a\.csv, line 3: column 'n' has '1e400', which does not fit"):
        read(source_of(tmp_path / "a.csv", schema, "fail"))


@pytest.mark.parametrize(
    ("name", "data", "good", "record"),
    [
        ("a.csv", b"n,s\n1,a\n2,caf\xe9\n3,c\n", [1, 3], "record 2, byte 8"),
        ("a.csv", b"n,s\n1,a\n\xe9,b\n", [1], "record 2, byte 8"),
        ("a.json", b'{"n":1,"s":"a"}\n{"n":2,"s":"caf\xe9"}\n', [1], "record 2, byte 16"),
        ("a.json", b'{"n":2,"s":"b","\xe9":0}\n{"n":3,"s":"c"}\n', [3], "record 1, byte 0"),
    ],
)
def test_records_that_are_not_utf8_are_left_out_without_a_schema(
    name: str, data: bytes, good: list[int], record: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    source = source_of(tmp_path / name, None)
    rows, letters, _ = read(source)
    assert source.schema == SCHEMA
    assert ([row["n"] for row in rows], len(letters)) == (good, 1)
    assert f", {record}: it is not UTF-8: text " in letters[0]
    says = r"line \d: it is not UTF-8: .*: convert the file first, with iconv .*, or leave such records out"
    with pytest.raises(WrongInput, match=says):
        source_of(tmp_path / name, None, "fail")


@pytest.mark.parametrize("header", [b"n,caf\xe9\n1,2\n", "n,s\n1,2\n".encode("utf-16")])
def test_a_header_of_csv_that_is_not_utf8_says_so(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(header)
    with pytest.raises(UsageError, match=r"a\.csv: its first line is not UTF-8: convert the file first"):
        source_of(tmp_path / "a.csv", None, "skip")
    with pytest.raises(UsageError, match=r"no column 's' .*; it is not UTF-8: convert the file first"):
        source_of(tmp_path / "a.csv", pa.schema({"s": pa.string()}), "skip")


DAY = date(2026, 1, 2)


@pytest.mark.parametrize(
    ("name", "text", "kind", "value"),
    [
        *(("a.csv", "x", kind, "x") for kind in (pa.string_view(), pa.dictionary(pa.int8(), pa.string()))),
        ("a.csv", "x", pa.binary_view(), b"x"),
        ("a.csv", "1.50", pa.decimal32(4, 2), Decimal("1.50")),
        ("a.csv", "9" * 48 + ".25", pa.decimal256(50, 2), Decimal("9" * 48 + ".25")),
        ("a.csv", "7", pa.dictionary(pa.int32(), pa.int64()), 7),
        ("a.json", '"x"', pa.dictionary(pa.int32(), pa.string()), "x"),
        ("a.json", '"2026-01-02"', pa.date32(), DAY),
        ("a.json", '[{"d": "2026-01-02"}]', pa.list_(pa.struct({"d": pa.date32()})), [{"d": DAY}]),
        ("a.json", '"2026-01-02T03:04"', pa.timestamp("us"), datetime(2026, 1, 2, 3, 4)),
    ],
    ids=str,
)
def test_types_that_pyarrow_does_not_read_are_read(
    name: str, text: str, kind: pa.DataType, value: Any, tmp_path: Path
) -> None:
    is_csv = name == "a.csv"
    (tmp_path / name).write_text(f"n,k\n{text},\n,\n" if is_csv else f'{{"n": {text}}}\n{{}}\n')
    source = source_of(tmp_path / name, pa.schema({"n": kind}), "fail")
    assert read(source)[0] == [{"n": value}, {"n": None}]


def test_a_type_of_which_no_value_can_be_is_refused_before_all_records_are_left_out(tmp_path: Path) -> None:
    kinds = [("a.csv", pa.list_(pa.int64())), ("a.csv", pa.uuid()), ("a.json", pa.uuid())]
    for name, kind in (*kinds, ("a.json", pa.time64("us")), ("a.json", pa.map_(pa.string(), pa.int64()))):
        (tmp_path / name).write_text("n,k\nx,\n" if name == "a.csv" else '{"n": "x"}\n')
        with pytest.raises(
            UsageError, match="column 'n' is declared as .*, which is not read from such files"
        ):
            source_of(tmp_path / name, pa.schema({"n": kind}), "skip")


@pytest.mark.parametrize(
    ("name", "text", "letters"),
    [
        (
            "a.json",
            '{"n":1,"s":"a"}\n{"n":1,"n":2}\n\n{"n":3\n{"n":4}\n',
            ["record 2, byte 16", "record 3, byte 31"],
        ),
        (
            "a.json",
            '{"n":1,"s":"a"}\n{"s":"\\ud800"}\n{"n":4}\n\v\n',
            ["record 2, byte 16", "record 4, byte 39"],
        ),
        ("a.csv", 'n,s\n1,a\n"2\n"\n4,\n3,"', ["record 2, byte 8", "record 4, byte 16"]),
    ],
)
def test_types_are_those_of_the_records_that_can_be_read(
    name: str, text: str, letters: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    source = source_of(tmp_path / name, None)
    rows, found, count = read(source)
    assert (source.schema, count) == (SCHEMA, 4)
    assert rows == [{"n": 1, "s": "a"}, {"n": 4, "s": None}]
    assert [re.search("record .*byte [0-9]+", letter)[0] for letter in found] == letters  # type: ignore[index]


def test_a_quotation_mark_that_is_not_closed_makes_one_record_of_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('n,s\n1,a\n2,"b\n3,c\n')
    rows, letters, count = read(source_of(tmp_path / "a.csv"))
    assert (rows, count) == ([{"n": 1, "s": "a"}], 2)
    assert letters[0].endswith("a.csv, record 2, byte 8: a quotation mark is not closed: text '2,\"b\\n3,c'")
    with pytest.raises(WrongInput, match=r"a\.csv, line 3: a quotation mark is not closed: "):
        read(source_of(tmp_path / "a.csv", on_error="fail"))


@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_record_that_is_too_long_is_left_out_alone(
    format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordfiles, "CSV_BLOCK_BYTES", 100)
    long = "x" * 5 + ('\n,""' if format == "csv" else " ") * 300
    middle = f'1,"{long}"' if format == "csv" else json.dumps({"n": 1, "s": long})
    head = "n,s\n" if format == "csv" else ""
    path = tmp_path / f"a.{format}"
    path.write_text(head + "\n".join([good(format, 0), middle, good(format, 2), bad(format, 4)]))
    rows, letters, count = read(source_of(path))
    assert ([row["n"] for row in rows], count) == ([0, 2], 4)
    assert f"record 2, byte {len(head + good(format, 0)) + 1}: it is too long: text " in letters[0]
    assert "record 4, " in letters[1]
    with pytest.raises(WrongInput, match="a record has more than 0 MiB, or a quotation mark is not closed"):
        read(source_of(path, on_error="fail"))


def test_a_compressed_file_is_counted_in_bytes_of_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"n,s\n1,a\nx,b\n"))
    assert ", record 2, byte 8: " in read(source_of(tmp_path / "a.csv.gz"))[1][0]
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"n,s\n" + b"1,a\n" * 9999)[:-20])
    with pytest.raises(WrongInput, match=r"cannot read .*b\.csv\.gz"):
        read(source_of(tmp_path / "b.csv.gz"))


def test_a_reader_that_takes_the_place_of_another_goes_on_behind_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,s\n" + "\n".join([*records_of("csv", 3, 8, count=10), ""]))
    source = source_of(tmp_path / "a.csv")
    reader = SourceReader(source, 0, 1, 0.0)
    batch = reader.poll(0.0)
    assert batch is not None
    assert (len(batch), reader.records, reader.positions) == (8, 10, {0: 10})
    assert [len(portion.letters) for portion in reader.take_left_out()] == [2]
    assert reader.take_left_out() == []
    reader = SourceReader(source, 0, 1, 0.0, resumed=[SplitPosition(0, 4, 2)])
    batch = reader.poll(0.0)
    assert isinstance(batch, pa.RecordBatch)
    assert (batch["n"].to_pylist(), reader.records) == ([6, 7, 9], 4)
    (portion,) = reader.take_left_out()
    assert [letter.split(", ")[1] for letter in portion.letters] == ["record 9"]
    reader = SourceReader(source, 0, 1, 0.0, resumed=[SplitPosition(0, 9)])
    assert reader.poll(0.0) is not None
    assert reader.take_left_out() == []


def test_a_batch_of_nothing_but_what_was_left_out_moves_the_position(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,s\nx,\ny,\n")
    reader = SourceReader(source_of(tmp_path / "a.csv"), 0, 1, 0.0)
    batch = reader.poll(0.0)
    assert batch is not None
    assert (len(batch), reader.records, reader.positions) == (0, 2, {0: 2})
    assert reader.poll(0.0) is None
    assert reader.records == 0


def test_columns_of_directories_stand_beside_what_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "a.csv").write_text("n\n1\nx\n2\n")
    table = Table.from_files(
        tmp_path,
        format="csv",
        schema={"n": int, "day": int},
        partitioning="hive",
        on_error="skip",
    )
    assert run(table.collect(), Cut()).rows == [{"n": 1, "day": 1}, {"n": 2, "day": 1}]


def test_what_no_restart_mends_is_final_in_other_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    text = TextSource(tmp_path / "a.txt")
    with pytest.raises(WrongInput, match="is not UTF-8"):
        list(text.read(text.splits()[0], 0))
    pq.write_table(pa.table({"n": [1.5]}), tmp_path / "a.parquet")
    with pytest.raises(WrongInput, match="does not fit int64"):
        run(Table.from_files(tmp_path / "a.parquet", schema={"n": int}).collect(), Cut())
    with pytest.raises(UsageError, match="on_error='skip' is for CSV and JSON"):
        Table.from_files(tmp_path / "a.parquet", on_error="skip")
