"""The text of one scrape: https://prometheus.io/docs/instrumenting/exposition_formats, and OpenMetrics 1.0.

Written as lines at once: a process with 200 subtasks has 10,000 series, and the event loop carries no data
while it makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from minishuffle.counters import Histogram, UserSeries
from minishuffle.observe.families import METRICS, USER_METRICS, MetricSpec, Process

__all__ = ["Exposition", "Scrape", "label_text"]

OPENMETRICS: Final = "application/openmetrics-text"
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_ESCAPES: Final = _HELP_ESCAPES | str.maketrans({'"': r"\""})


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Labels as they stand in a line, without braces; values are escaped."""
    return ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)
    )


class Scrape:
    """The lines of one scrape by family. ``labels`` are those of :func:`label_text`."""

    def __init__(self, process: Process) -> None:
        self._specs = {spec.name: spec for spec in METRICS if spec.served_by(process)}
        self._lines: dict[str, list[str]] = {name: [] for name in self._specs}
        self._user_kinds: dict[str, str] = {}

    def value(self, name: str, value: float, labels: str = "") -> None:
        self._lines[name].append(f"{name}{{{labels}}} {value}\n" if labels else f"{name} {value}\n")

    def by_label(self, name: str, values: Mapping[str, float], labels: str = "") -> None:
        """Add a sample for each item; the item's key is the value of the family's last label."""
        last = f"{labels}," if labels else ""
        last += self._specs[name].labels[-1]
        self._lines[name] += [
            f'{name}{{{last}="{key.translate(_ESCAPES)}"}} {value}\n' for key, value in values.items()
        ]

    def histogram(self, name: str, histogram: Histogram, labels: str = "") -> None:
        lines, cumulative = self._lines[name], 0
        first = f"{labels}," if labels else ""
        edges = (*histogram.bounds, "+Inf")
        for edge, count in zip(edges, tuple(histogram.counts), strict=True):
            cumulative += count
            lines.append(f'{name}_bucket{{{first}le="{edge}"}} {cumulative}\n')
        braced = f"{{{labels}}}" if labels else ""
        lines.append(f"{name}_count{braced} {cumulative}\n{name}_sum{braced} {histogram.total}\n")

    def user(self, series: UserSeries, labels: str) -> None:
        """Add a metric of the user's code. If an earlier one of this name has another type, it is left out: a
        family has a single type."""
        if self._user_kinds.setdefault(series.name, series.kind) != series.kind:
            return
        spec = next(spec for spec in USER_METRICS if spec.type == series.kind)
        name = spec.name.replace("NAME", series.name)
        if name not in self._specs:
            self._specs[name] = replace(spec, name=name, help=series.help or series.name)
            self._lines[name] = []
        if series.histogram is not None:
            self.histogram(name, series.histogram, labels)
        else:
            self.value(name, float(series.value), labels)

    def text(self, *, openmetrics: bool) -> str:
        """All families that have samples."""
        parts: list[str] = []
        for name, lines in self._lines.items():
            if lines:
                parts.append(_head(self._specs[name], openmetrics=openmetrics))
                parts += lines
        return "".join(parts)


def _head(spec: MetricSpec, *, openmetrics: bool) -> str:
    """The head of a family. OpenMetrics names a counter without ``_total``, and escapes quotes."""
    escapes = _ESCAPES if openmetrics else _HELP_ESCAPES
    name = spec.name.removesuffix("_total") if openmetrics and spec.type == "counter" else spec.name
    return f"# HELP {name} {spec.help.translate(escapes)}\n# TYPE {name} {spec.type}\n"


class Exposition:
    """The contents of ``/metrics`` of a process: its own families, and those of its interpreter.

    Args:
        collect: makes a scrape; called once for each.
    """

    def __init__(self, collect: Callable[[], Scrape]) -> None:
        self._collect = collect
        self._runtime = CollectorRegistry()
        for collector in (ProcessCollector, GCCollector, PlatformCollector):
            collector(registry=self._runtime)

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The text and its type for a request with this header ``Accept``: OpenMetrics if that is named."""
        if OPENMETRICS in accept:
            own = self._collect().text(openmetrics=True).encode()
            runtime: bytes = generate_openmetrics(self._runtime)  # type: ignore[no-untyped-call]
            return own + runtime, CONTENT_TYPE_LATEST
        own = self._collect().text(openmetrics=False).encode()
        return own + generate_latest(self._runtime), CONTENT_TYPE_PLAIN_0_0_4
