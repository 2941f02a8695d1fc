"""The columns of joins: which keys are compared, and what is held; results are in ``test_join_results``."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.errors import UsageError
from minishuffle.operators.join_columns import JoinColumns
from minishuffle.operators.join_inputs import LEFT, RIGHT, How


def test_keys_of_unlike_types_are_refused() -> None:
    for keys in ((pa.int64(), pa.string()), (pa.string(), pa.int64())):
        with pytest.raises(UsageError, match="join: the keys in 'k' of type .* are never equal"):
            JoinColumns(("k",), ("k",), "inner").check_keys(*(pa.schema({"k": kind}) for kind in keys))


@pytest.mark.parametrize(
    ("how", "held"),
    [("inner", ["v"]), ("left", ["v"]), ("right", ["v", "key"]), ("full", ["v", "key"]), ("semi", ["key"])],
)
def test_keys_of_the_right_are_held_where_its_rows_may_go_out_alone(how: How, held: list[str]) -> None:
    columns = JoinColumns(("k",), ("key",), how)
    assert columns.held_names(["t", "k"], LEFT) == ["k", "t"]
    assert columns.held_names(["key", "v"], RIGHT) == held
    assert columns.held_names(["key"], RIGHT) == ["key"]
