"""``bench debloat``: how old rows are when a slow consumer takes them, with and without buffer debloating.

A producer on one worker, and a consumer on the other that takes shares of the producer's rate one after the
other. The age of a row is the time from its creation to the consumer's function; both clocks are one, that of
the machine. Then both run as fast as they can, with and without, in turns: what debloating costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from minishuffle.api.stream import Stream
from minishuffle.errors import ShuffleError
from minishuffle.exchange.batch import Payload
from minishuffle.local import LocalCluster
from minishuffle.operators.base import TaskContext
from minishuffle.plan.graph import JobSettings

__all__ = ["SETTLE_SECONDS", "measure_debloat"]

MB: Final = 1_000_000
ROW_BYTES: Final = 1000
BATCH_ROWS: Final = 8
FULL_BATCH_ROWS: Final = 256
SETTLE_SECONDS: Final = 10.0
"""From a change of the consumer's rate on, until its ages are measured."""
WARM_UP_SECONDS: Final = 2.0
"""Not measured of a run at full rate: sizes begin small."""
WINDOW_SECONDS: Final = 1.0
WITHIN: Final = (0.7, 1.3)
"""Shares of the target between which an age is as wanted."""
CONSUMER: Final = 1
"""Index of the subtask that gets all rows: on the other worker."""
Ages = np.ndarray[Any, np.dtype[np.float64]]


class Throttle:
    """Waits so that bytes pass at a rate. Up to 50 ms that were lost are made up for.

    Args:
        rate: bytes per second; None: without bound.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = time.monotonic()

    def wait(self, size: int) -> None:
        """Until ``size`` bytes more may have passed."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._due = max(self._due, now - 0.05) + size / self._rate
        if self._due > now:
            time.sleep(self._due - now)


