"""The slots of one job: their workers, moves and vacancies. Pure.

A slot *moves* while its tasks end on its current worker; then another worker has it, or none if no worker has
a free slot. A slot is *vacant* while no worker has it: its worker was lost or is draining; or, on a schedule
that takes slots when they are needed, it is not taken yet or was given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from minishuffle.plan.graph import Placement

__all__ = ["NOWHERE", "Slots"]

NOWHERE = 0
"""The target of a slot that must leave its worker while no other has a free slot."""


class Slots:
    """The slots of one job; subtask i of each operator runs in slot i of its group.

    Invariant: segments are required exactly on workers that have a slot, or to which a slot moves.

    Args:
        placement: the worker of each slot; NOWHERE if none is taken yet.
        segments: the number of segments that the job requires on each worker.
    """

    def __init__(self, placement: Placement, segments: Mapping[int, int]) -> None:
        self.placement = placement
        """The worker of each slot; of a vacant slot, its last worker."""
        self.segments = dict(segments)
        """Number of segments required on each worker, without lost workers."""
        self.vacant = {slot for slot, worker in enumerate(placement) if worker == NOWHERE}
        self.shortage = ""
        """Why no worker took one of the vacant slots at the last attempt."""
        self._loss_texts: dict[int, str] = {}
        """Texts by lost worker."""
        self.moving: dict[int, int] = {}
        """Target worker, or NOWHERE, by moving slot."""
        self.left: set[int] = set()
        """Workers that had slots, and may still keep the partitions of tasks that finished there."""
        self.blocked: set[tuple[int, int]] = set()
        """Workers and slots of abandoned attempts: their threads still run, and the slots take no other
        task."""
        self.gave_back = False
        """Slots were given back since the last :meth:`take_gave_back`."""

    def recall(
        self,
        vacant: Iterable[int],
        segments: Mapping[int, int],
        moving: Mapping[int, int],
        left: Iterable[int],
        *,
        blocked: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Restore from the journaled values."""
        self.vacant, self.segments = set(vacant), dict(segments)
        self.moving, self.left, self.blocked = dict(moving), set(left), set(blocked)

    def lacks(self, why: str) -> None:
        """No worker can take a vacant slot: note why."""
        self.shortage = why

    def held(self) -> Counter[int]:
        """Number of slots by worker, without vacant ones. A moving slot counts on both workers."""
        held = Counter(worker for slot, worker in enumerate(self.placement) if slot not in self.vacant)
        held.update(worker for worker in self.moving.values() if worker != NOWHERE)
        return held

    def workers(self) -> set[int]:
        """The workers that have slots, or had some and may keep partitions."""
        return {*self.held(), *self.left}

    def on(self, workers: Iterable[int]) -> list[int]:
        """The slots of these workers that are not moving."""
        there = set(workers)
        return [
            slot
            for slot, worker in enumerate(self.placement)
            if worker in there and slot not in self.vacant and slot not in self.moving
        ]

    def coming(self, worker: int) -> list[int]:
        """The slots that move to a worker."""
        return [slot for slot, target in self.moving.items() if target == worker]

    def worker_lost(self, worker: int, text: str) -> None:
        """A worker is lost: its slots become vacant, for the reason ``text``. Slots that move away from it
        arrive at once."""
        self._loss_texts[worker] = text
        for slot in self.coming(worker):
            del self.moving[slot]
        for slot, holder in enumerate(self.placement):
            if holder == worker and slot not in self.vacant:
                self._leave(slot)
        self.segments.pop(worker, None)
        self.left.discard(worker)
        self.blocked = {each for each in self.blocked if each[0] != worker}

    def excluded(self, worker: int) -> None:
        """A worker has lost its slots though it is alive: others may read what it has."""
        self.left.add(worker)

    def block(self, worker: int, slot: int) -> None:
        """An attempt was abandoned in a slot that a worker has, or had."""
        self.blocked.add((worker, slot))

    def why_wanting(self, worker: int) -> str:
        """Why tasks of a lost or draining worker have no slot."""
        lost = self._loss_texts.get(worker, f"worker {worker} was lost")
        return f"{lost}; {self.shortage}" if self.shortage else lost

    def move(self, slot: int, worker: int, segments: int) -> None:
        """Give a slot to a worker, which then requires ``segments`` for the job: at once if the slot is
        vacant, else when :meth:`arrive` is called."""
        if slot in self.vacant:
            self.vacant.remove(slot)
            self._place(slot, worker)
        else:
            self.moving[slot] = worker
        self.segments[worker] = segments

    def evict(self, worker: int, slots: Collection[int]) -> None:
        """Take ``slots`` from a worker, with no target yet. Slots that move to the worker lose it as their
        target."""
        coming = self.coming(worker)
        self.moving.update(dict.fromkeys([*slots, *coming], NOWHERE))
        if coming and worker not in self.held():
            del self.segments[worker]

    def arrive(self, slot: int) -> None:
        """The tasks of a moving slot have ended on its old worker: complete the move."""
        before = self.placement[slot]
        self._loss_texts[before] = f"worker {before} is to leave"
        self._leave(slot)
        self._let_go(before)

    def give_back(self, slots: Iterable[int]) -> None:
        """Give back slots in which no task runs or is about to run. Partitions of tasks that finished there
        stay."""
        for slot in slots:
            self.vacant.add(slot)
            self._let_go(self.placement[slot])
            self.gave_back = True

    def take_gave_back(self) -> bool:
        """Whether slots were given back since the last call."""
        gave_back, self.gave_back = self.gave_back, False
        return gave_back

    def _let_go(self, worker: int) -> None:
        """A slot has left a worker: if it was its last one, the worker requires no segments any more."""
        if worker not in self.held() and worker in self.segments:
            del self.segments[worker]
            self.left.add(worker)

    def _leave(self, slot: int) -> None:
        worker = self.moving.pop(slot, NOWHERE)
        if worker == NOWHERE:
            self.vacant.add(slot)
        else:
            self._place(slot, worker)

    def _place(self, slot: int, worker: int) -> None:
        self.placement = (*self.placement[:slot], worker, *self.placement[slot + 1 :])
        self.left.discard(worker)

    def validate(self) -> None:
        """Check the invariant; for tests, after each step."""
        assert set(self.segments) == set(self.held())
        assert not self.vacant & self.moving.keys()
        assert all(self.placement[slot] != worker for slot, worker in self.moving.items())
