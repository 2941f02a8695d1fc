"""A small snapshot of a job that never ran: a count by rows on two subtasks, beside a source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from minishuffle.exchange.keys import destination, stable_hash
from minishuffle.operators.state_parts import ORDER, StatePart, by_rows
from minishuffle.snapshots.catalog import commit, state_file
from minishuffle.snapshots.sealedmanifest import (
    SavedOperator,
    SavedSplit,
    SavedTask,
    SavedVertex,
    SnapshotManifest,
)
from minishuffle.snapshots.statefile import TaskStateWriter
from minishuffle.snapshots.storage import Folder

__all__ = ["SECRET", "counts", "manifest_of", "prepare", "save", "save_parts"]

SECRET = b"a secret of thirty-two characters"


def counts(keys: Iterable[str], index: int = 0, parallelism: int = 1) -> StatePart:
    """How often each of the subtask's keys came: as often as it has letters."""
    mine = [key for key in keys if destination(stable_hash(key), parallelism) == index]
    numbers = pa.array(range(len(mine)), pa.int64())
    values = pa.array([len(key) for key in mine], pa.int64())
    return by_rows(
        "values", mine, **{ORDER: numbers, "namespace": pa.nulls(len(mine), pa.int64())}, value=values
    )


def manifest_of(**fields: object) -> SnapshotManifest:
    """A manifest with these fields, and others that any has."""
    usual = {
        "release": "0.2.0",
        "kind": "savepoint",
        "number": 1,
        "taken_at": 1_000.5,
        "cluster": "c",
        "job": "j1",
    }
    return SnapshotManifest(**usual | {"name": "words"} | fields)  # type: ignore[arg-type]


def prepare(folder: Folder) -> None:
    """Have the folder exist, as it does before tasks write into it; object stores have no folders."""
    if "://" not in folder.where:
        Path(folder.where).mkdir(parents=True, exist_ok=True)


def save_parts(folder: Folder, operator: SavedOperator, parts: Iterable[StatePart]) -> SnapshotManifest:
    """Write a snapshot with the state of one operator of one subtask."""
    prepare(folder)
    writer = TaskStateWriter(folder, state_file(0, 0, 1))
    for part in parts:
        writer.write(operator.id, part)
    task = SavedTask(0, 0, "running", None, writer.close())
    made = manifest_of(vertices=(SavedVertex("v", 1, (operator,)),), tasks=(task,))
    commit(folder, made, SECRET)
    return made


def save(folder: Folder, keys: Iterable[str] = ("a", "the", "ccc"), **fields: object) -> SnapshotManifest:
    """Write a snapshot into the folder, with the state of two subtasks."""
    keys, tasks = list(keys), [SavedTask(0, 0, "ended", None)]
    prepare(folder)
    for index in range(2):
        writer = TaskStateWriter(folder, state_file(1, index, 1))
        writer.write("count-1", counts(keys, index, 2))
        tasks.append(SavedTask(1, index, "running", 17, writer.close()))
    made = manifest_of(
        vertices=(
            SavedVertex("words", 1, (SavedOperator("words-0", "words", "source"),)),
            SavedVertex("count", 2, (SavedOperator("count-1", "count", "reduce"),)),
        ),
        tasks=tuple(tasks),
        positions={"words-0": {"0": SavedSplit(0, 3), "b": SavedSplit(1, 2, b"\xff\x00", 1, ended=True)}},
        committed=b"\x00\xfe",
        **fields,
    )
    commit(folder, made, SECRET)
    return made
