"""The table of metric families: the one place that names what ``/metrics`` serves.

The collectors build their families from it, the documented table is printed from it
(:func:`markdown_table`), and the tests hold the exposition of both processes against it.

A task's series are named by job and operator, each by what the user called it (``pipeline``, ``vertex``)
and by its id, which tells jobs and operators of one name apart and is the same on every worker. Only
tasks that are deployed now have series, so ids do not add up over the jobs of the past.
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
    """One metric family.

    ``name`` is as it is exposed (a counter's ends in ``_total``); ``labels`` leave out a histogram's
    ``le``; ``help`` says the unit; ``process`` says which kind of process serves it.
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
        "Always 1; the labels are the versions of minishuffle and of the interpreter.",
        "both",
    ),
    MetricSpec(
        "minishuffle_connections_refused_total",
        "counter",
        ("reason",),
        "Connections that this process refused or closed for cause, by reason.",
        "both",
    ),
    # --- coordinator ------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_term",
        "gauge",
        (),
        "Number of starts of this coordinator that its journal knows.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_journal_writable",
        "gauge",
        (),
        "Whether the journal could be written last (1); if not (0), the next coordinator would not know all.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_workers",
        "gauge",
        ("state",),
        "Worker processes: alive, awaited (by a new coordinator), lost (declared dead) or gone (in order).",
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
        "How often other workers have suspected each worker that is alive, as it answered no Ping.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_slots",
        "gauge",
        ("state",),
        "Slots of the workers that are alive, used, free, or on standby.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_jobs",
        "gauge",
        ("state",),
        "Jobs that the coordinator remembers, by state.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_job_paused",
        "gauge",
        ("pipeline", "pipeline_id"),
        "1 while a job is paused, else 0.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_tasks",
        "gauge",
        ("state",),
        "Subtasks of jobs that are not terminal, by the state of their attempt, or waiting for the first.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_links_broken",
        "gauge",
        ("pipeline", "pipeline_id"),
        "Pairs of workers between which tasks of a job need a connection that there has not been for "
        "link_timeout, or for which a worker is excluded from it.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_task_restarts_total",
        "counter",
        ("pipeline", "pipeline_id", "reason"),
        "Attempts that took the place of another, by how that one ended.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_records_dropped_total",
        "counter",
        ("pipeline", "pipeline_id", "reason"),
        "Records of a job that were dropped because something failed, over all attempts; with reason "
        "late_after_recovery those that were late since their producer restarted.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_state_rows_lost_total",
        "counter",
        ("pipeline", "pipeline_id"),
        "Rows that operators of a job held as state when their attempt ended and was not finished.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_recoveries_unfinished_total",
        "counter",
        ("pipeline", "pipeline_id"),
        "Recoveries of subtasks that never reached their first record: the attempt failed, was lost or was "
        "abandoned before it had passed a batch on.",
        "coordinator",
    ),
    MetricSpec(
        "minishuffle_recovery_duration_seconds",
        "histogram",
        ("pipeline", "pipeline_id", "phase"),
        "Seconds from the detection of a failure until the next attempt of the subtask was sent to its "
        "worker (reschedule), had all its channels (reattach) and had passed a batch on (first_record).",
        "coordinator",
    ),
    # --- worker -----------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_worker_slots",
        "gauge",
        ("state",),
        "Slots of this worker, used or free.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_abandoned_tasks_total",
        "counter",
        (),
        "Tasks whose thread did not stop after a cancel, so that their slot was written off.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_suspicions_total",
        "counter",
        (),
        "How often this worker has suspected another one, as it answered no Ping.",
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
        "Connections for jobs with flow_control=tcp: on the consumer's side reading, or stopped for want of "
        "a buffer; on the producer's sending, or paused as the socket takes no more.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_one_way_held_bytes",
        "gauge",
        (),
        "Bytes outside the network memory that were read of those connections that are stopped.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_one_way_window_closed_seconds",
        "gauge",
        (),
        "Seconds for which TCP's window was closed, of all such connections that are open on the producer's "
        "side.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_bytes_total",
        "counter",
        ("direction", "path"),
        "Bytes: whole frames over sockets (remote), payload handed over in the process (local).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_buffers_total",
        "counter",
        ("direction", "path"),
        "Network buffers with data that went over sockets (remote) or stayed in the process (local).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_frames_total",
        "counter",
        ("type", "direction"),
        "Frames over data connections, by type.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_credits_total",
        "counter",
        ("direction",),
        "Credits, in buffers: granted to producers or received from consumers, the first ones included.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_segments",
        "gauge",
        ("state",),
        "Segments of the network memory, used or free.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_segments_peak",
        "gauge",
        (),
        "Most segments in use at once since the worker started.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_segments_extra",
        "gauge",
        (),
        "Segments in use beside the network memory, for a task that came when others held its share.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_network_memory_bytes",
        "gauge",
        (),
        "Bytes of network memory, allocated once: the hard cap.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_assembly_bytes",
        "gauge",
        (),
        "Bytes of elements that span buffers and are being put together in memory.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_local_batch_bytes",
        "gauge",
        (),
        "Bytes of batches that wait, outside the network memory, for consumers on the same worker.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_blocking_bytes",
        "gauge",
        (),
        "Bytes stored for blocking exchanges and kept sides, in memory and on disk, of blocking_bytes_max.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_event_loop_lag_seconds",
        "histogram",
        (),
        "Seconds by which the event loop ran a timer late.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_gc_seconds_total",
        "counter",
        (),
        "Seconds that Python's garbage collector held the process up.",
        "worker",
    ),
    # --- tasks ------------------------------------------------------------------------------------
    MetricSpec(
        "minishuffle_task_records_total",
        "counter",
        (*TASK_LABELS, "direction"),
        "Records that a subtask took from or wrote for others; what a source makes is counted as out.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_operator_records_total",
        "counter",
        (*TASK_LABELS, "operator", "position", "direction"),
        "Records that each operator of a subtask's chain took in or emitted, side outputs included.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_bytes_total",
        "counter",
        (*TASK_LABELS, "direction"),
        "Serialised bytes that a subtask took in or emitted.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_buffers_total",
        "counter",
        (*TASK_LABELS, "direction"),
        "Network buffers with data that a subtask took in, or that were handed to its consumers.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_time_seconds_total",
        "counter",
        (*TASK_LABELS, "state"),
        "Seconds that a subtask's thread was busy, idle (no input) or backpressured_hard (no output buffer, "
        "or the coordinator takes no rows or positions); they add up to the time since it began, current "
        "waits included.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_cpu_seconds_total",
        "counter",
        TASK_LABELS,
        "Processor seconds of a subtask's thread; busy without them is waiting for a disk, another system or "
        "the interpreter.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_task_cpu_wait_seconds_total",
        "counter",
        TASK_LABELS,
        "Seconds that a subtask's thread was ready to run and had no processor; 0 where Linux does not say.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_latency_seconds",
        "histogram",
        (*TASK_LABELS, "source"),
        "Seconds that latency markers took from a source to a subtask, if the job has them: by OPERATOR or "
        "OPERATOR.INDEX of the source, or all together.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_backpressure_block_seconds",
        "histogram",
        TASK_LABELS,
        "Seconds of each wait of a subtask for an output buffer, booked when it ends.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_user_errors_total",
        "counter",
        (*TASK_LABELS, "policy"),
        "Records whose user function raised, or that cannot be read, by what was done with them.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_records_late_total",
        "counter",
        TASK_LABELS,
        "Records that came behind the watermark that closed what they belong to.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_state_rows",
        "gauge",
        TASK_LABELS,
        "Rows that a subtask's operators hold: both sides of a join, a row for each key of an aggregation or "
        "window.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_source_rows_skipped_total",
        "counter",
        TASK_LABELS,
        "Rows of an endless source with a rate that fell due while it did not run; they are never made.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_watermark_lag_seconds",
        "gauge",
        TASK_LABELS,
        "Seconds from the watermark that a subtask sent last, if it sent one, to the wall clock.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_queue_buffers",
        "gauge",
        _GATE,
        "Buffers that were received and wait for the subtask, by input gate.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_buffers",
        "gauge",
        (*_GATE, "kind"),
        "Input buffers in use, exclusive (of one channel) or floating (of the gate).",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_buffers_capacity",
        "gauge",
        (*_GATE, "kind"),
        "Input buffers that the gate may use, exclusive or floating.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_pool_usage_ratio",
        "gauge",
        _GATE,
        "Input buffers in use per input buffer of the gate, 0 to 1.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_channels_starved",
        "gauge",
        _GATE,
        "Input channels that wait in line for a floating buffer.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_debloated_buffer_bytes",
        "gauge",
        _GATE,
        "Bytes that producers are to put into each buffer for the gate, of jobs with a debloat_target.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_in_flight_seconds",
        "gauge",
        _GATE,
        "Time in which what producers have yet to send and the task has yet to read will be consumed at the "
        "present rate, of jobs with a debloat_target.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_credits",
        "gauge",
        (*_GATE, "state"),
        "Credits of a gate's remote channels, in buffers: announced to producers and not used yet, or "
        "unannounced.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_input_watermark_lag_seconds",
        "gauge",
        _GATE,
        "Seconds from the watermark of a gate, once all of its channels have one, to the wall clock.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_backlog_buffers",
        "gauge",
        TASK_LABELS,
        "Buffers that were written and wait for credit or for the socket.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_pool_buffers",
        "gauge",
        TASK_LABELS,
        "Output buffers in use.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_pool_buffers_capacity",
        "gauge",
        TASK_LABELS,
        "Output buffers that the subtask may use.",
        "worker",
    ),
    MetricSpec(
        "minishuffle_output_pool_usage_ratio",
        "gauge",
        TASK_LABELS,
        "Output buffers in use per output buffer of the subtask, 0 to 1.",
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
"""Those of the user's code, whose names are its own."""

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
"""What the client library's own collectors add, in its words."""


def markdown_table() -> str:
    """The README's table of every family; ends with a newline."""
    lines = ["| metric | type | labels | process | meaning |", "|---|---|---|---|---|"]
    for spec in (*METRICS, *USER_METRICS, *RUNTIME_METRICS):
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        meaning = spec.help.rstrip(".")
        lines.append(f"| `{spec.name}` | {spec.type} | {labels} | {spec.process} | {meaning} |")
    return "\n".join(lines) + "\n"
