"""Producers and consumers that restart at their oldest snapshots: each row is taken at least once, in order,
and what is taken again is counted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import ChannelEvent, InputChannel
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import serve
from minishuffle.exchange.rownumbers import ChannelRows, RetainedRowNumbers
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import FIRST_ATTEMPT, JobId, PartitionId
from minishuffle.protocol.connection import PartitionRequested
from minishuffle.wire.frames import PartitionRequest
from minishuffle.worker.channels.registry import TRANSITIONS, ChannelPhase
from support.links import BareLink
from support.retained import CAPACITY, Producer
from support.soak import examples

CONSUMERS = range(2)
SEGMENT_BYTES = 256


class Written(NamedTuple):
    """A snapshot of a producer."""

    rows: list[int]
    finished: bool


class ProducerTask:
    """A producer subtask, whatever attempt of it runs; it makes the same rows again or not."""

    def __init__(self, number: int, repeats: bool, memory_bytes: int) -> None:
        self.number = number
        self.repeats = repeats
        self.memory_bytes = memory_bytes
        self.attempt = 0
        self.snapshots = [Written([0 for _ in CONSUMERS], False)]
        """Those that are kept, the oldest first."""
        self.begins: dict[int, list[int]] = {}
        """By version, its first rows."""
        self.totals: dict[int, list[int]] = {}
        """By version, the rows up to its end."""
        self.made = [0 for _ in CONSUMERS]
        """The most rows that an attempt has made."""
        self.start([])

    def start(self, closed: list[int]) -> None:
        """The next attempt begins at the oldest snapshot, once it has read it."""
        self.attempt += 1
        self.version = FIRST_ATTEMPT if self.repeats else self.attempt
        self.producer = Producer(
            len(CONSUMERS),
            version=self.version,
            memory_bytes=self.memory_bytes,
            waits=lambda ready: None,
            closed=closed,
        )
        self.begun = self.finished = False
        del self.snapshots[1:]

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            rows, finished = self.snapshots[0]
            self.producer.partition.begin_at(rows)
            self.begins.setdefault(self.version, rows)
            if finished:
                self.finish()

    def write(self, consumer: int, count: int, size: int, whole: bool) -> None:
        """Rows say their version and number; of those that repeat themselves there are as many as before."""
        begin = self.producer.partition.written()[consumer]
        end = begin + count
        if self.repeats and self.totals:
            end = min(end, self.totals[self.version][consumer])
        if not self.begun or self.finished or begin == end:
            return
        self.made[consumer] = max(end, self.made[consumer])
        partition = self.producer.partition
        if partition.skips(consumer, end - begin):
            return
        if whole:
            numbers = list(range(begin, end))
            batch = Batch(pa.record_batch({"version": [self.version] * len(numbers), "number": numbers}))
            if partition.hand_over(consumer, batch):
                return
        else:
            batch = Batch([(self.version, number, "x" * size) for number in range(begin, end)])
        partition.write(consumer, *encode(batch))

    def finish(self) -> None:
        if not self.begun or self.finished:
            return
        if self.repeats:
            for consumer, (end, begin) in enumerate(
                zip(self.made, self.producer.partition.written(), strict=True)
            ):
                self.write(consumer, end - begin, 0, False)
        self.finished = True
        self.totals[self.version] = self.producer.partition.written()
        self.producer.partition.finish()

    def take_snapshot(self) -> None:
        if self.begun:
            self.snapshots.append(Written(self.producer.partition.written(), self.finished))

    def drop_oldest(self) -> None:
        """It may go once another is there that serves all consumers."""
        if len(self.snapshots) > 1:
            stable = self.producer.partition.stable()
            if all(row >= written for row, written in zip(stable, self.snapshots[1].rows, strict=True)):
                del self.snapshots[0]


class Wire:
    """Two connections between a consumer's process and a producer's."""

    def __init__(self, task: ProducerTask, consumer: int) -> None:
        self.task, self.consumer = task, consumer
        self.near, self.far = BareLink(), BareLink(dialer=True)
        self.partition = task.producer.partition

    def settle(self) -> None:
        while self.near.connection.wants_to_send or self.far.connection.wants_to_send:
            for sender, receiver in ((self.near, self.far), (self.far, self.near)):
                chunks, pieces = sender.connection.data_to_send(16)
                data = b"".join(chunks)
                for piece in pieces:
                    piece.released()
                if data:
                    receiver.connection.receive(data, 0.0)
                for event in receiver.connection.events():
                    if isinstance(event, PartitionRequested):
                        serve(self.far, event.request, self.partition.subpartitions[self.consumer])


class ConsumerTask:
    """A consumer subtask, whatever attempt of it runs; what it has taken is its state."""

    def __init__(self, number: int, tasks: list[ProducerTask]) -> None:
        self.number = number
        self.tasks = tasks
        self.attempt = 0
        self.over: set[int] = set()
        """Producers that have ended for good."""
        nothing: list[list[tuple[int, int]]] = [[] for _ in tasks]
        rows = [ChannelRows(each.number, 0, 0) for each in tasks]
        self.snapshots = [(rows, nothing)]
        """Those that are kept, the oldest first."""
        self.start()

    def start(self) -> None:
        self.attempt += 1
        network = NetworkBufferPool(64, SEGMENT_BYTES)
        self.gate = InputGate(
            0,
            0,
            GateBuffers(network.create_pool("gate", 5, 9), SEGMENT_BYTES, 2, 4),
            wake=lambda: None,
            give_back=lambda buffer: buffer.attachment.consumed(buffer),
            budget=AssemblyBudget(1 << 20),
            counters=TaskCounters(),
            tolerant=True,
            guaranteed=True,
        )
        self.generations = [0 for _ in self.tasks]
        self.phases = [ChannelPhase.WANTED for _ in self.tasks]
        self.wires: dict[int, Wire] = {}
        for producer in range(len(self.tasks)):
            if producer in self.over:
                self.gate.add_ended_channel(producer)
                self.phases[producer] = ChannelPhase.ENDED
            else:
                self.gate.add_channel(producer, partial(self._on_event, producer))
        self.begun = False
        del self.snapshots[1:]
        rows, taken = self.snapshots[0]
        self.starts = [each.row for each in rows]
        self.given = [0 for _ in self.tasks]
        self.taken = [[*each] for each in taken]

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.gate.begin_at(self.snapshots[0][0])

    def _on_event(self, producer: int, generation: int, event: ChannelEvent) -> None:
        if generation == self.generations[producer]:
            self.phases[producer] = TRANSITIONS[self.phases[producer], event]
        if event is ChannelEvent.END:
            assert self.snapshots[0][0][producer].ended, "its next attempt would have to read it again"
            self.over.add(producer)

    def attach(self, producer: int, remote: bool) -> None:
        """Read from the attempt that there is, if the task has read what came from the one before."""
        phase, task = self.phases[producer], self.tasks[producer]
        if phase is ChannelPhase.DOWN:
            self._on_event(producer, self.generations[producer], ChannelEvent.RENEW)
        elif phase is not ChannelPhase.WANTED:
            return
        self.generations[producer] += 1
        generation, channel = self.generations[producer], self.gate.channels[producer]
        self._on_event(producer, generation, ChannelEvent.REQUEST)
        if remote:
            self.wires[producer] = Wire(task, self.number)
            request = PartitionRequest(
                PartitionId(JobId("j1"), 0, producer),
                self.number,
                generation=generation,
                version=task.version,
            )
            channel.attach_remote(self.wires[producer].near, request)
        else:
            self._on_event(producer, generation, ChannelEvent.ATTACH)
            channel.attach_local(
                task.producer.partition.subpartitions[self.number],
                generation,
                lambda piece: None,
                attempt=self.attempt,
                version=task.version,
            )

    def detach(self, producer: int) -> None:
        """The link breaks, or the producer dies."""
        self.gate.channels[producer].detach(PeerLost("it was lost"))
        self.wires.pop(producer, None)

    def read(self, polls: int) -> bool:
        """Take so many elements; gives whether there was any."""
        found = False
        for task in self.tasks:
            task.producer.attend()
            if task.number in self.wires:
                self.wires[task.number].settle()
            while task.producer.disk.waiting:
                task.producer.disk.turn()
        for _ in range(polls if self.begun else 0):
            element = self.gate.poll()
            if element is None:
                break
            found = True
            batch = decode(element.format, element.rows, element.payload)
            self._take(element.channel, list(_rows_of(batch))[element.skip :])
        return found

    def _take(self, channel: InputChannel, rows: list[tuple[int, int]]) -> None:
        """Within a version the numbers follow each other; a version begins where the producer has begun it,
        and nothing is missing before it."""
        task, taken = self.tasks[channel.producer], self.taken[channel.producer]
        for version, number in rows:
            before, last = taken[-1] if taken else (0, -1)
            assert number == last + 1 or (version > before and number <= last)
            assert version == before or number == task.begins[version][self.number]
            taken.append((version, number))
        self.given[channel.producer] += len(rows)

    def take_snapshot(self) -> None:
        if self.begun:
            self.snapshots.append((self.gate.taken(), [[*each] for each in self.taken]))

    def drop_oldest(self) -> None:
        if len(self.snapshots) > 1:
            del self.snapshots[0]
            self.gate.make_stable(self.snapshots[0][0])

    def validate(self) -> None:
        for channel, start, given in zip(self.gate.channels, self.starts, self.given, strict=True):
            rows, task = channel.rows, self.tasks[channel.producer]
            assert isinstance(rows, RetainedRowNumbers)
            assert not self.begun or given == rows.next - start + rows.again
            assert not (task.repeats and rows.again)
        assert not any(self.gate.rows_dropped().values())


def _rows_of(batch: Batch) -> Iterator[tuple[int, int]]:
    if isinstance(batch.payload, list):
        return ((version, number) for version, number, _ in batch.payload)
    columns: Any = [column.to_pylist() for column in batch.payload.columns]
    return zip(*columns, strict=True)


class Restarts(RuleBasedStateMachine):
    """Two producers, of which one makes the same rows again, and two consumers."""

    @initialize(memory=st.sampled_from([0, 3_000, 1 << 20]))
    def make(self, memory: int) -> None:
        self.producers = [ProducerTask(0, True, memory), ProducerTask(1, False, memory)]
        self.consumers = [ConsumerTask(number, self.producers) for number in CONSUMERS]
        self.begin_all()

    @property
    def tasks(self) -> list[ProducerTask | ConsumerTask]:
        return [*self.producers, *self.consumers]

    def begin_all(self) -> None:
        for task in self.tasks:
            task.begin()

    @rule(
        p=st.integers(0, 1),
        c=st.integers(0, 1),
        count=st.integers(1, 5),
        size=st.sampled_from([0, 0, 30, 400]),
        whole=st.booleans(),
    )
    def write(self, p: int, c: int, count: int, size: int, whole: bool) -> None:
        self.producers[p].write(c, count, size, whole)

    @rule(count=st.integers(1, 5), size=st.sampled_from([0, 30, 400]), remote=st.booleans())
    def flow(self, count: int, size: int, remote: bool) -> None:
        """All is well for a while."""
        for task in self.producers:
            for number in CONSUMERS:
                task.write(number, count, size, False)
        for consumer in self.consumers:
            consumer.read(100)
            for p in range(len(self.producers)):
                consumer.attach(p, remote)
            consumer.read(100)

    @rule()
    def keep_new_snapshots(self) -> None:
        for consumer in self.consumers:
            consumer.take_snapshot()
            consumer.drop_oldest()
            consumer.read(0)
        for task in self.producers:
            task.take_snapshot()
            task.drop_oldest()

    @rule(p=st.integers(0, 11))
    def finish(self, p: int) -> None:
        """Rarely: nothing is written behind it."""
        if p < len(self.producers):
            self.producers[p].finish()

    @rule(
        c=st.integers(0, 1),
        polls=st.sampled_from([1, 3, 100]),
        attaches=st.sampled_from(["local", "remote", None]),
    )
    def read(self, c: int, polls: int, attaches: str | None) -> None:
        consumer = self.consumers[c]
        consumer.read(polls)
        if attaches is not None:
            for p in range(len(self.producers)):
                consumer.attach(p, remote=attaches == "remote")
            consumer.read(polls)

    @rule(which=st.integers(0, 3), takes=st.booleans(), drops=st.booleans())
    def keep_snapshots(self, which: int, takes: bool, drops: bool) -> None:
        task = self.tasks[which]
        if takes:
            task.take_snapshot()
        if drops:
            task.drop_oldest()

    @rule(p=st.integers(0, 1), c=st.integers(0, 1))
    def break_link(self, p: int, c: int) -> None:
        self.consumers[c].detach(p)

    @rule(p=st.integers(0, 1), begins=st.sampled_from([True, True, False]))
    def restart_producer(self, p: int, begins: bool) -> None:
        task = self.producers[p]
        for consumer in self.consumers:
            consumer.detach(p)
        task.producer.partition.release(written_off=False)
        task.start([each.number for each in self.consumers if p in each.over])
        if begins:
            task.begin()

    @rule(c=st.integers(0, 1), begins=st.sampled_from([True, True, False]))
    def restart_consumer(self, c: int, begins: bool) -> None:
        task = self.consumers[c]
        task.gate.close()
        for producer in self.producers:
            producer.producer.partition.fence(c, task.attempt + 1)
        task.start()
        if begins:
            task.begin()

    @rule()
    def begin(self) -> None:
        self.begin_all()

    @invariant()
    def is_right(self) -> None:
        for task in getattr(self, "producers", ()):
            task.producer.validate()
        for consumer in getattr(self, "consumers", ()):
            consumer.validate()

    def teardown(self) -> None:
        if not hasattr(self, "consumers"):
            return
        self.begin_all()
        for task in self.producers:
            for number in CONSUMERS:
                task.write(number, 3, 0, False)
            task.finish()
        for consumer in self.consumers:
            for _ in range(20):
                consumer.read(1 << 20)
                for task in self.producers:
                    consumer.attach(task.number, remote=False)
            assert consumer.gate.finished, (consumer.phases, consumer.number, consumer.gate.taken())
            for rows, taken in zip(consumer.gate.taken(), consumer.taken, strict=True):
                task = self.producers[rows.producer]
                assert rows.ended and rows.row == task.totals[rows.version][consumer.number], (
                    rows,
                    task.totals,
                    task.begins,
                )
                assert not rows.row or taken[-1][1] >= rows.row - 1
            consumer.take_snapshot()
            while len(consumer.snapshots) > 1:
                consumer.drop_oldest()
            consumer.read(1)
            assert consumer.over == {0, 1}
        for task in self.producers:
            task.producer.validate()
            assert task.producer.budget.used == 0
            task.producer.partition.release(written_off=False)
        for consumer in self.consumers:
            consumer.gate.close()


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
assert CAPACITY < SEGMENT_BYTES
