"""Files with one JSON object a line, as Arrow batches of one schema."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from minishuffle.connectors.filerecords import JsonLines
from minishuffle.connectors.files import Paths, opened
from minishuffle.connectors.inferred import Part, parts_of
from minishuffle.connectors.recordfiles import (
    CORRECT,
    Kinds,
    OnFault,
    RecordFiles,
    is_beyond_float,
    one_batch,
    parsed_schema,
)
from minishuffle.errors import UnknownName, UsageError
from minishuffle.exchange.schemas import with_innermost, without_dictionary
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import CSV_BLOCK_BYTES, JSON_DEPTH_MAX

__all__ = ["JsonSource"]

_BLANKS: Final = " \t\r\n"
_VALUE: Final = re.compile(f"[^{_BLANKS}]")
"""How one begins."""
_NULL_FIRST: Final = re.compile(rb"\s*null\b")
_ODD: Final = tuple(map(re.compile, (rb"\n\s*null\b", rb"\r\s*null\b", rb"Inf\b")))
"""There may be a record without an object, or infinity in a spelling that no other reader has. Each begins
with a literal, so that looking for it takes little time."""
_DEEP: Final = f"it is nested more than {JSON_DEPTH_MAX:,} levels deep"
_NUMBER: Final = "a number"
_TRUTH: Final = "a truth value"
_BESIDE: Final = {_NUMBER, _TRUTH}
"""What has a type in common if each is in a file of its own."""


class JsonSource(RecordFiles):
    """Record batches of files with one JSON object a line; a split is a file. A field that an object lacks is
    null.

    Args:
        schema: the fields to read; others are left out. None: those of all files, each of which is read
            whole, in types that hold the values of all.
        on_error: what is done about a line that cannot be read.
        head: see :class:`~minishuffle.connectors.recordfiles.RecordFiles`.

    Raises:
        UnknownName: no such file.
        UsageError: a file is larger than INFERRED_FILE_BYTES_MAX and the schema is not declared; a field has
            types with none in common.
        WrongInput: (also from ``read``) with "fail", a line cannot be read; named with file and line. (From
            ``read``) a file has changed since it was listed.
    """

    finds_times = True

    def __init__(
        self,
        paths: Paths,
        schema: pa.Schema | None = None,
        *,
        on_error: OnFault = "fail",
        head: int | None = None,
    ) -> None:
        try:
            super().__init__(paths, schema, JsonLines(), on_error, header=False, head=head)
        except RecursionError as error:
            why = "records are nested too deeply for their types to be found: declare the fields with schema="
            raise UsageError(f"the JSON files cannot be read: {why}") from error
        for path in self._splits:
            opened(path).close()
        if schema is None and not self.schema.names:
            raise UnknownName("the JSON files hold no field, so none is known: declare schema=")

    def whole(self, file: io.BytesIO) -> pa.Table:
        """With texts for times, which pyarrow would move to UTC without a word."""
        _refuse_odd(file.getvalue())
        options = pa_json.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
        table = pa_json.read_json(file, read_options=options)
        texts = pa.schema(each.with_type(with_innermost(each.type, _as_text)) for each in table.schema)
        if texts.equals(table.schema):
            return table
        file.seek(0)
        explicit = pa_json.ParseOptions(explicit_schema=texts)
        return pa_json.read_json(file, read_options=options, parse_options=explicit)

    def literals(self, file: io.BytesIO, parts: Collection[Part]) -> Iterator[tuple[Part, int, str]]:
        for line, value in _objects(file.read().decode("utf-8-sig", "replace")):
            for part in parts:
                for literal in _numbers_at(value, part):
                    yield part, line, literal

    def parse(self, data: bytes, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        _refuse_odd(data)
        explicit = pa_json.ParseOptions(
            explicit_schema=parsed_schema(schema, _parsed_type), unexpected_field_behavior="ignore"
        )
        table = pa_json.read_json(pa.BufferReader(data), read_options=_together(data), parse_options=explicit)
        batch = one_batch(table).select(schema.names)
        batch.validate(full=True)  # The reader lets texts through that are not UTF-8.
        self._check_infinite(table, data)
        return batch

    def _check_infinite(self, table: pa.Table, data: bytes) -> None:
        """Raises ArrowInvalid if infinity stands for a number that no float64 holds."""
        parts = [part for part, values in parts_of(table) if _has_infinite(values)]
        try:
            literals = self.literals(io.BytesIO(data), parts) if parts else ()
            is_beyond = any(is_beyond_float(literal) for _, _, literal in literals)
        except RecursionError as error:
            raise pa.ArrowInvalid(str(error)) from error
        if is_beyond:
            raise pa.ArrowInvalid("a number that no float64 holds")

    def of_no_rows(self, schema: pa.Schema) -> pa.Table:
        explicit = pa_json.ParseOptions(explicit_schema=parsed_schema(schema, _parsed_type))
        return pa_json.read_json(io.BytesIO(b"{}\n"), parse_options=explicit).slice(0, 0)

    def is_sound(self, data: bytes, names: Sequence[str]) -> bool:
        try:
            _refuse_odd(data)
            count = pa_json.read_json(pa.BufferReader(data), read_options=_together(data)).num_rows
        except pa.ArrowException:
            return False
        return self._splitter.has_records(data, count)

    def fault(self, record: bytes, names: Sequence[str]) -> tuple[str, str] | None:
        if is_too_deep(record):
            return _DEEP, CORRECT
        text = record.decode("utf-8", "replace").strip(_BLANKS)
        if text.startswith("["):
            return "it begins an array", "write one object a line, as jq -c '.[]' makes of an array"
        try:
            value, end = _decoder(_without_repeats, strict=True).raw_decode(text)
        except RecursionError:
            return "it is nested too deeply to be looked at, and something is wrong with it", CORRECT
        except json.JSONDecodeError as error:
            why = f"{error.msg.removesuffix(' at')} at character {error.pos + 1} of the line"
            return f"it is no JSON object ({why})", CORRECT
        except _Repeated as error:
            return f"it has the field {error.args[0]!r} twice", CORRECT
        if text[end:].strip(_BLANKS):
            return "there is more in the line than one object", CORRECT
        if not isinstance(value, dict):
            return "it is no JSON object", CORRECT
        if _has_half_character(value):
            return "it has one half of a surrogate pair without the other", CORRECT
        huge = next((number for number in _all_numbers(value) if is_beyond_float(number)), None)
        return None if huge is None else (f"it has {huge:.40}, which no float64 holds", CORRECT)

    def value(self, record: bytes, names: Sequence[str], name: str) -> str:
        try:
            value = json.loads(record.decode("utf-8", "replace"), strict=False).get(name)
            return f"{json.dumps(value, ensure_ascii=False):.200}"
        except RecursionError:
            return "what is nested too deeply to be shown"

    def mixture(self, path: str, data: bytes, known: Kinds) -> tuple[int, str] | None:
        for line, value in _objects(data.decode("utf-8-sig", "replace")):
            for part, kind, each in _kinds(value, ()):
                before, file, first = known.setdefault(part, (kind, path, line))
                if before == kind or (file != path and {before, kind} == _BESIDE):
                    continue
                name, of = ".".join(part), "" if file == path else f" of {file}"
                return line, f"column {name!r} has {kind}, {each!s:.40}, and {before} in line {first}{of}"
        return None


def _refuse_odd(data: bytes) -> None:
    """Raises ArrowInvalid for what pyarrow takes and is no record: null, at which it ends the process if it
    is the first, and which is a row of nulls if not; Inf; what is too deep, which ends the process too."""
    if is_too_deep(data):
        raise pa.ArrowInvalid(_DEEP)
    if _NULL_FIRST.match(data) is None and not any(odd.search(data) for odd in _ODD):
        return
    try:
        has_null = any(value is None for _, value in _objects(data.decode("utf-8-sig", "replace")))
    except (json.JSONDecodeError, RecursionError) as error:
        raise pa.ArrowInvalid(str(error)) from error
    if has_null:
        raise pa.ArrowInvalid("a record is null")


def is_too_deep(data: bytes) -> bool:
    """Whether a record is nested more than JSON_DEPTH_MAX levels deep.

    Most records have fewer bytes than that: then only the last end of one is looked for among so many.
    """
    first, begin = data.find(b"\n"), 0
    mark = b"}\r\n{" if data[first - 1 : first] == b"\r" else b"}\n{"  # These are in no value of JSON.
    while (limit := begin + JSON_DEPTH_MAX) < len(data):
        line = data.rfind(b"\n", begin, limit - 1)  # A single byte is found sooner.
        if line >= 0 and not _is_end(data, line, mark):
            found = data.rfind(mark, begin, limit)
            line = found + len(mark) - 2 if found >= 0 else -1
        if line < 0:
            line = data.find(b"\n", limit - 1)
            if line >= 0 and not _is_end(data, line, mark):
                found = data.find(mark, limit - len(mark))
                line = found + len(mark) - 2 if found >= 0 else -1
            line = line if line >= 0 else len(data)
            if _is_too_deep(np.frombuffer(data, np.uint8, line - begin, begin)):
                return True
        begin = line + 1
    return False


def _is_end(data: bytes, line: int, mark: bytes) -> bool:
    """Whether that line end is the one in ``mark``, between two records."""
    return data[line + 2 - len(mark) : line + 2] == mark


def _is_too_deep(record: np.ndarray[Any, Any]) -> bool:
    """To be exact, which takes long, only if enough lists and objects begin in it."""
    return (
        kernel("count_begun")(record, len(record)) > JSON_DEPTH_MAX
        and kernel("deepest_nesting")(record, len(record)) > JSON_DEPTH_MAX
    )


def _together(data: bytes) -> pa_json.ReadOptions:
    return pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1)


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """The type that pyarrow parses a field as.

    Text for dates and times of day, which it would take for numbers, and for times without a zone, where it
    would ignore a zone. For a dictionary, the type of its values.
    """
    kind = without_dictionary(kind)
    is_zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    is_text = pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind)
    return pa.string() if is_text and not is_zoned else kind


def _as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _has_infinite(values: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_floating(values.type) and pc.any(pc.is_inf(values)).as_py())


class _Number(str):
    """The literal of a number."""


class _Repeated(Exception):
    """An object has a field twice: its name."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for name in names if names.count(name) > 1))
    return found


