"""Keyed state of rows against plain Python, for all emissions."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, get_args

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators import reductions, row_store
from minishuffle.operators import row_functions as functions
from minishuffle.operators.base import TaskContext
from minishuffle.operators.chained import Emission
from support.batches import as_batch, collecting
from support.reducing import counting, folding, reducing

EMISSIONS: tuple[Emission, ...] = get_args(Emission)


@pytest.fixture(autouse=True, scope="module", params=[1, 100_000], ids="packed from {} keys".format)
def packed_from(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "PACKED_KEYS_MIN", request.param)
        patch.setattr(row_store, "PACKED_ROWS_MIN", 1)
        yield


every_emission = pytest.mark.parametrize("emit", EMISSIONS)


def run(operator: Any, *batches: Batch, context: TaskContext | None = None) -> list[Batch]:
    out: list[Batch] = []
    operator.open(context or TaskContext("job", "task", 0, 1, 1))
    for batch in batches:
        operator.process(as_batch(batch), 0, collecting(out))
    operator.finish(collecting(out))
    return out


def expected_of(
    batches: list[list[tuple[Any, Any]]], emit: Emission, step: Callable[[Any, Any], Any], nothing: Any
) -> list[Any]:
    """(key, value) pairs as a loop over records gives them; one list per batch, unordered but for "each"."""
    state: dict[Any, Any] = {}
    out: list[Any] = []
    for batch in batches:
        each = []
        for key, row in batch:
            state[key] = step(state.get(key, nothing), row)
            each.append((key, state[key]))
        if emit == "each":
            out.append(each)
        elif emit == "batch":
            out.append(dict(each))
    return [each for each in out if each] if emit != "end" else ([state] if state else [])


def loose(out: list[Any], emit: Emission) -> list[Any]:
    """What was emitted, without the order of keys where none is promised."""
    if emit == "each":
        return out
    assert all(len(dict(pairs)) == len(pairs) for pairs in out)
    return [dict(pairs) for pairs in out]


keyed_batches = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "b", 1, None, ("x", 2)]), st.integers(0, 99)), max_size=12),
    max_size=4,
)


WHOLE = {"numbers": range(9), "texts": "abcdefgh", "some": ["a", None], "days": [datetime.date(2026, 1, 2)]}
"""Keys, of which columns are made."""
LONG = 64
"""Keys of a long batch here."""


@pytest.fixture(autouse=True, scope="module")
def columns_from_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "COLUMN_KEYS_MIN", LONG)
        patch.setattr(reductions, "COLUMN_KEYS_MIN", LONG)
        yield


@every_emission
@given(data=st.data())
def test_counts_do_not_depend_on_how_keys_come(emit: Emission, data: st.DataObject) -> None:
    """Columns of one type or of several, short batches of rows before, between and behind them, and keys that
    no column holds, equal to such that do."""
    kinds = st.sampled_from(sorted(WHOLE)).flatmap(lambda name: st.sampled_from(list(WHOLE[name])))
    one = data.draw(st.sampled_from(sorted(WHOLE)))
    keys = data.draw(st.sampled_from([st.sampled_from(list(WHOLE[one])), st.one_of(kinds, st.just(3.0))]))
    drawn = data.draw(st.lists(st.lists(keys, min_size=1, max_size=9), max_size=6))
    batches = [batch * (1 if data.draw(st.booleans()) else LONG) for batch in drawn]
    out = run(counting(emit), *(functions.keys_alone(list(batch)) for batch in batches))
    rows = [[(key, None) for key in batch] for batch in batches]
    assert loose(out, emit) == expected_of(rows, emit, lambda n, _: n + 1, 0)


def test_keys_that_columns_hold_come_back_as_they_went_in() -> None:
    for some in ([1, 2], ["a", "é"], [b"a", b""], [datetime.date(2026, 1, 2)], [None, "a"], [None, 7]):
        batch = functions.keys_alone(list(some) * LONG)
        assert isinstance(batch.payload, pa.RecordBatch)
        assert batch.keys[0].equals(batch.payload.column(0))
        (out,) = run(counting("end"), batch)
        assert [(key, type(key)) for key, _ in out] == [(key, type(key)) for key in some]
    for odd in ([True], [1.0], [1, "a"], [2**70], [("a", 1)], ["\ud800"], [1, True]):
        batch = functions.keys_alone(list(odd) * LONG)
        assert batch.keys is batch.payload and isinstance(batch.payload, list)


@pytest.mark.parametrize("length", [2, LONG])
def test_state_of_counted_columns_goes_on_as_rows_and_as_columns(length: int) -> None:
    first, second = counting("end"), counting("end")
    run(first, functions.keys_alone(["a", "b"] * length))
    second.read_state(list(first.write_state()))
    assert second.state_rows() == first.state_rows() == 2
    for more in (["b", "c"] * length, ["c", 1] * length):
        second.process(as_batch(functions.keys_alone(more)), 0, lambda _: None)
    out: list[Batch] = []
    second.finish(collecting(out))
    assert [dict(pairs) for pairs in out] == [{"a": length, "b": 2 * length, "c": 2 * length, 1: length}]


def keyed(batches: list[list[tuple[Any, Any]]]) -> list[Batch]:
    return [Batch([row for _, row in batch], [key for key, _ in batch]) for batch in batches]


@every_emission
@given(batches=keyed_batches)
def test_rows_as_plain_python_with_one_call_per_record(
    emit: Emission, batches: list[list[tuple[Any, Any]]]
) -> None:
    calls: list[Any] = []

    def subtract(value: int, row: int) -> int:
        calls.append(row)
        return value - row

    records = sum(map(len, batches))
    keys = len({key for batch in batches for key, _ in batch})
    assert loose(run(counting(emit), *keyed(batches)), emit) == expected_of(
        batches, emit, lambda n, _: n + 1, 0
    )
    reduced = run(reducing(subtract, emit), *keyed(batches))
    assert loose(reduced, emit) == expected_of(
        batches, emit, lambda value, row: row if value is None else value - row, None
    )
    assert len(calls) == records - keys
    calls.clear()
    folded = run(folding(lambda: 1000, subtract, emit), *keyed(batches))
    assert loose(folded, emit) == expected_of(batches, emit, lambda value, row: value - row, 1000)
    assert calls == [row for batch in batches for _, row in batch]


@pytest.mark.parametrize(
    ("emit", "expected"),
    [
        ("each", [[(1, 1), (True, 2)], [(1.0, 3), ("a", 1)]]),
        ("batch", [[(1, 2)], [(1, 3), ("a", 1)]]),
        ("end", [[(1, 3), ("a", 1)]]),
    ],
)
def test_equal_keys_of_different_types_are_one_key(emit: Emission, expected: list[Any]) -> None:
    batches = [Batch([0, 0], [1, True]), Batch([0, 0], [1.0, "a"])]
    for operator in (counting(emit), folding(lambda: 0, lambda n, _: n + 1, emit)):
        out = run(operator, *batches)
        assert out == expected
        if emit == "each":
            assert [type(key) for pairs in out for key, _ in pairs] == [int, bool, float, str]


@pytest.mark.parametrize("emit", EMISSIONS[1:])
def test_a_key_is_shown_as_its_first_record_brought_it(emit: Emission) -> None:
    batches = [Batch([0], [key]) for key in (True, Decimal(1), (1, 2), (Decimal(1), 2))]
    for operator in (counting(emit), folding(lambda: 0, lambda n, _: n + 1, emit), reducing(max, emit)):
        shown = [repr(key) for pairs in run(operator, *batches) for key, _ in pairs]
        assert list(dict.fromkeys(shown)) == ["True", "(1, 2)"]


def test_keys_that_are_shown_as_they_came() -> None:
    here = datetime.timezone(datetime.timedelta(hours=2))
    noon, same = (
        datetime.datetime(2026, 1, 1, hour, tzinfo=zone) for hour, zone in ((12, datetime.UTC), (14, here))
    )
    batch = Batch([1, 2, 3, 4, 5, 6], [noon, same, -0.0, 0, math.nan, math.nan])
    for emit in EMISSIONS[1:]:
        (pairs,) = run(reducing(lambda value, row: value + row, emit), batch)
        assert [value for _, value in pairs] == [3, 7, 11]
        assert pairs[0][0] is noon
        assert math.isnan(pairs[2][0])


@every_emission
@pytest.mark.parametrize("on_error", ["skip", "dead_letter"])
def test_a_record_that_raises_is_dropped_alone(emit: Emission, on_error: Any) -> None:
    calls: list[int] = []

    def divide(value: int, row: int) -> int:
        calls.append(row)
        return value // row

    lines: list[str] = []
    context = TaskContext("job", "task", 0, 1, 1, log=lines.append)
    batch = Batch([80, 9, 0, 4, 3, 0], ["a", "b", "a", "a", "b", "c"])
    out = run(reducing(divide, emit, on_error), batch, context=context)
    if emit == "each":
        assert out == [[("a", 80), ("b", 9), ("a", 20), ("b", 3), ("c", 0)]]
    else:
        assert out == [[("a", 20), ("b", 3), ("c", 0)]]
    assert calls == [0, 4, 3]
    assert context.counters.user_errors == {on_error: 1}
    assert len(lines) == (on_error == "dead_letter")


def test_a_batch_of_nothing_but_bad_records_emits_nothing() -> None:
    def refuse(value: Any, row: Any) -> Any:
        raise ValueError("no")

    assert run(folding(lambda: 0, refuse, "batch", "skip"), Batch([1, 2], ["a", "b"])) == []


@every_emission
def test_a_failure_names_the_record(emit: Emission) -> None:
    batch = Batch([80, 0, 4], ["a", "a", "a"])
    with pytest.raises(ZeroDivisionError) as caught:
        run(reducing(lambda value, row: value // row, emit), batch)
    assert caught.value.__notes__ == ["raised in operator 'reduce' by the record 0"]
    with pytest.raises(StopIteration):
        run(folding(lambda: next(iter(())), lambda value, row: row, emit), batch)


def test_the_end_comes_in_chunks() -> None:
    rows = list(range(BATCH_ROWS_MAX + 1))
    out = run(counting("end"), Batch(rows, rows))
    assert [len(chunk) for chunk in out] == [BATCH_ROWS_MAX, 1]
