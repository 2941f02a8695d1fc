"""Clusters that nobody stops: the next one removes the state directories of killed programs, and no other;
what a program has started ends with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

PROGRAM = """
import sys
from minishuffle import LocalCluster
with LocalCluster(workers=1, slots=1) as cluster:
    print(cluster.state_dir, flush=True)
    sys.stdin.read()
"""


@contextmanager
def program() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another program with a cluster, and the cluster's state directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.communicate(timeout=60)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_next_cluster_removes_what_a_killed_one_left(temporary: Path) -> None:
    foreign = temporary / "minishuffle-notes"
    foreign.mkdir()
    with program() as (_, running), program() as (killed, left):
        killed.kill()
        killed.wait()
        assert left.exists()
        with LocalCluster(workers=1, slots=1) as cluster:
            assert set(temporary.iterdir()) == {foreign, running, cluster.state_dir}
        assert set(temporary.iterdir()) == {foreign, running}
    assert set(temporary.iterdir()) == {foreign}


def test_a_cluster_that_was_started_ends_with_its_program(temporary: Path) -> None:
    program = "from minishuffle import LocalCluster\nprint(*LocalCluster(workers=1).start().workers.values())"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not psutil.pid_exists(int(ran.stdout))
    assert list(temporary.iterdir()) == []
