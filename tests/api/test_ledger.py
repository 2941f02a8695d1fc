"""Jobs that were recorded give what they gave, but for the changes that are listed with their causes.

``MINISHUFFLE_SOAK=1`` plays all of the ledger (``make soak-ledger``), else some. See ``support.ledger``.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.ledger import FOLDER, PARTS, ROOT, Ledger, digest, plain, unplain
from support.ledgerparts import PLAY
from support.soak import SOAK

SOME = {"pipelines": 5, "widened": 1, "types": 12, "counts": 1}
"""How many entries are played outside of the soak."""

SIZES = {
    "pipelines": 4_614,
    "widened": 386,
    "types": 13_056,
    "counts": 500,
    "deaths": 500,
    "refusals": 765,
    "documents": 11,
}
"""Entries of each part: 5,000 pipelines in the first two."""


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS if SOAK else SOME)
def test_what_was_recorded_comes_again(part: str, ledger: Ledger) -> None:
    """What differs is left in a file, in the form in which it is listed if it is meant."""
    names = list(ledger.part(part))
    if not SOAK:
        names = names[:: len(names) // SOME[part] + 1]
    found = ledger.differing(part, PLAY[part], names)
    if part == "deaths":
        found = without_shifts(found, len(names))
    file = Path(tempfile.gettempdir(), f"ledger-{part}.json")
    if found:
        file.write_text(json.dumps(found, indent=1))
    assert not found, f"{len(found)} of {len(names)} differ, see {file}: {json.dumps(found)[:2000]}"


def without_shifts(found: dict[str, Any], played: int) -> dict[str, Any]:
    """What differs of jobs with deaths: whatever does not hold, and all other ends if they are too many.

    Which of its ends a job comes to depends on the moments at which faults strike, and these on the size of
    its programs in a simulated network: 300 bytes more behind them gave 11 of 63 jobs another end.
    """
    ends = {"finishes", "failed", "canceled"}
    shifts = Counter(dict.fromkeys(ends, 0))
    for each in found.values():
        if each["new"] in ends:
            shifts[each["old"]] -= 1
            shifts[each["new"]] += 1
    # Of so many draws, with a share of a half, three standard deviations.
    if max(map(abs, shifts.values())) > 1.5 * played**0.5:
        return found
    return {name: each for name, each in found.items() if each["new"] not in ends}


def test_jobs_with_deaths_may_end_otherwise_one_by_one_and_not_in_all() -> None:
    def all_of(count: int, new: str) -> dict[str, Any]:
        return {f"deaths/{number}": {"old": "finishes", "new": new} for number in range(count)}

    assert without_shifts(all_of(33, "failed"), 500) == {}
    assert len(without_shifts(all_of(34, "failed"), 500)) == 34
    assert len(without_shifts(all_of(1, "does not hold: a row came twice"), 500)) == 1


def test_every_change_has_a_cause_and_its_old_value(ledger: Ledger) -> None:
    assert ledger.check_changes((ROOT / "CHANGELOG.md").read_text()) == []


def test_the_ledger_has_its_entries_and_is_not_large(ledger: Ledger) -> None:
    assert {part: len(ledger.part(part)) for part in PARTS} == SIZES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6_000_000


def test_no_books_were_unbalanced_when_it_was_written(ledger: Ledger) -> None:
    values = {entry["value"] for entry in ledger.part("deaths").values()}
    assert values <= {"finishes", "failed", "canceled"}


# --- the ledger itself ------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path)
    assert ledger.write("pipelines", {"1": (1, "a"), "2": (2, "b")}) == 2
    assert ledger.write("pipelines", {"1": (1, "z"), "3": (3, "c")}) == 1
    (tmp_path / "changed.json").write_text("{}")
    return ledger


def listed(ledger: Ledger, changes: dict[str, Any]) -> list[str]:
    (ledger.folder / "changed.json").write_text(json.dumps(changes))
    return ledger.check_changes("- Twos\n  are C now.\n- Another.")


def test_what_differs_is_found_unless_it_is_listed(small: Ledger) -> None:
    values = {1: "a", 2: "C", 3: "c"}
    change = {"pipelines/2": {"old": "b", "new": "C"}}
    assert small.differing("pipelines", values.__getitem__) == change
    assert small.differing("pipelines", values.__getitem__, ["1", "3"]) == {}
    assert listed(small, {"Twos are C now.": change}) == []
    assert small.differing("pipelines", values.__getitem__) == {}
    assert small.differing("pipelines", {**values, 2: "b"}.__getitem__) == {
        "pipelines/2": {"old": "b", "new": "b"}
    }
    assert Ledger(small.folder).part("pipelines") == small.part("pipelines")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"Twos are D.": {"pipelines/2": {"old": "b", "new": "C"}}}, "is no line of the CHANGELOG"),
        ({"Another.": {"pipelines/4": {"old": "b", "new": "C"}}}, "is not in the ledger"),
        ({"Another.": {"pipelines/2": {"old": "a", "new": "C"}}}, "had 'b', not 'a'"),
        ({"Another.": {"pipelines/2": {"old": "b", "new": "b"}}}, "has not changed"),
        ({cause: {"pipelines/2": {"old": "b", "new": "C"}} for cause in ("Twos", "Another.")}, "two causes"),
    ],
)
def test_a_change_that_is_wrongly_listed_is_found(small: Ledger, changes: Any, problem: str) -> None:
    (found,) = listed(small, changes)
    assert problem in found


def test_rows_come_back_from_json_with_their_types() -> None:
    rows = [{"k": (1, ("b", None)), "v": True, "x": 1.0, "l": [1]}, {"k": None, "v": 1}]
    back = unplain(json.loads(json.dumps(plain(rows))))
    assert back == rows and digest(back) == digest(rows) != digest([])
    assert [type(row["v"]) for row in back] == [bool, int]
