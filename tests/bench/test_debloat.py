"""What ``bench debloat`` makes of ages, and its source and sink on a clock of the test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench import debloat
from minishuffle.bench.debloat import AgedSink, Stamped, Throttle
from minishuffle.cli.main import cli


class SlowTime:
    """Passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SlowTime:
    slow = SlowTime()
    monkeypatch.setattr(time, "monotonic", lambda: slow.now)
    monkeypatch.setattr(time, "sleep", slow.sleep)
    return slow


def test_a_throttle_makes_up_for_little_that_was_lost(clock: SlowTime) -> None:
    throttle = Throttle(1000.0)
    for _ in range(10):
        throttle.wait(100)
    assert clock.now == pytest.approx(101.0)
    clock.now += 5.0
    for _ in range(10):
        throttle.wait(100)
    assert clock.now == pytest.approx(106.95)


def test_rows_carry_the_time_at_which_they_were_made_until_the_time_is_up(clock: SlowTime) -> None:
    batches = list(Stamped(16_000.0, 2.0).read(0, 0))
    assert [batch[0][0] for batch in batches] == pytest.approx([100.5, 101.0, 101.5, 102.0])
    assert {len(batch) for batch in batches} == {debloat.BATCH_ROWS}


def test_a_sink_takes_each_phase_at_its_rate_and_the_rest_at_once(clock: SlowTime) -> None:
    sink = AgedSink([(2.0, 8000.0), (1.0, 32_000.0)])
    sink.open(None)  # type: ignore[arg-type]
    for _ in range(9):
        sink.write([(clock.now - 0.25, b"")] * 8)
    result = sink.close()
    assert result is not None and result["rows"] == 72
    ages = np.frombuffer(result["ages"]).reshape(-1, 2)
    assert ages[:, 0] == pytest.approx([1.0, 2.0, 2.25, 2.5, 2.75, 3.0, 3.0, 3.0, 3.0])
    assert ages[:, 1] == pytest.approx([1.25, 1.25, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25])


def test_a_sink_without_rows_has_no_result() -> None:
    sink = AgedSink([])
    sink.open(None)  # type: ignore[arg-type]
    assert sink.close() is None


def runs(age: Callable[[float], float]) -> Callable[..., Any]:
    """Instead of jobs: a batch each 0.1 s, whose age is the time's with debloating, and 5 s without."""

    def run(source: Stamped, sink: AgedSink, target: float) -> Any:
        times = np.arange(0.0, 30.0, 0.1)
        every = [age(at) if target else 5.0 for at in times]
        return np.column_stack([times, every])

    return run


ARGUMENTS = ["--target", "1", "--share", "10", "--seconds", "10", "--pairs", "1", "--full-seconds", "10"]


@pytest.mark.parametrize(
    ("age", "code", "expected"),
    [
        (lambda at: 3.0 if at < 3.5 else 1.25, 0, (1.25, 4.0)),
        (lambda at: 3.0 if at < 10.6 else 1.0, 1, (1.0, 11.0)),
        (lambda at: 1.4, 1, (1.4, 19.0)),
        (lambda at: 0.6, 1, (0.6, 19.0)),
    ],
)
def test_a_run_fails_if_an_age_is_not_as_wanted_ten_seconds_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
    age: Callable[[float], float],
    code: int,
    expected: tuple[float, float],
) -> None:
    monkeypatch.setattr(debloat, "_run", runs(age))
    result = CliRunner().invoke(cli, ["bench", "debloat", *ARGUMENTS, "--json"])
    assert result.exit_code == code, result.output
    figures = json.loads(result.stdout)
    assert figures["age_p50"] == [
        {"share": 10.0, "with": expected[0], "without": 5.0, "settled": expected[1]}
    ]
    assert figures["full_rate_ratio"] == 1.0
    if code:
        assert "not within 0.7 to 1.3 times the target of 1 s 10 s after a change" in result.stderr


def test_a_table_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debloat, "_run", runs(lambda at: 1.0))
    result = CliRunner().invoke(cli, ["bench", "debloat", *ARGUMENTS])
    assert result.exit_code == 0, result.output
    assert "consumer at 10 % of the rate" in result.stdout
    assert "median ratio of 1 pairs: 1.0" in result.stdout
