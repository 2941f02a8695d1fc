"""Real jobs that go on from a savepoint, in another cluster and at another parallelism: their files together
are those of the run without."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.errors import UsageError
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("wider_resources")]

SPLITS, ROWS, KEYS = 6, 4_000, 50
MOMENT = timedelta(seconds=40)


class Gated:
    """Rows with a key and a time (milliseconds), which wait in the middle of each split for a file."""

    bounded = True

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def splits(self) -> range:
        return range(SPLITS)

    def read(self, split: int, offset: int) -> Iterator[list[dict[str, Any]]]:
        middle = ROWS // 2 + 100 * split
        while offset < ROWS:
            if offset >= middle and not self.gate.exists():
                threading.Event().wait(0.005)
                yield []
                continue
            end = min(ROWS if offset >= middle else middle, offset + 70)
            yield [{"k": (n * 7 + split) % KEYS, "t": n * 1_000_000 + split} for n in range(offset, end)]
            offset = end


def pipelines(gate: Path, out: Path) -> dict[str, Stream[Any]]:
    source = Stream.source(Gated(gate))
    timed = source.event_time("t", out_of_order=timedelta(seconds=5))
    keyed, small = timed.key_by("k"), timed.filter(lambda row: row["k"] < 3).key_by("k")
    made = {
        "count": source.key_by("k").count(emit="end").map(list),
        "windows": keyed.window(MOMENT).count().map(shown),
        "sessions": keyed.session_window(MOMENT).count().map(shown),
        "ended": source.map(key_of).union(Stream.items(range(KEYS)).key_by(same).count(emit="end").map(list)),
        "side": source.broadcast_join(Stream.items([{"k": 3, "x": 1}, {"k": 4, "x": 2}]), on="k").map(shown),
        "joined": keyed.join(small, within=timedelta(seconds=9)).map(shown),
    }
    return {name: stream.to_files(out / name) for name, stream in made.items()}


def key_of(row: dict[str, Any]) -> list[int]:
    return [row["k"], row["t"]]


def same(number: int) -> int:
    return number


def shown(row: Any) -> list[str]:
    return [repr(row)]


def rows_in(*directories: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for directory in directories:
        for file in directory.glob("*.parquet"):
            found.update(map(repr, pq.read_table(file).to_pylist()))
    return found


def at_the_gate(handle: JobHandle) -> bool:
    """Both subtasks of the source have come to the middle of a split, or further."""
    return all(task.counters.records_out >= ROWS // 2 for task in handle.info().tasks if task.operator == 0)


def test_a_job_goes_on_elsewhere_as_if_nothing_had_happened(
    tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    gate, saved = tmp_path / "gate", {}
    with LocalCluster(workers=2, slots=8, pause_timeout=60.0) as cluster:
        jobs = pipelines(gate, tmp_path / "before")
        handles = {name: cluster.submit(job, name=name, parallelism=2) for name, job in jobs.items()}
        for name, handle in handles.items():
            wait_until(partial(at_the_gate, handle), f"{name} to wait for the file")
            going_on = handle.savepoint(into=tmp_path / "snapshots")
            assert bool(going_on.bytes) == (name not in ("ended", "side"))
            assert handle.info().state == "running"
            saved[name] = handle.savepoint(stop=True, into=tmp_path / "snapshots")
            assert handle.info().state == "canceled"
        with pytest.raises(UsageError, match="job j1 is canceled"):
            handles["count"].savepoint()
    gate.touch()
    for parallelism in (1, 4):
        with LocalCluster(workers=2, slots=16) as cluster:
            out = tmp_path / f"at {parallelism}"
            whole = pipelines(gate, tmp_path / f"whole {parallelism}")
            for name, job in pipelines(gate, out).items():
                handle = cluster.submit(
                    job,
                    name=name,
                    parallelism=parallelism,
                    restore_from=saved[name].path,
                    trust_snapshot=True,
                )
                handle.wait()
                cluster.submit(whole[name], name=name, parallelism=parallelism).wait()
                expected = rows_in(tmp_path / f"whole {parallelism}" / name)
                assert rows_in(tmp_path / "before" / name, out / name) == expected, name
