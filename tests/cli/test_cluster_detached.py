"""``cluster up --detach`` that is killed: what it started ends by itself, or is found by ``cluster down``."""

from __future__ import annotations

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
UP = (sys.executable, "-m", "minishuffle", "cluster", "up", "--detach", "--port", "0", "--workers", "2")


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
