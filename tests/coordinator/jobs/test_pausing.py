"""Jobs that are paused: barriers go out, come back when attempts end, and are over when a client says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import TaskFailed, UsageError
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import DeployTasks, PauseTasks, Standing, TaskReport
from minishuffle.wire.packed import SplitPosition, pack_positions
from minishuffle.wire.reports import SourcePositions
from minishuffle.wire.requests import CancelJob, GetEvents, PauseJob, ResumeJob, WaitPause

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


def told(worker: FakeWorker) -> list[tuple[int, bool]]:
    return [(each.barrier, each.paused) for each in worker.got(PauseTasks)]


def pause(cluster: FakeCluster, job: str) -> None:
    cluster.request(PauseJob(job=job))
    cluster.stand_all(job)
    assert cluster.show(job).state == "paused"


def metric(cluster: FakeCluster) -> bool:
    """What minishuffle_job_paused is made of."""
    (job,) = cluster.state.snapshot(cluster.now, {}).recoveries
    return job.paused


def event_of(cluster: FakeCluster, kind: str) -> str:
    events = cluster.request(GetEvents(job="j1")).events
    return str([event.text for event in events if event.kind == kind][-1])


def test_a_job_is_paused_when_all_stand_and_runs_again_when_it_is_resumed(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    wait = cluster.ask(WaitPause(job=job, wait_seconds=30.0)) if cluster.request(PauseJob(job=job)) else 0
    assert [told(worker) for worker in pair] == [[(1, True)]] * 2
    one, other = pair
    for worker, key in ((one, READ0), (other, READ1), (one, COUNT0)):
        assert cluster.show(job).state == "pausing" and cluster.reply(wait) is None
        assert not metric(cluster)
        cluster.stand(worker, key)
    cluster.stand(other, COUNT1, barrier=0)
    assert cluster.show(job).state == "pausing"
    cluster.stand(other, COUNT1)
    assert (cluster.reply(wait).state, cluster.show(job).pause) == ("paused", "paused")
    assert metric(cluster)
    cluster.request(PauseJob(job=job))
    cluster.request(ResumeJob(job=job))
    assert cluster.show(job).state == "running" and not metric(cluster)
    assert [told(worker) for worker in pair] == [[(1, True), (1, False)]] * 2
    assert cluster.refusal(ResumeJob(job=job)) == (UsageError.code, "job j1 is running, not paused")
    pause(cluster, job)
    assert told(one)[-1] == (2, True)


def test_heartbeats_say_it_too(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, report_of: Callable[..., Any]
) -> None:
    """A word of a worker is lost with its link, or with the coordinator."""
    cluster.request(PauseJob(job=job))
    for worker in pair:
        cluster.heartbeat(worker, [report_of(worker, key, 1) for key in worker.tasks])
    assert cluster.show(job).state == "paused"


def test_a_job_that_does_not_run_yet_is_paused_once_it_does(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    job = cluster.submit(make_graph())
    cluster.request(PauseJob(job=job))
    assert (cluster.show(job).state, cluster.show(job).pause, told(pair[0])) == ("created", "wanted", [])
    cluster.report_all(job, "running")
    assert told(pair[0]) == [(1, True)]
    cluster.stand_all(job)
    assert cluster.show(job).state == "paused"


def test_an_attempt_that_ends_takes_the_barrier_back_and_another_goes_out_when_the_next_one_runs(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, other = pair
    cluster.request(PauseJob(job=job))
    cluster.stand(one, READ0)
    cluster.fail(other, COUNT1, TaskFailed.code, "boom")
    assert told(one) == told(other) == [(1, True), (1, False)]
    deployed = other.got(DeployTasks)[-1]
    assert (deployed.barrier, deployed.paused) == (1, False)
    assert cluster.show(job).state == "pausing"
    cluster.report(other, COUNT1, "running", attempt=2)
    assert told(one)[-1] == (2, True)
    cluster.stand(one, READ0, barrier=1)  # late
    cluster.stand_all(job)
    assert cluster.show(job).state == "paused"


def test_after_three_barriers_that_attempts_took_back_the_pause_fails(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, other = pair
    cluster.request(PauseJob(job=job))
    for attempt in (1, 2, 3):
        assert told(one)[-1] == (attempt, True)
        cluster.report(other, COUNT1, "failed", attempt=attempt)
        cluster.advance(0.5)
        cluster.report(other, COUNT1, "running", attempt=attempt + 1)
    assert told(one)[-1] == (3, False)
    info = cluster.show(job)
    assert (info.state, info.pause) == ("running", "none")
    assert info.pause_problem == "count[1] restarted, as tasks did in each of 3 tries"


def test_a_pause_that_takes_too_long_is_undone_and_names_the_source(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, other = pair
    cluster.request(PauseJob(job=job))
    cluster.stand(one, READ0)
    cluster.advance(9.9)
    assert cluster.show(job).state == "pausing"
    cluster.advance(0.2)
    info = cluster.show(job)
    assert info.state == "running" and "read[1] did not return" in info.pause_problem
    assert "read[0]" not in info.pause_problem and "count" not in info.pause_problem
    assert told(one) == told(other) == [(1, True), (1, False)]
    assert event_of(cluster, "pause failed") == info.pause_problem


def test_one_that_takes_too_long_names_who_holds_the_sources_up(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, other = pair
    cluster.request(PauseJob(job=job))
    cluster.stand(one, READ0, barrier=0, blocked=True)
    cluster.stand(other, READ1)
    cluster.stand(one, COUNT0)
    cluster.advance(10.1)
    text = "count[1] has not taken all that was on its way to it within 10 s (pause_timeout): see"
    assert cluster.show(job).pause_problem.startswith(text)


def test_one_that_cannot_begin_in_time_names_what_does_not_run(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.request(PauseJob(job=job))
    cluster.lose(pair[1])
    cluster.advance(11.0)
    info = cluster.show(job)
    assert info.state == "running" and "read[1], count[1] did not run within 10 s" in info.pause_problem


def test_a_task_lost_while_the_job_is_paused_begins_behind_the_barrier_and_is_not_waited_for(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, other = pair
    pause(cluster, job)
    third = cluster.add()
    cluster.lose(other)
    deployed = third.got(DeployTasks)[-1]
    assert (deployed.barrier, deployed.paused, cluster.show(job).state) == (1, True, "paused")
    assert told(one) == [(1, True)]
    cluster.request(ResumeJob(job=job))
    assert told(one)[-1] == told(third)[-1] == (1, False)


def test_a_source_lost_while_paused_goes_on_where_it_stood(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """The time of a pause is no time in which it would have emitted anything, also if it is lost later."""
    one, other = pair

    def report(worker: FakeWorker, index: int) -> None:
        table = pack_positions([SplitPosition(index, 100, 10)])
        cluster.fact(worker, SourcePositions(attempt=AttemptId.of(job, 0, index, 1), positions=table))

    report(one, 0)
    report(other, 1)
    cluster.advance(2.0)
    pause(cluster, job)
    cluster.advance(30.0)
    cluster.report(other, READ1, "failed")
    spec = other.tasks[READ1]
    assert (spec.attempt, round(spec.positions_age, 1)) == (2, 2.0)
    cluster.request(ResumeJob(job=job))
    cluster.advance(1.0)
    cluster.report(one, READ0, "failed")
    assert round(one.tasks[READ0].positions_age, 1) == 3.0


@pytest.mark.parametrize("phase", ["aligning", "paused"])
def test_the_next_coordinator_goes_on_with_it(
    phase: str, cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.request(PauseJob(job=job))
    if phase == "paused":
        cluster.stand_all(job)
    cluster.lose_coordinator()
    cluster.check_journal()
    for worker in pair:
        worker.inbox.clear()
        cluster.come_back(worker)
    assert [told(worker) for worker in pair] == [[(1, True)]] * 2
    assert cluster.show(job).pause == phase
    cluster.stand_all(job)
    assert cluster.show(job).state == "paused"
    cluster.request(ResumeJob(job=job))
    cluster.lose_coordinator()
    for worker in pair:
        worker.inbox.clear()
        cluster.come_back(worker)
    assert [told(worker) for worker in pair] == [[(1, False)]] * 2, "whoever has not heard so does now"


def test_a_paused_job_is_cancelled_without_being_resumed(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    pause(cluster, job)
    cluster.request(CancelJob(job=job))
    cluster.report_all(job, "canceled")
    assert (cluster.show(job).state, told(pair[0])) == ("canceled", [(1, True)])
    assert "only one that runs can be paused" in cluster.refusal(PauseJob(job=job))[1]


@pytest.mark.parametrize("end", ["cancel", "finish", "resume"])
def test_a_job_that_ends_or_is_resumed_before_it_is_paused_says_so(
    end: str, cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.request(PauseJob(job=job))
    wait = cluster.ask(WaitPause(job=job, wait_seconds=30.0))
    if end == "finish":
        cluster.report_all(job, "finished")
    else:
        cluster.request(CancelJob(job=job) if end == "cancel" else ResumeJob(job=job))
    texts = {"cancel": "canceling", "finish": "ended", "resume": "resumed before"}
    assert texts[end] in cluster.reply(wait).pause_problem


def test_tasks_that_have_finished_are_not_waited_for(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, other = pair
    cluster.report(one, READ0, "finished")
    cluster.request(PauseJob(job=job))
    cluster.stand(one, COUNT0)
    cluster.stand(other, COUNT1)
    cluster.report(other, READ1, "finished")
    assert cluster.show(job).state == "paused"


def joining() -> JobGraph:
    """Two sources, a map behind the first, and a join that reads its second input first."""
    names = ["facts", "map", "side", "join"]
    vertices = [
        Vertex(
            name=name,
            parallelism=1,
            operators=[name],
            is_source=name in ("facts", "side"),
            bounded=False,
            program=name.encode(),
        )
        for name in names
    ]
    edges = [
        Edge(source=0, target=1, partitioner="hash"),
        Edge(source=1, target=3, partitioner="hash", input=0),
        Edge(source=2, target=3, partitioner="hash", input=1),
    ]
    return JobGraph(vertices=vertices, edges=edges, settings=JobSettings())


def test_what_waits_for_an_input_that_is_read_later_counts_as_standing_and_is_listed(
    cluster: FakeCluster,
) -> None:
    """Its rows stay where they are: in the queue, and in the hands of those that wait to write them."""
    worker = cluster.add(slots=4)
    job = cluster.submit(joining())
    cluster.report_all(job, "running")
    cluster.request(PauseJob(job=job))
    cluster.stand(worker, (job, 2, 0))
    cluster.stand(worker, (job, 0, 0), barrier=0, blocked=True)
    cluster.stand(worker, (job, 1, 0), barrier=0, blocked=True)
    assert cluster.show(job).state == "pausing"
    cluster.stand(worker, (job, 3, 0), unread=[1])
    info = cluster.show(job)
    assert info.state == "paused"
    assert info.pause_left == ["rows before input 0 of join, which is read later"]


def test_what_waits_for_external_clients_or_the_coordinator_and_dead_letters_are_listed(
    cluster: FakeCluster, report_of: Callable[..., Any]
) -> None:
    worker = cluster.add(slots=4)
    about = {"parallelism": 1, "bounded": False, "program": b""}
    vertices = [
        Vertex(name="in", operators=["in"], is_source=True, stream="orders", **about),
        Vertex(name="out", operators=["out"], is_source=False, sink="results", **about),
    ]
    graph = JobGraph(vertices=vertices, edges=[Edge(source=0, target=1, partitioner="hash")])
    job = cluster.submit(graph)
    cluster.report_all(job, "running")
    cluster.request(PauseJob(job=job))
    errors = TaskCounters(user_errors={"skip": 5, "dead_letter": 3})
    cluster.heartbeat(worker, [report_of(worker, (job, 0, 0), 1, counters=errors)])
    cluster.stand(worker, (job, 1, 0), outbox=70_000)
    kept = ["what is written to stream orders", "what readers have yet to take of sink results"]
    unsent = ["70,000 bytes of rows or lines that out[0] has yet to send to the coordinator"]
    letters = ["3 dead letters, in its log"]
    assert cluster.show(job).pause_left == kept + unsent + letters
    assert event_of(cluster, "paused").endswith("; ".join(kept + unsent + letters))
    cluster.heartbeat(worker, [report_of(worker, (job, 1, 0), 1)])
    assert cluster.show(job).pause_left == kept + letters, "it is sent by now"


def test_one_that_waits_for_a_consumer_that_reads_is_waited_for(cluster: FakeCluster) -> None:
    worker = cluster.add(slots=4)
    job = cluster.submit(joining())
    cluster.report_all(job, "running")
    cluster.request(PauseJob(job=job))
    cluster.stand(worker, (job, 2, 0))
    cluster.stand(worker, (job, 3, 0), unread=[1])
    cluster.stand(worker, (job, 1, 0))
    cluster.stand(worker, (job, 0, 0), barrier=0, blocked=True)
    assert cluster.show(job).state == "pausing"
    cluster.stand(worker, (job, 0, 0))
    assert cluster.show(job).state == "paused"


@pytest.fixture
def report_of() -> Callable[..., Any]:
    """The report of a task that stands, inside a heartbeat."""

    def make(
        worker: FakeWorker, key: tuple[str, int, int], barrier: int, counters: TaskCounters | None = None
    ) -> TaskReport:
        return TaskReport(
            attempt=AttemptId.of(*key, worker.tasks[key].attempt),
            counters=counters or TaskCounters(),
            standing=Standing(barrier=barrier),
        )

    return make
