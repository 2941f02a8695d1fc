"""A worker is killed under a keyed count that is to lose nothing: every row is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import JobInfo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SPLITS = 2
ROWS = 12_000
RATE = 4_000
KEYS = 7
SETTINGS = JobSettings(guarantee="at_least_once", snapshot_interval=0.2)


class Numbers:
    """As many rows in each split as it has; together RATE rows a second."""

    rate = RATE

    def splits(self) -> list[int]:
        return list(range(SPLITS))

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for begin in range(offset, ROWS // SPLITS, 10):
            yield list(range(begin, begin + 10))


@pytest.mark.parametrize("victim", [1, 2])
def test_every_row_is_counted_though_a_worker_is_killed(wait_until: Callable[..., Any], victim: int) -> None:
    with LocalCluster(workers=2, slots=1) as cluster:
        job = cluster.submit(
            Stream.source(Numbers()).key_by(lambda row: row % KEYS).count().collect(),
            parallelism=2,
            settings=SETTINGS,
        )
        wait_until(lambda: rows_read(job.info()) > ROWS // 3 and not job.info().unprotected, "snapshots")
        cluster.kill_worker(victim)
        found = job.wait(timeout=90)
        info = job.info()
    expected = Counter(row % KEYS for row in range(ROWS // SPLITS) for _ in range(SPLITS))
    assert dict(found.rows) == expected
    assert info.restarts and not (info.rows_dropped or info.rows_in_flight or info.state_rows_lost)


def rows_read(info: JobInfo) -> int:
    return sum(task.counters.records_out for task in info.tasks if task.operator == 0)
