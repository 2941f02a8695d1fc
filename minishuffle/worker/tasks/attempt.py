"""An attempt of a subtask on a worker, with all its resources, from its start to its release.

All calls are on the loop thread and do not block, unless noted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from minishuffle import limits
from minishuffle.counters import (
    PartitionSnapshot,
    PoolSnapshot,
    TaskCounters,
    TaskSnapshot,
)
from minishuffle.errors import PartitionLost, ResourceExhausted, TaskFailed, UsageError
from minishuffle.exchange.blocking import BlockingPartition
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.channels import ChannelEvent, InputChannel
from minishuffle.exchange.debloater import BufferDebloater, starting_bytes
from minishuffle.exchange.elements import AssemblyBudget, ByteBudget
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.gate import InputGate, SplitChannels
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retention import RetainedBytes, RetainedStore
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.exchange.spool import Spool
from minishuffle.exchange.wholebatches import WholeBatches
from minishuffle.ids import FIRST_ATTEMPT, AttemptId, PartitionId, snapshot_edge, state_edge
from minishuffle.operators.base import CompleteFile
from minishuffle.plan.graph import JobSettings
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.messages import (
    DeployTasks,
    InputSpec,
    OutputSpec,
    Standing,
    Step,
    TaskReport,
    TaskSpec,
    WriteState,
)
from minishuffle.wire.reports import (
    Fact,
    FileCompleted,
    PartitionReadable,
    SnapshotsHeld,
    SourcePositions,
    SplitsDealt,
    TaskStateChanged,
)
from minishuffle.worker.channels.registry import ChannelKey, Progress
from minishuffle.worker.diskthreads import DiskThreads
from minishuffle.worker.external.clientgate import UPSTREAM_EDGE, UpstreamGate
from minishuffle.worker.instructions import (
    attempt_id,
)
from minishuffle.worker.reports.channelcounts import Traffic
from minishuffle.worker.reports.filereports import FileReports
from minishuffle.worker.reports.outbox import Outbox
from minishuffle.worker.reports.poolusage import FlowTotals
from minishuffle.worker.sources.leases import SourceLeases
from minishuffle.worker.tasks.crashrecord import CrashRecord
from minishuffle.worker.tasks.handoff import LoopInbox, TaskPaths
from minishuffle.worker.tasks.latencymarkers import LatencyMarkers
from minishuffle.worker.tasks.snapshottaker import SnapshotParts, SnapshotTaker
from minishuffle.worker.tasks.statehandover import StateHandover, StateInput, state_partition
from minishuffle.worker.tasks.statewriter import restoring
from minishuffle.worker.tasks.task import Task, TaskOutcome
from minishuffle.worker.tasks.tasktable import takes_snapshots
from minishuffle.worker.wallclock import WallClock

__all__ = ["Attempt", "WorkerServices"]

_log = logging.getLogger("minishuffle.worker")


@dataclass(slots=True, kw_only=True)
class WorkerServices:
    """Services that all attempts on a worker share. (Flink: ``TaskManagerServices``.)"""

    worker: int
    pool: NetworkBufferPool
    inbox: LoopInbox
    report: Callable[[Task, TaskOutcome | None], None]
    """Called on the loop; see :class:`Task`."""
    said: Callable[[Outbox], None]
    """Called on the loop when a task has something for the coordinator; see :class:`Outbox`."""
    fact: Callable[[Fact], None]
    """Called on the loop with facts about an attempt for the coordinator."""
    recovered: Callable[[AttemptId, Step], None]
    """Called on the loop with steps of the recovery of an attempt; those of a first attempt are none."""
    stands: Callable[[AttemptId], None]
    """Called on the loop when an attempt stops for a pause, or is kept from it: see :class:`TaskPause`."""
    saved: Callable[[AttemptId, WriteState, TaskStateSnapshot | str, float], None] = lambda *taken: None
    """Called on the loop when an attempt has taken its state for a savepoint: see :class:`Task`."""
    made: Callable[[AttemptId, WriteState, TaskStateSnapshot | str], None] = lambda *made: None
    """Called on the loop with all parts of that state."""
    partition_lost: Callable[[AttemptId, PartitionLost], None] = lambda attempt, error: None
    """Called on the loop when a blocking partition of an attempt cannot be read."""
    snapshots_held: Callable[[SnapshotsHeld], None] = lambda fact: None
    """Called on the loop when a holder has all snapshots that are to be kept, or takes no more."""
    channel_event: Callable[[ChannelKey, int, ChannelEvent], object] = lambda key, generation, event: None
    """Called on the loop with the generation; see :class:`InputChannel`."""
    clock: Callable[[], float]
    """Seconds, of any origin; called on all threads."""
    cpu: Callable[[], float]
    """For how many seconds the thread that asks has had a processor."""
    wall: WallClock
    secret: bytes = b""
    """The cluster's, under which savepoints are signed."""
    away: Callable[[], bool] = lambda: False
    """Whether there is no coordinator; called on any thread."""
    record: CrashRecord = field(default_factory=CrashRecord)
    """Where tasks note their rows in hand."""
    spool_directory: str | None = None
    """Where elements are stored when the memory for them is full; None: the system's for temporary files."""
    spool_bytes_max: int = limits.SPOOL_BYTES_MAX
    """Maximum bytes that sinks of kept records write, see :class:`Spool`."""
    blocking_bytes_max: int = limits.BLOCKING_BYTES_MAX
    """Maximum bytes of ``stored``."""
    retained_bytes: int = limits.RETAINED_BYTES
    """Maximum bytes of ``retained``, between the elements that tasks read."""
    snapshot_wanted: Callable[[], None] = lambda: None
    """Called on the loop when half of these is retained: snapshots of consumers would free them."""
    snapshot_memory_bytes: int = limits.SNAPSHOT_MEMORY_BYTES_MAX
    """Maximum bytes of ``snapshots``; beyond it, snapshots lie on disk."""
    budget: AssemblyBudget = field(init=False)
    local: ByteBudget = field(init=False)
    """For batches that are handed to consumers on this worker."""
    stored: ByteBudget = field(init=False)
    """Budget of blocking partitions and of the gates that read them."""
    retained: RetainedBytes = field(init=False)
    """Budget of retained partitions."""
    snapshots: ByteBudget = field(init=False)
    """Budget of the memory for snapshots of tasks on other workers, and copies of those of its own tasks."""
    disk: DiskThreads = field(init=False)
    place: StorePlace = field(init=False)

    def __post_init__(self) -> None:
        self.budget = AssemblyBudget(limits.ASSEMBLY_BYTES_MAX)
        self.local = ByteBudget(limits.LOCAL_BATCH_BYTES_MAX)
        self.stored = ByteBudget(self.blocking_bytes_max)
        self.retained = RetainedBytes(
            self.retained_bytes,
            self.retained_bytes // limits.RETAINED_MEMORY_SHARE,
            self.pool.segment_bytes,
            on_half=partial(self.inbox.post, self.snapshot_wanted),
            on_disk_full=_warn_of_full_disk,
        )
        self.snapshots = ByteBudget(self.snapshot_memory_bytes)
        self.disk = DiskThreads(self.inbox)
        self.place = StorePlace(self.spool_directory, self.disk.close_file)


