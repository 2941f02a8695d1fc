"""One end of the transport and exchange benchmarks: ``python -m minishuffle.bench.peer ROLE [FILES]``.

ROLE is ``producer`` or ``consumer``; with three FILES, of a certificate, its key and the CA, connections use
TLS. A process reads one JSON command a line on standard input and
answers each with one JSON line; it ends at once when its standard input does. The full protocol is spoken
between the two: handshake with authentication, PartitionRequest, credits, BufferResponse.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import uvloop

from minishuffle import limits
from minishuffle.config import TlsFiles
from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.exchange.channels import QueuedEvent
from minishuffle.exchange.elements import ELEMENT_HEADER, AssemblyBudget, ElementFormat, pack_header
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import Address, JobId, PartitionId
from minishuffle.protocol.channel import NextType, Outgoing, Received
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import (
    NO_ELEMENT_START,
    CancelReason,
    DataType,
    EventKind,
    PartitionRequest,
    Role,
)
from minishuffle.wire.handshake import Identity
from minishuffle.worker.tasks.handoff import LoopInbox, TaskPaths

SECRET: Final = b"benchmark on loopback"
RING_BLOCKS: Final = 64
WAIT_SECONDS_MAX: Final = 120.0


def word_sum(view: memoryview | np.ndarray[Any, Any]) -> int:
    """Sum of the 64-bit words of ``view`` (a multiple of 8 bytes long), modulo 2**64."""
    return int(np.frombuffer(view, dtype=np.uint64).sum())


class Blocks:
    """A ring of filled blocks whose first word is stamped anew at each use, so that payloads differ."""

    def __init__(self, block_bytes: int, headroom: int) -> None:
        random = np.random.default_rng(7)
        self.views: list[memoryview] = []
        self._words: list[np.ndarray[Any, Any]] = []
        self._rest: list[int] = []
        for _ in range(RING_BLOCKS):
            block = np.zeros(headroom + block_bytes, dtype=np.uint8)
            words = block[headroom:].view(np.uint64)
            words[:] = random.integers(0, 2**63, len(words), dtype=np.uint64)
            words[0] = 0
            self.views.append(memoryview(block.data))
            self._words.append(words)
            self._rest.append(int(words.sum()))
        self.sum = 0

    def stamp(self, slot: int, value: int) -> memoryview:
        self._words[slot][0] = value
        self.sum = (self.sum + self._rest[slot] + value) & 0xFFFF_FFFF_FFFF_FFFF
        return self.views[slot]


class _RingSlice:
    """A block of the ring on its way out."""

    __slots__ = (
        "_free",
        "_slot",
        "backlog",
        "data_type",
        "first_start",
        "flags",
        "memory",
        "next_type",
        "row",
        "rows",
        "shared",
        "size",
        "start",
    )

    def __init__(
        self, memory: memoryview, start: int, data_type: int, free: list[int], slot: int, *, row: int
    ) -> None:
        self.memory, self.start, self.size, self.data_type = memory, start, len(memory) - start, data_type
        self.flags, self.first_start, self.row, self.rows = 0, NO_ELEMENT_START, row, 1
        self.shared = False
        self.next_type, self.backlog = NextType.NONE, 0
        self._free, self._slot = free, slot

    def released(self) -> None:
        if self._slot >= 0:
            self._free.append(self._slot)


class _RingView:
    """A subpartition's view that gives ``count`` blocks of the shared ring, then its end."""

    def __init__(self, blocks: Blocks, free: list[int], count: int) -> None:
        self._blocks, self._free, self._count, self._ended = blocks, free, count, False
        self._sent = 0

    def hold(self) -> None:
        """Nothing here is partial."""

    def resize(self, size: int) -> None:
        """All blocks have one size."""

    def resume(self, barrier: int) -> None:
        """No barrier comes."""

    def make_stable(self, version: int, row: int) -> None:
        """There are no snapshots."""

    def next_type(self) -> NextType:
        if self._count:
            return NextType.DATA if self._free else NextType.NONE
        return NextType.NONE if self._ended else NextType.EVENT

    def backlog(self) -> int:
        return min(self._count, RING_BLOCKS)

    def poll(self, data: bool = True) -> Outgoing | None:
        if self._count and self._free and data:
            slot = self._free.pop()
            memory = self._blocks.stamp(slot, self._count)
            self._count -= 1
            start = limits.SEGMENT_HEADROOM_BYTES
            piece = _RingSlice(memory, start, DataType.DATA, self._free, slot, row=self._sent)
            self._sent += 1
            piece.next_type, piece.backlog = self.next_type(), self.backlog()
            return piece
        if self._count or self._ended:
            return None
        self._ended = True
        memory = memoryview(bytearray(limits.SEGMENT_HEADROOM_BYTES + 1))
        memory[-1] = EventKind.END_OF_PARTITION
        start = limits.SEGMENT_HEADROOM_BYTES
        return _RingSlice(memory, start, DataType.EVENT, self._free, -1, row=self._sent)

    def release(self, reason: CancelReason) -> None:
        self._count = 0


