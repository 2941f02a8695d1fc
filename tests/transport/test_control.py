"""Control links over real loopback sockets, on both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient, ControlServer, connect_control
from minishuffle.wire.control import encode_message
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import CancelTasks, ControlMessage
from minishuffle.wire.reports import AttemptReport, Collected
from minishuffle.wire.requests import Accepted, GetStatus, ListJobs
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Listener, Stranger

SECRET = b"a secret of the cluster"
COORDINATOR = Identity(Role.COORDINATOR, "blue", 0, 0)
WORKER = Identity(Role.WORKER, "blue", 0, 0)
CLIENT = Identity(Role.CLIENT, "blue", 0, 0)

Run = Callable[[Coroutine[Any, Any, None]], None]
MakeStranger = Callable[[Address], Awaitable["Stranger"]]


def collected(size: int) -> AttemptReport:
    return AttemptReport(term=1, facts=[Collected(attempt=attempt(), payload=bytes(size))])


def test_messages_go_both_ways(run: Run, make_listener: type[Listener]) -> None:
    async def main() -> None:
        listener = make_listener()
        link = await connect_control(await listener.start(), WORKER, SECRET, timeout=5)
        received: asyncio.Queue[tuple[ControlMessage, int]] = asyncio.Queue()
        ended: asyncio.Queue[Exception | None] = asyncio.Queue()
        link.start(lambda message, request: received.put_nowait((message, request)), ended.put_nowait)
        link.send(ListJobs(), 7)
        link.send(collected(3_000_000))
        assert await received.get() == (Accepted(job="j7"), 7)
        assert await listener.messages.get() == (ListJobs(), 7)
        assert await listener.messages.get() == (collected(3_000_000), 0)
        (other,) = listener.links
        other.send(CancelTasks(term=1, job="j1"))
        assert await received.get() == (CancelTasks(term=1, job="j1"), 0)
        assert (link.peer, other.peer) == (COORDINATOR, WORKER)
        assert (link.local, link.remote) == (other.remote, other.local)
        link.close()
        await link.wait_closed()
        await other.wait_closed()
        link.send(ListJobs())  # without effect
        assert await ended.get() is None
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_last_words_before_a_close_arrive(run: Run, make_listener: type[Listener]) -> None:
    async def main() -> None:
        listener = make_listener()
        link = await connect_control(await listener.start(), WORKER, SECRET, timeout=5)
        link.start(lambda message, request: None, lambda error: None)
        for _ in range(20):
            link.send(collected(500_000))
        link.close()
        for _ in range(20):
            assert (await listener.messages.get())[0] == collected(500_000)
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_messages_that_come_before_start_wait_for_it(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener(starts_links=False)
        stranger = await make_stranger(await listener.start())
        await stranger.prove(and_then=encode_message(ListJobs(), 0) + encode_message(GetStatus(), 0)[:9])
        stranger.writer.write(encode_message(GetStatus(), 0)[9:])
        listener.start_link(listener.links[0])
        assert await listener.messages.get() == (ListJobs(), 0)
        assert await listener.messages.get() == (GetStatus(), 0)
        stranger.close()
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_link_lost_before_start_still_tells_its_end(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener(starts_links=False)
        stranger = await make_stranger(await listener.start())
        await stranger.prove(and_then=encode_message(ListJobs(), 1))
        (link,) = listener.links
        link.close()
        await link.wait_closed()
        listener.start_link(link)
        assert await listener.ends.get() is None
        assert listener.ends.empty()
        stranger.close()
        await listener.server.close()

    run(main())


def test_broken_connection_is_told_from_a_closed_one(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        stranger = await make_stranger(await listener.start())
        await stranger.prove()
        sock = stranger.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00" + bytes(4))
        stranger.writer.transport.abort()
        error = await listener.ends.get()
        assert isinstance(error, PeerLost)
        assert "broke" in str(error)
        await listener.server.close()

    run(main())


def test_closing_the_server_closes_its_links_and_its_port(run: Run, make_listener: type[Listener]) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start()
        link = await connect_control(address, WORKER, SECRET, timeout=5)
        ended: asyncio.Queue[Exception | None] = asyncio.Queue()
        link.start(lambda message, request: None, ended.put_nowait)
        await listener.server.close()
        assert await ended.get() is None
        with pytest.raises(
            PeerLost, match=rf"cannot connect to {address}: Connection refused; .*--coordinator"
        ):
            await connect_control(address, WORKER, SECRET, timeout=5)
        with pytest.raises(PeerLost, match=f"cannot connect to {address}: Connection refused"):
            BlockingControlClient(address, CLIENT, SECRET, 5)

    run(main())


def test_taken_port_names_its_holder_and_the_flag(run: Run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            server = ControlServer()
            with pytest.raises(UsageError) as caught:
                await server.start("127.0.0.1", port, COORDINATOR, SECRET, on_link=print, refused=print)
            assert f"port {port} on 127.0.0.1 is taken by" in str(caught.value)
            assert f"(pid {os.getpid()})" in str(caught.value)
            assert "--port" in str(caught.value)

    run(main())


def test_address_of_another_machine_cannot_be_listened_on(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:.*--host"):
            await ControlServer().start("192.0.2.1", 0, COORDINATOR, SECRET, on_link=print, refused=print)

    run(main())


def test_listener_that_never_answers(run: Run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = Address("127.0.0.1", silent.getsockname()[1])
            why = f"{address} accepted the connection and did not answer within 0.02 s"
            with pytest.raises(PeerLost, match=why):
                await connect_control(address, WORKER, SECRET, timeout=0.02)
            with pytest.raises(PeerLost, match=why):
                BlockingControlClient(address, CLIENT, SECRET, 0.02)

    run(main())
