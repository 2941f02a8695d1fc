"""Words and matrices of texts against their bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.keys import Texts

KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(drawn=st.lists(st.none() | st.text("ab\0é", max_size=20), max_size=8), skipped=st.integers(0, 2))
def test_words_are_the_bytes_with_zeros_beyond(
    kind: pa.DataType, drawn: list[str | None], skipped: int
) -> None:
    array = pa.array(drawn, pa.string()).cast(kind).slice(skipped)
    encoded = [(text or "").encode() for text in drawn[skipped:]]
    texts = Texts(array)
    assert texts.lengths.tolist() == list(map(len, encoded))
    assert [texts.text(row) for row in range(len(encoded))] == encoded
    for at in range(0, 30, 3):
        expected = [int.from_bytes(text[at : at + 8], "little") for text in encoded]
        assert texts.words(at).tolist() == expected
        rows = np.flatnonzero(texts.lengths > at)
        assert texts.words(at, rows).tolist() == [expected[row] for row in rows]


@pytest.mark.parametrize(
    ("texts", "shape"),
    [
        (["ab", "cd", "ef"], (3, 2)),
        (["", ""], (2, 0)),
        (["a", "bcd"], None),
        (["a", "bc", "d"], None),
        ([], None),
    ],
)
def test_a_matrix_where_all_have_one_length(texts: list[str], shape: tuple[int, int] | None) -> None:
    matrix = Texts(pa.array(["before", *texts], pa.string()).slice(1)).matrix()
    if shape is None:
        assert matrix is None
    else:
        assert matrix is not None
        assert matrix.shape == shape
        assert [bytes(row).decode() for row in matrix] == texts
