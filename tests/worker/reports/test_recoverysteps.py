"""What is reported of recoveries: batches by job, of restarted attempts alone."""

from __future__ import annotations

from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId
from minishuffle.wire.messages import RecoveryStep, RecoverySteps, Step
from minishuffle.worker.reports.recoverysteps import REPORT_SECONDS, Reattachments


def attempt(operator: int, index: int, number: int, job: str = "j1") -> AttemptId:
    return AttemptId(SubtaskId(JobId(job), OperatorId(operator), index), number)


def step(operator: int, index: int, kind: Step, channels: int, age: float, number: int = 2) -> RecoveryStep:
    return RecoveryStep(operator=operator, index=index, attempt=number, step=kind, channels=channels, age=age)


def test_steps_of_a_while_go_together() -> None:
    reports = Reattachments()
    assert reports.next_deadline() is None
    for producer in range(3):
        reports.attached(attempt(1, 0, 2), attempt(0, producer, 1), 1.0)
    reports.attached(attempt(2, 5, 1), attempt(1, 0, 2), 1.0 + REPORT_SECONDS / 2)
    reports.reached("first record", attempt(1, 7, 3, "j2"), 1.0 + REPORT_SECONDS)
    assert reports.next_deadline() == 1.0 + REPORT_SECONDS
    assert reports.take(4, 1.0) == []
    now = 1.0 + REPORT_SECONDS
    found = reports.take(4, now)
    assert [(each.term, each.job, len(each.steps)) for each in found] == [(4, "j1", 2), (4, "j2", 1)]
    (inputs, outputs), (first,) = (each.steps for each in found)
    assert inputs == step(1, 0, "inputs", 3, now - 1.0)
    assert outputs == step(1, 0, "outputs", 1, now - (1.0 + REPORT_SECONDS / 2))
    assert first == step(1, 7, "first record", 1, 0.0, number=3)
    assert reports.take(4, now + 1) == [] and reports.next_deadline() is None


def test_first_attempts_are_not_reported() -> None:
    reports = Reattachments()
    reports.attached(attempt(1, 0, 1), attempt(0, 0, 1), 1.0)
    reports.reached("first record", attempt(0, 0, 1), 1.0)
    assert reports.next_deadline() is None


def test_a_message_takes_many_steps() -> None:
    """A worker of 64 slots may have one for each subtask of a large job."""
    reports = Reattachments()
    for index in range(4_000):
        reports.reached("first record", attempt(0, index, 2), 1.0)
    (message,) = reports.take(1, 2.0)
    assert isinstance(message, RecoverySteps) and len(message.steps) == 4_000
