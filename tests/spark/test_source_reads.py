"""How results are cut into tasks and micro-batches; no JVM is needed for that."""

from __future__ import annotations

import dataclasses
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from minishuffle.errors import TaskCancelled, TaskFailed, UsageError
from minishuffle.remote.access import Access
from minishuffle.remote.reader import ResultInfo, SubtaskRows
from minishuffle.spark import source
from minishuffle.spark.source import ResultBatchReader, ResultStreamReader, Rows, shares

pytestmark = pytest.mark.extra

ACCESS = Access("127.0.0.1", 1, "local", b"secret")
SCHEMA = pa.schema([("id", pa.int64())])
ALL = ReadAllAvailable()


class Results:
    """A coordinator that knows one job; what is asked and committed is kept."""

    def __init__(self, *ends: int) -> None:
        subtasks = [SubtaskRows(subtask, 0, end) for subtask, end in enumerate(ends)]
        schema = pa.schema([("id", pa.int64())])
        self.info = ResultInfo(
            "j7", "flights", "result", schema, False, "running", False, 1_700_000_000.25, "", subtasks
        )
        self.asked: list[str] = []
        self.committed: list[tuple[str, dict[int, int]]] = []

    def describe(
        self, access: Access, job: str, sink: str | None = None, *, away_seconds: float = 0.0
    ) -> ResultInfo:
        self.asked.append(job)
        return self.info

    def wait(
        self, access: Access, job: str, sink: str | None, timeout: float | None, *, allow_loss: bool
    ) -> ResultInfo:
        return self.info

    def commit(self, access: Access, job: str, sink: str, offsets: dict[int, int]) -> None:
        self.committed.append((job, offsets))

    def grow(self, *ends: int) -> None:
        rows = [SubtaskRows(subtask, 0, end) for subtask, end in enumerate(ends)]
        self.info = dataclasses.replace(self.info, subtasks=rows)

    def change(self, **changes: object) -> None:
        self.info = dataclasses.replace(self.info, **changes)  # type: ignore[arg-type]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Results:
    found = Results(10, 0, 100)
    monkeypatch.setattr(source, "describe_result", found.describe)
    monkeypatch.setattr(source, "wait_result", found.wait)
    monkeypatch.setattr(source, "commit_result", found.commit)
    return found


def rows_of(offset: dict[str, int | str]) -> list[int]:
    return [int(offset[name]) for name in offset if name != "job"]


def test_a_batch_read_takes_every_row_once_in_tasks_of_a_bounded_size(results: Results) -> None:
    results.grow(5_000_001, 0, 3)
    partitions = ResultBatchReader(ACCESS, SCHEMA, "flights", "", timeout=1.0, allow_loss=False).partitions()
    assert all(isinstance(rows, Rows) and rows.job == "j7" for rows in partitions)
    taken = [(rows.subtask, rows.begin, rows.end) for rows in partitions if isinstance(rows, Rows)]
    # The subtasks in turn.
    assert taken == [(0, 0, 1_666_667), (2, 0, 3), (0, 1_666_667, 3_333_334), (0, 3_333_334, 5_000_001)]


def test_a_stream_goes_from_offset_to_offset(results: Results) -> None:
    reader = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0)
    start = reader.initialOffset()
    assert rows_of(start) == [0, 0, 0]
    end = reader.latestOffset(start, ALL)
    assert rows_of(end) == [10, 0, 100]
    assert reader.partitions(start, end) == [Rows("j7", "result", 0, 0, 10), Rows("j7", "result", 2, 0, 100)]
    assert not results.committed
    reader.commit(end)
    assert results.committed == [("j7", {0: 10, 1: 0, 2: 100})]
    assert json.dumps(reader.latestOffset(end, ALL)) == json.dumps(end)


def test_a_batch_is_committed_though_no_rows_follow_it(results: Results) -> None:
    """Spark commits it with the next one, for which the job may wait for that."""
    reader = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    for _ in range(2):
        reader.latestOffset(end, ALL)
        reader.commit(end)
    assert results.committed == [("j7", {0: 10, 1: 0, 2: 100})]
    again = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0)
    again.latestOffset(end, ALL)
    assert len(results.committed) == 2, "the query before may have been stopped in between"


def test_a_limited_batch_takes_something_of_every_subtask(results: Results) -> None:
    results.grow(1000, 4, 1000)
    reader = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 100)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(100)
    assert rows_of(reader.latestOffset(reader.initialOffset(), limit)) == [48, 4, 48]


def test_available_now_reads_no_further_than_what_there_was(results: Results) -> None:
    reader = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 60)
    reader.prepareForTriggerAvailableNow()
    start, seen = reader.initialOffset(), []
    for _ in range(4):
        start = reader.latestOffset(start, ReadMaxRows(60))
        seen.append(rows_of(start))
        results.grow(999, 999, 999)
    assert seen == [[10, 0, 50], [10, 0, 100], [10, 0, 100], [10, 0, 100]]


def test_a_query_stays_with_the_job_that_it_began_with(results: Results) -> None:
    start = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0).initialOffset()
    later = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0)
    end = later.latestOffset(start, ALL)
    assert results.asked == ["flights", "j7"]
    later.commit(end)
    assert results.committed[0][0] == "j7"


@pytest.mark.parametrize("option, submitted_at", [("other", 1_700_000_000.25), ("j7", 1_800_000_000.0)])
def test_a_checkpoint_of_another_job_is_refused(results: Results, option: str, submitted_at: float) -> None:
    start = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0).initialOffset()
    results.change(submitted_at=submitted_at)
    with pytest.raises(UsageError, match=f"another job than {option!r}, job j7: name another checkpoint"):
        ResultStreamReader(ACCESS, SCHEMA, option, "result", 0).latestOffset(start, ALL)


def test_a_job_that_failed_ends_the_query_once_its_rows_are_read(results: Results) -> None:
    reader = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0)
    start = reader.initialOffset()
    results.change(state="failed", terminal=True, cause="no sevens")
    end = reader.latestOffset(start, ALL)
    assert rows_of(end) == [10, 0, 100]
    with pytest.raises(TaskFailed, match=r"job j7 \(flights\) failed: no sevens"):
        reader.latestOffset(end, ALL)


def test_a_job_that_was_cancelled_ends_the_query_once_its_rows_are_read(results: Results) -> None:
    reader = ResultStreamReader(ACCESS, SCHEMA, "flights", "result", 0)
    start = reader.initialOffset()
    results.change(state="canceling")
    end = reader.latestOffset(start, ALL)
    assert reader.latestOffset(end, ALL) == end, "more may come"
    results.change(state="canceled", terminal=True)
    results.grow(10, 1, 100)
    end = reader.latestOffset(end, ALL)
    assert rows_of(end) == [10, 1, 100]
    with pytest.raises(TaskCancelled, match=r"job j7 \(flights\) was cancelled"):
        reader.latestOffset(end, ALL)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 3000))
def test_shares_fill_a_batch_and_starve_nobody(waiting: list[int], room: int) -> None:
    taken = shares(waiting, room)
    assert sum(taken) == min(sum(waiting), room)
    assert all(0 <= mine <= there for mine, there in zip(taken, waiting, strict=True))
    for mine, there in zip(taken, waiting, strict=True):
        assert mine == there or mine >= min(there, room // len(waiting))
