"""``bench quiet``: what a job costs that has little to do, in processor time.

A keyed job of rows, with emission of each update, gets its records on a schedule (the source of ``bench
latency``). The processor time of the coordinator's process and of the workers' is read when the warm-up is
over, and ``seconds`` later. A rate of 0 is a job whose sources wait. At low rates it is a matter of timers,
reports and heartbeats; at higher ones, of wakes and system calls for each small batch. Processor time grows
on a machine that others use too, if less than wall time: runs that are compared are made in turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from minishuffle.api.stream import Stream
from minishuffle.bench.latency import WARM_UP_SECONDS, Arrivals, Paced, percentile, remote_latencies
from minishuffle.client import JobHandle
from minishuffle.errors import ShuffleError
from minishuffle.exchange.batch import Payload
from minishuffle.local import LocalCluster

__all__ = ["measure_quiet"]

KEYS: Final = 1_024
BEYOND_SECONDS: Final = 0.5
"""How much longer than what is measured the sources run."""
STARTED_SECONDS_MAX: Final = 60.0


def cpu_seconds(process: int) -> float:
    """Processor time of a process so far, in seconds, of all its threads.

    Raises:
        ShuffleError: there is no such process.
    """
    try:
        # As clock_getcpuclockid(3) makes it; /proc counts hundredths, which is too coarse for one that idles.
        return time.clock_gettime(~process << 3 | 2)
    except OSError:
        raise ShuffleError(f"process {process} ended while it was measured") from None


class _Waiting(Paced):
    """The same source at a rate of 0: it waits until the time is up."""

    def __init__(self, seconds: float, splits: int) -> None:
        super().__init__(1.0, 0.0, splits)
        self._seconds = WARM_UP_SECONDS + seconds
        self.records = 0

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        time.sleep(self._seconds)
        return iter(())


def measure_quiet(
    *, rates: Sequence[float], parallelism: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """One job for each parallelism and rate, one after the other.

    Args:
        rates: records per second; 0 for none.
        parallelism: each on half as many workers, but at least two.
        seconds: of processor time that is looked at, for each.

    Returns:
        For each: cores (processor seconds per second) of the coordinator and of all workers together, the
        workers' microseconds per record, percentiles of the latency of records that crossed TCP, and how
        many records were lost. What does not exist without records is None.

    Raises:
        ShuffleError: a job failed, or a process ended.
    """
    points = []
    for each in parallelism:
        workers = max(2, each // 2)
        with LocalCluster(workers, -(-each // workers)) as cluster:
            for rate in rates:
                point = _measure(cluster, rate, each, seconds)
                points.append({"parallelism": each, "workers": workers, "rate": rate, **point})
    return points


def _measure(cluster: LocalCluster, rate: float, parallelism: int, seconds: float) -> dict[str, Any]:
    beyond = seconds + BEYOND_SECONDS
    source = Paced(rate, beyond, parallelism) if rate else _Waiting(beyond, parallelism)
    updates = Stream.source(source).key_by(lambda row: row[1] // 1000 % KEYS).reduce(_latest, emit="each")
    stream = updates.map(lambda update: update[1]).to(Arrivals(parallelism))
    coordinator = cluster.status().pid
    handle = cluster.submit(stream, name="bench-quiet", parallelism=parallelism)
    _wait_until_running(handle)
    time.sleep(WARM_UP_SECONDS)
    processes = [coordinator, *cluster.workers.values()]
    before, begin = [cpu_seconds(each) for each in processes], time.monotonic()
    time.sleep(seconds)
    spent = [cpu_seconds(each) - earlier for each, earlier in zip(processes, before, strict=True)]
    cores = [each / (time.monotonic() - begin) for each in spent]
    result = handle.wait(120)
    micros, times = remote_latencies(result)
    received = sum(sink.value["received"] for sink in result.results)
    return {
        "coordinator_cores": round(cores[0], 4),
        "workers_cores": round(sum(cores[1:]), 4),
        "workers_us_per_record": round(sum(cores[1:]) / rate * 1e6, 1) if rate else None,
        "p50_ms": percentile(micros, times, 0.5) if len(micros) else None,
        "p99_ms": percentile(micros, times, 0.99) if len(micros) else None,
        "lost": source.records * parallelism - received,
    }


def _latest(earlier: Any, later: Any) -> Any:
    return later


def _wait_until_running(handle: JobHandle) -> None:
    deadline = time.monotonic() + STARTED_SECONDS_MAX
    while any(task.state != "running" for task in handle.info().tasks):
        if time.monotonic() > deadline:
            raise ShuffleError("the job's tasks do not all run")
        time.sleep(0.05)
