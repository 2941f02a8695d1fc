"""Which job is alone on a worker, since its function may be what ends the process there. Pure.

A subtask that two deaths in a row count against (:mod:`~minishuffle.coordinator.jobs.deaths`) is *suspected*.
While that lasts its worker takes no slot of another job; those that are there stay, and go elsewhere when
the worker dies again. The suspect's own slot waits for a worker that no other job has slots on, as long as
one may come: for half of ``slot_timeout`` at most, then it takes any. What waits because of that says so, and
its time does not run out: the suspicion ends when an attempt gets past the place, when the job ends, or when
no further worker has died for twice ``slot_timeout``.

There is one such worker at most, of the job that has died most often, and among those of the one that got
least far; and there is none if no other worker is left for the others.
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
"""So many deaths that count make a suspect."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    job: Job
    slots: Mapping[int, TaskDeaths]
    """Those of its suspected subtasks."""

    @property
    def rank(self) -> tuple[int, int]:
        """The greatest is isolated."""
        return max((deaths.count, -deaths.position) for deaths in self.slots.values())

    @property
    def worker(self) -> int:
        """The one that has most of the slots; 0: none has."""
        placement, lost = self.job.slots.placement, self.job.slots.vacant
        at = [placement[slot] for slot in self.slots if slot not in lost]
        return max(at, key=lambda worker: (at.count(worker), -worker), default=0)

    @property
    def text(self) -> str:
        """Why others do not get a worker, behind its name."""
        worst = max(deaths.count for deaths in self.slots.values())
        return f"is kept for job {self.job.id} ({self.job.name}), inside which {worst} workers in a row died"


class Isolation:
    """
    Args:
        slot_timeout: seconds for which a lost slot waits for a worker.
    """

    def __init__(self, slot_timeout: float) -> None:
        self._slot_timeout = slot_timeout
        self._suspicion: _Suspicion | None = None
        self._has_others = False
        """There are other jobs than that of the suspect."""
        self._blocked: set[tuple[str, int]] = set()
        """Slots, by job, that found no worker when that was tried last, and may have but for this."""
        self._relented: set[tuple[str, int]] = set()
        """Slots of suspects that wait for a worker of their own no longer."""

    def look(self, jobs: Sequence[Job], at: float) -> Job | None:
        """Find the suspect among the jobs that have not ended; gives its job, which gets slots first."""
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
            if lasts and deaths.count >= SUSPECTED_DEATHS:
                slots[slot] = max(deaths, slots.get(slot, deaths), key=lambda each: each.count)
        return _Suspicion(job, slots) if slots else None

    def suspects(self, job: Job, slot: int | None = None) -> bool:
        """Whether it is the job of the suspect, and the slot one of its slots."""
        suspicion = self._suspicion
        if suspicion is None or suspicion.job is not job:
            return False
        return slot is None or slot in suspicion.slots

    # --- who may go where ------------------------------------------------------------------------

    def closed(self, job: Job, slot: int, workers: Sequence[Worker], held: Holdings) -> Mapping[int, str]:
        """The workers that do not take that lost slot of a job, and why, behind their name.

        Args:
            workers: all that the coordinator knows, those that were lost included.
            held: by all jobs.
        """
        suspicion, alive = self._suspicion, takers(each for each in workers if each.state == "alive")
        if suspicion is None:
            return NONE_CLOSED
        if suspicion.job is not job:
            return self.closed_to_new(alive)
        if not self._has_others or slot not in suspicion.slots or (job.id, slot) in self._relented:
            return NONE_CLOSED
        own, at = job.slots.held(), suspicion.worker
        at = at if any(each.worker == at for each in alive) else 0  # It is to leave.
        free = [each.worker for each in alive if held.slots[each.worker] <= own[each.worker]]
        wanted = [at] if at else free if len(alive) > 1 else []
        if not wanted and not any(each.state == "lost" for each in workers):
            return NONE_CLOSED  # No other will come.
        text = f"is not for a task inside which {suspicion.slots[slot].count} workers in a row died"
        return {each.worker: text for each in alive if each.worker not in wanted}

    def closed_to_new(self, alive: Sequence[Worker]) -> Mapping[int, str]:
        """The same for what is not of the suspect's job."""
        suspicion = self._suspicion
        if suspicion is None or not (worker := suspicion.worker):
            return NONE_CLOSED
        is_one_left = any(each.worker != worker for each in takers(alive))
        return {worker: suspicion.text} if is_one_left else NONE_CLOSED

    # --- waiting ---------------------------------------------------------------------------------

    def tried(self, job: Job, slot: int, closed: Mapping[int, str], free: Mapping[int, int]) -> float:
        """A lost slot has got a worker, or waits for one; gives for how many seconds before
        :meth:`wait_on` has to look.

        Args:
            closed: what :meth:`closed` gave.
            free: slots of each worker.
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
        """Whether a slot has found no worker, and may find one once the suspicion has ended."""
        return (job.id, slot) in self._blocked

    def wait_on(self, job: Job, at: float) -> None:
        """Slots of a job have waited long enough: those that waited because of a suspicion wait on."""
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
        """It has ended."""
        self._blocked = {key for key in self._blocked if key[0] != job}
        self._relented = {key for key in self._relented if key[0] != job}
