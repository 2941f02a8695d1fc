"""``bench latency``: from a record's creation to the user function behind an exchange, at a given rate.

A source and a sink on each of two workers. A record carries the time at which it was to be created: one
that its source makes late counts as late, so that a stall is seen by every record that it held up and not
by one (no coordinated omission). Latencies are of the records that crossed TCP; all records are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from minishuffle.api.stream import Stream
from minishuffle.bench.snapshotages import wait_watching
from minishuffle.bench.wire import PeerProcess
from minishuffle.client import JobResult
from minishuffle.errors import ShuffleError
from minishuffle.exchange.batch import Payload
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.local import LocalCluster
from minishuffle.operators.base import TaskContext
from minishuffle.plan.graph import Guarantee, JobSettings

__all__ = ["WARM_UP_SECONDS", "Arrivals", "Paced", "measure_latency", "percentile", "remote_latencies"]

WORKERS: Final = 2
WARM_UP_SECONDS: Final = 1.0
"""Records of this time are counted, not measured: channels are being opened, code runs for the first time."""
ECHO_ROUNDS: Final = 2_000
PERCENTILES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
Micros = np.ndarray[Any, np.dtype[np.int64]]


class Paced:
    """Source of ``rate`` records/s on a schedule of its own: (split, nanoseconds of the monotonic clock).

    The time of a record of the warm-up is 0. The clock is one for all processes of a machine.
    """

    format = "rows"
    bounded = True

    def __init__(self, rate: float, seconds: float, splits: int = WORKERS) -> None:
        self._every = splits / rate
        self._splits = splits
        self.records = max(1, round((seconds + WARM_UP_SECONDS) / self._every))
        """Records of each split."""

    def splits(self) -> Sequence[int]:
        return range(self._splits)

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        """As many at once as are due; ``offset`` is 0 here, since nothing is restarted."""
        every, sent = self._every, 0
        begin = time.monotonic() + every * split / self._splits
        while sent < self.records:
            due = min(self.records, int((time.monotonic() - begin) / every) + 1, sent + BATCH_ROWS_MAX)
            if due <= sent:
                time.sleep(max(0.0, begin + sent * every - time.monotonic()))
                continue
            yield [(split, self._stamp(begin, number)) for number in range(sent, due)]
            sent = due

    def _stamp(self, begin: float, number: int) -> int:
        seconds = number * self._every
        return int((begin + seconds) * 1e9) if seconds >= WARM_UP_SECONDS else 0


class Arrivals:
    """Sink: how late records came, by the split that made them.

    Its result is a map of ``received`` and, for each split, ``late`` (bytes of int64: the latencies that
    occurred, in microseconds) and ``times`` (how often each did).
    """

    result_only = False
    """What it has is lost with it; nothing fails here, and so it may be in a job that is to lose nothing."""

    def __init__(self, splits: int = WORKERS) -> None:
        self._splits = splits

    def open(self, context: TaskContext) -> None:
        self._received = 0
        self._late: list[list[int]] = [[] for _ in range(self._splits)]

    def write(self, batch: Payload) -> None:
        now = time.monotonic_ns()
        assert isinstance(batch, list)
        self._received += len(batch)
        late = self._late
        for split, created in batch:
            if created:
                late[split].append((now - created) // 1000)

    def close(self) -> dict[str, Any]:
        counted = [np.unique(np.array(late, np.int64), return_counts=True) for late in self._late]
        return {
            "received": self._received,
            "late": [values.tobytes() for values, _ in counted],
            "times": [times.astype(np.int64).tobytes() for _, times in counted],
        }


def measure_latency(
    *, rate: float, seconds: float, buffer_timeout: float | str, guarantee: Guarantee
) -> dict[str, Any]:
    """Run it once; see the module for what is measured. Times are in milliseconds.

    Raises:
        ShuffleError: the job failed, or no record that was measured crossed TCP.
    """
    source = Paced(rate, seconds)
    settings = JobSettings.model_validate({"buffer_timeout": buffer_timeout, "guarantee": guarantee})
    echo = _echo()
    with LocalCluster(workers=WORKERS, slots=1) as cluster:
        stream = Stream.source(source).rebalance().to(Arrivals())
        handle = cluster.submit(stream, name="bench-latency", parallelism=WORKERS, settings=settings)
        result, snapshots = wait_watching(cluster, handle, seconds + 120, guaranteed=guarantee != "loss")
    echo += _echo()
    micros, times = remote_latencies(result)
    if not len(micros):
        raise ShuffleError("no record that was measured crossed TCP: raise --seconds or --rate")
    received = sum(sink.value["received"] for sink in result.results)
    return {
        "flush": settings.buffer_timeout,
        "guarantee": guarantee,
        "rate": rate,
        **{name: percentile(micros, times, share) for name, share in PERCENTILES.items()},
        "remote_records": int(times.sum()),
        "lost": source.records * WORKERS - received,
        "echo_p50_ms": round(statistics.median(echo) * 1000 / 2, 3),
        **snapshots,
    }


def remote_latencies(result: JobResult) -> tuple[Micros, Micros]:
    """Latencies, in microseconds, of records whose source and sink ran in different workers, and how often
    each occurred; both are empty if there are none."""
    workers = {(task.operator, task.index): task.worker for task in result.tasks}
    first, last = min(workers)[0], max(workers)[0]
    late, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sink in result.results:
        for split in range(len(sink.value["late"])):
            if workers[first, split] != workers[last, sink.index]:
                late.append(np.frombuffer(sink.value["late"][split], np.int64))
                times.append(np.frombuffer(sink.value["times"][split], np.int64))
    values, inverse = np.unique(np.concatenate(late), return_inverse=True)
    return values, np.bincount(inverse, weights=np.concatenate(times)).astype(np.int64)


def percentile(micros: Micros, times: Micros, share: float) -> float:
    """The least latency, in milliseconds, that ``share`` of the records did not exceed."""
    position = np.searchsorted(np.cumsum(times), share * times.sum())
    return round(float(micros[min(int(position), len(micros) - 1)]) / 1000, 3)


def _echo() -> list[float]:
    """Round trips of 64 bytes between two processes that do nothing else, in seconds."""
    server, client = PeerProcess.start("consumer"), PeerProcess.start("producer")
    try:
        port = server.ask("echo")["port"]
        found: list[float] = client.ask("echo", port=port, rounds=ECHO_ROUNDS)["seconds"]
    finally:
        client.stop()
        server.stop()
    return found
