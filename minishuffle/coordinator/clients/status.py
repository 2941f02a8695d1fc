"""The state of the whole cluster, for clients and for ``/metrics``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from minishuffle import limits
from minishuffle.coordinator.jobs.history import History
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.jobindex import JobTable
from minishuffle.coordinator.links import Links
from minishuffle.coordinator.scheduling.placement import takers
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.coordinator.workers import WorkerRegistry
from minishuffle.counters import CoordinatorSnapshot, JobRecoveries
from minishuffle.plan.graph import JobGraph, JobSettings
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.outputs import GetFiles
from minishuffle.wire.requests import (
    ClusterStatus,
    EdgeInfo,
    GetStatus,
    GraphInfo,
    JobList,
    ListJobs,
    SettingInfo,
    ShowGraph,
    ShowJob,
    VertexInfo,
)

__all__ = ["CoordinatorFacts", "ClusterView", "StatusRequest", "coordinator_snapshot", "status_reply"]


@dataclass(frozen=True, slots=True)
class CoordinatorFacts:
    """Facts that are constant while a coordinator runs."""

    cluster: str
    version: str
    python: str
    """Major.minor of this process."""
    pid: int
    term: int
    wall_offset: float
    """At its start: the wall clock minus the clock of ``now``, in seconds."""
    identity: str = ""
    """Identity of its host, see ``host_identity``."""
    workers_anew: bool = False
    """All workers, standby workers too, are restarted together with the coordinator."""
    snapshot_dir: str = ""
    """Where savepoints are, unless their clients say otherwise."""


class ClusterView(NamedTuple):
    """All state from which replies about the whole cluster are made."""

    facts: CoordinatorFacts
    web_port: int
    journal_problem: str
    workers: WorkerRegistry
    jobs: JobTable
    links: Links
    history: History
    """Events of the cluster that belong to no job."""
    wall_offset: float
    """The current wall clock minus the clock of ``now``, in seconds."""


StatusRequest: TypeAlias = ListJobs | ShowJob | ShowGraph | GetFiles | GetStatus
"""Requests that are answered at once and change nothing."""


def status_reply(request: StatusRequest, cluster: ClusterView, now: float) -> ControlMessage:
    """The reply to a client's request.

    Raises:
        UnknownName: there is no job of this name.
    """
    at = now + cluster.wall_offset
    match request:
        case ListJobs(tasks=tasks):
            jobs = cluster.jobs.values()
            return JobList(jobs=[job.info(at, results=False, tasks=tasks) for job in jobs])
        case ShowJob(job=name, results=results, earlier=earlier):
            job = cluster.jobs.named(name)
            recent = cluster.workers.recent_counters(name) if earlier else None
            return job.info(at, results=results, recent=recent)
        case ShowGraph(job=name):
            return _graph_info(cluster.jobs.named(name))
        case GetFiles(job=name, after=after):
            return cluster.jobs.named(name).progress.manifest.after(after)
        case GetStatus():
            return _cluster_status(cluster, now, request)


def _cluster_status(cluster: ClusterView, now: float, request: GetStatus) -> ClusterStatus:
    """Workers with their connections, and jobs without results, as far as the request asks for them."""
    facts, at = cluster.facts, now + cluster.wall_offset
    used, confined = cluster.jobs.held.slots, cluster.workers.confined(facts.identity)
    return ClusterStatus(
        cluster=facts.cluster,
        version=facts.version,
        term=facts.term,
        pid=facts.pid,
        web_port=cluster.web_port,
        journal_problem=cluster.journal_problem,
        workers=[
            worker.info(
                used[worker.worker],
                now,
                (cluster.links.reached[worker.worker], cluster.links.known(worker.worker)),
                confined=worker.worker in confined,
                reports=request.reports,
                earlier=request.earlier,
            )
            for worker in cluster.workers
            if request.worker in (0, worker.worker)
        ],
        jobs=[job.info(at, results=False) for job in cluster.jobs.values() if request.jobs],
        unreached=[
            cluster.workers.no_link(key, why)
            for key, why in cluster.links.failing()[: limits.CLUSTER_EVENTS_SHOWN]
        ],
        events=cluster.history.last_events(limits.CLUSTER_EVENTS_SHOWN),
    )


def _graph_info(job: Job) -> GraphInfo:
    """The graph of a job as clients see it."""
    vertices = [
        VertexInfo(**vertex.model_dump(include=set(VertexInfo.model_fields))) for vertex in job.graph.vertices
    ]
    return GraphInfo(
        job=job.id,
        vertices=vertices,
        edges=[EdgeInfo(**edge.model_dump(include=set(EdgeInfo.model_fields))) for edge in job.graph.edges],
        restart_strategy=job.graph.settings.restart_strategy,
        on_unavailable=job.graph.on_unavailable,
        settings=_settings(job.graph),
    )


def _settings(graph: JobGraph) -> list[SettingInfo]:
    """All of a job's settings, in the order in which they are declared."""
    given, follows = graph.settings, dict[str, str](on_unavailable=graph.on_unavailable)
    if given.schedule != "eager":
        follows["start_when"] = given.starts_when
    found = []
    for name, field in JobSettings.model_fields.items():
        value = getattr(given, name)
        found.append(
            SettingInfo(
                name=name,
                value=_setting_text(follows.get(name, value)),
                default=_setting_text(field.default),
                given=value != field.default,
            )
        )
    return found


def _setting_text(value: float | str | None) -> str:
    """Empty for None."""
    return "" if value is None else str(value)


def coordinator_snapshot(cluster: ClusterView, now: float, refused: dict[str, int]) -> CoordinatorSnapshot:
    """The values of ``/metrics``; ``refused`` counts refused connections by reason."""
    workers, jobs = list(cluster.workers), list(cluster.jobs.values())
    active = [job for job in jobs if not job.terminal]
    used = Holdings(active).slots
    alive = [worker for worker in workers if worker.state == "alive"]
    standby = sum(worker.slots for worker in takers(alive) if worker.standby)
    regular = [worker for worker in alive if not worker.standby]
    free = sum(worker.slots - used[worker.worker] for worker in takers(regular))
    taken = sum(used[worker.worker] for worker in regular)
    tasks: Counter[str] = Counter()
    for job in active:
        tasks.update(job.subtasks.states)
    return CoordinatorSnapshot(
        term=cluster.facts.term,
        journal_writable=not cluster.journal_problem,
        workers=tuple(worker.entry(now) for worker in workers),
        slots={"used": taken, "free": free, "standby": standby},
        jobs=dict(Counter(job.state for job in jobs)),
        tasks=dict(+tasks),
        recoveries=tuple(map(_recoveries, jobs)),
        connections_refused=dict(refused),
    )


def _recoveries(job: Job) -> JobRecoveries:
    losses = job.progress.losses()
    seconds = job.recoveries.seconds
    shown = not job.terminal or any(histogram.count for histogram in seconds.values())
    return JobRecoveries(
        job.id,
        job.name,
        dict(job.recoveries.restarts),
        losses.dropped,
        losses.state_rows,
        seconds if shown else {},
        job.recoveries.unfinished,
        len(job.links.infos()),
        job.pause.phase == "paused",
        0 if job.terminal else len(job.holders.unprotected()),
        job.cuts.info().taken_at,
        job.cuts.failed,
        job.fallback.count,
        {} if job.terminal else _holders(job),
    )


def _holders(job: Job) -> dict[tuple[str, int, int], int]:
    return {
        (task.name, *key): job.holders.worker_of(key)
        for key, task in job.subtasks.items()
        if key in job.holders
    }
