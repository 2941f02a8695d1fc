"""The task thread: runs one attempt of a subtask, a batch at a time.

The thread opens the program, moves batches through its chain, and writes what comes out to its result
partitions. It never touches a socket: see ``handoff``.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cloudpickle

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.dataflow.operators.base import (
    END_OF_TIME,
    Batch,
    Emit,
    Mark,
    Operator,
    Program,
    Source,
    TaskContext,
    Watermark,
)
from minishuffle.dataflow.operators.reader import SourceReader
from minishuffle.errors import (
    ResourceExhausted,
    ShuffleError,
    TaskCancelled,
    TaskFailed,
    clipped,
    text_of,
)
from minishuffle.exchange.elements import pack_rows
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.rows import pack_result
from minishuffle.exchange.spool import Spool
from minishuffle.ids import AttemptId
from minishuffle.wire.frames import EventKind
from minishuffle.wire.messages import ErrorInfo
from minishuffle.worker.chain import Chain
from minishuffle.worker.handoff import TaskPaths
from minishuffle.worker.inputs import Inputs
from minishuffle.worker.outbox import Outbox

__all__ = ["Task", "TaskOutcome"]

PACKAGE: Final = Path(__file__).parent.parent
RUNTIME_CODE: Final = f"{PACKAGE}{os.sep}"
USER_CODE_INSIDE: Final = tuple(f"{PACKAGE / part}{os.sep}" for part in ("examples", "bench"))
MESSAGE_BYTES_MAX: Final = limits.CONTROL_FRAME_BYTES_MAX - limits.MIB
"""Most bytes of collected rows, or of a result, that a control frame takes."""
GATES_WAIT_SECONDS: Final = 1.0
"""How long a task that is not woken waits before it looks at its gates again."""
_log = logging.getLogger("minishuffle.worker")


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """How an attempt ended: ``finished``, ``failed`` or ``canceled``."""

    state: str
    error: ErrorInfo | None = None
    result: bytes = b""


@dataclass(slots=True)
class Task:
    """One attempt of a subtask on this worker.

    ``report`` is called on the loop: with None when it runs, and with its outcome.
    """

    attempt_id: AttemptId
    job_name: str
    name: str
    parallelism: int
    program: bytes
    gates: list[InputGate]
    partitions: dict[int, ResultPartition]
    """By edge."""
    paths: TaskPaths
    counters: TaskCounters
    report: Callable[[Task, TaskOutcome | None], None]
    outbox: Outbox
    spool: Spool | None = None
    """Where a sink whose records other programs read keeps them."""
    state: str = "deploying"
    thread: threading.Thread | None = None

    def start(self) -> None:
        name = f"{self.attempt_id.subtask.job}:{self.name}[{self.attempt_id.subtask.index}]"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            result = self._execute()
            outcome = TaskOutcome("finished", result=result)
        except TaskCancelled:
            outcome = TaskOutcome("canceled")
        except BaseException as error:  # whatever user code raises, SystemExit included, ends this task alone
            state = "canceled" if self.paths.cancelled else "failed"
            outcome = TaskOutcome(state, self._blame(error))
        self.paths.post(self.report, self, outcome)

    def _blame(self, error: BaseException) -> ErrorInfo:
        """What raised is the user's, and so may be the code that runs when it is looked at: whatever that
        does, the end of the task is reported."""
        task = f"{self.name}[{self.attempt_id.subtask.index}]"
        try:
            info = describe_failure(error, task)
            _log.info("attempt %s of %s failed", self.attempt_id, self.name, exc_info=error)
            return info
        except BaseException as broken:
            task = clipped(task, limits.TASK_NAME_CHARS_MAX)
            kind, why = type(error).__name__, type(broken).__name__
            text = f"{task}: {kind} (it cannot be described: that raised {why})"
            return ErrorInfo(code=TaskFailed.code, text=text, task=task)

    def _execute(self) -> bytes:
        program: Program = cloudpickle.loads(self.program)
        context = TaskContext(
            job=self.attempt_id.subtask.job,
            name=self.name,
            index=self.attempt_id.subtask.index,
            parallelism=self.parallelism,
            attempt=self.attempt_id.attempt,
            counters=self.counters,
            now=time.time,
            collect=self._collect,
            log=self.outbox.log,
            wait_until=self.paths.wait_until,
            spool=self.spool,
        )
        opened: list[Operator] = []
        try:
            for operator in program.operators:
                operator.open(context)
                opened.append(operator)
            chain = Chain(program, self.partitions, context.index, self.counters)
            self.paths.post(self.report, self, None)
            if program.source is not None:
                emit = chain.entrance(0)
                self._run_source(program.source, chain, emit)
                emit(Watermark(END_OF_TIME))
            else:
                first = program.operators[0].first_input if program.operators else None
                self._run_gates(Inputs(self.gates, first), chain)
            chain.finish(self.paths.check)
            self._end_partitions()
        except BaseException as error:
            _close(opened, error)
            raise
        found = [result for result in _close(opened, None) if result is not None]
        packed = pack_result(found[-1]) if found else b""
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ResourceExhausted(
                f"the sink's result has {len(packed)} bytes and at most {MESSAGE_BYTES_MAX} fit: "
                "write large results to a file in the sink, and return its name"
            )
        self.outbox.drain()
        return packed

    def _run_source(self, source: Source, chain: Chain, emit: Emit) -> None:
        in_turn = any(operator.by_split for operator in chain.operators)
        reader = SourceReader(
            source, self.attempt_id.subtask.index, self.parallelism, time.time(), in_turn=in_turn
        )
        try:
            self._read(reader, chain, emit)
        finally:
            reader.close()

    def _read(self, reader: SourceReader, chain: Chain, emit: Emit) -> None:
        paths, counters = self.paths, self.counters
        while True:
            paths.check()
            paths.bell.clear()
            begin = time.time()
            due = self._look_at_clock(chain, begin)
            batch = reader.poll(begin)
            for mark in reader.take_marks():
                emit(mark)
            if batch is None:
                return
            if not len(batch):
                paths.wait(min(reader.next_due, due) - time.time())
                continue
            if not counters.first_output_at:
                counters.first_output_at = begin
            counters.records_in += len(batch)
            self._timed(emit, batch)

    def _run_gates(self, inputs: Inputs, chain: Chain) -> None:
        paths, counters = self.paths, self.counters
        entrances = {gate.input: chain.entrance(gate.input) for gate in self.gates}
        while not inputs.finished:
            paths.check()
            paths.bell.clear()
            now = time.time()
            due = self._look_at_clock(chain, now)
            found = inputs.poll()
            if found is None:
                if not inputs.finished:
                    paths.wait(min(GATES_WAIT_SECONDS, due - now))
                continue
            number, item = found
            if isinstance(item, Mark):
                entrances[number](item)
            else:
                counters.records_in += len(item)
                self._timed(entrances[number], item)

    @staticmethod
    def _look_at_clock(chain: Chain, now: float) -> float:
        """Call operators whose time has come; returns when the next one's does (inf: never)."""
        due = chain.deadline()
        if due is not None and due <= now:
            chain.on_clock(now)
            due = chain.deadline()
        return math.inf if due is None else due

    def _timed(self, emit: Emit, batch: Batch) -> None:
        """Push one batch through the chain; what it waits for segments is not busy time."""
        counters = self.counters
        blocked = counters.backpressured_seconds
        begin = time.time()
        emit(batch)
        end = time.time()
        counters.busy_seconds += max(0.0, end - begin - (counters.backpressured_seconds - blocked))
        counters.last_input_at = end

    def _end_partitions(self) -> None:
        for partition in self.partitions.values():
            partition.broadcast_event(EventKind.END_OF_DATA)
            partition.broadcast_event(EventKind.END_OF_PARTITION)
        self.counters.last_input_at = time.time()

    def _collect(self, rows: list[Any]) -> None:
        payload = pack_rows(rows)
        if len(payload) <= MESSAGE_BYTES_MAX:
            self.outbox.collect(len(rows), payload)
        elif len(rows) > 1:
            middle = len(rows) // 2
            self._collect(rows[:middle])
            self._collect(rows[middle:])
        else:
            raise ResourceExhausted(
                f"a row of {len(payload)} bytes cannot be collected, at most {MESSAGE_BYTES_MAX} fit: "
                "write such rows with to_parquet or a sink of your own"
            )


