"""How a job goes on from a savepoint: which of its tasks begins with what. Pure.

Operators are matched by the ids of their state, which are their names where they were given one, else their
place in the plan. Keys are divided among subtasks by their workers, which read the savepoint themselves;
sources take their splits from the positions that are dealt out here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from minishuffle.coordinator.jobs.fallback import RestorePoint
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.savepoints import sides_of
from minishuffle.errors import UsageError
from minishuffle.plan.graph import JobGraph, StatefulOperator, Vertex
from minishuffle.snapshots.sealedmanifest import SavedOperator, SavedSplit, SnapshotManifest, fingerprint
from minishuffle.wire.clients import write_and_partition
from minishuffle.wire.messages import Restoration
from minishuffle.wire.packed import Cursor, SplitPosition, pack_positions

__all__ = ["resumptions_of"]


def resumptions_of(
    graph: JobGraph, manifest: SnapshotManifest, point: RestorePoint
) -> dict[TaskKey, Resumption]:
    """Positions and state for the first attempts of a submitted job, or of one that goes back to ``point``;
    tasks for which the snapshot has none are left out.

    Raises:
        UsageError: an operator is not in both, or is another one there, or the job cannot go on from any.
    """
    _require_restorable(graph)
    saved = {each.id: each for vertex in manifest.vertices for each in vertex.operators}
    dropped = _dropped(saved.values(), point.drop)
    ours = {each.id: each for vertex in graph.vertices for each in vertex.states}
    _require_match({id: each for id, each in saved.items() if id not in dropped}, ours)
    taken = saved.keys() & ours.keys() - dropped
    where = {each.id: number for number, vertex in enumerate(manifest.vertices) for each in vertex.operators}
    restoration = Restoration(
        path=point.path,
        fingerprint=fingerprint(manifest),
        trust=point.trust,
        dropped=sorted(dropped),
        outputs={id: ours[id].outputs for id in sorted(taken) if _has_others(saved[id], ours[id])},
    )
    found = {}
    again = sides_of(graph)
    for number, vertex in enumerate(graph.vertices):
        states = [each for each in vertex.states if each.id in taken]
        if number in again or not states:
            continue
        source = next((each.id for each in states if each.kind == "source"), None)
        others = [each for each in states if each.kind != "source"]
        splits = {} if source is None else manifest.positions.get(source, {})
        ended = _ended(manifest, vertex, {where[each.id] for each in states})
        for index in range(vertex.parallelism):
            # A source that has ended knows by its splits, and reads those that are new.
            has_ended = bool(others or not splits) and index in ended
            found[number, index] = Resumption(
                positions=pack_positions(_dealt(splits, index, vertex)),
                restoration=restoration if others and not has_ended else None,
                has_ended=has_ended,
            )
    return found


def _require_restorable(graph: JobGraph) -> None:
    if any(edge.kind == "blocking" for edge in graph.edges):
        raise UsageError(
            "a job with a blocking exchange cannot go on from a savepoint, since what it stores is made "
            "again from the beginning: leave exchange('blocking') out"
        )


def _dropped(saved: Iterable[SavedOperator], drop: Collection[str]) -> set[str]:
    """The ids of the operators of these ids or names.

    Raises:
        UsageError: there are none.
    """
    operators = list(saved)
    for name in drop:
        if not any(name in (each.id, each.name) for each in operators):
            raise UsageError(
                f"the savepoint has no state of {name!r} to drop: it has that of {_named(operators)}"
            )
    return {each.id for each in operators if each.id in drop or each.name in drop}


def _require_match(saved: Mapping[str, SavedOperator], ours: Mapping[str, StatefulOperator]) -> None:
    """
    Raises:
        UsageError: there is state of an operator that the job does not have, or of another kind.
    """
    if gone := [each for id, each in saved.items() if id not in ours]:
        new = [each for id, each in ours.items() if id not in saved]
        beside = f"; it has, without state in the savepoint, {_named(new)}" if new else ""
        drops = " ".join(f"--drop-state {_quoted(each.id)}" for each in gone)
        names = ", ".join(f".name({each.id!r})" for each in gone)
        raise UsageError(
            f"the savepoint has state of {_named(gone)}, which the job does not have{beside}: give the "
            f"operators that go on with it these names, {names}, or leave that state out with {drops}"
        )
    for id, each in saved.items():
        if each.kind != ours[id].kind:
            raise UsageError(
                f"{_named([each])} is of kind {ours[id].kind} in this job and of kind {each.kind} in the "
                f"savepoint, whose state it cannot read: leave that out with --drop-state {_quoted(id)}"
            )
        _require_same_making(each, ours[id])


def _require_same_making(saved: SavedOperator, ours: StatefulOperator) -> None:
    """
    Raises:
        UsageError: the state is made of something else now.
    """
    drop = f"leave that state out with --drop-state {_quoted(saved.id)}"
    for what, now in ours.reads.items():
        before = saved.reads.get(what)
        is_of_rows = now.startswith(("first ", "last "))
        if before is None and saved.reads and is_of_rows:
            raise UsageError(
                f"{_named([saved])} has {what} ({now}) in this job and not in the savepoint, whose keys have "
                f"no row for it: give it an aggregate() of its own, or {drop}"
            )
        if before not in (None, now):
            is_one_of_several = what.startswith("aggregate ") and not is_of_rows
            anew = "call it otherwise, so that it begins anew, or " if is_one_of_several else ""
            raise UsageError(
                f"{_named([saved])} has {what} ({now}) in this job and ({before}) in the savepoint, from "
                f"which it cannot go on: {anew}{drop}"
            )


def _has_others(saved: SavedOperator, ours: StatefulOperator) -> bool:
    """Whether it has other aggregates now, or in another order."""
    return bool(saved.outputs) and list(saved.outputs) != ours.outputs


def _named(operators: Sequence[SavedOperator | StatefulOperator]) -> str:
    return ", ".join(each.name if each.name == each.id else f"{each.name} ({each.id})" for each in operators)


def _quoted(id: str) -> str:
    return id if id.isidentifier() else f"'{id}'"


def _ended(manifest: SnapshotManifest, vertex: Vertex, before: Collection[int]) -> Collection[int]:
    """The subtasks of a vertex that have ended, as its operators are in these vertices of the snapshot.

    Raises:
        UsageError: some had ended there, and it has another number of subtasks now.
    """
    subtasks = range(vertex.parallelism)
    tasks = [task for task in manifest.tasks if task.vertex in before]
    ended = [task for task in tasks if task.state == "ended"]
    if len(ended) == len(tasks):
        return subtasks
    if all(manifest.vertices[each].parallelism == len(subtasks) for each in before):
        going_on = {task.index for task in tasks if task.state != "ended"}
        return set(subtasks) - going_on
    if ended and not vertex.is_source:
        raise UsageError(
            f"of {vertex.name} {len(ended)} of {len(tasks)} subtasks had ended, and the state of the others "
            f"goes to {len(subtasks)} now: submit the job with the parallelism that it had, or go on from "
            "another snapshot"
        )
    return ()


def _dealt(splits: Mapping[str, SavedSplit], index: int, vertex: Vertex) -> list[SplitPosition]:
    """The positions for one subtask. Splits with names go to all subtasks: each asks its source for its own.
    A partition that an external client writes goes to the subtask that reads it."""
    parallelism = vertex.parallelism
    if vertex.stream:
        of = {name: write_and_partition(name)[1] % parallelism for name in splits}
        splits = {name: each for name, each in splits.items() if of[name] == index}
    return [
        SplitPosition(
            each.number,
            each.rows,
            done=each.ended,
            cursor=Cursor(name, each.cursor, each.cursor_rows) if _has_name(name, each) else None,
        )
        for name, each in splits.items()
        if _has_name(name, each) or each.number % parallelism == index
    ]


def _has_name(name: str, split: SavedSplit) -> bool:
    return name != str(split.number) or bool(split.cursor)
