"""The blocking client of the coordinator over real loopback sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import PeerLost, RemoteProtocolError, ShuffleError, UnknownName
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient, ControlLink
from minishuffle.wire.frames import Ping, Role, encode_frame
from minishuffle.wire.handshake import Handshake, Identity
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.reports import AttemptReport, Collected
from minishuffle.wire.requests import Accepted, GetStatus, ListJobs, ShowJob
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Listener

SECRET = b"a secret of the cluster"
COORDINATOR = Identity(Role.COORDINATOR, "blue", 0, 0)
CLIENT = Identity(Role.CLIENT, "blue", 0, 0)

Run = Callable[[Coroutine[Any, Any, None]], None]


def collected(size: int) -> AttemptReport:
    return AttemptReport(term=1, facts=[Collected(attempt=attempt(), payload=bytes(size))])


def test_blocking_client_asks_and_is_answered(run: Run, make_listener: type[Listener]) -> None:
    def ask(address: Address) -> None:
        with BlockingControlClient(address, CLIENT, SECRET, 5) as client:
            assert client.request(ListJobs()) == Accepted(job="j1")
            with pytest.raises(UnknownName, match="there is no job j9"):
                client.request(ShowJob(job="j9"))
            assert client.request(collected(5_000_000), timeout=5) == Accepted(job="j3")
        with pytest.raises(PeerLost):
            client.request(ListJobs())

    async def main() -> None:
        listener = make_listener()
        await asyncio.to_thread(ask, await listener.start())
        assert listener.links[0].peer == CLIENT
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_blocking_client_skips_a_reply_that_came_too_late(run: Run, make_listener: type[Listener]) -> None:
    def ask(address: Address) -> None:
        with BlockingControlClient(address, CLIENT, SECRET, 5) as client:
            with pytest.raises(PeerLost, match="did not answer in time"):
                client.request(ListJobs(), timeout=0.02)
            assert client.request(GetStatus()) == Accepted(job="second")

    async def main() -> None:
        listener = make_listener(starts_links=False)

        def on_link(link: ControlLink) -> None:
            def answer(message: ControlMessage, request: int) -> None:
                if request == 2:
                    link.send(Accepted(job="first"), 1)
                    link.send(Accepted(job="second"), 2)

            link.start(answer, lambda error: None)

        listener.on_link = on_link  # type: ignore[method-assign]
        await asyncio.to_thread(ask, await listener.start())
        await listener.server.close()

    run(main())


def test_blocking_client_notices_that_the_coordinator_went_away(
    run: Run, make_listener: type[Listener]
) -> None:
    def ask(address: Address) -> ShuffleError:
        with BlockingControlClient(address, CLIENT, SECRET, 5) as client, pytest.raises(PeerLost) as caught:
            client.request(ListJobs())
        return caught.value

    async def main() -> None:
        listener = make_listener(starts_links=False)
        listener.on_link = lambda link: link.close()  # type: ignore[method-assign]
        error = await asyncio.to_thread(ask, await listener.start())
        assert "the coordinator at 127.0.0.1:" in str(error)
        await listener.server.close()

    run(main())


def test_blocking_client_takes_no_garbage(run: Run) -> None:
    def ask(address: Address) -> None:
        with pytest.raises(RemoteProtocolError), BlockingControlClient(address, CLIENT, SECRET, 5) as client:
            client.request(ListJobs())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = Handshake(COORDINATOR, SECRET, os.urandom(32), dialer=False)
        while handshake.peer is None:
            writer.write(handshake.receive(await reader.read(4096)))
        writer.write(encode_frame(Ping(1)))
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        await asyncio.to_thread(ask, Address("127.0.0.1", server.sockets[0].getsockname()[1]))
        server.close()

    run(main())
