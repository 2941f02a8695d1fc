"""Which vertices may be deployed once something stands in their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.scheduling.firstoutput import FirstOutputs
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex


def graph(*edges: str, start_when: str = "all") -> JobGraph:
    """Edges as ``0-1``, a pipelined one, and ``0=1``, blocking."""
    count = 1 + max((int(edge[end]) for edge in edges for end in (0, 2)), default=0)
    vertices = [
        Vertex(
            name=f"v{number}",
            parallelism=2,
            operators=[],
            is_source=not any(int(edge[2]) == number for edge in edges),
            program=b"",
        )
        for number in range(count)
    ]
    kinds = {"-": "pipelined_bounded", "=": "blocking"}
    return JobGraph(
        vertices=vertices,
        edges=[
            Edge.model_validate(
                {"source": edge[0], "target": edge[2], "partitioner": "hash", "kind": kinds[edge[1]]}
            )
            for edge in edges
        ],
        settings=JobSettings.model_validate({"schedule": "first_output", "start_when": start_when}),
    )


def due(given: JobGraph, *readable: int) -> list[int]:
    """Of all vertices, while there is something in these edges."""
    waiting = range(len(given.vertices))
    return FirstOutputs(given).due(waiting, readable.__contains__)


def test_sources_wait_for_nothing_and_others_for_their_input() -> None:
    chain = graph("0-1", "1-2")
    assert due(chain) == [0]
    assert due(chain, 0) == [0, 1]
    assert due(chain, 0, 1) == [0, 1, 2]
    assert FirstOutputs(chain).due([2], {0}.__contains__) == [], "one that waits for another"


@pytest.mark.parametrize(("start_when", "expected"), [("any", [0, 1, 2]), ("all", [0, 1])])
def test_any_input_will_do_or_all_are_waited_for(start_when: str, expected: list[int]) -> None:
    join = graph("0-2", "1-2", start_when=start_when)
    assert due(join, 0) == expected
    assert due(join, 0, 1) == [0, 1, 2]


@pytest.mark.parametrize(
    ("edges", "readable", "starts"),
    [
        # A source that feeds the join, and what is before the other input of that.
        (["0-1", "0-2", "1-2"], [1], True),
        # Two joins, each of which what feeds the other waits for.
        (["0-2", "1-2", "0-3", "1-3"], [0], True),
        (["0-2", "5-2", "0-4", "1-3", "1-5", "4-3"], [0], True),
        # An input that nothing but the join connects with the others counts by itself.
        (["0-2", "1-2", "2-3"], [0], False),
        (["0-1", "0-2", "1-2", "3-2"], [0, 1, 2], False),
        (["0-1", "0-2", "1-2", "3-2"], [1, 3], True),
        # Who reads what is stored waits for who stores it.
        (["0=1", "0-2", "1-2"], [1], True),
        # It holds nobody up, and all of it is waited for.
        (["0-1", "0=2", "1=2"], [1], False),
        (["0-1", "0=2", "1=2"], [1, 2], True),
        # Unless who stores it would wait for the join.
        (["0-1", "1=2", "0-2"], [2], True),
    ],
)
def test_inputs_that_others_join_count_as_one(edges: list[str], readable: list[int], starts: bool) -> None:
    """The join is vertex 2."""
    assert (2 in due(graph(*edges), *readable)) is starts


class Run:
    """Vertices that emit at their end alone, once all that they read has ended, or as soon as anything has
    come; each edge that nobody reads has room for one row, and then its producer stands still."""

    def __init__(self, given: JobGraph, at_end: Iterable[int], random: Random) -> None:
        self.graph = given
        self.starts = FirstOutputs(given)
        self.at_end = set(at_end)
        self.random = random
        self.deployed: set[int] = set()
        self.finished: set[int] = set()
        self.written: dict[int, int] = dict.fromkeys(range(len(given.edges)), 0)
        self.rows = dict.fromkeys(range(len(given.vertices)), 3)
        """What each has yet to write over every edge."""

    def has_something(self, number: int) -> bool:
        source = self.graph.edges[number].source
        if number in self.graph.kept_edges():
            return source in self.finished
        return self.written[number] > 0 or source in self.finished

    def may_write(self, vertex: int) -> bool:
        edges = self.graph.edges
        inputs = self.graph.inputs_of(vertex)
        has_input = not inputs or any(map(self.has_something, inputs))
        if vertex in self.at_end:
            has_input = all(edges[number].source in self.finished for number in inputs)
        room = all(
            edges[number].target in self.deployed
            or number in self.graph.kept_edges()
            or not self.written[number]
            for number in self.graph.outputs_of(vertex)
        )
        return has_input and room and self.rows[vertex] > 0

    def may_finish(self, vertex: int) -> bool:
        inputs = self.graph.inputs_of(vertex)
        ended = all(self.graph.edges[number].source in self.finished for number in inputs)
        return ended and not self.rows[vertex]

    def step(self) -> bool:
        """Anything that may happen; False: nothing can."""
        waiting = [each for each in self.rows if each not in self.deployed]
        moves = [(self.deployed.add, each) for each in self.starts.due(waiting, self.has_something)]
        for vertex in self.deployed - self.finished:
            moves += [(self.write, vertex)] if self.may_write(vertex) else []
            moves += [(self.finished.add, vertex)] if self.may_finish(vertex) else []
        if moves:
            move, vertex = self.random.choice(moves)
            move(vertex)
        return bool(moves)

    def write(self, vertex: int) -> None:
        self.rows[vertex] -= 1
        for number in self.graph.outputs_of(vertex):
            self.written[number] += 1


@given(st.data())
def test_no_job_waits_for_itself(data: st.DataObject) -> None:
    """Of whatever shape, whatever of it emits at its end alone, and in whatever order."""
    count = data.draw(st.integers(2, 7))
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=10, unique=True))
    edges = [f"{one}{data.draw(st.sampled_from('---='))}{other}" for one, other in chosen]
    at_end = data.draw(st.sets(st.integers(0, count - 1)))
    run = Run(graph(*edges), at_end, Random(data.draw(st.integers(0, 1_000))))
    while run.step():
        pass
    assert run.finished == set(run.rows)
