"""The pipeline ``ads``: its data, and its answer against Spark's and against that of plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from minishuffle import LocalCluster
from minishuffle.pipelines import DataDirectory, advertising
from minishuffle.pipelines.advertising import KINDS, WITHIN, Advertising, generated_files
from minishuffle.pipelines.run import run_once

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("wider_resources"),
]

IMPRESSIONS = 20_000


def by_loops(files: dict[str, Path]) -> Counter[tuple[Any, ...]]:
    """Campaign and window, with how many were shown, clicked and bought, and what that cost and brought."""
    shown, clicked, bought = (pq.read_table(files[name]).to_pylist() for name in KINDS)
    clicks = {row["request"]: row["at"] for row in clicked}
    purchases = {row["request"]: row for row in bought}
    found: dict[tuple[Any, ...], list[int]] = {}
    for row in shown:
        time, counts = row["at"], [1, 0, 0, row["bid"], 0]
        click, purchase = clicks.get(row["request"]), purchases.get(row["request"])
        if click is not None and click - time <= WITHIN:
            time, counts[1] = click, 1
        if purchase is not None and purchase["at"] - time <= WITHIN:
            time, counts[2], counts[4] = purchase["at"], 1, purchase["price"]
        start = time.replace(minute=time.minute // 15 * 15, second=0, microsecond=0)
        held = found.setdefault((row["campaign"], start), [0] * len(counts))
        for number, count in enumerate(counts):
            held[number] += count
    return Counter((*key, *counts[:4], counts[4] if counts[2] else None) for key, counts in found.items())


def test_files_are_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advertising, "CHUNK_ROWS", 300)
    files = generated_files(tmp_path, 1_000, 1)
    tables = {name: pq.read_table(file) for name, file in files.items()}
    assert tables["impressions"]["request"].to_pylist() == list(range(1_000))
    assert 1_000 > tables["clicks"].num_rows > tables["purchases"].num_rows > 0
    monkeypatch.setattr(advertising, "generated_tables", None)
    assert generated_files(tmp_path, 1_000, 1) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files.values())


def test_the_result_is_that_of_spark_and_of_loops(
    spark: SparkSession,
    cluster: LocalCluster,
    options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advertising, "RATE", 5)  # more than an hour
    data = DataDirectory(tmp_path / "data")
    cluster.status()  # Connects, so that no test opens what outlives it.
    pipeline = Advertising(IMPRESSIONS)
    answers = str(tmp_path / "answers")
    outcome = run_once(pipeline, spark, cluster.client, options, data, output=answers, parallelism=2)
    assert outcome.verdict is not None and outcome.verdict.equal, outcome.verdict
    assert outcome.late == 0
    rows = Counter(tuple(row.values()) for row in outcome.result.toArrow().to_pylist())
    expected = by_loops(generated_files(data.path, IMPRESSIONS, 1))
    assert rows == expected and len(rows) > 500
    assert pipeline.stats(outcome.result)["shown"] == IMPRESSIONS
    best = pipeline.report(outcome.result).toArrow()["cents"].to_pylist()
    assert len(best) == 10 and best == sorted(best, reverse=True)
