"""Which producer each input channel of a worker reads from, and who reads each partition here. Pure.

Both are keyed by attempt: several attempts of a subtask may be on a worker at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from minishuffle.errors import LocalProtocolError, PartitionNotFound, ShuffleError, Superseded
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import FIRST_ATTEMPT, AttemptId, JobId, OperatorId, PartitionId, SubtaskId
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import OutputSpec

__all__ = [
    "ChannelEntry",
    "ChannelKey",
    "ChannelPhase",
    "InputRegistry",
    "PartitionRegistry",
    "TRANSITIONS",
    "Waiting",
]

# --- input channels -------------------------------------------------------------------------------
#
# An input channel is wanted from its deployment on; requested once its PartitionRequest was sent over a
# link, or stands in this worker's own waiting line; attached when the producer's first frame arrives, or
# when this worker's own partition is read. It ends when the task has read the end of the partition. It fails
# when the request is refused or not answered in time, with its link, or by itself. A link may break while
# the end of the partition waits to be read: then the channel has failed, and ends all the same::
#
#     wanted ──> requested ──> attached ──> ended
#        │           │             │          ^
#        └───────────┴─────────────┴──────> failed


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """One input channel of an attempt here."""

    attempt: AttemptId
    edge: int
    producer: int


class ChannelPhase(Enum):
    WANTED = "wanted"
    REQUESTED = "requested"
    ATTACHED = "attached"
    ENDED = "ended"
    FAILED = "failed"


TRANSITIONS: Final[Mapping[tuple[ChannelPhase, ChannelEvent], ChannelPhase]] = {
    (ChannelPhase.WANTED, ChannelEvent.REQUEST): ChannelPhase.REQUESTED,
    (ChannelPhase.WANTED, ChannelEvent.FAIL): ChannelPhase.FAILED,
    (ChannelPhase.REQUESTED, ChannelEvent.ATTACH): ChannelPhase.ATTACHED,
    (ChannelPhase.REQUESTED, ChannelEvent.FAIL): ChannelPhase.FAILED,
    (ChannelPhase.ATTACHED, ChannelEvent.END): ChannelPhase.ENDED,
    (ChannelPhase.ATTACHED, ChannelEvent.FAIL): ChannelPhase.FAILED,
    (ChannelPhase.ENDED, ChannelEvent.FAIL): ChannelPhase.ENDED,
    (ChannelPhase.FAILED, ChannelEvent.END): ChannelPhase.ENDED,
    (ChannelPhase.FAILED, ChannelEvent.FAIL): ChannelPhase.FAILED,
}
"""What is not here cannot happen to one generation of a channel."""


@dataclass(slots=True)
class ChannelEntry:
    """One generation of an input channel; ``request`` asks for the partition at ``worker``."""

    worker: int
    request: PartitionRequest
    phase: ChannelPhase = ChannelPhase.WANTED


class InputRegistry:
    """The input channels of all attempts that are not terminal."""

    def __init__(self) -> None:
        self._entries: dict[ChannelKey, ChannelEntry] = {}
        self._by_attempt: dict[AttemptId, list[ChannelKey]] = {}
        self._by_worker: dict[int, dict[ChannelKey, None]] = {}

    def want(self, key: ChannelKey, worker: int, request: PartitionRequest) -> None:
        self._entries[key] = ChannelEntry(worker, request)
        self._by_attempt.setdefault(key.attempt, []).append(key)
        self._by_worker.setdefault(worker, {})[key] = None

    def move(self, key: ChannelKey, generation: int, event: ChannelEvent) -> bool:
        """Something happened to that generation; False if the channel is gone or of a later one.

        Raises:
            LocalProtocolError: that cannot happen in its phase.
        """
        entry = self._entries.get(key)
        if entry is None or entry.request.generation != generation:
            return False
        phase = TRANSITIONS.get((entry.phase, event))
        if phase is None:
            raise LocalProtocolError(f"{event.value} of channel {key}, which is {entry.phase.value}")
        entry.phase = phase
        return True

    def request_wanted(self, worker: int) -> list[tuple[ChannelKey, PartitionRequest]]:
        """The requests to send to that worker now that it can be reached."""
        return [(key, entry.request) for key, entry in self._wanted(worker, ChannelEvent.REQUEST)]

    def fail_wanted(self, worker: int) -> list[ChannelKey]:
        """The worker cannot be reached."""
        return [key for key, _ in self._wanted(worker, ChannelEvent.FAIL)]

    def _wanted(self, worker: int, event: ChannelEvent) -> list[tuple[ChannelKey, ChannelEntry]]:
        found = [
            (key, self._entries[key])
            for key in self._by_worker.get(worker, ())
            if self._entries[key].phase is ChannelPhase.WANTED
        ]
        for key, entry in found:
            self.move(key, entry.request.generation, event)
        return found

    def wants(self, worker: int) -> bool:
        """Whether some channel waits for a link to that worker."""
        entries = (self._entries[key] for key in self._by_worker.get(worker, ()))
        return any(entry.phase is ChannelPhase.WANTED for entry in entries)

    def link_down(self, worker: int) -> None:
        """Every channel over the link to that worker has failed, unless it had ended."""
        for key in self._by_worker.get(worker, ()):
            entry = self._entries[key]
            if entry.phase is not ChannelPhase.WANTED:
                self.move(key, entry.request.generation, ChannelEvent.FAIL)

    def remove(self, attempt: AttemptId) -> None:
        """The attempt is terminal."""
        for key in self._by_attempt.pop(attempt, ()):
            entry = self._entries.pop(key)
            of_worker = self._by_worker[entry.worker]
            del of_worker[key]
            if not of_worker:
                del self._by_worker[entry.worker]

    def phases(self) -> Iterator[tuple[ChannelKey, ChannelEntry]]:
        return iter(self._entries.items())

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert {key for keys in self._by_attempt.values() for key in keys} == set(self._entries)
        by_worker = [(worker, key) for worker, keys in self._by_worker.items() for key in keys]
        assert len(by_worker) == len(self._entries)
        assert all(self._entries[key].worker == worker for worker, key in by_worker)
        assert all(key.attempt == attempt for attempt, keys in self._by_attempt.items() for key in keys)


# --- partitions -----------------------------------------------------------------------------------
#
# A request for a subpartition is granted, waits, or is refused:
#
# - it waits for a producer attempt that is not here yet;
# - it waits while the coordinator has not spoken of the consumer's attempt yet;
# - of the known attempt it is granted if its generation is greater than any that was granted before: the
#   consumer itself says that it has lost the link before;
# - anything else is refused: an attempt that was replaced, a generation that was granted already, a
#   subpartition that the producer does not have.


@dataclass(slots=True)
class _Partition:
    """What one attempt writes for one edge, and who reads it."""

    producer: AttemptId
    output: OutputSpec
    readers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By consumer index: attempt and generation of the request that was granted last."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that could not be answered yet; ``channel``: of this worker's own."""

    link: int
    request: PartitionRequest
    channel: ChannelKey | None
    deadline: float


