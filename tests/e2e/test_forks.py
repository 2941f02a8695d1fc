"""Functions that fork: the copy of a worker's process keeps nothing of its network, and signals to it are its
own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HEARTBEAT_TIMEOUT = 60.0
SECONDS_MAX = 20.0
"""Less than that, by far: for what is to happen at once on a busy machine."""


class Forks:
    """Forks once in each process, when there is a file: the copy writes its id to another, and waits for a
    signal."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.forked = False

    def __call__(self, number: int) -> int:
        if not self.forked and (self.directory / "now").exists():
            self.forked = True
            parent = os.getpid()
            if os.fork() == 0:
                new = self.directory / f"{parent}.new"
                new.write_text(str(os.getpid()))
                new.replace(self.directory / str(parent))
                signal.pause()
                os._exit(0)
        return number


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[dict[int, int]]:
    """By worker's process, its copy; filled by the test, and killed at its end."""
    found: dict[int, int] = {}
    yield found
    for file in tmp_path.iterdir():
        if file.name.isdecimal():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("use_uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_worker_that_is_killed_is_missed_at_once_though_a_copy_of_it_lives(
    use_uvloop: bool, tmp_path: Path, copies: dict[int, int], wait_until: Callable[..., Any]
) -> None:
    endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=100)
    keyed = endless.map(Forks(tmp_path)).key_by(lambda number: number % 100).count(emit="batch").to_count()
    with LocalCluster(
        workers=2,
        slots=1,
        restart_workers=False,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        suspect_after=HEARTBEAT_TIMEOUT,
        use_uvloop=use_uvloop,
    ) as cluster:
        cluster.submit(keyed, parallelism=2)

        def forked() -> bool:
            for pid in cluster.workers.values():
                if (tmp_path / str(pid)).exists():
                    copies[pid] = int((tmp_path / str(pid)).read_text())
            return len(copies) == 2

        wait_until(lambda: all(worker.peers for worker in cluster.status().workers), "a data connection")
        (tmp_path / "now").touch()
        wait_until(forked, "the forks")
        victim = cluster.workers[2]
        for worker, copy in copies.items():
            # The coordinator's, the other worker's, and the ports for those and for metrics.
            assert len(psutil.Process(worker).net_connections("tcp")) >= 4
            assert psutil.Process(copy).net_connections("tcp") == []

        cluster.kill_worker(2)
        lost = lambda: [worker.state for worker in cluster.status().workers] == ["alive", "lost"]  # noqa: E731
        wait_until(lost, "the loss of worker 2", SECONDS_MAX)
        assert psutil.Process(copies[victim]).status() != psutil.STATUS_ZOMBIE  # It lives on.


def terminated(number: int) -> int | None:
    """The exit code of a process that is forked and ended, as pools of ``multiprocessing`` end theirs."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    process.terminate()
    process.join(SECONDS_MAX)
    code = process.exitcode
    process.kill()
    process.join()
    return code


@pytest.mark.parametrize("use_uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_function_ends_what_it_has_forked_and_not_its_worker(use_uvloop: bool) -> None:
    with LocalCluster(workers=1, slots=1, restart_workers=False, use_uvloop=use_uvloop) as cluster:
        codes = cluster.run(Stream.items(range(20)).map(terminated).collect(), timeout=60)
        assert codes == [-signal.SIGTERM] * 20
        assert [worker.state for worker in cluster.status().workers] == ["alive"]
