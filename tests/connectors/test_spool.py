"""What a sink for other programs keeps: the declared columns, in elements that are worth reading."""

from __future__ import annotations

import datetime
from functools import partial

import pyarrow as pa
import pytest

from minishuffle.connectors.spool import SpoolSink
from minishuffle.errors import LocalProtocolError, TaskCancelled, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import ELEMENT_HEADER, decode, read_header
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.spool import Spool
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Mark, TaskContext
from minishuffle.operators.state_parts import divided
from support.batches import as_batch

SCHEMA = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def nobody(item: Batch | Mark) -> None:
    raise AssertionError("a sink emits nothing")


class Sink:
    """An opened sink with a clock of its own."""

    def __init__(
        self, schema: pa.Schema = SCHEMA, bytes_max: int | None = None, *, is_guaranteed: bool = False
    ) -> None:
        self.now = 100.0
        make_store = partial(ElementStore, "results of the test", StorePlace())
        self.spool = Spool(make_store, bytes_max, is_guaranteed=is_guaranteed)
        self.waits = 0
        self.context = TaskContext(
            "job", "task", 0, 1, 1, now=lambda: self.now, wait_until=self.wait, spool=self.spool
        )
        self.operator = SpoolSink("result", schema)
        self.operator.open(self.context)

    def wait(self, ready: object) -> None:
        self.waits += 1
        assert callable(ready) and not ready()
        self.spool.free(0, self.spool.rows)
        assert ready()

    def take(self, **columns: object) -> None:
        self.operator.process(Batch(pa.record_batch(columns)), 0, nobody)

    def elements(self) -> list[pa.RecordBatch]:
        found = []
        for rows, parts in self.spool.read(0, self.spool.rows):
            data = memoryview(b"".join(parts))
            found.append(decode(read_header(data)[2], rows, data[ELEMENT_HEADER.size :]).payload)
        return found


def moments(*seconds: int) -> pa.Array:
    return pa.array([second * 10**9 for second in seconds], pa.timestamp("ns"))


def test_columns_are_taken_by_name_and_times_become_microseconds_in_utc() -> None:
    sink = Sink()
    sink.take(at=moments(1, 2), n=pa.array([3, 4], pa.int32()))
    sink.operator.finish(nobody)
    (element,) = sink.elements()
    assert element.schema == SCHEMA
    utc = datetime.UTC
    assert element.to_pylist() == [
        {"n": 3, "at": datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=utc)},
        {"n": 4, "at": datetime.datetime(1970, 1, 1, 0, 0, 2, tzinfo=utc)},
    ]


def test_small_batches_wait_for_each_other_but_not_for_long() -> None:
    sink = Sink(pa.schema([("n", pa.int64())]))
    assert sink.operator.deadline() is None
    sink.take(n=[1])
    due = sink.operator.deadline()
    assert due is not None and due == pytest.approx(100.1)
    sink.now += 0.05
    sink.take(n=[2, 3])
    assert sink.operator.deadline() == due and sink.spool.rows == 0
    sink.operator.on_clock(due, nobody)
    assert sink.operator.deadline() is None
    assert sink.context.counters.rows_kept == sink.spool.rows == 3
    assert [element.to_pydict() for element in sink.elements()] == [{"n": [1, 2, 3]}]


def test_long_batches_are_written_at_once_and_in_pieces() -> None:
    sink = Sink(pa.schema([("n", pa.int64())]))
    sink.take(n=[7])
    sink.take(n=range(2 * BATCH_ROWS_MAX + 5))
    assert sink.context.counters.rows_kept == 1 + 2 * BATCH_ROWS_MAX
    sink.operator.finish(nobody)
    assert [element.num_rows for element in sink.elements()] == [1, BATCH_ROWS_MAX, BATCH_ROWS_MAX, 5]


