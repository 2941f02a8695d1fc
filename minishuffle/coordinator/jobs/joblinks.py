"""The broken links between workers of a job, and the workers excluded from the job because of them. Pure.

If tasks have needed a link for ``link_timeout``, and probes show that it cannot be made, one of its two
workers is excluded from the job, and its subtasks move. The excluded worker is the one that more of the job's
other workers cannot reach; if equal, the one with fewer slots of the job; if equal, the one that registered
later. It is readmitted when links between it and every worker of the job have been possible for
``link_timeout``.
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
    """The exclusion of an alive worker from a job."""

    other: int
    """The worker it cannot connect to."""
    why: str
    """Names both, with their addresses."""


@dataclass(frozen=True, slots=True)
class LinksRecord(Record):
    """The exclusions of a job, as they are journaled."""

    excluded: dict[int, Exclusion]
    moved_at: float


class JobLinks:
    """The broken links and the exclusions of one job. Broken links are not journaled: workers report them to
    the next coordinator again.

    Args:
        history: of the job.
    """

    def __init__(self, history: History) -> None:
        self.broken: dict[PairKey, str] = {}
        """Error texts by pair of workers, for links that tasks have needed for ``link_timeout``."""
        self.excluded: dict[int, Exclusion] = {}
        """Exclusions by worker."""
        self.moved_at = 0.0
        """Wall clock of the last exclusion, in seconds."""
        self._broken_at: dict[PairKey, float] = {}
        """By pair, when it was first reported as broken, by the clock of probes."""
        self._history = history

    # --- links -----------------------------------------------------------------------------------

    def set_broken(self, links: Mapping[PairKey, str], at: float, now: float) -> bool:
        """Set the broken links of the job; True if they have changed. ``at`` is wall clock, ``now`` the clock
        of probes."""
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
        """A worker is lost or has left: forget its links and its exclusion."""
        self._drop_broken(worker)
        self.excluded.pop(worker, None)

    def _drop_broken(self, worker: int) -> None:
        self.broken = {pair: text for pair, text in self.broken.items() if worker not in pair}
        self._broken_at = {pair: at for pair, at in self._broken_at.items() if pair in self.broken}

    def infos(self) -> list[BrokenLink]:
        """The broken links for clients: links that tasks wait for, and links for which a worker is
        excluded."""
        found = [BrokenLink(workers=list(pair), text=text) for pair, text in self.broken.items()]
        return found + [
            BrokenLink(workers=sorted((worker, each.other)), text=each.why, excluded=worker)
            for worker, each in self.excluded.items()
        ]

    def end(self) -> None:
        """The job has ended and needs no links."""
        self.broken, self._broken_at, self.excluded = {}, {}, {}

    # --- workers ---------------------------------------------------------------------------------

    def to_judge(self, at: float, seconds: float) -> dict[PairKey, float]:
        """The broken links for which a worker may be excluded at the wall clock ``at``, each with the time
        from which its probes count. Empty within ``seconds`` of the last exclusion."""
        return self._broken_at if at >= self.moved_at + seconds else {}

    def worst(
        self,
        pair: PairKey,
        slots: Mapping[int, int],
        apart: Callable[[int, int], bool],
        epoch: Callable[[int], int],
    ) -> int:
        """The worker of the pair to exclude.

        Args:
            slots: of the job, by worker.
            apart: whether no link could be made between two workers.
            epoch: the number of a worker's registration.
        """

        def rank(worker: int) -> tuple[int, int, int]:
            others = (other for other in slots if other != worker)
            return sum(apart(worker, other) for other in others), -slots[worker], epoch(worker)

        return max(pair, key=rank)

    def exclude(self, worker: int, exclusion: Exclusion, at: float) -> None:
        """Exclude a worker: it gets no more slots of the job."""
        self.excluded[worker], self.moved_at = exclusion, at
        self._drop_broken(worker)
        self._history.note(at, "worker excluded", exclusion.why, worker=worker)

    def readmit(self, worker: int, seconds: float, at: float) -> None:
        """Let an excluded worker get slots of the job again. Either it could connect to all others for
        ``seconds``, or ``seconds`` is 0 and no other worker has slots."""
        del self.excluded[worker]
        could = f"could connect to each worker of this job for {seconds:g} s, and may run its tasks again"
        text = f"worker {worker} {could if seconds else 'may run tasks of this job again: no other has any'}"
        self._history.note(at, "worker readmitted", text, worker=worker)

    def closed(self) -> dict[int, str]:
        """Workers excluded from slots of the job, with the reason as it follows their name in a text."""
        return dict.fromkeys(self.excluded, "is excluded from this job, since others cannot connect to it")

    def watched(self, workers: Iterable[int]) -> set[PairKey]:
        """All pairs of an excluded worker and a worker with slots of the job."""
        return {
            (min(pair), max(pair)) for one in self.excluded for other in workers for pair in [(one, other)]
        }

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> LinksRecord:
        """For the journal: the exclusions, without broken links and probe results."""
        return LinksRecord(self.excluded, self.moved_at)

    def recall(self, record: LinksRecord) -> None:
        """Restore from the record."""
        self.excluded, self.moved_at = record.excluded, record.moved_at
