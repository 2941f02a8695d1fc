"""Facts come to their job only from the attempt that is current, on the worker that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from minishuffle.coordinator.jobs.attemptreports import PositionRounds, apply_fact, may_wait, refuses
from minishuffle.counters import TaskCounters
from minishuffle.ids import AttemptId
from minishuffle.limits import LEASE_SECONDS
from minishuffle.wire.messages import Standing, TaskReport
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    EndsRead,
    Fact,
    FileCompleted,
    PartitionReadable,
    SourcePositions,
    SplitsDealt,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)
from support.attempts import attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakeCluster
    from minishuffle.coordinator.jobs.job import Job

FACTS: Final[dict[str, Callable[[AttemptId], Fact | TaskReport]]] = {
    "heartbeat": lambda of: TaskReport(attempt=of, counters=TaskCounters()),
    "stands": lambda of: TaskStands(attempt=of, standing=Standing()),
    "positions": lambda of: SourcePositions(attempt=of),
    "splits": lambda of: SplitsDealt(attempt=of, splits=1),
    "file": lambda of: FileCompleted(attempt=of, file=0, path="part", rows=1, bytes=1, checksum=""),
    "rows": lambda of: Collected(attempt=of, payload=b"rows"),
    "readable": lambda of: PartitionReadable(attempt=of, edge=0),
    "ends": lambda of: EndsRead(attempt=of, edge=0, producers=[0]),
    "state": lambda of: TaskStateChanged(attempt=of, state="running"),
    "released": lambda of: TaskReleased(attempt=of, traffic=b""),
}
ALWAYS: Final = {"heartbeat", "ends", "released", "readable"}
"""What counts of an attempt that has finished, too."""


@pytest.fixture
def job(cluster: FakeCluster, make_graph: Any) -> Job:
    cluster.add()
    cluster.submit(make_graph(1, 1))
    return cluster.state._jobs["j1"]


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_counts_of_the_current_attempt_where_it_runs(job: Job, name: str) -> None:
    make = FACTS[name]
    unknown = [(1, attempt(number=2)), (2, attempt()), (1, attempt(7)), (9, attempt())]
    assert not any(apply_fact(job, worker, make(of), 1.0) for worker, of in unknown)
    assert not job.subtasks.changed or name in ("heartbeat", "released"), "the journal has nothing to write"
    assert apply_fact(job, 1, make(attempt()), 1.0)
    assert apply_fact(job, 1, TaskStateChanged(attempt=attempt(), state="finished"), 1.0)
    assert apply_fact(job, 1, make(attempt()), 1.0) is (name in ALWAYS)


def test_a_file_that_is_not_listed_is_refused(job: Job) -> None:
    file = FACTS["file"](attempt())
    assert isinstance(file, FileCompleted)
    assert (
        refuses(job, file)
        and refuses(None, file)
        and not refuses(None, EndsRead(attempt=attempt(), edge=0, producers=[]))
    )
    assert apply_fact(job, 1, file, 1.0) and not refuses(job, file)


def test_what_waits_for_the_journal_waits_as_long_as_all_may() -> None:
    def within(*seconds: float) -> float:
        facts: list[Fact] = [SourcePositions(attempt=attempt(), within=each) for each in seconds]
        return may_wait(AttemptReport(term=1, facts=facts))

    assert (within(0.2, 0.1), within(0.2, 0.0)) == (0.1, 0.0)
    readable = PartitionReadable(attempt=attempt(), edge=0)
    moved = SourcePositions(attempt=attempt(), within=0.1)
    assert may_wait(AttemptReport(term=1, facts=[moved, readable])) == 0.0


def test_a_round_of_positions_is_complete_once_all_that_reported_lately_have_again() -> None:
    rounds = PositionRounds()
    assert rounds.note(1, 0.001), "nobody else is known"
    rounds.end(0.002)
    assert not rounds.note(2, 0.003)
    rounds.end(0.01)
    rounds.end(0.02)
    for worker, complete in ((2, False), (2, False), (1, True), (2, True)):
        assert rounds.note(worker, LEASE_SECONDS) is complete
    rounds.end(LEASE_SECONDS)
    assert not rounds.note(1, 2 * LEASE_SECONDS)
    rounds.end(3 * LEASE_SECONDS)
    assert rounds.note(1, 3 * LEASE_SECONDS), "worker 2 has not reported for two leases"
