"""The diagnosis of a job: the cause that throttles it, as a pure function of two looks at heartbeats and of
the job graph.

The first look is half a minute old. The coordinator keeps it (:mod:`~minishuffle.coordinator.recentreports`),
so that all diagnoses of the same time agree, and the next one does too.

If workers of the job have no connection, this is the cause: all other waits follow from it.

A task is *throttled* while it waits for its output (more than ``LOW_FROM`` of its time). The cause is
downstream of it, so the search follows the data. Among the consumers of throttled tasks, one that is busy, or
always has queued input, is the bottleneck. If there is none, the exchange in between is. Then the rules are
tried in order (:data:`RULES`): each has a condition, numbers as evidence, and advice.

Small rows can wait in buffers for a minute before a task is throttled. Until then the bottleneck is a task
that is always busy, and whose vertex reads fewer records than are sent to it: it *falls behind*
(:func:`level_loads`).

If tasks wait for a slot, this is the cause (``waiting``): all others wait for them. The same holds if no task
runs and others wait to be deployed. A paused job is reported as paused.

The rules on buffers are those of Flink's guide to back-pressure: output full and input full passes it on;
output full and input empty is the network or its credit; one subtask full among many is skew. A job with
``flow_control = "tcp"`` has no credit: its evidence has the share of looks at which a connection was stopped
instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from minishuffle.errors import UsageError
from minishuffle.observe.loads import LOW_FROM, Level, VertexLoad, vertex_loads
from minishuffle.wire.messages import PeerReport
from minishuffle.wire.requests import JOB_LIVE, GraphInfo, JobInfo, TaskInfo, WorkerInfo

__all__ = [
    "ALSO_SHORT_OF_CPU",
    "CHAINED",
    "LATE_SECONDS_MAX",
    "RULES",
    "SECONDS_LEAST",
    "SHORT_OF_CPU",
    "Backlog",
    "Diagnosis",
    "Judged",
    "Link",
    "Look",
    "diagnose_job",
    "level_loads",
    "links_of",
    "require_running",
    "seconds_between",
]

_THERE: Final = frozenset({"created", "running", "restarting"})
"""States of tasks that run, or are about to."""
SECONDS_LEAST: Final = 3.0
"""Shortest time between the looks of a diagnosis, in a job that has just begun."""
LATE_SECONDS_MAX: Final = 5.0
"""Seconds for which the second look waits for late reports of subtasks."""

BUSY_FROM: Final = 0.70
"""Least busy share of a bottleneck's time, unless input is queued for it at most looks."""
AT_LIMIT_FROM: Final = 0.95
"""Busy share of its time from which a task can process no more rows."""
QUEUED_FROM: Final = 0.60
BEHIND_TAKEN_MAX: Final = 0.9
"""Largest share of its sent records that a vertex processes when it falls behind."""
IDLE_BUSY_MAX: Final = 0.25
"""A task with a smaller busy share throttles no other, even if input is queued for it."""
GC_FROM: Final = 0.15
CPU_WAIT_FROM: Final = 0.25
WORKER_CPU_FROM: Final = 0.75
"""Processor time per second of a worker from which its threads contend for the interpreter's lock."""
SKEW_FROM: Final = 1.5
"""Multiple of the fair share of records."""
SLOWER_FROM: Final = 1.5
"""Multiple of the other subtasks' busy seconds per record."""
WAITING_FROM: Final = 0.3
ROUND_TRIP_SECONDS_FROM: Final = 0.002
QUEUED_BYTES_FROM: Final = 65_536
QUEUED_TIMES_FROM: Final = 4.0
"""Multiple of the least round trip from which data in flight counts as queued on the way."""
HOT_KEYS_SHOWN: Final = 3
TCP_ADVICE: Final = (
    ". Without a buffer it stops the connection that it shares: with flow_control=credit others go on"
)
SHORT_OF_CPU: Final = "a worker short of CPU"
ALSO_SHORT_OF_CPU: Final = ". Its thread also waits for a processor, but a whole one would not do"
CHAINED: Final = " -> "
"""Separator between the operators in the name of a chain."""
MORE_PROCESSORS: Final = (
    "its thread is ready to run and has no processor: give the machine or the container more processors, "
    "move other work away, or run fewer workers there"
)


