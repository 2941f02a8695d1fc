"""What clients are told of jobs: rows, log lines, events, lists, and answers that they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.errors import ResourceExhausted, UnknownName
from minishuffle.plan.graph import JobGraph, JobSettings
from minishuffle.wire.messages import ControlMessage, PeerReport, WorkerReport
from minishuffle.wire.requests import (
    CancelJob,
    GetEvents,
    GetLogs,
    GetRows,
    GetStatus,
    ListJobs,
    ShowGraph,
    ShowJob,
    WaitJob,
)

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
READ0, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 1, 0), ("j1", 1, 1)


# --- rows, logs, results -----------------------------------------------------------------------------


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
        "job collected more than 10 bytes of rows: write large results with to_files instead of collect"
    ]
    assert info.causes[0].task == "count[1]"


def test_too_large_results_of_sinks_fail_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RESULT_BYTES_MAX", 10)
    cluster.submit(make_graph())
    cluster.report(pair[0], COUNT0, "finished", result=bytes(8))
    cluster.report(pair[1], COUNT1, "finished", result=bytes(8))
    info = cluster.show("j1")
    assert (info.state, info.causes[0].code) == ("failing", ResourceExhausted.code)
    assert [len(task.result) for task in info.tasks] == [0, 0, 8, 0]


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


def test_a_job_that_is_asked_for_by_its_name_is_named(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    for name in ("one", "two"):
        cluster.submit(make_graph(), name=name)
    text = cluster.refusal(CancelJob(job="two"))[1]
    assert text.startswith("there is no job 'two'; that is the name of j2: write j2 ")


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


def test_the_snapshot_counts(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph(1, 1))
    cluster.report_all("j1", "finished")
    cluster.submit(make_graph(2, 1))
    cluster.report(pair[1], ("j2", 0, 1), "running")
    cluster.lose(cluster.add())
    cluster.now += 1.5
    snapshot = cluster.state.snapshot(cluster.now, {"secret": 2})
    assert (snapshot.term, snapshot.slots) == (7, {"used": 2, "free": 2, "standby": 0})
    assert snapshot.jobs == {"finished": 1, "created": 1}
    assert snapshot.tasks == {"created": 2, "running": 1}
    assert snapshot.connections_refused == {"secret": 2}
    assert [(w.worker, w.state, w.heartbeat_age_seconds) for w in snapshot.workers] == [
        (1, "alive", 1.5),
        (2, "alive", 1.5),
        (3, "lost", 1.5),
    ]
    assert snapshot.workers[0].metrics_port == pair[0].about.metrics_port


def test_lists_may_be_without_what_is_long(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    (listed,) = cluster.request(ListJobs(tasks=False)).jobs
    assert (listed.tasks, listed.task_states) == ([], {"created": 4})
    cluster.report(pair[1], COUNT1, "finished", result=b"result")
    shown = cluster.request(ShowJob(job="j1", results=False))
    assert {task.result for task in shown.tasks} == {b""}
    assert b"result" in {task.result for task in cluster.request(ShowJob(job="j1")).tasks}
    assert cluster.request(GetStatus(jobs=False)).jobs == []
    cluster.heartbeat(
        pair[0], stuck={"j1": [0]}, peers=[PeerReport(worker=2, connections=1, local="a:1", remote="b:2")]
    )
    assert [each.worker for each in cluster.request(GetStatus(worker=2)).workers] == [2]
    whole, brief = (cluster.request(GetStatus(reports=reports)).workers[0] for reports in (True, False))
    assert whole.report.stuck and whole.peers
    assert brief == whole.model_copy(update={"report": WorkerReport(), "peers": []})
    assert len(cluster.request(GetStatus()).jobs) == 1


def test_settings_are_shown_with_what_follows_where_none_was_given(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(buffer_timeout=0, restart_strategy="individual", schedule="first_output"))
    found = {each.name: each for each in cluster.request(ShowGraph(job="j1")).settings}
    assert list(found) == list(JobSettings.model_fields)
    assert {name for name, each in found.items() if each.given} == {"buffer_timeout", "schedule"}
    assert (found["buffer_timeout"].value, found["buffer_timeout"].default) == ("0.0", "adaptive")
    assert (found["on_unavailable"].value, found["on_unavailable"].default) == ("wait", "")
    assert found["start_when"].value == "any"
    assert found["source_lease"].value == ""
