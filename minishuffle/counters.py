"""Plain counters of a process: written by one thread each, read at scrape time.

Nothing on the data path imports a metrics library; ``observe`` turns these into metric families.
A field is written by exactly one thread, so a reader sees a value that was true a moment ago.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pydantic import Field

__all__ = [
    "ConnectionCounters",
    "CoordinatorSnapshot",
    "GateSnapshot",
    "Histogram",
    "LIMITS",
    "OneWayCounts",
    "TCP_LIMITS",
    "JobRecoveries",
    "OperatorCounters",
    "PartitionSnapshot",
    "PoolSnapshot",
    "RECOVERY_SECONDS_BOUNDS",
    "TaskCounters",
    "TaskSnapshot",
    "UserSeries",
    "WorkerEntry",
    "WorkerSnapshot",
]


class Histogram:
    """Counts per bucket, and the sum, as in Prometheus' classic histogram.

    ``bounds`` are upper edges, ascending, in the unit of the observed values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Upper edge of the bucket that holds the quantile; the last edge beyond it, 0.0 if empty."""
        rank, seen = q * self.count, 0
        if not rank:
            return 0.0
        for edge, count in zip((*self.bounds, self.bounds[-1]), self.counts, strict=True):
            seen += count
            if seen >= rank:
                return edge
        return self.bounds[-1]


LAG_SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
RECOVERY_SECONDS_BOUNDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    600.0,
)


@dataclass(slots=True)
class ConnectionCounters:
    """Totals over all data connections of a process.

    ``bytes_*`` counts every byte of every frame, handshake included; ``frames_*`` is keyed by
    frame type name in snake case; ``buffers_*`` counts BufferResponses with data.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: dict[str, int] = field(default_factory=dict)
    frames_out: dict[str, int] = field(default_factory=dict)
    buffers_in: int = 0
    buffers_out: int = 0
    payload_bytes_out: int = 0
    rows_out: int = 0
    rows_discarded: int = 0
    """Rows in buffers that arrived after their channel was closed."""
    credits_granted: int = 0
    """Credits granted to peers: initial credits and AddCredit."""
    credits_received: int = 0


LIMITS: Final = ("exclusive", "floating", "credit", "queue", "pool", "writer")
"""Limits that are hit under back-pressure, in order. On the consumer's side: all exclusive buffers of a
channel are in use; the channel waits because the gate has no free floating buffer; all its credit is used. On
the producer's side: a subpartition holds the maximum of segments for one consumer; the output has no free
segment; the task waits for a segment. Channels inside a worker have only the last three limits."""

TCP_LIMITS: Final = (
    "channel",
    "local_pool",
    "global_pool",
    "reading",
    "window",
    "transport",
    *LIMITS[-3:],
)
"""The same for a job with ``flow_control = "tcp"``. On the consumer's side: a channel waits for a buffer; the
gate's pool is at its maximum; the network memory is exhausted before the pool is at its maximum; the worker
stops reading the connection. On the producer's side: TCP's window is closed for half of the time between two
checks (``LOOK_SECONDS`` of ``worker/channels/onewaylinks.py``); the transport is paused; then the same three
limits as with credit."""

FLOW: Final = (
    "looks",
    "input",
    "exclusive",
    "floating",
    "starved",
    "queued",
    "output",
    "uncredited",
    "unsent",
)
"""Sums over samples of a task's buffers. ``looks`` counts the samples. ``input``, ``exclusive``, ``floating``
and ``output`` add the share of these buffers that is in use, 0 to 1. The others add 1 per sample: ``starved``
if a channel waits for a floating buffer, ``queued`` if a buffer waits for the task to read it, ``uncredited``
if a channel has buffers to send and no credit, ``unsent`` if it has credit and waits for the socket. A sum
divided by ``looks`` is the mean."""

COUNTED_MAX: Final = (1 << 63) - 1
"""The largest count that fits into a control message."""


