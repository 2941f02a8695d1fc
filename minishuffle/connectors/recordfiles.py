"""Record batches of files that are read from first to last, and what becomes of records that cannot be read.

A file is read in blocks of whole records. If one cannot be read, it is halved until the records at fault are
alone: each is judged by itself, wherever the blocks were cut and reading began. They count as records of the
split like all others, so that its positions do not depend on what was left out.
"""

from __future__ import annotations

import io
import math
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Final, Literal, TypeAlias

import pyarrow as pa

from minishuffle.connectors.filerecords import Block, Splitter, line_at, record_blocks
from minishuffle.connectors.files import Paths, decompressed, files_of
from minishuffle.connectors.inferred import InferredTypes, Part, UnfitNumber
from minishuffle.errors import UsageError, WrongInput
from minishuffle.exchange.rows import preview
from minishuffle.exchange.schemas import with_innermost
from minishuffle.limits import (
    BATCH_ROWS_MAX,
    CSV_BLOCK_BYTES,
    DEAD_LETTER_CHARS,
    INFERRED_FILE_BYTES_MAX,
    MIB,
)
from minishuffle.operators.base import Portion
from minishuffle.operators.wider_type import in_schema

__all__ = [
    "CORRECT",
    "Kinds",
    "OnFault",
    "RecordFiles",
    "TooLarge",
    "is_beyond_float",
    "one_batch",
    "parsed_schema",
    "shown",
]

OnFault: TypeAlias = Literal["fail", "skip", "dead_letter"]
"""What is done about a record that cannot be read: the job ends, it is left out, or that is also logged."""
Kinds: TypeAlias = dict[Part, tuple[str, str, int]]
"""What the first value of each part is, with the file and the line that it is in."""

_LEAVE_OUT: Final = "or leave such records out: on_error='skip' or 'dead_letter'"
CORRECT: Final = f"correct the file, {_LEAVE_OUT}"
"""What to do about a record that can be read in no types."""
_NOT_TEXT: Final = (
    "it is not UTF-8",
    "convert the file first, with iconv for example, declare what is no text as bytes with schema=, "
    f"{_LEAVE_OUT}",
)
"""What is wrong with a record where only ``schema`` could say that a column is bytes, and what to do."""
_MIXED: Final = (
    "correct the file, or declare with schema= what the column is to be, and leave records out that do not "
    "fit: on_error='skip' or 'dead_letter'"
)
"""What to do about values that have no type in common."""
_JUDGED_MAX: Final = 1024
"""Records of which the bad ones are looked for at once, so that a task with many hears of a cancel soon."""
_LETTERS: Final = 64
"""Records left out after which what was read is given away."""
_SINGLY_MAX: Final = 8
"""Records that are tried one by one if they cannot be read together."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one file is read."""

    path: str
    names: Sequence[str]
    own: pa.Schema


class TooLarge(UsageError):
    """A file is larger than INFERRED_FILE_BYTES_MAX, and no schema is declared. ``why`` is the text without
    ``advice``."""

    advice = "declare them with schema="

    def __init__(self, path: str) -> None:
        self.why = (
            f"{path} has more than {INFERRED_FILE_BYTES_MAX // MIB} MiB, and all of it would be read for the "
            "types of its columns"
        )
        super().__init__(f"{self.why}: {self.advice}")


