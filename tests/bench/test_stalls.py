"""When the machine stood still is seen, and left out of what was silent then."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np

from minishuffle.bench.stalls import STALL_SECONDS, Stalls, awake
from support.waiting import until


def test_a_stall_is_seen_and_a_watch_ends_with_its_block(tmp_path: Path) -> None:
    with Stalls(tmp_path / "stalls") as stalls:
        pid = stalls.pid

        def stall() -> bool:
            """A process that is stopped sees what one sees whose machine stands still."""
            os.kill(pid, signal.SIGSTOP)
            subprocess.run(["sleep", str(2 * STALL_SECONDS)], check=True, timeout=30)
            os.kill(pid, signal.SIGCONT)
            return bool(stalls.spans())

        until(stall, "a stall that is seen")
        spans = stalls.spans()
        assert all(end - begin > STALL_SECONDS * 1e9 for begin, end in spans)
        assert spans == sorted(spans)
    assert not Path(f"/proc/{pid}").exists()


def test_what_was_awake_is_the_rest() -> None:
    edges = np.array([0, 10, 30, 100], np.int64)
    assert awake(edges, []).tolist() == [10, 20, 70]
    assert awake(edges, [(5, 35), (90, 200)]).tolist() == [5, 0, 55]
    assert awake(edges, [(200, 300)]).tolist() == [10, 20, 70]
