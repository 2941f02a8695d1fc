"""One set of books: a worker's ``/metrics`` says what really crossed its socket, byte for byte."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.cli.demo import Samples, scrape, total
from minishuffle.config import HASH_SEED, ClusterSettings, create_secret, hash_seed
from minishuffle.coordinator.scheduling.placement import deployments
from minishuffle.exchange.elements import unpack_rows
from minishuffle.ids import Address
from minishuffle.launch import Child, settings_flags, spawn, stop_children, wait_until_ready
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.transport.control import ControlLink, ControlServer
from minishuffle.wire.decoder import FrameDecoder
from minishuffle.wire.frames import (
    BUFFER_FIXED_BYTES,
    BufferHeader,
    DataType,
    Frame,
    FrameType,
    PartitionRequest,
    Role,
)
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    Acknowledge,
    ControlMessage,
    Heartbeat,
    ReleaseJob,
    WorkerAddress,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import AttemptReport, Collected, Fact, TaskStateChanged

CLUSTER = "books"
HOST = "127.0.0.1"
SECONDS_MAX = 40.0
SETTINGS = ClusterSettings(segment_bytes=4096, suspect_after=4.0)

pytestmark = pytest.mark.timeout(120)


@dataclass
class Recording:
    """One direction of a connection, counted anew from its bytes with the codec alone."""

    size: int = 0
    frames: Counter[str] = field(default_factory=Counter)
    data_buffers: int = 0
    credits: int = 0
    raw: bytearray = field(default_factory=bytearray)

    def count(self) -> Recording:
        """Decode all that was recorded; whatever is left over at its end would be a frame cut short."""
        self.size = len(self.raw)
        decoder = FrameDecoder(self, limits.DATA_FRAME_BYTES_MAX)
        decoder.receive(bytes(self.raw))
        for kind in FrameType:
            self.frames[kind.name.lower()] += decoder.counts[kind]
        self.frames = +self.frames
        assert sum(self.frames.values())
        return self

    # --- the decoder's sink ----------------------------------------------------------------------

    def frame(self, frame: Frame) -> None:
        if isinstance(frame, PartitionRequest):
            self.credits += frame.initial_credit

    def credit(self, channel: int, credit: int) -> None:
        self.credits += credit

    def buffer_begin(self, header: BufferHeader) -> memoryview:
        length, _, _, _, _, data_type, *_ = header
        self.data_buffers += data_type == DataType.DATA
        return memoryview(bytearray(length - BUFFER_FIXED_BYTES))

    def buffer_end(self) -> None:
        pass


class RecordingProxy:
    """Passes on one connection, and keeps what went through: ``there`` from the dialer, ``back`` to it."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.there, self.back = Recording(), Recording()
        self.connections = 0
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[RecordingProxy]:
        server = await asyncio.start_server(self._pass_on, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        yield self
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self.target.host, self.target.port)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._copy(reader, far_writer, self.there), self._copy(far_reader, writer, self.back)
            )

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Recording) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                seen.raw += data
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass
class Site:
    """Two real worker processes, with the test as their coordinator and a proxy between them."""

    links: dict[int, ControlLink] = field(default_factory=dict)
    about: dict[int, Register] = field(default_factory=dict)
    states: dict[tuple[int, int], str] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    rows: int = 0
    children: list[Child] = field(default_factory=list)
    proxy: RecordingProxy = field(default_factory=lambda: RecordingProxy(Address(HOST, 1)))

    def on_link(self, link: ControlLink) -> None:
        def on_message(message: ControlMessage, request: int) -> None:
            match message:
                case Register(requested_worker=worker):
                    self.links[worker], self.about[worker] = link, message
                    link.send(Registered(term=1, worker=worker, epoch=1, heartbeat_interval=0.5))
                case AttemptReport(number=number, facts=facts):
                    for fact in facts:
                        self.hear(fact)
                    link.send(Acknowledge(term=1, number=number))
                case Heartbeat():
                    pass

        link.start(on_message, lambda error: None)

    def hear(self, fact: Fact) -> None:
        match fact:
            case TaskStateChanged(state=state, error=error):
                self.states[fact.attempt.subtask.key] = state
                self.errors += [error] if error else []
            case Collected(payload=payload):
                self.rows += len(unpack_rows(payload))

    def address(self, worker: int, port: int) -> WorkerAddress:
        return WorkerAddress(worker=worker, epoch=1, host=HOST, data_port=port)

    def deploy(self, stream: Stream[Any], settings: JobSettings) -> None:
        """With two subtasks of everything, one on each worker; worker 1 dials worker 2 by the proxy."""
        graph = compile_job(stream, parallelism=2, settings=settings)
        addresses = [self.address(1, self.about[1].data_port), self.address(2, self.proxy.port)]
        for worker, message in deployments(graph, (1, 2), addresses, term=1, job="j1", name="books").items():
            self.links[worker].send(message)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not condition():
                assert not self.errors, f"while waiting for {what}: {self.errors[0].text}"
                await asyncio.sleep(0.01)

    async def metrics(self, worker: int) -> Samples:
        target = Address(HOST, self.about[worker].metrics_port)
        return await asyncio.to_thread(scrape, [target])


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    secret = create_secret(tmp_path / "secret")
    site, server = Site(), ControlServer()
    refused: list[str] = []
    await server.start(
        HOST,
        0,
        Identity(Role.COORDINATOR, CLUSTER, 0, 0),
        secret,
        on_link=site.on_link,
        refused=lambda reason, text, remote: refused.append(text),
    )
    async with AsyncExitStack() as stack:
        try:
            for worker in (1, 2):
                arguments = ["--cluster", CLUSTER, "--secret-file", str(tmp_path / "secret")]
                arguments += [
                    "--coordinator",
                    f"{HOST}:{server.port}",
                    "worker",
                    "start",
                    "--id",
                    str(worker),
                ]
                flags = settings_flags(SETTINGS)
                hashes = {HASH_SEED: hash_seed(secret)}
                child = spawn(f"worker-{worker}", [*arguments, *flags], tmp_path, environment=hashes)
                site.children.append(child)
            deadline = asyncio.get_running_loop().time() + SECONDS_MAX
            for child in site.children:
                await asyncio.to_thread(wait_until_ready, child, deadline)
            site.proxy = RecordingProxy(Address(HOST, site.about[2].data_port))
            await stack.enter_async_context(site.proxy.listening())
            assert len({os.getpid(), *(about.pid for about in site.about.values())}) == 3
            yield site
            assert refused == []
        finally:
            await asyncio.to_thread(stop_children, site.children, 10.0)
            await server.close()


