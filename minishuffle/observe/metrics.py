"""The contents of ``/metrics`` of a worker and of the coordinator, at the moment of a scrape.

The data path counts in plain integers (``minishuffle.counters``); a snapshot of them becomes the families of
:data:`~minishuffle.observe.families.METRICS`. Only totals and current values are served: rates are the
scraper's work.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from minishuffle.counters import (
    CoordinatorSnapshot,
    GateSnapshot,
    TaskSnapshot,
    WorkerSnapshot,
)
from minishuffle.observe.exposition import Exposition, Scrape, label_text
from minishuffle.observe.families import TASK_LABELS
from minishuffle.wire.frames import FrameType
from minishuffle.wire.requests import JOB_LIVE

__all__ = ["coordinator_exposition", "worker_exposition"]


MICROSECONDS = 1_000_000

# Label values that exist from the start, so that a first increase is visible.
_DATA_FRAMES = tuple(kind.name.lower() for kind in FrameType if kind is not FrameType.MESSAGE)
_REFUSALS = ("secret", "version", "cluster", "timeout", "limit", "malformed", "closed", "peer", "tls")
_ERROR_POLICIES = ("skip", "dead_letter", "side")
_WORKER_STATES = ("alive", "awaited", "lost", "gone")
_SLOT_STATES = ("used", "free", "standby")
_JOB_ENDS = ("finished_with_loss", "failing", "failed", "canceling", "canceled")
_JOB_STATES = (*JOB_LIVE, "finished", *_JOB_ENDS)
_PENDING = ("restarting", "waiting for a slot")
_TASK_STATES = (
    "waiting",
    "created",
    "running",
    "finished",
    "failed",
    "canceled",
    "abandoned",
    "lost",
    *_PENDING,
)
_RESTART_REASONS = ("failed", "canceled", "abandoned", "lost", "finished")
_DROP_REASONS = (
    "upstream_unavailable",
    "suspected",
    "queue_discarded",
    "partial_element",
    "failed_batch",
    "late_after_recovery",
    "sink_unfinished",
)


def worker_exposition(snapshot: Callable[[], WorkerSnapshot], version: str) -> Exposition:
    """A worker's ``/metrics``; ``snapshot`` is called once for each scrape."""
    return Exposition(lambda: _worker_scrape(snapshot(), version))


def coordinator_exposition(snapshot: Callable[[], CoordinatorSnapshot], version: str) -> Exposition:
    """The coordinator's ``/metrics``; ``snapshot`` is called once for each scrape."""
    return Exposition(lambda: _coordinator_scrape(snapshot(), version))


def _add_build(scrape: Scrape, version: str) -> None:
    labels = label_text(("version", "python"), (version, platform.python_version()))
    scrape.value("minishuffle_build_info", 1, labels)


