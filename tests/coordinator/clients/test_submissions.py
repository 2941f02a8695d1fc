"""Cancels of submissions that have not come: how many are remembered. The rest is in
``transcripts/submission_ids.txt``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.plan.graph import JobGraph
from minishuffle.wire.requests import (
    Accepted,
    CancelSubmission,
    Failure,
    SubmitJob,
)

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]


def submission(graph: JobGraph, number: str = "s1") -> SubmitJob:
    return SubmitJob(name="words", python="3.11", graph=graph.to_bytes(), submission=number)


def test_cancels_of_submissions_that_never_come_are_bounded(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.clients.submissions.WITHDRAWN_KEPT", 2)
    for number in ("s1", "s2", "s3"):
        cluster.request(CancelSubmission(submission=number))
    assert cluster.request(submission(make_graph(1, 1), "s1")) == Accepted(job="j1"), "forgotten"
    assert isinstance(cluster.request(submission(make_graph(1, 1), "s3")), Failure)
