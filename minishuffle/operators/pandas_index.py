"""Tables as a program gives them, and the index of a pandas frame, as pyarrow brings it along: metadata of
the schema say which columns it is.

(pandas: "Storing pandas DataFrame objects in Apache Parquet format", the developer's guide.)
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

import pyarrow as pa

from minishuffle.errors import UsageError

__all__ = ["given_table", "unnamed_index", "with_named_range", "without_unnamed_index"]

Data = TypeVar("Data", pa.Table, pa.RecordBatch)

_KEY: Final = b"pandas"
_STAND_IN: Final = "__index_level_0__"
"""What pyarrow calls an index without a name, or with that of a column."""


def given_table(data: Any, taker: str) -> pa.Table:
    """A record batch, a table or a frame (what has ``__arrow_c_stream__``) as a table, without an unnamed
    index.

    Raises:
        UsageError: Arrow has no types for it; begins with the ``taker``.
    """
    try:
        table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        why = ": ".join(str(part) for part in reversed(error.args))
        raise UsageError(f"{taker} cannot take a {type(data).__name__} as a table: {why}") from error
    return without_unnamed_index(table)


def unnamed_index(schema: pa.Schema) -> list[int]:
    """The numbers of the columns that are levels of an index without a name."""
    told = _told(schema)
    levels = {name for name in told.get("index_columns", ()) if isinstance(name, str)}
    unnamed = {
        name
        for each in told.get("columns", ())
        if (name := each.get("field_name")) in levels and each.get("name") is None
    }
    # Levels stand behind the columns, of which one may have the same name.
    return sorted(numbers[-1] for name in unnamed if (numbers := schema.get_all_field_indices(name)))


def without_unnamed_index(data: Data) -> Data:
    """A batch or table without those columns; itself if it has no others."""
    left_out = unnamed_index(data.schema)
    kept = [number for number in range(data.num_columns) if number not in left_out]
    return _of_no_frame(data.select(kept)) if left_out and kept else data


def with_named_range(table: pa.Table) -> pa.Table:
    """A whole frame with its index in a column, if that is a range that has a name."""
    for level in _told(table.schema).get("index_columns", ()):
        if isinstance(level, dict) and level.get("kind") == "range" and level.get("name") is not None:
            values = range(level["start"], level["stop"], level["step"])
            name = str(level["name"])
            if len(values) == table.num_rows:
                named = _STAND_IN if name in table.column_names else name
                table = _of_no_frame(table.append_column(named, pa.array(values, pa.int64())))
    return table


def _of_no_frame(data: Data) -> Data:
    """Without the metadata, which say what no longer holds."""
    metadata = {key: value for key, value in data.schema.metadata.items() if key != _KEY}
    return data.replace_schema_metadata(metadata or None)


def _told(schema: pa.Schema) -> dict[str, Any]:
    """What the metadata say of a frame; nothing if there was none."""
    if not schema.metadata or _KEY not in schema.metadata:
        return {}
    try:
        told = json.loads(schema.metadata[_KEY])
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
