"""Parquet files as Arrow batches of one schema."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from minishuffle.connectors.files import Paths, files_of, is_uri, opened
from minishuffle.errors import UnknownName, UsageError, WrongInput, did_you_mean
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.pandas_index import unnamed_index
from minishuffle.operators.wider_type import common_schema, in_schema

__all__ = ["ParquetSource"]


class ParquetSource:
    """Record batches of Parquet files; a split is (path, row group).

    ``schema`` is common to all files, and every batch has it: columns that a file lacks are null, and
    types that differ become wider. If it is given, it says which columns are read, and in which types.

    Raises:
        UnknownName: no such file, or each lacks a column of ``schema``.
        UsageError: a file cannot be read or is not Parquet; two files have types with none in common; no
            value of a column can be of the type that is declared.
        WrongInput: (from ``read``) a value does not fit the common type, or a file has changed since it was
            listed.
    """

    bounded = True
    format: Literal["arrow"] = "arrow"

    def __init__(self, paths: Paths, schema: pa.Schema | None = None) -> None:
        self._splits: list[tuple[str, int]] = []
        schemas: dict[str, pa.Schema] = {}
        listed = files_of(paths)
        self._listed = {file.path: file for file in listed}
        for path in (file.path for file in listed):
            schemas[path], groups = _schema_and_groups(path)
            self._splits.extend((path, group) for group in range(groups))
        known = dict.fromkeys(name for its in schemas.values() for name in its.names)
        if schema is None:
            schemas = {path: _without_index(its) for path, its in schemas.items()}
        missing = [name for name in schema.names if name not in known] if schema is not None else []
        if missing:
            where = next(iter(schemas)) if len(schemas) == 1 else f"any of {len(schemas)} files"
            hint = did_you_mean(missing[0], known)
            raise UnknownName(f"no column {missing[0]!r} in {where}: {hint}there are {', '.join(known)}")
        if schema is not None:
            _check_types(schemas, schema)
        self.schema = common_schema(schemas).remove_metadata() if schema is None else schema
        self.columns = None if schema is None else schema.names

    def projected(self, names: frozenset[str]) -> ParquetSource:
        """(At submission.) The same for these columns, those of them that there are."""
        narrowed = copy.copy(self)
        narrowed.schema = pa.schema([field for field in self.schema if field.name in names])
        narrowed.columns = narrowed.schema.names
        return narrowed

    def splits(self) -> list[tuple[str, int]]:
        return self._splits

    def read(self, split: tuple[str, int], offset: int) -> Iterator[pa.RecordBatch]:
        path, group = split
        self._listed[path].check_unchanged()
        remote = is_uri(path)
        with (
            opened(path) if remote else nullcontext(path) as where,
            pq.ParquetFile(where, pre_buffer=remote) as file,
        ):
            batches = file.iter_batches(BATCH_ROWS_MAX, row_groups=[group], columns=self.columns)
            for batch in batches:
                if offset < batch.num_rows:
                    yield self._fitted(path, batch.slice(offset))
                offset = max(0, offset - batch.num_rows)

    def _fitted(self, path: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            fitted: pa.RecordBatch = in_schema(batch, self.schema, path)
        except UsageError as error:
            raise WrongInput(str(error)) from error
        return fitted


def _schema_and_groups(path: str) -> tuple[pa.Schema, int]:
    """The schema of the file with its metadata, and the number of its row groups."""
    try:
        with opened(path) as raw, pq.ParquetFile(raw) as file:
            return file.schema_arrow, file.metadata.num_row_groups
    except pa.ArrowException as error:
        raise UsageError(
            f"{path} is not a Parquet file: name what it is with format='csv' or format='json' ({error})"
        ) from error


def _check_types(schemas: Mapping[str, pa.Schema], declared: pa.Schema) -> None:
    """Raises UsageError for a declared type that not even a null of a column of a file becomes. Files mostly
    have the same types, and each is looked at once: for all columns of a file that takes longer than opening
    it does."""
    passed: set[tuple[pa.DataType, pa.DataType]] = set()
    for path, given in schemas.items():
        for field in declared:
            number = given.get_field_index(field.name)
            if number < 0:
                continue
            own = given.field(number)
            if (own.type, field.type) not in passed:
                _check_type(path, own, field)
                passed.add((own.type, field.type))


def _check_type(path: str, given: pa.Field, declared: pa.Field) -> None:
    one = pa.schema([given.with_nullable(True)])
    try:
        in_schema(
            pa.RecordBatch.from_arrays([pa.nulls(1, given.type)], schema=one),
            pa.schema([declared.with_nullable(True)]),
            path,
        )
    except UsageError as error:
        raise UsageError(
            f"column {declared.name!r} is declared as {declared.type}, and no {given.type} of {path} "
            f"becomes that ({error.__cause__}): declare what it holds, and make the type of that with "
            "map_batches()"
        ) from error


def _without_index(schema: pa.Schema) -> pa.Schema:
    """Without what no column was of the pandas frame that was written, if there are others."""
    left_out = unnamed_index(schema)
    kept = [field for number, field in enumerate(schema) if number not in left_out]
    return pa.schema(kept) if left_out and kept else schema
