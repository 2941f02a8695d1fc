"""Files with one JSON object a line, as Arrow batches of one schema."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.json as pa_json

from minishuffle.dataflow.operators.files import Paths, RecordFiles, opened, parsed_schema
from minishuffle.errors import UnknownName, UsageError
from minishuffle.limits import CSV_BLOCK_BYTES

__all__ = ["JsonSource"]


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

    def __init__(self, paths: Paths, schema: pa.Schema | None = None) -> None:
        super().__init__(paths, schema)
        for path in self._splits:
            opened(path).close()
        if schema is None and not self.schema.names:
            raise UnknownName("the JSON files hold no field, so none is known: declare schema=")

    def whole(self, file: io.BytesIO) -> pa.Table:
        options = pa_json.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
        return pa_json.read_json(file, read_options=options)

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
