"""The state of the whole cluster, for clients and for ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minishuffle.coordinator.jobs import Job
from minishuffle.coordinator.scheduling import slots_used
from minishuffle.coordinator.workers import Worker
from minishuffle.counters import CoordinatorSnapshot, JobRecoveries
from minishuffle.wire.requests import ClusterStatus

__all__ = ["CoordinatorFacts", "cluster_status", "coordinator_snapshot"]


@dataclass(frozen=True, slots=True)
class CoordinatorFacts:
    """What does not change while a coordinator runs."""

    cluster: str
    version: str
    python: str
    """Major.minor of this process."""
    pid: int
    term: int
    wall_offset: float
    """Wall clock minus the clock of ``now``, in seconds."""


def cluster_status(
    facts: CoordinatorFacts, web_port: int, workers: Iterable[Worker], jobs: Sequence[Job], now: float
) -> ClusterStatus:
    """Workers with their connections, and jobs without what their sinks returned."""
    used = slots_used(job for job in jobs if not job.terminal)
    return ClusterStatus(
        cluster=facts.cluster,
        version=facts.version,
        term=facts.term,
        pid=facts.pid,
        web_port=web_port,
        workers=[worker.info(used[worker.worker], now) for worker in workers],
        jobs=[job.info(results=False) for job in jobs],
    )


def coordinator_snapshot(
    term: int, workers: Sequence[Worker], jobs: Sequence[Job], now: float, refused: dict[str, int]
) -> CoordinatorSnapshot:
    """Everything that ``/metrics`` is made from; ``refused`` counts connections by reason."""
    active = [job for job in jobs if not job.terminal]
    used = slots_used(active)
    alive = [worker for worker in workers if worker.state == "alive"]
    slots = {worker.worker: worker.slots for worker in alive if not worker.standby}
    standby = sum(worker.slots for worker in alive if worker.standby)
    taken = sum(used[worker] for worker in slots)
    tasks: Counter[str] = Counter()
    for job in active:
        tasks.update(job.task_states)
    return CoordinatorSnapshot(
        term=term,
        workers=tuple(worker.entry(now) for worker in workers),
        slots={"used": taken, "free": sum(slots.values()) - taken, "standby": standby},
        jobs=dict(Counter(job.state for job in jobs)),
        tasks=dict(+tasks),
        recoveries=tuple(map(_recoveries, jobs)),
        connections_refused=dict(refused),
    )


def _recoveries(job: Job) -> JobRecoveries:
    losses = job.losses()
    seconds = job.recoveries.seconds
    shown = not job.terminal or any(histogram.count for histogram in seconds.values())
    return JobRecoveries(
        job.id,
        job.name,
        dict(job.restarts),
        losses.dropped,
        losses.state_rows,
        seconds if shown else {},
    )
