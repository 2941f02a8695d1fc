"""``cluster up --detach`` that is killed: what it started ends by itself, or is found by ``cluster down``;
and one that another one comes in the way of."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 60.0
MINISHUFFLE = (sys.executable, "-m", "minishuffle")
UP = (*MINISHUFFLE, "cluster", "up", "--detach", "--port", "0", "--workers", "2")
DOWN = (*MINISHUFFLE, "cluster", "down")


@contextmanager
def starting(
    directory: Path, children: int
) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """``cluster up`` as soon as it has started so many processes, which end with the block in any case."""
    with (directory / "up.log").open("wb") as log:
        up = subprocess.Popen(UP, stdout=log, stderr=log)
    found: list[psutil.Process] = []

    def started() -> list[psutil.Process]:
        assert up.poll() is None, "it ended before it had started them"
        found[:] = psutil.Process(up.pid).children()
        return found

    try:
        until(lambda: len(started()) >= children, "their start", SECONDS_MAX)
        yield up, found
    finally:
        up.kill()
        up.wait()
        for child in found:
            if child.is_running():
                child.kill()


@pytest.mark.parametrize("children", [1, 3], ids=["coordinator", "workers"])
def test_what_a_killed_start_has_started_ends_by_itself(
    tmp_path: Path, own_state: Path, children: int
) -> None:
    with starting(tmp_path, children) as (up, found):
        up.kill()
        up.wait()
        _, alive = psutil.wait_procs(found, SECONDS_MAX)
        assert not alive
        assert not (own_state / "cluster.json").exists()


def test_of_two_starts_one_wins_and_the_other_says_why_not(tmp_path: Path, own_state: Path) -> None:
    with starting(tmp_path, 1) as (up, found):
        up.send_signal(signal.SIGSTOP)  # So that it is still starting.
        other = subprocess.run(UP, capture_output=True, text=True, timeout=SECONDS_MAX)
        up.send_signal(signal.SIGCONT)
        assert (other.returncode, other.stdout, other.stderr.count("\n")) == (1, "", 1)
        assert f"another 'cluster up' (pid {up.pid}) is starting a cluster in {own_state}" in other.stderr
        try:
            assert up.wait(SECONDS_MAX) == 0
            assert all(process.is_running() for process in found)
        finally:
            down = subprocess.run(DOWN, capture_output=True, text=True, timeout=SECONDS_MAX)
        assert down.returncode == 0 and down.stdout.startswith("cluster 'default' is down\n")
        _, alive = psutil.wait_procs(found, SECONDS_MAX)
        assert not alive


def test_what_runs_on_without_its_state_directory_is_named_and_ended(tmp_path: Path, own_state: Path) -> None:
    with starting(tmp_path, 3) as (up, found):
        assert up.wait(SECONDS_MAX) == 0
        shutil.rmtree(own_state)
        status = [*MINISHUFFLE, "cluster", "status"]
        refused = subprocess.run(status, capture_output=True, text=True, timeout=SECONDS_MAX)
        assert refused.returncode == 2
        assert f"the state directory {own_state} is gone, and of cluster 'default' there" in refused.stderr
        assert all(f"(pid {process.pid})" in refused.stderr for process in found)
        down = subprocess.run(DOWN, capture_output=True, text=True, timeout=SECONDS_MAX)
        assert (down.returncode, down.stdout) == (0, "cluster 'default' is down\n"), down.stderr
        _, alive = psutil.wait_procs(found, SECONDS_MAX)
        assert not alive
        assert not own_state.exists()
