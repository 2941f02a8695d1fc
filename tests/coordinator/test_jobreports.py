"""Each kind of report comes to its job, once, and only from the attempt that is current."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minishuffle.coordinator.jobreports import heard
from minishuffle.wire.messages import ChannelEnds, EndsRead, LogLines, RecoverySteps

if TYPE_CHECKING:
    from conftest import FakeCluster


def ends(attempt: int) -> EndsRead:
    found = ChannelEnds(operator=1, index=0, attempt=attempt, edge=0, producers=[1])
    return EndsRead(term=7, job="j1", ends=[found])


def test_ends_count_of_the_attempt_that_is_current(cluster: FakeCluster, make_graph: Any) -> None:
    cluster.add()
    cluster.submit(make_graph(2, 1))
    job = cluster.state._jobs["j1"]
    assert not heard(job, 1, ends(2), 1.0) and not heard(job, 2, ends(1), 1.0)
    assert not job.ends.is_read(0, 1, 0)
    assert heard(job, 1, EndsRead(term=7, job="j1", ends=[*ends(2).ends, *ends(1).ends]), 1.0)
    assert job.ends.is_read(0, 1, 0) and not job.ends.is_read(0, 0, 0)


def test_lines_and_steps_are_always_of_use(cluster: FakeCluster, make_graph: Any) -> None:
    cluster.add()
    cluster.submit(make_graph(2, 1))
    job = cluster.state._jobs["j1"]
    assert heard(job, 1, LogLines(term=7, job="j1", lines=["one"]), 1.0)
    assert heard(job, 9, RecoverySteps(term=7, job="j1", steps=[]), 1.0)