@dataclass(slots=True)
class TaskCounters:
    """Totals of one attempt: written by its task thread, shown by ``/metrics``, carried by heartbeats."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    rows_done: int = 0
    """Input rows (of a source: rows it created) that the chain has finished: emitted, filtered out or
    dropped. Rows that operators hold for later and rows on their way to the client do not count yet. It is
    updated after ``records_out`` and read before it, so for one-to-one operators it never exceeds
    ``records_out``."""
    records_in: int = 0
    """Received from other tasks or external clients. Records that a source creates do not count."""
    records_out: int = 0
    """Written for other tasks, even if these were unavailable. For a source whose chain ends in a sink: the
    records it created."""
    bytes_in: int = 0
    bytes_out: int = 0
    buffers_in: int = 0
    """Network buffers with data that were received; one segment may be sent as several of them."""
    user_errors: dict[str, int] = field(default_factory=dict)
    """By policy: skip, dead_letter, side."""
    records_late: int = 0
    """Records that arrived after the watermark had closed their window or join interval."""
    late_dropped: int = 0
    """Late records that were dropped: their operator has ``late="drop"``."""
    rows_kept: int = 0
    """Rows that a sink has stored for other programs to read. Rows that were read and deleted since, and rows
    of earlier attempts, are included."""
    rows_filed: int = 0
    """Rows that a sink has accepted and can still lose: rows that a file sink wrote, also to incomplete
    files, and rows that only the sink's result, or memory of a user's sink, has."""
    rows_in_result: int = 0
    """Rows of ``rows_filed`` that are in the final result, which the sink returned when it closed."""
    rows_skipped: int = 0
    """Rows that an endless source with a fixed rate should have produced while no attempt ran; they are not
    produced later."""
    state_rows: int = 0
    """Rows that the operators hold as state; they are lost if the attempt does not finish."""
    watermark: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """The last event time that the task sent to its consumers, in microseconds since 1970; None: none yet."""
    rows_again: int = 0
    """Rows that it has received as new ones of producers that had restarted, and perhaps before. This field
    is filled in when the counters are read."""
    first_output_at: float = 0.0
    """When a source emitted its first record, by the monotonic clock of its host; 0.0: none yet."""
    last_input_at: float = 0.0
    """When the last batch was processed completely, by the same clock; 0.0: none yet."""
    buffers_out: int = 0
    """Network buffers with data that were handed to consumers. This field and the fields after it are filled
    in when the counters are read: see ``Task.read_counters``."""
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    backpressured_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of the task's thread."""
    cpu_wait_seconds: float = 0.0
    """Seconds that the thread was ready to run but waited for a processor; 0.0 if the system does not report
    it."""
    rows_dropped: dict[str, int] = field(default_factory=dict)
    """By reason: upstream_unavailable, suspected, queue_discarded, partial_element, failed_batch,
    late_after_recovery; the coordinator adds sink_unfinished and, for a job, result_lost."""

    limits_hit: dict[str, float] = field(default_factory=dict)
    """By limit (LIMITS, TCP_LIMITS), the wall clock at which it was first hit, in seconds since 1970. The
    event loop writes the limits of consumers and connections, the task's thread those of producers."""
    flow: dict[str, float] = field(default_factory=dict)
    """Sums over the samples that the event loop takes of the task's buffers: see :data:`FLOW`."""
    hot_keys: dict[str, float] = field(default_factory=dict)
    """By ``EDGE:CONSUMER:KEY``, the share of a frequent key in the rows written over the edge, 0 to 1:
    see :mod:`~minishuffle.exchange.hotkeys`."""
    latency: dict[str, float] = field(default_factory=dict)
    """``count`` of the latency markers received, and their travel times in seconds: ``p50``, ``p95``,
    ``p99``, ``max``; empty before the first marker."""
    snapshot: dict[str, float] = field(default_factory=dict)
    """Local snapshots of the attempt: ``taken``, how many; ``bytes`` and ``seconds``, the size of the last
    one and for how long its thread had a processor for it; ``age`` in seconds of what a next attempt goes on
    from, unless the holder has nothing. Empty without a guarantee."""

    @property
    def seconds(self) -> float:
        """The time that the task has reported."""
        return self.busy_seconds + self.idle_seconds + self.backpressured_seconds

    def note_late(self, rows: int, *, dropped: bool) -> None:
        """Count ``rows`` late records; ``dropped``: no output gets them."""
        self.records_late += rows
        if dropped:
            self.late_dropped += rows

    def note_filed(self, rows: int) -> None:
        """Count ``rows`` more rows that a sink has accepted and can still lose."""
        self.rows_filed += rows

    def note_flushed(self, rows: int) -> None:
        """Count ``rows`` of these as outside of the process: the sink cannot lose them any more."""
        self.rows_filed -= rows

    def note_kept(self, rows: int) -> None:
        """Set the number of rows that a sink has stored in all, rows of earlier attempts included."""
        self.rows_kept = rows

    def note_in_result(self, rows: int) -> None:
        """Count ``rows`` rows in the final result of a sink."""
        self.rows_in_result += rows

    def plus(self, later: TaskCounters) -> TaskCounters:
        """The totals of two attempts; ``later`` is the newer one. Counts stop at ``COUNTED_MAX``."""
        values: dict[str, Any] = {}
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(later, each.name)
            if each.name == "limits_hit":
                values[each.name] = {**theirs, **ours}
            elif each.name in ("hot_keys", "latency", "snapshot"):
                values[each.name] = theirs or ours
            elif isinstance(ours, dict):
                names = ours | theirs
                values[each.name] = {
                    name: min(COUNTED_MAX, ours.get(name, 0) + theirs.get(name, 0)) for name in names
                }
            elif each.name == "state_rows":
                values[each.name] = theirs
            elif each.name == "watermark":
                values[each.name] = ours if theirs is None else theirs
            elif each.name == "first_output_at":
                values[each.name] = ours or theirs
            elif each.name in ("last_input_at", "rows_kept"):
                values[each.name] = max(ours, theirs)
            else:
                values[each.name] = min(type(ours)(COUNTED_MAX), ours + theirs)
        return TaskCounters(**values)


