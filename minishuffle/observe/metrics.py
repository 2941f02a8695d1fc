"""What ``/metrics`` of a worker and of the coordinator is made from, at the moment of a scrape.

The data path counts in plain integers (``minishuffle.counters``); a collector here takes a snapshot
when it is asked and turns it into the families of :data:`~minishuffle.observe.families.METRICS`. Only
totals and present values are served: rates are the scraper's work.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from minishuffle.counters import (
    CoordinatorSnapshot,
    GateSnapshot,
    Histogram,
    OperatorCounters,
    TaskSnapshot,
    UserSeries,
    WorkerSnapshot,
)
from minishuffle.observe.families import METRICS, USER_METRICS, MetricSpec, MetricType, Process
from minishuffle.wire.frames import FrameType

__all__ = ["coordinator_registry", "worker_registry"]


Family: TypeAlias = "CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily"

_FAMILY_TYPES: dict[MetricType, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

MICROSECONDS = 1_000_000

# Label values that exist from the start, so that a first increase is seen as one.
_DATA_FRAMES = tuple(kind.name.lower() for kind in FrameType if kind is not FrameType.MESSAGE)
_REFUSALS = ("secret", "version", "cluster", "timeout", "limit", "malformed", "closed", "peer")
_ERROR_POLICIES = ("skip", "dead_letter", "side")
_WORKER_STATES = ("alive", "awaited", "lost", "gone")
_SLOT_STATES = ("used", "free", "standby")
_JOB_ENDS = ("finished_with_loss", "failing", "failed", "canceling", "canceled")
_JOB_STATES = ("created", "running", "finished", *_JOB_ENDS)
_PENDING = ("restarting", "waiting for a slot")
_TASK_STATES = ("created", "running", "finished", "failed", "canceled", "abandoned", "lost", *_PENDING)
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


def worker_registry(snapshot: Callable[[], WorkerSnapshot], version: str) -> CollectorRegistry:
    """The registry behind a worker's ``/metrics``; ``snapshot`` is called once for each scrape."""
    return _registry(_WorkerCollector(snapshot, version))


def coordinator_registry(snapshot: Callable[[], CoordinatorSnapshot], version: str) -> CollectorRegistry:
    """The registry behind the coordinator's ``/metrics``; ``snapshot`` is called once for each scrape."""
    return _registry(_CoordinatorCollector(snapshot, version))


def _registry(collector: _WorkerCollector | _CoordinatorCollector) -> CollectorRegistry:
    """A registry of its own has no process_* and python_* families unless they are asked for."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class _Scrape:
    """The families of one scrape, filled by name."""

    def __init__(self, process: Process) -> None:
        self._families = {spec.name: _family(spec) for spec in METRICS if spec.served_by(process)}

    def value(self, name: str, value: float, *labels: str) -> None:
        family = self._families[name]
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

    def by_label(self, name: str, values: Mapping[str, float], labels: Sequence[str] = ()) -> None:
        """One sample for each item; the item's key is the value of the last label."""
        for key, value in values.items():
            self.value(name, value, *labels, key)

    def histogram(self, name: str, histogram: Histogram, labels: Sequence[str] = ()) -> None:
        family = self._families[name]
        assert isinstance(family, HistogramMetricFamily)
        edges = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        buckets: list[tuple[str, float]] = []
        cumulative = 0
        for edge, count in zip(edges, tuple(histogram.counts), strict=True):
            cumulative += count
            buckets.append((edge, cumulative))
        family.add_metric(labels, buckets, histogram.total)

    def user(self, series: UserSeries, task: Sequence[str]) -> None:
        """What the user's code counts in the operator of a task. A name that an earlier one has for another
        type of metric is left out: a family has one type."""
        spec = next(spec for spec in USER_METRICS if spec.type == series.kind)
        family = self._families.get(f"user {series.name}")
        if family is None:
            name, text = spec.name.replace("NAME", series.name), series.help or series.name
            family = _family(replace(spec, name=name, help=text))
            self._families[f"user {series.name}"] = family
        if family.type != series.kind:
            return
        labels = (*task, series.operator, str(series.position))
        if series.histogram is not None:
            self.histogram(f"user {series.name}", series.histogram, labels)
        else:
            self.value(f"user {series.name}", series.value, *labels)

    def families(self) -> list[Metric]:
        return [family for family in self._families.values() if family.samples]


def _family(spec: MetricSpec) -> Family:
    return _FAMILY_TYPES[spec.type](spec.name, spec.help, labels=spec.labels)


