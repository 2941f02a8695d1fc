"""State as tables of Arrow, by operator: to test it, and to see what a job knew when something went wrong.

=====================  ===================================================================================
column                 holds
=====================  ===================================================================================
names of key columns   the key of a Table; ``key0``, ``key1``, … where nobody wrote their names down
``key``                the key of a Stream; of tuples of one length ``key0``, ``key1``, …
``window_start``       where state is by window: its start, in UTC
``value``              a value of Python, such as the count or the sum of a Stream's key
names of aggregates    of a Table; one with several numbers, such as a mean, has ``NAME.0``, ``NAME.1``, …
names of a row's       rows that are held, as a join does: their columns, or ``row`` for a row of Python
all others             as the operator calls them: ``operators.keyed_state`` has a table of these
=====================  ===================================================================================

Values of Python become the type of Arrow that holds all of them whole (``operators.python_values``), dicts a
struct; where there is none, texts: what ``repr`` says of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.config import default_secret_file, default_state_dir, read_secret
from minishuffle.errors import UnknownName, UsageError, did_you_mean
from minishuffle.exchange.gather import taken
from minishuffle.exchange.keys import fixed_values, stable_hash
from minishuffle.operators.python_values import MISFITS, array_of, type_of
from minishuffle.operators.state_parts import HASH, KEY, ORDER, from_column
from minishuffle.snapshots.savedstate import Snapshot, open_snapshot
from minishuffle.snapshots.sealedmanifest import SavedOperator, SavedVertex
from minishuffle.snapshots.segmentindex import NO_GROUP, StateSegment
from minishuffle.snapshots.statefile import key_groups, read_parts

__all__ = ["OperatorState", "PartState", "SavedState", "read_state"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_ROW: Final = "row"
_COLUMN: Final = "row."
_NAMESPACE: Final = "namespace"
_VALUE: Final = "value"
_OF_KEY: Final = re.compile(rf"{KEY}(\d+)")
_OF_AGGREGATE: Final = re.compile(r"(?:row\.)?(\d+)\.(\d+)")
"""Columns of keys, and those of the states of aggregates, by their numbers."""


@dataclass(frozen=True, slots=True)
class PartState:
    """One kind of an operator's state."""

    name: str
    by_key: bool
    """Whether its rows are of keys."""
    rows: int
    bytes: int
    """In files, which are compressed."""
    schema: pa.Schema
    """The columns of its table, as its first rows have them."""


@dataclass(frozen=True, slots=True)
class OperatorState:
    """What all subtasks of an operator held."""

    name: str
    id: str
    kind: str
    vertex: str
    """The vertex that it is a part of."""
    parallelism: int
    parts: tuple[PartState, ...] = ()
    """None: it held nothing."""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


