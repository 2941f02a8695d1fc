"""``bench state``: what is measured, and what the command shows."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from minishuffle.bench import stores
from minishuffle.bench.stores import measure_state
from minishuffle.cli.main import cli


def test_each_store_is_measured_beside_a_dict() -> None:
    measured = measure_state([16, 64], [10], seconds=0.0)
    assert [(cell["keys"], cell["batch"]) for cell in measured["cells"]] == [(10, 16), (10, 64)]
    for cell in measured["cells"]:
        assert list(cell["ns_per_row"]) == ["dict", "objects", "packed", "keyed_state", "slots"]
        assert all(spent > 0 for spent in cell["ns_per_row"].values())
        assert cell["of_dict"]["dict"] == 1.0
    assert [part["store"] for part in measured["parts"]] == ["keyed_state", "slots"]
    assert all(part["bytes_per_key"] >= 24 for part in measured["parts"])


def test_all_stores_come_to_the_same_sums() -> None:
    def sums(name: str) -> list[float]:
        take, found = stores._STORES[name](), []
        before, items = stores._items("slots" if name == "slots" else "dict", 5, 40, 8)
        for item in [*before, *items]:
            given: Any = take(*item)
            found += given if isinstance(given, list) else given.to_pylist()
        return found

    expected = sums("dict")
    assert len(expected) == 45
    assert all(sums(name) == expected for name in stores._STORES)


def test_the_command_shows_a_table_or_json() -> None:
    arguments = ["bench", "state", "--batch", "16", "--keys", "10", "--minutes", "0"]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0 and "keyed state" in shown.output, shown.output
    printed = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert [cell["batch"] for cell in printed["cells"]] == [16]
