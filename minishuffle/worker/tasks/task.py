"""The task thread: runs one attempt of a subtask, a batch at a time.

The thread opens the program, moves batches through its chain, and writes what comes out to its result
partitions. It never touches a socket: see ``handoff``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import CodeType, FrameType
from typing import Any, Final

import cloudpickle

from minishuffle import limits
from minishuffle.counters import OperatorCounters, TaskCounters
from minishuffle.errors import (
    ResourceExhausted,
    TaskCancelled,
    TaskFailed,
    UnserializableRecord,
    WrongResult,
    clipped,
)
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.collected import gatherable, pack_collected
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retention import RetainedStore
from minishuffle.exchange.rows import pack_result
from minishuffle.exchange.sizes import Drop, sendable
from minishuffle.exchange.spool import Spool
from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.operators.base import (
    END_OF_TIME,
    Emit,
    Mark,
    Portion,
    Program,
    TaskContext,
    Watermark,
)
from minishuffle.operators.user_metrics import UserMetrics
from minishuffle.plan.programs import open_program
from minishuffle.runtime.asynccalls import CALLS_CODE, LoopCalls
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.inputs import Inputs
from minishuffle.runtime.reader import SourceReader
from minishuffle.runtime.resting import SourceRest
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.runtime.usererrors import describe_failure
from minishuffle.wire.messages import ErrorInfo, PoisonSearch, Step, WriteState
from minishuffle.wire.packed import SplitPosition
from minishuffle.worker.interpreter import compete
from minishuffle.worker.reports.filereports import FileReports
from minishuffle.worker.reports.outbox import Outbox
from minishuffle.worker.sources.leases import SourceLeases
from minishuffle.worker.tasks.busytime import ProcessorClock
from minishuffle.worker.tasks.crashrecord import CrashRecord
from minishuffle.worker.tasks.handoff import TaskPaths
from minishuffle.worker.tasks.jobimports import import_from
from minishuffle.worker.tasks.latencymarkers import LatencyMarkers
from minishuffle.worker.tasks.lateparts import LateParts
from minishuffle.worker.tasks.poisonrows import PoisonRows, PoisonWatch
from minishuffle.worker.tasks.snapshottaker import SnapshotTaker
from minishuffle.worker.tasks.statehandover import StateHandover
from minishuffle.worker.tasks.taskrows import TaskRows
from minishuffle.worker.wallclock import WallClock

__all__ = ["Task", "TaskOutcome", "part_of"]


MESSAGE_BYTES_MAX: Final = limits.CONTROL_PAYLOAD_BYTES_MAX
"""Most bytes of collected rows, or of a result, that a control frame takes."""
HOT_KEYS_MAX: Final = 8
"""Keys that one report names."""
GATES_WAIT_SECONDS: Final = 1.0
"""How long a task that is not woken waits before it looks at its gates again."""
SOURCE: Final = "source"
_TURNS: Final = threading.Lock()
"""Attempts that look for a row that ends their process have it while they are inside user code."""
_log = logging.getLogger("minishuffle.worker")


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """How an attempt ended: ``finished``, ``failed`` or ``canceled``."""

    state: str
    error: ErrorInfo | None = None
    result: bytes = b""
    positions: bytes = b""
    """Where a source stands, as a table of positions."""
    moved: bool = False
    """It stood at the barrier of a move: its :class:`StateHandover` has its state."""
    dealt: Sequence[tuple[int, int, int]] = ()
    """See :attr:`~minishuffle.wire.reports.TaskStateChanged.dealt`."""


@dataclass(slots=True)
class Task:
    """An attempt of a subtask on this worker.

    ``report`` is called on the loop: with None when it runs, and with its outcome; ``recovered`` with each
    step of the recovery of an attempt that took the place of another; ``saved`` with the state taken for a
    savepoint, or why there is none, and the seconds for which it stood; ``made`` with all of its parts, or
    why they cannot be written.
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
    recovered: Callable[[AttemptId, Step], None]
    saved: Callable[[AttemptId, WriteState, TaskStateSnapshot | str, float], None]
    made: Callable[[AttemptId, WriteState, TaskStateSnapshot | str], None]
    outbox: Outbox
    leases: SourceLeases
    files: FileReports
    spool: Spool | None
    """Where a sink whose records other programs read keeps them."""
    latency: LatencyMarkers
    wall: WallClock
    state_handover: StateHandover
    record: CrashRecord = field(default_factory=CrashRecord)
    """Where it notes its rows in hand."""
    restored: Callable[[Chain, int, int], None] | None = None
    """Gives an open chain the state with which the subtask of that index and parallelism begins; None: it
    begins without."""
    has_ended: bool = False
    """It had ended before its job was restored."""
    snapshots: SnapshotTaker | None = None
    """Takes its local snapshots; None: its job has no guarantee, or it runs again from its beginning."""
    dealt: Callable[[int], None] | None = None
    """Called by its thread with the number of its source's splits; None: nobody asks."""
    search: PoisonSearch | None = None
    """The rows that have ended the processes of attempts before it."""
    rests: bool = False
    """Its source may be read a little later: see :class:`SourceRest`."""
    state: str = "deploying"
    thread: threading.Thread | None = None
    operators: tuple[OperatorCounters, ...] = ()
    """The chain's, a source first, once the program is open."""
    user_metrics: tuple[UserMetrics, ...] = ()
    _recovers: bool = field(default=False, init=False)
    """No batch was passed on yet since it took the place of another attempt."""
    _is_behind: bool = field(default=False, init=False)
    """It goes on from a snapshot, and has always had something to do since."""
    _retained: list[RetainedPartition] = field(default_factory=list, init=False)
    """Its partitions of the retained kind."""
    _late: LateParts = field(default_factory=partial(LateParts, time.monotonic), init=False)
    """Parts still to be made of its last snapshot for the whole job, if it takes no local ones."""
    _held_seconds: float = field(default=0.0, init=False)
    """For how long it has had nothing to do while a barrier held channels back, since the last one."""
    _begun: TaskStateSnapshot | None = field(default=None, init=False)
    """The local snapshot with which it begins."""
    _poison: PoisonWatch | None = field(default=None, init=False)
    """Its search for such rows, while it lasts."""
    _inputs: Inputs | None = field(default=None, init=False)
    _repeats_from: int | None = field(default=None, init=False)
    """See :attr:`TaskContext.repeats_from`."""
    _reader: SourceReader | None = field(default=None, init=False)
    _loops: list[LoopCalls] = field(default_factory=list, init=False)
    """The loops of its asynchronous functions."""
    _drop: Drop | None = field(default=None, init=False)
    """Called to drop a row that cannot be collected; None: the task fails."""
    _closed_with: bytes = field(default=b"", init=False)
    """The result that the sink returned on close when the task was cancelled."""
    processor: ProcessorClock = field(default_factory=ProcessorClock, init=False)
    """The clock of its thread."""
    _rows: TaskRows = field(init=False)

    def __post_init__(self) -> None:
        self._rows = TaskRows(self.counters)

    def start(self) -> None:
        calls = self.record.claim(self.attempt_id)
        if self.search is not None and self.record.is_read:
            calls.take_turns(_TURNS)
        self.paths.record(calls)
        self.thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        try:
            self.thread.start()
        except BaseException:
            self.record.release(self.paths.calls)
            raise

    @property
    def _thread_name(self) -> str:
        return f"{self.attempt_id.subtask.job}:{self.name}[{self.attempt_id.subtask.index}]"

    @property
    def first_operator(self) -> str:
        """The name of its source, if it has one."""
        return self.name.partition(" -> ")[0]

    def read_counters(self) -> TaskCounters:
        """(Loop.) The totals of this moment."""
        seconds = self.paths.clock.read()
        rows_done = self.counters.rows_done
        return replace(
            self.counters,
            rows_done=max(0, rows_done - self.outbox.unsent_rows),
            # The task thread may add a policy at any moment: dict() copies without giving way to it.
            user_errors=dict(self.counters.user_errors),
            limits_hit=dict(self.counters.limits_hit),
            rows_dropped=self._rows_dropped(),
            rows_again=self._rows_again(),
            buffers_out=sum(partition.buffers_out() for partition in self.partitions.values()),
            busy_seconds=seconds.busy,
            idle_seconds=seconds.idle,
            backpressured_seconds=seconds.backpressured,
            cpu_seconds=self.processor.had_seconds(),
            cpu_wait_seconds=self.processor.waited_seconds(),
            hot_keys=self._hot_keys(),
            latency=self.latency.summary(),
            snapshot={} if self.snapshots is None else self.snapshots.seen(),
        )

    def abandon(self) -> None:
        """(Loop.) Its thread does not stop; :meth:`write_off` follows."""
        self.state = "abandoned"

    def write_off(self) -> None:
        """(Loop.) It was abandoned, and its paths are closed: the rows that it has in hand are lost."""
        self._rows.write_off()
        if self._inputs is not None:
            self._rows.leave(self._inputs.rows_left())

    def _rows_again(self) -> int:
        if self.snapshots is not None:
            return self.snapshots.rows_again
        return sum(each.rows_again for each in (*self.gates, *([self.spool] if self.spool else ())))

    def _rows_dropped(self) -> dict[str, int]:
        dropped = self._rows.dropped()
        found = [gate.rows_dropped() for gate in self.gates]
        found += [partition.rows_dropped() for partition in self.partitions.values()]
        for place in found:
            for reason, rows in place.items():
                if rows:
                    dropped[reason] = dropped.get(reason, 0) + rows
        return dropped

    def async_frame(self, frames: Mapping[int, FrameType]) -> FrameType | None:
        """(Any thread.) Where one of its asynchronous functions is, of the innermost frames of all threads;
        None: none of them runs."""
        return next((frame for calls in self._loops if (frame := calls.frame(frames)) is not None), None)

    def _hot_keys(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for edge, partition in self.partitions.items():
            for (position, key), share in partition.hot_keys.shares().items():
                consumer = partition.subpartitions[position].consumer
                found[f"{edge}:{consumer}:{key}"] = round(share, 4)
        return dict(islice(found.items(), HOT_KEYS_MAX))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        compete()
        self.paths.clock.enter("busy")
        assert self.thread is not None
        self.processor.begin(threading.get_ident(), self.thread.native_id)
        outcome = replace(self._outcome(), positions=self.leases.exact())
        self.processor.end()
        self.paths.clock.enter(None)
        self.record.release(self.paths.calls)
        self.paths.post(self._reached, outcome)
        if self.snapshots is not None and outcome.state == "finished" and not self.has_ended:
            self.snapshots.attend()

    def _reached(self, outcome: TaskOutcome | None) -> None:
        """(Loop.) It runs, or has ended."""
        self.state = "running" if outcome is None else outcome.state
        self.report(self, outcome)

    def _outcome(self) -> TaskOutcome:
        try:
            result = self._execute()
            dealt = tuple((gate.edge, *each) for gate in self.gates for each in gate.dealt())
            return TaskOutcome("finished", result=result, dealt=dealt)
        except BaseException as error:  # whatever user code raises, SystemExit included, ends this task alone
            if isinstance(error, TaskCancelled) and self.paths.cancelled:
                return TaskOutcome("canceled", result=self._closed_with, moved=self.state_handover.moved)
            state = "canceled" if self.paths.cancelled else "failed"
            return TaskOutcome(state, self._blame(error))

    def _blame(self, error: BaseException) -> ErrorInfo:
        """Describe the error. Its own methods may be user code and may raise as well: the end of the task is
        reported in any case."""
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
        if self.has_ended:
            self.paths.post(self._reached, None)
            self._end_partitions()
            return b""
        self._recovers = self.attempt_id.attempt > FIRST_ATTEMPT
        self._retained = [each for each in self.partitions.values() if isinstance(each, RetainedPartition)]
        self.paths.calls.enter()
        program = open_program(self.program, cloudpickle.loads)
        import_from(program.modules)
        kept = {gate.input for gate in self.gates if gate.kept}
        if self.snapshots is not None:
            self._begin_with(self.snapshots)
        self._poison = self._watch()
        index = self.attempt_id.subtask.index
        chain = Chain(program, self.partitions, index, self.counters, kept, watch=self._poison)
        context, self._drop = self._context(chain), chain.drop
        if self.snapshots is not None:
            self.files.secure_by(partial(self._secure, chain))
        try:
            produced = [] if program.source is None else [OperatorCounters(self.first_operator)]
            metrics = [
                UserMetrics(operator.name, position)
                for position, operator in enumerate(program.operators, start=len(produced))
            ]
            self.user_metrics = tuple(metrics)
            chain.open(self._contexts(context, metrics))
            self.operators = (*produced, *chain.counters)
            self._go_on(chain)
            self._count_state(chain)
            self.paths.calls.leave()
            self.paths.post(self._reached, None)
            if self.paths.pause.starts_paused and (barrier := self.paths.pause.due):
                self._stand(chain, barrier)
            if program.source is not None:
                emit = chain.entrance(0)
                self._run_source(program, chain, emit, produced[0])
                emit(Watermark(END_OF_TIME))
            else:
                self._inputs = inputs = Inputs.of(program, self.gates)
                try:
                    self._run_gates(inputs, chain)
                finally:
                    self._rows.leave(inputs.rows_left())
            self._take_last_snapshot(chain)
            self.paths.calls.enter()
            chain.finish(self.paths.check)
            self.counters.state_rows, self.counters.rows_done = 0, self._rows.taken
            self._end_partitions()
        except BaseException as error:
            self.paths.calls.enter()
            results = chain.close(error)
            if isinstance(error, TaskCancelled):
                self._closed_with = _packed_result(results)
            raise
        packed = _packed_result(chain.close(None))
        self.outbox.drain()
        return packed

    def _watch(self) -> PoisonWatch | None:
        """Its search for a row that ends the process, if it has any."""
        if self.search is None:
            return None
        rows = PoisonRows(self.search, () if self._begun is None else self._begun.left_out)
        left_out = (lambda places: None) if self.snapshots is None else self.snapshots.leave_out
        return PoisonWatch(rows, self.paths.calls, left_out)

    def _begin_with(self, snapshots: SnapshotTaker) -> None:
        """Read the last local snapshot, if there is any, and begin to take snapshots."""
        self._begun = self.state_handover.take_snapshot()
        if self._begun is not None:
            self.paths.post(self.recovered, self.attempt_id, "snapshot read")
        self._is_behind = self._recovers
        snapshots.begin(self._begun or TaskStateSnapshot())

    def _go_on(self, chain: Chain) -> None:
        """Give the chain, which is open, the state with which it begins."""
        if self._begun is not None:
            chain.restore(self._begun)
            self._begun = replace(self._begun, parts={})  # nothing else keeps them
            return
        if self.restored is not None:
            self.restored(chain, self.attempt_id.subtask.index, self.parallelism)
        if self.snapshots is None:
            self.state_handover.take_over(chain)

    def _context(self, chain: Chain) -> TaskContext:
        return TaskContext(
            job=self.attempt_id.subtask.job,
            name=self.name,
            index=self.attempt_id.subtask.index,
            parallelism=self.parallelism,
            attempt=self.attempt_id.attempt,
            counters=self.counters,
            now=self.paths.pause.now,
            wall=self.wall,
            paused_seconds=self.paths.pause.stood_seconds,
            lead=self.wall.lead,
            collect=self._collect,
            log=self.outbox.log,
            settle=self.outbox.settle,
            wait_until=self.paths.wait_until,
            spool=self.spool,
            files=self.files,
            put_aside=chain.put_aside,
            async_calls=self._loop_calls,
            repeats_from=lambda: self._repeats_from,
        )

    def _contexts(self, context: TaskContext, metrics: Sequence[UserMetrics]) -> Iterator[TaskContext]:
        """One for each operator, with the metrics of its own."""
        for place, own in enumerate(metrics):
            alone = None if self._poison is None else partial(self._poison.alone, place)
            yield replace(context, metrics=own, alone=alone)

    def _loop_calls(self) -> LoopCalls:
        if self._poison is None:
            self.paths.calls.run_on()
        name, ring = f"{self._thread_name} calls", self.paths.bell.ring_now
        calls = LoopCalls(name, ring, compete, self._calls_started)
        self._loops.append(calls)
        return calls

    def _calls_started(self, have_ended: Callable[[], bool]) -> None:
        """Asynchronous calls have begun. While a row is looked for that ends the process, theirs are the rows
        in hand: none is taken before they have ended. If they do not, they may wait for calls of later rows:
        then no row is looked for any more."""
        if self._poison is not None and not self._poison.has_given_up:
            if self.paths.wait_inside(have_ended, limits.POISON_CALLS_SECONDS):
                return
            self._poison.give_up()
        self.paths.calls.run_on()

    def _run_source(self, program: Program, chain: Chain, emit: Emit, produced: OperatorCounters) -> None:
        assert program.source is not None
        in_turn = any(operator.by_split for operator in chain.operators)
        index, now = self.attempt_id.subtask.index, self.paths.pause.now()
        self.paths.calls.enter()
        reader = self.leases.open(
            program.source,
            index,
            self.parallelism,
            now,
            in_turn=in_turn,
            times=program.times,
            resumed=None if self._begun is None else self._begun.positions,
            behind=0.0 if self._begun is None else max(0.0, self.wall() - self._begun.at),
        )
        self.counters.rows_skipped, self._reader = reader.rows_skipped, reader
        try:
            if self.dealt is not None and reader.dealt is not None:
                self.dealt(reader.dealt)
            self._read(reader, chain, emit, produced)
            self.leases.finish(self.paths.pause.now())
        finally:
            reader.close()

    def _read(self, reader: SourceReader, chain: Chain, emit: Emit, produced: OperatorCounters) -> None:
        paths, counters, leases, pause = self.paths, self.counters, self.leases, self.paths.pause
        ends_here = not self.partitions
        consumers = sum(len(each.subpartitions) for each in self.partitions.values())
        rest = SourceRest(time.monotonic(), self.processor.waited_seconds(), consumers)
        while True:
            paths.check()
            paths.bell.clear()
            if pause.dividers:
                self._divide()
            if barrier := pause.barrier:
                self._meet(chain, barrier)
                continue
            seconds = self._between(chain)
            if pause.barrier:
                continue
            begin = pause.now()
            due = min(self._look_at_clock(chain, begin), begin + seconds)
            paths.calls.enter()
            found = reader.poll(begin)
            for mark in reader.take_marks():
                if mark.state == "done":
                    leases.end(mark.split)
                emit(mark)
            if found is None:
                return
            if not reader.records:
                leases.idle(begin)
                self._catch_up()
                paths.wait(min(reader.next_due, due) - pause.now())
                continue
            leases.take(reader.records, begin)
            for portion in reader.take_left_out():
                self._leave_out(portion)
            if not (rows := len(found)):
                continue
            if not counters.first_output_at:
                counters.first_output_at = time.monotonic()
            produced.records_out += rows
            if ends_here:
                counters.records_out += rows
            self._take(Batch(found, None, reader.times), emit, chain)
            counters.last_input_at = now = time.monotonic()
            if self.rests:
                if rest.read(rows, now):
                    rest.look(now, self.processor.waited_seconds())
                if rest.seconds:
                    paths.rest(min(rest.seconds, due - pause.now()))

    def _between(self, chain: Chain) -> float:
        """Between two elements, wait while its worker retains as many bytes as it may, and take snapshots
        that are due; gives in how many seconds the next one is. It does not wait before a barrier: what is on
        its way there is little, and a durable snapshot frees more."""
        seconds = self._look_at_snapshots(chain)
        for partition in self._retained:
            while partition.store.full and not self.paths.pause.barrier:
                self.paths.wait_until(partial(self._may_go_on, partition.store))
                seconds = self._look_at_snapshots(chain)
        return seconds

    def _may_go_on(self, store: RetainedStore) -> bool:
        is_due = self.snapshots is not None and self.snapshots.is_due
        return store.make_room() or is_due or self.paths.pause.barrier > 0

    def _look_at_snapshots(self, chain: Chain) -> float:
        if self.snapshots is None:
            return self._late.go_on()
        return self.snapshots.look(chain, self._positions)

    def _secure(self, chain: Chain) -> None:
        """Have a snapshot of this moment safe, if it takes any and its source is open."""
        if self.snapshots is not None and (self._reader is not None or self.gates):
            self.snapshots.secure(chain, self._positions)

    def _take_last_snapshot(self, chain: Chain) -> None:
        """All input is read, and what follows comes again from this snapshot."""
        if self.snapshots is None:
            self._late.end()
        else:
            self.snapshots.take_last(chain, self._positions)
        if any(operator.reports for operator in chain.operators):
            self._secure(chain)

    def _positions(self) -> list[SplitPosition]:
        if self._reader is not None:
            return self._reader.snapshot()
        return [each for gate in self.gates for each in gate.positions()]

    def _leave_out(self, portion: Portion) -> None:
        """Count and report records of the source that it could not read."""
        errors = self.counters.user_errors
        errors[portion.policy] = errors.get(portion.policy, 0) + len(portion.letters)
        if portion.policy == "dead_letter":
            for letter in portion.letters:
                self.outbox.log(f"dead letter: {letter}")

    def _run_gates(self, inputs: Inputs, chain: Chain) -> None:
        paths, counters, pause = self.paths, self.counters, self.paths.pause
        entrances = {gate.input: chain.entrance(gate.input) for gate in self.gates}
        while not inputs.finished:
            paths.check()
            paths.bell.clear()
            if pause.dividers:
                self._divide()
            if (barrier := pause.barrier) and inputs.is_aligned(barrier):
                self._meet(chain, barrier, inputs.unread())
                continue
            seconds = self._between(chain) if inputs.is_between else math.inf
            now = pause.now()
            due = min(self._look_at_clock(chain, now), now + seconds)
            found = inputs.poll()
            if found is None:
                if not (inputs.finished or (pause.barrier and inputs.is_aligned(pause.barrier))):
                    self._catch_up()
                    is_held = barrier > 0 and inputs.is_held(barrier)
                    paths.wait(min(GATES_WAIT_SECONDS, due - now))
                    self._held_seconds = self._held_seconds + pause.now() - now if is_held else 0.0
                continue
            number, item = found
            if isinstance(item, Mark):
                paths.calls.enter()
                entrances[number](item)
                paths.calls.leave()
                self._count_state(chain)
            else:
                counters.records_in += len(item.payload)
                late, began = counters.late_dropped, time.monotonic()
                is_guaranteed = inputs.late_from is not None and any(gate.guaranteed for gate in self.gates)
                self._repeats_from = inputs.late_from if is_guaranteed else None
                self._take(item, entrances[number], chain, repeated=number in inputs.repeated)
                if inputs.late_from is not None and not is_guaranteed:
                    self._rows.drop_late(counters.late_dropped - late)
                counters.last_input_at = time.monotonic()
                if self._poison is None:  # else rows of several channels would be in hand together
                    inputs.took(counters.last_input_at - began, len(item.payload))
                takes_parts = self.snapshots is not None or self._late.under_way
                if inputs.drained and not (barrier or takes_parts) and inputs.is_between:
                    # Whatever has come since the look rings: another look would find nothing.
                    now = pause.now()
                    paths.wait(min(GATES_WAIT_SECONDS, self._look_at_clock(chain, now) - now))

    def _take(self, batch: Batch, entrance: Emit, chain: Chain, *, repeated: bool = False) -> None:
        """Have the chain take a batch: at once, unless a row is looked for that ends the process."""
        if (poison := self._poison) is None:
            self._pass(batch, entrance, chain, repeated=repeated)
            return
        for piece in poison.pieces(batch):
            self._pass(piece, entrance, chain, repeated=repeated)
        if poison.has_ended:
            self._poison = None

    def _pass(
        self, batch: Batch, entrance: Callable[[Batch], None], chain: Chain, *, repeated: bool = False
    ) -> None:
        """Have the chain take a batch; if that raises, count the rows of it that are lost. The next attempt
        gets all of an input that is ``repeated`` again."""
        kept = chain.rows_kept()
        calls, rows = self.paths.calls, len(batch.payload)
        self._rows.take(rows)
        calls.enter(rows)
        try:
            entrance(batch)
        except BaseException:
            if self.state != "abandoned" and not repeated:
                self._rows.fail(chain.rows_kept() - kept)
            raise
        else:
            calls.leave(rows)
            self._rows.done(repeated=repeated)
        finally:
            self._count_state(chain)
        if self._recovers:
            self._recovers = False
            self.paths.post(self.recovered, self.attempt_id, "first record")

    def _catch_up(self) -> None:
        """There is nothing to do: the loop looks whether it is so behind what the thread has given back."""
        if self._is_behind:
            self.paths.post(self._look_caught_up)

    def _look_caught_up(self) -> None:
        """(Loop.)"""
        if self._is_behind and all(gate.has_read_all for gate in self.gates):
            self._is_behind = False
            self.recovered(self.attempt_id, "caught up")

    def _meet(self, chain: Chain, barrier: int, unread: Sequence[int] = ()) -> None:
        """All that came before a barrier is read: stop there, or take the state for a snapshot of the whole
        job and go on. Edges that are ``unread`` are read later."""
        if (cut := self.paths.pause.take_cut()) is not None:
            began = time.monotonic()
            self._forward(chain, cut.barrier)
            self._save(chain, cut, unread, began=began)
        elif self.paths.pause.due:
            self._stand(chain, barrier, unread)

    def _forward(self, chain: Chain, barrier: int) -> None:
        """Send a barrier after all emitted records."""
        self.paths.calls.enter()
        chain.on_barrier(self.paths.check)
        self.paths.calls.leave()
        self._count_state(chain)
        for partition in self.partitions.values():
            partition.broadcast_barrier(barrier)
        self.outbox.hurry()

    def _stand(self, chain: Chain, barrier: int, unread: Sequence[int] = ()) -> None:
        """Send a barrier, and stop until it has ended. Edges that are ``unread`` are read later."""
        self._forward(chain, barrier)
        if self.snapshots is None:
            self._late.end()
        else:
            self.snapshots.make_parts()
        pause = self.paths.pause
        if pause.moving:
            self.state_handover.hand_on(chain)
        pause.stop(barrier, unread)
        while True:
            self.paths.stand(lambda: pause.ended >= barrier or pause.saves is not None)
            if (savepoint := pause.take_saves()) is None:
                break
            self._save(chain, savepoint)
        pause.go_on()
        self.state_handover.go_on()

    def _save(
        self, chain: Chain, savepoint: WriteState, unread: Sequence[int] = (), *, began: float = 0.0
    ) -> None:
        """Take the state, once the coordinator has all rows and lines that precede it. Sinks have committed
        at the barrier. Rows of edges that are ``unread`` would not be in a cut. If the task goes on, which
        stands since it ``began``, the parts are made between the elements that follow."""
        self.paths.calls.enter()
        self.outbox.drain()
        made = partial(self.paths.post, self.made, self.attempt_id, savepoint)
        problem = ""
        if self._reader is None and not self.gates:
            problem = "it has restarted while the job was paused, and opens its source once that is resumed"
        if unread:
            problem = "rows of an input are not read yet, since it reads another input to its end first"
        taken: TaskStateSnapshot | str
        try:
            if problem:
                taken = problem
            elif not savepoint.goes_on:
                taken = chain.snapshot(self._positions(), of_all=True)
            elif self.snapshots is not None:
                freeze = partial(chain.snapshot, self._positions(), of_all=True, frozen=True)
                taken = self.snapshots.cut(savepoint.savepoint, freeze, made)
            else:
                self._late.end()
                taken = chain.snapshot(self._positions(), of_all=True, frozen=True)
                self._late.begin(taken, made)
        except UnserializableRecord as error:
            taken = f"its state cannot be written: {error}"
        self.paths.calls.leave()
        held, self._held_seconds = self._held_seconds, 0.0
        stood = held + time.monotonic() - began if savepoint.goes_on else 0.0
        self.paths.post(self.saved, self.attempt_id, savepoint, taken, stood)
        if not (savepoint.goes_on or isinstance(taken, str)):
            made(taken)

    def _divide(self) -> None:
        """Put a barrier before consumers that are to move: they get what was emitted so far, and their next
        attempts what follows."""
        dividers = self.paths.pause.dividers
        while dividers:
            barrier, edges = dividers.popleft()
            for edge, consumers in edges.items():
                self.partitions[edge].broadcast_barrier(barrier, consumers)

    def _count_state(self, chain: Chain) -> None:
        self.counters.state_rows = chain.state_rows()
        self.counters.rows_done = max(0, self._rows.taken - chain.rows_kept())

    def _look_at_clock(self, chain: Chain, now: float) -> float:
        """Call operators whose time has come, and emit a latency marker if it is time; returns when the next
        is due (inf: never)."""
        due = chain.deadline()
        if due is not None and due <= now:
            self.paths.calls.enter()
            chain.on_clock(now)
            self.paths.calls.leave()
            self._count_state(chain)
            due = chain.deadline()
        next_marker = self.latency.emit_due(now)
        return next_marker if due is None else min(due, next_marker)

    def _end_partitions(self) -> None:
        for partition in self.partitions.values():
            partition.finish()
        self.counters.last_input_at = time.monotonic()

    def _collect(self, batch: Payload) -> None:
        if left_out := self.outbox.leave_out(len(batch)):
            batch = batch[left_out:] if isinstance(batch, list) else batch.slice(left_out)
            if not len(batch):
                return
        if not isinstance(batch, list) and (small := gatherable(batch)) is not None:
            self.outbox.gather(*small)
            return
        try:
            packed = pack_collected(batch)
        except UnserializableRecord:
            if self._drop is None:
                raise
            packed = pack_collected(batch := sendable(Batch(batch), self._drop).payload)
        rows = len(batch)
        if len(packed) <= MESSAGE_BYTES_MAX:
            self.outbox.collect(packed, rows)
        elif rows > 1:
            whole, middle = Batch(batch), rows // 2
            self._collect(whole.slice(0, middle).payload)
            self._collect(whole.slice(middle, rows).payload)
        else:
            raise ResourceExhausted(
                f"a row of {len(packed)} bytes cannot be collected, at most {MESSAGE_BYTES_MAX} fit: "
                "write such rows with to_files or a sink of your own"
            )


def _packed_result(results: list[Any]) -> bytes:
    """The result of the sink, the last operator, at its close; empty if it is None."""
    found = [result for result in results if result is not None]
    packed = pack_result(found[-1]) if found else b""
    if len(packed) > MESSAGE_BYTES_MAX:
        raise WrongResult(
            f"the sink's result has {len(packed)} bytes and at most {MESSAGE_BYTES_MAX} fit: "
            "write large results to a file in the sink, and return its name"
        )
    return packed


_PARTS: Final = {
    Task._read.__code__: SOURCE,
    Task._run_source.__code__: SOURCE,
    Task._run_gates.__code__: "inputs",
    Task._execute.__code__: "open and close",
    **dict.fromkeys(CALLS_CODE, "asynchronous calls"),
}


def part_of(code: CodeType) -> str | None:
    """The name of a frame of this code in a task's stack: SOURCE for its source, else in words; None: it is
    not a frame of a task's loop."""
    return _PARTS.get(code)
