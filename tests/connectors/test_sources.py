"""Sources: every record once, from any offset, for any parallelism; bad files and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.connectors import items, text
from minishuffle.connectors.generator import GeneratorSource
from minishuffle.connectors.items import ArrowItemsSource, ItemsSource
from minishuffle.connectors.parquet import ParquetSource
from minishuffle.connectors.text import TextSource
from minishuffle.errors import UnknownName, UsageError
from minishuffle.operators.base import Source
from minishuffle.runtime.reader import SourceReader
from minishuffle.wire.packed import SplitPosition
from support.sourcereading import read_all, records_of


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def arrow_numbered(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count))})


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "TEXT_SPLIT_BYTES", 10)
    monkeypatch.setattr(text, "LIST_ROWS", 3)
    monkeypatch.setattr(items, "LIST_ROWS", 3)


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
