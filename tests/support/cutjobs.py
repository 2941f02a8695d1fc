"""Whole jobs in one thread, without a network, cut up in whatever way a seed says.

Programs, chains, inputs, partitioners and elements are the real ones. A seed decides which subtask goes next,
which channel it reads, and where batches are split and merged, so that two runs of a job have nothing in
common but its records.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from minishuffle.api.stream_base import StreamBase
from minishuffle.counters import TaskCounters
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.collected import pack_collected, unpack_collected
from minishuffle.exchange.elements import WHOLE, read_header, unpinned
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.watermarks import END_OF_TIME, WatermarkValve
from minishuffle.operators.base import Emit, Mark, Program, TaskContext, Watermark
from minishuffle.operators.row_conversion import rows_of
from minishuffle.plan.graph import JobGraph
from minishuffle.plan.planner import compile_job
from minishuffle.plan.programs import open_program
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.inputs import Inputs
from minishuffle.runtime.reader import SourceReader
from minishuffle.wire.packed import SplitPosition
from minishuffle.worker.tasks.statehandover import pack_state, unpack_state
from support.listing import Listing

__all__ = ["Cut", "Outcome", "run"]

RESTARTS_SHARE = 0.2
"""Of the steps of a subtask, those behind which it restarts, if any does."""


@dataclass(frozen=True)
class Cut:
    """How a run is cut: batches of at most ``rows`` rows (None: as they come), merged before that or not."""

    parallelism: int = 1
    seed: int = 0
    rows: int | None = None
    merges: bool = False
    optimise: tuple[str, ...] | None = None
    """The rewrites of the plan that are made; None: all."""
    restarts: bool = False
    """Subtasks go on from snapshots of themselves, at drawn moments."""


@dataclass
class Outcome:
    """What a run gave."""

    rows: list[Any] = field(default_factory=list)
    """What ``collect`` sent, in order; columns as dicts."""
    log: list[str] = field(default_factory=list)
    counters: TaskCounters = field(default_factory=TaskCounters)
    """Of all subtasks."""
    bytes_shipped: int = 0
    """Of all elements that crossed an exchange."""

    def take(self, batch: Payload) -> None:
        """Add rows as they are after an exchange: times in one time zone, for example."""
        self.rows.extend(unpack_rows(pack_rows(rows_of(Batch(batch)))))


@dataclass
class _Channel:
    """From one producer to one consumer of an edge: elements as the wire carries them, and marks."""

    producer: int
    number: int
    """In the gate's valve."""
    queue: deque[Any] = field(default_factory=deque)
    ended: bool = False


@dataclass
class _Element:
    channel: _Channel
    format: int
    rows: int
    payload: Any
    skip: int = 0


class _Gate:
    """What :class:`Inputs` reads: the channels of one edge to one consumer, in the order of the dice."""

    kept = False
    split_changes = None

    def __init__(self, input: int, dice: random.Random) -> None:
        self.input = input
        self.valve = WatermarkValve()
        self.marked = False
        self.channels: dict[int, _Channel] = {}
        self._dice = dice

    def channel(self, producer: int) -> _Channel:
        if producer not in self.channels:
            self.channels[producer] = _Channel(producer, self.valve.add())
        return self.channels[producer]

    @property
    def finished(self) -> bool:
        return all(channel.ended for channel in self.channels.values())

    def late_from(self, channel: Any) -> None:
        """Nothing restarts."""

    def poll(self) -> _Element | None:
        ready = [channel for channel in self.channels.values() if channel.queue]
        if not ready:
            return None
        channel = self._dice.choice(ready)
        item = channel.queue.popleft()
        if isinstance(item, _Element):
            return item
        if item == "end":
            channel.ended = True
            self.marked |= self.valve.end(channel.number)
        else:
            self.marked |= self.valve.update(channel.number, *item)
        return None


