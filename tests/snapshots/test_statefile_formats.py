"""State of operators in files of each format: what follows is as if they had never stopped.

``formats/operators-N`` holds what ``support.stateful`` had made of its operators then.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minishuffle.operators.state_parts import StatePart
from minishuffle.snapshots.sealedmanifest import FORMAT_VERSION, WrittenState
from minishuffle.snapshots.storage import folder_at
from support.stateful import Run, goes_on, head, load, tail

FORMATS = Path(__file__).parent / "formats"
GIVEN = {
    version: json.loads((FORMATS / f"operators-{version}" / "given.json").read_text())
    for version in range(1, FORMAT_VERSION + 1)
}
"""By format: where the file's index is, and the watermark that each case had passed on."""


@pytest.fixture(scope="module")
def states() -> dict[int, dict[str, list[StatePart]]]:
    """By format and case."""
    return {
        version: load(folder_at(FORMATS / f"operators-{version}"), WrittenState(**given["written"]))
        for version, given in GIVEN.items()
    }


@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version, given in GIVEN.items() for name in given["told"]]
)
def test_state_of_each_format_goes_on(
    version: int, name: str, states: dict[int, dict[str, list[StatePart]]]
) -> None:
    without, told = Run(name), GIVEN[version]["told"][name]
    without.take(head(name))
    assert without.told == told
    without.forget()
    without.take(tail(name))
    assert goes_on(name, states[version][name], told) == without.finish()
