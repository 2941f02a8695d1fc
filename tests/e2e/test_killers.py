"""Functions that end their process: the job that they are of fails, with the cause."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from minishuffle import JobSettings, LocalCluster, Stream
from minishuffle.errors import TaskFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FAILURES_MAX = 3


class Killer:
    """Ends its process at its first record."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, row: Any) -> Any:
        if self.how == "exit":
            os._exit(1)
        signal.raise_signal(getattr(signal, self.how))
        return row


def test_a_function_that_ends_its_process_fails_its_job_with_the_cause() -> None:
    settings = JobSettings(restart_failures_max=FAILURES_MAX, source_lease=0)
    # Each death has a worker of its own, so that nobody waits for a new one.
    with LocalCluster(workers=2 * FAILURES_MAX, slots=1, restart_workers=False) as cluster:
        for how, ended in (
            ("SIGSEGV", "was killed by SIGSEGV"),
            ("exit", "ended with code 1, which was not"),
        ):
            rows = Stream.items(range(1000)).map(Killer(how))
            job = cluster.submit(rows.collect(), name="killer", settings=settings, parallelism=1)
            with pytest.raises(TaskFailed) as failed:
                job.wait(timeout=100)
            text = str(failed.value)
            assert f"each of the {FAILURES_MAX} times that its worker died (restart_failures_max)" in text
            assert ended in text and "rows in hand behind the 0 that it had done" in text
            assert "items -> map -> collect[0]" in text
            counted = [event for event in job.events() if event.kind == "death counted"]
            assert len({event.worker for event in counted}) == len(counted) == FAILURES_MAX
