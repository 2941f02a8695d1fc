"""Processes that are found by their command lines, and which of them are taken for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from minishuffle.cli.ownprocesses import LAUNCHER, alive, is_minishuffle, own_processes, role

PROGRAM = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def running(directory: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with that command line, in that folder, which does nothing."""
    script = directory / "minishuffle"
    script.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=directory,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            process.communicate(timeout=30)


def test_only_our_own_processes_are_ours(tmp_path: Path) -> None:
    assert not is_minishuffle(os.getpid())
    assert not is_minishuffle(2**22 + 1)
    with running(tmp_path) as process:
        started = psutil.Process(process.pid).create_time()
        assert is_minishuffle(process.pid)
        assert is_minishuffle(process.pid, started)
        assert not is_minishuffle(process.pid, started - 60)
    assert not is_minishuffle(process.pid)


def test_those_of_a_state_directory_are_found_whichever_way_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    gone = tmp_path / "minishuffle" / "blue"
    assert not gone.exists()
    assert own_processes(gone) is None
    lines: list[tuple[tuple[str, ...], dict[str, str]]] = [
        (("--cluster", "blue", "coordinator", "start"), {}),
        (("worker", "start", "--id", "2", "--state-dir", "minishuffle/../minishuffle/blue"), {}),
        (("worker", "start", "--id=2", f"--state-dir={gone}"), {}),
        (("worker", "start"), {"MINISHUFFLE_CLUSTER": "blue"}),
        (("cluster", "up"), {"MINISHUFFLE_STATE_DIR": str(gone)}),
        (("worker", "start"), {}),
        (("--cluster", "blue", "worker", "start"), {"XDG_STATE_HOME": str(tmp_path / "other")}),
        (("--cluster", "blue", "cluster", "status"), {}),
    ]
    with ExitStack() as stack:
        pids = [stack.enter_context(running(tmp_path, *words, **env)).pid for words, env in lines]
        record = own_processes(gone)
        assert record is not None
        assert alive(record) == {
            "coordinator": pids[0],
            "worker 2": pids[1],
            f"worker 2, too, {pids[2]}": pids[2],
            "worker": pids[3],
            LAUNCHER: pids[4],
        }
    assert alive(record) == {}
    assert own_processes(gone) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("python -m minishuffle.cli --cluster a worker start --id 1", "worker"),
        ("python /opt/bin/minishuffle coordinator start", "coordinator"),
        ("minishuffle --debug cluster up --detach", LAUNCHER),
        ("minishuffle cluster down", None),
        ("timeout 60 minishuffle cluster up", None),
        ("vim minishuffle", None),
        ("python -m pytest worker start", None),
        ("", None),
    ],
)
def test_the_role_of_a_process_is_that_of_its_command(line: str, found: str | None) -> None:
    assert role(line.split()) == found