class Link(NamedTuple):
    """An edge of the job graph: vertex numbers, and the partitioner."""

    source: int
    target: int
    partitioner: str


def links_of(graph: GraphInfo) -> list[Link]:
    """The edges of a job."""
    return [Link(edge.source, edge.target, edge.partitioner) for edge in graph.edges]


@dataclass(frozen=True, slots=True)
class Look:
    """A job and the workers at one moment."""

    job: JobInfo
    workers: Sequence[WorkerInfo]


class Diagnosis(BaseModel):
    """The result of a diagnosis.

    ``verdict`` is ``healthy``, without ``task`` and with the ``rule`` ``none``; ``waiting``, without
    ``task``, if tasks lack a slot or a connection, or no task is deployed; ``paused``, likewise; or
    ``throttled``. A task that falls behind is ``throttled`` too, with ``falls_behind`` in its evidence.
    """

    model_config = ConfigDict(frozen=True)

    job: str
    verdict: Literal["healthy", "waiting", "paused", "throttled"]
    task: str
    rule: str
    evidence: dict[str, Any]
    advice: str

    @property
    def own_code(self) -> bool:
        """Whether the task's own code is slow, or needs more CPU than there is: a profile shows where."""
        return self.rule == SHORT_OF_CPU or any(each.own_code for each in RULES if each.name == self.rule)


@dataclass(frozen=True, slots=True)
class Span:
    """The work of a subtask between the looks: shares of its time, rates per second, and means of its buffer
    samples (see ``TaskCounters.flow``)."""

    info: TaskInfo
    busy: float
    idle: float
    backpressured: float
    cpu: float
    cpu_wait: float
    records_in: float
    records_out: float
    bytes_out: float
    buffers_out: float
    flow: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.info.name}[{self.info.index}]"

    @property
    def records(self) -> float:
        """Records in per second; for a source, records out."""
        return self.records_in or self.records_out

    def looks(self, what: str) -> float:
        """The mean of one of ``TaskCounters.flow`` over the buffer samples."""
        return self.flow.get(what, 0.0)


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """The work of a worker's process between the looks, in seconds per second."""

    worker: int
    cpu: float
    gc: float
    lag: float
    """The event loop's lag at the 99th percentile, in seconds."""
    round_trips: Mapping[int, float]
    """Seconds, by peer."""
    queued_bytes: Mapping[int, int]
    """Bytes that waited in the kernel or on the way at both looks, by peer."""
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Scene:
    """A bottleneck and its surroundings."""

    task: Span
    """The bottleneck; for an exchange, the producer that waits most."""
    beside: list[Span]
    """The other subtasks of its vertex."""
    behind: list[Span]
    """Its consumers."""
    throttled: list[Span]
    """Tasks that wait for it, or will once the buffers are full."""
    here: WorkerSpan
    """Its worker."""
    busy_here: list[Span]
    """Tasks of this job on this worker with a busy share of at least ``IDLE_BUSY_MAX``, itself included."""
    keyed: bool
    """Its input is partitioned by key."""
    hot_keys: list[tuple[str, float]] = field(default_factory=list)
    """Frequent keys of its input, with their share of the rows that its producers write."""
    sent_times: float | None = None
    """Records sent to it as a multiple of the records it processes; None: its producers wait, and may have
    any number."""

    @property
    def share(self) -> float:
        """Its share of the records of its vertex."""
        total = self.task.records + sum(each.records for each in self.beside)
        return self.task.records / total if total else 0.0

    @property
    def slower(self) -> float:
        """Its busy seconds per record, divided by the median of the other subtasks."""
        others = [each.busy / each.records for each in self.beside if each.records and each.busy]
        mine = self.task.busy / self.task.records if self.task.records else 0.0
        return mine / median(others) if others else 1.0

    @property
    def alone(self) -> bool:
        """Whether the other subtasks are much less busy."""
        return bool(self.beside) and median(each.busy for each in self.beside) <= 0.7 * self.task.busy

    @property
    def waits_for_processor(self) -> bool:
        """Whether its thread waits for a processor for at least half of the time that it is busy without
        computing. Threads that contend for the interpreter's lock wake up for it, and then wait for the
        processor too: in this case the process as a whole has a processor."""
        task = self.task
        waits = task.cpu_wait >= max(CPU_WAIT_FROM, 0.5 * (task.busy - task.cpu))
        return waits and self.here.cpu < WORKER_CPU_FROM

    @property
    def processor_would_do(self) -> bool:
        """Whether it would process all records sent to it with a processor of its own; if that number is not
        known, twice as many as now."""
        if self.sent_times is None:
            return self.task.cpu_wait >= self.task.cpu
        return self.sent_times * max(0.0, self.task.busy - self.task.cpu_wait) <= 1.0

    @property
    def on_own_processor(self) -> str:
        """Advice with its rate on a processor of its own: if this is too low, its code is the cause all the
        same."""
        rate = self.task.records / max(0.01, self.task.busy - self.task.cpu_wait)
        return (
            f". On a processor of its own it would take about {rate:,.0f} records/s in place of "
            f"{self.task.records:,.0f}: where that is too few, make its code cheaper"
        )

    @property
    def is_slow_end(self) -> bool:
        """Whether it writes to no task, and spends most of its time neither on a processor nor waiting for
        one."""
        task = self.task
        return not self.behind and task.cpu + task.cpu_wait < 0.5 * (task.busy + task.backpressured)

    @property
    def peers(self) -> list[int]:
        """Other workers to which it writes."""
        return sorted({each.info.worker for each in self.behind} - {self.here.worker})

    @property
    def round_trip(self) -> float:
        return max((self.here.round_trips.get(peer, 0.0) for peer in self.peers), default=0.0)

    @property
    def queued_bytes(self) -> int:
        return max((self.here.queued_bytes.get(peer, 0) for peer in self.peers), default=0)


