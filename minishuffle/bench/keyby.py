"""``bench keyby``: records per second through one keyed sum, on a real cluster, checked.

Built with the public API: a source and an aggregation on every worker, about half of the records
crossing TCP. The records are generated inside the timed window, and nothing is combined before the
exchange. The rate is N ÷ (first emit → last output).
"""

from __future__ import annotations

import threading
import time
from itertools import chain, islice
from typing import Any, Final, Literal

import numpy as np
import psutil

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.bench.records import BLOCK, Checker, Numbers, blocks_of, expected_sums
from minishuffle.bench.snapshotages import wait_watching
from minishuffle.client import JobResult
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import Guarantee, JobSettings
from minishuffle.wire.requests import ClusterStatus, TaskInfo

__all__ = ["elapsed", "measure_keyby"]

SAMPLE_SECONDS: Final = 0.5
SETTLE_SECONDS_MAX: Final = 10.0
Emit = Literal["each", "batch"]


def _add_amount(total: float, row: tuple[str, str, int, float, int]) -> float:
    return total + row[3]


def _add_value(total: int, row: tuple[int, int]) -> int:
    return total + row[1]


def keyby_stream(source: Numbers, emit: Emit) -> StreamBase:
    """The job: sum per key. Rows call a Python key function and a Python sum for every record."""
    checker = Checker(source.kind, source.keys)
    if source.format == "arrow":
        key, value = ("key", "value") if source.kind == "int" else ("user", "amount")
        return Table.source(source).key_by(key).aggregate(emit, total=(value, "sum")).to(checker)
    keyed = Stream.source(source).key_by(lambda row: row[0])
    if source.kind == "int":
        return keyed.fold(int, _add_value, emit).to(checker)
    return keyed.fold(float, _add_amount, emit).to(checker)


class _Sampler(threading.Thread):
    """Resident memory of the workers, twice a second."""

    def __init__(self, workers: dict[int, int]) -> None:
        super().__init__(daemon=True)
        self.samples: list[dict[str, Any]] = []
        self._processes = {worker: psutil.Process(pid) for worker, pid in workers.items()}
        self._stopped = threading.Event()
        self._begin = time.monotonic()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            t = round(time.monotonic() - self._begin, 2)
            for worker, process in self._processes.items():
                self.samples.append({"worker": worker, "t": t, "rss": process.memory_info().rss})

    def cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes.values()]
        return float(sum(each.user + each.system for each in times))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def measure_keyby(
    *,
    format: Literal["arrow", "rows"],
    record: Literal["int", "event"],
    emit: Emit,
    workers: int,
    records: int | None,
    seconds: float | None,
    buffer_timeout: float | str,
    keys: int,
    guarantee: Guarantee,
) -> dict[str, Any]:
    """Run it once; see the module for what is measured.

    Raises:
        ShuffleError: neither or both of ``records`` and ``seconds`` are given, or the job failed.
    """
    if (records is None) == (seconds is None):
        raise ShuffleError("give either --records or --seconds")
    source = Numbers(record, format, workers, records, seconds, keys=keys)
    settings = JobSettings.model_validate({"buffer_timeout": buffer_timeout, "guarantee": guarantee})
    with LocalCluster(workers=workers, slots=1) as cluster:
        sampler = _Sampler(cluster.workers)
        cpu = sampler.cpu_seconds()
        sampler.start()
        handle = cluster.submit(
            keyby_stream(source, emit), name="bench-keyby", parallelism=workers, settings=settings
        )
        try:
            result, snapshots = wait_watching(
                cluster, handle, (seconds or 0) + 600, guaranteed=guarantee != "loss"
            )
        finally:
            sampler.stop()
        cpu = sampler.cpu_seconds() - cpu
        emitted = {task.index: task.counters.records_out for task in result.tasks if task.operator == 0}
        total = sum(emitted.values())
        status = _settled_status(cluster, total)
    seconds_taken = elapsed(result.tasks)
    return {
        "flush": settings.buffer_timeout,
        "guarantee": guarantee,
        "keys": keys,
        "records_per_second": round(total / seconds_taken),
        "records": total,
        "seconds": round(seconds_taken, 3),
        "cpu_seconds": round(cpu, 2),
        "rss_bytes": sampler.samples,
        **_network(status),
        **snapshots,
        "verified": _verified(source, emit, result, emitted, splits=workers, records=records),
    }


def _settled_status(cluster: LocalCluster, total: int) -> ClusterStatus:
    """The status once each worker has sent a heartbeat since the job ended.

    An element's rows count with its first buffer, its bytes with each: an earlier heartbeat may have all
    records and a part of their bytes.
    """
    begin = time.monotonic()
    deadline = begin + SETTLE_SECONDS_MAX
    while True:
        status = cluster.status()
        reports = [worker.report for worker in status.workers]
        counted = sum(report.remote_records_out + report.local_records_out for report in reports)
        waited = time.monotonic() - begin
        if counted >= total and all(worker.heartbeat_age_seconds < waited for worker in status.workers):
            return status
        if time.monotonic() > deadline:
            raise ShuffleError(f"the workers counted {counted} of {total} records")
        time.sleep(0.05)


def elapsed(tasks: list[TaskInfo]) -> float:
    """Seconds from the first record that a source emits to the last thing that any task takes."""
    begin = min(task.counters.first_output_at for task in tasks if task.counters.first_output_at)
    return max(task.counters.last_input_at for task in tasks) - begin


def _network(status: ClusterStatus) -> dict[str, Any]:
    reports = [worker.report for worker in status.workers]
    remote = sum(report.remote_records_out for report in reports)
    local = sum(report.local_records_out for report in reports)
    payload = sum(report.remote_payload_bytes_out for report in reports)
    return {
        "network_bytes": {
            "cap": max(report.network_cap_bytes for report in reports),
            "peak": max(report.network_peak_bytes for report in reports),
        },
        "remote_fraction": round(remote / (remote + local), 4),
        "remote_payload_bytes_per_record": round(payload / max(1, remote), 2),
    }


def _verified(
    source: Numbers,
    emit: Emit,
    result: JobResult,
    emitted: dict[int, int],
    *,
    splits: int,
    records: int | None,
) -> bool:
    """Every key's sum, the number of outputs and their keys, against numpy over the same records."""
    block = BLOCK[source.format]
    blocks = chain.from_iterable(
        islice(blocks_of(block, split, splits, records), -(-count // block))
        for split, count in emitted.items()
    )
    sums, key_sum, counts = expected_sums(source.kind, blocks, source.keys)
    found = np.zeros_like(sums)
    outputs = found_key_sum = 0
    for sink in result.results:
        value = sink.value
        outputs += value["outputs"]
        found_key_sum += value["key_sum"]
        keys = np.frombuffer(value["keys"], dtype=np.int64)
        found[keys] += np.frombuffer(value["sums"], dtype=sums.dtype)
    same = bool((found == sums).all()) and int(counts.sum()) == sum(emitted.values())
    if emit == "each":
        return same and outputs == int(counts.sum()) and found_key_sum % 2**64 == key_sum % 2**64
    return same