class Attempt:
    """The resources of one attempt: its task, paths, gates, partitions, pools and outbox. The constructor
    builds them and starts its thread; if it fails, nothing remains.

    Raises:
        ResourceExhausted: the pools that it needs do not fit.
        Exception: e.g. no further thread can be started.
    """

    def __init__(self, services: WorkerServices, message: DeployTasks, spec: TaskSpec) -> None:
        self.id, self.slot = attempt_id(message.job, spec), spec.slot
        self.settings = JobSettings.model_validate(message.settings)
        self.counters, self.traffic, self._flow = TaskCounters(), Traffic(), FlowTotals()
        self.note_limit = partial(_note_limit, self.counters, services.wall)
        pause, stands = (message.barrier, message.paused), partial(services.stands, self.id)
        self.paths = TaskPaths(services.inbox, pause, stands)
        self.gates: list[InputGate] = []
        self.upstreams: UpstreamGate | None = None
        """Where external clients write into the task, if they do."""
        self.partitions: dict[int, ResultPartition] = {}
        """By edge."""
        source = None if spec.inputs else (spec.operator, spec.index)
        self._latency = LatencyMarkers(self.settings, source, self.partitions, services.wall)
        self.reported: tuple[bytes, dict[str, int]] | None = None
        """The result of :meth:`rows` at the end of the task."""
        self._services, self.spec = services, spec
        self.pools: dict[int, LocalPool] = {}
        """The partitions' pools, by edge."""
        self._channels: dict[tuple[int, int], InputChannel] = {}
        """By edge and producer."""
        parts = SnapshotParts(self._outbox(), self._source_leases(), self._file_reports(), self._spool())
        self.task = Task(
            self.id,
            message.name,
            spec.name,
            spec.parallelism,
            message.programs[spec.operator],
            self.gates,
            self.partitions,
            self.paths,
            self.counters,
            services.report,
            services.recovered,
            services.saved,
            services.made,
            *parts,
            self._latency,
            services.wall,
            self._state_handover(),
            services.record,
            None if spec.restoration is None else restoring(spec.restoration, services.secret),
            spec.has_ended,
            self._snapshot_taker(parts) if self._takes_snapshots else None,
            dealt=self._splits_dealt if spec.one_split else None,
            search=spec.poison,
            rests=bool(spec.outputs) and self.settings.buffer_timeout == "adaptive",
        )
        try:
            for input_spec in spec.inputs:
                self.gates.append(self._build_gate(input_spec))
            if spec.stream:
                self.upstreams = self._upstream_gate()
                self.gates.append(self.upstreams.gate)
            for output in spec.outputs:
                self._build_partition(output)
            self.task.start()
        except BaseException:
            self.release()
            raise

    def _spool(self) -> Spool | None:
        if not self.spec.sink:
            return None
        bytes_max = None if self.spec.bounded else self._services.spool_bytes_max
        store = partial(ElementStore, f"what {self._where()} keeps for readers", self._services.place)
        return Spool(store, bytes_max, self.spec.first_row, is_guaranteed=self._takes_snapshots)

    @property
    def _takes_snapshots(self) -> bool:
        return takes_snapshots(self.spec, is_guaranteed=self.settings.is_guaranteed)

    def _outbox(self) -> Outbox:
        known = self.spec.rows_collected if self.spec.version else 0
        return Outbox(self.id, self.paths, self._services.said, self._services.away, known=known)

    def _file_reports(self) -> FileReports:
        report = partial(_report_file, self._services.fact, self.id)
        spec = self.spec
        return FileReports(
            self.paths,
            report,
            spec.files,
            spec.committable,
            attempt=spec.attempt,
            held=self._takes_snapshots,
            is_complete=spec.files_complete,
            rows=spec.rows_listed,
        )

    def _source_leases(self) -> SourceLeases:
        held = self._takes_snapshots
        restarts = self.settings.restart_strategy != "none" and not held
        return SourceLeases(
            self.paths,
            partial(_report_positions, self._services.fact, self.id, bool(self.spec.stream))
            if restarts
            else None,
            rows=self.settings.source_lease,
            resumed=self.spec.positions,
            age=self.spec.positions_age,
            held=held,
            cuts=held and self.spec.receipts_by_cuts,
        )

    def _splits_dealt(self, splits: int) -> None:
        """(Task.) Report how many splits its source has given it.

        Raises:
            UsageError: there are more than one, and earlier attempts had one alone: the rows would come in
                another order than theirs.
        """
        if splits > 1 and self.spec.version:
            raise UsageError(
                f"splits() gives {splits} splits to {self._where()}, which had one before: give the same "
                "splits in the same order each time, or set a discovery_interval"
            )
        self.paths.post(self._services.fact, SplitsDealt(attempt=self.id, splits=splits))

    def _build_partition(self, output: OutputSpec) -> None:
        """Its pool has at least n + 1 segments, as in Flink, and at most what its channels can use, or if it
        is not bounded what the worker has. One that is blocking or retained has none."""
        subtask = self.id.subtask
        partition_id = PartitionId(subtask.job, output.edge, subtask.index)
        if output.kept or output.retained:
            make = self._blocking_partition if output.kept else self._retained_partition
            self.partitions[output.edge] = make(partition_id, output)
            return
        least, most = output.count + 1, output.count * limits.OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
        if not output.bounded:
            most = max(most, self._services.pool.total)
        pool = self._services.pool.create_pool(f"output {partition_id}", least, most)
        paths = self.paths
        acquire: Callable[[], Segment] = partial(paths.acquire, pool, self.note_limit)
        if (announce := self._announcing(output)) is not None:
            acquire = partial(_acquire_first, acquire, announce, [])
        pool.on_available(paths.bell.ring)
        self.pools[output.edge] = pool
        self.partitions[output.edge] = PipelinedPartition(
            partition_id,
            range(output.first, output.first + output.count),
            acquire,
            paths.notify,
            self.counters,
            flushing=flushing(self.settings.buffer_timeout),
            drops=self.settings.on_unavailable == "drop",
            full=partial(self.note_limit, "queue"),
            repeats=bool(self.spec.version),
            closed=output.closed,
            whole_batches=WholeBatches(
                self._services.local, self._services.pool.segment_bytes, paths.wait_until, paths.bell.ring
            ),
            buffer_size=self._starting_bytes(),
        )

    def _announcing(self, output: OutputSpec) -> Callable[[], None] | None:
        """(Task.) Reports that consumers find something to read; None: nobody waits for that."""
        first = PartitionReadable(attempt=self.id, edge=output.edge)
        return partial(self.paths.post, self._services.fact, first) if output.announced else None

    def _starting_bytes(self) -> int | None:
        """Bytes per buffer until the consumer announces a size; None: fill the whole buffer."""
        debloats = self.settings.debloat_target > 0
        return starting_bytes(self._services.pool.segment_bytes) if debloats else None

    def _blocking_partition(self, partition_id: PartitionId, output: OutputSpec) -> BlockingPartition:
        return BlockingPartition(
            partition_id,
            range(output.first, output.first + output.count),
            self.paths.notify,
            self.counters,
            self._stored(partition_id, limits.KEPT_MEMORY_BYTES),
            shared=output.shared,
            capacity=self._services.pool.segment_bytes,
            disk=self._services.disk,
            lost=partial(self._services.partition_lost, self.id),
        )

    def _state_handover(self) -> StateHandover:
        """Its state: from an earlier attempt, and for the next one."""
        services, subtask = self._services, self.id.subtask
        partition_id = PartitionId(subtask.job, state_edge(subtask.operator), subtask.index)
        make_partition = partial(
            state_partition,
            partition_id,
            self._stored(partition_id, limits.KEPT_MEMORY_BYTES),
            capacity=services.pool.segment_bytes,
            disk=services.disk,
        )
        if not self.spec.state_attempt:
            return StateHandover(self.paths, make_partition, is_needed=self.spec.needs_state)
        key = partition_id.edge, partition_id.producer
        earlier = StateInput(
            partition_id,
            self.paths,
            services.budget,
            segment_bytes=services.pool.segment_bytes,
            store=self._stored(partition_id, limits.KEPT_MEMORY_BYTES),
            on_event=partial(services.channel_event, ChannelKey(self.id, *key)),
            clock=services.clock,
        )
        self._channels[key] = earlier.channel
        closed = partial(self._channels.pop, key, None)
        return StateHandover(self.paths, make_partition, earlier, closed, is_needed=self.spec.needs_state)

    def _snapshot_taker(self, parts: SnapshotParts) -> SnapshotTaker:
        spec = self.spec
        return SnapshotTaker(
            self.paths,
            self.gates,
            self.partitions,
            self._snapshot_stream,
            self._snapshot_store,
            parts=parts,
            wall=self._services.wall,
            place=spec.operator + spec.index / spec.parallelism,
            clock=self._services.clock,
            cpu=self._services.cpu,
            settings=self.settings,
            holder=spec.holder,
            is_held=spec.holder <= FIRST_ATTEMPT or spec.state_attempt == spec.holder,
            is_restored=spec.restoration is not None,
            again=spec.rows_again,
        )

    def _snapshot_stream(
        self, on_stable: Callable[[], None], fenced: Callable[[int], None]
    ) -> RetainedPartition:
        """By which the holder of its snapshots gets them; nobody waits for that one."""
        services, index = self._services, self.id.subtask.index
        partition_id = PartitionId(self.id.subtask.job, snapshot_edge(self.id.subtask.operator), index)
        return RetainedPartition(
            partition_id,
            range(index, index + 1),
            self.paths.notify,
            TaskCounters(),
            self._retained_store(partition_id, 0),
            version=self.spec.attempt,
            wait=self.paths.wait_until,
            wake=self.paths.bell.ring,
            flushing=Flush.ADAPTIVE,
            capacity=services.pool.segment_bytes,
            unread_bytes=None,
            disk=services.disk,
            fenced=fenced,
            lost=self._lose_retained,
            on_stable=on_stable,
        )

    def _snapshot_store(self) -> ElementStore:
        services = self._services
        return ElementStore(f"a snapshot of {self._where()}", services.place, memory=services.snapshots)

    def _retained_store(self, partition_id: PartitionId, keep_bytes: int) -> RetainedStore:
        owner = f"what partition {partition_id} at {self._where()} retains"
        return RetainedStore(
            self._services.retained,
            partial(ElementStore, owner, self._services.place),
            keep_bytes=keep_bytes,
            wake=self.paths.bell.ring,
        )

    def _retained_partition(self, partition_id: PartitionId, output: OutputSpec) -> RetainedPartition:
        services, paths = self._services, self.paths
        unread_bytes = limits.OUTPUT_BUFFERS_PER_SUBPARTITION_MAX * services.pool.segment_bytes
        partition = RetainedPartition(
            partition_id,
            range(output.first, output.first + output.count),
            paths.notify,
            self.counters,
            self._retained_store(partition_id, unread_bytes),
            version=self.spec.version or self.spec.attempt,
            wait=paths.wait_until,
            wake=paths.bell.ring,
            flushing=flushing(self.settings.buffer_timeout),
            capacity=self._starting_bytes() or services.pool.segment_bytes,
            unread_bytes=unread_bytes,
            disk=services.disk,
            closed=output.closed,
            full=partial(self.note_limit, "queue"),
            lost=self._lose_retained,
            on_stable=(lambda: None) if self.task.snapshots is None else self.task.snapshots.consumed,
            replayed=partial(self._replayed, output.operator),
            begun=self._announcing(output),
        )
        if self.spec.attempt > FIRST_ATTEMPT:
            for each in partition.subpartitions:
                each.lose()  # Consumers that have read an earlier attempt to its end never come.
        return partition

    def _lose_retained(self, error: PartitionLost) -> None:
        """(Loop.) What it retains cannot be read: the task fails, also if it has finished."""
        if self.task.snapshots is not None:
            self.task.snapshots.lose(error)
        self._services.partition_lost(self.id, error)

    def _replayed(self, operator: int, index: int, attempt: int) -> None:
        """(Loop.) An attempt of a consumer was sent all that was retained for it when it began to read."""
        self._services.recovered(AttemptId.of(self.id.subtask.job, operator, index, attempt), "replayed")

    def _stored(self, partition_id: PartitionId, memory_bytes: int) -> ElementStore:
        """The store of a partition that this attempt writes or reads."""
        return ElementStore(
            f"partition {partition_id} at {self._where()}",
            self._services.place,
            memory_bytes=memory_bytes,
            budget=self._services.stored,
        )

    def _where(self) -> str:
        return f"attempt {self.id} on worker {self._services.worker}"

    def _build_gate(self, spec: InputSpec) -> InputGate:
        """Exclusive buffers for every channel, floating ones from 1 up. (Flink counts remote channels only; a
        local one may become remote, when its producer is restarted elsewhere.)"""
        services, settings = self._services, self.settings
        exclusive, floating = settings.buffers_per_channel, settings.floating_buffers_per_gate
        reserved = exclusive * spec.count
        name = f"input {spec.input} of {self.spec.name}[{self.spec.index}]"
        pool = services.pool.create_pool(name, reserved + 1, reserved + floating)
        memory = limits.KEPT_MEMORY_BYTES // max(1, spec.count)
        credit = spec.kept or settings.flow_control == "credit"

        def store(producer: int) -> ElementStore:
            return self._stored(PartitionId(self.id.subtask.job, spec.edge, producer), memory)

        gate = InputGate(
            spec.edge,
            spec.input,
            GateBuffers(pool, services.pool.segment_bytes, exclusive, floating, credit=credit),
            wake=self.paths.bell.ring,
            give_back=self.paths.give_back,
            budget=services.budget,
            counters=self.counters,
            tolerant=settings.restart_strategy != "none",
            kept=store if spec.kept else None,
            waits=spec.waits,
            strict=spec.strict,
            guaranteed=spec.guaranteed,
            redealt=spec.redealt,
            debloater=None if spec.kept else self._debloater(),
        )
        gate.end_barriers(self.paths.pause.ended)
        gate.on_latency = self._latency.take
        gate.buffers.on_limit = self.note_limit
        ended = set(spec.ended)
        for producer in range(spec.first, spec.first + spec.count):
            if producer in ended:
                gate.add_ended_channel(producer)
                continue
            on_event = partial(services.channel_event, ChannelKey(self.id, spec.edge, producer))
            self._channels[spec.edge, producer] = gate.add_channel(producer, on_event)
        return gate

    def _debloater(self) -> BufferDebloater | None:
        """The debloater of a gate, if the job has a ``debloat_target``."""
        target, services = self.settings.debloat_target, self._services
        return BufferDebloater(target, services.pool.segment_bytes, services.clock) if target else None

    def _upstream_gate(self) -> UpstreamGate:
        """Its channels come and go, and share the gate's pool. There is no debloating: external clients have
        a bound of their own, in rows (``source_lease``)."""
        services, settings = self._services, self.settings
        exclusive, floating = settings.buffers_per_channel, settings.floating_buffers_per_gate
        pool = services.pool.create_pool(
            f"stream {self.spec.stream} of {self.spec.name}[{self.spec.index}]",
            1 + exclusive,
            2 * (1 + exclusive) + floating,
        )

        def make_gate(splits: SplitChannels) -> InputGate:
            return InputGate(
                UPSTREAM_EDGE,
                0,
                GateBuffers(pool, services.pool.segment_bytes, exclusive, floating),
                wake=self.paths.bell.ring,
                give_back=self.paths.give_back,
                budget=services.budget,
                counters=self.counters,
                splits=splits,
            )

        return UpstreamGate(
            make_gate,
            self.task.leases,
            post=self.paths.post,
            clock=services.clock,
            resumed=None if self._takes_snapshots and not self.spec.has_ended else self.task.leases.resumed(),
        )

    def set_pause(self, barrier: int, *, paused: bool) -> None:
        """The task must stop after this barrier (``paused``), or the barrier has ended."""
        self.paths.pause.want(barrier, paused=paused)
        over = self.paths.pause.ended
        for gate in self.gates:
            gate.end_barriers(over)
        for partition in self.partitions.values():
            partition.end_barriers(over)
        self.paths.bell.ring()

    def pass_barrier(self, barrier: int) -> None:
        """The task has come to this barrier on all channels, and goes on behind it."""
        for gate in self.gates:
            gate.end_barriers(barrier)

    def move(self, barrier: int, moving: Collection[tuple[int, int]]) -> None:
        """Prepare for the move of the subtasks ``moving``. If this attempt is one of them, its task stops at
        the barrier once it has read all records sent to it before. Otherwise records that it emits for moving
        subtasks from now on wait for their next attempts."""
        pause, subtask = self.paths.pause, self.id.subtask
        if (subtask.operator, subtask.index) in moving:
            pause.move(barrier, moving)
        else:
            for gate in self.gates:
                gate.expect_move(barrier)
                gate.end_barriers(barrier)
            fed = {
                each.edge: {index for operator, index in moving if operator == each.operator}
                & {*range(each.first, each.first + each.count)}
                for each in self.spec.outputs
            }
            if any(fed.values()):
                pause.divide(barrier, fed)
        self.paths.bell.ring()

    @property
    def has_moved_on(self) -> bool:
        """The task moves and has stopped, and its consumers have read all its output; consumers that move as
        well do not count."""
        pause = self.paths.pause
        if not (pause.moving and pause.at):
            return False
        return all(
            partition.is_read([index for operator, index in pause.moving if operator == output.operator])
            for output in self.spec.outputs
            for partition in [self.partitions[output.edge]]
        )

    def partition(self, edge: int) -> ResultPartition | None:
        """The partition for that edge, or for the holder of its snapshots; None: there is none."""
        return next((each for each in self._written() if each.id.edge == edge), None)

    def _written(self) -> list[ResultPartition]:
        stream = [] if self.task.snapshots is None else [self.task.snapshots.writer.partition]
        return [*self.partitions.values(), *stream]

    def channel(self, edge: int, producer: int) -> InputChannel | None:
        return self._channels.get((edge, producer))

    # --- taking down -----------------------------------------------------------------------------

    def end(self, *, moved: bool = False) -> bytes:
        """The task has ended: gives the rows exchanged, as in :meth:`rows`, for its last report. If it has
        ``moved``, the state that it keeps is all that remains of it. If a task that takes snapshots has
        finished, its thread stays for them until :meth:`release`."""
        self.close(stays=self.task.state == "finished" and self._takes_snapshots)
        self.reported = self.rows()
        if moved and (state := self.task.state_handover.kept) is not None:
            for pool in self.pools.values():
                pool.destroy()
            self.partitions[state.id.edge] = state
        return self.reported[0]

    def close(self, *, stays: bool = False) -> None:
        """The task's thread is done (or written off): its inputs close. Idempotent. If the thread ``stays``,
        inputs stay attached until producers have heard what its last snapshot covers.

        The partitions of a task that has finished stay. If tasks restart, any other end is an error for the
        consumers, and what they have not read is discarded.
        """
        if not stays:
            self.paths.close()
        if self.upstreams is not None:
            self.upstreams.close()
        for gate in self.gates:
            gate.close(listens=stays)
        task = self.task
        if task.state_handover.earlier is not None:
            task.state_handover.earlier.gate.close()
        if task.state != "finished" and self.settings.restart_strategy != "none":
            error = TaskFailed(f"attempt {self.id.attempt} of {task.name}[{self.spec.index}] is {task.state}")
            for partition in self._written():
                partition.fail(error)
                partition.release(self._writes)

    def abandon(self) -> None:
        """Its thread does not stop: whatever it does from now on, nobody sees or counts it."""
        self.task.abandon()
        self.close()
        self.task.write_off()

    def release(self) -> None:
        """Free its partitions and pools: no consumer reads from it any more."""
        self.close()
        for partition in self._written():
            partition.release(self._writes)
        if self.task.snapshots is not None:
            self.task.snapshots.writer.forget()
        for pool in self.pools.values():
            pool.destroy()

    @property
    def _writes(self) -> bool:
        """Its thread still runs: it may write to its open segments, which are written off."""
        task = self.task
        runs = task.thread is not None and task.thread.is_alive()
        return runs and task.state in ("deploying", "running", "abandoned")

    # --- looks at its buffers ---------------------------------------------------------------------

    @property
    def channels(self) -> int:
        """How many all gates and partitions have."""
        inputs = sum(len(gate.channels) for gate in self.gates)
        return inputs + sum(len(each.subpartitions) for each in self.partitions.values())

    def look(self) -> None:
        """Add up how full its buffers are."""
        if self.task.state == "running":
            self._flow.look(self.gates, self.partitions.values(), self.pools.values())

    def _counted(self) -> TaskCounters:
        counters = self.task.read_counters()
        counters.flow = self._flow.read()
        return counters

    # --- flushing and reports --------------------------------------------------------------------

    def flush(self) -> None:
        """Let what is published in open segments go out."""
        for partition in self.partitions.values():
            partition.flush()

    def debloat(self) -> None:
        """Have its producers put as much into a buffer as suits how fast its task consumes."""
        if self.task.state == "running":
            for gate in self.gates:
                gate.debloat()

    def renew_leases(self) -> SourcePositions | None:
        """Ask its source for what is to be reported; one that stands at a barrier has said where it is."""
        if self.task.state != "running" or self.paths.pause.at:
            return None
        table, within = self.task.leases.renew(self.paths.pause.now())
        return _positions(self.id, bool(self.spec.stream), table, within) if table else None

    def snapshot(self) -> TaskSnapshot:
        """For ``/metrics``."""
        subtask, task = self.id.subtask, self.task
        return TaskSnapshot(
            job=subtask.job,
            job_name=task.job_name,
            operator=subtask.operator,
            name=task.name,
            index=subtask.index,
            slot=self.slot,
            attempt=self.id.attempt,
            state=task.state,
            counters=task.read_counters(),
            blocks=task.paths.clock.blocks,
            operators=task.operators,
            gates=tuple(gate.snapshot() for gate in self.gates),
            partitions=tuple(
                PartitionSnapshot(self.partitions[edge].backlog(), PoolSnapshot(pool.in_use, pool.size))
                for edge, pool in self.pools.items()
            ),
            latencies=self._latency.histograms(),
            user_series=tuple(series for each in task.user_metrics for series in each.series()),
        )

    def progress(self) -> Progress:
        """A value that changes whenever the thread makes progress: if it is the same later, the task is
        stuck. None while the task waits for input, for output buffers or for the coordinator."""
        state, since = self.paths.clock.present()
        return (since, self.counters.records_in, self.counters.records_out) if state == "busy" else None

    def rows(self) -> tuple[bytes, dict[str, int]]:
        """Rows exchanged and rows dropped so far."""
        return self.traffic.table(), self.task.read_counters().rows_dropped

    def completed(self, message: TaskStateChanged) -> TaskStateChanged:
        """Complete the report that the attempt was abandoned: add its counters, and the positions of its
        source. Rows in hand are lost; later output of the thread is discarded."""
        self.reported = self.rows()
        counts = {"counters": self.task.read_counters(), "traffic": self.reported[0]}
        return message.model_copy(update={**counts, "positions": self.task.leases.exact()})

    def report(self) -> TaskReport:
        """For the heartbeat."""
        return TaskReport(
            attempt=self.id,
            counters=self._counted(),
            traffic=self.traffic.table(),
            writes=self.upstreams.connected() if self.upstreams is not None else [],
            inside=self.paths.calls.inside,
            position=self.paths.calls.position,
            in_hand=self.paths.calls.in_hand,
            standing=self.standing(),
            awaits_cut=self.task.leases.awaited_cut,
            awaits_snapshot=self.task.leases.awaits_snapshot,
        )

    def standing(self) -> Standing:
        """How it stands to the last barrier."""
        pause = self.paths.pause
        return Standing(
            barrier=pause.at,
            blocked=pause.blocked,
            unread=list(pause.unread) if pause.at else [],
            taken=self.has_moved_on,
            outbox=self.task.outbox.unsent_bytes,
        )


