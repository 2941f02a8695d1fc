"""Isolation of a job whose function may crash worker processes: it gets a worker of its own. Pure.

A subtask is *suspected* when two deaths in a row count against it
(:mod:`~minishuffle.coordinator.jobs.deaths`). While it is, its worker takes no slots of other jobs; tasks of
other jobs that run there stay, and restart elsewhere when the worker dies again. The suspect's own slot waits
for a worker without slots of other jobs, as long as one may become free, but at most half of
``slot_timeout``; then it takes any. A slot of another job that finds no worker because of the isolation says
so, and its timeout does not run. The suspicion ends when an attempt gets beyond the place of the death, when
the job ends, or when no worker has died for twice ``slot_timeout``.

A job that loses nothing would go back to a durable snapshot if a task were lost together with the worker that
has its snapshots. There the slot of a suspect waits for a worker without any other slot, its own job's
included, and without snapshots of its tasks.

At most one worker is isolated. It belongs to the job with the most deaths; if several have equally many, to
the job whose attempts got least far. No worker is isolated if no other would be left for the other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from minishuffle.coordinator.jobs.deaths import TaskDeaths
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.scheduling.placement import NONE_CLOSED, takers
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.coordinator.workers import Worker

__all__ = ["SUSPECTED_DEATHS", "Isolation"]

SUSPECTED_DEATHS: Final = 2
"""Number of counted deaths that make a subtask a suspect."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    job: Job
    slots: Mapping[int, TaskDeaths]
    """Deaths by slot of its suspected subtasks."""

    @property
    def rank(self) -> tuple[int, int]:
        """The suspicion with the greatest rank is isolated."""
        return max((deaths.in_a_row, -deaths.position) for deaths in self.slots.values())

    @property
    def worker(self) -> int:
        """The worker with most of the slots; 0: none."""
        placement, lost = self.job.slots.placement, self.job.slots.vacant
        at = [placement[slot] for slot in self.slots if slot not in lost]
        return max(at, key=lambda worker: (at.count(worker), -worker), default=0)

    @property
    def text(self) -> str:
        """Why other jobs get no slots of the worker, as it follows its name in a text."""
        worst = max(deaths.in_a_row for deaths in self.slots.values())
        return f"is kept for job {self.job.id} ({self.job.name}), inside which {worst} workers in a row died"


class Isolation:
    """The isolation of the suspected job.

    Args:
        slot_timeout: seconds for which a lost slot waits for a worker.
    """

    def __init__(self, slot_timeout: float) -> None:
        self._slot_timeout = slot_timeout
        self._suspicion: _Suspicion | None = None
        self._has_others = False
        """There are other jobs besides the suspect's."""
        self._blocked: set[tuple[str, int]] = set()
        """Slots, by job, that found no worker at the last try because of the isolation."""
        self._relented: set[tuple[str, int]] = set()
        """Slots of suspects that no longer wait for a worker of their own."""

    def look(self, jobs: Sequence[Job], at: float) -> Job | None:
        """Find the suspect among the jobs that have not ended. Returns its job, which gets slots first."""
        found = [each for job in jobs if (each := self._suspicion_of(job, at)) is not None]
        self._suspicion = max(found, key=lambda each: each.rank, default=None)
        self._has_others = len(jobs) > 1
        return None if self._suspicion is None else self._suspicion.job

    def _suspicion_of(self, job: Job, at: float) -> _Suspicion | None:
        if job.stopping:
            return None
        slots: dict[int, TaskDeaths] = {}
        for key, deaths in job.deaths.counted().items():
            slot = job.slot_of(key)
            lasts = at < deaths.at + 2 * self._slot_timeout
            if lasts and deaths.in_a_row >= SUSPECTED_DEATHS:
                slots[slot] = max(deaths, slots.get(slot, deaths), key=lambda each: each.in_a_row)
        return _Suspicion(job, slots) if slots else None

    def suspects(self, job: Job, slot: int | None = None) -> bool:
        """Whether the job is the suspect's, and the slot, if given, is suspected."""
        suspicion = self._suspicion
        if suspicion is None or suspicion.job is not job:
            return False
        return slot is None or slot in suspicion.slots

    # --- who may go where ------------------------------------------------------------------------

    def closed(self, job: Job, slot: int, workers: Sequence[Worker], held: Holdings) -> Mapping[int, str]:
        """The workers that do not take a lost slot of a job, with the reason as it follows their name.

        Args:
            workers: all known ones, lost ones included.
            held: slots and segments of all jobs.
        """
        suspicion, alive = self._suspicion, takers(each for each in workers if each.state == "alive")
        if suspicion is None:
            return NONE_CLOSED
        if suspicion.job is not job:
            return self.closed_to_new(alive)
        if slot not in suspicion.slots or (job.id, slot) in self._relented:
            return NONE_CLOSED
        own = job.slots.held()
        if job.graph.settings.is_guaranteed:
            holders = job.holders_of(slot)
            wanted = [n for n in (each.worker for each in alive) if not held.slots[n] and n not in holders]
        elif self._has_others:
            at = suspicion.worker
            at = at if any(each.worker == at for each in alive) else 0  # It is to leave.
            free = [each.worker for each in alive if held.slots[each.worker] <= own[each.worker]]
            wanted = [at] if at else free if len(alive) > 1 else []
        else:
            return NONE_CLOSED
        if not wanted and not any(each.state == "lost" for each in workers):
            return NONE_CLOSED  # No other will come.
        text = f"is not for a task inside which {suspicion.slots[slot].in_a_row} workers in a row died"
        return {each.worker: text for each in alive if each.worker not in wanted}

    def closed_to_new(self, alive: Sequence[Worker]) -> Mapping[int, str]:
        """The workers that take no slots of jobs other than the suspect's, with the reason."""
        suspicion = self._suspicion
        if suspicion is None or not (worker := suspicion.worker):
            return NONE_CLOSED
        is_one_left = any(each.worker != worker for each in takers(alive))
        return {worker: suspicion.text} if is_one_left else NONE_CLOSED

    # --- waiting ---------------------------------------------------------------------------------

    def tried(self, job: Job, slot: int, closed: Mapping[int, str], free: Mapping[int, int]) -> float:
        """Note whether a lost slot got a worker. Returns the seconds it may wait before :meth:`wait_on` must
        decide.

        Args:
            closed: the result of :meth:`closed`.
            free: free slots of each worker.
        """
        key, is_suspect = (job.id, slot), self.suspects(job, slot)
        if slot not in job.slots.vacant:
            self._blocked.discard(key)
            self._relented.discard(key)
        elif closed and (is_suspect or any(free.get(worker, 0) > 0 for worker in closed)):
            self._blocked.add(key)
            return self._slot_timeout / 2 if is_suspect else self._slot_timeout
        else:
            self._blocked.discard(key)
        return self._slot_timeout

    def blocks(self, job: Job, slot: int) -> bool:
        """Whether a slot found no worker because of the isolation, and may find one when it ends."""
        return (job.id, slot) in self._blocked

    def wait_on(self, job: Job, at: float) -> None:
        """Extend the wait of overdue slots that found no worker because of the isolation."""
        for slot in job.slots_overdue(at):
            key = (job.id, slot)
            if key not in self._blocked:
                continue
            self._blocked.discard(key)
            seconds = self._slot_timeout
            if self.suspects(job, slot):
                self._relented.add(key)
                seconds /= 2
            job.wait_on(slot, at + seconds)

    def forget(self, job: str) -> None:
        """A job has ended: forget its slots."""
        self._blocked = {key for key in self._blocked if key[0] != job}
        self._relented = {key for key in self._relented if key[0] != job}
