"""The queue of an asynchronous function: order, marks, how many are under way, and what an error leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from minishuffle.errors import LocalProtocolError, UsageError, WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import (
    END_OF_TIME,
    Aside,
    AsyncCall,
    Idle,
    Mark,
    TaskContext,
    Watermark,
)
from minishuffle.operators.map_async import MapRowsAsync
from support.batches import collecting


class Scripted:
    """Calls that end when the test says so: each gives ten times its row."""

    def __init__(self) -> None:
        self.calls: list[AsyncCall] = []
        self.closed: list[str] = []

    def start(
        self, fn: Callable[[Any], Awaitable[Any]], calls: Sequence[AsyncCall], timeout: float | None
    ) -> None:
        self.calls += calls

    def wait(self, awaitable: Awaitable[Any]) -> None:
        raise AssertionError("no hook is asynchronous")

    def cancel(self) -> None:
        self.closed.append("cancel")

    def close(self) -> None:
        self.closed.append("close")

    @property
    def under_way(self) -> list[Any]:
        return [call.row for call in self.calls if not call.done]

    def end(self, row: Any, error: BaseException | None = None) -> None:
        (call,) = [call for call in self.calls if call.row == row and not call.done]
        call.result, call.error, call.done = 10 * row, error, True

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """The last one ends first."""
        while not ready():
            self.end(self.under_way[-1])


async def unused(row: Any) -> Any:
    raise AssertionError("the calls are scripted")


class Opened:
    """An operator with scripted calls, and what it has emitted."""

    def __init__(self, concurrency: int, on_error: Any = "fail") -> None:
        self.calls = Scripted()
        self.operator = MapRowsAsync(unused, concurrency, None, on_error)
        self.out: list[Batch | Mark] = []
        self.context = TaskContext(
            "job", "task", 0, 1, 1, async_calls=lambda: self.calls, wait_until=self.calls.wait_until
        )
        self.operator.open(self.context)

    def process(self, *rows: Any) -> None:
        self.operator.process(Batch(list(rows)), 0, collecting(self.out))

    def mark(self, mark: Mark) -> None:
        self.operator.on_mark(mark, 0, collecting(self.out))

    def look(self) -> None:
        """As a task does that was woken."""
        if self.operator.deadline() is not None:
            self.operator.on_clock(0.0, collecting(self.out))


def test_results_come_in_the_order_of_the_rows() -> None:
    opened = Opened(10)
    opened.process(1, 2, 3)
    opened.calls.end(2)
    opened.look()
    assert opened.out == [] and opened.operator.state_rows() == 3
    opened.calls.end(1)
    opened.look()
    assert opened.out == [[10, 20]] and opened.operator.state_rows() == 1
    opened.process(4)
    opened.calls.end(3)
    opened.process(5)
    assert opened.out == [[10, 20], [30]], "a batch brings what is ready too"


def test_so_many_are_under_way_and_no_more() -> None:
    opened = Opened(2)
    at_once = []
    start = opened.calls.start

    def counted(fn: Any, calls: Sequence[AsyncCall], timeout: float | None) -> None:
        start(fn, calls, timeout)
        at_once.append(opened.operator.state_rows())

    opened.calls.start = counted  # type: ignore[method-assign]
    opened.process(1, 2, 3, 4, 5)
    assert opened.out == [[10, 20], [30, 40]] and opened.calls.under_way == [5]
    assert max(at_once) == 2


def test_marks_wait_for_the_rows_before_them() -> None:
    opened = Opened(10)
    opened.mark(Watermark(1))
    opened.process(1)
    opened.mark(Watermark(2))
    opened.mark(Watermark(3))
    opened.process(2)
    opened.mark(Idle())
    opened.calls.end(2)
    opened.look()
    assert opened.out == [Watermark(1)]
    opened.calls.end(1)
    opened.look()
    assert opened.out == [Watermark(1), [10], Watermark(3), [20], Idle()]


@pytest.mark.parametrize("end", ["finish", "on_barrier"])
def test_the_end_and_a_barrier_wait_for_all(end: str) -> None:
    opened = Opened(10)
    opened.process(1, 2)
    opened.mark(Watermark(END_OF_TIME))
    opened.context.counters.state_rows = 2
    getattr(opened.operator, end)(collecting(opened.out))
    assert opened.out == [[10, 20], Watermark(END_OF_TIME)]
    assert opened.context.counters.state_rows == 0 == opened.operator.state_rows()


def test_a_call_that_raises_fails_the_task_and_stays_among_the_rows_that_are_lost() -> None:
    opened = Opened(10)
    opened.process(1, 2, 3)
    opened.context.counters.state_rows = 3
    opened.calls.end(2, KeyError("two"))
    opened.look()
    assert opened.out == [], "what is before it comes first"
    opened.calls.end(1)
    with pytest.raises(KeyError, match="two") as caught:
        opened.look()
    assert caught.value.__notes__ == ["raised in operator 'map_async' by the record 2"]
    assert opened.out == [[10]]
    assert opened.operator.state_rows() == 2 == opened.context.counters.state_rows


def test_a_record_whose_call_raises_is_dropped_alone_if_that_is_wanted() -> None:
    opened = Opened(10, "skip")
    opened.process(1, 2, 3)
    opened.mark(Watermark(1))
    for row, error in ((1, None), (2, TimeoutError("no result within 1 s")), (3, None)):
        opened.calls.end(row, error)
    opened.look()
    assert opened.out == [[10, 30], Watermark(1)]
    assert opened.context.counters.user_errors == {"skip": 1}


@pytest.mark.parametrize("error", [UsageError("use map"), SystemExit(3)])
def test_some_errors_are_no_records_fault(error: BaseException) -> None:
    opened = Opened(10, "skip")
    opened.process(1)
    opened.calls.end(1, error)
    with pytest.raises(type(error)):
        opened.look()


def test_rows_may_be_put_aside() -> None:
    opened = Opened(10)
    opened.operator.side_tags = {"odd": "tag"}
    opened.process(1, 2)
    opened.calls.end(1)
    opened.calls.end(2)
    opened.calls.calls[0].result = Aside("odd", 1)
    opened.look()
    aside, rows = opened.out
    assert (aside, rows) == (("tag", [1]), [20])


def test_a_row_for_a_side_output_that_is_not_there_is_no_fault_of_the_record() -> None:
    opened = Opened(10, "skip")
    opened.process(1)
    opened.calls.end(1)
    opened.calls.calls[0].result = Aside("odd", 1)
    with pytest.raises(WrongResult, match=r"map_async: .* write sides=\['odd'\]"):
        opened.look()


def test_calls_are_cancelled_before_the_functions_own_close() -> None:
    calls = Scripted()
    closed = calls.closed
    fn = type("Fn", (), {"close": lambda self: closed.append("own"), "__call__": unused})()
    operator = MapRowsAsync(fn, 10)
    operator.open(TaskContext("job", "task", 0, 1, 1, async_calls=lambda: calls))
    operator.close()
    assert closed == ["cancel", "own", "close"]


def test_an_open_that_raises_leaves_no_loop() -> None:
    def fail(self: Any, context: TaskContext) -> None:
        raise OSError("no")

    calls = Scripted()
    operator = MapRowsAsync(type("Fn", (), {"open": fail, "__call__": unused})(), 1)
    with pytest.raises(OSError, match="no"):
        operator.open(TaskContext("job", "task", 0, 1, 1, async_calls=lambda: calls))
    assert calls.closed == ["close"]


def test_an_operator_without_a_loop_says_so() -> None:
    with pytest.raises(LocalProtocolError, match="map_async"):
        MapRowsAsync(unused, 1).open(TaskContext("job", "task", 0, 1, 1))
