"""Sources.

A source's files, slices or number blocks are fixed when it is made, in the client: every subtask sees
the same splits, and a file that is missing is reported before anything is submitted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from minishuffle.dataflow.operators.base import Batch
from minishuffle.dataflow.operators.copies import set_apart
from minishuffle.dataflow.operators.files import Paths, compression_of, decompressed, files_of, is_uri, opened
from minishuffle.dataflow.operators.pandasindex import unnamed_index
from minishuffle.dataflow.operators.widertype import common_schema, in_schema
from minishuffle.errors import UnknownName, UsageError, WrongInput
from minishuffle.limits import BATCH_ROWS_MAX, MIB, RATE_MAX

__all__ = [
    "ArrowItemsSource",
    "GeneratorSource",
    "ItemsSource",
    "ParquetSource",
    "TextSource",
    "number_batch",
    "number_rows",
]

Format: TypeAlias = Literal["rows", "arrow"]
TextSplit: TypeAlias = tuple[str, int, int | None]

LIST_ROWS = 4096
"""Rows in a batch of Python objects."""
TEXT_SPLIT_BYTES = 8 * MIB
SLICES_MAX = 64
"""Slices of a collection in memory, and number sequences of a generator."""
GENERATED_ROWS = 16_384
"""Records in a generated Arrow batch when no rate is set: its columns fit the processor's cache."""
TURNS_PER_SECOND = 5
"""Batches per second and split of a generator with a rate: the flow is smooth also where each of 64 subtasks
has one split, and batches are not so small that a worker does little else than wake."""


