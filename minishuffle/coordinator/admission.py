"""Whether a submitted job is let in, and where it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from minishuffle.coordinator.jobs import Job
from minishuffle.coordinator.placement import Placement, buffers_needed, check_buffers, place
from minishuffle.coordinator.workers import Worker
from minishuffle.dataflow.arguments import checked_job_name
from minishuffle.dataflow.graph import JobGraph
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.wire.messages import SubmitJob

__all__ = ["admit", "checked_graph", "segments_required", "slots_used"]


def checked_graph(message: SubmitJob, python: str) -> JobGraph:
    """The graph of a submission; ``python`` is the cluster's major.minor.

    Raises:
        UsageError: the name does not fit, the client's Python is another one, or the graph makes no sense.
    """
    if message.python != python:
        raise UsageError(
            f"the job was made with Python {message.python[:20]}, this cluster runs Python {python}, and "
            f"functions are pickled between them: submit it with Python {python}"
        )
    checked_job_name(message.name)
    graph = JobGraph.from_bytes(message.graph)
    if not graph.vertices:
        raise InvalidGraph("the job has no operators: give it a source and a sink")
    return graph


def slots_used(jobs: Iterable[Job]) -> Counter[int]:
    """Slots that these jobs hold, by worker."""
    used: Counter[int] = Counter()
    for job in jobs:
        used.update(job.slots_held())
    return used


def segments_required(jobs: Iterable[Job]) -> Counter[int]:
    """Segments that these jobs require, by worker."""
    required: Counter[int] = Counter()
    for job in jobs:
        required.update(job.segments_held())
    return required


def admit(
    graph: JobGraph, workers: Sequence[Worker], jobs: Sequence[Job]
) -> tuple[Placement, dict[int, int]]:
    """Where the job goes beside ``jobs``, and how many segments it requires on each worker.

    Raises:
        ResourceExhausted: it does not fit; with the arithmetic.
    """
    used, required = slots_used(jobs), segments_required(jobs)
    free = {worker.worker: max(0, worker.slots - used[worker.worker]) for worker in workers}
    placement = place(free, sum(worker.slots for worker in workers), graph)
    needs = buffers_needed(graph, placement)
    total = {worker.worker: worker.about.segments for worker in workers}
    check_buffers(needs, {worker: total[worker] - required[worker] for worker in total}, total)
    return placement, {worker: need.segments for worker, need in needs.items()}
