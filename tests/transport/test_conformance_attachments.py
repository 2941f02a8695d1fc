"""Every transport carries channels whose attachments are replaced: whatever is under way then, each row is
read once, or counted as lost on the way, or thrown away with its element."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError, TaskFailed
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import Attachment, GivenBack, RemoteAttachment
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import Received
from minishuffle.wire.frames import EventKind, PartitionRequest
from support.fabric import SEGMENT_BYTES, Fabric, Runner

EXCLUSIVE = 2
FLOATING = 3
LONG = 12 * SEGMENT_BYTES


class Reading:
    """A task on node 1 that reads subpartition 0 of node 0, over the fabric or as if it were local."""

    def __init__(self, fabric: Fabric, *, tolerant: bool = False) -> None:
        self.fabric = fabric
        self.source, self.node = fabric.nodes
        self.pool = self.node.pool.create_pool("gate", EXCLUSIVE + 1, EXCLUSIVE + FLOATING)
        self.returned: list[GivenBack] = []
        self.holds = False
        """What the task has read stays with it for now."""
        self.gate = InputGate(
            0,
            0,
            GateBuffers(self.pool, SEGMENT_BYTES, EXCLUSIVE, FLOATING),
            wake=lambda: None,
            give_back=self._give_back,
            budget=AssemblyBudget(1 << 20),
            counters=TaskCounters(),
            tolerant=tolerant,
        )
        self.events: list[tuple[int, str]] = []
        """Generation, and what happened to it."""
        self.channel = self.gate.add_channel(0, lambda g, event: self.events.append((g, event.value)))
        self.attachments: list[Attachment] = []
        self.written = 0
        self.read: list[int] = []

    def _give_back(self, buffer: GivenBack) -> None:
        self.returned.append(buffer)
        if not self.holds:
            self.give_back()

    def give_back(self) -> None:
        returned, self.returned = self.returned, []
        for buffer in returned:
            buffer.attachment.consumed(buffer)

    # --- attachments -----------------------------------------------------------------------------

    @property
    def attachment(self) -> RemoteAttachment:
        attachment = self.channel.attachment
        assert isinstance(attachment, RemoteAttachment)
        return attachment

    def attach_remote(self) -> None:
        assert self.node.link is not None
        request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, generation=len(self.attachments) + 1)
        self.channel.attach_remote(self.node.link, request)
        self._attached()

    def attach_local(self) -> None:
        subpartition = self.source.partition.subpartitions[0]
        self.channel.attach_local(subpartition, len(self.attachments) + 1, lambda piece: None)
        self._attached()

    def _attached(self) -> None:
        assert self.channel.attachment is not None
        self.attachments.append(self.channel.attachment)

    async def served(self) -> None:
        """The producer has heard of the attachment."""
        await self.fabric.until(
            lambda: (
                bool(self.source.served) and self.source.served[-1].view.generation == len(self.attachments)
            )
        )

    # --- rows --------------------------------------------------------------------------------------

    async def write(self, count: int, size: int = 100) -> None:
        """Elements of one row each, which is a number that counts up and ``size`` bytes."""
        for _ in range(count):
            await self.fabric.until(self.source.room)
            self.write_one(size)

    def write_one(self, size: int) -> None:
        rows, parts = encode(Batch([[self.written, "x" * size]]))
        self.written += 1
        self.source.partition.write(0, rows, parts)

    def flush(self) -> None:
        subpartition = self.source.partition.subpartitions[0]
        if subpartition.flush():
            subpartition.attend()

    def poll(self) -> None:
        while (element := self.gate.poll()) is not None:
            rows: Any = decode(element.format, element.rows, element.payload).payload
            self.read += [row[0] for row in rows]

    async def finish(self) -> None:
        """The producer ends, everything is read, and the books agree."""
        self.source.partition.broadcast_event(EventKind.END_OF_PARTITION)

        def finished() -> bool:
            self.poll()
            return self.gate.finished

        await self.fabric.until(finished)
        assert self.read == sorted(set(self.read))
        received = sum(attachment.rows_received for attachment in self.attachments)
        assert received == len(self.read) + self.channel.rows_incomplete
        sent = {each.view.generation: each.view.rows_sent for each in self.source.served}
        for attachment in self.attachments:
            if isinstance(attachment, RemoteAttachment):
                assert attachment.rows_received <= sent.get(attachment.generation, 0)
            else:
                sent[attachment.generation] = attachment.rows_received
        assert sum(sent.values()) == self.written
        if self.source.down is None:
            assert sum(sent.values()) - received == self.node.counters.rows_discarded
        assert self.channel.attachment is None
        await self.fabric.until(lambda: self.source.output.in_use == 0)
        assert self.pool.in_use == 0
        self.gate.close()


async def reading_of(fabric: Fabric, *, tolerant: bool = False) -> Reading:
    reading = Reading(fabric, tolerant=tolerant)
    reading.attach_remote()
    await reading.served()
    return reading


def test_attached_again_with_data_queued(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        await reading.write(3)
        reading.flush()
        await fabric.until(lambda: reading.attachment.rows_received == 3)
        reading.attach_remote()
        await reading.served()
        await reading.write(3)
        await reading.finish()
        assert reading.read == list(range(6)), "what was queued is read first"

    run_joined(scenario)


def test_attached_again_with_data_in_flight(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        for _ in range(5):
            reading.write_one(SEGMENT_BYTES // 2)
        reading.attach_remote()
        await reading.served()
        await reading.write(5)
        await reading.finish()
        assert reading.read[-5:] == list(range(5, 10))

    run_joined(scenario)


def test_attached_again_in_the_middle_of_an_element(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        reading.write_one(100)
        reading.write_one(LONG)
        await fabric.until(lambda: len(reading.channel.queue) == EXCLUSIVE + FLOATING)
        reading.attach_remote()
        await reading.served()
        await reading.write(2)
        await reading.finish()
        assert reading.read == [0, 2, 3]
        assert reading.channel.rows_incomplete == 1

    run_joined(scenario)


def test_attached_again_with_the_ledger_at_zero(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        for _ in range(8):
            reading.write_one(SEGMENT_BYTES - 100)
        reading.flush()
        await fabric.until(lambda: len(reading.channel.queue) == EXCLUSIVE + FLOATING)
        reading.holds = True
        reading.poll()
        assert reading.attachment.consumer.credit.idle == 0 == reading.node.input.in_use
        reading.attach_remote()
        await reading.served()
        assert reading.attachment.consumer.credit.idle == 0, "every buffer is out"
        await reading.write(2)
        assert not reading.attachment.rows_received
        reading.holds = False
        reading.give_back()
        assert reading.attachment.consumer.credit.exclusive_total == EXCLUSIVE
        await reading.finish()
        assert len(reading.read) + reading.channel.rows_incomplete == reading.written

    run_joined(scenario)


def test_local_in_place_of_remote_and_back(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        for attach in (reading.attach_local, reading.attach_remote, reading.attach_local):
            await reading.write(2)
            reading.flush()
            await fabric.until(lambda: reading.channel.attachment is not None and all_received(reading))
            attach()
            if isinstance(reading.channel.attachment, RemoteAttachment):
                await reading.served()
        await reading.write(2)
        await reading.finish()
        assert reading.read == list(range(8))

    run_joined(scenario)


def all_received(reading: Reading) -> bool:
    reading.poll()
    return len(reading.read) == reading.written


def test_detached_before_its_link_ends_and_attached_locally_after_it(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        await reading.write(3)
        reading.flush()
        await fabric.until(lambda: reading.attachment.rows_received == 3)
        reading.channel.detach()
        assert reading.node.link is not None
        reading.node.link.abort(PeerLost("enough"))
        await fabric.until(lambda: reading.source.down is not None and reading.node.down is not None)
        await reading.write(3)
        reading.attach_local()
        await reading.finish()
        assert reading.read == list(range(6))

    run_joined(scenario)


def test_a_link_that_ends_under_an_attachment_is_an_error_behind_what_arrived(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric)
        await reading.write(3)
        reading.flush()
        await fabric.until(lambda: reading.attachment.rows_received == 3)
        assert reading.node.link is not None
        reading.node.link.abort(PeerLost("enough"))
        await fabric.until(lambda: reading.channel.attachment is None)
        with pytest.raises(ShuffleError, match="enough"):
            reading.poll()
        assert reading.read == [0, 1, 2]
        reading.gate.close()
        assert reading.pool.in_use == 0

    run_joined(scenario)


# --- producers that fail, in a gate that goes on without them -------------------------------------------


async def drained(reading: Reading) -> None:
    """The task has read everything up to the failure of the last attachment."""

    def done() -> bool:
        reading.poll()
        return reading.events[-1:] == [(len(reading.attachments), "drain")]

    await reading.fabric.until(done)


@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
def test_a_producer_that_fails_in_the_middle_of_an_element_is_an_end_behind_what_arrived(
    run_joined: Runner, local: bool
) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric, tolerant=True)
        if local:
            reading.attach_local()
        await reading.write(3)
        reading.write_one(LONG)
        await fabric.until(lambda: len(reading.channel.queue) >= EXCLUSIVE + FLOATING)
        reading.source.partition.fail(TaskFailed("the producer raised"))
        await drained(reading)
        assert reading.read == [0, 1, 2]
        assert reading.channel.rows_incomplete == 1
        assert reading.channel.attachment is None and reading.pool.in_use == 0
        reading.gate.close()

    run_joined(scenario)


def test_attached_again_behind_a_failure_with_the_rest_of_the_old_queue_unread(run_joined: Runner) -> None:
    """The task reads all of the old, then all of the new; buffers of the old credit the old alone."""

    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric, tolerant=True)
        await reading.write(3, SEGMENT_BYTES - 100)
        reading.flush()
        await fabric.until(lambda: reading.attachment.rows_received == 3)
        reading.source.served[-1].view.fail(PeerLost("for once"))
        await fabric.until(lambda: reading.channel.attachment is None)
        assert reading.events == [(1, "attach"), (1, "fail")]
        assert sum(isinstance(item, Received) for item in reading.channel.queue) >= 2
        reading.attach_remote()
        await reading.served()
        await reading.write(3)
        reading.flush()
        await fabric.until(lambda: reading.attachment.rows_received == 3)
        assert not reading.read
        await reading.finish()
        assert reading.read[-3:] == [3, 4, 5]
        assert len(reading.read) + reading.channel.rows_incomplete == 6
        assert reading.events[2:] == [(2, "attach"), (1, "drain"), (2, "end")]

    run_joined(scenario)


def test_a_link_that_ends_under_an_attachment_is_read_to_its_end_and_the_channel_goes_on(
    run_joined: Runner,
) -> None:
    async def scenario(fabric: Fabric) -> None:
        reading = await reading_of(fabric, tolerant=True)
        for _ in range(5):
            reading.write_one(SEGMENT_BYTES // 2)
        await fabric.until(lambda: reading.attachment.rows_received > 0)
        assert reading.node.link is not None
        reading.node.link.abort(PeerLost("enough"))
        await fabric.until(lambda: reading.source.down is not None)
        await drained(reading)
        lost = reading.source.served[0].view.rows_sent - reading.attachments[0].rows_received
        await reading.write(3)
        reading.attach_local()
        await reading.finish()
        assert reading.read[-3:] == [5, 6, 7]
        assert len(reading.read) + reading.channel.rows_incomplete + lost == reading.written

    run_joined(scenario)
