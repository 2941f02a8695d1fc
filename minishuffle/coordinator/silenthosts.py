"""Detection of lost hosts, whose kernel no longer answers. Pure.

A silent worker may be stopped or busy, and is given ``heartbeat_timeout``. But if its whole host was cut off
or lost power, connections to its ports are neither completed nor refused, which can be known sooner. So a
host that has been silent for a part of ``host_timeout`` is probed: once by the coordinator, and if it does
not answer, three times by the coordinator and by workers on other hosts. If no probe is answered, and no
process of the host sends a message meanwhile, all its workers are lost after ``host_timeout``.

The observer itself may be the one that is cut off. So two observers on different hosts must agree, and the
coordinator must receive the other's answer. With fewer hosts there is no verdict of this kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from minishuffle import limits
from minishuffle.coordinator.workers import Worker
from minishuffle.ids import Address
from minishuffle.wire.advertised import parse_host
from minishuffle.wire.messages import HostLook

__all__ = ["OWN", "HostStep", "HostSuspicion", "HostVerdict", "LookAtHost", "SilentHosts"]

GLANCE_SECONDS: Final = 0.05
"""Seconds for the coordinator's own first probe: an answer takes a round trip."""
LOOK_SECONDS: Final = 0.25
"""Seconds for the probes that a verdict needs."""
LOOKS: Final = 3
REPORT_SECONDS_MAX: Final = 0.15
"""Seconds to wait for the reports of other observers after their probes."""
OBSERVERS_MAX: Final = 2
"""Most workers that probe a host, each on a different host."""
ADDRESSES_MAX: Final = 4
"""Most ports of one host that are dialed."""
OWN: Final = 0
"""The coordinator as an observer; workers have their ids."""

assert GLANCE_SECONDS + LOOK_SECONDS < limits.HOST_TIMEOUT_SECONDS_MIN


@dataclass(frozen=True, slots=True)
class LookAtHost:
    """Let an observer dial a host; its answer goes to :meth:`SilentHosts.answered`."""

    observer: int
    """A worker id, or :data:`OWN`."""
    look: HostLook


@dataclass(frozen=True, slots=True)
class HostSuspicion:
    """A host may be lost: prepare the workers that would take over from its workers."""

    workers: list[Worker]


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """A host is lost, and all of its workers."""

    workers: list[Worker]
    why: str


HostStep: TypeAlias = LookAtHost | HostSuspicion | HostVerdict


@dataclass(slots=True)
class _Look:
    """A probe of a host that is under way."""

    ticket: int
    last_seen_at: float
    """When a process of the host last sent a message; a later message ends the probe."""
    observers: list[int]
    until: float
    """Deadline for the answers."""
    answers: dict[int, bool | None] = field(default_factory=dict)
    """By observer, whether the host has answered; None: the observer cannot tell."""

    @property
    def is_glance(self) -> bool:
        return self.observers == [OWN]

    @property
    def has_ended(self) -> bool:
        return True in self.answers.values() or len(self.answers) == len(self.observers)

    @property
    def is_silence(self) -> bool:
        """The coordinator had no answer and, except in a first probe of its own, neither had at least one
        observer on another host."""
        seen = [observer for observer, answer in self.answers.items() if answer is False]
        return OWN in seen and (self.is_glance or len(seen) > 1)