@dataclass(slots=True)
class OperatorCounters:
    """Records of one operator of a task's chain, written by the task's thread.

    ``records_out`` counts side outputs too.
    """

    name: str
    records_in: int = 0
    records_out: int = 0


@dataclass(slots=True)
class UserSeries:
    """A metric of the user's code in one operator, written by the thread of that code."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str
    operator: str
    position: int
    """Position of the operator in its chain; a source comes first."""
    value: float = 0.0
    histogram: Histogram | None = None

    def add(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


@dataclass(slots=True, frozen=True)
class PoolSnapshot:
    """Segments of a pool: ``used`` of ``capacity``."""

    used: int
    capacity: int


@dataclass(slots=True, frozen=True)
class GateSnapshot:
    """An input gate of a task, summed over its channels."""

    queue_buffers: int
    exclusive_used: int
    exclusive_capacity: int
    floating_used: int
    floating_capacity: int
    channels: int
    channels_starved: int
    """Channels that wait for a floating buffer."""
    credits_announced: int | None
    """Credits granted to producers and not used yet; None without credit-based flow control."""
    credits_unannounced: int | None
    """Free buffers not yet granted as credit; None without credit-based flow control."""
    watermark: int | None
    """Event time in microseconds since 1970; None: none yet, or no more to come."""
    debloated_bytes: int | None = None
    """Buffer size in bytes that the gate asks of its producers; None: the job has no ``debloat_target``."""
    in_flight_seconds: float | None = None
    """Seconds the task needs, at its current rate, for all data in flight: not yet sent by producers, or not
    yet read. None: the job has no ``debloat_target``, or the task has consumed nothing yet."""


@dataclass(slots=True, frozen=True)
class PartitionSnapshot:
    """A result partition of a task, summed over its subpartitions."""

    backlog_buffers: int
    pool: PoolSnapshot


@dataclass(slots=True, frozen=True)
class TaskSnapshot:
    """A task that is deployed on this worker now."""

    job: str
    """Job id."""
    job_name: str
    operator: int
    name: str
    index: int
    attempt: int
    state: str
    counters: TaskCounters
    blocks: Histogram
    """Seconds of each finished wait for an output segment."""
    operators: tuple[OperatorCounters, ...]
    """The operators of its chain in order; a source is the first."""
    gates: tuple[GateSnapshot, ...]
    partitions: tuple[PartitionSnapshot, ...]
    latencies: Mapping[str, Histogram] = field(default_factory=dict)
    """Travel times of the latency markers received, by source, in seconds."""
    user_series: tuple[UserSeries, ...] = ()
    slot: int = 0
    """Number of the task's slot among the slots of its job."""


class OneWayCounts(NamedTuple):
    """The one-way connections of a worker, see :mod:`~minishuffle.protocol.oneway`."""

    reading: int = 0
    stopped: int = 0
    """Connections on which reading is stopped, because a consumer has no free buffer."""
    held_bytes: int = 0
    """Bytes already read from the stopped connections, and not yet consumed."""
    sending: int = 0
    paused: int = 0
    """Outgoing connections whose socket is full."""
    window_closed_seconds: float = 0.0
    """Seconds for which TCP's window was closed, summed over the outgoing connections."""


