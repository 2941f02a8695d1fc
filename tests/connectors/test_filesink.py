"""The file sink: what its parts hold, when they appear, and what an attempt that died has left behind."""

from __future__ import annotations

import hashlib
import resource
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from minishuffle.connectors.filesink import FileSink, Roll
from minishuffle.errors import CannotWrite, LocalProtocolError, ResourceExhausted, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX, FILE_SNAPSHOT_BYTES_MAX, FILE_SNAPSHOT_SECONDS_MAX, MIB
from minishuffle.operators.base import TaskContext
from support.batches import as_batch
from support.listing import Listing

ARROW = pa.record_batch({"a": [1, 2], "b": ["x", None]})
NEVER = Roll(seconds=1e9, rows=1 << 60, bytes=1 << 60)


class Clock:
    now = 1000.0


def nothing(batch: Any) -> None:
    raise AssertionError(f"a sink emits nothing, and not {batch!r}")


def opened(
    path: Path, listing: Listing, roll: Roll = NEVER, *, attempt: int = 2, sink: FileSink | None = None
) -> FileSink:
    """A sink of subtask 3, at that attempt."""
    made: FileSink = cloudpickle.loads(cloudpickle.dumps(sink or FileSink(path, roll)))
    made.open(TaskContext("j1", "task", 3, 4, attempt, now=lambda: Clock.now, files=listing))
    return made


def run(path: Path, *batches: Any, finish: bool = True, roll: Roll = NEVER) -> Any:
    """``batches``: lists of rows, or record batches of one schema."""
    schema = batches[0].schema if isinstance(batches[0], pa.RecordBatch) else None
    sink = opened(path, Listing(), sink=FileSink(path, roll, schema))
    for batch in batches:
        sink.process(as_batch(batch), 0, nothing)
    if finish:
        sink.finish(nothing)
    return sink.close()


def visible(path: Path) -> list[str]:
    """The files that readers take for data."""
    return sorted(each.name for each in path.iterdir() if not each.name.startswith((".", "_")))


