"""The vertices of a job that may be deployed on the schedule ``first_output``. Pure.

A vertex without inputs is deployed at once. Any other vertex is deployed when one of its inputs is ready
(``any``), or each of them is (``all``). An input is ready when one of its producers has written the first
buffer of a pipelined partition, or when all partitions of a stored edge are complete. An input without rows
is ready at its end. Slots are held from the submission on; rows wait for consumers that are not deployed yet,
and none is dropped. (Flink had this schedule with ``any`` input as ``ScheduleMode.LAZY_FROM_SOURCES``.)

With ``all``, a vertex that waits for one input stops the producers of another once that is full. If it waited
for these producers, it would wait forever. Example: a source feeds a join directly, and through an
aggregation that emits at its end. So inputs whose producers are connected with each other, even without the
vertex and in any direction, form a group, and the first ready input of a group is enough. Producers of an
input in a group of its own never wait for the vertex, nor for tasks that wait for it. Stored inputs block no
producer, so each is waited for, unless it is in a group with a pipelined input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minishuffle.plan.graph import JobGraph

__all__ = ["FirstOutputs"]


class FirstOutputs:
    """The deployment of a job's vertices by first output; on another schedule no vertex waits for it."""

    def __init__(self, graph: JobGraph) -> None:
        self.is_used = graph.settings.schedule == "first_output"
        self.ahead: set[int] = set()
        """Vertices that no longer wait for inputs, because workers with rows for them are draining, or retain
        much."""
        self._kept = graph.kept_edges()
        vertices = range(len(graph.vertices)) if self.is_used else ()
        if graph.settings.starts_when == "any":
            inputs = [graph.inputs_of(vertex) for vertex in vertices]
            self._wanted = [[edges] if edges else [] for edges in inputs]
        else:
            self._wanted = [self._separate(graph, vertex) for vertex in vertices]

    def _separate(self, graph: JobGraph, vertex: int) -> list[list[int]]:
        """The groups of a vertex's inputs; one input of each group must be ready."""
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

    def is_stored(self, edge: int) -> bool:
        """Whether an input is ready only once all of it is there."""
        return edge in self._kept

    def go_ahead(self, vertices: Iterable[int]) -> None:
        """These vertices no longer wait for inputs."""
        self.ahead.update(vertices)

    def due(self, waiting: Iterable[int], has_something: Callable[[int], bool]) -> list[int]:
        """The waiting vertices that may be deployed.

        Args:
            has_something: whether an edge is ready.
        """
        return [each for each in waiting if not self.missing(each, has_something)]

    def missing(self, vertex: int, has_something: Callable[[int], bool]) -> list[list[int]]:
        """The groups of edges without a ready one, for which a vertex waits."""
        wanted = [] if vertex in self.ahead else self._wanted[vertex]
        return [edges for edges in wanted if not any(map(has_something, edges))]
