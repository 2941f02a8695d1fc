"""A whole job in the calling thread, without a network: each chain has one subtask.

Chains, inputs, readers of sources and operators are those of a worker's tasks. An exchange is a hand-over in
memory: rows cross it as the bytes that they are in a cluster, columns as they arrive there (without
dictionaries, in memory that no function writes to), and watermarks in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from minishuffle.connectors.pushed import TakenSink
from minishuffle.counters import TaskCounters
from minishuffle.errors import described
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.elements import WHOLE, Part, read_header, unpinned
from minishuffle.exchange.gate import Element
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.watermarks import END_OF_TIME, WatermarkValve
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.operators.assign_event_time import AssignEventTime
from minishuffle.operators.base import Program, TaskContext, Watermark
from minishuffle.operators.user_metrics import UserMetrics
from minishuffle.plan.graph import Edge
from minishuffle.plan.programs import ProgramSpec, built_program
from minishuffle.runtime.asynccalls import AwaitedCalls
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.inputs import Inputs
from minishuffle.runtime.reader import SourceReader
from minishuffle.runtime.usererrors import without_runtime

__all__ = ["LeftOut", "OneThread"]

LeftOut: TypeAlias = Callable[[str, str, Batch], None]
"""Takes records that an operator drops: its name, which no other has, the side output to which they might
have gone, and the records."""
_CHANNEL: Final[Any] = SimpleNamespace(number=0, producer=0)
"""The only one of a hand-over."""


class _HandOver:
    """An edge from one chain to another: a partition for the one, a gate for the other."""

    kept = False
    split_changes = None

    def __init__(self, edge: int, input: int) -> None:
        self.edge, self.input = edge, input
        self.hot_keys = HotKeys()
        self.taps = ()
        self.subpartitions = (None,)
        self.valve = WatermarkValve()
        self.valve.add()
        self.marked = False
        self.finished = False
        self._queue: deque[Element | tuple[int, bool] | None] = deque()
        """Elements; times with idleness; None: the end."""

    # --- written -----------------------------------------------------------------------------------

    def skips(self, position: int, rows: int) -> bool:
        return False

    def hand_over(self, position: int, batch: Batch) -> bool:
        if isinstance(batch.payload, list):
            return False
        columns = unpinned(batch.payload)
        self._queue.append(Element(_CHANNEL, WHOLE, len(batch), Batch(columns, None, batch.times)))
        return True

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        header, *body = parts
        _, _, kind = read_header(header)
        self._queue.append(Element(_CHANNEL, kind, rows, b"".join(body)))

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        self.write(0, rows, parts)

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        self._queue.append((time, idle))

    def finish(self) -> None:
        self._queue.append(None)

    # --- read --------------------------------------------------------------------------------------

    def poll(self) -> Element | None:
        while self._queue and not self.marked:
            item = self._queue.popleft()
            if isinstance(item, Element):
                return item
            if item is None:
                self.finished = True
                self.marked |= self.valve.end(0)
                break
            self.marked |= self.valve.update(0, *item)
        return None

    def late_from(self, channel: InputChannel) -> None:
        """Nothing restarts."""

    def is_aligned(self, barrier: int) -> bool:
        """There are no barriers."""
        return False

    def is_held(self, barrier: int) -> bool:
        """There are no barriers."""
        return False


class _Task:
    """A chain, and what it reads: a source or hand-overs."""

    def __init__(
        self, name: str, program: Program, written: Sequence[_HandOver], read: Sequence[_HandOver]
    ) -> None:
        self.name = name
        self.ended = False
        self.counters = TaskCounters()
        self.chain = Chain(program, {each.edge: each for each in written}, 0, self.counters)
        for operator in program.operators:
            if isinstance(operator, TakenSink):
                operator.drop = self.chain.drop
        self._written = written
        self._source, self._reads_times = program.source, program.times
        self._reader: SourceReader | None = None
        self._inputs = Inputs.of(program, read)
        self._entrances = {gate.input: self.chain.entrance(gate.input) for gate in read}

    def open(self, context: TaskContext, left_out: Sequence[Callable[[str, Batch], None] | None]) -> None:
        """``left_out`` is that of each operator."""
        operators = self.chain.operators
        self.chain.open(
            replace(context, left_out=look, metrics=UserMetrics(operator.name, number))
            for number, (operator, look) in enumerate(zip(operators, left_out, strict=True))
        )
        if self._source is not None:
            in_turn = any(operator.by_split for operator in operators)
            self._reader = SourceReader(
                self._source, 0, 1, context.now(), in_turn=in_turn, times=self._reads_times
            )

    @property
    def is_source(self) -> bool:
        return self._reader is not None

    def end_source(self) -> bool:
        """Whether there was one."""
        if self._reader is None:
            return False
        self._reader.close()
        return True

    def close(self, error: BaseException | None) -> None:
        self.ended = True
        raised: Exception | None = None
        try:
            if self._reader is not None:
                self._reader.close()
        except Exception as broken:
            raised = broken
            if error is not None:
                error.add_note(f"and closing its source raised {described(broken)}")
        self.chain.close(error if error is not None else raised)
        if error is None and raised is not None:
            raise raised

    def step(self, now: float) -> bool:
        """Read one thing and pass it on; False: there was nothing."""
        due = self.chain.deadline()
        if due is not None and due <= now:
            self.chain.on_clock(now)
        return self._read_inputs() if self._reader is None else self._read_source(self._reader, now)

    def _read_source(self, reader: SourceReader, now: float) -> bool:
        emit = self.chain.entrance(0)
        found = reader.poll(now)
        for mark in reader.take_marks():
            emit(mark)
        reader.take_left_out()
        if found is None:
            emit(Watermark(END_OF_TIME))
            self._finish()
        elif len(found):
            emit(Batch(found, None, reader.times))
        return found is None or bool(reader.records)

    def _read_inputs(self) -> bool:
        found = self._inputs.poll()
        if found is not None:
            number, item = found
            self._entrances[number](item)
        elif self._inputs.finished:
            self._finish()
        return found is not None or self.ended

    def _finish(self) -> None:
        self.chain.finish(lambda: None)
        for each in self._written:
            each.finish()
        self.close(None)


class OneThread:
    """A job that is ready to run: its operators are open.

    Args:
        programs: of each chain with its name, those in front first.
        edges: between them, by their places.
        job: what functions see as its id.
        now: a clock that does not go back, in seconds.
        wall: seconds since 1970.
        left_out: takes records that are dropped.

    Raises:
        Exception: what the ``open`` of a function raises; what was open is closed.
    """

    def __init__(
        self,
        programs: Sequence[tuple[str, ProgramSpec]],
        edges: Sequence[Edge],
        *,
        job: str,
        now: Callable[[], float],
        wall: Callable[[], float],
        left_out: LeftOut | None = None,
    ) -> None:
        self._job = job
        self._now = now
        handed = [_HandOver(number, edge.input) for number, edge in enumerate(edges)]
        self._tasks = [
            _Task(
                name,
                built_program(spec),
                [handed[output.edge] for output in spec.outputs],
                [handed[number] for number, edge in enumerate(edges) if edge.target == place],
            )
            for place, (name, spec) in enumerate(programs)
        ]
        self._timed = [
            (task, number, operator)
            for task in self._tasks
            for number, operator in enumerate(task.chain.operators)
            if isinstance(operator, AssignEventTime)
        ]
        seen: Counter[str] = Counter()
        try:
            for task in self._tasks:
                task.open(self._context(task, wall), list(_named(task, seen, left_out)))
        except BaseException as error:
            self.close(error)
            raise

    def _context(self, task: _Task, wall: Callable[[], float]) -> TaskContext:
        return TaskContext(
            job=self._job,
            name=task.name,
            index=0,
            parallelism=1,
            attempt=FIRST_ATTEMPT,
            counters=task.counters,
            now=self._now,
            wall=wall,
            put_aside=task.chain.put_aside,
            async_calls=lambda: AwaitedCalls(f"{task.name} calls"),
        )

    @property
    def ended(self) -> bool:
        """Whether every source has ended, and all that came of it."""
        return all(task.ended for task in self._tasks)

    @property
    def has_event_time(self) -> bool:
        """Whether any step says where event time stands."""
        return bool(self._timed)

    def step(self) -> bool:
        """Have each source give one batch, and all others take what there is for them; False: there was
        nothing."""
        moved = False
        for task in self._tasks:
            while not task.ended and task.step(self._now()):
                moved = True
                if task.is_source:
                    break
        return moved

    def drain(self) -> None:
        """Until there is nothing more for any task."""
        while self.step():
            pass

    def end_sources(self) -> bool:
        """Read sources no further: what comes next of each is its end. Whether any had not ended."""
        ended = [task.end_source() for task in self._tasks if not task.ended]
        return any(ended)

    def guarded(self, steps: Callable[[], None]) -> None:
        """Do something with the job, and close it if that raises: with the user's own frames alone, where
        there are any."""
        __tracebackhide__ = True
        try:
            steps()
        except BaseException as error:
            self.close(error)
            error.__traceback__ = without_runtime(error.__traceback__)
            raise

    def advance(self, watermark: int) -> None:
        """Have event time go on, wherever records get theirs, and drain; microseconds since 1970."""
        for task, number, operator in self._timed:
            if not task.ended:
                operator.advance(watermark, task.chain.behind(number))
                self.drain()

    def deadline(self) -> float | None:
        """When an operator next waits for the clock; None: none does."""
        times = [task.chain.deadline() for task in self._tasks if not task.ended]
        return min((time for time in times if time is not None), default=None)

    def close(self, error: BaseException | None = None) -> None:
        """Close all that is open; raises what is raised last, or adds it to the notes of ``error``."""
        with ExitStack() as closing:
            for task in reversed(self._tasks):
                if not task.ended:
                    closing.callback(task.close, error)


def _named(
    task: _Task, seen: Counter[str], left_out: LeftOut | None
) -> Iterator[Callable[[str, Batch], None] | None]:
    """What takes the dropped records of each operator; names that were seen before are numbered."""
    for operator in task.chain.operators:
        seen[operator.name] += 1
        times = seen[operator.name]
        name = operator.name if times == 1 else f"{operator.name}.{times}"
        yield None if left_out is None else partial(left_out, name)
