"""What ``bench isolation`` is made of, and a short run of each mode in the soak."""

from __future__ import annotations

import json
import math
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench import siblings
from minishuffle.bench.siblings import EVENTS, ROW_BYTES, Controls, CountingSink, PacedPairs
from minishuffle.cli.main import cli
from minishuffle.errors import ShuffleError
from minishuffle.operators.base import TaskContext


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["credit", "tcp"])
def test_siblings_go_on_with_credits_and_stop_with_tcp(mode: str) -> None:
    options = ["--json", "--seconds", "2", "--flow-control", mode]
    result = CliRunner().invoke(cli, ["bench", "isolation", *options])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert (measured["flow_control"], measured["pairs"], measured["channels"]) == (mode, 8, 64)
    if mode == "credit":
        assert measured["sibling_ratio"] >= 0.5 and measured["barrier_ms"] is not None
    else:
        assert measured["sibling_ratio"] <= 0.05 and measured["barrier_ms"] is None


def test_a_producer_sends_to_its_consumer_alone_until_the_end(tmp_path: Path) -> None:
    controls = Controls(str(tmp_path / "controls"), 4)
    table = controls.create()
    assert table.tolist() == [0, 0, -1, -2, -2, -2, -2, 0, 0, 0, 0]
    source = PacedPairs(controls)
    assert list(source.splits()) == [0, 1, 2, 3]
    table[3 + 1] = 2
    rows = source.read(1, 0)
    assert list(islice(rows, 2)) == [[(2, bytes(ROW_BYTES))]] * 2
    table[1] = 1
    assert list(rows) == [] and list(source.read(0, 0)) == []


def test_rows_are_paced_without_making_up_for_lost_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [100.0], []

    def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(siblings.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(siblings.time, "sleep", sleep)
    controls = Controls(str(tmp_path / "controls"), 1)
    table = controls.create()
    table[0], table[3] = 10.0, 0
    rows = PacedPairs(controls).read(0, 0)
    for _ in range(3):
        next(rows)
    now[0] += 5.0
    for _ in range(2):
        next(rows)
    assert waits == [0.05, 0.1, 0.1, 0.05, 0.1]


def test_a_consumer_counts_and_waits_while_it_is_told_to(tmp_path: Path) -> None:
    controls = Controls(str(tmp_path / "controls"), 2)
    table = controls.create()
    sink = CountingSink(controls)
    sink.open(TaskContext("job", "task", 1, 2, 1))
    sink.write([(1, b"")] * 3)
    assert table[5:].tolist() == [0, 3]
    table[2] = 1
    waiting = threading.Thread(target=sink.write, args=([(1, b"")],))
    waiting.start()
    table[2] = -1
    waiting.join(30)
    assert table[5:].tolist() == [0, 4]
    table[2], table[1] = 1, 1
    sink.write([(1, b"")])
    sink.close()
    assert table[5:].tolist() == [0, 5]


def test_a_machine_on_which_nothing_moves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(siblings.IsolationRun, "_match", lambda run: (None, None))
    monkeypatch.setattr(siblings.IsolationRun, "_sockets", lambda run, *asked: ([], []))
    nobody: Any = None
    run = siblings.IsolationRun(nobody, nobody, np.zeros(3 + 4), 1)
    run._consumers = [0]
    with pytest.raises(ShuffleError, match="^no pair moved a row in 2 s: use fewer channels"):
        run.measure(1.0, one_way=False)


def test_the_latest_event_is_that_of_the_last_bucket_that_has_grown() -> None:
    before = {0.001: 10.0, 0.005: 20.0, math.inf: 20.0}
    assert siblings._latest(before, {0.001: 40.0, 0.005: 20.0 + EVENTS, math.inf: 20.0 + EVENTS}) == 5.0
    assert siblings._latest({}, {0.001: EVENTS, 0.005: EVENTS, math.inf: EVENTS}) == 1.0
    assert siblings._latest(before, {0.001: 40.0, 0.005: 60.0, math.inf: 60.0}) is None
    assert siblings._latest({}, {}) is None


def test_series_are_summed_by_label() -> None:
    text = 'a_total{path="local"} 3\na_total{path="remote"} 4.0\nb 7\n'
    assert siblings.sum_of(text, "a_total", 'path="local"') == 3
    assert siblings.sum_of(text, "a_total", "") == 7 and siblings.sum_of(text, "b", "") == 7


@pytest.mark.parametrize("reading, stopped", [(1, 0), (0, 1)])
def test_a_connection_that_has_stopped_for_want_of_a_buffer_is_one_that_is_read(
    reading: int, stopped: int
) -> None:
    text = f"""minishuffle_connections 3.0
minishuffle_one_way_connections{{state="reading"}} {reading}.0
minishuffle_one_way_connections{{state="stopped"}} {stopped}.0
minishuffle_one_way_connections{{state="sending"}} 1.0
"""
    assert siblings._connections(text) == (3.0, 1.0)
