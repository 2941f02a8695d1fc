"""The sink that writes files, one after the other, which count once the coordinator has listed them.

A subtask's part is hidden (its name begins with a dot) while it is written. When it is complete, the sink
reports its rows and checksum to the coordinator, which acknowledges once it is in the manifest; only then
the part gets its name. Spark, pyarrow and pandas leave out names with a dot, so whoever reads the directory
sees listed parts only, and each row once. An attempt that died in between leaves hidden parts: the next
one names those that are listed, and removes the others, whose rows were lost with it. (Flink: ``FileSink``,
whose parts are in progress, pending and finished.)

In a job that loses nothing a part is listed once a snapshot that was taken behind its end is safe. The first
rows of the next one, which wait in memory for a row group, are in the snapshot. While a row group is in the
file no snapshot is taken: the rows are retained by their producers. The part is completed early where they
cannot wait.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from minishuffle.errors import CannotWrite, LocalProtocolError, ResourceExhausted, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.schemas import (
    with_columns_of,
    with_innermost,
    with_long_dictionary,
    with_types,
    without_dictionary,
    without_view,
)
from minishuffle.exchange.sizes import pieces
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.limits import (
    BATCH_ROWS_MAX,
    FILE_SNAPSHOT_BYTES_MAX,
    FILE_SNAPSHOT_SECONDS_MAX,
    MIB,
)
from minishuffle.operators.base import CompleteFile, Emit, OutputFiles, TaskContext
from minishuffle.operators.chained import ChainedOperator, preview
from minishuffle.operators.row_conversion import RowsToArrow, schema_with_rows
from minishuffle.operators.wider_type import in_schema, require_own_names

__all__ = ["FileSink", "Roll"]

WHERE: Final = "the file sink"
"""What errors about columns name."""
ROW_GROUP_BYTES: Final = 64 * MIB
"""Columns in memory that make a row group, if BATCH_ROWS_MAX rows have fewer."""
CLOSED_EARLY: Final = "files_closed_early", "Files that were completed before they were due, for a snapshot."


@dataclass(frozen=True, slots=True)
class Roll:
    """When a part is complete: so long after its first row, or with so many rows or bytes.

    A part may be longer than ``bytes`` by a row group.
    """

    seconds: float
    rows: int
    bytes: int


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """An OSError within becomes a ResourceExhausted that names the path."""
    try:
        yield
    except OSError as error:
        raise ResourceExhausted(
            f"{path} cannot be written: {error.strerror}; see that there is room and that it may be written"
        ) from error


def _directory_of(path: str | Path) -> Path:
    """Raises UsageError: no directory can have that path."""
    try:
        if not str(path):
            raise ValueError("it is empty")
        directory = Path(path).expanduser().resolve()
        directory.exists()  # which looks whether it could
        os.fsencode(directory)
    except (OSError, RuntimeError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        text = f"{preview(path)} cannot be the path of a directory ({said}): give another"
        raise UsageError(text) from error
    return directory


class _CheckedFile(io.RawIOBase):
    """A new file that knows the checksum of what was written to it.

    Raises:
        ResourceExhausted: it cannot be written, e.g. because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.size = 0
        self._checksum = hashlib.sha256()
        self._path = path
        with _errors_of(path):
            self._file = path.open("xb", buffering=0)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        with _errors_of(self._path):
            while at < len(view):
                at += self._file.write(view[at:])
        self._checksum.update(view)
        self.size += at
        return at

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def sync(self) -> str:
        """Have it outlive this machine; gives the checksum."""
        with _errors_of(self._path):
            os.fsync(self._file.fileno())
        return self._checksum.hexdigest()


def filed_types(schema: pa.Schema) -> list[pa.DataType]:
    """The types of the columns in files: no views inside of others, and no dictionaries but unordered ones of
    texts and bytes.

    pyarrow writes no others, or writes those of durations as numbers.
    """
    return [
        with_innermost(with_innermost(kind, _filed_dictionary), without_view)
        if kind.num_fields
        else _filed_dictionary(kind)
        for kind in schema.types
    ]


def _filed_dictionary(kind: pa.DataType) -> pa.DataType:
    if not pa.types.is_dictionary(kind):
        return kind
    long = with_long_dictionary(kind)
    plain = without_dictionary(kind)
    is_filed = plain in _FILED_IN_DICTIONARIES and not pa.types.is_dictionary(kind.value_type)
    # An exchange loses the order of categories: one by which they first came would be another.
    return long if is_filed and not kind.ordered else plain


