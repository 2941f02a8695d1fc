"""What the snapshots of a simulated run say of rows, and what has to hold between them after each step.

The next attempt of a task goes on from the oldest snapshot that its holder has, whichever others are lost
with it. So for each channel, with what that snapshot of the producer has written and that of the consumer has
taken, and what the producer need not retain any more::

    written ≤ taken    freed ≤ taken
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pytest

from minishuffle.coordinator.jobs.holders import HeldTask
from minishuffle.coordinator.jobs.job import Job
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.frames import ROW_MAX
from minishuffle.worker.tasks.attempt import Attempt
from minishuffle.worker.tasks.localsnapshots import LocalSnapshots
from minishuffle.worker.tasks.snapshotholder import SnapshotHolder
from minishuffle.worker.tasks.snapshotstream import BEGUN

__all__ = ["SnapshotLog", "log_snapshots"]

Label: TypeAlias = tuple[int, int]
"""The attempt of the task, and the number of the snapshot."""


Task: TypeAlias = tuple[int, int]
"""Operator and index."""


class SnapshotLog:
    """What each snapshot counts, and which ones holders have."""

    def __init__(self) -> None:
        self.taken = 0
        """Snapshots in all."""
        self.compared = 0
        """Channels of which both ends were there to be compared."""
        self.counted: dict[LocalSnapshots, dict[int, TaskStateSnapshot]] = {}
        self.labels: dict[Any, Label] = {}
        """By partition of a holder."""

    def note(self, machine: LocalSnapshots, number: int, counted: TaskStateSnapshot) -> None:
        self.taken += 1
        self.counted[machine][number] = counted

    def check(
        self, job: Job, attempts: Mapping[AttemptId, Attempt], holders: Mapping[AttemptId, SnapshotHolder]
    ) -> None:
        """What has to hold of a job, with every attempt that there was and the holders on living workers."""
        nexts = {
            (operator, index): self._next(job, (operator, index), attempts, holders)
            for operator, vertex in enumerate(job.graph.vertices)
            for index in range(vertex.parallelism)
        }
        for number, edge in enumerate(job.graph.edges):
            for producer in range(job.graph.vertices[edge.source].parallelism):
                consumers = job.graph.consumers_of(number, producer)
                written, stable = self._sent(job, (edge.source, producer), nexts, attempts, number)
                for place, consumer in enumerate(consumers):
                    freed = stable[place] if stable else 0
                    if (goes_on := nexts[edge.target, consumer]) is None or freed == ROW_MAX:
                        continue
                    rows = {each.producer: each.row for each in goes_on.taken.get(number, ())}
                    taken = rows.get(producer, 0)
                    self.compared += 1
                    assert max(written[place], freed) <= taken, (
                        f"on edge {number} from {producer} to {consumer} the oldest snapshots have "
                        f"{written[place]} rows written and {taken} taken, and {freed} are freed"
                    )

    def _sent(
        self,
        job: Job,
        task: Task,
        nexts: Mapping[Task, TaskStateSnapshot | None],
        attempts: Mapping[AttemptId, Attempt],
        edge: int,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """By consumer, rows below which the next attempt of a task makes none, and those that its present
        one need not retain; nothing of one that is not there."""
        goes_on = nexts[task]
        written: Sequence[int] = goes_on.written.get(edge, ()) if goes_on is not None else ()
        subtask = job.subtasks[task]
        attempt = attempts.get(AttemptId.of(job.id, *task, subtask.attempt))
        partition = attempt.partitions.get(edge) if attempt is not None else None
        there = isinstance(partition, RetainedPartition) and not partition._released
        stable = partition.stable() if there and subtask.on_worker else ()
        return written or [0] * len(job.graph.consumers_of(edge, task[1])), stable

    def _next(
        self,
        job: Job,
        task: Task,
        attempts: Mapping[AttemptId, Attempt],
        holders: Mapping[AttemptId, SnapshotHolder],
    ) -> TaskStateSnapshot | None:
        """What the next attempt of a task goes on from; None: nothing yet, or nobody knows."""
        if task not in job.holders:
            return None
        named = job.holders.of(task)
        holder = holders.get(HeldTask(task, named.number).of(job.id)) if named.worker else None
        if named.former and not (holder is not None and holder._has_all):  # The coordinator is about to hear.
            holder = holders.get(HeldTask(task, named.former).of(job.id))
        elif not (named.former or named.has_all or named.number == FIRST_ATTEMPT):
            return None
        if holder is None or not holder._kept:  # Its worker leaves.
            return None
        label = self.labels.get(holder.partition)
        if label is None:
            return TaskStateSnapshot()
        attempt, number = label
        machine = attempts[AttemptId.of(job.id, *task, attempt)].task.snapshots._machine  # type: ignore[union-attr]
        return self.counted[machine][number]


def log_snapshots(patch: pytest.MonkeyPatch) -> SnapshotLog:
    """Have each snapshot noted, as long as the patch lasts."""
    log = SnapshotLog()
    init, take, on_marker = LocalSnapshots.__init__, LocalSnapshots.take, SnapshotHolder._on_marker

    def note_begun(self: LocalSnapshots, begun: TaskStateSnapshot, **options: Any) -> None:
        init(self, begun, **options)
        log.counted[self] = {BEGUN: begun}

    def note_and_take(
        self: LocalSnapshots, counted: TaskStateSnapshot, now: float, stable: Mapping[int, Sequence[int]]
    ) -> int:
        number = take(self, counted, now, stable)
        log.note(self, number, counted)
        return number

    def label(self: SnapshotHolder, attempt: int, end: int, marker: Any, whole: Any) -> None:
        on_marker(self, attempt, end, marker, whole)
        if whole is not None and self._kept.get(marker.number) is whole:
            log.labels[whole] = attempt, marker.number

    patch.setattr(LocalSnapshots, "__init__", note_begun)
    patch.setattr(LocalSnapshots, "take", note_and_take)
    patch.setattr(SnapshotHolder, "_on_marker", label)
    return log
