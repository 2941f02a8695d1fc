"""Latency markers: how long rows take from their source to each task, but for user code.

A source emits markers at an interval. A marker follows the rows emitted before it through the same queues,
buffers and sockets. Each task records its age and forwards it to one consumer of each output. It does not
pass through the operators, so rows held there do not delay it. A marker is an event: no row, not counted as
one, and not repeated after a failure. Its time is the wall time as its worker has anchored it
(:mod:`minishuffle.clock`). Clocks of different machines are compared as they are; what would be negative
counts as zero. (Flink: ``LatencyMarker``, ``LatencyStats``.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from minishuffle import limits
from minishuffle.counters import Histogram
from minishuffle.exchange.partition import ResultPartition
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.frames import LatencyMarker

__all__ = ["LATENCY_SECONDS_BOUNDS", "LatencyMarkers"]

LATENCY_SECONDS_BOUNDS: Final = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
ALL: Final = "all"
OTHERS: Final = "others"
"""Sources beyond the limit, together."""
MICROSECONDS: Final = 1_000_000


class LatencyMarkers:
    """The latency markers of one attempt. The task's thread writes, any thread reads.

    Args:
        settings: of the job.
        source: operator and index, if the task emits markers; None: it sends on what it reads.
        partitions: by edge; they may come later.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        settings: JobSettings,
        source: tuple[int, int] | None,
        partitions: Mapping[int, ResultPartition],
        wall: Callable[[], float],
    ) -> None:
        self._source = source if settings.latency_interval else None
        self._interval = settings.latency_interval
        self._granularity = settings.latency_granularity
        self._partitions = partitions
        self._wall = wall
        self._due = -math.inf
        self._all = Histogram(LATENCY_SECONDS_BOUNDS)
        self._longest = 0.0
        self._by_source: dict[str, Histogram] = {}

    def emit_due(self, now: float) -> float:
        """Emit a marker if it is time; gives when the next one is due (inf: never). ``now``: seconds, of any
        origin."""
        if self._source is None:
            return math.inf
        if now >= self._due:
            self._due = now + self._interval
            self._send(LatencyMarker(*self._source, int(self._wall() * MICROSECONDS)))
        return self._due

    def take(self, marker: LatencyMarker) -> None:
        """Record a received marker and forward it."""
        seconds = max(0.0, self._wall() - marker.time / MICROSECONDS)
        self._longest = max(self._longest, seconds)
        self._all.observe(seconds)
        if self._granularity != "single":
            self._of(marker).observe(seconds)
        self._send(marker)

    def _send(self, marker: LatencyMarker) -> None:
        for partition in self._partitions.values():
            partition.emit_latency(marker)

    def _of(self, marker: LatencyMarker) -> Histogram:
        by_operator = self._granularity == "operator"
        name = str(marker.operator) if by_operator else f"{marker.operator}.{marker.subtask}"
        known = self._by_source
        if name not in known:
            name = name if len(known) < limits.LATENCY_SOURCES_MAX else OTHERS
            known.setdefault(name, Histogram(LATENCY_SECONDS_BOUNDS))
        return known[name]

    def histograms(self) -> dict[str, Histogram]:
        """By source: ``OPERATOR`` or ``OPERATOR.INDEX``, or all together; none if no marker has come."""
        if not self._all.count:
            return {}
        return {ALL: self._all} if self._granularity == "single" else dict(self._by_source)

    def summary(self) -> dict[str, float]:
        """The number of markers that have come, quantiles (upper edges of buckets) and the longest time, in
        seconds; empty if none has come."""
        count = self._all.count
        if not count:
            return {}
        quantiles = {f"p{q}": min(self._longest, self._all.quantile(q / 100)) for q in (50, 95, 99)}
        return {"count": float(count), **quantiles, "max": self._longest}
