"""A worker that was declared lost while it was paused says so when it goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_worker_that_was_paused_too_long_says_why_it_ends(wait_until: Callable[..., Any]) -> None:
    timing = {"heartbeat_interval": 0.1, "heartbeat_timeout": 1.0}
    with LocalCluster(workers=1, restart_workers=False, **timing) as cluster:
        (worker,) = cluster.status().workers
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: cluster.status().workers[0].state == "lost", "the verdict")
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        (log,) = cluster.state_dir.glob("worker-1*.log")
        reason = "the coordinator declared this worker lost: it was silent for 1 s; start it again"
        wait_until(lambda: reason in log.read_text(), "the worker's last words")
        assert "the coordinator is gone" not in log.read_text()
