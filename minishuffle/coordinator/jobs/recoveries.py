"""The progress of recoveries of one job, by subtask. Pure: times are passed in.

A recovery begins when a failed or lost attempt is detected. The next attempt must be attached to all its
producers and consumers, and pass on a first batch. If it goes on from a snapshot, it also reads that, its
producers replay what they retain for it, and at some moment it has nothing to do: it has caught up. If it
fails, a new recovery begins. The durations are kept in one histogram for each phase.
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
"""Steps of a recovery, in their order."""
DIED: Final = frozenset({"failed", "lost", "abandoned"})
"""Ends of an attempt that were not requested."""
PHASES: Final = ("reschedule", "reattach", "first_record")
"""Phases, each from the detection until the next attempt was sent to its worker, had all its channels, or had
passed on its first batch. The time before the detection is not known."""
LATER_PHASES: Final[Mapping[Step, str]] = {
    "snapshot read": "snapshot_read",
    "replayed": "replayed",
    "caught up": "caught_up",
}
"""Further phases of a task that goes on from a snapshot, by their steps, which come in any order."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A completed step of a recovery, as an event: ``text`` follows the name of the subtask."""

    kind: str
    at: float
    text: str


@dataclass(slots=True)
class _Recovery:
    detected_at: float
    missing: dict[str, int]
    """By step, the channels not attached yet, or the first records outstanding."""
    expected: dict[str, int]
    paused: bool = False
    """The recovery waited for the end of a pause, so the times of steps after that are not counted."""


class Recoveries:
    """The last one of each subtask, until the subtask finishes; and how many there were."""

    def __init__(self, *, guaranteed: bool = False) -> None:
        self.restarts: Counter[str] = Counter()
        """Replacement attempts, by how the previous attempt ended; drained: because its slot moved."""
        self._last: dict[TaskKey, _Recovery] = {}
        phases = (*PHASES, *(LATER_PHASES.values() if guaranteed else ()))
        self.seconds = {phase: Histogram(RECOVERY_SECONDS_BOUNDS) for phase in phases}
        """Durations of the completed phases, in seconds."""
        self.unfinished = 0
        """Recoveries whose attempt died before it had passed on a first batch."""
        self._died_in: dict[TaskKey, Step] = {}
        """The step in which the last recovering attempt of a subtask died."""

    def restarts_after(self, end: str) -> None:
        """Count a restart after an attempt that ended in this state."""
        self.restarts[end] += 1

    def recall_restarts(self, restarts: Mapping[str, int]) -> None:
        """Restore the counts of restarts."""
        self.restarts = Counter(restarts)

    def moved(self, key: TaskKey, state: str, at: float) -> None:
        """Note the new state of a subtask. A finished subtask may restart together with others."""
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
        """The step of its recovery in which the last attempt of a subtask died; None: it died in no
        recovery."""
        return self._died_in.get(key)

    def record(self, key: TaskKey) -> float | None:
        """For the journal: when the failure was detected, if the subtask recovers."""
        recovery = self._last.get(key)
        return None if recovery is None else recovery.detected_at

    def recall(self, key: TaskKey, detected_at: float | None) -> None:
        """Restore from the result of :meth:`record`. Milestones of an attempt deployed earlier are not
        known."""
        if detected_at is not None:
            self._last[key] = _Recovery(detected_at, {}, {})

    def deployed(
        self, key: TaskKey, at: float, *, inputs: int, outputs: int, snapshots: bool = False
    ) -> None:
        """The next attempt was sent to its worker; ``inputs`` and ``outputs`` count its channels.
        ``snapshots``: it goes on from one."""
        expected = {"inputs": inputs, "outputs": outputs, "first record": 1}
        if snapshots:
            expected |= {"snapshot read": 1, "replayed": inputs, "caught up": 1}
        recovery = self._last[key]
        recovery.expected = {step: count for step, count in expected.items() if count}
        recovery.missing = dict(recovery.expected)
        self.seconds["reschedule"].observe(self.since(key, at))

    def since(self, key: TaskKey, at: float) -> float:
        """Seconds since the failure was detected; 0 if the subtask does not recover."""
        recovery = self._last.get(key)
        return 0.0 if recovery is None else max(0.0, at - recovery.detected_at)

    def resumed(self) -> None:
        """The job was paused and has resumed."""
        for recovery in self._last.values():
            recovery.paused = recovery.paused or bool(recovery.missing)

    def reached(self, key: TaskKey, step: RecoveryStep, at: float) -> Milestone | None:
        """Note a step that a worker reports of the current attempt. Returns the milestone if the step is
        complete."""
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
        elif phase := LATER_PHASES.get(step.step):
            if not recovery.paused:
                self.seconds[phase].observe(self.since(key, at))
        elif not recovery.missing.keys() & {"inputs", "outputs"}:
            self.seconds["reattach"].observe(self.since(key, at))
        match step.step:
            case "inputs":
                return Milestone("inputs reattached", at, f"reads from all {count} producers")
            case "outputs":
                return Milestone("outputs reattached", at, f"is read by all {count} consumers")
            case "first record":
                return Milestone("first record", at, "has passed on its first batch")
            case "snapshot read":
                return Milestone("snapshot read", at, "has the state of its snapshot")
            case "replayed":
                return Milestone("replayed", at, f"was sent what all {count} producers retained for it")
            case "caught up":
                return Milestone("caught up", at, "has nothing left to do, for the first time")
