"""What a user may write, and what each mistake is answered with, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.plan.nodes import Node, inputs_first
from minishuffle.plan.planner import compile_job
from support.cutjobs import run
from support.planned import planned

TABLE = pa.table({"user": ["a", "b"], "amount": [1, 2]})


def rows() -> Stream[Any]:
    return Stream.items([1, 2, 3])


def last(stream: Stream[Any]) -> Node:
    (node,) = stream.plan.ends
    return node


def labels(stream: Stream[Any]) -> list[str]:
    return [node.label for node in inputs_first(stream.plan.ends)]


def operators(stream: Stream[Any]) -> list[str]:
    return [planned(node).name for node in inputs_first(stream.plan.ends) if not node.is_source]


class Numbers:
    """A source of the user's own."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        yield [split]


class Heap:
    """A sink of the user's own."""

    def open(self, context: Any) -> None: ...

    def write(self, batch: Any) -> None: ...

    def close(self) -> None: ...


# --- sources --------------------------------------------------------------------------------------


def test_sources_are_named_after_what_they_read(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("x\n")
    streams = [
        Stream.text(text),
        Stream.text([str(text), text]),
        rows(),
        Stream.generate(),
        Stream.source(Numbers()),
    ]
    assert [last(s).label for s in streams] == ["text", "text", "items", "generate", "Numbers"]


@pytest.mark.parametrize("source", [Stream.text, Table.from_files])
def test_a_missing_file_is_named(source: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"nowhere\.dat"):
        source(tmp_path / "nowhere.dat")


@pytest.mark.parametrize("items", ["abc", b"abc", {"a": 1}, 7])
def test_items_takes_a_collection_of_rows(items: Any) -> None:
    with pytest.raises(UsageError, match="takes a list of rows, not a"):
        Stream.items(items)


def test_items_of_columns_are_a_table() -> None:
    for items in (TABLE, TABLE.to_batches()[0], TABLE.to_pandas()):
        with pytest.raises(UsageError, match=r"write Table\.from_arrow"):
            Stream.items(items)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"fn": 5}, "takes a function"),
        ({"rate": 0}, "rate is 0"),
        ({"rate": "5"}, "rate is '5'"),
        ({"records": -1}, "records is -1"),
        ({"records": 5.5}, "records is 5.5: give a whole number"),
    ],
)
def test_generate_checks_its_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Stream.generate(**arguments)


def test_a_source_needs_its_methods_and_a_known_format() -> None:
    odd = Numbers()
    odd.format = "csv"  # type: ignore[attr-defined]
    for source, told in [(object(), "needs the methods"), (Numbers, "needs the methods"), (odd, "'csv'")]:
        with pytest.raises(UsageError, match=told):
            Stream.source(source)  # type: ignore[arg-type]


# --- other streams ---------------------------------------------------------------------------------


def test_union_takes_streams() -> None:
    with pytest.raises(InvalidGraph, match="at least one other stream"):
        rows().union()
    with pytest.raises(UsageError, match="not a list"):
        rows().union([1])  # type: ignore[arg-type]


# --- sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "follow",
    [
        lambda s: s.map(str),
        lambda s: s.key_by("a"),
        lambda s: s.collect(),
        lambda s: rows().union(s),
        lambda s: s.rebalance(),
        lambda s: s.to_table({"a": int}),
    ],
)
def test_nothing_follows_a_sink(follow: Callable[[Stream[Any]], Any]) -> None:
    with pytest.raises(InvalidGraph, match="cannot follow the sink 'collect'"):
        follow(rows().collect())


def test_a_sink_needs_its_methods() -> None:
    with pytest.raises(UsageError, match="is not a sink"):
        rows().to(object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"write Heap\(\.\.\.\)"):
        rows().to(Heap)  # type: ignore[arg-type]


def test_a_directory_that_holds_output_is_refused_before_the_job(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "part-0-1.parquet")
    with pytest.raises(UsageError, match="already holds Parquet files"):
        rows().to_files(tmp_path)