class Stamped:
    """Source of rows for so many seconds: (the time at which it was made, payload).

    Args:
        rate: bytes per second, if it is not held up; None: as fast as they are taken.
    """

    format = "rows"
    bounded = True

    def __init__(self, rate: float | None, seconds: float) -> None:
        self._rate = rate
        self.seconds = seconds

    def splits(self) -> Sequence[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        rows = BATCH_ROWS if self._rate is not None else FULL_BATCH_ROWS
        throttle, payload = Throttle(self._rate), bytes(ROW_BYTES)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            throttle.wait(rows * ROW_BYTES)
            yield [(time.monotonic(), payload)] * rows


class AgedSink:
    """Sink that takes rows at one rate after the other, and all that is left at the end at once.

    Its result is a map of ``ages`` (bytes of float64: pairs of when a batch was taken, in seconds since the
    first, and how old its first row was) and ``rows``; None if it gets nothing.

    Args:
        phases: seconds and bytes per second (None: as fast as it can) of each.
    """

    def __init__(self, phases: Sequence[tuple[float, float | None]]) -> None:
        self._phases = phases

    def open(self, context: TaskContext) -> None:
        self._rows = 0
        self._ages: list[float] = []
        self._begin = 0.0
        self._left = list(self._phases)
        self._next = 0.0
        """When the next phase begins, in seconds since the first row."""
        self._throttle = Throttle(None)

    def write(self, batch: Payload) -> None:
        assert isinstance(batch, list)
        now = time.monotonic()
        self._begin = self._begin or now
        if now - self._begin >= self._next:
            seconds, rate = self._left.pop(0) if self._left else (float("inf"), None)
            self._throttle = Throttle(rate)
            self._next += seconds
        self._throttle.wait(len(batch) * ROW_BYTES)
        now = time.monotonic()
        self._rows += len(batch)
        self._ages += (now - self._begin, now - batch[0][0])

    def close(self) -> dict[str, Any] | None:
        if not self._rows:
            return None
        return {"rows": self._rows, "ages": np.array(self._ages, np.float64).tobytes()}


def measure_debloat(
    *, target: float, produce: float, shares: Sequence[float], seconds: float, pairs: int, full_seconds: float
) -> dict[str, Any]:
    """Run it once; see the module for what is measured.

    Args:
        target: seconds in flight.
        produce: MB/s of the producer, if it is not held up.
        shares: percents of that, which the consumer takes for SETTLE_SECONDS and ``seconds`` each.
        pairs, full_seconds: runs at full rate with and without debloating.

    Raises:
        ShuffleError: a job failed, or its rows did not cross TCP.
    """
    phases = [(SETTLE_SECONDS + seconds, share / 100 * produce * MB) for share in shares]
    bounds = [0.0, *accumulate(length for length, _ in phases)]
    rates = [(_full_rate(target, full_seconds), _full_rate(0.0, full_seconds)) for _ in range(pairs)]
    found = {
        name: _run(Stamped(produce * MB, bounds[-1] + 1), AgedSink(phases), each)
        for name, each in (("with", target), ("without", 0.0))
    }
    measured = [
        {
            "share": share,
            **{name: _median(ages, begin + SETTLE_SECONDS, end) for name, ages in found.items()},
            "settled": _settled(found["with"], begin, end, target),
        }
        for share, begin, end in zip(shares, bounds, bounds[1:], strict=False)
    ]
    ratios = [ours / plain for ours, plain in rates]
    return {
        "target": target,
        "produced_mb_per_second": produce,
        "age_p50": measured,
        "full_rate_mb_per_second": {
            name: round(statistics.median(rate for rate in each) / MB, 1)
            for name, each in zip(("with", "without"), zip(*rates, strict=True), strict=True)
        }
        if rates
        else {},
        "full_rate_ratio": round(statistics.median(ratios), 3) if ratios else None,
        "as_wanted": all(
            WITHIN[0] <= each["with"] / target <= WITHIN[1] and each["settled"] <= SETTLE_SECONDS
            for each in measured
        ),
    }


def _full_rate(target: float, seconds: float) -> float:
    """Bytes per second that arrive while nobody is slow on purpose, from WARM_UP_SECONDS on."""
    times = _run(Stamped(None, WARM_UP_SECONDS + seconds), AgedSink([]), target)[:, 0]
    taken = np.count_nonzero(times >= WARM_UP_SECONDS) * FULL_BATCH_ROWS * ROW_BYTES
    return float(taken / (times[-1] - WARM_UP_SECONDS))


def _run(source: Stamped, sink: AgedSink, target: float) -> Ages:
    """The ages that the sink saw, and when."""
    settings = JobSettings(debloat_target=target)
    with LocalCluster(workers=2, slots=1) as cluster:
        stream = Stream.source(source).parallel(1).partition(lambda row, consumers: CONSUMER).to(sink)
        handle = cluster.submit(stream, name="bench-debloat", parallelism=2, settings=settings)
        result = handle.wait(3 * source.seconds + 120)
    if len({task.worker for task in result.tasks}) != 2:
        raise ShuffleError("the rows did not cross TCP: producer and consumer ran on one worker")
    (value,) = [each.value for each in result.results if each.value is not None]
    return np.frombuffer(value["ages"], np.float64).reshape(-1, 2)


def _median(ages: Ages, begin: float, end: float) -> float:
    """The median age of what was taken between two times, in seconds."""
    within = ages[(ages[:, 0] >= begin) & (ages[:, 0] < end), 1]
    if not len(within):
        raise ShuffleError("the consumer has taken nothing: raise --produce, --seconds or the shares")
    return round(float(np.median(within)), 3)


def _settled(ages: Ages, begin: float, end: float, target: float) -> float:
    """How long it took until the median age of each second was as wanted, in seconds."""
    settled, low, high = 0.0, *(share * target for share in WITHIN)
    for at in np.arange(begin, end - WINDOW_SECONDS, WINDOW_SECONDS):
        if not low <= _median(ages, at, at + WINDOW_SECONDS) <= high:
            settled = float(at + WINDOW_SECONDS - begin)
    return settled
