"""Sinks: what they send, count, log and write, and what a failed attempt leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.dataflow.operators.base import Batch, KeyedRows, TaskContext
from minishuffle.dataflow.operators.sinks import CollectSink, CountSink, ParquetSink, PrintSink, UserSink
from minishuffle.errors import UsageError
from minishuffle.limits import BATCH_ROWS_MAX


def nothing(batch: Batch) -> None:
    raise AssertionError(f"a sink emits nothing, and not {batch!r}")


def run(operator: Any, *batches: Batch, finish: bool = True, **options: Any) -> Any:
    operator = cloudpickle.loads(cloudpickle.dumps(operator))
    operator.open(TaskContext("job", "task", index=3, parallelism=4, attempt=2, **options))
    for batch in batches:
        operator.process(batch, 0, nothing)
    if finish:
        operator.finish(nothing)
    return operator.close()


ARROW = pa.record_batch({"a": [1, 2], "b": ["x", None]})


def test_collect_sends_rows_and_dicts() -> None:
    sent: list[Any] = []
    assert run(CollectSink(), [1, (2, 3)], ARROW, collect=sent.append) is None
    assert sent == [[1, (2, 3)], [{"a": 1, "b": "x"}, {"a": 2, "b": None}]]


def test_count_counts_both_formats() -> None:
    assert run(CountSink(), [1, 2, 3], ARROW, []) == 5
    assert run(CountSink()) == 0


def test_print_logs_one_line_per_row() -> None:
    lines: list[str] = []
    assert run(PrintSink(), ["a", 1], ARROW, log=lines.append) is None
    assert lines == ["'a'", "1", "{'a': 1, 'b': 'x'}", "{'a': 2, 'b': None}"]


class Remembering:
    def open(self, context: TaskContext) -> None:
        self.seen: list[Any] = [context.index]

    def write(self, batch: Batch) -> None:
        if batch == ["bad"]:
            raise ValueError("cannot write")
        self.seen.append(batch)

    def close(self) -> list[Any]:
        return self.seen


def test_users_sink_is_opened_fed_and_closed() -> None:
    sink = UserSink(Remembering())
    assert sink.name == "Remembering"
    assert run(sink, [1], KeyedRows(["k"], ["v"])) == [3, [1], ["v"]]
    assert UserSink(Remembering()).close() is None


def test_users_sink_must_have_the_methods() -> None:
    with pytest.raises(UsageError, match=r"object is not a sink: it needs the methods open\(context\)"):
        UserSink(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([ARROW, ARROW], ARROW.to_pylist() * 2),
        ([[{"a": 1}, {"a": None}]], [{"a": 1}, {"a": None}]),
        ([[("w", 2)], [["v", 3]]], [{"key": "w", "value": 2}, {"key": "v", "value": 3}]),
        ([[(1, 2.0, "x")]], [{"c0": 1, "c1": 2.0, "c2": "x"}]),
        ([["word"]], [{"value": "word"}]),
        ([[{"a": None}], [{"a": 2.5}], [{"a": 1}]], [{"a": None}, {"a": 2.5}, {"a": 1.0}]),
        ([[{"a": 1}], [{"a": 2.5}], [{"a": None}]], [{"a": 1.0}, {"a": 2.5}, {"a": None}]),
    ],
)
def test_parquet_columns(batches: list[Batch], expected: list[Any], tmp_path: Path) -> None:
    result = run(ParquetSink(tmp_path / "new" / "out"), *batches)
    file = tmp_path / "new" / "out" / "part-3-2.parquet"
    assert result == {"file": str(file), "rows": len(expected)}
    assert list(file.parent.iterdir()) == [file]
    assert pq.read_table(file).to_pylist() == expected


def test_parquet_puts_small_batches_into_one_row_group(tmp_path: Path) -> None:
    batch = pa.record_batch({"n": range(BATCH_ROWS_MAX // 4)})
    run(ParquetSink(tmp_path), *[batch] * 6)
    with pq.ParquetFile(tmp_path / "part-3-2.parquet") as file:
        assert [file.metadata.row_group(i).num_rows for i in range(2)] == [
            BATCH_ROWS_MAX,
            BATCH_ROWS_MAX // 2,
        ]


@pytest.mark.parametrize("turned", [False, True])
def test_parquet_writes_anew_what_needs_wider_types(turned: bool, tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"a": pa.nulls(BATCH_ROWS_MAX)}),
        pa.record_batch({"a": range(BATCH_ROWS_MAX)}),
        pa.record_batch({"a": [0.5] * BATCH_ROWS_MAX}),
        pa.record_batch({"a": [7]}),
    ]
    batches = batches[::-1] if turned else batches
    result = run(ParquetSink(tmp_path), *batches)
    assert result["rows"] == 3 * BATCH_ROWS_MAX + 1
    assert [path.name for path in tmp_path.iterdir()] == ["part-3-2.parquet"]
    table = pq.read_table(tmp_path / "part-3-2.parquet")
    assert table.schema == pa.schema({"a": pa.float64()})
    assert table["a"].to_pylist() == [value for batch in batches for value in batch["a"].to_pylist()]


@pytest.mark.parametrize("turned", [False, True])
def test_parquet_refuses_values_that_would_change(turned: bool, tmp_path: Path) -> None:
    large = pa.record_batch({"a": [2**53 + 1] * BATCH_ROWS_MAX})
    batches = [large, pa.record_batch({"a": [0.5]})]
    with pytest.raises(UsageError, match="a value does not fit .* declare Stream.schema"):
        run(ParquetSink(tmp_path), *(batches[::-1] if turned else batches))


def test_parquet_without_rows_writes_no_file(tmp_path: Path) -> None:
    assert run(ParquetSink(tmp_path), []) == {"file": None, "rows": 0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [1, BATCH_ROWS_MAX])
def test_parquet_of_a_failed_attempt_leaves_nothing(rows: int, tmp_path: Path) -> None:
    batch = pa.record_batch({"n": range(rows)})
    assert run(ParquetSink(tmp_path), batch, finish=False) is None
    assert list(tmp_path.iterdir()) == []


def test_parquet_is_hidden_while_it_is_written(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.open(TaskContext("job", "task", 0, 1, 1))
    sink.process(pa.record_batch({"n": range(BATCH_ROWS_MAX)}), 0, nothing)
    assert [path.name[0] for path in tmp_path.iterdir()] == ["."]
    sink.finish(nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["part-0-1.parquet"]
    sink.close()


def test_parquet_refuses_columns_that_change(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"changed from \(a: int64, b: string\) to \(a: bool, b: string\)"):
        run(ParquetSink(tmp_path), ARROW, pa.record_batch({"a": [True], "b": ["x"]}))
    with pytest.raises(UsageError, match=r"changed from \(a: int64, b: string\) to \(a: double\)"):
        run(ParquetSink(tmp_path), ARROW, pa.record_batch({"a": [1.0]}))
    with pytest.raises(UsageError, match="into the same columns"):
        run(ParquetSink(tmp_path), [(1, 2), (1, 2, 3)])


def test_parquet_refuses_places_that_it_cannot_write_to(tmp_path: Path) -> None:
    run(ParquetSink(tmp_path / "out"), [1])
    with pytest.raises(UsageError, match="already holds Parquet parts"):
        ParquetSink(tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: give the path of a directory"):
        ParquetSink(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot write into"):
        run(ParquetSink(tmp_path / "file" / "below"), [1])
    assert UserSink(Remembering()).close() is None
    assert ParquetSink(tmp_path / "unopened").close() is None


def test_parquet_of_another_job_is_never_replaced(tmp_path: Path) -> None:
    first, second = ParquetSink(tmp_path), ParquetSink(tmp_path)
    for number, sink in enumerate((first, second)):
        sink.open(TaskContext("job", "task", 0, 1, 1))
        sink.process([number + 1], 0, nothing)
    first.finish(nothing)
    with pytest.raises(UsageError, match="is there already: another job has written into that directory"):
        second.finish(nothing)
    assert [sink.close() is None for sink in (first, second)] == [False, True]
    assert [path.suffix for path in tmp_path.iterdir()] == [".parquet"]
    assert pq.read_table(tmp_path).to_pylist() == [{"value": 1}]