class _Partition:
    """What a chain writes to: the channels of one producer on one edge."""

    def __init__(self, channels: list[_Channel], outcome: Outcome) -> None:
        self.subpartitions = self._channels = channels
        self.hot_keys = HotKeys()
        self.taps = ()
        self._columnar = 0
        """Arrow batches so far."""
        self._outcome = outcome

    def skips(self, position: int, rows: int) -> bool:
        return False

    def hand_over(self, position: int, batch: Batch) -> bool:
        """Every other Arrow batch is for a consumer on the same worker."""
        columns = batch.payload
        if isinstance(columns, list):
            return False
        self._columnar += 1
        if self._columnar % 2:
            channel = self._channels[position]
            self._outcome.bytes_shipped += columns.nbytes
            whole = Batch(unpinned(columns), None, batch.times)
            channel.queue.append(_Element(channel, WHOLE, len(batch), whole))
        return bool(self._columnar % 2)

    def write(self, position: int, rows: int, parts: Iterable[Any]) -> None:
        header, *body = parts
        size, declared, kind = read_header(header)
        payload = b"".join(body)
        assert (size, declared) == (len(payload), rows)
        channel = self._channels[position]
        self._outcome.bytes_shipped += size
        channel.queue.append(_Element(channel, kind, rows, payload))

    def broadcast(self, to: Iterable[int], rows: int, parts: list[Any]) -> None:
        for position in to:
            self.write(position, rows, parts)

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """A newer watermark takes the place of one with no data after it."""
        for channel in self._channels:
            if channel.queue and isinstance(channel.queue[-1], tuple):
                channel.queue.pop()
            channel.queue.append((time, idle))

    def finish(self) -> None:
        for channel in self._channels:
            channel.queue.append("end")


def _parts(batch: Batch, at: list[int]) -> list[Batch]:
    return [batch.slice(a, b) for a, b in zip([0, *at], [*at, len(batch)], strict=True)]


def _merged(one: Batch, other: Batch) -> Batch | None:
    """Both as one batch; None if they are of different kinds."""
    if [one.keys is None, one.times is None] != [other.keys is None, other.times is None]:
        return None
    kinds = [getattr(each.payload, "schema", None) for each in (one, other)]
    return Batch.concat([one, other]) if kinds[0] == kinds[1] else None


class _Task:
    """One subtask. ``step`` reads one thing and passes it on."""

    def __init__(self, run: _Run, vertex: int, index: int) -> None:
        graph = run.graph
        self._vertex, self._index = graph.vertices[vertex], index
        self._run, self._dice = run, run.dice
        gates = [run.gate(edge, index) for edge in graph.inputs_of(vertex)]
        for edge, gate in zip(graph.inputs_of(vertex), gates, strict=True):
            for producer in graph.producers_of(edge, index):
                gate.channel(producer)
        self._gates = gates
        self._partitions = {
            edge: _Partition(
                [run.gate(edge, consumer).channel(index) for consumer in graph.consumers_of(edge, index)],
                run.outcome,
            )
            for edge in graph.outputs_of(vertex)
        }
        self._inputs: Inputs | None = None
        self._reader: SourceReader | None = None
        self._begin(1, [])
        self.ended = False

    def _begin(self, attempt: int, positions: Sequence[SplitPosition]) -> None:
        """Open an attempt, whose source begins there."""
        run, told = self._run, self._vertex
        self._program: Program = open_program(told.program, cloudpickle.loads)
        self._context = TaskContext(
            job="j1",
            name=told.name,
            index=self._index,
            parallelism=told.parallelism,
            attempt=attempt,
            now=lambda: run.now,
            wall=lambda: run.now,
            collect=lambda batch: run.outcome.take(unpack_collected(pack_collected(batch))),
            log=run.outcome.log.append,
            files=Listing(),
            counters=run.outcome.counters,
        )
        for operator in self._program.operators:
            operator.open(self._context)
        self._chain = Chain(self._program, self._partitions, self._index, TaskCounters())  # type: ignore[arg-type]
        self._context.put_aside = self._chain.put_aside
        self._entrances = {gate.input: self._chain.entrance(gate.input) for gate in self._gates}
        if self._program.source is None:
            self._inputs = Inputs.of(self._program, self._gates)  # type: ignore[arg-type]
            for gate in self._gates:
                gate.marked = True
        else:
            in_turn = any(operator.by_split for operator in self._program.operators)
            self._reader = SourceReader(
                self._program.source,
                self._index,
                told.parallelism,
                run.now,
                in_turn=in_turn,
                resumed=positions,
            )

    def restart(self) -> None:
        """Between two elements, go on with another attempt, which has what this one has written down."""
        if self._inputs is not None and not self._inputs.is_between:
            return
        assert self._chain.before_snapshot(lambda: None, urgent=True)
        positions = [] if self._reader is None else self._reader.snapshot()
        snapshot = replace(self._chain.snapshot(positions), dealt=self._chain.dealt())
        assert not self._chain.left_out(snapshot)
        snapshot = unpack_state(memoryview(b"".join(parts[1:])) for parts in pack_state(snapshot))
        for operator in self._program.operators:
            operator.close()
        self._begin(self._context.attempt + 1, snapshot.positions)
        self._chain.restore(snapshot)

    def step(self) -> bool:
        """False if there was nothing to do."""
        self._chain.on_clock(self._run.now)
        return self._read_source() if self._inputs is None else self._read_gates(self._inputs)

    def _read_source(self) -> bool:
        assert self._reader is not None
        emit = self._chain.entrance(0)
        batch = self._reader.poll(self._run.now)
        for mark in self._reader.take_marks():
            emit(mark)
        if batch is None:
            emit(Watermark(END_OF_TIME))
            self._end()
        elif len(batch):
            for piece in self._cut(Batch(batch)):
                emit(piece)
        return True

    def _read_gates(self, inputs: Inputs) -> bool:
        found = inputs.poll()
        while (
            self._run.cut.merges
            and found is not None
            and not isinstance(found[1], Mark)
            and self._dice.random() < 0.7
        ):
            other = inputs.poll()
            if other is None:
                break
            both = None
            if other[0] == found[0] and not isinstance(other[1], Mark):
                both = _merged(found[1], other[1])
            if both is None:
                self._pass(*found)
                found = other
            else:
                found = (found[0], both)
        if found is not None:
            self._pass(*found)
            return True
        if inputs.finished:
            self._end()
            return True
        return False

    def _pass(self, number: int, item: Batch | Mark) -> None:
        emit: Emit = self._entrances[number]
        if isinstance(item, Mark):
            emit(item)
        else:
            for piece in self._cut(item):
                emit(piece)

    def _cut(self, batch: Batch) -> list[Batch]:
        rows = self._run.cut.rows
        if rows is None:
            return [batch]
        at, place = [], self._dice.randint(1, rows)
        while place < len(batch):
            at.append(place)
            place += self._dice.randint(1, rows)
        return _parts(batch, at)

    def _end(self) -> None:
        self._chain.finish(lambda: None)
        for partition in self._partitions.values():
            partition.finish()
        for operator in self._program.operators:
            operator.close()
        self.ended = True


