"""The state of a task that moves: written down by the attempt that ends, and read by the one that begins.

An attempt that stands at the barrier of a move stores its state as a blocking partition of its own
(:mod:`~minishuffle.exchange.blocking`), which stays on its worker when the attempt has ended. The next
attempt reads it over a channel like any other, with credit, TLS and all, before its first element. It begins
with none of it if it cannot have all of it.

The elements are of the format ``STATE``. The first one is msgpack: the watermark that the task has passed on,
and everything that is counted (rows by channel, positions of the source). Each of the others is an Arrow IPC
stream of one batch, and the metadata of its schema has the id of the operator and the name of the part. (To
write an Arrow stream takes 0.15 ms, however little is in it: a task that has no state writes none.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgpack
import pyarrow as pa

from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PartitionLost,
    PeerLost,
    ResourceExhausted,
    ShuffleError,
    StateLost,
    TaskCancelled,
    described,
)
from minishuffle.exchange.blocking import BlockingPartition, DiskReads
from minishuffle.exchange.channels import ChannelEvent, InputChannel
from minishuffle.exchange.elements import AssemblyBudget, ElementFormat, Part, with_header
from minishuffle.exchange.elementstore import ElementStore
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.rownumbers import ChannelRows
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import PartitionId
from minishuffle.limits import BATCH_BYTES_MAX
from minishuffle.operators.state_parts import StatePart
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.packed import pack_positions, unpack_positions
from minishuffle.worker.tasks.handoff import TaskPaths

__all__ = ["StateHandover", "StateInput", "pack_state", "state_gate", "state_partition", "unpack_state"]

_BUFFERS: Final = 16
"""Buffers of a channel that reads state, beside the network memory."""
_EXCLUSIVE: Final = 2
SILENCE_SECONDS_MAX: Final = 30.0
"""Without a byte of the state, after which a task begins without it."""
_LOOK_SECONDS: Final = 1.0
_OPERATOR: Final = b"minishuffle.operator"
_PART: Final = b"minishuffle.part"


# --- elements ---------------------------------------------------------------------------------------------


def pack_state(snapshot: TaskStateSnapshot) -> Iterator[list[Part]]:
    """Each element, in order, which counts as one row; none if there is nothing to go on with.

    Raises:
        UsageError: a row is longer than an element may be.
    """
    if snapshot == TaskStateSnapshot():
        return
    yield with_header(1, ElementFormat.STATE, [_pack_counted(snapshot)])
    for operator, parts in snapshot.parts.items():
        for part in parts:
            names = {_OPERATOR: operator.encode(), _PART: part.name.encode()}
            batch = part.batch.replace_schema_metadata({**(part.batch.schema.metadata or {}), **names})
            rows = max(1, batch.num_rows * BATCH_BYTES_MAX // max(1, batch.nbytes))
            for begin in range(0, batch.num_rows, rows):
                piece = batch.slice(begin, rows)
                yield _element(piece)


def _element(batch: pa.RecordBatch) -> list[Part]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return with_header(1, ElementFormat.STATE, [memoryview(sink.getvalue()).cast("B")])


def unpack_state(payloads: Iterator[memoryview]) -> TaskStateSnapshot:
    """The snapshot whose elements have these payloads."""
    facts = next(payloads, None)
    if facts is None:
        return TaskStateSnapshot()
    counted = _unpack_counted(facts)
    parts: dict[str, list[StatePart]] = {}
    for payload in payloads:
        with pa.ipc.open_stream(payload) as stream:
            batch = stream.read_next_batch()
        metadata = dict(batch.schema.metadata)
        operator, name = (metadata.pop(key).decode() for key in (_OPERATOR, _PART))
        parts.setdefault(operator, []).append(StatePart(name, batch.replace_schema_metadata(metadata)))
    return replace(counted, parts=parts)


def _pack_counted(snapshot: TaskStateSnapshot) -> bytes:
    packed: bytes = msgpack.packb(
        [
            snapshot.watermark,
            pack_positions(snapshot.positions),
            {edge: list(rows) for edge, rows in snapshot.taken.items()},
            {edge: list(rows) for edge, rows in snapshot.written.items()},
            dict(snapshot.dealt),
            snapshot.collected,
            snapshot.at,
            list(snapshot.left_out),
            snapshot.pending,
            snapshot.again,
        ]
    )
    return packed


def _unpack_counted(packed: memoryview) -> TaskStateSnapshot:
    counted = msgpack.unpackb(packed, strict_map_key=False)
    watermark, positions, taken, written, dealt, collected, at, left_out, pending, again = counted
    return TaskStateSnapshot(
        positions=unpack_positions(positions),
        watermark=watermark,
        taken={edge: [ChannelRows(*each) for each in rows] for edge, rows in taken.items()},
        written=written,
        dealt=dealt,
        collected=collected,
        at=at,
        left_out=tuple(left_out),
        pending=pending,
        again=again,
    )


# --- both sides -------------------------------------------------------------------------------------------


def state_gate(
    partition_id: PartitionId,
    paths: TaskPaths,
    budget: AssemblyBudget,
    counters: TaskCounters,
    *,
    segment_bytes: int,
    **options: Any,
) -> InputGate:
    """A gate for one channel, by which a partition with state is read; its buffers are beside the network
    memory. It has these ``options``, and waits for another attachment when one is lost.

    Raises:
        ResourceExhausted: the system does not give that much memory.
    """
    pool = NetworkBufferPool(_BUFFERS, segment_bytes).create_pool("state", _EXCLUSIVE + 1, _BUFFERS)
    return InputGate(
        partition_id.edge,
        0,
        GateBuffers(pool, segment_bytes, _EXCLUSIVE, _BUFFERS - _EXCLUSIVE),
        wake=paths.bell.ring,
        give_back=paths.give_back,
        budget=budget,
        counters=counters,
        tolerant=True,
        **options,
    )


def state_partition(
    partition_id: PartitionId,
    store: ElementStore,
    *,
    capacity: int,
    disk: DiskReads,
    lost: Callable[[PartitionLost], None] = lambda error: None,
) -> BlockingPartition:
    """(Any thread.) Where state is kept for the next attempt of the subtask ``partition_id.producer``.

    Args:
        capacity: payload bytes of a buffer.
        lost: (loop) called once if what is kept cannot be read.
    """
    return BlockingPartition(
        partition_id,
        range(partition_id.producer, partition_id.producer + 1),
        lambda subpartition: None,  # All is written before somebody reads.
        TaskCounters(),
        store,
        shared=False,
        capacity=capacity,
        disk=disk,
        lost=lost,
    )


class StateInput:
    """Where an attempt reads the state of an earlier one: a gate with one channel, in memory of its own.

    Args:
        partition_id: what the earlier attempt has written.
        segment_bytes: payload bytes of a buffer.
        store: where elements wait until all have come.
        clock: seconds, of any origin.

    Raises:
        ResourceExhausted: the system does not give that much memory.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        paths: TaskPaths,
        budget: AssemblyBudget,
        *,
        segment_bytes: int,
        store: ElementStore,
        on_event: Callable[[int, ChannelEvent], object],
        clock: Callable[[], float],
    ) -> None:
        self._counters, self._paths, self._clock = TaskCounters(), paths, clock
        self.gate = state_gate(
            partition_id,
            paths,
            budget,
            self._counters,
            segment_bytes=segment_bytes,
            tolerates=PeerLost,
            kept=lambda producer: store,
        )
        self.channel: InputChannel = self.gate.add_channel(partition_id.producer, on_event)

    def read(self) -> Iterator[memoryview]:
        """(Task.) The payloads of all elements, once they are here.

        Raises:
            ShuffleError: they cannot be had.
            TaskCancelled: meanwhile.
        """
        gate, paths, counters = self.gate, self._paths, self._counters
        seen, since = 0, self._clock()
        while True:
            paths.check()
            paths.bell.clear()
            if (element := gate.poll()) is not None:
                yield element.payload
                continue
            if gate.finished:
                return
            if counters.bytes_in > seen:
                seen, since = counters.bytes_in, self._clock()
            elif self._clock() - since > SILENCE_SECONDS_MAX:
                raise PeerLost(f"nothing of it has come for {SILENCE_SECONDS_MAX:g} s")
            paths.wait(_LOOK_SECONDS)


