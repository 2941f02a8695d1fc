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
    """Counts per bucket with the sum, as Prometheus' classic histogram wants them.

    ``bounds`` are upper edges, ascending, in the unit of what is observed.
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
    """Totals over all data connections of a process, by what went over the socket.

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
    """Rows of buffers that arrived for a channel that was closed already."""
    credits_granted: int = 0
    """Announced to peers: initial credits and AddCredit."""
    credits_received: int = 0


LIMITS: Final = ("exclusive", "floating", "credit", "queue", "pool", "writer")
"""What fills up under back-pressure, in this order. On the side of a consumer: all exclusive buffers of a
channel are in use; it waits in line, as the gate has no floating one left; all credit of it is used. On that
of the producer: a subpartition has all segments that the output keeps for one consumer; the output has none
left; the task waits for one. Channels inside a worker have the last three alone."""

TCP_LIMITS: Final = (
    "channel",
    "local_pool",
    "global_pool",
    "reading",
    "window",
    "transport",
    *LIMITS[-3:],
)
"""The same of a job with ``flow_control = "tcp"``. On the side of a consumer: a channel waits for a buffer;
its gate's pool has all in use that it may have; the network memory lets that have no more, although the job's
settings would; the connection is read no further. On that of the producer: TCP's window is closed, for half
of the time between two looks (``LOOK_SECONDS`` of ``worker/onewaylinks.py``); the transport is paused; and
then as with credit."""

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
"""What is added up at each look at a task's buffers: 1 for the look itself; the shares in use of its input
buffers, of the exclusive and the floating ones among them, and of its output buffers; and 1 if a channel
waits in line for a floating buffer, a buffer waits for the task to read it, a channel has buffers to send and
no credit, or has both and waits for the socket. The mean between two looks at a job tells how it was."""

COUNTED_MAX: Final = (1 << 63) - 1
"""The greatest count that a control message carries."""


@dataclass(slots=True)
class TaskCounters:
    """Totals of one attempt: written by its task thread, shown by ``/metrics``, carried by heartbeats."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    rows_done: int = 0
    """Rows taken in or made that the chain has passed on, left out or dropped, without those that it keeps to
    emit later on and those on their way to the client. It is counted behind ``records_out``, and read before
    it: of a task that writes one row for each it is never ahead."""
    records_in: int = 0
    """Taken from other tasks or external clients; what a source makes itself is none of them."""
    records_out: int = 0
    """Written for other tasks, those included that were unavailable; of a source whose chain ends in a sink,
    what it made."""
    bytes_in: int = 0
    bytes_out: int = 0
    buffers_in: int = 0
    """Network buffers with data that were taken in; one segment may come in several of them."""
    user_errors: dict[str, int] = field(default_factory=dict)
    """By policy: skip, dead_letter, side."""
    records_late: int = 0
    """Records that came behind the watermark that closed what they belong to."""
    late_dropped: int = 0
    """Those of them that nobody got."""
    rows_kept: int = 0
    """Rows that a sink has kept for other programs to read, those that were read and given up, and those of
    earlier attempts included."""
    rows_filed: int = 0
    """Rows that a sink has taken and may lose: those of a file sink, in files that are not complete too, and
    those that are in the sink's result alone."""
    rows_in_result: int = 0
    """Those of them that the result has which the sink gave at its close."""
    rows_skipped: int = 0
    """Rows of an endless source with a pace that fell due while no attempt ran: they are never made."""
    state_rows: int = 0
    """Rows that the operators hold, which are lost if the attempt does not finish."""
    watermark: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """The last event time that the task sent to its consumers, in microseconds since 1970; None: none yet."""
    first_output_at: float = 0.0
    """When a source emitted its first record, by the monotonic clock of its host; 0.0: none yet."""
    last_input_at: float = 0.0
    """When the last batch had been dealt with, by the same clock; 0.0: none yet."""
    buffers_out: int = 0
    """Network buffers with data that were handed to consumers. This and what follows is filled in when the
    counters are read: see ``Task.read_counters``."""
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    backpressured_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of the task's thread."""
    cpu_wait_seconds: float = 0.0
    """Time that the thread was ready to run and had no processor; 0.0 where the system does not say."""
    rows_dropped: dict[str, int] = field(default_factory=dict)
    """By reason: upstream_unavailable, suspected, queue_discarded, partial_element, failed_batch,
    late_after_recovery; the coordinator adds sink_unfinished and, for a job, result_lost."""

    limits_hit: dict[str, float] = field(default_factory=dict)
    """By limit (LIMITS, TCP_LIMITS), the wall clock at which it was first hit, in seconds since 1970. The
    loop writes those of a consumer and of connections, the task those of a producer."""
    flow: dict[str, float] = field(default_factory=dict)
    """Sums over the looks that the loop takes at the task's buffers while it runs: see :data:`FLOW`."""
    hot_keys: dict[str, float] = field(default_factory=dict)
    """By ``EDGE:CONSUMER:KEY``, the share of the rows written over that edge that a key has, if it has many:
    see :mod:`~minishuffle.exchange.hotkeys`."""
    latency: dict[str, float] = field(default_factory=dict)
    """``count`` of the latency markers that have come, and the seconds that they took: ``p50``, ``p95``,
    ``p99``, ``max``; empty if none has come."""

    def note_late(self, rows: int, *, dropped: bool) -> None:
        """So many records came too late; ``dropped``: nobody gets them."""
        self.records_late += rows
        if dropped:
            self.late_dropped += rows

    def note_filed(self, rows: int) -> None:
        """A sink has taken so many more rows, and may lose them."""
        self.rows_filed += rows

    def note_kept(self, rows: int) -> None:
        """A sink has kept so many rows in all, those of earlier attempts included."""
        self.rows_kept = rows

    def note_in_result(self, rows: int) -> None:
        """A sink that closes has so many rows in its result."""
        self.rows_in_result += rows

    def plus(self, later: TaskCounters) -> TaskCounters:
        """The totals of two attempts; ``later`` is the newer one. Counts stop at ``COUNTED_MAX``."""
        values: dict[str, Any] = {}
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(later, each.name)
            if each.name == "limits_hit":
                values[each.name] = {**theirs, **ours}
            elif each.name in ("hot_keys", "latency"):
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
    """The place of the operator in its chain, a source first."""
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
    """One input gate of a task, summed over its channels."""

    queue_buffers: int
    exclusive_used: int
    exclusive_capacity: int
    floating_used: int
    floating_capacity: int
    channels: int
    channels_starved: int
    """Channels that wait in line for a floating buffer."""
    credits_announced: int | None
    """Credits that producers have and did not use yet; None where there is no credit."""
    credits_unannounced: int | None
    """Free buffers that producers were not given credit for yet; None where there is no credit."""
    watermark: int | None
    """Event time in microseconds since 1970; None: none yet, or no more to come."""
    debloated_bytes: int | None = None
    """Bytes that producers are to put into a buffer; None: the job does not debloat."""
    in_flight_seconds: float | None = None
    """In which what producers have yet to send and the task has yet to read will be consumed; None: it does
    not debloat, or nothing was consumed so far."""