def _from_zero(names: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    """``counts`` with a zero for each name that was not counted yet."""
    return {**dict.fromkeys(names, 0), **counts}


class _WorkerCollector:
    def __init__(self, snapshot: Callable[[], WorkerSnapshot], version: str) -> None:
        self._snapshot = snapshot
        self._version = version

    def collect(self) -> list[Metric]:
        snapshot = self._snapshot()
        scrape = _Scrape("worker")
        scrape.value("minishuffle_build_info", 1, self._version, platform.python_version())
        _add_worker(scrape, snapshot)
        _add_network(scrape, snapshot)
        for task in _newest_attempts(snapshot.tasks):
            labels = (task.job_name, task.job, task.name, str(task.operator), str(task.index))
            _add_task(scrape, labels, task)
            for position, operator in enumerate(task.operators):
                _add_operator(scrape, (*labels, operator.name, str(position)), operator)
            for position, gate in enumerate(task.gates):
                _add_gate(scrape, (*labels, str(position)), gate)
            if task.partitions:
                _add_output(scrape, labels, task)
            for series in task.user_series:
                scrape.user(series, labels)
        return scrape.families()


def _newest_attempts(tasks: Iterable[TaskSnapshot]) -> list[TaskSnapshot]:
    """The newest attempt of each subtask: an abandoned older one has no series any more."""
    newest: dict[tuple[str, int, int], TaskSnapshot] = {}
    for task in tasks:
        subtask = (task.job, task.operator, task.index)
        if subtask not in newest or newest[subtask].attempt < task.attempt:
            newest[subtask] = task
    return list(newest.values())


def _add_worker(scrape: _Scrape, snapshot: WorkerSnapshot) -> None:
    used = snapshot.slots_used
    scrape.by_label("minishuffle_worker_slots", {"used": used, "free": snapshot.slots - used})
    scrape.value("minishuffle_abandoned_tasks_total", snapshot.abandoned_tasks)
    scrape.value("minishuffle_suspicions_total", snapshot.suspicions)
    scrape.histogram("minishuffle_event_loop_lag_seconds", snapshot.loop_lag)
    scrape.value("minishuffle_gc_seconds_total", snapshot.gc_seconds)
    refused = _from_zero(_REFUSALS, snapshot.connections_refused)
    scrape.by_label("minishuffle_connections_refused_total", refused)


def _add_network(scrape: _Scrape, snapshot: WorkerSnapshot) -> None:
    remote = snapshot.remote
    scrape.value("minishuffle_connections", snapshot.connections)
    for direction, size, buffers, frames in (
        ("in", remote.bytes_in, remote.buffers_in, remote.frames_in),
        ("out", remote.bytes_out, remote.buffers_out, remote.frames_out),
    ):
        scrape.by_label(
            "minishuffle_network_bytes_total", {"remote": size, "local": snapshot.local_bytes}, [direction]
        )
        scrape.by_label(
            "minishuffle_network_buffers_total",
            {"remote": buffers, "local": snapshot.local_buffers},
            [direction],
        )
        for kind, count in _from_zero(_DATA_FRAMES, frames).items():
            scrape.value("minishuffle_frames_total", count, kind, direction)
    credits = {"granted": remote.credits_granted, "received": remote.credits_received}
    scrape.by_label("minishuffle_credits_total", credits)
    free = snapshot.segments_free
    scrape.by_label("minishuffle_network_segments", {"used": snapshot.segments_total - free, "free": free})
    scrape.value("minishuffle_network_segments_peak", snapshot.segments_peak)
    scrape.value("minishuffle_network_segments_extra", snapshot.segments_extra)
    scrape.value("minishuffle_network_memory_bytes", snapshot.segments_total * snapshot.segment_bytes)
    scrape.value("minishuffle_assembly_bytes", snapshot.assembly_bytes)
    scrape.value("minishuffle_local_batch_bytes", snapshot.local_batch_bytes)


def _add_task(scrape: _Scrape, labels: Sequence[str], task: TaskSnapshot) -> None:
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
    scrape.value("minishuffle_task_cpu_seconds_total", counters.cpu_seconds, *labels)
    scrape.value("minishuffle_task_cpu_wait_seconds_total", counters.cpu_wait_seconds, *labels)
    scrape.histogram("minishuffle_backpressure_block_seconds", task.blocks, labels)
    for source, histogram in task.latencies.items():
        scrape.histogram("minishuffle_latency_seconds", histogram, (*labels, source))
    errors = _from_zero(_ERROR_POLICIES, counters.user_errors)
    scrape.by_label("minishuffle_user_errors_total", errors, labels)
    scrape.value("minishuffle_records_late_total", counters.records_late, *labels)
    scrape.value("minishuffle_state_rows", counters.state_rows, *labels)
    scrape.value("minishuffle_source_rows_skipped_total", counters.rows_skipped, *labels)
    if counters.watermark is not None:
        scrape.value("minishuffle_watermark_lag_seconds", _lag(counters.watermark), *labels)


def _add_operator(scrape: _Scrape, labels: Sequence[str], operator: OperatorCounters) -> None:
    records = {"in": operator.records_in, "out": operator.records_out}
    scrape.by_label("minishuffle_operator_records_total", records, labels)


def _add_gate(scrape: _Scrape, labels: Sequence[str], gate: GateSnapshot) -> None:
    scrape.value("minishuffle_input_queue_buffers", gate.queue_buffers, *labels)
    used = {"exclusive": gate.exclusive_used, "floating": gate.floating_used}
    scrape.by_label("minishuffle_input_buffers", used, labels)
    capacity = {"exclusive": gate.exclusive_capacity, "floating": gate.floating_capacity}
    scrape.by_label("minishuffle_input_buffers_capacity", capacity, labels)
    if total := sum(capacity.values()):
        scrape.value("minishuffle_input_pool_usage_ratio", sum(used.values()) / total, *labels)
    scrape.value("minishuffle_channels_starved", gate.channels_starved, *labels)
    credits = {"announced": gate.credits_announced, "unannounced": gate.credits_unannounced}
    scrape.by_label("minishuffle_input_credits", credits, labels)
    if gate.watermark is not None:
        scrape.value("minishuffle_input_watermark_lag_seconds", _lag(gate.watermark), *labels)


def _lag(watermark: int) -> float:
    """Seconds from an event time to now."""
    return time.time() - watermark / MICROSECONDS


def _add_output(scrape: _Scrape, labels: Sequence[str], task: TaskSnapshot) -> None:
    backlog = sum(partition.backlog_buffers for partition in task.partitions)
    used = sum(partition.pool.used for partition in task.partitions)
    capacity = sum(partition.pool.capacity for partition in task.partitions)
    scrape.value("minishuffle_output_backlog_buffers", backlog, *labels)
    scrape.value("minishuffle_output_pool_buffers", used, *labels)
    scrape.value("minishuffle_output_pool_buffers_capacity", capacity, *labels)
    if capacity:
        scrape.value("minishuffle_output_pool_usage_ratio", used / capacity, *labels)


class _CoordinatorCollector:
    def __init__(self, snapshot: Callable[[], CoordinatorSnapshot], version: str) -> None:
        self._snapshot = snapshot
        self._version = version

    def collect(self) -> list[Metric]:
        snapshot = self._snapshot()
        scrape = _Scrape("coordinator")
        scrape.value("minishuffle_build_info", 1, self._version, platform.python_version())
        scrape.value("minishuffle_term", snapshot.term)
        states = Counter(worker.state for worker in snapshot.workers)
        scrape.by_label("minishuffle_workers", _from_zero(_WORKER_STATES, states))
        for worker in snapshot.workers:
            if worker.state == "alive":
                age = worker.heartbeat_age_seconds
                scrape.value("minishuffle_worker_heartbeat_age_seconds", age, str(worker.worker))
                scrape.value("minishuffle_worker_suspected_total", worker.suspicions, str(worker.worker))
        scrape.by_label("minishuffle_slots", _from_zero(_SLOT_STATES, snapshot.slots))
        scrape.by_label("minishuffle_jobs", _from_zero(_JOB_STATES, snapshot.jobs))
        scrape.by_label("minishuffle_tasks", _from_zero(_TASK_STATES, snapshot.tasks))
        refused = _from_zero(_REFUSALS, snapshot.connections_refused)
        scrape.by_label("minishuffle_connections_refused_total", refused)
        for job in snapshot.recoveries:
            labels = (job.job_name, job.job)
            restarts = _from_zero(_RESTART_REASONS, job.restarts)
            scrape.by_label("minishuffle_task_restarts_total", restarts, labels)
            dropped = _from_zero((*_DROP_REASONS, "result_lost"), job.rows_dropped)
            scrape.by_label("minishuffle_records_dropped_total", dropped, labels)
            scrape.value("minishuffle_state_rows_lost_total", job.state_rows_lost, *labels)
            for phase, histogram in job.seconds.items():
                scrape.histogram("minishuffle_recovery_duration_seconds", histogram, (*labels, phase))
        return scrape.families()
