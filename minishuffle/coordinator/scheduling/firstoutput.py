"""Which vertices of a job on the schedule ``first_output`` may be deployed. Pure.

A vertex without inputs is deployed at once, any other when something stands in one of its inputs (``any``) or
in each (``all``): the first buffer of a pipelined partition, of whichever producer, or all of an edge whose
partitions are stored. An input without a row has its end. Slots are held from the submission on; rows wait
for consumers that are not there, and none is dropped. (Flink had it as ``ScheduleMode.LAZY_FROM_SOURCES``,
where any input would do.)

With ``all``, a vertex that waits for one input holds up those who write another, once that is full. If it was
waiting for them, that would be for ever: think of a source that feeds a join, and an aggregation before its
other input that emits at its end. So inputs count as one that edges join also without the vertex, whichever
way these go: the first of them that has something is enough. What lies beyond an input that counts by itself
then never waits for the vertex, nor for what waits for it. What is stored holds nobody up: all of it is
waited for, unless it counts with a pipelined edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minishuffle.plan.graph import JobGraph

__all__ = ["FirstOutputs"]


class FirstOutputs:
    """When each vertex of a job is deployed; of a job on another schedule none waits for this."""

    def __init__(self, graph: JobGraph) -> None:
        self.is_used = graph.settings.schedule == "first_output"
        self.ahead: set[int] = set()
        """Vertices that wait for no input any more, since workers are to leave which have some."""
        self._kept = graph.kept_edges()
        vertices = range(len(graph.vertices)) if self.is_used else ()
        if graph.settings.starts_when == "any":
            inputs = [graph.inputs_of(vertex) for vertex in vertices]
            self._wanted = [[edges] if edges else [] for edges in inputs]
        else:
            self._wanted = [self._separate(graph, vertex) for vertex in vertices]

    def _separate(self, graph: JobGraph, vertex: int) -> list[list[int]]:
        """Sets of inputs of a vertex, in each of which one has to have something."""
        part_of = list(range(len(graph.vertices)))
        for edge in graph.edges:
            if vertex not in (edge.source, edge.target):
                one, other = part_of[edge.source], part_of[edge.target]
                part_of = [one if part == other else part for part in part_of]
        parts: dict[int, list[int]] = {}
        for number in graph.inputs_of(vertex):
            parts.setdefault(part_of[graph.edges[number].source], []).append(number)
        found = []
        for edges in parts.values():
            pipelined = [number for number in edges if number not in self._kept]
            found += [pipelined] if pipelined else [[number] for number in edges]
        return found

    def go_ahead(self, vertices: Iterable[int]) -> None:
        """These wait for no input any more."""
        self.ahead.update(vertices)

    def due(self, waiting: Iterable[int], has_something: Callable[[int], bool]) -> list[int]:
        """Those of the vertices that wait which may be deployed.

        Args:
            has_something: whether there is something to read in an edge.
        """
        return [each for each in waiting if not self.missing(each, has_something)]

    def missing(self, vertex: int, has_something: Callable[[int], bool]) -> list[list[int]]:
        """What a vertex waits for: one of each of these lists of edges is to have something."""
        wanted = [] if vertex in self.ahead else self._wanted[vertex]
        return [edges for edges in wanted if not any(map(has_something, edges))]