def test_nothing_is_written_of_batches_without_rows() -> None:
    sink = Sink()
    sink.take(at=moments(), n=pa.array([], pa.int64()))
    sink.operator.finish(nobody)
    assert sink.operator.deadline() is None and sink.spool.rows == 0


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"n": [1]}, "declared with the columns n, at and was given n"),
        (
            {"n": ["x"], "at": moments(1)},
            "column 'n' of to_spark .* has the type string, and a value that does not fit int64",
        ),
        (
            {"n": [1.5], "at": moments(1)},
            "column 'n' of to_spark .* has the type double, and a value that does not fit int64",
        ),
        (
            {"n": [1], "at": pa.array([1], pa.timestamp("ns"))},
            r"column 'at' of to_spark .* has the type timestamp\[ns\], .* not fit timestamp\[us, tz=UTC\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(columns: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Sink().take(**columns)


def test_nulls_are_refused_where_none_may_be() -> None:
    sink = Sink(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    with pytest.raises(UsageError, match="column 'n' .*has nulls,? and is declared without"):
        sink.take(n=pa.array([1, None], pa.int32()))
    declared = pa.RecordBatch.from_arrays([pa.array([1, None], pa.int64())], schema=sink.operator.schema)
    with pytest.raises(UsageError, match="column 'n' .*has nulls,? and is declared without"):
        sink.operator.process(as_batch(declared), 0, nobody)


def test_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="takes Arrow columns and was given list"):
        Sink().operator.process(Batch([{"n": 1}]), 0, nobody)


def test_a_task_without_a_spool_is_a_fault_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="nowhere to keep"):
        SpoolSink("result", SCHEMA).open(TaskContext("job", "task", 0, 1, 1))


def test_a_full_spool_holds_the_sink_until_readers_have_caught_up() -> None:
    sink = Sink(pa.schema([("n", pa.int64())]), bytes_max=1)
    for number in range(3):
        sink.take(n=[number])
        sink.operator.on_clock(sink.now, nobody)
    assert sink.waits == 2
    assert sink.spool.rows == 3


def test_a_cancel_gets_through_to_a_sink_that_waits() -> None:
    sink = Sink(pa.schema([("n", pa.int64())]), bytes_max=1)

    def cancelled(ready: object) -> None:
        raise TaskCancelled("the task was cancelled")

    sink.context.wait_until = cancelled
    sink.take(n=[1])
    sink.operator.on_clock(sink.now, nobody)
    sink.take(n=[2])
    with pytest.raises(TaskCancelled):
        sink.operator.finish(nobody)
    assert sink.spool.rows == 1


@pytest.mark.parametrize("is_guaranteed", [False, True])
def test_a_snapshot_has_nothing_that_readers_cannot_see_and_the_end_waits_for_them(
    *, is_guaranteed: bool
) -> None:
    sink = Sink(pa.schema([("n", pa.int64())]), is_guaranteed=is_guaranteed)
    sink.take(n=[1, 2])
    sink.operator.before_snapshot(nobody)
    assert sink.spool.rows == 2 and not sink.operator.state_rows()
    sink.operator.finish(nobody)
    assert sink.waits == is_guaranteed


def test_a_cut_of_the_job_has_the_rows_that_nobody_has_dealt_with_and_a_snapshot_of_the_task_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minishuffle.connectors.spool.PART_BYTES", 1)
    schema = pa.schema([("n", pa.int64())])
    sink, fresh = Sink(schema), Sink(schema)
    assert sink.operator.stored_state() is None
    for number in range(3):
        sink.take(n=[2 * number, 2 * number + 1])
        sink.operator.on_clock(sink.now, nobody)
    sink.spool.free(0, 3)
    sink.take(n=[6])
    stored = sink.operator.stored_state()
    assert stored is not None and not list(sink.operator.freeze_state())
    sink.take(n=[7])
    parts = list(stored)
    assert [len(part.batch) for part in parts] == [1, 1, 1, 1]
    fresh.operator.read_state(divided(reversed(parts), 0, 1))
    assert [n for element in fresh.elements() for n in element.column("n").to_pylist()] == [3, 4, 5, 6]
    assert fresh.context.counters.rows_kept == 4
