"""``bench scale``: the closed formula against the real machines, and what the command shows."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from minishuffle.bench import scale
from minishuffle.bench.scale import Costs, count_probes, expected, measure_scale, probes_max
from minishuffle.cli.main import cli
from minishuffle.errors import ShuffleError


def test_the_formula() -> None:
    assert expected(100, "individual") == Costs(16, 51, 12, 1568)
    assert expected(100, "full") == Costs(592, 123, 300, -1)
    assert expected(4000, "individual") == Costs(16, 2001, 12, 63968)


@pytest.mark.parametrize("workers", [1, 20, 150])
def test_probes_of_links_do_not_grow_with_the_square_of_workers(workers: int) -> None:
    assert probes_max(1_000) == 32_000
    assert 0 <= probes_max(workers) - count_probes(workers) <= 32 * 32


@pytest.mark.parametrize("slots", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_the_machines_come_to_what_the_formula_says(slots: int) -> None:
    points = measure_scale([slots])["points"]
    assert [(each["strategy"], each["estimated"]) for each in points] == [
        ("individual", False),
        ("full", False),
    ]
    for point in points:
        costs = expected(slots, point["strategy"])
        assert (point["decisions"], point["messages"]) == (costs.decisions, costs.messages)
        assert (point["tasks_touched"], point["channels"]) == (costs.tasks_touched, costs.channels)
        assert point["bytes_per_task"] > 0 and point["bytes_per_channel"] > 0


def test_what_differs_from_the_formula_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "expected", lambda slots, strategy: Costs(1, 2, 3, 4))
    with pytest.raises(ShuffleError, match="individual at 8 slots costs Costs"):
        measure_scale([8])


@pytest.mark.slow
def test_the_command_prints_the_points_and_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "FULL_SLOTS_MAX", 8)
    monkeypatch.setattr(scale, "SIZES", (8, 16))
    shown = CliRunner().invoke(cli, ["bench", "scale"])
    assert shown.exit_code == 0, shown.output
    assert "individual: decisions 4K, messages 2N/K + 1" in shown.output
    found = json.loads(CliRunner().invoke(cli, ["bench", "scale", "--json"]).stdout)
    by_size = [(each["slots"], each["strategy"], each["estimated"]) for each in found["points"]]
    assert by_size[2:] == [(16, "individual", False), (16, "full", True)]
    assert found["points"][3]["messages"] == expected(16, "full").messages
