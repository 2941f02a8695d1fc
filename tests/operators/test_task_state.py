"""What is no value of a key: written by some subtasks, read by as many or by others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.exchange.keys import destination, stable_hash
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators import task_state
from minishuffle.operators.state_parts import SLICE_ROWS, StatePart, divided
from minishuffle.operators.task_state import Holding, Records, Scope, TaskState


def written(scope: Scope, subtasks: Iterable[list[Records]]) -> list[StatePart]:
    parts: list[StatePart] = []
    for index, held in enumerate(subtasks):
        holding = Holding(scope, lambda held=held: held, lambda records: None)  # type: ignore[misc]
        parts += TaskState({"held": holding}).write(index)
    return parts


def read(scope: Scope, parts: list[StatePart], index: int, parallelism: int) -> list[Records]:
    found: list[Records] = []
    state = TaskState({"held": Holding(scope, list, found.append)})
    state.read(divided([*parts, StatePart("another's", pa.RecordBatch.from_pydict({}))], index, parallelism))
    return found


def rows(found: list[Records]) -> list[Any]:
    return [row for records in found for row in records.payload]


@pytest.mark.parametrize(
    ("scope", "same", "fewer"),
    [
        ("subtask", [["a", 1], ["b"], []], [["a", 1], ["b"]]),
        ("all", [["a", "b", 1]] * 3, [["a", "b", 1]] * 2),
    ],
)
def test_who_goes_on_with_what_has_no_key(scope: Scope, same: list[Any], fewer: list[Any]) -> None:
    parts = written(scope, [[Records(["a"]), Records([1])], [Records(["b"])], []])
    for parallelism, expected in ((3, same), (2, fewer)):
        assert [rows(read(scope, parts, index, parallelism)) for index in range(parallelism)] == expected


@pytest.mark.parametrize("payload", ["rows", "columns"])
def test_records_go_where_their_keys_do_in_their_order(payload: str) -> None:
    numbers = [[3, 1, 4, 1, 5], [9, 2, 6]]

    def records(some: list[int]) -> Records:
        marks = {"matched": pa.array([number % 2 == 0 for number in some])}
        if payload == "rows":
            return Records([{"n": number} for number in some], some, marks)
        batch = pa.RecordBatch.from_pydict({"n": pa.array(some, pa.int32()), "row": list(map(str, some))})
        return Records(batch, [pa.array(some)], marks)

    parts = written("key", [list(map(records, numbers))])[::-1]
    for parallelism in (1, 2):
        for index in range(parallelism):
            got = read("key", parts, index, parallelism)
            mine = [
                [n for n in some if destination(stable_hash(n), parallelism) == index] for some in numbers
            ]
            assert got == [records(some) for some in mine if some]


def test_many_records_are_cut_into_parts() -> None:
    count = BATCH_ROWS_MAX + 1
    held = Records(pa.RecordBatch.from_pydict({"n": range(count)}), None, {"m": pa.array(range(count))})
    parts = written(
        "subtask",
        [[held, Records(pa.RecordBatch.from_pydict({"n": [-1]}), None, {"m": held.marks["m"][:1]})]],
    )
    assert [part.batch.num_rows for part in parts] == [BATCH_ROWS_MAX, 1, 1]
    found = read("subtask", parts[::-1], 0, 1)
    assert [records.payload["n"][0].as_py() for records in found] == [0, BATCH_ROWS_MAX, -1]
    assert [records.marks["m"][0].as_py() for records in found] == [0, BATCH_ROWS_MAX, 0]


def test_rows_that_nobody_changes_are_packed_a_few_at_a_time_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed_rows: list[int] = []
    pack = task_state.packed
    monkeypatch.setattr(task_state, "packed", lambda rows: (packed_rows.append(len(rows)), pack(rows))[1])
    count = 2 * SLICE_ROWS + 1
    held = [Records([{"n": n} for n in range(count)], list(range(count)), {"m": pa.array(range(count))})]
    state = TaskState({"held": Holding("key", lambda: held, held.append, is_fixed=True)})
    parts = state.freeze(0)
    assert packed_rows == []
    held.clear()
    found = [next(parts)]
    assert packed_rows == [SLICE_ROWS]
    got = read("key", [*found, *parts], 0, 1)
    assert packed_rows == [SLICE_ROWS, SLICE_ROWS, 1]
    assert [n for records in got for n in records.keys] == list(range(count))
    assert rows(got) == [{"n": n} for n in range(count)]
    assert [n.as_py() for records in got for n in records.marks["m"]] == list(range(count))


def test_other_rows_are_copied_and_packed_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_rows, pack = list[int](), task_state.packed
    monkeypatch.setattr(task_state, "packed", lambda rows: (packed_rows.append(len(rows)), pack(rows))[1])
    row = {"n": [1]}
    parts = TaskState({"held": Holding("key", lambda: [Records([row], [1])], list)}).freeze(0)
    assert packed_rows == []
    row["n"].append(2)
    assert rows(read("key", list(parts), 0, 1)) == [{"n": [1]}]
    assert packed_rows == [1]
