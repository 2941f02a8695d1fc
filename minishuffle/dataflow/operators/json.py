"""Files with one JSON object a line, as Arrow batches of one schema."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.json as pa_json

from minishuffle.dataflow.operators.files import Paths, RecordFiles, opened, parsed_schema
from minishuffle.dataflow.operators.inferred import Part
from minishuffle.errors import UnknownName, UsageError
from minishuffle.exchange.schemas import with_innermost
from minishuffle.limits import CSV_BLOCK_BYTES

__all__ = ["JsonSource"]

_VALUE: Final = re.compile(r"[^ \t\r\n]")
"""How one begins."""


class JsonSource(RecordFiles):
    """Record batches of files with one JSON object a line; a split is a file. A field that an object lacks is
    null.

    Args:
        schema: the fields to read; others are left out. None: those of all files, each of which is read
            whole, in types that hold the values of all.

    Raises:
        UnknownName: no such file.
        UsageError: a file is larger than INFERRED_FILE_BYTES_MAX and the schema is not declared; a field has
            types with none in common; or (from ``read``) a value does not fit.
    """

    finds_times = True

    def __init__(self, paths: Paths, schema: pa.Schema | None = None) -> None:
        super().__init__(paths, schema)
        for path in self._splits:
            opened(path).close()
        if schema is None and not self.schema.names:
            raise UnknownName("the JSON files hold no field, so none is known: declare schema=")

    def whole(self, file: io.BytesIO) -> pa.Table:
        """With texts for times, which pyarrow would move to UTC without a word."""
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

    def batches(self, path: str, file: io.BufferedReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        if not file.peek(1):
            return
        try:
            with pa_json.open_json(
                file,
                read_options=pa_json.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
                parse_options=pa_json.ParseOptions(
                    explicit_schema=parsed_schema(schema), unexpected_field_behavior="ignore"
                ),
            ) as reader:
                for batch in reader:
                    yield batch.select(schema.names)
        except pa.ArrowException as error:
            raise UsageError(f"{path}: {error}: correct the file, or the schema") from error


def _as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else kind


class _Number(str):
    """The literal of a number."""


def _objects(text: str) -> Iterator[tuple[int, Any]]:
    """The values in the text, with the line in which each begins, and with literals for their numbers."""
    decoder = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_Number, strict=False)
    place, line = 0, 1
    while match := _VALUE.search(text, place):
        begin = match.start()
        line += text.count("\n", place, begin)
        value, place = decoder.raw_decode(text, begin)
        yield line, value
        line += text.count("\n", begin, place)


def _numbers_at(value: Any, part: Part) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers_at(each, part[1:])
    elif isinstance(value, dict):
        yield from _numbers_at(value.get(part[0]), part[1:])
    elif isinstance(value, _Number):
        yield value
