from __future__ import annotations

from collections.abc import Callable

from minishuffle.coordinator.jobs.consumption import EndedChannels
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.scheduling.placement import buffers_needed, deployments
from minishuffle.plan.graph import Edge, JobGraph
from minishuffle.wire.messages import TaskAttempt, WorkerAddress

ADDRESSES = [WorkerAddress(worker=w, epoch=w, host="10.0.0.1", data_port=5000 + w) for w in (1, 2)]


def deploy(graph: JobGraph, placement: tuple[int, ...]):  # type: ignore[no-untyped-def]
    return deployments(graph, placement, ADDRESSES, term=3, job="j5", name="words")


def test_each_worker_gets_its_tasks_with_programs_and_addresses(make_graph: Callable[..., JobGraph]) -> None:
    messages = deploy(make_graph(2, 1), (1, 2))
    assert sorted(messages) == [1, 2]
    first, second = messages[1], messages[2]
    assert (first.term, first.job, first.name) == (3, "j5", "words")
    assert (first.workers, second.workers) == (ADDRESSES, ADDRESSES[:1])
    assert [(task.name, task.index, task.parallelism, task.attempt) for task in first.tasks] == [
        ("read", 0, 2, 1),
        ("count", 0, 1, 1),
    ]
    assert [(task.name, task.index) for task in second.tasks] == [("read", 1)]
    assert first.programs == {0: b"read", 1: b"count"}
    assert second.programs == {0: b"read"}
    assert first.settings == make_graph().settings.model_dump() | {"on_unavailable": "wait"}


def test_each_worker_gets_the_addresses_at_the_other_ends_of_its_channels(
    make_graph: Callable[..., JobGraph],
) -> None:
    addresses = [WorkerAddress(worker=w, epoch=w, host="10.0.0.1", data_port=5000 + w) for w in range(1, 5)]

    def workers(graph: JobGraph, placement: tuple[int, ...]) -> dict[int, list[int]]:
        messages = deployments(graph, placement, addresses, term=3, job="j5", name="words")
        return {to: [address.worker for address in each.workers] for to, each in messages.items()}

    assert workers(make_graph(4, 4, "forward"), (1, 2, 3, 4)) == {1: [1], 2: [2], 3: [3], 4: [4]}
    assert workers(make_graph(4, 2, "rescale"), (1, 2, 3, 4)) == {1: [1, 2], 2: [1, 3, 4], 3: [2], 4: [2]}
    assert workers(make_graph(2, 4, "rescale"), (1, 2, 3, 4)) == {1: [1, 2], 2: [1, 3, 4], 3: [2], 4: [2]}
    assert workers(make_graph(4, 1), (1, 2, 3, 4)) == {1: [1, 2, 3, 4], 2: [1], 3: [1], 4: [1]}


def test_channels_name_the_producers_worker(make_graph: Callable[..., JobGraph]) -> None:
    message = deploy(make_graph(3, 2), (1, 2, 1))[1]
    task = next(task for task in message.tasks if task.operator == 1)
    (gate,) = task.inputs
    assert (gate.edge, gate.input, gate.operator) == (0, 0, 0)
    assert list(message.channels(gate)) == [(0, 1, 1), (1, 1, 2), (2, 1, 1)]


def test_inputs_and_outputs_agree_for_every_pattern(make_graph: Callable[..., JobGraph]) -> None:
    for partitioner, sources, sinks in (
        ("hash", 3, 2),
        ("rescale", 5, 2),
        ("rescale", 2, 5),
        ("forward", 3, 3),
    ):
        placement = tuple(1 + i % 2 for i in range(max(sources, sinks)))
        tasks = [
            t for m in deploy(make_graph(sources, sinks, partitioner), placement).values() for t in m.tasks
        ]
        fed = {
            (task.index, consumer)
            for task in tasks
            for output in task.outputs
            for consumer in range(output.first, output.first + output.count)
        }
        read = {
            (producer, task.index)
            for task in tasks
            for gate in task.inputs
            for producer in range(gate.first, gate.first + gate.count)
        }
        assert fed == read
        assert {consumer for _, consumer in read} == set(range(sinks))


def test_producers_learn_what_to_do_with_rows_for_a_consumer_that_restarts(
    make_graph: Callable[..., JobGraph],
) -> None:
    def resolved(graph: JobGraph) -> set[object]:
        return {message.settings["on_unavailable"] for message in deploy(graph, (1, 2)).values()}

    graph = make_graph(2, 2)
    endless = graph.vertices[0].model_copy(update={"bounded": False})
    assert resolved(graph) == {"wait"}
    assert resolved(make_graph(2, 2, on_unavailable="drop")) == {"drop"}
    assert resolved(graph.model_copy(update={"vertices": [endless, graph.vertices[1]]})) == {"drop"}


def named(attempts: dict[TaskKey, int]) -> dict[TaskKey, TaskAttempt]:
    return {key: TaskAttempt(operator=key[0], index=key[1], attempt=n) for key, n in attempts.items()}