class PartitionRegistry:
    """The partitions of all attempts here that were not released, and the attempts that the coordinator
    has spoken of."""

    def __init__(self) -> None:
        self._partitions: dict[PartitionId, dict[int, _Partition]] = {}
        """By attempt of the producer."""
        self._attempts: dict[SubtaskId, int] = {}
        """The highest attempt that the coordinator has named, where that is not the first."""

    def learn(self, attempt: AttemptId) -> None:
        """The coordinator speaks of that attempt."""
        if attempt.attempt > self._attempts.get(attempt.subtask, FIRST_ATTEMPT):
            self._attempts[attempt.subtask] = attempt.attempt

    def add(self, producer: AttemptId, outputs: list[OutputSpec]) -> None:
        for output in outputs:
            partition = PartitionId(producer.subtask.job, output.edge, producer.subtask.index)
            self._partitions.setdefault(partition, {})[producer.attempt] = _Partition(producer, output)

    def remove(self, producer: AttemptId, outputs: list[OutputSpec]) -> None:
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

    def grant(self, request: PartitionRequest) -> AttemptId | None:
        """The attempt that serves the request; None: it has to wait.

        Raises:
            ShuffleError: it never can be served.
        """
        name = PartitionId(JobId(request.job), request.edge, request.producer)
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
        where = f"subpartition {request.subpartition} of partition {request.job}/edge{request.edge}."
        where += str(request.producer)
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

    def late(self, request: PartitionRequest, worker: int) -> ShuffleError:
        """Why a request has waited in vain on ``worker``."""
        name = PartitionId(JobId(request.job), request.edge, request.producer)
        if request.producer_attempt not in self._partitions.get(name, {}):
            text = f"partition {name} attempt {request.producer_attempt} is not on worker {worker}"
            return PartitionNotFound(text)
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
