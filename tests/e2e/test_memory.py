"""A worker gives back what jobs held once they have ended."""

from __future__ import annotations

import psutil
import pytest

from minishuffle.api.stream import Table
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KEYS = 2_000_000
RUNS = 6
MIB = 1 << 20
GROWTH_MIB_MAX = 100
"""From the second run to the last; the state of one run has about 65 MiB."""


def test_the_state_of_ended_jobs_is_given_back() -> None:
    resident: list[int] = []
    with LocalCluster(workers=1, slots=1) as cluster:
        (worker,) = cluster.workers.values()
        for _ in range(RUNS):
            numbers = Table.generate(records=KEYS).key_by("number")
            stream = numbers.aggregate("end", total=("number", "sum")).to_count()
            result = cluster.submit(stream, name="sums", parallelism=1).wait(100)
            assert [sink.value for sink in result.results] == [KEYS]
            resident.append(psutil.Process(worker).memory_info().rss // MIB)
    assert resident[-1] - resident[1] < GROWTH_MIB_MAX, resident
