"""From a job graph and a placement to one DeployTasks for each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minishuffle.coordinator.jobs import Job
from minishuffle.coordinator.workers import Worker
from minishuffle.dataflow.arguments import checked_job_name
from minishuffle.dataflow.graph import JobGraph, Placement
from minishuffle.errors import InvalidGraph, ResourceExhausted, UsageError
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.wire.messages import (
    DeployTasks,
    InputSpec,
    OutputSpec,
    SubmitJob,
    TaskSpec,
    WorkerAddress,
)
from minishuffle.wire.packed import pack_placement

__all__ = [
    "BufferNeed",
    "admit",
    "buffers_needed",
    "check_buffers",
    "checked_graph",
    "deployments",
    "place",
    "segments_required",
    "slots_used",
]


# --- placement ------------------------------------------------------------------------------------
#
# Which slot of which worker runs what, and whether a job fits: pure arithmetic.
#
# Slots are shared: subtask ``i`` of every operator runs in the job's slot ``i``. A *placement* is a
# tuple with the worker id of each slot.


TERMS_SHOWN = 8
"""Terms of the arithmetic in an error; the largest come first."""


def place(free: Mapping[int, int], total: int, graph: JobGraph) -> Placement:
    """Spread the job's slots evenly over the workers.

    Args:
        free: free slots of each worker that is alive.
        total: all slots of these workers, used ones included.

    Raises:
        ResourceExhausted: there are not enough slots; with the arithmetic.
    """
    needed, available = graph.slots_needed, sum(free.values())
    if needed > available:
        raise ResourceExhausted(
            f"job needs {needed} slots (greatest parallelism), {available} are free of {total}: "
            "start more workers (--workers/--slots) or lower --parallelism"
        )
    taken: Counter[int] = Counter()
    slots: list[int] = []
    for _ in range(needed):
        open_workers = [worker for worker in free if taken[worker] < free[worker]]
        # The one with the fewest of this job; then the emptiest; then the lowest id.
        worker = min(open_workers, key=lambda w: (taken[w], taken[w] - free[w], w))
        taken[worker] += 1
        slots.append(worker)
    return tuple(slots)


@dataclass(slots=True)
class BufferNeed:
    """Segments that a job requires on one worker; ``terms`` counts equal parts of the sum."""

    segments: int = 0
    terms: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By (formula, segments of one)."""

    def add(self, formula: str, segments: int) -> None:
        self.segments += segments
        self.terms[formula, segments] += 1

    def arithmetic(self) -> str:
        """The sum as a reader can check it."""
        parts = sorted(self.terms.items(), key=lambda term: -term[0][1] * term[1])
        texts = [
            f"{formula} = {each}" if count == 1 else f"{count} x ({formula} = {each}) = {count * each}"
            for (formula, each), count in parts[:TERMS_SHOWN]
        ]
        if len(parts) > TERMS_SHOWN:
            texts.append(f"and {len(parts) - TERMS_SHOWN} more")
        return "; ".join(texts)


def buffers_needed(graph: JobGraph, placement: Placement) -> dict[int, BufferNeed]:
    """The least number of segments that each worker has to have for the job.

    An input gate needs ``remote channels x exclusive + 1``, one that other programs write to
    ``exclusive + 1``, a result partition ``consumers + 1``: the minimums with which a worker creates its
    local pools.
    """
    needs: dict[int, BufferNeed] = {worker: BufferNeed() for worker in sorted(set(placement))}
    exclusive = graph.settings.buffers_per_channel
    for vertex in graph.vertices:
        for worker in placement[: vertex.parallelism] if vertex.stream else ():
            formula = f"stream {vertex.stream}: {exclusive} exclusive + 1 floating"
            needs[worker].add(formula, exclusive + 1)
    for number, edge in enumerate(graph.edges):
        source, target = graph.vertices[edge.source], graph.vertices[edge.target]
        producers_on = Counter(placement[: source.parallelism])
        for index in range(target.parallelism):
            worker = placement[index]
            if edge.pointwise:
                remote = sum(placement[p] != worker for p in graph.producers_of(number, index))
            else:
                remote = source.parallelism - producers_on[worker]
            gate = f"input {edge.input} of {target.name}"
            formula = f"{gate}: {remote} channels x {exclusive} exclusive + 1 floating"
            needs[worker].add(formula, remote * exclusive + 1)
        for index in range(source.parallelism):
            consumers = len(graph.consumers_of(number, index))
            needs[placement[index]].add(f"output of {source.name}: {consumers} consumers + 1", consumers + 1)
    return needs


