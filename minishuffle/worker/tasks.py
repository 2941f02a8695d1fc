"""What a worker tells of itself: to register, with each heartbeat, and for ``/metrics``; and of a task
whose own report cannot be sent."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata

from minishuffle import limits
from minishuffle.counters import (
    ConnectionCounters,
    Histogram,
    PartitionSnapshot,
    PoolSnapshot,
    TaskCounters,
    TaskSnapshot,
    WorkerSnapshot,
)
from minishuffle.dataflow.graph import JobSettings
from minishuffle.errors import ResourceExhausted, clipped, text_of
from minishuffle.exchange.channels import GateBuffers, InputChannel
from minishuffle.exchange.elements import AssemblyBudget
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool
from minishuffle.exchange.spool import Spool
from minishuffle.ids import AttemptId, JobId, OperatorId, PartitionId, SubtaskId
from minishuffle.protocol.channel import Outgoing
from minishuffle.wire.frames import DataType
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    DeployTasks,
    ErrorInfo,
    InputSpec,
    Register,
    TaskReport,
    TaskSpec,
    TaskStateChanged,
    WorkerReport,
)
from minishuffle.worker.client_gate import UpstreamGate
from minishuffle.worker.handoff import LoopInbox, TaskPaths
from minishuffle.worker.outbox import Outbox
from minishuffle.worker.state import ChannelKey, StartTask, TaskKey
from minishuffle.worker.task import Task, TaskOutcome

__all__ = [
    "Deployment",
    "registration",
    "short_failure",
    "worker_report",
    "worker_snapshot",
]


# --- deployment -----------------------------------------------------------------------------------
#
# What is deployed on a worker: tasks with their gates, partitions and pools, built and taken down.
#
# Everything here is called on the loop thread and does not block.


class Deployment:
    """All tasks of a worker.

    Args:
        report: what tasks call, on the loop; see :class:`Task`.
        said: called on the loop when a task has something for the coordinator; see :class:`Outbox`.
        spool_directory, spool_bytes_max: of the sinks that keep records, see :class:`Spool`.
    """

    def __init__(
        self,
        worker: int,
        pool: NetworkBufferPool,
        inbox: LoopInbox,
        report: Callable[[Task, TaskOutcome | None], None],
        said: Callable[[Outbox], None],
        spool_directory: str | None = None,
        spool_bytes_max: int = limits.SPOOL_BYTES_MAX,
    ) -> None:
        self.pool = pool
        self.tasks: dict[TaskKey, Task] = {}
        self.partitions: dict[PartitionId, ResultPartition] = {}
        self.spools: dict[TaskKey, Spool] = {}
        """Also of jobs that are over: see :meth:`drop_spools`."""
        self.budget = AssemblyBudget(limits.ASSEMBLY_BYTES_MAX)
        self.local_bytes = 0
        self.local_buffers = 0
        self.local_rows = 0
        self._spool_directory = spool_directory
        self._spool_bytes_max = spool_bytes_max
        self._worker = worker
        self._inbox = inbox
        self._report = report
        self._said = said
        self._pools: dict[PartitionId, LocalPool] = {}
        self._flush_intervals: dict[str, float] = {}

    # --- building --------------------------------------------------------------------------------

    def start(self, instruction: StartTask) -> None:
        """Build one task and start its thread.

        Raises:
            ResourceExhausted: the pools that it needs do not fit.
            Exception: there cannot be another thread, for one. Nothing of the task is left behind.
        """
        message, spec = instruction.message, instruction.spec
        job = message.job
        settings = JobSettings.model_validate(message.settings)
        counters = TaskCounters()
        paths = TaskPaths(self._inbox)
        subtask = SubtaskId(JobId(job), OperatorId(spec.operator), spec.index)
        gates: list[InputGate] = []
        partitions: dict[int, ResultPartition] = {}
        try:
            for input_spec in spec.inputs:
                gates.append(self._build_gate(message, input_spec, spec, settings, paths, counters))
            if spec.stream:
                gates.append(self._upstream_gate(spec, settings, paths, counters))
            for output in spec.outputs:
                partition_id = PartitionId(JobId(job), output.edge, spec.index)
                pool = self._output_pool(partition_id, output.count, paths)
                partition = ResultPartition(
                    partition_id,
                    output.first,
                    output.count,
                    lambda pool=pool: paths.acquire(pool),  # type: ignore[misc]
                    paths.notify,
                    counters,
                    eager=settings.buffer_timeout == 0,
                )
                partitions[output.edge] = self.partitions[partition_id] = partition
            attempt_id = AttemptId(subtask, spec.attempt)
            task = Task(
                attempt_id,
                message.name,
                spec.name,
                spec.parallelism,
                message.programs[spec.operator],
                gates,
                partitions,
                paths,
                counters,
                self._report,
                Outbox(attempt_id, paths, self._said),
            )
            if spec.sink:
                bytes_max = None if spec.bounded else self._spool_bytes_max
                task.spool = Spool(self._spool_directory, bytes_max)
            task.start()
        except BaseException:
            for gate in gates:
                gate.close()
            for partition in partitions.values():
                self._drop_partition(partition.id, written_off=False)
            raise
        self.tasks[(job, spec.operator, spec.index)] = task
        if task.spool is not None:
            self.spools[(job, spec.operator, spec.index)] = task.spool
        if settings.buffer_timeout > 0:
            self._flush_intervals[job] = settings.buffer_timeout

    def _output_pool(self, partition_id: PartitionId, count: int, paths: TaskPaths) -> LocalPool:
        """At least n + 1, as in Flink for a pipelined partition; at most what its channels can use."""
        pool = self.pool.create_pool(
            f"output {partition_id}", count + 1, count * limits.OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
        )
        pool.on_available(paths.bell.ring)
        self._pools[partition_id] = pool
        return pool

    def _build_gate(
        self,
        message: DeployTasks,
        spec: InputSpec,
        task: TaskSpec,
        settings: JobSettings,
        paths: TaskPaths,
        counters: TaskCounters,
    ) -> InputGate:
        """Flink's sizes: exclusive buffers for remote channels only, floating ones from 1 up."""
        exclusive, floating = settings.buffers_per_channel, settings.floating_buffers_per_gate
        channels = list(message.channels(spec))
        reserved = exclusive * sum(1 for _, _, worker in channels if worker != self._worker)
        name = f"input {spec.input} of {task.name}[{task.index}]"
        pool = self.pool.create_pool(name, reserved + 1, reserved + floating)
        gate = InputGate(
            spec.edge,
            spec.input,
            GateBuffers(pool, self.pool.segment_bytes, exclusive, floating),
            wake=paths.bell.ring,
            give_back=paths.give_back,
            budget=self.budget,
            counters=counters,
        )
        for producer, _, _ in channels:
            gate.add_channel(producer)
        return gate

    def _upstream_gate(
        self, task: TaskSpec, settings: JobSettings, paths: TaskPaths, counters: TaskCounters
    ) -> UpstreamGate:
        """Its channels come and go, and share what the gate's pool has."""
        exclusive, floating = settings.buffers_per_channel, settings.floating_buffers_per_gate
        pool = self.pool.create_pool(
            f"stream {task.stream} of {task.name}[{task.index}]",
            1 + exclusive,
            2 * (1 + exclusive) + floating,
        )
        return UpstreamGate(
            GateBuffers(pool, self.pool.segment_bytes, exclusive, floating),
            wake=paths.bell.ring,
            give_back=paths.give_back,
            budget=self.budget,
            counters=counters,
            post=paths.post,
        )

    def _handed_over(self, piece: Outgoing) -> None:
        if piece.data_type == DataType.DATA:
            self.local_buffers += 1
            self.local_bytes += piece.size
            self.local_rows += piece.rows

    # --- connecting ------------------------------------------------------------------------------

    def channel(self, key: ChannelKey) -> InputChannel | None:
        """The input channel of that key; None if its task is gone."""
        task = self.tasks.get(key.task)
        if task is None:
            return None
        for gate in task.gates:
            if gate.edge == key.edge:
                return next((channel for channel in gate.channels if channel.producer == key.producer), None)
        return None

    def connect_local(self, key: ChannelKey, partition_id: PartitionId) -> None:
        channel = self.channel(key)
        partition = self.partitions.get(partition_id)
        if channel is None or partition is None:
            return
        subpartition = partition.subpartition(key.task[2])
        assert subpartition is not None
        channel.attach_local(subpartition, 1, self._handed_over)

    # --- taking down -----------------------------------------------------------------------------

    def ended(self, task: Task) -> None:
        """The task's thread is done (or written off): its inputs close, its partitions stay."""
        task.paths.close()
        for gate in task.gates:
            gate.close()

    def release(self, job: str) -> None:
        """The job is over everywhere."""
        for key in [key for key in self.tasks if key[0] == job]:
            task = self.tasks.pop(key)
            running = (
                task.thread is not None
                and task.thread.is_alive()
                and task.state in ("deploying", "running", "abandoned")
            )
            self.ended(task)
            for partition in task.partitions.values():
                self._drop_partition(partition.id, written_off=running)
        self._flush_intervals.pop(job, None)

    def free_rows(self, key: TaskKey, begin: int, read: int) -> None:
        """Readers are done with rows of a sink: see :meth:`Spool.free`; it may have waited for that."""
        spool, task = self.spools.get(key), self.tasks.get(key)
        if spool is not None:
            spool.free(begin, read)
        if task is not None:
            task.paths.bell.ring()

    def drop_spools(self, job: str) -> None:
        """Nobody will read what the job's sinks kept."""
        for key in [key for key in self.spools if key[0] == job]:
            del self.spools[key]

    def _drop_partition(self, partition_id: PartitionId, *, written_off: bool) -> None:
        partition = self.partitions.pop(partition_id)
        for subpartition in partition.subpartitions:
            subpartition.discard(written_off)
        self._pools.pop(partition_id).destroy()

    # --- timers and figures ----------------------------------------------------------------------

    def flush_intervals(self) -> set[float]:
        """The buffer timeouts of the jobs that have one, in seconds."""
        return set(self._flush_intervals.values())

    def flush(self, interval: float) -> None:
        """That buffer timeout has passed: let what is published go out, of the jobs whose it is."""
        for partition in self.partitions.values():
            if self._flush_intervals.get(partition.id.job) == interval:
                partition.flush()

    def snapshots(self) -> tuple[TaskSnapshot, ...]:
        return tuple(self._snapshot(key, task) for key, task in self.tasks.items())

    def _snapshot(self, key: TaskKey, task: Task) -> TaskSnapshot:
        job, operator, index = key
        partitions = []
        for partition in task.partitions.values():
            pool = self._pools[partition.id]
            partitions.append(PartitionSnapshot(partition.backlog(), PoolSnapshot(pool.in_use, pool.size)))
        return TaskSnapshot(
            job=job,
            job_name=task.job_name,
            operator=operator,
            name=task.name,
            index=index,
            attempt=task.attempt_id.attempt,
            state=task.state,
            counters=task.read_counters(),
            blocks=task.paths.clock.blocks,
            operators=task.operators,
            gates=tuple(gate.snapshot() for gate in task.gates),
            partitions=tuple(partitions),
        )

    def reports(self) -> list[TaskReport]:
        """For the heartbeat."""
        return [
            TaskReport(
                job=job,
                operator=operator,
                index=index,
                attempt=task.attempt_id.attempt,
                state=task.state,
                counters=task.read_counters(),
            )
            for (job, operator, index), task in self.tasks.items()
        ]


