"""One suite that every transport passes: the seeded memory wire, and TCP on asyncio and on uvloop."""

from __future__ import annotations

import random

import pytest

from minishuffle.errors import PartitionNotFound, PeerLost
from minishuffle.wire.frames import EventKind
from support.fabric import CHANNELS, SEGMENT_BYTES, Fabric, Runner


async def write_everything(fabric: Fabric, sizes: list[int], seed: int = 5) -> list[bytes]:
    """Node 0 writes elements of those sizes to its channels in turn; returns what each should read."""
    source, rng = fabric.nodes[0], random.Random(seed)
    expected = [bytearray() for _ in range(CHANNELS)]
    for number, size in enumerate(sizes):
        await fabric.until(source.room)
        data = rng.randbytes(size)
        source.partition.write(number % CHANNELS, 1, [data])
        expected[number % CHANNELS] += data
    source.partition.broadcast_event(EventKind.END_OF_PARTITION)
    return [bytes(data) for data in expected]


def test_everything_arrives_once_and_in_order(run_joined: Runner) -> None:
    """Case 194, PipelinedSubpartitionTest."""

    async def scenario(fabric: Fabric) -> None:
        reader = fabric.nodes[1]
        reader.read_all()
        sizes = [1, 7, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES, 100] * 30
        expected = await write_everything(fabric, sizes)
        await fabric.until(lambda: all(r.ended for r in reader.readers))
        assert [bytes(r.data) for r in reader.readers] == expected
        await fabric.until(lambda: fabric.nodes[0].output.in_use == 0)
        sent, received = fabric.nodes[0].counters, reader.counters
        await fabric.until(lambda: sent.credits_received == received.credits_granted)
        assert sent.payload_bytes_out == sum(sizes) and sent.buffers_out == received.buffers_in

    run_joined(scenario)


def test_a_paused_channel_stops_alone(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        source, reader = fabric.nodes
        reader.read_all()
        paused, free = reader.readers[0], reader.readers[1]
        paused.paused = True
        for _ in range(12):
            source.partition.write(0, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(paused.queue) == 2 + 8)
        for _ in range(40):
            await fabric.until(lambda: source.output.size - source.output.in_use >= 2)
            source.partition.write(1, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(free.data) == 40 * SEGMENT_BYTES)
        assert len(paused.queue) == 2 + 8
        paused.paused = False
        paused.drain()
        await fabric.until(lambda: len(paused.data) == 12 * SEGMENT_BYTES)
        assert paused.channel.credit.received == 12

    run_joined(scenario)


def test_segments_are_not_reused_while_the_transport_holds_them(run_joined: Runner) -> None:
    """Many small slices of few segments, overwritten as soon as they are lent again."""

    async def scenario(fabric: Fabric) -> None:
        source, reader = fabric.nodes
        reader.read_all()
        first = source.partition.subpartitions[0]
        await fabric.until(lambda: first.view is not None)
        expected = bytearray()
        for number in range(2000):
            await fabric.until(source.room)
            data = number.to_bytes(4, "big") * 25
            source.partition.write(0, 1, [data])
            expected += data
            if number % 3 == 0 and first.flush():
                first.attend()
        source.partition.broadcast_event(EventKind.END_OF_PARTITION)
        await fabric.until(lambda: reader.readers[0].ended)
        assert bytes(reader.readers[0].data) == bytes(expected)

    run_joined(scenario)


def test_both_ends_may_consume_over_one_connection(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        for node in fabric.nodes:
            node.read_all()
        for node in fabric.nodes:
            node.partition.write(2, 1, [f"from {node.identity.worker}".encode()])
            node.partition.broadcast_event(EventKind.END_OF_PARTITION)
        await fabric.until(lambda: all(r.ended for node in fabric.nodes for r in node.readers))
        assert bytes(fabric.nodes[0].readers[2].data) == b"from 2"
        assert bytes(fabric.nodes[1].readers[2].data) == b"from 1"

    run_joined(scenario)


def test_a_refused_partition_is_the_channels_matter(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        fabric.nodes[0].refuse = True
        reader = fabric.nodes[1]
        reader.read_all()
        await fabric.until(lambda: all(r.error is not None for r in reader.readers))
        assert all(isinstance(r.error, PartitionNotFound) for r in reader.readers)
        assert reader.link is not None

    run_joined(scenario)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("gently", [True, False], ids=["close", "abort"])
def test_the_end_of_a_connection_fails_its_channels_and_frees_every_segment(
    run_joined: Runner, side: int, gently: bool
) -> None:
    async def scenario(fabric: Fabric) -> None:
        source, reader = fabric.nodes
        reader.read_all()
        reader.readers[0].paused = True
        for _ in range(12):
            source.partition.write(0, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(reader.readers[0].queue) > 0)
        link = fabric.nodes[side].link
        assert link is not None
        if gently:
            link.close()
        else:
            link.abort(PeerLost("enough"))
        await fabric.until(lambda: source.down is not None and reader.down is not None)
        assert all(isinstance(r.error, PeerLost) for r in reader.readers)
        reader.readers[0].drain()
        assert reader.input.in_use == 0
        for subpartition in source.partition.subpartitions:
            subpartition.discard()
        assert source.output.in_use == 0
        assert source.pool.free == source.pool.total

    run_joined(scenario)
