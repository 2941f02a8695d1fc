"""Parts of state: what belongs to which subtask, in which order they are read, and of which version."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.errors import UnserializableRecord, UsageError
from minishuffle.exchange.keys import destination, stable_hash
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import (
    KEY,
    ORDER,
    SUBTASK,
    StatePart,
    as_column,
    by_columns,
    by_rows,
    chunks,
    cut,
    divided,
    from_column,
    in_order,
    key_columns_of,
    keys_of,
    packed,
    versioned,
)


def test_keys_go_to_the_subtask_that_gets_their_records() -> None:
    part = by_rows("p", list(range(50)), v=list(range(50)))
    for index in range(3):
        keys = [key for own in divided([part], index, 3) for key in keys_of(own)]
        assert keys == [key for key in range(50) if destination(stable_hash(key), 3) == index]
    assert list(divided([part], 0, 1)) == [part]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -(2**63)], pa.int64()),
        ([1.5, -0.0], pa.float64()),
        (["ä", ""], pa.large_string()),
        ([1, 2**64], pa.large_binary()),
        (["a", "\ud800"], None),
        ([True, False], pa.large_binary()),
        ([1, 1.0, "1", None], pa.large_binary()),
        ([b"1"], pa.large_binary()),
        ([(1, "a"), (2, "b")], pa.large_binary()),
        ([], pa.large_binary()),
    ],
)
def test_values_of_one_plain_type_are_a_column_of_it(values: list[Any], kind: pa.DataType | None) -> None:
    if kind is None:
        with pytest.raises(UnserializableRecord):
            as_column(values)
        return
    column = as_column(values)
    back = from_column(column)
    assert column.type == kind
    assert [(type(each), repr(each)) for each in back] == [(type(each), repr(each)) for each in values]


def test_keys_of_version_1_can_be_read() -> None:
    part = versioned("sums", {ORDER: [0, 1], KEY: packed(["a", "b"])})
    old = StatePart("sums", part.batch.replace_schema_metadata({"minishuffle.state": "1"}))
    (read,) = in_order([old])
    assert keys_of(read) == ["a", "b"]


def test_parts_of_no_key_go_to_one_subtask_or_to_all() -> None:
    own, common = versioned("own", {SUBTASK: [2, 2]}), versioned("common", {"v": [1]})
    found = [[part.name for part in divided([own, common], index, 4)] for index in range(4)]
    assert found == [["common"], ["common"], ["own", "common"], ["common"]]
    assert [part.name for part in divided([own], 0, 2)] == ["own"]


def test_columns_of_keys_are_cut_into_parts_and_come_back() -> None:
    keys = [pa.array(range(BATCH_ROWS_MAX + 1)), pa.array(["é"] * (BATCH_ROWS_MAX + 1))]
    first, second = cut(by_columns("p", keys, {"v": keys[0]}))
    assert (first.batch.num_rows, second.batch.num_rows) == (BATCH_ROWS_MAX, 1)
    assert [column.to_pylist() for column in key_columns_of(second)] == [[BATCH_ROWS_MAX], ["é"]]
    (own,) = divided([second], destination(stable_hash((BATCH_ROWS_MAX, "é")), 5), 5)
    assert own.batch.schema == second.batch.schema
    assert list(map(len, chunks(range(BATCH_ROWS_MAX + 1)))) == [BATCH_ROWS_MAX, 1]


def test_parts_are_read_by_the_number_of_their_first_row() -> None:
    parts = [versioned("p", {ORDER: numbers}) for numbers in ([5, 9], [0, 7], [3])]
    empty = versioned("p", {ORDER: pa.array([], pa.int64())})
    found = [part.batch[ORDER].to_pylist() for part in in_order([*parts, empty])]
    assert found == [[0, 7], [3], [5, 9]]


@pytest.mark.parametrize(("metadata", "version"), [({"minishuffle.state": "9"}, "9"), (None, "0")])
def test_parts_of_another_version_are_refused(metadata: dict[str, str] | None, version: str) -> None:
    part = versioned("sums", {ORDER: [0]})
    other = StatePart(part.name, part.batch.replace_schema_metadata(metadata))
    expected = f"'sums' of format {version} cannot be read here, where it is 2: go on with the release"
    with pytest.raises(UsageError, match=expected):
        in_order([other])
