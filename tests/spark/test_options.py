"""What the data source says to options and streams that do not fit; needs no JVM and no cluster."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import LongType, StructField, StructType

from minishuffle.dataflow.arguments import schema_message
from minishuffle.errors import UsageError
from minishuffle.external.access import Access
from minishuffle.spark import datasource, writes
from minishuffle.spark.datasource import MinishuffleDataSource
from minishuffle.spark.schemas import arrow_schema_of
from minishuffle.spark.writes import BatchWriter, StreamingWriter
from minishuffle.wire.streams import StreamInfo

SCHEMA = StructType([StructField("id", LongType())])


def source(**options: str) -> MinishuffleDataSource:
    given = CaseInsensitiveDict({name.replace("_", "-"): value for name, value in options.items()})
    return MinishuffleDataSource(given)


class Orders:
    """A running job reads the stream."""

    bounded = True

    def describe(self, access: Access, stream: str) -> StreamInfo:
        message = schema_message(arrow_schema_of(SCHEMA))
        return StreamInfo(stream=stream, job="j1", bounded=self.bounded, schema_message=message)


@pytest.fixture(autouse=True)
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    found = Orders()
    monkeypatch.setattr(writes, "describe_stream", found.describe)
    monkeypatch.setattr(datasource, "find_access", lambda *_: Access("127.0.0.1", 1, "local", b"secret"))
    monkeypatch.setattr(datasource, "settle_memory", lambda: None)
    return found


def test_a_streaming_query_is_refused_by_a_bounded_stream(orders: Orders) -> None:
    given: Any = source(stream="orders")
    assert isinstance(given.writer(SCHEMA, False), BatchWriter)
    with pytest.raises(UsageError, match=r"it writes into Stream.from_spark\('orders', ..., bounded=False\)"):
        given.streamWriter(SCHEMA, False)
    orders.bounded = False
    assert isinstance(given.streamWriter(SCHEMA, False), StreamingWriter)
