"""``bench spark`` with few rows: every way is measured, every row counted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from minishuffle.bench import spark as bench
from minishuffle.cli.main import cli
from support.spark import spark  # noqa: F401  (a fixture)

pytestmark = pytest.mark.extra

WAYS = ("write", "noop", "python", "read", "parquet_read")


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.usefixtures("wider_resources")
def test_every_way_is_measured(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(bench, "spark_session", lambda app, master: spark)
    monkeypatch.setattr(bench, "stop_spark", lambda session: None)
    options = ["--records", "20000", "--rounds", "1", "--warm-up", "0", "--json"]
    done = CliRunner().invoke(cli, ["bench", "spark", *options])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    rates = {way: figures[f"{way}_rows_per_second"] for way in WAYS}
    assert all(rate > 0 for rate in rates.values())
    assert figures["records"] == 20_000
    assert figures["write_to_noop"] == pytest.approx(rates["write"] / rates["noop"], abs=0.001)
    assert figures["write_to_python"] == pytest.approx(rates["write"] / rates["python"], abs=0.001)
    assert figures["read_to_parquet"] == pytest.approx(rates["read"] / rates["parquet_read"], abs=0.001)
