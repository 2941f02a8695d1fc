"""A coordinator that is started again from its journal, and workers that come back to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted, TaskFailed
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import CancelTasks, ReleaseJob, TaskReport, WorkerLost
from minishuffle.wire.packed import PeerRows, SplitPosition, pack_positions, pack_traffic
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import SourcePositions
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    Failure,
    GetEvents,
    GetLogs,
    GetRows,
    GetStatus,
    SubmitJob,
)
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
RESTARTS = {"restart_strategy": "individual"}


@pytest.fixture
def pair(cluster: FakeCluster) -> tuple[FakeWorker, FakeWorker]:
    return cluster.add(), cluster.add()


def attempts(cluster: FakeCluster, job: str = "j1") -> list[tuple[int, int, int, str]]:
    return [(task.operator, task.index, task.attempt, task.state) for task in cluster.show(job).tasks]


def states(cluster: FakeCluster) -> list[str]:
    return [worker.state for worker in cluster.request(GetStatus()).workers]


def test_running_tasks_are_taken_back_and_none_restarts(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    before = cluster.show("j1")
    cluster.lose_coordinator()
    assert states(cluster) == ["awaited", "awaited"]
    assert cluster.show("j1") == before, "right before any worker is back"
    for worker in pair:
        inbox = len(worker.inbox)
        cluster.come_back(worker)
        (welcome,) = worker.inbox[inbox:]
        assert isinstance(welcome, Registered)
        assert (welcome.term, welcome.worker, welcome.epoch) == (cluster.term, worker.worker, worker.epoch)
    assert states(cluster) == ["alive", "alive"]
    assert cluster.show("j1") == before
    cluster.report_all("j1", "finished")
    assert cluster.show("j1").state == "finished"
    cluster.check_journal()


def test_a_worker_that_was_killed_meanwhile_is_recovered_when_its_time_is_up(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    spare = cluster.add()
    job = cluster.submit(make_graph(**RESTARTS))
    cluster.report_all(job, "running")
    lost = next(worker for worker in pair if worker.tasks)
    others = [worker for worker in (*pair, spare) if worker is not lost]
    cluster.lose_coordinator()
    for worker in others:
        cluster.come_back(worker)
    cluster.advance(cluster.settings.heartbeat_timeout - 0.25)
    assert {attempt for _, _, attempt, _ in attempts(cluster)} == {1}
    cluster.advance(0.5)
    assert all(worker.got(WorkerLost)[-1].worker == lost.worker for worker in others)
    restarted = {index for _, index, attempt, _ in attempts(cluster) if attempt == 2}
    assert restarted == {key[2] for key in lost.tasks}


def test_a_task_that_waited_for_a_slot_gets_one_from_the_next_coordinator(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    worker = cluster.add()
    job = cluster.submit(make_graph(**RESTARTS))
    cluster.report_all(job, "running")
    cluster.lose(worker)
    assert {state for _, _, _, state in attempts(cluster)} == {"waiting for a slot"}
    cluster.advance(1.0)
    cluster.lose_coordinator()
    other = cluster.add()
    assert {(attempt, state) for _, _, attempt, state in attempts(cluster)} == {(2, "created")}
    key = next(iter(other.tasks))
    cluster.report(other, key, "running", attempt=2)
    events = cluster.request(GetEvents(job=job, after=0, wait_seconds=0.0)).events
    (event,) = [each for each in events if each.kind == "task running" and each.attempt == 2]
    assert event.since == pytest.approx(1.0), "since its worker was lost"


@pytest.mark.parametrize("wrong", [{"python": "3.9"}, {"advertise": "0.0.0.0"}, {"data_port": 0}])
def test_a_process_that_is_refused_does_not_take_the_place_of_an_awaited_worker(
    cluster: FakeCluster, make_graph: MakeGraph, wrong: dict[str, Any]
) -> None:
    worker = cluster.add()
    job = cluster.submit(make_graph(**RESTARTS))
    cluster.report_all(job, "running")
    cluster.lose_coordinator()
    refused = cluster.add(requested_worker=worker.worker, **wrong)
    assert "registration refused" in cluster.closed[refused.link]
    cluster.come_back(worker)
    assert {attempt[2:] for attempt in attempts(cluster)} == {(1, "running")}


@pytest.mark.parametrize("is_back", [True, False])
def test_a_wait_that_ends_while_workers_are_awaited_is_judged_after_a_try(
    cluster: FakeCluster, make_graph: MakeGraph, is_back: bool
) -> None:
    """A slot comes free meanwhile, and the last worker that is awaited comes back or does not."""
    one, two, three = (cluster.add(slots=1) for _ in range(3))
    job, other = (cluster.submit(make_graph(1, 1, **RESTARTS)) for _ in range(2))
    cluster.submit(make_graph(1, 1))  # It ends if the third worker is lost.
    cluster.report_all(job, "running")
    cluster.lose(one)
    cluster.advance(cluster.settings.slot_timeout - 1.0)
    assert {task.state for task in cluster.show(job).tasks} == {"waiting for a slot"}
    cluster.lose_coordinator()
    cluster.come_back(two)
    cluster.report_all(other, "finished")
    cluster.advance(2.0)
    if is_back:
        cluster.come_back(three)
    else:
        cluster.advance(2.0)
    assert {(task.worker, task.state) for task in cluster.show(job).tasks} == {(two.worker, "created")}


def test_a_lost_worker_that_comes_back_is_refused(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    cluster.lose_coordinator()
    cluster.come_back(pair[0])
    cluster.advance(cluster.settings.heartbeat_timeout + 1.0)
    cluster.come_back(pair[1])
    refused: Any = cluster.replies[pair[1].link, 0]
    assert isinstance(refused, Failure) and "was declared lost while it was away" in refused.text
    assert pair[1].link in cluster.closed


def test_a_new_process_with_the_id_of_an_awaited_one_takes_its_place(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    cluster.lose_coordinator()
    fresh = cluster.add(requested_worker=1)
    assert (fresh.worker, fresh.epoch) == (1, 3)
    cluster.come_back(pair[0])
    assert isinstance(cluster.replies[pair[0].link, 0], Failure)


def test_a_control_link_that_is_made_anew_takes_the_place_of_one_that_is_half_open(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    before, old = cluster.show("j1"), pair[0].link
    cluster.come_back(pair[0])
    assert "has a new control link" in cluster.closed[old]
    cluster.do(cluster.state.link_closed(old, cluster.now))
    assert (states(cluster), cluster.show("j1")) == (["alive", "alive"], before)


def test_a_worker_that_comes_back_hears_again_what_it_is_to_cancel_for_its_region(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    """The first message was on its way in the link that broke."""
    cluster.submit(make_graph(restart_strategy="region"))
    cluster.report_all("j1", "running")
    cluster.fail(pair[0], ("j1", 0, 0), TaskFailed.code, "boom")
    first = pair[1].got(CancelTasks)
    assert len(first) == 1 and first[0].attempts
    cluster.come_back(pair[1])
    again = pair[1].got(CancelTasks)[1:]
    assert again == first


def test_submissions_wait_in_their_order_until_it_is_known_who_is_there(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.lose_coordinator()
    submission = SubmitJob(name="s", python="3.11", graph=make_graph().to_bytes())
    waits = [(cluster.ask(submission, link=link), link) for link in (2_000, 2_001, 1_000)]
    cluster.do(cluster.state.link_closed(2_000, cluster.now))
    cluster.come_back(pair[0])
    assert not cluster.replies
    cluster.come_back(pair[1])
    assert [cluster.reply(*wait) for wait in waits] == [None, Accepted(job="j1"), Accepted(job="j2")]


def test_a_job_that_ends_is_cancelled_and_released_where_nobody_had_heard_of_it(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(4, 4))
    cluster.report_all("j1", "running")
    spec = list(pair[0].tasks.values())
    cluster.lose_coordinator()
    cluster.come_back(pair[0])
    cluster.request(CancelJob(job="j1"))
    cluster.come_back(pair[1])
    assert [message.job for message in pair[1].got(CancelTasks)] == ["j1"]
    cluster.report_all("j1", "canceled")
    assert cluster.show("j1").state == "canceled"
    released = len(pair[0].got(ReleaseJob))
    pair[0].tasks = pair[0].tasks | {("j1", 0, 0): next(iter(spec))}
    cluster.lose_coordinator()
    cluster.come_back(pair[0])
    assert len(pair[0].got(ReleaseJob)) == released + 1 and pair[0].tasks == {}


def collects(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph, *payloads: bytes
) -> FakeWorker:
    """The worker on which job j1 runs, whose sink has sent these."""
    cluster.submit(make_graph(1, 1))
    worker = next(each for each in pair if each.tasks)
    cluster.report_all("j1", "running")
    for payload in payloads:
        cluster.collect(worker, ("j1", 1, 0), payload)
    return worker


def test_rows_that_nobody_had_fetched_are_reported_lost(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    worker = collects(cluster, pair, make_graph, b"1", b"2")
    cluster.lose_coordinator()
    cluster.come_back(worker)
    cluster.collect(worker, ("j1", 1, 0), b"3")
    code, text = cluster.refusal(GetRows(job="j1", after=1))
    assert code == ResourceExhausted.code
    assert (
        "rows that nobody had fetched were lost with the coordinator (batches: 1); run the job again" in text
    )
    assert cluster.request(GetRows(job="j1", after=2)).batches == [b"3"], "who had them misses none"


def test_a_coordinator_that_hands_over_leaves_rows_lines_and_counts_to_the_next(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    worker = collects(cluster, pair, make_graph, b"1", b"2")
    cluster.log(worker, "j1", "one", "two")
    report = TaskReport(attempt=attempt(), counters=TaskCounters(records_out=7))
    cluster.heartbeat(worker, [report])
    counted = TaskReport(attempt=attempt(), counters=TaskCounters(records_out=9))
    cluster.heartbeat(worker, [counted])  # Within the same second.
    before = cluster.show("j1")
    for _ in range(2):  # It is handed on once more by one that had it from another.
        cluster.hand_over()
        assert cluster.show("j1") == before
        assert cluster.show("j1").tasks[0].counters.records_out == 9
        assert cluster.request(GetRows(job="j1", after=0)).batches == [b"1", b"2"]
        assert cluster.request(GetLogs(job="j1", after=1)).lines == ["two"]
        assert not {kind for kind, _ in cluster.journal} & {"rows", "lines"}, "they are kept once"
        cluster.come_back(worker)
    cluster.collect(worker, ("j1", 1, 0), b"3")
    cluster.log(worker, "j1", "three")
    assert cluster.request(GetRows(job="j1", after=1)).batches == [b"2", b"3"]
    assert cluster.request(GetLogs(job="j1", after=0)).lines == ["one", "two", "three"]


def test_rows_that_a_killed_coordinator_had_stay_lost_when_the_next_one_hands_over(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    worker = collects(cluster, pair, make_graph)
    cluster.collect(worker, ("j1", 1, 0), b"1")
    cluster.lose_coordinator()
    cluster.come_back(worker)
    cluster.collect(worker, ("j1", 1, 0), b"2")
    cluster.hand_over()
    assert "lost with the coordinator (batches: 1)" in cluster.refusal(GetRows(job="j1", after=0))[1]
    assert cluster.request(GetRows(job="j1", after=1)).batches == [b"2"]


def test_what_a_worker_has_beyond_the_books_is_released_and_what_it_lacks_is_missing(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(4, 4))
    job = cluster.state._jobs["j1"]
    first, _ = pair
    mine = [attempt(operator, index) for _, operator, index in first.tasks]
    reconciler = cluster.state._reconciler

    def about(*held: AttemptId, epoch: int = 1) -> Register:
        return first.about.model_copy(update={"attempts": held, "epoch": epoch})

    assert reconciler.missing(job, first.worker, about(*mine)) == []
    assert reconciler.missing(job, first.worker, about(*mine[1:])) == [mine[0].subtask.key]
    surplus = [attempt(0, 0, 7), attempt(0, 0, job="j9")]
    worker = cluster.state._workers.named(first.worker)
    found = reconciler.desired(worker, about(*mine, *surplus), cluster.now)
    whole, some = (each for each in found if isinstance(each, ReleaseJob))
    assert len(found) == 2 and (whole.job, some.job) == ("j9", "j1")
    assert [each.attempt for each in some.attempts] == [7]
    assert reconciler.desired(worker, about(*surplus, epoch=0), 0.0) == [], "a new process has nothing"


def test_a_task_that_never_reached_its_worker_starts_again(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(**RESTARTS))
    worker = pair[0]
    gone = next(iter(worker.tasks))
    cluster.lose_coordinator()
    del worker.tasks[gone]
    for each in pair:
        cluster.come_back(each)
    assert worker.tasks[gone].attempt == 2
    assert cluster.show("j1").restarts == {"lost": 1}


def said(index: int, operator: int, rows: int, **dropped: int) -> TaskReport:
    """A heartbeat's report: each of two producers sends each of two consumers so many rows."""
    if operator:
        peers = [PeerRows(0, other, 1, received=rows) for other in (0, 1)]
        done = 2 * rows - dropped.get("failed_batch", 0)
        counters = TaskCounters(records_in=2 * rows, rows_done=done)
    else:
        peers = [PeerRows(0, other, 1, sent=rows + 5) for other in (0, 1)]
        counters = TaskCounters(records_out=2 * rows + 10, rows_done=2 * rows + 10)
    counters.rows_dropped = dropped
    return TaskReport(attempt=attempt(operator, index), counters=counters, traffic=pack_traffic(peers))


