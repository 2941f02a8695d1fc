"""The pause of one job: its barriers, which of its tasks stand behind them, and when it is complete. Pure.

A pause is *wanted* until every task runs that has not finished. Then a barrier goes out, the next number of
the job: sources put it between two reads, and each other task passes it on once it has read all that came
before. The pause is *aligning* until all of them stand behind it, and then the job is *paused*::

    none --a client asks--> wanted --all run--> aligning --all stand--> paused --a client asks--> none
                              ^                    |
                              +--an attempt ends---+

An attempt that ends before all stand takes the barrier back everywhere; after ``TRIES_MAX`` barriers, or
``pause_timeout``, the pause fails, and all go on. One that ends later is not waited for: the next one begins
behind the barrier.

A task that waits for consumers of which none reads from it, since they read another input to its end first,
cannot come to a barrier: it counts as one that stands, and what it waits with stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from minishuffle.coordinator.jobs.lifecycle import WAITING, Subtask, names_of
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.journal.codec import Record
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import PauseTasks, Standing

__all__ = ["JobPause", "Phase", "TRIES_MAX"]

TRIES_MAX: Final = 3
"""Barriers of one pause."""
Phase = Literal["none", "wanted", "aligning", "paused"]
_RUNS: Final = Standing()


@dataclass(slots=True)
class PauseRecord(Record):
    """Times are of the wall clock: a coordinator that takes over goes on with them."""

    phase: Phase = "none"
    barrier: int = 0
    """The last that went out; 0: none has."""
    tries: int = 0
    """How many went out for this pause."""
    until: float = 0.0
    """When it fails, if it is not complete by then."""
    seconds: float = 0.0
    """How long it may take."""
    since: float = 0.0
    """When it was complete."""
    problem: str = ""
    """Why the last one failed."""


@dataclass(slots=True)
class JobPause(PauseRecord):
    """Invariant: what stands is known of no attempt while no barrier is out."""

    unsent: bool = field(default=False, repr=False)
    """The workers have yet to hear of the barrier, or that it has ended."""
    _stand: dict[TaskKey, tuple[int, Standing]] = field(default_factory=dict, repr=False)
    """Attempt, and how it stands to the barrier that is out."""

    # --- moves -----------------------------------------------------------------------------------

    def want(self, at: float, seconds: float) -> None:
        """A client asks for it, and for no longer than so many seconds; no effect if one has before."""
        if self.phase == "none":
            self.phase, self.tries, self.problem = "wanted", 0, ""
            self.until, self.seconds = at + seconds, seconds

    @property
    def under_way(self) -> bool:
        return self.phase in ("wanted", "aligning")

    @property
    def is_out(self) -> bool:
        """Tasks are to stand behind the barrier."""
        return self.phase in ("aligning", "paused")

    def next_barrier(self) -> int:
        """The number of a barrier that is not of a pause."""
        self.barrier += 1
        return self.barrier

    def look(self, graph: JobGraph, tasks: Mapping[TaskKey, Subtask], at: float) -> bool:
        """Send a barrier out if every task that was deployed and has not finished runs; True, once, when all
        stand. What waits to be deployed waits on."""
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
        """How the current attempt of a task stands; True if that is new."""
        known = (task.attempt, standing)
        if not self.is_out or self._stand.get(task.key) == known:
            return False
        self._stand[task.key] = known
        return True

    def interrupted(self, task: Subtask) -> str:
        """The attempt of a task has ended, and its work is not done: before all stand, the barrier is taken
        back. Gives why the pause fails, if that was once too often."""
        if self.phase != "aligning":
            return ""
        self._take_back("wanted")
        if self.tries < TRIES_MAX:
            return ""
        return f"{task} restarted, as tasks did in each of {TRIES_MAX} tries"

    def end(self, problem: str = "", *, tells: bool = True) -> None:
        """It has ended, or has failed for that ``problem``: whatever stands goes on. Workers hear of it,
        unless the job ends as well."""
        self.problem = problem
        self._take_back("none")
        self.unsent = self.unsent and tells

    def repeat(self) -> None:
        """The workers hear once more what holds now."""
        self.unsent = True

    def take_unsent(self) -> bool:
        """Whether the workers have yet to hear of the barrier, or that it has ended: True once."""
        unsent, self.unsent = self.unsent, False
        return unsent

    def _take_back(self, phase: Phase) -> None:
        self.unsent = self.unsent or self.is_out
        self.phase = phase
        self._stand.clear()

    def message(self, term: int, job: str) -> PauseTasks | None:
        """What a worker of the job is to know; None if there has been no barrier."""
        if not self.barrier:
            return None
        return PauseTasks(term=term, job=job, barrier=self.barrier, paused=self.is_out)

    # --- who stands ------------------------------------------------------------------------------

    def _standing(self, key: TaskKey, attempt: int) -> Standing:
        of, standing = self._stand.get(key, (0, _RUNS))
        return standing if of == attempt else _RUNS

    def _moving(self, graph: JobGraph, tasks: Collection[Subtask]) -> list[Subtask]:
        """Those that have yet to stand."""
        moving = {each.key: each for each in _live(tasks)}
        for key, task in list(moving.items()):
            if self._standing(key, task.attempt).barrier >= self.barrier:
                del moving[key]
        blocked = {each.key for each in tasks if each.state == WAITING}
        while found := {key for key, task in moving.items() if self._is_blocked(graph, task, blocked)}:
            blocked |= found
            for key in found:
                del moving[key]
        return list(moving.values())

    def _is_blocked(self, graph: JobGraph, task: Subtask, blocked: Collection[TaskKey]) -> bool:
        """Whether it waits for consumers of which none reads from it before the pause has ended: each is
        ``blocked`` itself, reads that input later, or is not deployed so far."""
        if not self._standing(task.key, task.attempt).blocked:
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
        """Why the pause fails after its time: the first tasks, on the way of the data, that do not stand,
        and do not wait for others that do not. Those that are ``leaving`` run, and move to another worker
        before it begins."""
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
        # One that waits for its consumers is not to blame, but they are.
        free = [task for task in moving.values() if not self._standing(task.key, task.attempt).blocked]
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
        """What stays where it is while the job is paused, in words."""
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
            if (unsent := self._standing(task.key, task.attempt).outbox)
        ]
        found += [f"{dead_letters:,} dead letters, in its log"] if dead_letters else []
        return found


def _live(tasks: Iterable[Subtask]) -> list[Subtask]:
    """Those that are to stand: all that were deployed and have not finished."""
    return [task for task in tasks if task.state not in ("finished", WAITING)]
