"""Submissions that are repeated, and cancelled before, while and after they are journaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import TaskCancelled
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.requests import (
    Accepted,
    CancelSubmission,
    Failure,
    ListJobs,
    SubmitJob,
)

if TYPE_CHECKING:
    from conftest import FakeCluster

CLIENT = 1_000
MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


def submission(graph: JobGraph, number: str = "s1") -> SubmitJob:
    return SubmitJob(name="words", python="3.11", graph=graph.to_bytes(), submission=number)


def test_a_submission_that_is_repeated_is_answered_alike_and_starts_one_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    request = submission(make_graph(1, 1))
    assert [cluster.request(request), cluster.request(request)] == [Accepted(job="j1")] * 2
    cluster.report_all("j1", "finished")
    assert cluster.request(request) == Accepted(job="j1"), "also when the job has ended"
    assert cluster.request(submission(make_graph(1, 1), "s2")) == Accepted(job="j2")
    assert cluster.submit(make_graph(1, 1)) == "j3", "without an id each submission is a job"
    assert cluster.submit(make_graph(1, 1)) == "j4"


def test_a_job_can_be_cancelled_by_its_submission(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.request(submission(make_graph(1, 1)))
    assert cluster.request(CancelSubmission(submission="s1")) == Accepted(job="j1")
    assert cluster.show("j1").state == "canceling"
    cluster.report_all("j1", "canceled")
    assert cluster.request(CancelSubmission(submission="s1")) == Accepted(job="j1"), "it has ended already"


def test_a_cancel_that_arrives_before_its_submission_refuses_it(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    assert cluster.request(CancelSubmission(submission="s1")) == Accepted()
    code, text = cluster.refusal(submission(make_graph(1, 1)))
    assert (code, text) == (TaskCancelled.code, "the submission was cancelled: submit the job again")
    assert cluster.request(ListJobs()).jobs == []
    assert cluster.request(submission(make_graph(1, 1), "s2")) == Accepted(job="j1")


def test_a_submission_can_be_cancelled_while_it_is_journaled(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.state.client_request(CLIENT, 1, submission(make_graph(1, 1)), cluster.now)
    assert cluster.request(CancelSubmission(submission="s1")) == Accepted()
    cluster.do(cluster.state.journaled(None, cluster.now))
    assert isinstance(cluster.replies[CLIENT, 1], Failure)
    assert cluster.request(ListJobs()).jobs == []


def test_cancels_of_submissions_that_never_come_are_bounded(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.submissions.WITHDRAWN_KEPT", 2)
    for number in ("s1", "s2", "s3"):
        cluster.request(CancelSubmission(submission=number))
    assert cluster.request(submission(make_graph(1, 1), "s1")) == Accepted(job="j1"), "forgotten"
    assert isinstance(cluster.request(submission(make_graph(1, 1), "s3")), Failure)
