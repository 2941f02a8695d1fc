"""A real Prometheus finds a coordinator and two workers by itself, and scrapes them."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minishuffle.counters import CoordinatorSnapshot, TaskCounters, TaskSnapshot, WorkerEntry, WorkerSnapshot
from minishuffle.observe.prometheus import prometheus_command, prometheus_config
from minishuffle.transport.credentials import Credentials
from minishuffle.web.server import WebServer, serve_coordinator_web, serve_worker_web
from support.accesses import READ_TOKEN, access, worker_access
from support.certificates import files_of
from support.coordinators import ScriptedCoordinator
from support.prometheus import query, running_prometheus
from support.soak import SOAK
from support.waiting import until

HOST = "127.0.0.1"
STEP_SECONDS_MAX = 60.0
WORKERS = (1, 2)


@pytest.fixture(params=["plain", "token", "certificate"] if SOAK else ["plain"])
def clients(request: pytest.FixtureRequest) -> str:
    """What HTTP clients show over TLS; ``plain``: there is no TLS."""
    return str(request.param)


@pytest.fixture
def cluster_web(
    clients: str,
    make_worker: Callable[..., WorkerSnapshot],
    make_task: Callable[..., TaskSnapshot],
    make_coordinator: Callable[..., CoordinatorSnapshot],
) -> Iterator[str]:
    """Web servers of a coordinator and two workers whose counters move; gives the coordinator's address."""
    started = time.monotonic()

    def worker_snapshot(number: int) -> WorkerSnapshot:
        records = int((time.monotonic() - started) * 1000)
        counters = TaskCounters(records_in=records, records_out=records)
        return make_worker(worker=number, tasks=(make_task(index=number - 1, counters=counters),))

    strict = clients == "certificate"
    wants = replace(worker_access(reads_are_open=False), certificates=strict)
    tls = None if clients == "plain" else Credentials(files_of(), web_certificates=strict)

    async def start() -> list[WebServer]:
        servers = [await serve_worker_web(lambda n=n: worker_snapshot(n), 0, wants, tls=tls) for n in WORKERS]
        entries = tuple(
            WorkerEntry(n, "alive", HOST, server.port, 0.1)
            for n, server in zip(WORKERS, servers, strict=True)
        )

        class Source(ScriptedCoordinator):
            def snapshot(self) -> CoordinatorSnapshot:
                return make_coordinator(workers=entries)

        guarded = access(reads_are_open=False, certificates=strict)
        return [*servers, await serve_coordinator_web(Source(), 0, guarded, tls=tls)]

    with running_loop() as loop:
        servers = asyncio.run_coroutine_threadsafe(start(), loop).result(STEP_SECONDS_MAX)
        yield f"{HOST}:{servers[-1].port}"
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(STEP_SECONDS_MAX)


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STEP_SECONDS_MAX)
        loop.close()


@pytest.mark.slow
def test_prometheus_scrapes_a_cluster_through_service_discovery(
    cluster_web: str, clients: str, prometheus_binaries: Path, tmp_path: Path
) -> None:
    config = prometheus_config(
        cluster_web, tmp_path, READ_TOKEN, None if clients == "plain" else files_of("another")
    )
    with running_prometheus(prometheus_binaries, config) as ask:

        def all_up() -> list[dict[str, Any]]:
            targets: list[dict[str, Any]] = ask("targets?state=active").get("activeTargets", [])
            up = [target for target in targets if target["health"] == "up"]
            return up if len(up) == len(WORKERS) + 1 else []

        targets = until(all_up, "the scrape of three targets", STEP_SECONDS_MAX)
        assert {target["labels"].get("worker") for target in targets} == {None, "1", "2"}
        assert {target["labels"]["job"] for target in targets} == {"minishuffle"}
        rate = "sum(rate(minishuffle_task_records_total[10s]))"
        moving = until(lambda: query(ask, f"{rate} > 0"), "a rate above 0", STEP_SECONDS_MAX)
        assert float(moving[0]["value"][1]) > 0
        ages = until(
            lambda: query(ask, "minishuffle_worker_heartbeat_age_seconds"), "heartbeat ages", STEP_SECONDS_MAX
        )
        assert sorted(age["metric"]["worker"] for age in ages) == ["1", "2"]
        assert not query(ask, '{__name__=~"minishuffle_.*", exported_worker!=""}')
        assert not query(ask, '{__name__=~"minishuffle_.*", exported_job!=""}')


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_promtool_accepts_the_configuration(prometheus_binaries: Path, tmp_path: Path, scheme: str) -> None:
    directory = tmp_path / "with space"
    directory.mkdir()
    config = prometheus_config("[::1]:8472", directory, "token", None if scheme == "http" else files_of())
    checked = subprocess.run(
        [prometheus_binaries / "promtool", "check", "config", config],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    text = config.read_text(encoding="utf-8")
    assert f'url: "{scheme}://[::1]:8472/sd/prometheus"' in text
    assert text.count(f"ca_file: {json.dumps(files_of().ca)}") == (2 if scheme == "https" else 0)


def test_the_command_keeps_data_beside_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a b" / "prometheus.yml"
    assert shlex.split(prometheus_command(path)) == [
        "prometheus",
        f"--config.file={path}",
        f"--storage.tsdb.path={tmp_path / 'a b' / 'prometheus-data'}",
        "--web.listen-address=127.0.0.1:9090",
    ]


def test_the_token_is_found_whatever_directory_the_configuration_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus looks for a relative one from there, and not from where the cluster was started."""
    (tmp_path / "state").mkdir()
    monkeypatch.chdir(tmp_path)
    text = prometheus_config("127.0.0.1:8472", Path("state"), "token").read_text()
    token_file = tmp_path / "state" / "read-token"
    assert text.count(f'credentials_file: "{token_file}"') == 2
    assert token_file.read_text() == "token\n"
