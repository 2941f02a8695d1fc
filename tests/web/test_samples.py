"""Ten minutes of a job and its worker, looked at at times that the test sets."""

from __future__ import annotations

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.web.samples import KEPT_SECONDS, SAMPLE_SECONDS, SAMPLES_KEPT, Samples
from minishuffle.wire.messages import WorkerReport
from support.coordinators import ScriptedCoordinator


class Watched:
    """A job of two subtasks that are looked at."""

    def __init__(self) -> None:
        self.coordinator = ScriptedCoordinator()
        self.job = self.coordinator.submit()
        self.samples = Samples()
        self.at = 0.0

    def look(self, source: TaskCounters | None = None, sink: TaskCounters | None = None) -> None:
        """After a heartbeat with what the two have counted, or without one."""
        counted = {(self.job, number, 0): each for number, each in enumerate((source, sink)) if each}
        self.coordinator.heartbeat(counted)
        self.at += SAMPLE_SECONDS
        self.samples.look(*self.coordinator.look(), self.at)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_sample_is_what_tasks_did_since_the_last_look(watched: Watched) -> None:
    watched.look(TaskCounters(busy_seconds=10.0, records_out=1000), TaskCounters(idle_seconds=10.0))
    assert watched.samples.loads(watched.job) == [], "nobody knows since when"
    watched.look(
        TaskCounters(busy_seconds=10.5, backpressured_seconds=1.5, records_out=1600),
        TaskCounters(idle_seconds=10.0, busy_seconds=2.0, records_in=600),
    )
    read, count = watched.samples.loads(watched.job)
    assert (read.level, read.backpressured, read.busy, read.records_out) == ("HIGH", 0.75, 0.25, 300.0)
    assert (count.level, count.busy, count.records_in) == ("OK", 1.0, 300.0)
    found = watched.samples.of_job(watched.job, 0)
    assert (found.next, found.at) == (2, [2.0, 4.0])
    assert [vertex.name for vertex in found.vertices] == ["read", "count"]
    assert found.vertices[0].backpressured == [None, 0.75]
    assert found.vertices[1].records_in == [None, 300.0]


def test_what_was_silent_has_no_sample(watched: Watched) -> None:
    watched.look(TaskCounters(busy_seconds=1.0), TaskCounters(busy_seconds=1.0))
    watched.look(TaskCounters(busy_seconds=2.0), TaskCounters(busy_seconds=1.0))
    read, count = watched.samples.of_job(watched.job, 1).vertices
    assert (read.busy, count.busy) == ([1.0], [None])


def test_the_next_attempt_counts_from_zero(watched: Watched) -> None:
    watched.look(TaskCounters(busy_seconds=9.0, records_out=90), TaskCounters(busy_seconds=9.0))
    watched.coordinator.report(watched.job, 1, 0, "failed")
    watched.coordinator.now += 10.0
    watched.coordinator._carry_out(watched.coordinator.state.handle_timer(watched.coordinator.now))
    watched.coordinator.report(watched.job, 1, 0, "running")
    watched.look(TaskCounters(busy_seconds=10.0), TaskCounters(busy_seconds=2.0, records_in=8))
    count = watched.samples.of_job(watched.job, 1).vertices[1]
    assert (count.busy, count.records_in) == ([1.0], [4.0])


def test_a_reader_gets_what_it_does_not_have_and_the_oldest_are_dropped(watched: Watched) -> None:
    for number in range(SAMPLES_KEPT + 5):
        watched.look(TaskCounters(busy_seconds=1.0 + number))
    found = watched.samples.of_job(watched.job, 0)
    assert (found.next, len(found.at)) == (SAMPLES_KEPT + 5, SAMPLES_KEPT)
    assert found.at[-1] - found.at[0] == pytest.approx(KEPT_SECONDS - SAMPLE_SECONDS)
    assert len(watched.samples.of_job(watched.job, SAMPLES_KEPT).at) == 5
    assert watched.samples.of_job(watched.job, found.next).at == []
    of_an_earlier_term = found.next + 9
    assert len(watched.samples.of_job(watched.job, of_an_earlier_term).at) == SAMPLES_KEPT
    assert len(watched.samples.of_workers(found.next - 2).at) == 2


def test_a_job_that_has_ended_is_kept_for_ten_minutes(watched: Watched) -> None:
    watched.look(TaskCounters(busy_seconds=1.0))
    for operator in (0, 1):
        watched.coordinator.report(watched.job, operator, 0, "finished")
    watched.samples.look(*watched.coordinator.look(), watched.at + KEPT_SECONDS - 0.5)
    assert len(watched.samples.of_job(watched.job, 0).at) == 1
    watched.samples.look(*watched.coordinator.look(), watched.at + KEPT_SECONDS)
    assert watched.samples.of_job(watched.job, 0).at == []
    assert watched.samples.of_job("j9", 0).vertices == []


def test_workers_say_how_late_their_loops_are_and_what_is_in_use(watched: Watched) -> None:
    coordinator = watched.coordinator
    total = coordinator.look()[1][0].about.segments
    coordinator.heartbeat({}, WorkerReport(loop_lag_seconds=0.125, segments_free=total - 7))
    watched.samples.look(*coordinator.look(), 2.0)
    coordinator.state.link_closed(1, coordinator.now)
    watched.samples.look(*coordinator.look(), 4.0)
    (worker,) = watched.samples.of_workers(0).workers
    assert (worker.worker, worker.loop_lag, worker.segments_used) == (1, [0.125, None], [7.0, None])
