"""Slots of words and of rows of words against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import ResourceExhausted
from minishuffle.operators import word_table as wordtable
from minishuffle.operators.word_table import WordTable


def column(*words: int) -> np.ndarray:
    return np.array(words, dtype=np.int64).reshape(-1, 1)


def test_a_table_is_at_most_half_full() -> None:
    table = WordTable(2)
    for first in range(0, 20_000, 700):
        numbers = np.arange(first, first + 700)
        table.add(np.stack((numbers, numbers % 7), axis=1))
        assert 2 * len(table) <= len(table._places)
        assert np.count_nonzero(table._places) == len(table)
    assert table.find(table.rows)[0].tolist() == list(range(len(table)))


def test_more_rows_than_slots_can_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordtable, "ROWS_MAX", 3)
    table = WordTable(1)
    table.add(column(5, 6))
    with pytest.raises(ResourceExhausted, match="more than 3 keys, and no more fit: raise parallelism"):
        table.add(column(7, 5, 8))
    assert table.add(column(7, 5)).tolist() == [2, 0]
    assert table.find(column(5, 6, 7, 8))[0].tolist() == [0, 1, 2, -1]


WORDS = st.integers(-(2**63), 2**63 - 1) | st.integers(-40, 40) | st.integers(-40, 40).map(lambda n: n << 56)


@st.composite
def lists_of_rows(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, ...]]]]:
    width = draw(st.integers(1, 3))
    rows = st.lists(st.tuples(*[WORDS] * width), max_size=60)
    return width, draw(st.lists(rows, max_size=4))


def matrix(rows: list[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


@given(lists_of_rows())
def test_rows_against_a_dict(drawn: tuple[int, list[list[tuple[int, ...]]]]) -> None:
    width, lists = drawn
    table = WordTable(width)
    slots: dict[tuple[int, ...], int] = {}
    for rows in lists:
        for row in rows:
            slots.setdefault(row, len(slots))
        assert table.add(matrix(rows, width)).tolist() == [slots[row] for row in rows]
        asked = [*rows, *((word,) * width for word in (0, 77, -(2**63), 2**63 - 1))]
        found, absent = table.find(matrix(asked, width))
        assert absent == sum(row not in slots for row in asked)
        assert found.tolist() == [slots.get(row, -1) for row in asked]
        assert len(table) == len(slots)
    assert list(map(tuple, table.rows.tolist())) == list(slots)