def _from_zero(names: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    """``counts`` with a zero for each name that was not counted yet."""
    return {**dict.fromkeys(names, 0), **counts}


def _worker_scrape(snapshot: WorkerSnapshot, version: str) -> Scrape:
    scrape = Scrape("worker")
    _add_build(scrape, version)
    _add_worker(scrape, snapshot)
    _add_network(scrape, snapshot)
    for task in _newest_attempts(snapshot.tasks):
        names = (task.job_name, task.job, task.name, str(task.operator), str(task.index))
        labels = label_text(TASK_LABELS, names)
        _add_task(scrape, labels, task, snapshot.wall)
        for position, operator in enumerate(task.operators):
            place = label_text(("operator", "position"), (operator.name, str(position)))
            records = {"in": operator.records_in, "out": operator.records_out}
            scrape.by_label("minishuffle_operator_records_total", records, f"{labels},{place}")
        for position, gate in enumerate(task.gates):
            _add_gate(scrape, f'{labels},gate="{position}"', gate, snapshot.wall)
        if task.partitions:
            _add_output(scrape, labels, task)
        for series in task.user_series:
            place = label_text(("operator", "position"), (series.operator, str(series.position)))
            scrape.user(series, f"{labels},{place}")
    return scrape


def _newest_attempts(tasks: Iterable[TaskSnapshot]) -> list[TaskSnapshot]:
    """The newest attempt of each subtask; an abandoned older one has no series."""
    newest: dict[tuple[str, int, int], TaskSnapshot] = {}
    for task in tasks:
        subtask = (task.job, task.operator, task.index)
        if subtask not in newest or newest[subtask].attempt < task.attempt:
            newest[subtask] = task
    return list(newest.values())


def _add_worker(scrape: Scrape, snapshot: WorkerSnapshot) -> None:
    used = snapshot.slots_used
    scrape.by_label("minishuffle_worker_slots", {"used": used, "free": snapshot.slots - used})
    scrape.value("minishuffle_abandoned_tasks_total", snapshot.abandoned_tasks)
    scrape.value("minishuffle_suspicions_total", snapshot.suspicions)
    scrape.histogram("minishuffle_event_loop_lag_seconds", snapshot.loop_lag)
    scrape.value("minishuffle_gc_seconds_total", snapshot.gc_seconds)
    refused = _from_zero(_REFUSALS, snapshot.connections_refused)
    scrape.by_label("minishuffle_connections_refused_total", refused)


def _add_network(scrape: Scrape, snapshot: WorkerSnapshot) -> None:
    remote = snapshot.remote
    scrape.value("minishuffle_connections", snapshot.connections)
    one_way = snapshot.one_way
    states = ("reading", "stopped", "sending", "paused")
    scrape.by_label("minishuffle_one_way_connections", {state: getattr(one_way, state) for state in states})
    scrape.value("minishuffle_one_way_held_bytes", one_way.held_bytes)
    scrape.value("minishuffle_one_way_window_closed_seconds", one_way.window_closed_seconds)
    for direction, size, buffers, frames in (
        ("in", remote.bytes_in, remote.buffers_in, remote.frames_in),
        ("out", remote.bytes_out, remote.buffers_out, remote.frames_out),
    ):
        scrape.by_label(
            "minishuffle_network_bytes_total",
            {"remote": size, "local": snapshot.local_bytes},
            f'direction="{direction}"',
        )
        scrape.by_label(
            "minishuffle_network_buffers_total",
            {"remote": buffers, "local": snapshot.local_buffers},
            f'direction="{direction}"',
        )
        for kind, count in _from_zero(_DATA_FRAMES, frames).items():
            scrape.value("minishuffle_frames_total", count, f'type="{kind}",direction="{direction}"')
    credits = {"granted": remote.credits_granted, "received": remote.credits_received}
    scrape.by_label("minishuffle_credits_total", credits)
    free = snapshot.segments_free
    scrape.by_label("minishuffle_network_segments", {"used": snapshot.segments_total - free, "free": free})
    scrape.value("minishuffle_network_segments_peak", snapshot.segments_peak)
    scrape.value("minishuffle_network_segments_extra", snapshot.segments_extra)
    scrape.value("minishuffle_network_memory_bytes", snapshot.segments_total * snapshot.segment_bytes)
    scrape.value("minishuffle_assembly_bytes", snapshot.assembly_bytes)
    scrape.value("minishuffle_local_batch_bytes", snapshot.local_batch_bytes)
    scrape.value("minishuffle_blocking_bytes", snapshot.blocking_bytes)
    scrape.value("minishuffle_retained_bytes", snapshot.retained_bytes)
    scrape.value("minishuffle_retained_bytes_limit", snapshot.retained_bytes_limit)
    scrape.value("minishuffle_snapshots_held_bytes", snapshot.snapshot_bytes)


def _add_task(scrape: Scrape, labels: str, task: TaskSnapshot, wall: float) -> None:
    counters = task.counters
    for what, taken, emitted in (
        ("records", counters.records_in, counters.records_out),
        ("bytes", counters.bytes_in, counters.bytes_out),
        ("buffers", counters.buffers_in, counters.buffers_out),
    ):
        scrape.by_label(f"minishuffle_task_{what}_total", {"in": taken, "out": emitted}, labels)
    times = {
        "busy": counters.busy_seconds,
        "idle": counters.idle_seconds,
        "backpressured_hard": counters.backpressured_seconds,
    }
    scrape.by_label("minishuffle_task_time_seconds_total", times, labels)
    scrape.value("minishuffle_task_cpu_seconds_total", counters.cpu_seconds, labels)
    scrape.value("minishuffle_task_cpu_wait_seconds_total", counters.cpu_wait_seconds, labels)
    scrape.histogram("minishuffle_backpressure_block_seconds", task.blocks, labels)
    for source, histogram in task.latencies.items():
        scrape.histogram("minishuffle_latency_seconds", histogram, f'{labels},source="{source}"')
    errors = _from_zero(_ERROR_POLICIES, counters.user_errors)
    scrape.by_label("minishuffle_user_errors_total", errors, labels)
    scrape.value("minishuffle_records_late_total", counters.records_late, labels)
    scrape.value("minishuffle_state_rows", counters.state_rows, labels)
    scrape.value("minishuffle_source_rows_skipped_total", counters.rows_skipped, labels)
    if snapshot := counters.snapshot:
        scrape.value("minishuffle_snapshots_taken_total", snapshot["taken"], labels)
        scrape.value("minishuffle_snapshot_bytes", snapshot["bytes"], labels)
        scrape.value("minishuffle_snapshot_duration_seconds", snapshot["seconds"], labels)
        if "age" in snapshot:
            scrape.value("minishuffle_snapshot_age_seconds", snapshot["age"], labels)
    if counters.watermark is not None:
        scrape.value("minishuffle_watermark_lag_seconds", wall - counters.watermark / MICROSECONDS, labels)


def _add_gate(scrape: Scrape, labels: str, gate: GateSnapshot, wall: float) -> None:
    scrape.value("minishuffle_input_queue_buffers", gate.queue_buffers, labels)
    used = {"exclusive": gate.exclusive_used, "floating": gate.floating_used}
    capacity = {"exclusive": gate.exclusive_capacity, "floating": gate.floating_capacity}
    credits = {"announced": gate.credits_announced, "unannounced": gate.credits_unannounced}
    announced = {state: count for state, count in credits.items() if count is not None}
    if not announced:  # nothing is exclusive where there is no credit
        del used["exclusive"], capacity["exclusive"]
    scrape.by_label("minishuffle_input_buffers", used, labels)
    scrape.by_label("minishuffle_input_buffers_capacity", capacity, labels)
    if total := sum(capacity.values()):
        scrape.value("minishuffle_input_pool_usage_ratio", sum(used.values()) / total, labels)
    scrape.value("minishuffle_channels_starved", gate.channels_starved, labels)
    if gate.debloated_bytes is not None:
        scrape.value("minishuffle_debloated_buffer_bytes", gate.debloated_bytes, labels)
    if gate.in_flight_seconds is not None:
        scrape.value("minishuffle_in_flight_seconds", gate.in_flight_seconds, labels)
    if announced:
        scrape.by_label("minishuffle_input_credits", announced, labels)
    if gate.watermark is not None:
        scrape.value("minishuffle_input_watermark_lag_seconds", wall - gate.watermark / MICROSECONDS, labels)


def _add_output(scrape: Scrape, labels: str, task: TaskSnapshot) -> None:
    backlog = sum(partition.backlog_buffers for partition in task.partitions)
    used = sum(partition.pool.used for partition in task.partitions)
    capacity = sum(partition.pool.capacity for partition in task.partitions)
    scrape.value("minishuffle_output_backlog_buffers", backlog, labels)
    scrape.value("minishuffle_output_pool_buffers", used, labels)
    scrape.value("minishuffle_output_pool_buffers_capacity", capacity, labels)
    if capacity:
        scrape.value("minishuffle_output_pool_usage_ratio", used / capacity, labels)


def _coordinator_scrape(snapshot: CoordinatorSnapshot, version: str) -> Scrape:
    scrape = Scrape("coordinator")
    _add_build(scrape, version)
    scrape.value("minishuffle_term", snapshot.term)
    scrape.value("minishuffle_journal_writable", float(snapshot.journal_writable))
    states = Counter(worker.state for worker in snapshot.workers)
    scrape.by_label("minishuffle_workers", _from_zero(_WORKER_STATES, states))
    for worker in snapshot.workers:
        if worker.state == "alive":
            age = worker.heartbeat_age_seconds
            labels = f'worker="{worker.worker}"'
            scrape.value("minishuffle_worker_heartbeat_age_seconds", age, labels)
            scrape.value("minishuffle_worker_suspected_total", worker.suspicions, labels)
    scrape.by_label("minishuffle_slots", _from_zero(_SLOT_STATES, snapshot.slots))
    scrape.by_label("minishuffle_jobs", _from_zero(_JOB_STATES, snapshot.jobs))
    scrape.by_label("minishuffle_tasks", _from_zero(_TASK_STATES, snapshot.tasks))
    refused = _from_zero(_REFUSALS, snapshot.connections_refused)
    scrape.by_label("minishuffle_connections_refused_total", refused)
    for job in snapshot.recoveries:
        labels = label_text(("pipeline", "pipeline_id"), (job.job_name, job.job))
        restarts = _from_zero(_RESTART_REASONS, job.restarts)
        scrape.by_label("minishuffle_task_restarts_total", restarts, labels)
        dropped = _from_zero((*_DROP_REASONS, "result_lost"), job.rows_dropped)
        scrape.by_label("minishuffle_records_dropped_total", dropped, labels)
        scrape.value("minishuffle_state_rows_lost_total", job.state_rows_lost, labels)
        scrape.value("minishuffle_recoveries_unfinished_total", job.unfinished, labels)
        scrape.value("minishuffle_links_broken", job.links_broken, labels)
        scrape.value("minishuffle_job_paused", float(job.paused), labels)
        scrape.value("minishuffle_tasks_unprotected", job.unprotected, labels)
        if job.durable_at:
            scrape.value("minishuffle_durable_snapshot_timestamp_seconds", job.durable_at, labels)
        scrape.value("minishuffle_durable_snapshots_failed_total", job.durable_failed, labels)
        scrape.value("minishuffle_fallbacks_total", job.fallbacks, labels)
        for (vertex, number, index), holder in job.holders.items():
            names = (job.job_name, job.job, vertex, str(number), str(index))
            scrape.value("minishuffle_snapshot_holder", holder, label_text(TASK_LABELS, names))
        for phase, histogram in job.seconds.items():
            where = f'{labels},phase="{phase}"'
            scrape.histogram("minishuffle_recovery_duration_seconds", histogram, where)
    return scrape
