"""Types by the literals: integers stay whole, at any depth, or are refused by line; times stay moments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Table
from minishuffle.connectors.csv import CsvSource
from minishuffle.connectors.inferred import InferredTypes
from minishuffle.connectors.json import JsonSource
from minishuffle.errors import UsageError
from support.cutjobs import Cut, run
from tests.api.test_jobs import execute

BEYOND = 2**64 - 1
WIDE = pa.decimal128(38, 0)
ZONED = pa.timestamp("us", "UTC")
DATES = pa.timestamp("s")
Format = Literal["csv", "json"]


def written(folder: Path, format: Format, *files: list[Any]) -> Path:
    """Each file with a column ``n`` of these literals."""
    for number, literals in enumerate(files):
        if format == "csv":
            text = "n,k\n" + "".join(f"{literal},\n" for literal in literals)
        else:
            text = "".join(f'{{"n": {literal}}}\n' for literal in literals)
        (folder / f"{number}.{format}").write_text(text)
    return folder


def read(folder: Path, format: Format) -> tuple[pa.DataType, list[Any]]:
    source = CsvSource(folder) if format == "csv" else JsonSource(folder)
    batches = [batch for split in source.splits() for batch in source.read(split, 0)]
    assert {batch.schema for batch in batches} == {source.schema}
    return source.schema.field("n").type, [value for batch in batches for value in batch["n"].to_pylist()]


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ([[2**53, 2**53 + 1]], pa.int64()),
        ([[-(2**63), 2**63 - 1]], pa.int64()),
        ([[BEYOND, BEYOND - 1]], pa.uint64()),
        ([[2**53, 2**53 + 1, 2**63]], pa.uint64()),
        ([[2**64]], WIDE),
        ([[-1, BEYOND]], WIDE),
        ([[-(2**63) - 1]], WIDE),
        ([[10**38 - 1, 1 - 10**38]], WIDE),
        ([[2**53 + 1], [2**63]], pa.uint64()),
        ([[2**63], [2**53 + 1]], pa.uint64()),
        ([[BEYOND], [-1]], WIDE),
        ([[7], [BEYOND], [10**37 + 1]], WIDE),
        ([["true"], [BEYOND]], pa.uint64()),
        ([["true"], [10**30 + 1]], WIDE),
    ],
    ids=str,
)
def test_integers_are_whole(
    tmp_path: Path, format: Format, files: list[list[Any]], kind: pa.DataType
) -> None:
    values = [1 if value == "true" else value for file in files for value in file]
    assert read(written(tmp_path, format, *files), format) == (kind, values)


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize(
    ("files", "values"),
    [
        ([[2**53, "0.5"]], [2.0**53, 0.5]),
        ([[2**64, "0.5"]], [2.0**64, 0.5]),
        ([[2**64], ["1.0"]], [2.0**64, 1.0]),
        ([["9007199254740993.0", "1e300"]], [2.0**53, 1e300]),
        ([["1e19", "3"]], [1e19, 3.0]),
        ([["1e2"], [2**53]], [100.0, 2.0**53]),
    ],
    ids=str,
)
def test_integers_that_float64_holds_may_stand_beside_fractions(
    tmp_path: Path, format: Format, files: list[list[Any]], values: list[float]
) -> None:
    assert read(written(tmp_path, format, *files), format) == (pa.float64(), values)


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize(
    ("files", "at", "literal"),
    [
        ([["1.5", 2**53 + 1]], (0, 2), 2**53 + 1),
        ([[-(2**53) - 1, "1e2"]], (0, 1), -(2**53) - 1),
        ([[BEYOND, "1.0"]], (0, 1), BEYOND),
        ([[7, 2**53 + 1], ["1.5"]], (0, 2), 2**53 + 1),
        ([["1.5"], [7, 8, 2**53 + 1]], (1, 3), 2**53 + 1),
        ([[1], ["1.5", 2**53], [2**63 - 1]], (2, 1), 2**63 - 1),
        ([["1.5"], ["1" * 400]], (1, 1), "1" * 40),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_integers_beside_fractions_that_float64_does_not_hold_are_refused(
    tmp_path: Path, format: Format, files: list[list[Any]], at: tuple[int, int], literal: Any
) -> None:
    line = at[1] + (format == "csv")
    says = (
        rf"{at[0]}\.{format}, line {line}: column 'n' has {literal}, an integer that no float64 holds, "
        r"beside fractions: (declare its type with schema=, such as float64|correct the file$)"
    )
    with pytest.raises(UsageError, match=says):
        Table.from_files(written(tmp_path, format, *files), format=format)


@pytest.mark.parametrize("format", ["csv", "json"])
def test_an_integer_of_more_than_38_digits_is_refused(tmp_path: Path, format: Format) -> None:
    says = rf"1\.{format}, line {2 + (format == 'csv')}: column 'n' has 10{{38}}, an integer of more than 38 "
    with pytest.raises(UsageError, match=says):
        Table.from_files(written(tmp_path, format, [1], [2, 10**38]), format=format)


def test_lines_of_csv_are_counted_over_quoted_line_ends_and_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text(f'"k\n",n\n"a\n""b",1.5\n\n,{2**53 + 1}\n')
    with pytest.raises(UsageError, match=r"1\.csv, line 6: column 'n' has 9007199254740993,"):
        CsvSource(tmp_path)


def test_lines_of_json_are_counted_over_empty_ones(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(f'\n{{"n": 1.5}}\n\n  {{"n":\n{2**53 + 1}}}\n')
    with pytest.raises(UsageError, match=r"1\.json, line 4: column 'n' has 9007199254740993,"):
        JsonSource(tmp_path)


def test_fields_and_items_are_whole_too(tmp_path: Path) -> None:
    nested = [[{"l": [1, 2**53 + 1], "s": {"x": BEYOND}}], [{"l": [2**63, None], "s": None}, None]]
    for number, values in enumerate(nested):
        (tmp_path / f"{number}.json").write_text(
            f'{{"n": {values}}}'.replace("'", '"').replace("None", "null")
        )
    kind = pa.list_(pa.struct({"l": pa.list_(pa.uint64()), "s": pa.struct({"x": pa.uint64()})}))
    assert read(tmp_path, "json") == (kind, nested)
    (tmp_path / "2.json").write_text('{"n": [{"l": [0.5]}]}')
    says = r"0\.json, line 1: column 'n\.l' has 9007199254740993, an integer that no float64 holds"
    with pytest.raises(UsageError, match=says):
        JsonSource(tmp_path)


@pytest.mark.parametrize(
    ("values", "kind"), [([BEYOND, BEYOND - 1, BEYOND], int), ([-1, BEYOND, BEYOND - 1, -1], Decimal)]
)
@pytest.mark.parametrize("format", ["csv", "json"])
def test_they_are_keys_and_values_of_whole_jobs(
    tmp_path: Path, format: Format, values: list[int], kind: Any
) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in", format, *([value] for value in values))
    table = Table.from_files(tmp_path / "in", format=format)
    cut = Cut(2, rows=1)
    counts = run(table.key_by("n").count().collect(), cut).rows
    assert sorted((row["n"], row["count"]) for row in counts) == [
        (kind(value), values.count(value)) for value in sorted(set(values))
    ]
    totals = run(table.key_by("n").aggregate(n2=("n", "max"), many=("n", "count_distinct")).collect(), cut)
    assert {row["n"]: (row["n2"], row["many"]) for row in totals.rows} == {v: (v, 1) for v in values}
    execute(table.to_files(tmp_path / "out"))
    assert sorted(pq.read_table(tmp_path / "out")["n"].to_pylist()) == sorted(values)


def test_a_sum_of_wide_integers_is_whole(tmp_path: Path) -> None:
    table = Table.from_files(written(tmp_path, "json", [-1, BEYOND, BEYOND]), format="json")
    constant = table.with_columns(k=pa.compute.scalar(1))
    (row,) = run(constant.key_by("k").aggregate(total=("n", "sum")).collect(), Cut(2, rows=1)).rows
    assert row["total"] == 2 * BEYOND - 1


def test_only_parts_with_values_that_may_be_rounded_are_asked_for() -> None:
    types = InferredTypes(finds_times=False)
    table = pa.table({"a": [0.5, float("nan")], "b": [{"x": [1.5, 2.0**53]}, None], "i": [2**62, 1]})
    assert types.add("f", table) == [("b", "x", "[]")]


# --- texts that are times ---------------------------------------------------------------------------


def json_of(*texts: Any) -> list[str]:
    return ["null" if text is None else f'"{text}"' for text in texts]


@pytest.mark.parametrize(
    ("files", "kind", "values"),
    [
        (
            [["2026-01-01T00:00:00+02:00", None, "2026-01-01 00:00:00.25Z"]],
            ZONED,
            [datetime(2025, 12, 31, 22, tzinfo=UTC), None, datetime(2026, 1, 1, 0, 0, 0, 250_000, UTC)],
        ),
        (
            [["2026-01-01T00:00-0330"], ["2026-01-01T00:00:00.123456Z"]],
            ZONED,
            [datetime(2026, 1, 1, 3, 30, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 0, 123_456, UTC)],
        ),
        (
            [["2026-01-01T00:00:00", "2026-01-01 00:00"], [None, "2026-01-01T00:00:00.5"]],
            pa.timestamp("us"),
            [datetime(2026, 1, 1), datetime(2026, 1, 1), None, datetime(2026, 1, 1, 0, 0, 0, 500_000)],
        ),
        ([["2026-01-01", None], ["2026-01-02"]], DATES, [datetime(2026, 1, 1), None, datetime(2026, 1, 2)]),
        ([["2026-02-28T23:59:59"], [None]], pa.timestamp("us"), [datetime(2026, 2, 28, 23, 59, 59), None]),
    ],
    ids=str,
)
def test_texts_of_json_that_are_all_times_of_one_form_are_times(
    tmp_path: Path, files: list[list[Any]], kind: pa.DataType, values: list[Any]
) -> None:
    written(tmp_path, "json", *(json_of(*texts) for texts in files))
    assert read(tmp_path, "json") == (kind, values)


@pytest.mark.parametrize(
    "files",
    [
        [["2026-01-01T00:00:00Z", "2026-01-01T00:00:00"]],
        [["2026-01-01T00:00:00Z"], ["2026-01-01T00:00:00"]],
        [["2026-01-01T00:00:00"], ["2026-01-01T00:00:00Z"]],
        [["2026-01-01", "2026-01-01T00:00:00"]],
        [["2026-01-01"], ["2026-01-01T00:00:00"]],
        [["2026-01-01T00:00:00"], ["soon"]],
        [["2026-01-01"], ["soon"]],
        [["2026-01-01T10"]],
        [["2026-01-01T10:00:00+02"]],
        [["20260101T100000Z"]],
        [["2026-W01-1"]],
        [["2026-01-01t10:00:00z"]],
        [["2026-01-01T10:00:00.1234567Z"]],
        [["2026-01-01T10:00:00,5Z"]],
        [["2026-02-30T10:00:00Z"]],
        [["2026-01-01T24:00:00Z"]],
        [["0000-06-01T00:00:00Z"]],
        [["0001-01-01T00:00:00+02:00"]],
        [[" 2026-01-01T10:00:00Z"]],
        [["2026-01-01T10:00:00Z\\n"]],
    ],
    ids=str,
)
def test_other_texts_of_json_stay_as_they_are(tmp_path: Path, files: list[list[str]]) -> None:
    written(tmp_path, "json", *(json_of(*texts) for texts in files))
    assert read(tmp_path, "json") == (
        pa.string(),
        [text.replace("\\n", "\n") for texts in files for text in texts],
    )


def test_times_in_fields_and_items_keep_their_moments_too(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"n": {"l": [{"t": "2026-01-01T00:00:00+02:00"}, null], "d": "a"}}')
    (tmp_path / "2.json").write_text('{"n": {"l": [{"t": "2026-01-01T00:00:00.5Z"}], "e": "2026-01-01"}}')
    kind, (one, other) = read(tmp_path, "json")
    assert kind.field("l").type == pa.list_(pa.struct({"t": ZONED}))
    assert one == {"l": [{"t": datetime(2025, 12, 31, 22, tzinfo=UTC)}, None], "d": "a", "e": None}
    assert other["l"] == [{"t": datetime(2026, 1, 1, 0, 0, 0, 500_000, UTC)}]
    (tmp_path / "3.json").write_text('{"n": {"l": [{"t": "2026-01-01T00:00:00"}]}}')
    kind, values = read(tmp_path, "json")
    assert kind.field("l").type == pa.list_(pa.struct({"t": pa.string()}))
    assert values[0]["l"] == [{"t": "2026-01-01T00:00:00+02:00"}, None]


def test_windows_of_json_times_are_those_of_their_moments(tmp_path: Path) -> None:
    written(tmp_path, "json", json_of("2026-01-01T01:30:00+02:00", "2025-12-31T23:45:00Z"))
    table = Table.from_files(tmp_path, format="json").event_time("n").key_by("n")
    rows = run(table.window(timedelta(hours=1)).count().collect(), Cut(1)).rows
    assert {row["window_start"] for row in rows} == {datetime(2025, 12, 31, 23, tzinfo=UTC)}


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("other", ["1", "-1", str(2**63)])
@pytest.mark.parametrize(
    ("literal", "value"),
    [("+5", 5.0), ("+9007199254740993", 2**53 + 1), (" +009223372036854775807", 2**63 - 1)],
)
def test_an_integer_of_csv_may_have_a_plus(
    tmp_path: Path, literal: str, value: float, other: str, files: int
) -> None:
    numbers = [[literal, other]] if files == 1 else [[literal], [other]]
    kind, values = read(written(tmp_path, "csv", *numbers), "csv")
    assert values == [value, int(other)]
    assert kind == (pa.float64() if isinstance(value, float) else pa.decimal128(38, 0))


@pytest.mark.parametrize("literal", ["009007199254740993", " 9007199254740993", "-09007199254740993 "])
def test_such_an_integer_of_another_file_is_found_however_it_is_written(tmp_path: Path, literal: str) -> None:
    (tmp_path / "0.csv").write_text("n\n1.5\n")
    (tmp_path / "1.csv").write_text(f"n\n7\n{literal}\n")
    says = rf"1\.csv, line 3: column 'n' has {int(literal)}, an integer that no float64 holds"
    with pytest.raises(UsageError, match=says):
        CsvSource(tmp_path)