class _Run:
    def __init__(self, graph: JobGraph, cut: Cut) -> None:
        self.graph, self.cut = graph, cut
        self.dice = random.Random(cut.seed)
        self.now = 0.0
        self.outcome = Outcome()
        self._gates: dict[tuple[int, int], _Gate] = {}
        self._tasks = [
            _Task(self, number, index)
            for number, vertex in enumerate(graph.vertices)
            for index in range(vertex.parallelism)
        ]

    def gate(self, edge: int, consumer: int) -> _Gate:
        if (edge, consumer) not in self._gates:
            self._gates[edge, consumer] = _Gate(self.graph.edges[edge].input, self.dice)
        return self._gates[edge, consumer]

    def run(self) -> Outcome:
        waiting = list(self._tasks)
        while waiting:
            self.dice.shuffle(waiting)
            moved = False
            for task in waiting:
                for _ in range(self.dice.randint(1, 6)):
                    self.now += self.dice.choice([0.0, 0.0, 0.001, 0.3])
                    moved |= task.step()
                    if task.ended:
                        break
                    if self.cut.restarts and self.dice.random() < RESTARTS_SHARE:
                        task.restart()
            waiting = [task for task in waiting if not task.ended]
            self.now += 0.01
            assert moved or any(gate_has_items(gate) for gate in self._gates.values()), "the job stands still"
        return self.outcome


def gate_has_items(gate: _Gate) -> bool:
    """Whether something waits there."""
    return any(channel.queue for channel in gate.channels.values())


def run(stream: StreamBase, cut: Cut | None = None) -> Outcome:
    """Run a job to its end.

    Raises: whatever an operator or a function of the job raises.
    """
    cut = cut or Cut()
    graph = JobGraph.from_bytes(
        compile_job(stream, parallelism=cut.parallelism, optimise=cut.optimise).to_bytes()
    )
    return _Run(graph, cut).run()