@dataclass(slots=True, frozen=True)
class WorkerSnapshot:
    """All values of a worker's ``/metrics``, collected on the event loop's thread."""

    worker: int
    epoch: int
    slots: int
    slots_used: int
    remote: ConnectionCounters
    local_bytes: int
    """Payload bytes handed over inside the worker; counted once, as in and as out."""
    local_buffers: int
    connections: int
    segments_total: int
    segments_free: int
    segments_peak: int
    segments_extra: int
    segment_bytes: int
    assembly_bytes: int
    loop_lag: Histogram
    abandoned_tasks: int
    connections_refused: dict[str, int]
    """By reason: secret, version, cluster, timeout, limit, malformed, closed, peer."""
    tasks: tuple[TaskSnapshot, ...]
    suspicions: int = 0
    """How often another worker did not answer a Ping of this worker."""
    gc_seconds: float = 0.0
    """Seconds for which Python's garbage collector stopped the process."""
    one_way: OneWayCounts = OneWayCounts()
    local_batch_bytes: int = 0
    """Bytes of batches queued as objects for consumers on this worker."""
    blocking_bytes: int = 0
    """Bytes stored on this worker by blocking partitions and by gates that read them."""
    retained_bytes: int = 0
    """Bytes retained on this worker by retained partitions, in memory and on disk."""
    retained_bytes_limit: int = 0
    """The bound of ``retained_bytes``, beyond which tasks wait."""
    snapshot_bytes: int = 0
    """Bytes of snapshots that this worker holds for tasks of other workers, in memory and on disk."""
    wall: float = 0.0
    """The worker's wall clock, seconds since 1970."""


@dataclass(slots=True, frozen=True)
class WorkerEntry:
    """A worker as the coordinator sees it."""

    worker: int
    state: str
    """alive, lost or gone."""
    host: str
    metrics_port: int
    heartbeat_age_seconds: float
    suspicions: int = 0
    """How often other workers suspected this worker to be dead."""


@dataclass(slots=True, frozen=True)
class JobRecoveries:
    """Restarts, losses and recovery times of one job."""

    job: str
    job_name: str
    restarts: dict[str, int]
    """Restarts of subtasks, by how the previous attempt ended."""
    rows_dropped: dict[str, int]
    """By reason."""
    state_rows_lost: int = 0
    """Rows of operator state lost with attempts that did not finish."""
    seconds: Mapping[str, Histogram] = field(default_factory=dict)
    """Seconds of the recoveries since this coordinator started, by phase: reschedule, reattach, first_record,
    and with a guarantee snapshot_read, replayed, caught_up. Empty for a job that has ended without one."""
    unfinished: int = 0
    """Recoveries since this coordinator started in which the new attempt ended before its first record."""
    links_broken: int = 0
    """Pairs of workers that cannot exchange this job's data: without a connection for longer than
    ``link_timeout``, or with one of the two excluded from the job for this reason."""
    paused: bool = False
    """All tasks of the job have stopped at a barrier until it is resumed."""
    unprotected: int = 0
    """Tasks that could not go on if their worker was lost now."""
    durable_at: float = 0.0
    """When the last complete durable snapshot was begun, wall clock; 0: there is none."""
    durable_failed: int = 0
    """Durable snapshots that failed."""
    fallbacks: int = 0
    """How often the whole job went back to a snapshot."""
    holders: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    """The worker that holds the snapshots of a task, 0 if none does; by vertex, its number, and subtask."""


@dataclass(slots=True, frozen=True)
class CoordinatorSnapshot:
    """All values of the coordinator's ``/metrics`` and ``/sd/prometheus``."""

    term: int
    journal_writable: bool
    workers: tuple[WorkerEntry, ...]
    slots: dict[str, int]
    """Slots by state: used and free on workers that are alive; standby on workers that accept no job yet."""
    jobs: dict[str, int]
    """By state."""
    tasks: dict[str, int]
    """Subtasks of jobs that are not terminal, by state."""
    recoveries: tuple[JobRecoveries, ...]
    connections_refused: dict[str, int]
    """By reason, as in :class:`WorkerSnapshot`."""
