"""Which tasks of a job begin with what, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from minishuffle.coordinator.jobs.fallback import RestorePoint
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.restoring import resumptions_of
from minishuffle.errors import UsageError
from minishuffle.plan.graph import Edge, JobGraph, StatefulOperator, Vertex
from minishuffle.snapshots.sealedmanifest import (
    SavedOperator,
    SavedSplit,
    SavedTask,
    SavedVertex,
    SnapshotManifest,
)
from minishuffle.wire.packed import Cursor, SplitPosition, unpack_positions

SPLITS = {
    "0": SavedSplit(0, 5),
    "1": SavedSplit(1, 6, ended=True),
    "2": SavedSplit(2, 7),
    "named": SavedSplit(3, 8, b"at 8", 7),
}


def manifest(counts: Any = "running", reads: Any = "running", **positions: Any) -> SnapshotManifest:
    vertices = (
        SavedVertex("read", 2, (SavedOperator("read", "read", "source"),)),
        SavedVertex("count", 2, (SavedOperator("count-1", "count", "count"),)),
    )
    tasks = [SavedTask(0, index, reads) for index in (0, 1)] + [
        SavedTask(1, index, counts) for index in (0, 1)
    ]
    given = {"read": SPLITS} | positions
    return SnapshotManifest("1", "savepoint", 1, 0.0, "c", "j1", "n", vertices, tuple(tasks), given)


def graph(
    parallelism: int = 2, id: str = "count-1", kind: str = "count", edge: Any = "pipelined"
) -> JobGraph:
    def vertex(name: str, states: list[StatefulOperator], **fields: Any) -> Vertex:
        given = {"operators": [name], "program": b"", "is_source": name == "read"} | fields
        return Vertex(name=name, parallelism=parallelism, states=states, **given)

    read = vertex("read", [StatefulOperator(id="read", name="read", kind="source")])
    count = vertex("count", [StatefulOperator(id=id, name="count", kind=kind)])
    return JobGraph(
        vertices=[read, count, vertex("sink", [])],
        edges=[
            Edge(source=0, target=1, partitioner="hash", kind=edge),
            Edge(source=1, target=2, partitioner="forward"),
        ],
    )


def point(drop: Sequence[str] = ()) -> RestorePoint:
    return RestorePoint("/s", tuple(drop))


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_each_split_without_a_name_is_dealt_to_one_subtask_and_one_with_a_name_to_all(
    parallelism: int,
) -> None:
    found = resumptions_of(graph(parallelism), manifest(), point())
    assert found.keys() == {(vertex, index) for vertex in (0, 1) for index in range(parallelism)}
    named = SplitPosition(3, 8, cursor=Cursor("named", b"at 8", 7))
    for index in range(parallelism):
        table = unpack_positions(found[0, index].positions)
        assert table[-1] == named
        assert [each.split for each in table[:-1]] == [*range(3)][index::parallelism]
        assert all(each.done == (each.split == 1) and each.lease == 0 for each in table[:-1])
        assert found[0, index].restoration is None
        assert (found[1, index].positions, found[1, index].has_ended) == (b"", False)
        restoration = found[1, index].restoration
        assert restoration is not None and (restoration.path, restoration.dropped) == ("/s", [])


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_partitions_that_programs_write_are_dealt_to_those_to_which_they_are_sent(parallelism: int) -> None:
    job = graph(parallelism)
    written = [job.vertices[0].model_copy(update={"stream": "clicks"}), *job.vertices[1:]]
    names = [f"q/7/{partition}" for partition in range(5)]
    splits = {name: SavedSplit(number, 3, b"at 3", 3) for number, name in enumerate(names)}
    found = resumptions_of(job.model_copy(update={"vertices": written}), manifest(read=splits), point())
    for index in range(parallelism):
        table = unpack_positions(found[0, index].positions)
        assert [each.cursor and each.cursor.name for each in table] == names[index::parallelism]


@pytest.mark.parametrize(
    ("given", "asked", "text"),
    [
        (
            {"id": "other"},
            {},
            r"has state of count \(count-1\), which .* it has, .*, count \(other\): "
            r".* these names, .name\('count-1'\), .*--drop-state 'c",
        ),
        (
            {"kind": "fold"},
            {},
            r"count \(count-1\) is of kind fold in this job and of kind count in the savepoint",
        ),
        ({}, {"drop": ["sum"]}, r"no state of 'sum' to drop: it has that of read, count \(count-1\)"),
        ({"edge": "blocking"}, {}, "a blocking exchange cannot go on from a savepoint"),
    ],
)
def test_what_does_not_match_is_refused_with_what_to_do(
    given: dict[str, Any], asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        resumptions_of(graph(**given), manifest(), point(**asked))


@pytest.mark.parametrize("name", ["count", "count-1"])
def test_state_that_is_dropped_is_taken_by_nobody(name: str) -> None:
    for id in ("count-1", "other"):
        found = resumptions_of(graph(id=id), manifest(), point(drop=[name]))
        assert {key[0] for key in found} == {0}


SAVED = {"keys": "string", "windows": "5 s", "aggregate c": "count", "aggregate s": "sum of int64"}


def described(saved: dict[str, str], now: dict[str, str]) -> dict[TaskKey, Resumption]:
    """Of a count with what its state is made of, and these aggregates; the tasks that go on from it."""

    def outputs(reads: dict[str, str]) -> list[str]:
        return [what.removeprefix("aggregate ") for what in reads if " " in what]

    made, job = manifest(), graph()
    count = SavedOperator("count-1", "count", "count", ("k",), tuple(outputs(saved)), saved)
    job.vertices[1].states[:] = [
        StatefulOperator(id="count-1", name="count", kind="count", outputs=outputs(now), reads=now)
    ]
    vertices = (made.vertices[0], replace(made.vertices[1], operators=(count,)))
    return resumptions_of(job, replace(made, vertices=vertices), point())


@pytest.mark.parametrize(
    ("what", "now", "advice"),
    [
        ("keys", "string, int64", "leave that state out with --drop-state 'count-1'"),
        ("windows", "10 s", "leave that"),
        ("aggregate s", "sum of double", "call it otherwise, so that it begins anew, or leave that"),
        ("aggregate s", "max of int64", "call it otherwise"),
        ("aggregate s", "first of int64 by v", "leave that"),
    ],
)
def test_state_that_is_made_of_something_else_is_refused(what: str, now: str, advice: str) -> None:
    told = re.escape(f"count (count-1) has {what} ({now}) in this job and ({SAVED[what]}) in the savepoint")
    with pytest.raises(UsageError, match=f"{told}, .*: {advice}"):
        described(SAVED, SAVED | {what: now})


def test_positions_in_splits_of_other_records_are_refused() -> None:
    job = graph()
    job.vertices[0].states[0] = job.vertices[0].states[0].model_copy(update={"reads": {"splits": "64 of 9"}})
    made, read = manifest(), SavedOperator("read", "read", "source", reads={"splits": "64 of 3"})
    vertices = (replace(made.vertices[0], operators=(read,)), made.vertices[1])
    with pytest.raises(UsageError, match=r"read has splits \(64 of 9\) .* \(64 of 3\) .* --drop-state read"):
        resumptions_of(job, replace(made, vertices=vertices), point())


def test_the_first_of_rows_that_have_gone_is_refused() -> None:
    with pytest.raises(
        UsageError, match="not in the savepoint, whose keys have no row for it: give it an agg"
    ):
        described(SAVED, SAVED | {"aggregate f": "first of int64 by v"})


def test_tasks_hear_of_aggregates_that_are_new_or_gone_or_in_another_order() -> None:
    changed = {"aggregate new": "max of double", "aggregate s": "sum of int64"}
    for saved, now, outputs in (
        (SAVED, SAVED, {}),
        (SAVED, changed, {"count-1": ["new", "s"]}),
        (SAVED, dict(reversed(SAVED.items())), {"count-1": ["s", "c"]}),
        ({}, SAVED, {}),  # An earlier release did not say.
    ):
        restoration = described(saved, now)[1, 0].restoration
        assert restoration is not None and restoration.outputs == outputs


def test_of_a_vertex_some_tasks_of_which_had_ended_the_others_go_on() -> None:
    """A durable snapshot has such, for a job of the same parallelism that goes back."""
    made = manifest()
    tasks = [replace(task, state="ended") if task.index == 0 else task for task in made.tasks]
    found = resumptions_of(graph(), replace(made, tasks=tuple(tasks)), point())
    assert [found[1, index].has_ended for index in (0, 1)] == [True, False]
    assert [found[1, index].restoration is None for index in (0, 1)] == [True, False]
    assert not found[0, 0].has_ended, "a source looks for splits that are new"
    with pytest.raises(UsageError, match="of count 1 of 2 subtasks had ended, and the state of the others"):
        resumptions_of(graph(3), replace(made, tasks=tuple(tasks)), point())


def test_tasks_that_had_ended_give_their_end_and_nothing_else() -> None:
    """A source knows by its splits, and reads those that are new; one that reports none, as nothing of its
    job restarts, has ended."""
    found = resumptions_of(graph(), manifest(counts="ended", reads="ended"), point())
    assert [found[1, index].has_ended for index in (0, 1)] == [True, True]
    assert found[1, 0].restoration is None
    assert not found[0, 0].has_ended
    found = resumptions_of(graph(), manifest(counts="ended", reads="ended", read={}), point())
    assert found[0, 0].has_ended


def test_a_side_that_is_read_to_its_end_first_runs_from_its_beginning() -> None:
    def vertex(name: str, source: bool) -> Vertex:
        kind = "source" if source else "join"
        states = [StatefulOperator(id=name, name=name, kind=kind)]
        return Vertex(
            name=name, parallelism=1, operators=[name], is_source=source, program=b"", states=states
        )

    joined = JobGraph(
        vertices=[vertex("read", True), vertex("side", True), vertex("join", False)],
        edges=[
            Edge(source=0, target=2, partitioner="rebalance"),
            Edge(source=1, target=2, input=1, partitioner="broadcast"),
        ],
    )
    saved = SnapshotManifest(
        "1", "savepoint", 1, 0.0, "c", "j1", "n",
        (SavedVertex("read", 1, (SavedOperator("read", "read", "source"),)),),
        (SavedTask(0, 0, "running"),),
        {"read": {"0": SavedSplit(0, 5)}},
    )  # fmt: skip
    assert resumptions_of(joined, saved, point()).keys() == {(0, 0)}
