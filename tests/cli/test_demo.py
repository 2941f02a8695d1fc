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
from support.soak import SOAK

pytestmark = [pytest.mark.extra, pytest.mark.slow]

SHORT = {
    **{"KEYBY_SECONDS": 1.0, "REFRESH_SECONDS": 0.5, "BEFORE_SECONDS": 0.5},
    **{"JOIN_SECONDS": 2.0, "JOIN_RATE": 5_000},
}
"""How long the endless jobs run, and inputs come: as long as it takes to see rows of theirs; and a quarter of
the rows of the join."""


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("wider_resources")
def test_the_demo_passes_and_leaves_nothing(
    run: Callable[..., Result],
    spark: SparkSession,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(demo, "started_spark", lambda *_: contextlib.nullcontext(spark))
    if SOAK:  # The whole year, the only one in the tests.
        rows, rows_in = 60_142, 362_891
    else:
        rows, rows_in = 5_133, sum(request.getfixturevalue("january"))
        for name, less in SHORT.items():
            monkeypatch.setattr(demo, name, less)
    result = run("demo")
    assert result.exit_code == 0, result.output
    out = result.output
    assert "equal to plain Python's count" in out
    assert f"EQUAL: {rows:,} rows of minishuffle and of Spark" in out
    assert f"\n{rows_in:,} rows in at " in out and ", 0 late; " in out
    assert "ran again after" in out and " ran on; " in out
    rows_joined = int(demo.JOIN_RATE * demo.JOIN_SECONDS)
    assert f"of {rows_joined:,} rows 0 are lost, " in " ".join(out.split())
    assert out.count(" ok ") == 6
    assert "minishuffle cluster up" in out.splitlines()[-3]
    assert list((tmp_path / "tmp").iterdir()) == []