class RecordFiles:
    """Record batches of files; a split is a file.

    ``schema`` None: the one that holds what :meth:`whole` makes of all files. Each is read in its own types
    then, and converted, so that a value that does not fit is noticed. With ``head`` it is that of the first
    so many records of each file: a guess, to show to somebody.

    Raises:
        TooLarge: without ``schema`` and ``head``.
        UsageError: without ``schema``, a file cannot be read, or is not UTF-8; a column has types with none
            in common, or numbers that no type holds.
        WrongInput: (also from ``read``) with "fail", a record cannot be read; named with file and line. (From
            ``read``) a file has changed since it was listed.
    """

    bounded = True
    format: Literal["arrow"] = "arrow"
    finds_times: ClassVar[bool] = False
    """What :meth:`whole` has as texts may be times."""

    def __init__(
        self,
        paths: Paths,
        schema: pa.Schema | None,
        splitter: Splitter,
        on_error: OnFault,
        *,
        header: bool,
        head: int | None = None,
    ) -> None:
        if on_error not in ("fail", "skip", "dead_letter"):
            raise UsageError(f"on_error is {on_error!r}: write 'fail', 'skip' or 'dead_letter'")
        listed = files_of(paths)
        self._splits = [file.path for file in listed]
        self._listed = {file.path: file for file in listed}
        self._splitter = splitter
        self._on_error = on_error
        self.header = header
        """The first record of each file names its columns."""
        self._head = head
        self._own: dict[str, pa.Schema] = {}
        self._is_inferred = schema is None
        for field in schema or ():
            self._check_type(field)
        self.schema = self._inferred() if schema is None else schema

    # --- the format ------------------------------------------------------------------------------

    def whole(self, file: io.BytesIO) -> pa.Table:
        """The file in types that are inferred from all of it."""
        raise NotImplementedError

    def literals(self, file: io.BytesIO, parts: Collection[Part]) -> Iterator[tuple[Part, int, str]]:
        """All numbers of those parts as they stand in the file, each with the line of its record."""
        raise NotImplementedError

    def parse(self, data: bytes, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Whole records of a file with columns of those ``names``, as the columns of ``schema``.

        Raises:
            pa.ArrowException: they cannot be read so.
        """
        raise NotImplementedError

    def names_of(self, path: str) -> Sequence[str]:
        """The columns of the file, if they are the same in each record."""
        return ()

    def is_sound(self, data: bytes, names: Sequence[str]) -> bool:
        """Whether all records can be read together in some types."""
        raise NotImplementedError

    def fault(self, record: bytes, names: Sequence[str]) -> tuple[str, str] | None:
        """Why the record cannot be read in any types, and what to do about it; None if it can."""
        raise NotImplementedError

    def value(self, record: bytes, names: Sequence[str], name: str) -> str:
        """What the record has in a column, as it stands there."""
        raise NotImplementedError

    def advice(self, value: str) -> str:
        """What helps if a value, as :meth:`value` shows it, does not fit."""
        return "correct the file or the schema"

    def mixture(self, path: str, data: bytes, known: Kinds) -> tuple[int, str] | None:
        """The line of the first value in a file that goes with none before it, and what is wrong; ``known``
        says what those of other files are, and is added to."""
        return None

    def of_no_rows(self, schema: pa.Schema) -> pa.Table:
        """What is parsed of a file that has these columns and no values. Raises ArrowException: it cannot
        have one of a type."""
        raise NotImplementedError

    def _check_type(self, field: pa.Field) -> None:
        """Raises UsageError if no value can be of that type: all records would be left out."""
        schema = pa.schema([field.with_nullable(True)])
        try:
            in_schema(self.of_no_rows(schema), schema, "a file")
        except (pa.ArrowException, UsageError) as error:
            raise UsageError(
                f"column {field.name!r} is declared as {field.type}, which is not read from such files: "
                "declare it as str, or as what it holds, and make the type of that with map_batches()"
            ) from error

    # --- reading ---------------------------------------------------------------------------------

    def splits(self) -> list[str]:
        return self._splits

    def read(self, split: str, offset: int) -> Iterator[pa.RecordBatch | Portion]:
        self._listed[split].check_unchanged()
        shape = _Shape(split, self.names_of(split), self._own.get(split, self.schema))
        number = 0
        """Records before the block."""
        with decompressed(split) as file:
            for block in self._blocks(file):
                batch = self._whole_block(shape, block)
                if batch is None:
                    spans = [(0, len(block.data))] if block.is_cut else list(self._splitter.spans(block.data))
                    wanted = range(max(0, offset - number), len(spans))
                    yield from self._judged(shape, block, spans, wanted, before=number)
                    number += len(spans)
                    continue
                for start in range(max(0, offset - number), batch.num_rows, BATCH_ROWS_MAX):
                    yield batch.slice(start, BATCH_ROWS_MAX)
                number += batch.num_rows

    def _blocks(self, file: io.BufferedIOBase) -> Iterator[Block]:
        """The file without its header, in blocks of at least one record each."""
        is_header = self.header
        for block in record_blocks(file, self._splitter, CSV_BLOCK_BYTES):
            span = next(self._splitter.spans(block.data), None)
            if span is not None and is_header:
                is_header = False
                block = Block(block.offset + span[1], block.data[span[1] :])
                span = next(self._splitter.spans(block.data), None)
            if span is not None:
                yield block

    def _read(self, shape: _Shape, data: bytes) -> pa.RecordBatch:
        if self._is_inferred and not _is_text(data):
            raise pa.ArrowInvalid(_NOT_TEXT[0])
        return in_schema(self.parse(data, shape.names, shape.own), self.schema, shape.path)

    def _whole_block(self, shape: _Shape, block: Block) -> pa.RecordBatch | None:
        """The block; None if not all of its records can be read. Raises WrongInput: that must not be."""
        error: Exception | None = None
        if not block.is_cut and not self._splitter.is_open(block.data):
            try:
                batch = self._read(shape, block.data)
            except (pa.ArrowException, UsageError) as found:
                error = found
            else:
                if self._on_error == "fail" or self._splitter.has_records(block.data, batch.num_rows):
                    return batch
        if self._on_error == "fail":
            raise self._refusal(shape, block) from error
        return None

    def _judged(
        self, shape: _Shape, block: Block, spans: Sequence[tuple[int, int]], of: range, *, before: int
    ) -> Iterator[pa.RecordBatch | Portion]:
        """The records numbered ``of`` of a block that has some that cannot be read, and so many before it."""
        assert self._on_error != "fail"
        nothing = one_batch(self.schema.empty_table())
        good, letters, count = [nothing], list[str](), 0
        for start in range(0, len(of), _JUDGED_MAX):
            some = of[start : start + _JUDGED_MAX]
            faulty = [0] if block.is_cut else []
            if not block.is_cut:
                good += self._good(shape, block, spans, some, faulty)
            letters += [self._letter(shape, block, before + place, spans[place]) for place in faulty]
            count += len(some)
            is_full = len(letters) >= _LETTERS or count + _JUDGED_MAX > BATCH_ROWS_MAX
            if is_full or some[-1] == of[-1]:
                batch = pa.concat_batches(good)
                yield Portion(batch, count, self._on_error, letters) if letters else batch
                good, letters, count = [nothing], [], 0

    def _good(
        self, shape: _Shape, block: Block, spans: Sequence[tuple[int, int]], of: range, faulty: list[int]
    ) -> Iterator[pa.RecordBatch]:
        """What can be read of the records numbered ``of``; the numbers of others are added to ``faulty``."""
        data = block.data[spans[of[0]][0] : spans[of[-1]][1]]
        if (batch := self._readable(shape, data, len(of))) is not None:
            yield batch
        elif len(of) == 1:
            faulty.append(of[0])
        else:
            step = 1 if len(of) <= _SINGLY_MAX else (len(of) + 1) // 2
            for start in range(0, len(of), step):
                yield from self._good(shape, block, spans, of[start : start + step], faulty)

    def _readable(self, shape: _Shape, data: bytes, count: int) -> pa.RecordBatch | None:
        """The ``count`` records of these bytes; None if one cannot be read, or there are not as many."""
        if count == 1 and self._splitter.is_open(data):
            return None
        try:
            batch = self._read(shape, data)
        except (pa.ArrowException, UsageError):
            return None
        return batch if batch.num_rows == count else None

    # --- what is wrong ---------------------------------------------------------------------------

    def _letter(self, shape: _Shape, block: Block, number: int, span: tuple[int, int]) -> str:
        if self._on_error == "skip":
            return ""
        text = block.data[span[0] : span[1]]
        why = "it is too long" if block.is_cut else self._why(shape, text)[0]
        return (
            f"{shape.path}, record {number + 1}, byte {block.offset + span[0]}: {why}: text "
            f"{shown(text, DEAD_LETTER_CHARS)}"
        )

    def _refusal(self, shape: _Shape, block: Block) -> WrongInput:
        """The error for the first record of the block that cannot be read."""
        spans = list(self._splitter.spans(block.data))
        first, end = 0, len(spans)
        while end - first > 1:
            middle = (first + end) // 2
            data = block.data[spans[first][0] : spans[middle - 1][1]]
            is_fine = self._readable(shape, data, middle - first) is not None
            first, end = (middle, end) if is_fine else (first, middle)
        start, end = spans[first]
        with decompressed(shape.path) as file:
            where = f"{shape.path}, line {line_at(file, block.offset + start)}"
        if block.is_cut:
            return WrongInput(
                f"{where}: a record has more than {CSV_BLOCK_BYTES // MIB} MiB, or a quotation mark is not "
                f"closed: correct the file, convert it to Parquet, {_LEAVE_OUT}"
            )
        why, advice = self._why(shape, block.data[start:end])
        return WrongInput(f"{where}: {why}: {shown(block.data[start:end])}: {advice}")

    def _why(self, shape: _Shape, record: bytes) -> tuple[str, str]:
        """Why a record cannot be read, and what to do about it."""
        fault = self._fault(record, shape.names)
        if fault is not None:
            return fault
        for field in shape.own:
            if len(found := self.schema.get_all_field_indices(field.name)) > 1:
                continue  # without a name
            kind = self.schema.field(found[0])
            try:
                parsed = self.parse(record, shape.names, pa.schema([field]))
                in_schema(parsed, pa.schema([kind]), shape.path)
            except (pa.ArrowException, UsageError):
                value = self.value(record, shape.names, field.name)
                nullable = "" if kind.nullable else ", not null"
                return (
                    f"column {kind.name!r} has {value}, which does not fit {kind.type}{nullable}",
                    f"{self.advice(value)}, {_LEAVE_OUT}",
                )
        return "it cannot be read", CORRECT

    def _fault(self, record: bytes, names: Sequence[str]) -> tuple[str, str] | None:
        """As :meth:`fault`, in types that are inferred if there is no schema."""
        if record.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            return "the file is UTF-16", "convert it to UTF-8, with iconv for example"
        fault = self.fault(record, names)
        return _NOT_TEXT if fault is None and self._is_inferred and not _is_text(record) else fault

    # --- types that nobody declares --------------------------------------------------------------

    def _inferred(self) -> pa.Schema:
        """The schema for all files, without columns if there are none. A column without values is text."""
        types = InferredTypes(self.finds_times)
        for path in self._splits:
            self._infer(path, types)
        try:
            own, schema = types.own(), types.common()
        except UnfitNumber as error:
            place = error.place
            data = self._all_of(place.path)
            file = io.BytesIO(data if self._on_error == "fail" else self._sound(place.path, data))
            line = next(
                line
                for _, line, literal in self.literals(file, [place.part])
                if literal == place.literal or _is_integer(literal, place.literal)
            )
            advice = "declare its type with schema=, such as float64, which rounds it"
            raise UsageError(
                f"{place.path}, line {line}: column {place.name!r} has {place.literal:.40}, {error}: "
                f"{'correct the file' if is_beyond_float(place.literal) else advice}"
            ) from None
        except UsageError:
            self._refuse_mixture()
            raise
        schema = pa.schema(
            field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema
        )
        self._own = {path: each for path, each in own.items() if not each.equals(schema)}
        return schema

    def _infer(self, path: str, types: InferredTypes) -> None:
        data = self._all_of(path)
        try:
            try:
                table = self.whole(io.BytesIO(data)) if _is_text(data) else None
            except pa.ArrowException:
                table = None
            if table is None:
                data = self._sound(path, data)
                table = self.whole(io.BytesIO(data))
            if unclear := types.add(path, table):
                types.tell(path, self.literals(io.BytesIO(data), unclear))
        except pa.ArrowException as error:
            if any(f"Empty {kind} file" in str(error) for kind in ("CSV", "JSON")):
                return
            line, why = self.mixture(path, data, {}) or (0, str(error))
            raise WrongInput(f"{path}{f', line {line}' if line else ''}: {why}: {_MIXED}") from error

    def _refuse_mixture(self) -> None:
        """Raises WrongInput for the first value that goes with none of the files before it, if there is
        one."""
        known: Kinds = {}
        for path in self._splits:
            data = self._all_of(path)
            found = self.mixture(path, data if self._on_error == "fail" else self._sound(path, data), known)
            if found is not None:
                raise WrongInput(f"{path}, line {found[0]}: {found[1]}: {_MIXED}")

    def _all_of(self, path: str) -> bytes:
        """The file's bytes, decompressed; with ``head``, the header and the first ``head`` records, of one
        block at most.

        Raises:
            TooLarge: without ``head``, if there are more than INFERRED_FILE_BYTES_MAX bytes.
        """
        with decompressed(path) as file:
            if self._head is not None:
                return self._head_of(file, self._head)
            data = file.read(INFERRED_FILE_BYTES_MAX + 1).removeprefix(BOM_UTF8)
        if len(data) > INFERRED_FILE_BYTES_MAX:
            raise TooLarge(path)
        return data

    def _head_of(self, file: io.BufferedIOBase, records: int) -> bytes:
        """The first so many records, as far as one block has them, and the header before them."""
        block = next(record_blocks(file, self._splitter, CSV_BLOCK_BYTES), None)
        if block is None or block.is_cut:
            return b""
        spans = list(islice(self._splitter.spans(block.data), records + self.header))
        return block.data[: spans[-1][1]] + b"\n" if spans else b""

    def _sound(self, path: str, data: bytes) -> bytes:
        """A file's bytes with empty lines for records that cannot be read in any types. Raises WrongInput:
        there are such, and they must not be left out."""
        names = self.names_of(path)
        if any("\N{REPLACEMENT CHARACTER}" in name for name in names) and not _is_text(data):
            raise UsageError(
                f"{path}: its first line is not UTF-8: convert the file first, with iconv for example"
            )
        kept: list[bytes] = []
        end = 0
        for block in self._blocks(io.BytesIO(data)):
            if not block.is_cut and _is_text(block.data) and self.is_sound(block.data, names):
                continue
            for start, behind in self._splitter.spans(block.data):
                record = block.data[start:behind]
                fault = ("it is too long", CORRECT) if block.is_cut else self._fault(record, names)
                if fault is None:
                    continue
                if block.is_cut or self._on_error == "fail":
                    line = line_at(io.BytesIO(data), block.offset + start)
                    raise WrongInput(f"{path}, line {line}: {fault[0]}: {shown(record)}: {fault[1]}")
                kept += data[end : block.offset + start], b"\n" * record.count(b"\n")
                end = block.offset + behind
        return b"".join([*kept, data[end:]])


def _is_integer(literal: str, integer: str) -> bool:
    """Whether a literal, which may have blanks around it and zeros in front, is that integer other than 0."""
    found = literal.strip().lstrip("+-").lstrip("0")
    return found == integer.lstrip("-") and literal.strip().startswith("-") == integer.startswith("-")


def _is_text(data: bytes) -> bool:
    """Whether it is UTF-8."""
    ends = pa.array([0, len(data)], pa.int64()).buffers()[1]
    try:
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def is_beyond_float(literal: str) -> bool:
    """Whether it is a number, of finite size, that no float64 holds: pyarrow makes infinity of it."""
    return literal.strip()[-1:].isdecimal() and math.isinf(float(literal))


def parsed_schema(schema: pa.Schema, parsed: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    """What pyarrow is to make of texts, which becomes ``schema`` by casts: ``parsed`` of each type that holds
    no others, and float64 for shorter floats, since pyarrow has no word for numbers too large for these."""

    def replaced(kind: pa.DataType) -> pa.DataType:
        found = parsed(kind)
        return pa.float64() if pa.types.is_floating(found) else found

    return pa.schema([field.with_type(with_innermost(field.type, replaced)) for field in schema])


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """All rows of the table together."""
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays(
        [pa.array([], kind) for kind in table.schema.types], schema=table.schema
    )


def shown(record: bytes, chars: int = 200) -> str:
    """The text of a record for errors and logs."""
    return preview(record.rstrip(b"\r\n").decode("utf-8", "replace"), chars)
