"""A worker as the one task of a job of Spark: what runs on the executor, and nothing of the driver.

The worker is a child process of Spark's Python worker, which is used again for other tasks: no thread and
no signal handler of ours may stay in it. The child ends when its standard input does, so it does not
outlive a Python worker that Spark kills; that one in turn ends with its executor, which ends with the
driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyspark import TaskContext

from minishuffle.client import Client
from minishuffle.config import HASH_SEED, hash_seed
from minishuffle.errors import (
    PeerLost,
    ShuffleError,
    text_of,
)
from minishuffle.ids import Address
from minishuffle.launch import POLL_SECONDS, Child
from minishuffle.postmortem import observed
from minishuffle.replacements import REGISTRATION_SECONDS_MAX, SignalSequence
from minishuffle.transport.addresses import unreachable
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.requests import Accepted, ClusterStatus, GetStatus, WorkerEnded

__all__ = ["WorkerOrder", "run_worker_task"]

LOG_TAIL_LINES: Final = 5
STOP_SECONDS: Final = 20.0
VERDICT_SECONDS: Final = 0.5
"""Between two questions to the coordinator whether it has declared the worker lost."""
ANSWER_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What an executor needs to know to run worker number ``worker``; ``flags`` are its settings."""

    worker: int
    cluster: str
    coordinator: Address
    secret: bytes = field(repr=False)
    flags: tuple[str, ...] = ()
    tls: Credentials | None = field(default=None, repr=False, compare=False)
    """By which it asks the coordinator; the worker has its files by ``flags``."""

    def __call__(self, _: Iterable[int]) -> Iterator[str]:
        """(In an executor.) Runs the worker to its end and tells how that was; never raises, because Spark
        would try it again under the same number."""
        yield run_worker_task(self)


def run_worker_task(order: WorkerOrder) -> str:
    """Run a worker until it ends; gives the reason, empty for an orderly end."""
    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        return "its executor was lost (a worker's number is used once: what Spark tries again ends at once)"
    try:
        directory = Path(
            tempfile.mkdtemp(prefix="minishuffle-executor-", dir=_spark_directory())
        )  # mode 0700
    except OSError as error:
        return f"the executor has no room for a worker's files: {text_of(error)}"
    try:
        return _run(order, directory)
    except PeerLost as error:
        return str(error)
    except OSError as error:
        return f"the worker does not start on this executor: {text_of(error)}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _spark_directory() -> str | None:
    """Where Spark lets tasks put their data, and clears up even after an executor that was killed."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return first if os.path.isdir(first) else None


def _run(order: WorkerOrder, directory: Path) -> str:
    secret_file = directory / "secret"
    descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(order.secret)
    command = [
        sys.executable,
        "-m",
        "minishuffle.cli",
        *("--cluster", order.cluster, "--state-dir", str(directory), "--secret-file", str(secret_file)),
        *("--coordinator", str(order.coordinator), "worker", "start", "--exit-with-parent"),
        *("--host", _own_address(order.coordinator), "--id", str(order.worker), *order.flags),
    ]
    out, log = directory / "worker.out", directory / "worker.log"
    with out.open("wb") as output, log.open("wb") as errors, observed() as (observation, more, descriptors):
        process = subprocess.Popen(
            [*command, *more],
            stdin=subprocess.PIPE,
            stdout=output,  # A pipe would be full once functions have printed enough.
            stderr=errors,
            start_new_session=True,
            pass_fds=descriptors,
            env={**os.environ, HASH_SEED: hash_seed(order.secret)},
        )
        observation.began(process.pid)
        with contextlib.closing(Child("worker", process, out, log, observation=observation)) as child:
            hangs = False
            try:
                if hangs := _waits(order, child, secret_file):
                    observation.hangs()
            finally:
                _end(child, hangs)
            code = process.poll()
            if code is not None and (end := observation.report(child.read_ready(), code)) is not None:
                _tell(order, end)
    if hangs:
        return f"worker {order.worker} hung on {socket.gethostname()}, and was ended"
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"worker {order.worker} ended with code {code} on {socket.gethostname()}: {' '.join(lines)}"


def _own_address(coordinator: Address) -> str:
    """The address of this machine by which the coordinator is reached, and others reach this worker.

    Raises:
        PeerLost: there is no way to the coordinator from here.
    """
    try:
        with socket.create_connection((coordinator.host, coordinator.port), CONNECT_SECONDS) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise PeerLost(
            f"executor {socket.gethostname()}: {unreachable(coordinator, CONNECT_SECONDS, error)}; let the "
            "coordinator listen on an address that executors reach (--host, or SparkCluster(host=...))"
        ) from error


def _client(order: WorkerOrder, seconds: float) -> Client:
    return Client(order.coordinator, order.secret, cluster=order.cluster, timeout=seconds, tls=order.tls)


def _tell(order: WorkerOrder, end: WorkerEnded) -> None:
    """Tell the coordinator how the worker ended, once; it can do without."""
    with (
        contextlib.suppress(ShuffleError),
        _client(order, CONNECT_SECONDS) as client,
    ):
        client.request(end, Accepted)


def _waits(order: WorkerOrder, child: Child, secret_file: Path) -> bool:
    """Wait until the worker ends, or hangs, which is given: it runs although the coordinator has declared it
    lost, or it has not registered in time."""
    is_registered, deadline = False, time.monotonic() + REGISTRATION_SECONDS_MAX
    question = GetStatus(jobs=False, reports=False, worker=order.worker)
    with _client(order, ANSWER_SECONDS) as client:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(VERDICT_SECONDS)
            if not is_registered and child.read_ready() is not None:
                is_registered = True
                secret_file.unlink()
            if child.process.poll() is not None:
                return False
            child.observation.look(time.monotonic())
            if not is_registered and time.monotonic() > deadline:
                return True
            with contextlib.suppress(ShuffleError):  # It is asked again.
                found = client.request(question, ClusterStatus).workers
                if [(worker.pid, worker.state) for worker in found] == [(child.pid, "lost")]:
                    return True


def _end(child: Child, hangs: bool) -> None:
    """Have it end, in order if it does not hang. What SIGKILL does not end, as a disk does not answer it, is
    left."""
    process = child.process
    assert process.stdin is not None
    process.stdin.close()
    if not hangs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    sequence = SignalSequence(time.monotonic())
    while process.poll() is None and not sequence.outlived(now := time.monotonic()):
        for number in sequence.due(now):
            child.send_signal(number)
        time.sleep(POLL_SECONDS)
