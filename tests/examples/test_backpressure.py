"""Back-pressure, from one end to the other: what fills up in which order, and who throttles whom."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from minishuffle.counters import LIMITS, TCP_LIMITS
from minishuffle.examples.backpressure import BATCH_ROWS, PacedSource, backpressure
from minishuffle.local import LocalCluster
from minishuffle.plan.planner import compile_job

PRODUCE, CONSUME, SECONDS = 4.0, 2.0, 4.0
"""MB/s, and seconds of each half."""
FLOATING = 64
"""Many: a backlog that grows by all of them at one look, as after the machine stood still for a moment, takes
them before the exclusive buffers are in use, and rightly so."""
SMALL = 8_192
"""Bytes of a segment if the network memory is small."""
SAMPLE_SECONDS = 0.01
"""Stages closer together than this may come in any order."""


def run(cluster: LocalCluster, **given: Any) -> tuple[dict[str, Any], str]:
    """What the job gave, and ``jobs show`` of it."""
    flags = ["--coordinator", str(cluster.client.address), "--cluster", "local"]
    command = [sys.executable, "-m", "minishuffle.cli", *flags]
    command += ["--secret-file", str(cluster.state_dir / "secret")]
    settings = {"produce": PRODUCE, "consume": CONSUME, "later": 8, "seconds": SECONDS, **given}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = [*command, "submit", "backpressure", *options, "--wait", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shown = [*command, "jobs", "show", found["job"]]
    return found, subprocess.run(shown, capture_output=True, text=True, timeout=60, check=True).stdout


def check(found: dict[str, Any], names: tuple[str, ...], *, close: float, seconds: float = SECONDS) -> None:
    """The stages have come in order, the producer is within ``close`` of the consumer, and all has come."""
    at = {hit["limit"]: hit["seconds"] for hit in found["limits"]}
    tasks = {hit["limit"]: hit["task"] for hit in found["limits"]}
    assert set(at) == set(names)
    for before, after in pairwise(names):
        assert at[before] <= at[after] + SAMPLE_SECONDS, found["limits"]
    ends = names.index("queue") - 2 * ("window" in names)
    assert {tasks[name] for name in names[:ends]} == {"consumer[1]"}
    assert {tasks[name] for name in names[ends:]} == {"producer[0]"}
    (result,) = [sink["value"] for sink in found["results"] if sink["value"]]
    assert result["rows"] == result["distinct"] == (PRODUCE + CONSUME) * seconds * 1000
    slow, fast = result["slow"], result["fast"]
    assert slow["produced"] == pytest.approx(slow["consumed"], rel=close), result
    assert fast["produced"] > 1.3 * slow["produced"], "it speeds up again"


@pytest.mark.slow
@pytest.mark.alone
def test_limits_are_hit_in_order_and_the_producer_follows_the_consumer() -> None:
    with LocalCluster(workers=2, slots=1) as cluster:
        found, shown = run(cluster, floating_buffers_per_gate=FLOATING)
    check(found, LIMITS, close=0.4)
    assert "writer: blocked" in shown


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["credit", "tcp"])
def test_twenty_times_out_of_twenty(mode: str) -> None:
    """With TCP flow control, the network memory is less than the settings would let the gate have, and
    still enough for a full queue of the producer."""
    floating, seconds = (FLOATING, 8.0) if mode == "credit" else (4 * FLOATING, 8.0)
    memory = {} if mode == "credit" else {"segment_bytes": SMALL, "network_memory_bytes": 256 * (SMALL + 64)}
    with LocalCluster(workers=2, slots=1, **memory) as cluster:
        for _ in range(20):
            found, shown = run(
                cluster, floating_buffers_per_gate=floating, seconds=seconds, flow_control=mode
            )
            check(found, LIMITS if mode == "credit" else TCP_LIMITS, close=0.05, seconds=seconds)
            assert ("TCP flow control" in shown) == (mode == "tcp")


def test_one_producer_sends_all_to_one_consumer() -> None:
    graph = compile_job(backpressure(), parallelism=2)
    assert [vertex.parallelism for vertex in graph.vertices] == [1, 2]
    assert [edge.partitioner for edge in graph.edges] == ["custom"]


def test_a_producer_goes_on_where_it_was() -> None:
    producer = PacedSource(1e9, 20)
    numbers = [row[0] for batch in producer.read(0, 5) for row in batch]
    assert numbers == list(range(5, 20))
    assert BATCH_ROWS == 8
