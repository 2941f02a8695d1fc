"""What the data source says to options and streams that do not fit; needs no JVM and no cluster."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import LongType, StructField, StructType

from minishuffle.errors import UsageError
from minishuffle.plan.schemas import schema_message
from minishuffle.remote.access import Access
from minishuffle.spark import source as source_module
from minishuffle.spark.schemas import arrow_schema_of
from minishuffle.spark.source import BatchWriter, MinishuffleDataSource, StreamingWriter, number, switch
from minishuffle.wire.clients import StreamInfo

pytestmark = pytest.mark.extra

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
    monkeypatch.setattr(source_module, "describe_stream", found.describe)
    monkeypatch.setattr(source_module, "find_access", lambda *_: Access("127.0.0.1", 1, "local", b"secret"))
    monkeypatch.setattr(source_module, "settle_memory", lambda: None)
    return found


def test_a_streaming_query_is_refused_by_a_bounded_stream(orders: Orders) -> None:
    given: Any = source(stream="orders")
    assert isinstance(given.writer(SCHEMA, False), BatchWriter)
    with pytest.raises(UsageError, match=r"it writes into Table.from_spark\('orders', ..., bounded=False\)"):
        given.streamWriter(SCHEMA, False)
    orders.bounded = False
    assert isinstance(given.streamWriter(SCHEMA, False), StreamingWriter)


def test_a_dataframe_without_columns_is_refused() -> None:
    given: Any = source(stream="orders")
    for writer in (given.writer, given.streamWriter):
        with pytest.raises(UsageError, match="the DataFrame has no columns, and rows without any cannot be"):
            writer(StructType([]), False)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("partitions", "abc", "option 'partitions' takes a whole number from 1, not 'abc'"),
        ("partitions", "0", "takes a whole number from 1, not '0'"),
        ("partitions", "9" * 400, "takes a whole number from 1, not '999"),
        ("partitions", "1.5", "takes a whole number from 1, not '1.5'"),
        ("max-rows-per-batch", "-1", "option 'max-rows-per-batch' takes a whole number from 1, not '-1'"),
        ("timeout", "nan", "option 'timeout' takes a number from 0, not 'nan'"),
        ("timeout", "inf", "takes a number from 0, not 'inf'"),
        ("timeout", "-0.5", "takes a number from 0, not '-0.5'"),
        ("timeout", "soon", "takes a number from 0, not 'soon'"),
    ],
)
def test_numbers_that_are_none_or_out_of_range_are_refused(name: str, value: str, said: str) -> None:
    given = source(stream="orders", job="j1", **{name: value})
    with pytest.raises(UsageError) as raised:
        {"partitions": given.writer, "timeout": given.reader}.get(name, given.streamReader)(
            *([SCHEMA, False] if name == "partitions" else [SCHEMA])
        )
    assert said in str(raised.value)


def test_a_bad_limit_is_refused_before_the_job_is_asked_for_its_schema() -> None:
    with pytest.raises(UsageError, match="takes a whole number from 1, not 'many'"):
        source(job="j1", max_rows_per_batch="many").schema()


def test_numbers_are_taken() -> None:
    assert number({"timeout": "0"}, "timeout", 600.0, 0) == 0.0
    assert number({"timeout": "1e3"}, "timeout", 600.0, 0) == 1000.0
    assert number({"partitions": "4"}, "partitions", 0, 1) == 4
    assert number({}, "partitions", 0, 1) == 0


@pytest.mark.parametrize(
    "name, said",
    [
        ("partition", "there is no option 'partition'; did you mean 'partitions'? there are stream, job"),
        ("secret_file", "did you mean 'secret-file'?"),
        ("xyz", "there is no option 'xyz'; there are stream, job"),
    ],
)
def test_options_that_nobody_knows_are_refused(name: str, said: str) -> None:
    given = MinishuffleDataSource(CaseInsensitiveDict({"stream": "orders", name: "3"}))
    with pytest.raises(UsageError) as raised:
        given.writer(SCHEMA, False)
    assert said in str(raised.value)


def test_options_go_by_any_case_and_sparks_own_are_let_through() -> None:
    names = ("Stream", "CheckpointLocation", "path", "queryName", "Cluster")
    given = MinishuffleDataSource(CaseInsensitiveDict(dict.fromkeys(names, "x")))
    assert isinstance(given.writer(SCHEMA, False), BatchWriter)


class Task:
    """A task of Spark."""

    def partitionId(self) -> int:
        return 3

    def taskAttemptId(self) -> int:
        return 17


def test_a_partition_beyond_those_that_were_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module.TaskContext, "get", staticmethod(Task))
    monkeypatch.setattr(source_module, "settle_memory", lambda: None)
    given = source(stream="orders", partitions="3").writer(SCHEMA, False)
    with pytest.raises(UsageError, match="says that the DataFrame has 3, and this is number 4: say how many"):
        given.write(iter(()))


def test_a_switch_is_off_unless_it_is_said() -> None:
    assert [switch(CaseInsensitiveDict(given), "allow-loss") for given in ({}, {"allow-loss": "True"})] == [
        False,
        True,
    ]
    with pytest.raises(UsageError, match="option 'allow-loss' takes true or false, not 'maybe'"):
        switch({"allow-loss": "maybe"}, "allow-loss")