_FILED_IN_DICTIONARIES: Final = {pa.string(), pa.large_string(), pa.binary(), pa.large_binary()}


def check_writable(schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: a Parquet file cannot have these columns, or nobody could tell two of them apart.
    """
    require_own_names(schema, WHERE)
    for field in schema:
        try:
            pq.ParquetWriter(io.BytesIO(), pa.schema([field])).close()
        except (pa.ArrowException, OSError) as error:
            raise UsageError(
                f"{WHERE} writes Parquet, which has nothing for column {field.name!r} of type {field.type} "
                f"({error}): give it another type, or drop() it"
            ) from error


class _Part:
    """A Parquet file that is being written."""

    def __init__(self, hidden: Path, visible: Path, opened_at: float) -> None:
        self.hidden = hidden
        self.visible = visible
        self.opened_at = opened_at
        self.rows = 0
        """Those that are kept for the next row group included."""
        self.kept_bytes = 0
        self._kept: list[pa.RecordBatch] = []
        self._kept_rows = 0
        self._file: _CheckedFile | None = None
        self._writer: pq.ParquetWriter | None = None

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return 0 if self._file is None else self._file.size

    def room(self, rows: int) -> int:
        """How many rows there are until it has so many."""
        return rows - self.rows

    def keep(self, batch: pa.RecordBatch) -> None:
        self._kept.append(batch)
        self._kept_rows += batch.num_rows
        self.kept_bytes += batch.nbytes
        self.rows += batch.num_rows

    def write_row_group(self, schema: pa.Schema) -> None:
        """Small batches are put together, so that a row group is worth reading. ``schema`` holds all that are
        kept; it is the same for each row group of the part."""
        if self._writer is None:
            self._begin(schema)
        if self._kept:
            assert self._writer is not None
            batches = [in_schema(batch, schema, WHERE) for batch in self._kept]
            self._writer.write_table(pa.Table.from_batches(batches, schema))
        self._kept, self._kept_rows, self.kept_bytes = [], 0, 0

    def kept_rows(self, schema: pa.Schema) -> bytes:
        """All of its rows, none of which is in the file, as an Arrow stream in types that hold them."""
        stream = io.BytesIO()
        with pa.ipc.new_stream(stream, schema) as writer:
            for batch in self._kept:
                writer.write_batch(in_schema(batch, schema, WHERE))
        return stream.getvalue()

    @property
    def has_types(self) -> bool:
        """Whether its first row group is written, in types that are those of all of its row groups."""
        return self._writer is not None

    @property
    def has_row_group(self) -> bool:
        """Whether it has kept enough for one."""
        return self._kept_rows >= BATCH_ROWS_MAX or self.kept_bytes >= ROW_GROUP_BYTES

    def _begin(self, schema: pa.Schema) -> None:
        check_writable(schema)
        self._file = _CheckedFile(self.hidden)
        self._writer = pq.ParquetWriter(self._file, schema)

    def complete(self) -> str:
        """Nothing more is written to it; gives its checksum."""
        assert self._writer is not None and self._file is not None
        self._writer.close()
        checksum = self._file.sync()
        self._file.close()
        return checksum

    def _close(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.close()

    def discard(self) -> None:
        """It will not be complete."""
        try:
            self._close()
        finally:
            self.hidden.unlink(missing_ok=True)


_PERMANENT: Final = frozenset(
    {errno.EACCES, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM}
    | {errno.EROFS}
)
"""Why a directory cannot be made, and not at the next attempt either."""


class FileSink(ChainedOperator):
    """Writes ``path/part-<subtask>-<attempt>-<number>.parquet``; the result is {"files", "rows"}.

    Dict rows become columns by name, pairs the columns ``key`` and ``value``, longer tuples ``c0``, ``c1``,
    …, anything else the column ``value``. A part has the types that hold its first row group, and those of
    the parts before it. A later row that does not fit, which has another type or a column not seen before,
    completes the part and begins the next, whose types hold that row and all before: from part to part a
    subtask's types only become wider, also after a restart. A subtask without rows writes nothing, but the
    first one an empty file if ``schema`` is given: so a table of no rows can be read. A subtask that fails
    keeps the parts that were complete.

    Raises:
        UsageError: ``path`` already holds Parquet files, is no directory or cannot be one, rows have other
            columns than the first ones, or values of types that have none in common or that Parquet does not
            have.
    """

    name = "to_files"
    reports = True
    only_reads = True

    def __init__(self, path: str | Path, roll: Roll, schema: pa.Schema | None = None) -> None:
        self.path = str(_directory_of(path))
        self.roll = roll
        self._known = None if schema is None else with_types(schema, filed_types(schema))
        """Types of all files; None: of files of rows, which are those that hold the rows."""
        if self._known is not None:
            check_writable(self._known)
        self._token = uuid4().hex[:12]
        """In the names of its hidden parts, beside the job's id, which another cluster's may have too."""
        self._opened = False
        self.claim()

    def claim(self) -> str:
        """
        Raises:
            UsageError: there are Parquet files already, or it is a file.
        """
        directory = Path(self.path)
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"{directory} is a file: give the path of a directory for the Parquet parts")
        found = (each.name for each in directory.glob("*.parquet") if not each.name.startswith("."))
        if (name := next(found, None)) is not None:
            raise UsageError(
                f"{directory} already holds Parquet files ({name}): remove them or give another path; a "
                "program that runs again removes them first, with shutil.rmtree, or has the date in its path"
            )
        return self.path

    def open(self, context: TaskContext) -> None:
        super().open(context)
        if context.files is None:
            raise LocalProtocolError(f"{self.name}: this task was given nobody to report its files to")
        self._files: OutputFiles = context.files
        self._directory = Path(self.path)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            never = error.errno in _PERMANENT and context.attempt == FIRST_ATTEMPT
            kind = CannotWrite if never else UsageError
            raise kind(f"cannot write into {self._directory}: {error.strerror}") from error
        self._schema: pa.Schema | None = None
        """What holds the rows so far; None: there were none."""
        self._part: _Part | None = None
        self._pending: deque[_Part] = deque()
        """Complete parts that are not listed yet, as far as is known here."""
        self._named = 0
        """Parts that have got their name."""
        self._rows = 0
        """Rows of complete parts."""
        self._finished = False
        self._opened = True
        self._adopts = bool(self._files.adopted)
        """Parts of earlier attempts are about to be listed, and have yet to get their names."""
        self._settle_earlier()
        self._schema = self._known or self._earlier_types()
        if self._files.sink_state and not self._files.is_complete:
            self._write_on(self._files.sink_state)

    def _write_on(self, rows: bytes) -> None:
        """Begin with the rows of the part that was open in the snapshot."""
        with pa.ipc.open_stream(rows) as stream:
            self._schema = stream.schema
            for batch in stream:
                self._keep(batch)

    # --- parts of earlier attempts ---------------------------------------------------------------

    def _hidden_prefix(self) -> str:
        return f".{self.context.job}.{self._token}."

    def _hidden_parts(self) -> Iterator[tuple[Path, int, int]]:
        """The hidden files of this subtask, with attempt and number."""
        pattern = re.compile(rf"part-{self.context.index:05}-(\d+)-(\d+)\.parquet")
        for hidden in self._directory.glob(f"{self._hidden_prefix()}*"):
            found = pattern.fullmatch(hidden.name.removeprefix(self._hidden_prefix()))
            if found is not None:
                yield hidden, int(found[1]), int(found[2])

    def _settle_earlier(self) -> None:
        """Give listed parts that earlier attempts have left hidden their names, and remove the others, except
        those that are about to be listed."""
        adopted = {(file.attempt, file.number) for file in self._files.adopted}
        for hidden, attempt, number in list(self._hidden_parts()):
            if attempt >= self.context.attempt:
                continue
            if number < self._files.listed.get(attempt, 0):
                _publish(hidden, self._directory / hidden.name.removeprefix(self._hidden_prefix()))
            elif (attempt, number) not in adopted:
                hidden.unlink(missing_ok=True)

    def _name_adopted(self) -> None:
        if self._has_adopted():
            self._adopts = False
            self._settle_earlier()

    def _has_adopted(self) -> bool:
        """Whether all that it has adopted is listed, and not named so far."""
        listed = self._files.listed
        return self._adopts and all(file.number < listed.get(file.attempt, 0) for file in self._files.adopted)

    def _earlier_types(self) -> pa.Schema | None:
        """Those of the last part of earlier attempts, which the next parts hold too; None: there is none to
        be read."""
        counts = {attempt: count for attempt, count in self._files.listed.items() if count}
        counts |= {file.attempt: file.number + 1 for file in self._files.adopted}
        if not counts:
            return None
        last = max(counts)
        name = self._part_name(last, counts[last] - 1)
        for path in (self._directory / name, self._directory / f"{self._hidden_prefix()}{name}"):
            with suppress(OSError, pa.ArrowException):
                return pq.read_schema(path)
        return None

    def _part_name(self, attempt: int, number: int) -> str:
        return f"part-{self.context.index:05}-{attempt}-{number:05}.parquet"

    # --- writing ---------------------------------------------------------------------------------

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if self._files.is_complete:
            return
        payload = batch.payload
        if not isinstance(payload, list):
            columns = with_columns_of(payload, filed_types(payload.schema))
            # Exchanges decode dictionaries, but for what stays in the worker.
            self._write(in_schema(columns, self._known, WHERE))
            return
        for piece in pieces(batch):
            if piece.payload:
                self._write_rows(_named(piece.payload))

    def _write(self, batch: pa.RecordBatch) -> None:
        self._schema = self._known
        at = 0
        while at < batch.num_rows:
            piece = batch.slice(at, self._current().room(self.roll.rows))
            self._keep(piece)
            at += piece.num_rows

    def _write_rows(self, rows: list[Any]) -> None:
        while rows:
            part = self._current()
            some = rows[: part.room(self.roll.rows)]
            fitting = self._fitting(some) if part.has_types else some
            if fitting:
                if not part.has_types:
                    self._schema = schema_with_rows(self._schema, some)
                assert self._schema is not None
                self._keep(RowsToArrow(self._schema, inferred=True).convert(fitting))
                rows = rows[len(fitting) :]
            else:
                self._take_types(self._with_row(some[0]))

    def _fitting(self, rows: list[Any]) -> list[Any]:
        """The first of the rows, as many as fit the part's types."""
        assert self._schema is not None
        converter = RowsToArrow(self._schema, inferred=True)
        fitting, odd = 0, len(rows) + 1
        middle = len(rows)  # All of them are looked at first.
        while odd - fitting > 1:  # The rows before ``fitting`` fit, and those before ``odd`` do not.
            try:
                converter.convert(rows[fitting:middle])
                fitting = middle
            except UsageError:
                odd = middle
            middle = (fitting + odd) // 2
        return rows[:fitting]

    def _with_row(self, row: Any) -> pa.Schema:
        """The types of the parts so far made to hold a row that does not fit them.

        Raises:
            UsageError: none do.
        """
        wider = schema_with_rows(self._schema, [row])
        RowsToArrow(wider, inferred=True).convert([row])
        return wider

    def _take_types(self, schema: pa.Schema) -> None:
        """The next rows have these types, and a part with others is complete."""
        part, before, self._schema = self._part, self._schema, schema
        if part is not None and before is not None and part.has_types and not schema.equals(before):
            self._complete(before)
            self.context.log(
                f"{self.name}: {part.visible.name} ends after {part.rows:,} rows, since the next one needs "
                f"{_changes(before, schema)}"
            )

    def _current(self) -> _Part:
        if self._part is None:
            self._part = self._begin()
        return self._part

    def _keep(self, batch: pa.RecordBatch) -> None:
        """Rows, at most as many as the part has room for."""
        part = self._current()
        part.keep(batch)
        self.context.counters.note_filed(batch.num_rows)
        if part.has_row_group or part.kept_bytes >= self.roll.bytes:
            assert self._schema is not None
            part.write_row_group(self._schema)
        if part.rows >= self.roll.rows or part.size >= self.roll.bytes:
            self._complete()

    def _begin(self) -> _Part:
        number = self._named + len(self._pending)
        name = self._part_name(self.context.attempt, number)
        hidden = self._directory / f"{self._hidden_prefix()}{name}"
        return _Part(hidden, self._directory / name, self.context.now())

    def _complete(self, schema: pa.Schema | None = None) -> None:
        """The part has all its rows: report it. Its types are ``schema``, or those of the next rows."""
        part, self._part = self._part, None
        types = schema or self._schema
        assert part is not None and types is not None
        try:
            part.write_row_group(types)
            checksum = part.complete()
        except BaseException:
            part.discard()
            raise
        number = self._named + len(self._pending)
        self._pending.append(part)
        self._rows += part.rows
        self._files.complete(CompleteFile(number, str(part.visible), part.rows, part.size, checksum))
        self._name_listed()

    def _name_listed(self) -> None:
        while self._pending and self._named < self._files.acknowledged:
            part = self._pending[0]
            _publish(part.hidden, part.visible)
            self._pending.popleft()
            self._named += 1

    # --- clocks and ends -------------------------------------------------------------------------

    def deadline(self) -> float | None:
        if (self._pending and self._named < self._files.acknowledged) or self._has_adopted():
            return 0.0
        return None if self._part is None else self._part.opened_at + self.roll.seconds

    def on_clock(self, now: float, emit: Emit) -> None:
        self._name_listed()
        self._name_adopted()
        if self._part is not None and now >= self._part.opened_at + self.roll.seconds:
            self._complete()

    def on_barrier(self, emit: Emit) -> None:
        """What came before the barrier is complete, and stays whatever comes of the task."""
        if self._part is not None:
            self._complete()
        self._files.wait()
        self._name_listed()

    def defers_snapshot(self, *, urgent: bool) -> bool:
        if self._part is None or urgent or self._is_in_memory(self._part):
            return False
        return self.context.now() < self._part.opened_at + FILE_SNAPSHOT_SECONDS_MAX

    @staticmethod
    def _is_in_memory(part: _Part) -> bool:
        """Whether all rows of an open part are, and few enough for a snapshot."""
        return not part.has_types and part.kept_bytes <= FILE_SNAPSHOT_BYTES_MAX

    def before_snapshot(self, emit: Emit) -> None:
        part, rows = self._part, b""
        if part is not None and self._is_in_memory(part):
            assert self._schema is not None
            rows = part.kept_rows(self._schema)
        elif part is not None:
            self.context.metrics.counter(*CLOSED_EARLY).add()
            self._complete()
        self._files.keep(rows)

    def finish(self, emit: Emit) -> None:
        has_parts = self._part or self._pending or self._named or any(self._files.listed.values())
        if not has_parts and self._known is not None and self.context.index == 0:
            self._schema = self._known
            self._part = self._begin()
        if self._part is not None:
            self._complete()
        self._files.finish()
        self._name_listed()
        self._settle_earlier()
        self._finished = True

    def close(self) -> dict[str, Any] | None:
        """After a failure or a cancel, what was complete still gets its name, and is what counts. What nobody
        will list any more is removed."""
        if not self._opened:
            return None
        if not self._finished:
            try:
                if self._part is not None:
                    self._part.discard()
            finally:
                if self._pending:
                    self._files.linger()
                self._name_listed()
                for part in [*self._pending][max(0, self._files.may_be_listed - self._named) :]:
                    part.hidden.unlink(missing_ok=True)
        return {"files": self._named, "rows": self._rows - sum(part.rows for part in self._pending)}


def _publish(hidden: Path, visible: Path) -> None:
    """Give a complete part its name: a link replaces nothing. It may have it already: by the attempt that
    wrote it, and that somebody takes for dead."""
    try:
        if not (visible.exists() and hidden.samefile(visible)):
            visible.hardlink_to(hidden)
    except FileNotFoundError:
        if not visible.exists():
            raise
    except FileExistsError:
        raise UsageError(
            f"{visible} is there already: another job has written into that directory; give each its own"
        ) from None
    hidden.unlink(missing_ok=True)


def _changes(before: pa.Schema, after: pa.Schema) -> str:
    """What is new in the types of the next part."""
    new = [f"{field.name!r}" for field in after if field.name not in before.names]
    wider = [
        f"{field.name!r} as {field.type} instead of {before.field(field.name).type}"
        for field in after
        if field.name in before.names and field.type != before.field(field.name).type
    ]
    return ", ".join([*wider, *(f"the column {name}" for name in new)]) or "columns that may be null"


def _named(rows: list[Any]) -> list[Any]:
    """Rows as dicts: a pair has the names key and value, a longer tuple c0, c1 and so on, and what is neither
    tuple nor dict the name value. Raises UsageError for tuples of several lengths."""
    first = rows[0]
    if isinstance(first, dict):
        return rows
    if not isinstance(first, tuple | list):
        return [{"value": row} for row in rows]
    names = ("key", "value") if len(first) == 2 else tuple(f"c{i}" for i in range(len(first)))
    odd = next((row for row in rows if not isinstance(row, tuple | list) or len(row) != len(names)), None)
    if odd is not None:
        raise UsageError(f"the file sink cannot write {first!r:.80} and {odd!r:.80} into the same columns")
    return [dict(zip(names, row, strict=True)) for row in rows]
