"""``minishuffle demo`` from its first line to its last, with the session of Spark that tests share. That it
leaves nothing as a process of its own is seen in ``e2e/test_command_line.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from minishuffle.cli import demo

pytestmark = [pytest.mark.extra, pytest.mark.slow]


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("wider_resources")
def test_the_demo_passes_and_leaves_nothing(
    run: Callable[..., Result], spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(demo, "started_spark", lambda *_: contextlib.nullcontext(spark))
    result = run("demo")
    assert result.exit_code == 0, result.output
    out = result.output
    assert "equal to plain Python's count" in out
    assert "EQUAL: 60,142 rows of minishuffle and of Spark" in out  # A whole year, the only one in the tests.
    assert "\n362,891 rows in at " in out and ", 0 late; " in out
    assert "ran again after" in out and " ran on; " in out
    assert out.count(" ok ") == 6
    assert "minishuffle cluster up" in out.splitlines()[-3]
    assert list((tmp_path / "tmp").iterdir()) == []
