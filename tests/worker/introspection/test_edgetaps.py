"""Taps of edges on a worker: what opens and ends them, and that nothing is left of them on a partition."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.wire.inquiries import TappedEdge
from minishuffle.worker.introspection.edgetaps import EdgeTaps

if TYPE_CHECKING:
    from conftest import Site


class Looks:
    """Two subtasks that write without end, and somebody who looks at what they write."""

    def __init__(self, site: Site) -> None:
        self.now = 100.0
        self.taps = EdgeTaps(site.deployment, lambda: self.now, lambda: 1_700_000_000.0)
        numbers = Stream.generate(lambda start, count: list(range(start, start + count)), rate=20_000)
        site.deploy(numbers.key_by(lambda row: row % 7).count(emit="batch").to_count(), parallelism=2)
        self._site = site
        attempts = site.deployment.attempts.values()
        self.partitions = [each for attempt in attempts for each in attempt.partitions.values()]

    def ask(self, name: str = "a", *, edge: int = 0, ends: bool = False) -> dict[str, Any]:
        question = TappedEdge(edge=edge, tap=name, ends=ends)
        found: dict[str, Any] = json.loads(self.taps.answer("j1", question))
        return found

    async def rows(self, name: str, count: int) -> list[dict[str, Any]]:
        found = self.ask(name)["rows"]

        def enough() -> bool:
            found.extend(self.ask(name)["rows"])
            return len(found) >= count

        await self._site.until(enough)
        return found

    def open(self) -> list[int]:
        return [len(partition.taps) for partition in self.partitions]

    async def end(self) -> None:
        """Of the job."""
        for task in self._site.tasks():
            task.paths.cancel()
        await self._site.finish()
        self._site.release()


async def test_rows_of_the_producers_come_until_it_ends(site: Site) -> None:
    looks = Looks(site)
    assert looks.open() == [0, 0]
    found = await looks.rows("a", limits.TAP_ROWS)
    assert len(found) == limits.TAP_ROWS, "of both together"
    assert {(row["producer"], row["attempt"]) for row in found} <= {(0, 1), (1, 1)}
    assert {row["consumer"] for row in found} <= {0, 1}
    assert looks.open() == [1, 1]
    await looks.rows("b", 1)
    assert looks.open() == [2, 2], "each of those who look has a tap of its own"
    assert looks.ask("a", ends=True) == {"rows": [], "producers": 2}
    assert looks.open() == [1, 1]
    assert looks.ask("c", edge=7) == {"rows": [], "producers": 0}
    looks.ask("d")
    newest = looks.partitions[0].taps[-1]
    await site.until(lambda: bool(newest._rows))
    await looks.end()
    found = looks.ask("d")
    assert found["producers"] == 0 and found["rows"]
    assert looks.ask("d")["producers"] == 0


async def test_a_tap_that_nobody_asks_for_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(site)
    looks.ask("a")
    looks.now += limits.TAP_SECONDS_MAX
    looks.taps.expire()
    assert looks.open() == [1, 1]
    looks.ask("b")
    looks.now += 0.1
    looks.taps.expire()
    assert looks.open() == [1, 1], "the one that was asked for"
    monkeypatch.setattr(limits, "TAPS_MAX", 2)
    for name in ("c", "d"):
        looks.ask(name)
    assert looks.open() == [2, 2], "the oldest makes room"
    looks.now += limits.TAP_SECONDS_MAX + 0.1
    looks.taps.expire()
    assert looks.open() == [0, 0]
