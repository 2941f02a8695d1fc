from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.scheduling.placement import buffers_needed, check_buffers, place, worker_need
from minishuffle.errors import ResourceExhausted
from minishuffle.plan.graph import Edge, JobGraph, Vertex


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
    placement = place(free, 30, graph_of(needed))
    taken = Counter(placement)
    assert taken.total() == needed
    before: Counter[int] = Counter()
    for worker in placement:
        open_workers = [other for other in free if before[other] < free[other]]
        assert worker == min(open_workers, key=lambda each: (before[each], before[each] - free[each], each))
        before[worker] += 1
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


def test_every_channel_needs_exclusive_buffers_wherever_its_producer_is(
    make_graph: Callable[..., JobGraph],
) -> None:
    needs = buffers_needed(make_graph(4, 2), (1, 2, 2, 2))
    # Worker 1: gate of count[0] with 4 channels, output of read[0] to 2 consumers.
    assert needs[1].segments == (4 * 2 + 1) + (2 + 1)
    # Worker 2: gate of count[1] with 4 channels, outputs of read[1], read[2], read[3].
    assert needs[2].segments == (4 * 2 + 1) + 3 * (2 + 1)


def test_a_job_that_restarts_needs_room_for_one_more_task_the_largest(
    make_graph: Callable[..., JobGraph],
) -> None:
    needs = buffers_needed(make_graph(4, 2, restart_strategy="individual"), (1, 2, 2, 2))
    assert needs[1].segments == (4 * 2 + 1) + (2 + 1) + (4 * 2 + 1)
    assert needs[2].segments == (4 * 2 + 1) + 3 * (2 + 1) + (4 * 2 + 1)
    assert "a restart of count beside an attempt that does not stop = 9" in needs[1].arithmetic()


def test_a_side_that_is_kept_on_the_disk_needs_no_buffers_where_it_is_written(
    make_graph: Callable[..., JobGraph],
) -> None:
    two = make_graph(1, 1, restart_strategy="individual")
    edges = [*two.edges, Edge(source=2, target=1, partitioner="broadcast", input=1)]
    graph = two.model_copy(update={"vertices": [*two.vertices, two.vertices[0]], "edges": edges})
    assert graph.kept_edges() == {1}
    # The gates of count with one channel each, the output of read, and room for count once more.
    assert worker_need(graph, [0]).segments == 2 * (2 + 1) + (1 + 1) + 2 * (2 + 1)


def test_what_a_worker_needs_is_the_sum_over_its_slots(make_graph: Callable[..., JobGraph]) -> None:
    graph = make_graph(4, 2)
    parts = [worker_need(graph, [slot]).segments for slot in range(4)]
    assert worker_need(graph, range(4)).segments == sum(parts)
    assert buffers_needed(graph, (1, 2, 1, 2))[2].segments == parts[1] + parts[3]


@pytest.mark.parametrize("partitioner", ["hash", "rescale", "broadcast"])
@pytest.mark.parametrize(("sources", "sinks"), [(1, 1), (3, 5), (5, 3), (4, 2)])
def test_needs_equal_the_sum_over_subtasks(
    make_graph: Callable[..., JobGraph], partitioner: str, sources: int, sinks: int
) -> None:
    graph = make_graph(sources, sinks, partitioner, buffers_per_channel=3)
    placement = tuple(1 + index % 3 for index in range(graph.slots_needed))
    expected: Counter[int] = Counter()
    for index in range(sinks):
        expected[placement[index]] += 3 * len(graph.producers_of(0, index)) + 1
    for index in range(sources):
        expected[placement[index]] += len(graph.consumers_of(0, index)) + 1
    assert {worker: need.segments for worker, need in buffers_needed(graph, placement).items()} == expected


def test_too_few_buffers_show_the_arithmetic(make_graph: Callable[..., JobGraph]) -> None:
    needs = buffers_needed(make_graph(4, 4), (1, 2, 1, 2))
    # 2 gates with 4 channels each, and 2 outputs to 4 consumers each.
    assert needs[1].segments == 2 * (4 * 2 + 1) + 2 * (4 + 1) == 28
    check_buffers(needs, {1: 28, 2: 28}, {1: 64, 2: 64})
    with pytest.raises(ResourceExhausted) as raised:
        check_buffers(needs, {1: 28, 2: 27}, {1: 64, 2: 64})
    assert str(raised.value) == (
        "job needs 28 network buffers on worker 2, 27 are free of 64 "
        "(2 x (input 0 of count: 4 channels x 2 exclusive + 1 floating = 9) = 18; "
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
    assert needs[1].segments == 11 * (2 + 1) + 11 * 2 + (2 + 1 + 2)
    assert needs[1].arithmetic().endswith("; and 15 more")
