"""Data and control connections over TLS: what both sides say of what does not fit, and what holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.config import TlsFiles
from minishuffle.errors import PeerLost
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient, connect_control
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.tls import TlsStream
from minishuffle.wire.frames import FRAME_HEADER, FRAME_HEADER_BYTES, Reject, Role, decode_body
from minishuffle.wire.handshake import HandshakeRefused, Identity
from minishuffle.wire.requests import Accepted, GetStatus
from support.certificates import credentials, files_of, unchecked

if TYPE_CHECKING:
    from conftest import Listener, RunSite, Site

SECRET = b"a secret of the cluster"
CLIENT = Identity(Role.CLIENT, "blue", 0, 0)
Run = Callable[[Coroutine[Any, Any, None]], None]

ONE_SIDED = (
    "the side that {} uses TLS, and the side that {} does not: set tls_certificate, tls_key and tls_ca"
)
DIALED = ONE_SIDED.format("was dialed", "dialed it")
DIALING = ONE_SIDED.format("dialed", "was dialed")
THEIRS, MINE = "the certificate of the other side ", "the certificate of this side "
CASES = [
    ("good", "another", "", ""),
    ("good", "foreign name", "", ""),  # Nobody dials it.
    ("good", None, DIALED, DIALED),
    (None, "good", DIALING, DIALING),
    ("good", "stranger", THEIRS + "is of another CA", MINE + "is of another CA than that in"),
    ("foreign name", "good", THEIRS + "is not for 127.0.0.1, by which", MINE + "is not taken"),
    ("expired", "good", THEIRS + "has expired: renew it", MINE + "has expired, says the other side"),
    ("good", "expired", MINE + "has expired, says the other side", THEIRS + "has expired: renew it"),
]  # fmt: skip
"""Who is dialed, who dials, and what the one that dials and the one that is dialed say."""


def given(kind: str | None) -> Credentials | None:
    return unchecked(kind) if kind is not None else None


@pytest.mark.parametrize(("dialed", "dials", "there", "here"), CASES)
def test_data_connections_are_mutual(
    run_site: RunSite, dialed: str | None, dials: str | None, there: str, here: str
) -> None:
    async def scenario(site: Site) -> None:
        if not there:
            await site.works(await site.dial(tls=given(dials)))
            return
        with pytest.raises(HandshakeRefused) as refused:
            await site.dial(tls=given(dials))
        assert refused.value.reason == "tls"
        assert str(refused.value).startswith(there)
        await site.until(lambda: site.handler.refusals)
        assert [text.startswith(here) for _, text, _ in site.handler.refusals] == [True]
        assert site.handler.reasons == site.dialing.reasons == ["tls"]
        assert (site.handler.up, site.dialing.up) == ([], [])

    run_site(scenario, tls=given(dialed))


@pytest.mark.parametrize(("dialed", "dials", "there", "here"), CASES)
def test_control_links_are_mutual(
    run: Run, dialed: str | None, dials: str | None, there: str, here: str, make_listener: type[Listener]
) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start(tls=given(dialed))

        def ask() -> None:
            with BlockingControlClient(address, CLIENT, SECRET, 5, tls=given(dials)) as client:
                assert client.request(GetStatus()) == Accepted(job="j1")

        if not there:
            (await connect_control(address, CLIENT, SECRET, timeout=5, tls=given(dials))).close()
            await asyncio.to_thread(ask)
            await listener.server.close()
            return
        for dial in (
            connect_control(address, CLIENT, SECRET, timeout=5, tls=given(dials)),
            asyncio.to_thread(ask),
        ):
            with pytest.raises(HandshakeRefused) as refused:
                await dial
            assert refused.value.reason == "tls"
            assert str(refused.value).startswith(f"{address}: {there}")
            reason, text, _ = await listener.refusals.get()
            assert (reason, text[: len(here)]) == ("tls", here)
        assert listener.links == []
        await listener.server.close()

    run(main())


def test_what_is_said_without_tls_is_answered_so_that_it_can_be_read(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        peer.send(b"GET / HTTP/1.1\r\n\r\n")
        answer = await peer.until_closed()
        _, kind, channel = FRAME_HEADER.unpack_from(answer)
        frame = decode_body(kind, channel, memoryview(answer)[FRAME_HEADER_BYTES:])
        assert isinstance(frame, Reject) and frame.text.startswith(DIALED)
        assert site.handler.reasons == ["tls"]

    run_site(scenario, tls=credentials())


def test_who_says_nothing_or_half_of_it_is_bounded_as_without_tls(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        silent, begun, left = [await site.peer() for _ in range(3)]
        for peer in (begun, left):
            peer.send(b"\x16\x03\x01\x02\x00\x01")
        await site.until(lambda: len(site.endpoints[0].unproven) == 3)
        await left.close()
        assert await silent.until_closed() == b""
        await begun.until_closed()
        assert sorted(site.handler.reasons) == ["closed", "timeout", "timeout"]

    run_site(scenario, tls=credentials(), handshake_seconds=0.1)


def test_nobody_who_has_a_certificate_alone_can_stand_between_two_that_have_the_secret(
    run_site: RunSite,
) -> None:
    """It speaks TLS with both, by a good certificate, and passes on what they say."""

    async def scenario(site: Site) -> None:
        between = credentials("another").current()
        pumps: list[asyncio.Task[None]] = []

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(65_536):
                    writer.write(data)
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                writer.close()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(
                "127.0.0.1", site.port, ssl=between.dialing, server_hostname="127.0.0.1"
            )
            pumps.append(asyncio.create_task(pump(reader, there[1])))
            pumps.append(asyncio.create_task(pump(there[0], writer)))

        server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=between.accepting)
        dialer = site.endpoint(Identity(Role.WORKER, "test", 1, 1), site.dialing, tls=credentials())
        with pytest.raises(HandshakeRefused, match="do not have the same secret"):
            await dialer.dial(Address("127.0.0.1", server.sockets[0].getsockname()[1]), 2, 2)
        assert site.handler.reasons == ["secret"]
        server.close()
        await asyncio.gather(*pumps, return_exceptions=True)

    run_site(scenario, tls=credentials())


def test_certificates_that_change_are_used_by_new_connections_and_break_none(
    run_site: RunSite, tmp_path: Path
) -> None:
    files = TlsFiles(*(str(shutil.copy(file, tmp_path / Path(file).name)) for file in files_of()))

    def seen(link: Any) -> Any:
        assert isinstance(link._connected, TlsStream)
        return link._connected.get_extra_info("peercert")["serialNumber"]

    async def scenario(site: Site) -> None:
        first = await site.dial(tls=credentials())
        for new, old in zip(files_of("another"), files, strict=True):
            shutil.copy(new, tmp_path / "new")
            os.replace(tmp_path / "new", old)
        second = await site.endpoint(
            Identity(Role.WORKER, "test", 3, 3), site.dialing, tls=credentials()
        ).dial(site.address, 2, 2)
        assert seen(first) != seen(second)
        await site.works(first)
        await site.works(second)
        assert site.handler.down == site.dialing.down == []

    run_site(scenario, tls=Credentials(files))


def test_what_is_no_tls_behind_the_handshake_ends_that_connection_alone(run_site: RunSite) -> None:
    async def scenario(site: Site) -> None:
        good, broken = await site.dial(tls=credentials()), None
        broken = await site.endpoint(
            Identity(Role.WORKER, "test", 3, 3), site.dialing, tls=credentials()
        ).dial(site.address, 2, 2)
        assert isinstance(broken._connected, TlsStream)
        broken._connected._socket.write(bytes(64))
        await site.until(lambda: site.handler.down)
        assert isinstance(site.handler.down[0], PeerLost)
        await site.works(good)

    run_site(scenario, tls=credentials())
