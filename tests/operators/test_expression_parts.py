"""What an expression reads, and what it compares by order."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.errors import UsageError
from minishuffle.operators.expression_parts import columns_in_order, names_in

A, B, NESTED = pc.field("a"), pc.field("b"), pc.field("s", "x")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (A == "M", []),
        (A.isin(["M"]) & A.is_valid(), []),
        ((A < "M") & (NESTED >= B), [("a",), ("s", "x"), ("b",)]),
        (pc.less_equal(pc.scalar("M"), A) | (B > A), [("a",), ("b",), ("a",)]),
        (pc.min_element_wise(A, "M"), [("a",)]),
        (pc.if_else(pc.field("c"), A, B) < "M", [("c",), ("a",), ("b",)]),
        (pc.coalesce(A, "M") > B, [("a",), ("b",)]),
        (pc.struct_field(pc.field("s"), ["x", "y"]) < "M", [("s", "x", "y")]),
        (pc.struct_field(pc.field("s"), [1]) < "M", [("s", 1)]),
        (pc.list_element(pc.field("l"), 0) < "M", [("l", 0)]),
        (A.cast("string") < "M", []),
        (pc.index_in(A, value_set=pa.array(["S", "M"])) < 1, []),
        (pc.field("it's: 'a'") < "options: '0'\nend: 'less'", [("it's: 'a'",)]),
    ],
    ids=str,
)
def test_the_columns_that_are_compared_by_order_are_found(
    expression: pc.Expression, expected: list[object]
) -> None:
    assert columns_in_order(expression) == expected


def test_the_columns_that_are_read_are_found() -> None:
    assert names_in((A < "M") & (NESTED >= B)) == {"a", "s", "b"}
    assert names_in(pc.scalar(1)) == frozenset()
    with pytest.raises(UsageError, match="by its number: write its name"):
        names_in(pc.field(0) == 1)