# --- figures --------------------------------------------------------------------------------------


def registration(
    host: str, data_port: int, metrics_port: int, slots: int, pool: NetworkBufferPool, requested_worker: int
) -> Register:
    """What this process says when it registers."""
    return Register(
        host=host,
        data_port=data_port,
        metrics_port=metrics_port,
        pid=os.getpid(),
        slots=slots,
        python=".".join(platform.python_version_tuple()[:2]),
        version=metadata.version("minishuffle"),
        segments=pool.total,
        segment_bytes=pool.segment_bytes,
        requested_worker=requested_worker,
    )


def worker_report(
    pool: NetworkBufferPool,
    remote: ConnectionCounters,
    deployment: Deployment,
    loop_lag: Histogram,
    abandoned: int,
) -> WorkerReport:
    """For the heartbeat."""
    stride = pool.segment_bytes + limits.SEGMENT_HEADROOM_BYTES
    return WorkerReport(
        network_cap_bytes=pool.total * stride,
        network_peak_bytes=pool.peak_used * stride,
        segments_free=pool.free,
        abandoned_tasks=abandoned,
        remote_bytes_out=remote.bytes_out,
        remote_payload_bytes_out=remote.payload_bytes_out,
        remote_records_out=remote.rows_out,
        local_records_out=deployment.local_rows,
        loop_lag_p99_seconds=loop_lag.quantile(0.99),
    )


