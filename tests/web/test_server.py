"""The web servers over real sockets, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import aiohttp
import pytest
import uvloop
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from minishuffle.counters import (
    CoordinatorSnapshot,
    WorkerEntry,
    WorkerSnapshot,
)
from minishuffle.errors import UsageError
from minishuffle.transport.credentials import Credentials
from minishuffle.web.server import HttpLimits, WebServer, serve_coordinator_web, serve_worker_web
from support.accesses import READ_TOKEN, TOKEN, access, worker_access
from support.certificates import credentials, files_of, unchecked
from support.coordinators import ScriptedCoordinator
from support.snapshots import idle_worker

T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]

HOST = "127.0.0.1"
SECONDS_MAX = 20.0

WORKER = idle_worker()
COORDINATOR = CoordinatorSnapshot(
    term=1,
    journal_writable=True,
    workers=(
        WorkerEntry(2, "lost", HOST, 9002, 599.0),
        WorkerEntry(1, "alive", HOST, 9001, 0.1),
        WorkerEntry(3, "lost", HOST, 9003, 601.0),
        WorkerEntry(4, "gone", HOST, 9004, 1.0),
        WorkerEntry(5, "alive", "::1", 9005, 0.1),
    ),
    slots={},
    jobs={},
    tasks={},
    recoveries=(),
    connections_refused={},
)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run[T]:
    """Run a coroutine to its end on a loop of that kind, within bounds."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_bounded(work: Awaitable[T]) -> T:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(work, SECONDS_MAX))

    return run_bounded


@pytest.mark.parametrize(("kind", "strict"), [("good", False), ("good", True), (None, True), (None, False)])
def test_https_with_tokens_or_certificates(run: Run[None], kind: str | None, strict: bool) -> None:
    shown = (
        ssl.create_default_context(cafile=files_of().ca) if kind is None else credentials().current().dialing
    )

    async def main() -> None:
        tls = Credentials(files_of(), web_certificates=strict)
        wants = access(certificates=strict)
        async with (
            closing(serve_coordinator_web(ScriptedCoordinator(), 0, wants, tls=tls)) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=shown)) as session,
        ):
            base = f"https://{HOST}:{server.port}"
            for path, status in (("/healthz", 200), ("/metrics", 403 if strict and kind is None else 200)):
                async with session.get(f"{base}{path}") as response:
                    assert (path, response.status) == (path, status)
            async with session.get(base) as response:
                assert (response.status == 403) or f"{base}/metrics" in await response.text()
            status, _, text = await get(server, "/healthz")
            assert (status, text) == (400, "this port speaks TLS: ask it with https://\n")

    run(main())


def test_https_refuses_certificates_of_others(run: Run[None]) -> None:
    async def main() -> None:
        tls = Credentials(files_of(), web_certificates=True)
        other = unchecked("stranger").current().dialing
        other.load_verify_locations(files_of().ca)
        async with (
            closing(serve_worker_web(lambda: WORKER, 0, worker_access(), tls=tls)) as server,
            aiohttp.ClientSession() as session,
        ):
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"https://{HOST}:{server.port}/healthz", ssl=other)
            async with session.get(
                f"https://{HOST}:{server.port}/healthz", ssl=credentials().current().dialing
            ) as response:
                assert response.status == 200

    run(main())


async def get(
    server: WebServer, path: str, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of one request."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{HOST}:{server.port}{path}", headers=headers) as response,
    ):
        return response.status, dict(response.headers), await response.text()


@asynccontextmanager
async def closing(starting: Awaitable[WebServer]) -> AsyncIterator[WebServer]:
    """A server that is closed however the test ends."""
    server = await starting
    try:
        yield server
    finally:
        await server.close()


class Source(ScriptedCoordinator):
    """A coordinator with other workers in its metrics."""

    def snapshot(self) -> CoordinatorSnapshot:
        return COORDINATOR


def worker_web(host: str = HOST, http: HttpLimits = HttpLimits()) -> Awaitable[WebServer]:  # noqa: B008
    return serve_worker_web(lambda: WORKER, 0, worker_access(bound=host), http)


def coordinator_web(port: int = 0) -> Awaitable[WebServer]:
    return serve_coordinator_web(Source(), port, access())


