"""Every transport tells a producer that its consumer has gone, and lets go of the segments that it holds."""

from __future__ import annotations

from minishuffle.errors import PeerLost
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import CancelReason, PartitionRequest
from support.fabric import SEGMENT_BYTES, Fabric, Node, Reader, Runner

ELEMENT_BYTES = SEGMENT_BYTES * 3 // 2
ELEMENTS_MAX = 40


def fill(source: Node) -> int:
    """Write elements of one row for consumer 0 until there is no room; gives the rows."""
    rows = 0
    while source.room():
        assert rows < ELEMENTS_MAX
        source.partition.write(0, 1, [bytes(ELEMENT_BYTES)])
        rows += 1
    return rows


async def reading_of(fabric: Fabric) -> tuple[Node, Node, PipelinedSubpartition]:
    """Node 1 reads from node 0, which drops what it cannot send; consumer 0 takes nothing off its queue."""
    source, node = fabric.nodes
    for subpartition in source.partition.subpartitions:
        subpartition._drops = True
    node.read_all()
    node.readers[0].paused = True
    await fabric.until(lambda: len(source.served) == len(node.readers))
    return source, node, source.partition.subpartitions[0]


def check_books(source: Node, rows: int) -> None:
    """Nothing is queued any more."""
    sent = sum(attachment.view.rows_sent for attachment in source.served)
    assert 0 < sent < rows
    assert sent + sum(source.partition.rows_dropped().values()) == rows


def test_a_link_that_ends_makes_its_consumers_unavailable(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        source, node, subpartition = await reading_of(fabric)
        rows = fill(source)
        await fabric.until(lambda: len(node.readers[0].queue) > 2)
        assert node.link is not None
        node.link.abort(PeerLost("cut"))
        await fabric.until(lambda: source.down is not None)
        await fabric.until(lambda: source.output.in_use <= 1)
        assert not any(each.available for each in source.partition.subpartitions)
        assert source.partition.skips(0, 5)
        check_books(source, rows + 5)
        assert source.partition.rows_dropped()["upstream_unavailable"] == 5
        assert source.output.in_use == 0
        view = subpartition.attach(2, lambda: None)
        assert subpartition.available
        source.partition.write(0, 1, [b"next"])
        subpartition.flush()
        piece = view.poll()
        assert piece is not None and bytes(piece.payload) == b"next"
        piece.released()

    run_joined(scenario)


def test_a_consumer_that_fails_leaves_the_others_of_its_link_alone(run_joined: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        source, node, subpartition = await reading_of(fabric)
        rows = fill(source)
        await fabric.until(lambda: len(node.readers[0].queue) > 2)
        assert node.link is not None
        node.link.connection.cancel(node.readers[0].channel, CancelReason.FAILED)
        node.link.flush_soon()
        await fabric.until(lambda: not subpartition.available)
        await fabric.until(lambda: source.output.in_use <= 1)
        check_books(source, rows)
        source.partition.write(1, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(node.readers[1].data) == SEGMENT_BYTES)
        node.readers[0].drain()
        again = Reader(node, 0)
        request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, consumer_attempt=2)
        node.link.connection.request_partition(again.channel, request)
        node.link.flush_soon()
        await fabric.until(lambda: subpartition.available)
        source.partition.write(0, 1, [b"n" * SEGMENT_BYTES])
        source.partition.flush()
        await fabric.until(lambda: len(again.data) == SEGMENT_BYTES)
        assert bytes(again.data) == b"n" * SEGMENT_BYTES

    run_joined(scenario)