class StateHandover:
    """The state that an attempt takes over from an earlier one, and hands on to the next attempt.

    Args:
        make_partition: makes the partition in which it keeps its state.
        earlier: where it reads state; None: it begins without any.
        closed: called on the loop when ``earlier`` is closed since it was read, or cannot be.
        is_needed: there have been snapshots of the subtask, and it must not begin without.
    """

    def __init__(
        self,
        paths: TaskPaths,
        make_partition: Callable[[], BlockingPartition],
        earlier: StateInput | None = None,
        closed: Callable[[], object] = lambda: None,
        *,
        is_needed: bool = False,
    ) -> None:
        self.earlier = earlier
        self.lost = ""
        """Why it could not take state over, or hand its own on."""
        self.moved = False
        """It stands at the barrier of a move, and ``kept`` has all of its state."""
        self.kept: BlockingPartition | None = None
        """None: there is no state to go on with."""
        self._paths, self._make_partition, self._closed = paths, make_partition, closed
        self._is_needed = is_needed

    @property
    def bytes(self) -> int:
        """The size of what it keeps."""
        return 0 if self.kept is None else self.kept.subpartitions[0].log.bytes

    # --- task ------------------------------------------------------------------------------------

    def take_over(self, chain: Chain) -> None:
        """Read the state of an earlier attempt, if there is any, and have the chain go on with it.

        Raises:
            TaskCancelled: meanwhile.
            Exception: what a function of the user raises as its state is read.
        """
        try:
            snapshot = self._read()
        except TaskCancelled:
            raise
        except (ShuffleError, pa.ArrowException, OSError) as error:
            self.lost = described(error)
            return
        if snapshot is not None:
            chain.restore(snapshot)

    def take_snapshot(self) -> TaskStateSnapshot | None:
        """The oldest snapshot that the holder of the subtask's snapshots has; None: it begins from the
        beginning.

        Raises:
            StateLost: there have been some, and this holder has none.
            ShuffleError, OSError, ArrowException: it cannot be read; another attempt tries again.
            TaskCancelled: meanwhile.
        """
        snapshot = self._read()
        if snapshot is not None and snapshot != TaskStateSnapshot():
            return snapshot
        if self._is_needed:
            raise StateLost(
                "it was lost together with the holder of its snapshots, before another one had any that it "
                "can go on from"
            )
        return None

    def _read(self) -> TaskStateSnapshot | None:
        """The state that an earlier attempt or the holder has; None: there is neither."""
        if self.earlier is None:
            return None
        try:
            return unpack_state(self.earlier.read())
        finally:
            self._paths.post(self._close_earlier)

    def _close_earlier(self) -> None:
        """(Loop.) Its memory is free from now on."""
        earlier, self.earlier = self.earlier, None
        if earlier is not None:
            earlier.gate.close()
            self._closed()

    def hand_on(self, chain: Chain) -> None:
        """The chain stands at the barrier of a move: keep all of its state.

        Raises:
            TaskCancelled: meanwhile.
        """
        try:
            self.kept = self._written(chain)
        except TaskCancelled:
            raise
        except Exception as error:  # as for a value that no row may have, a set for one: it moves without
            self.lost = described(error)
        else:
            self.moved = True

    def _written(self, chain: Chain) -> BlockingPartition | None:
        snapshot = chain.snapshot()
        if missing := chain.left_out(snapshot):
            raise ResourceExhausted(f"what {', '.join(missing)} holds cannot be taken along")
        partition: BlockingPartition | None = None
        try:
            for element in pack_state(snapshot):
                self._paths.check()
                if partition is None:
                    partition = self._make_partition()
                partition.write(0, 1, element)
        except BaseException:
            if partition is not None:
                partition.release(False)
            raise
        if partition is not None:
            partition.finish()
        return partition

    def go_on(self) -> None:
        """The barrier has ended: it goes on itself."""
        kept, self.kept, self.moved = self.kept, None, False
        if kept is not None:
            kept.release(False)
