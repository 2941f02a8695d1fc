"""Types in types: what is replaced, and what stays."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.exchange.schemas import with_innermost, without_dictionary, without_view

VIEWS = pa.struct([pa.field("a", pa.string_view(), nullable=False), ("b", pa.list_(pa.binary_view()))])
LONG = pa.struct([pa.field("a", pa.large_string(), nullable=False), ("b", pa.list_(pa.large_binary()))])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int64(), pa.int64()),
        (pa.string_view(), pa.large_string()),
        (VIEWS, LONG),
        (pa.list_(VIEWS, 2), pa.list_(LONG, 2)),
        (pa.large_list(VIEWS), pa.large_list(LONG)),
        (pa.map_(pa.string(), VIEWS, keys_sorted=True), pa.map_(pa.string(), LONG, keys_sorted=True)),
    ],
    ids=str,
)
def test_views_become_long_types_at_any_depth(kind: pa.DataType, expected: pa.DataType) -> None:
    assert with_innermost(kind, without_view) == expected


def test_dictionaries_become_what_they_hold_at_any_depth() -> None:
    texts = pa.dictionary(pa.int32(), pa.string())
    kind = pa.struct([("a", texts), ("b", pa.list_(texts)), ("c", pa.string_view())])
    plain = pa.struct([("a", pa.string()), ("b", pa.list_(pa.string())), ("c", pa.string_view())])
    assert with_innermost(kind, without_dictionary) == plain
