"""The table of jobs: which ended ones it keeps, and how much of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs.jobindex import JOBS_KEPT
from minishuffle.errors import ResourceExhausted
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.requests import GetRows, ListJobs

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
READ0, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 1, 0), ("j1", 1, 1)


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
        "kept; run the job again and read its rows when it ends, or write them with to_files"
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


@pytest.mark.slow
def test_the_last_hundred_jobs_that_are_over_are_kept(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    cluster.add()
    running = cluster.submit(make_graph(1, 1))
    for _ in range(JOBS_KEPT + 3):
        cluster.report_all(cluster.submit(make_graph(1, 1)), "finished")
    jobs = [job.job for job in cluster.request(ListJobs()).jobs]
    assert (len(jobs), jobs[0], jobs[1]) == (JOBS_KEPT + 1, running, "j5")


def test_rows_of_jobs_that_run_are_bounded_in_sum(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients have fetched makes room; else the job that goes beyond the limit fails, and it alone."""
    monkeypatch.setattr(limits, "COLLECTED_RUNNING_BYTES_MAX", 20)
    for job in ("j1", "j2"):
        cluster.submit(make_graph())
        for _ in range(2):
            cluster.collect(pair[0], (job, 1, 0), bytes(5))
    assert len(cluster.request(GetRows(job="j1", after=1)).batches) == 1, "the client has the first batch"
    cluster.collect(pair[0], ("j2", 1, 0), bytes(5))
    assert cluster.show("j2").state == "created"
    text = cluster.refusal(GetRows(job="j1"))[1]
    assert "the rows of job j1 (count words) are gone: at most 20 bytes of rows of all jobs that run" in text
    assert len(cluster.request(GetRows(job="j1", after=1)).batches) == 1
    cluster.collect(pair[0], ("j2", 1, 0), bytes(5))
    info = cluster.show("j2")
    assert (info.state, info.causes[0].code) == ("failing", ResourceExhausted.code)
    assert (
        "jobs that run collected more than 20 bytes of rows that no client has fetched" in info.causes[0].text
    )
    assert cluster.show("j1").state == "created"
    cluster.collect(pair[0], ("j2", 1, 0), bytes(500))
    assert cluster.show("j2").collected_batches == 4, "it takes no more"