def rows_of(path: Path) -> list[Any]:
    """As Spark, pyarrow and pandas read a directory."""
    return ds.dataset(path, format="parquet").to_table().to_pylist() if visible(path) else []


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
def test_columns(batches: list[Batch], expected: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "out"
    assert run(path, *batches) == {"files": 1, "rows": len(expected)}
    assert [each.name for each in path.iterdir()] == ["part-00003-2-00000.parquet"]
    assert rows_of(path) == expected


def test_small_batches_make_one_row_group(tmp_path: Path) -> None:
    batch = pa.record_batch({"n": range(BATCH_ROWS_MAX // 4)})
    run(tmp_path, *[batch] * 6)
    with pq.ParquetFile(tmp_path / "part-00003-2-00000.parquet") as file:
        assert [file.metadata.row_group(i).num_rows for i in range(2)] == [
            BATCH_ROWS_MAX,
            BATCH_ROWS_MAX // 2,
        ]


def parts(path: Path) -> list[tuple[pa.Schema, list[Any]]]:
    """The types of each part, in order, and its rows without those that repeat the one before."""
    tables = [pq.read_table(path / name) for name in visible(path)]
    return [(each.schema, [row for row, _ in groupby(each.to_pylist())]) for each in tables]


def test_a_row_that_does_not_fit_begins_the_next_part_in_types_that_hold_all(tmp_path: Path) -> None:
    """Also where rows of the former types come again, and none of them is written anew."""
    whole = BATCH_ROWS_MAX
    batches: list[Any] = [
        [{"a": None}] * whole,
        [{"a": 2**53 + 1}] * whole,
        [{"a": 0.5}, {"a": 7}, {"a": 0.5, "b": "x"}],
    ]
    log: list[str] = []
    sink = opened(tmp_path, Listing())
    sink.context.log = log.append
    for batch in batches:
        sink.process(as_batch(batch), 0, nothing)
    sink.finish(nothing)
    assert sink.close() == {"files": 3, "rows": 2 * whole + 3}
    assert parts(tmp_path) == [
        (pa.schema({"a": pa.null()}), [{"a": None}]),
        (pa.schema({"a": pa.int64()}), [{"a": 2**53 + 1}]),
        (
            pa.schema({"a": pa.float64(), "b": pa.string()}),
            [{"a": 0.5, "b": None}, {"a": 7.0, "b": None}, {"a": 0.5, "b": "x"}],
        ),
    ]
    assert log == [
        f"to_files: part-00003-2-00000.parquet ends after {whole:,} rows, since the next one needs "
        "'a' as int64 instead of null",
        f"to_files: part-00003-2-00001.parquet ends after {whole:,} rows, since the next one needs "
        "'a' as double instead of int64",
    ]


def test_the_rows_before_the_one_that_does_not_fit_stay_in_their_part(tmp_path: Path) -> None:
    later = [{"a": 2}, {"a": True}, {"a": 3}, {"a": 0.5}, {"a": 4}, {"a": 1, "b": 5}]
    run(tmp_path, [{"a": 1}] * BATCH_ROWS_MAX, later)
    assert parts(tmp_path) == [
        (pa.schema({"a": pa.int64()}), [{"a": 1}, {"a": 2}, {"a": 1}, {"a": 3}]),
        (
            pa.schema({"a": pa.float64(), "b": pa.int64()}),
            [{"a": 0.5, "b": None}, {"a": 4.0, "b": None}, {"a": 1.0, "b": 5}],
        ),
    ]


def test_the_next_attempt_goes_on_in_the_types_of_the_last(tmp_path: Path) -> None:
    made, listing = FileSink(tmp_path, NEVER), Listing()
    run(tmp_path, [{"a": 0.5, "b": "x"}])
    listing.listed = {1: 0, 2: 1}
    sink = opened(tmp_path, listing, attempt=3, sink=made)
    sink.process(as_batch([{"a": 1}]), 0, nothing)
    sink.finish(nothing)
    types = pa.schema({"a": pa.float64(), "b": pa.string()})
    assert parts(tmp_path) == [(types, [{"a": 0.5, "b": "x"}]), (types, [{"a": 1.0, "b": None}])]


def test_a_row_with_no_type_in_common_fails_with_column_and_types(tmp_path: Path) -> None:
    first = [{"a": 1}] * BATCH_ROWS_MAX
    with pytest.raises(
        UsageError, match="column 'a' has values of the types int64 and string, which have none"
    ):
        run(tmp_path, first, [{"a": "x"}])
    with pytest.raises(
        UsageError, match="column 'a': the value 9007199254740993 does not fit the type double"
    ):
        run(tmp_path, [{"a": 0.5}] * BATCH_ROWS_MAX, [{"a": 2**53 + 1}])
    assert visible(tmp_path) == []


def test_without_rows_there_is_no_file(tmp_path: Path) -> None:
    assert run(tmp_path, []) == {"files": 0, "rows": 0}
    assert list(tmp_path.iterdir()) == []


def test_a_table_without_rows_gives_one_file_with_its_columns(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, NEVER, ARROW.schema)
    for index, earlier, expected in ((3, {}, 0), (0, {1: 2}, 0), (0, {1: 0}, 1)):
        listing = Listing()
        listing.listed = earlier
        made: FileSink = cloudpickle.loads(cloudpickle.dumps(sink))
        made.open(TaskContext("j1", "task", index, 4, 2, files=listing))
        made.finish(nothing)
        assert made.close() == {"files": expected, "rows": 0}
    assert ds.dataset(tmp_path, format="parquet").to_table().equals(pa.Table.from_batches([], ARROW.schema))


def test_files_of_a_table_have_its_types_however_its_batches_come(tmp_path: Path) -> None:
    texts = pa.array(["x"] * BATCH_ROWS_MAX)
    schema = pa.schema({"c": texts.dictionary_encode().type})
    sink = opened(tmp_path, Listing(), sink=FileSink(tmp_path, NEVER, schema))
    for column in (texts.dictionary_encode(), texts, texts.dictionary_encode()):
        sink.process(Batch(pa.record_batch({"c": column})), 0, nothing)
    sink.finish(nothing)
    assert parts(tmp_path) == [(schema, [{"c": "x"}])]


@pytest.mark.parametrize("rows", [1, BATCH_ROWS_MAX])
def test_a_failed_attempt_leaves_no_part_that_was_not_complete(rows: int, tmp_path: Path) -> None:
    assert run(tmp_path, pa.record_batch({"n": range(rows)}), finish=False) == {"files": 0, "rows": 0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("turned", [False, True])
def test_a_column_that_only_some_batches_have_is_null_in_the_others(turned: bool, tmp_path: Path) -> None:
    batches: list[Any] = [[{"a": 1}], [{"a": 1, "b": "x"}]]
    run(tmp_path, *(batches[::-1] if turned else batches))
    (path,) = tmp_path.iterdir()
    found = pq.read_table(path).to_pylist()
    assert len(found) == len(batches[0]) + 1
    assert sorted(set(map(str, found))) == ["{'a': 1, 'b': 'x'}", "{'a': 1, 'b': None}"]


def test_rows_of_other_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="into the same columns"):
        run(tmp_path, [(1, 2), (1, 2, 3)])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            pa.record_batch({"ok": [1], "t": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}),
            "nothing for column 't' of type month_day_nano_interval",
        ),
        (
            pa.record_batch({"t": pa.array([100], pa.decimal128(5, -2))}),
            r"column 't' of type decimal128\(5, -2\)",
        ),
        (pa.record_batch({"t": pa.array([{}], pa.struct([]))}), "column 't' of type struct<>"),
        (pa.RecordBatch.from_arrays([pa.array([1])] * 2, ["a", "a"]), "two columns of one name"),
    ],
    ids=["interval", "negative scale", "no parts", "one name"],
)
def test_columns_that_parquet_has_no_place_for_are_refused(
    batch: pa.RecordBatch, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        FileSink(tmp_path, NEVER, batch.schema)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_to_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "out", [1])
    with pytest.raises(UsageError, match="already holds Parquet files"):
        FileSink(tmp_path / "out", NEVER)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".hidden.parquet").touch()
    FileSink(tmp_path / "theirs", NEVER)
    (tmp_path / "theirs" / "1.parquet").touch()
    with pytest.raises(
        UsageError, match=r"already holds Parquet files \(1.parquet\): .*shutil.rmtree, or has the date"
    ):
        FileSink(tmp_path / "theirs", NEVER)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: give the path of a directory"):
        FileSink(tmp_path / "file", NEVER)
    with pytest.raises(CannotWrite, match="cannot write into"):
        opened(tmp_path / "file" / "below", Listing(), attempt=1)
    with pytest.raises(UsageError, match="cannot write into") as restarted:
        run(tmp_path / "file" / "below", [1])
    assert restarted.type is UsageError, "the first attempt could: this may pass"
    assert FileSink(tmp_path / "unopened", NEVER).close() is None
    with pytest.raises(LocalProtocolError, match="nobody to report its files to"):
        FileSink(tmp_path / "new", NEVER).open(TaskContext("j1", "task", 0, 1, 1))


