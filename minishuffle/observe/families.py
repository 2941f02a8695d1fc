"""The table of metric families: the only place with the names served by ``/metrics``.

The collectors build their families from it, the documented table is printed from it (:func:`markdown_table`),
and tests compare the exposition of both processes with it.

A task's series have labels for its job and operator. Each has a name given by the user (``pipeline``,
``vertex``), and an id, which distinguishes jobs and operators with the same name, and is the same on every
worker. Only currently deployed tasks have series, so the number of ids does not grow with past jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = [
    "METRICS",
    "MetricSpec",
    "MetricType",
    "Process",
    "RUNTIME_METRICS",
    "TASK_LABELS",
    "USER_METRICS",
    "markdown_table",
]

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]
Process: TypeAlias = Literal["worker", "coordinator", "both"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric family.

    ``name`` is the exposed one (a counter's ends in ``_total``); ``labels`` does not contain a histogram's
    ``le``; ``help`` gives the unit; ``process`` is the kind of process that serves it.
    """

    name: str
    type: MetricType
    labels: tuple[str, ...]
    help: str
    process: Process

    def served_by(self, process: Process) -> bool:
        return self.process in (process, "both")


TASK_LABELS: Final = ("pipeline", "pipeline_id", "vertex", "vertex_id", "subtask")
_GATE: Final = (*TASK_LABELS, "gate")

