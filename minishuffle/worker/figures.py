"""What a worker tells of itself: to register, with each heartbeat, and for ``/metrics``; and of a task
whose own report cannot be sent."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from minishuffle import limits
from minishuffle.counters import ConnectionCounters, Histogram, WorkerSnapshot
from minishuffle.errors import ResourceExhausted, clipped, text_of
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import AttemptId
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import ErrorInfo, Register, TaskStateChanged, WorkerReport
from minishuffle.worker.deployment import Deployment

__all__ = ["registration", "short_failure", "worker_report", "worker_snapshot"]


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
