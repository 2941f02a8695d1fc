"""Savepoints in an object store: a job goes on from one, and one that is refused leaves its job alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minishuffle import LocalCluster, Stream, UsageError
from minishuffle.client import JobHandle
from support.objectstore import Faults, object_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROWS = 900


class Gated:
    """Rows, which wait in the middle for a file."""

    bounded = True

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[str]]:
        if offset < ROWS // 2:
            yield ["abc"[n % 3] for n in range(offset, ROWS // 2)]
        while not self.gate.exists():
            threading.Event().wait(0.005)
            yield []
        yield ["abc"[n % 3] for n in range(max(offset, ROWS // 2), ROWS)]


def at_the_gate(handle: JobHandle) -> bool:
    return sum(task.counters.records_in for task in handle.info().tasks if task.operator == 1) == ROWS // 2


def test_a_job_goes_on_from_an_object_store(
    tmp_path: Path, wait_until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    gate, objects, faults = tmp_path / "gate", {"bucket/": b""}, Faults()
    counts = Stream.source(Gated(gate)).key_by(str).count(emit="end").name("count").collect()
    with object_store(objects, faults) as options, LocalCluster(workers=2) as cluster:
        place = f"s3://key:word@bucket/saved?{options}"
        handle = cluster.submit(counts, parallelism=2)
        wait_until(partial(at_the_gate, handle), "the rows before the gate")
        faults.refused = {"PUT /bucket/saved"}
        with pytest.raises(
            UsageError, match="there is no savepoint of job j1 .*: s3://bucket/saved/j1-savepoint-1"
        ):
            handle.savepoint(into=place)
        assert handle.info().state == "running"
        assert [name for name in objects if name.endswith("manifest")] == []
        faults.refused = set()
        saved = handle.savepoint(stop=True, into=place)
        gate.touch()
        other = cluster.submit(counts, parallelism=3, restore_from=saved.path)
        other.wait()
        assert sorted(other.rows()) == [("a", 300), ("b", 300), ("c", 300)]
