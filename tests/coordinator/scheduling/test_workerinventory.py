"""What jobs hold on each worker: that it stays right is checked after each step of the simulations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from minishuffle.coordinator.scheduling.slots import Slots
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.errors import ResourceExhausted
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.requests import CancelJob, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
LOOKS_PER_JOB_MAX = 10


def refused(cluster: FakeCluster, graph: JobGraph) -> str:
    code, text = cluster.refusal(SubmitJob(name="one more", python="3.11", graph=graph.to_bytes()))
    assert code == ResourceExhausted.code
    return text


def test_a_submission_does_not_look_at_all_other_jobs(
    cluster: FakeCluster, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Counter[Slots]()
    held = Slots.held

    def counted(self: Slots) -> Counter[int]:
        looks[self] += 1
        return held(self)

    cluster.add(slots=60)
    monkeypatch.setattr(CoordinatorState, "validate", lambda state: None)  # It looks at all of them.
    monkeypatch.setattr(Slots, "held", counted)
    for _ in range(60):
        cluster.submit(make_graph(1, 1))
    assert len(looks) == 60
    assert max(looks.values()) <= LOOKS_PER_JOB_MAX


def test_a_job_holds_until_it_has_ended(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    cluster.add(slots=2)
    first = cluster.submit(make_graph(2, 2))
    assert "job needs 2 slots (greatest parallelism), 0 are free of 2" in refused(cluster, make_graph(2, 2))
    cluster.request(CancelJob(job=first))
    assert "job needs 2 slots (greatest parallelism), 0 are free of 2" in refused(cluster, make_graph(2, 2))
    cluster.report_all(first, "canceled")
    cluster.submit(make_graph(2, 2))
