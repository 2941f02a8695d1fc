"""The holders of the snapshots of one job's tasks, where it has a guarantee. Pure.

Each task that takes snapshots (:meth:`JobGraph.snapshotted`) sends them to a holder on another worker, and
its next attempt goes on from there. The holders of a task are numbered from 1. Which snapshots a holder has
the coordinator does not know, but whether it has all that are to be kept: it says so once
(``SnapshotsHeld``). Until then the holder before it stays, if its worker is alive, and is the one that the
next attempt reads::

    none --named--> named --it has all--> holding --its worker leaves, or the task comes there--> former
      ^               |                      |                                                      |
      +--its worker is lost------------------+          released, when the next one has all --------+

Once a holder is lost that may have had snapshots, the task cannot begin anew: its producers may have freed
what these covered. It needs the state of the next holder; if it is lost before there is one, the whole job
goes back to a snapshot of its own (:mod:`~minishuffle.coordinator.jobs.fallback`).
(Flink keeps such state in a checkpoint storage; a holder resembles the secondary copy of its task-local
recovery.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from minishuffle.backoff import Backoff
from minishuffle.coordinator.jobs.lifecycle import PENDING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.subtasks import Subtask, Subtasks, names_of
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import StateLost
from minishuffle.ids import FIRST_ATTEMPT, AttemptId, holder_operator
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import ErrorInfo, PlacedAttempt, TaskAttempt
from minishuffle.wire.reports import SnapshotsHeld

__all__ = ["HeldTask", "Holder", "Holders", "state_lost"]


RETRY: Final = Backoff(first=10.0, longest=300.0)
"""Until a worker that could hold no more for a task is named for it again: there may be room by then, and the
task sends all its snapshots."""


class HeldTask(NamedTuple):
    """A holder on a worker: of which task, and its number among the holders of that."""

    key: TaskKey
    number: int

    @property
    def attempt(self) -> TaskAttempt:
        """Its attempt, as messages about the job name it."""
        return TaskAttempt(operator=holder_operator(self.key[0]), index=self.key[1], attempt=self.number)

    def of(self, job: str) -> AttemptId:
        """Its attempt, as workers know it."""
        return AttemptId.of(job, holder_operator(self.key[0]), self.key[1], self.number)


@dataclass(slots=True)
class Holder(Record):
    """The holder of one task's snapshots, as it is journaled.

    Invariants: ``0 <= former < number`` or both are 0; a holder that has all has none before it; without a
    worker it has nothing.
    """

    number: int = 0
    """The number of the last holder, counted from 1. The first is named with an attempt, and has what that
    begins with."""
    worker: int = 0
    """The worker that holds, 0: none does."""
    has_all: bool = False
    """It has all snapshots that are to be kept."""
    former: int = 0
    """The number of the holder before it, which still has what it had; 0: there is none."""
    former_worker: int = 0
    is_lost: bool = False
    """A holder was lost that may have had snapshots, and no other has all."""
    shunned: tuple[int, ...] = ()
    """Workers that could hold no more for the task, and are not named before ``retry_at``."""
    retry_at: float = 0.0
    """Wall clock; 0: there are none."""
    failures: int = 0
    """Holders in a row that could hold no more."""
    problem: str = ""
    """Why the last of these could not."""
    is_bare: bool = False
    """It was said that no other worker can hold."""

    def named(self, worker: int, *, runs: bool) -> None:
        """The next holder is on this worker. One that comes once the task ``runs`` is never the first: what
        the task has sent so far may be older than the rows that its producers retain."""
        before = max(self.number, FIRST_ATTEMPT) if runs else self.number
        self.number, self.worker, self.has_all = before + 1, worker, False

    def holds(self) -> None:
        """It has all that are to be kept."""
        self.has_all, self.is_lost, self.former, self.former_worker = True, False, 0, 0
        self.shunned, self.retry_at, self.failures, self.problem, self.is_bare = (), 0.0, 0, "", False

    @property
    def has_what_is_there(self) -> bool:
        """The last one has what a next attempt begins with, be it nothing."""
        return self.has_all or (self.number == FIRST_ATTEMPT and not self.is_lost)

    def steps_down(self) -> None:
        """Another is about to be named. A live holder stays as the former one, if there is none."""
        if not self.former:
            self.former, self.former_worker = self.number, self.worker
        self.worker, self.has_all = 0, False

    def lost(self) -> None:
        """It is gone, with all that it had."""
        self.worker, self.has_all = 0, False
        self.is_lost = self.is_lost or not self.former

    def failed(self, problem: str, at: float, *, readable: bool) -> None:
        """It can hold no more, and its worker is not to be named again for a while. If its snapshots are
        ``readable`` and complete, it stays until the next one has all."""
        self.shunned = (*self.shunned, self.worker)
        self.failures, self.problem = self.failures + 1, problem
        self.retry_at = at + RETRY.seconds(self.failures)
        if readable and self.has_what_is_there and not self.former:
            self.steps_down()
        else:
            self.lost()

    def forgive(self, workers: Collection[int]) -> None:
        """Let these workers be named again."""
        self.shunned = tuple(each for each in self.shunned if each not in workers)
        self.retry_at = self.retry_at if self.shunned else 0.0

    def former_lost(self) -> None:
        """The one before it is gone, with all that it had."""
        self.former = self.former_worker = 0
        self.is_lost = True

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert 0 <= self.former < max(1, self.number) or (not self.worker and self.former == self.number)
        assert bool(self.former) == bool(self.former_worker)
        assert not (self.has_all and (self.former or self.is_lost or not self.worker))


class Holders:
    """The holders of one job.

    Args:
        subtasks: told of changes to journal.
    """

    def __init__(self, graph: JobGraph, subtasks: Subtasks) -> None:
        vertices = graph.snapshotted()
        self._subtasks = subtasks
        self._of = {key: Holder() for key in subtasks if key[0] in vertices}
        self._unsent: list[TaskKey] = []
        """Tasks whose holder is to be deployed."""
        self._dropped: list[tuple[int, HeldTask]] = []
        """Holders that are to be released, with their workers."""
        self._apart: frozenset[tuple[int, int]] = frozenset()
        """Pairs of workers without a link, the lower number first."""

    def __contains__(self, key: TaskKey) -> bool:
        return key in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    # --- what happens ---------------------------------------------------------------------------

    def name(self, key: TaskKey, worker: int, *, runs: bool = False) -> None:
        """A worker holds for a task from now on; the holder there was stays until the next one has all.
        ``runs``: an attempt of the task is there already."""
        holder = self._changing(key)
        if holder.worker:
            self.step_down(key)
        holder.named(worker, runs=runs)
        self._unsent.append(key)

    def step_down(self, key: TaskKey) -> None:
        """The holder of a task is not to be any longer, and is alive."""
        holder = self._changing(key)
        if holder.former:
            self._drop(holder.worker, HeldTask(key, holder.number))
        holder.steps_down()

    def start_over(self) -> None:
        """All tasks begin again with something else than their snapshots: no holder is needed any more."""
        for worker in self.workers():
            for held in self.on(worker):
                self._drop(worker, held)
        for key, holder in self._of.items():
            self._of[key] = Holder(
                number=holder.number,
                shunned=holder.shunned,
                retry_at=holder.retry_at,
                failures=holder.failures,
                problem=holder.problem,
                is_bare=holder.is_bare,
            )
            self._subtasks.touch(key)

    def alone(self) -> list[TaskKey]:
        """Tasks without a holder."""
        return [key for key, holder in self._of.items() if not (holder.worker or holder.former)]

    def freed(self, keys: Iterable[TaskKey]) -> None:
        """Producers of these tasks retain nothing that a durable snapshot covers: they go on from that,
        or from what a holder has."""
        for key in keys:
            if not self._of[key].has_all:
                self._changing(key).is_lost = True

    def reported(self, worker: int, held: HeldTask, fact: SnapshotsHeld, at: float) -> bool:
        """A holder has all that are to be kept, or, with a ``problem``, can hold no more, or not give what it
        has: the one before it, too. False if it is neither."""
        problem = fact.problem
        holder = self._of.get(held.key)
        is_former = holder is not None and (holder.former_worker, holder.former) == (worker, held.number)
        is_last = holder is not None and (holder.worker, holder.number) == (worker, held.number)
        if holder is None or not (is_last or (is_former and problem)):
            return False
        self._subtasks.touch(held.key)
        if problem:
            if is_last:
                holder.failed(problem, at, readable=fact.readable)
            else:
                holder.former_lost()
            if holder.former != held.number:
                self._drop(worker, held)
        else:
            if holder.former:
                self._drop(holder.former_worker, HeldTask(held.key, holder.former))
            holder.holds()
        return True

    def worker_lost(self, worker: int) -> None:
        """All holders on a worker are gone. A later worker of its number may hold again."""
        for held in self.on(worker):
            self.gone(worker, held)
        for key in [key for key, each in self._of.items() if worker in each.shunned]:
            self._changing(key).forgive([worker])
        self._dropped = [each for each in self._dropped if each[0] != worker]

    def unheld(self, key: TaskKey) -> bool:
        """No worker is left to hold for a task whose holder has failed: the task goes on alone, as without
        one, and a former holder is released. Gives whether that is new."""
        holder = self._of[key]
        if holder.is_bare and not holder.former:
            return False
        self._subtasks.touch(key)
        if holder.former:
            self._drop(holder.former_worker, HeldTask(key, holder.former))
            holder.former_lost()
        is_new, holder.is_bare = not holder.is_bare, True
        return is_new

    def retry(self, at: float) -> None:
        """Let workers that could hold no more be named again, once that is due."""
        for key, holder in self._of.items():
            if holder.shunned and holder.retry_at <= at:
                self._changing(key).forgive(holder.shunned)

    def next_time(self) -> float | None:
        """When :meth:`retry` has something to do."""
        return min((each.retry_at for each in self._of.values() if each.shunned), default=None)

    def gone(self, worker: int, held: HeldTask) -> None:
        """A holder is not on its worker any more, or never was."""
        holder = self._changing(held.key)
        if (worker, held.number) == (holder.former_worker, holder.former):
            holder.former_lost()
        else:
            holder.lost()

    def _changing(self, key: TaskKey) -> Holder:
        self._subtasks.touch(key)
        return self._of[key]

    def _drop(self, worker: int, held: HeldTask) -> None:
        self._dropped.append((worker, held))
        self._unsent = [key for key in self._unsent if key != held.key]

    def set_apart(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """Between these pairs of workers there has been no link for too long. Whether they are others than
        before."""
        before, self._apart = self._apart, frozenset(pairs)
        return self._apart != before

    # --- what follows ---------------------------------------------------------------------------

    def of(self, key: TaskKey) -> Holder:
        """The holder of a task that takes snapshots."""
        return self._of[key]

    def are_apart(self, one: int, other: int) -> bool:
        """Whether two workers have had no link for too long: neither can hold for tasks of the other."""
        return (min(one, other), max(one, other)) in self._apart

    def worker_of(self, key: TaskKey) -> int:
        """The worker that holds for a task; 0: none does, or it takes no snapshots."""
        holder = self._of.get(key)
        return 0 if holder is None else holder.worker

    def workers_of(self, key: TaskKey) -> set[int]:
        """The workers that have snapshots of a task, or are to have them."""
        holder = self._of.get(key)
        return set() if holder is None else {holder.worker, holder.former_worker} - {0}

    def for_first(self, key: TaskKey, resumption: Resumption) -> Resumption:
        """The resumption of a task's first attempt, with where its snapshots go."""
        holder = self._of.get(key)
        return resumption if holder is None else resumption._replace(holder=holder.number)

    def for_next(self, key: TaskKey, resumption: Resumption) -> Resumption:
        """The resumption of a task's next attempt, with where its snapshots are and go."""
        holder = self._of.get(key)
        if holder is None:
            return resumption
        number = holder.number if holder.worker else 0
        worker, state = (holder.former_worker, holder.former) if holder.former else (holder.worker, number)
        return resumption._replace(
            state_worker=worker,
            state_attempt=state,
            state_holder=state > 0,
            needs_state=holder.is_lost,
            holder=number,
        )

    def without_state(self, tasks: Iterable[Subtask]) -> list[Subtask]:
        """The tasks among these that cannot go on, since nobody has their snapshots; none of them runs."""
        able = [task for task in tasks if task.key in self._of and not task.resumption.has_ended]
        held = [(task, self._of[task.key]) for task in able]
        return [task for task, each in held if each.is_lost and not each.worker and not each.former]

    def unprotected(self) -> list[Subtask]:
        """Tasks on a worker that would be lost together with it: no other worker has what they go on from.
        A task that had ended in what its job began with goes on from nothing."""
        tasks = [self._subtasks[key] for key in self._of if not self._subtasks[key].resumption.has_ended]
        return [task for task in tasks if task.on_worker and self._is_alone(task)]

    def _is_alone(self, task: Subtask) -> bool:
        holder = self._of[task.key]
        away = {holder.worker if holder.has_what_is_there else 0, holder.former_worker}
        return not away - {0, task.worker}

    def on(self, worker: int) -> list[HeldTask]:
        """The holders on a worker, former ones included."""
        found = []
        for key, each in self._of.items():
            if each.worker == worker:
                found.append(HeldTask(key, each.number))
            if each.former_worker == worker:
                found.append(HeldTask(key, each.former))
        return found

    def workers(self) -> set[int]:
        """The workers that hold anything, or could hold no more."""
        holders = self._of.values()
        return {each for one in holders for each in (one.worker, one.former_worker, *one.shunned)} - {0}

    def count(self) -> Counter[int]:
        """By worker, for how many tasks it holds."""
        return Counter(each.worker for each in self._of.values() if each.worker)

    def needs(self, worker: int) -> bool:
        """Whether a worker has snapshots that a task is about to go on from, or another worker is about to
        have."""
        for key, number in self.on(worker):
            task, holder = self._subtasks[key], self._of[key]
            reads = task.state in PENDING or (task.state == "created" and task.attempt > FIRST_ATTEMPT)
            if reads or (task.runs and number == holder.former and holder.worker):
                return True
        return False

    def some_are_alone(self) -> bool:
        """Whether tasks run without a holder on another worker."""
        tasks = [self._subtasks[key] for key in self._of]
        return any(task.runs and self._of[task.key].worker in (0, task.worker) for task in tasks)

    def named_for(self, tasks: Iterable[Subtask]) -> list[PlacedAttempt]:
        """The holders of these tasks, if not the first."""
        holders = [(task.key, self._of[task.key]) for task in tasks if task.key in self._of]
        return [
            PlacedAttempt(**HeldTask(key, each.number).attempt.model_dump(), worker=each.worker)
            for key, each in holders
            if each.worker and each.number > FIRST_ATTEMPT
        ]

    # --- messages -------------------------------------------------------------------------------

    def take_unsent(self) -> list[TaskKey]:
        """Take the tasks whose holder is to be deployed."""
        unsent, self._unsent = self._unsent, []
        return list(dict.fromkeys(key for key in unsent if self._of[key].worker))

    def take_dropped(self) -> list[tuple[int, HeldTask]]:
        """Take the holders that are to be released, with their workers."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # --- the journal ----------------------------------------------------------------------------

    def record(self, key: TaskKey) -> Holder | None:
        """For the journal; None if no holder was ever named."""
        holder = self._of.get(key)
        return replace(holder) if holder is not None and (holder.number or holder.is_lost) else None

    def recall(self, key: TaskKey, record: Holder | None) -> None:
        """Restore from the record. Workers that come back say which holders they have."""
        if record is not None:
            self._of[key] = record

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        for holder in self._of.values():
            holder.validate()


def state_lost(tasks: Sequence[Subtask], why: str) -> ErrorInfo:
    """The reason for which a job goes back whose ``tasks`` were lost, and all their snapshots."""
    error = StateLost(f"{names_of(tasks)} cannot go on alone: no worker has their snapshots any more ({why})")
    return ErrorInfo(code=error.code, text=str(error), task=str(tasks[0]))