class SavedState:
    """The state in a snapshot; see :func:`read_state`, whose errors all methods raise that read files."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.manifest = snapshot.manifest
        self.passed_over = snapshot.passed_over
        """Why newer snapshots of the same directory cannot be read."""
        self._folder = snapshot.folder
        self._segments = [(file, segment) for file, index in snapshot.segments() for segment in index]
        self._operators = {
            operator.id: (vertex, operator)
            for vertex in self.manifest.vertices
            for operator in vertex.operators
        }

    @property
    def path(self) -> str:
        """Path or URI of the snapshot."""
        return self._folder.where

    def operators(self) -> list[OperatorState]:
        """The operators that may have state, in the order of the job's graph."""
        return [self._described(*found) for found in self._operators.values()]

    def _described(self, vertex: SavedVertex, operator: SavedOperator) -> OperatorState:
        parts: dict[str, list[tuple[str, StateSegment]]] = {}
        for file, segment in self._segments:
            if segment.operator == operator.id:
                parts.setdefault(segment.part, []).append((file, segment))
        described = tuple(
            PartState(
                name,
                found[0][1].first != NO_GROUP,
                sum(segment.rows for _, segment in found),
                sum(segment.length for _, segment in found),
                self._table(operator, found[:1], None).schema,
            )
            for name, found in parts.items()
        )
        about = operator.name, operator.id, operator.kind
        return OperatorState(*about, vertex.name, vertex.parallelism, described)

    def table(self, operator: str, part: str = "", *, keys: Iterable[Any] | None = None) -> pa.Table:
        """The state of an operator: a row for each key (and window), or for each row that it held.

        ::

            counts = minishuffle.read_state("snapshots/j1-savepoint-1").table("count")

        Args:
            operator: its name or its id.
            part: which of its kinds of state, if it has several by key, such as ``left`` and ``right`` of a
                join.
            keys: only the rows of these, each as the function gave it, or as the value of the key's column
                (a tuple where there are several). No more is read than what may have them.

        Raises:
            UnknownName: there is no such operator, or part.
            UsageError: several have that name; the part is not named; a key cannot be one.
            UnreadableSnapshot: a file is missing, cut or changed.
            StorageUnavailable: the storage does not answer.
        """
        found = self._named(operator)
        mine = [(file, segment) for file, segment in self._segments if segment.operator == found.id]
        name = part or _only_part(found.name, [segment for _, segment in mine])
        names = list(dict.fromkeys(segment.part for _, segment in mine))
        if part and part not in names:
            raise UnknownName(
                f"operator {found.name!r} has no part {part!r}: {did_you_mean(part, names)}"
                f"it has {', '.join(names) or 'no state'}"
            )
        hashes = None if keys is None else np.array([stable_hash(key) for key in keys], np.uint64)
        return self._table(found, [each for each in mine if each[1].part == name], hashes)

    def _named(self, operator: str) -> SavedOperator:
        every = [found for _, found in self._operators.values()]
        named = [found for found in every if operator in (found.id, found.name)]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(found.id for found in named)
            raise UsageError(f"several operators are called {operator!r}: give the id of one, {ids}")
        names = [found.name for found in every]
        raise UnknownName(
            f"{self.path} has no operator {operator!r}: {did_you_mean(operator, names)}it has "
            f"{', '.join(names) or 'none with state'}"
        )

    def _table(
        self, operator: SavedOperator, found: Sequence[tuple[str, StateSegment]], hashes: Vector | None
    ) -> pa.Table:
        if hashes is not None:
            groups = key_groups(hashes).tolist()
            found = [
                (file, segment)
                for file, segment in found
                if any(segment.first <= group <= segment.last for group in groups)
            ]
        batches = []
        for file, of_file in groupby(found, key=itemgetter(0)):
            for part in read_parts(self._folder, file, [segment for _, segment in of_file]):
                batches.append(part.batch if hashes is None else _with_hashes(part.batch, hashes))
        return pa.table(dict(_columns(operator, batches)))


def _only_part(operator: str, segments: Iterable[StateSegment]) -> str:
    """The name of the part by key, if there is one, or of the only part."""
    by_key = {segment.part: segment.first != NO_GROUP for segment in segments}
    names = [name for name, is_one in by_key.items() if is_one] or list(by_key)
    if len(names) > 1:
        raise UsageError(
            f"operator {operator!r} has several kinds of state, {', '.join(names)}: name one with part= or "
            "--part"
        )
    return names[0] if names else ""


def _with_hashes(batch: pa.RecordBatch, hashes: Vector) -> pa.RecordBatch:
    return taken(batch, np.flatnonzero(np.isin(fixed_values(batch[HASH], np.uint64), hashes)))


# --- columns ----------------------------------------------------------------------------------------------


