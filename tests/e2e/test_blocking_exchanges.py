"""Blocking exchanges, and the stages that they make, under ``kill -9``: the rows are the same, and a killed
consumer restarts no producer."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle
from minishuffle.errors import TaskFailed
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import JOB_LIVE, TaskInfo
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROWS = 3_000
KEYS = 100
EXPECTED = {key: sum(range(key, 2 * ROWS, KEYS)) for key in range(KEYS)}
SECONDS_MAX = 60.0


class Numbers:
    """Two splits: the numbers below ROWS, and as many behind them."""

    def splits(self) -> list[int]:
        return [0, ROWS]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for first in range(split + offset, split + ROWS, 50):
            yield list(range(first, min(first + 50, split + ROWS)))


class Waits:
    """The subtasks in ``where`` wait for a file behind so many calls, in whatever attempt."""

    def __init__(self, go_on: Path, where: dict[int, int]) -> None:
        self.go_on = go_on
        self.where = where
        self.calls = 0

    def open(self, context: Any) -> None:
        self.index = context.index
        self._wait(0)

    def call(self) -> None:
        self.calls += 1
        self._wait(self.calls)

    def _wait(self, calls: int) -> None:
        if self.where.get(self.index) == calls:
            (self.go_on.parent / f"{self.go_on.name}.{self.index}").touch()
            while not self.go_on.exists():
                threading.Event().wait(0.01)


class Passes(Waits):
    def __call__(self, row: Any) -> Any:
        self.call()
        return row


class Adds(Waits):
    def __call__(self, one: int, other: int) -> int:
        self.call()
        return one + other


def task(handle: JobHandle, name: str, index: int) -> TaskInfo:
    return next(
        each for each in handle.info().tasks if name in each.name.split(" -> ") and each.index == index
    )


def last_digits(number: int) -> int:
    return number % KEYS


def sums(before: Passes, behind: Adds) -> Stream[Any]:
    """Of the numbers, by last digits; both sides of the exchange have slots of their own."""
    numbers = Stream.source(Numbers()).map(before).name("numbers").exchange("blocking")
    return numbers.key_by(last_digits).reduce(behind).name("sums").slot_group("sums").collect()


def test_what_is_stored_comes_whole_and_too_much_of_it_is_refused(tmp_path: Path) -> None:
    with LocalCluster(workers=1, slots=4, blocking_bytes_max=200_000) as cluster:
        handle = cluster.submit(sums(Passes(tmp_path, {}), Adds(tmp_path, {})), parallelism=2)
        assert dict(handle.wait(SECONDS_MAX).rows) == EXPECTED
        (complete,) = [event.text for event in handle.events() if event.kind == "exchange complete"]
        assert complete == "Numbers -> numbers => sums -> collect: all 2 partitions can be read"
        in_stages = JobSettings(schedule="stages")
        staged = cluster.submit(
            sums(Passes(tmp_path, {}), Adds(tmp_path, {})), parallelism=4, settings=in_stages
        )
        assert dict(staged.wait(SECONDS_MAX).rows) == EXPECTED, "eight slots at once, four in each stage"
        large = Stream.items(["x" * 1_000] * 1_000).exchange("blocking").rebalance().collect()
        text = "finds no room: blocking partitions would take more than 200,000 bytes.*blocking_bytes_max"
        with pytest.raises(TaskFailed, match=text):
            cluster.run(large, timeout=SECONDS_MAX, settings=JobSettings(restart_strategy="none"))


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["written", "unread", "half read"])
@pytest.mark.parametrize("victim", ["numbers", "sums"])
def test_whoever_is_killed_the_sums_are_right(victim: str, moment: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    before = Passes(go_on, {0: ROWS // 2} if moment == "written" else {})
    behind = Adds(go_on, {} if moment == "written" else {0: 0 if moment == "unread" else ROWS // 2})
    with LocalCluster(workers=4, slots=1, standby=1) as cluster:
        handle = cluster.submit(sums(before, behind), parallelism=2)
        until(Path(f"{go_on}.0").exists, "the moment")
        if moment != "written":
            until(lambda: task(handle, "numbers", 0).state == "finished", "what is stored is complete")
        cluster.kill_worker(task(handle, victim, 0).worker)
        until(lambda: task(handle, victim, 0).attempt == 2, "it runs again")
        go_on.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
    assert Counter(key for key, _ in result.rows) == Counter(EXPECTED.keys())
    assert dict(result.rows) == EXPECTED
    assert (info.state, info.rows_again, info.rows_in_flight) == ("finished", 0, 0)
    restarted = [(each.name, each.index) for each in info.tasks if each.attempt > 1]
    assert len(restarted) == 1, "a killed consumer restarts no producer, and nobody his neighbours"


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["written", "unread", "half read"])
def test_a_worker_that_leaves_has_what_it_stores_made_again_and_costs_no_row(
    moment: str, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    before = Passes(go_on, {0: ROWS // 2} if moment == "written" else {})
    behind = Adds(go_on, {} if moment == "written" else {0: 0 if moment == "unread" else ROWS // 2})
    with LocalCluster(workers=5, slots=1) as cluster:
        handle = cluster.submit(sums(before, behind), parallelism=2)
        until(Path(f"{go_on}.0").exists, "the moment")
        if moment != "written":
            until(lambda: task(handle, "numbers", 0).state == "finished", "what is stored is complete")
        leaving = task(handle, "numbers", 0).worker
        cluster.client.drain(leaving)
        if moment == "written":
            go_on.touch()
        until(lambda: task(handle, "numbers", 0).attempt == 2, "it runs again")
        until(
            lambda: "gone" in [each.state for each in cluster.status().workers if each.worker == leaving],
            "the worker has left",
        )
        assert moment == "written" or handle.info().state in JOB_LIVE
        go_on.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
    assert Counter(key for key, _ in result.rows) == Counter(EXPECTED.keys())
    assert dict(result.rows) == EXPECTED
    assert (info.state, info.rows_again, info.restarts) == ("finished", 0, {"drained": 1})


@pytest.mark.soak
def test_each_consumer_keeps_what_it_has_when_an_aggregate_is_killed(tmp_path: Path) -> None:
    """Consumer 0 has finished, 1 is half through, 2 has not begun."""
    go_on = tmp_path / "go on"
    names = [(key, f"name {key}") for key in range(KEYS)]
    counts = (
        Stream.source(Numbers())
        .key_by(lambda number: number % KEYS)
        .reduce(lambda one, other: one + other)
        .parallel(2)
        .name("aggregate")
    )
    joined = (
        counts.exchange("blocking")
        .key_by(lambda pair: pair[0])
        .join(Stream.items(names).parallel(1).exchange("blocking").key_by(lambda pair: pair[0]))
        .parallel(3)
        .slot_group("joins")
        .map(Passes(go_on, {1: 10, 2: 0}))
        .parallel(3)
        .collect()
        .parallel(3)
    )
    with LocalCluster(workers=5, slots=1, standby=1) as cluster:
        handle = cluster.submit(joined, parallelism=2)
        until(lambda: all(Path(f"{go_on}.{index}").exists() for index in (1, 2)), "1 and 2 wait")
        until(lambda: task(handle, "join", 0).state == "finished", "consumer 0 has finished")
        cluster.kill_worker(task(handle, "aggregate", 0).worker)
        until(lambda: task(handle, "aggregate", 0).attempt == 2, "the aggregate runs again")
        go_on.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
    assert sorted(result.rows) == sorted((key, (key, EXPECTED[key]), (key, name)) for key, name in names)
    assert [each.attempt for each in info.tasks if "join" in each.name.split(" -> ")] == [1, 1, 1]
    assert (info.state, info.rows_again) == ("finished", 0)


@pytest.mark.soak
def test_a_partition_with_a_corrupt_block_is_made_again(tmp_path: Path) -> None:
    """Its consumer goes on with the rows of the producer's next attempt, and does not restart."""
    go_on, rows, size = tmp_path / "go on", 30, 1_000_000
    stored = Stream.items(list(range(rows))).map(lambda n: (n, bytes([n]) * size)).name("makes")
    read = stored.exchange("blocking").rebalance().map(Passes(go_on, {0: 0})).slot_group("reads")
    checked = read.map(lambda pair: (pair[0], pair[1] == bytes([pair[0]]) * size)).collect()
    with LocalCluster(workers=2, slots=1) as cluster:
        handle = cluster.submit(checked, parallelism=1)
        until(Path(f"{go_on}.0").exists, "the consumer waits")
        until(lambda: task(handle, "makes", 0).state == "finished", "what is stored is complete")
        worker = task(handle, "makes", 0).worker
        (pid,) = [each.pid for each in cluster.status().workers if each.worker == worker]
        opened = Path(f"/proc/{pid}/fd").iterdir()
        files = [each for each in opened if "minishuffle-rows-" in os.readlink(each)]
        assert files, "what finds no room in memory is on disk"
        for each in files:
            with each.open("r+b") as file:
                file.seek(5_000_000)
                file.write(b"corrupt")
        go_on.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
        (cause,) = [event.text for event in handle.events() if event.kind == "task lost"]
    assert sorted(result.rows) == [(number, True) for number in range(rows)]
    assert (info.state, info.restarts) == ("finished", {"lost": 1})
    named = r"block \d+ of partition .* at attempt .* on worker \d cannot be read, .* at offset .* checksum"
    assert re.search(named, cause)