METRICS: Final[tuple[MetricSpec, ...]] = (
    # --- both -------------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_build_info",
        "gauge",
        ("version", "python"),
        "Always 1; the labels are the versions of minishuffle and of Python.",
        "both",
    ),
    MetricSpec(
        "minishuffle_connections_refused_total",
        "counter",
        ("reason",),
        "Connections that this process refused, or closed because of an error, by reason.",
        "both",
    ),
    # --- coordinator ------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_term",
        "gauge",
        (),
        "How often this coordinator has started, as counted in its journal.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_journal_writable",
        "gauge",
        (),
        "1 if the last write to the coordinator's journal succeeded; 0 if it failed: a coordinator that "
        "restarts now would not know the latest changes.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_workers",
        "gauge",
        ("state",),
        "Worker processes by state: alive, awaited (expected to reconnect after a restart of the "
        "coordinator), lost (declared dead) or gone (shut down normally).",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_worker_heartbeat_age_seconds",
        "gauge",
        ("worker",),
        "Seconds since the last heartbeat of each worker that is alive.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_worker_suspected_total",
        "counter",
        ("worker",),
        "How often other workers suspected this worker to be dead because it did not answer their Ping "
        "frames.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_slots",
        "gauge",
        ("state",),
        "Slots of the workers that are alive, by state: used, free or standby.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_jobs",
        "gauge",
        ("state",),
        "Jobs that the coordinator knows, running and ended, by state.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_job_paused",
        "gauge",
        ("pipeline", "pipeline_id"),
        "1 while the job is paused, else 0.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_tasks_unprotected",
        "gauge",
        ("pipeline", "pipeline_id"),
        "Subtasks of a job with a guarantee that could not go on if their worker was lost now: no other "
        "worker has their snapshots.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_snapshot_holder",
        "gauge",
        TASK_LABELS,
        "The worker that holds the snapshots of a subtask of a job with a guarantee; 0 if none does.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_tasks",
        "gauge",
        ("state",),
        "Subtasks of all jobs that have not ended, by the state of their attempt, or waiting for their "
        "first attempt.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_links_broken",
        "gauge",
        ("pipeline", "pipeline_id"),
        "Pairs of workers that cannot exchange the data of this job: they have had no connection for "
        "longer than link_timeout, or a worker is excluded from the job because of this pair.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_task_restarts_total",
        "counter",
        ("pipeline", "pipeline_id", "reason"),
        "Restarts of subtasks, by how the previous attempt ended.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_records_dropped_total",
        "counter",
        ("pipeline", "pipeline_id", "reason"),
        "Records of the job that were lost because of failures, in all attempts; reason "
        "late_after_recovery counts records that were late because their producer had restarted.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_state_rows_lost_total",
        "counter",
        ("pipeline", "pipeline_id"),
        "Rows of operator state of the job that were lost because an attempt ended before it had finished.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_durable_snapshot_timestamp_seconds",
        "gauge",
        ("pipeline", "pipeline_id"),
        "When the last complete durable snapshot of the job was begun, in seconds since 1970; none before "
        "the first.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_durable_snapshots_failed_total",
        "counter",
        ("pipeline", "pipeline_id"),
        "Durable snapshots of the job that failed.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_fallbacks_total",
        "counter",
        ("pipeline", "pipeline_id"),
        "How often all tasks of the job went back to a snapshot, since one of them could not be recovered "
        "alone.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_recoveries_unfinished_total",
        "counter",
        ("pipeline", "pipeline_id"),
        "Recoveries of subtasks that did not succeed: the new attempt failed, was lost or was abandoned "
        "before it processed its first batch.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_recovery_duration_seconds",
        "histogram",
        ("pipeline", "pipeline_id", "phase"),
        "Seconds from the detection of a failure until the new attempt of the subtask was sent to a "
        "worker (reschedule), had all its input and output channels connected (reattach) and had "
        "processed its first batch (first_record). In a job with a guarantee also until it had the state of "
        "its snapshot (snapshot_read), was sent what was retained for it (replayed), and had nothing left to "
        "do for the first time (caught_up).",
        "coordinator",
    ),
    # --- worker -----------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_worker_slots",
        "gauge",
        ("state",),
        "Slots of this worker, by state: used or free.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_abandoned_tasks_total",
        "counter",
        (),
        "Tasks whose thread did not stop when it was canceled; the slot stays blocked until that thread "
        "ends.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_suspicions_total",
        "counter",
        (),
        "How often this worker suspected another worker to be dead because it did not answer a Ping frame.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_connections",
        "gauge",
        (),
        "Open data connections to other workers.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_one_way_connections",
        "gauge",
        ("state",),
        "Data connections of jobs with flow_control=tcp, by state: on the consumer's worker reading, or "
        "stopped (no free buffer); on the producer's worker sending, or paused (the socket is full).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_one_way_held_bytes",
        "gauge",
        (),
        "Bytes already read from stopped connections (flow_control=tcp) and held outside the network memory.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_one_way_window_closed_seconds",
        "gauge",
        (),
        "Seconds for which the TCP window was closed, summed over the open connections (flow_control=tcp) "
        "on which this worker sends.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_bytes_total",
        "counter",
        ("direction", "path"),
        "Bytes exchanged between tasks, by direction: over sockets (path remote, whole frames) or within "
        "the worker (path local, payload only).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_buffers_total",
        "counter",
        ("direction", "path"),
        "Network buffers with data exchanged between tasks, by direction: over sockets (path remote) or "
        "within the worker (path local).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_frames_total",
        "counter",
        ("type", "direction"),
        "Protocol frames on data connections, by frame type and direction.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_credits_total",
        "counter",
        ("direction",),
        "Credits, one for each network buffer: granted to producers, or received from consumers; initial "
        "credits are included.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_segments",
        "gauge",
        ("state",),
        "Memory segments of the network memory, by state: used or free.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_segments_peak",
        "gauge",
        (),
        "Largest number of memory segments in use at the same time since the worker started.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_segments_extra",
        "gauge",
        (),
        "Memory segments allocated in addition to the network memory, for tasks that started while other "
        "tasks still used their share.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_memory_bytes",
        "gauge",
        (),
        "Size of the network memory in bytes: allocated once, when the worker starts.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_assembly_bytes",
        "gauge",
        (),
        "Bytes of partly received elements that are larger than one network buffer.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_local_batch_bytes",
        "gauge",
        (),
        "Bytes of batches that are queued for consumers on the same worker, outside the network memory.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_blocking_bytes",
        "gauge",
        (),
        "Bytes stored for blocking exchanges and broadcast sides of joins, in memory and on disk; the "
        "limit is blocking_bytes_max.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_retained_bytes",
        "gauge",
        (),
        "Bytes of sent rows that are retained until snapshots of their consumers cover them, in memory and "
        "on disk.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_retained_bytes_limit",
        "gauge",
        (),
        "What minishuffle_retained_bytes may be before tasks wait: retained_bytes of the worker.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_snapshots_held_bytes",
        "gauge",
        (),
        "Bytes of snapshots that the worker holds for tasks of other workers, in memory (at most "
        "snapshot_memory_bytes) and on disk.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_event_loop_lag_seconds",
        "histogram",
        (),
        "Delay of timers on the worker's event loop, in seconds.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_gc_seconds_total",
        "counter",
        (),
        "Seconds for which Python's garbage collector stopped the process.",
        "worker",
    ),
    # --- tasks ------------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_task_records_total",
        "counter",
        (*TASK_LABELS, "direction"),
        "Records that a subtask received from other tasks (in) or sent (out); records that a source "
        "creates count as out.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_operator_records_total",
        "counter",
        (*TASK_LABELS, "operator", "position", "direction"),
        "Records that each operator in the chain of a subtask received (in) or emitted (out, side outputs "
        "included).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_bytes_total",
        "counter",
        (*TASK_LABELS, "direction"),
        "Serialised bytes that a subtask received (in) or sent (out).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_buffers_total",
        "counter",
        (*TASK_LABELS, "direction"),
        "Network buffers with data that a subtask received (in) or sent (out).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_time_seconds_total",
        "counter",
        (*TASK_LABELS, "state"),
        "Seconds that the thread of a subtask was busy, idle (no input) or backpressured_hard (no free "
        "output buffer, or the coordinator does not accept result rows or source positions now); the "
        "three add up to the time since the subtask started.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_cpu_seconds_total",
        "counter",
        TASK_LABELS,
        "CPU seconds used by the thread of a subtask; busy time above this was spent waiting for a disk, "
        "an external system or the Python interpreter lock.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_cpu_wait_seconds_total",
        "counter",
        TASK_LABELS,
        "Seconds that the thread of a subtask was ready to run but waited for a CPU; 0 if Linux does not "
        "report it.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_latency_seconds",
        "histogram",
        (*TASK_LABELS, "source"),
        "Seconds that latency markers took from a source to this subtask, if the job uses them; label "
        "source is OPERATOR, OPERATOR.INDEX or all (all sources together).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_snapshots_taken_total",
        "counter",
        TASK_LABELS,
        "Local snapshots that a subtask of a job with a guarantee has taken.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_snapshot_age_seconds",
        "gauge",
        TASK_LABELS,
        "Age of the snapshot from which a next attempt of the subtask would go on, which is what it would "
        "read once more; none while its holder has none.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_snapshot_bytes",
        "gauge",
        TASK_LABELS,
        "Size of the last snapshot of the subtask.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_snapshot_duration_seconds",
        "gauge",
        TASK_LABELS,
        "How long the thread of the subtask took for its last snapshot.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_backpressure_block_seconds",
        "histogram",
        TASK_LABELS,
        "Length in seconds of each wait of a subtask for a free output buffer; a wait counts when it ends.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_user_errors_total",
        "counter",
        (*TASK_LABELS, "policy"),
        "Records for which a user function raised an error, or that could not be parsed, by the error "
        "policy that was applied.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_records_late_total",
        "counter",
        TASK_LABELS,
        "Records that arrived late: the watermark had already closed their window or join interval.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_state_rows",
        "gauge",
        TASK_LABELS,
        "Rows held as state by the operators of a subtask: the rows of both sides of a join, one row for "
        "each key of an aggregation or window.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_source_rows_skipped_total",
        "counter",
        TASK_LABELS,
        "Rows that an endless source with a fixed rate should have produced while it was not running; "
        "they are not produced later.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_watermark_lag_seconds",
        "gauge",
        TASK_LABELS,
        "Seconds by which the last watermark that a subtask sent lags the wall clock; absent before the "
        "first watermark.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_queue_buffers",
        "gauge",
        _GATE,
        "Received buffers queued for the subtask, by input gate.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_buffers",
        "gauge",
        (*_GATE, "kind"),
        "Input buffers in use, by kind: exclusive (reserved for one channel) or floating (shared by the "
        "gate).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_buffers_capacity",
        "gauge",
        (*_GATE, "kind"),
        "Maximum number of input buffers of the gate, by kind: exclusive or floating.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_pool_usage_ratio",
        "gauge",
        _GATE,
        "Share of the gate's input buffers that is in use, 0 to 1.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_channels_starved",
        "gauge",
        _GATE,
        "Input channels that are waiting for a floating buffer.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_debloated_buffer_bytes",
        "gauge",
        _GATE,
        "Buffer size in bytes that the gate currently asks of its producers, for jobs with a debloat_target.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_in_flight_seconds",
        "gauge",
        _GATE,
        "Seconds it would take the subtask, at its current rate, to process all data in flight (not yet "
        "sent by producers, or not yet read), for jobs with a debloat_target.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_credits",
        "gauge",
        (*_GATE, "state"),
        "Credits of a gate's remote channels, one for each buffer: announced (known to producers, not "
        "used yet) or unannounced.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_watermark_lag_seconds",
        "gauge",
        _GATE,
        "Seconds by which the watermark of a gate lags the wall clock; absent until all its channels have "
        "a watermark.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_backlog_buffers",
        "gauge",
        TASK_LABELS,
        "Output buffers that are queued until their consumer grants credit or the socket accepts them.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_pool_buffers",
        "gauge",
        TASK_LABELS,
        "Output buffers of the subtask in use.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_pool_buffers_capacity",
        "gauge",
        TASK_LABELS,
        "Maximum number of output buffers of the subtask.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_pool_usage_ratio",
        "gauge",
        TASK_LABELS,
        "Share of the subtask's output buffers that is in use, 0 to 1.",
        "worker",
    ),
)

