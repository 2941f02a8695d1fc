"""CSV files as Arrow batches of one schema."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from minishuffle.connectors.filerecords import CsvRecords
from minishuffle.connectors.files import Paths, decompressed
from minishuffle.connectors.inferred import InferredTypes, Part
from minishuffle.connectors.recordfiles import (
    CORRECT,
    OnFault,
    RecordFiles,
    is_beyond_float,
    one_batch,
    parsed_schema,
    shown,
)
from minishuffle.errors import UnknownName, UsageError, did_you_mean
from minishuffle.exchange.schemas import without_dictionary, without_view
from minishuffle.limits import CSV_BLOCK_BYTES

__all__ = ["CsvSource"]

_TOGETHER_BYTES: Final = 3 * CSV_BLOCK_BYTES
"""More than any block has."""
_SEPARATORS: Final = (";", "\t", "|", ",")
_HEXADECIMAL: Final = re.compile(rb"0[xX]")


class CsvSource(RecordFiles):
    """Record batches of UTF-8 CSV files; a split is a file. Values may be quoted and hold line ends.

    Args:
        schema: the columns to read, in this order. With a header, files may have others; a column that some
            of them lack is null there. None: those of all files, each of which is read whole, in types that
            hold the values of all.
        nulls: the spellings that stand for null, where they are not quoted.
        header: the first line of each file names its columns; else they are those of ``schema``.
        delimiter: between two values, one character of ASCII.
        on_error: what is done about a record that cannot be read.
        head: see :class:`~minishuffle.connectors.recordfiles.RecordFiles`.

    Raises:
        UnknownName: no such file, or no file's header has a column of ``schema``.
        UsageError: the delimiter cannot be one; a file or its header cannot be read; without a schema, there
            is no header, it names one column, which another delimiter would part, a file is larger than
            INFERRED_FILE_BYTES_MAX, or a column has types with none in common.
        WrongInput: (also from ``read``) with "fail", a record cannot be read; named with file and line. (From
            ``read``) a file has changed since it was listed.
    """

    def __init__(
        self,
        paths: Paths,
        schema: pa.Schema | None = None,
        nulls: Sequence[str] = ("",),
        header: bool = True,
        delimiter: str = ",",
        *,
        on_error: OnFault = "fail",
        head: int | None = None,
    ) -> None:
        _check_delimiter(delimiter)
        if not schema and not header:
            raise UsageError(
                "CSV files without a header do not name their columns: declare them with schema="
            )
        self.nulls = list(nulls)
        self.delimiter = delimiter
        super().__init__(paths, schema, CsvRecords(delimiter), on_error, header=header, head=head)
        if header:
            self._check_headers()

    def _check_headers(self) -> None:
        headers = {path: names for path in self._splits if (names := self._names(path)) is not None}
        for path, names in headers.items():
            twice = [name for name in self.schema.names if name and names.count(name) > 1]
            if twice:
                raise UsageError(
                    f"{path}: its first line names several columns {twice[0]!r}, which cannot be "
                    "distinguished: give each a name of its own"
                )
        known = dict.fromkeys(name for names in headers.values() for name in names)
        missing = [name for name in self.schema.names if name not in known]
        if not headers or not missing:
            return
        found = f"{', '.join(known):.2000}"  # All that follows, if a quotation mark is not closed.
        if "\N{REPLACEMENT CHARACTER}" in found:
            found += "; it is not UTF-8: convert the file first, with iconv for example"
        hint = did_you_mean(missing[0], known)
        if len(headers) > 1:
            where = f"any of {len(headers)} files: {hint}there are"
        else:
            where = f"{next(iter(headers))}: {hint}its first line has"
        ways = (_separator(names, self.delimiter) for names in headers.values())
        way = next((f": write delimiter={each!r}" for each in ways if each), "")
        raise UnknownName(f"no column {missing[0]!r} in {where} {found}{way}")

    def _infer(self, path: str, types: InferredTypes) -> None:
        names = (self._names(path) or []) if self.header else []
        if separator := _separator(names, self.delimiter):
            raise UsageError(
                f"{path}: its first line names one column, {names[0]!r:.200}: write delimiter={separator!r}; "
                "if that is its name, declare it, as in schema={...: 'string'}"
            )
        super()._infer(path, types)

    def _names(self, path: str) -> list[str] | None:
        """Those of its columns; None of an empty file."""
        with decompressed(path) as file:
            text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
            try:
                return next(filter(None, csv.reader(text, delimiter=self.delimiter)), None)
            except csv.Error as error:
                raise UsageError(f"{path}: its header cannot be read ({error}): correct the file") from error

    def whole(self, file: io.BytesIO) -> pa.Table:
        """With texts for integers in hexadecimal digits, which no other reader takes for numbers."""
        table = pa_csv.read_csv(_WithLastLineEnd(file), **self._options())
        names = [field.name for field in table.schema if pa.types.is_int64(field.type)]
        if not names or _HEXADECIMAL.search(file.getvalue()) is None:
            return table
        file.seek(0)
        as_texts = self._options(column_types=dict.fromkeys(names, pa.string()))
        texts = pa_csv.read_csv(_WithLastLineEnd(file), **as_texts)
        for name in names:
            if pc.any(pc.match_substring(texts[name], "x", ignore_case=True)).as_py():
                place = table.schema.get_field_index(name)
                table = table.set_column(place, name, texts[name])
        return table

    def literals(self, file: io.BytesIO, parts: Collection[Part]) -> Iterator[tuple[Part, int, str]]:
        as_texts = self._options(column_types={name: pa.string() for (name,) in parts})
        texts = pa_csv.read_csv(_WithLastLineEnd(file), **as_texts)
        lines = self._lines(file.getvalue())
        if self.header:
            next(lines)
        places = [(part, place) for part in parts for place in texts.schema.get_all_field_indices(part[0])]
        rows = zip(*(texts.column(place).to_pylist() for _, place in places), strict=True)
        for line, row in zip(lines, rows, strict=True):
            for (part, _), text in zip(places, row, strict=True):
                if text is not None:
                    yield part, line, text

    def _lines(self, data: bytes) -> Iterator[int]:
        """The line in which each record begins."""
        line, place = 1, 0
        for start, _ in self._splitter.spans(data):
            line += data.count(b"\n", place, start) or data.count(b"\r", place, start)
            place = start
            yield line

    def _options(self, names: Sequence[str] | None = None, **columns: Any) -> dict[str, Any]:
        """For pyarrow, which infers what ``columns`` do not say."""
        return {
            "read_options": pa_csv.ReadOptions(
                use_threads=False,
                column_names=names,
                block_size=_TOGETHER_BYTES if names else CSV_BLOCK_BYTES,
            ),
            "parse_options": pa_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            "convert_options": pa_csv.ConvertOptions(
                null_values=self.nulls, strings_can_be_null=True, quoted_strings_can_be_null=False, **columns
            ),
        }

    def of_no_rows(self, schema: pa.Schema) -> pa.Table:
        types = parsed_schema(schema, _parsed_type)
        kinds = dict(zip(map(str, range(len(types))), types.types, strict=True))
        header = io.BytesIO(self.delimiter.join(kinds).encode() + b"\n")
        return pa_csv.read_csv(header, **self._options(column_types=kinds)).rename_columns(schema.names)

    def names_of(self, path: str) -> Sequence[str]:
        return self._names(path) or () if self.header else self.schema.names

    def parse(self, data: bytes, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        # For pyarrow no columns are all of them.
        read = schema or pa.schema([(name, pa.binary()) for name in names[:1]])
        places = _places(names, read.names)
        kinds = dict(zip(places, parsed_schema(read, _parsed_type).types, strict=True))
        batch = self._parsed(
            data, names, column_types=kinds, include_columns=places, include_missing_columns=True
        )
        self._check_infinite(batch, data, names)
        batch = batch.rename_columns(read.names)
        _check(batch, read)
        return batch if schema else batch.select([])

    def _parsed(self, data: bytes, names: Sequence[str], **columns: Any) -> pa.RecordBatch:
        """Columns named by their places, since some may have one name."""
        file = pa.BufferReader(data if data.endswith(b"\n") else data + b"\n")
        return one_batch(pa_csv.read_csv(file, **self._options(_numbers(names), **columns)))

    def _check_infinite(self, batch: pa.RecordBatch, data: bytes, names: Sequence[str]) -> None:
        """Raises ArrowInvalid if infinity stands for a number that no float64 holds."""
        masks = zip(batch.schema.names, map(_infinite, batch.columns), strict=True)
        infinite = {place: mask for place, mask in masks if mask is not None}
        if not infinite:
            return
        texts = self._parsed(
            data, names, column_types=dict.fromkeys(infinite, pa.string()), include_columns=list(infinite)
        )
        for place, mask in infinite.items():
            if any(is_beyond_float(text) for text in texts.column(place).filter(mask).to_pylist()):
                raise pa.ArrowInvalid("a number that no float64 holds")

    def is_sound(self, data: bytes, names: Sequence[str]) -> bool:
        try:
            self._parsed(data, names, column_types=dict.fromkeys(_numbers(names), pa.binary()))
        except pa.ArrowException:
            return False
        return not self._splitter.is_open(data)

    def fault(self, record: bytes, names: Sequence[str]) -> tuple[str, str] | None:
        if self._splitter.is_open(record):
            return "a quotation mark is not closed", CORRECT
        try:
            self._parsed(record, names, column_types=dict.fromkeys(_numbers(names), pa.binary()))
        except pa.ArrowException as error:
            counts = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
            why = f"it has {counts[2]} values for {counts[1]} columns" if counts else str(error)
            return why, CORRECT
        return None

    def value(self, record: bytes, names: Sequence[str], name: str) -> str:
        batch = self.parse(record, names, pa.schema([(name, pa.binary())]))
        found = batch.column(0)[0].as_py()
        return "null" if found is None else shown(found)

    def advice(self, value: str) -> str:
        if any(value == shown(each.encode()) for each in self.nulls):
            return "correct the file or the schema: what stands in quotation marks is no null"
        return "correct the file or the schema, name what stands for null, as in nulls=('NA',)"


def _check(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    """What the reader lets through: decimals with too many digits, nulls where none may be."""
    for field, column in zip(schema, batch.columns, strict=True):
        if pa.types.is_decimal(field.type):
            column.validate(full=True)
        if not field.nullable and column.null_count:
            raise pa.ArrowInvalid(f"column {field.name!r} has an empty value and is not nullable")


def _numbers(names: Sequence[str]) -> list[str]:
    return list(map(str, range(len(names))))


def _places(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The numbers of the columns with the wanted names: one that is wanted twice is another each time. No
    number for those that are not there."""
    places: dict[str, list[str]] = {}
    for place, name in zip(_numbers(names), names, strict=True):
        places.setdefault(name, []).append(place)
    return [
        places[name].pop(0) if places.get(name) else f"missing {number}" for number, name in enumerate(wanted)
    ]


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """What pyarrow reads for types that it does not read, dictionaries of few kinds among them."""
    if pa.types.is_dictionary(kind):
        is_read = pa.types.is_int32(kind.index_type) and without_view(kind.value_type) == kind.value_type
        return kind if is_read else without_dictionary(kind)
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_decimal256(kind):
        return pa.string()
    return without_view(kind)