def test_one_task_is_deployed_with_the_attempts_of_those_that_read_it(
    make_graph: Callable[..., JobGraph],
) -> None:
    """Its worker may know nothing of the job so far, and lets nobody read whose attempt was not named."""
    graph = make_graph(2, 2)
    attempts = named({(0, 0): 2, (0, 1): 4, (1, 0): 2})
    (message,) = deployments(
        graph, (1, 2), ADDRESSES, term=3, job="j5", name="words", tasks=[(0, 0)], attempts=attempts
    ).values()
    assert [(each.operator, each.index, each.attempt) for each in message.attempts] == [(1, 0, 2)]


def test_one_task_is_deployed_with_the_attempts_of_those_that_it_reads(
    make_graph: Callable[..., JobGraph],
) -> None:
    graph = make_graph(3, 2)
    attempts = named({(0, 1): 4, (1, 0): 2, (1, 1): 3})
    (message,) = deployments(
        graph, (1, 2, 1), ADDRESSES, term=3, job="j5", name="words", tasks=[(1, 1)], attempts=attempts
    ).values()
    assert [(task.operator, task.index, task.attempt) for task in message.tasks] == [(1, 1, 3)]
    assert message.programs == {1: b"count"}
    assert [(each.operator, each.index, each.attempt) for each in message.attempts] == [(0, 1, 4)]
    assert list(message.channels(message.tasks[0].inputs[0])) == [(0, 1, 1), (1, 4, 2), (2, 1, 1)]


def test_a_producer_without_a_worker_is_asked_for_at_the_consumers_own(
    make_graph: Callable[..., JobGraph],
) -> None:
    (message,) = deployments(
        make_graph(2, 2),
        (1, 0),
        ADDRESSES[:1],
        term=3,
        job="j5",
        name="words",
        tasks=[(1, 0)],
        attempts={(0, 1): TaskAttempt(operator=0, index=1, attempt=2)},
    ).values()
    assert list(message.channels(message.tasks[0].inputs[0])) == [(0, 1, 1), (1, 2, 1)]
    assert message.workers == ADDRESSES[:1]


def test_both_ends_of_a_side_know_that_it_is_kept(make_graph: Callable[..., JobGraph]) -> None:
    graph = make_graph(restart_strategy="individual")
    side = graph.vertices[0].model_copy(update={"name": "side"})
    endless = graph.vertices[0].model_copy(update={"bounded": False})
    edges = [*graph.edges, Edge(source=2, target=1, input=1, partitioner="broadcast")]
    graph = graph.model_copy(update={"vertices": [endless, graph.vertices[1], side], "edges": edges})
    read, count, small = deploy(graph, (1, 2))[1].tasks
    assert [gate.kept for gate in count.inputs] == [False, True]
    assert [(output.kept, output.shared) for output in read.outputs] == [(False, False)]
    assert [(output.kept, output.shared) for output in small.outputs] == [(True, True)]


def test_tasks_go_to_the_slots_of_their_group(make_graph: Callable[..., JobGraph]) -> None:
    graph = make_graph(2, 2)
    apart = [vertex.model_copy(update={"slot_group": vertex.name}) for vertex in graph.vertices]
    graph = graph.model_copy(update={"vertices": apart})
    messages = deploy(graph, (1, 1, 2, 1))
    found = {
        worker: [(task.name, task.index, task.slot) for task in message.tasks]
        for worker, message in messages.items()
    }
    assert found == {1: [("read", 0, 0), ("read", 1, 1), ("count", 1, 3)], 2: [("count", 0, 2)]}
    (gate,) = next(task for task in messages[2].tasks).inputs
    assert list(messages[2].channels(gate)) == [(0, 1, 1), (1, 1, 1)]
    assert messages[2].workers == ADDRESSES[:1]
    assert {address.worker for address in messages[1].workers} == {1, 2}


def test_with_a_guarantee_exchanges_are_retained_and_nothing_is_left_out(
    make_graph: Callable[..., JobGraph],
) -> None:
    graph = make_graph(2, 2, restart_strategy="individual", guarantee="at_least_once")
    done = {(0, 0): EndedChannels({}, {}), (1, 0): EndedChannels({}, {})}
    (message,) = deployments(
        graph, (1, 1), ADDRESSES, term=3, job="j5", name="words", tasks=done, done=done
    ).values()
    (output,), (gate,) = message.tasks[0].outputs, message.tasks[1].inputs
    assert (output.retained, output.kept, output.closed) == (True, False, [])
    assert (gate.guaranteed, gate.waits, gate.kept, gate.strict, gate.ended) == (True, True, False, False, [])
    assert gate.redealt == (graph.edges[0].partitioner not in ("hash", "broadcast"))


def test_what_is_retained_takes_no_buffers_of_its_own(make_graph: Callable[..., JobGraph]) -> None:
    def segments(guarantee: str) -> int:
        graph = make_graph(2, 2, restart_strategy="individual", guarantee=guarantee)
        return sum(need.segments for need in buffers_needed(graph, (1, 2)).values())

    assert segments("loss") - segments("at_least_once") == 2 * 3