class SilentHosts:
    """The hosts of a cluster by identity, and the probes under way.

    Invariants: at most one probe for each host, and none if a process of it sent a message within
    ``patience``; no verdict before ``seconds`` of silence.

    Args:
        identity: of the coordinator's host.
        seconds: ``host_timeout``; None: there are no verdicts on hosts.
    """

    def __init__(self, term: int, identity: str, seconds: float | None) -> None:
        self._term = term
        self._identity = identity
        self._seconds = seconds
        self._looks: dict[str, _Look] = {}
        self._answered_at: dict[str, float] = {}
        """By host, the time of its last answered probe."""
        self._tickets = 0
        self._next: float | None = None

    @property
    def patience(self) -> float:
        """Seconds of silence after which a host is probed."""
        return (self._seconds or 0.0) - GLANCE_SECONDS - LOOK_SECONDS

    def joined(self, now: float) -> None:
        """Another worker has registered."""
        if self._seconds is not None and self._next is None:
            self._next = now + self.patience

    def answered(self, observer: int, ticket: int, answer: bool | None) -> None:
        """Note the answer of an observer; :meth:`due` acts on it."""
        for look in self._looks.values():
            if look.ticket == ticket and observer in look.observers:
                look.answers[observer] = answer

    def next_deadline(self) -> float | None:
        """The time of the next call of :meth:`due`; early if the host has sent a message since."""
        return self._next

    def due(self, workers: Iterable[Worker], now: float) -> list[HostStep]:
        """The steps that are due, by the time and the answers; ``workers`` are all alive ones."""
        if self._seconds is None or self._next is None:
            return []
        hosts: dict[str, list[Worker]] = {}
        for worker in workers:
            hosts.setdefault(worker.about.identity, []).append(worker)
        self._looks = {host: look for host, look in self._looks.items() if host in hosts}
        self._answered_at = {host: at for host, at in self._answered_at.items() if host in hosts}
        found: list[HostStep] = []
        again: list[float] = []
        for host in hosts:
            if host in (self._identity, ""):
                continue
            at, what = self._look_after(host, hosts, now)
            found += what
            again.append(at)
        self._next = min(again, default=None)
        return found

    def _look_after(
        self, host: str, hosts: dict[str, list[Worker]], now: float
    ) -> tuple[float, Sequence[HostStep]]:
        """The next time to check a host, and the steps to take now."""
        assert self._seconds is not None
        last_seen_at = max(worker.last_seen_at for worker in hosts[host])
        look = self._looks.get(host)
        if look is not None and last_seen_at <= look.last_seen_at:
            until = look.until
            if look.has_ended:
                is_early = look.is_silence and not look.is_glance
                until = last_seen_at + self._seconds if is_early else now
            if now < until:
                return until, []
            return self._looked(host, look, hosts, now)
        self._looks.pop(host, None)
        begin = max(last_seen_at, self._answered_at.get(host, last_seen_at)) + self.patience
        if now < begin:
            return begin, []
        if not (self._observers(host, hosts) and _addresses(hosts[host])):
            return now + self._seconds, []
        return self._begin(host, last_seen_at, [OWN], hosts, now)

    def _looked(
        self, host: str, look: _Look, hosts: dict[str, list[Worker]], now: float
    ) -> tuple[float, Sequence[HostStep]]:
        """A probe has ended."""
        del self._looks[host]
        if True in look.answers.values():
            self._answered_at[host] = now
            return now + self.patience, []
        if not look.is_silence:
            return now + GLANCE_SECONDS, []
        if look.is_glance:
            again, looks = self._begin(
                host, look.last_seen_at, [OWN, *self._observers(host, hosts)], hosts, now
            )
            return again, [HostSuspicion(hosts[host]), *looks]
        names = " and ".join("the coordinator" if each == OWN else f"worker {each}" for each in look.answers)
        why = (
            f"its host did not answer: nothing was heard of it for {now - look.last_seen_at:.2f} s, and "
            f"{names} could not connect to any of its ports ({LOOKS} tries each)"
        )
        return now + self.patience, [HostVerdict(hosts[host], why)]

    def _begin(
        self, host: str, last_seen_at: float, observers: list[int], hosts: dict[str, list[Worker]], now: float
    ) -> tuple[float, Sequence[HostStep]]:
        seconds, times = (GLANCE_SECONDS, 1) if observers == [OWN] else (LOOK_SECONDS, LOOKS)
        self._tickets += 1
        until = now + seconds + REPORT_SECONDS_MAX
        self._looks[host] = _Look(self._tickets, last_seen_at, observers, until)
        addresses = _addresses(hosts[host])
        what = HostLook(
            term=self._term, ticket=self._tickets, addresses=addresses, times=times, seconds=seconds
        )
        return until, [LookAtHost(each, what) for each in observers]

    def _observers(self, host: str, hosts: dict[str, list[Worker]]) -> list[int]:
        """Workers on other hosts than this one and the coordinator's, the most recently seen first."""
        others = hosts.keys() - {host, self._identity, ""} - self._looks.keys()
        latest = [max(hosts[other], key=lambda worker: worker.last_seen_at) for other in others]
        latest.sort(key=lambda worker: (-worker.last_seen_at, worker.worker))
        return [worker.worker for worker in latest[:OBSERVERS_MAX]]

    def validate(self, now: float) -> None:
        """Check the invariants; for tests, after each step."""
        for look in self._looks.values():
            assert set(look.answers) <= set(look.observers)
            assert look.last_seen_at + self.patience <= now + 1e-9


def _addresses(workers: Iterable[Worker]) -> list[str]:
    """Data and metrics ports of a host, with numeric addresses only, since a name server may be silent
    too."""
    found: list[str] = []
    for worker in sorted(workers, key=lambda worker: worker.worker):
        host = next((each for each in (worker.about.host, worker.about.seen) if _is_numeric(each)), "")
        if host:
            ports = (worker.about.data_port, worker.about.metrics_port)
            found += [str(Address(host, port)) for port in ports if port]
    return found[:ADDRESSES_MAX]


def _is_numeric(host: str) -> bool:
    address = parse_host(host)
    return address is not None and not address.is_loopback