def check_buffers(needs: Mapping[int, BufferNeed], free: Mapping[int, int], total: Mapping[int, int]) -> None:
    """Compare with the segments of each worker that no other job requires.

    Raises:
        ResourceExhausted: they do not suffice on some worker; with the arithmetic of the first such.
    """
    for worker, need in needs.items():
        if need.segments > free[worker]:
            raise ResourceExhausted(
                f"job needs {need.segments} network buffers on worker {worker}, {free[worker]} are free of "
                f"{total[worker]} ({need.arithmetic()}): raise network_memory_bytes of the workers "
                "(--network-memory-bytes) or lower --parallelism"
            )


# --- admission ------------------------------------------------------------------------------------
#
# Whether a submitted job is let in, and where it goes.


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


# --- deployment -----------------------------------------------------------------------------------


def deployments(
    graph: JobGraph,
    placement: Placement,
    addresses: Sequence[WorkerAddress],
    *,
    term: int,
    job: str,
    name: str,
) -> dict[int, DeployTasks]:
    """What to send to each worker that takes part; ``addresses`` are of all of these.

    Each gets those of the workers at the other end of its channels, which may come to dial it or be dialed.
    """
    tasks: dict[int, list[TaskSpec]] = {}
    for operator, vertex in enumerate(graph.vertices):
        for index in range(vertex.parallelism):
            tasks.setdefault(placement[index], []).append(_task(graph, operator, index))
    settings = graph.settings.model_dump()
    tables = {
        edge.source: pack_placement(placement[: graph.vertices[edge.source].parallelism])
        for edge in graph.edges
    }
    ends = {worker: _workers_at_ends(specs, placement) for worker, specs in tasks.items()}
    return {
        worker: DeployTasks(
            term=term,
            job=job,
            name=name,
            settings=settings,
            programs={spec.operator: graph.vertices[spec.operator].program for spec in specs},
            tasks=specs,
            workers=[each for each in addresses if each.worker in ends[worker]],
            placement={spec.operator: tables[spec.operator] for task in specs for spec in task.inputs},
        )
        for worker, specs in sorted(tasks.items())
    }


def _workers_at_ends(specs: Sequence[TaskSpec], placement: Placement) -> set[int]:
    """Those of the producers and consumers of these tasks."""
    ranges = {(gate.first, gate.count) for spec in specs for gate in spec.inputs}
    ranges |= {(output.first, output.count) for spec in specs for output in spec.outputs}
    return {worker for first, count in ranges for worker in placement[first : first + count]}


def _task(graph: JobGraph, operator: int, index: int) -> TaskSpec:
    vertex = graph.vertices[operator]
    inputs, outputs = [], []
    for number in graph.inputs_of(operator):
        edge, producers = graph.edges[number], graph.producers_of(number, index)
        inputs.append(
            InputSpec(
                edge=number,
                input=edge.input,
                operator=edge.source,
                first=producers.start,
                count=len(producers),
            )
        )
    for number in graph.outputs_of(operator):
        consumers = graph.consumers_of(number, index)
        outputs.append(
            OutputSpec(
                edge=number, operator=graph.edges[number].target, first=consumers.start, count=len(consumers)
            )
        )
    return TaskSpec(
        operator=operator,
        name=vertex.name,
        index=index,
        parallelism=vertex.parallelism,
        attempt=FIRST_ATTEMPT,
        inputs=inputs,
        outputs=outputs,
        stream=vertex.stream,
        sink=vertex.sink,
        bounded=vertex.bounded,
    )
