"""``bench operators``: what is measured, how runs are compared, and what the command shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minishuffle.bench.operators import OPERATORS, Isolated, compared, measure_operators
from minishuffle.cli.main import cli
from minishuffle.errors import UsageError


def test_each_operator_is_measured_in_both_forms_with_event_time_and_without() -> None:
    cells = measure_operators(["join inner", "map"], [16], [50], seconds=0.0)["cells"]
    assert [(each["operator"], each["form"], each["event_time"]) for each in cells] == [
        (name, form, timed)
        for name, form in (("map", "rows"), ("join inner", "rows"), ("join inner", "columns"))
        for timed in (False, True)
    ]
    assert all(each["ns_per_row"] > 0 and each["batch"] == 16 and each["keys"] == 50 for each in cells)
    assert [each["bytes_per_key"] is None for each in cells] == [True] * 2 + [False] * 4


def test_operators_have_one_cell_each() -> None:
    named = [(each.name, each.form) for each in OPERATORS]
    assert len(named) == len(set(named)) > 40
    with pytest.raises(UsageError, match="no operator is named 'mop': there are map, filter"):
        measure_operators(["mop"], seconds=0.0)


def test_what_is_measured_of_a_table_is_the_operator_alone() -> None:
    """Rows of columns are made behind the exchange, of all columns."""
    (filtering,) = (each for each in OPERATORS if (each.name, each.form) == ("filter", "columns"))
    chain, ways = Isolated(filtering, timed=False, keys=10, rows=0).opened()
    assert [type(operator).__name__ for operator in chain.operators] == ["Filter"]
    assert list(ways) == [0]


def measured(**spent: dict[int, float]) -> dict[str, Any]:
    """By operator and rows of a batch."""
    same = {"form": "rows", "event_time": False, "keys": 1000}
    return {
        "cells": [
            {"operator": name, "batch": batch, "ns_per_row": each, **same}
            for name, cells in spent.items()
            for batch, each in cells.items()
        ]
    }


def test_ratios_of_an_operator_have_a_geometric_mean_in_long_batches_and_in_short_ones() -> None:
    earlier = measured(map={1: 10.0, 16: 10.0, 128: 10.0, 512: 10.0}, count={512: 10.0}, gone={1: 1.0})
    found = compared(measured(map={1: 20.0, 16: 5.0, 128: 12.5, 512: 8.0}, count={512: 11.0}), earlier)
    assert found["operators"] == [
        {"operator": "map", "long": 1.0, "long_is_met": True, "short": 1.0, "short_is_met": True},
        {"operator": "count", "long": 0.9091, "long_is_met": False, "short": None, "short_is_met": True},
    ]
    assert [(each["operator"], each["batch"], each["ratio"]) for each in found["slow_cells"]] == [
        ("map", 1, 0.5),
        ("map", 128, 0.8),
    ]
    assert not found["is_met"]
    with pytest.raises(UsageError, match="none of these cells"):
        compared(measured(map={1: 1.0}), measured(map={2: 1.0}))


def test_the_command_compares_with_what_it_printed_before(tmp_path: Path) -> None:
    arguments = [
        "bench",
        "operators",
        "--operator",
        "filter",
        "--batch",
        "128",
        "--keys",
        "10",
        "--minutes",
        "0",
    ]
    printed = CliRunner().invoke(cli, [*arguments, "--json"])
    found = json.loads(printed.stdout)
    assert {each["operator"] for each in found["cells"]} == {"filter"}
    file = tmp_path / "earlier.json"
    for factor, code, text in ((1000.0, 0, "filter"), (0.001, 1, "too slow")):
        for cell in found["cells"]:
            cell["ns_per_row"] *= factor
        file.write_text(json.dumps(found))
        shown = CliRunner().invoke(cli, [*arguments, "--against", str(file)])
        assert (shown.exit_code, text in shown.output) == (code, True), shown.output
        for cell in found["cells"]:
            cell["ns_per_row"] /= factor
    file.write_text("{}")
    shown = CliRunner().invoke(cli, [*arguments, "--against", str(file)])
    assert shown.exit_code == 2 and "give --against another file" in shown.output
