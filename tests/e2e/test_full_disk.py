"""A real cluster whose coordinator cannot write to its state directory."""

from __future__ import annotations

import resource

import pytest

from minishuffle.dataflow.stream import Stream
from minishuffle.errors import ResourceExhausted
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_full_disk_refuses_submissions_and_jobs_run_on() -> None:
    with LocalCluster(workers=1, slots=2) as cluster:
        endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=100).to_count()
        running = cluster.client.submit(endless, name="runs on", parallelism=1)
        pid = cluster.status().pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        for _ in range(2):
            with pytest.raises(
                ResourceExhausted, match="cannot be accepted: the journal .* make room"
            ) as raised:
                cluster.client.submit(Stream.items([1]).collect(), parallelism=1)
            assert len(str(raised.value).splitlines()) == 1
        assert running.info().state in ("created", "running")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        assert cluster.client.submit(Stream.items([1]).collect(), parallelism=1).wait(30).rows == [1]
        assert running.info().state == "running"
        running.cancel()
        assert running.wait_until_over(30).state == "canceled"
