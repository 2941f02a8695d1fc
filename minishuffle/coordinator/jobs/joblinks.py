"""The links between workers that one job needs and does not have, and the workers that it does without. Pure.

Tasks have needed a link for ``link_timeout``, and probes say that none can be made: then one of the two
workers is excluded from the job, and its subtasks move. That is the one that most other workers of the job
cannot reach; of two that are equal in that the one with fewer slots of the job, then the one that registered
later.
It is let in again when links between it and each worker of the job could be made for ``link_timeout``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from minishuffle.coordinator.jobs.history import History
from minishuffle.coordinator.journal.codec import Record
from minishuffle.coordinator.links import PairKey
from minishuffle.wire.requests import BrokenLink

__all__ = ["Exclusion", "JobLinks"]


@dataclass(frozen=True, slots=True)
class Exclusion(Record):
    """A worker that gets no slots of a job, although it is alive."""

    other: int
    """The worker that it has no link to."""
    why: str
    """Names both, with their addresses."""


@dataclass(frozen=True, slots=True)
class LinksRecord(Record):
    """Who is excluded from a job, and since when."""

    excluded: dict[int, Exclusion]
    moved_at: float


class JobLinks:
    """Which links are broken, as workers say again to the next coordinator, and who is excluded.

    Args:
        history: of the job.
    """

    def __init__(self, history: History) -> None:
        self.broken: dict[PairKey, str] = {}
        """Texts by pair of workers between which tasks need a link that there has not been for
        ``link_timeout``."""
        self.excluded: dict[int, Exclusion] = {}
        """By worker."""
        self.moved_at = 0.0
        """When one was excluded last, by the wall clock."""
        self._broken_at: dict[PairKey, float] = {}
        """When it was heard of that."""
        self._history = history

    # --- links -----------------------------------------------------------------------------------

    def hear(self, links: Mapping[PairKey, str], at: float, now: float) -> bool:
        """These links are broken, and no others; True: that is new. ``at`` is of the wall clock, ``now`` of
        that of probes."""
        gone, new = self.broken.keys() - links.keys(), links.keys() - self.broken.keys()
        for pair in sorted(new):
            self._history.note(at, "link broken", links[pair])
        for one, other in sorted(gone):
            text = f"worker {one} and worker {other} are connected again, or need no connection any more"
            self._history.note(at, "link restored", text)
        kept = {pair: text for pair, text in self.broken.items() if pair not in gone}
        self.broken = kept | {pair: links[pair] for pair in new}
        self._broken_at = {pair: self._broken_at.get(pair, now) for pair in self.broken}
        return bool(gone or new)

    def forget(self, worker: int) -> None:
        """That worker is lost or has left: its links are no matter."""
        self._drop_broken(worker)
        self.excluded.pop(worker, None)

    def _drop_broken(self, worker: int) -> None:
        self.broken = {pair: text for pair, text in self.broken.items() if worker not in pair}
        self._broken_at = {pair: at for pair, at in self._broken_at.items() if pair in self.broken}

    def infos(self) -> list[BrokenLink]:
        """As clients see them: those that tasks wait for, and those for which a worker is excluded."""
        found = [BrokenLink(workers=list(pair), text=text) for pair, text in self.broken.items()]
        return found + [
            BrokenLink(workers=sorted((worker, each.other)), text=each.why, excluded=worker)
            for worker, each in self.excluded.items()
        ]

    def end(self) -> None:
        """The job has ended, and needs none."""
        self.broken, self._broken_at, self.excluded = {}, {}, {}

    # --- workers ---------------------------------------------------------------------------------

    def to_judge(self, at: float, seconds: float) -> dict[PairKey, float]:
        """The broken links for which a worker may be excluded at that time of the wall clock, once in so many
        seconds, each with the time from which on probes count."""
        return self._broken_at if at >= self.moved_at + seconds else {}

    def worst(
        self,
        pair: PairKey,
        slots: Mapping[int, int],
        apart: Callable[[int, int], bool],
        epoch: Callable[[int], int],
    ) -> int:
        """Which of the two is to be excluded.

        Args:
            slots: of the job, by worker.
            apart: whether no link could be made between two workers.
            epoch: which of the registrations a worker's is.
        """

        def rank(worker: int) -> tuple[int, int, int]:
            others = (other for other in slots if other != worker)
            return sum(apart(worker, other) for other in others), -slots[worker], epoch(worker)

        return max(pair, key=rank)

    def exclude(self, worker: int, exclusion: Exclusion, at: float) -> None:
        """That worker gets no slots of the job from now on."""
        self.excluded[worker], self.moved_at = exclusion, at
        self._drop_broken(worker)
        self._history.note(at, "worker excluded", exclusion.why, worker=worker)

    def readmit(self, worker: int, seconds: float, at: float) -> None:
        """That worker may get slots of the job again: it could be linked with all others for so long, or (0)
        there are none."""
        del self.excluded[worker]
        could = f"could connect to each worker of this job for {seconds:g} s, and may run its tasks again"
        text = f"worker {worker} {could if seconds else 'may run tasks of this job again: no other has any'}"
        self._history.note(at, "worker readmitted", text, worker=worker)

    def closed(self) -> dict[int, str]:
        """Workers that take no slots of the job, and why, behind their name."""
        return dict.fromkeys(self.excluded, "is excluded from this job, since others cannot connect to it")

    def watched(self, workers: Iterable[int]) -> set[PairKey]:
        """Pairs of excluded workers and those that have slots of the job."""
        return {
            (min(pair), max(pair)) for one in self.excluded for other in workers for pair in [(one, other)]
        }

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> LinksRecord:
        """All but broken links, and what probes have found."""
        return LinksRecord(self.excluded, self.moved_at)

    def recall(self, record: LinksRecord) -> None:
        """Become what the record says."""
        self.excluded, self.moved_at = record.excluded, record.moved_at