# --- rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """A possible cause: its place, its condition, the numbers as evidence, and advice."""

    name: str
    where: Literal["task", "exchange"]
    holds: Callable[[Scene], bool]
    evidence: Callable[[Scene], dict[str, Any]]
    advice: str
    own_code: bool = False
    """The user's function or sink itself is slow."""


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "garbage collection",
        "task",
        lambda scene: scene.here.gc >= GC_FROM,
        lambda scene: {"gc_seconds_per_second": scene.here.gc},
        "leave Python's garbage collector as the worker sets it, and do not call gc.collect() in functions; "
        "keep fewer objects as state, for example Arrow columns instead of rows",
    ),
    Rule(
        SHORT_OF_CPU,
        "task",
        lambda scene: scene.waits_for_processor and scene.processor_would_do,
        lambda scene: {"cpu_wait": scene.task.cpu_wait, "worker_cpu": scene.here.cpu},
        MORE_PROCESSORS,
    ),
    Rule(
        "interpreter lock",
        "task",
        lambda scene: (
            len(scene.busy_here) >= 2
            and scene.here.cpu >= WORKER_CPU_FROM
            and scene.task.cpu < 0.8 * scene.task.busy
            and scene.task.cpu >= 0.5 * scene.here.cpu / len(scene.busy_here)
        ),
        lambda scene: {
            "worker_cpu": scene.here.cpu,
            "busy_tasks_of_worker": len(scene.busy_here),
            "event_loop_lag_p99_seconds": scene.here.lag,
        },
        "its threads wait for each other: start more workers with fewer slots each; where functions take "
        "rows, use columns (Table, record batches), whose loops run without the lock",
    ),
    Rule(
        "skewed key",
        "task",
        lambda scene: scene.keyed and scene.alone and scene.share * (1 + len(scene.beside)) >= SKEW_FROM,
        lambda scene: {
            "share_of_records": scene.share,
            "fair_share": 1 / (1 + len(scene.beside)),
            "hot_keys": [{"key": key, "share": round(share, 3)} for key, share in scene.hot_keys],
        },
        "split the hot key (add a salt to it and combine the parts behind), or aggregate before the "
        "exchange, so that it carries one row per key and batch",
    ),
    Rule(
        "one slow channel",
        "task",
        lambda scene: scene.alone and scene.slower >= SLOWER_FROM,
        lambda scene: {
            "share_of_records": scene.share,
            "times_slower_per_record": scene.slower,
            "busy_of_others": median(each.busy for each in scene.beside),
        },
        "this subtask alone is slow, and holds up all that write to it: look at its worker's machine, and at "
        "what its records have in common; rebalance() lets others take its rows where keys do not matter",
        own_code=True,
    ),
    Rule(
        "slow sink",
        "task",
        lambda scene: scene.is_slow_end and CHAINED not in scene.task.info.name,
        lambda scene: {"cpu_share_of_busy": _ratio(scene.task.cpu, scene.task.busy)},
        "it waits for what it writes to: write larger batches, write to files instead of collect or print, "
        "or raise its parallelism if the other system takes more at a time",
        own_code=True,
    ),
    Rule(
        "slow function or sink",
        "task",
        # The time of each operator in a chain is not counted separately.
        lambda scene: scene.is_slow_end,
        lambda scene: {"cpu_share_of_busy": _ratio(scene.task.cpu, scene.task.busy)},
        "one of the operators of this chain waits, a function for another system or the sink for what it "
        "writes to: call map_async for what waits, write larger batches, or raise the parallelism if the "
        "other system takes more at a time",
        own_code=True,
    ),
    Rule(
        "slow function",
        "task",
        lambda scene: True,
        lambda scene: {"cpu_share_of_busy": _ratio(scene.task.cpu, scene.task.busy)},
        "make the function cheaper (map_batches on columns; no call to another system for each record), or "
        "raise the parallelism of this operator",
        own_code=True,
    ),
    Rule(
        "network",
        "exchange",
        lambda scene: (
            bool(scene.peers)
            and (scene.task.looks("unsent") >= WAITING_FROM or scene.queued_bytes >= QUEUED_BYTES_FROM)
        ),
        lambda scene: {
            "unsent": scene.task.looks("unsent"),
            "queued_bytes": scene.queued_bytes,
            "round_trip_seconds": scene.round_trip,
            "to_workers": scene.peers,
        },
        "buffers wait for the socket, or on the way: the connection carries no more. Look for lost packets "
        "and a full link, send less (fewer columns, aggregates before the exchange), or place the tasks on "
        "one machine",
    ),
    Rule(
        "credit round trip too long",
        "exchange",
        lambda scene: (
            scene.task.looks("uncredited") >= WAITING_FROM and scene.round_trip >= ROUND_TRIP_SECONDS_FROM
        ),
        lambda scene: {
            "uncredited": scene.task.looks("uncredited"),
            "round_trip_seconds": scene.round_trip,
            "bytes_per_round_trip": scene.task.bytes_out * scene.round_trip,
        },
        "credit is on its way while consumers wait: raise buffers_per_channel and floating_buffers_per_gate "
        "until they hold the bytes of a round trip",
    ),
    Rule(
        "too few buffers",
        "exchange",
        lambda scene: scene.task.looks("uncredited") >= WAITING_FROM or scene.task.looks("output") >= 0.8,
        lambda scene: {
            "uncredited": scene.task.looks("uncredited"),
            "output_buffers_used": scene.task.looks("output"),
            "floating_buffers_used": max((each.looks("floating") for each in scene.behind), default=0.0),
        },
        "raise buffers_per_channel and floating_buffers_per_gate of the job, and network_memory_bytes if the "
        "workers have no segments left",
    ),
    Rule(
        SHORT_OF_CPU,
        "exchange",
        lambda scene: scene.task.cpu_wait >= CPU_WAIT_FROM and scene.here.cpu < WORKER_CPU_FROM,
        lambda scene: {"cpu_wait": scene.task.cpu_wait, "worker_cpu": scene.here.cpu},
        MORE_PROCESSORS,
    ),
    Rule(
        "unknown",
        "exchange",
        lambda scene: True,
        lambda scene: {"uncredited": scene.task.looks("uncredited"), "unsent": scene.task.looks("unsent")},
        "'minishuffle dump' shows what it waits for now; a source may wait for the coordinator to take its "
        "positions",
    ),
)
"""Rules in the order in which they are tried; the last one of each place always holds."""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# --- the search -----------------------------------------------------------------------------------