@pytest.mark.soak
def test_between_two_stages_a_partition_and_the_coordinator_are_killed(tmp_path: Path) -> None:
    """The second stage waits for slots that another job has, while what the first has stored is lost, made
    again by a standby worker, and the coordinator is killed."""
    go_on = tmp_path / "go on"
    numbers = Stream.source(Numbers()).parallel(1).map(Passes(go_on, {})).name("numbers")
    staged = numbers.exchange("blocking").key_by(last_digits).reduce(Adds(go_on, {})).name("sums").parallel(2)
    holder = Stream.items([1]).map(Passes(go_on, {0: 0})).name("holder").collect()
    with LocalCluster(workers=2, slots=1, standby=1) as cluster:
        handle = cluster.submit(
            staged.collect().parallel(2), parallelism=1, settings=JobSettings(schedule="stages")
        )
        other = cluster.submit(holder, parallelism=1)
        until(lambda: task(handle, "numbers", 0).state == "finished", "the first stage is complete")
        until(lambda: "free slots" in "".join(each.text for each in handle.info().deploy_waits), "it waits")
        first = task(handle, "numbers", 0)
        assert {each.state for each in handle.info().tasks} == {"finished", "waiting"}
        cluster.kill_worker(first.worker)
        until(
            lambda: (task(handle, "numbers", 0).attempt, task(handle, "numbers", 0).state) == (2, "finished"),
            "the partition is made again",
        )
        assert task(handle, "numbers", 0).worker != first.worker
        assert [(each.state, each.version) for each in handle.info().stages][0] == ("complete", 2)
        cluster.kill_coordinator()
        until(lambda: bool(handle.info().deploy_waits), "the next coordinator knows what waits")
        assert task(handle, "numbers", 0).attempt == 2
        go_on.touch()
        result, info = handle.wait(SECONDS_MAX), handle.info()
        other.wait(SECONDS_MAX)
    assert dict(result.rows) == EXPECTED and len(result.rows) == KEYS
    assert (info.state, info.restarts, info.rows_in_flight) == ("finished", {"lost": 1}, 0)
