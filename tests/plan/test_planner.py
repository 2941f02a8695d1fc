"""Chains and edges, and what no job graph can be made of."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, ResourceExhausted, UsageError
from minishuffle.operators.base import Program
from minishuffle.plan.graph import JobGraph, JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.plan.programs import open_program


def shape(graph: JobGraph) -> list[str]:
    """``name*parallelism`` of each vertex, then ``source>target partitioner`` of each edge."""
    vertices = [f"{vertex.name}*{vertex.parallelism}" for vertex in graph.vertices]
    return vertices + [f"{edge.source}>{edge.target} {edge.partitioner}" for edge in graph.edges]


def compiled(stream: Stream[Any], parallelism: int = 2) -> list[str]:
    return shape(compile_job(stream, parallelism=parallelism))


def items() -> Stream[Any]:
    return Stream.items(list(range(10)))


def sales() -> Table:
    return Table.from_arrow(pa.table({"user": ["a"], "city": ["Oslo"]}))


# --- chains and edges -----------------------------------------------------------------------------


def test_the_word_count_is_two_chains() -> None:
    stream = Stream.items(["to be", "or not"]).flat_map(str.split).key_by(str.lower).count().collect()
    graph = compile_job(stream, parallelism=3)
    assert shape(graph) == ["items -> flat_map*3", "count -> collect*3", "0>1 hash"]
    assert [vertex.operators for vertex in graph.vertices] == [
        ["items", "flat_map", "key_by"],
        ["count", "collect"],
    ]
    assert [vertex.is_source for vertex in graph.vertices] == [True, False]
    assert [vertex.bounded for vertex in graph.vertices] == [True, True]
    assert graph.settings == JobSettings()


def test_forward_steps_are_one_chain() -> None:
    stream = items().map(abs).forward().filter(bool).name("odd").flat_map(abs).to_count()
    assert compiled(stream) == ["items -> map -> odd -> flat_map -> to_count*2"]


@pytest.mark.parametrize("method", ["rebalance", "rescale", "broadcast"])
def test_a_choice_of_subtasks_cuts_the_chain(method: str) -> None:
    stream = getattr(items(), method)().map(abs).collect()
    assert compiled(stream) == ["items*2", "map -> collect*2", f"0>1 {method}"]


def test_a_function_that_chooses_is_carried_by_the_edge() -> None:
    graph = compile_job(items().partition(lambda row, count: row % count).collect(), parallelism=2)
    assert shape(graph) == ["items*2", "collect*2", "0>1 custom"]
    program: Program = open_program(graph.vertices[0].program, cloudpickle.loads)
    (output,) = program.outputs
    assert output.choose is not None
    assert (output.edge, output.partitioner, output.choose(5, 2)) == (0, "custom", 1)


def groups(stream: Stream[Any]) -> list[str]:
    graph = compile_job(stream, parallelism=2)
    return [f"{vertex.name}: {vertex.slot_group}" for vertex in graph.vertices]


def test_a_slot_group_is_that_of_what_follows_too() -> None:
    one = items().map(abs).slot_group("heavy").filter(bool)
    assert groups(one.rebalance().collect()) == ["items: ", "map -> filter: heavy", "collect: heavy"]
    assert groups(items().slot_group("a").key_by(abs).count().slot_group("b").collect()) == [
        "items: a",
        "count -> collect: b",
    ]
    assert groups(one.union(items()).collect())[-1] == "collect: ", "the inputs are of two"
    assert groups(items().slot_group("a").union(items().slot_group("a")).collect())[-1] == "collect: a"
    with pytest.raises(UsageError, match="slot_group takes a name of 1 to"):
        items().slot_group("")
    with pytest.raises(InvalidGraph, match=r"slot_group\(\) must directly follow the operator"):
        items().rebalance().slot_group("a")


def test_a_changed_parallelism_cuts_the_chain_and_rebalances() -> None:
    stream = items().parallel(1).map(abs).filter(bool).parallel(4).collect()
    assert compiled(stream) == ["items*1", "map*2", "filter -> collect*4", "0>1 rebalance", "1>2 rebalance"]


def test_sinks_and_keys_run_where_their_input_does() -> None:
    stream = items().parallel(1).key_by(abs).count().parallel(3).collect()
    assert compiled(stream) == ["items*1", "count -> collect*3", "0>1 hash"]
    assert compiled(items().parallel(3).collect()) == ["items -> collect*3"]
    assert compiled(items().collect().parallel(1)) == ["items*2", "collect*1", "0>1 rebalance"]


def test_forward_between_different_parallelisms_is_refused() -> None:
    with pytest.raises(InvalidGraph, match=r"from 'items' with parallelism 1 to 'map' with parallelism 2"):
        compile_job(items().parallel(1).forward().map(abs).collect(), parallelism=2)


def test_a_stream_used_twice_runs_once_and_has_two_edges() -> None:
    stream = items().map(abs)
    both = Stream.together(stream.collect(), stream.filter(bool).to_count())
    assert compiled(both) == [
        "items -> map*2",
        "collect*2",
        "filter -> to_count*2",
        "0>1 forward",
        "0>2 forward",
    ]


def test_a_union_has_one_edge_for_each_input() -> None:
    stream = items().union(items().parallel(1), items().rebalance()).map(abs).collect()
    assert compiled(stream) == [
        "items*2",
        "items*1",
        "items*2",
        "map -> collect*2",
        "0>3 forward",
        "1>3 rebalance",
        "2>3 rebalance",
    ]
    graph = compile_job(stream)
    assert [edge.input for edge in graph.edges] == [0, 0, 0]


def test_a_union_with_itself_reads_twice() -> None:
    stream = items().map(abs)
    assert compiled(stream.union(stream).collect()) == [
        "items -> map*2",
        "collect*2",
        "0>1 forward",
        "0>1 forward",
    ]


def test_arrow_is_exchanged_by_its_columns() -> None:
    graph = compile_job(sales().key_by("user", "city").count().collect(), parallelism=2)
    assert shape(graph) == ["from_arrow*2", "count -> collect*2", "0>1 hash"]
    program: Program = open_program(graph.vertices[0].program, cloudpickle.loads)
    assert program.outputs[0].keys == ("user", "city")
    assert program.operators == []


def test_a_chain_of_auxiliary_steps_is_still_named() -> None:
    stream = items().rebalance().key_by(abs).count().collect()
    assert compiled(stream) == ["items*2", "key_by*2", "count -> collect*2", "0>1 rebalance", "1>2 hash"]


def test_what_follows_an_endless_source_is_endless() -> None:
    stream = Stream.generate(rate=10).union(items()).key_by(abs).count().to_count()
    graph = compile_job(stream)
    assert [vertex.bounded for vertex in graph.vertices if vertex.is_source] == [False, True]
    assert not graph.vertices[-1].bounded


def test_settings_travel_with_the_graph() -> None:
    settings = JobSettings(buffers_per_channel=0, buffer_timeout=-1)
    assert compile_job(items().collect(), settings=settings).settings == settings


# --- mistakes -------------------------------------------------------------------------------------


def test_a_stream_without_a_sink_is_no_job() -> None:
    with pytest.raises(InvalidGraph, match=r"ends with 'map' and goes nowhere: end it with collect\(\)"):
        compile_job(items().map(abs))
    with pytest.raises(InvalidGraph, match="goes nowhere"):
        compile_job(items().union(items()))


@pytest.mark.parametrize("job", [[1], items().key_by(abs), Stream])
def test_only_streams_are_jobs(job: Any) -> None:
    with pytest.raises(UsageError, match="a job is a Stream or a Table, not a"):
        compile_job(job)


@pytest.mark.parametrize("parallelism", [0, 1.0, 40_000])
def test_the_job_s_parallelism_is_checked(parallelism: Any) -> None:
    with pytest.raises(UsageError, match="parallelism takes a whole number"):
        compile_job(items().collect(), parallelism=parallelism)


def test_more_than_fits_into_a_submission_is_refused_with_the_arithmetic() -> None:
    first, second = (Stream.items([bytes(35 * 2**20)]) for _ in range(2))
    with pytest.raises(
        ResourceExhausted,
        match=r"carries 70\.\d MiB and at most 64 MiB fit; 35\.\d MiB of it in 'items.*Stream\.generate, "
        r"or read it there with Stream\.source",
    ):
        compile_job(first.union(second).collect())


def test_a_broadcast_join_runs_where_its_big_side_does() -> None:
    small = Stream.items([{"k": 1}])
    big = Stream.generate(lambda start, count: [{"k": 1}] * count, records=10).parallel(3)
    graph = compile_job(big.broadcast_join(small, on="k").collect(), parallelism=2)
    assert [(edge.partitioner, edge.input) for edge in graph.edges] == [("forward", 0), ("broadcast", 1)]
    joined = graph.vertices[graph.edges[0].target]
    assert joined.parallelism == 3


def test_a_directory_that_has_filled_since_is_refused_at_submission(tmp_path: Path) -> None:
    stream = Stream.items([1]).to_files(tmp_path)
    compile_job(stream)
    (tmp_path / "part-0-1.parquet").touch()
    with pytest.raises(UsageError, match="already holds Parquet files"):
        compile_job(stream)


def test_two_sinks_of_a_job_write_to_two_directories(tmp_path: Path) -> None:
    rows = Stream.items([1])
    both = Stream.together(rows.to_files(tmp_path / "a"), rows.to_files(tmp_path / "x" / ".." / "a"))
    compile_job(Stream.together(rows.to_files(tmp_path / "a"), rows.to_files(tmp_path / "b")))
    with pytest.raises(UsageError, match="two sinks of the job write to"):
        compile_job(both)


def test_rows_of_several_sinks_are_told_apart_by_name() -> None:
    rows = Stream.items([1])
    graph = compile_job(Stream.together(rows.map(abs).collect("x"), rows.collect(), rows.to_count()))
    assert sorted(vertex.collects for vertex in graph.vertices) == ["", "", "collect", "x"]
    with pytest.raises(UsageError, match=r"2 sinks of the job are named 'collect': give each its own"):
        compile_job(Stream.together(rows.map(abs).collect(), rows.collect()))
    with pytest.raises(UsageError, match="collect takes a name"):
        rows.collect("")


# --- side outputs ---------------------------------------------------------------------------------


def timed() -> Stream[Any]:
    return items().event_time(int)


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    "step",
    [
        lambda sides: items().map(abs, sides=sides),
        lambda sides: items().flat_map(range, sides=sides),
        lambda sides: items().map_async(asyncio.sleep, concurrency=1, sides=sides),
        lambda sides: timed().key_by(abs).process(lambda row, context: None, sides=sides),
    ],
    ids=["map", "flat_map", "map_async", "process"],
)
def test_something_reads_every_side_output(step: Any) -> None:
    made = step(["odd", "large"])
    some = made.collect(), made.side("odd").collect("odd")
    with pytest.raises(UsageError, match=r"nothing reads .* 'large' of .*: give \.side\('large'\) right"):
        compile_job(Stream.together(*some))
    compile_job(Stream.together(*some, made.side("large").to_count()))


@pytest.mark.parametrize(
    "made",
    [
        timed().key_by(abs).window(HOUR, late="side", allowed_lateness=HOUR).count(),
        timed().key_by(abs).session_window(HOUR, late="side").count(),
        timed().key_by(abs).count_window(3, late="side").reduce(max),
        timed().to_table({"n": int}).key_by("n").window(HOUR, late="side").count(),
        timed().to_table({"n": int}).key_by("n").session_window(HOUR, late="side").count(),
    ],
    ids=["window", "sessions", "counts", "columns", "sessions of columns"],
)
def test_something_reads_late_records_that_are_put_aside(made: Any) -> None:
    with pytest.raises(UsageError, match=r"nothing reads the late .*: give \.late .* late='drop', which"):
        compile_job(made.to_count())
    compile_job(Stream.together(made.to_count(), made.late.to_count()))


@pytest.mark.parametrize("as_of", [False, True])
def test_something_reads_the_late_records_of_both_sides_of_a_join(as_of: bool) -> None:
    if as_of:
        left, right = (timed().to_table({name: int}).key_by(name) for name in "ab")
        joined: Any = left.asof_join(right, late="side")
    else:
        joined = timed().key_by(abs).join(timed().key_by(abs), late="side")
    some = joined.to_count(), joined.late.to_count()
    with pytest.raises(UsageError, match=r"nothing reads the late .*: give \.late_right right after"):
        compile_job(Stream.together(*some))
    compile_job(Stream.together(*some, joined.late_right.to_count()))


def test_panes_need_not_be_read() -> None:
    """What they show goes out at last."""
    compile_job(timed().key_by(abs).window(HOUR, early=timedelta(minutes=1)).count().to_count())


# --- state ----------------------------------------------------------------------------------------


def reads(table: Table) -> dict[str, str]:
    """What the state of the last operator of a table that has some is made of."""
    states = [
        state for vertex in compile_job(table.collect(), parallelism=1).vertices for state in vertex.states
    ]
    return states[-1].reads


def test_state_is_described_by_the_types_of_keys_the_functions_of_aggregates_and_windows() -> None:
    columns = {
        "user": pa.array(["a"]).dictionary_encode(),
        "n": [1],
        "x": [0.5],
        "at": [datetime(2026, 1, 1)],
    }
    rows = Table.from_arrow(pa.table(columns)).event_time("at")
    keyed = rows.key_by("user", "n")
    found = reads(keyed.aggregate(s=("x", "sum"), c=("x", "count"), f=("x", "first"), l=("n", "last")))
    assert found == {
        "keys": "string, int64",
        "aggregate s": "sum of double",
        "aggregate c": "count",
        "aggregate f": "first of double by x, n",
        "aggregate l": "last of int64 by x, n",
    }
    assert reads(keyed.count()) == reads(keyed.distinct()) == {"keys": "string, int64"}


def test_state_is_described_by_how_records_are_cut_into_windows_and_which_rows_are_kept() -> None:
    rows = Table.from_arrow(pa.table({"n": [1], "at": [datetime(2026, 1, 1)]})).event_time("at")
    keyed, second = rows.key_by("n"), timedelta(seconds=1)
    windows = {
        "of 5 s": keyed.window(5 * second).count(),
        "of 5 s each 0.5 s from 0.25 s on": keyed.window(
            5 * second, slide=second / 2, offset=second / 4
        ).count(),
        "of 1 days in Europe/Zurich": keyed.window(timedelta(days=1), tz="Europe/Zurich").count(),
        "of 3 months in UTC": keyed.window("quarter").count(),
        "sessions with gaps of 1.5 s": keyed.session_window(1.5 * second).count(),
        "windows of 5 records": keyed.count_window(5).count(),
    }
    assert {text: reads(table)["windows"] for text, table in windows.items()} == {
        text: text for text in windows
    }
    assert reads(keyed.top_n(3, by="at"))["rows"] == "the 3 greatest by at"
    assert reads(keyed.top_n(3, by="at", descending=False))["rows"] == "the 3 smallest by at"


def test_state_of_a_join_is_described_by_which_pairs_it_gives() -> None:
    rows = Table.from_arrow(pa.table({"n": [1], "at": [datetime(2026, 1, 1)]}))
    keyed, plain, second = rows.event_time("at").key_by("n"), rows.key_by("n"), timedelta(seconds=1)
    joins = {
        "left, right rows 2 s before to 0.5 s after": keyed.join(
            keyed, how="left", before=2 * second, after=second / 2
        ),
        "inner": plain.join(plain),
        "the last right row of 1.5 s": keyed.asof_join(keyed, tolerance=1.5 * second),
        "the last right row": keyed.asof_join(keyed),
    }
    assert {text: reads(table)["pairs"] for text, table in joins.items()} == {text: text for text in joins}
    streams = rows.to_rows().key_by("n")
    job = compile_job(streams.join(streams, how="anti").collect())
    assert [state.reads for state in job.vertices[-1].states] == [{"pairs": "anti"}]


def test_state_of_generated_records_is_of_their_rate() -> None:
    """Numbers are dealt to splits in blocks that are shorter at a lower rate."""
    found = {rate: reads(Table.generate(rate=rate, records=10**6)) for rate in (500, 1_000_000)}
    assert found == {
        500: {"splits": "64 with blocks of 1 records, by its rate and records"},
        1_000_000: {"splits": "64 with blocks of 3,125 records, by its rate and records"},
    }
    assert reads(sales()) == {}
