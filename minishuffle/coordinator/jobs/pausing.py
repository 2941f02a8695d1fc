"""The pause of one job: its barriers, and the tasks that have stopped at them. Pure.

A pause is *wanted* until every unfinished task runs. Then a barrier is sent, with the job's next barrier
number. Sources insert it between two reads; every other task forwards it once it has read everything before
it. The pause is *aligning* until all tasks have stopped at the barrier, and then the job is *paused*::

    none --a client asks--> wanted --all run--> aligning --all stand--> paused --a client asks--> none
                              ^                    |
                              +--an attempt ends---+

If an attempt ends while the pause is aligning, the barrier is taken back everywhere. After ``TRIES_MAX``
barriers, or ``pause_timeout``, the pause fails and all tasks continue. If an attempt ends later, its next
attempt starts at the barrier, and the job stays paused.

A task may wait for consumers that will not read from it before the pause ends, since they first read another
input to its end. It cannot reach a barrier. So it counts as stopped, and its rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask, names_of
from minishuffle.coordinator.journal.codec import Record
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import PauseTasks, Standing

__all__ = ["JobPause", "Phase", "TRIES_MAX"]

TRIES_MAX: Final = 3
"""Most barriers sent for one pause."""
Phase = Literal["none", "wanted", "aligning", "paused"]
_RUNS: Final = Standing()


@dataclass(slots=True)
class PauseRecord(Record):
    """The journaled state of a pause. Times are wall clock, so the next coordinator can continue with
    them."""

    phase: Phase = "none"
    barrier: int = 0
    """Number of the last barrier sent; 0: none."""
    tries: int = 0
    """Number of barriers sent for this pause."""
    until: float = 0.0
    """Deadline of the pause."""
    seconds: float = 0.0
    """Time limit until it is complete, in seconds."""
    since: float = 0.0
    """Time at which the job was paused."""
    problem: str = ""
    """Why the last pause failed."""


@dataclass(slots=True)
class JobPause(PauseRecord):
    """The pause of one job.

    Invariant: while no barrier is out, no task is recorded as stopped.
    """

    unsent: bool = field(default=False, repr=False)
    """The workers have not been sent the barrier, or its end, yet."""
    _stand: dict[TaskKey, tuple[int, Standing]] = field(default_factory=dict, repr=False)
    """By subtask, the attempt, and its standing at the current barrier."""

    # --- moves -----------------------------------------------------------------------------------

    def want(self, at: float, seconds: float) -> None:
        """A client asks for a pause within ``seconds``; no effect if one is wanted or complete already."""
        if self.phase == "none":
            self.phase, self.tries, self.problem = "wanted", 0, ""
            self.until, self.seconds = at + seconds, seconds

    @property
    def under_way(self) -> bool:
        return self.phase in ("wanted", "aligning")

    @property
    def is_out(self) -> bool:
        """A barrier is out, at which tasks must stop."""
        return self.phase in ("aligning", "paused")

    def next_barrier(self) -> int:
        """Take the number of a barrier that does not belong to a pause."""
        self.barrier += 1
        return self.barrier

    def look(self, graph: JobGraph, tasks: Mapping[TaskKey, Subtask], at: float) -> bool:
        """Send a barrier if every deployed and unfinished task runs. True, once, when all tasks have stopped.
        Tasks that wait for deployment keep waiting."""
        live = _live(tasks.values())
        is_between = not live and any(task.state == WAITING for task in tasks.values())
        if self.phase == "wanted" and all(task.state == "running" for task in live):
            self.phase, self.barrier, self.tries = "aligning", self.barrier + 1, self.tries + 1
            self.unsent = True
            self._stand.clear()
        if self.phase != "aligning" or not (live or is_between) or self._moving(graph, tasks.values()):
            return False
        self.phase, self.since = "paused", at
        return True

    def stands(self, task: Subtask, standing: Standing) -> bool:
        """Note the standing of a task's current attempt; True if it has changed."""
        known = (task.attempt, standing)
        if not self.is_out or self._stand.get(task.key) == known:
            return False
        self._stand[task.key] = known
        return True

    def interrupted(self, task: Subtask) -> str:
        """An attempt has ended before its task was finished: take back a barrier that is aligning. Returns
        why the pause fails, if all tries are used."""
        if self.phase != "aligning":
            return ""
        self._take_back("wanted")
        if self.tries < TRIES_MAX:
            return ""
        return f"{task} restarted, as tasks did in each of {TRIES_MAX} tries"

    def end(self, problem: str = "", *, tells: bool = True) -> None:
        """End the pause, or let it fail with a ``problem``: stopped tasks continue. Workers get a message
        unless the job ends as well (``tells``)."""
        self.problem = problem
        self._take_back("none")
        self.unsent = self.unsent and tells

    def repeat(self) -> None:
        """Send the workers the current state again."""
        self.unsent = True

    def take_unsent(self) -> bool:
        """Whether the workers must be sent the barrier, or its end: True once."""
        unsent, self.unsent = self.unsent, False
        return unsent

    def _take_back(self, phase: Phase) -> None:
        self.unsent = self.unsent or self.is_out
        self.phase = phase
        self._stand.clear()

    def message(self, term: int, job: str) -> PauseTasks | None:
        """The current state for a worker; None if there has been no barrier."""
        if not self.barrier:
            return None
        return PauseTasks(term=term, job=job, barrier=self.barrier, paused=self.is_out)

    # --- who stands ------------------------------------------------------------------------------

    def standing(self, key: TaskKey, attempt: int) -> Standing:
        """How an attempt stands to the current barrier."""
        of, standing = self._stand.get(key, (0, _RUNS))
        return standing if of == attempt else _RUNS

    def _moving(self, graph: JobGraph, tasks: Collection[Subtask]) -> list[Subtask]:
        """Tasks that have not stopped yet."""
        moving = {each.key: each for each in _live(tasks)}
        for key, task in list(moving.items()):
            if self.standing(key, task.attempt).barrier >= self.barrier:
                del moving[key]
        blocked = {each.key for each in tasks if each.state == WAITING}
        while found := {key for key, task in moving.items() if self._is_blocked(graph, task, blocked)}:
            blocked |= found
            for key in found:
                del moving[key]
        return list(moving.values())

    def _is_blocked(self, graph: JobGraph, task: Subtask, blocked: Collection[TaskKey]) -> bool:
        """Whether a task waits for consumers, none of which will read from it before the pause ends: each is
        ``blocked`` itself, reads this input later, or is not deployed yet."""
        if not self.standing(task.key, task.attempt).blocked:
            return False
        consumers = [
            (edge, (graph.edges[edge].target, consumer))
            for edge in graph.outputs_of(task.operator)
            for consumer in graph.consumers_of(edge, task.index)
        ]
        return bool(consumers) and all(
            key in blocked or edge in self._stand.get(key, (0, _RUNS))[1].unread for edge, key in consumers
        )

    def overdue(self, graph: JobGraph, tasks: Collection[Subtask], leaving: Collection[TaskKey]) -> str:
        """Why the pause fails at its deadline: the most upstream tasks that have not stopped, and do not wait
        for other tasks to stop. Subtasks ``leaving`` a worker move before the pause begins."""
        live = _live(tasks)
        within = f"within {self.seconds:g} s (pause_timeout)"
        if self.phase == "wanted":
            if late := [task for task in live if task.state != "running"]:
                return f"{names_of(late)} did not run {within}"
            if late := [task for task in live if task.key in leaving]:
                what = "did not move from a worker that is to leave"
                return f"{names_of(late)} {what} {within}: pause again once it has left"
            return f"what is to be deployed did not run {within}"
        moving = {task.key: task for task in self._moving(graph, tasks)}
        # A task that waits for its consumers is not to blame; its consumers are.
        free = [task for task in moving.values() if not self.standing(task.key, task.attempt).blocked]
        blamed = {task.key: task for task in free} or moving
        first = [task for key, task in blamed.items() if not blamed.keys() & {*graph.producers(*key)}]
        sources = [task for task in first if graph.vertices[task.operator].is_source]
        if sources:
            what, advice = (
                "did not return from its read, or from what is chained to it,",
                "have it yield sooner",
            )
        else:
            what, advice = "has not taken all that was on its way to it", "see 'minishuffle diagnose'"
        return f"{names_of(sources or first)} {what} {within}: {advice}, or raise pause_timeout"

    def left(self, graph: JobGraph, tasks: Collection[Subtask], dead_letters: int) -> list[str]:
        """The data that stays where it is while the job is paused, in words."""
        edges = sorted({edge for _, standing in self._stand.values() for edge in standing.unread})
        found = [
            f"rows before input {edge.input} of {graph.vertices[edge.target].name}, which is read later"
            for edge in (graph.edges[number] for number in edges)
        ]
        waiting = {task.operator for task in tasks if task.state == WAITING}
        written = {
            edge.target
            for number, edge in enumerate(graph.edges)
            if edge.source not in waiting and number not in graph.kept_edges()
        }
        found += [
            f"rows before {graph.vertices[vertex].name}, which is not deployed so far"
            for vertex in sorted(waiting & written)
        ]
        kept = {graph.vertices[graph.edges[edge].source].name for edge in graph.kept_edges()}
        found += [f"what {name} stores for its consumers" for name in sorted(kept)]
        found += [f"what is written to stream {each.stream}" for each in graph.vertices if each.stream]
        found += [
            f"what readers have yet to take of sink {each.sink}" for each in graph.vertices if each.sink
        ]
        found += [
            f"{unsent:,} bytes of rows or lines that {task} has yet to send to the coordinator"
            for task in tasks
            if (unsent := self.standing(task.key, task.attempt).outbox)
        ]
        found += [f"{dead_letters:,} dead letters, in its log"] if dead_letters else []
        return found


def _live(tasks: Iterable[Subtask]) -> list[Subtask]:
    """Tasks that must stop at a barrier: deployed and not finished."""
    return [task for task in tasks if task.state not in ("finished", WAITING)]