class TextSource:
    """Lines of UTF-8 text files, without their line ends (LF or CRLF).

    A split is (path, first byte, byte after the last): about 8 MiB of whole lines; one file that is
    compressed, whose last byte is None.

    Raises:
        UnknownName: no such file.
        UsageError: a file cannot be read.
        WrongInput: (from ``read``) a file is not UTF-8.
    """

    bounded = True
    format: Format = "rows"

    def __init__(self, paths: Paths) -> None:
        self._splits = [split for path in files_of(paths) for split in _text_splits(path)]

    def splits(self) -> list[TextSplit]:
        return self._splits

    def read(self, split: TextSplit, offset: int) -> Iterator[list[str]]:
        path = split[0]
        for start, data in _text_of(split):
            try:
                text = data.decode("utf-8-sig" if start == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise WrongInput(
                    f"{path} is not UTF-8 at byte {start + error.start}: convert it first, with iconv for "
                    "example"
                ) from error
            lines = text.replace("\r\n", "\n").split("\n")
            if not lines[-1]:
                lines.pop()
            for first in range(min(offset, len(lines)), len(lines), LIST_ROWS):
                yield lines[first : first + LIST_ROWS]
            offset = max(0, offset - len(lines))


def _text_splits(path: str) -> Iterator[TextSplit]:
    """Cut at the first line start at or after each multiple of the split size."""
    with opened(path) as file:
        if compression_of(path) is not None:
            yield path, 0, None
            return
        size = file.seek(0, 2)
        start = 0
        while start < size:
            end = size
            if start + TEXT_SPLIT_BYTES < size:
                file.seek(start + TEXT_SPLIT_BYTES - 1)
                file.readline()
                end = file.tell()
            yield path, start, end
            start = end


def _text_of(split: TextSplit) -> Iterator[tuple[int, bytes]]:
    """Pieces of whole lines, each with the number of its first byte."""
    path, start, end = split
    if end is not None:
        with opened(path) as file:
            file.seek(start)
            yield start, file.read(end - start)
        return
    with decompressed(path) as stream:
        while data := stream.read(TEXT_SPLIT_BYTES):
            data += stream.readline()
            yield start, data
            start += len(data)


class ParquetSource:
    """Record batches of Parquet files; a split is (path, row group).

    ``schema`` is common to all files, and every batch has it: columns that a file lacks are null, and
    types that differ become wider. If it is given, it says which columns are read, and in which types.

    Raises:
        UnknownName: no such file, or each lacks a column of ``schema``.
        UsageError: a file cannot be read or is not Parquet; two files have types with none in common.
        WrongInput: (from ``read``) a value does not fit the common type.
    """

    bounded = True
    format: Format = "arrow"

    def __init__(self, paths: Paths, schema: pa.Schema | None = None) -> None:
        self._splits: list[tuple[str, int]] = []
        schemas: dict[str, pa.Schema] = {}
        for path in files_of(paths):
            schemas[path], groups = _schema_and_groups(path)
            self._splits.extend((path, group) for group in range(groups))
        known = dict.fromkeys(name for its in schemas.values() for name in its.names)
        if schema is None:
            schemas = {path: _without_index(its) for path, its in schemas.items()}
        missing = [name for name in schema.names if name not in known] if schema is not None else []
        if missing:
            where = next(iter(schemas)) if len(schemas) == 1 else f"any of {len(schemas)} files"
            raise UnknownName(f"no column {missing[0]!r} in {where}: there are {', '.join(known)}")
        self.schema = common_schema(schemas).remove_metadata() if schema is None else schema
        self.columns = None if schema is None else schema.names

    def for_columns(self, names: frozenset[str]) -> ParquetSource:
        """(At submission.) The same for these columns, those of them that there are."""
        narrowed = copy.copy(self)
        narrowed.schema = pa.schema([field for field in self.schema if field.name in names])
        narrowed.columns = narrowed.schema.names
        return narrowed

    def splits(self) -> list[tuple[str, int]]:
        return self._splits

    def read(self, split: tuple[str, int], offset: int) -> Iterator[pa.RecordBatch]:
        path, group = split
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


def _without_index(schema: pa.Schema) -> pa.Schema:
    """Without what no column was of the pandas frame that was written, if there are others."""
    left_out = unnamed_index(schema)
    kept = [field for number, field in enumerate(schema) if number not in left_out]
    return pa.schema(kept) if left_out and kept else schema


class ItemsSource:
    """A collection in memory, carried to the workers with the job; a split is (start, stop)."""

    bounded = True
    format: Format = "rows"
    shares = False
    """They were set apart, and each is given once."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = set_apart(items)

    def splits(self) -> list[tuple[int, int]]:
        return _slices(len(self._items))

    def read(self, split: tuple[int, int], offset: int) -> Iterator[list[Any]]:
        start, stop = split
        for first in range(start + offset, stop, LIST_ROWS):
            yield self._items[first : min(first + LIST_ROWS, stop)]


class ArrowItemsSource:
    """An Arrow table in memory, carried to the workers with the job; a split is (start, stop)."""

    bounded = True
    format: Format = "arrow"

    def __init__(self, table: pa.Table | pa.RecordBatch) -> None:
        self._table = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table

    def splits(self) -> list[tuple[int, int]]:
        return _slices(self._table.num_rows)

    def read(self, split: tuple[int, int], offset: int) -> Iterator[pa.RecordBatch]:
        start, stop = split
        piece = self._table.slice(start + offset, max(0, stop - start - offset))
        yield from piece.to_batches(max_chunksize=BATCH_ROWS_MAX)


def _slices(size: int) -> list[tuple[int, int]]:
    count = min(size, SLICES_MAX)
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


class GeneratorSource:
    """Records by number: ``fn(start, count)`` gives those numbered start to start + count - 1.

    ``fn`` returns a list of rows or, with ``format="arrow"``, a RecordBatch, of exactly ``count``
    records, and the same for the same numbers at each call. Blocks of consecutive numbers are dealt
    to the splits in turn. ``rate`` is records/s of the whole source; ``records`` is the total, or
    None for a source without end.

    Raises:
        UsageError: ``rate``, ``records`` or ``splits`` is out of range, or ``fn`` returns another
            number of records.
    """

    def __init__(
        self,
        fn: Callable[[int, int], Batch],
        rate: float | None = None,
        records: int | None = None,
        splits: int = SLICES_MAX,
        format: Format = "rows",
    ) -> None:
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate <= RATE_MAX):
            raise UsageError(f"rate is {rate!r}: give records per second above 0, or leave it out")
        if records is not None and not (isinstance(records, int) and records >= 0):
            raise UsageError(
                f"records is {records!r}: give a whole number from 0 on, or leave it out for no end"
            )
        if splits < 1:
            raise UsageError(f"splits is {splits}: give at least 1")
        self.fn = fn
        self.rate = rate
        self.records = records
        self.bounded = records is not None
        self.format = format
        self._splits = splits
        self._block = self._block_records()

    def _block_records(self) -> int:
        block: float = GENERATED_ROWS if self.format == "arrow" else LIST_ROWS
        if self.rate is not None:
            block = min(self.rate / self._splits / TURNS_PER_SECOND, BATCH_ROWS_MAX)
        if self.records is not None:
            block = min(block, -(-self.records // self._splits))
        return max(1, int(block))

    def splits(self) -> range:
        return range(self._splits)

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        turn, within = divmod(offset, self._block)
        while True:
            block_start = (turn * self._splits + split) * self._block
            stop = block_start + self._block
            if self.records is not None:
                stop = min(stop, self.records)
            count = stop - block_start - within
            if count <= 0:
                return
            batch = self.fn(block_start + within, count)
            kind = pa.RecordBatch if self.format == "arrow" else list
            if not isinstance(batch, kind):
                raise UsageError(
                    f"the generator's function gave a {type(batch).__name__}: return a {kind.__name__}, "
                    "or say format='arrow' for record batches"
                )
            if len(batch) != count:
                raise UsageError(
                    f"the generator's function was asked for {count} records from number "
                    f"{block_start + within} on and gave {len(batch)}: return exactly as many"
                )
            yield batch
            turn, within = turn + 1, 0


def number_rows(start: int, count: int) -> list[int]:
    """What a generator gives without a function: ``count`` integers from ``start`` on."""
    return list(range(start, start + count))


def number_batch(start: int, count: int) -> pa.RecordBatch:
    """The same as the int64 column ``number``."""
    return pa.RecordBatch.from_pydict({"number": np.arange(start, start + count, dtype=np.int64)})
