"""What a task reads from several gates: turns, order of marks and batches, the input that comes first."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import WHOLE, ElementFormat, pack_rows
from minishuffle.exchange.gate import Element, InputGate
from minishuffle.exchange.watermarks import WatermarkValve
from minishuffle.limits import TAKEN_ROWS
from minishuffle.operators.base import END_OF_TIME, Active, Idle, Reached, SplitMark, Watermark
from minishuffle.runtime.inputs import Inputs
from support.batches import shown


class Gate:
    """Gives what a script says: rows, (watermark, idle), or the end; ``producer`` comes with rows."""

    def __init__(self, number: int, *script: Any, splits: bool = False) -> None:
        self.input = number
        self.script = deque(script)
        self.valve = WatermarkValve()
        self.valve.add()
        self.marked = False
        self.kept = False
        self.finished = False
        self.split_changes: deque[tuple[int, str]] | None = deque() if splits else None

    def late_from(self, channel: Any) -> None:
        """Nothing restarts."""

    def poll(self) -> Element | None:
        while self.script:
            match self.script.popleft():
                case "end":
                    self.finished = True
                case (int(time), bool(idle)):
                    self.marked |= self.valve.update(0, time, idle)
                case ("split", int(split), str(state)):
                    assert self.split_changes is not None
                    self.split_changes.append((split, state))
                case None | Element() as found:
                    return found
                case (int(producer), list(rows)):
                    channel = type("Channel", (), {"producer": producer, "number": 0})()
                    return Element(channel, ElementFormat.ROWS, len(rows), pack_rows(rows))
        return None


def read(*gates: Gate, first: int | None = None, by_channel: bool = False) -> list[tuple[int, Any]]:
    """Everything until the end."""
    inputs = Inputs([cast(InputGate, gate) for gate in gates], first, by_channel)
    found: list[tuple[int, Any]] = []
    for _ in range(200):
        if inputs.finished:
            return found
        item = inputs.poll()
        if item is not None:
            found.append((item[0], shown(item[1])))
    raise AssertionError(f"no end after {found}")


END = Watermark(END_OF_TIME)


def test_gates_take_turns() -> None:
    one = Gate(0, (0, ["a"]), (0, ["b"]), "end")
    other = Gate(0, (0, ["x"]), (0, ["y"]), (0, ["z"]), "end")
    assert read(one, other) == [(0, [row]) for row in "axbyz"] + [(0, END)]


def test_turns_go_to_gates_that_have_something() -> None:
    """Case 152, UnionInputGateTest."""
    idle = Gate(0, *[None] * 60, "end")
    one = Gate(0, *[(0, ["a"])] * 20, "end")
    other = Gate(0, *[(0, ["b"])] * 20, "end")
    for gates in ((one, idle, other), (idle, one, other), (one, other, idle)):
        turns = [item[0] for _, item in read(*(Gate(0, *gate.script) for gate in gates))[:40]]
        assert "".join(turns) in ("ab" * 20, "ba" * 20)


def columns(*values: int, name: str = "x") -> Batch:
    return Batch(pa.RecordBatch.from_pydict({name: pa.array(values, pa.int64())}))


def categories(prefix: str) -> Batch:
    """A hundred values of a dictionary whose indices tell 128 apart."""
    values = pa.array([f"{prefix}{n}" for n in range(100)])
    indices = pa.array(range(100), pa.int8())
    return Batch(pa.RecordBatch.from_pydict({"x": pa.DictionaryArray.from_arrays(indices, values)}))


ONE, TWO, LARGE = columns(1), columns(2, 3), columns(*range(TAKEN_ROWS // 4))
NEARLY = columns(*range(TAKEN_ROWS // 4 - 1))
TIMED = Batch(ONE.payload, None, np.array([5], np.int64))


@pytest.mark.parametrize(
    ("script", "lengths"),
    [
        ([ONE, TWO, (7, False), TWO, ONE], [3, Watermark(7), 2, 1]),
        ([ONE, LARGE, ONE], [1, len(LARGE), 1]),
        ([NEARLY] * 9, [5 * len(NEARLY), 4 * len(NEARLY)]),
        ([ONE, None, ONE], [1, 1]),
        ([ONE, TWO, "end"], [3]),
        ([ONE, columns(1, name="y"), ONE], [1, 1, 1]),
        ([ONE, TIMED, TIMED], [1, 1, 1]),
        ([TIMED, TIMED, ONE], [2, 1]),
        ([(0, ["a"]), (0, ["b", "c"]), ONE, (0, ["d"])], [3, 1, 1]),
        ([categories("a"), categories("a"), categories("b"), ONE], [100, 100, 100, 1]),
    ],
    ids=["mark", "large", "many", "waiting", "end", "schemas", "timed next", "times", "rows", "dictionaries"],
)
def test_small_batches_that_wait_are_taken_together(script: list[Any], lengths: list[Any]) -> None:
    channel = type("Channel", (), {"producer": 0, "number": 0})()
    given = [Element(channel, WHOLE, len(each), each) if isinstance(each, Batch) else each for each in script]
    inputs = Inputs([cast(InputGate, Gate(0, *given))], None)
    inputs.took(0.0, 1)
    found: list[Any] = []
    for _ in range(50):
        if (item := inputs.poll()) is not None:
            found.append(len(item[1]) if isinstance(item[1], Batch) else item[1])
    assert found[: len(lengths)] == lengths
    assert all(each == END for each in found[len(lengths) :])


@pytest.mark.parametrize(("seconds", "together"), [(None, 1), (0.011, 1), (0.005, 2), (0.0012, 8)])
def test_as_many_rows_come_together_as_are_taken_in_time(seconds: float | None, together: int) -> None:
    channel = type("Channel", (), {"producer": 0, "number": 0})()
    gate = Gate(0, *[Element(channel, WHOLE, 1, ONE)] * 20)
    inputs = Inputs([cast(InputGate, gate)], None)
    if seconds is not None:
        inputs.took(seconds, 1)
    found = inputs.poll()
    assert found is not None and isinstance(found[1], Batch)
    assert len(found[1]) == together


def test_gates_of_one_input_are_as_far_as_the_last_of_them() -> None:
    one = Gate(0, (10, False), (0, ["a"]), (30, False), (0, ["b"]), "end")
    other = Gate(0, (20, False), (0, ["x"]), (25, False), (0, ["y"]), "end")
    assert read(one, other) == [
        (0, ["a"]),
        (0, Watermark(10)),
        (0, ["x"]),
        (0, Watermark(20)),
        (0, ["b"]),
        (0, Watermark(25)),
        (0, ["y"]),
        (0, Watermark(30)),  # The greatest of all comes before the end.
        (0, END),
    ]


def test_each_input_has_a_watermark_of_its_own_and_an_end() -> None:
    left = Gate(0, (10, False), (0, ["l"]), "end")
    right = Gate(1, (0, ["r"]), (5, False), (7, True), "end")
    assert read(left, right) == [
        (0, Watermark(10)),
        (0, ["l"]),
        (1, ["r"]),
        (0, END),
        (1, Watermark(7)),
        (1, Idle()),
        (1, END),
    ]


def test_a_batch_is_said_how_far_its_producer_is_by_itself() -> None:
    ahead = Gate(0, (10, False), (0, ["a"]), (0, ["b"]), (30, False), (0, ["c"]), "end")
    behind = Gate(0, (5, False), (0, ["x"]), "end")
    found = read(ahead, behind, by_channel=True)
    assert [item for _, item in found] == [
        Reached(10), ["a"], Watermark(5), Reached(5), ["x"], Reached(10), ["b"],
        Watermark(10), Watermark(30), Reached(30), ["c"], END,
    ]  # fmt: skip


def test_an_input_is_active_again_when_one_of_its_gates_is() -> None:
    one = Gate(0, (10, True), None, None, (10, False), (0, ["a"]), (10, True), None, "end")
    other = Gate(0, (10, True), None, None, None, None, "end")
    assert read(one, other) == [
        (0, Watermark(10)),
        (0, Idle()),
        (0, Active()),
        (0, ["a"]),
        (0, Idle()),
        (0, END),
    ]


def test_an_input_that_comes_first_is_read_to_its_end_before_any_other() -> None:
    big = Gate(0, (0, ["big"]), "end")
    small = Gate(1, None, (0, ["small"]), None, (0, ["more"]), "end")
    assert read(big, small, first=1) == [
        (1, ["small"]),
        (1, ["more"]),
        (1, END),
        (0, ["big"]),
        (0, END),
    ]


def test_a_gate_of_splits_says_which_split_a_batch_is_of_and_no_watermark_but_its_end() -> None:
    gate = Gate(
        0,
        ("split", 0, "open"),
        ("split", 2, "open"),
        (0, ["a"]),
        (0, ["b"]),
        (2, ["c"]),
        (99, False),
        ("split", 0, "done"),
        (2, ["d"]),
        "end",
        splits=True,
    )
    assert read(gate) == [
        (0, SplitMark(0, "open")),
        (0, SplitMark(2, "open")),
        (0, SplitMark(0, "current")),
        (0, ["a"]),
        (0, ["b"]),
        (0, SplitMark(2, "current")),
        (0, ["c"]),
        (0, SplitMark(0, "done")),
        (0, ["d"]),
        (0, END),
    ]


def test_data_of_an_idle_gate_makes_it_count_again() -> None:
    one = Gate(0, (10, True), None, (0, ["late riser"]), None, None, None, "end")
    other = Gate(0, (20, False), None, None, (30, False), None, None, None, None, "end")
    assert read(one, other) == [
        (0, Watermark(20)),
        (0, ["late riser"]),
        (0, Watermark(30)),
        (0, END),
    ]