def require_running(job: JobInfo) -> JobInfo:
    """The job. Raises UsageError: it does not run."""
    if job.state not in JOB_LIVE:
        raise UsageError(f"job {job.job} is {job.state}: only one that runs can be diagnosed")
    return job


def diagnose_job(before: Look, after: Look, links: Iterable[Link]) -> Diagnosis:
    """The main cause that throttles the job, from two looks at it and at the workers."""
    if "paused" in (before.job.state, after.job.state):
        return _paused(after.job)
    if any(not link.excluded for link in after.job.links_broken):
        return _disconnected(after.job, "waiting for a connection")
    if after.job.slot_waits:
        return _without_slots(after.job)
    if after.job.deploy_waits and not any(task.state in _THERE for task in after.job.tasks):
        return _not_deployed(after.job)
    edges = list(links)
    spans = _spans(before.job, after.job)
    workers = _worker_spans(before.workers, after.workers)
    throttled = [each for each in spans if each.backpressured > LOW_FROM]
    if not throttled and after.job.links_broken:
        return _disconnected(after.job, "running without a worker")
    behind = _falling_behind(spans, edges)
    if not throttled and behind is None:
        return _healthy(after.job, spans)
    where: Literal["task", "exchange"] = "task"
    if behind is not None:
        scene = _scene(behind.task, spans, behind.producers, workers, edges)
        scene = replace(scene, sent_times=behind.sent / behind.taken if behind.taken else inf)
    else:
        scene, where = _bottleneck(spans, throttled, workers, edges)
    rule = next(each for each in RULES if each.where == where and each.holds(scene))
    evidence, advice = {**_common_evidence(scene), **rule.evidence(scene)}, rule.advice
    if rule.own_code and scene.waits_for_processor:
        advice += ALSO_SHORT_OF_CPU
    if rule.name == SHORT_OF_CPU and where == "task":
        advice += scene.on_own_processor
    if behind is not None:
        evidence["falls_behind"] = behind.text
    if after.job.flow_control == "tcp":
        evidence.pop("uncredited", None)
        evidence["stops_connection"] = max(each.looks("starved") for each in (scene.task, *scene.behind))
        advice += TCP_ADVICE if evidence["stops_connection"] >= WAITING_FROM else ""
    if after.job.links_broken:
        evidence["excluded"] = [link.text for link in after.job.links_broken]
    return Diagnosis(
        job=after.job.job,
        verdict="throttled",
        task=scene.task.name,
        rule=rule.name,
        evidence={name: _rounded(value) for name, value in evidence.items()},
        advice=advice,
    )


