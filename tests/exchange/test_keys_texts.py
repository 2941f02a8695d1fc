"""The bytes of text columns."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.keys import Texts

KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(drawn=st.lists(st.none() | st.text("ab\0é", max_size=20), max_size=8), skipped=st.integers(0, 2))
def test_bytes_and_lengths(kind: pa.DataType, drawn: list[str | None], skipped: int) -> None:
    encoded = [(text or "").encode() for text in drawn[skipped:]]
    texts = Texts(pa.array(drawn, pa.string()).cast(kind).slice(skipped))
    assert texts.lengths.tolist() == list(map(len, encoded))
    assert [texts.text(row) for row in range(len(encoded))] == encoded
