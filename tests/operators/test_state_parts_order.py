"""State that another process goes on with, in the same order: for each operator, in both directions.

States go by files of snapshots. Bounds that say how state is laid out, as from how many keys on it is packed,
are small here, and as they are in the other process: what an operator emits does not depend on them. Nor does
it depend on how input is cut into batches, but in the cases that say so.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minishuffle.operators import (
    asof_join,
    column_store,
    first_last,
    held_records,
    interval_join,
    row_store,
    sessions,
    state_parts,
    top_n,
    waiting_batches,
)
from minishuffle.operators.state_parts import StatePart
from minishuffle.snapshots import statefile
from minishuffle.snapshots.storage import folder_at
from support.stateful import CASES, Given, Run, compacted, goes_on, head, load, save, tail

TESTS = Path(__file__).parents[1]
LAYOUT = (
    (row_store, "PACKED_KEYS_MIN", 64),
    (row_store, "PACKED_ROWS_MIN", 4),
    (column_store, "_SPARE_SLOTS", 4),
    (sessions, "SPARE_SESSIONS", 4),
    (interval_join, "SPARE_KEYS", 4),
    (held_records, "CHUNK_ROWS_MAX", 32),
    (held_records, "rows_that_fit", lambda weight: 7),
    (top_n, "BATCH_ROWS_MAX", 64),
    (asof_join, "BATCH_ROWS_MAX", 64),
    (first_last, "BATCH_ROWS_MAX", 64),
    (first_last, "_CHUNKS_MAX", 8),
    (waiting_batches, "_RUN_ROWS_MIN", 16),
    (state_parts, "BATCH_ROWS_MAX", 50),
    (statefile, "SEGMENT_ROWS", 20),
    (column_store, "BATCH_ROWS_MAX", 50),
)


@pytest.fixture(scope="module", autouse=True)
def other_layout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in LAYOUT:
            patch.setattr(module, name, value)
        yield


@dataclass(frozen=True)
class Elsewhere:
    """What a process with another hash seed gives behind the states that were written here, by case and file,
    and the states that it has written."""

    found: dict[tuple[str, str], list[str]]
    states: dict[str, list[StatePart]]


@pytest.fixture(scope="module")
def here() -> dict[str, Run]:
    """The operators of all cases after their heads."""
    runs = {name: Run(name) for name in CASES}
    for name, run in runs.items():
        run.take(head(name))
    return runs


@pytest.fixture(scope="module")
def elsewhere(here: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    place = tmp_path_factory.mktemp("states")
    folder = folder_at(place)
    once = save(folder, "once", {name: run.operator.write_state() for name, run in here.items()})
    told = {name: run.told for name, run in here.items()}
    read = {name: Run(name, parts, told[name]) for name, parts in load(folder, once).items()}
    again = save(folder, "again", {name: compacted(run.operator.write_state()) for name, run in read.items()})
    folder.publish("given", pickle.dumps(Given({"once": once, "again": again}, told)))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-m", "support.stateful", str(place)]
    subprocess.run(command, cwd=TESTS, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, timeout=120)
    found, own = pickle.loads(folder.read("made"))
    return Elsewhere(found, load(folder, own))


@pytest.mark.parametrize("name", CASES)
def test_state_goes_on_elsewhere_in_the_same_order(
    name: str, here: dict[str, Run], elsewhere: Elsewhere
) -> None:
    without, run = Run(name), here[name]
    without.take(head(name))
    told = without.told
    for each in (without, run):
        each.forget()
        each.take(tail(name))
    expected = without.finish()
    assert len(expected) > 5
    assert run.finish() == expected, "writing the state changes it"
    assert elsewhere.found[name, "once"] == expected
    assert elsewhere.found[name, "again"] == expected, "when it is written again, or input cut otherwise"
    assert goes_on(name, elsewhere.states[name], told) == expected