def _columns(operator: SavedOperator, batches: Sequence[pa.RecordBatch]) -> Iterator[tuple[str, pa.Array]]:
    """The columns of a table with the rows of all batches, which need not have the same."""
    raw = list(dict.fromkeys(name for batch in batches for name in batch.schema.names))
    rows = {name.removeprefix(_COLUMN) for name in raw if name.startswith(_COLUMN)}
    has_keys_in_rows = bool(rows) and not operator.keys and not operator.outputs
    for name in raw:
        if name in (HASH, ORDER) or (has_keys_in_rows and _OF_KEY.fullmatch(name)):
            continue
        arrays = [_column(batch, name) for batch in batches]
        if name in (KEY, _ROW, _VALUE):
            values = list(chain.from_iterable(map(from_column, arrays)))
            yield from _of_keys(values) if name == KEY else ((name, _typed(values)),)
        elif name == _NAMESPACE:
            if any(array.null_count < len(array) for array in arrays):
                yield "window_start", _joined(arrays).cast(pa.timestamp("us", "UTC"))
        elif (shown := _shown(operator, name, raw)) not in rows or name.startswith(_COLUMN):
            yield shown, _joined(arrays)


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch[name] if name in batch.schema.names else pa.nulls(batch.num_rows)


def _shown(operator: SavedOperator, name: str, names: Iterable[str]) -> str:
    """What a column of a part is called in a table."""
    if found := _OF_KEY.fullmatch(name):
        number = int(found[1])
        return operator.keys[number] if number < len(operator.keys) else name
    if found := _OF_AGGREGATE.fullmatch(name):
        number = int(found[1])
        if name.startswith(_COLUMN) and number >= len(operator.outputs):
            return name.removeprefix(_COLUMN)
        output = operator.outputs[number] if number < len(operator.outputs) else f"aggregate{number}"
        of_it = [each for each in map(_OF_AGGREGATE.fullmatch, names) if each and int(each[1]) == number]
        return output if len(of_it) == 1 else f"{output}.{found[2]}"
    return name.removeprefix(_COLUMN)


def _of_keys(keys: Sequence[Any]) -> Iterator[tuple[str, pa.Array]]:
    """Keys as a column, or as several if all are tuples of one length."""
    if set(map(type, keys)) == {tuple} and len(set(map(len, keys))) == 1:
        for number, column in enumerate(zip(*keys, strict=True)):
            yield f"{KEY}{number}", _typed(column)
    else:
        yield KEY, _typed(keys)


def _typed(values: Sequence[Any]) -> pa.Array:
    """Values in the type that holds all of them whole; without one, what ``repr`` says of each."""
    try:
        return array_of(type_of(values), values)
    except MISFITS:
        return pa.array([None if value is None else repr(value) for value in values], pa.string())


def _joined(arrays: Sequence[pa.Array]) -> pa.ChunkedArray:
    """The values of all, in a type that holds them; of types that have none in common, texts."""
    tables = [pa.table({"": array}) for array in arrays]
    try:
        return pa.concat_tables(tables, promote_options="permissive").column(0)
    except pa.ArrowException:
        return pa.chunked_array([_typed(list(chain.from_iterable(array.to_pylist() for array in arrays)))])


# --- the public name --------------------------------------------------------------------------------------


def read_state(path: str | Path, *, secret_file: str | Path | None = None, trust: bool = False) -> SavedState:
    """Open the state in a snapshot: the folder of one, or the newest whole one in a directory of snapshots.

    ::

        state = minishuffle.read_state("snapshots/j1-savepoint-1")
        state.operators()
        state.table("count").to_pandas()

    No cluster is needed. Nothing is decoded before the manifest is verified, and each part of a file is
    compared with its checksum when it is read.

    Args:
        path: of a directory, or a URI such as ``s3://bucket/folder``.
        secret_file: has the secret of the cluster that wrote it; by default this user's cluster ``default``.
        trust: open a snapshot that is not signed under this secret.

    Raises:
        UnknownName: there is no snapshot.
        UnreadableSnapshot: a file is missing, cut, changed, or of another format.
        UntrustedSnapshot: it is not signed under this secret.
        StorageUnavailable: the storage does not answer.
    """
    file = default_secret_file(default_state_dir("default")) if secret_file is None else Path(secret_file)
    needed = not trust and (secret_file is not None or file.exists())
    return SavedState(open_snapshot(path, read_secret(file) if needed else b"", trust=trust))
