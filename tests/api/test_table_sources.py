"""Where tables come from: files that differ, data in memory, numbers, sources of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError, WrongColumns
from minishuffle.limits import NAME_BYTES_MAX
from minishuffle.plan.planner import compile_job
from minishuffle.plan.unknownschemas import drafting
from support.cutjobs import Cut, run

SCHEMA = pa.schema({"user": pa.string(), "at": pa.timestamp("us", "UTC")}, metadata={"made": "by hand"})


def rows(table: Table, width: int = 2) -> list[Any]:
    return sorted(run(table.collect(), Cut(width, rows=3)).rows, key=str)


def types(table: Table) -> dict[str, str]:
    assert table.plan.gives.schema is not None
    return {field.name: str(field.type) for field in table.plan.gives.schema}


def test_parquet_files_that_differ(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [2.5]}), tmp_path / "2.parquet")
    table = Table.from_files(tmp_path)
    assert types(table) == {"a": "double", "b": "string"}
    assert rows(table) == [{"a": 1.0, "b": "x"}, {"a": 2.5, "b": None}]
    declared = Table.from_files(str(tmp_path / "*.parquet"), schema={"a": float})
    assert rows(declared) == [{"a": 1.0}, {"a": 2.5}]
    with pytest.raises(UnknownName, match="no column 'c' in any of 2 files: there are a, b"):
        Table.from_files(tmp_path, schema={"c": int})
    lossy = Table.from_files(tmp_path, schema={"a": int})
    with pytest.raises(UsageError, match="does not fit int64"):
        rows(lossy)


def test_csv_files_are_read_whole_for_their_types(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b,c\n1,x,\n2,y,\n")
    (tmp_path / "2.csv").write_text("a,b,c\n2.5,z,\n")
    (tmp_path / "3.csv").write_text("")
    table = Table.from_files(tmp_path, format="csv")
    assert types(table) == {"a": "double", "b": "string", "c": "string"}
    assert [row["a"] for row in rows(table)] == [1.0, 2.0, 2.5]
    declared = Table.from_files(tmp_path / "1.csv", format="csv", schema={"a": str})
    assert rows(declared) == [{"a": "1"}, {"a": "2"}]


def test_a_csv_file_may_have_columns_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,,,b\n1,7,7,\n")
    assert rows(Table.from_files(tmp_path, format="csv").map_batches(nameless).select("", "b")) == [
        {"": 7, "b": None}
    ]


def nameless(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select([1, 3])


def test_a_column_that_a_csv_file_lacks_is_null_there(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("id,v\n1,2\n")
    (tmp_path / "2.csv").write_text("new,id\nx,3\n")
    (tmp_path / "3.csv").write_text("id\n")
    every = [{"id": 1, "v": 2, "new": None}, {"id": 3, "v": None, "new": "x"}]
    assert rows(Table.from_files(tmp_path, format="csv")) == every
    assert rows(Table.from_files(tmp_path, format="csv", schema={"id": int, "v": int, "new": str})) == every
    with pytest.raises(UnknownName, match="no column 'c' in any of 3 files: there are id, v, new"):
        Table.from_files(tmp_path, format="csv", schema={"c": int})


def test_json_files_are_read_whole_for_their_fields(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"a": 1}\n{"a": 2, "late": {"x": 1}}\n')
    (tmp_path / "2.json").write_text('{"a": 2.5, "n": null}')
    (tmp_path / "3.json").write_text("")
    table = Table.from_files(tmp_path, format="json")
    assert types(table) == {"a": "double", "late": "struct<x: int64>", "n": "string"}
    assert rows(table) == [
        {"a": 1.0, "late": None, "n": None},
        {"a": 2.0, "late": {"x": 1}, "n": None},
        {"a": 2.5, "late": None, "n": None},
    ]
    assert rows(Table.from_files(tmp_path, format="json", schema={"a": float})) == [
        {"a": 1.0}, {"a": 2.0}, {"a": 2.5}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "one", "other", "values"),
    [
        ("csv", "7", "2.5", [2.5, 7.0]),
        ("csv", "1", "true", [1, 1]),
        ("csv", "2026-01-01 00:00:00", "2026-01-01T00:00:00Z", [datetime(2026, 1, 1, tzinfo=UTC)] * 2),
        ("json", "7", "2.5", [2.5, 7.0]),
        ("json", "1", "true", [1, 1]),
    ],
)
def test_files_of_other_types_are_read_in_their_own(
    tmp_path: Path, format: Any, one: str, other: str, values: list[Any]
) -> None:
    for number, value in enumerate((one, other)):
        text = f"n,k\n{value},\n" if format == "csv" else f'{{"n": {value}}}'
        (tmp_path / f"{number}.{format}").write_text(text)
    assert [row["n"] for row in rows(Table.from_files(tmp_path, format=format))] == values


def test_an_integer_of_parquet_that_the_common_type_does_not_hold_is_said(tmp_path: Path) -> None:
    for number, value in enumerate((2**53 + 1, 2.5)):
        pq.write_table(pa.table({"n": [value]}), tmp_path / f"{number}.parquet")
    with pytest.raises(UsageError, match=r"column 'n' of .*0.parquet has the type int64, and a value that"):
        rows(Table.from_files(tmp_path))


def test_json_objects_that_differ_inside_are_read_in_their_own_types(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"l": [], "s": {"a": 1, "c": null}}')
    (tmp_path / "2.json").write_text('{"s": {"b": [true], "a": 2.5}, "l": [{"x": 1}, null]}')
    inside = {"a": 2.5, "b": [True], "c": None}
    assert rows(Table.from_files(tmp_path, format="json")) == [
        {"l": [], "s": {"a": 1.0, "b": None, "c": None}}, {"l": [{"x": 1}, None], "s": inside}
    ]  # fmt: skip


def test_what_a_file_cannot_be_read_for_is_said(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"a": 1\n')
    (tmp_path / "mixed.json").write_text('{"a": 1}\n{"a": "x"}\n')
    (tmp_path / "plain.csv").write_text("1,2\n")
    for name, format, options, error, says in (
        ("bad.json", "json", {}, UsageError, "bad.json, line 1: it is no JSON object"),
        ("mixed.json", "json", {}, UsageError, "mixed.json, line 2: column 'a' has a text"),
        ("plain.csv", "csv", {"header": False}, UsageError, "do not name their columns"),
        ("nothing.csv", "csv", {}, UnknownName, "no file"),
        ("plain.csv", "xml", {}, UsageError, "write 'parquet', 'csv' or 'json'"),
        ("plain.csv", "csv", {"nulls": "NA"}, UsageError, "nulls takes a list"),
    ):
        with pytest.raises(error, match=says):
            Table.from_files(tmp_path / name, format=format, **options)  # type: ignore[arg-type]
    declared = Table.from_files(tmp_path / "mixed.json", format="json", schema={"a": int})
    with pytest.raises(UsageError, match=r"mixed.json, line 2: .*correct the file or the schema"):
        rows(declared)


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("partitioning", [None, "hive"])
def test_columns_of_files_that_are_too_large_to_be_read_whole_have_to_be_declared(
    format: Any, partitioning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``minishuffle schema`` shows those of the first rows, whatever comes behind them."""
    monkeypatch.setattr("minishuffle.connectors.recordfiles.INFERRED_FILE_BYTES_MAX", 3)
    monkeypatch.setattr("minishuffle.api.table_sources.DRAFT_ROWS", 2)
    (tmp_path / "day=1").mkdir()
    lines = {
        "csv": ["n,s", "1,a", '2,"b\n"', "x,c"],
        "json": ['{"n": 1, "s": "a"}', '{"n": 2}', '{"n": "x"}'],
    }
    (tmp_path / "day=1" / f"x.{format}").write_text("\n".join(lines[format]))
    path = tmp_path if partitioning else tmp_path / "day=1"
    says = rf"^Table.from_files at .*.py:\d+: .*x.{format} has more than 0 MiB, .*: declare them with schema="
    with pytest.raises(InvalidGraph, match=says):
        Table.from_files(path, format=format, partitioning=partitioning)
    with drafting():
        (end,) = Table.from_files(path, format=format, partitioning=partitioning).plan.ends
    source: Any = end.feeds[0].node.step.source
    expected = {"n": pa.int64(), "s": pa.string()} | ({"day": pa.string()} if partitioning else {})
    assert source.schema == pa.schema(expected)


