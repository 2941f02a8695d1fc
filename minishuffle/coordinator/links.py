"""Between which workers there is a link, or could be one, as probes, heartbeats and waiting tasks tell. Pure.

Of each pair of workers the one with the lower id probes the other, as it would dial it, when either registers
or comes back, and again while that fails or somebody asks. What a probe finds refuses nobody: it is shown.
Only a link that tasks of a job need and that there has not been for ``link_timeout`` is *broken*.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from minishuffle import limits
from minishuffle.coordinator.workers import Worker, WorkerRegistry
from minishuffle.wire.messages import Heartbeat, Probe, Probed

__all__ = ["ANSWER_SECONDS", "Links", "Pair", "PairKey", "pair_of"]

PairKey: TypeAlias = tuple[int, int]
"""Worker ids, the lower first: it dials."""
PROBES_PER_TIMEOUT: Final = 4
"""So often is a pair probed within ``link_timeout`` that is probed again and again."""
ANSWER_SECONDS: Final = limits.PROBE_SECONDS_MAX + 1.0
"""After which a probe without an answer is sent again."""


def pair_of(one: int, other: int) -> PairKey:
    """The key of two workers."""
    return (one, other) if one < other else (other, one)


@dataclass(slots=True)
class Pair:
    """What is known of two workers that are alive."""

    linked: bool | None = None
    """There is a link, or the last probe could make one; None: nobody knows so far."""
    since: float = 0.0
    """Since when it has been so."""
    answered_at: float = -math.inf
    """When that was seen last."""
    why: str = ""
    """Why there is none."""


class _Need(NamedTuple):
    """What a worker reports of a link that it needs and does not have."""

    since: float
    why: str
    jobs: frozenset[str]


class Links:
    """All pairs of workers.

    Args:
        seconds: ``link_timeout``, or ``heartbeat_timeout`` if that is longer.
    """

    def __init__(self, term: int, seconds: float) -> None:
        self.seconds = seconds
        self._term = term
        self._pairs: dict[PairKey, Pair] = {}
        self._probe_at: dict[PairKey, float] = {}
        """When a pair is to be probed, or asked for once more."""
        self._queue: list[tuple[float, PairKey]] = []
        """The same in the order of their times, a heap, and what was changed since."""
        self._watched: frozenset[PairKey] = frozenset()
        """Pairs that are probed again and again, whatever is found."""
        self._needs: dict[int, dict[int, _Need]] = {}
        """By worker that needs a link, and by the other one."""
        self._new: dict[int, set[int]] = {}
        """Workers whose first probes have not all been answered, with the others that are missing."""
        self._of: dict[int, set[PairKey]] = {}
        """The pairs of each worker."""
        self.reached = Counter[int]()
        """With how many others each worker has a link, or could have one."""
        self._failing: set[PairKey] = set()

    # --- coming and going ------------------------------------------------------------------------

    def joined(self, worker: int, others: Iterable[int], now: float) -> None:
        """A worker has registered, or come back: it and each of the others are to be probed."""
        missing = self._new[worker] = {other for other in others if other != worker}
        for other in missing:
            key = pair_of(worker, other)
            self._pairs.setdefault(key, Pair())
            self._at(key, now)
            for each in key:
                self._of.setdefault(each, set()).add(key)

    def left(self, worker: int) -> None:
        """It is not alive any more."""
        self._new.pop(worker, None)
        self._needs.pop(worker, None)
        for needs in self._needs.values():
            needs.pop(worker, None)
        for missing in self._new.values():
            missing.discard(worker)
        for key in self._of.pop(worker, ()):
            other = _other(key, worker)
            self._of[other].discard(key)
            self.reached[other] -= bool(self._pairs.pop(key).linked)
            self._probe_at.pop(key, None)
            self._failing.discard(key)
        del self.reached[worker]

    # --- probes ----------------------------------------------------------------------------------

    def ask(self, keys: Iterable[PairKey], now: float) -> None:
        """Have these probed now, as far as no answer is under way."""
        for key in keys:
            if key in self._pairs and key not in self._probe_at:
                self._at(key, now)

    def _at(self, key: PairKey, at: float) -> None:
        """Have a pair probed then, and no sooner."""
        self._probe_at[key] = at
        heapq.heappush(self._queue, (at, key))

    def watch(self, keys: Collection[PairKey], now: float) -> bool:
        """Have these probed again and again, and no others unless that fails; True: there are new ones."""
        watched = frozenset(keys)
        new, self._watched = watched - self._watched, watched
        self.ask(new, now)
        return bool(new)

    def due(self, workers: WorkerRegistry, now: float) -> list[tuple[int, Probe]]:
        """What to send to whom now."""
        peers: dict[int, list[int]] = {}
        while (at := self.next_deadline()) is not None and at <= now:
            _, key = heapq.heappop(self._queue)
            peers.setdefault(key[0], []).append(key[1])
            self._at(key, now + ANSWER_SECONDS)
        found = []
        for number, others in sorted(peers.items()):
            known = [
                worker.address for other in sorted(others) if (worker := workers.get_alive(other)) is not None
            ]
            if known and workers.get_alive(number) is not None:
                found.append((number, Probe(term=self._term, peers=known)))
        return found

    def next_deadline(self) -> float | None:
        """When :meth:`due` has something."""
        while self._queue and self._probe_at.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def probed(self, by: int, message: Probed, now: float) -> bool | None:
        """What a worker has found: whether that differs from what was known, None if nothing was or the pair
        is not known."""
        key = (by, message.worker)
        pair = self._pairs.get(key)
        if pair is None:
            return None
        before = pair.linked
        self._seen(key, not message.why, message.why, now)
        self._probe_at.pop(key, None)
        if message.why or key in self._watched:
            self._at(key, now + self.seconds / PROBES_PER_TIMEOUT)
        return None if before is None else pair.linked != before

    def _seen(self, key: PairKey, linked: bool, why: str, now: float) -> None:
        pair = self._pairs[key]
        if pair.linked is not linked:
            for worker in key:
                self.reached[worker] += linked - bool(pair.linked)
            (self._failing.discard if linked else self._failing.add)(key)
            pair.linked, pair.since = linked, now
        pair.why, pair.answered_at = why, now
        for worker in key:
            self._new.get(worker, set()).discard(_other(key, worker))

    def take_new(self) -> list[int]:
        """Workers whose first probes have all been answered by now, and which were not given before."""
        found = sorted(worker for worker, missing in self._new.items() if not missing)
        for worker in found:
            del self._new[worker]
        return found

    # --- links that tasks need -------------------------------------------------------------------

    def heard(self, worker: Worker, message: Heartbeat, workers: WorkerRegistry, now: float) -> set[str]:
        """A heartbeat: gives the jobs that need, or needed, links which that worker does not have."""
        before = self._needs.pop(worker.worker, {})
        needs: dict[int, _Need] = {}
        for each in message.unlinked:
            peer = workers.get_alive(each.worker)
            if peer is not None and peer.epoch == each.epoch and peer is not worker:
                since = max(now - each.seconds, worker.joined_at, peer.joined_at)
                needs[peer.worker] = _Need(since, each.why, frozenset(each.jobs))
        if needs:
            self._needs[worker.worker] = needs
        for peer_report in message.peers:
            key = pair_of(worker.worker, peer_report.worker)
            other = workers.get_alive(peer_report.worker)
            if key in self._pairs and other is not None and other.epoch == peer_report.epoch:
                self._seen(key, True, "", now)
        return {job for each in (*before.values(), *needs.values()) for job in each.jobs}

    def broken(self, job: str, now: float) -> dict[PairKey, str]:
        """The pairs between which tasks of a job have needed a link for too long, each with why there is
        none, as far as that is known."""
        found: dict[PairKey, str] = {}
        for worker, needs in self._needs.items():
            for peer, need in needs.items():
                if job in need.jobs and now >= need.since + self.seconds:
                    key = pair_of(worker, peer)
                    found[key] = found.get(key) or need.why or self._pairs.get(key, _NOTHING).why
        return found

    # --- what is known ---------------------------------------------------------------------------

    def pair(self, one: int, other: int) -> Pair:
        """What is known of two workers."""
        return self._pairs.get(pair_of(one, other), _NOTHING)

    def failing(self) -> list[tuple[PairKey, str]]:
        """The pairs between which no link could be made, each with why."""
        return [(key, self._pairs[key].why) for key in sorted(self._failing)]

    def validate(self, alive: Collection[int]) -> None:
        """Check the invariants against what is alive or awaited; for tests, after each step."""
        assert {worker for key in self._pairs for worker in key} <= set(alive)
        assert all(low < high for low, high in self._pairs)
        assert self._probe_at.keys() <= self._pairs.keys()
        assert self._needs.keys() <= set(alive) and self._new.keys() <= set(alive)
        assert self._failing == {key for key, pair in self._pairs.items() if pair.linked is False}
        linked = Counter(worker for key, pair in self._pairs.items() if pair.linked for worker in key)
        assert +self.reached == linked
        assert {key for keys in self._of.values() for key in keys} == self._pairs.keys()


def _other(key: PairKey, worker: int) -> int:
    return key[1] if key[0] == worker else key[0]


_NOTHING: Final = Pair()
