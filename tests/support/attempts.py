"""Attempt ids, short."""

from __future__ import annotations

from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId


def attempt(operator: int = 0, index: int = 0, number: int = 1, *, job: str = "j1") -> AttemptId:
    return AttemptId(SubtaskId(JobId(job), OperatorId(operator), index), number)
