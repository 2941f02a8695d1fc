"""The links between workers that exist or could be made, from probes, heartbeats and waiting tasks. Pure.

In each pair of workers, the one with the lower id probes the other, as it would dial it. It does so when
either registers or comes back, again while probes fail, at growing intervals, and at once on request. A
failed probe excludes no worker; it is shown. Only a link that tasks of a job need, and that has not existed
for ``link_timeout``, is *broken*.

The number of pairs grows with the square of the number of workers, so in large clusters only some are probed:
each newcomer is tried with at most ``PROBES_PER_WORKER_MAX`` others, on as many hosts as possible. At most
``PROBES_UNDER_WAY_MAX`` probes are under way at a time, and at most ``PROBES_PER_SECOND_MAX`` begin per
second. Probes of links that jobs need come first, without waiting for others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Final, NamedTuple, TypeAlias

from minishuffle import limits
from minishuffle.coordinator.workers import Worker, WorkerRegistry
from minishuffle.wire.messages import Heartbeat, Probe, Probed

__all__ = ["ANSWER_SECONDS", "Links", "Pair", "PairKey", "pair_of"]

PairKey: TypeAlias = tuple[int, int]
"""Worker ids, the lower first: the lower one dials."""
PROBES_PER_TIMEOUT: Final = 4
"""Number of probes within ``link_timeout`` of a pair that is watched."""
ANSWER_SECONDS: Final = limits.PROBE_SECONDS_MAX + 1.0
"""Seconds after which a probe without an answer is sent again."""
TURN_SECONDS: Final = 0.01
"""Shortest time between two batches of probes delayed by the rate limit."""
AGAIN_SECONDS_MAX: Final = 30.0
"""Longest time between two probes of a failing pair that no job needs."""


def pair_of(one: int, other: int) -> PairKey:
    """The key of a pair of workers."""
    return (one, other) if one < other else (other, one)


@dataclass(slots=True)
class Pair:
    """The known state of the link between two alive workers."""

    linked: bool | None = None
    """True: there is a link, or the last probe could make one. None: not known yet."""
    since: float = 0.0
    """Time since which ``linked`` has this value."""
    answered_at: float = -math.inf
    """Time of the last observation."""
    why: str = ""
    """Why there is no link."""
    failures: int = 0
    """Number of probes in a row that failed, or had no answer."""
    linked_at: float = -math.inf
    """When one of the two last reported a link."""
    told: bool | None = None
    """The value of ``linked`` that :meth:`Links.probed` last announced."""
    told_at: float = -math.inf


class _Need(NamedTuple):
    """A worker's report of a link that it needs and does not have."""

    since: float
    why: str
    jobs: frozenset[str]


