"""In which order the end of a cluster on executors goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.local import LocalCluster
from minishuffle.spark.cluster import SparkCluster


def test_workers_are_ordered_to_end_before_spark_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    found: Any = SparkCluster.__new__(SparkCluster)
    found._supplier = SimpleNamespace(
        order_no_more=lambda: said.append("no further orders"),
        stop=lambda: said.append("cancel the rest"),
    )
    monkeypatch.setattr(LocalCluster, "__exit__", lambda *_: said.append("stop the cluster"))
    found.__exit__(None, None, None)
    assert said == ["no further orders", "stop the cluster", "cancel the rest"]
