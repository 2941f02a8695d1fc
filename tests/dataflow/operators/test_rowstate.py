"""Values by key against a dict, before, at and after packing."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators import rowstate
from minishuffle.dataflow.operators.rowstate import NOTHING, KeyedValues
from minishuffle.exchange.keys import canonical_rows


def is_packed(state: KeyedValues) -> bool:
    return state._dict is None


class Model:
    """The state and a dict beside it; every record's new value is given, NOTHING if it is dropped."""

    def __init__(self) -> None:
        self.state = KeyedValues()
        self.expected: dict[Any, Any] = {}
        self.dropped = False

    def bring_forward(self, keys: list[Any], news: list[Any]) -> None:
        keys = canonical_rows(keys)
        held, places = self.state.take(keys)
        values = []
        for key, place, new in zip(keys, places, news, strict=True):
            self.same(held[place], self.expected.get(key, NOTHING))
            values.append(new)
            if new is not NOTHING:
                held[place] = self.expected[key] = new
        self.state.put(None if NOTHING in news else values)
        found = list(self.state.items())
        self.dropped |= NOTHING in news
        # A key whose first record was dropped has its place from then on if it was packed, else later.
        assert self.dropped or [key for key, _ in found] == list(self.expected)
        assert dict(found) == self.expected
        assert len(self.state) == len(found) if not self.dropped else len(self.state) >= len(found)
        for key, value in found:
            self.same(value, self.expected[key])

    @staticmethod
    def same(value: Any, expected: Any) -> None:
        assert type(value) is type(expected)
        assert value == expected


KEYS = [
    st.sampled_from(["a", "b", "", "é", "c\0", "a rather long key, of more than one word"]),
    st.integers(-4, 4),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), 0]),
    st.sampled_from([b"", b"a", b"\xff"]),
    st.sampled_from([date(2026, 1, 1), date(2026, 1, 2)]),
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["a", "b"])),
    st.sampled_from(["a", None, "\ud800"]),
    st.sampled_from([0.5, 1.0, 1, True, (), ("a",), ("a", "b"), ("a", None), None]),
]
VALUES = [
    st.floats(allow_nan=False),
    st.integers(-9, 9),
    st.sampled_from([2**63 - 1, -(2**63), 2**63]),
    st.sampled_from([0, 0.0, False, None, "x", (1, 2)]),
    st.sampled_from([1.5, NOTHING]),
    st.sampled_from([1, NOTHING]),
]


@st.composite
def batches_of(draw: st.DrawFn) -> list[tuple[list[Any], list[Any]]]:
    """Batches of which most have the first one's types."""
    batches = []
    first = draw(st.sampled_from(KEYS)), draw(st.sampled_from(VALUES))
    for _ in range(draw(st.integers(1, 6))):
        keys, values = draw(st.just(first) | st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)))
        batch = draw(st.lists(st.tuples(keys, values), min_size=1, max_size=8))
        batches.append(([key for key, _ in batch], [value for _, value in batch]))
    return batches


@pytest.mark.parametrize("keys_min", [1, 3, 10_000])
@given(batches=batches_of())
def test_values_against_a_dict(keys_min: int, batches: list[tuple[list[Any], list[Any]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowstate, "PACKED_KEYS_MIN", keys_min)
        patch.setattr(rowstate, "PACKED_ROWS_MIN", 1)
        model = Model()
        for keys, values in batches:
            model.bring_forward(keys, values)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack four keys, if batches have two rows or more."""
    monkeypatch.setattr(rowstate, "PACKED_KEYS_MIN", 4)
    monkeypatch.setattr(rowstate, "PACKED_ROWS_MIN", 2)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("keys", "more", "stays"),
    [
        ("abcd", "xa", True),
        (range(4), range(3, 9), True),
        ([("a", n) for n in range(4)], [("b", 1)], True),
        (["a", "b", None, "c"], [None, "d"], True),
        ("abcd", [1, 2], False),
        ("abcd", [("a",)], False),
        (range(4), [2**63], False),
        ([("a", n) for n in range(4)], [("a", 1, 2)], False),
    ],
    ids=str,
)
def test_many_keys_are_packed_until_one_of_another_type_comes(keys: Any, more: Any, stays: bool) -> None:
    model = Model()
    model.bring_forward(list(keys), [1.0] * 4)
    assert not is_packed(model.state)
    model.bring_forward([keys[0]], [2.0])
    assert is_packed(model.state)
    model.bring_forward(list(more), [3.0] * len(more))
    assert is_packed(model.state) == stays
    for _ in range(3):
        model.bring_forward(list(keys), [4.0] * 4)
    assert is_packed(model.state) == stays


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("keys", [[0.5, 1.5, 2.5, 3.5], ["a", 1, 2, 3], [(), ("a",), (1,), (2,)]], ids=str)
def test_keys_of_other_types_stay_in_a_dict(keys: list[Any]) -> None:
    model = Model()
    for _ in range(3):
        model.bring_forward(keys, [1.0] * 4)
    assert not is_packed(model.state)


@pytest.mark.usefixtures("soon")
def test_short_batches_stay_in_a_dict_until_keys_have_doubled() -> None:
    model = Model()
    for key in range(5):
        model.bring_forward([key], [0])
    model.bring_forward(list(range(7)), [0] * 7)  # asked at four keys, asks again at eight
    model.bring_forward(list(range(7)), [0] * 7)
    assert not is_packed(model.state)
    model.bring_forward([7, 0], [0, 0])
    model.bring_forward([0], [0])
    assert is_packed(model.state)
