"""The sink that Spark reads: what must be known of the records, and which types it gives."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import UsageError
from minishuffle.plan.sparktypes import spark_schema


@pytest.mark.parametrize("name", ["", 3])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="to_spark takes a name"):
        Table.from_arrow(pa.table({"a": [1]})).to_spark(name)


def test_timestamps_are_those_of_spark() -> None:
    schema = pa.schema(
        [
            pa.field("at", pa.timestamp("ns", "America/New_York"), nullable=False),
            ("naive", pa.timestamp("s")),
            ("d", pa.date32()),
        ]
    )
    moment = pa.timestamp("us", "UTC")
    expected = pa.schema(
        [pa.field("at", moment, nullable=False), ("naive", pa.timestamp("us")), ("d", pa.date32())]
    )
    assert spark_schema(schema) == expected


def test_files_are_not_written_into_object_stores() -> None:
    with pytest.raises(UsageError, match=r"cannot write to s3://bucket/out: give a directory"):
        Table.from_arrow(pa.table({"a": [1]})).to_files("s3://bucket/out")
