"""The registry of workers: alive, awaited, lost and gone ones, with their slots and addresses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from minishuffle import limits
from minishuffle.config import ClusterSettings
from minishuffle.coordinator.jobs.lossaccounting import Attempt
from minishuffle.coordinator.journal.codec import Record
from minishuffle.coordinator.recentreports import RecentReports
from minishuffle.coordinator.scheduling.draining import Drain
from minishuffle.counters import TaskCounters, WorkerEntry
from minishuffle.errors import UnknownName, UsageError
from minishuffle.ids import Address
from minishuffle.releases import require_same_release
from minishuffle.wire.advertised import advertised_host, host_problem, is_loopback
from minishuffle.wire.messages import (
    Heartbeat,
    PeerReport,
    WorkerAddress,
    WorkerReport,
)
from minishuffle.wire.registration import Register, Registered, WorkerDescription
from minishuffle.wire.requests import WorkerInfo

__all__ = ["RegistryNumbers", "Worker", "WorkerRegistry"]

LISTED_SECONDS: Final = 600.0
"""Seconds for which a lost or gone worker stays listed."""
HELD_UP_SECONDS: Final = 0.05
"""A timer that is late by more than this was held up."""
LISTED_MAX: Final = 256
"""Most lost and gone workers listed: the last ones."""


@dataclass(slots=True)
class Absence:
    """The absence of a worker whose control link closed; its process may still live."""

    link: int
    why: str
    seconds_max: float
    """Seconds for which the worker is awaited."""


@dataclass(frozen=True, slots=True)
class WorkerRecord(Record):
    """A registration that has not ended, as it is journaled."""

    epoch: int
    about: WorkerDescription
    standby: bool
    written_off: tuple[tuple[str, int], ...]
    drain: Drain | None = None


@dataclass(frozen=True, slots=True)
class AppliedRecord(Record):
    """The part of a registration that changes often."""

    number: int
    """Highest number of an applied report of the worker."""


@dataclass(slots=True)
class Worker:
    """A registered worker. ``link`` is the shell's number of its control link, 0 while the worker is not
    alive."""

    worker: int
    epoch: int
    link: int
    about: WorkerDescription
    last_seen_at: float
    state: Literal["alive", "awaited", "lost", "gone"] = "alive"
    """Awaited: it was registered with an earlier coordinator, or its control link closed, and it has not come
    back yet."""
    ended_at: float = 0.0
    report: WorkerReport = field(default_factory=WorkerReport)
    peers: list[PeerReport] = field(default_factory=list)
    recent: RecentReports = field(default_factory=RecentReports)
    applied: int = 0
    """Highest number of an applied report of the worker."""
    written_off: set[tuple[str, int]] = field(default_factory=set)
    """Slots, with their job, whose task was abandoned: its thread still runs there."""
    looked_again_at: float = -math.inf
    """The ``last_seen_at`` that was set when the worker was silent too long but was given another
    interval."""
    suspicions: int = 0
    """How often other workers have suspected it."""
    standby: bool = False
    """It is a standby worker, started as one or as a replacement for one, and has not taken over a slot
    yet."""
    joined_at: float = -math.inf
    """Time of its registration, or return."""
    absence: Absence | None = None
    """Set while it is awaited because its control link closed; None for a worker known from an earlier
    coordinator."""

    drain: Drain | None = None
    """Set while it is draining."""

    def __str__(self) -> str:
        return f"worker {self.worker} (pid {self.about.pid} on {self.about.host})"

    @property
    def slots(self) -> int:
        """Slots that can be given to jobs."""
        return max(0, self.about.slots - len(self.written_off))

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(
            worker=self.worker, epoch=self.epoch, host=self.about.host, data_port=self.about.data_port
        )

    def record(self) -> WorkerRecord:
        """For the journal."""
        written_off = tuple(sorted(self.written_off))
        return WorkerRecord(
            self.epoch, self.about, self.standby, written_off, self.drain and self.drain.record()
        )

    @classmethod
    def from_record(cls, worker: int, record: WorkerRecord, applied: int, now: float) -> Worker:
        """A worker known from an earlier coordinator, awaited from ``now`` on."""
        return cls(
            worker,
            record.epoch,
            0,
            record.about,
            now,
            state="awaited",
            applied=applied,
            written_off=set(record.written_off),
            standby=record.standby,
            drain=record.drain,
        )

    def call_up(self) -> None:
        """Make it a regular worker."""
        self.standby = False

    def note_message(self, now: float) -> None:
        """Note that the worker has sent a message."""
        self.last_seen_at = now

    def suspect(self) -> None:
        """Another worker suspects it."""
        self.suspicions += 1

    def registered(self, term: int, heartbeat_interval: float) -> Registered:
        """The answer to its registration, but for what is desired of it. To be called before the reports are
        applied that it has come with."""
        return Registered(
            term=term,
            worker=self.worker,
            epoch=self.epoch,
            heartbeat_interval=heartbeat_interval,
            applied=self.applied,
        )

    @property
    def place(self) -> str:
        """Its name with its advertised address, for texts."""
        return f"worker {self.worker} ({Address(self.about.host, self.about.data_port)})"

    @property
    def on_loopback(self) -> bool:
        """It advertises a loopback address, at which other hosts reach only themselves."""
        return is_loopback(self.about.host)

    def info(
        self,
        slots_used: int,
        now: float,
        reach: tuple[int, int],
        *,
        confined: bool = False,
        reports: bool = True,
        earlier: bool = False,
    ) -> WorkerInfo:
        """The worker for clients, with its last report, or one from half a minute ago (``earlier``).
        ``reach`` are its fields ``reachable`` and ``tried``."""
        report, peers = self.recent.report if earlier else (self.report, self.peers)
        admits = self.state == "alive" and not self.standby and self.drain is None
        return WorkerInfo(
            worker=self.worker,
            epoch=self.epoch,
            state=self.state,
            host=self.about.host,
            pid=self.about.pid,
            data_port=self.about.data_port,
            metrics_port=self.about.metrics_port,
            slots=self.about.slots,
            slots_free=max(0, self.slots - slots_used) if admits else 0,
            standby=self.standby,
            confined=confined,
            reachable=reach[0],
            tried=reach[1],
            draining=self.drain is not None and self.state in ("alive", "awaited"),
            heartbeat_age_seconds=max(0.0, now - self.last_seen_at),
            report=report if reports else WorkerReport(),
            peers=peers if reports else [],
        )

    def entry(self, now: float) -> WorkerEntry:
        age = max(0.0, now - self.last_seen_at)
        about = self.about
        return WorkerEntry(self.worker, self.state, about.host, about.metrics_port, age, self.suspicions)


def _process(about: WorkerDescription) -> tuple[str, int, int]:
    """The identity of a worker's process, independent of its advertised address."""
    return about.identity, about.pid, about.data_port