def _close(operators: list[Operator], error: BaseException | None) -> list[Any]:
    """Close all of them. What one raises goes to the notes of ``error``, which came first, if there is one.

    Raises: what was raised first, if there is no ``error``.
    """
    results = []
    first: Exception | None = None
    for operator in operators:
        try:
            results.append(operator.close())
        except Exception as broken:
            first = first or broken
            if error is not None:
                error.add_note(
                    f"and close() of {operator.name!r} raised {type(broken).__name__}: {text_of(broken)}"
                )
    if first is not None and error is None:
        raise first
    return results


def describe_failure(error: BaseException, task: str) -> ErrorInfo:
    """An error as the user is to see it: their own frames, not the runtime's."""
    task = clipped(task, limits.TASK_NAME_CHARS_MAX)
    size = limits.ERROR_TEXT_BYTES_MAX // 4
    if isinstance(error, ShuffleError) and not isinstance(error, TaskFailed):
        return ErrorInfo(code=error.code, text=clipped(f"{task}: {text_of(error)}", size), task=task)
    summary = traceback.TracebackException.from_exception(error)
    _leave_runtime_out(summary)
    text = f"{task}: {type(error).__name__}: {text_of(error)}"
    frames = "".join(summary.format())
    return ErrorInfo(
        code=TaskFailed.code, text=clipped(text, size), traceback=clipped(frames, size), task=task
    )


def _leave_runtime_out(summary: traceback.TracebackException) -> None:
    """Keep the user's frames only, of the error and of those that led to it."""
    behind: list[traceback.TracebackException | None] = [summary]
    while behind:
        each = behind.pop()
        if each is not None:
            own = [frame for frame in each.stack if _is_users(frame.filename)]
            each.stack = traceback.StackSummary.from_list(own)
            behind += [each.__cause__, each.__context__, *(each.exceptions or ())]


def _is_users(filename: str) -> bool:
    return not filename.startswith(RUNTIME_CODE) or filename.startswith(USER_CODE_INSIDE)
