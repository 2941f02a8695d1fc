"""Metrics that the user's functions and sinks count with, and that the worker serves under ``/metrics``.

Each has one writer, the task's thread (or the thread of its asynchronous function); the worker's loop reads
plain numbers at a scrape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite

from minishuffle import limits
from minishuffle.counters import Histogram, UserSeries
from minishuffle.errors import UsageError

__all__ = ["Counter", "Gauge", "SECONDS_BOUNDS", "UserMetrics"]

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets of a histogram that says none."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")
_RESERVED = ("_total", "_count", "_sum", "_bucket", "_created", "_info")
_TAKEN = "errors"


class Counter:
    """A number that only grows."""

    def __init__(self, series: UserSeries) -> None:
        self._series = series

    def add(self, amount: float = 1) -> None:
        """Count so many more.

        Raises:
            UsageError: the amount is below 0.
        """
        if not amount >= 0:
            raise UsageError(f"counter {self._series.name!r} cannot grow by {amount}: use a gauge")
        self._series.add(amount)


class Gauge:
    """A number that is set."""

    def __init__(self, series: UserSeries) -> None:
        self._series = series

    def set(self, value: float) -> None:
        self._series.set(float(value))


class UserMetrics:
    """Those of one operator of one attempt: ``context.metrics``. What is made twice by one name is the same.

    Args:
        operator: its name, a label.
        position: its place in the chain, a label.
    """

    def __init__(self, operator: str = "", position: int = 0) -> None:
        self._operator = operator
        self._position = position
        self._series: dict[str, UserSeries] = {}

    def counter(self, name: str, help: str = "") -> Counter:
        """Served as ``minishuffle_user_NAME_total``.

        Raises:
            UsageError: the name does not fit, is that of another kind of metric, or is one too many.
        """
        return Counter(self._made(name, "counter", help))

    def gauge(self, name: str, help: str = "") -> Gauge:
        """Served as ``minishuffle_user_NAME``; raises as :meth:`counter`."""
        return Gauge(self._made(name, "gauge", help))

    def histogram(self, name: str, help: str = "", bounds: Sequence[float] = SECONDS_BOUNDS) -> Histogram:
        """Served as ``minishuffle_user_NAME``; ``observe(value)`` counts a value in the bucket of the first
        upper edge, of ``bounds``, that is not below it. Raises as :meth:`counter`."""
        edges = tuple(float(bound) for bound in bounds)
        if not 0 < len(edges) <= limits.USER_BUCKETS_MAX or not all(map(isfinite, edges)):
            raise UsageError(
                f"histogram {name!r} has 1 to {limits.USER_BUCKETS_MAX} finite bounds, not {len(edges)}"
            )
        if list(edges) != sorted(set(edges)):
            raise UsageError(f"the bounds of histogram {name!r} are to ascend: {list(edges)}")
        series = self._made(name, "histogram", help, Histogram(edges))
        assert series.histogram is not None
        return series.histogram

    def _made(self, name: str, kind: str, help: str, histogram: Histogram | None = None) -> UserSeries:
        found = self._series.get(name)
        if found is not None:
            if found.kind != kind:
                raise UsageError(f"metric {name!r} of {self._operator!r} is a {found.kind}, not a {kind}")
            return found
        if not _NAME.fullmatch(name) or name.endswith(_RESERVED):
            raise UsageError(
                f"a metric cannot be named {name!r}: write at most 100 lower-case letters, digits and '_', "
                f"without one of {', '.join(_RESERVED)} at the end"
            )
        if name == _TAKEN:
            raise UsageError(
                f"{name!r} is taken: minishuffle counts records whose function raised as "
                "minishuffle_user_errors_total; name it another way"
            )
        if len(self._series) >= limits.USER_METRICS_MAX:
            raise UsageError(
                f"operator {self._operator!r} has {limits.USER_METRICS_MAX} metrics, which is the limit: "
                "make each once, in open(context), and no name from a record"
            )
        series = UserSeries(name, kind, help, self._operator, self._position, histogram=histogram)
        self._series[name] = series
        return series

    def series(self) -> tuple[UserSeries, ...]:
        """(Any thread.) All that were made; copied without giving way to the one that makes them."""
        return tuple(self._series.values())
