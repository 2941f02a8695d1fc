"""What expressions give on batches of columns; their types are found in test_table."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.errors import UsageError
from minishuffle.operators.evaluation import evaluated, missing_column

N = pc.field("n")


def test_several_expressions_are_evaluated_at_once() -> None:
    batch = pa.record_batch({"n": [1, 2, None], "d": pa.array(["a", "b", "a"]).dictionary_encode()})
    found = evaluated(batch, [N + 1, pc.field("d") == "a", pc.utf8_upper(pc.field("d"))], "it")
    assert [column.to_pylist() for column in found] == [
        [2, 3, None],
        [True, False, True],
        ["A", "B", "A"],
    ]
    assert evaluated(batch, [], "it") == []


def test_types_that_do_not_go_together_are_to_be_cast() -> None:
    batch = pa.record_batch({"n": [1.5], "l": [[1]]})
    for expression in (N > "3", N + "3"):
        with pytest.raises(UsageError, match=r"matching input types \(double, string\): cast one of them"):
            evaluated(batch, [expression], "filter")
    with pytest.raises(UsageError, match=r"(?m)\(list<item: int64>, list<item: int64>\)$"):
        evaluated(batch, [pc.field("l") == pc.field("l")], "filter")


def test_a_value_that_fits_none_is_named_with_the_expression() -> None:
    batch = pa.record_batch({"n": pa.array([100, 127], pa.int8())})
    with pytest.raises(UsageError, match=r"^it: .*n.*: overflow") as failed:
        evaluated(batch, [pc.add_checked(N, N)], "it")
    assert type(failed.value) is UsageError
    assert missing_column(pa.ArrowInvalid("No match for FieldRef.Name(x) in n: int8")) == "x"
    assert missing_column(pa.ArrowInvalid("overflow")) is None


def test_columns_without_values_have_the_result_of_any_type() -> None:
    batch = pa.record_batch({"n": pa.nulls(2), "x": [1.5, 2.5]})
    doubled, is_valid = evaluated(batch, [N * 2, pc.is_valid(N)], "it")
    assert (doubled.null_count, is_valid.to_pylist()) == (2, [False, False])
