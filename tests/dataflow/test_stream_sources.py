"""Streams that another program writes: what the job's graph says of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.dataflow.compile import compile_job
from minishuffle.dataflow.stream import Stream
from minishuffle.errors import UnknownName, UsageError
from minishuffle.limits import NAME_BYTES_MAX

SCHEMA = pa.schema({"user": pa.string(), "at": pa.timestamp("us", "UTC")}, metadata={"made": "by hand"})


@pytest.mark.parametrize("bounded", [True, False])
def test_a_stream_from_spark_is_a_source_with_a_name_and_a_schema(bounded: bool) -> None:
    stream = Stream.from_spark("orders", SCHEMA, bounded=bounded)
    graph = compile_job(stream.to_count(), parallelism=2)
    (vertex,) = graph.vertices
    assert (vertex.stream, vertex.is_source, vertex.bounded) == ("orders", True, bounded)
    read = pa.ipc.read_schema(pa.py_buffer(vertex.stream_schema))
    assert read.equals(SCHEMA.remove_metadata(), check_metadata=True)
    assert vertex.name == "from_spark orders -> to_count"


def test_its_columns_are_known() -> None:
    stream = Stream.from_spark("orders", schema={"user": str, "n": "int64"})
    assert stream._schema == pa.schema({"user": pa.string(), "n": pa.int64()})
    with pytest.raises(UnknownName, match="no column 'usr'; did you mean 'user'"):
        stream.key_by("usr")


@pytest.mark.parametrize("name", ["", "  ", 3, "x" * (NAME_BYTES_MAX + 1), "a\nb", "\udcff"])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(
        UsageError, match=r"Stream\.from_spark takes a name of 1 to \d+ bytes, all printable, not"
    ):
        Stream.from_spark(name, SCHEMA)
