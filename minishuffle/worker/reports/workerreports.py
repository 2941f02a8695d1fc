"""A worker's reports: at registration, in heartbeats and for ``/metrics``.

Everything here is called on the loop thread and does not block.
"""

from __future__ import annotations

import os
import platform
from typing import Final

from minishuffle import limits
from minishuffle.config import ClusterSettings
from minishuffle.counters import ConnectionCounters, Histogram, OneWayCounts, WorkerSnapshot
from minishuffle.errors import ResourceExhausted, clipped, text_of
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import AttemptId
from minishuffle.releases import releases_here
from minishuffle.transport.interfaces import host_identity
from minishuffle.transport.tcp import DataEndpoint
from minishuffle.wire.messages import ErrorInfo, WorkerReport
from minishuffle.wire.registration import Register
from minishuffle.wire.reports import TaskStateChanged
from minishuffle.worker.instructions import state_change
from minishuffle.worker.tasks.deployment import Deployment

__all__ = ["registration", "resident_bytes", "short_failure", "worker_report", "worker_snapshot"]

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


def registration(
    settings: ClusterSettings,
    pool: NetworkBufferPool,
    *,
    host: str,
    advertise: str,
    data_port: int,
    metrics_port: int,
    requested_worker: int,
    standby: bool,
    end_is_told: bool = False,
) -> Register:
    """The registration of this process."""
    return Register(
        host=host,
        advertise=advertise,
        identity=host_identity(),
        data_port=data_port,
        metrics_port=metrics_port,
        pid=os.getpid(),
        slots=settings.slots,
        python=".".join(platform.python_version_tuple()[:2]),
        releases=releases_here(),
        segments=pool.total,
        segment_bytes=pool.segment_bytes,
        requested_worker=requested_worker,
        standby=standby,
        end_is_told=end_is_told,
    )


def worker_report(
    pool: NetworkBufferPool,
    remote: ConnectionCounters,
    deployment: Deployment,
    loop_lag: Histogram,
    *,
    abandoned: int,
    stuck: dict[str, list[int]],
    jobs_loaded: int,
    clock: float,
    cpu_seconds: float,
    gc_seconds: float,
    memory_bytes: int,
) -> WorkerReport:
    """For the heartbeat."""
    stride = pool.segment_bytes + limits.SEGMENT_HEADROOM_BYTES
    return WorkerReport(
        network_cap_bytes=pool.total * stride,
        network_peak_bytes=pool.peak_used * stride,
        segments_free=pool.free,
        abandoned_tasks=abandoned,
        stuck=stuck,
        remote_bytes_out=remote.bytes_out,
        remote_payload_bytes_out=remote.payload_bytes_out,
        remote_records_out=remote.rows_out,
        remote_records_discarded=remote.rows_discarded,
        local_records_out=deployment.local_rows,
        loop_lag_p99_seconds=loop_lag.quantile(0.99),
        jobs_loaded=jobs_loaded,
        clock_seconds=clock,
        cpu_seconds=cpu_seconds,
        gc_seconds=gc_seconds,
        memory_bytes=memory_bytes,
        snapshot_bytes=deployment.snapshot_bytes,
        snapshot_memory_bytes=deployment.services.snapshot_memory_bytes,
        retains_much=deployment.services.retained.needs_room,
        disk_problem=clipped(deployment.services.retained.disk_problem, limits.LINK_ERROR_CHARS_MAX),
        segment_bytes=pool.segment_bytes,
    )


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say (Linux does, in ``statm``)."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def worker_snapshot(
    endpoint: DataEndpoint,
    pool: NetworkBufferPool,
    deployment: Deployment | None,
    *,
    slots: int,
    refused: dict[str, int],
    loop_lag: Histogram,
    abandoned: int = 0,
    suspicions: int = 0,
    gc_seconds: float,
    wall: float,
    one_way: OneWayCounts,
) -> WorkerSnapshot:
    """For ``/metrics``; there is no deployment before the worker is registered."""
    tasks = deployment.snapshots() if deployment is not None else ()
    return WorkerSnapshot(
        worker=endpoint.identity.worker,
        epoch=endpoint.identity.epoch,
        slots=slots,
        slots_used=len({(task.job, task.slot) for task in tasks}),
        remote=endpoint.counters,
        local_bytes=deployment.local_bytes if deployment is not None else 0,
        local_buffers=deployment.local_buffers if deployment is not None else 0,
        connections=len(endpoint.links),
        segments_total=pool.total,
        segments_free=pool.free,
        segments_peak=pool.peak_used,
        segments_extra=pool.extra,
        segment_bytes=pool.segment_bytes,
        assembly_bytes=deployment.services.budget.used if deployment is not None else 0,
        loop_lag=loop_lag,
        abandoned_tasks=abandoned,
        connections_refused=refused,
        tasks=tasks,
        suspicions=suspicions,
        local_batch_bytes=deployment.services.local.used if deployment is not None else 0,
        blocking_bytes=deployment.services.stored.used if deployment is not None else 0,
        retained_bytes=deployment.services.retained.used if deployment is not None else 0,
        retained_bytes_limit=deployment.services.retained.limit_bytes if deployment is not None else 0,
        snapshot_bytes=deployment.snapshot_bytes if deployment is not None else 0,
        gc_seconds=gc_seconds,
        wall=wall,
        one_way=one_way,
    )


def short_failure(attempt_id: AttemptId, state: str, error: Exception) -> TaskStateChanged:
    """Instead of the report of how an attempt ended, which ``error`` kept from being sent."""
    text = f"task {attempt_id} ended as {state}, which could not be reported: {text_of(error)}"
    info = ErrorInfo(code=ResourceExhausted.code, text=clipped(text, limits.ERROR_TEXT_BYTES_MAX // 64))
    return state_change(attempt_id, "canceled" if state == "canceled" else "failed", info)