def _bottleneck(
    spans: list[Span], throttled: list[Span], workers: Mapping[int, WorkerSpan], edges: list[Link]
) -> tuple[Scene, Literal["task", "exchange"]]:
    """The task, or the producer at an exchange, that throttles the others."""
    targets: dict[int, set[int]] = {}
    for edge in edges:
        targets.setdefault(edge.source, set()).add(edge.target)
    held = {vertex for each in throttled for vertex in targets.get(each.info.operator, ())}
    waiting = {each.name for each in throttled}
    ends = [each for each in throttled if not targets.get(each.info.operator)]
    suspects = [each for each in spans if each.info.operator in held and each.name not in waiting]
    culprits = ends or [each for each in suspects if _is_full(each)]
    if culprits:
        task = max(culprits, key=lambda each: each.busy + each.backpressured)
        return _scene(task, spans, throttled, workers, edges), "task"
    # The most downstream task that waits, waits for the exchange next to it.
    last = [each for each in throttled if not targets.get(each.info.operator, set()) & _vertices(throttled)]
    task = max(last or throttled, key=lambda each: (_waits_for_exchange(each), each.backpressured))
    return _scene(task, spans, throttled, workers, edges), "exchange"


class Backlog(NamedTuple):
    """A task that does not keep up, its producers, and the rates of its vertex."""

    task: Span
    producers: list[Span]
    taken: float
    sent: float
    at_most: bool
    """Other consumers of the same producers are at their limit too: part of ``sent`` may be for them."""

    @property
    def text(self) -> str:
        most = "up to " if self.at_most else ""
        return f"{self.taken:,.0f} of {most}{self.sent:,.0f} records/s, the rest waits in buffers"


