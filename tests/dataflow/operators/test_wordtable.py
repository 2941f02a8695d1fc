"""Slots of words and of rows of words against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators import wordtable
from minishuffle.dataflow.operators.wordtable import WordTable, first_rows
from minishuffle.errors import ResourceExhausted


def column(*words: int) -> np.ndarray:
    return np.array(words, dtype=np.int64).reshape(-1, 1)


def test_close_words_are_addressed_and_wide_ones_hashed() -> None:
    table = WordTable(1)
    table.insert(column(10**12, 10**12 + 1000))
    assert table._direct is not None
    assert table.find(column(10**12 + 1000, 10**12, 5, -(2**63))).tolist() == [1, 0, -1, -1]
    table.insert(column(-(10**15)))
    assert table._direct is None
    assert table.find(column(-(10**15), 10**12, 10**12 + 1000, 10**12 + 1)).tolist() == [2, 0, 1, -1]
    assert table.rows.tolist() == [[10**12], [10**12 + 1000], [-(10**15)]]


def test_a_table_that_is_addressed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordtable, "DIRECT_SIZE_MAX", 4096)
    monkeypatch.setattr(wordtable, "DIRECT_SIZE_FREE", 128)
    table = WordTable(1)
    for first in range(0, 6000, 500):
        words = column(*range(first, first + 500))
        table.insert(words)
        assert table.find(words).tolist() == words[:, 0].tolist()
        assert (table._direct is not None) == (first + 500 <= 4096)
        assert table._direct is None or len(table._direct) <= 4097
    asked = column(*range(-10, 6010))
    assert table.find(asked).tolist() == [-1] * 10 + list(range(6000)) + [-1] * 10


def test_a_hash_table_is_at_most_half_full() -> None:
    table = WordTable(2)
    for first in range(0, 20_000, 700):
        numbers = np.arange(first, first + 700)
        table.insert(np.stack((numbers, numbers % 7), axis=1))
        assert 2 * len(table) <= len(table._slots)
        assert np.count_nonzero(table._slots >= 0) == len(table)
    assert table.find(table.rows).tolist() == list(range(len(table)))


def test_more_rows_than_slots_can_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordtable, "ROWS_MAX", 3)
    table = WordTable(1)
    table.insert(column(5, 6))
    with pytest.raises(ResourceExhausted, match="4 keys, and at most 3 fit: raise parallelism"):
        table.insert(column(7, 8))
    assert table.find(column(5, 6, 7)).tolist() == [0, 1, -1]


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
        fresh = [row for row in dict.fromkeys(rows) if row not in slots]
        table.insert(matrix(fresh, width))
        for row in fresh:
            slots[row] = len(slots)
        asked = [*rows, *((word,) * width for word in (0, 77, -(2**63), 2**63 - 1))]
        found = table.find(matrix(asked, width))
        assert found.dtype == np.int64
        assert found.tolist() == [slots.get(row, -1) for row in asked]
        assert len(table) == len(slots)
    assert list(map(tuple, table.rows.tolist())) == list(slots)


@given(lists_of_rows())
def test_first_rows_against_a_dict(drawn: tuple[int, list[list[tuple[int, ...]]]]) -> None:
    width, lists = drawn
    for rows in lists:
        expected = [rows.index(row) for row in dict.fromkeys(rows)]
        assert first_rows(matrix(rows, width)).tolist() == expected
