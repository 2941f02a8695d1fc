"""The leak check finds what it is there to find, and nothing else."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LONG_WAIT, SHORT_WAIT = "SETTLE_SECONDS_MAX = 2.0", "SETTLE_SECONDS_MAX = 0.5"

TESTS = """
import asyncio, os, subprocess, sys, threading
import pytest
from minishuffle import launch
from minishuffle.config import create_secret
from support import forked

held = []

@pytest.fixture(scope="module")
def shared_pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)

def test_leaks_a_descriptor():
    held.append(os.pipe())
    assert held

def test_leaks_a_thread():
    thread = threading.Thread(target=threading.Event().wait, args=(20,), name="left", daemon=True)
    thread.start()
    assert thread.is_alive()

def test_leaks_a_process():
    held.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    assert held

def test_leaks_a_process_of_a_cluster(tmp_path):
    create_secret(tmp_path / "secret")
    arguments = ["--state-dir", str(tmp_path), "coordinator", "start", "--port", "0"]
    held.append(launch.spawn("coordinator", arguments, tmp_path))
    assert forked.template_processes()

async def test_leaks_a_task():
    held.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))
    assert held

@pytest.mark.usefixtures("wider_resources")
def test_opted_out_keeps_a_descriptor():
    held.append(os.pipe())
    assert held

def test_clean_ends_a_thread_soon_after():
    thread = threading.Thread(target=threading.Event().wait, args=(0.1,))
    thread.start()
    assert thread.ident

def test_clean_uses_what_the_module_shares(shared_pipe):
    os.write(shared_pipe[1], b"x")
    assert os.read(shared_pipe[0], 1) == b"x"

async def test_clean_awaits_its_task():
    assert await asyncio.create_task(asyncio.sleep(0, 1)) == 1

async def test_clean_cancels_its_task():
    assert asyncio.create_task(asyncio.Event().wait()).cancel()
"""


@pytest.mark.slow
def test_each_kind_of_leak_fails_its_test_alone(repository: Path, tmp_path: Path) -> None:
    conftest = (repository / "tests" / "conftest.py").read_text()
    assert conftest.count(LONG_WAIT) == 1
    (tmp_path / "conftest.py").write_text(conftest.replace(LONG_WAIT, SHORT_WAIT))
    (tmp_path / "test_leaks.py").write_text(TESTS)
    config = ["-c", str(repository / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *config, "-p", "no:cacheprovider", "-rA", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    passed = set(re.findall(r"^PASSED \S+::test_(\w+)", ran.stdout, re.MULTILINE))
    errors = set(re.findall(r"^ERROR \S+::test_(\w+)", ran.stdout, re.MULTILINE))
    assert "FAILED" not in ran.stdout
    assert passed == set(re.findall(r"def test_(\w+)", TESTS))
    leaks = ["descriptor", "thread", "process", "process_of_a_cluster", "task"]
    assert errors == {f"leaks_a_{what}" for what in leaks}
    for text in ("pipe:[", "thread 'left'", "process ", "task forgotten"):
        assert re.search(rf"left behind: .*{re.escape(text)}", ran.stdout), text
    assert len(set(re.findall(r"process (\d+) \(", ran.stdout))) == 2


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_an_error(repository: Path, tmp_path: Path) -> None:
    """Though the process has begun to import it before it collects: what was defined by then is no file."""
    (tmp_path / "conftest.py").write_text((repository / "tests" / "conftest.py").read_text())
    (tmp_path / "test_broken.py").write_text("def test_before(): ...\n\nimport absent_module\n")
    (tmp_path / "test_raises.py").write_text("def test_before(): ...\n\n1 / 0\n")
    config = ["-c", str(repository / "pyproject.toml"), "--rootdir", str(tmp_path), "-n", "1"]
    command = [sys.executable, "-m", "pytest", *config, "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "No module named 'absent_module'" in ran.stdout, ran.stdout + ran.stderr
    assert "ZeroDivisionError" in ran.stdout
    assert ran.returncode == 1 and "2 errors" in ran.stdout and "passed" not in ran.stdout


def test_both_event_loops_run_coroutines(any_loop: asyncio.Runner, request: pytest.FixtureRequest) -> None:
    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__

    is_uvloop = any_loop.run(kind()).startswith("uvloop")
    assert is_uvloop == ("uvloop" in request.node.name)


@pytest.mark.slow
def test_the_stacks_of_a_process_that_died_stand_at_the_end(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from support.fatal import register as pytest_configure\n")
    (tmp_path / "test_dies.py").write_text(
        "import ctypes\n\ndef test_reads_address_zero():\n    ctypes.string_at(0)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(repository / "tests")}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    shown = ended.stdout.partition("gw0 died")[2]
    assert "Fatal Python error: Segmentation fault" in shown
    assert 'test_dies.py", line 4 in test_reads_address_zero' in shown
    assert "Extension modules" not in shown


@pytest.mark.slow
def test_tests_that_need_more_are_counted_without_what_they_need(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "from support import extras\n"
        "sys.modules['pyspark'] = None\n"
        "pytest_configure = extras.register\n"
        "pytest_pycollect_makemodule = lambda module_path, parent: extras.stand_in(module_path, parent)\n"
        "pytest_collection_modifyitems = lambda items: extras.mark_by_fixture(items)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    extra\n    soak\n")
    (tmp_path / "test_spark_alone.py").write_text(
        "import pyspark\nimport pytest\n\n"
        "pytestmark = [\n    pytest.mark.extra,\n]\n\n"
        "def test_one(): ...\n\nasync def test_two(): ...\n\ndef helper(): ...\n\n"
        "@pytest.mark.soak\ndef test_three(): ...\n"
    )
    (tmp_path / "test_mixed.py").write_text(
        "import pytest\n\n"
        "@pytest.fixture\ndef prometheus_binaries(): ...\n\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_watched(n, prometheus_binaries): ...\n\n"
        "@pytest.mark.extra\n@pytest.mark.soak\ndef test_for_hours(): ...\n\n"
        "def test_plain(): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    environment = {**os.environ, "PYTHONPATH": str(repository / "tests")}

    def printed(*options: str) -> str:
        ended = subprocess.run(
            [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        return ended.stdout + ended.stderr

    left_out = printed("-m", "not extra")
    assert "left out: 3 test functions that need more than requirements.lock" in left_out, left_out
    assert re.search(r"^1 passed in", left_out, re.MULTILINE), left_out
    everything = printed()
    assert "left out" not in everything
    reasons = re.findall(r"^this test needs Spark: run scripts/bootstrap --tests$", everything, re.MULTILINE)
    assert len(reasons) == 3, everything
    assert "3 failed, 4 passed" in everything
