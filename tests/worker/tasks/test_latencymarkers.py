"""Latency markers of a task: when a source emits one, what is booked, and where it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.frames import LatencyMarker
from minishuffle.worker.tasks.latencymarkers import LatencyMarkers

if TYPE_CHECKING:
    from conftest import Site

SECONDS_MAX = 20.0


class Sent:
    """Stands in for a partition."""

    def __init__(self) -> None:
        self.markers: list[LatencyMarker] = []

    def emit_latency(self, marker: LatencyMarker) -> None:
        self.markers.append(marker)


class Batches:
    """A hundred batches of 50 rows."""

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for _ in range(50):
            yield list(range(50))


class Made:
    """The markers of one attempt, with two outputs and a clock that the test sets."""

    def __init__(self, *, source: tuple[int, int] | None = None, **settings: Any) -> None:
        self.now = 1000.0
        self.outputs = [Sent(), Sent()]
        partitions = cast("dict[int, PipelinedPartition]", dict(enumerate(self.outputs)))
        chosen = JobSettings(**{"latency_interval": 2.0, **settings})
        self.markers = LatencyMarkers(chosen, source, partitions, lambda: self.now)

    def arrive(self, operator: int, index: int, seconds: float) -> None:
        """A marker comes that was emitted so long ago."""
        self.markers.take(LatencyMarker(operator, index, round((self.now - seconds) * 1e6)))


def test_a_source_emits_one_into_each_output_when_it_is_time() -> None:
    made = Made(source=(3, 4))
    assert made.markers.emit_due(10.0) == 12.0
    assert made.markers.emit_due(11.9) == 12.0
    made.now = 1002.5
    assert made.markers.emit_due(12.5) == 14.5
    expected = [LatencyMarker(3, 4, 1_000_000_000), LatencyMarker(3, 4, 1_002_500_000)]
    assert [output.markers for output in made.outputs] == [expected, expected]
    assert made.markers.summary() == {} and made.markers.histograms() == {}


def test_none_is_emitted_by_default_or_by_a_task_that_is_no_source() -> None:
    for made in (Made(source=(0, 0), latency_interval=0.0), Made()):
        assert made.markers.emit_due(1000.0) == math.inf
        assert made.outputs[0].markers == []


def test_one_that_comes_is_booked_and_goes_on_as_it_is() -> None:
    made = Made()
    for _ in range(99):
        made.arrive(0, 1, 0.004)
    made.arrive(0, 1, 3.0)
    assert made.markers.summary() == {"count": 100.0, "p50": 0.005, "p95": 0.005, "p99": 0.005, "max": 3.0}
    assert made.outputs[1].markers == made.outputs[0].markers
    assert made.outputs[0].markers[0] == LatencyMarker(0, 1, 999_996_000)
    made.arrive(0, 1, -5.0)
    assert made.markers.summary()["count"] == 101.0, "a clock that is ahead: no time at all"


@pytest.mark.parametrize(
    ("granularity", "names"),
    [("single", ["all"]), ("operator", ["0", "5"]), ("subtask", ["0.0", "0.1", "5.0"])],
)
def test_latencies_are_kept_apart_as_the_job_wants(granularity: str, names: list[str]) -> None:
    made = Made(latency_granularity=granularity)
    for operator, index in ((0, 0), (0, 1), (5, 0), (0, 0)):
        made.arrive(operator, index, 0.01)
    found = made.markers.histograms()
    assert sorted(found) == names
    assert sum(histogram.count for histogram in found.values()) == made.markers.summary()["count"] == 4


def test_sources_beyond_the_limit_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LATENCY_SOURCES_MAX", 3)
    made = Made(latency_granularity="subtask")
    for index in range(10):
        made.arrive(0, index, 0.01)
    found = made.markers.histograms()
    assert {name: each.count for name, each in found.items()} == {"0.0": 1, "0.1": 1, "0.2": 1, "others": 7}


async def test_markers_pass_every_task_behind_a_source_and_no_row_is_counted_for_them(site: Site) -> None:
    settings = JobSettings(latency_interval=1e-6, restart_strategy="none")
    rows = Stream.source(Batches()).rebalance().map(lambda row: row + 1)
    counted = rows.key_by(lambda row: row % 7).count(emit="end").rebalance().to_count()
    tasks = site.deploy(counted, parallelism=2, settings=settings)
    await site.until(lambda: len(site.outcomes) == len(tasks))
    assert {outcome.state for outcome in site.outcomes.values()} == {"finished"}
    found = {task.attempt_id: task.read_counters() for task in tasks}
    by_operator = [
        [each for key, each in found.items() if key.subtask.operator == operator] for operator in range(4)
    ]
    assert not any(each.latency for each in by_operator[0])
    for readers in by_operator[1:]:
        assert sum(each.latency.get("count", 0.0) for each in readers) > 0, "state does not hold them up"
    assert sum(each.records_in for each in by_operator[1]) == 5_000
    assert sum(each.records_in for each in by_operator[3]) == 7
    assert all(not each.rows_dropped for each in found.values())