class Judged(NamedTuple):
    """The loads of all vertices of a job, and the task that falls behind before any task waits for it."""

    loads: list[VertexLoad]
    behind: Backlog | None


def level_loads(loads: Iterable[VertexLoad], earlier: JobInfo, now: JobInfo, links: Iterable[Link]) -> Judged:
    """``loads``, which may cover a shorter time, with the levels since the ``earlier`` look, as
    :func:`diagnose_job` finds them from the same looks. The vertex of the task that falls behind is
    BEHIND."""
    behind = _falling_behind(_spans(earlier, now), list(links))
    number = -1 if behind is None else behind.task.info.operator
    levels: list[Level] = [load.level for load in vertex_loads(earlier, now)]
    levelled = [
        replace(load, level="BEHIND" if each == number else levels[each]) for each, load in enumerate(loads)
    ]
    return Judged(levelled, behind)


def _falling_behind(spans: list[Span], edges: list[Link]) -> Backlog | None:
    """The busiest task of the vertex with the smallest share of processed to sent records, if this share is
    too small and no task waits for its output.

    Records out of a vertex are counted for all of its edges together. So vertices with producers in common
    are looked at together. A vertex that is not at its limit keeps up: its records in were sent to it.
    """
    if any(each.backpressured > LOW_FROM for each in spans):
        return None
    taken, sent = defaultdict[int, float](float), defaultdict[int, float](float)
    for each in spans:
        taken[each.info.operator] += each.records_in
        sent[each.info.operator] += each.records_out
    at_limit = {each.info.operator for each in spans if each.busy >= AT_LIMIT_FROM}
    found = []
    for target in at_limit.intersection(edge.target for edge in edges):
        sources, targets = _with_producers_in_common(target, edges)
        lacking = sum(sent[each] for each in sources) - sum(taken[each] for each in targets)
        if lacking > (1.0 - BEHIND_TAKEN_MAX) * sum(sent[each] for each in sources):
            writers = {edge.source for edge in edges if edge.target == target}
            found.append(
                Backlog(
                    max((each for each in spans if each.info.operator == target), key=lambda each: each.busy),
                    [each for each in spans if each.info.operator in writers],
                    taken[target],
                    taken[target] + lacking,
                    len(at_limit & targets) > 1,
                )
            )
    return min(found, key=lambda each: each.taken / each.sent, default=None)


def _with_producers_in_common(target: int, edges: list[Link]) -> tuple[set[int], set[int]]:
    """The producers of a vertex, the producers of their other consumers, and so on; and the consumers of all
    these."""
    sources, targets = set[int](), {target}
    while more := {edge.source for edge in edges if edge.target in targets} - sources:
        sources |= more
        targets |= {edge.target for edge in edges if edge.source in sources}
    return sources, targets


def _waits_for_exchange(span: Span) -> bool:
    return max(span.looks("uncredited"), span.looks("unsent")) >= WAITING_FROM


def _vertices(spans: Iterable[Span]) -> set[int]:
    return {each.info.operator for each in spans}


def _is_full(span: Span) -> bool:
    """Whether it is always busy, or is busy and mostly has queued input."""
    return span.busy >= BUSY_FROM or (span.busy >= IDLE_BUSY_MAX and span.looks("queued") >= QUEUED_FROM)


def _scene(
    task: Span,
    spans: list[Span],
    throttled: list[Span],
    workers: Mapping[int, WorkerSpan],
    edges: list[Link],
) -> Scene:
    operator, worker = task.info.operator, task.info.worker
    inputs = [(number, edge) for number, edge in enumerate(edges) if edge.target == operator]
    outputs = {edge.target for edge in edges if edge.source == operator}
    return Scene(
        task,
        [each for each in spans if each.info.operator == operator and each is not task],
        [each for each in spans if each.info.operator in outputs],
        throttled,
        workers.get(worker, WorkerSpan(worker, 0.0, 0.0, 0.0, {}, {}, 0)),
        [each for each in spans if each.info.worker == worker and each.busy >= IDLE_BUSY_MAX],
        any(edge.partitioner == "hash" for _, edge in inputs),
        _hot_keys(task, spans, [number for number, _ in inputs]),
    )


