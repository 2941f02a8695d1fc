"""Back-pressure, from one end to the other: what fills up in which order, and who throttles whom."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from minishuffle.counters import LIMITS
from minishuffle.dataflow.compile import compile_job
from minishuffle.examples.backpressure import BATCH_ROWS, PacedSource, backpressure
from minishuffle.local import LocalCluster

PRODUCE, CONSUME, SECONDS = 4.0, 2.0, 4.0
"""MB/s, and seconds of each half."""
FLOATING = 64
"""Many: a backlog that grows by all of them at one look, as after the machine stood still for a moment, takes
them before the exclusive buffers are in use, and rightly so."""


@pytest.mark.slow
@pytest.mark.alone
def test_limits_are_hit_in_order_and_the_producer_follows_the_consumer() -> None:
    with LocalCluster(workers=2, slots=1) as cluster:
        flags = ["--coordinator", str(cluster.client.address), "--cluster", "local"]
        flags += ["--secret-file", str(cluster.state_dir / "secret")]
        given = {"produce": PRODUCE, "consume": CONSUME, "later": 8, "seconds": SECONDS}
        options = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        options += ["--set", f"floating_buffers_per_gate={FLOATING}", "--wait", "--json"]
        words = [sys.executable, "-m", "minishuffle.cli", *flags, "submit", "backpressure", *options]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        shown = subprocess.run(
            [sys.executable, "-m", "minishuffle.cli", *flags, "jobs", "show", found["job"]],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    assert [hit["limit"] for hit in found["limits"]] == list(LIMITS)
    assert [hit["task"] for hit in found["limits"]] == ["consumer[1]"] * 3 + ["producer[0]"] * 3
    assert "writer: blocked" in shown
    (result,) = [sink["value"] for sink in found["results"] if sink["value"]]
    assert result["rows"] == result["distinct"] == (PRODUCE + CONSUME) * SECONDS * 1000
    slow, fast = result["slow"], result["fast"]
    assert slow["produced"] == pytest.approx(slow["consumed"], rel=0.4), "not twice as much"
    assert fast["produced"] > 1.3 * slow["produced"], "it speeds up again"


def test_one_producer_sends_all_to_one_consumer() -> None:
    graph = compile_job(backpressure(), parallelism=2)
    assert [vertex.parallelism for vertex in graph.vertices] == [1, 2]
    assert [edge.partitioner for edge in graph.edges] == ["custom"]


def test_a_producer_goes_on_where_it_was() -> None:
    producer = PacedSource(1e9, 20)
    numbers = [row[0] for batch in producer.read(0, 5) for row in batch]
    assert numbers == list(range(5, 20))
    assert BATCH_ROWS == 8
