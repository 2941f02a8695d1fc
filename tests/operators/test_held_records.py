"""The records that a side of a join holds: found by key and time, merged, let go, numbered anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.operators import held_records
from minishuffle.operators.base import END_OF_TIME
from minishuffle.operators.held_records import Held
from minishuffle.operators.row_conversion import rows_of


def vector(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def hold(held: Held, slots: Any, times: Any, as_rows: bool = False) -> None:
    names = [f"{slot}@{time}" for slot, time in zip(slots.tolist(), times.tolist(), strict=True)]
    payload = names if as_rows else pa.record_batch({"name": names})
    batch = Batch(payload, slots.tolist() if as_rows else None, times)
    held.add(batch, slots, np.zeros(len(slots), dtype=np.bool_))


def names_of(batch: Batch) -> list[str]:
    return [row if isinstance(row, str) else row["name"] for row in rows_of(batch)]


def held_in(held: Held) -> list[str]:
    """The names of all records, as they are written down, by fours at most."""
    names = []
    for chunk in held.chunks:
        for numbers, batch in chunk.pieces(4):
            assert names_of(batch) == names_of(chunk.records(numbers)) and len(batch) <= 4
            names += names_of(batch)
    return names


def found(held: Held, slots: Any, times: Any) -> list[tuple[int, str]]:
    pairs = []
    for asked, numbers in held.find(slots, Batch(pa.record_batch({"asked": slots}), None, times)):
        pairs += list(zip(asked.tolist(), names_of(held.records(numbers)), strict=True))
    return sorted(pairs)


def sizes(held: Held) -> list[int]:
    return [chunk.end - chunk.first for chunk in held.chunks]


def test_records_are_found_by_key_and_time_within() -> None:
    held = Held(10, 10)
    hold(held, vector(0, 0, 0, 1), vector(-11, -10, 10, 0))
    hold(held, vector(0, 1), vector(11, 25))
    assert found(held, vector(0, 1, 2), vector(0, 15, 0)) == [(0, "0@-10"), (0, "0@10"), (1, "1@25")]


def test_many_partners_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_records, "rows_that_fit", lambda weight: 2)
    held = Held(2, 1)
    hold(held, vector(*[0] * 7, 1), vector(1, 1, 2, 3, 4, 5, 6, 3))
    asked, times = vector(0, 1, -1, 0), vector(3, 3, 3, 9)
    batch = Batch(pa.record_batch({"asked": asked}), None, times)
    pieces = [len(some) for some, _ in held.find(asked, batch)]
    assert pieces == [2, 2, 2]
    assert found(held, asked, times) == [
        (0, "0@1"),
        (0, "0@1"),
        (0, "0@2"),
        (0, "0@3"),
        (0, "0@4"),
        (1, "1@3"),
    ]


RECORDS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=40)


@given(
    steps=st.lists(st.tuples(RECORDS, st.integers(0, 12)), min_size=1, max_size=8),
    before=st.integers(0, 12),
    after=st.integers(0, 12),
    room=st.sampled_from([1, 4, 64]),
    as_rows=st.booleans(),
)
def test_all_partners_are_found_once_whatever_came_and_went(
    steps: list[tuple[list[tuple[int, int]], int]], before: int, after: int, room: int, as_rows: bool
) -> None:
    """Room for few numbers, so that there is soon to be more, and numbers are given anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_records, "ROOM", room)
        patch.setattr(held_records, "CHUNK_ROWS_MAX", 50)
        held, model, limit = Held(before, after), [], -1
        for given_records, past in steps:
            kept = [(slot, time + limit + 1) for slot, time in given_records]
            hold(held, *(vector(*column) for column in zip(*kept, strict=True)), as_rows=as_rows)
            model += kept
            limit += past
            gone = [name for chunk, rows in held.take_until(limit) for name in names_of(chunk.records(rows))]
            assert sorted(gone) == sorted(f"{slot}@{time}" for slot, time in model if time <= limit)
            model = [(slot, time) for slot, time in model if time > limit]
            assert len(held) == len(model)
            assert sorted(held_in(held)) == sorted(f"{slot}@{time}" for slot, time in model)
            assert held.earliest == min((time for _, time in model), default=END_OF_TIME)
            # Nobody asks for what is gone: those were let go that can match no more.
            asked = [(slot, limit + before + 1 + shift) for slot in (-1, 0, 3, 4) for shift in (0, 3, 15, 60)]
            slots, times = (vector(*column) for column in zip(*asked, strict=True))
            assert found(held, slots, times) == sorted(
                (place, f"{slot}@{time}")
                for place, (own, at) in enumerate(asked)
                for slot, time in model
                if own == slot and -before <= time - at <= after
            )


@pytest.mark.parametrize("as_rows", [False, True], ids=["arrow", "rows"])
def test_one_record_after_the_other_makes_few_chunks(as_rows: bool) -> None:
    held = Held(0, 0)
    for number in range(1000):
        hold(held, vector(number % 7), vector(number), as_rows)
    assert len(held) == 1000
    assert len(held.chunks) <= 12
    assert found(held, vector(3, 5), vector(3, 999)) == [(0, "3@3"), (1, "5@999")]


def test_chunks_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_records, "CHUNK_ROWS_MAX", 100)
    held = Held(0, 0)
    for number in range(1000):
        hold(held, vector(number), vector(7))
    assert max(sizes(held)) <= 100


def test_records_let_go_are_given_once_and_freed() -> None:
    held = Held(0, 0)
    hold(held, np.arange(100), np.arange(100)[::-1].copy())
    hold(held, vector(1, 2), vector(200, 201))
    assert held.earliest == 0
    gone = [numbers.tolist() for _, numbers in held.take_until(39)]
    assert gone == [list(range(60, 100))]
    assert (len(held), held.earliest, sum(sizes(held))) == (62, 40, 102)
    assert [len(numbers) for _, numbers in held.take_until(51)] == [12]
    assert (len(held), sum(sizes(held))) == (50, 50)
    assert list(held.take_until(51)) == []
    assert [len(numbers) for _, numbers in held.take_until(END_OF_TIME)] == [48, 2]
    assert (held.chunks, held.earliest) == ([], END_OF_TIME)


def test_who_had_a_partner_is_known_under_new_numbers_and_new_slots() -> None:
    held = Held(0, 0)
    hold(held, vector(1, 2, 3), vector(1, 2, 3))
    held.matched[2] = True
    assert len(list(held.take_until(1))) == 1
    hold(held, vector(4, 5), vector(4, 5))
    held.renumber(vector(0, 0, 12, 13, 14, 15))
    names = [name for chunk in held.chunks for name in names_of(chunk.records(chunk.numbers))]
    assert names == ["2@2", "3@3", "4@4", "5@5"]
    assert held.matched[:4].tolist() == [False, True, False, False]
    assert found(held, vector(3, 13), vector(3, 3)) == [(1, "3@3")]
