"""Types in types: what is replaced, and what stays."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.errors import UsageError
from minishuffle.exchange.schemas import require_plain, with_innermost, without_dictionary, without_view

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


RUNS = pa.run_end_encoded(pa.int32(), pa.int64())
UNION = pa.dense_union([pa.field("a", pa.int8()), pa.field("b", pa.string())])


@pytest.mark.parametrize(
    "kind", [RUNS, UNION, pa.list_(UNION), pa.struct([("a", pa.int8()), ("b", pa.list_(RUNS))])], ids=str
)
def test_runs_and_unions_are_refused_at_any_depth(kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="column 'x' is of type .* decode runs with pyarrow.compute"):
        require_plain(pa.field("x", kind))


@pytest.mark.parametrize("kind", [pa.int64(), VIEWS, pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_other_types_are_taken(kind: pa.DataType) -> None:
    require_plain(pa.field("x", kind))
