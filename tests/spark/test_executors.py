"""What an executor does with an order for a worker; here without a Spark around it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark import TaskContext

from minishuffle.config import read_secret
from minishuffle.ids import Address
from minishuffle.launch import settings_flags
from minishuffle.local import LocalCluster
from minishuffle.spark import executors
from minishuffle.spark.executors import WorkerOrder, run_worker_task

pytestmark = pytest.mark.extra

Until = Callable[..., Any]
SECONDS_MAX = 60.0
SECRET = b"c" * 64


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Spark lets tasks put their data."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    return tmp_path


def order(cluster: LocalCluster, number: int, secret: bytes | None = None) -> WorkerOrder:
    own = read_secret(cluster.state_dir / "secret")
    flags = tuple(settings_flags(cluster._settings))
    return WorkerOrder(number, "local", cluster.client.address, secret or own, flags)


@pytest.mark.slow
def test_a_worker_runs_until_its_cluster_stops(directory: Path, wait_until: Until) -> None:
    reasons: list[str] = []
    with LocalCluster(workers=1, slots=1) as cluster:
        work = order(cluster, 7)
        task = threading.Thread(target=lambda: reasons.extend(work(iter([0]))))
        task.start()
        try:
            wait_until(lambda: 7 in {worker.worker for worker in cluster.status().workers}, "worker 7")
            (files,) = directory.iterdir()
            wait_until(lambda: not (files / "secret").exists(), "the end of its secret file")
            assert files.stat().st_mode & 0o077 == 0
            assert cluster.status().workers[-1].host == "127.0.0.1"
        finally:
            cluster.client.stop_cluster()
            task.join(SECONDS_MAX)
    assert reasons == [""]
    assert not list(directory.iterdir())


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended(directory: Path, wait_until: Until) -> None:
    """Stopped, and unable to end in order, as one whose function holds the interpreter."""
    reasons: list[str] = []
    timing = {"heartbeat_interval": 0.2, "heartbeat_timeout": 1.0}
    with LocalCluster(workers=1, slots=1, **timing) as cluster:
        work = order(cluster, 7)
        task = threading.Thread(target=lambda: reasons.extend(work(iter([0]))))
        task.start()
        found = wait_until(
            lambda: [each for each in cluster.status().workers if each.worker == 7], "worker 7"
        )
        os.kill(found[0].pid, signal.SIGSTOP)
        task.join(SECONDS_MAX)
        assert reasons == [f"worker 7 hung on {socket.gethostname()}, and was ended"]
        assert not psutil.pid_exists(found[0].pid)
    assert not list(directory.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_a_wrong_secret_is_named(cluster: LocalCluster, directory: Path) -> None:
    reason = run_worker_task(order(cluster, 8, SECRET))
    assert reason.startswith(f"worker 8 ended with code 1 on {socket.gethostname()}: minishuffle: ")
    assert "secret" in reason and SECRET.decode() not in reason
    assert not list(directory.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_a_number_that_is_taken_is_refused(cluster: LocalCluster, directory: Path) -> None:
    reason = run_worker_task(order(cluster, 1))
    assert f"worker id 1 is held by process {cluster.workers[1]} on 127.0.0.1" in reason
    assert not list(directory.iterdir())


def test_a_coordinator_out_of_reach_is_named_with_the_mend(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reason = run_worker_task(WorkerOrder(1, "local", Address("127.0.0.1", port), SECRET))
    assert reason == (
        f"executor {socket.gethostname()}: cannot connect to 127.0.0.1:{port}: Connection refused; let the "
        "coordinator listen on an address that executors reach (--host, or SparkCluster(host=...))"
    )
    assert not list(directory.iterdir())


def test_what_spark_tries_again_ends_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondAttempt:
        def attemptNumber(self) -> int:
            return 1

    monkeypatch.setattr(TaskContext, "get", classmethod(lambda _: SecondAttempt()))
    reason = run_worker_task(WorkerOrder(1, "local", Address("127.0.0.1", 1), SECRET))
    assert reason.startswith("its executor was lost")
    assert not list(directory.iterdir())


def test_functions_of_a_worker_may_print_as_much_as_they_like(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads what they print. What Python prints at its start is not the line of a worker."""
    program, script = directory / "python", directory / "worker.py"
    line = json.dumps({"ready": "worker", "worker": 7, "epoch": 1, "pid": 1})
    # Its first line cannot name a Python whose path has blanks.
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    script.write_text(
        "import signal, sys, time\nsignal.alarm(20)\n"
        "print('warning', flush=True)\ntime.sleep(0.3)\n"
        "secret = sys.argv[sys.argv.index('--secret-file') + 1]\n"
        f"assert open(secret).read()\nprint({line!r}, flush=True)\nprint('x' * 1_000_000)\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(executors, "VERDICT_SECONDS", 0.02)
    monkeypatch.setattr(executors, "ANSWER_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as server:
        reason = run_worker_task(WorkerOrder(7, "local", Address(*server.getsockname()), SECRET))
    assert reason == ""
    assert {*directory.iterdir()} == {program, script}


def test_an_order_does_not_show_its_secret() -> None:
    assert SECRET.decode() not in repr(WorkerOrder(1, "local", Address("127.0.0.1", 1), SECRET))
