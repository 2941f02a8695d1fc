"""The first process of a container, in a PID namespace of its own, which takes root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from minishuffle.cli.firstprocess import run_behind_init
from minishuffle.config import create_secret
from support.waiting import until

SECONDS_MAX = 60.0
ORPHANS = 53

LEAVING = f"""
import os, subprocess, sys, time
import psutil
from minishuffle.cli.firstprocess import run_behind_init
run_behind_init()
assert os.getpid() != 1
for _ in range({ORPHANS}):
    assert subprocess.run(["sh", "-c", "sleep 0.01 & exit 3"]).returncode == 3
def zombies():
    states = [each.info["status"] for each in psutil.process_iter(["status"])]
    return states.count(psutil.STATUS_ZOMBIE), len(states)
deadline = time.monotonic() + {SECONDS_MAX}
while zombies() != (0, 2) and time.monotonic() < deadline:
    time.sleep(0.01)
print(zombies(), flush=True)
"""


def as_first(command: Sequence[str]) -> list[str]:
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]


def ran(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        as_first([sys.executable, "-c", "\n".join(lines)]),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_another_process_than_the_first_goes_on_at_once() -> None:
    before = os.getpid()
    run_behind_init()
    assert os.getpid() == before


def test_what_functions_leave_behind_is_waited_for() -> None:
    done = ran(LEAVING)
    assert (done.stdout, done.stderr, done.returncode) == ("(0, 2)\n", "", 0)


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 15)", 143)],
)
def test_it_ends_as_what_it_runs_does(ending: str, code: int) -> None:
    start = "from minishuffle.cli.firstprocess import run_behind_init; run_behind_init()"
    assert ran("import os, sys", start, ending).returncode == code


@pytest.mark.slow
def test_signals_reach_what_it_runs(tmp_path: Path) -> None:
    """A coordinator that is the first process: SIGTERM has it hand over, and both end with 0."""
    create_secret(tmp_path / "secret")
    command = [sys.executable, "-m", "minishuffle.cli", "--state-dir", str(tmp_path), "coordinator", "start"]
    with subprocess.Popen(
        as_first([*command, "--port", "0", "--web-port", "0"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as outer:
        assert outer.stdout is not None
        ready = json.loads(outer.stdout.readline())
        assert ready["pid"] == 2, "behind the first"
        (first,) = until(lambda: psutil.Process(outer.pid).children(), "the first process")
        first.send_signal(signal.SIGTERM)
        assert outer.wait(SECONDS_MAX) == 0
