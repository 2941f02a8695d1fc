"""Sources: every record once, from any offset, for any parallelism; bad files and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators import sources
from minishuffle.dataflow.operators.base import Source
from minishuffle.dataflow.operators.sources import (
    ArrowItemsSource,
    GeneratorSource,
    ItemsSource,
    ParquetSource,
    TextSource,
)
from minishuffle.errors import UnknownName, UsageError
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.wire.packed import SplitPosition
from minishuffle.worker.reader import SourceReader


def records_of(batches: Any) -> list[Any]:
    out: list[Any] = []
    for batch in batches:
        assert 0 < len(batch) <= BATCH_ROWS_MAX
        out.extend(batch if isinstance(batch, list) else batch.to_pylist())
    return out


def read_all(source: Source) -> list[Any]:
    return [record for split in source.splits() for record in records_of(source.read(split, 0))]


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def arrow_numbered(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count))})


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TEXT_SPLIT_BYTES", 10)
    monkeypatch.setattr(sources, "LIST_ROWS", 3)


def bounded_source(kind: str, directory: Path) -> tuple[Source, list[Any]]:
    """A source and its records in split order (a generator's in the order of numbers)."""
    if kind == "text":
        lines = [f"line {i}" * (i % 4) for i in range(50)]
        (directory / "a.txt").write_text("\n".join(lines))
        return TextSource(directory / "a.txt"), lines
    if kind == "parquet":
        table = pa.table({"n": range(50), "s": [str(i) for i in range(50)]})
        pq.write_table(table, directory / "a.parquet", row_group_size=20)
        return ParquetSource(directory / "a.parquet"), table.to_pylist()
    if kind == "items":
        return ItemsSource(range(100)), list(range(100))
    if kind == "arrow items":
        table = pa.table({"n": range(100)})
        return ArrowItemsSource(table), table.to_pylist()
    if kind == "generator":
        return GeneratorSource(numbered, records=50, splits=3, rate=200), list(range(50))
    return GeneratorSource(arrow_numbered, records=50, splits=3, format="arrow"), [
        {"n": i} for i in range(50)
    ]


KINDS = ["text", "parquet", "items", "arrow items", "generator", "arrow generator"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_splits")
def test_every_record_once_and_from_every_offset(kind: str, tmp_path: Path) -> None:
    source, expected = bounded_source(kind, tmp_path)
    assert isinstance(source, Source)
    records = read_all(source)
    assert (sorted(records, key=str) if "generator" in kind else records) == (
        sorted(expected, key=str) if "generator" in kind else expected
    )
    assert len(source.splits()) > 1
    assert list(cloudpickle.loads(cloudpickle.dumps(source)).splits()) == list(source.splits())
    for split in list(source.splits())[:5]:
        whole = records_of(source.read(split, 0))
        for offset in (*range(len(whole) + 1), len(whole) + 1, len(whole) + 1_000_000):
            assert records_of(source.read(split, offset)) == whole[offset:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.usefixtures("small_splits")
def test_another_reader_goes_on_where_one_has_ended(kind: str, in_turn: bool, tmp_path: Path) -> None:
    source, expected = bounded_source(kind, tmp_path)
    found: list[Any] = []
    resumed: dict[int, SplitPosition] = {}
    attempts = 0
    while attempts < 100:
        attempts += 1
        reader = SourceReader(source, 0, 1, 0.0, in_turn=in_turn, resumed=list(resumed.values()), age=60.0)
        batch: Any = []
        for poll in range(2):
            batch = reader.poll(float(poll))
            if batch is not None and len(batch):
                found.extend(records_of([batch]))
        resumed |= {split: SplitPosition(split, position) for split, position in reader.positions.items()}
        done = (mark.split for mark in reader.take_marks() if mark.state == "done")
        resumed |= {split: resumed[split]._replace(done=True) for split in done}
        reader.close()
        assert not reader.rows_skipped
        if batch is None:
            break
    assert 1 < attempts < 100
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallelism", [1, 2, 5])
@pytest.mark.usefixtures("small_splits")
def test_subtasks_share_the_splits(kind: str, parallelism: int, tmp_path: Path) -> None:
    source, expected = bounded_source(kind, tmp_path)
    found: list[Any] = []
    for index in range(parallelism):
        reader = SourceReader(source, index, parallelism, started_at=0.0)
        now, mine = 0.0, 0
        while (batch := reader.poll(now)) is not None:
            found.extend(records_of([batch]) if len(batch) else [])
            mine += len(batch)
            now = max(now, reader.next_due)
        assert sum(reader.positions.values()) == mine
        reader.close()
    assert sorted(found, key=str) == sorted(expected, key=str)


@given(
    lines=st.lists(
        st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=12), max_size=30
    ),
    crlf=st.booleans(),
    end=st.booleans(),
    split_bytes=st.integers(1, 40),
)
def test_text_lines(
    lines: list[str], crlf: bool, end: bool, split_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ending = "\r\n" if crlf else "\n"
    text = ending.join(lines) + (ending if end and lines else "")
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    expected = text.replace("\r\n", "\n").split("\n")
    if not expected[-1]:
        expected.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "TEXT_SPLIT_BYTES", split_bytes)
        source = TextSource(path)
        starts = [start for _, start, _ in source.splits()]
    assert read_all(source) == [
        line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(expected)
    ]
    data = text.encode()
    assert all(start == 0 or data[start - 1 : start] == b"\n" for start in starts)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(UsageError, match=r"a\.txt is not UTF-8 at byte 6: convert it"):
        read_all(TextSource(tmp_path / "a.txt"))


def test_directories_and_patterns_mean_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.log", ".hidden", "_SUCCESS"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    assert read_all(TextSource(tmp_path)) == ["a.txt", "b.txt", "c.log"]
    assert read_all(TextSource(str(tmp_path / "*.txt"))) == ["a.txt", "b.txt"]
    assert read_all(TextSource([tmp_path / "c.log", str(tmp_path / "a*")])) == ["c.log", "a.txt"]


@pytest.mark.parametrize("kind", [TextSource, ParquetSource])
def test_missing_files(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"no file .*nothing"):
        kind(tmp_path / "nothing")
    with pytest.raises(UnknownName, match=r"no file .*\*\.txt"):
        kind(str(tmp_path / "*.txt"))
    with pytest.raises(UnknownName, match="has no files"):
        kind(tmp_path)
    with pytest.raises(UsageError, match="at least one file"):
        kind([])


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not at all")
    with pytest.raises(UsageError, match=r"a\.parquet is not a Parquet file"):
        ParquetSource(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(UnknownName, match=r"no column 'c' in .*: there are a, b"):
        ParquetSource(tmp_path / "a.parquet", pa.schema({"a": pa.int64(), "c": pa.int64()}))
    assert read_all(ParquetSource(tmp_path / "a.parquet", pa.schema({"b": pa.int64()}))) == [{"b": 2}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate is 0"),
        ({"rate": 10**26}, "rate is 1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"records": -1}, "records is -1"),
        ({"splits": 0}, "splits is 0"),
    ],
)
def test_generator_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GeneratorSource(numbered, **options)


def test_generator_refuses_another_number_of_records() -> None:
    with pytest.raises(UsageError, match="asked for 4 records from number 4 on and gave 1"):
        list(
            GeneratorSource(
                lambda start, count: [start] * (4 if start == 0 else 1), records=8, splits=2
            ).read(1, 0)
        )


@pytest.mark.parametrize(
    ("format", "given", "told"),
    [
        ("rows", None, "gave a NoneType: return a list, or say format='arrow'"),
        ("rows", pa.record_batch({"n": [0]}), "gave a RecordBatch: return a list"),
        ("arrow", [0], "gave a list: return a RecordBatch"),
    ],
)
def test_generator_refuses_another_kind_of_batch(format: Any, given: Any, told: str) -> None:
    source = GeneratorSource(lambda start, count: given, records=1, splits=1, format=format)
    with pytest.raises(UsageError, match=told):
        list(source.read(0, 0))


@given(st.integers(0, 300), st.integers(1, 9), st.none() | st.floats(1, 1e6))
def test_generator_gives_each_number_once(records: int, splits: int, rate: float | None) -> None:
    assert sorted(read_all(GeneratorSource(numbered, rate, records, splits))) == list(range(records))


def test_generator_without_end_goes_on_where_it_was() -> None:
    source = GeneratorSource(numbered, rate=1000, splits=2)
    assert source.bounded is False
    batches = source.read(1, 0)
    first, second = next(batches), next(batches)
    resumed = source.read(1, len(first) + 3)
    assert next(resumed) == second[3:]
    assert next(resumed) == next(batches)