async def idle(site: Site) -> None:
    """Wait until keep-alives have gone over the connection."""
    async with asyncio.timeout(SECONDS_MAX):
        while "pong" not in frames(await site.metrics(1), "in") | frames(await site.metrics(1), "out"):
            await asyncio.sleep(0.05)


async def at_rest(site: Site) -> dict[int, Samples]:
    """Metrics of both workers at a moment when nothing was under way before, between and after."""
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            sizes = len(site.proxy.there.raw), len(site.proxy.back.raw)
            found = {worker: await site.metrics(worker) for worker in (1, 2)}
            again = {worker: await site.metrics(worker) for worker in (1, 2)}
            if sizes == (len(site.proxy.there.raw), len(site.proxy.back.raw)) and all(
                books(found[worker]) == books(again[worker]) for worker in (1, 2)
            ):
                return found
            await asyncio.sleep(0.05)


BOOKS = (
    "minishuffle_frames_total",
    "minishuffle_network_bytes_total",
    "minishuffle_network_buffers_total",
    "minishuffle_credits_total",
)


def books(samples: Samples) -> Samples:
    return [sample for sample in samples if sample[0] in BOOKS]


def frames(samples: Samples, direction: str) -> dict[str, int]:
    """By frame type, without the zeros."""
    return {
        labels["type"]: int(value)
        for name, labels, value in samples
        if name == "minishuffle_frames_total" and labels["direction"] == direction and value
    }


def assert_booked(samples: Samples, received: Recording, sent: Recording) -> None:
    assert frames(samples, "in") == dict(received.frames)
    assert frames(samples, "out") == dict(sent.frames)
    for direction, recorded in (("in", received), ("out", sent)):
        of = {"path": "remote", "direction": direction}
        assert total(samples, "minishuffle_network_bytes_total", **of) == recorded.size
        assert total(samples, "minishuffle_network_buffers_total", **of) == recorded.data_buffers
    assert total(samples, "minishuffle_credits_total", direction="granted") == sent.credits
    assert total(samples, "minishuffle_credits_total", direction="received") == received.credits


@pytest.mark.slow
async def test_metrics_equal_the_recorded_connection(site: Site) -> None:
    records = 30_000
    numbers = Stream.generate(records=records)
    stream = numbers.key_by(lambda number: number % 997).count(emit="each").collect()
    site.deploy(stream, JobSettings(buffers_per_channel=1, floating_buffers_per_gate=2))
    await site.until(lambda: len(site.states) == 4 and set(site.states.values()) == {"finished"}, "the end")
    await site.until(lambda: site.rows == records, "every row")
    proxy = site.proxy
    await idle(site)
    for link in site.links.values():
        link.send(ReleaseJob(term=1, job="j1"))
    metrics = await at_rest(site)
    assert proxy.connections == 1
    there, back = proxy.there.count(), proxy.back.count()
    assert_booked(metrics[1], received=back, sent=there)
    assert_booked(metrics[2], received=there, sent=back)

    # The job did exercise what is compared: credits ran out and came again, both ways.
    for recorded in (there, back):
        assert recorded.frames["hello"] >= 1
        assert recorded.frames["partition_request"] == 1
        assert recorded.frames["add_credit"] > 0
        assert recorded.data_buffers > 3
        assert recorded.frames["buffer_response"] == recorded.data_buffers + 2  # the two end events