def test_a_json_split_goes_on_behind_an_offset(tmp_path: Path) -> None:
    from minishuffle.connectors.json import JsonSource

    path = tmp_path / "a.json"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(9)))
    source = JsonSource(path)
    (split,) = source.splits()
    assert [value for batch in source.read(split, 7) for value in batch["n"].to_pylist()] == [7, 8]
    assert list(source.read(split, 20)) == []


def test_frames_are_tables() -> None:
    import polars as pl

    frame = pl.DataFrame({"a": [1, 2], "b": pl.Series(["x", "y"], dtype=pl.Categorical)})
    assert rows(Table.from_arrow(frame)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert rows(Table.from_arrow(pa.RecordBatch.from_pydict({"a": [3]}))) == [{"a": 3}]


def test_numbers_make_tables() -> None:
    assert rows(Table.generate(records=3)) == [{"number": 0}, {"number": 1}, {"number": 2}]
    squares = Table.generate(
        lambda start, count: pa.RecordBatch.from_pydict({"n": [n * n for n in range(start, start + count)]}),
        records=3,
        schema={"n": int},
    )
    assert types(squares) == {"n": "int64"}
    assert rows(squares) == [{"n": 0}, {"n": 1}, {"n": 4}]


def test_numbers_are_checked_for_a_declared_schema_too() -> None:
    assert rows(Table.generate(records=2, schema={"number": int})) == [{"number": 0}, {"number": 1}]
    with pytest.raises(WrongColumns, match=r"column 'number' is not in the declared schema \(n\)"):
        rows(Table.generate(records=2, schema={"n": int}))


def test_generated_columns_are_those_of_one_call() -> None:
    asked: list[tuple[int, int]] = []

    def made(start: int, count: int) -> pa.RecordBatch:
        asked.append((start, count))
        return pa.RecordBatch.from_pydict({"n": pa.array([start / 2] * count, pa.float32())})

    assert types(Table.generate(made, records=3)) == {"n": "float"}
    assert asked == [(0, 1)]
    assert types(Table.generate(made, records=3, schema={"n": "float32"})) == {"n": "float"}
    assert asked == [(0, 1)]
    assert rows(Table.generate(made, records=3)) == [{"n": 0.0}, {"n": 0.5}, {"n": 1.0}]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda start, count: 1 / start, "raised ZeroDivisionError: division by zero"),
        (
            lambda start, count: pa.record_batch({"n": [1], "x": [None]}),
            "gave the column 'x' in the type null",
        ),
        (lambda start, count: pa.record_batch({"x": [[]]}), r"gave the column 'x' in the type list<.*null>"),
    ],
)
def test_a_generator_that_does_not_show_its_columns_has_to_say_them(made: Any, why: str) -> None:
    """The error has the line, what to write, and the command that shows what to write."""
    says = rf"^Table.generate at .*test_table_sources.py:\d+: its function, called with \(0, 1\), {why}: "
    with pytest.raises(InvalidGraph, match=rf"{says}write schema= .*`minishuffle schema .*.py:JOB` shows"):
        Table.generate(made)


