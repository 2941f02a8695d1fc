"""Sinks: the last operator of a chain. What ``close`` returns is the subtask's result.

The one that writes files is in :mod:`~minishuffle.connectors.filesink`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, replace
from inspect import iscoroutinefunction, isgeneratorfunction
from typing import Any, Protocol, runtime_checkable

import msgpack
import pyarrow as pa

from minishuffle.errors import LocalProtocolError, UsageError, WrongResult
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.schemas import as_declared, batch_without_rows
from minishuffle.limits import COMMITTABLE_BYTES_MAX, SINK_FLUSH_SECONDS
from minishuffle.operators.base import CompleteFile, Emit, OutputFiles, TaskContext
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.row_conversion import rows_of

__all__ = ["CollectSink", "CountSink", "PrintSink", "Sink", "UserSink"]


@runtime_checkable
class Sink(Protocol):
    """The user's own sink. The instance is pickled to each subtask, which calls it from one thread, in the
    order open, (write, flush)*, close. (Flink: ``SinkWriter``.)

    It may have a method ``flush()``: what it has written so far is outside of the process when that returns.
    It is called where rows were written since the last call: once the first of them is SINK_FLUSH_SECONDS
    (1 s) old, whether more come or not; before the subtask stops for a pause, or moves to another worker; and
    after the last row, before ``close``. Not after a failure or a cancel.

    With two methods more it commits in two phases. ``prepare()``, called behind ``flush``, gives 1 to 1,024
    bytes that stand for all that was written since the last call, and nobody outside sees. Once the
    coordinator has these, durably, ``commit(prepared)`` is called with them, and what was written is to be
    seen. Nothing more is prepared before that. It may be called again with the same bytes, also in the next
    attempt, behind its ``open``: it must do no harm then. What was prepared and never committed, by an
    attempt that the coordinator takes for dead, or that failed before, is to be removed outside.

    In a job that loses nothing it is flushed before each snapshot of its task, and prepares then alone, once
    more also while earlier bytes wait for their commit: they are committed, in order, once the snapshot is
    safe. Rows that an attempt has flushed come again if it dies before that, and what it has prepared and no
    safe snapshot has is never committed. One that keeps rows in the process (without any of ``flush``,
    ``prepare`` and ``result_only`` = False) is refused there.

    What it has taken, and not flushed (not prepared), counts as lost (``sink_unfinished``) if its attempt
    fails, since rows that wait in memory are lost then, and so is the result. Optional attribute:
    ``result_only`` (bool, default True). False says that rows are kept outside of the process when ``write``
    returns, and does not count them; of one that commits in two phases they never are.

    A restart may bring rows again that an earlier attempt has flushed or committed (with ``source_lease`` 0,
    or where a stage is replayed), as sources do not go back with sinks: where each row is to be there once,
    give it a key.
    """

    def open(self, context: TaskContext) -> None:
        """Before the first batch."""

    def write(self, batch: Payload) -> None:
        """Take a list of rows or a ``pyarrow.RecordBatch``, as the stream before it has them."""

    def close(self) -> Any:
        """Once at the end, also after a failure or a cancel. The return value (what msgpack takes, or
        None) is the subtask's result, unless it has failed."""


class CollectSink(ChainedOperator):
    """Sends every batch to the client.

    Args:
        schema: of columns. The first subtask sends it without rows if it has none, so that a table of no rows
            has its columns.
    """

    name = "collect"
    only_reads = True

    def __init__(self, schema: pa.Schema | None = None) -> None:
        self._schema = schema
        self._sent = False

    def before_snapshot(self, emit: Emit) -> None:
        self.context.settle()

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self._sent = True
        self.context.collect(
            batch.payload if self._schema is None else as_declared(batch.payload, self._schema)
        )

    def finish(self, emit: Emit) -> None:
        if self._schema is not None and not self._sent and not self.context.index:
            self.context.collect(batch_without_rows(self._schema))


class CountSink(ChainedOperator):
    """Counts rows; the result is their number."""

    name = "count_sink"
    only_reads = True

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._count = 0
        if context.files is not None and context.files.sink_state:
            self._count = int(context.files.sink_state)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self._count += len(batch.payload)
        self.context.counters.note_filed(len(batch.payload))

    def before_snapshot(self, emit: Emit) -> None:
        if self.context.files is not None:
            self.context.files.keep(b"%d" % self._count)

    def close(self) -> int:
        self.context.counters.note_in_result(self._count)
        return self._count


class PrintSink(ChainedOperator):
    """Writes each row into the job's log, as ``repr`` shows it."""

    name = "print"
    only_reads = True

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        log = self.context.log
        for row in rows_of(batch):
            log(repr(row))

    def before_snapshot(self, emit: Emit) -> None:
        self.context.settle()


