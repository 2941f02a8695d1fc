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

from minishuffle.coordinator.jobs.job import Job
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.ids import FIRST_ATTEMPT, holder_operator
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.frames import ROW_MAX
from minishuffle.worker.tasks.attempt import Attempt
from minishuffle.worker.tasks.localsnapshots import LocalSnapshots
from minishuffle.worker.tasks.snapshotholder import SnapshotHolder
from minishuffle.worker.tasks.snapshotstream import BEGUN
from support.simulated_jobs import Sender

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
        self, job: Job, attempts: Mapping[Sender, Attempt], holders: Mapping[Sender, SnapshotHolder]
    ) -> None:
        """What has to hold of a job, with every attempt that there was and the holders on living workers, by
        operator, index and attempt."""
        graph = job.graph
        nexts = {task: self._next(job, task, attempts, holders) for task in job.subtasks}
        for number, edge in enumerate(graph.edges):
            takes = [
                None if each is None else {rows.producer: rows.row for rows in each.taken.get(number, ())}
                for consumer in range(graph.vertices[edge.target].parallelism)
                for each in [nexts[edge.target, consumer]]
            ]
            for producer in range(graph.vertices[edge.source].parallelism):
                written, stable = self._sent(job, (edge.source, producer), nexts, attempts, number)
                for place, consumer in enumerate(graph.consumers_of(number, producer)):
                    freed, rows = stable[place] if stable else 0, takes[consumer]
                    if rows is None or freed == ROW_MAX:
                        continue
                    taken, begins = rows.get(producer, 0), written[place] if written else 0
                    self.compared += 1
                    assert begins <= taken and freed <= taken, (
                        f"on edge {number} from {producer} to {consumer} the oldest snapshots have "
                        f"{begins} rows written and {taken} taken, and {freed} are freed"
                    )

    def _sent(
        self,
        job: Job,
        task: Task,
        nexts: Mapping[Task, TaskStateSnapshot | None],
        attempts: Mapping[Sender, Attempt],
        edge: int,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """By consumer, rows below which the next attempt of a task makes none, and those that its present
        one need not retain; nothing of one that makes all, or is not there."""
        goes_on = nexts[task]
        written: Sequence[int] = goes_on.written.get(edge, ()) if goes_on is not None else ()
        subtask = job.subtasks[task]
        attempt = attempts.get((*task, subtask.attempt))
        partition = attempt.partitions.get(edge) if attempt is not None else None
        there = isinstance(partition, RetainedPartition) and not partition._released
        return written, partition.stable() if there and subtask.on_worker else ()

    def _next(
        self,
        job: Job,
        task: Task,
        attempts: Mapping[Sender, Attempt],
        holders: Mapping[Sender, SnapshotHolder],
    ) -> TaskStateSnapshot | None:
        """What the next attempt of a task goes on from; None: nothing yet, or nobody knows."""
        if task not in job.holders:
            return None
        named, (operator, index) = job.holders.of(task), task
        holder = holders.get((holder_operator(operator), index, named.number)) if named.worker else None
        if named.former and not (holder is not None and holder._has_all):  # The coordinator is about to hear.
            holder = holders.get((holder_operator(operator), index, named.former))
        elif not (named.former or named.has_all or named.number == FIRST_ATTEMPT):
            return None
        if holder is None or not holder._kept:  # Its worker leaves.
            return None
        label = self.labels.get(holder.partition)
        if label is None:
            return TaskStateSnapshot()
        attempt, number = label
        machine = attempts[operator, index, attempt].task.snapshots._machine  # type: ignore[union-attr]
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
