"""Which producer each input channel of a worker reads from, and who reads each partition here. Pure.

Both are keyed by attempt: several attempts of a subtask may be on a worker at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from minishuffle.errors import LocalProtocolError, PartitionNotFound, ShuffleError, Superseded
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import (
    FIRST_ATTEMPT,
    AttemptId,
    OperatorId,
    PartitionId,
    SubtaskId,
    is_holder,
    is_state_edge,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import OutputSpec
from minishuffle.worker.channels.dialing import LINK_BACKOFF

__all__ = [
    "LIVE_PHASES",
    "ChannelEntry",
    "ChannelKey",
    "ChannelPhase",
    "InputRegistry",
    "PartitionRegistry",
    "Progress",
    "TRANSITIONS",
    "Upstream",
    "Waiting",
]

# --- input channels -------------------------------------------------------------------------------
#
# An input channel reads one generation after another, never two at once:
#
# - *wanted* from its deployment on, while its producer's worker cannot be reached;
# - *requested* once its PartitionRequest was sent over a link, or stands in this worker's own waiting line;
# - *attached* when the producer's first frame arrives, or when this worker's own partition is read;
# - *draining* when it has failed: its request was refused or not answered in time, its link broke, its
#   producer was lost or replaced. The task still reads the data delivered before that;
# - *cached*: draining too, and the coordinator has named the attempt to read from next. A newer name
#   replaces an older one (Flink: ``CachedChannelProvider`` of ByteDance's single task recovery);
# - *down* when the task has read all delivered data: it waits for the coordinator to name an attempt, or
#   for the time to request the same one again;
# - *ended* when the task has read the end of the partition, even if its link broke later. If the partition is
#   retained, it is so once snapshots of the task cover the end, and attached before. It stays so if the
#   producer runs again for other consumers: the coordinator tells its next attempt that this consumer has
#   ended.
#
# A task of a job with a guarantee that has finished *listens*: it reads nothing, so that a channel of it that
# has failed is down at once, and requests the same attempt again until that has heard what is covered.
#
# A task of a job that does not restart fails instead of draining. Each cell has the next phase; it is
# empty if the event cannot happen in this phase. A transition to wanted begins the next generation::
#
#                  request    attach    end     fail      drain    renew
#     wanted       requested                    draining           wanted
#     requested               attached          draining
#     attached                          ended   draining
#     draining                          ended   draining  down     cached
#     cached                            ended   cached    wanted   cached
#     down                                                         wanted
#     ended


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """The key of an input channel of an attempt on this worker."""

    attempt: AttemptId
    edge: int
    producer: int


class ChannelPhase(Enum):
    WANTED = "wanted"
    REQUESTED = "requested"
    ATTACHED = "attached"
    DRAINING = "draining"
    CACHED = "cached"
    DOWN = "down"
    ENDED = "ended"


TRANSITIONS: Final[Mapping[tuple[ChannelPhase, ChannelEvent], ChannelPhase]] = {
    (ChannelPhase.WANTED, ChannelEvent.REQUEST): ChannelPhase.REQUESTED,
    (ChannelPhase.WANTED, ChannelEvent.FAIL): ChannelPhase.DRAINING,
    (ChannelPhase.WANTED, ChannelEvent.RENEW): ChannelPhase.WANTED,
    (ChannelPhase.REQUESTED, ChannelEvent.ATTACH): ChannelPhase.ATTACHED,
    (ChannelPhase.REQUESTED, ChannelEvent.FAIL): ChannelPhase.DRAINING,
    (ChannelPhase.ATTACHED, ChannelEvent.END): ChannelPhase.ENDED,
    (ChannelPhase.ATTACHED, ChannelEvent.FAIL): ChannelPhase.DRAINING,
    (ChannelPhase.DRAINING, ChannelEvent.END): ChannelPhase.ENDED,
    (ChannelPhase.DRAINING, ChannelEvent.FAIL): ChannelPhase.DRAINING,
    (ChannelPhase.DRAINING, ChannelEvent.DRAIN): ChannelPhase.DOWN,
    (ChannelPhase.DRAINING, ChannelEvent.RENEW): ChannelPhase.CACHED,
    (ChannelPhase.CACHED, ChannelEvent.END): ChannelPhase.ENDED,
    (ChannelPhase.CACHED, ChannelEvent.FAIL): ChannelPhase.CACHED,
    (ChannelPhase.CACHED, ChannelEvent.DRAIN): ChannelPhase.WANTED,
    (ChannelPhase.CACHED, ChannelEvent.RENEW): ChannelPhase.CACHED,
    (ChannelPhase.DOWN, ChannelEvent.RENEW): ChannelPhase.WANTED,
}
"""All legal transitions within one generation of a channel."""
LIVE_PHASES: Final = (ChannelPhase.WANTED, ChannelPhase.REQUESTED, ChannelPhase.ATTACHED)
"""Phases in which no data of the generation is lost and its end is not read yet."""


Progress: TypeAlias = "tuple[float, int, int] | None"
"""A value that changes when a task makes progress. None: the task waits."""


class Upstream(NamedTuple):
    """An attempt of a producer, the worker that runs it, and the version of its rows."""

    attempt: int
    worker: int
    version: int


@dataclass(slots=True)
class ChannelEntry:
    """State of an input channel; ``request`` is for its current generation and goes to ``worker``."""

    producer: SubtaskId
    worker: int
    request: PartitionRequest
    repairs: bool
    """A failed channel is requested again; if False, the task fails."""
    phase: ChannelPhase = ChannelPhase.WANTED
    cached: Upstream | None = None
    """Where the next generation reads from, as long as the task has not drained this one."""
    retry_at: float | None = None
    """When the same attempt may be requested again."""
    progress: Progress = None
    """The task's progress at the last check; only while the channel is cached."""
    failures: int = 0
    """Generations in a row that failed before their producer answered."""

    @property
    def upstream(self) -> Upstream:
        """The producer that the channel reads from, or will read from next."""
        request = self.request
        return self.cached or Upstream(request.producer_attempt, self.worker, request.version)


