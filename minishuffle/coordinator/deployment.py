"""From a job graph and a placement to one DeployTasks for each worker."""

from __future__ import annotations

from collections.abc import Sequence

from minishuffle.coordinator.placement import Placement
from minishuffle.dataflow.graph import JobGraph
from minishuffle.wire.messages import (
    DeployTasks,
    InputChannelSpec,
    InputSpec,
    OutputSpec,
    TaskSpec,
    WorkerAddress,
)

__all__ = ["FIRST_ATTEMPT", "deployments"]

FIRST_ATTEMPT = 1


def deployments(
    graph: JobGraph,
    placement: Placement,
    addresses: Sequence[WorkerAddress],
    *,
    term: int,
    job: str,
    name: str,
) -> dict[int, DeployTasks]:
    """What to send to each worker that takes part; ``addresses`` are of all of these."""
    tasks: dict[int, list[TaskSpec]] = {}
    for operator, vertex in enumerate(graph.vertices):
        for index in range(vertex.parallelism):
            tasks.setdefault(placement[index], []).append(_task(graph, placement, operator, index))
    settings = graph.settings.model_dump()
    return {
        worker: DeployTasks(
            term=term,
            job=job,
            name=name,
            settings=settings,
            programs={spec.operator: graph.vertices[spec.operator].program for spec in specs},
            tasks=specs,
            workers=list(addresses),
        )
        for worker, specs in sorted(tasks.items())
    }


def _task(graph: JobGraph, placement: Placement, operator: int, index: int) -> TaskSpec:
    vertex = graph.vertices[operator]
    inputs = [
        InputSpec(
            edge=edge,
            input=graph.edges[edge].input,
            channels=[
                InputChannelSpec(producer=producer, attempt=FIRST_ATTEMPT, worker=placement[producer])
                for producer in graph.producers_of(edge, index)
            ],
        )
        for edge in graph.inputs_of(operator)
    ]
    outputs = []
    for edge in graph.outputs_of(operator):
        consumers = graph.consumers_of(edge, index)
        outputs.append(OutputSpec(edge=edge, first=consumers.start, count=len(consumers)))
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
