"""What a worker says of itself."""

from __future__ import annotations

import gc
import mmap
from typing import TYPE_CHECKING

from minishuffle.config import ClusterSettings
from minishuffle.counters import LAG_SECONDS_BOUNDS, ConnectionCounters, Histogram
from minishuffle.limits import SNAPSHOT_MEMORY_BYTES_MAX
from minishuffle.worker.interpreter import GarbageClock
from minishuffle.worker.reports.workerreports import registration, resident_bytes, worker_report

if TYPE_CHECKING:
    from conftest import Site


async def test_a_heartbeat_has_what_rates_are_made_from(site: Site) -> None:
    lag = Histogram(LAG_SECONDS_BOUNDS)
    lag.observe(0.004)
    report = worker_report(
        site.pool,
        ConnectionCounters(bytes_out=7),
        site.deployment,
        lag,
        abandoned=1,
        stuck={"j1": [0]},
        jobs_loaded=2,
        clock=10.5,
        cpu_seconds=3.5,
        gc_seconds=0.25,
        memory_bytes=77,
    )
    assert report.memory_bytes == 77
    assert (report.snapshot_bytes, report.snapshot_memory_bytes) == (0, SNAPSHOT_MEMORY_BYTES_MAX)
    assert (report.clock_seconds, report.cpu_seconds, report.gc_seconds) == (10.5, 3.5, 0.25)
    assert (report.abandoned_tasks, report.stuck) == (1, {"j1": [0]})
    assert (report.segments_free, report.segment_bytes) == (site.pool.total, site.pool.segment_bytes)
    assert (report.remote_bytes_out, report.abandoned_tasks, report.jobs_loaded) == (7, 1, 2)
    assert report.loop_lag_p99_seconds == 0.005


async def test_a_registration_has_what_placement_needs(site: Site) -> None:
    about = registration(
        ClusterSettings(slots=5),
        site.pool,
        host="h",
        advertise="",
        data_port=1,
        metrics_port=2,
        requested_worker=3,
        standby=True,
    )
    assert (about.slots, about.segments, about.requested_worker, about.standby) == (
        5,
        site.pool.total,
        3,
        True,
    )


def test_the_resident_memory_of_a_process_grows_with_what_it_holds() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64_000_000) as held:  # What is allocated may lie in memory that was used before.
        held.write(b"x" * len(held))
        assert resident_bytes() > before + 32_000_000 > 32_000_000


def test_the_time_of_collections_is_added_up_until_the_clock_is_closed() -> None:
    times = iter(range(100))
    clock = GarbageClock(lambda: float(next(times)))
    gc.collect()
    gc.collect()
    assert clock.seconds == 2.0, "each from its start to its stop"
    clock.close()
    clock.close()
    gc.collect()
    assert clock.seconds == 2.0
