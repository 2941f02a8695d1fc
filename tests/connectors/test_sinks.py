"""Sinks: what they send, count and log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from minishuffle.connectors.sinks import CollectSink, CountSink, PrintSink, UserSink
from minishuffle.counters import TaskCounters
from minishuffle.errors import UsageError, WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.limits import COMMITTABLE_BYTES_MAX, SINK_FLUSH_SECONDS
from minishuffle.operators.base import CompleteFile, TaskContext
from support.batches import as_batch
from support.listing import Listing


def nothing(batch: Batch) -> None:
    raise AssertionError(f"a sink emits nothing, and not {batch!r}")


CONTEXT: dict[str, Any] = {"job": "job", "name": "task", "index": 3, "parallelism": 4, "attempt": 2}


def run(operator: Any, *batches: Batch, finish: bool = True, **options: Any) -> Any:
    operator = cloudpickle.loads(cloudpickle.dumps(operator))
    operator.open(TaskContext(**{**CONTEXT, **options}))
    for batch in batches:
        operator.process(as_batch(batch), 0, nothing)
    if finish:
        operator.finish(nothing)
    return operator.close()


ARROW = pa.record_batch({"a": [1, 2], "b": ["x", None]})


def test_collect_sends_rows_as_they_are() -> None:
    sent: list[Any] = []
    assert run(CollectSink(), [1, (2, 3)], collect=sent.append) is None
    assert sent == [[1, (2, 3)]]


CATEGORIES = pa.dictionary(pa.int8(), pa.string())


def test_collect_sends_columns_in_the_types_of_their_table() -> None:
    order = pa.dictionary(pa.int8(), pa.string(), ordered=True)
    schema = pa.schema(
        [
            pa.field("a", pa.int64(), nullable=False),
            ("b", CATEGORIES),
            ("n", pa.dictionary(pa.int32(), pa.int64())),
            ("s", pa.struct([("c", CATEGORIES)])),
            ("o", order),
        ]
    )
    decoded = pa.record_batch(
        {"a": [1, 2], "b": ["x", None], "n": [7, 7], "s": [{"c": "y"}, None], "o": ["S", "M"]}
    )
    sent: list[pa.RecordBatch] = []
    run(CollectSink(schema), decoded, collect=sent.append)
    assert sent[0].to_pylist() == decoded.to_pylist()
    # Which of two categories is the greater one is not to be known from their texts.
    assert sent[0].schema.equals(schema.set(4, pa.field("o", pa.string())))

    many = pa.record_batch({"b": [str(number) for number in range(200)]})
    run(CollectSink(pa.schema([("b", CATEGORIES)])), many, collect=sent.append)
    assert sent[1].equals(many), "int8 has no number for each of them"


@pytest.mark.parametrize(("index", "batches", "sends"), [(0, 0, 1), (0, 2, 2), (3, 0, 0)])
def test_the_first_subtask_sends_the_columns_of_a_table_without_rows(
    index: int, batches: int, sends: int
) -> None:
    sent: list[pa.RecordBatch] = []
    run(CollectSink(ARROW.schema), *[ARROW] * batches, collect=sent.append, index=index)
    assert [batch.schema for batch in sent] == [ARROW.schema] * sends
    assert sum(map(len, sent)) == batches * len(ARROW)


def test_count_counts_both_formats() -> None:
    assert run(CountSink(), [1, 2, 3], ARROW, []) == 5
    assert run(CountSink()) == 0


def test_print_logs_one_line_per_row() -> None:
    lines: list[str] = []
    assert run(PrintSink(), ["a", 1], ARROW, log=lines.append) is None
    assert lines == ["'a'", "1", "{'a': 1, 'b': 'x'}", "{'a': 2, 'b': None}"]


class Remembering:
    def open(self, context: TaskContext) -> None:
        self.seen: list[Any] = [context.index]

    def write(self, batch: Batch) -> None:
        if batch == ["bad"]:
            raise ValueError("cannot write")
        self.seen.append(batch)

    def close(self) -> list[Any]:
        return self.seen


def test_users_sink_is_opened_fed_and_closed() -> None:
    sink = UserSink(Remembering())
    assert sink.name == "Remembering"
    assert run(sink, [1], Batch(["v"], ["k"])) == [3, [1], ["v"]]
    assert UserSink(Remembering()).close() is None


def test_users_sink_must_have_the_methods() -> None:
    with pytest.raises(UsageError, match=r"object is not a sink: it needs the methods open\(context\)"):
        UserSink(object())  # type: ignore[arg-type]


class Awaited(Remembering):
    async def write(self, batch: Batch) -> None:  # type: ignore[override]
        self.seen.append(batch)


class Yielding(Remembering):
    def write(self, batch: Batch) -> Iterator[None]:  # type: ignore[override]
        self.seen.append(batch)
        yield


class FlushingAsync(Remembering):
    async def flush(self) -> None: ...


class OpenedAsync(Remembering):
    async def open(self, context: TaskContext) -> None:  # type: ignore[override]
        self.seen.append(context.index)


@pytest.mark.parametrize("sink", [Awaited(), Yielding(), FlushingAsync(), OpenedAsync()])
def test_a_write_whose_call_writes_nothing_is_refused(sink: Any) -> None:
    with pytest.raises(UsageError, match=r"\w+\.(open|write|flush) is an async function or a generator"):
        UserSink(sink)


class Flushing(Remembering):
    def flush(self) -> None:
        self.seen.append("flush")


def test_users_sink_is_flushed_where_it_has_rows_that_were_not() -> None:
    counters, now = TaskCounters(), 100.0
    sink = UserSink(Flushing())
    sink.open(TaskContext("job", "task", 3, 4, 1, counters=counters, now=lambda: now))
    sink.on_barrier(nothing)
    assert sink.deadline() is None, "nothing was written"
    sink.process(Batch([1, 2]), 0, nothing)
    now += 0.5
    sink.process(Batch([3]), 0, nothing)
    assert (sink.deadline(), counters.rows_filed) == (100.0 + SINK_FLUSH_SECONDS, 3)
    sink.on_clock(101.0, nothing)
    assert (sink.deadline(), counters.rows_filed) == (None, 0)
    sink.process(Batch([4]), 0, nothing)
    sink.on_barrier(nothing)
    sink.process(Batch([5]), 0, nothing)
    sink.finish(nothing)
    sink.process(Batch([6]), 0, nothing)
    assert sink.close() == [3, [1, 2], [3], "flush", [4], "flush", [5], "flush", [6]], "as after a failure"
    assert (counters.rows_filed, counters.rows_in_result) == (1, 1)


class Committing(Flushing):
    """Prepares how many rows it has seen, and notes what it commits."""

    def prepare(self) -> bytes:
        return b"%d" % sum(len(each) for each in self.seen if isinstance(each, list))

    def commit(self, prepared: bytes) -> None:
        self.seen.append(prepared)


def committing(listing: Listing, counters: TaskCounters | None = None) -> UserSink:
    sink = UserSink(Committing())
    sink.sink.result_only = False  # Which none is that has yet to commit.
    sink.open(TaskContext("job", "task", 3, 4, 2, counters=counters or TaskCounters(), files=listing))
    return sink


def test_a_sink_commits_once_the_coordinator_has_what_it_has_prepared() -> None:
    listing, counters = Listing(at_once=False, committable=b"before"), TaskCounters()
    sink = committing(listing, counters)
    sink.process(Batch([1, 2]), 0, nothing)
    sink.on_clock(SINK_FLUSH_SECONDS, nothing)
    assert listing.heard == [CompleteFile(0, "", 2, 0, "", b"2")]
    assert sink.deadline() is None, "it waits for the coordinator, which wakes it"
    sink.process(Batch([3]), 0, nothing)
    sink.on_clock(9.0, nothing)
    assert len(listing.heard) == 1, "the next is prepared once this one is committed"
    listing.acknowledged = 1
    assert sink.deadline() == 0.0
    sink.on_clock(9.0, nothing)
    sink.finish(nothing)
    expected = [3, b"before", [1, 2], "flush", [3], b"2", "flush", b"3"]
    assert (sink.close(), counters.rows_filed, counters.rows_in_result) == (expected, 3, 0)
    assert [each.rows for each in listing.heard] == [2, 1]


@pytest.mark.parametrize("acknowledged", [0, 1])
def test_after_a_failure_a_sink_commits_what_the_coordinator_has(acknowledged: int) -> None:
    listing = Listing(at_once=False)
    sink = committing(listing)
    sink.process(Batch([1]), 0, nothing)
    sink.on_clock(SINK_FLUSH_SECONDS, nothing)
    listing.acknowledged = acknowledged
    assert sink.close() == [3, [1], "flush", *[b"1"] * acknowledged]
    assert listing.lingered == 1


def test_what_is_no_commit_in_two_phases_is_refused() -> None:
    class Half(Remembering):
        def commit(self, prepared: bytes) -> None: ...

    with pytest.raises(UsageError, match=r"Half has one of prepare\(\) and commit\(prepared\): give it both"):
        UserSink(Half())
    for given in (None, b"", "text", bytes(COMMITTABLE_BYTES_MAX + 1)):
        sink = committing(Listing())
        sink.sink.prepare = lambda given=given: given
        sink.process(Batch([1]), 0, nothing)
        with pytest.raises(WrongResult, match=r"Committing\.prepare gives .*: give 1 to 1024 bytes"):
            sink.finish(nothing)


class Keeping(Remembering):
    result_only = False


@pytest.mark.parametrize(
    ("sink", "rows"), [(CountSink(), 3), (UserSink(Remembering()), 3), (UserSink(Keeping()), 0)]
)
def test_rows_that_the_result_alone_has_are_counted_as_such(sink: Any, rows: int) -> None:
    """Before the close they are with the attempt alone, unless the sink says that it keeps them elsewhere."""
    counters = TaskCounters()
    sink.open(TaskContext("job", "task", 0, 1, 1, counters=counters))
    sink.process(Batch([1]), 0, nothing)
    sink.process(Batch(["v", "w"], ["k", "l"]), 0, nothing)
    assert (counters.rows_filed, counters.rows_in_result) == (rows, 0)
    sink.close()
    assert counters.rows_in_result == rows


# --- snapshots ------------------------------------------------------------------------------------------


def test_a_sink_prepares_for_each_snapshot_and_commits_in_order() -> None:
    listing = Listing(at_once=False, held=True)
    sink = committing(listing)
    sink.process(Batch([1, 2]), 0, nothing)
    assert sink.deadline() is None, "snapshots come often enough"
    sink.on_clock(9.0, nothing)
    assert listing.heard == []
    for batch in ([], [3], [4]):
        if batch:
            sink.process(Batch(batch), 0, nothing)
        assert not sink.defers_snapshot(urgent=False)
        sink.before_snapshot(nothing)
    assert [file.committable for file in listing.heard] == [b"2", b"3", b"4"]
    listing.acknowledged = 1
    assert sink.deadline() == 0.0
    sink.on_clock(9.0, nothing)
    assert sink.sink.seen[-1] == b"2" and sink.deadline() is None
    sink.before_snapshot(nothing)
    again = committing(listing := Listing(held=True, listed={2: 2}, sink_state=listing.sink_state))
    assert again.deadline() == 0.0
    again.on_clock(9.0, nothing)
    assert again.sink.seen[-1] == b"3", "it is listed, and may not be committed"
    listing.listed = {2: 3}
    again.before_snapshot(nothing)
    assert again.sink.seen[-1] == b"4" and listing.sink_state == b""


def test_the_end_of_a_sink_commits_what_snapshots_have_prepared() -> None:
    listing = Listing(at_once=False, held=True)
    sink = committing(listing)
    sink.process(Batch([1]), 0, nothing)
    sink.before_snapshot(nothing)
    sink.process(Batch([2]), 0, nothing)
    sink.finish(nothing)
    assert [each for each in sink.close() if isinstance(each, bytes)] == [b"1", b"2"]
    done = committing(Listing(held=True, is_complete=True, committable=b"2"))
    done.process(Batch([2]), 0, nothing)
    done.finish(nothing)
    assert done.close()[-1] == b"2", "and nothing is prepared again"


def test_a_sink_that_keeps_rows_in_its_process_can_lose_some() -> None:
    context = TaskContext("job", "task", 3, 4, 1, files=Listing(held=True))
    with pytest.raises(UsageError, match=r"Remembering keeps the rows .* result_only = False"):
        UserSink(Remembering()).open(context)
    outside = Remembering()
    outside.result_only = False  # type: ignore[attr-defined]
    UserSink(outside).open(context)
    flushing = UserSink(Flushing())
    flushing.open(context)
    flushing.process(Batch([1]), 0, nothing)
    assert flushing.deadline() is not None
    flushing.before_snapshot(nothing)
    assert flushing.sink.seen[-1] == "flush"


def test_a_count_goes_on_from_its_snapshot() -> None:
    first, second = CountSink(), CountSink()
    first.open(TaskContext("job", "task", 0, 1, 1, files=(listing := Listing(held=True))))
    first.process(Batch([1, 2]), 0, nothing)
    first.before_snapshot(nothing)
    second.open(TaskContext("job", "task", 0, 1, 2, files=listing))
    second.process(Batch([3]), 0, nothing)
    assert second.close() == 3
