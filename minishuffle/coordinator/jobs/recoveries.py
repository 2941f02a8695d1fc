"""How far the recoveries of one job have come, subtask by subtask. Pure: times are passed in.

A recovery is detected when an attempt fails or is lost. The one that takes its place is to be attached to all
its producers and consumers, and to pass a first batch on. A subtask that fails again begins anew.
The times that recoveries took are kept as one histogram for each phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from minishuffle.coordinator.jobs.lifecycle import ENDED
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.counters import RECOVERY_SECONDS_BOUNDS, Histogram
from minishuffle.wire.messages import RecoveryStep, Step

__all__ = ["Milestone", "Recoveries"]

STEPS: Final[tuple[Step, ...]] = ("inputs", "outputs", "first record")
"""In their order."""
DIED: Final = frozenset({"failed", "lost", "abandoned"})
"""Ends of an attempt that is not told to end."""
PHASES: Final = ("reschedule", "reattach", "first_record")
"""Each from the detection until the next attempt was sent to its worker, had all its channels, and had passed
its first batch on. How long a failure went undetected nobody knows."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A step of a recovery that is complete, as an event: ``text`` follows the name of the subtask."""

    kind: str
    at: float
    text: str


@dataclass(slots=True)
class _Recovery:
    detected_at: float
    missing: dict[str, int]
    """Channels that are not attached yet, or first records, by step."""
    expected: dict[str, int]
    paused: bool = False
    """It was to wait for the end of a pause: its first record says nothing of how long it took."""


class Recoveries:
    """The last one of each subtask, until the subtask finishes; and how many there were."""

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()
        """Attempts that took the place of another, by how that one ended; drained: since its slot moved."""
        self._last: dict[TaskKey, _Recovery] = {}
        self.seconds = {phase: Histogram(RECOVERY_SECONDS_BOUNDS) for phase in PHASES}
        """What each recovery took that has come so far, by phase."""
        self.unfinished = 0
        """Those whose attempt died before it had passed a first batch on."""
        self._died_in: dict[TaskKey, Step] = {}
        """The step in which the last attempt died that was to recover a subtask, if it died in one."""

    def restarts_after(self, end: str) -> None:
        """An attempt is to take the place of one that came to that end."""
        self.restarts[end] += 1

    def recall_restarts(self, restarts: Mapping[str, int]) -> None:
        """So many did, as far as the journal has it."""
        self.restarts = Counter(restarts)

    def moved(self, key: TaskKey, state: str, at: float) -> None:
        """The subtask has come to that state. One that has finished may restart with others."""
        if state in DIED:
            self._died(key)
        if state == "finished":
            self._last.pop(key, None)
        elif state in ENDED or (state == "restarting" and key not in self._last):
            self._last[key] = _Recovery(at, {}, {})

    def _died(self, key: TaskKey) -> None:
        recovery = self._last.get(key)
        self._died_in.pop(key, None)
        if recovery is not None and "first record" in recovery.missing:
            self.unfinished += 1
            self._died_in[key] = next(step for step in STEPS if step in recovery.missing)

    def died_in(self, key: TaskKey) -> Step | None:
        """The step of its recovery in which the last attempt of a subtask died; None: it died in none."""
        return self._died_in.get(key)

    def record(self, key: TaskKey) -> float | None:
        """For the journal: when the failure was detected, if the subtask recovers."""
        recovery = self._last.get(key)
        return None if recovery is None else recovery.detected_at

    def recall(self, key: TaskKey, detected_at: float | None) -> None:
        """What :meth:`record` gave. Of an attempt that was deployed before that, no milestones are known."""
        if detected_at is not None:
            self._last[key] = _Recovery(detected_at, {}, {})

    def deployed(self, key: TaskKey, at: float, *, inputs: int, outputs: int) -> None:
        """The next attempt was sent to its worker; it has so many channels."""
        expected = {"inputs": inputs, "outputs": outputs, "first record": 1}
        recovery = self._last[key]
        recovery.expected = {step: count for step, count in expected.items() if count}
        recovery.missing = dict(recovery.expected)
        self.seconds["reschedule"].observe(self.since(key, at))

    def since(self, key: TaskKey, at: float) -> float:
        """Seconds since the failure was detected; 0 if the subtask does not recover."""
        recovery = self._last.get(key)
        return 0.0 if recovery is None else max(0.0, at - recovery.detected_at)

    def resumed(self) -> None:
        """The job was paused, and goes on."""
        for recovery in self._last.values():
            recovery.paused = recovery.paused or "first record" in recovery.missing

    def reached(self, key: TaskKey, step: RecoveryStep, at: float) -> Milestone | None:
        """A worker reports a step of the current attempt: the milestone, if that completes one."""
        recovery = self._last.get(key)
        if recovery is None or step.step not in recovery.missing:
            return None
        recovery.missing[step.step] -= step.channels
        if recovery.missing[step.step] > 0:
            return None
        del recovery.missing[step.step]
        count, at = recovery.expected[step.step], at - step.age
        if step.step == "first record":
            if not recovery.paused:
                self.seconds["first_record"].observe(self.since(key, at))
        elif not recovery.missing.keys() - {"first record"}:
            self.seconds["reattach"].observe(self.since(key, at))
        match step.step:
            case "inputs":
                return Milestone("inputs reattached", at, f"reads from all {count} producers")
            case "outputs":
                return Milestone("outputs reattached", at, f"is read by all {count} consumers")
            case "first record":
                return Milestone("first record", at, "has passed on its first batch")
