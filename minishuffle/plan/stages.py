"""The stages of a job: what pipelined edges join runs at one time, what blocking edges join in turn.

A *stage* is a set of vertices that pipelined edges connect (Flink: a pipelined region, there of subtasks, in
``SchedulingPipelinedRegionComputeUtil``). Blocking edges lead from one stage to another; where they would
lead round in a circle, the stages on it are one, whose blocking edges hold no deployment back. So stages have
an order, and one that waits until all of its inputs are complete never waits for itself.

What a schedule does with them:

================  =========================================================================================
``eager``         all vertices are deployed at once; a consumer of a blocking edge waits on its worker
``first_output``  slots as with ``eager``; a vertex is deployed when something stands in an input of it, or in
                  each
``stages``        a stage is deployed as a whole, when its blocking inputs are complete (``all``), or one is
                  (``any``) and there are slots for all that the others wait for; it gives its slots back
                  when it has ended
================  =========================================================================================

A job without blocking edges has nothing to wait for: ``stages`` is ``eager`` then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from minishuffle.plan.graph import JobGraph

__all__ = ["Stage", "deploys_later", "is_staged", "slots_needed", "stages_of"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Vertices that run at one time, in the order of their numbers."""

    vertices: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    """Its blocking edges from other stages."""
    needs: tuple[int, ...] = ()
    """The stages that these come from, by their place in the order."""


def stages_of(graph: JobGraph) -> tuple[Stage, ...]:
    """Every vertex in one stage, and each stage behind those that it reads from; of those that could come
    next, the one of the lowest vertex does."""
    stage_of = {number: number for number in range(len(graph.vertices))}
    for edge in graph.edges:
        if edge.kind != "blocking":
            _merge(stage_of, (edge.source, edge.target))
    while True:
        before: dict[int, set[int]] = {stage: set() for stage in sorted(set(stage_of.values()))}
        for edge in graph.edges:
            if (source := stage_of[edge.source]) != (target := stage_of[edge.target]):
                before[target].add(source)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            _merge(stage_of, [vertex for vertex in stage_of if stage_of[vertex] in error.args[1]])
        else:
            return _ordered(graph, stage_of, before)


def _merge(stage_of: dict[int, int], vertices: tuple[int, ...] | list[int]) -> None:
    """The stages of these become one, named by its lowest vertex."""
    merged = {stage_of[vertex] for vertex in vertices}
    if len(merged) > 1:
        stage_of.update({each: min(merged) for each, stage in stage_of.items() if stage in merged})


def _ordered(
    graph: JobGraph, stage_of: Mapping[int, int], before: Mapping[int, set[int]]
) -> tuple[Stage, ...]:
    order: dict[int, int] = {}
    while len(order) < len(before):
        ready = next(stage for stage in before if stage not in order and before[stage] <= order.keys())
        order[ready] = len(order)
    found = []
    for stage in order:
        inputs = [
            number
            for number, edge in enumerate(graph.edges)
            if stage_of[edge.target] == stage != stage_of[edge.source]
        ]
        vertices = tuple(vertex for vertex in sorted(stage_of) if stage_of[vertex] == stage)
        needs = tuple(sorted(order[each] for each in before[stage]))
        found.append(Stage(vertices, tuple(inputs), needs))
    return tuple(found)


def is_staged(graph: JobGraph) -> bool:
    """Whether the job's stages are deployed one by one."""
    return graph.settings.schedule == "stages" and any(edge.kind == "blocking" for edge in graph.edges)


def deploys_later(graph: JobGraph) -> bool:
    """Whether subtasks of the job wait for their time, instead of being deployed at once."""
    return is_staged(graph) or graph.settings.schedule == "first_output"


def slots_needed(graph: JobGraph) -> int:
    """The least number of slots with which the job runs: those of all vertices; or if its stages are deployed
    one by one, of the largest stage beside those without an end, which give no slots back."""
    if not is_staged(graph):
        return graph.slots_needed
    stages = [stage.vertices for stage in stages_of(graph)]
    endless = [
        vertex
        for vertices in stages
        if not all(graph.vertices[each].bounded for each in vertices)
        for vertex in vertices
    ]
    return max(graph.slots_of([*vertices, *endless]) for vertices in stages)
