"""Jobs with TCP flow control on real clusters: the same results as with credit, recovery, and no deadlock.

They take minutes, and run in the soak alone (``make soak-tcp``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.api.stream_base import StreamBase
from minishuffle.client import JobHandle
from minishuffle.examples.ads import ads, answer
from minishuffle.examples.backpressure import backpressure
from minishuffle.examples.keyby import keyby
from minishuffle.examples.wordcount import wordcount
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENT = {"suspect_after": 20.0, "heartbeat_timeout": 30.0}
"""The sources of some jobs are live: rows for a worker that is only slow would be dropped."""
ADS = 40_000
ROWS = 200_000
SECONDS_MAX = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=2, slots=2, **PATIENT) as cluster:
        cluster.status()  # The client connects at first use.
        yield cluster


def tcp(**settings: Any) -> JobSettings:
    return JobSettings(flow_control="tcp", **settings)


def numbers(results: list[dict[str, Any]], *names: str) -> dict[str, int]:
    return {name: sum(each[name] for each in results if each) for name in names}


JOBS: dict[str, tuple[Callable[[], StreamBase], Callable[[Any], Any]]] = {
    "ads": (
        lambda: ads(rate=80_000, records=ADS, within=0.2),
        lambda result: numbers([each.value for each in result.results], "examples", "clicks"),
    ),
    "backpressure": (
        lambda: backpressure(seconds=1.0),
        lambda result: numbers([each.value for each in result.results], "rows", "distinct"),
    ),
    "keyby": (
        lambda: keyby(rate=100_000, records=ROWS),
        lambda result: sum(each.value for each in result.results),
    ),
    "wordcount": (wordcount, lambda result: Counter(map(tuple, result.rows))),
}


@pytest.mark.parametrize("name", JOBS)
def test_built_in_jobs_give_equal_results_in_both_modes(cluster: LocalCluster, name: str) -> None:
    make, read = JOBS[name]
    found = []
    for mode in ("credit", "tcp"):
        settings = JobSettings(flow_control=mode)
        found.append(read(cluster.submit(make(), settings=settings).wait(SECONDS_MAX)))
    assert found[0] == found[1] and found[0]
    if name == "ads":
        assert found[0] == answer(ADS, 0.2)


@pytest.mark.parametrize("seed", range(5))
def test_two_shuffles_in_a_row_do_not_block_each_other(cluster: LocalCluster, seed: int) -> None:
    """Each has channels both ways between the workers, and hardly a buffer."""
    text = "x" * (100 + 5_000 * (seed % 2))
    rows = Stream.items([(number % (5 + seed), number, text) for number in range(ROWS // 20)]).parallel(4)
    first = rows.partition(lambda row, consumers: row[0] % consumers).map(lambda row: row)
    stream = first.rebalance().map(lambda row: row[:2])
    few = tcp(buffers_per_channel=1, floating_buffers_per_gate=1)
    found = cluster.run(stream.collect(), settings=few, parallelism=4, timeout=SECONDS_MAX)
    assert Counter(number for _, number in found) == Counter(range(ROWS // 20))


def stopped(handle: JobHandle) -> bool:
    """A connection was read no further, on account of some task."""
    return any("reading" in task.counters.limits_hit for task in handle.info().tasks)


def test_a_job_whose_consumer_hardly_reads_is_cancelled(cluster: LocalCluster) -> None:
    def hardly(row: tuple[int, str]) -> tuple[int, str]:
        time.sleep(0.3)
        return row

    rows = Stream.items([(number % 4, "x" * 5_000) for number in range(ROWS // 25)]).parallel(4)
    stream = rows.partition(lambda row, consumers: row[0]).map(hardly).to_count()
    handle = cluster.submit(stream, settings=tcp(), parallelism=4)
    until(lambda: stopped(handle), "a connection that is stopped")
    handle.cancel()
    assert handle.wait_until_over(SECONDS_MAX).state == "canceled"
    assert not any("abandoned" in event.kind for event in handle.events())
    few = cluster.run(Stream.items(range(100)).rebalance().collect(), settings=tcp(), parallelism=4)
    assert sorted(few) == list(range(100))


@pytest.mark.parametrize("strategy", ["individual", "region"])
def test_what_a_killed_worker_costs_is_in_the_books(strategy: str) -> None:
    def sent_on(row: tuple[int, int]) -> int:
        time.sleep(0.0001)
        return row[1]

    with LocalCluster(workers=3, slots=2, **PATIENT) as cluster:
        rows = Stream.items(range(ROWS // 10)).parallel(3).map(lambda number: (number % 97, number))
        stream = rows.partition(lambda row, consumers: row[0] % consumers).map(sent_on).collect()
        settings = tcp(on_unavailable="wait", restart_strategy=strategy)
        handle = cluster.submit(stream, settings=settings, parallelism=3)
        until(lambda: sum(task.counters.records_in for task in handle.info().tasks) > 1_000, "rows")
        cluster.kill_worker(2)
        found = set(handle.wait(SECONDS_MAX, allow_loss=True).rows)
        info = handle.info()
    assert info.restarts.get("lost", 0) > 0
    assert found <= set(range(ROWS // 10))
    missing, dropped = ROWS // 10 - len(found), sum(info.rows_dropped.values())
    assert missing <= dropped + info.rows_in_flight


def test_a_consumer_that_dies_while_it_stops_its_siblings_stops_them_no_more(cluster: LocalCluster) -> None:
    victim, each = 3, 1_000

    def slow(row: tuple[int, int, str]) -> int:
        if row[0] == victim:
            time.sleep(0.02)
            if row[1] == 100:
                raise RuntimeError("the victim dies")
        return row[0]

    rows = Stream.items([(number % 4, number // 4, "x" * 5_000) for number in range(4 * each)]).parallel(1)
    stream = rows.partition(lambda row, consumers: row[0]).map(slow).collect()
    handle = cluster.submit(stream, settings=tcp(on_unavailable="drop"), parallelism=4)
    info = handle.info()
    where = {(task.operator, task.index): task.worker for task in info.tasks}
    assert where[1, victim] != where[0, 0] and list(where.values()).count(where[1, victim]) == 2
    result = Counter(handle.wait(SECONDS_MAX, allow_loss=True).rows)
    assert [result[number] for number in range(4) if number != victim] == [each] * 3
    assert handle.info().restarts == {"failed": 1}
