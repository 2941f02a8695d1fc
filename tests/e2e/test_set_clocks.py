"""A system clock that is set by hours, back and forward, under jobs of real processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.operators.keyed_process import ProcessContext
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

HOUR = 3600.0
RECORDS = 600
RATE = 400
STEPS = {150: -HOUR, 300: HOUR}
"""By record, how far the system clock is ahead of the right one from then on."""
DELAY = 0.2
SECONDS_MAX = 60.0


def all_fired() -> threading.Event:
    """The worker's own, for all of its threads."""
    event: threading.Event = vars(time).setdefault("all_fired", threading.Event())
    return event


class ClockSetter:
    """Numbers records as they come, and sets the system clock, for this worker alone, when it is time. (The
    module ``time`` is all that the worker reads it by.) The last one waits for the timers of the others."""

    def __init__(self) -> None:
        self.number = -1

    def __call__(self, row: int) -> int:
        self.number += 1
        if self.number in STEPS:
            right, ahead = getattr(time, "right", time.time), STEPS[self.number]
            time.right = right  # type: ignore[attr-defined]
            time.time = lambda: right() + ahead
        if self.number == RECORDS - 1:
            assert all_fired().wait(SECONDS_MAX), "timers did not fire"
        return self.number


def on_record(row: int, context: ProcessContext) -> None:
    at = round((time.time() + DELAY) * 1e6)
    context.state.setdefault(at, []).append((row, time.monotonic()))
    context.set_timer(at, "wall")


def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
    found = context.state.pop(round(at.timestamp() * 1e6))
    time.fired = getattr(time, "fired", 0) + len(found)  # type: ignore[attr-defined]
    if time.fired >= RECORDS - 1:  # type: ignore[attr-defined]
        all_fired().set()
    return [(row, time.monotonic() - began) for row, began in found]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One worker that no other test has: its clock is set."""
    with LocalCluster(workers=1) as made:
        yield made


def test_rates_timers_markers_and_windows_go_on_when_the_clock_is_set(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{number}\n" for number in range(100)))
    paced = Stream.generate(rate=RATE, records=RECORDS).parallel(1).map(ClockSetter())
    timers = paced.key_by(lambda row: row % 7).process(on_record, on_timer).collect("timers")
    others = Stream.text(lines).map(int).union(Stream.items(range(100)))
    rolled = others.union(paced).to_files(tmp_path / "out", seconds=0.2)
    timed = paced.event_time(lambda row: row * 1_000_000, idle_after=timedelta(seconds=5))
    windows = timed.key_by(lambda row: 0).window(timedelta(seconds=100)).count().collect("windows")
    settings = JobSettings(latency_interval=0.05)

    job = cluster.submit(Stream.together(timers, rolled, windows), settings=settings)
    result = job.wait(timeout=SECONDS_MAX)

    fired = Counter(row for row, _ in result.collected["timers"])
    assert fired == dict.fromkeys(range(RECORDS - 1), 1)
    delays = [delay for _, delay in result.collected["timers"]]
    # Timers fire by a clock that may be 1 % faster.
    assert min(delays) > DELAY / 1.02
    assert max(delays) < SECONDS_MAX
    assert {start.timestamp(): count for _, start, count in result.collected["windows"]} == {
        100.0 * number: 100 for number in range(RECORDS // 100)
    }
    files = [pq.read_metadata(path).num_rows for path in (tmp_path / "out").iterdir()]
    assert sum(files) == RECORDS + 200 and len(files) > len(STEPS)
    markers = [task.counters.latency for task in job.info().tasks if task.counters.latency]
    assert markers and all(each["max"] < SECONDS_MAX for each in markers)
    assert max(each["count"] for each in markers) > len(STEPS)
    steps = [event.text for event in job.events() if event.kind == "clock set"]
    assert [text.partition(":")[0] for text in steps] == [
        "the system clock of worker 1 was set back by 3,600.0 s",
        "the system clock of worker 1 was set forward by 7,200.0 s",
    ]
