"""Reading the workers' ``/metrics``, and a dozen figures that tell how a job is doing."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from minishuffle.cli.tables import byte_text, rate_text
from minishuffle.ids import Address

__all__ = ["FIGURES", "Figure", "Samples", "scrape", "total"]

Samples: TypeAlias = "list[tuple[str, dict[str, str], float]]"
"""(sample name, labels, value) of all workers together."""

SCRAPE_SECONDS = 2.0


def scrape(targets: Sequence[Address]) -> Samples:
    """Ask every worker once.

    Raises:
        OSError: one does not answer.
    """
    samples: Samples = []
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=SCRAPE_SECONDS) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            samples += [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of a sample over workers and tasks, of those series that have these labels."""
    wanted = labels.items()
    return sum(value for found, has, value in samples if found == name and wanted <= has.items())


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the display. ``rate``: growth per second of a counter, else the value itself."""

    text: str
    metric: str
    labels: dict[str, str]
    show: Callable[[float], str]
    rate: bool = False

    def value(self, before: Samples, now: Samples, seconds: float) -> float:
        figure = total(now, self.metric, **self.labels)
        if self.rate:
            return (figure - total(before, self.metric, **self.labels)) / seconds
        return figure


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _bytes_rate(value: float) -> str:
    return f"{byte_text(value)}/s"


def _seconds_rate(value: float) -> str:
    return f"{value:.2f} threads"


_RECORDS = "minishuffle_task_records_total"
_BYTES = "minishuffle_network_bytes_total"
_BUFFERS = "minishuffle_network_buffers_total"
_TIME = "minishuffle_task_time_seconds_total"

FIGURES: tuple[Figure, ...] = (
    Figure("records emitted", _RECORDS, {"direction": "out"}, rate_text, rate=True),
    Figure("records taken in", _RECORDS, {"direction": "in"}, rate_text, rate=True),
    Figure("over TCP", _BYTES, {"direction": "out", "path": "remote"}, _bytes_rate, rate=True),
    Figure("inside a worker", _BYTES, {"direction": "out", "path": "local"}, _bytes_rate, rate=True),
    Figure("buffers over TCP", _BUFFERS, {"direction": "out", "path": "remote"}, rate_text, rate=True),
    Figure("credits granted", "minishuffle_credits_total", {"direction": "granted"}, rate_text, rate=True),
    Figure("data connections", "minishuffle_connections", {}, _count),
    Figure("network segments used", "minishuffle_network_segments", {"state": "used"}, _count),
    Figure("network segments free", "minishuffle_network_segments", {"state": "free"}, _count),
    Figure("buffers waiting for tasks", "minishuffle_input_queue_buffers", {}, _count),
    Figure("buffers waiting for credit", "minishuffle_output_backlog_buffers", {}, _count),
    Figure("channels out of credit", "minishuffle_channels_starved", {}, _count),
    Figure("busy", _TIME, {"state": "busy"}, _seconds_rate, rate=True),
    Figure("back-pressured", _TIME, {"state": "backpressured_hard"}, _seconds_rate, rate=True),
    Figure("memory of the workers", "process_resident_memory_bytes", {}, byte_text),
)
