"""The progress of one job's rows: positions of its sources, output of its sinks, and losses. Pure.

It holds the records that change together:

- the positions of its sources, those included that external clients write (:mod:`~.positions`);
- the files that its sinks have completed (:mod:`~.manifest`);
- the rows that attempts have exchanged and dropped (:mod:`~.lossaccounting`).

When a subtask gets its next attempt, the account of the last one is closed, and all of them give the state
with which the next one starts: its *resumption*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from minishuffle.coordinator.jobs.consumption import Ends
from minishuffle.coordinator.jobs.lifecycle import PENDING
from minishuffle.coordinator.jobs.lossaccounting import (
    Attempt,
    Books,
    Losses,
    TaskKey,
    Totals,
    rows_received,
)
from minishuffle.coordinator.jobs.lostpartitions import Replays
from minishuffle.coordinator.jobs.manifest import Manifest
from minishuffle.coordinator.jobs.positions import Resumption, SourceProgress
from minishuffle.coordinator.jobs.subtasks import Subtask, Subtasks
from minishuffle.counters import TaskCounters
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import AttemptPositions, TaskReport
from minishuffle.wire.reports import Collected, FileCompleted, SourcePositions, TaskReleased, TaskStateChanged

__all__ = ["JobProgress"]


class JobProgress:
    """The progress of one job's rows.

    Args:
        ends: the kept partitions, whose producers' rows come again.
        replays: the tasks that run again from the beginning.
    """

    def __init__(self, graph: JobGraph, subtasks: Subtasks, ends: Ends, replays: Replays) -> None:
        self.sources = SourceProgress(repeats=graph.settings.source_lease == 0)
        self.manifest = Manifest()
        self._graph, self._subtasks, self._ends, self._replays = graph, subtasks, ends, replays
        kept = graph.kept_edges() | graph.retained_edges()
        self._snapshotted = graph.snapshotted()
        self.books = Books(graph.edges, kept, replays.vertices | self._snapshotted)
        self.rows_collected = 0
        """Rows that the client has, or gets."""
        self._losses: Losses | None = None
        """Cached losses; None after a change."""

    # --- what is reported -----------------------------------------------------------------------

    def moved(self, task: Subtask, message: TaskStateChanged | SourcePositions, at: float) -> None:
        """Note the positions of a source's current attempt."""
        external = bool(self._graph.vertices[task.operator].stream)
        self.sources.report(*task.key, message.positions, at, external=external)

    def witnessed(self, worker: int, source: AttemptPositions, at: float) -> bool:
        """A peer of a worker says where a source there is, or was when it was lost; False if that attempt has
        ended otherwise, or another has begun."""
        key = source.attempt.subtask.key
        task = self._subtasks.get(key)
        if task is None or (task.worker, task.attempt) != (worker, source.attempt.attempt):
            return False
        if not task.runs and task.state not in PENDING:
            return False
        self.sources.report(*key, source.positions, at)
        self._subtasks.touch(key)
        if not task.runs:
            self._count_made(task)
            self._losses = None
        return True

    def exchanged(self, task: Subtask, traffic: bytes, rows_dropped: dict[str, int]) -> None:
        """Set the total rows exchanged and dropped by a subtask's current attempt."""
        self._losses = None
        task.exchanged(traffic, rows_dropped)

    def exchanged_before(self, worker: int, report: TaskReport | TaskReleased) -> bool:
        """Set the total rows exchanged and dropped by an earlier attempt. False if it is not known."""
        self._losses = None
        attempt, key = report.attempt.attempt, report.attempt.subtask.key
        dropped = report.counters.rows_dropped if isinstance(report, TaskReport) else report.rows_dropped
        if key in self._subtasks:
            self._subtasks.touch(key)
        return self.books.report(worker, key, attempt, report.traffic, dropped)

    def file_completed(self, task: Subtask, message: FileCompleted) -> bool:
        """List a file of a sink; False if it was listed before."""
        if not self.manifest.add(message):
            return False
        task.listed(message.rows)
        self._losses = None
        return True

    # --- what happens ---------------------------------------------------------------------------

    def state_changed(self) -> None:
        """The state of a subtask has changed, so the losses may have too."""
        self._losses = None

    def attempt_lost(self, task: Subtask) -> None:
        """An attempt is lost: note the rows it may have emitted, and its listed files that may still be
        hidden."""
        self.manifest.lost(*task.key, task.attempt)
        self._count_made(task)

    def _count_made(self, task: Subtask) -> None:
        task.may_have_made(self.sources.rows_made(*task.key), self.sources.rows_leased(*task.key))

    def state_lost(self, key: TaskKey, attempt: int) -> None:
        """The state that a subtask's earlier attempt kept is lost."""
        self._subtasks.touch(key)
        self.books.state_lost(key, attempt)
        self._losses = None

    def results_lost(self, rows: int) -> None:
        """Count uncommitted rows kept by a sink as lost with their worker."""
        self.books.lose("result_lost", rows)
        self._losses = None

    def repeats_in_part(self, key: TaskKey) -> None:
        """A consumer gets none of a source's repeated rows."""
        self._subtasks.touch(key)
        self._subtasks[key].repeats_in_part()
        self.books.repeat_in_part(key)

    def coordinator_lost(self) -> None:
        """A new coordinator begins. Without a coordinator, sources continue beyond their leases. Until a
        worker is back, the counts of rows passed on by its tasks are those from before."""
        tasks = [task for task in self._subtasks.values() if task.runs]
        workers = {task.worker for task in tasks if self._graph.vertices[task.operator].is_source}
        passed_on = self.books.passed_on(list(self._subtasks.values()))
        for task in tasks:
            if task.worker in workers and task.passed_on_max is None:
                task.passed_on(passed_on[task.id])
                self._subtasks.touch(task.key)

    def worker_back(self, worker: int) -> None:
        """A worker has come back to this coordinator, with the counts of its tasks."""
        for task in self._subtasks.values():
            if task.worker == worker and task.passed_on_max is not None:
                task.passed_on(None)
                self._subtasks.touch(task.key)

    def next_attempt(self, task: Subtask, at: float) -> Resumption:
        """Close the account of a subtask's last attempt. Returns the state with which the next one starts."""
        key = task.key
        if task.starts_over:
            self.sources.start_over(*key, task.resumption.positions, at)
        elif task.repeated or task.operator in self._snapshotted:
            self.sources.reset(*key, task.resumption.positions)
        elif self.repeats_rows(task.operator) and not self._graph.vertices[task.operator].stream:
            self.sources.reset(*key)
        self.books.repeat(self._rows_again(task))
        resumption = self.sources.resume(*key, at)
        if task.moved:  # It stood still meanwhile: a source with a rate skips nothing.
            resumption = resumption._replace(positions_age=0.0)
        again = self.books.totals(task).counters.rows_again
        self.books.close(task, self._subtasks.values())
        is_guaranteed = self._graph.settings.is_guaranteed
        files, committable = self.manifest.counts(*key), self.manifest.committable(*key)
        return resumption._replace(
            files=files,
            committable=committable,
            files_complete=self.manifest.is_complete(*key),
            rows_collected=task.collected_end if is_guaranteed else 0,
            rows_listed=task.listed_in_all if is_guaranteed else 0,
            rows_again=again if is_guaranteed else 0,
            first_row=task.rows_kept,
        )

    @property
    def rows_published(self) -> int:
        """Rows that left the job: in listed files, committed, and collected."""
        return self.manifest.rows + self.manifest.committed + self.rows_collected

    def collected(self, task: Subtask, message: Collected) -> None:
        """Count rows that the client gets."""
        again = task.collected(message.first_row, message.rows)
        self.rows_collected += message.rows
        if again and self._graph.settings.is_guaranteed:
            self.books.repeat(again)
            self._losses = None

    def recall_collected(self, rows: int) -> None:
        """Restore their number."""
        self.rows_collected = rows

    def goes_back(self, published: int) -> None:
        """The job goes back to where it had published so many rows: those behind it come twice."""
        self.books.repeat(max(0, self.rows_published - published))
        self.manifest.start_over()
        self._losses = None

    def repeats_rows(self, operator: int) -> bool:
        """Whether all rows of a subtask come again when it restarts."""
        return operator in self._replays.vertices or self._ends.keeps(operator)

    def _rows_again(self, task: Subtask) -> int:
        """Upper bound of the rows that come twice: rows already published by a task that is replayed, or rows
        of blocking inputs that its next attempt reads again."""
        outputs = self._graph.outputs_of(task.operator)
        if task.operator in self._replays.vertices:
            kept = task.rows_kept - task.resumption.first_row
            # Rows that are numbered are counted when they are collected again.
            collected = 0 if self._graph.settings.is_guaranteed else task.rows_collected
            return 0 if outputs else task.rows_listed + collected + kept
        edges = {
            edge
            for edge in self._graph.inputs_of(task.operator)
            if self._graph.edges[edge].kind == "blocking" and not self._graph.is_read_first(edge)
        }
        return rows_received(task, edges) if edges else 0

    # --- what follows ---------------------------------------------------------------------------

    def losses(self) -> Losses:
        """Rows lost so far, over all attempts."""
        if self._losses is None:
            self._losses = self.books.losses(self._subtasks.values())
        return self._losses

    def totals(self, task: Subtask, recent: Mapping[Attempt, TaskCounters] | None = None) -> Totals:
        """The totals of a subtask over all its attempts; ``recent`` replaces counters of its attempts."""
        if recent is None or task.id not in recent:
            return self.books.totals(task)
        return self.books.totals(replace(task, counters=recent[task.id]))
