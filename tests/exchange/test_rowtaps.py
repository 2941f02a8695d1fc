"""What a tap keeps of rows: text of a bounded size, of the first rows alone, whatever they do."""

from __future__ import annotations

import gc
import weakref
from datetime import UTC, datetime
from decimal import Decimal
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from minishuffle import limits
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.rowtaps import RowTap, TappedFields
from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId

PRODUCER = {"producer": 2, "attempt": 3}


class Taps:
    """Of two producers of one edge on one worker; ``take`` gives the rows since it was called last."""

    def __init__(self) -> None:
        self.rows: list[TappedFields] = []
        self.put, self.put_beside = (
            RowTap(AttemptId(SubtaskId(JobId("j1"), OperatorId(0), index), 3), self.rows, lambda: 7.5).put
            for index in (2, 5)
        )

    def take(self) -> list[TappedFields]:
        taken = self.rows[:]
        self.rows.clear()
        return taken


class Other:
    def __repr__(self) -> str:
        raise AssertionError("no code of the user's runs")


class Pair(NamedTuple):
    left: Any
    right: Any


class Liar(str):
    """Its text is another one wherever it is asked for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self

    def __len__(self) -> int:
        raise RuntimeError("no")

    def __getitem__(self, _: Any) -> Any:
        raise RuntimeError("no")

    def encode(self, *_: Any) -> Any:
        return self


def test_rows_come_as_text_with_their_keys_and_times() -> None:
    seen = Taps()
    rows = [("a", 1), ("b", 2)]
    seen.put(Batch(rows, ["a", "b"], np.array([5, 6])), 3)
    assert seen.take() == [
        PRODUCER | {"at": 7.5, "consumer": 3, "time": 5, "key": "'a'", "columns": [], "values": ["('a', 1)"]},
        PRODUCER | {"at": 7.5, "consumer": 3, "time": 6, "key": "'b'", "columns": [], "values": ["('b', 2)"]},
    ]
    seen.put(Batch(["each its own key"], rows), None)
    assert seen.take()[0]["consumer"] is None
    assert seen.take() == []


def test_columns_come_one_by_one() -> None:
    columns: dict[str, Any] = {
        "text": ["x", None],
        "at": [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)] * 2,
        "price": [Decimal("1.50")] * 2,
        "shares": [[0.5], []],
        "exact": pa.array([1, 2], pa.timestamp("ns")),
    }
    seen = Taps()
    seen.put(Batch(pa.RecordBatch.from_pydict(columns)), 0)
    first, second = seen.take()
    assert first["columns"] == list(columns)
    assert first["values"][:4] == ["'x'", "2026-01-02 03:04:05+00:00", "1.50", "[0.5]"]
    assert second["values"][0] == "null"
    assert len(second["values"]) == 5


def test_the_first_rows_are_kept_and_no_others() -> None:
    seen = Taps()
    for start in range(0, 3 * limits.TAP_ROWS, 8):
        (seen.put, seen.put_beside)[start % 16 // 8](Batch(list(range(start, start + 8))), 0)
    assert {row["producer"] for row in seen.rows} == {2, 5}
    assert [row["values"] for row in seen.take()] == [[str(row)] for row in range(limits.TAP_ROWS)]


def test_rows_that_take_long_hold_the_task_up_once() -> None:
    rows: list[TappedFields] = []
    now = [0.0]

    def wall() -> float:
        now[0] += limits.TAP_TASK_SECONDS_MAX * 0.75
        return now[0]

    seen = RowTap(AttemptId(SubtaskId(JobId("j1"), OperatorId(0), 2), 3), rows, wall)
    seen.put(Batch(["slow"] * 8), 0)
    seen.put(Batch([1]), 0)
    assert [row["values"] for row in rows] == [["'slow'"]] * 2


def test_rows_are_shown_as_what_crosses_the_edge() -> None:
    nested: list[Any] = []
    for _ in range(limits.TAP_VALUE_CHARS):
        nested = [nested]
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    plain = [None, True, 1.5, b"x", (), (1,), [2, [3]], {"k": ("v", 0)}, moment, Decimal("1.50"), UUID(int=7)]
    rows = [
        plain,
        Pair("a", np.float64(0.5)),
        np.int64(3),
        HTTPStatus.OK,
        Other(),
        Liar("truth"),
        "\ud800\x1b[2J",
    ]
    seen = Taps()
    seen.put(Batch([*rows, 10**5_000, nested, [0] * 10_000_000]), 0)
    *shown, long, deep, wide = (row["values"][0] for row in seen.take())
    other = "a value of Other"
    assert shown == [repr(plain), "('a', 0.5)", "3", "200", other, "'truth'", "'\\ud800\\x1b[2J'"]
    assert long.startswith("a value of int that cannot be shown: ValueError: Exceeds the limit")
    assert deep == "[" * limits.TAP_VALUE_CHARS + "…"
    assert wide == ("[" + "0, " * 500)[: limits.TAP_VALUE_CHARS] + "…"


def test_what_is_long_is_cut() -> None:
    seen = Taps()
    seen.put(Batch(["x" * 10_000, b"x" * 10_000]), 0)
    long, raw = (row["values"][0] for row in seen.take())
    assert long == "'" + "x" * (limits.TAP_VALUE_CHARS - 1) + "…"
    assert raw == "b'" + "x" * (limits.TAP_VALUE_CHARS - 2) + "…"
    many = pa.RecordBatch.from_pydict(
        {"n": pa.array([np.arange(1_000_000)]), "d": pa.array(["x"]).dictionary_encode()}
    )
    seen.put(Batch(many), 0)
    assert seen.take()[0]["values"] == ["a list<item: int64> of 8,000,004 bytes", "'x'"]
    wide = pa.RecordBatch.from_pydict({f"c{number}": [number] for number in range(200)})
    seen.put(Batch(wide), 0)
    (row,) = seen.take()
    assert (len(row["columns"]), row["values"][-1]) == (limits.TAP_COLUMNS_MAX, "63")
    names = [f"{number} {'name' * 1_000}" for number in range(limits.TAP_COLUMNS_MAX)]
    seen.put(Batch(pa.RecordBatch.from_pydict({name: ["\x01" * 10_000] for name in names})), 0)
    (row,) = seen.take()
    for texts in (row["columns"], row["values"]):
        assert sum(map(len, texts)) <= limits.TAP_ROW_CHARS + limits.TAP_COLUMNS_MAX


def test_nothing_of_what_was_seen_is_kept_alive() -> None:
    class Row:
        pass

    seen, row = Taps(), Row()
    alive = weakref.ref(row)
    buffer = pa.py_buffer(b"segment!")
    before = gc.get_referrers(buffer)
    seen.put(Batch([row], [row]), 0)
    seen.put(
        Batch(pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.int64(), 1, [None, buffer])], ["n"])), 0
    )
    del row
    assert alive() is None
    assert gc.get_referrers(buffer) == before
    assert len(seen.take()) == 2
