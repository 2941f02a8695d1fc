"""Jobs in tests: what goes in and comes out, time that moves by hand, and nothing of the outside world."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle import testing
from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UnserializableRecord, UsageError, WrongResult
from minishuffle.limits import LIST_ROWS
from minishuffle.operators.base import Aside, TaskContext

SECOND = 1_000_000
TEN = timedelta(seconds=10)
CLICKS = pa.schema({"user": pa.string(), "at": pa.timestamp("us", "UTC")})


class Unread:
    """A source that cannot be read here."""

    bounded = True
    format = "rows"

    def splits(self) -> list[int]:
        raise AssertionError("a source of the plan was opened")

    def read(self, split: int, offset: int) -> Iterator[Any]:
        raise AssertionError("a source of the plan was opened")


class UnreadColumns(Unread):
    format = "arrow"
    schema = CLICKS


class Unwritten:
    """A sink that cannot be opened here."""

    def open(self, context: TaskContext) -> None:
        raise AssertionError("a sink of the plan was opened")

    def write(self, batch: Any) -> None:
        raise AssertionError("a sink of the plan was opened")

    def close(self) -> None:
        raise AssertionError("a sink of the plan was opened")


def rows(name: str = "rows") -> Stream[Any]:
    return Stream.source(Unread()).name(name)


def clicks(name: str = "clicks") -> Table:
    return Table.source(UnreadColumns()).name(name)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def timed(stream: Stream[Any], **options: Any) -> Stream[Any]:
    return stream.event_time(lambda row: row["t"] * SECOND, **options)


# --- what goes in and comes out ---------------------------------------------------------------------


def test_a_stream_gives_a_list_and_a_table_a_table() -> None:
    words = rows().flat_map(str.split).key_by(str).count(emit="end")
    assert testing.run(words, ["to be", "or not to be"]) == [("to", 2), ("be", 2), ("or", 1), ("not", 1)]
    assert testing.run(words.collect(), iter([])) == []
    counts = clicks().key_by("user").count(emit="end")
    found = testing.run(counts, [{"user": "ann", "at": at(1)}, {"user": "ann"}, {"user": "bob"}])
    assert found == pa.table({"user": ["ann", "bob"], "count": [2, 1]})
    assert testing.run(counts, CLICKS.empty_table()).schema == found.schema


def test_what_several_sinks_and_side_outputs_get_stands_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").write_text("there is one already")
    parsed = rows().map(
        lambda row: Aside("large", row) if row > 9 else 10 // row, sides=["large"], on_error="side"
    )
    job = Stream.together(
        parsed.to(Unwritten()),
        parsed.side("large").to_files(tmp_path / "out").name("files"),
        parsed.errors.map(lambda error: error["record"]).collect("wrong"),
        parsed.map(lambda n: {"n": n}).to_table({"n": int}).to_spark("kept"),
    )
    found = testing.run(job, [1, 0, 20, 5])
    table = found.pop("to_spark kept")
    assert found == {"Unwritten": [10, 2], "files": [20], "wrong": [0]}
    assert table.to_pylist() == [{"n": 10}, {"n": 2}]
    assert not (tmp_path / "out").exists()


def test_sources_take_rows_by_name_in_the_order_given() -> None:
    both = rows("one").union(rows("two"), rows("three"))
    assert testing.run(both, {"two": [2, 2], "one": [1], "three": []}) == [2, 2, 1]
    small = clicks("users").rename({"at": "since"})
    written = Table.from_spark("visits", CLICKS).broadcast_join(small, on="user")
    found = testing.run(
        written,
        {
            "from_spark visits": [{"user": "ann", "at": at(5)}, {"user": "bob", "at": at(6)}],
            "users": pa.table(
                {"at": [at(1)], "user": ["ann"]}, schema=pa.schema([CLICKS.field(1), CLICKS.field(0)])
            ),
        },
    )
    assert found.to_pylist() == [{"user": "ann", "at": at(5), "since": at(1)}]


def test_rows_are_those_that_a_cluster_would_give() -> None:
    """They are packed on their way to the client, and copied where a step may change them."""
    given = [{"n": [1]}]

    def changed(row: Any) -> Any:
        row["n"].append(2)
        return row

    stream = rows()
    both = Stream.together(stream.map(changed).collect("changed"), stream.collect("given"))
    assert testing.run(both, given) == {"changed": [{"n": [1, 2]}], "given": [{"n": [1]}]}
    assert given == [{"n": [1]}]
    (refused,) = testing.run(rows().map(lambda n: n or ..., on_error="skip"), [1, 0])["map.errors"]
    assert "Ellipsis" in refused["error"]
    with pytest.raises(UnserializableRecord, match="cannot cross an exchange: Ellipsis"):
        testing.run(rows().map(lambda n: ...), [1])


def test_collections_in_memory_give_their_own_rows() -> None:
    users = Table.from_arrow(pa.table({"user": ["ann"], "name": ["Ann"]})).name("users")
    joined = clicks().broadcast_join(users, on="user").select("name")
    assert testing.run(joined, {"clicks": [{"user": "ann"}, {"user": "bob"}]}) == pa.table({"name": ["Ann"]})
    given = pa.table({"user": ["bob"], "name": ["Bob"]})
    assert testing.run(joined, {"clicks": [{"user": "bob"}], "users": given})["name"].to_pylist() == ["Bob"]
    numbers = Stream.items([1, 2]).name("held").union(rows("given"))
    assert testing.run(numbers, {"given": [0]}) == [1, 2, 0]
    assert testing.run(Stream.items([1, 2]).map(str)) == ["1", "2"]
    assert testing.run(Stream.items([1, 2]).union(Stream.items([3]))) == [1, 2, 3]
    with testing.start(joined) as job:
        job.push([{"user": "bob"}], "clicks")
        job.push(given, "users")
        assert job.take().num_rows == 0
        job.end("users")
        assert job.take() == pa.table({"name": ["Bob"]})


async def halved(row: int) -> int:
    return 4 // row


def test_asynchronous_functions_have_ended_when_rows_were_pushed() -> None:
    job = rows().map_async(halved, concurrency=2, on_error="dead_letter").key_by(str).count(emit="batch")
    with testing.start(job) as harness:
        harness.push([1, 2, 0, 4, 4])
        found = harness.take()
        assert found["collect"] == [("4", 1), ("2", 1), ("1", 1), ("1", 2)]
        (error,) = found["map_async.errors"]
        assert (error["record"], error["error"][:17]) == (0, "ZeroDivisionError")
    assert not [thread for thread in threading.enumerate() if thread.name.endswith(" calls")]


# --- what is dropped ----------------------------------------------------------------------------------


def test_late_records_are_there_with_the_name_of_the_step() -> None:
    stream = timed(rows()).key_by("user").window(TEN).count().name("visits")
    given = [{"user": 1, "t": 1}, {"user": 1, "t": 12}, {"user": 1, "t": 3}]
    found = testing.run(stream, given)
    assert found["visits.late"] == [{"user": 1, "t": 3}]
    assert found["collect"] == [(1, at(0), 1), (1, at(10), 1)]
    assert testing.run(stream, given[:2]) == found["collect"]
    table = clicks().event_time("at").key_by("user").session_window(TEN)
    late = testing.run(table.count(), [{"user": "a", "at": at(30)}, {"user": "b", "at": at(3)}])
    assert late["window_count.late"].to_pylist() == [{"user": "b", "at": at(3)}]
    way = r": rows were dropped: window_count\.late has 1; take result\['collect'\]"
    with pytest.raises(AttributeError, match=f"is a dict and has no attribute 'num_rows'{way}$"):
        late.num_rows  # noqa: B018
    keys = rf"there are 'collect', 'window_count\.late'{way}"
    for key in ("count.late", "late", "windw_count"):
        with pytest.raises(
            KeyError, match=f"there is no '{key}': did you mean 'window_count.late'\\? {keys}"
        ):
            late[key]
    with pytest.raises(KeyError, match=f"there is no 'user': {keys}"):
        late["user"]


def test_late_records_of_a_join_and_records_that_raise_are_apart() -> None:
    left, right = timed(rows("left")), timed(rows("right").map(lambda row: row["x"] and row, on_error="skip"))
    joined = left.key_by("k").join(right.key_by("k"), within=TEN)
    found = testing.run(
        joined,
        {
            "right": [{"k": 1, "t": 50, "x": 1}, {"k": 1, "t": 3, "x": 1}, {"k": 1}],
            "left": [{"k": 1, "t": 52}],
        },
    )
    assert [row[0] for row in found["collect"]] == [1]
    assert found["join.late_right"] == [{"k": 1, "t": 3, "x": 1}]
    assert [(each["operator"], each["record"]) for each in found["map.errors"]] == [("map", {"k": 1})]


def test_two_steps_of_one_name_are_numbered() -> None:
    stream = rows().map(lambda n: 1 // n, on_error="skip").map(lambda n: 1 // (n - 1), on_error="skip")
    found = testing.run(stream, [0, 1])
    assert found["collect"] == []
    assert [found[name][0]["record"] for name in ("map.errors", "map.2.errors")] == [0, 1]


# --- steps ---------------------------------------------------------------------------------------------


def test_event_time_goes_on_with_records_and_by_hand() -> None:
    job = testing.start(timed(rows(), out_of_order=TEN).key_by("k").window(TEN).count())
    job.push([{"k": 1, "t": 1}, {"k": 1, "t": 19}])
    assert job.take() == []
    job.advance_to(at(10) - timedelta(microseconds=1))
    assert job.take() == []
    job.advance_to(at(10))
    assert (job.take(), job.take()) == ([(1, at(0), 1)], [])
    job.push([{"k": 1, "t": 9}])
    assert job.take() == {"collect": [], "window_count.late": [{"k": 1, "t": 9}]}
    job.advance_to(5 * SECOND)
    job.push([{"k": 1, "t": 11}])
    assert job.finish() == [(1, at(10), 2)]
    assert job.finish() == []
    with pytest.raises(UsageError, match="'rows' has ended: push rows before finish"):
        job.push([1])


def test_event_time_waits_for_the_least_of_all_inputs() -> None:
    both = timed(rows("one")).union(timed(rows("two")))
    with testing.start(both.key_by("k").window(TEN).count()) as job:
        job.push([{"k": 1, "t": 1}, {"k": 1, "t": 30}], "one")
        assert job.take() == []
        job.push([{"k": 1, "t": 2}, {"k": 1, "t": 11}], "two")
        assert job.take() == [(1, at(0), 2)]
        job.advance_to(at(31))
        assert job.take() == [(1, at(10), 1)]


def test_early_panes_come_with_event_time() -> None:
    windows = timed(rows()).key_by("k").window(TEN, early=timedelta(seconds=2)).count()
    with testing.start(Stream.together(windows.panes.collect("panes"), windows.collect())) as job:
        job.push([{"k": 1, "t": 0}])
        job.advance_to(at(3))
        found = job.take()
        assert ([pane[:3] for pane in found["panes"]], found["collect"]) == ([(1, at(0), 1)], [])
        assert job.finish()["collect"] == [(1, at(0), 1)]


def on_row(row: Any, context: Any) -> list[Any]:
    context.state["n"] = context.state.get("n", 0) + 1
    context.set_timer(at(5 * context.state["n"]), clock="wall")
    return [("row", context.state["n"])]


def on_timer(time: datetime, context: Any) -> list[Any]:
    return [(context.key, time)]


def test_the_clock_moves_by_hand_alone() -> None:
    with testing.start(rows().key_by("k").process(on_row, on_timer, ttl=timedelta(seconds=30))) as job:
        job.push([{"k": "a"}, {"k": "a"}, {"k": "b"}])
        job.advance_clock(4.9)
        assert job.take() == [("row", 1), ("row", 2), ("row", 1)]
        job.advance_clock(20)
        assert job.take() == [("a", at(5)), ("b", at(5)), ("a", at(10))]
        job.advance_clock(31)
        job.push([{"k": "a"}])
        assert job.take() == [("row", 1), ("a", at(5))]
        for wrong in (-1, "1"):
            with pytest.raises(UsageError, match=f"takes seconds from 0 on, not {wrong!r}"):
                job.advance_clock(wrong)  # type: ignore[arg-type]


def test_a_silent_input_is_idle_once_the_clock_says_so() -> None:
    quick, silent = timed(rows("quick")), timed(rows("silent"), idle_after=timedelta(seconds=60))
    with testing.start(quick.union(silent).key_by("k").window(TEN).count()) as job:
        job.push([{"k": 1, "t": 1}, {"k": 1, "t": 11}], "quick")
        job.advance_clock(59)
        assert job.take() == []
        job.advance_clock(1)
        assert job.take() == [(1, at(0), 1)]


# --- functions -----------------------------------------------------------------------------------------


class Noting:
    """A function that says what happens to it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def open(self, context: TaskContext) -> None:
        self.seen.append(f"open {context.index} of {context.parallelism}")

    def __call__(self, row: int) -> int:
        return 1 // row

    def close(self) -> None:
        self.seen.append("close")