def test_a_worker_answers_in_the_format_that_is_asked_for(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(worker_web()) as server:
            status, headers, text = await get(server, "/metrics", {"Accept": "text/plain"})
            assert status == 200
            assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "minishuffle_connections" in {f.name for f in text_string_to_metric_families(text)}
            accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
            status, headers, text = await get(server, "/metrics", accept)
            assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            assert "minishuffle_connections" in {f.name for f in parse_openmetrics(text)}

    run(body())


def test_each_scrape_takes_one_snapshot(run: Run[None]) -> None:
    async def body() -> None:
        taken = 0

        def snapshot() -> WorkerSnapshot:
            nonlocal taken
            taken += 1
            return replace(WORKER, connections=taken)

        async with closing(serve_worker_web(snapshot, 0, worker_access())) as server:
            for expected in (1, 2):
                _, _, text = await get(server, "/metrics")
                assert f"minishuffle_connections {expected}\n" in text
            assert taken == 2

    run(body())


def test_service_discovery_lists_the_coordinator_and_workers_alive_or_lost_of_late(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(coordinator_web()) as server:
            status, headers, text = await get(server, "/sd/prometheus")
            assert status == 200
            assert headers["Content-Type"].startswith("application/json")
            assert headers["X-Prometheus-Refresh-Interval-Seconds"] == "5"

            def worker(number: int, target: str) -> dict[str, object]:
                role = {"__meta_minishuffle_role": "worker", "__meta_minishuffle_worker": str(number)}
                return {"targets": [target], "labels": role}

            assert json.loads(text) == [
                {
                    "targets": [f"{HOST}:{server.port}"],
                    "labels": {"__meta_minishuffle_role": "coordinator"},
                },
                worker(1, "127.0.0.1:9001"),
                worker(2, "127.0.0.1:9002"),
                worker(5, "[::1]:9005"),
            ]

    run(body())


def test_the_coordinators_page_lists_what_can_be_read(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(coordinator_web()) as server:
            status, headers, text = await get(server, "/")
            assert status == 200
            assert headers["Content-Type"].startswith("text/plain")
            assert f"http://{HOST}:{server.port}/sd/prometheus" in text
            assert "http://127.0.0.1:9001/metrics" in text
            assert "http://127.0.0.1:9003/metrics" not in text
            _, _, metrics = await get(server, "/metrics")
            assert 'minishuffle_workers{state="lost"} 2' in metrics
            assert (await get(server, "/nothing"))[0] == 404

    run(body())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:1", 200),
        ("127.8.8.8", 200),
        ("[::1]:9000", 200),
        ("evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[fe80::1]", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_only_our_own_names_are_answered(run: Run[None], host: str, status: int) -> None:
    async def body() -> None:
        async with closing(coordinator_web()) as server:
            for path in ("/metrics", "/sd/prometheus", "/"):
                assert (await get(server, path, {"Host": host}))[0] == status

    run(body())


def test_a_server_bound_to_every_address_answers_as_the_one_it_was_reached_at(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(worker_web("0.0.0.0")) as server:
            assert (await get(server, "/metrics", {"Host": f"{HOST}:{server.port}"}))[0] == 200
            assert (await get(server, "/metrics", {"Host": "192.0.2.1"}))[0] == 403

    run(body())


def test_a_port_that_is_taken_is_named_with_its_holder_and_the_flag(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(worker_web()) as server:
            with pytest.raises(UsageError) as caught:
                await coordinator_web(server.port)
            text = str(caught.value)
            assert str(server.port) in text
            assert f"pid {os.getpid()}" in text
            assert "--web-port" in text

    run(body())


def test_an_address_of_another_machine_is_refused(run: Run[None]) -> None:
    async def body() -> None:
        with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0: .*--host"):
            await worker_web("192.0.2.1")

    run(body())


def test_after_close_the_port_is_free(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(worker_web()) as server:
            await server.close()
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(server, "/metrics")
            async with closing(serve_worker_web(lambda: WORKER, server.port, worker_access())) as again:
                assert (await get(again, "/metrics"))[0] == 200

    run(body())


HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"


async def ended(reader: asyncio.StreamReader) -> bool:
    """Read until the server closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(1 << 16):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE], ids=["nothing", "half a head", "a request"])
def test_a_connection_that_waits_for_a_request_is_closed(run: Run[None], sent: bytes) -> None:
    async def body() -> None:
        async with closing(worker_web(http=HttpLimits(idle_seconds=0.2))) as server:
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(sent)
            assert await ended(reader)
            writer.close()

    run(body())


def test_a_head_that_trickles_in_is_not_waited_for(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(worker_web(http=HttpLimits(idle_seconds=0.2))) as server:
            reader, writer = await asyncio.open_connection(HOST, server.port)
            end = asyncio.create_task(ended(reader))
            for _ in range(1000):  # 20 s at least, a hundred times what is waited for
                writer.write(b"G")
                if (await asyncio.wait([end], timeout=0.02))[0]:
                    break
            assert end.done()
            writer.close()

    run(body())


def test_many_connections_lock_nobody_out(run: Run[None], caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with closing(worker_web(http=HttpLimits(connections=4))) as server:
            opened = []
            for _ in range(40):
                opened.append(await asyncio.open_connection(HOST, server.port))
                opened[-1][1].write(HALF)
            status, _, _ = await get(server, "/metrics")
            assert status == 200
            for reader, _ in opened[: 40 - 4]:
                assert await ended(reader), "long before its time is up"
            for _, writer in opened:
                writer.close()

    run(body())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("minishuffle")]
    assert lines[0] == "more than 4 HTTP connections at once: 1 closed so far"
    assert len(lines) < 10


@pytest.mark.slow
def test_an_answer_that_nobody_reads_does_not_hold_a_connection(run: Run[None]) -> None:
    async def body() -> None:
        async with closing(worker_web(http=HttpLimits(connections=1))) as server:
            with socket.create_connection((HOST, server.port)) as greedy:
                greedy.setblocking(False)
                loop = asyncio.get_running_loop()
                with contextlib.suppress(TimeoutError):  # Its answers fill all buffers in between.
                    async with asyncio.timeout(1.0):
                        while True:
                            await loop.sock_sendall(greedy, WHOLE)
                status, _, _ = await get(server, "/metrics")
                assert status == 200

    run(body())


def test_requests_good_and_bad_leave_no_line_in_the_log(
    run: Run[None], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with closing(worker_web()) as server:
            assert (await get(server, "/metrics"))[0] == 200
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(b"\x00\x01garbage\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    with caplog.at_level(logging.DEBUG):
        run(body())
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_a_failing_snapshot_is_an_answer_and_a_line_in_the_log(
    run: Run[None], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        def snapshot() -> WorkerSnapshot:
            raise RuntimeError("no snapshot today")

        async with closing(serve_worker_web(snapshot, 0, worker_access())) as server:
            assert (await get(server, "/metrics"))[0] == 500

    run(body())
    assert "no snapshot today" in caplog.text


def test_health_costs_nothing_since_anybody_may_ask(run: Run[None]) -> None:
    async def body() -> None:
        taken: list[int] = []

        def snapshot() -> WorkerSnapshot:
            taken.append(len(taken))
            return replace(WORKER, epoch=min(1, taken[-1]))

        async with closing(serve_worker_web(snapshot, 0, worker_access())) as server:
            for expected in (1, 2, 2, 2):
                assert (await get(server, "/healthz"))[0] == 200
                assert len(taken) == expected, "none once it runs"
        source = Source()
        source.snapshot = lambda: pytest.fail("a snapshot")  # type: ignore[method-assign]
        async with closing(serve_coordinator_web(source, 0, access())) as server:
            assert (await get(server, "/healthz"))[0] == 200

    run(body())


def test_health_is_open_and_says_nothing_but_the_state(run: Run[None]) -> None:
    async def body() -> None:
        started = replace(WORKER, epoch=4)
        guarded = worker_access(reads_are_open=False)
        for snapshot, state in ((started, "running"), (replace(WORKER, epoch=0), "starting")):
            async with closing(serve_worker_web(lambda each=snapshot: each, 0, guarded)) as server:
                status, _, text = await get(server, "/healthz")
                assert (status, json.loads(text)) == (200, {"state": state})
                assert (await get(server, "/metrics"))[0] == 401
                bearer = {"Authorization": f"Bearer {READ_TOKEN}"}
                assert (await get(server, "/metrics", bearer))[0] == 200
        for problem, state in (("", "running"), ("no room", "journal not writable")):
            source = Source()
            source.state.write_ahead.problem = problem
            async with closing(serve_coordinator_web(source, 0, access(reads_are_open=False))) as server:
                status, _, text = await get(server, "/healthz")
                assert (status, json.loads(text)) == (200, {"state": state})
                assert (await get(server, "/"))[0] == 401, "it names workers"
                assert (await get(server, "/", {"Accept": "text/html"}))[0] == 200
                for path in ("/metrics", "/sd/prometheus"):
                    assert (await get(server, path))[0] == 401
                    for token in (READ_TOKEN, TOKEN):
                        assert (await get(server, path, {"Authorization": f"Bearer {token}"}))[0] == 200

    run(body())
