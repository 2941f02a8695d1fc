"""Joins with a small side under failures: a subtask that starts anew has all of the side again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.local import LocalCluster

pytestmark = pytest.mark.timeout(120)

SECONDS_MAX = 60.0
KEYS = 50
Until = Callable[..., Any]


def numbers(start: int, count: int) -> list[dict[str, int]]:
    return [{"k": number % KEYS, "n": number} for number in range(start, start + count)]


def names() -> Stream[Any]:
    return Stream.items([{"k": key, "name": f"name {key}"} for key in range(KEYS)])


def joined(records: int | None) -> Stream[Any]:
    big = Stream.generate(numbers, rate=2_000, records=records).parallel(1).rebalance()
    return big.broadcast_join(names(), on="k")


@pytest.mark.slow
def test_a_join_that_restarts_goes_on_matching(tmp_path: Path) -> None:
    raised = tmp_path / "raised"

    def raise_once(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 500 and not raised.exists():
            raised.touch()
            raise ValueError("just once")
        return row

    with LocalCluster(workers=1, slots=2) as cluster:
        handle = cluster.submit(joined(2_000).map(raise_once).collect(), parallelism=2)
        result = handle.wait(SECONDS_MAX, allow_loss=True)
        info = handle.info()
    assert info.restarts == {"failed": 1}
    assert info.state_rows_lost == 0, "the next attempt has all of the side again"
    (restarted,) = [task for task in info.tasks if task.attempt == 2]
    found = {row["n"] for row in result.rows}
    assert len(found) == len(result.rows)
    assert all(row["name"] == f"name {row['k']}" for row in result.rows)
    assert len(found) + sum(info.rows_dropped.values()) >= 2_000
    assert 1_000 < len(found) < 2_000, f"{restarted.name} matches nothing any more"


@pytest.mark.slow
def test_a_join_goes_on_matching_when_what_keeps_its_side_dies_with_it(wait_until: Until) -> None:
    def task(handle: JobHandle, name: str, index: int) -> Any:
        return next(each for each in handle.info().tasks if (each.name, each.index) == (name, index))

    stream = joined(None).rebalance().to_count()
    with LocalCluster(workers=3, slots=1, heartbeat_interval=0.1, restart_workers=False) as cluster:
        handle = cluster.submit(stream, parallelism=2)
        wait_until(lambda: task(handle, "broadcast_join", 1).counters.records_out > 500, "rows that match")
        victim = task(handle, "broadcast_join", 1).worker
        assert victim != task(handle, "generate", 0).worker
        assert (task(handle, "items", 1).worker, task(handle, "items", 1).state) == (victim, "finished")
        cluster.kill_worker(victim, signal.SIGKILL)
        wait_until(lambda: task(handle, "broadcast_join", 1).attempt == 2, "the restart")
        matched = task(handle, "broadcast_join", 1).counters.records_out
        wait_until(
            lambda: task(handle, "broadcast_join", 1).counters.records_out > matched + 500, "more that match"
        )
        assert {name: task(handle, name, 0).attempt for name in ("items", "broadcast_join")} == {
            "items": 1,
            "broadcast_join": 1,
        }
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)
