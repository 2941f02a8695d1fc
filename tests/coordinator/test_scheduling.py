from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.scheduling import buffers_needed, check_buffers, place
from minishuffle.dataflow.graph import Edge, JobGraph, Vertex
from minishuffle.errors import ResourceExhausted


def graph_of(parallelism: int) -> JobGraph:
    vertex = Vertex(name="read", parallelism=parallelism, operators=["read"], is_source=True, program=b"")
    return JobGraph(vertices=[vertex], edges=[])


@pytest.mark.parametrize(
    ("free", "needed", "placement"),
    [
        ({1: 2, 2: 2}, 1, (1,)),
        ({1: 2, 2: 2}, 2, (1, 2)),
        ({1: 2, 2: 2}, 4, (1, 2, 1, 2)),
        ({1: 4, 2: 2}, 2, (1, 2)),
        ({1: 1, 2: 4}, 2, (2, 1)),
        ({1: 1, 2: 4}, 5, (2, 1, 2, 2, 2)),
        ({1: 0, 2: 1, 3: 1}, 2, (2, 3)),
    ],
)
def test_slots_are_spread(free: dict[int, int], needed: int, placement: tuple[int, ...]) -> None:
    assert place(free, 9, graph_of(needed)) == placement


@given(st.dictionaries(st.integers(1, 9), st.integers(0, 5), max_size=6), st.integers(1, 20))
def test_a_placement_is_even_and_within_what_is_free(free: dict[int, int], needed: int) -> None:
    if needed > sum(free.values()):
        with pytest.raises(ResourceExhausted):
            place(free, 30, graph_of(needed))
        return
    taken = Counter(place(free, 30, graph_of(needed)))
    assert taken.total() == needed
    assert all(taken[worker] <= free[worker] for worker in taken)
    roomy = [worker for worker in free if taken[worker] < free[worker]]
    assert all(taken[other] <= taken[worker] + 1 for worker in roomy for other in free)


def test_too_few_slots_show_the_arithmetic() -> None:
    with pytest.raises(ResourceExhausted) as raised:
        place({1: 2, 2: 0}, 4, graph_of(6))
    assert str(raised.value) == (
        "job needs 6 slots (greatest parallelism), 2 are free of 4: "
        "start more workers (--workers/--slots) or lower --parallelism"
    )


def test_only_remote_channels_need_exclusive_buffers(make_graph: Callable[..., JobGraph]) -> None:
    needs = buffers_needed(make_graph(4, 2), (1, 2, 2, 2))
    # Worker 1: gate of count[0] with 3 remote channels, output of read[0] to 2 consumers.
    assert needs[1].segments == (3 * 2 + 1) + (2 + 1)
    # Worker 2: gate of count[1] with 1 remote channel, outputs of read[1], read[2], read[3].
    assert needs[2].segments == (1 * 2 + 1) + 3 * (2 + 1)


@pytest.mark.parametrize("partitioner", ["hash", "rescale", "broadcast"])
@pytest.mark.parametrize(("sources", "sinks"), [(1, 1), (3, 5), (5, 3), (4, 2)])
def test_needs_equal_the_sum_over_subtasks(
    make_graph: Callable[..., JobGraph], partitioner: str, sources: int, sinks: int
) -> None:
    graph = make_graph(sources, sinks, partitioner, buffers_per_channel=3)
    placement = tuple(1 + index % 3 for index in range(graph.slots_needed))
    expected: Counter[int] = Counter()
    for index in range(sinks):
        remote = [p for p in graph.producers_of(0, index) if placement[p] != placement[index]]
        expected[placement[index]] += 3 * len(remote) + 1
    for index in range(sources):
        expected[placement[index]] += len(graph.consumers_of(0, index)) + 1
    assert {worker: need.segments for worker, need in buffers_needed(graph, placement).items()} == expected


def test_too_few_buffers_show_the_arithmetic(make_graph: Callable[..., JobGraph]) -> None:
    needs = buffers_needed(make_graph(4, 4), (1, 2, 1, 2))
    # 2 gates with 2 remote channels each, and 2 outputs to 4 consumers each.
    assert needs[1].segments == 2 * (2 * 2 + 1) + 2 * (4 + 1) == 20
    check_buffers(needs, {1: 20, 2: 20}, {1: 64, 2: 64})
    with pytest.raises(ResourceExhausted) as raised:
        check_buffers(needs, {1: 20, 2: 19}, {1: 64, 2: 64})
    assert str(raised.value) == (
        "job needs 20 network buffers on worker 2, 19 are free of 64 "
        "(2 x (input 0 of count: 2 channels x 2 exclusive + 1 floating = 5) = 10; "
        "2 x (output of read: 4 consumers + 1 = 5) = 10): raise network_memory_bytes of the workers "
        "(--network-memory-bytes) or lower --parallelism"
    )


def test_the_arithmetic_of_a_large_job_is_cut() -> None:
    count = 12
    vertices = [
        Vertex(name=f"v{i}", parallelism=1, operators=["v"], is_source=i == 0, program=b"")
        for i in range(count)
    ]
    edges = [Edge(source=i, target=i + 1, partitioner="hash") for i in range(count - 1)]
    needs = buffers_needed(JobGraph(vertices=vertices, edges=edges), (1,))
    assert needs[1].segments == 11 * 1 + 11 * 2
    assert needs[1].arithmetic().endswith("; and 14 more")
