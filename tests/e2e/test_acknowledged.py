"""A queue of which is kept only what was not acknowledged, under a job that is to lose nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import TaskCancelled
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETTINGS = JobSettings(
    guarantee="at_least_once", snapshot_interval=0.2, snapshot_cost_max=1.0, durable_interval=0.3
)


class Queue:
    """Numbers, ten at a time. Those below the number in its file are gone; it fails where one of them is
    asked for."""

    replayable, bounded = True, False

    def __init__(self, file: Path) -> None:
        self.file = file

    def splits(self) -> list[str]:
        return ["queue"]

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[int], bytes]]:
        number = int(position or b"0")
        if number < int(self.file.read_text()):
            self.file.with_suffix(".lost").write_text(f"asked for {number}")
        while True:
            yield list(range(number, number + 10)), b"%d" % (number + 10)
            number += 10
            threading.Event().wait(0.005)

    def acknowledge(self, positions: dict[str, bytes]) -> None:
        self.file.write_text(positions["queue"].decode())


def test_what_is_acknowledged_is_asked_for_never_again(
    tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    file = tmp_path / "queue"
    file.write_text("0")

    def acknowledged(more: int = 0) -> int:
        wait_until(lambda: int(file.read_text() or 0) > more, f"more than {more} to be acknowledged")
        return int(file.read_text() or 0)

    with LocalCluster(workers=2, slots=1) as cluster:
        job = Stream.source(Queue(file)).parallel(1).rebalance().map(abs).collect()
        handle = cluster.submit(job, parallelism=2, settings=SETTINGS)
        first = acknowledged()
        assert handle.info().durable.taken
        wait_until(lambda: not handle.info().unprotected, "holders")
        cluster.kill_worker(handle.info().tasks[0].worker)
        first = acknowledged(first + 300)
        before = handle.info().fallbacks
        for worker in cluster.status().workers:
            cluster.kill_worker(worker.worker)
        wait_until(lambda: handle.info().fallbacks > before, "the job to go back")
        first = acknowledged(first + 300)
        handle.cancel()
        rows = set[int]()
        with pytest.raises(TaskCancelled):
            for row in handle.rows():
                rows.add(row)
    assert not file.with_suffix(".lost").exists()
    assert rows.issuperset(range(first)), "some that were acknowledged are lost"
