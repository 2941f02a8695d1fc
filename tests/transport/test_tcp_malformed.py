"""Malformed bytes close the connection that they came over, and no other."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minishuffle import limits
from minishuffle.errors import PeerLost, RemoteProtocolError
from minishuffle.ids import JobId, PartitionId
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.frames import FRAME_HEADER, FrameType, Hello, PartitionRequest, Ping, Role, encode_frame
from minishuffle.wire.handshake import Handshake, HandshakeRefused, Identity

if TYPE_CHECKING:
    from conftest import Site

SECRET = b"the cluster's"
HOST = "127.0.0.1"
REQUEST = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=1, initial_credit=2)

RunSite = Callable[..., None]

MALFORMED = {
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "oversized": FRAME_HEADER.pack(limits.DATA_FRAME_BYTES_MAX + 1, FrameType.PING, 0) + bytes(16),
    "unknown": FRAME_HEADER.pack(5, 99, 0),
    "too short": FRAME_HEADER.pack(0, FrameType.PING, 0),
}
"""What is no frame at any time. The garbage's first four bytes are a length, too."""


def worker(number: int, epoch: int | None = None) -> Identity:
    return Identity(Role.WORKER, "test", number, number if epoch is None else epoch)


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_before_the_handshake_close_that_connection_alone(
    run_site: RunSite, data: bytes
) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        peer = await site.peer()
        peer.send(data)
        await peer.until_closed()
        (refusal,) = site.handler.refusals
        assert (refusal[0], refusal[2]) == (
            "malformed",
            f"{HOST}:{peer.writer.get_extra_info('sockname')[1]}",
        )
        await site.works(link)

    run_site(scenario)


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_after_the_handshake_close_that_connection_alone(
    run_site: RunSite, data: bytes
) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        peer = await site.peer()
        await peer.prove(worker(7))
        await site.until(lambda: len(site.handler.up) == 2)
        peer.send(encode_frame(REQUEST) + data)
        await peer.until_closed()
        await site.until(lambda: site.handler.down)
        (error,) = site.handler.down
        assert isinstance(error, RemoteProtocolError)
        assert site.handler.reasons == ["malformed"]
        await site.works(link)

    run_site(scenario)


def test_malformed_bytes_right_behind_the_last_hello_are_caught(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        handshake = Handshake(worker(7), SECRET, bytes(32), dialer=True, target=2)
        peer.send(handshake.start())
        proof = b""
        while not proof:
            proof = handshake.receive(await peer.reader.read(4096))
        peer.send(proof + encode_frame(Ping(3)) + MALFORMED["unknown"])
        await peer.until_closed()
        await site.until(lambda: site.handler.down)
        assert isinstance(site.handler.down[0], RemoteProtocolError)
        assert site.counters.frames_in == {"hello": 2, "ping": 1}

    run_site(scenario)


@pytest.mark.parametrize("proved", [False, True], ids=["before", "after"])
def test_a_truncated_frame_closes_that_connection_alone(run_site: RunSite, proved: bool) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        peer = await site.peer()
        if proved:
            await peer.prove(worker(7))
            await site.until(lambda: len(site.handler.up) == 2)
            peer.send(encode_frame(REQUEST)[:-3])
        else:
            peer.send(encode_frame(Hello(Role.WORKER, "test", 7, 7, 2, bytes(32)))[:-3])
        peer.writer.write_eof()
        await peer.until_closed()
        await site.until(lambda: not len(site.endpoints[0].unproven) and len(site.endpoints[0].links) == 1)
        assert [type(error) for error in site.handler.down] == ([PeerLost] if proved else [])
        assert site.handler.events == []
        await site.works(link)

    run_site(scenario)


def test_a_frame_may_come_byte_by_byte(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        await peer.prove(worker(7))
        for byte in encode_frame(replace(REQUEST, channel=0x8000_0001)):
            peer.send(bytes([byte]))
            await peer.writer.drain()
        await site.until(lambda: site.handler.events)
        answer = await peer.reader.readexactly(FRAME_HEADER.size)
        assert FRAME_HEADER.unpack(answer)[1:] == (FrameType.ERROR, 0x8000_0001)

    run_site(scenario)


async def refused_in_every_way(site: Site) -> None:
    """Garbage, silence, and peers that leave; before the handshake is complete and after it."""
    proved = len(site.handler.down) + 2
    for data in (*MALFORMED.values(), b"", encode_frame(Hello(Role.WORKER, "test", 7, 7, 2, bytes(32)))[:20]):
        peer = await site.peer()
        peer.send(data)
        if data in MALFORMED.values():
            await peer.until_closed()
        await peer.close()
    for data in (MALFORMED["garbage"], b""):
        peer = await site.peer()
        await peer.prove(worker(7))
        peer.send(data)
        if data:
            await peer.until_closed()
        await peer.close()
    with pytest.raises(HandshakeRefused):
        await site.dial(secret=b"another")
    await site.until(lambda: not len(site.endpoints[0].unproven) and len(site.handler.down) == proved)


def alive() -> list[object]:
    return [thing for thing in gc.get_objects() if isinstance(thing, DataLink | Handshake)]


def test_what_was_refused_leaves_nothing_behind(run_site: RunSite) -> None:
    """Without the garbage collector, which workers hardly ever let run."""

    async def scenario(site: Site) -> None:
        await refused_in_every_way(site)
        site.handler.forget()
        site.dialing.forget()
        gc.collect()
        before = alive()
        gc.disable()
        try:
            for _ in range(5):
                await refused_in_every_way(site)
                site.handler.forget()
            await asyncio.sleep(0)
            left = [thing for thing in alive() if not any(thing is known for known in before)]
        finally:
            gc.enable()
        assert left == []

    run_site(scenario)


@pytest.mark.parametrize("said", [0, 20, -1], ids=["nothing", "half a Hello", "no proof"])
def test_a_peer_that_leaves_in_the_middle_of_its_handshake_is_counted(run_site: RunSite, said: int) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        hello = encode_frame(Hello(Role.WORKER, "test", 7, 7, 2, bytes(32)))
        if said:
            peer.send(hello[:said] if said > 0 else hello)
        if said < 0:
            await peer.reader.readexactly(FRAME_HEADER.size)
        await site.until(lambda: len(site.endpoints[0].unproven))
        remote = "{}:{}".format(*peer.writer.get_extra_info("sockname"))
        await peer.close()
        await site.until(lambda: not len(site.endpoints[0].unproven))
        # One that said nothing at all only looked whether the port is open.
        text = f"{remote} closed the connection during the handshake"
        assert site.handler.refusals == ([("closed", text, remote)] if said else [])

    run_site(scenario)


def test_a_refusal_is_counted_once(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        await refused_in_every_way(site)
        reasons = Counter(site.handler.reasons)
        assert reasons == {"malformed": len(MALFORMED) + 1, "closed": 1, "secret": 1}
        assert site.dialing.reasons == ["secret"]

    run_site(scenario)
