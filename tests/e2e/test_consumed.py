"""Credit is granted on consumption: a function that stops, stops everything before it within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RECORDS = 400_000
SEGMENT_BYTES = 1024
SETTINGS = JobSettings(buffers_per_channel=2)
STOPPED_SECONDS_MAX = 100.0
CONSUMERS = 2
STILL_FOR_SECONDS = 0.5


@pytest.fixture(scope="module")
def seen(watch: Any) -> Iterator[Any]:
    with LocalCluster(workers=2, slots=2, segment_bytes=SEGMENT_BYTES) as cluster:
        cluster.status()  # The client connects at first use.
        yield watch(cluster)


class Gate:
    """A sink that lets nothing through until a file is there."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag
        self.count = 0
        self.sum = 0

    def open(self, context: Any) -> None:
        pass

    def write(self, batch: Any) -> None:
        deadline = time.monotonic() + STOPPED_SECONDS_MAX
        while not self.flag.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.count += len(batch)
        self.sum += sum(batch)

    def close(self) -> Any:
        return [self.count, self.sum]


def figures(seen: Any) -> dict[str, float]:
    """What tells whether anything moves."""
    samples = seen.samples()
    names = ("minishuffle_task_records_total", "minishuffle_credits_total", "minishuffle_frames_total")
    return {
        f"{name}{sorted(labels.items())}": value
        for name, labels, value in samples
        if name in names and labels.get("type") not in ("ping", "pong")
    }


def test_a_stopped_function_stops_its_producers_within_what_was_granted(
    seen: Any, wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    flag = tmp_path / "go on"
    numbers = Stream.generate(records=RECORDS).name("numbers")
    handle = seen.cluster.submit(
        numbers.rebalance().map(abs).name("taken").to(Gate(flag)),
        name="stopped",
        parallelism=CONSUMERS,
        settings=SETTINGS,
    )
    try:
        wait_until(lambda: _still(seen), "that nothing moves any more")
        _check_stopped(seen)
    finally:
        flag.touch()
    results = [result.value for result in handle.wait(60).results]
    assert sum(count for count, _ in results) == RECORDS
    assert sum(sum_ for _, sum_ in results) == RECORDS * (RECORDS - 1) // 2
    # Whatever was granted was used or taken back with the channels; no buffer is missing afterwards.
    seen.calm()
    assert seen.total("minishuffle_network_segments", state="used") == 0


def _still(seen: Any) -> bool:
    """Nothing has moved between two looks, after every consumer has got something."""
    samples = seen.samples()
    taken = [value for name, labels, value in samples if _queue(name, labels)]
    before = figures(seen)
    time.sleep(STILL_FOR_SECONDS)
    return len(taken) == CONSUMERS and all(taken) and before == figures(seen)


def _queue(name: str, labels: dict[str, str]) -> bool:
    return name == "minishuffle_input_queue_buffers" and labels["pipeline"] == "stopped"


def _check_stopped(seen: Any) -> None:
    emitted = seen.total("minishuffle_task_records_total", vertex="numbers", direction="out")
    assert 0 < emitted < RECORDS / 4
    producers = CONSUMERS
    remote_channels = CONSUMERS * producers // 2
    for worker in (1, 2):
        samples = seen.samples(worker)

        def of(name: str, samples: Any = samples, **labels: str) -> float:
            return sum(v for n, has, v in samples if n == name and labels.items() <= has.items())

        # All credit that the peer gave is used up: as many data buffers went out as credits came in.
        credits = of("minishuffle_credits_total", direction="received")
        sent = of("minishuffle_network_buffers_total", direction="out", path="remote")
        assert credits == sent > 0
        granted = of("minishuffle_credits_total", direction="granted")
        assert granted == of("minishuffle_network_buffers_total", direction="in", path="remote")
        # What lies in front of the function is within the buffers that the gate ever had.
        capacity = of("minishuffle_input_buffers_capacity")
        floating = limits.FLOATING_BUFFERS_PER_GATE_DEFAULT
        exclusive = SETTINGS.buffers_per_channel * remote_channels // 2
        assert capacity <= exclusive + floating
        assert of("minishuffle_input_buffers") <= capacity
        local_bound = SETTINGS.buffers_per_channel + floating
        queued = of("minishuffle_input_queue_buffers")
        assert 0 < queued <= exclusive + floating + local_bound
        # The producer waits for a segment of its own pool, which is all in use; and the cap holds.
        assert of("minishuffle_output_pool_buffers") == of("minishuffle_output_pool_buffers_capacity")
        assert of("minishuffle_output_backlog_buffers") <= of("minishuffle_output_pool_buffers_capacity")
        assert of("minishuffle_network_segments_peak") * SEGMENT_BYTES <= of(
            "minishuffle_network_memory_bytes"
        )