def test_batches_of_other_columns_than_the_first_call_are_refused() -> None:
    def changing(start: int, count: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"n": ["a"] * count if start else [1] * count})

    with pytest.raises(UsageError, match="'n' has the type string, but int64 is what the function gave when"):
        rows(Table.generate(changing, records=100))


class Batches:
    format = "arrow"

    def splits(self) -> list[int]:
        return [1, 2]

    def read(self, split: int, offset: int) -> Iterator[pa.RecordBatch]:
        if not offset:
            yield pa.RecordBatch.from_pydict({"split": [split]})


def test_a_source_of_ones_own_gives_batches() -> None:
    table = Table.source(Batches(), schema={"split": int})
    assert table.plan.ends[0].feeds[0].node.label == "Batches"
    assert rows(table) == [{"split": 1}, {"split": 2}]
    with pytest.raises(UsageError, match="column 'split' has the type int64"):
        rows(Table.source(Batches(), schema={"split": str}))
    with pytest.raises(
        InvalidGraph, match=r"Table.source at .*test_table_sources.py:\d+: Batches has no attr"
    ):
        Table.source(Batches())

    class Unread(Batches):
        schema = {"split": pa.int64()}

        def splits(self) -> list[int]:
            raise AssertionError("a source is not read while the job is made")

    read = Table.source(Unread())
    assert types(read) == {"split": "int64"}
    assert types(Table.source(Unread(), schema={"split": "int8"})) == {"split": "int8"}
    with pytest.raises(UnknownName, match="no column 'spit'; did you mean 'split'"):
        read.key_by("spit")

    class Rows(Batches):
        format = "rows"

    with pytest.raises(UsageError, match=r"Rows gives rows: write Stream.source"):
        Table.source(Rows())
    for make in (Table.source, Stream.source):
        with pytest.raises(UsageError, match="is not a source: it needs the methods"):
            make(Batches)  # type: ignore[operator]


@pytest.mark.parametrize("bounded", [True, False])
def test_a_table_from_spark_is_a_source_with_a_name_and_a_schema(bounded: bool) -> None:
    table = Table.from_spark("orders", SCHEMA, bounded=bounded)
    graph = compile_job(table.to_count(), parallelism=2)
    (vertex,) = graph.vertices
    assert (vertex.stream, vertex.is_source, vertex.bounded) == ("orders", True, bounded)
    read = pa.ipc.read_schema(pa.py_buffer(vertex.stream_schema))
    assert read.equals(SCHEMA.remove_metadata(), check_metadata=True)
    assert vertex.name == "from_spark orders -> to_count"


def test_columns_from_spark_are_known() -> None:
    table = Table.from_spark("orders", schema={"user": str, "n": "int64"})
    assert table.plan.gives.schema == pa.schema({"user": pa.string(), "n": pa.int64()})
    with pytest.raises(UnknownName, match="no column 'usr'; did you mean 'user'"):
        table.key_by("usr")


