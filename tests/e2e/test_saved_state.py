"""The state in a savepoint of a real job, as tables with the names that the job has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle import LocalCluster, Stream, Table, read_state
from minishuffle.client import JobHandle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROWS, USERS = 1_000, ("ann", "bob", "cho")


class Clicks:
    """So many clicks, and then none for ever: what says that it ends gives its results at the end."""

    bounded = True

    def __init__(self, format: str) -> None:
        self.format = format

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        clicks = [{"user": USERS[n % 3], "n": n} for n in range(offset, ROWS)]
        if clicks:
            yield pa.RecordBatch.from_pylist(clicks) if self.format == "arrow" else clicks
        while True:
            threading.Event().wait(0.005)
            yield []


def have_come(handle: JobHandle) -> bool:
    return sum(task.counters.records_in for task in handle.info().tasks if task.operator == 1) == ROWS


def test_the_state_in_a_savepoint_has_the_names_of_its_job(
    tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    schema = pa.schema({"user": pa.string(), "n": pa.int64()})
    table = Table.source(Clicks("arrow"), schema).key_by("user")
    jobs = {
        "visits": Stream.source(Clicks("rows")).key_by("user").count(emit="end"),
        "spent": table.aggregate(emit="end", most=("n", "max"), mean=("n", "mean")),
    }
    states = {}
    with LocalCluster(workers=2) as cluster:
        for name, stream in jobs.items():
            handle = cluster.submit(stream.name(name).collect(), name=name, parallelism=2)
            wait_until(partial(have_come, handle), f"the rows of {name}")
            saved = handle.savepoint(stop=True, into=tmp_path)
            states[name] = read_state(saved.path, secret_file=cluster.state_dir / "secret")
    for name, state in states.items():
        assert state.manifest.name == name
        assert [(each.name, each.rows) for each in state.operators()][-1] == (name, len(USERS))
    assert sorted(states["visits"].table("visits").to_pylist(), key=str) == [
        {"key": "ann", "value": 334}, {"key": "bob", "value": 333}, {"key": "cho", "value": 333},
    ]  # fmt: skip
    assert states["visits"].table("visits", keys=["cho"]).to_pydict() == {"key": ["cho"], "value": [333]}
    spent = states["spent"].table("spent")
    assert spent.column_names == ["user", "most", "mean.0", "mean.1"]
    assert dict(zip(*spent.select(["user", "most"]).to_pydict().values(), strict=True)) == {
        "ann": 999, "bob": 997, "cho": 998,
    }  # fmt: skip