def _hot_keys(task: Span, spans: list[Span], edges: list[int]) -> list[tuple[str, float]]:
    """Frequent keys of its inputs, as sampled by their producers: see ``TaskCounters.hot_keys``."""
    shares: dict[str, list[float]] = {}
    for each in spans:
        for name, share in each.info.counters.hot_keys.items():
            edge, consumer, key = name.split(":", 2)
            if int(edge) in edges and int(consumer) == task.info.index:
                shares.setdefault(key, []).append(share)
    found = [(key, sum(each) / len(each)) for key, each in shares.items()]
    return sorted(found, key=lambda each: -each[1])[:HOT_KEYS_SHOWN]


def _common_evidence(scene: Scene) -> dict[str, Any]:
    """The evidence about its task that every diagnosis has."""
    task = scene.task
    held = max(scene.throttled, key=lambda each: each.backpressured)
    found: dict[str, Any] = {
        "worker": task.info.worker,
        "busy": task.busy,
        "idle": task.idle,
        "backpressured": task.backpressured,
        "cpu": task.cpu,
        "cpu_wait": task.cpu_wait,
        "records_per_second": task.records,
        "most_backpressured": held.name,
        "its_backpressure": held.backpressured,
    }
    if task.records and task.busy:
        found["records_per_second_if_always_busy"] = task.records / max(
            task.busy, task.busy + task.backpressured
        )
    written = held.records_out
    if written:
        found["bytes_per_record"] = held.bytes_out / written
    if held.buffers_out and scene.here.segment_bytes:
        fill = held.bytes_out / held.buffers_out / scene.here.segment_bytes
        found["buffer_fill"] = min(1.0, fill)  # bytes count when written, buffers when sent
    return found


def _without_slots(job: JobInfo) -> Diagnosis:
    """Tasks wait for a slot, and their producers and consumers wait for these tasks."""
    return Diagnosis(
        job=job.job,
        verdict="waiting",
        task="",
        rule="waiting for a slot",
        evidence={"why": [wait.text for wait in job.slot_waits]},
        advice="start another worker ('minishuffle worker start'), or cancel a job that holds slots",
    )


def _not_deployed(job: JobInfo) -> Diagnosis:
    """No task of the job runs: the next ones wait for slots, which other jobs have."""
    return Diagnosis(
        job=job.job,
        verdict="waiting",
        task="",
        rule="waiting to be deployed",
        evidence={"why": [wait.text for wait in job.deploy_waits]},
        advice="it goes on when other jobs give slots back; or start another worker ('minishuffle worker "
        "start'), or cancel a job that holds slots",
    )


def _paused(job: JobInfo) -> Diagnosis:
    """The job is paused, or was at one of the looks."""
    return Diagnosis(
        job=job.job,
        verdict="paused",
        task="",
        rule="paused",
        evidence={"left": job.pause_left} if job.pause_left else {},
        advice=f"'minishuffle jobs resume {job.job}' has it go on",
    )


def _disconnected(job: JobInfo, rule: str) -> Diagnosis:
    """Two workers have no connection: tasks wait for it, or one of the workers is excluded from the job."""
    workers = sorted({worker for link in job.links_broken for worker in link.workers})
    return Diagnosis(
        job=job.job,
        verdict="waiting",
        task="",
        rule=rule,
        evidence={"workers": workers, "why": [link.text for link in job.links_broken]},
        advice="have the network let each worker reach the address that the other advertises ('minishuffle "
        "cluster status'): look at firewalls, network policies and routes between the two, and at --host and "
        "--advertise of 'worker start'",
    )