# --- rolling --------------------------------------------------------------------------------------


def test_a_part_is_complete_with_so_many_rows_whatever_the_batches(tmp_path: Path) -> None:
    sink = opened(tmp_path, listing := Listing(), Roll(1e9, 40, 1 << 60))
    for first in range(0, 100, 10):
        sink.process(Batch([{"n": n} for n in range(first, first + 10)]), 0, nothing)
    sink.process(Batch([{"n": n} for n in range(100, 185)]), 0, nothing)
    assert [file.rows for file in listing.heard] == [40, 40, 40, 40]
    sink.finish(nothing)
    assert sink.close() == {"files": 5, "rows": 185}
    assert sink.context.counters.rows_filed == 185
    assert sorted(row["n"] for row in rows_of(tmp_path)) == list(range(185))


def test_a_file_that_finds_no_room_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(ResourceExhausted, match=r"part-00003.* cannot be written: File too large; see"):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            run(tmp_path, pa.record_batch({"a": pa.array(range(50_000))}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_part_is_complete_with_so_many_bytes(tmp_path: Path) -> None:
    roll = Roll(1e9, 1 << 60, 100_000)
    sink = FileSink(tmp_path, roll, pa.schema({"b": pa.binary()}))
    sink = opened(tmp_path, listing := Listing(), sink=sink)
    noise = hashlib.shake_256(b"x").digest(3 * MIB)
    for at in range(0, len(noise), 10_000):
        sink.process(Batch(pa.record_batch({"b": [noise[at : at + 10_000]]})), 0, nothing)
    sink.finish(nothing)
    sizes = [file.bytes for file in listing.heard]
    assert len(sizes) > 20
    assert all(100_000 <= size < 130_000 for size in sizes[:-1])


def test_a_part_is_complete_so_long_after_its_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path, listing := Listing(), Roll(5.0, 1 << 60, 1 << 60))
    assert sink.deadline() is None
    sink.process(Batch([1]), 0, nothing)
    assert sink.deadline() == 1005.0
    monkeypatch.setattr(Clock, "now", 1004.0)
    sink.process(Batch([2]), 0, nothing)
    sink.on_clock(1004.0, nothing)
    assert listing.heard == []
    sink.on_clock(1005.0, nothing)
    assert [file.rows for file in listing.heard] == [2]
    assert sink.deadline() is None, "no row waits"
    assert rows_of(tmp_path) == [{"value": 1}, {"value": 2}]


def test_types_once_given_are_kept_for_the_parts_behind(tmp_path: Path) -> None:
    run(tmp_path, [{"a": 2.5}, {"a": 1}, {"a": None}], roll=Roll(1e9, 1, 1 << 60))
    schemas = [pq.read_schema(tmp_path / name) for name in visible(tmp_path)]
    assert len(schemas) == 3 and set(schemas) == {pa.schema({"a": pa.float64()})}


# --- listed, and only then there -----------------------------------------------------------------------


def test_a_part_is_hidden_until_it_is_listed(tmp_path: Path) -> None:
    listing = Listing(at_once=False)
    sink = opened(tmp_path, listing, Roll(1e9, 2, 1 << 60))
    sink.process(Batch([1, 2, 3, 4, 5]), 0, nothing)
    assert len(listing.heard) == 2 and rows_of(tmp_path) == []
    listing.acknowledged = 1
    assert sink.deadline() == 0.0
    sink.on_clock(1000.0, nothing)
    assert visible(tmp_path) == ["part-00003-2-00000.parquet"]
    sink.finish(nothing)
    assert len(listing.heard) == 3
    assert [row["value"] for row in rows_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(list(tmp_path.iterdir())) == 3, "nothing hidden is left"


def test_what_precedes_a_barrier_is_complete_and_listed(tmp_path: Path) -> None:
    """A task that moves, or is paused, leaves no open part."""
    sink = opened(tmp_path, listing := Listing())
    sink.on_barrier(nothing)
    assert not listing.heard, "nothing was written"
    for batch in ([1, 2], [3]):
        sink.process(Batch(batch), 0, nothing)
        sink.on_barrier(nothing)
    assert [file.rows for file in listing.heard] == [2, 1]
    assert [row["value"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert sink.close() == {"files": 2, "rows": 3}


def test_what_is_reported_of_a_part_is_what_is_in_the_file(tmp_path: Path) -> None:
    sink = opened(tmp_path, listing := Listing(), Roll(1e9, 2, 1 << 60))
    sink.process(Batch([1, 2]), 0, nothing)
    (file,) = listing.heard
    content = Path(file.path).read_bytes()
    assert (file.rows, file.bytes, file.checksum) == (2, len(content), hashlib.sha256(content).hexdigest())


def test_what_was_complete_survives_a_cancel(tmp_path: Path) -> None:
    listing = Listing(at_once=False)
    sink = opened(tmp_path, listing, Roll(1e9, 2, 1 << 60))
    sink.process(Batch([1, 2, 3, 4, 5]), 0, nothing)

    def list_one_more() -> None:
        listing.acknowledged = 1

    listing.linger = list_one_more  # type: ignore[method-assign]
    assert sink.close() == {"files": 1, "rows": 2}
    assert rows_of(tmp_path) == [{"value": 1}, {"value": 2}]
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(hidden) == 1 and hidden[0].endswith("part-00003-2-00001.parquet"), (
        "the second may be listed all the same: the next attempt knows"
    )


def test_what_nobody_will_list_is_removed_by_a_cancel(tmp_path: Path) -> None:
    listing = Listing(at_once=False)
    sink = opened(tmp_path, listing, Roll(1e9, 2, 1 << 60))
    sink.process(Batch([1, 2, 3, 4, 5]), 0, nothing)
    listing.acknowledged, listing.gives_up = 1, True
    assert sink.close() == {"files": 1, "rows": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["part-00003-2-00000.parquet"]


def died(path: Path, sink: FileSink) -> None:
    """Attempt 2 has left two parts that were reported and one that was not complete."""
    listing = Listing(at_once=False)
    first = opened(path, listing, sink=sink)
    first.process(Batch(list(range(4))), 0, nothing)
    assert len(listing.heard) == 2 and visible(path) == []
    last = next(each for each in path.iterdir() if each.name.endswith("00001.parquet"))
    last.with_name(last.name.replace("00001.parquet", "00002.parquet")).touch()


@pytest.mark.parametrize(("listed", "rows"), [({}, 0), ({2: 1}, 2), ({2: 2, 1: 7}, 4)])
def test_the_next_attempt_names_what_is_listed_and_removes_the_rest(
    listed: dict[int, int], rows: int, tmp_path: Path
) -> None:
    sink = FileSink(tmp_path, Roll(1e9, 2, 1 << 60))
    died(tmp_path, sink)
    others = tmp_path / ".j2.abcdef012345.part-00003-1-00000.parquet"
    others.touch()
    opened(tmp_path, Listing(listed=listed), sink=sink, attempt=4)
    assert [row["value"] for row in rows_of(tmp_path)] == list(range(rows))
    assert {path.name for path in tmp_path.iterdir()} - set(visible(tmp_path)) == {others.name}


def test_a_fenced_attempt_that_goes_on_gets_nothing_listed_and_leaves_nothing(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, Roll(1e9, 2, 1 << 60))
    late, listing = opened(tmp_path, unheard := Listing(at_once=False), sink=sink), Listing(listed={2: 1})
    late.process(Batch([1, 2]), 0, nothing)
    following = opened(tmp_path, listing, sink=sink, attempt=3)
    assert visible(tmp_path) == ["part-00003-2-00000.parquet"]
    unheard.acknowledged = 1  # its acknowledgement was under way when it was fenced
    late.on_clock(0.0, nothing)
    late.process(Batch([3, 4]), 0, nothing)
    following.process(Batch([5]), 0, nothing)
    following.finish(nothing)
    assert [row["value"] for row in rows_of(tmp_path)] == [1, 2, 5]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_part_of_another_job_is_never_replaced(tmp_path: Path) -> None:
    first, second = (opened(tmp_path, Listing()) for _ in range(2))
    first.process(Batch([1]), 0, nothing)
    second.process(Batch([2]), 0, nothing)
    first.finish(nothing)
    with pytest.raises(UsageError, match="is there already: another job has written into that directory"):
        second.finish(nothing)
    assert first.close() == {"files": 1, "rows": 1}
    assert rows_of(tmp_path) == [{"value": 1}]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/tmp/" + "a" * 300, "File name too long"),
        ("~nosuchuser/x", "home directory"),
        ("x\0y", "null"),
        ("\ud800", "surrogate"),
        ("", "it is empty"),
    ],
)
def test_what_can_be_no_path_is_refused_before_the_job_starts(path: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be the path of a directory .*{said}.*: give another"):
        FileSink(path, Roll(1.0, 10, MIB))


# --- snapshots ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [[1, 2.5], [{"a": "x"}, {"a": None}], pa.record_batch({"a": pa.array(["x", "y"]).dictionary_encode()})],
)
def test_a_snapshot_takes_the_rows_of_an_open_part_along(batch: Any, tmp_path: Path) -> None:
    schema = batch.schema if isinstance(batch, pa.RecordBatch) else None
    made = FileSink(tmp_path, NEVER, schema)
    first = opened(tmp_path, before := Listing(held=True), sink=made)
    first.before_snapshot(nothing)
    assert before.sink_state == b""
    for _ in range(2):
        first.process(as_batch(batch), 0, nothing)
    assert not first.defers_snapshot(urgent=False)
    first.before_snapshot(nothing)
    assert first.context.counters.rows_filed == 4 and before.heard == []
    second = opened(tmp_path, Listing(held=True, sink_state=before.sink_state), sink=made, attempt=3)
    second.process(as_batch(batch), 0, nothing)
    second.finish(nothing)
    assert second.close() == {"files": 1, "rows": 6}
    rows = rows_of(tmp_path)
    assert rows == rows[:2] * 3 and len(rows) == 6


def test_an_open_part_in_the_file_holds_snapshots_up_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = Listing(held=True)
    sink = opened(tmp_path, listing)
    large = pa.record_batch({"a": ["x" * (FILE_SNAPSHOT_BYTES_MAX + 1)]})
    sink = opened(tmp_path, listing, sink=FileSink(tmp_path, NEVER, large.schema))
    sink.process(Batch(large), 0, nothing)
    assert sink.defers_snapshot(urgent=False) and not sink.defers_snapshot(urgent=True)
    monkeypatch.setattr(Clock, "now", Clock.now + FILE_SNAPSHOT_SECONDS_MAX)
    assert not sink.defers_snapshot(urgent=False)
    sink.before_snapshot(nothing)
    (file,) = listing.heard
    assert (file.rows, listing.sink_state) == (1, b"")
    (series,) = sink.context.metrics.series()
    assert (series.name, series.value) == ("files_closed_early", 1.0)


def test_parts_from_a_snapshot_get_their_names_once_they_are_listed(tmp_path: Path) -> None:
    made = FileSink(tmp_path, Roll(seconds=1e9, rows=1, bytes=1 << 60))
    first = opened(tmp_path, before := Listing(held=True, at_once=False), sink=made)
    first.process(Batch([1.5, 2, 3]), 0, nothing)
    first.close()
    adopted = [replace(file, attempt=2) for file in before.heard[:2]]
    second = opened(tmp_path, listing := Listing(held=True, adopted=adopted), sink=made, attempt=3)
    assert (visible(tmp_path), second.deadline()) == ([], None)
    assert len(list(tmp_path.iterdir())) == 2, "the third is removed"
    listing.listed = {2: 2}
    assert second.deadline() == 0.0
    second.on_clock(0.0, nothing)
    assert (rows_of(tmp_path), second.deadline()) == ([{"value": 1.5}, {"value": 2.0}], None)


def test_rows_that_are_listed_are_not_written_again(tmp_path: Path) -> None:
    made = FileSink(tmp_path, NEVER)
    first = opened(tmp_path, Listing(held=True), sink=made)
    first.process(Batch([1]), 0, nothing)
    first.before_snapshot(nothing)
    state = first.context.files
    assert state is not None
    first.finish(nothing)
    first.close()
    listing = Listing(held=True, listed={2: 1}, is_complete=True, sink_state=state.sink_state)
    second = opened(tmp_path, listing, sink=made, attempt=3)
    second.process(Batch([1]), 0, nothing)
    second.finish(nothing)
    assert (second.close(), listing.heard) == ({"files": 0, "rows": 0}, [])
    assert rows_of(tmp_path) == [{"value": 1}]
