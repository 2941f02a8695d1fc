"""What operators take and give: rows for side outputs, sources, and what is no list of rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from minishuffle.errors import WrongResult
from minishuffle.operators.base import NO_ROWS, Aside, Source, TaskContext, refuse_as_rows


def test_a_process_knows_whether_there_is_any_row_for_a_side_output() -> None:
    packed = pickle.dumps(Aside("odd", 1))
    code = (
        "from minishuffle import Aside; import pickle\n"
        f"print(Aside.made, pickle.loads({packed!r}), Aside.made)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False Aside(name='odd', row=1) True\n"


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ("ab", "[text] for one row, or list(text) for its letters"),
        (b"ab", "[text] for one row, or list(text) for its letters"),
        ({"a": 1}, "[row] for one, or [] for none"),
        (Aside("odd", 1), "[row] for one, or [] for none"),
    ],
)
def test_what_is_one_row_is_no_list_of_them(given: Any, way: str) -> None:
    assert type(given) in NO_ROWS
    with pytest.raises(WrongResult) as raised:
        refuse_as_rows(given)
    assert str(raised.value) == f"the function gave {given!r}, which is no list of rows: return {way}"


def test_a_source_is_what_has_splits_and_reads_them() -> None:
    class Numbers:
        def splits(self) -> list[int]:
            return [0]

    assert not isinstance(Numbers(), Source)
    Numbers.read = lambda self, split, offset: iter(())  # type: ignore[attr-defined]
    assert isinstance(Numbers(), Source)


def test_the_counters_and_metrics_of_a_context_are_its_own() -> None:
    one, other = (TaskContext("job", "task", 0, 1, 1) for _ in range(2))
    assert one.counters is not other.counters and one.metrics is not other.metrics
    assert (one.now(), one.wall(), one.lead(), one.spool, one.files) == (0.0, 0.0, 0.0, None, None)
