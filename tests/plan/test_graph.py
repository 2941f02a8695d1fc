"""Edge patterns: who feeds whom, computed and never listed; and graphs that contradict themselves."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from minishuffle import limits
from minishuffle.errors import InvalidGraph
from minishuffle.limits import PARALLELISM_MAX
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex

ALL_TO_ALL = ["hash", "rebalance", "broadcast", "custom"]
SIZES = list(product(range(1, 13), repeat=2))


def vertex(parallelism: int, name: str = "step") -> Vertex:
    return Vertex(name=name, parallelism=parallelism, operators=[name], is_source=False, program=b"")


def two(producers: int, consumers: int, partitioner: Any) -> JobGraph:
    return JobGraph(
        vertices=[vertex(producers), vertex(consumers)],
        edges=[Edge(source=0, target=1, partitioner=partitioner)],
    )


def pairs(graph: JobGraph, m: int, n: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(producer, consumer) as the producers say, and as the consumers say."""
    told = {(i, j) for i in range(m) for j in graph.consumers_of(0, i)}
    heard = {(i, j) for j in range(n) for i in graph.producers_of(0, j)}
    return told, heard


@pytest.mark.parametrize("partitioner", ALL_TO_ALL)
def test_all_to_all_edges_join_every_pair(partitioner: str) -> None:
    for m, n in SIZES:
        told, heard = pairs(two(m, n, partitioner), m, n)
        assert told == heard == set(product(range(m), range(n)))


def test_rescale_is_seen_alike_from_both_ends() -> None:
    for m, n in SIZES:
        told, heard = pairs(two(m, n, "rescale"), m, n)
        assert told == heard, (m, n)
        assert {i for i, _ in told} == set(range(m)), (m, n)
        assert {j for _, j in told} == set(range(n)), (m, n)


def test_rescale_is_balanced_and_joins_no_more_than_it_must() -> None:
    for m, n in SIZES:
        graph = two(m, n, "rescale")
        consumers = [len(graph.consumers_of(0, i)) for i in range(m)]
        producers = [len(graph.producers_of(0, j)) for j in range(n)]
        for degrees in (consumers, producers):
            assert max(degrees) - min(degrees) <= 1, (m, n)
        assert sum(consumers) == max(m, n)


@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_forward_joins_equal_numbers(size: int) -> None:
    graph = two(size, size, "forward")
    for index in range(size):
        assert list(graph.consumers_of(0, index)) == list(graph.producers_of(0, index)) == [index]


def test_neighbours_of_a_great_graph_are_computed_not_stored() -> None:
    graph = two(PARALLELISM_MAX, PARALLELISM_MAX, "hash")
    assert len(graph.consumers_of(0, PARALLELISM_MAX - 1)) == PARALLELISM_MAX
    assert len(graph.to_bytes()) < 1000


def test_edges_of_a_vertex_and_slots() -> None:
    edges = [(0, 2), (1, 2), (2, 3), (2, 4)]
    graph = JobGraph(
        vertices=[vertex(p) for p in (1, 5, 2, 3, 2)],
        edges=[Edge(source=source, target=target, partitioner="rebalance") for source, target in edges],
    )
    assert graph.inputs_of(2) == [0, 1]
    assert graph.outputs_of(2) == [2, 3]
    assert graph.inputs_of(0) == graph.outputs_of(4) == []
    assert graph.slots_needed == 5


def test_each_slot_group_has_slots_of_its_own() -> None:
    """Widths 2 and 3 in one group, 2 and 1 in the other."""
    vertices = [
        vertex(width).model_copy(update={"slot_group": group})
        for width, group in [(2, ""), (2, "b"), (3, ""), (1, "b")]
    ]
    graph = JobGraph(vertices=vertices, edges=[])
    assert (graph.slots_needed, graph.first_slots()) == (5, [0, 3, 0, 3])
    there = [graph.in_slot(slot) for slot in range(5)]
    assert there == [[(0, 0), (2, 0)], [(0, 1), (2, 1)], [(2, 2)], [(1, 0), (3, 0)], [(1, 1)]]
    assert graph.slots_of([1, 3]) == 2


