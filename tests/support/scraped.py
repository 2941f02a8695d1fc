"""What ``/metrics`` of a process says, read as a scraper does."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from minishuffle.observe.exposition import Exposition

__all__ = ["Scraper", "scraped_families"]


def scraped_families(exposition: Exposition) -> list[Metric]:
    """All families of one scrape."""
    text, _ = exposition.answer("")
    return list(text_string_to_metric_families(text.decode()))


class Scraper:
    """Reads single samples."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """The value of that one sample, of a scrape of its own; None if there is none."""
        found = [
            sample.value
            for family in scraped_families(self._exposition)
            for sample in family.samples
            if sample.name == name and sample.labels == (labels or {})
        ]
        assert len(found) <= 1, f"{name} {labels} is there {len(found)} times"
        return found[0] if found else None
