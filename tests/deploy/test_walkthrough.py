"""What the containers run and what the units run, for real, on three hosts: up, words counted, a host lost.

Hosts are network namespaces. No image is built: the commands are read from Dockerfile, compose file and unit.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from minishuffle.bench.hosts import Hosts
from minishuffle.client import Client
from minishuffle.config import read_secret, read_token
from minishuffle.examples.wordcount import SHIPPED_TEXT, words
from minishuffle.ids import Address
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS_MAX = 180.0
BIN = Path(sys.executable).parent
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
"""With the compiled loops of this machine: in a home of their own, nodes would first compile them anew."""


class Nodes:
    """The three hosts, and processes on them that are stopped at the end."""

    def __init__(self, deploy: Path, directory: Path, hosts: Hosts) -> None:
        self.hosts = hosts
        self.secret = directory / "secret"
        self.token = directory / "read-token"
        self.coordinator = Address(hosts.address(0), 8471)
        self._deploy = deploy
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        docker = deploy / "docker"
        entry = re.search(r"^ENTRYPOINT (\[.+\])$", (docker / "Dockerfile").read_text(), re.MULTILINE)
        assert entry is not None
        self._entry = [str(docker / json.loads(entry[1])[-1])]
        self._compose = yaml.safe_load((docker / "compose.yml").read_text())["services"]
        self.tls: dict[str, str] = {}
        """What compose.tls.yml adds to the environment, but for where files are."""

    def use_tls(self, clients: str) -> None:
        """From now on; ``clients`` is what those of web ports show."""
        text = (self._deploy / "docker" / "compose.tls.yml").read_text()
        given = yaml.safe_load(text)["services"]["coordinator"]["environment"]
        assert set(given) == {"NODE_TLS", "NODE_NAMES", "MINISHUFFLE_TLS_HTTP_CLIENTS"}
        self.tls = given | {
            "NODE_CA": str(self._directory / "ca"),
            "MINISHUFFLE_TLS_HTTP_CLIENTS": clients,
        }

    def _environment(self, host: int) -> dict[str, str]:
        """As in a container, but for where files are."""
        return {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self._directory),
            "XDG_CACHE_HOME": CACHE,
            "NODE_STATE": str(self._directory / f"state-{host}"),
            "NODE_SECRET_FILE": str(self.secret),
            "NODE_TOKEN_FILE": str(self.token),
            "MINISHUFFLE_COORDINATOR": str(self.coordinator),
            **self.tls,
            **({"NODE_TLS": str(self._directory / f"tls-{host}")} if self.tls else {}),
        }

    def run(self, *words: str, host: int = 0) -> subprocess.CompletedProcess[str]:
        """What 'docker compose exec' runs in a container of that host."""
        return subprocess.run(
            [*self.hosts.command(host), *self._entry, *words],
            env=self._environment(host),
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    def start_service(self, name: str, host: int) -> subprocess.Popen[bytes]:
        """What the container of that service runs."""
        return self._start([*self._entry, *self._compose[name]["command"]], host, self._environment(host))

    def start_unit(self, name: str, host: int) -> subprocess.Popen[bytes]:
        """What that unit runs, with the environment file of its host."""
        text = (self._deploy / "systemd" / name).read_text()
        found = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
        assert found is not None
        given = (self._deploy / "systemd" / "environment.example").read_text()
        assert all(f"{name}=" in given for name in ("NODE_HOST", "NODE_ADVERTISE", "MINISHUFFLE_COORDINATOR"))
        here = {
            "/opt/minishuffle/bin/": f"{BIN}/",
            "%i": "1",
            "/var/lib/": f"{self._directory}/",
            "/etc/minishuffle/secret": str(self.secret),
            "${NODE_HOST}": self.hosts.address(host),
            "${NODE_ADVERTISE}": "",
            "${MINISHUFFLE_COORDINATOR}": str(self.coordinator),
        }
        words = shlex.split(found[1])  # before it names folders of this machine, which may have blanks
        for there, meant in here.items():
            words = [word.replace(there, meant) for word in words]
        assert not any("$" in word for word in words)
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._directory), "XDG_CACHE_HOME": CACHE}
        return self._start(words, host, environment)

    def _start(self, words: list[str], host: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._directory / f"log-{len(self._started)}").open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    [*self.hosts.command(host), *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        return self._started[-1]

    def stop(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def nodes(deploy: Path, tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = Nodes(deploy, tmp_path, stack.enter_context(Hosts(3)))
        stack.callback(made.stop)
        yield made


def alive(client: Client) -> dict[str, int]:
    """The worker of each host."""
    return {worker.host: worker.worker for worker in client.status().workers if worker.state == "alive"}


def test_three_hosts_count_words_and_lose_one(nodes: Nodes) -> None:
    assert nodes.run("secret").returncode == 0
    assert stat.S_IMODE(nodes.secret.stat().st_mode) == 0o600
    secret = read_secret(nodes.secret)
    assert nodes.run("secret").returncode == 0
    assert read_secret(nodes.secret) == secret, "one that is there is kept"
    assert nodes.token.read_text().strip() == read_token(secret)
    assert stat.S_IMODE(nodes.token.stat().st_mode) == 0o444

    assert nodes.run("healthy").returncode != 0
    coordinator = nodes.start_service("coordinator", 0)
    until(lambda: nodes.run("healthy").returncode == 0, "a healthy coordinator", SECONDS_MAX)
    first = nodes.start_service("worker", 1)
    second = nodes.start_unit("minishuffle-worker@.service", 2)
    with Client(nodes.coordinator, secret) as client:
        here, there = nodes.hosts.address(1), nodes.hosts.address(2)
        until(lambda: set(alive(client)) == {here, there}, "two workers", SECONDS_MAX)
        assert nodes.run("healthy", host=1).returncode == 0

        counted = nodes.run("submit", "wordcount", "--wait", "--json")
        assert counted.returncode == 0, counted.stderr
        text = SHIPPED_TEXT.read_text()
        assert dict(json.loads(counted.stdout)["rows"]) == Counter(words(text))

        job = json.loads(
            nodes.run("submit", "keyby", "--parallelism", "2", "--set", "rate=100", "--json").stdout
        )["job"]
        lost = alive(client)[there]

        def states() -> set[tuple[str, int]]:
            return {(task.state, task.worker) for task in client.job(job).tasks}

        until(lambda: len(states()) == 2 and {state for state, _ in states()} == {"running"}, "a job on both")
        nodes.hosts.cut(2)
        until(
            lambda: states() == {("running", alive(client).get(here))}, "all tasks on one host", SECONDS_MAX
        )
        nodes.hosts.restore(2)
        assert second.wait(SECONDS_MAX) != 0, "it was declared lost"
        nodes.start_unit("minishuffle-worker@.service", 2)  # Restart=always
        until(lambda: alive(client).get(there, lost) != lost, "another worker there", SECONDS_MAX)
        client.cancel(job)
    down = nodes.run("cluster", "down")
    assert (coordinator.wait(SECONDS_MAX), first.wait(SECONDS_MAX)) == (0, 0), down.stderr


@pytest.mark.soak
@pytest.mark.parametrize("clients", ["token", "certificate"])
def test_nodes_with_tls_make_their_certificates_and_are_healthy(
    nodes: Nodes, tmp_path: Path, clients: str
) -> None:
    nodes.use_tls(clients)
    assert nodes.run("secret").returncode == 0
    assert nodes.run("secret").returncode == 0
    nodes.start_service("coordinator", 0)
    until(lambda: nodes.run("healthy").returncode == 0, "a healthy coordinator", SECONDS_MAX)
    for host in (1, 2):
        nodes.start_service("worker", host)
    until(lambda: nodes.run("cluster", "status").stdout.count("alive") == 2, "two workers", SECONDS_MAX)
    assert [nodes.run("healthy", host=host).returncode for host in (1, 2)] == [0, 0]
    counted = nodes.run("submit", "wordcount", "--wait", "--json", host=1)
    assert dict(json.loads(counted.stdout)["rows"]) == Counter(words(SHIPPED_TEXT.read_text())), (
        counted.stderr
    )

    web, reader = f"https://{nodes.hosts.address(0)}:8472/metrics", tmp_path / "tls"
    shown = ["--cert", str(reader / "certificate.pem"), "--key", str(reader / "key.pem")]
    token = ["--header", f"Authorization: Bearer {nodes.token.read_text().strip()}"]

    def status(*options: str) -> str:
        curl = ["curl", "--silent", "--cacert", str(reader / "ca.pem"), "--output", "/dev/null"]
        asked = [*nodes.hosts.command(1), *curl, "--write-out", "%{http_code}", *options, web]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout

    assert status(*shown, *token) == "200"
    assert (status(*token), status(*shown), status()) == (
        ("200", "401", "401") if clients == "token" else ("403", "200", "403")
    )


def test_a_node_without_a_secret_says_how_to_get_one(nodes: Nodes) -> None:
    refused = nodes.run("coordinator")
    assert refused.returncode == 2
    assert "there is no secret at" in refused.stderr
