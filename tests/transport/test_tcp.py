"""The TCP shell against peers without the secret, silent ones and too many; what goes well is the
conformance suite's."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address, JobId, PartitionId
from minishuffle.protocol.connection import PeerSilent
from minishuffle.wire.frames import AddCredit, Hello, PartitionRequest, Ping, Pong, Role, encode_frame
from minishuffle.wire.handshake import HandshakeRefused, Identity

if TYPE_CHECKING:
    from conftest import Site

HOST = "127.0.0.1"
REQUEST = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=1, initial_credit=2)

RunSite = Callable[..., None]


def worker(number: int, epoch: int | None = None) -> Identity:
    return Identity(Role.WORKER, "test", number, number if epoch is None else epoch)


def beyond_handshake(frames: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in frames.items() if name not in ("hello", "welcome", "reject")}


@pytest.mark.parametrize(
    ("host", "reason"), [("nosuch.invalid", ".+"), ("192.0.2.1", "Cannot assign requested address")]
)
def test_listening_where_this_machine_is_not_names_host_and_flag(
    run_site: RunSite, host: str, reason: str
) -> None:
    async def scenario(site: Site) -> None:
        expected = rf"^cannot listen on {host}:0: {reason}; choose another address with --host$"
        with pytest.raises(UsageError, match=expected) as caught:
            await site.endpoint(worker(3), site.handler).listen(host)
        assert "Errno" not in str(caught.value) and "Unknown error" not in str(caught.value)

    run_site(scenario)


# --- the secret -----------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_on_both_sides(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        with pytest.raises(HandshakeRefused, match="do not have the same secret") as refused:
            await site.dial(secret=b"another")
        assert refused.value.reason == "secret"
        await site.until(lambda: site.handler.refusals)
        assert site.handler.reasons == site.dialing.reasons == ["secret"]
        assert len(site.handler.up) == 1
        assert site.handler.down == []
        await site.works(link)

    run_site(scenario)


def test_nothing_behind_an_unproved_hello_is_read(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        hello = Hello(Role.WORKER, "test", 1, 1, 2, bytes(32))
        peer.send(encode_frame(hello))
        await peer.reader.readexactly(20)
        unproved = encode_frame(replace(hello, proof=bytes(32)))
        peer.send(unproved + encode_frame(REQUEST) + encode_frame(Ping(1)))
        await peer.until_closed()
        assert site.handler.reasons == ["secret"]
        assert (site.handler.up, site.handler.events) == ([], [])
        assert site.counters.frames_in == {"hello": 2}

    run_site(scenario)


@pytest.mark.parametrize(
    "frame", [REQUEST, Ping(1), AddCredit(((1, 1),))], ids=lambda frame: type(frame).__name__
)
def test_no_other_frame_is_read_before_hello(run_site: RunSite, frame: Any) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        peer.send(encode_frame(frame))
        await peer.until_closed()
        assert site.handler.reasons == ["malformed"]
        assert (site.handler.up, site.handler.events) == ([], [])
        assert beyond_handshake(site.counters.frames_in) == {}

    run_site(scenario)


def test_a_peer_that_is_proved_and_not_welcome_learns_why(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        site.handler.unwelcome = "worker 1 is connected already"
        with pytest.raises(HandshakeRefused, match="worker 1 is connected already") as refused:
            await site.dial()
        assert refused.value.reason == "peer"
        assert site.handler.reasons == ["peer"]
        assert site.handler.up == []

    run_site(scenario)


@pytest.mark.parametrize(
    ("target", "epoch", "message"),
    [(2, 1, "epoch 1 was dialed, epoch 2 answers"), (3, None, "worker 3 was dialed, but worker 2 answers")],
)
def test_another_worker_than_the_one_that_was_dialed_is_refused(
    run_site: RunSite, target: int, epoch: int | None, message: str
) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(HandshakeRefused, match=message):
            await site.dial(target=target, epoch=epoch)
        assert site.dialing.reasons == ["peer"]
        assert site.dialing.up == []

    run_site(scenario)


# --- silence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", encode_frame(Hello(Role.WORKER, "test", 7, 7, 2, bytes(32)))[:20]])
def test_a_peer_that_does_not_finish_its_handshake_is_sent_away(run_site: RunSite, said: bytes) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        peer.send(said)
        assert await peer.until_closed() == b""
        assert site.handler.refusals[0][:2] == ("timeout", "no handshake within 0.05 s")
        assert len(site.handler.refusals) == 1

    run_site(scenario, handshake_seconds=0.05)


def test_dialing_somebody_who_says_nothing_ends_in_time(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        endpoint = site.endpoint(worker(1), site.dialing, handshake_seconds=0.05)
        with socket.create_server((HOST, 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(PeerLost, match="no handshake within 0.05 s|cannot be reached"):
                await endpoint.dial(Address(HOST, port), 2, 2)
            await site.until(lambda: not len(endpoint.dialing))

    run_site(scenario)


def test_dialing_a_host_whose_name_cannot_be_one_is_like_one_that_is_not_there(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        endpoint = site.endpoint(worker(1), site.dialing)
        with pytest.raises(PeerLost, match="worker 2 cannot be reached: cannot connect to a..b:1"):
            await endpoint.dial(Address("a..b", 1), 2, 2)

    run_site(scenario)


def test_dialing_where_nobody_listens_names_worker_and_address(run_site: RunSite) -> None:
    """Case 102, RemoteInputChannelTest."""

    async def scenario(site: Site) -> None:
        with socket.create_server((HOST, 0)) as taken:
            port = taken.getsockname()[1]
        endpoint = site.endpoint(worker(1), site.dialing)
        with pytest.raises(
            PeerLost, match=f"worker 2 cannot be reached: .*{HOST}:{port}: Connection refused"
        ):
            await endpoint.dial(Address(HOST, port), 2, 2)

    run_site(scenario)


def test_dialing_somebody_who_hangs_up_is_told(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(hang_up, HOST, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = site.endpoint(worker(1), site.dialing)
            with pytest.raises(PeerLost, match=f"{HOST}:{port} closed the connection during the handshake"):
                await endpoint.dial(Address(HOST, port), 2, 2)

    run_site(scenario)


def test_an_established_peer_that_is_silent_is_pinged_and_then_reported(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        await peer.prove(worker(7))
        await site.until(lambda: site.handler.up)
        ping = await peer.reader.readexactly(len(encode_frame(Ping(1))))
        assert ping == encode_frame(Ping(1))
        await site.until(lambda: site.handler.events)
        assert isinstance(site.handler.events[0], PeerSilent)

    run_site(scenario, ping_interval=0.05)


def test_a_peer_that_answers_its_pings_is_not_reported(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        await site.dial()
        await site.until(lambda: site.counters.frames_in.get("pong", 0) >= 5)
        assert site.handler.events == []

    run_site(scenario, ping_interval=0.05)


def test_only_a_worker_is_reported_after_so_short_a_silence(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        program, peer = await site.peer(), await site.peer()
        await program.prove(Identity(Role.CLIENT, "test", 1, 1))
        await peer.prove(worker(7))
        await site.until(lambda: site.handler.events)
        (event,) = site.handler.events
        assert isinstance(event, PeerSilent) and event.seconds >= 0.2
        assert site.counters.frames_out["ping"] == 1

    run_site(scenario, ping_interval=60.0, suspect_after=0.2)


# --- limits and ends ------------------------------------------------------------------------------------


def test_the_oldest_unproven_connection_makes_room(
    run_site: RunSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED_CONNECTIONS_MAX", 3)

    async def scenario(site: Site) -> None:
        waiting = []
        for number in range(3):
            waiting.append(await site.peer())
            await site.until(lambda: len(site.endpoints[0].unproven) == number + 1)  # noqa: B023
        await site.works(await site.dial())
        assert await waiting[0].until_closed() == b""
        assert site.handler.reasons == ["limit"]
        await waiting[1].prove(worker(7))
        await site.until(lambda: len(site.handler.up) == 2)
        assert site.handler.reasons == ["limit"]

    run_site(scenario)


def test_a_process_that_dials_takes_no_place_of_those_that_it_accepts(
    run_site: RunSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED_CONNECTIONS_MAX", 1)

    async def scenario(site: Site) -> None:
        endpoint = site.endpoint(worker(1), site.dialing)
        with socket.create_server((HOST, 0)) as silent:
            address = Address(HOST, silent.getsockname()[1])
            dials = [asyncio.ensure_future(endpoint.dial(address, 2, 2)) for _ in range(3)]
            await site.until(lambda: len(endpoint.dialing) == 3)
            assert site.dialing.reasons == []
            await endpoint.close()
            await asyncio.gather(*dials, return_exceptions=True)

    run_site(scenario)


def test_connections_that_are_refused_leave_no_memory(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        tracemalloc.start()
        try:
            peers = [await site.peer() for _ in range(30)]
            await site.until(lambda: len(site.endpoints[0].unproven) == 30)
            for peer in peers:
                peer.send(b"GET / HTTP/1.1\r\n\r\n")
                await peer.until_closed()
            assert site.handler.reasons == ["malformed"] * 30
            assert tracemalloc.get_traced_memory()[1] < 8 * limits.RECEIVE_BUFFER_BYTES
        finally:
            tracemalloc.stop()
        await site.works(await site.dial())

    run_site(scenario)


def test_closing_an_endpoint_tells_its_peers_and_stops_listening(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        await site.dial()
        silent = await site.peer()
        await site.until(lambda: len(site.endpoints[0].unproven) == 1)
        await site.endpoints[0].close()
        assert await silent.until_closed() == b""
        await site.until(lambda: site.dialing.down)
        assert "worker 2 closed the connection" in str(site.dialing.down[0])
        assert "closed on this side" in str(site.handler.down[0])
        endpoint = site.endpoint(worker(1), site.dialing)
        with pytest.raises(PeerLost, match="cannot be reached"):
            await endpoint.dial(site.address, 2, 2)

    run_site(scenario)


def test_both_ends_count_the_same_bytes(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        await site.works(link)
        dialing = site.endpoints[1].counters
        await site.until(lambda: site.counters.bytes_in == dialing.bytes_out)
        await site.until(lambda: site.counters.bytes_out == dialing.bytes_in)
        assert site.counters.frames_in == dialing.frames_out == {"hello": 2, "partition_request": 1}
        assert site.counters.frames_out == dialing.frames_in == {"hello": 2, "welcome": 1, "error": 1}

    run_site(scenario)


# --- turns ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_peer_that_floods_takes_one_read_in_a_turn_of_the_loop(run_site: RunSite) -> None:
    """Else heartbeats wait for it, and the worker is taken for lost."""
    flood = encode_frame(Pong(1)) * 100_000
    assert len(flood) > 3 * limits.RECEIVE_BUFFER_BYTES

    async def scenario(site: Site) -> None:
        peer = await site.peer()
        await peer.prove(worker(1))
        await site.until(lambda: site.handler.up)
        before = seen = site.counters.bytes_in
        peer.send(flood)
        most = 0
        while seen < before + len(flood):
            await asyncio.sleep(0)
            most, seen = max(most, site.counters.bytes_in - seen), site.counters.bytes_in
        assert 0 < most <= limits.RECEIVE_BUFFER_BYTES

    run_site(scenario)
