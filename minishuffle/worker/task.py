"""The task thread: runs one attempt of a subtask, a batch at a time.

The thread opens the program, moves batches through its chain, and writes what comes out to its result
partitions. It never touches a socket: see ``handoff``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import cloudpickle
import msgpack

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.dataflow.operators.base import Batch, Emit, Operator, Output, Program, TaskContext
from minishuffle.dataflow.operators.reader import SourceReader
from minishuffle.errors import ResourceExhausted, ShuffleError, TaskCancelled, TaskFailed
from minishuffle.exchange.elements import decode, encode, pack_rows
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.partitioner import Partitioner
from minishuffle.ids import AttemptId
from minishuffle.wire.frames import EventKind
from minishuffle.wire.parts import ErrorInfo
from minishuffle.worker.handoff import TaskPaths

__all__ = ["Task", "TaskOutcome"]

PACKAGE: Final = Path(__file__).parent.parent
RUNTIME_CODE: Final = f"{PACKAGE}{os.sep}"
USER_CODE_INSIDE: Final = tuple(f"{PACKAGE / part}{os.sep}" for part in ("examples", "bench"))
MESSAGE_BYTES_MAX: Final = limits.CONTROL_FRAME_BYTES_MAX - limits.MIB
"""Most bytes of collected rows, or of a result, that a control frame takes."""
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

    ``report`` is called on the loop with ("running" or an outcome); ``collect`` and ``log`` likewise
    with the rows packed by msgpack and with a line.
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
    collect: Callable[[Task, int, bytes], None]
    log: Callable[[Task, str], None]
    state: str = "deploying"
    thread: threading.Thread | None = None
    _stages: list[Emit] = field(default_factory=list)
    """Entrances of the chain's operators, first to last, and of what follows the last."""

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
            _log.info("attempt %s of %s failed", self.attempt_id, self.name, exc_info=error)
            outcome = TaskOutcome(state, describe_failure(error, self._task_name()))
        self.paths.post(self.report, self, outcome)

    def _task_name(self) -> str:
        return f"{self.name}[{self.attempt_id.subtask.index}]"

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
            log=lambda line: self.paths.post(self.log, self, line),
        )
        opened: list[Operator] = []
        results: list[Any] = []
        try:
            for operator in program.operators:
                operator.open(context)
                opened.append(operator)
            emit = self._chain(program)
            self.paths.post(self.report, self, None)
            if program.source is not None:
                self._run_source(program, emit)
            else:
                self._run_gates(program, emit)
            self._finish(program)
        finally:
            results = [operator.close() for operator in opened]
        found = [result for result in results if result is not None]
        packed = bytes(msgpack.packb(found[-1])) if found else b""
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ResourceExhausted(
                f"the sink's result has {len(packed)} bytes and at most {MESSAGE_BYTES_MAX} fit: "
                "write large results to a file in the sink, and return its name"
            )
        return packed

    def _chain(self, program: Program) -> Emit:
        """Build the calls from operator to operator, last to first; returns the chain's entrance."""
        emit = self._writer(program.outputs)
        self._stages = [emit]
        for operator in reversed(program.operators):
            emit = _stage(operator, emit)
            self._stages.insert(0, emit)
        return emit

    def _writer(self, outputs: list[Output]) -> Emit:
        writers = [self._edge_writer(output) for output in outputs]
        if len(writers) == 1:
            return writers[0]

        def write_all(batch: Batch) -> None:
            for write in writers:
                write(batch)

        return write_all

    def _edge_writer(self, output: Output) -> Emit:
        partition = self.partitions[output.edge]
        consumers = len(partition.subpartitions)
        start = self.attempt_id.subtask.index
        partitioner = Partitioner(output.partitioner, consumers, output.keys, output.choose, start)
        broadcast = output.partitioner == "broadcast"

        def write(batch: Batch) -> None:
            if not len(batch):
                return
            if broadcast:
                rows, parts = encode(batch)
                for position in range(consumers):
                    partition.write(position, rows, parts)
                return
            for position, piece in partitioner.split(batch):
                rows, parts = encode(piece)
                partition.write(position, rows, parts)

        return write

    def _run_source(self, program: Program, emit: Emit) -> None:
        assert program.source is not None
        subtask = self.attempt_id.subtask
        reader = SourceReader(program.source, subtask.index, self.parallelism, time.time())
        try:
            self._read(reader, emit)
        finally:
            reader.close()

    def _read(self, reader: SourceReader, emit: Emit) -> None:
        paths, counters = self.paths, self.counters
        while True:
            paths.check()
            paths.bell.clear()
            begin = time.time()
            batch = reader.poll(begin)
            if batch is None:
                return
            if not len(batch):
                paths.wait(reader.next_due - time.time())
                continue
            if not counters.first_output_at:
                counters.first_output_at = begin
            counters.records_in += len(batch)
            self._timed(emit, batch)

    def _run_gates(self, program: Program, emit: Emit) -> None:
        gates, paths, counters = self.gates, self.paths, self.counters
        entrances = [emit if gate.input == 0 else self._entrance(program, gate.input) for gate in gates]
        turn = 0
        while not all(gate.finished for gate in gates):
            paths.check()
            paths.bell.clear()
            idle = True
            for step in range(len(gates)):
                position = (turn + step) % len(gates)
                element = gates[position].poll()
                if element is None:
                    continue
                idle = False
                counters.records_in += element.rows
                self._timed(entrances[position], decode(element.format, element.rows, element.payload))
            turn += 1
            if idle and not all(gate.finished for gate in gates):
                paths.wait(1.0)

    def _entrance(self, program: Program, number: int) -> Emit:
        operator, following = program.operators[0], self._stages[1]
        return lambda batch: operator.process(batch, number, following)

    def _timed(self, emit: Emit, batch: Batch) -> None:
        """Push one batch through the chain; what it waits for segments is not busy time."""
        counters = self.counters
        blocked = counters.backpressured_seconds
        begin = time.time()
        emit(batch)
        end = time.time()
        counters.busy_seconds += max(0.0, end - begin - (counters.backpressured_seconds - blocked))
        counters.last_input_at = end

    def _finish(self, program: Program) -> None:
        for operator, following in zip(program.operators, self._stages[1:], strict=True):
            self.paths.check()
            operator.finish(following)
        for partition in self.partitions.values():
            partition.broadcast_event(EventKind.END_OF_DATA)
            partition.broadcast_event(EventKind.END_OF_PARTITION)
        self.counters.last_input_at = time.time()

    def _collect(self, rows: list[Any]) -> None:
        payload = pack_rows(rows)
        if len(payload) <= MESSAGE_BYTES_MAX:
            self.paths.post(self.collect, self, len(rows), payload)
        elif len(rows) > 1:
            middle = len(rows) // 2
            self._collect(rows[:middle])
            self._collect(rows[middle:])
        else:
            raise ResourceExhausted(
                f"a row of {len(payload)} bytes cannot be collected, at most {MESSAGE_BYTES_MAX} fit: "
                "write such rows with to_parquet or a sink of your own"
            )


def _stage(operator: Operator, following: Emit) -> Emit:
    return lambda batch: operator.process(batch, 0, following)


def describe_failure(error: BaseException, task: str) -> ErrorInfo:
    """An error as the user is to see it: their own frames, not the runtime's."""
    if isinstance(error, ShuffleError) and not isinstance(error, TaskFailed):
        return ErrorInfo(code=error.code, text=f"{task}: {error}", task=task)
    summary = traceback.TracebackException.from_exception(error)
    _leave_runtime_out(summary)
    text = f"{task}: {type(error).__name__}: {_text_of(error)}"
    size = limits.ERROR_TEXT_BYTES_MAX // 4
    return ErrorInfo(
        code=TaskFailed.code, text=text[:size], traceback="".join(summary.format())[:size], task=task
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's own __str__; the task has to be reported all the same
        return f"(its text cannot be had: __str__ raised {type(broken).__name__})"


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
