"""What a job will do, before anything runs: its chains, the exchanges between them, and its stages."""

from __future__ import annotations

from typing import Any

from minishuffle.dataflow.graph import JobGraph
from minishuffle.dataflow.stages import slots_needed, stages_of

__all__ = ["plan_lines", "plan_map"]


def plan_map(graph: JobGraph) -> dict[str, Any]:
    """For JSON."""
    names = [vertex.name for vertex in graph.vertices]
    return {
        "operators": [" -> ".join(vertex.operators) for vertex in graph.vertices],
        "exchanges": [
            {
                "source": names[edge.source],
                "target": names[edge.target],
                "partitioner": edge.partitioner,
                "kind": edge.kind,
                "because_of": edge.because_of,
            }
            for edge in graph.edges
        ],
        "schedule": graph.settings.schedule,
        "start_when": None if graph.settings.schedule == "eager" else graph.settings.starts_when,
        "stages": [
            {"operators": [names[vertex] for vertex in stage.vertices], "after": list(stage.needs)}
            for stage in stages_of(graph)
        ],
        "slots": slots_needed(graph),
    }


def plan_lines(graph: JobGraph) -> list[str]:
    """For a reader."""
    lines = ["operators (one line for each thread):"]
    lines += [f"  {' -> '.join(vertex.operators)}" for vertex in graph.vertices]
    if graph.edges:
        lines += ["", "exchanges:", *(f"  {_exchange(graph, number)}" for number in range(len(graph.edges)))]
    return [*lines, "", *_schedule(graph)]


def _exchange(graph: JobGraph, number: int) -> str:
    edge = graph.edges[number]
    text = f"{_ends(graph, number)}: {edge.partitioner}, {edge.kind}"
    if edge.because_of is not None:
        text += f" (since it joins both ends of {_ends(graph, edge.because_of)}, which is blocking)"
    return text


def _ends(graph: JobGraph, number: int) -> str:
    edge = graph.edges[number]
    return f"{graph.vertices[edge.source].name} => {graph.vertices[edge.target].name}"


def _schedule(graph: JobGraph) -> list[str]:
    settings, slots = graph.settings, slots_needed(graph)
    noun = "slot" if slots == 1 else "slots"
    if settings.schedule == "eager":
        return [f"schedule eager: all at once, {slots} {noun}"]
    if settings.schedule == "first_output":
        return [
            f"schedule first_output: each when {settings.starts_when} of its inputs have rows, {slots} {noun}"
        ]
    if all(edge.kind != "blocking" for edge in graph.edges):
        return [f"schedule stages is eager here, as no exchange is blocking: all at once, {slots} {noun}"]
    lines = [
        f"schedule stages: each when {settings.starts_when} of its blocking inputs are complete, "
        f"{slots} {noun}"
    ]
    for number, stage in enumerate(stages_of(graph)):
        after = f", after {', '.join(str(each + 1) for each in stage.needs)}" if stage.needs else ""
        names = "; ".join(graph.vertices[vertex].name for vertex in stage.vertices)
        lines.append(f"  {number + 1}: {names}{after}")
    return lines