class UserSink(ChainedOperator):
    """Runs a :class:`Sink` of the user; its name is the class's.

    Raises:
        UsageError: the object lacks one of the methods, or a call of one would do nothing.
    """

    def __init__(self, sink: Sink) -> None:
        if not isinstance(sink, Sink):
            raise UsageError(
                f"{type(sink).__name__} is not a sink: it needs the methods open(context), write(batch) "
                "and close()"
            )
        for method in ("open", "write", "flush", "prepare", "commit", "close"):
            fn = getattr(sink, method, None)
            if iscoroutinefunction(fn) or isgeneratorfunction(fn):
                raise UsageError(
                    f"{type(sink).__name__}.{method} is an async function or a generator: a call of it "
                    "does nothing; make it a plain function"
                )
        if hasattr(sink, "prepare") != hasattr(sink, "commit"):
            raise UsageError(
                f"{type(sink).__name__} has one of prepare() and commit(prepared): give it both, or neither"
            )
        self.sink: Any = sink
        self.name = type(sink).__name__
        self._opened = False
        self._rows = 0
        """In the result or in memory, and nowhere else."""
        self._flushes = hasattr(sink, "flush")
        self.reports = self._commits = hasattr(sink, "commit")
        self._flush_at: float | None = None
        """None: nothing was written since the last call."""
        self._prepared = 0
        """How many times."""
        self._pending: deque[CompleteFile] = deque()
        """What was prepared and is not committed."""
        self._is_held = False
        """It prepares for snapshots."""

    @property
    def keeps_in_process(self) -> bool:
        return bool(getattr(self.sink, "result_only", True)) and not (self._flushes or self._commits)

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._is_result_only = self._commits or bool(getattr(self.sink, "result_only", True))
        self._is_held = context.files is not None and context.files.held
        if self._is_held and self.keeps_in_process:
            raise UsageError(
                f"{self.name} keeps the rows that it takes in the process, and its job is to lose none: give "
                "it flush(), or prepare() and commit(prepared), or result_only = False if they are outside "
                "once write returns"
            )
        self._opened = True
        self.sink.open(context)
        if self._commits:
            if context.files is None:
                raise LocalProtocolError(f"{self.name}: this task was given nobody to report to")
            self._files: OutputFiles = context.files
            if self._files.committable:
                self.sink.commit(self._files.committable)
            if self._files.sink_state:
                before = msgpack.unpackb(self._files.sink_state)
                self._pending.extend(CompleteFile(*prepared) for prepared in before)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if self._commits and self._files.is_complete:
            return
        if (self._flushes or self._commits) and self._flush_at is None:
            self._flush_at = self.context.now() + SINK_FLUSH_SECONDS
        self.sink.write(batch.payload)
        if self._is_result_only:
            self._rows += len(batch.payload)
            self.context.counters.note_filed(len(batch.payload))

    def deadline(self) -> float | None:
        if self._pending:
            return 0.0 if self._is_listed(self._pending[0]) else None
        return None if self._is_held and self._commits else self._flush_at

    def on_clock(self, now: float, emit: Emit) -> None:
        self._commit_listed()
        if self._is_held and self._commits:
            return
        if self._flush_at is not None and now >= self._flush_at and not self._pending:
            self._flush()

    def before_snapshot(self, emit: Emit) -> None:
        self._commit_listed()
        self._flush()
        if self._commits:
            own = self.context.attempt
            pending = [astuple(replace(each, attempt=each.attempt or own)) for each in self._pending]
            self._files.keep(msgpack.packb(pending) if pending else b"")

    def on_barrier(self, emit: Emit) -> None:
        self._commit()
        self._flush()
        self._commit()

    def finish(self, emit: Emit) -> None:
        """Have all that was written put outside, and committed."""
        if not self._is_held:
            self._commit()
        self._flush()
        if self._pending:
            self._files.finish()
            self._commit_listed()

    def _flush(self) -> None:
        """Have what was written since the last call put outside, or prepared."""
        if self._flush_at is None:
            return
        self._flush_at = None
        if self._flushes:
            self.sink.flush()
        if self._commits:
            self._prepare()
        else:
            self.context.counters.note_flushed(self._rows)
        self._rows = 0

    def _prepare(self) -> None:
        given = self.sink.prepare()
        if not isinstance(given, bytes) or not 0 < len(given) <= COMMITTABLE_BYTES_MAX:
            raise WrongResult(
                f"{self.name}.prepare gives {given!r:.80}: give 1 to {COMMITTABLE_BYTES_MAX} bytes that say "
                "what is to be committed"
            )
        prepared = CompleteFile(self._prepared, "", self._rows, 0, "", given)
        self._prepared += 1
        self._pending.append(prepared)
        self._files.complete(prepared)

    def _is_listed(self, prepared: CompleteFile) -> bool:
        """Whether the coordinator has it."""
        listed, attempt = self._files.listed, prepared.attempt
        return prepared.number < (listed.get(attempt, 0) if attempt else self._files.acknowledged)

    def _commit(self) -> None:
        """Wait until the coordinator has what was prepared, and commit it."""
        if self._pending:
            self._files.wait()
            self._commit_listed()

    def _commit_listed(self) -> None:
        while self._pending and self._is_listed(self._pending[0]):
            self.sink.commit(self._pending.popleft().committable)

    def close(self) -> Any:
        """After a failure or a cancel, what the coordinator has is still committed."""
        if not self._opened:
            return None
        try:
            if self._pending:
                self._files.linger()
                self._commit_listed()
        finally:
            result = self.sink.close()
        if not self._commits:
            self.context.counters.note_in_result(self._rows)
        return result