def _healthy(job: JobInfo, spans: list[Span]) -> Diagnosis:
    busiest = max(spans, key=lambda each: each.busy, default=None)
    sources = sum(each.records_out for each in spans if not each.records_in)
    evidence: dict[str, Any] = {"records_per_second": sources}
    if job.deploy_waits:
        evidence["not_deployed"] = [wait.text for wait in job.deploy_waits]
    if busiest is not None:
        evidence |= {
            "most_backpressured": max(each.backpressured for each in spans),
            "busiest": busiest.name,
            "busy": busiest.busy,
        }
    advice = "nothing is wrong: no task waits for another to take its rows"
    if busiest is not None and busiest.busy >= AT_LIMIT_FROM:
        advice = (
            "nothing is wrong so far: no task waits for another to take its rows, but "
            f"{busiest.name} is at its limit: it takes {busiest.records:,.0f} records/s, and what is sent to "
            "it beyond that waits in buffers"
        )
    return Diagnosis(
        job=job.job,
        verdict="healthy",
        task="",
        rule="none",
        evidence={name: _rounded(each) for name, each in evidence.items()},
        advice=advice,
    )


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


# --- what happened between the looks --------------------------------------------------------------


def seconds_between(before: JobInfo, after: JobInfo) -> float:
    """The shortest time that a running subtask has reported in between."""
    earlier = {(task.operator, task.index): task.counters for task in before.tasks}
    passed = [
        task.counters.seconds - earlier[task.operator, task.index].seconds
        for task in after.tasks
        if task.state == "running"
    ]
    return min(passed, default=0.0)


def _spans(before: JobInfo, after: JobInfo) -> list[Span]:
    """The spans of all subtasks that have reported time in between."""
    earlier = {(task.operator, task.index): task for task in before.tasks}
    found = []
    for task in after.tasks:
        was = earlier.get((task.operator, task.index))
        if was is not None and (span := _span(was, task)) is not None:
            found.append(span)
    return found


def _span(before: TaskInfo, after: TaskInfo) -> Span | None:
    was, now = before.counters, after.counters
    states = [
        max(0.0, getattr(now, name) - getattr(was, name))
        for name in ("busy_seconds", "idle_seconds", "backpressured_seconds")
    ]
    seconds = sum(states)
    if not seconds:
        return None

    def per_second(name: str) -> float:
        return float(max(0.0, getattr(now, name) - getattr(was, name)) / seconds)

    looks = now.flow.get("looks", 0.0) - was.flow.get("looks", 0.0)
    growth = {name: max(0.0, total - was.flow.get(name, 0.0)) for name, total in now.flow.items()}
    flow = {name: each / looks for name, each in growth.items()} if looks > 0 else {}
    busy, idle, backpressured = (state / seconds for state in states)
    return Span(
        after,
        busy,
        idle,
        backpressured,
        cpu=per_second("cpu_seconds"),
        cpu_wait=per_second("cpu_wait_seconds"),
        records_in=per_second("records_in"),
        records_out=per_second("records_out"),
        bytes_out=per_second("bytes_out"),
        buffers_out=per_second("buffers_out"),
        flow=flow,
    )


def _worker_spans(before: Sequence[WorkerInfo], after: Sequence[WorkerInfo]) -> dict[int, WorkerSpan]:
    earlier = {each.worker: each for each in before}
    found: dict[int, WorkerSpan] = {}
    for each in after:
        was = earlier.get(each.worker, each)
        seconds = each.report.clock_seconds - was.report.clock_seconds
        cpu, gc = (
            max(0.0, getattr(each.report, name) - getattr(was.report, name)) / seconds if seconds > 0 else 0.0
            for name in ("cpu_seconds", "gc_seconds")
        )
        queued = {peer.worker: _queued_bytes(peer) for peer in was.peers}
        found[each.worker] = WorkerSpan(
            each.worker,
            cpu,
            gc,
            each.report.loop_lag_p99_seconds,
            {peer.worker: peer.round_trip_seconds for peer in each.peers},
            {peer.worker: min(_queued_bytes(peer), queued.get(peer.worker, 0)) for peer in each.peers},
            each.report.segment_bytes,
        )
    return found


def _queued_bytes(peer: PeerReport) -> int:
    """The bytes queued on a connection. Bytes in flight count only if their round trip is much longer than
    the least one: a fast connection over a long distance has many in flight too."""
    waits = peer.smoothed_round_trip_seconds >= QUEUED_TIMES_FROM * peer.round_trip_seconds
    return peer.unsent_bytes + (peer.in_flight_bytes if waits else 0)