class Peer:
    """Common to both roles: the endpoint and the current measurement. Is the endpoint's handler."""

    def __init__(self, worker: int, tls: Credentials | None) -> None:
        self.tls = tls
        self.loop = asyncio.get_running_loop()
        self.counters = ConnectionCounters()
        self.endpoint = DataEndpoint(
            self, Identity(Role.WORKER, "bench", worker, 1), SECRET, self.counters, 60.0, tls=tls
        )
        self.inbox = LoopInbox(self.loop)
        self.link: DataLink | None = None
        self.on_request: Callable[[PartitionRequest], None] = lambda request: None
        self.linked = asyncio.Event()
        self.echoing: asyncio.Server | None = None

    def authorize(self, peer: Identity) -> str | None:
        return None

    def refused(self, reason: str, text: str, remote: str) -> None:
        raise ShuffleError(f"{remote}: {text}")

    def link_up(self, link: DataLink) -> None:
        self.link = link
        self.linked.set()

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        for event in events:
            if isinstance(event, PartitionRequested):
                self.on_request(event.request)

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        self.link = None


class Producer(Peer):
    """Serves the partition requests of one measurement."""

    async def dial(self, port: int) -> dict[str, Any]:
        await self.endpoint.dial(Address("127.0.0.1", port), 2, 1)
        return {}

    async def echo(self, port: int, rounds: int) -> dict[str, Any]:
        """Seconds of each of so many round trips, one after the other."""
        done: asyncio.Future[list[float]] = self.loop.create_future()
        await self.loop.create_connection(lambda: _Pings(rounds, done), "127.0.0.1", port)
        return {"seconds": await asyncio.wait_for(done, WAIT_SECONDS_MAX)}

    async def bare_tls(self, port: int, block_bytes: int, total_bytes: int, echoes: bool) -> dict[str, Any]:
        """Send whole blocks by the loop's own TLS; ``back`` is what came back of them."""
        assert self.tls is not None
        blocks, done = Blocks(block_bytes, 0), self.loop.create_future()
        await self.loop.create_connection(
            lambda: _Bare(done, blocks, total_bytes // block_bytes, echoes=echoes),
            "127.0.0.1",
            port,
            ssl=self.tls.current().dialing,
        )
        back = await asyncio.wait_for(done, WAIT_SECONDS_MAX)
        return {"sum": blocks.sum & 0xFFFF_FFFF_FFFF_FFFF, "back": back}

    async def transport(self, channels: int, segment_bytes: int, buffers: int) -> dict[str, Any]:
        """Loop only: views over a ring of blocks."""
        blocks, link = Blocks(segment_bytes, limits.SEGMENT_HEADROOM_BYTES), self.link
        assert link is not None
        free = list(range(RING_BLOCKS))
        served = 0
        done: asyncio.Future[None] = self.loop.create_future()

        def attach(request: PartitionRequest) -> None:
            nonlocal served
            link.connection.attach(request.channel, _RingView(blocks, free, buffers // channels))
            link.flush_soon()
            served += 1
            if served == channels:
                done.set_result(None)

        self.on_request = attach
        print(json.dumps({"ready": True}), flush=True)
        await asyncio.wait_for(done, WAIT_SECONDS_MAX)
        return {"blocks": blocks}

    async def exchange(self, channels: int, segment_bytes: int, buffers: int) -> dict[str, Any]:
        """A writer thread fills every byte of every element."""
        link = self.link
        assert link is not None
        pool = NetworkBufferPool(2 * channels + 64, segment_bytes)
        paths = TaskPaths(self.inbox)
        local = pool.create_pool("bench", channels + 1, 2 * channels + 8)
        local.on_available(paths.bell.ring)
        partition = PipelinedPartition(
            PartitionId(JobId("bench"), 0, 0),
            range(channels),
            lambda: paths.acquire(local),
            paths.notify,
            TaskCounters(),
        )
        attached = threading.Semaphore(0)

        def attach(request: PartitionRequest) -> None:
            serve(link, request, partition.subpartitions[request.subpartition])
            attached.release()

        self.on_request = attach
        sums: list[int] = []

        def write() -> None:
            for _ in range(channels):
                attached.acquire(timeout=WAIT_SECONDS_MAX)
            words = (segment_bytes - ELEMENT_HEADER.size) // 8
            template = np.random.default_rng(7).integers(0, 2**62, words, dtype=np.uint64)
            element = np.empty(words, dtype=np.uint64)
            header = pack_header(words * 8, 1, ElementFormat.ROWS)
            rest, total = int(template.sum()), 0
            view = memoryview(element.data).cast("B")
            for number in range(buffers):
                np.add(template, np.uint64(number), out=element)
                total += rest + number * words
                partition.write(number % channels, 1, [header, view])
            partition.finish()
            sums.append(total & 0xFFFF_FFFF_FFFF_FFFF)

        thread = threading.Thread(target=write)
        thread.start()
        print(json.dumps({"ready": True}), flush=True)
        return {"thread": thread, "sums": sums}


class Consumer(Peer):
    """Requests the partitions of one measurement and reads them to their ends."""

    received: asyncio.Future[dict[str, Any]]
    """What comes by the loop's own TLS."""

    async def listen(self) -> dict[str, Any]:
        return {"port": await self.endpoint.listen("127.0.0.1")}

    async def echo(self) -> dict[str, Any]:
        """Listen, and send back whatever comes."""
        self.echoing = await self.loop.create_server(_Echo, "127.0.0.1", 0)
        return {"port": self.echoing.sockets[0].getsockname()[1]}

    async def bare_tls_port(self, echoes: bool) -> dict[str, Any]:
        """Listen by the loop's own TLS for one connection that sends blocks."""
        assert self.tls is not None
        self.received = self.loop.create_future()
        server = await self.loop.create_server(
            lambda: _Bare(self.received, None, 0, echoes=echoes),
            "127.0.0.1",
            0,
            ssl=self.tls.current().accepting,
        )
        self.received.add_done_callback(lambda _: server.close())
        return {"port": server.sockets[0].getsockname()[1]}

    async def bare_tls(self) -> dict[str, Any]:
        """What was received, of which every byte was read."""
        return await asyncio.wait_for(self.received, WAIT_SECONDS_MAX)

    def gate(self, channels: int, segment_bytes: int, wake: Callable[[], None], give_back: Any) -> InputGate:
        exclusive = limits.BUFFERS_PER_CHANNEL_DEFAULT
        reserved = channels * exclusive
        pool = NetworkBufferPool(reserved + 64, segment_bytes)
        local = pool.create_pool("bench", reserved + 1, reserved + limits.FLOATING_BUFFERS_PER_GATE_DEFAULT)
        floating = limits.FLOATING_BUFFERS_PER_GATE_DEFAULT
        gate = InputGate(
            0,
            0,
            GateBuffers(local, segment_bytes, exclusive, floating),
            wake=wake,
            give_back=give_back,
            budget=AssemblyBudget(limits.ASSEMBLY_BYTES_MAX),
            counters=TaskCounters(),
        )
        link = self.link
        assert link is not None
        for number in range(channels):
            request = PartitionRequest(PartitionId(JobId("bench"), 0, 0), number)
            gate.add_channel(0).attach_remote(link, request)
        return gate

    async def transport(self, channels: int, segment_bytes: int, buffers: int) -> dict[str, Any]:
        """Loop only: every buffer is read and given back as it comes."""
        await asyncio.wait_for(self.linked.wait(), WAIT_SECONDS_MAX)
        total = received = ended = 0
        done: asyncio.Future[None] = self.loop.create_future()
        gates: list[InputGate] = []

        def drain() -> None:
            nonlocal total, received, ended
            gate = gates[0]
            line = gate.ready.line
            while line:
                channel = line[0]
                while channel.queue:
                    item = channel.queue.popleft()
                    if isinstance(item, Received):
                        payload = item.payload
                        total += word_sum(payload)
                        received += len(payload)
                        item.attachment.consumed(item)
                    else:
                        assert isinstance(item, QueuedEvent), item
                        ended += 1
                gate.ready.end_turn(channel)
            if ended == channels and not done.done():
                done.set_result(None)

        gates.append(self.gate(channels, segment_bytes, drain, None))
        begin = time.perf_counter()
        await asyncio.wait_for(done, WAIT_SECONDS_MAX)
        seconds = time.perf_counter() - begin
        gates[0].close()
        return {"bytes": received, "seconds": seconds, "sum": total & 0xFFFF_FFFF_FFFF_FFFF}

    async def exchange(self, channels: int, segment_bytes: int, buffers: int) -> dict[str, Any]:
        """A reader thread reads every byte of every element."""
        await asyncio.wait_for(self.linked.wait(), WAIT_SECONDS_MAX)
        paths = TaskPaths(self.inbox)
        gate = self.gate(channels, segment_bytes, paths.bell.ring, paths.give_back)

        def read() -> tuple[int, int]:
            total = received = 0
            while not gate.finished:
                paths.bell.clear()
                element = gate.poll()
                if element is None:
                    if not gate.finished:
                        paths.wait(1.0)
                    continue
                total += word_sum(element.payload)
                received += len(element.payload)
            return total, received

        begin = time.perf_counter()
        total, received = await asyncio.wait_for(asyncio.to_thread(read), WAIT_SECONDS_MAX)
        seconds = time.perf_counter() - begin
        gate.close()
        return {"bytes": received, "seconds": seconds, "sum": total & 0xFFFF_FFFF_FFFF_FFFF}


# --- a plain echo ---------------------------------------------------------------------------------

ECHO_BYTES: Final = 64


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


class _Pings(asyncio.Protocol):
    """Sends ``ECHO_BYTES`` again as soon as they are back."""

    def __init__(self, rounds: int, done: asyncio.Future[list[float]]) -> None:
        self._rounds = rounds
        self._done = done
        self._seconds: list[float] = []
        self._back = 0
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(bytes(ECHO_BYTES))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._back += len(data)
        if self._back < ECHO_BYTES:
            return
        self._seconds.append(time.perf_counter() - self._sent_at)
        self._back = 0
        if len(self._seconds) < self._rounds:
            self._send()
        else:
            self._transport.close()
            self._done.set_result(self._seconds)


# --- the loop's own TLS ---------------------------------------------------------------------------

BARE_BLOCKS: Final = limits.FLUSH_SEGMENTS_MAX
"""Given to the transport at once, as in a flush of a connection."""


class _Bare(asyncio.BufferedProtocol):
    """One end of a connection by which blocks go, and with ``echoes`` come back; reads every byte of what it
    receives. The end that has blocks closes the connection."""

    def __init__(
        self, done: asyncio.Future[dict[str, Any]], blocks: Blocks | None, count: int, *, echoes: bool
    ) -> None:
        self._done, self._blocks, self._count, self._echoes = done, blocks, count, echoes
        self._buffer = memoryview(bytearray(limits.RECEIVE_BUFFER_BYTES))
        self._filled = self._received = self._sum = self._due = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._begin = time.perf_counter()
        self._send()

    def _send(self) -> None:
        while self._blocks is not None and self._count and not self._paused:
            some = range(self._count, max(0, self._count - BARE_BLOCKS), -1)
            pieces = [self._blocks.stamp(each % RING_BLOCKS, each) for each in some]
            self._due += sum(map(len, pieces))
            self._transport.writelines(pieces)
            self._count -= len(some)
        self._end()

    def _end(self) -> None:
        """Close the connection if all was sent, and is back."""
        if self._blocks is None or self._count:
            return
        if not self._echoes or self._received + self._filled == self._due:
            self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._echoes and self._blocks is None:
            self._transport.write(bytes(self._buffer[self._filled : self._filled + nbytes]))
        self._filled += nbytes
        if self._filled == len(self._buffer):
            self._read()
        self._end()

    def _read(self) -> None:
        self._sum += word_sum(self._buffer[: self._filled])
        self._received += self._filled
        self._filled = 0

    def pause_writing(self) -> None:
        self._paused = True
        if self._blocks is None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._blocks is None:
            self._transport.resume_reading()
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._read()
        seconds = time.perf_counter() - self._begin
        total = self._sum & 0xFFFF_FFFF_FFFF_FFFF
        self._done.set_result({"bytes": self._received, "seconds": seconds, "sum": total})


# --- the raw socket, blocking ---------------------------------------------------------------------


def raw_consumer(listener: socket.socket, block_bytes: int, total_bytes: int) -> dict[str, Any]:
    """Receive whole blocks and read every byte of them."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        block = memoryview(bytearray(block_bytes))
        total = received = 0
        begin = time.perf_counter()
        while received < total_bytes:
            filled = 0
            while filled < block_bytes:
                size = connection.recv_into(block[filled:])
                if not size:
                    raise ShuffleError("the raw producer closed early")
                filled += size
            total += word_sum(block)
            received += block_bytes
        seconds = time.perf_counter() - begin
    return {"bytes": received, "seconds": seconds, "sum": total & 0xFFFF_FFFF_FFFF_FFFF}


def raw_producer(port: int, block_bytes: int, total_bytes: int) -> dict[str, Any]:
    """Send whole blocks with ``sendall``."""
    blocks = Blocks(block_bytes, 0)
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS_MAX) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(total_bytes // block_bytes):
            connection.sendall(blocks.stamp(number % RING_BLOCKS, number))
    return {"sum": blocks.sum}


async def _commands(role: str, *files: str) -> None:
    tls = Credentials(TlsFiles(*files)) if files else None
    peer = Producer(1, tls) if role == "producer" else Consumer(2, tls)
    listener = socket.create_server(("127.0.0.1", 0))
    pending: dict[str, Any] = {}
    commands: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in open(sys.stdin.fileno(), closefd=False):  # noqa: SIM115
            peer.loop.call_soon_threadsafe(commands.put_nowait, line)
        os._exit(0)  # In the middle of a measurement too: the parent is gone.

    threading.Thread(target=read, daemon=True).start()
    try:
        while line := await commands.get():
            command = json.loads(line)
            name = command.pop("do")
            if name == "raw_port":
                answer = {"port": listener.getsockname()[1]}
            elif name == "raw":
                call: Callable[..., Any] = raw_producer if role == "producer" else raw_consumer
                first = command.pop("port") if role == "producer" else listener
                answer = await asyncio.to_thread(call, first, **command)
            elif name == "sum":
                if "thread" in pending:
                    await asyncio.to_thread(pending["thread"].join, WAIT_SECONDS_MAX)
                    answer = {"sum": pending["sums"][0]}
                else:
                    answer = {"sum": pending["blocks"].sum}
            else:
                answer = await getattr(peer, name)(**command)
                if role == "producer" and name in ("transport", "exchange"):
                    pending = answer
                    continue
            print(json.dumps(answer), flush=True)
    finally:
        listener.close()
        await peer.endpoint.close()


if __name__ == "__main__":
    uvloop.run(_commands(*sys.argv[1:]))