@dataclass(slots=True, frozen=True)
class PartitionSnapshot:
    """One result partition of a task, summed over its subpartitions."""

    backlog_buffers: int
    pool: PoolSnapshot


@dataclass(slots=True, frozen=True)
class TaskSnapshot:
    """One task that is deployed on this worker now."""

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
    """Its waits for output segments that have ended, in seconds."""
    operators: tuple[OperatorCounters, ...]
    """Its chain, a source first."""
    gates: tuple[GateSnapshot, ...]
    partitions: tuple[PartitionSnapshot, ...]
    latencies: Mapping[str, Histogram] = field(default_factory=dict)
    """What the markers that have come took, by source, in seconds."""
    user_series: tuple[UserSeries, ...] = ()
    slot: int = 0
    """The number of its slot, of those that the job has."""


class OneWayCounts(NamedTuple):
    """The one-way connections of a worker, see :mod:`~minishuffle.protocol.oneway`."""

    reading: int = 0
    stopped: int = 0
    """Those that are not read, as a consumer has no buffer."""
    held_bytes: int = 0
    """Read of these before they were stopped, and not taken yet."""
    sending: int = 0
    paused: int = 0
    """Those that this worker sends over and whose socket takes no more."""
    window_closed_seconds: float = 0.0
    """For so long TCP's windows have been closed of all those over which it sends."""


@dataclass(slots=True, frozen=True)
class WorkerSnapshot:
    """Everything that a worker's ``/metrics`` is made from, taken on the loop thread."""

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
    """How often another worker has answered no Ping of this one."""
    gc_seconds: float = 0.0
    """Time that Python's garbage collector held the process up."""
    one_way: OneWayCounts = OneWayCounts()
    local_batch_bytes: int = 0
    """Bytes of the batches that wait as objects for consumers on this worker."""
    blocking_bytes: int = 0
    """Bytes that blocking partitions, and gates that read some, store on this worker."""
    wall: float = 0.0
    """The worker's wall clock, seconds since 1970."""


@dataclass(slots=True, frozen=True)
class WorkerEntry:
    """One worker as the coordinator knows it."""

    worker: int
    state: str
    """alive, lost or gone."""
    host: str
    metrics_port: int
    heartbeat_age_seconds: float
    suspicions: int = 0
    """How often other workers have suspected it."""


@dataclass(slots=True, frozen=True)
class JobRecoveries:
    """What failures have cost one job so far."""

    job: str
    job_name: str
    restarts: dict[str, int]
    """Attempts that took the place of another, by how that one ended."""
    rows_dropped: dict[str, int]
    """By reason."""
    state_rows_lost: int = 0
    """Held as state by attempts that did not finish."""
    seconds: Mapping[str, Histogram] = field(default_factory=dict)
    """What recoveries took since this coordinator started, by phase: reschedule, reattach, first_record.
    Empty for a job that has ended and had none."""
    unfinished: int = 0
    """Recoveries since this coordinator started whose attempt died before its first record."""
    links_broken: int = 0
    """Pairs of workers between which its tasks need a connection that there has not been for
    ``link_timeout``, or for which a worker is excluded."""
    paused: bool = False
    """All of its tasks stand behind a barrier until it is resumed."""


@dataclass(slots=True, frozen=True)
class CoordinatorSnapshot:
    """Everything that the coordinator's ``/metrics`` and ``/sd/prometheus`` are made from."""

    term: int
    journal_writable: bool
    workers: tuple[WorkerEntry, ...]
    slots: dict[str, int]
    """used and free, of the workers that are alive, and standby: of those that admit no job so far."""
    jobs: dict[str, int]
    """By state."""
    tasks: dict[str, int]
    """Subtasks of jobs that are not terminal, by state."""
    recoveries: tuple[JobRecoveries, ...]
    connections_refused: dict[str, int]
    """By reason, as in :class:`WorkerSnapshot`."""
