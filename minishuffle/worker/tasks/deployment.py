"""The attempts deployed on a worker: their connection, release and inspection.

All calls are on the loop thread and do not block.
"""

from __future__ import annotations

from collections.abc import Iterable

from minishuffle.counters import (
    TaskSnapshot,
)
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.partition import PartitionView, ResultPartition
from minishuffle.exchange.spool import Spool
from minishuffle.ids import AttemptId, is_snapshot_edge, is_state_edge
from minishuffle.protocol.channel import Outgoing
from minishuffle.wire.frames import DataType
from minishuffle.wire.messages import CutComplete, TaskReport
from minishuffle.wire.reports import SourcePositions
from minishuffle.worker.channels.registry import ChannelKey, Progress
from minishuffle.worker.instructions import (
    Attach,
    Fence,
    MoveTasks,
    RequestPartition,
    SetPause,
    StartHolder,
    StartTask,
)
from minishuffle.worker.reports.poolusage import Turns
from minishuffle.worker.tasks.attempt import Attempt, WorkerServices
from minishuffle.worker.tasks.snapshotholder import SnapshotHolder

__all__ = ["Deployment"]


class Deployment:
    """All attempts on a worker; several of one subtask may be there at once."""

    def __init__(self, services: WorkerServices) -> None:
        self.services = services
        self.attempts: dict[AttemptId, Attempt] = {}
        self.holders: dict[AttemptId, SnapshotHolder] = {}
        """Holders of snapshots of tasks on other workers; no report and no count of rows has them."""
        self.spools: dict[AttemptId, Spool] = {}
        """Also of jobs that have ended: see :meth:`drop_spools`."""
        self.local_bytes = 0
        self.local_buffers = 0
        self.local_rows = 0
        self._moved_on: set[AttemptId] = set()
        self._turns = Turns()

    def start(self, instruction: StartTask) -> Attempt:
        """Build one attempt and start its thread.

        Raises:
            Exception: see :class:`Attempt`.
        """
        attempt = Attempt(self.services, instruction.message, instruction.spec)
        self.attempts[attempt.id] = attempt
        if attempt.task.spool is not None:
            self.spools[attempt.id] = attempt.task.spool
        return attempt

    def hold(self, instruction: StartHolder) -> None:
        """Begin to hold the snapshots of a task.

        Raises:
            Exception: see :class:`SnapshotHolder`.
        """
        key, spec = instruction.holder, instruction.spec
        self.holders[key] = SnapshotHolder(key, spec.task_attempt, self.services)

    @property
    def snapshot_bytes(self) -> int:
        """The size of all snapshots that are held, in memory and on disk."""
        return sum(holder.bytes for holder in self.holders.values())

    def _handed_over(self, piece: Outgoing) -> None:
        if piece.data_type == DataType.DATA:
            self.local_buffers += 1
            self.local_bytes += piece.size
            self.local_rows += piece.rows

    # --- connecting ------------------------------------------------------------------------------

    def channel(self, key: ChannelKey) -> InputChannel | None:
        """The input channel of that key; None if its attempt is gone."""
        if is_snapshot_edge(key.edge):
            holder = self.holders.get(key.attempt)
            return holder.channel if holder is not None else None
        attempt = self.attempts.get(key.attempt)
        return attempt.channel(key.edge, key.producer) if attempt is not None else None

    def progress(self, key: AttemptId) -> Progress:
        """See :meth:`Attempt.progress`; None if the attempt is gone."""
        attempt = self.attempts.get(key)
        return attempt.progress() if attempt is not None else None

    def partition(self, producer: AttemptId, edge: int) -> ResultPartition | None:
        """The partition that the attempt writes for the edge; None if it is gone."""
        if (holder := self.holders.get(producer)) is not None:
            return holder.partition
        attempt = self.attempts.get(producer)
        return attempt.partition(edge) if attempt is not None else None

    def connect_local(self, key: ChannelKey, producer: AttemptId, generation: int, *, version: int) -> None:
        channel, partition = self.channel(key), self.partition(producer, key.edge)
        if channel is None or partition is None:
            return
        subpartition = partition.subpartition(key.attempt.subtask.index)
        assert subpartition is not None
        reader = key.attempt
        channel.attach_local(
            subpartition,
            generation,
            self._handed_over,
            attempt=reader.attempt,
            version=version,
        )
        view = subpartition.view
        if view is not None and subpartition.error is not None:
            view.fail(subpartition.error)
        if not _is_counted(key.edge):
            return
        self.attempts[reader].traffic.receives((key.edge, key.producer, producer.attempt), channel)
        if subpartition.view is not None:
            peer = (key.edge, reader.subtask.index, reader.attempt)
            self.attempts[producer].traffic.sends(peer, subpartition.view)

    def moved_on(self) -> list[AttemptId]:
        """Attempts that have stopped to move and whose rows were taken since this was asked last."""
        found = {key for key, attempt in self.attempts.items() if attempt.has_moved_on}
        new = [key for key in found if key not in self._moved_on]
        self._moved_on = found
        return new

    @property
    def moves(self) -> bool:
        """Whether any attempt is to move."""
        return any(attempt.paths.pause.moving for attempt in self.attempts.values())

    def stop_tasks(self, instruction: SetPause | MoveTasks) -> None:
        """See :meth:`Attempt.set_pause` and :meth:`Attempt.move`."""
        for attempt in self.attempts.values():
            if attempt.id.subtask.job != instruction.job:
                continue
            if isinstance(instruction, SetPause):
                attempt.set_pause(instruction.barrier, paused=instruction.paused)
            else:
                attempt.move(instruction.barrier, instruction.subtasks)

    def fence(self, instruction: Fence) -> None:
        """Earlier attempts of a consumer read no more. Of a task whose snapshots are held here, they write no
        more."""
        producer, consumer = instruction.producer, instruction.consumer
        if (holder := self.holders.get(producer)) is not None:
            if consumer.subtask.index == producer.subtask.index:  # Holders of other subtasks go on.
                holder.fence(consumer.attempt)
            return
        partition = self.partition(producer, instruction.edge)
        if partition is not None:
            partition.fence(consumer.subtask.index, consumer.attempt)

    def close_subpartitions(self, producer: AttemptId, edge: int, consumers: Iterable[int]) -> None:
        """Consumers want none of its rows."""
        partition = self.partition(producer, edge)
        if partition is not None:
            partition.close(consumers)

    def count_received(self, instruction: RequestPartition) -> None:
        """The channel was attached to a link."""
        channel, request = self.channel(instruction.channel), instruction.request
        if channel is not None and _is_counted(request.partition.edge):
            peer = (request.partition.edge, request.partition.producer, request.producer_attempt)
            self.attempts[instruction.channel.attempt].traffic.receives(peer, channel)

    def count_sent(self, instruction: Attach, view: PartitionView) -> None:
        """A peer reads by that view."""
        request = instruction.request
        peer = (request.partition.edge, request.subpartition, request.consumer_attempt)
        if _is_counted(request.partition.edge):
            self.attempts[instruction.producer].traffic.sends(peer, view)

    def note_limit(self, producer: AttemptId, limit: str) -> None:
        """A connection by which that attempt sends is at a limit."""
        if (attempt := self.attempts.get(producer)) is not None:
            attempt.note_limit(limit)

    # --- taking down -----------------------------------------------------------------------------

    def release(self, attempts: list[AttemptId]) -> list[Attempt]:
        """Free what these attempts have here. An attempt that could not be built has nothing.

        Gives those that have exchanged or dropped more rows since their end was reported.
        """
        changed: list[Attempt] = []
        for key in attempts:
            if (holder := self.holders.pop(key, None)) is not None:
                holder.release()
            attempt = self.attempts.pop(key, None)
            if attempt is not None:
                attempt.release()
                if attempt.rows() != attempt.reported:
                    changed.append(attempt)
        return changed

    def free_rows(self, attempt_id: AttemptId, begin: int, read: int) -> None:
        """Readers are done with rows of a sink: see :meth:`Spool.free`; it may have waited for that."""
        spool, attempt = self.spools.get(attempt_id), self.attempts.get(attempt_id)
        if spool is not None:
            spool.free(begin, read)
        if attempt is not None:
            attempt.paths.bell.ring()
            if (taker := attempt.task.snapshots) is not None:
                taker.consumed()

    def drop_spools(self, job: str) -> None:
        """Delete the rows kept by the job's sinks: they will not be read. The attempts may remain until they
        are released."""
        for key in [key for key in self.spools if key.subtask.job == job]:
            self.spools.pop(key).give_up()

    # --- timers and reports ----------------------------------------------------------------------

    def ring(self) -> None:
        """Have every task that waits look again."""
        for attempt in self.attempts.values():
            attempt.paths.bell.ring()

    def look(self) -> None:
        """Add up how full the buffers of some attempts are, with those that tasks have given back."""
        self.services.inbox.drain()
        self._turns.take(list(self.attempts.values()))

    def flush_intervals(self) -> set[float]:
        """The buffer timeouts of the jobs that have one, in seconds."""
        timeouts = (attempt.settings.buffer_timeout for attempt in self.attempts.values())
        return {timeout for timeout in timeouts if timeout != "adaptive" and timeout > 0}

    def flush(self, interval: float) -> None:
        """A buffer timeout has passed: send the published parts of open segments, for jobs with this
        timeout."""
        self.services.inbox.drain()
        for attempt in self.attempts.values():
            if attempt.settings.buffer_timeout == interval:
                attempt.flush()

    @property
    def debloats(self) -> bool:
        """Whether any of the jobs does."""
        return any(attempt.settings.debloat_target for attempt in self.attempts.values())

    def debloat(self) -> None:
        """See :meth:`Attempt.debloat`."""
        for attempt in self.attempts.values():
            attempt.debloat()

    def want_snapshots(self, job: str | None = None) -> None:
        """Have all tasks, or those of a job, take a snapshot soon: what their producers retain can be given
        up then."""
        for attempt in self.attempts.values():
            if attempt.task.snapshots is not None and job in (None, attempt.id.subtask.job):
                attempt.task.snapshots.ask()

    def cut_complete(self, message: CutComplete) -> None:
        """A durable snapshot of a job is complete. If there is need for more room, that is wanted of the next
        one too: the bound says so but once, until less than half of it is held."""
        for attempt in self.attempts.values():
            subtask, taker = attempt.id.subtask, attempt.task.snapshots
            if taker is not None and subtask.job == message.job:
                taker.cut_complete(message.savepoint, message.kept, freed=subtask.key in message.alone)
        if self.services.retained.needs_room:
            self.want_snapshots(message.job)

    @property
    def reads_sources(self) -> bool:
        """Whether any of its tasks reads a source, or what external clients write."""
        return any(not attempt.spec.inputs for attempt in self.attempts.values())

    def renew_leases(self) -> list[SourcePositions]:
        """Ask all sources for what is to be reported."""
        found = (attempt.renew_leases() for attempt in self.attempts.values())
        return [fact for fact in found if fact is not None]

    def snapshots(self) -> tuple[TaskSnapshot, ...]:
        return tuple(attempt.snapshot() for attempt in self.attempts.values())

    def reports(self) -> list[TaskReport]:
        """For the heartbeat."""
        return [attempt.report() for attempt in self.attempts.values()]


def _is_counted(edge: int) -> bool:
    """Whether rows over that edge are rows of the job: state and snapshots are not."""
    return not (is_state_edge(edge) or is_snapshot_edge(edge))
