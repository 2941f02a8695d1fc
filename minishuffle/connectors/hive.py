"""Files in directories such as ``day=2026-01-01/shop=7``, whose names hold the values of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa

from minishuffle.connectors.files import files_below
from minishuffle.errors import UnknownName, UsageError
from minishuffle.operators.base import Portion

__all__ = ["HiveSource", "file_schema", "hive_files"]

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value of a directory for rows without one. (Hive, Spark.)"""


def hive_files(paths: Sequence[str | Path]) -> dict[str, dict[str, str | None]]:
    """All files below the directories ``paths``, sorted, with the columns in their directories' names.

    Raises:
        UnknownName: there is no such directory, or no file below it.
        UsageError: the directories of two files name different columns.
    """
    found: dict[str, dict[str, str | None]] = {}
    for given in paths:
        try:
            files = files_below(given)
        except UnknownName as error:
            raise UnknownName(
                f"{error}: partitioning='hive' takes the one above those like key=value"
            ) from None
        for path, inside in files:
            if not any(part[0] in "._" and "=" not in part for part in inside):
                found[path] = dict(_pair(part) for part in inside[:-1] if "=" in part)
    if not found:
        raise UnknownName(f"there are no files below {', '.join(map(str, paths))}")
    first, *others = found
    for other in others:
        if list(found[other]) != list(found[first]):
            raise UsageError(
                f"{first} and {other} are in directories of different columns, "
                f"({', '.join(found[first])}) and ({', '.join(found[other])}): read them as two tables"
            )
    return found


def _pair(part: str) -> tuple[str, str | None]:
    name, _, value = part.partition("=")
    return unquote(name), None if value == NULL else unquote(value)


def file_schema(
    declared: pa.Schema | None, found: Mapping[str, Mapping[str, str | None]]
) -> pa.Schema | None:
    """The columns of a declared schema that files hold, as their directories' names do not; None: there is no
    declared one."""
    if declared is None:
        return None
    named = next(iter(found.values()))
    return pa.schema([field for field in declared if field.name not in named])


class HiveSource:
    """What a source of files gives, and after it the columns that their directories name: texts, or of the
    types in ``declared``.

    Raises:
        UsageError: a value does not fit its declared type, or a column is in the files too.
    """

    bounded = True
    format: Literal["arrow"] = "arrow"

    def __init__(
        self, source: Any, found: dict[str, dict[str, str | None]], declared: pa.Schema | None
    ) -> None:
        self._source = source
        names = list(next(iter(found.values())))
        types = {field.name: field.type for field in declared or ()}
        fields = [pa.field(name, types.get(name, pa.string())) for name in names]
        twice = [name for name in names if name in source.schema.names]
        if twice:
            raise UsageError(
                f"column {twice[0]!r} is in the files and in the names of their directories: rename one"
            )
        self._constants = {path: _constants(path, values, fields) for path, values in found.items()}
        self.schema = pa.schema([*source.schema, *fields])

    def splits(self) -> Sequence[Any]:
        splits: Sequence[Any] = self._source.splits()
        return splits

    def read(self, split: Any, offset: int) -> Iterator[pa.RecordBatch | Portion]:
        constants = self._constants[split if isinstance(split, str) else split[0]]
        for given in self._source.read(split, offset):
            batch = given.batch if isinstance(given, Portion) else given
            added = [pa.repeat(value, batch.num_rows) for value in constants]
            whole = pa.RecordBatch.from_arrays([*batch.columns, *added], schema=self.schema)
            yield replace(given, batch=whole) if isinstance(given, Portion) else whole


def _constants(path: str, values: dict[str, str | None], fields: Sequence[pa.Field]) -> list[pa.Scalar]:
    found = []
    for field in fields:
        try:
            found.append(pa.scalar(values[field.name], pa.string()).cast(field.type))
        except pa.ArrowException as error:
            raise UsageError(
                f"{path}: {field.name}={values[field.name]} does not fit the declared type {field.type}"
            ) from error
    return found
