"""What clients are told of jobs: rows, log lines, events, lists, and answers that they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator import jobs as jobs_module
from minishuffle.coordinator.jobs import JOBS_KEPT
from minishuffle.dataflow.graph import JobGraph
from minishuffle.errors import ResourceExhausted, UnknownName
from minishuffle.wire.messages import (
    CancelJob,
    ControlMessage,
    GetEvents,
    GetLogs,
    GetRows,
    GetStatus,
    ListJobs,
    ShowJob,
    Shutdown,
    WaitJob,
)

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
READ0, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 1, 0), ("j1", 1, 1)


# --- rows, logs, results -----------------------------------------------------------------------------


def test_collected_rows_are_kept_for_clients(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.collect(pair[0], COUNT0, b"one")
    cluster.collect(pair[1], COUNT1, b"two")
    reply = cluster.request(GetRows(job="j1"))
    assert (reply.batches, reply.next, reply.terminal) == ([b"one", b"two"], 2, False)
    cluster.report_all("j1", "finished")
    reply = cluster.request(GetRows(job="j1", after=1))
    assert (reply.batches, reply.next, reply.terminal) == ([b"two"], 2, True)
    assert cluster.show("j1").collected_batches == 2
    cluster.collect(pair[0], COUNT0, b"late")
    assert cluster.state.ignored == 1


def test_too_many_collected_rows_fail_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COLLECT_BYTES_MAX", 10)
    cluster.submit(make_graph())
    cluster.collect(pair[0], COUNT0, bytes(8))
    cluster.collect(pair[1], COUNT1, bytes(8))
    info = cluster.show("j1")
    assert (info.state, info.collected_batches, info.causes[0].code) == ("failing", 1, ResourceExhausted.code)
    assert [cause.text for cause in info.causes] == [
        "job collected more than 10 bytes of rows: write large results with to_parquet instead of collect"
    ]
    assert info.causes[0].task == "count[1]"


def finish_with_rows(cluster: FakeCluster, graph: JobGraph, *batches: bytes) -> str:
    """Run a job whose count[0] collects these batches, to its end."""
    job = cluster.submit(graph)
    worker = next(worker for worker in cluster.workers.values() if (job, 1, 0) in worker.tasks)
    for batch in batches:
        cluster.collect(worker, (job, 1, 0), batch)
    cluster.report_all(job, "finished")
    return job


def test_rows_of_ended_jobs_are_bounded_in_sum_and_the_oldest_jobs_go_first(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COLLECTED_ENDED_BYTES_MAX", 20)
    for _ in range(2):
        finish_with_rows(cluster, make_graph(), bytes(8), bytes(2))
    running = cluster.submit(make_graph())
    cluster.collect(pair[0], (running, 1, 0), bytes(15))
    assert len(cluster.request(GetRows(job="j1")).batches) == 2, "rows of a running job do not count"
    finish_with_rows(cluster, make_graph(), b"newest")
    code, text = cluster.refusal(GetRows(job="j1"))
    assert code == ResourceExhausted.code
    assert text == (
        "the rows of job j1 (count words) are gone: at most 20 bytes of rows of all jobs that have ended are "
        "kept; run the job again and read its rows when it ends, or write them with to_parquet"
    )
    assert cluster.refusal(GetRows(job="j1", after=1)) == (code, text), "not the end of a shorter result"
    assert cluster.show("j1").collected_batches == 2, "the job itself stays listed as it ended"
    assert len(cluster.request(GetRows(job="j2")).batches) == 2
    assert cluster.request(GetRows(job="j4")).batches == [b"newest"]


def test_rows_that_a_client_has_fetched_are_dropped_before_any_others(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COLLECTED_ENDED_BYTES_MAX", 20)
    finish_with_rows(cluster, make_graph(), bytes(9))
    finish_with_rows(cluster, make_graph(), bytes(5), bytes(5))
    reply = cluster.request(GetRows(job="j2", after=1))
    assert len(reply.batches) == 1, "with this request the client says that it has the first batch"
    finish_with_rows(cluster, make_graph(), bytes(6))
    assert len(cluster.request(GetRows(job="j1")).batches) == 1, "older, but not fetched"
    assert cluster.request(GetRows(job="j2", after=1)) == reply, "the rest can still be read"
    assert "the rows of job j2 (count words) are gone" in cluster.refusal(GetRows(job="j2"))[1]


def test_rows_are_awaited(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    rows = cluster.ask(GetRows(job="j1", wait_seconds=9.0))
    late = cluster.ask(GetRows(job="j1", after=1, wait_seconds=9.0))
    assert cluster.reply(rows) is None
    cluster.collect(pair[0], COUNT0, b"one")
    assert cluster.reply(rows).batches == [b"one"]
    assert cluster.reply(late) is None
    cluster.report_all("j1", "finished")
    assert (cluster.reply(late).batches, cluster.reply(late).terminal) == ([], True)


def test_too_large_results_of_sinks_fail_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "RESULT_BYTES_MAX", 10)
    cluster.submit(make_graph())
    cluster.report(pair[0], COUNT0, "finished", result=bytes(8))
    cluster.report(pair[1], COUNT1, "finished", result=bytes(8))
    info = cluster.show("j1")
    assert (info.state, info.causes[0].code) == ("failing", ResourceExhausted.code)
    assert [len(task.result) for task in info.tasks] == [0, 0, 8, 0]


def test_log_lines_are_kept_for_clients(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.log(pair[0], "j1", "hello", "world")
    cluster.log(pair[0], "j9", "nobody's")
    reply = cluster.request(GetLogs(job="j1", after=1))
    assert (reply.lines, reply.next, reply.terminal) == (["world"], 2, False)
    assert cluster.state.ignored == 1


# --- requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        ShowJob(job="j9"),
        CancelJob(job="j9"),
        GetEvents(job="j9"),
        GetLogs(job="j9"),
        GetRows(job="j9"),
        WaitJob(job="j9", wait_seconds=1),
    ],
)
def test_an_unknown_job_is_named_with_those_that_are_known(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, message: ControlMessage
) -> None:
    code, text = cluster.refusal(message)
    assert code == UnknownName.code
    assert text.startswith("there is no job 'j9'; none was submitted yet")
    for _ in range(2):
        cluster.submit(make_graph())
    assert "there is no job 'j9'; the latest are j1, j2" in cluster.refusal(message)[1]


def test_a_wait_is_answered_when_the_job_is_over(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    wait = cluster.ask(WaitJob(job="j1", wait_seconds=5.0))
    cluster.report_all("j1", "running")
    cluster.advance(1.0)
    assert cluster.reply(wait) is None
    cluster.report_all("j1", "finished")
    assert cluster.reply(wait).state == "finished"
    assert cluster.request(WaitJob(job="j1", wait_seconds=5.0)).state == "finished"


def test_a_wait_is_answered_when_its_time_is_up(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    waits = [cluster.ask(WaitJob(job="j1", wait_seconds=seconds)) for seconds in (2.0, 3.0, 1e9)]
    cluster.advance(1.875)
    assert [cluster.reply(wait) for wait in waits] == [None] * 3
    cluster.advance(0.125)
    assert [cluster.reply(wait) is not None for wait in waits] == [True, False, False]
    cluster.advance(58.0)
    assert [cluster.reply(wait).state for wait in waits] == ["created"] * 3
    assert cluster.request(WaitJob(job="j1", wait_seconds=0)).state == "created"


def test_events_and_logs_are_awaited(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    events = cluster.ask(GetEvents(job="j1", after=1, wait_seconds=9.0))
    logs = cluster.ask(GetLogs(job="j1", after=0, wait_seconds=9.0))
    cluster.log(pair[0], "j1", "line")
    assert (cluster.reply(logs).lines, cluster.reply(events)) == (["line"], None)
    cluster.report(pair[0], READ0, "running")
    (event,) = cluster.reply(events).events
    assert (event.number, event.kind, event.operator, event.index, event.worker) == (
        2,
        "task running",
        0,
        0,
        1,
    )
    assert event.at == 1_000_100.0
    assert cluster.request(GetEvents(job="j1", after=0, wait_seconds=9.0)).events[0].kind == "created"
    late = cluster.ask(GetEvents(job="j1", after=99, wait_seconds=9.0))
    cluster.report_all("j1", "finished")
    assert (cluster.reply(late).events, cluster.reply(late).terminal) == ([], True)


def test_a_client_that_left_is_not_answered(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    gone = cluster.ask(WaitJob(job="j1", wait_seconds=5.0), link=2_000)
    stays = cluster.ask(WaitJob(job="j1", wait_seconds=5.0), link=2_001)
    cluster.do(cluster.state.link_closed(2_000, cluster.now))
    cluster.report_all("j1", "finished")
    assert cluster.reply(gone, 2_000) is None
    assert cluster.reply(stays, 2_001).state == "finished"


def test_more_waits_than_are_kept_are_answered_at_once(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.state.POLLS_MAX", 2)
    cluster.submit(make_graph())
    asked = [cluster.ask(WaitJob(job="j1", wait_seconds=5.0)) for _ in range(3)]
    assert [cluster.reply(request) is not None for request in asked] == [False, False, True]


def test_one_client_cannot_take_all_places_of_those_who_wait(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINK_REQUESTS_MAX", 2)
    cluster.submit(make_graph())
    asked = [cluster.ask(WaitJob(job="j1", wait_seconds=5.0)) for _ in range(3)]
    assert [cluster.reply(request) is not None for request in asked] == [False, False, True]
    other = cluster.ask(WaitJob(job="j1", wait_seconds=5.0), link=2_000)
    assert cluster.reply(other, 2_000) is None


def test_a_client_that_sends_what_only_workers_may_is_cut_off(cluster: FakeCluster) -> None:
    cluster.ask(Shutdown(term=7, reason=""))
    assert cluster.closed == {1_000: "a client sent shutdown"}


def test_lists_leave_out_what_sinks_returned(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph(), name="one")
    cluster.submit(make_graph(), name="two")
    cluster.report(pair[0], COUNT0, "finished", result=b"\x01")
    (one, two) = cluster.request(ListJobs()).jobs
    assert [(job.job, job.name, len(job.tasks)) for job in (one, two)] == [("j1", "one", 4), ("j2", "two", 4)]
    assert all(task.result == b"" for task in one.tasks)
    status = cluster.request(GetStatus())
    assert (status.cluster, status.version, status.term, status.pid) == ("test", "0", 7, 99)
    assert status.jobs == [one, two]


def test_the_last_hundred_jobs_that_are_over_are_kept(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    cluster.add()
    running = cluster.submit(make_graph(1, 1))
    for _ in range(JOBS_KEPT + 3):
        cluster.report_all(cluster.submit(make_graph(1, 1)), "finished")
    jobs = [job.job for job in cluster.request(ListJobs()).jobs]
    assert (len(jobs), jobs[0], jobs[1]) == (JOBS_KEPT + 1, running, "j5")


def test_the_snapshot_counts(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph(1, 1))
    cluster.report_all("j1", "finished")
    cluster.submit(make_graph(2, 1))
    cluster.report(pair[1], ("j2", 0, 1), "running")
    cluster.lose(cluster.add())
    cluster.now += 1.5
    snapshot = cluster.state.snapshot(cluster.now, {"secret": 2})
    assert (snapshot.term, snapshot.slots) == (7, {"used": 2, "free": 2})
    assert snapshot.jobs == {"finished": 1, "created": 1}
    assert snapshot.tasks == {"created": 2, "running": 1}
    assert snapshot.connections_refused == {"secret": 2}
    assert [(w.worker, w.state, w.heartbeat_age_seconds) for w in snapshot.workers] == [
        (1, "alive", 1.5),
        (2, "alive", 1.5),
        (3, "lost", 1.5),
    ]
    assert snapshot.workers[0].metrics_port == pair[0].about.metrics_port