@pytest.mark.parametrize("name", ["", "  ", 3, "x" * (NAME_BYTES_MAX + 1), "a\nb", "\udcff"])
def test_other_names_from_spark_are_refused(name: Any) -> None:
    with pytest.raises(
        UsageError, match=r"Table\.from_spark takes a name of 1 to \d+ bytes, all printable, not"
    ):
        Table.from_spark(name, SCHEMA)


def runs(start: int, count: int) -> pa.RecordBatch:
    """Every other value is null, which no count of runs says."""
    values = pa.array([None if number % 2 else number for number in range(start, start + count)], pa.int64())
    return pa.RecordBatch.from_pydict({"k": pa.array([1] * count), "v": pc.run_end_encode(values)})


def test_columns_of_runs_and_unions_are_refused() -> None:
    refused = "column 'v' is of type run_end_encoded<.*decode runs with pyarrow.compute.run_end_decode"
    with pytest.raises(UsageError, match=refused):
        Table.from_arrow(runs(0, 4))
    with pytest.raises(UsageError, match=refused):
        Table.generate(runs, records=4, schema=runs(0, 1).schema)
    with pytest.raises(UsageError, match=refused):
        Table.generate(runs, records=4)


STRICT_PARTS = pa.list_(pa.field("x", pa.int64(), nullable=False))


def test_a_null_in_a_part_that_is_declared_without_is_refused(tmp_path: Path) -> None:
    given = [{"s": [1]}, {"s": [2, None]}]
    pq.write_table(pa.Table.from_pylist(given), tmp_path / "1.parquet")
    schema = pa.schema([("s", STRICT_PARTS)])
    with pytest.raises(UsageError, match=r"column 's\.x' of .*1\.parquet has nulls, and is declared without"):
        rows(Table.from_files(tmp_path, schema=schema))
    with pytest.raises(UsageError, match=r"column 's\.x': the value None does not fit a column that is not"):
        rows(Stream.items(given).to_table(schema))
    fine = [{"s": [1]}, {"s": None}]
    assert rows(Stream.items(fine).to_table(schema)) == sorted(fine, key=str)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([[7.0, 1e300]], pa.list_(pa.float32())),
        ([[1, 7]], pa.list_(pa.bool_())),
        ([{"x": 1.0}, {"x": 1e300}], pa.struct([("x", pa.float32())])),
        ([[{"x": [1e300]}]], pa.list_(pa.struct([("x", pa.list_(pa.float32()))]))),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused_at_any_depth(
    tmp_path: Path, given: list[Any], kind: pa.DataType
) -> None:
    pq.write_table(pa.table({"a": given}), tmp_path / "1.parquet")
    with pytest.raises(UsageError, match="column 'a' of .* would be another value"):
        rows(Table.from_files(tmp_path / "1.parquet", schema={"a": kind}))


def test_what_fits_is_read_at_any_depth_also_of_a_slice(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.struct([("x", pa.float64())])))
    given = [[("far", [{"x": 1e300}])], None, [("near", [{"x": 1.5}, None])], []]
    pq.write_table(pa.table({"a": pa.array(given, kind)}).slice(1), tmp_path / "1.parquet")
    narrow = pa.map_(pa.string(), pa.list_(pa.struct([("x", pa.float32())])))
    found = rows(Table.from_files(tmp_path / "1.parquet", schema={"a": narrow}))
    assert found == sorted([{"a": each} for each in given[1:]], key=str)


def test_a_number_of_json_that_no_short_float_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"a": 1.5, "b": [2.5]}\n{"a": null, "b": null}\n')
    schema = {"a": pa.float32(), "b": pa.list_(pa.float32())}
    fine = Table.from_files(tmp_path / "1.json", format="json", schema=schema)
    assert rows(fine) == [{"a": 1.5, "b": [2.5]}, {"a": None, "b": None}]
    (tmp_path / "1.json").write_text('{"a": 1e300}\n')
    with pytest.raises(UsageError, match=r"1\.json, line 1: column 'a' has 1e\+300, which"):
        rows(Table.from_files(tmp_path / "1.json", format="json", schema={"a": pa.float32()}))


def test_rows_without_columns_are_refused() -> None:
    with pytest.raises(UsageError, match="takes a table with columns: these 3 rows have none"):
        Table.from_arrow(pa.table({"a": [1, 2, 3]}).select([]))


@pytest.mark.parametrize("schema", [None, {"a": pa.time64("us")}])
def test_times_of_day_with_a_zone_are_refused(schema: Any) -> None:
    given = [{"a": time(1)}, {"a": time(1, tzinfo=UTC)}]
    with pytest.raises(UsageError, match="column 'a' has times of day with a time zone"):
        rows(Stream.items(given).to_table(schema))
    assert rows(Stream.items(given[:1]).to_table(schema)) == given[:1]
