"""A source that has finished is killed with its worker while a consumer has yet to read all of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from minishuffle import LocalCluster, Stream
from minishuffle.plan.graph import JobSettings
from support.waiting import until

ROWS = 30_000


class Numbers:
    """Three splits, one for each subtask: ROWS numbers of a split, a hundred at a time."""

    def splits(self) -> list[int]:
        return [0, ROWS, 2 * ROWS]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for first in range(split + offset, split + ROWS, 100):
            yield list(range(first, min(first + 100, split + ROWS)))


@pytest.mark.slow
def test_nothing_is_missing_and_nothing_comes_twice(tmp_path: Path) -> None:
    """Rows go to two consumers by their last bit. That of the odd ones waits in the middle until the worker
    is gone that has the third source alone; the other has read everything by then, or is about to."""
    go_on = tmp_path / "go on"
    os.mkfifo(go_on)
    waited: list[int] = []

    def wait_at_odd_ones(row: int) -> int:
        if row % 2 and row % ROWS > 500 and not waited:
            waited.append(row)
            go_on.read_bytes()  # until the other end is opened and closed
        return row

    def last_bit(row: int, consumers: int) -> int:
        return row % 2

    stream = (
        Stream.source(Numbers()).partition(last_bit).map(wait_at_odd_ones).parallel(2).collect().parallel(2)
    )
    settings = JobSettings(on_unavailable="wait", buffer_timeout=0)
    with LocalCluster(workers=4, slots=1) as cluster:
        job = cluster.submit(stream, parallelism=3, settings=settings)

        def task(index: int) -> str:
            (found,) = [each for each in job.info().tasks if (each.operator, each.index) == (0, index)]
            return f"{found.state} {found.attempt} {found.worker}"

        until(lambda: task(2).startswith("finished"), "the third source has finished")
        cluster.kill_worker(int(task(2).split()[2]))
        until(lambda: task(2).split()[1] == "2", "it runs again")
        go_on.write_bytes(b"")
        rows = Counter(job.rows())
        info = job.info()
    assert info.state == "finished" and info.rows_dropped == {} and info.rows_in_flight == 0
    assert rows == Counter(range(3 * ROWS))
    assert {(each.operator, each.index): each.attempt for each in info.tasks}[0, 2] == 2
