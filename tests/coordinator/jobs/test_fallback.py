"""The return of a whole job to a snapshot."""

from __future__ import annotations

from minishuffle.coordinator.jobs.fallback import BEGINNING, FallbackRecord, JobFallback, RestorePoint
from minishuffle.coordinator.jobs.positions import Resumption

POINTS = [RestorePoint("/s/2", number=2), RestorePoint("/s/1", number=1), BEGINNING]
FOUND = {(0, 0): Resumption(b"here")}


def test_the_newest_snapshot_is_read_and_an_older_one_if_that_cannot_be() -> None:
    back = JobFallback()
    back.begin("j1", POINTS, 0.0)
    assert [(each.work, each.folder, each.savepoint) for each in back.take_work()] == [("open", "/s/2", 1)]
    assert back.under_way and not back.is_read and back.awaits(1, "/s/2")
    assert back.unreadable("j1", 0.0) and not back.awaits(1, "/s/2")
    assert [each.folder for each in back.take_work()] == ["/s/1"]
    back.found(FOUND)
    assert back.is_read
    assert back.end() == (POINTS[1], FOUND)
    assert not back.under_way and back.count == 1


def test_nothing_is_read_for_the_beginning_of_a_job() -> None:
    back = JobFallback()
    back.begin("j1", POINTS[1:], 0.0)
    assert back.unreadable("j1", 0.0) and back.is_read
    assert len(back.take_work()) == 1
    assert back.end() == (BEGINNING, {})


def test_a_job_that_has_nothing_to_go_back_to_says_so() -> None:
    back = JobFallback()
    back.begin("j1", [RestorePoint("/mine")], 0.0)
    assert not back.unreadable("j1", 0.0)
    assert not back.under_way and not back.is_read


def test_a_snapshot_in_which_a_task_finds_its_state_broken_is_read_no_more() -> None:
    back = JobFallback()
    assert back.begin("j1", POINTS, 0.0)
    back.found(FOUND)
    assert back.end()[0] == back.last
    back.pass_over()
    back.pass_over()
    assert back.broken == (2,), "several tasks say so"
    again = JobFallback()
    again.recall(back)
    assert again.begin("j1", POINTS, 0.0)
    assert [each.folder for each in again.take_work()] == ["/s/1"]
    assert not again.begin("j1", POINTS[:1], 0.0) and not again.under_way


def test_the_next_coordinator_reads_again_what_was_being_read() -> None:
    back = JobFallback()
    back.recall(FallbackRecord(3, (RestorePoint("/mine", ("count",), trust=True),)))
    back.read("j1", 0.0)
    (work,) = back.take_work()
    assert (work.folder, work.savepoint, work.trust) == ("/mine", 3, True)


def test_points_have_names_for_events() -> None:
    named = [*POINTS, RestorePoint("s3://key:word@bucket/saved")]
    assert list(map(str, named)) == [
        "durable snapshot 2",
        "durable snapshot 1",
        "its beginning",
        "savepoint s3://bucket/saved",
    ]
