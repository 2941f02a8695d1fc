"""A job with a guarantee whose workers are all killed at once: it goes back to its last durable snapshot, and
loses nothing, also if the next ones could not be written."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from support.objectstore import Faults, object_store

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


@contextmanager
def refused(faults: Faults, cluster: LocalCluster) -> Iterator[None]:
    """The store answers each request that writes by 503."""
    faults.refused = {"PUT", "POST"}
    yield
    faults.refused = set()


@contextmanager
def late(faults: Faults, cluster: LocalCluster) -> Iterator[None]:
    """The store answers no request that writes."""
    faults.late = {"PUT", "POST"}
    yield
    faults.late = set()
    faults.released.set()


@contextmanager
def full(faults: Faults, cluster: LocalCluster) -> Iterator[None]:
    """No worker can write to a file."""
    for pid in cluster.workers.values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    yield  # The next processes can.


@pytest.mark.parametrize(
    ("strike", "directory"),
    [
        pytest.param(refused, "s3", marks=pytest.mark.soak),
        pytest.param(late, "s3", marks=pytest.mark.soak),
        pytest.param(full, "", id="full"),
    ],
)
def test_a_job_runs_on_while_no_snapshot_can_be_written_and_goes_back_to_the_last_good_one(
    strike: Any,
    directory: str,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    objects, faults = {"bucket/": b""}, Faults()
    given = JobSettings(guarantee="at_least_once", durable_interval=0.4)
    with object_store(objects, faults) as options:
        place = f"s3://key:word@bucket/snapshots?{options}" if directory else ""
        with LocalCluster(workers=2, slots=8, slot_timeout=150.0, snapshot_dir=place) as cluster:
            count = Stream.source(Gated(tmp_path / "gate")).key_by("k").count(emit="end")
            handle = cluster.submit(count.collect(), parallelism=2, settings=given)
            wait_until(lambda: handle.info().durable.taken, "a durable snapshot")
            with strike(faults, cluster):
                wait_until(lambda: handle.info().durable.failed, "one that fails", 60.0)
                info = handle.info()
                assert (info.state, info.restarts) == ("running", {})
                before = info.durable
                assert before.problem and before.taken_at
                for worker in cluster.status().workers:
                    cluster.kill_worker(worker.worker)
                wait_until(lambda: handle.info().fallbacks, "the job to go back", 60.0)
            (tmp_path / "gate").touch()
            found = handle.wait()
            events = [event.text for event in handle.events() if event.kind == "job begins again"]
            wait_until(lambda: not [each for each in objects if each.endswith("manifest")], "removal")

    assert events == [f"all tasks go on from durable snapshot {before.number}"]
    assert dict(found.rows) == Counter((n * 7 + split) % KEYS for split in range(SPLITS) for n in range(ROWS))
