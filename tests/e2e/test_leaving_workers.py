"""Real workers that leave: SIGTERM and ``worker drain`` have their tasks move, and a whole cluster ends soon.

``MINISHUFFLE_SOAK=1`` restarts three workers again and again, and ends clusters in each order.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import Client, JobHandle
from minishuffle.config import ClusterSettings, create_secret, read_secret
from minishuffle.launch import Child, start_processes, stop_children
from minishuffle.local import LocalCluster
from support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TURNS = 15 if SOAK else 3
SECONDS_MAX = 60.0
END_SECONDS_MAX = 5.0
"""For a whole cluster to end by signals."""
SPLITS = 4
Until = Callable[..., Any]
PACE = threading.Event()
"""Never set."""


class Splits:
    """Rows of four splits without an end, each with its number; ``note`` is told of what is emitted."""

    bounded = False

    def splits(self) -> list[int]:
        return list(range(SPLITS))

    def read(self, split: int, offset: int) -> Iterator[list[tuple[int, int]]]:
        while True:
            yield [(split, number) for number in range(offset, offset + 5)]
            offset += 5
            threading.Event().wait(0.01)


class Numbers(Splits):
    """Splits of so many rows, the last of which come when a file is there."""

    bounded = True
    ROWS, HELD = 2_000, 100

    def __init__(self, go: str) -> None:
        self._go = go

    def read(self, split: int, offset: int) -> Iterator[list[tuple[int, int]]]:
        while offset < self.ROWS:
            if offset >= self.ROWS - self.HELD and not os.path.exists(self._go):
                threading.Event().wait(0.01)
                yield []
                continue
            yield [(split, number) for number in range(offset, offset + 5)]
            offset += 5
            threading.Event().wait(0.01)


def noted(folder: str) -> Callable[[tuple[int, int]], tuple[int, int]]:
    """Writes down each row that a source emits, in a file of the process."""

    def note(row: tuple[int, int]) -> tuple[int, int]:
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(f"{row[0]} {row[1]}\n")
        return row

    return note


def emitted(folder: Path) -> dict[int, Counter[int]]:
    """By split: how often each row was emitted."""
    found: dict[int, Counter[int]] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            split, number = map(int, line.split())
            found.setdefault(split, Counter())[number] += 1
    return found


def endless(folder: Path) -> Stream[Any]:
    rows = Stream.source(Splits()).map(noted(str(folder)))
    return rows.key_by(lambda row: row[1] % 20).count(emit="batch").to_count()


def drain(cluster: LocalCluster, worker: int) -> Any:
    """What the command prints."""
    where = ["--coordinator", str(cluster.client.address), "--secret-file", str(cluster.state_dir / "secret")]
    words = ["worker", "drain", str(worker), "--wait", "--json"]
    command = [sys.executable, "-m", "minishuffle.cli", *where, "--cluster", "local", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
    return json.loads(done.stdout)


def running_on(handle: JobHandle) -> set[int]:
    """The workers of the tasks, once all of them run."""
    tasks = handle.info().tasks
    return {task.worker for task in tasks} if all(task.state == "running" for task in tasks) else set()


def test_workers_are_restarted_one_after_the_other_under_a_count(wait_until: Until, tmp_path: Path) -> None:
    """One is sent SIGTERM, the next is asked to leave. Each source goes on exactly where it was, and each
    count with what it had: the result is that of a run without."""
    folder, go = tmp_path / "rows", tmp_path / "go"
    folder.mkdir()
    left: list[Child] = []
    with LocalCluster(workers=3, slots=2) as cluster:
        processes = cluster._running()
        rows = Stream.source(Numbers(str(go))).map(noted(str(folder)))
        counts = rows.key_by(lambda row: row[1] % 20).count().collect()
        handle = cluster.submit(counts, parallelism=4)
        wait_until(lambda: running_on(handle), "all tasks to run")
        moved = 0
        for turn, worker in itertools.islice(enumerate(itertools.cycle((1, 2, 3))), TURNS):
            old = processes.workers[worker]
            moved += 2 * len({task.index for task in handle.info().tasks if task.worker == worker})
            if turn % 2:
                assert drain(cluster, worker) == {"worker": worker, "timeout": None, "left": True}
            else:
                old.process.send_signal(signal.SIGTERM)
            assert old.process.wait(SECONDS_MAX) == 0
            left.append(old)
            wait_until(lambda worker=worker: running_on(handle) - {worker}, "all tasks to run elsewhere")
            assert worker not in running_on(handle)
            processes.workers[worker] = processes.launch.start(worker, cluster.client.address)
            wait_until(
                lambda worker=worker: (
                    {each.worker for each in cluster.client.workers() if each.state == "alive"} == {1, 2, 3}
                ),
                f"the next worker {worker}",
            )
        go.touch()
        assert dict(handle.rows()) == dict.fromkeys(range(20), SPLITS * Numbers.ROWS // 20)
        info = handle.info()
        assert moved and info.restarts == {"drained": moved}
        assert info.state == "finished" and not info.rows_again and not info.state_rows_lost
        assert info.first_failure is None and not info.causes
    for old in left:
        old.close()
    assert emitted(folder) == {split: dict.fromkeys(range(Numbers.ROWS), 1) for split in range(SPLITS)}


def orders() -> list[tuple[int, ...]]:
    """Of the coordinator (0) and two workers."""
    return list(itertools.permutations(range(3))) if SOAK else [(1, 2, 0), (0, 1, 2)]


@pytest.mark.parametrize("pause", [0.0, 0.3] if SOAK else [0.0])
@pytest.mark.parametrize("order", orders(), ids=lambda order: "".join(map(str, order)))
def test_all_processes_end_soon_in_whatever_order_they_are_sent_sigterm(
    order: Sequence[int], pause: float, wait_until: Until, tmp_path: Path
) -> None:
    """As ``docker compose down`` does. No worker waits for another that leaves too, however long it might."""
    secret = tmp_path / "secret"
    create_secret(secret)
    processes = start_processes(
        cluster="local",
        state_dir=tmp_path,
        secret_file=secret,
        workers=2,
        settings=ClusterSettings(drain_timeout=10 * SECONDS_MAX, slots=1),
    )
    children: list[Child] = [processes.coordinator, *processes.workers.values()]
    try:
        rows = tmp_path / "rows"
        rows.mkdir()
        with Client(processes.address, read_secret(secret), cluster="local") as client:
            handle = client.submit(endless(rows), parallelism=2)
            wait_until(lambda: running_on(handle) == {1, 2}, "all tasks to run")
        begin = time.monotonic()
        for each in order:
            children[each].process.send_signal(signal.SIGTERM)
            PACE.wait(pause)
        assert [child.process.wait(SECONDS_MAX) for child in children] == [0, 0, 0]
        seconds = time.monotonic() - begin
        assert not SOAK or seconds < END_SECONDS_MAX
    finally:
        stop_children(children, 0.0)