def _infinite(column: pa.Array) -> pa.Array | None:
    """A mask of the infinite values; None if no value is."""
    if not pa.types.is_floating(column.type):
        return None
    mask = pc.is_inf(column)
    return mask if pc.any(mask).as_py() else None


def _separator(names: Sequence[str], delimiter: str) -> str:
    """What may stand between the values of a file whose only column has this name; empty if nothing does. Not
    the delimiter that it was read with: that stands in quotation marks there."""
    if len(names) != 1:
        return ""
    most = max((each for each in _SEPARATORS if each != delimiter), key=names[0].count)
    return most if most in names[0] else ""


def _check_delimiter(delimiter: str) -> None:
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise UsageError(
            f"the delimiter of a CSV file is one character, not {delimiter!r}: write one of ASCII that "
            "is no quotation mark and no line end, such as ';' or '\\t'"
        )


class _WithLastLineEnd(io.RawIOBase):
    """A file's bytes and a line end after the last line if it has none.

    Without it pyarrow takes the last value, if it is empty, for as much quoted as the value before,
    so that it is not null, and a header alone for no header.
    """

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._is_ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._is_ended = data.endswith(b"\n") if data else self._is_ended
        if self._is_ended or len(data) == size:
            return data
        self._is_ended = True
        return data + b"\n"
