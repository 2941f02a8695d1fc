"""A real Prometheus: its binaries, a server for the length of a ``with`` block, and queries."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minishuffle.observe.prometheus import prometheus_command
from support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
STOP_SECONDS_MAX = 60.0

Ask = Callable[[str], dict[str, Any]]
"""``data`` of a call of Prometheus' API; empty while the server starts."""


def fetched_binaries() -> Path:
    """The folder with ``prometheus`` and ``promtool``, fetched once per machine; never skips."""
    cache = Path.home() / ".cache" / "minishuffle" / "prometheus"
    script = ROOT / "scripts" / "fetch-prometheus"
    fetched = subprocess.run([script, cache], capture_output=True, text=True, timeout=600, check=False)
    if fetched.returncode:
        pytest.fail(f"{script.name} {cache} failed:\n{fetched.stdout}{fetched.stderr}", pytrace=False)
    return cache / "usr" / "bin"


@contextmanager
def running_prometheus(binaries: Path, config: Path) -> Iterator[Ask]:
    """The printed command, run on a free port and scraping each second; gives a client of its API."""
    text = config.read_text(encoding="utf-8")
    assert text.count(": 5s") == 3
    config.write_text(text.replace(": 5s", ": 1s"), encoding="utf-8")
    (port,) = free_ports(1)
    address = f"{HOST}:{port}"
    command = shlex.split(prometheus_command(config))
    assert command[0] == "prometheus"
    assert "--web.listen-address=127.0.0.1:9090" in command
    arguments = [part.replace("127.0.0.1:9090", address) for part in command[1:]]
    log = config.parent / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen([binaries / "prometheus", *arguments], stdout=output, stderr=output)
        try:
            yield lambda path: ask_prometheus(process, address, path, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask_prometheus(process: subprocess.Popen[bytes], address: str, path: str, log: Path) -> dict[str, Any]:
    """``data`` of an API call; empty while the server starts."""
    assert process.poll() is None, log.read_text(errors="replace")
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=5.0) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code != 503:  # it starts
            pytest.fail(f"{path}: {error.read().decode(errors='replace')}")
        return {}
    except (urllib.error.URLError, ConnectionError):
        return {}
    assert answer["status"] == "success"
    data: dict[str, Any] = answer["data"]
    return data


def query(ask: Ask, text: str) -> list[dict[str, Any]]:
    """The series that an expression gives now."""
    result: list[dict[str, Any]] = ask(f"query?query={urllib.parse.quote(text)}").get("result", [])
    return result