def test_a_graph_survives_the_wire() -> None:
    graph = two(3, 2, "rescale").model_copy(update={"settings": JobSettings(buffer_timeout=-1)})
    assert JobGraph.from_bytes(graph.to_bytes()) == graph


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\xa5words", two(1, 1, "hash").to_bytes()[:-1]])
def test_other_bytes_are_no_graph(data: bytes) -> None:
    with pytest.raises(InvalidGraph, match="job graph cannot be read"):
        JobGraph.from_bytes(data)


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0), (-1, 0)])
def test_an_edge_must_join_vertices_that_exist(source: int, target: int) -> None:
    with pytest.raises(ValidationError, match="which does not exist"):
        JobGraph(
            vertices=[vertex(1), vertex(1)],
            edges=[Edge(source=source, target=target, partitioner="hash")],
        )


def test_forward_needs_equal_parallelisms() -> None:
    with pytest.raises(ValidationError, match="forward edge 0 joins different parallelisms"):
        two(2, 3, "forward")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({f"key {n}": 0 for n in range(1_000)}, "a map has 1,000 keys"),
        ({"vertices": [{}] * 5_000, "edges": []}, "cannot be read: vertices.0.name: Field required"),
        ({"vertices": [], "edges": [[]] * 60_000}, "it has more than 65,536 values"),
    ],
)
def test_what_a_graph_can_have_done_is_bounded(fields: Any, text: str) -> None:
    with pytest.raises(InvalidGraph, match=text) as caught:
        JobGraph.from_bytes(msgpack.packb(fields))
    assert len(str(caught.value).splitlines()) == 1


# --- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"), [({}, "adaptive"), ("adaptive", "adaptive"), (0, 0), (-1, -1), ("0.25", 0.25)]
)
def test_a_buffer_timeout_is_adaptive_or_seconds(given: Any, kept: Any) -> None:
    settings = JobSettings.model_validate({"buffer_timeout": given} if given != {} else {})
    assert settings.buffer_timeout == kept
    assert JobSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("given", ["soon", -2, -0.5, float("nan"), None])
def test_any_other_buffer_timeout_is_refused(given: Any) -> None:
    with pytest.raises(ValidationError, match="buffer_timeout"):
        JobSettings.model_validate({"buffer_timeout": given})


@pytest.mark.parametrize("name", ["buffers_per_channel", "floating_buffers_per_gate"])
def test_a_channel_never_has_more_buffers_than_credit_can_name(name: str) -> None:
    JobSettings.model_validate({name: limits.JOB_BUFFERS_MAX})
    with pytest.raises(ValidationError, match=f"{name}\n.*less than or equal to"):
        JobSettings.model_validate({name: limits.JOB_BUFFERS_MAX + 1})


def kept(edges: list[Edge], *, endless: set[int], parallelism: int = 2, **settings: Any) -> frozenset[int]:
    count = 1 + max(max(edge.source, edge.target) for edge in edges)
    vertices = [
        Vertex(
            name=f"v{n}",
            parallelism=parallelism,
            operators=[],
            is_source=False,
            bounded=n not in endless,
            program=b"",
        )
        for n in range(count)
    ]
    return JobGraph(vertices=vertices, edges=edges, settings=JobSettings(**settings)).kept_edges()


MAIN = Edge(source=0, target=2, partitioner="hash")
SIDE = Edge(source=1, target=2, input=1, partitioner="broadcast")


def test_a_bounded_side_is_kept_if_tasks_restart() -> None:
    assert kept([MAIN, SIDE], endless={0, 2}) == {1}
    assert kept([MAIN, SIDE], endless={0, 1, 2}) == frozenset()
    assert kept([MAIN, SIDE], endless={0, 2}, restart_strategy="none") == frozenset()
    passed_on = SIDE.model_copy(update={"input": 0})
    assert kept([MAIN, passed_on], endless={0, 2}) == frozenset(), "rows would go on twice"


@pytest.mark.parametrize(
    ("partitioner", "parallelism", "expected"),
    [("hash", 2, {1, 2}), ("forward", 2, {1, 2}), ("rebalance", 2, set()), ("rebalance", 1, {1, 2})],
)
def test_what_leads_to_a_side_is_kept_too_if_it_comes_out_the_same_again(
    partitioner: Any, parallelism: int, expected: set[int]
) -> None:
    before = Edge(source=3, target=1, partitioner=partitioner)
    assert kept([MAIN, SIDE, before], endless={0, 2}, parallelism=parallelism) == expected


def test_a_side_whose_producer_feeds_others_too_is_not_kept() -> None:
    other = Edge(source=1, target=3, partitioner="hash")
    assert kept([MAIN, SIDE, other], endless={0, 2}) == frozenset()
