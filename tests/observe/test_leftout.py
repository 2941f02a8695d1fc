"""What is said of records that a job left out."""

from __future__ import annotations

from minishuffle.counters import TaskCounters
from minishuffle.observe.leftout import left_out, left_out_texts
from minishuffle.wire.requests import JobInfo, TaskInfo


def job(*counters: TaskCounters, **fields: dict[str, int]) -> JobInfo:
    tasks = [
        TaskInfo(
            operator=0, name="map", index=index, attempt=1, state="finished", worker=1, counters=each
        )
        for index, each in enumerate(counters)
    ]  # fmt: skip
    return JobInfo(job="j7", name="n", state="finished", submitted_at=0.0, tasks=tasks, **fields)  # type: ignore[arg-type]


def test_a_job_that_left_nothing_out_says_nothing() -> None:
    """Late records that a side output took are not left out."""
    info = job(TaskCounters(records_in=5, records_late=3))
    assert left_out(info) == {}
    assert left_out_texts(info) == []


def test_what_all_subtasks_left_out_is_counted_by_what_became_of_it() -> None:
    info = job(
        TaskCounters(records_late=2, late_dropped=2, user_errors={"skip": 1}),
        TaskCounters(user_errors={"skip": 1000, "dead_letter": 1}, rows_skipped=5),
        rows_dropped={"failed_batch": 6, "queue_discarded": 1},
    )
    assert left_out(info) == {"late": 2, "skipped": 1001, "dead_letters": 1, "never_made": 5, "dropped": 7}
    lines = left_out_texts(info)
    assert lines[1].startswith("1,001 records were skipped")
    assert lines[2] == ("1 record is a dead letter (on_error='dead_letter'): see 'minishuffle jobs logs j7'")
    assert len(lines) == 5
    assert left_out_texts(info.model_copy(update={"state": "finished_with_loss"})) == lines[:4]