def worker_snapshot(
    identity: Identity,
    slots: int,
    remote: ConnectionCounters,
    connections: int,
    refused: dict[str, int],
    pool: NetworkBufferPool,
    deployment: Deployment,
    loop_lag: Histogram,
    abandoned: int,
) -> WorkerSnapshot:
    """For ``/metrics``."""
    tasks = deployment.snapshots()
    return WorkerSnapshot(
        worker=identity.worker,
        epoch=identity.epoch,
        slots=slots,
        slots_used=len({(task.job, task.index) for task in tasks}),
        remote=remote,
        local_bytes=deployment.local_bytes,
        local_buffers=deployment.local_buffers,
        connections=connections,
        segments_total=pool.total,
        segments_free=pool.free,
        segments_peak=pool.peak_used,
        segment_bytes=pool.segment_bytes,
        assembly_bytes=deployment.budget.used,
        loop_lag=loop_lag,
        abandoned_tasks=abandoned,
        connections_refused=refused,
        tasks=tasks,
    )


def short_failure(term: int, attempt_id: AttemptId, state: str, error: Exception) -> TaskStateChanged:
    """Instead of the report of how an attempt ended, which ``error`` kept from being sent."""
    text = f"task {attempt_id} ended as {state}, which could not be reported: {text_of(error)}"
    subtask = attempt_id.subtask
    return TaskStateChanged(
        term=term,
        job=subtask.job,
        operator=subtask.operator,
        index=subtask.index,
        attempt=attempt_id.attempt,
        state="canceled" if state == "canceled" else "failed",
        error=ErrorInfo(code=ResourceExhausted.code, text=clipped(text, limits.ERROR_TEXT_BYTES_MAX // 64)),
    )