_USER_SUFFIXES: Final[dict[MetricType, str]] = {"counter": "_total", "gauge": "", "histogram": ""}
USER_METRICS: Final[tuple[MetricSpec, ...]] = tuple(
    MetricSpec(
        f"minishuffle_user_NAME{suffix}",
        kind,
        (*TASK_LABELS, "operator", "position"),
        f"A {kind} that a function or sink of a job made as NAME with `context.metrics.{kind}`.",
        "worker",
    )
    for kind, suffix in _USER_SUFFIXES.items()
)
"""Families of the user's code; NAME stands for the user's name."""

_PLATFORM_LABELS: Final = ("version", "implementation", "major", "minor", "patchlevel")

RUNTIME_METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec("process_virtual_memory_bytes", "gauge", (), "Virtual memory size in bytes.", "both"),
    MetricSpec("process_resident_memory_bytes", "gauge", (), "Resident memory size in bytes.", "both"),
    MetricSpec(
        "process_start_time_seconds",
        "gauge",
        (),
        "Start time of the process since unix epoch in seconds.",
        "both",
    ),
    MetricSpec(
        "process_cpu_seconds_total",
        "counter",
        (),
        "Total user and system CPU time spent in seconds.",
        "both",
    ),
    MetricSpec("process_open_fds", "gauge", (), "Number of open file descriptors.", "both"),
    MetricSpec("process_max_fds", "gauge", (), "Maximum number of open file descriptors.", "both"),
    MetricSpec(
        "python_gc_objects_collected_total",
        "counter",
        ("generation",),
        "Objects collected during gc",
        "both",
    ),
    MetricSpec(
        "python_gc_objects_uncollectable_total",
        "counter",
        ("generation",),
        "Uncollectable objects found during GC",
        "both",
    ),
    MetricSpec(
        "python_gc_collections_total",
        "counter",
        ("generation",),
        "Number of times this generation was collected",
        "both",
    ),
    MetricSpec("python_info", "gauge", _PLATFORM_LABELS, "Python platform information", "both"),
)
"""Families of the client library's own collectors, with its help texts."""


def markdown_table() -> str:
    """The README's table of every family; ends with a newline."""
    lines = ["| metric | type | labels | process | meaning |", "|---|---|---|---|---|"]
    for spec in (*METRICS, *USER_METRICS, *RUNTIME_METRICS):
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        meaning = spec.help.rstrip(".")
        lines.append(f"| `{spec.name}` | {spec.type} | {labels} | {spec.process} | {meaning} |")
    return "\n".join(lines) + "\n"
