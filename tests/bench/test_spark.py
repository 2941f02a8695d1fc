"""``bench spark`` with few rows: every way is measured, every row counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WAYS = ("write", "noop", "python", "read", "parquet_read")


@pytest.mark.slow
@pytest.mark.timeout(270)
def test_every_way_is_measured() -> None:
    command = [sys.executable, "-m", "minishuffle.cli", "bench", "spark"]
    options = ["--records", "20000", "--rounds", "1", "--warm-up", "0", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    rates = {way: figures[f"{way}_rows_per_second"] for way in WAYS}
    assert all(rate > 0 for rate in rates.values())
    assert figures["records"] == 20_000
    assert figures["write_to_noop"] == pytest.approx(rates["write"] / rates["noop"], abs=0.001)
    assert figures["write_to_python"] == pytest.approx(rates["write"] / rates["python"], abs=0.001)
    assert figures["read_to_parquet"] == pytest.approx(rates["read"] / rates["parquet_read"], abs=0.001)
