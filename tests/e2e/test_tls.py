"""A cluster of real processes whose connections use TLS: it recovers as without, and takes nobody else's.

``MINISHUFFLE_SOAK=1`` kills workers and coordinators again and again while certificates change, and has two
coordinators whose certificates are of different CAs.
"""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from minishuffle.api.stream import Stream
from minishuffle.authority import Authority, here
from minishuffle.client import Client
from minishuffle.config import TlsFiles, read_secret
from minishuffle.errors import ShuffleError
from minishuffle.ids import Address
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.remote.access import find_access
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.handshake import HandshakeRefused
from minishuffle.wire.requests import GetStatus
from support.certificates import credentials
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RATE = 4_000
SECONDS_MAX = 60.0
COMMAND = (sys.executable, "-m", "minishuffle.cli")


def spread(records: int) -> Stream:
    return Stream.generate(rate=RATE, records=records).rebalance().collect()


def test_a_worker_that_is_killed_is_replaced_over_tls_and_nobody_else_gets_in(tmp_path: Path) -> None:
    with LocalCluster(workers=2, slots=2, tls=True) as cluster:
        address, secret = cluster.client.address, read_secret(cluster.state_dir / "secret")
        job = cluster.submit(spread(2 * RATE), parallelism=2, settings=JobSettings(source_lease=0))
        source = job.info().tasks[0]
        until(lambda: job.info().tasks[0].counters.records_out > RATE / 8, "rows over a data connection")
        for tls, said in (
            (None, "the side that was dialed uses TLS, and the side that dialed it does not"),
            (credentials(), "the certificate of the other side is of another CA than that in tls_ca"),
        ):
            with (
                pytest.raises(HandshakeRefused, match=said),
                Client(address, secret, cluster="local", tls=tls) as no,
            ):
                no.status()
        page = f"https://127.0.0.1:{cluster.web_port}/metrics"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(page, timeout=SECONDS_MAX)
        trusted = ssl.create_default_context(cafile=str(cluster.state_dir / "tls" / "ca.pem"))
        with urllib.request.urlopen(page, timeout=SECONDS_MAX, context=trusted) as metrics:
            assert 'minishuffle_connections_refused_total{reason="tls"} 2' in metrics.read().decode()
        cluster.kill_worker(source.worker)
        assert find_access(cluster.spark_options()).request(GetStatus()).term == 1  # type: ignore[attr-defined]
        rows = list(job.rows(allow_loss=True))
        info = job.info()
    assert [task.attempt for task in info.tasks if task.name == source.name].count(2) == 1
    missing = 2 * RATE - len(set(rows))
    assert missing <= sum(info.rows_dropped.values()) + info.rows_in_flight


@pytest.mark.soak
def test_certificates_change_while_workers_and_coordinators_are_killed(tmp_path: Path) -> None:
    authority = Authority.kept(tmp_path / "ca")
    files = authority.issue(tmp_path / "node", here())
    named = {f"tls_{name}": path for name, path in files._asdict().items()}
    with LocalCluster(workers=3, slots=1, tls_http_clients="certificate", **named) as cluster:
        stream = Stream.generate(rate=RATE).rebalance().filter(lambda row: False).collect()
        job = cluster.submit(stream, parallelism=3)

        def links() -> set[tuple[str, str]]:
            """Both ends of each connection, when all three workers say the same of all."""
            there = [each for each in cluster.status().workers if each.state == "alive"]
            found = {(peer.local, peer.remote) for each in there for peer in each.peers}
            runs = {task.state for task in job.info().tasks} == {"running"}
            agreed = runs and len(there) == 3 and found == {(end, start) for start, end in found}
            return found if agreed and len(found) == 6 else set()

        def moved() -> list[int]:
            return [task.counters.records_in + task.counters.records_out for task in job.info().tasks]

        before: set[tuple[str, str]] = set()
        for turn in range(12):
            before = until(lambda old=before: (now := links()) != old and now, "all links", SECONDS_MAX)
            made = moved()
            authority.issue(tmp_path / "node", here())
            until(
                lambda made=made: all(now > then for now, then in zip(moved(), made, strict=True)),
                "rows of all",
                SECONDS_MAX,
            )
            assert links() == before, "new certificates break no connection"
            if turn % 3 == 2:
                cluster.kill_coordinator()
                until(lambda before=before: links() == before, "workers that are back", SECONDS_MAX)
            cluster.kill_worker(1 + turn % 3)
        log = (cluster.state_dir / "worker-2.log").read_text()
        assert "certificate.pem was read again, for new connections" in log
        job.cancel()


@pytest.mark.soak
def test_two_coordinators_with_different_cas_take_no_workers_of_each_other(tmp_path: Path) -> None:
    with LocalCluster(workers=1, tls=True) as one, LocalCluster(workers=1, tls=True) as other:
        ours = Credentials.of(one._settings)
        for cluster in (one, other):
            assert [each.state for each in cluster.status().workers] == ["alive"]
        command = [
            *(*COMMAND, "--cluster", "local", "--coordinator", str(other.client.address)),
            *("--secret-file", str(other.state_dir / "secret"), "--state-dir", str(tmp_path)),
            *("worker", "start"),
        ]
        files = ours.files if ours is not None else None
        assert isinstance(files, TlsFiles)
        given = [word for name, path in files._asdict().items() for word in (f"--tls-{name}", path)]
        for more, said in (
            (given, "the certificate of the other side is of another CA than that in tls_ca"),
            ([], "the side that was dialed uses TLS, and the side that dialed it does not"),
        ):
            refused = subprocess.run(
                [*command, *more], capture_output=True, text=True, timeout=60, check=False
            )
            assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr
            assert len(refused.stderr.splitlines()) == 1
        log = (other.state_dir / "coordinator.log").read_text()
        assert "is of another CA than that in tls_ca of the other side" in log
        assert "the side that was dialed uses TLS" in log
        assert len(other.status().workers) == 1


@pytest.mark.soak
@pytest.mark.parametrize("clients", ["token", "certificate"])
def test_the_commands_find_what_a_cluster_with_tls_uses(tmp_path: Path, clients: str) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [*COMMAND, "--state-dir", str(tmp_path / "state"), *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    up = run("cluster", "up", "--tls", "--detach", "--port", "0", "--tls-http-clients", clients)
    try:
        assert "web page     https://127.0.0.1:" in up
        counted = run("submit", "wordcount", "--wait", "--json")
        assert '"state": "finished"' in counted
        web = re.search(r"https://(\S+)/$", up, re.MULTILINE)
        assert web is not None
        client = Credentials(
            TlsFiles(
                *(str(tmp_path / "state" / "tls" / f"{name}.pem") for name in ("certificate", "key", "ca"))
            )
        )
        context = client.current().dialing
        where = Address.parse(web[1])
        with urllib.request.urlopen(f"https://{where}/metrics", timeout=60, context=context) as answer:
            assert answer.status == 200
    except ShuffleError as error:
        pytest.fail(str(error))
    finally:
        run("cluster", "down")
