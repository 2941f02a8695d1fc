"""State that another process goes on with, in the same order: for each operator, in both directions.

Bounds that say how state is laid out, as from how many keys on it is packed, are small here, and as they are
in the other process: what an operator emits does not depend on them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minishuffle.operators import (
    asof_join,
    change_log,
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
from support.stateful import CASES, Run, as_read, compacted, goes_on, head, tail

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
    (change_log, "_RECENT_ROWS_MIN", 16),
    (state_parts, "BATCH_ROWS_MAX", 50),
    (column_store, "BATCH_ROWS_MAX", 50),
)


@pytest.fixture(scope="module", autouse=True)
def other_layout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in LAYOUT:
            patch.setattr(module, name, value)
        yield


@dataclass(frozen=True)
class Written:
    """The operator of a case, and what was written after its head: once, and after it was read and written
    again; with the last watermark that was passed on."""

    run: Run
    states: list[tuple[list[StatePart], int]]


@pytest.fixture(scope="module")
def here() -> dict[str, Written]:
    found = {}
    for name in CASES:
        run = Run(name)
        run.take(head(name))
        parts = as_read(run.operator.write_state())
        again = as_read(Run(name, parts, run.told).operator.write_state())
        found[name] = Written(run, [(parts, run.told), (compacted(again), run.told)])
    return found


@pytest.fixture(scope="module")
def elsewhere(here: dict[str, Written], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with another hash seed makes of these states, and the states that it writes."""
    given, made = (tmp_path_factory.mktemp("states") / name for name in ("given", "made"))
    given.write_bytes(pickle.dumps({name: written.states for name, written in here.items()}))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-m", "support.stateful", str(given), str(made)]
    subprocess.run(command, cwd=TESTS, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, timeout=120)
    answers: dict[str, Any] = pickle.loads(made.read_bytes())
    return answers


@pytest.mark.parametrize("name", CASES)
def test_state_goes_on_elsewhere_in_the_same_order(
    name: str, here: dict[str, Written], elsewhere: dict[str, Any]
) -> None:
    without, run = Run(name), here[name].run
    without.take(head(name))
    for each in (without, run):
        each.forget()
        each.take(tail(name))
    expected = without.finish()
    assert len(expected) > 5
    assert run.finish() == expected, "writing the state changes it"
    (once, again), (parts, told) = elsewhere[name]
    assert once == expected
    assert again == expected, "what was read is written in another order"
    assert goes_on(name, parts, told) == expected
