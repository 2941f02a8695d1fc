"""What runs again with a subtask of a replayed region, and what stays."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.lostpartitions import Replays, Rerun
from minishuffle.coordinator.jobs.subtasks import Subtask, first_attempts
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex

PARTITIONERS = {"h": "hash", "r": "rebalance", "f": "forward", "b": "broadcast"}


def graph(
    *edges: str, width: int = 2, external: Iterable[int] = (), endless: Iterable[int] = (), strategy: str = ""
) -> JobGraph:
    """Edges as ``0h-1``, a pipelined one by hash, and ``0h=1``, blocking."""
    count = 1 + max(int(edge[end]) for edge in edges for end in (0, 3))
    return JobGraph(
        vertices=[
            Vertex(
                name=f"v{n}",
                parallelism=width,
                operators=[],
                is_source=not any(int(edge[3]) == n for edge in edges),
                bounded=n not in endless,
                program=b"",
                stream="rows" if n in external else "",
            )
            for n in range(count)
        ],
        edges=[
            Edge.model_validate(
                {
                    "source": int(edge[0]),
                    "target": int(edge[3]),
                    "input": 1 if edge[1] == "b" else 0,
                    "partitioner": PARTITIONERS[edge[1]],
                    "kind": "blocking" if edge[2] == "=" else "pipelined_bounded",
                }
            )
            for edge in edges
        ],
        settings=JobSettings.model_validate({"restart_strategy": strategy or "individual"}),
    )


def tasks_of(given: JobGraph, **states: str) -> dict[TaskKey, Subtask]:
    """``t20``: vertex 2, index 0; all others have finished. ``gone``: that, on a worker that is lost."""
    tasks = first_attempts(given, (1,) * given.slots_needed)
    for key, task in tasks.items():
        state = states.get(f"t{key[0]}{key[1]}", "finished")
        task.on_worker = state != "gone"
        task.state = "finished" if state == "gone" else state
    return tasks


def after(given: JobGraph, key: TaskKey, **states: str) -> Rerun:
    """What runs again since that subtask is pending."""
    tasks = tasks_of(given, **states)
    tasks[key].state = "restarting"
    return Replays(given).begin([key], tasks)


@pytest.mark.parametrize(
    ("edges", "key", "states", "expected"),
    [
        # A source and its stored partition: it alone, whatever its consumers have.
        (["0h=1"], (0, 0), {"t10": "running", "t11": "created"}, {(0, 0)}),
        # A consumer of stored partitions: it alone, and not what wrote these.
        (["0h=1"], (1, 0), {"t11": "running"}, {(1, 0)}),
        (["0h-1", "1h=2"], (2, 0), {"t21": "running"}, {(2, 0)}),
        # A producer with what feeds it, and not its neighbour, which has stored all.
        (["0h-1", "1h=2"], (1, 0), {"t20": "running"}, {(0, 0), (0, 1), (1, 0)}),
        (["0f-1", "1h=2"], (1, 0), {"t20": "running"}, {(0, 0), (1, 0)}),
        # A neighbour that runs has half of the rows of the attempts before.
        (["0h-1", "1h=2"], (1, 0), {"t11": "running"}, {(0, 0), (0, 1), (1, 0), (1, 1)}),
        # What a consumer feeds over pipelined edges, unless that has finished.
        (["0h=1", "1h-2"], (1, 0), {"t20": "running"}, {(1, 0), (1, 1), (2, 0)}),
        # Back to what is stored, and behind that only if it is lost too.
        (["0h=1", "1h=2"], (1, 0), {}, {(1, 0)}),
        (["0h=1", "1h=2"], (1, 0), {"t01": "gone"}, {(1, 0), (0, 1)}),
        (["0h-1", "1h=2", "2h=3"], (2, 1), {"t10": "gone"}, {(2, 1), (1, 0), (0, 0), (0, 1)}),
        # Another division of the rows: all of the region, and all who read what it stores.
        (
            ["0r-1", "1h=2"],
            (1, 0),
            {"t20": "running"},
            {(vertex, index) for vertex in range(3) for index in range(2)},
        ),
        (["0r=1", "1h=2"], (1, 0), {}, {(1, 0)}),
        (["0r=1", "1h-2"], (0, 0), {}, {(0, 0), *((v, n) for v in (1, 2) for n in range(2))}),
        # What follows from other rows than before are others, whoever gets which.
        (["0r=1", "1h=2"], (0, 1), {}, {(0, 1), *((v, n) for v in (1, 2) for n in range(2))}),
        # A side that is kept is stored like any other.
        (["0h=1", "2b-1"], (1, 0), {"t11": "running"}, {(1, 0)}),
        (["0h=1", "2b-1"], (1, 0), {"t21": "gone"}, {(1, 0), (2, 1)}),
    ],
)
def test_what_runs_again_is_what_cannot_stay(
    edges: list[str], key: TaskKey, states: dict[str, str], expected: set[TaskKey]
) -> None:
    again = after(graph(*edges), key, **states)
    assert (again.tasks, again.unreadable) == (expected, set())


def test_a_consumer_that_does_not_replay_starts_again_alone_with_other_rows() -> None:
    given = graph("0r=1", "2h-1", "1h-3", endless=[2, 1, 3])
    assert given.replayed() == {0}
    assert after(given, (0, 0), t10="running", t11="running", t30="running").tasks == {
        (0, 0),
        (1, 0),
        (1, 1),
    }
    assert Replays(given).begin([(1, 0)], tasks_of(given, t10="restarting")).tasks == set()


def test_what_an_external_client_wrote_cannot_run_again() -> None:
    assert Replays(graph("0h-1", "1h=2", external=[0])).cannot([(0, 0), (1, 1), (2, 0)]) == [(0, 0), (1, 1)]
    given = graph("0h=1", "1h=2", external=[0])
    assert after(given, (1, 0)).unreadable == set()
    assert after(given, (1, 0), t01="gone").unreadable == {(0, 1)}
    assert Replays(graph("0h=1", external=[0], strategy="none")).cannot([(0, 0)]) == []


def test_nothing_is_deployed_while_something_of_it_runs() -> None:
    given = graph("0h-1", "1h=2")
    tasks = tasks_of(given, t10="restarting", t11="running", t00="running")
    replays = Replays(given)
    again = replays.begin([(1, 0)], tasks)
    assert again.tasks == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert replays.begin([(1, 0), (0, 1)], tasks) == Rerun(), "each is given once"
    assert {key for key in tasks if replays.must_end(key)} == {(0, 0), (1, 1)}
    assert replays.holds_back((1, 0)) and not replays.holds_back((2, 0)) and replays.take_ready() == []
    assert replays.deployed_with([(1, 0), (2, 0)]) == again.tasks and replays.deployed_with([(2, 0)]) == set()
    replays.ended((0, 0))
    recalled = Replays(given)
    assert recalled.recall(replays.record()) == [(1, 1)]
    for each in (replays, recalled):
        each.ended((1, 1))
        assert each.take_ready() == sorted(again.tasks) and not each.holds_back((1, 0))
        for key in again.tasks:
            each.deployed(key)
        assert each.take_ready() == []


def test_failures_of_a_region_count_together() -> None:
    replays = Replays(graph("0h-1", "1h=2", "3b-2", endless=[3]))
    assert {replays.counts_for(key) for key in [(0, 1), (1, 0), (1, 1)]} == {(0, 0)}
    assert replays.counts_for((2, 1)) == (2, 1), "it does not replay"


@pytest.mark.parametrize(
    ("edges", "fields", "expected"),
    [
        (["0h-1", "1h=2"], {}, {0, 1, 2}),
        (["0h-1", "2h-3"], {}, set()),
        (["0h=1", "2h-3"], {}, {0, 1}),
        (["0h=1", "2h-1"], {"endless": [2, 1]}, {0}),
        (["0h=1", "1h=2"], {"external": [0]}, {1, 2}),
        (["0h=1", "2b-1"], {}, {0, 1}),
        (["0h=1"], {"strategy": "none"}, set()),
    ],
)
def test_what_ends_and_touches_a_blocking_edge_replays(
    edges: list[str], fields: dict[str, list[int]], expected: set[int]
) -> None:
    assert graph(*edges, **fields).replayed() == expected  # type: ignore[arg-type]