class Links:
    """The pairs of workers.

    Args:
        seconds: ``link_timeout``, or ``heartbeat_timeout`` if that is longer.
    """

    def __init__(self, term: int, seconds: float) -> None:
        self.seconds = seconds
        self._term = term
        self._pairs: dict[PairKey, Pair] = {}
        self._probe_at: dict[PairKey, float] = {}
        """When a pair is probed next, or its probe is repeated."""
        self._queue: list[tuple[float, PairKey]] = []
        """A heap of the same pairs by time; entries may be outdated."""
        self._urgent: dict[PairKey, float] = {}
        """Pairs to probe now that jobs need, in order, with the time since when."""
        self._others: dict[PairKey, None] = {}
        """Other pairs to probe now."""
        self._under_way: set[PairKey] = set()
        """Probes requested and not answered yet."""
        self._allowed, self._allowed_at = float(limits.PROBES_BURST_MAX), 0.0
        """Rate limit: the number of other probes allowed at this time; it grows with time."""
        self._watched: frozenset[PairKey] = frozenset()
        """Pairs that are probed repeatedly, whatever the result."""
        self._needs: dict[int, dict[int, _Need]] = {}
        """By worker that needs a link, and by its peer."""
        self._new: dict[int, set[int]] = {}
        """By worker, the peers whose first probe is not answered yet."""
        self._of: dict[int, set[PairKey]] = {}
        """Pairs by worker."""
        self.reached = Counter[int]()
        """By worker, the number of others with which it has a link or could have one."""
        self._failing: set[PairKey] = set()

    # --- coming and going ------------------------------------------------------------------------

    def joined(self, worker: Worker, others: Iterable[Worker], now: float) -> None:
        """A worker has registered, or come back: probe it with others."""
        number = worker.worker
        self._of.setdefault(number, set())
        self._new[number] = set(_to_probe(worker, others))
        for other in self._new[number]:
            self._of.setdefault(other, set())
            key = pair_of(number, other)
            self._pair(key)
            self._wait(key, now, urgent=key in self._watched)

    def _pair(self, key: PairKey) -> Pair:
        """The state of a pair of joined workers."""
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = Pair()
            for each in key:
                self._of[each].add(key)
        return pair

    def left(self, worker: int) -> None:
        """A worker is no longer alive: forget its pairs."""
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
            self._forget_probe(key)
            self._failing.discard(key)
        del self.reached[worker]

    # --- probes ----------------------------------------------------------------------------------

    def ask(self, keys: Iterable[PairKey], now: float) -> None:
        """Probe these pairs now and before others, unless a probe is under way: a job needs them."""
        for key in sorted(keys):
            if all(worker in self._of for worker in key) and key not in self._under_way:
                self._pair(key)
                self._wait(key, now, urgent=True)

    def _wait(self, key: PairKey, now: float, *, urgent: bool) -> None:
        """Probe a pair as soon as the limits allow."""
        urgent = urgent or key in self._urgent
        self._forget_probe(key)
        if urgent:
            self._urgent[key] = now
        else:
            self._others[key] = None

    def _forget_probe(self, key: PairKey) -> None:
        self._probe_at.pop(key, None)
        self._urgent.pop(key, None)
        self._others.pop(key, None)
        self._under_way.discard(key)

    def _at(self, key: PairKey, at: float) -> None:
        """Probe a pair at this time."""
        self._probe_at[key] = at
        heapq.heappush(self._queue, (at, key))

    def watch(self, keys: Collection[PairKey], now: float) -> bool:
        """Probe exactly these pairs repeatedly; others only while their probes fail. True if there are new
        ones."""
        watched = frozenset(keys)
        new, self._watched = watched - self._watched, watched
        self.ask(new, now)
        return bool(new)

    def due(self, workers: WorkerRegistry, now: float) -> list[tuple[int, Probe]]:
        """The probes to send now, by worker."""
        while (at := self._next_time()) is not None and at <= now:
            key = heapq.heappop(self._queue)[1]
            if key in self._under_way:
                self._pairs[key].failures += 1
                later = self._again_seconds(key) if self._pairs[key].failures > 1 else 0.0
                self._forget_probe(key)
                if later:
                    self._at(key, now + later)
                    continue
            self._wait(key, now, urgent=key in self._watched)
        peers: dict[int, list[int]] = {}
        for key in self._taken(now):
            peers.setdefault(key[0], []).append(key[1])
            self._under_way.add(key)
            self._at(key, now + ANSWER_SECONDS)
        found = []
        for number, others in sorted(peers.items()):
            known = [
                worker.address for other in sorted(others) if (worker := workers.get_alive(other)) is not None
            ]
            if known and workers.get_alive(number) is not None:
                found.append((number, Probe(term=self._term, peers=known)))
        return found

    def _taken(self, now: float) -> list[PairKey]:
        """Take the pairs that may be probed now."""
        room = limits.URGENT_PROBES_UNDER_WAY_MAX - len(self._under_way)
        keys = list(islice(self._urgent, max(0, room)))
        for key in keys:
            del self._urgent[key]
        grown = self._allowed + (now - self._allowed_at) * limits.PROBES_PER_SECOND_MAX
        self._allowed, self._allowed_at = min(grown, float(limits.PROBES_BURST_MAX)), now
        room = min(limits.PROBES_UNDER_WAY_MAX - len(self._under_way) - len(keys), int(self._allowed))
        others = list(islice(self._others, max(0, room)))
        for key in others:
            del self._others[key]
        self._allowed -= len(others)
        return keys + others

    def _again_seconds(self, key: PairKey) -> float:
        """Seconds between a failed probe and the next one."""
        seconds = self.seconds / PROBES_PER_TIMEOUT
        if key in self._watched:
            return seconds
        longest = max(seconds, AGAIN_SECONDS_MAX)
        return min(seconds * 2.0 ** min(self._pairs[key].failures - 1, 10), longest)

    def _next_time(self) -> float | None:
        while self._queue and self._probe_at.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def next_deadline(self) -> float | None:
        """The time at which :meth:`due` has probes to send."""
        times = [self._next_time()]
        if self._urgent and len(self._under_way) < limits.URGENT_PROBES_UNDER_WAY_MAX:
            times.append(next(iter(self._urgent.values())))
        if self._others and len(self._under_way) < limits.PROBES_UNDER_WAY_MAX:
            missing = (1.0 - self._allowed) / limits.PROBES_PER_SECOND_MAX
            times.append(self._allowed_at + (max(missing, TURN_SECONDS) if missing > 0.0 else 0.0))
        return min((time for time in times if time is not None), default=None)

    def probed(self, by: int, message: Probed, now: float) -> bool | None:
        """Note the result of a probe. Returns whether it differs from the last announced one, which changes
        at most once in ``link_timeout``; None if nothing was known, or the pair is not known."""
        key = (by, message.worker)
        pair = self._pairs.get(key)
        if pair is None:
            return None
        before = pair.told if pair.told is not None else pair.linked
        # An existing link is as good as a new one: a firewall may refuse only new ones.
        linked = not message.why or now < pair.linked_at + self.seconds / 2
        self._seen(key, linked, "" if linked else message.why, now)
        self._forget_probe(key)
        pair.failures = pair.failures + 1 if message.why else 0
        if message.why or key in self._watched:
            self._at(key, now + self._again_seconds(key))
        if before is None or before == linked:
            pair.told = linked
            return None if before is None else False
        if now < pair.told_at + self.seconds:
            self._at(key, min(self._probe_at.get(key, math.inf), pair.told_at + self.seconds))
            return False
        pair.told, pair.told_at = linked, now
        return True

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
        """The workers whose first probes have all been answered since the last call."""
        found = sorted(worker for worker, missing in self._new.items() if not missing)
        for worker in found:
            del self._new[worker]
        return found

    # --- links that tasks need -------------------------------------------------------------------

    def note_heartbeat(
        self, worker: Worker, message: Heartbeat, workers: WorkerRegistry, now: float
    ) -> set[str]:
        """Note a heartbeat's links. Returns the jobs that need, or needed, links that the worker does not
        have."""
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
            is_there = other is not None and other is not worker and other.epoch == peer_report.epoch
            if is_there and self._of.keys() >= set(key):
                self._pair(key).linked_at = now
                self._seen(key, True, "", now)
        return {job for each in (*before.values(), *needs.values()) for job in each.jobs}

    def broken(self, job: str, now: float) -> dict[PairKey, str]:
        """The broken links of a job: pairs between which its tasks have needed a link for too long, with the
        reason if it is known."""
        found: dict[PairKey, str] = {}
        for worker, needs in self._needs.items():
            for peer, need in needs.items():
                if job in need.jobs and now >= need.since + self.seconds:
                    key = pair_of(worker, peer)
                    found[key] = found.get(key) or need.why or self._pairs.get(key, _NOTHING).why
        return found

    # --- what is known ---------------------------------------------------------------------------

    def pair(self, one: int, other: int) -> Pair:
        """The known state of two workers' link."""
        return self._pairs.get(pair_of(one, other), _NOTHING)

    def known(self, worker: int) -> int:
        """The number of others with which a worker was probed, or is about to be."""
        return len(self._of.get(worker, ()))

    def failing(self) -> list[tuple[PairKey, str]]:
        """The pairs between which no link could be made, with the reasons."""
        return [(key, self._pairs[key].why) for key in sorted(self._failing)]

    def validate(self, alive: Collection[int]) -> None:
        """Check the invariants against what is alive or awaited; for tests, after each step."""
        assert {worker for key in self._pairs for worker in key} <= set(alive)
        assert all(low < high for low, high in self._pairs)
        assert self._probe_at.keys() | self._urgent.keys() | self._others.keys() <= self._pairs.keys()
        assert self._under_way <= self._probe_at.keys()
        assert not (self._probe_at.keys() | self._others.keys()) & self._urgent.keys()
        assert not self._probe_at.keys() & self._others.keys()
        assert self._needs.keys() <= set(alive) and self._new.keys() <= set(alive)
        assert self._failing == {key for key, pair in self._pairs.items() if pair.linked is False}
        linked = Counter(worker for key, pair in self._pairs.items() if pair.linked for worker in key)
        assert +self.reached == linked
        assert {key for keys in self._of.values() for key in keys} == self._pairs.keys()


def _to_probe(worker: Worker, others: Iterable[Worker]) -> list[int]:
    """The workers with which a newcomer is probed: one of each other place, then a second of each, and so on;
    workers of its own place last. A place is a host with its advertised address."""
    places: dict[tuple[str, str], list[int]] = {}
    for other in others:
        if other.worker != worker.worker:
            places.setdefault(_place(other), []).append(other.worker)
    own = places.pop(_place(worker), [])
    first = [there[0] for there in places.values()]
    most = limits.PROBES_PER_WORKER_MAX
    if len(first) > most:  # Spread over all.
        return [first[number * len(first) // most] for number in range(most)]
    turns = chain.from_iterable(zip_longest(*places.values()))
    return [*(number for number in turns if number is not None), *own][:most]


def _place(worker: Worker) -> tuple[str, str]:
    return worker.about.identity, worker.about.host


def _other(key: PairKey, worker: int) -> int:
    return key[1] if key[0] == worker else key[0]


_NOTHING: Final = Pair()