def _has_half_character(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _decoder(
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, *, strict: bool = False
) -> json.JSONDecoder:
    """Gives literals for numbers."""
    return json.JSONDecoder(
        parse_float=_Number,
        parse_int=_Number,
        parse_constant=_Number,
        strict=strict,
        object_pairs_hook=pairs,
    )


def _objects(text: str) -> Iterator[tuple[int, Any]]:
    """The values in the text, with the line in which each begins, and with literals for their numbers."""
    decoder = _decoder()
    place, line = 0, 1
    while match := _VALUE.search(text, place):
        begin = match.start()
        line += text.count("\n", place, begin)
        value, place = decoder.raw_decode(text, begin)
        yield line, value
        line += text.count("\n", begin, place)


def _all_numbers(value: Any) -> Iterator[_Number]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _all_numbers(each)
    elif isinstance(value, _Number):
        yield value


def _kinds(value: Any, part: Part) -> Iterator[tuple[Part, str, Any]]:
    """What the value, and each value in it, is, with its part."""
    if isinstance(value, dict):
        yield part, "an object", value
        for name, each in value.items():
            yield from _kinds(each, (*part, name))
    elif isinstance(value, list):
        yield part, "a list", value
        for each in value:
            yield from _kinds(each, (*part, "[]"))
    elif isinstance(value, _Number):
        yield part, _NUMBER, value
    elif value is not None:
        yield part, _TRUTH if isinstance(value, bool) else "a text", value


def _numbers_at(value: Any, part: Part) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers_at(each, part[1:])
    elif isinstance(value, dict):
        yield from _numbers_at(value.get(part[0]), part[1:])
    elif isinstance(value, _Number):
        yield value
