"""The life cycle of one job.

::

    created --all run--> running --all finished--> finished
       |                    |
       +--a task failed, its worker was lost, too many rows--> failing  --all ended-> failed
       +--the user asks------------------------------------> canceling --all ended-> canceled

A terminal task (finished, failed, canceled, abandoned, or lost with its worker) stays so. A job
on its way to ``failed`` or ``canceled`` ends there whatever its tasks report meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from minishuffle import limits
from minishuffle.coordinator.history import History
from minishuffle.counters import TaskCounters
from minishuffle.dataflow.graph import JobGraph, Placement
from minishuffle.errors import ResourceExhausted, ShuffleError, TaskCancelled, UnknownName
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.wire.messages import (
    COUNT_MAX,
    Collected,
    ErrorInfo,
    JobInfo,
    JobRows,
    LogLines,
    TaskInfo,
    TaskReleased,
    TaskReport,
    TaskStateChanged,
)
from minishuffle.wire.packed import unpack_traffic

__all__ = ["JOBS_KEPT", "JOB_OVER", "Job", "JobTable", "TASK_OVER"]


# --- jobs -----------------------------------------------------------------------------------------

JOB_OVER: Final = frozenset({"finished", "failed", "canceled"})
TASK_OVER: Final = frozenset({"finished", "failed", "canceled", "abandoned", "lost"})
RESULT_BYTES_MAX: Final = 16 * limits.MIB
"""What all sinks of a job together may return at their close."""
_STOPPING: Final = {"failing": "failed", "canceling": "canceled"}


@dataclass(slots=True)
class Subtask:
    """One subtask and its current attempt."""

    operator: int
    name: str
    index: int
    worker: int
    attempt: int = FIRST_ATTEMPT
    state: str = "created"
    counters: TaskCounters = field(default_factory=TaskCounters)
    traffic: bytes = b""
    """Rows that the attempt has exchanged, by edge and peer: see :func:`unpack_traffic`."""
    result: bytes = b""

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"

    def info(self, results: bool) -> TaskInfo:
        peers = unpack_traffic(self.traffic)
        return TaskInfo(
            operator=self.operator,
            name=self.name,
            index=self.index,
            attempt=self.attempt,
            state=self.state,
            worker=self.worker,
            counters=self.counters,
            rows_sent=min(COUNT_MAX, sum(peer.sent for peer in peers)),
            rows_received=min(COUNT_MAX, sum(peer.received for peer in peers)),
            result=self.result if results else b"",
        )


class Job:
    """One submitted job; times are of the wall clock.

    Invariants: a terminal job has only terminal tasks; a finished one only finished tasks; a
    failed or failing one has a cause.

    Args:
        segments: how many segments the job requires on each worker.
    """

    def __init__(
        self,
        job: str,
        name: str,
        graph: JobGraph,
        placement: Placement,
        segments: Mapping[int, int],
        *,
        at: float,
        submission: str = "",
    ) -> None:
        self.id = job
        self.name = name
        self.submission = submission
        """The id that the client gave its submission; may be empty."""
        self.placement = placement
        """Worker of each slot, lost ones included."""
        self.state = "created"
        self.submitted_at = at
        self.ended_at = 0.0
        self.stop_sent = False
        """Whether CancelTasks was sent."""
        self.released = False
        """Whether ReleaseJob was sent."""
        self.history = History()
        self._slots = Counter(placement)
        self._segments = dict(segments)
        self._tasks = {
            (operator, index): Subtask(operator, vertex.name, index, placement[index])
            for operator, vertex in enumerate(graph.vertices)
            for index in range(vertex.parallelism)
        }
        self._states = Counter({"created": len(self._tasks)})
        self._result_bytes = 0
        where = ", ".join(map(str, sorted(set(placement))))
        self.history.note(at, "created", f"{name}: {len(self._tasks)} tasks on workers {where}")

    @property
    def terminal(self) -> bool:
        return self.state in JOB_OVER

    @property
    def stopping(self) -> bool:
        """Failing or canceling: its tasks are to be cancelled."""
        return self.state in _STOPPING

    @property
    def task_states(self) -> Counter[str]:
        """Number of tasks by state; states without any may be there with 0."""
        return self._states

    def open_workers(self) -> list[int]:
        """Workers with a task that is not terminal."""
        return sorted({task.worker for task in self._tasks.values() if task.state not in TASK_OVER})

    def slots_held(self) -> Counter[int]:
        """Number of slots by worker, without workers that were lost."""
        return self._slots

    def segments_held(self) -> dict[int, int]:
        """Number of segments required by worker, without workers that were lost."""
        return self._segments

    def rows_kept(self, operator: int) -> list[int]:
        """Rows that each subtask of a sink has kept for other programs so far."""
        return [task.counters.rows_kept for task in self._tasks.values() if task.operator == operator]

    def attempt_of(self, operator: int, index: int) -> int:
        """The current attempt of a subtask."""
        return self._tasks[operator, index].attempt

    def abandoned_slots(self) -> Counter[int]:
        """By worker, the slots held in which a task was abandoned."""
        lost = {task.index for task in self._tasks.values() if task.state == "abandoned"}
        workers = (self.placement[index] for index in lost)
        return Counter(worker for worker in workers if worker in self._slots)

    def info(self, *, results: bool) -> JobInfo:
        """As clients see it; ``results`` of sinks may be left out for brevity."""
        return JobInfo(
            job=self.id,
            name=self.name,
            state=self.state,
            submitted_at=self.submitted_at,
            ended_at=self.ended_at,
            tasks=[task.info(results) for task in self._tasks.values()],
            causes=self.history.causes,
            collected_batches=self.history.batches,
        )

    def rows_after(self, number: int) -> JobRows:
        """Collected batches after the first ``number``.

        Raises:
            ResourceExhausted: some of them were dropped.
        """
        try:
            return self.history.rows_after(number, self.terminal)
        except ResourceExhausted as error:
            raise ResourceExhausted(f"the rows of job {self.id} ({self.name}) are gone: {error}") from None

    # --- what happens to it ----------------------------------------------------------------------

    def heard(
        self, worker: int, message: TaskStateChanged | TaskReleased | Collected | LogLines, at: float
    ) -> bool:
        """A worker says something of it; False if that is not (any more) so."""
        match message:
            case TaskStateChanged():
                return self.task_changed(worker, message, at)
            case TaskReleased():
                return self.task_released(worker, message)
            case Collected():
                return self.collected(worker, message, at)
            case LogLines(lines=lines):
                self.history.log(lines)
                return True

    def task_changed(self, worker: int, message: TaskStateChanged, at: float) -> bool:
        """A worker says that a task's state changed; False if that is not (any more) so."""
        task = self._tasks.get((message.operator, message.index))
        if task is None or (task.worker, task.attempt) != (worker, message.attempt):
            return False
        if task.state in TASK_OVER or task.state == message.state:
            return False
        error = message.error
        self._set(task, message.state, at, error.text if error is not None else str(task))
        if message.state != "running":
            task.counters = message.counters
            task.traffic = message.traffic or task.traffic
        if message.state == "finished":
            self._keep_result(task, message.result, at)
        elif message.state != "running":
            self._blame(task, error, at)
        self._advance(at)
        return True

    def _keep_result(self, task: Subtask, result: bytes, at: float) -> None:
        self._result_bytes += len(result)
        if self._result_bytes <= RESULT_BYTES_MAX:
            task.result = result
            return
        text = (
            f"the sinks of this job returned more than {RESULT_BYTES_MAX} bytes at their close: "
            "write large results with to_parquet"
        )
        self.fail(ErrorInfo(code=ResourceExhausted.code, text=text, task=str(task)), at)

    def _blame(self, task: Subtask, error: ErrorInfo | None, at: float) -> None:
        """A task ended, and not because its work was done."""
        asked = self.stopping and task.state in ("canceled", "abandoned")
        if self.state == "canceling" or asked:
            return
        if error is None:
            text = f"{task}: the task was {task.state} although nobody asked for it"
            error = ErrorInfo(code=TaskCancelled.code, text=text, task=str(task))
        self.fail(error, at)

    def report(self, worker: int, report: TaskReport) -> bool:
        """Counters from a heartbeat; False if they are not of a current attempt."""
        task = self._tasks.get((report.operator, report.index))
        if task is None or (task.worker, task.attempt) != (worker, report.attempt):
            return False
        if task.state not in TASK_OVER:
            task.counters = report.counters
        task.traffic = report.traffic  # grows on: what was written before the end may not be sent yet
        return True

    def task_released(self, worker: int, message: TaskReleased) -> bool:
        """What the task has exchanged in all; False if it is not of a current attempt."""
        task = self._tasks.get((message.operator, message.index))
        if task is None or (task.worker, task.attempt) != (worker, message.attempt):
            return False
        task.traffic = message.traffic
        return True

    def collected(self, worker: int, message: Collected, at: float) -> bool:
        """A batch of rows for the client; False if it is not of a current attempt that runs."""
        task = self._tasks.get((message.operator, message.index))
        if task is None or (task.worker, task.attempt) != (worker, message.attempt):
            return False
        if task.state in TASK_OVER or self.stopping:
            return False
        if not self.history.collect(message.payload):
            text = (
                f"job collected more than {limits.COLLECT_BYTES_MAX} bytes of rows: write large results "
                "with to_parquet instead of collect"
            )
            self.fail(ErrorInfo(code=ResourceExhausted.code, text=text, task=str(task)), at)
        return True

    def worker_lost(self, worker: int, cause: ErrorInfo, at: float) -> None:
        """Its tasks there that are not terminal are lost, and what was held there is free."""
        del self._slots[worker], self._segments[worker]
        here = [task for task in self._tasks.values() if task.worker == worker]
        lost = [task for task in here if task.state not in TASK_OVER]
        for task in lost:
            self._set(task, "lost", at, f"{task} was lost with worker {worker}")
        # Tasks elsewhere may have failed for want of it before, whatever its own had come to.
        explains = self.state == "failing" and not self.history.explained
        if (lost or explains) and self.state != "canceling":
            names = ", ".join(str(task) for task in lost[:5]) + (" and others" if len(lost) > 5 else "")
            text = f"{cause.text}; {names} ran there" if lost else cause.text
            self.fail(cause.model_copy(update={"text": text}), at, verdict=True)
        self._advance(at)

    def undeployed(self, worker: int, error: ShuffleError, at: float) -> None:
        """Its tasks could not be sent to the worker."""
        for task in self._tasks.values():
            if task.worker == worker and task.state not in TASK_OVER:
                self._set(task, "failed", at, str(error))
        self.fail(ErrorInfo(code=error.code, text=f"deployment on worker {worker}: {error}"), at)
        self._advance(at)

    def fail(self, cause: ErrorInfo, at: float, *, verdict: bool = False) -> None:
        """Begin to fail, or add to the causes of a failure that has begun."""
        if self.terminal or self.state == "canceling":
            return
        self.history.blame(cause, verdict=verdict)
        if self.state != "failing":
            self._move("failing", at, cause.text)

    def cancel(self, at: float, why: str) -> None:
        """Begin to cancel, unless it has ended or is ending already."""
        if not self.terminal and not self.stopping:
            self._move("canceling", at, why)
            self._advance(at)

    # --- states ----------------------------------------------------------------------------------

    def _set(self, task: Subtask, state: str, at: float, text: str) -> None:
        self._states[task.state] -= 1
        self._states[state] += 1
        task.state = state
        self.history.note(
            at,
            f"task {state}",
            text,
            operator=task.operator,
            index=task.index,
            attempt=task.attempt,
            worker=task.worker,
        )

    def _move(self, state: str, at: float, text: str) -> None:
        self.state = state
        if self.terminal:
            self.ended_at = at
        self.history.note(at, state, text)

    def _advance(self, at: float) -> None:
        """Follow from the states of the tasks to that of the job."""
        states = self._states
        if self.state == "created" and not states["created"]:
            self._move("running", at, "all tasks run")
        if sum(states[state] for state in TASK_OVER) < len(self._tasks):
            return
        if self.stopping:
            causes = self.history.causes
            text = causes[0].text if causes else "cancelled"
            self._move(_STOPPING[self.state], at, text)
        elif not self.terminal:
            self._move("finished", at, f"after {at - self.submitted_at:.3f} s")

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        states = Counter(task.state for task in self._tasks.values())
        assert states == +self._states
        if self.terminal:
            assert set(states) <= TASK_OVER and self.ended_at >= self.submitted_at
        else:
            assert any(state not in TASK_OVER for state in states)
        if self.state == "finished":
            assert set(states) == {"finished"}
        assert bool(self.history.causes) == (self.state in ("failing", "failed"))
        assert sum(len(task.result) for task in self._tasks.values()) <= RESULT_BYTES_MAX
        self.history.validate()


