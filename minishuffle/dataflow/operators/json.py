"""Files with one JSON object a line, as Arrow batches of one schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
import pyarrow.json as pa_json

from minishuffle.dataflow.operators.files import Paths, decompressed, files_of, inspected, opened
from minishuffle.dataflow.operators.widertype import common_schema, with_texts_for_nulls
from minishuffle.errors import UnknownName, UsageError
from minishuffle.limits import BATCH_ROWS_MAX, CSV_BLOCK_BYTES

__all__ = ["JsonSource"]


class JsonSource:
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

    bounded = True
    format: Literal["arrow"] = "arrow"

    def __init__(self, paths: Paths, schema: pa.Schema | None = None) -> None:
        self._splits = files_of(paths)
        for path in self._splits:
            opened(path).close()
        self.schema = self._inferred() if schema is None else schema

    def _inferred(self) -> pa.Schema:
        schemas = {}
        for path in self._splits:
            with inspected(path) as file:
                options = pa_json.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
                try:
                    schema = pa_json.read_json(file, read_options=options).schema
                except pa.ArrowException as error:
                    if "Empty JSON file" in str(error):
                        continue
                    raise UsageError(f"{path}: {error}: correct the file, or declare schema=") from error
                schemas[path] = schema
        if not schemas:
            raise UnknownName("the JSON files hold no object, so their fields are not known: declare schema=")
        return with_texts_for_nulls(common_schema(schemas))

    def splits(self) -> list[str]:
        return self._splits

    def read(self, split: str, offset: int) -> Iterator[pa.RecordBatch]:
        with decompressed(split) as file:
            if not file.peek(1):
                return
            for batch in self._batches(split, file):
                for start in range(min(offset, batch.num_rows), batch.num_rows, BATCH_ROWS_MAX):
                    yield batch.slice(start, BATCH_ROWS_MAX)
                offset = max(0, offset - batch.num_rows)

    def _batches(self, path: str, file: Any) -> Iterator[pa.RecordBatch]:
        try:
            with pa_json.open_json(
                file,
                read_options=pa_json.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
                parse_options=pa_json.ParseOptions(
                    explicit_schema=self.schema, unexpected_field_behavior="ignore"
                ),
            ) as reader:
                for batch in reader:
                    yield batch.select(self.schema.names)
        except pa.ArrowException as error:
            raise UsageError(f"{path}: {error}: correct the file, or the schema") from error
