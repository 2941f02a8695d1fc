"""The state of tasks that move: who keeps it, who is told, and what counts as lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.jobs.movedstate import go_on_with_state
from minishuffle.counters import TaskCounters
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import ErrorInfo, ReleaseJob, Shutdown, TaskSpec, TasksRestarted
from minishuffle.wire.requests import DrainWorker, GetEvents

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

READ, COUNT = 0, 1
Key = tuple[str, int, int]


def events(cluster: FakeCluster, job: str) -> list[str]:
    found = cluster.request(GetEvents(job=job)).events
    return [event.text for event in found if event.kind in ("state moved", "state lost")]


def move(cluster: FakeCluster, worker: FakeWorker, job: str, **fields: Any) -> None:
    """The worker is drained, and its tasks of subtask 0 end at the barrier; the count keeps 100 bytes."""
    cluster.request(DrainWorker(worker=worker.worker))
    cluster.report(worker, (job, READ, 0), "canceled", moved=True)
    kept = {"moved": True, "state_bytes": 100} | fields
    counters = TaskCounters(records_in=30, rows_done=30, state_rows=7)
    cluster.report(worker, (job, COUNT, 0), "canceled", counters=counters, **kept)


def spec_of(worker: FakeWorker, key: Key) -> TaskSpec:
    return worker.tasks[key]


@pytest.fixture
def key(job: str) -> Key:
    return job, COUNT, 0


def test_the_next_attempt_reads_the_state_and_the_worker_leaves_when_it_has(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    spec = spec_of(two, key)
    assert (spec.state_worker, spec.state_attempt, spec.attempt) == (1, 1, 2)
    assert spec_of(two, (job, READ, 0)).state_attempt == 0, "it has moved without any"
    (released,) = one.got(ReleaseJob)
    assert [(each.operator, each.attempt) for each in released.attempts] == [(READ, 1)]
    told = [each for message in one.got(TasksRestarted) for each in message.tasks]
    assert [(each.operator, each.attempt, each.worker) for each in told] == [(COUNT, 2, 2)]
    assert not one.got(Shutdown), "it is needed until the state was read"
    cluster.report(two, key, "running", attempt=2)
    assert not one.states and len(one.got(Shutdown)) == 1
    info = cluster.show(job)
    assert (info.state_rows_lost, info.rows_dropped, info.rows_in_flight) == (0, {}, 0)
    assert events(cluster, job) == ["count[0] goes on with the state of attempt 1, from worker 1"]


def test_a_job_whose_tasks_have_moved_with_their_state_has_lost_nothing(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    for each, spec in list(two.tasks.items()):
        cluster.report(two, each, "running", attempt=spec.attempt)
        cluster.report(two, each, "finished", attempt=spec.attempt)
    assert cluster.show(job).state == "finished"


def test_a_worker_that_dies_takes_the_state_with_it(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    """The attempt that was to read it begins without, and says so."""
    one, two = pair
    move(cluster, one, job)
    cluster.lose(one)
    assert cluster.show(job).state_rows_lost == 0, "it may have been read"
    cluster.report(two, key, "running", attempt=2, state_lost="worker 1 was declared lost")
    assert cluster.show(job).state_rows_lost == 7
    assert events(cluster, job) == [
        "count[0] begins without the state of attempt 1, which worker 1 kept: worker 1 was declared lost"
    ]


def test_state_that_is_gone_before_the_next_attempt_begins_is_not_asked_for(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    cluster.lose(one)
    cluster.report(two, key, "abandoned", attempt=2)
    spec = spec_of(two, key)
    assert (spec.attempt, spec.state_attempt) == (3, 0)
    cluster.report(two, key, "running", attempt=3)
    assert cluster.show(job).state_rows_lost == 7
    (text,) = events(cluster, job)
    assert text.endswith("that worker is gone")


def test_state_waits_for_the_attempt_after_one_that_was_abandoned(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    cluster.report(two, key, "abandoned", attempt=2)
    spec = spec_of(two, key)
    assert (spec.attempt, spec.state_worker, spec.state_attempt) == (3, 1, 1)
    cluster.report(two, key, "running", attempt=3)
    assert not one.states and cluster.show(job).state_rows_lost == 0


def test_no_second_attempt_fails_of_the_same_state(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    error = ErrorInfo(code=60, text="what was pickled cannot be read")
    cluster.report(two, key, "failed", attempt=2, error=error)
    cluster.advance(1.0)
    assert (spec_of(two, key).attempt, spec_of(two, key).state_attempt) == (3, 0)
    assert not one.states and cluster.show(job).state_rows_lost == 7


def test_a_task_that_cannot_keep_its_state_says_why(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job, moved=False, state_bytes=0, state_lost="the disk is full")
    assert spec_of(two, key).state_attempt == 0 and cluster.show(job).state_rows_lost == 7
    assert events(cluster, job) == ["count[0] moves without its state: the disk is full"]


def test_the_next_coordinator_has_the_state_kept_and_released(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    cluster.lose_coordinator()
    cluster.come_back(one)
    assert one.states == {(*key, 1)}
    cluster.come_back(two)
    cluster.report(two, key, "running", attempt=2)
    assert not one.states and cluster.show(job).state_rows_lost == 0


def test_state_that_was_read_while_its_worker_was_away_is_released_when_it_comes_back(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, key: Key
) -> None:
    one, two = pair
    move(cluster, one, job)
    cluster.break_link(one)
    cluster.report(two, key, "running", attempt=2)
    cluster.come_back(one)
    assert not one.states


def joined(*, kind: Any = "pipelined", partitioner: Any = "hash", input: int = 0, **first: Any) -> JobGraph:
    """A source and a bounded side, which a join reads."""
    ends = {"program": b"program", "parallelism": 2, "bounded": True}
    vertices = [
        Vertex(name="read", operators=["read"], is_source=True, **ends | first),
        Vertex(name="side", operators=["side"], is_source=True, **ends),
        Vertex(name="join", operators=["join"], is_source=False, **ends | first),
    ]
    edges = [
        Edge(source=0, target=2, partitioner="hash"),
        Edge(source=1, target=2, partitioner=partitioner, input=input, kind=kind),
    ]
    return JobGraph(vertices=vertices, edges=edges, settings=JobSettings())


@pytest.mark.parametrize(
    ("graph", "taken"),
    [
        (joined(), {0, 1, 2}),
        (joined(partitioner="broadcast", input=1), {0, 1, 2}),
        (joined(kind="blocking"), set()),
        (joined(kind="blocking", bounded=False), {0}),
    ],
    ids=["pipelined", "read first", "all runs again", "read again"],
)
def test_what_gets_rows_again_goes_on_without_state(graph: JobGraph, taken: set[int]) -> None:
    """It would count them twice; what is read first is no part of the state."""
    assert go_on_with_state(graph) == taken
