"""A job with a guarantee whose workers are all killed at once: it goes back to its last durable snapshot, and
loses nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("wider_resources")]

SPLITS, ROWS, KEYS = 4, 3_000, 50


class Gated:
    """Rows with a key, which wait in the middle of each split for a file, and come slowly until then."""

    bounded = True

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def splits(self) -> range:
        return range(SPLITS)

    def read(self, split: int, offset: int) -> Iterator[list[dict[str, int]]]:
        while offset < ROWS:
            if not self.gate.exists():
                threading.Event().wait(0.005)
                if offset >= ROWS // 2 + 100 * split:
                    yield []
                    continue
            end = min(ROWS, offset + 20)
            yield [{"k": (n * 7 + split) % KEYS, "n": n, "split": split} for n in range(offset, end)]
            offset = end


def rows_in(directory: Path) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for file in directory.glob("*.parquet"):
        found.update(tuple(row.values()) for row in pq.read_table(file).to_pylist())
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_all_killed_at_once_take_no_row_and_no_count_with_them(
    tmp_path: Path, wait_until: Callable[..., Any], workers: int
) -> None:
    source = Stream.source(Gated(tmp_path / "gate"))
    jobs = {
        "count": source.key_by("k").count(emit="end").to_files(tmp_path / "count"),
        "rows": source.rebalance().to_files(tmp_path / "rows"),
    }
    given = JobSettings(guarantee="at_least_once", durable_interval=0.4)
    with LocalCluster(workers=workers, slots=8, slot_timeout=150.0) as cluster:
        handles = [
            cluster.submit(job, name=name, parallelism=2, settings=given) for name, job in jobs.items()
        ]
        for handle in handles:
            wait_until(lambda handle=handle: handle.info().durable.taken >= 2, "durable snapshots")
        for worker in cluster.status().workers:
            cluster.kill_worker(worker.worker)
        for handle in handles:
            wait_until(lambda handle=handle: handle.info().fallbacks, "the job to go back")
        (tmp_path / "gate").touch()
        for handle in handles:
            handle.wait()
        infos = [handle.info() for handle in handles]
        snapshots = cluster.state_dir / "snapshots"
        wait_until(
            lambda: not list(snapshots.glob("*")), "the snapshots of jobs that have ended to be removed"
        )
    assert [(info.state, info.rows_dropped, info.rows_in_flight) for info in infos] == 2 * [
        ("finished", {}, 0)
    ]
    rows = [((n * 7 + split) % KEYS, n, split) for split in range(SPLITS) for n in range(ROWS)]
    counts = Counter(key for key, _, _ in rows)
    assert rows_in(tmp_path / "count") == Counter(counts.items())
    found, expected = rows_in(tmp_path / "rows"), Counter(rows)
    assert not expected - found, "some rows are lost"
    assert (found - expected).total() <= infos[1].rows_again, "more came twice than was counted"