def test_an_error_is_the_functions_own_with_its_frames() -> None:
    function = Noting()
    with pytest.raises(ZeroDivisionError) as raised:
        testing.run(rows().parallel(4).map(function).parallel(2), [1, 0])
    frames = traceback.extract_tb(raised.tb)
    assert (frames[-1].name, frames[-2].name) == ("__call__", "_running")
    assert raised.value.__notes__ == ["raised in operator 'map' by the record 0"]
    assert function.seen == ["open 0 of 1", "close"]
    with testing.start(rows().map(function)) as job:
        job.push([1])
    assert function.seen[2:] == ["open 0 of 1", "close"]
    with pytest.raises(UsageError, match="'rows' has ended"):
        job.push([1])


def test_a_function_that_cannot_be_pickled_runs() -> None:
    lock = threading.Lock()
    assert testing.run(rows().map(lambda row: lock.locked()), [1]) == [False]


# --- what is refused -----------------------------------------------------------------------------------

ONE, TWO = rows("one"), rows("one").union(rows("two"))


@pytest.mark.parametrize(
    ("stream", "inputs", "message"),
    [
        (TWO, [1], r"the job has 2 sources: write {'one': rows, 'two': rows}"),
        (TWO, {"one": [1]}, r"inputs of the job: 'two' is missing: write {'one': rows, 'two': rows}"),
        (ONE, None, "'one' is missing: write {'one': rows}"),
        (ONE, {"uno": [1]}, r"'one' is missing, 'uno' is no source of it: write {'one': rows}"),
        (ONE, "text", "'one' takes a list of rows, not a str"),
        (ONE, pa.table({"a": [1]}), "'one' takes a list of rows, not a Table"),
        (clicks(), 5, "'clicks' takes a pyarrow.Table, a DataFrame or a list of dicts, not a int"),
        (clicks(), [{"when": 1}], r"rows for 'clicks': 'when' is no column of its schema \(user: string, at"),
        (clicks(), [{"user": 5}], "rows for 'clicks': column 'user': the value 5 does not fit the type str"),
        (
            clicks(),
            pa.table({"user": [1], "at": pa.array([at(1)], CLICKS.types[1])}),
            r"not of its schema \(user: string, at: .*\): user is int64, not string; cast it",
        ),
        (clicks(), pa.table({"at": [1], "on": [1]}), "user is not there; on is not in it; cast it"),
        (
            clicks(),
            pd.DataFrame({"user": ["a"], "at": ["2026-01-01"]}),
            r"at is (large_)?string, not timestamp\[us, tz=UTC\] \(a text is no time: pandas.to_datetime",
        ),
        (clicks(), [{"at": "2026-01-01"}], r"'2026-01-01' does not fit .* \(as declared; a text is no time:"),
        (clicks(), pd.DataFrame({"user": ["a", 1], "at": [at(1)] * 2}), "'clicks' cannot take a Data"),
        (rows("one").union(rows("one")), [1], "two sources of the job are named 'one': give each its own"),
        (Stream.together(ONE.print(), ONE.print()), [1], "two sinks of the job are named 'print'"),
        (rows().key_by(str), [1], "not a KeyedStream: say what to compute for each key, such as count"),
        (rows, None, r"a job is a Stream or a Table, not a function: call it: rows\(\.\.\.\)$"),
        (
            Stream.items([1]).union(Stream.items([2])),
            {"items": [1]},
            "two sources of the job are named 'items': give each its own",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_words(stream: Any, inputs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        testing.run(stream, inputs)


def test_rows_that_do_not_fit_are_an_error_of_the_test_alone() -> None:
    """pytest shows no frame of this package, and no error behind the one that says what to do."""
    wrong: list[Any] = [[{"when": 1}], [{"user": 5}], {"uno": []}]
    for given in wrong:
        with pytest.raises(UsageError) as raised:
            testing.run(clicks(), given)
        shown = [entry.name for entry in raised.traceback if not entry.ishidden(raised)]
        assert shown == ["test_rows_that_do_not_fit_are_an_error_of_the_test_alone"]
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_steps_that_do_not_fit_are_refused_in_words() -> None:
    with testing.start(TWO) as job:
        for name, given in ((None, "no input is named"), ("three", "'three' is no source of the job")):
            with pytest.raises(UsageError, match=f"{given}: write push.* with one of 'one', 'two'"):
                job.push([1], name)
        with pytest.raises(UsageError, match="the job has no event time to advance"):
            job.advance_to(at(1))
        with pytest.raises(UsageError, match="advance_to takes a datetime or microseconds: 'soon'"):
            job.advance_to("soon")  # type: ignore[arg-type]
    with pytest.raises(InvalidGraph, match="and it has none: bound its source"):
        testing.start(rows().broadcast_join(Stream.generate(rate=1), on="k"))
    with pytest.raises(WrongResult, match="no list of rows"):
        testing.run(rows().flat_map(lambda row: "text"), [1])


def test_columns_are_computed_as_in_a_cluster() -> None:
    doubled = clicks().with_columns(twice=pc.binary_join_element_wise(pc.field("user"), pc.field("user"), ""))
    kept = doubled.filter(pc.field("twice") != "bb").select("twice")
    assert testing.run(kept, [{"user": "a"}, {"user": "b"}]) == pa.table({"twice": ["aa"]})
    held = pa.table({"shop": pa.array(["x", "y", "x"]).dictionary_encode()}, metadata={"made": "by hand"})
    assert testing.run(Table.from_arrow(held)).schema.metadata is None
    shops = Table.from_arrow(held).key_by("shop").distinct()
    assert shops.schema == pa.schema({"shop": pa.string()})
    assert testing.run(shops).schema.equals(shops.schema, check_metadata=True)

    again = np.zeros(1)

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        again[0] += batch.num_rows
        return pa.record_batch([pa.array(again), pa.array([str(batch.schema.types[0])])], ["n", "type"])

    schema = {"n": pa.float64(), "type": pa.string()}
    counts = Table.from_arrow(held).rebalance().map_batches(counted, schema=schema, batch_rows=1)
    for table in (counts, counts.rebalance().with_columns(type=pc.field("type"))):
        again[0] = 0
        assert testing.run(table).to_pydict() == {"n": [1, 2, 3], "type": ["string"] * 3}


# --- sources and sinks of one's own --------------------------------------------------------------------


class Emptying:
    """Takes the rows out of its batches, and refuses one of them."""

    def open(self, context: TaskContext) -> None:
        self.rows: list[Any] = []

    def write(self, batch: Any) -> None:
        while batch:
            self.rows.append(batch.pop().pop("n"))
        if "bad" in self.rows:
            raise ValueError("cannot write")

    def close(self) -> list[Any]:
        return self.rows


def test_each_attempt_of_a_sink_has_its_own_rows() -> None:
    given = [{"n": 1}, {"n": 2}]
    assert testing.check_sink(Emptying(), given, parallelism=1) == [[2, 1]]
    assert given == [{"n": 1}, {"n": 2}]
    with pytest.raises(ValueError, match="cannot write") as raised:
        testing.check_sink(Emptying(), [{"n": "bad"}], parallelism=1)
    assert raised.value.__notes__ == ["raised by Emptying.write in attempt 2 of subtask 0 for batch 0 of 1"]


class Marking:
    """Commits in two phases, and puts what it has seen into the list of its module."""

    outside: ClassVar[list[Any]] = []

    def open(self, context: TaskContext) -> None:
        self.attempt, self.rows = context.attempt, list[Any]()

    def write(self, batch: Any) -> None:
        self.rows += batch

    def prepare(self) -> bytes:
        rows, self.rows = self.rows, []
        return b"%d" % len(rows)

    def commit(self, prepared: bytes) -> None:
        self.outside.append((self.attempt, int(prepared)))

    def close(self) -> None: ...


def test_a_sink_is_checked_with_snapshots_too() -> None:
    Marking.outside.clear()
    rows = list(range(3 * LIST_ROWS + 5))
    assert testing.check_sink(Marking(), rows, parallelism=1, guarantee="at_least_once") == [None]
    before, again, rest = [(1, LIST_ROWS)] * 3, [(2, LIST_ROWS)] * 4, [(2, 5)]
    assert Marking.outside == [*before, *again, *rest]
    with pytest.raises(UsageError, match="Emptying keeps the rows that it takes in the process"):
        testing.check_sink(Emptying(), [1], guarantee="at_least_once")


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: testing.check_sink(Emptying(), iter([1])), "takes a list of rows or a pyarrow.Table, not"),
        (lambda: testing.check_sink(Emptying, [1]), r"a sink, not the class Emptying: write Emptying\("),  # type: ignore[arg-type]
        (lambda: testing.check_source(Emptying), "check_source takes a source, not the class Emptying"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_is_no_source_and_no_sink_is_refused_in_words(check: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check()
