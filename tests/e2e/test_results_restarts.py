"""Kept results of an endless job whose workers are killed in turn, as a streaming query reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.config import read_secret
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import Guarantee, JobSettings
from minishuffle.remote.access import Access
from minishuffle.remote.reader import ResultReader, commit_result, describe_result

SCHEMA = pa.schema([("n", pa.int64())])
RATE = 4_000


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(start, start + count), pa.int64())], SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("guarantee", ["loss", "at_least_once"])
def test_a_reader_goes_on_when_both_workers_are_killed_in_turn(
    wait_until: Callable[..., Any], guarantee: Guarantee
) -> None:
    """Offsets never go back, and each range is read or known to be lost, and no row comes twice; or with a
    guarantee no row is lost, and those that come twice are counted."""
    with LocalCluster(workers=2, slots=1) as cluster:
        address = cluster.client.address
        access = Access(address.host, address.port, "local", read_secret(cluster.state_dir / "secret"))
        stream = Table.generate(numbers, rate=RATE, schema=SCHEMA).rebalance().to_spark()
        settings = JobSettings(guarantee=guarantee, snapshot_interval=0.2)
        handle = cluster.submit(stream, parallelism=2, settings=settings)
        at = {0: 0, 1: 0}
        found: list[int] = []
        lost = 0

        def read_batch() -> bool:
            """One micro-batch; True if there was anything in it."""
            nonlocal lost
            info = describe_result(access, handle.id)
            ends = {rows.subtask: rows.end for rows in info.subtasks}
            assert all(ends[subtask] >= at[subtask] for subtask in at)
            assert not (guarantee != "loss" and info.rows_lost)
            for subtask, end in ends.items():
                rows = range(at[subtask], end)
                with ResultReader(access, info.job, info.sink, subtask, rows, allow_loss=True) as reader:
                    taken = [n for batch in reader.batches() for n in batch.column("n").to_pylist()]
                found.extend(taken)
                missing = sum(map(len, reader.lost))
                assert len(taken) + missing == len(rows) or guarantee != "loss"
                lost += missing
            progress = any(ends[subtask] > at[subtask] for subtask in at)
            at.update(ends)
            commit_result(access, info.job, info.sink, at)
            return progress

        for index in (0, 1):
            for _ in range(3):
                wait_until(read_batch, "rows")
            wait_until(lambda: not handle.info().unprotected, "holders")
            before = handle.info().restarts.get("lost", 0)
            cluster.kill_worker(handle.info().tasks[-2 + index].worker)
            wait_until(lambda before=before: handle.info().restarts.get("lost", 0) > before, "the restart")
            wait_until(lambda: handle.info().state == "running", "the job")
        counted, last = at.copy(), max(found)
        wait_until(lambda: read_batch() and all(at[i] > counted[i] + RATE // 4 for i in at), "new rows")
        if guarantee != "loss":
            wait_until(lambda: not (read_batch() and set(range(last)).difference(found)), "every row")
        info = handle.info()
        assert len(found) - len(set(found)) <= (info.rows_again if guarantee != "loss" else 0)
        assert info.rows_dropped.get("result_lost", 0) == lost
        handle.cancel()
        handle.wait_until_over(30)


@pytest.mark.slow
def test_rows_that_nobody_has_read_come_again_when_all_workers_are_killed_at_once(
    wait_until: Callable[..., Any],
) -> None:
    """Those from before the durable snapshot are in it, and those behind it are made again."""
    given = JobSettings(guarantee="at_least_once", durable_interval=0.4)
    with LocalCluster(workers=2, slots=4, slot_timeout=150.0) as cluster:
        address = cluster.client.address
        access = Access(address.host, address.port, "local", read_secret(cluster.state_dir / "secret"))
        stream = Table.generate(numbers, rate=RATE, schema=SCHEMA).rebalance().to_spark()
        handle = cluster.submit(stream, parallelism=2, settings=given)
        at, found = {0: 0, 1: 0}, list[int]()

        def read_batch(share: float = 1.0) -> bool:
            """The first part of what there is, which is committed; True if there was anything."""
            info = describe_result(access, handle.id)
            before = dict(at)
            for subtask, begin, end in info.subtasks:
                at[subtask] += int((end - max(begin, at[subtask])) * share)
                rows = range(before[subtask], at[subtask])
                with ResultReader(access, info.job, info.sink, subtask, rows) as reader:
                    found.extend(n for batch in reader.batches() for n in batch.column("n").to_pylist())
            commit_result(access, info.job, info.sink, at)
            return at != before

        wait_until(lambda: read_batch(0.5), "rows")
        taken = handle.info().durable.taken
        wait_until(lambda: handle.info().durable.taken >= taken + 2, "durable snapshots")
        assert handle.info().durable.bytes, "rows that nobody has read"
        for worker in cluster.status().workers:
            cluster.kill_worker(worker.worker)
        wait_until(lambda: handle.info().fallbacks, "the job to go back")
        last, counted = max(found), dict(at)
        wait_until(lambda: read_batch() and all(at[i] > counted[i] + RATE for i in at), "new rows", 60.0)
        wait_until(lambda: read_batch() and max(found) > last + RATE, "rows behind these", 60.0)
        wait_until(lambda: read_batch() and not set(range(last + RATE)).difference(found), "every row", 60.0)
        assert handle.info().rows_dropped == {}
        handle.cancel()
        handle.wait_until_over(30)
