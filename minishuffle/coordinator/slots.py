"""The slots of one job: which workers have them, and which were lost with theirs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from minishuffle.dataflow.graph import Placement

__all__ = ["Slots"]


class Slots:
    """Subtask i of each operator runs in slot i.

    Invariant: segments are required of exactly those workers that have a slot which is not lost.

    Args:
        placement: the worker of each slot.
        segments: how many segments the job requires on each worker.
    """

    def __init__(self, placement: Placement, segments: Mapping[int, int]) -> None:
        self.placement = placement
        """The worker of each slot, or the last one of a slot that was lost with it."""
        self.segments = dict(segments)
        """Number of segments required by worker, without workers that were lost."""
        self.lost: set[int] = set()
        self.shortage = ""
        """Why no worker could take one of the lost slots, when that was tried last."""
        self._loss_texts: dict[int, str] = {}
        """By worker that was lost."""

    def held(self) -> Counter[int]:
        """Number of slots by worker, without workers that were lost."""
        return Counter(worker for slot, worker in enumerate(self.placement) if slot not in self.lost)

    def worker_lost(self, worker: int, text: str) -> None:
        """Its slots are lost with it, as the text says."""
        self._loss_texts[worker] = text
        self.lost |= {slot for slot, holder in enumerate(self.placement) if holder == worker}
        del self.segments[worker]

    def why_wanting(self, worker: int) -> str:
        """Why tasks that ran on that worker, which was lost, have no slot."""
        lost = self._loss_texts.get(worker, f"worker {worker} was lost")
        return f"{lost}; {self.shortage}" if self.shortage else lost

    def move(self, slot: int, worker: int, segments: int) -> None:
        """A slot of a lost worker is that one's now, which has to have ``segments`` for the job."""
        self.lost.remove(slot)
        self.placement = (*self.placement[:slot], worker, *self.placement[slot + 1 :])
        self.segments[worker] = segments

    def validate(self) -> None:
        """Check the invariant; for tests, after each step."""
        assert set(self.segments) == set(self.held())