class InputRegistry:
    """The input channels of all attempts that are not terminal."""

    def __init__(self) -> None:
        self._entries: dict[ChannelKey, ChannelEntry] = {}
        self._by_attempt: dict[AttemptId, list[ChannelKey]] = {}
        self._by_worker: dict[int, dict[ChannelKey, None]] = {}
        self._by_producer: dict[SubtaskId, dict[ChannelKey, None]] = {}
        self._undrained: dict[ChannelKey, float] = {}
        """When to look at the tasks of channels that are cached; the earliest first."""
        self._retries: list[tuple[float, int, ChannelKey, int]] = []
        """A heap of the times at which failed channels are requested again, each with the generation that
        failed: an entry is stale once there is a later one. The running number keeps the order of entries
        with the same time."""
        self._failed = 0
        """The last running number."""

    def want(self, key: ChannelKey, entry: ChannelEntry) -> None:
        self._entries[key] = entry
        self._by_attempt.setdefault(key.attempt, []).append(key)
        self._by_worker.setdefault(entry.worker, {})[key] = None
        self._by_producer.setdefault(entry.producer, {})[key] = None

    def move(self, key: ChannelKey, generation: int, event: ChannelEvent) -> ChannelEntry | None:
        """Apply an event to a generation of a channel; None if the channel is gone or has a later generation.

        Raises:
            LocalProtocolError: the event cannot happen in its phase.
        """
        entry = self._entries.get(key)
        if entry is None or entry.request.generation != generation:
            return None
        phase = TRANSITIONS.get((entry.phase, event))
        if phase is None:
            raise LocalProtocolError(f"{event.value} of channel {key}, which is {entry.phase.value}")
        before, entry.phase = entry.phase, phase
        if phase is ChannelPhase.ENDED:
            entry.retry_at = None
        if phase is not ChannelPhase.CACHED and before is ChannelPhase.CACHED:
            del self._undrained[key]
            if phase is ChannelPhase.WANTED:
                assert entry.cached is not None
                self._begin(key, entry, entry.cached)
            entry.cached = None
        return entry

    def answered(self, key: ChannelKey) -> None:
        """The producer of the current generation has answered."""
        self._entries[key].failures = 0

    def retry_later(self, key: ChannelKey, now: float) -> None:
        """The current generation has failed: request the same attempt again in a while, if the task does not
        fail of it."""
        entry = self._entries[key]
        if entry.repairs:
            entry.failures += 1
            self._failed += 1
            entry.retry_at = now + LINK_BACKOFF.seconds(entry.failures)
            heapq.heappush(self._retries, (entry.retry_at, self._failed, key, entry.request.generation))

    def take_retries(self, now: float) -> list[ChannelKey]:
        """Drained channels that are due to be requested again. Due channels that still drain are requested
        when they are drained."""
        found: list[ChannelKey] = []
        while self._retries and self._retries[0][0] <= now:
            _, _, key, generation = heapq.heappop(self._retries)
            entry = self._entries.get(key)
            if entry is None or entry.request.generation != generation or entry.retry_at is None:
                continue
            if entry.phase is ChannelPhase.DOWN:
                found.append(key)
        return found

    def give_up(self, key: ChannelKey) -> None:
        """Do not request the same attempt again."""
        self._entries[key].retry_at = None

    def renew(
        self, key: ChannelKey, upstream: Upstream, drain_by: float, progress: Progress = None
    ) -> ChannelEntry:
        """The next generation reads from ``upstream``; at once, or when the task has drained the channel,
        which is looked at at ``drain_by`` (later ones do not put that off). ``progress`` is the task's."""
        entry = self._entries[key]
        entry.progress = progress
        self.move(key, entry.request.generation, ChannelEvent.RENEW)
        if entry.phase is ChannelPhase.CACHED:
            entry.cached = upstream
            entry.retry_at = None
            self._undrained.setdefault(key, drain_by)
        else:
            self._begin(key, entry, upstream)
        return entry

    def _begin(self, key: ChannelKey, entry: ChannelEntry, upstream: Upstream) -> None:
        """The next generation, which is wanted."""
        self._leave_worker(key, entry.worker)
        if upstream.attempt != entry.request.producer_attempt:
            entry.failures = 0
        generation = entry.request.generation + 1
        entry.request = replace(
            entry.request,
            producer_attempt=upstream.attempt,
            version=upstream.version,
            generation=generation,
        )
        entry.worker, entry.retry_at = upstream.worker, None
        self._by_worker.setdefault(upstream.worker, {})[key] = None

    def _leave_worker(self, key: ChannelKey, worker: int) -> None:
        of_worker = self._by_worker[worker]
        del of_worker[key]
        if not of_worker:
            del self._by_worker[worker]

    def __getitem__(self, key: ChannelKey) -> ChannelEntry:
        return self._entries[key]

    def get(self, key: ChannelKey) -> ChannelEntry | None:
        return self._entries.get(key)

    def readers(self, producer: SubtaskId) -> list[ChannelKey]:
        """The channels that read from any attempt of that subtask."""
        return list(self._by_producer.get(producer, ()))

    def wanting(self, worker: int) -> list[ChannelKey]:
        """The channels that wait for a link to that worker."""
        keys = self._by_worker.get(worker, ())
        return [key for key in keys if self._entries[key].phase is ChannelPhase.WANTED]

    def reading(self, worker: int) -> list[ChannelKey]:
        """The channels that were requested of that worker and have neither failed nor ended."""
        keys = self._by_worker.get(worker, ())
        requested = (ChannelPhase.REQUESTED, ChannelPhase.ATTACHED)
        return [key for key in keys if self._entries[key].phase in requested]

    def of_worker(self, worker: int) -> list[ChannelKey]:
        """Every channel whose current generation is that worker's."""
        return list(self._by_worker.get(worker, ()))

    def next_deadline(self) -> float | None:
        """When :meth:`undrained` or :meth:`take_retries` has something."""
        retry_at = self._retries[0][0] if self._retries else None
        return min((at for at in (self.drain_by(), retry_at) if at is not None), default=None)

    def drain_by(self) -> float | None:
        """When to look whether the task of a channel that is cached is stuck."""
        return next(iter(self._undrained.values()), None)

    def undrained(self, now: float) -> list[ChannelKey]:
        """Channels that are cached and whose task is to be looked at."""
        return [key for key, deadline in self._undrained.items() if now >= deadline]

    def postpone(self, key: ChannelKey, progress: Progress, drain_by: float) -> None:
        """The task is not stuck: look at it again then, which is no sooner than at any other."""
        self._entries[key].progress = progress
        del self._undrained[key]
        self._undrained[key] = drain_by

    def state_of(self, attempt: AttemptId) -> ChannelKey | None:
        """The channel by which it reads the state of an earlier attempt."""
        keys = self._by_attempt.get(attempt, ())
        return next((key for key in keys if is_state_edge(key.edge)), None)

    def remove(self, attempt: AttemptId) -> list[ChannelKey]:
        """The attempt is terminal; gives the channels that it had."""
        removed = self._by_attempt.pop(attempt, [])
        self._forget(removed)
        return removed

    def remove_one(self, key: ChannelKey) -> None:
        """The attempt does not read that channel any more."""
        self._by_attempt[key.attempt].remove(key)
        self._forget([key])

    def _forget(self, keys: Iterable[ChannelKey]) -> None:
        for key in keys:
            entry = self._entries.pop(key)
            self._leave_worker(key, entry.worker)
            self._undrained.pop(key, None)
            of_producer = self._by_producer[entry.producer]
            del of_producer[key]
            if not of_producer:
                del self._by_producer[entry.producer]

    def phases(self) -> Iterator[tuple[ChannelKey, ChannelEntry]]:
        return iter(self._entries.items())

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert {key for keys in self._by_attempt.values() for key in keys} == set(self._entries)
        for index in (self._by_worker, self._by_producer):
            assert sum(map(len, index.values())) == len(self._entries) and all(index.values())
        by_worker = [(worker, key) for worker, keys in self._by_worker.items() for key in keys]
        assert all(self._entries[key].worker == worker for worker, key in by_worker)
        by_producer = [(producer, key) for producer, keys in self._by_producer.items() for key in keys]
        assert all(self._entries[key].producer == producer for producer, key in by_producer)
        assert all(key.attempt == attempt for attempt, keys in self._by_attempt.items() for key in keys)
        cached = {key for key, entry in self._entries.items() if entry.cached is not None}
        assert cached == set(self._undrained)
        assert cached == {k for k, entry in self._entries.items() if entry.phase is ChannelPhase.CACHED}
        assert list(self._undrained.values()) == sorted(self._undrained.values())
        planned = {(key, generation) for _, _, key, generation in self._retries}
        for key, entry in self._entries.items():
            if entry.retry_at is not None and entry.phase is not ChannelPhase.DRAINING:
                assert entry.phase is ChannelPhase.DOWN and (key, entry.request.generation) in planned


