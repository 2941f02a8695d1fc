"""Joins with a small side: rows and columns against nested loops, order, columns, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import ResourceExhausted, UnknownName, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.operators import broadcast_join, join_results
from minishuffle.operators.base import END_OF_TIME, Idle, TaskContext, Watermark
from minishuffle.operators.broadcast_join import (
    BIG,
    SMALL,
    BroadcastColumns,
    BroadcastJoin,
    SmallColumns,
    SmallRows,
    places,
)
from minishuffle.operators.row_conversion import rows_of
from support.batches import as_batch, collecting

Row = dict[str, Any]


def of_rows(columns: BroadcastColumns, names: tuple[str, ...] | None = None) -> BroadcastJoin:
    return BroadcastJoin(SmallRows(columns, names))


def of_columns(columns: BroadcastColumns, schema: pa.Schema) -> BroadcastJoin:
    return BroadcastJoin(SmallColumns(columns, schema))


BIG_SCHEMA = pa.schema({"v": pa.int64(), "a": pa.int32(), "b": pa.string()})
SMALL_SCHEMA = pa.schema({"x": pa.int64(), "b": pa.large_string(), "v": pa.int64()})


def columns(*, is_left: bool = False) -> BroadcastColumns:
    return BroadcastColumns(("a", "b"), ("x", "b"), is_left=is_left)


def run(operator: BroadcastJoin, small: list[Any], big: list[Any]) -> list[Row]:
    out: list[Any] = []
    operator.open(TaskContext("job", "task", 0, 1, 1))
    for batch in small:
        operator.process(as_batch(batch), SMALL, collecting(out))
    operator.on_mark(Watermark(END_OF_TIME), SMALL, collecting(out))
    assert out == []
    assert operator.state_rows() == sum(map(len, small))
    for batch in big:
        operator.process(as_batch(batch), BIG, collecting(out))
    for batch in out:
        if isinstance(batch, pa.RecordBatch):
            batch.validate(full=True)
            assert batch.schema.equals(out[0].schema)
    return [row for batch in out for row in rows_of(as_batch(batch))]


def reference(small: list[Row], big: list[Row], *, is_left: bool) -> list[Row]:
    result = []
    for row in big:
        key = (row["a"], row["b"])
        partners = [each["v"] for each in small if None not in key and key == (each["x"], each["b"])]
        if is_left and not partners:
            partners = [None]
        result += [{**row, "v_right": partner} for partner in partners]
    return result


numbers = st.none() | st.integers(0, 2)
texts = st.none() | st.sampled_from("pq")
smalls: st.SearchStrategy[list[Row]] = st.lists(
    st.builds(dict, x=numbers, b=texts, v=st.integers(0, 9)), max_size=8
)
bigs: st.SearchStrategy[list[Row]] = st.lists(
    st.builds(dict, v=st.integers(0, 9), a=numbers, b=texts), max_size=12
)


@given(small=smalls, big=bigs, is_left=st.booleans(), cut=st.integers(0, 8))
def test_rows_and_arrow_agree_with_nested_loops(
    small: list[Row], big: list[Row], is_left: bool, cut: int
) -> None:
    expected = reference(small, big, is_left=is_left)
    pieces = [[piece for piece in (rows[:cut], rows[cut:]) if piece] for rows in (small, big)]
    as_rows = of_rows(columns(is_left=is_left), ("x", "b", "v"))
    assert run(as_rows, *pieces) == expected
    arrow = [
        [pa.RecordBatch.from_pylist(piece, schema=schema) for piece in rows]
        for rows, schema in zip(pieces, (SMALL_SCHEMA, BIG_SCHEMA), strict=True)
    ]
    as_arrow = of_columns(columns(is_left=is_left), SMALL_SCHEMA)
    assert run(as_arrow, *arrow) == expected


@pytest.mark.parametrize("key", [None, (1, None), ((None,), 1)])
def test_a_key_with_a_null_in_it_has_no_partner(key: Any) -> None:
    by_key = BroadcastColumns(("k",), ("k",), is_left=False)
    assert run(of_rows(by_key), [[{"k": key, "n": 1}, {"k": (1, 2), "n": 2}]], [[{"k": key}]]) == []
    assert run(of_rows(by_key), [[{"k": (1, 2), "n": 2}]], [[{"k": (1, 2)}]]) == [{"k": (1, 2), "n": 2}]


def test_one_column_and_no_other_on_the_small_side() -> None:
    """A semi-join."""
    single = BroadcastColumns(("k",), ("k",), is_left=False)
    small, big = pa.record_batch({"k": ["a", "b"]}), pa.record_batch({"k": ["b", "c", "b"], "n": [1, 2, 3]})
    assert run(of_columns(single, small.schema), [small], [big]) == [
        {"k": "b", "n": 1},
        {"k": "b", "n": 3},
    ]
    found = run(of_rows(single), [small.to_pylist()], [big.to_pylist()])
    assert found == [{"k": "b", "n": 1}, {"k": "b", "n": 3}]


def test_marks_of_the_big_side_pass_and_those_of_the_small_do_not() -> None:
    operator = of_rows(columns())
    out: list[Any] = []
    for input in (SMALL, BIG):
        for mark in (Watermark(5), Idle()):
            operator.on_mark(mark, input, collecting(out))
    assert out == [Watermark(5), Idle()]
    assert operator.first_input == SMALL


def test_keys_of_the_big_side_are_not_kept() -> None:
    small = pa.record_batch({"k": [5], "n": [1]})
    side = SmallColumns(BroadcastColumns(("k",), ("k",), is_left=True), small.schema)
    operator = BroadcastJoin(side)
    big = [pa.record_batch({"k": list(range(start, start + 100))}) for start in range(0, 1000, 100)]
    assert len(run(operator, [small], big)) == 1000
    assert side._index is not None
    assert len(side._index.slots) == 1


def test_many_partners_go_out_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (broadcast_join, join_results):
        monkeypatch.setattr(module, "BATCH_ROWS_MAX", 100)
    sizes: list[int] = []
    operator = of_columns(BroadcastColumns(("k",), ("k",), is_left=False), pa.schema({"k": pa.int64()}))
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(Batch(pa.record_batch({"k": [1] * 70})), SMALL, lambda item: None)
    batch = pa.record_batch({"k": [1] * 150})
    operator.process(as_batch(batch), BIG, lambda item: sizes.append(len(item)))  # type: ignore[arg-type]
    assert sum(sizes) == 70 * 150
    assert max(sizes) <= 100


def test_the_small_side_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_join, "BROADCAST_BYTES_MAX", 1000)
    told = r"the small side of broadcast_join has more than .* use key_by\(...\).join\(...\)"
    with pytest.raises(ResourceExhausted, match=told):
        run(
            of_columns(columns(), pa.schema({"x": pa.int64()})),
            [pa.record_batch({"x": range(20)})] * 10,
            [],
        )
    with pytest.raises(ResourceExhausted, match=told):
        run(of_rows(columns()), [[{"x": "y" * 200, "b": 1}]] * 10, [])


def test_an_empty_small_side_gives_nulls() -> None:
    big = pa.RecordBatch.from_pylist([{"v": 1, "a": 1, "b": "p"}], schema=BIG_SCHEMA)
    assert run(of_columns(columns(), SMALL_SCHEMA), [], [big]) == []
    (row,) = run(of_columns(columns(is_left=True), SMALL_SCHEMA), [], [big])
    assert row == {"v": 1, "a": 1, "b": "p", "v_right": None}


def test_rows_without_the_column_are_told() -> None:
    with pytest.raises(UnknownName, match="no column 'x' to join by: the row has b"):
        run(of_rows(columns()), [[{"x": 1, "b": 1}, {"b": 1}]], [])
    with pytest.raises(UsageError, match=r"broadcast_join takes dict rows, but a row is \(1, 2\)"):
        run(of_rows(columns()), [], [[(1, 2)]])


def test_a_name_that_is_taken_with_its_suffix_gets_another() -> None:
    small, big = {"x": 1, "b": 1, "v": 2}, {"a": 1, "b": 1, "v": 1, "v_right": 1}
    (row,) = run(of_rows(columns()), [[small]], [[big]])
    assert row == {**big, "v_right_right": 2}


def test_views_of_texts_are_joined_too_at_any_depth() -> None:
    kind = pa.string_view()
    inner = pa.list_(kind)
    small = pa.record_batch({"k": pa.array(["a", "b"], kind), "names": pa.array([["A"], ["B"]], inner)})
    big = pa.record_batch({"k": pa.array(["b", "c"], kind), "more": pa.array([["x"], None], inner)})
    operator = of_columns(BroadcastColumns(("k",), ("k",), is_left=False), small.schema)
    assert run(operator, [small], [big]) == [{"k": "b", "more": ["x"], "names": ["B"]}]


@pytest.mark.parametrize(
    ("keys", "asked", "partners"),
    [
        (pa.array([1, 2]), pa.array([1.5, 2.0]), [None, 6]),
        (pa.array([1.5, 2.0]), pa.array([1, 2]), [None, 6]),
        (pa.array([3, 4]), pa.array([1.5, 2.0]), [None, None]),
    ],
    ids=str,
)
def test_keys_of_other_types_have_a_partner_or_none(keys: pa.Array, asked: pa.Array, partners: Any) -> None:
    by_key = BroadcastColumns(("k",), ("k",), is_left=True)
    small, big = pa.record_batch({"k": keys, "z": [5, 6]}), pa.record_batch({"k": asked})
    assert [row["z"] for row in run(of_columns(by_key, small.schema), [small], [big])] == partners
    as_rows = [rows_of(as_batch(small))], [rows_of(as_batch(big))]
    assert [row["z"] for row in run(of_rows(by_key), *as_rows)] == partners


def vector(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def test_places_come_in_pieces() -> None:
    pieces = [
        list(zip(asked.tolist(), where.tolist(), strict=True))
        for asked, where in places(vector(10, 20, 30, 40), vector(2, 0, 3, 7), 5)
    ]
    assert pieces == [
        [(0, 10), (0, 11), (2, 30), (2, 31), (2, 32)],
        [(3, number) for number in range(40, 45)],
        [(3, 45), (3, 46)],
    ]
    assert list(places(vector(1), vector(0))) == []
