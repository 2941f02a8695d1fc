"""The steps of recoveries on a worker: channels that were attached again, first records and so on. Pure.

The reports of some milliseconds go to the coordinator together: one message for each job, however many
channels there are.
"""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.wire.messages import RecoveryStep, RecoverySteps, Step

__all__ = ["REPORT_SECONDS", "Reattachments"]

REPORT_SECONDS: Final = 0.02
"""How long a report waits for others."""
_Seen: TypeAlias = "tuple[int, float]"
"""How many channels, and when the last was attached."""


class Reattachments:
    """Recovery steps of restarted attempts that are not reported yet."""

    def __init__(self) -> None:
        self._seen: dict[Step, dict[AttemptId, _Seen]] = {step: {} for step in get_args(Step)}
        self._due: float | None = None

    def attached(self, consumer: AttemptId, producer: AttemptId, now: float) -> None:
        """``consumer`` reads from ``producer`` from now on."""
        self.reached("inputs", consumer, now)
        self.reached("outputs", producer, now)

    def reached(self, step: Step, attempt: AttemptId, now: float) -> None:
        """A step of an attempt, by one channel if it has any; of a first attempt it is none."""
        if attempt.attempt > FIRST_ATTEMPT:
            seen = self._seen[step]
            seen[attempt] = (seen.get(attempt, (0, now))[0] + 1, now)
            self._due = now + REPORT_SECONDS if self._due is None else self._due

    def next_deadline(self) -> float | None:
        """When :meth:`take` has something."""
        return self._due

    def take(self, term: int, now: float) -> list[RecoverySteps]:
        """The messages that are due, one for each job."""
        if self._due is None or now < self._due:
            return []
        steps: dict[str, list[RecoveryStep]] = {}
        for step, seen in self._seen.items():
            for attempt, (channels, at) in seen.items():
                subtask = attempt.subtask
                found = RecoveryStep(
                    operator=subtask.operator,
                    index=subtask.index,
                    attempt=attempt.attempt,
                    step=step,
                    channels=channels,
                    age=max(0.0, now - at),
                )
                steps.setdefault(subtask.job, []).append(found)
            seen.clear()
        self._due = None
        return [RecoverySteps(term=term, job=job, steps=each) for job, each in steps.items()]