def _settled(about: Register) -> Register:
    """The registration with its advertised address as its host.

    Raises:
        UsageError: nobody can connect there.
    """
    host = advertised_host(about)
    if problem := host_problem(host):
        raise UsageError(
            f"the worker cannot advertise {host!r}, which {problem}: start it with --advertise, and an "
            "address by which other hosts reach it"
        )
    if not about.data_port:
        raise UsageError("the worker cannot advertise port 0: others dial the port that it listens on")
    return about.model_copy(update={"host": host})


class RegistryNumbers(NamedTuple):
    """The journaled numbers of :class:`WorkerRegistry`."""

    epoch: int = 0
    highest: int = 0
    standby_short: int = 0


class WorkerRegistry:
    """All workers by id: alive, awaited, and recently ended ones.

    Invariants: each link belongs to at most one worker, which is alive; epochs are all different and at most
    ``epoch``.

    Args:
        numbers: of the previous coordinator.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        python: str,
        release: str,
        numbers: RegistryNumbers = RegistryNumbers(),  # noqa: B008  (a tuple)
    ) -> None:
        self.epoch = numbers.epoch
        """Number of registrations accepted so far."""
        self._settings = settings
        self._python, self._release = python, release
        self._workers: dict[int, Worker] = {}
        self._by_link: dict[int, Worker] = {}
        self.highest = numbers.highest
        """The highest id given so far."""
        self.standby_short = numbers.standby_short
        """Number of standby workers that were called up or lost, and not replaced yet."""
        self.changed: dict[int, Worker] = {}
        """Workers whose changes are not journaled yet; also ended ones that are no longer listed."""
        self.reported: dict[int, Worker] = {}
        """Workers whose last report's number is not journaled yet."""

    @property
    def numbers(self) -> RegistryNumbers:
        return RegistryNumbers(self.epoch, self.highest, self.standby_short)

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.worker))

    def recent_counters(self, job: str) -> dict[Attempt, TaskCounters]:
        """The counters of a job's attempts from half a minute ago."""
        found: dict[Attempt, TaskCounters] = {}
        for worker in self.alive():
            found |= worker.recent.counters(job)
        return found

    def alive(self) -> list[Worker]:
        return [worker for worker in self if worker.state == "alive"]

    def releases(self) -> dict[int, dict[str, str]]:
        """Package versions of each alive worker."""
        return {worker.worker: worker.about.releases for worker in self.alive()}

    def get_alive(self, number: int) -> Worker | None:
        worker = self._workers.get(number)
        return worker if worker is not None and worker.state == "alive" else None

    def awaited(self) -> list[Worker]:
        return [worker for worker in self if worker.state == "awaited"]

    def awaits(self, workers: Collection[int]) -> bool:
        """Whether one of these workers is awaited, or any worker of an earlier coordinator, which may run any
        task."""
        return any(each.absence is None or each.worker in workers for each in self.awaited())

    def there(self) -> list[Worker]:
        """The workers that are alive or awaited."""
        return [worker for worker in self if worker.state in ("alive", "awaited")]

    def last_seen_at(self, number: int) -> float:
        """When a worker last sent a message; -inf if there is no worker with this id."""
        worker = self.get_there(number)
        return -math.inf if worker is None else worker.last_seen_at

    def ended_since(self, since: float) -> list[Worker]:
        """The workers that were lost or have left since ``since``."""
        return [each for each in self if each.state in ("lost", "gone") and each.ended_at >= since]

    def get_there(self, number: int) -> Worker | None:
        """The worker with this id, if it is alive or awaited."""
        worker = self._workers.get(number)
        return worker if worker is not None and worker.state in ("alive", "awaited") else None

    def named(self, number: int) -> Worker:
        """The worker with this id.

        Raises:
            UnknownName: no alive or awaited worker has this id.
        """
        if (worker := self.get_there(number)) is not None:
            return worker
        there = ", ".join(str(each.worker) for each in self.there()) or "none"
        raise UnknownName(f"there is no worker {number}; alive: {there}")

    def by_link(self, link: int) -> Worker | None:
        return self._by_link.get(link)

    # --- coming and going ------------------------------------------------------------------------

    def register(self, link: int, about: Register, now: float, *, is_awaited: bool = False) -> Worker:
        """Accept a worker: as a standby worker if it was started as one, or if standby workers are missing.

        When several workers are started, their order of registration is not known in advance. So a worker
        becomes regular if tasks wait for a slot, and the next one standby.

        Args:
            is_awaited: tasks wait for a slot.

        Raises:
            UsageError: its Python or segment size does not match, its id is taken, or nobody can connect to
                its advertised address.
        """
        about = self.checked(about)
        number = about.requested_worker or self.highest + 1
        self.highest = max(self.highest, number)
        self.epoch += 1
        standby = about.standby or (self.standby_short > 0 and not is_awaited)
        self.standby_short -= standby and self.standby_short > 0
        worker = Worker(number, self.epoch, link, about.description(), now, standby=standby, joined_at=now)
        self._workers[number] = self._by_link[link] = worker
        self.touch(worker)
        return worker

    def checked(self, about: Register) -> Register:
        """The registration with its advertised address as its host; raises as :meth:`register`."""
        about = _settled(about)
        self._check(about)
        return about

    def called_up(self, count: int) -> None:
        """``count`` standby workers were called up and need replacements."""
        self.standby_short += count

    def forget_standby(self) -> None:
        """Standby workers need no replacements, neither lost nor present ones: all become regular."""
        self.standby_short = 0
        for worker in self.there():
            worker.call_up()

    def recall(self, worker: Worker) -> None:
        """Add a worker known from an earlier coordinator, which is awaited."""
        self._workers[worker.worker] = worker

    def take_back(self, link: int, about: Register, now: float) -> tuple[Worker, int]:
        """Take back a worker that had lost its control link. Returns it with its previous link.

        Raises:
            UsageError: it was declared lost, is not known, or another process claims its id.
        """
        worker = self.get_there(about.requested_worker)
        if worker is not None and _process(about) != _process(worker.about):
            raise UsageError(
                f"worker {worker.worker} is process {worker.about.pid} on {worker.about.host}, and not "
                f"process {about.pid} on {about.host}: register without an epoch, as a new one"
            )
        if worker is None and about.requested_worker not in self._workers:
            raise UsageError(
                f"worker {about.requested_worker} is not known to this coordinator: its journal could not be "
                "written when the worker came, or is another one; start the worker again"
            )
        if worker is None or worker.epoch != about.epoch:
            raise UsageError(
                f"worker {about.requested_worker} was declared lost while it was away, and its tasks have "
                "been given to others; start it again"
            )
        host = _settled(about).host
        if is_loopback(host):  # tells where the coordinator is now, not the other workers
            host = worker.about.host
        worker.about = worker.about.model_copy(update={"host": host, "seen": about.seen})
        before = worker.link
        self._by_link.pop(before, None)
        self._by_link[link] = worker
        worker.link, worker.last_seen_at, worker.state, worker.absence = link, now, "alive", None
        worker.joined_at = now
        if worker.drain is not None:
            worker.drain.link_renewed()
        self.touch(worker)
        return worker, before

    def link_lost(self, worker: Worker, why: str, now: float) -> None:
        """The control link of a worker closed: await it, for LINK_GRACE_SECONDS unless its process is
        found."""
        del self._by_link[worker.link]
        worker.absence = Absence(worker.link, why, limits.LINK_GRACE_SECONDS)
        worker.state, worker.link, worker.last_seen_at = "awaited", 0, now

    def absent(self, link: int) -> Worker | None:
        """The worker that is awaited because this control link closed."""
        found = (each for each in self.awaited() if each.absence is not None and each.absence.link == link)
        return next(found, None)

    def process_found(self, link: int) -> None:
        """The process of a closed link is alive: await it for ``heartbeat_timeout``, like any silent
        worker."""
        if (worker := self.absent(link)) is not None and worker.absence is not None:
            worker.absence.seconds_max = self._settings.heartbeat_timeout

    def silence_max(self, worker: Worker) -> float:
        """Seconds of silence after which the worker is lost."""
        return self._settings.heartbeat_timeout if worker.absence is None else worker.absence.seconds_max

    def _check(self, about: Register) -> None:
        if about.python != self._python:
            raise UsageError(
                f"the worker runs Python {about.python}, this cluster runs Python {self._python}, and "
                f"functions are pickled between them: start the worker with Python {self._python}"
            )
        require_same_release(about.releases, self._release)
        holder = self.get_alive(about.requested_worker)
        if holder is not None:
            raise UsageError(
                f"worker id {holder.worker} is held by process {holder.about.pid} on {holder.about.host}: "
                "stop that one, or choose another --id (0: any free one)"
            )
        for other in self.alive():
            if other.about.segment_bytes != about.segment_bytes:
                raise UsageError(
                    f"the worker has network buffers of {about.segment_bytes} bytes, the others have "
                    f"{other.about.segment_bytes}: start it with --segment-bytes {other.about.segment_bytes}"
                )

    def end(self, worker: Worker, state: Literal["lost", "gone"], now: float) -> None:
        """A worker was lost, or has left."""
        self._by_link.pop(worker.link, None)
        self.standby_short += worker.standby and state == "lost"
        worker.state, worker.ended_at, worker.link, worker.peers = state, now, 0, []
        worker.absence = None
        self.touch(worker)
        if state == "gone":
            self._others_leave(worker)
        self.forget(now)

    def heartbeat(self, worker: Worker, message: Heartbeat) -> bool:
        """Note a heartbeat. True if written-off slots are usable again, because their threads have ended."""
        worker.report, worker.peers = message.report, message.peers
        worker.recent.note(message)
        stuck = {(job, slot) for job, slots in message.report.stuck.items() for slot in slots}
        ended = worker.written_off - stuck
        worker.written_off -= ended
        if ended:
            self.touch(worker)
        return bool(ended)

    def write_off(self, worker: Worker, job: str, slot: int) -> None:
        """The thread of a task that was abandoned still runs in a slot that a job has given back."""
        worker.written_off.add((job, slot))
        self.touch(worker)

    def applied(self, worker: Worker, number: int) -> None:
        """A report of that number is applied, and so are those before."""
        worker.applied = max(number, worker.applied)
        self.reported[worker.worker] = worker

    # --- addresses -------------------------------------------------------------------------------

    def to_advertise(self, newcomer: Worker) -> list[tuple[Worker, str]]:
        """Workers with loopback addresses that must advertise another one, since a worker of another host has
        registered: each with an address that other hosts may reach."""

        def way(to: Worker) -> str:
            return to.about.seen if to.on_loopback and to.about.seen else to.about.host

        others = [each for each in self.alive() if each.about.identity != newcomer.about.identity]
        found = [(each, way(newcomer)) for each in others if each.on_loopback]
        if others and newcomer.on_loopback:
            found.append((newcomer, way(others[0])))
        return found

    def advertised(self, worker: Worker, host: str) -> bool:
        """Change the advertised address of a worker. False, and no change, if nobody can connect there, or it
        is the same."""
        if not host or host_problem(host) or is_loopback(host) or host == worker.about.host:
            return False
        worker.about = worker.about.model_copy(update={"host": host})
        self.touch(worker)
        return True

    def epoch_of(self, number: int) -> int:
        """The epoch of an alive or awaited worker, else 0."""
        worker = self.get_there(number)
        return 0 if worker is None else worker.epoch

    def no_link(self, workers: tuple[int, int], why: str, seconds: float = 0.0) -> str:
        """A text about a missing link between two workers."""
        there = [self.get_there(number) for number in workers]
        one, other = (
            each.place if each is not None else f"worker {number}"
            for each, number in zip(there, workers, strict=True)
        )
        time = f" for {seconds:g} s" if seconds else ""
        return f"no connection between {one} and {other}{time}{f': {why}' if why else ''}"

    def confined(self, identity: str) -> set[int]:
        """The workers that other hosts cannot reach, if there are other hosts; ``identity`` is the
        coordinator's."""
        there = self.there()
        hosts = {identity, *(each.about.identity for each in there)}
        return {each.worker for each in there if each.on_loopback} if len(hosts) > 1 else set()

    # --- workers that leave ----------------------------------------------------------------------

    def leaving(self) -> dict[int, Drain]:
        """The drains of alive workers."""
        return {each.worker: each.drain for each in self.alive() if each.drain is not None}

    def some_stay(self) -> bool:
        """Whether there is a worker that is not draining."""
        return any(each.drain is None for each in self.there())

    def drain(self, worker: Worker, until: float | None, *, signalled: bool) -> None:
        """A worker is to leave. ``until`` is of the wall clock, see :class:`Drain`."""
        self.touch(worker)
        if worker.drain is not None:
            worker.drain.order(until, signalled=signalled)
        else:
            others_leave = self._others_leave(worker)
            worker.drain = Drain(until, signalled, others_leave=others_leave)

    def _others_leave(self, worker: Worker) -> bool:
        """Tell the other workers that are leaving about this one; False if there are none."""
        found = [each for each in self.there() if each is not worker and each.drain is not None]
        for each in found:
            if each.drain is not None:
                each.drain.join()
        self.touch(*found)
        return bool(found)

    # --- the journal -----------------------------------------------------------------------------

    def touch(self, *workers: Worker) -> None:
        """Something has happened to these that the journal is to have."""
        self.changed.update((worker.worker, worker) for worker in workers)

    def take_changed(self) -> list[Worker]:
        """Take the workers whose changes are not journaled yet."""
        changed, self.changed = self.changed, {}
        return list(changed.values())

    def take_reported(self) -> list[Worker]:
        """Workers whose reports were applied since the last call."""
        reported, self.reported = self.reported, {}
        return list(reported.values())

    # --- time ------------------------------------------------------------------------------------

    def silent(self, now: float) -> list[Worker]:
        """The workers that have been silent for :meth:`silence_max`, or did not come back within it.

        If this is called late, this process itself was held up, perhaps with its whole machine, and
        heartbeats may wait in its sockets. Then no worker is judged before these were read: each gets another
        interval. If the call is late by less than an interval, as can happen in a busy loop, a worker gets it
        only once in each silence.
        """
        interval = self._settings.heartbeat_interval
        found: list[Worker] = []
        for worker in self.there():
            due = worker.last_seen_at + self.silence_max(worker)
            looks_again = now > due + HELD_UP_SECONDS and worker.looked_again_at != worker.last_seen_at
            if looks_again or now > due + interval:
                worker.last_seen_at += now - due + interval
                worker.looked_again_at = worker.last_seen_at
            elif now >= due:
                found.append(worker)
        return found

    def forget(self, now: float) -> None:
        """Drop workers from the list that ended LISTED_SECONDS ago, or before the last LISTED_MAX."""
        ended = [worker for worker in self._workers.values() if worker.state in ("lost", "gone")]
        ended.sort(key=lambda worker: worker.ended_at)
        for position, worker in enumerate(reversed(ended)):
            if position >= LISTED_MAX or now >= worker.ended_at + LISTED_SECONDS:
                del self._workers[worker.worker]

    def next_deadline(self) -> float | None:
        return min(
            (
                worker.ended_at + LISTED_SECONDS
                if worker.state in ("lost", "gone")
                else worker.last_seen_at + self.silence_max(worker)
                for worker in self._workers.values()
            ),
            default=None,
        )

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        alive = self.alive()
        assert {worker.link: worker for worker in alive} == self._by_link
        assert all(worker.link == 0 for worker in self if worker.state != "alive")
        assert all(worker.absence is None for worker in self if worker.state != "awaited")
        epochs = [worker.epoch for worker in self]
        assert len(set(epochs)) == len(epochs)
        assert all(0 < epoch <= self.epoch for epoch in epochs)
        assert all(0 < worker.worker <= self.highest for worker in self)
        assert 0 <= self.standby_short <= self.epoch