def _warn_of_full_disk(error: ResourceExhausted) -> None:
    """(Any thread.)"""
    _log.warning("tasks wait until snapshots free what is retained, or there is room: %s", error)


def flushing(buffer_timeout: float | Literal["adaptive"]) -> Flush:
    """The flush policy for a job's buffer timeout."""
    if buffer_timeout == "adaptive":
        return Flush.ADAPTIVE
    return Flush.AT_ONCE if buffer_timeout == 0 else Flush.ON_REQUEST


def _acquire_first(
    acquire: Callable[[], Segment], announce: Callable[[], None], taken: list[bool]
) -> Segment:
    """(Task.) A segment for writing; the first one is announced, and ``taken`` has an item from then on."""
    segment = acquire()
    if not taken:
        taken.append(True)
        announce()
    return segment


def _report_positions(
    report: Callable[[Fact], None], attempt: AttemptId, waits: bool, positions: bytes, within: float
) -> None:
    report(_positions(attempt, waits, positions, within))


def _positions(attempt: AttemptId, waits: bool, positions: bytes, within: float) -> SourcePositions:
    return SourcePositions(attempt=attempt, positions=positions, within=within, waits=waits)


def _report_file(report: Callable[[Fact], None], attempt: AttemptId, file: CompleteFile) -> None:
    report(
        FileCompleted(
            attempt=attempt,
            file=file.number,
            path=file.path,
            rows=file.rows,
            bytes=file.bytes,
            checksum=file.checksum,
            committable=file.committable,
            writer=file.attempt,
            is_last=file.is_last,
        )
    )


def _note_limit(counters: TaskCounters, wall: Callable[[], float], limit: str) -> None:
    """(Any thread.) Note when a limit is hit for the first time, see :data:`~minishuffle.counters.LIMITS`.
    A function, not a method: as a method, its callers would form a reference cycle with the attempt."""
    if limit not in counters.limits_hit:
        counters.limits_hit[limit] = wall()
