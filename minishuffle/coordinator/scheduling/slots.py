"""The slots of one job: which workers have them, which move, and which are vacant. Pure.

A slot *moves* while its tasks end on the worker that has it; then it is another one's, or nobody's if none
has a free one. A slot is *vacant* while no worker has it: it was lost with its worker or had to leave it; or,
on a schedule that takes slots when they are needed, it was not taken so far or was given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from minishuffle.plan.graph import Placement

__all__ = ["NOWHERE", "Slots"]

NOWHERE = 0
"""Where a slot moves to that has to leave its worker, and for which there is no other."""


class Slots:
    """Subtask i of each operator runs in slot i.

    Invariant: segments are required of exactly those workers that have a slot, or to which one moves.

    Args:
        placement: the worker of each slot, or NOWHERE if none has been taken for it.
        segments: how many segments the job requires on each worker.
    """

    def __init__(self, placement: Placement, segments: Mapping[int, int]) -> None:
        self.placement = placement
        """The worker of each slot; of a vacant slot, its last worker."""
        self.segments = dict(segments)
        """Number of segments required by worker, without workers that were lost."""
        self.vacant = {slot for slot, worker in enumerate(placement) if worker == NOWHERE}
        self.shortage = ""
        """Why no worker could take one of the vacant slots, when that was tried last."""
        self._loss_texts: dict[int, str] = {}
        """By worker that was lost."""
        self.moving: dict[int, int] = {}
        """By slot that moves, the worker that it moves to, or NOWHERE."""
        self.left: set[int] = set()
        """Workers that had slots, and may keep what tasks that have finished there wrote."""
        self.blocked: set[tuple[int, int]] = set()
        """Worker and slot of attempts that were abandoned: their threads still run, and take no other task
        beside them."""
        self.gave_back = False
        """Others may have what was given back; until somebody looks."""

    def recall(
        self,
        vacant: Iterable[int],
        segments: Mapping[int, int],
        moving: Mapping[int, int],
        left: Iterable[int],
        *,
        blocked: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Become what these are, of which the journal has each."""
        self.vacant, self.segments = set(vacant), dict(segments)
        self.moving, self.left, self.blocked = dict(moving), set(left), set(blocked)

    def lacks(self, why: str) -> None:
        """No worker can take a vacant slot, for that reason."""
        self.shortage = why

    def held(self) -> Counter[int]:
        """Number of slots by worker, without those that are vacant. One that moves is held on both."""
        held = Counter(worker for slot, worker in enumerate(self.placement) if slot not in self.vacant)
        held.update(worker for worker in self.moving.values() if worker != NOWHERE)
        return held

    def workers(self) -> set[int]:
        """Those that have slots, and those that have had some."""
        return {*self.held(), *self.left}

    def on(self, workers: Iterable[int]) -> list[int]:
        """The slots that these have and that do not move away."""
        there = set(workers)
        return [
            slot
            for slot, worker in enumerate(self.placement)
            if worker in there and slot not in self.vacant and slot not in self.moving
        ]

    def coming(self, worker: int) -> list[int]:
        """The slots that move there."""
        return [slot for slot, target in self.moving.items() if target == worker]

    def worker_lost(self, worker: int, text: str) -> None:
        """Its slots are vacant, as the text says, but for those that move elsewhere: these are there
        already."""
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
        """Why tasks that ran on that worker, which was lost or is to leave, have no slot."""
        lost = self._loss_texts.get(worker, f"worker {worker} was lost")
        return f"{lost}; {self.shortage}" if self.shortage else lost

    def move(self, slot: int, worker: int, segments: int) -> None:
        """That worker, which has to have ``segments`` for the job, gets a slot: at once if it is vacant,
        else when it :meth:`arrives <arrive>`."""
        if slot in self.vacant:
            self.vacant.remove(slot)
            self._place(slot, worker)
        else:
            self.moving[slot] = worker
        self.segments[worker] = segments

    def evict(self, worker: int, slots: Collection[int]) -> None:
        """These slots of it are to leave it, wherever they go, and none comes any more."""
        coming = self.coming(worker)
        self.moving.update(dict.fromkeys([*slots, *coming], NOWHERE))
        if coming and worker not in self.held():
            del self.segments[worker]

    def arrive(self, slot: int) -> None:
        """Nothing runs any more where a slot was that moves."""
        before = self.placement[slot]
        self._loss_texts[before] = f"worker {before} is to leave"
        self._leave(slot)
        self._let_go(before)

    def give_back(self, slots: Iterable[int]) -> None:
        """Nothing runs in these, which do not move, nor is to for now: others may have what they took. What
        tasks that have finished there wrote stays."""
        for slot in slots:
            self.vacant.add(slot)
            self._let_go(self.placement[slot])
            self.gave_back = True

    def take_gave_back(self) -> bool:
        """Whether slots were given back since the last call."""
        gave_back, self.gave_back = self.gave_back, False
        return gave_back

    def _let_go(self, worker: int) -> None:
        """A slot has left that worker: nothing is required of it any more if that was its last one."""
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