# --- jobtable -------------------------------------------------------------------------------------
#
# Every job that the coordinator knows, by id: those that run, and the last ones that have ended.


JOBS_KEPT: Final = 100
"""Ended jobs that are still listed."""
JOBS_NAMED: Final = 5
"""Known jobs that an error about an unknown one lists."""


class JobTable(dict[str, Job]):
    """In the order of submission.

    Invariants, once :meth:`forget` was called: at most JOBS_KEPT have ended, and these keep
    COLLECTED_ENDED_BYTES_MAX of collected rows at most.
    """

    def named(self, name: str) -> Job:
        """Raises UnknownName: there is no job of that id."""
        if name in self:
            return self[name]
        known = list(self)[-JOBS_NAMED:]
        there = f"the latest are {', '.join(known)}" if known else "none was submitted yet"
        shown = name[: limits.NAME_BYTES_MAX]
        raise UnknownName(f"there is no job {shown!r}; {there} ('minishuffle jobs list' shows all)")

    def submitted(self, submission: str) -> Job | None:
        """The job of a submission with that id."""
        return next((job for job in self.values() if submission and job.submission == submission), None)

    def active(self) -> list[Job]:
        return [job for job in self.values() if not job.terminal]

    def forget(self) -> None:
        """Drop the oldest jobs that have ended, and rows of the others: first what clients have fetched."""
        ended = [job for job in self.values() if job.terminal]
        for old in ended[: max(0, len(ended) - JOBS_KEPT)]:
            del self[old.id]
        ended = sorted((job for job in self.values() if job.terminal), key=lambda job: job.ended_at)
        excess = sum(job.history.collected_bytes for job in ended) - limits.COLLECTED_ENDED_BYTES_MAX
        for drop in (History.drop_fetched_rows, History.drop_rows):
            for job in ended:
                if excess > 0:
                    excess -= drop(job.history)

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        ended = [job for job in self.values() if job.terminal]
        assert len(ended) <= JOBS_KEPT
        assert sum(job.history.collected_bytes for job in ended) <= limits.COLLECTED_ENDED_BYTES_MAX
