"""An asynchronous function of the user for each row, several calls at a time, results in the rows' order.

(Flink: ``AsyncWaitOperator`` with its ordered queue.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from itertools import repeat
from typing import Any

import numpy as np

from minishuffle.errors import LocalProtocolError, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import (
    AsyncCall,
    AsyncCalls,
    Emit,
    Mark,
    TaskContext,
    Watermark,
)
from minishuffle.operators.chained import OnError, RecordOperator, emit_rows

__all__ = ["MapRowsAsync"]


class MapRowsAsync(RecordOperator):
    """Emits what awaiting ``fn(row)`` gives, in the order of the rows.

    A queue holds the rows whose results were not emitted yet, and the marks between them: a mark goes on when
    all rows before it have. While ``concurrency`` rows are there no other is taken: the task waits.

    A call that raises, or takes longer than ``timeout``, is treated as ``on_error`` says once it is first in
    the queue. The rows of the queue are state: if the task fails they are lost and counted as that, the one
    that raised among them.

    Args:
        timeout: seconds for one call; None: as long as it takes.
    """

    name = "map_async"
    keeps_rows = True
    shares = True

    def __init__(
        self,
        fn: Callable[[Any], Awaitable[Any]],
        concurrency: int,
        timeout: float | None = None,
        on_error: OnError = "fail",
    ) -> None:
        super().__init__(fn, on_error)
        self.concurrency = concurrency
        self.timeout = timeout
        self._queue: deque[AsyncCall | Mark] = deque()
        self._rows = 0
        """Calls in the queue."""

    # --- life cycle --------------------------------------------------------------------------------

    def open(self, context: TaskContext) -> None:
        """``open`` and ``close`` of the function's object may be asynchronous: then its loop runs them."""
        if context.async_calls is None:
            raise LocalProtocolError(
                f"{self.name}: this task was given nobody to call asynchronous functions"
            )
        self._calls: AsyncCalls = context.async_calls()
        try:
            super().open(context)
        except BaseException:
            self._calls.close()
            raise

    def close(self) -> Any:
        """Requests that are under way are cancelled first."""
        try:
            self._calls.cancel()
            super().close()
        finally:
            self._calls.close()

    def _call_hook(self, name: str, *arguments: TaskContext) -> Any:
        found = super()._call_hook(name, *arguments)
        if isawaitable(found):
            self._calls.wait(found)

    def state_rows(self) -> int:
        return self._rows

    # --- rows and marks ------------------------------------------------------------------------------

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given, begin = batch.payload, 0
        while begin < len(given):
            room = self.concurrency - self._rows
            if not room:
                self._wait_for_first()
                self._give(emit)
                continue
            end = begin + room
            times = repeat(None) if batch.times is None else batch.times[begin:end].tolist()
            calls = list(map(AsyncCall, given[begin:end], times))
            self._queue += calls
            self._rows += len(calls)
            self._calls.start(self.fn, calls, self.timeout)
            begin += len(calls)
        self._give(emit)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        queue = self._queue
        if not queue:
            emit(mark)
            return
        if isinstance(mark, Watermark) and isinstance(queue[-1], Watermark):
            queue.pop()
        queue.append(mark)

    def deadline(self) -> float | None:
        """At once when the first call in the queue has ended, which wakes the task."""
        return 0.0 if self._is_first_ready() else None

    def on_clock(self, now: float, emit: Emit) -> None:
        self._give(emit)

    def on_barrier(self, emit: Emit) -> None:
        self.finish(emit)

    def finish(self, emit: Emit) -> None:
        """All calls that are under way end, and what they gave is emitted."""
        while self._queue:
            self._wait_for_first()
            self._give(emit)

    def _is_first_ready(self) -> bool:
        return bool(self._queue) and (isinstance(self._queue[0], Mark) or self._queue[0].done)

    def _wait_for_first(self) -> None:
        self.context.wait_until(self._is_first_ready)

    def _give(self, emit: Emit) -> None:
        """Emit what is ready at the head of the queue."""
        queue, parted = self._queue, self.parted(emit)
        rows: list[Any] = []
        times: list[int] = []
        taken = 0
        while self._is_first_ready():
            first = queue[0]
            if isinstance(first, Mark):
                self._emit(rows, times, taken, parted)
                rows, times, taken = [], [], 0
                queue.popleft()
                emit(first)
                continue
            if first.error is not None and self._fails(first.error):
                self._emit(rows, times, taken, parted)
                self.note_failure(first.error, first.row)
                raise first.error
            queue.popleft()
            self._rows -= 1
            taken += 1
            if isinstance(first.error, Exception):
                time = None if first.time is None else np.array([first.time], np.int64)
                self.drop(first.error, first.row, time)
            else:
                rows.append(first.result)
                if first.time is not None:
                    times.append(first.time)
        self._emit(rows, times, taken, parted)

    def _fails(self, error: BaseException) -> bool:
        return self.on_error == "fail" or isinstance(error, UsageError) or not isinstance(error, Exception)

    def _emit(self, rows: list[Any], times: list[int], taken: int, emit: Callable[[Batch], None]) -> None:
        """``taken`` rows have left the queue and become these. They count as state until these are emitted,
        as there may be no batch in hand that they could be counted with."""
        emit_rows(rows, emit, times or None)
        counters = self.context.counters
        counters.state_rows = max(0, counters.state_rows - taken)
