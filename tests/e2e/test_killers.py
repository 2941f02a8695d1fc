"""Functions that end their process: their job fails with the cause, and a job beside it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle import JobSettings, LocalCluster, Stream, replacements
from minishuffle.backoff import Backoff
from minishuffle.client import JobHandle
from minishuffle.errors import TaskFailed
from minishuffle.limits import RESTART_FAILURES_MAX_DEFAULT
from minishuffle.wire.requests import JobEvent
from support.soak import SOAK
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS_PER_SECOND = 2_000
WAYS = {
    "exit 1": "ended with code 1, which was not its own doing",
    "exit 0": "ended with code 0, which was not its own doing",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGBUS": "was killed by SIGBUS",
    "SIGABRT": "was killed by SIGABRT",
    "SIGFPE": "was killed by SIGFPE",
    "SIGILL": "was killed by SIGILL",
    "memory": "was killed for want of memory (SIGKILL, and its cgroup counts an oom_kill)",
}
MEMORY_BYTES = 1_600_000_000
"""Of a whole cluster; its workers take 100 MB each before they do anything."""


class Killer:
    """Ends its process at its first record."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __call__(self, row: Any) -> Any:
        if self.way.startswith("exit"):
            os._exit(int(self.way[-1]))
        held = []
        while self.way == "memory":
            held.append(bytearray(b"x") * 50_000_000)
        signal.raise_signal(getattr(signal, self.way))
        return row


@contextlib.contextmanager
def small_cgroup() -> Iterator[None]:
    """This process, and what it starts, may have only so much memory."""
    root = Path("/sys/fs/cgroup/memory")
    if not root.is_dir():
        root = root.parent
    limit = "memory.max" if root.name == "cgroup" else "memory.limit_in_bytes"
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    controller = "" if root.name == "cgroup" else "memory"
    (before,) = [line.split(":", 2)[2] for line in lines if line.split(":")[1] == controller]
    group = root / "minishuffle-killers"
    try:
        group.mkdir(exist_ok=True)
        (group / limit).write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        pytest.fail(f"no cgroup can be made here, which takes root: {error}")
    try:
        yield
    finally:
        (root / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of what was started there")
        group.rmdir()


def same(row: Any) -> Any:
    return row


def found(job: JobHandle, kind: str) -> list[JobEvent]:
    return [event for event in job.events() if event.kind == kind]


@pytest.mark.parametrize(
    ("way", "failures_max", "seconds"),
    [
        ("exit 1", 3, 4),
        *((way, RESTART_FAILURES_MAX_DEFAULT, 60) for way in WAYS if SOAK),
    ],
)
def test_a_function_that_ends_its_process_fails_its_job_and_no_other(
    way: str, failures_max: int, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SOAK:
        monkeypatch.setattr(replacements, "BACKOFF", Backoff(0.0, 0.0))
    if way == "memory":
        monkeypatch.setattr("minishuffle.launch.Popen", subprocess.Popen)
    rows = seconds * ROWS_PER_SECOND
    healthy_rows = Stream.generate(rate=ROWS_PER_SECOND, records=rows).map(same).rebalance().map(same)
    place = small_cgroup() if way == "memory" else contextlib.nullcontext()
    with place, LocalCluster(workers=3, slots=2) as cluster:
        healthy = cluster.submit(healthy_rows.collect(), name="healthy", parallelism=3)
        killer = cluster.submit(
            Stream.generate(rate=1000).map(Killer(way)).collect(),
            name="killer",
            parallelism=1,
            settings=JobSettings(restart_failures_max=failures_max),
        )
        with pytest.raises(TaskFailed) as failed:
            killer.wait(timeout=300)
        result = healthy.wait(timeout=300, allow_loss=True)
        info = healthy.info()
        isolated = min(event.at for event in found(killer, "worker isolated"))
        before = [event for event in found(killer, "death counted") if event.at < isolated]
        lost = found(healthy, "task lost")

    assert f"each of the {failures_max} times that its worker died (restart_failures_max)" in str(
        failed.value
    )
    assert WAYS[way] in str(failed.value) and "generate -> map -> collect[0]" in str(failed.value)
    assert "rows in hand behind the 0 that it had done" in str(failed.value)
    for operator, index in {(event.operator, event.index) for event in lost if way != "memory"}:
        times = [event for event in lost if (event.operator, event.index) == (operator, index)]
        assert len(times) <= len(before), "each death before that took it along once"
    # For want of memory the kernel ends whichever process of the cgroup is the largest.
    assert way == "memory" or all(event.at <= isolated for event in lost), "none afterwards"
    assert len(set(result.rows)) == len(result.rows), "none comes twice"
    missing = rows - len(result.rows)
    dropped = sum(info.rows_dropped.values())
    assert dropped <= missing <= dropped + info.rows_in_flight, "the books balance"


class KillerRow:
    """Ends its process at one row."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def __call__(self, row: Any) -> Any:
        if row == self.row:
            os._exit(3)
        return row


class Numbers:
    """Rows in order, in one split."""

    rate = 2_000
    rows = 3_000

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for begin in range(offset, self.rows, 50):
            yield list(range(begin, begin + 50))


def test_a_row_that_ends_its_process_is_a_dead_letter_and_the_state_before_it_stays_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replacements, "BACKOFF", Backoff(0.0, 0.0))
    failures_max, keys, bad = 2, 100, (34, 13)
    counted = Stream.source(Numbers()).key_by(lambda row: row % keys).count(emit="each")
    rows = counted.map(KillerRow(bad), on_error="dead_letter")
    settings = JobSettings(
        guarantee="at_least_once", snapshot_interval=0.1, restart_failures_max=failures_max
    )
    with LocalCluster(workers=2, slots=1) as cluster:
        job = cluster.submit(rows.collect(), name="poison", parallelism=1, settings=settings)
        result = job.wait(timeout=120)
        letters = [line for line in job.logs() if "dead letter" in line]
        deaths, info = found(job, "death counted"), job.info()
    numbers = range(1, Numbers.rows // keys + 1)
    assert {*map(tuple, result.rows)} == {(key, number) for key in range(keys) for number in numbers} - {bad}
    assert len(result.rows) == Numbers.rows - 1 + info.rows_again
    assert letters and all(letter.endswith(f"record {bad}") for letter in letters)
    assert "FatalRecord: the function took this record each of" in letters[0]
    in_hand = max(int(re.findall(r"with ([\d,]+) rows", each.text)[0].replace(",", "")) for each in deaths)
    assert failures_max <= len(deaths) <= failures_max + math.ceil(math.log2(in_hand)) + 2
