"""What is reported of ends that were read: batches by job, of attempts that run."""

from __future__ import annotations

from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId
from minishuffle.wire.messages import ChannelEnds, EndsRead
from minishuffle.worker.endreports import ENDS_WAIT_SECONDS, EndReports
from minishuffle.worker.registry import ChannelKey


def attempt(operator: int, index: int, job: str = "j1") -> AttemptId:
    return AttemptId(SubtaskId(JobId(job), OperatorId(operator), index), 1)


def ends(operator: int, index: int, edge: int, producers: list[int]) -> ChannelEnds:
    return ChannelEnds(operator=operator, index=index, attempt=1, edge=edge, producers=producers)


def test_the_ends_of_a_while_go_together() -> None:
    reports = EndReports()
    assert reports.next_deadline() is None
    for producer in range(3):
        reports.read(ChannelKey(attempt(1, 0), 0, producer), 1.0)
    reports.read(ChannelKey(attempt(1, 0), 2, 1), 1.0 + ENDS_WAIT_SECONDS / 2)
    reports.read(ChannelKey(attempt(4, 7, "j2"), 5, 0), 1.0 + ENDS_WAIT_SECONDS / 2)
    now = 1.0 + ENDS_WAIT_SECONDS
    assert reports.next_deadline() == now and reports.take(4, 1.0) == []
    assert reports.take(4, now) == [
        EndsRead(term=4, job="j1", ends=[ends(1, 0, 0, [0, 1, 2]), ends(1, 0, 2, [1])]),
        EndsRead(term=4, job="j2", ends=[ends(4, 7, 5, [0])]),
    ]
    assert reports.take(4, now + 1) == [] and reports.next_deadline() is None


def test_of_a_task_that_has_ended_meanwhile_there_is_nothing() -> None:
    """If it has finished, that says all."""
    reports = EndReports()
    reports.read(ChannelKey(attempt(1, 0), 0, 0), 1.0)
    reports.forget(attempt(1, 0))
    assert reports.take(4, 1.0 + ENDS_WAIT_SECONDS) == []