def test_together_takes_streams_with_sinks() -> None:
    stream = rows()
    both = Stream.together(stream.collect(), stream.to_count())
    assert labels(both) == ["items", "collect", "to_count"]
    for streams in ((), (rows(),), (rows().collect(), rows()), (1,)):
        with pytest.raises(InvalidGraph, match="together takes"):
            Stream.together(*streams)  # type: ignore[arg-type]


def test_side_outputs_are_checked_where_they_are_written() -> None:
    with pytest.raises(UsageError, match=r"sides takes a list of names: write \['bad'\]"):
        rows().map(len, sides="bad")
    with pytest.raises(UsageError, match="'late' is not a name for a side output of your own"):
        rows().map(len, sides=["late"])
    with pytest.raises(InvalidGraph, match=r"\.side\('bad'\) must directly follow .* with sides=\['bad'\]"):
        rows().map(len, sides=["other"]).side("bad")
    with pytest.raises(InvalidGraph, match=r"\.errors must directly follow .* with on_error='side'"):
        _ = rows().map(len).errors
    assert rows().filter(bool, on_error="side").errors.plan.gives.columns is None
    with pytest.raises(
        UsageError, match=r"key_by has no side output of errors, only map, map_async, filter, flat_map"
    ):
        compile_job(rows().key_by(len, on_error="side").count().collect())
    with pytest.raises(
        UsageError, match=r"nothing reads the errors of map: give \.errors right after it a sink"
    ):
        compile_job(rows().map(len, on_error="side").collect())


def test_a_table_knows_its_columns() -> None:
    table = Table.from_arrow(TABLE.replace_schema_metadata({"a": "note"}))
    assert table.schema.equals(TABLE.schema, check_metadata=True)
    assert table.rename({"user": "who"}).columns == ["who", "amount"]
    with pytest.raises(InvalidGraph, match="schema cannot follow the sink 'collect'"):
        _ = table.collect().schema


def test_what_there_is_shows_its_columns() -> None:
    table = Table.from_arrow(TABLE)
    assert repr(table.select("user")) == "<Table select [user: string]>"
    assert repr(table.key_by("user")) == (
        "<KeyedTable by user of <Table from_arrow [user: string, amount: int64]>>"
    )
    assert repr(rows().map(str)) == "<Stream map [Python objects]>"
    wide = Table.from_arrow(pa.table({f"c{number}": [1] for number in range(9)}))
    assert repr(wide).endswith("c5: int64, 3 more]>")
    assert repr(table.collect()) == "<Table collect>"


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.select("amont"),
        lambda table: table.drop("amont"),
        lambda table: table.rename({"amont": "n"}),
        lambda table: table.filter(pc.field("amont") > 1),
        lambda table: table.with_columns(n=pc.field("amont")),
        lambda table: table.explode("amont"),
        lambda table: table.event_time("amont"),
        lambda table: table.key_by("amont"),
        lambda table: table.key_by("user").aggregate(n=("amont", "sum")),
        lambda table: table.key_by("user").top_n(1, by="amont"),
        lambda table: table.broadcast_join(Table.from_arrow(TABLE), on="amont"),
        lambda table: table.map_batches(lambda batch: batch, columns=["amont"], schema="same"),
    ],
)
def test_a_wrong_name_of_a_column_is_answered_with_the_nearest(use: Any) -> None:
    with pytest.raises(UnknownName, match="there is no column 'amont'; did you mean 'amount'"):
        use(Table.from_arrow(TABLE))


@pytest.mark.parametrize(
    "use",
    [
        lambda stream: stream.event_time("amont"),
        lambda stream: stream.key_by("amont").count(),
        lambda stream: stream.broadcast_join(Stream.items([{"amont": 1}]), on="amont"),
    ],
)
def test_a_name_that_a_row_lacks_is_answered_with_the_nearest(use: Any) -> None:
    stream = Stream.items([0]).map(lambda _: {"user": "a", "amount": 1})
    with pytest.raises(UsageError, match="no column 'amont' .* did you mean 'amount'"):
        run(use(stream).collect())