# --- partitions -----------------------------------------------------------------------------------
#
# A request for a subpartition is granted, waits, or is refused:
#
# - it waits for a producer attempt that is not here yet;
# - it waits while the coordinator has not named the consumer's attempt yet;
# - for the known attempt it is granted if its generation is greater than any granted before: the consumer
#   itself reports so that it has lost the previous link;
# - any other is refused: a replaced attempt, a generation granted already, a subpartition that the producer
#   does not have.


@dataclass(slots=True)
class _Partition:
    """The partition that an attempt writes for an edge, and its readers."""

    producer: AttemptId
    output: OutputSpec
    repeats: bool
    """It writes the rows of an earlier attempt once more."""
    readers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By consumer index: attempt and generation of the request that was granted last."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that cannot be answered yet; ``channel``: of this worker's own consumer."""

    link: int
    request: PartitionRequest
    channel: ChannelKey | None
    deadline: float

    @property
    def key(self) -> tuple[int, int | ChannelKey]:
        """The key of a request: there is at most one request for each."""
        return self.link, self.channel or self.request.channel


class PartitionRegistry:
    """The partitions of all attempts here that were not released, and the line of requests for partitions
    that come later. It knows which attempts the coordinator has spoken of."""

    def __init__(self) -> None:
        self._partitions: dict[PartitionId, dict[int, _Partition]] = {}
        """By attempt of the producer."""
        self._attempts: dict[SubtaskId, int] = {}
        """The highest attempt that the coordinator has named, where that is not the first."""
        self._waiting: dict[tuple[int, int | ChannelKey], Waiting] = {}
        """In the order of their deadlines."""

    def learn(self, attempt: AttemptId) -> list[tuple[AttemptId, int]]:
        """The coordinator speaks of that attempt. If it is a new one, gives the producers here, with the
        edge, whose partitions an earlier attempt of it reads, or may have read from an earlier attempt of
        theirs. A task hears of each holder of its snapshots."""
        subtask = attempt.subtask
        if attempt.attempt <= self._attempts.get(subtask, FIRST_ATTEMPT):
            return []
        self._attempts[subtask] = attempt.attempt
        return [
            (each.producer, each.output.edge)
            for attempts in self._partitions.values()
            for each in attempts.values()
            if (each.producer.subtask.job, each.output.operator) == (subtask.job, subtask.operator)
            and 0 <= subtask.index - each.output.first < each.output.count
            and (each.repeats or is_holder(subtask.operator) or subtask.index in each.readers)
        ]

    def add(self, producer: AttemptId, outputs: list[OutputSpec], *, repeats: bool = False) -> None:
        for output in outputs:
            partition = PartitionId(producer.subtask.job, output.edge, producer.subtask.index)
            self._partitions.setdefault(partition, {})[producer.attempt] = _Partition(
                producer, output, repeats
            )

    def release(self, producer: AttemptId, outputs: list[OutputSpec]) -> None:
        """The attempt was released."""
        for output in outputs:
            partition = PartitionId(producer.subtask.job, output.edge, producer.subtask.index)
            attempts = self._partitions[partition]
            del attempts[producer.attempt]
            if not attempts:
                del self._partitions[partition]

    def forget(self, job: str) -> None:
        """The job has ended everywhere."""
        self._attempts = {subtask: n for subtask, n in self._attempts.items() if subtask.job != job}

    def request(self, waiting: Waiting) -> AttemptId | None:
        """The attempt that serves the request; None: it stands in line from now on.

        Raises:
            ShuffleError: it never can be served.
        """
        producer = self.grant(waiting.request)
        if producer is None:
            self._waiting[waiting.key] = waiting
        return producer

    def waiting(self) -> list[Waiting]:
        """The line, ordered by deadlines."""
        return list(self._waiting.values())

    def take_answers(self) -> Iterator[tuple[Waiting, AttemptId | ShuffleError]]:
        """Take out of the line what can be answered by now: with the attempt that serves it, or why none
        does."""
        for key, waiting in list(self._waiting.items()):
            try:
                answer: AttemptId | ShuffleError | None = self.grant(waiting.request)
            except ShuffleError as error:
                answer = error
            if answer is not None:
                self._waiting.pop(key, None)
                yield waiting, answer

    def take_late(self, now: float, worker: int) -> list[tuple[Waiting, ShuffleError]]:
        """Take out of the line what has waited in vain on ``worker``, with the reason."""
        late = [waiting for waiting in self._waiting.values() if now >= waiting.deadline]
        for waiting in late:
            del self._waiting[waiting.key]
        return [(waiting, self._late(waiting.request, worker)) for waiting in late]

    def take_back(self, link: int, channel: int | ChannelKey) -> None:
        """Remove a request: the consumer no longer waits for the answer."""
        self._waiting.pop((link, channel), None)

    def drop_link(self, link: int) -> None:
        """Nor for any that would go over that link."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting.link != link}

    def next_deadline(self) -> float | None:
        """When :meth:`take_late` has something."""
        return next((waiting.deadline for waiting in self._waiting.values()), None)

    def grant(self, request: PartitionRequest) -> AttemptId | None:
        """The attempt that serves the request; None: it has to wait.

        Raises:
            ShuffleError: it never can be served.
        """
        name = request.partition
        attempts = self._partitions.get(name, {})
        partition = attempts.get(request.producer_attempt)
        if partition is None:
            newest = max(attempts, default=0)
            if request.producer_attempt < newest:
                raise Superseded(
                    f"attempt {request.producer_attempt} of partition {name} was replaced by {newest}"
                )
            return None
        output = partition.output
        if not output.first <= request.subpartition < output.first + output.count:
            raise PartitionNotFound(f"partition {name} has no subpartition {request.subpartition}")
        known = self._consumer_attempt(partition, request)
        if request.consumer_attempt > known:
            return None
        self._check_reader(partition, request, known)
        partition.readers[request.subpartition] = (request.consumer_attempt, request.generation)
        return partition.producer

    def _consumer_attempt(self, partition: _Partition, request: PartitionRequest) -> int:
        operator = OperatorId(partition.output.operator)
        consumer = SubtaskId(partition.producer.subtask.job, operator, request.subpartition)
        return self._attempts.get(consumer, FIRST_ATTEMPT)

    @staticmethod
    def _check_reader(partition: _Partition, request: PartitionRequest, known: int) -> None:
        where = f"subpartition {request.subpartition} of partition {request.partition}"
        attempt, generation = partition.readers.get(request.subpartition, (0, 0))
        if request.consumer_attempt < known:
            raise Superseded(
                f"attempt {known} reads {where}: attempt {request.consumer_attempt} was replaced"
            )
        if attempt == request.consumer_attempt and request.generation <= generation:
            raise Superseded(
                f"generation {generation} of attempt {attempt} reads {where} already, and generation "
                f"{request.generation} was requested"
            )

    def _late(self, request: PartitionRequest, worker: int) -> ShuffleError:
        name = request.partition
        if request.producer_attempt not in self._partitions.get(name, {}):
            return PartitionNotFound(
                f"partition {name} attempt {request.producer_attempt} is not on worker {worker}"
            )
        return PartitionNotFound(
            f"the coordinator does not know attempt {request.consumer_attempt} of consumer "
            f"{request.subpartition}, which asked worker {worker} for partition {name}"
        )

    def validate(self, tasks: Mapping[AttemptId, list[OutputSpec]]) -> None:
        """Check the invariants; for tests, after each step."""
        found = {
            (partition.producer, partition.output.edge)
            for attempts in self._partitions.values()
            for partition in attempts.values()
        }
        assert found == {(key, output.edge) for key, outputs in tasks.items() for output in outputs}
        for attempts in self._partitions.values():
            assert attempts and all(n == each.producer.attempt for n, each in attempts.items())
        assert all(attempt > FIRST_ATTEMPT for attempt in self._attempts.values())
        deadlines = [each.deadline for each in self._waiting.values()]
        assert deadlines == sorted(deadlines)
