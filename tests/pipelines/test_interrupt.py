"""Ctrl-C and SIGTERM in the driver while Spark writes into a job that takes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from minishuffle import LocalCluster
from support.soak import SOAK

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("wider_resources"),
]

SECONDS_MAX = 150.0
SLOW = """
import time
from pathlib import Path

from minishuffle.pipelines import Input, Pipeline


class Slow(Pipeline):
    name = "slow"

    def inputs(self, spark, data):
        return {"numbers": Input(spark.range(200_000).selectExpr("id AS value"), ("value",), 2)}

    def job(self, tables):
        gate = Path(__file__).with_name("gate")

        def wait(batch):
            gate.touch()
            time.sleep(0.5)
            return batch

        slow = tables["numbers"].map_batches(wait, schema={"value": "int64"})
        return slow.key_by("value").aggregate(number=("value", "count"))


pipeline = Slow()
"""


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + SECONDS_MAX
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("streaming", [True, False] if SOAK else [True])
def test_nothing_runs_on_after_ctrl_c(
    cluster: LocalCluster, options: dict[str, str], tmp_path: Path, streaming: bool
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    place = ["--coordinator", options["coordinator"], "--cluster", "local"]
    place += ["--secret-file", options["secret-file"], "--state-dir", str(tmp_path / "state")]
    command = ["pipeline", "run", f"{tmp_path}/slow.py:pipeline", *(["--streaming"] if streaming else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "minishuffle.cli", *place, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb"},
    )
    try:
        until((tmp_path / "gate").exists, process)
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("java" in child.name() for child in family)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert out == "" and err.splitlines()[-1] == "minishuffle: interrupted"
    assert "Traceback" not in err, err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    job = cluster.client.jobs()[-1]
    if streaming:
        assert job.state == "running"  # It waits for the queries to go on.
        handle = cluster.client.handle(job.job)
        handle.cancel()
        handle.wait_until_over(30)
    else:
        assert job.state == "canceled"


@pytest.mark.soak
def test_sigterm_to_all_processes_at_once_ends_with_its_own_code(tmp_path: Path) -> None:
    """As ``timeout`` and service managers send it: Java is gone before Spark could be asked to stop."""
    (tmp_path / "slow.py").write_text(SLOW)
    place = ["--state-dir", str(tmp_path / "state")]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "minishuffle.cli",
            *place,
            "pipeline",
            "run",
            f"{tmp_path}/slow.py:pipeline",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until((tmp_path / "gate").exists, process)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (143, "", "")
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