def test_what_a_source_emits_while_nobody_hears_it_hides_no_row_that_is_missing(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    """Of 100 rows within its lease others had 60 when the coordinator was lost, and its worker with it. 90 of
    it have come since, some of which come once more."""
    stays, dies = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(make_graph(2, 2, **RESTARTS))
    cluster.report_all("j1", "running")
    (index,) = {key[2] for key in dies.tasks}
    positions = pack_positions([SplitPosition(split=index, position=70, lease=30)])
    cluster.fact(dies, SourcePositions(attempt=attempt(0, index), positions=positions), 9)
    reads = attempt(1, 1 - index)

    def got(rows: int) -> list[TaskReport]:
        traffic = pack_traffic([PeerRows(0, index, 1, received=rows)])
        return [TaskReport(attempt=reads, counters=TaskCounters(records_in=rows), traffic=traffic)]

    cluster.heartbeat(stays, got(60))
    cluster.advance(1.5)
    cluster.heartbeat(stays, got(60))
    cluster.lose_coordinator()
    cluster.come_back(stays)
    cluster.advance(cluster.settings.heartbeat_timeout + 1)
    cluster.add(slots=1)
    cluster.heartbeat(stays, got(90))
    assert (cluster.show("j1").rows_in_flight, cluster.show("j1").rows_again) == (40, 30)
    cluster.check_journal()


def test_what_a_worker_had_counted_that_is_lost_with_the_coordinator_is_known(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    """The drops of its tasks stay counted, and what its sink had taken is not in flight."""
    stays, dies, spare = (cluster.add(slots=1) for _ in range(3))
    cluster.submit(make_graph(2, 2, **RESTARTS))
    cluster.report_all("j1", "running")
    (index,) = {key[2] for key in stays.tasks}
    ours = [said(index, 0, 100), said(index, 1, 100)]
    theirs = [said(1 - index, 0, 100, upstream_unavailable=7), said(1 - index, 1, 100, failed_batch=3)]
    cluster.heartbeat(stays, ours)
    cluster.heartbeat(dies, theirs)
    cluster.advance(1.5)
    cluster.heartbeat(stays, ours)
    before = cluster.show("j1")
    assert before.rows_dropped == {"failed_batch": 3, "upstream_unavailable": 7}
    cluster.lose_coordinator()
    assert cluster.show("j1").rows_dropped == before.rows_dropped
    cluster.come_back(stays)
    cluster.come_back(spare)
    cluster.advance(cluster.settings.heartbeat_timeout + 1)
    cluster.heartbeat(stays, ours)
    after = cluster.show("j1")
    assert after.rows_dropped == before.rows_dropped
    assert after.rows_in_flight == 10, "5 rows of each source; what the sink had dropped it had taken"
    cluster.check_journal()


def test_what_running_tasks_count_is_written_every_two_seconds(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(1, 1))
    cluster.report_all("j1", "running")
    (worker,) = (worker for worker in pair if worker.tasks)

    def write_at(seconds: float, rows: int) -> bytes:
        cluster.now += seconds
        cluster.heartbeat(worker, [said(0, 1, rows)])
        cluster.advance(1.0, heartbeats=False)
        return cluster.journal["counts", "j1/1/0"]

    first = write_at(0.0, 10)
    assert write_at(0.0, 20) == first
    second = write_at(0.1, 30)
    assert second != first
    cluster.report(worker, ("j1", 1, 0), "finished")
    assert ("counts", "j1/1/0") not in cluster.journal
