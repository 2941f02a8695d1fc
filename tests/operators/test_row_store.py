"""Values by key against a dict, before, at and after packing."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from minishuffle.exchange.keys import canonical_rows
from minishuffle.operators import row_store
from minishuffle.operators.row_store import ABSENT, RowStore


class Model:
    """The state and a dict beside it; every record's new value is given, ABSENT if it is dropped."""

    def __init__(self) -> None:
        self.state = RowStore()
        self.expected: dict[Any, Any] = {}

    def bring_forward(self, keys: list[Any], news: list[Any]) -> None:
        keys = canonical_rows(keys)
        held, places = self.state.take(keys)
        values = []
        for key, place, new in zip(keys, places, news, strict=True):
            self.same(held[place], self.expected.get(key, ABSENT))
            values.append(new)
            if new is not ABSENT:
                held[place] = self.expected[key] = new
        dropped = [number for number, new in enumerate(news) if new is ABSENT]
        self.state.put(None if dropped else values, dropped)
        found = list(self.state.items())
        assert [key for key, _ in found] == list(self.expected)
        assert dict(found) == self.expected
        assert len(self.state) == len(found)
        for key, value in found:
            self.same(value, self.expected[key])

    @staticmethod
    def same(value: Any, expected: Any) -> None:
        assert type(value) is type(expected)
        assert value == expected


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack four keys, if batches have two rows or more."""
    monkeypatch.setattr(row_store, "PACKED_KEYS_MIN", 4)
    monkeypatch.setattr(row_store, "PACKED_ROWS_MIN", 2)


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
    assert not model.state.is_packed
    model.bring_forward([keys[0]], [2.0])
    assert model.state.is_packed
    model.bring_forward(list(more), [3.0] * len(more))
    assert model.state.is_packed == stays
    for _ in range(3):
        model.bring_forward(list(keys), [4.0] * 4)
    assert model.state.is_packed == stays


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("keys", [[0.5, 1.5, 2.5, 3.5], ["a", 1, 2, 3], [(), ("a",), (1,), (2,)]], ids=str)
def test_keys_of_other_types_stay_in_a_dict(keys: list[Any]) -> None:
    model = Model()
    for _ in range(3):
        model.bring_forward(keys, [1.0] * 4)
    assert not model.state.is_packed


@pytest.mark.usefixtures("soon")
def test_short_batches_stay_in_a_dict_until_keys_have_doubled() -> None:
    model = Model()
    for key in range(5):
        model.bring_forward([key], [0])
    model.bring_forward(list(range(7)), [0] * 7)  # asked at four keys, asks again at eight
    model.bring_forward(list(range(7)), [0] * 7)
    assert not model.state.is_packed
    model.bring_forward([7, 0], [0, 0])
    model.bring_forward([0], [0])
    assert model.state.is_packed


@pytest.mark.usefixtures("soon")
def test_keys_are_shown_as_the_first_record_brought_them() -> None:
    store = RowStore()
    batches = ([1, Decimal(2), 3], [Decimal(3), Decimal(5)], [Decimal(5), 4, Decimal(6)], [6, Decimal(7)])
    for keys in batches:
        forms = canonical_rows(keys)
        store.remember(keys, forms)
        held, places = store.take(forms)
        for place in places:
            held[place] = 0
        store.put([0] * len(keys))
    assert store.is_packed
    assert [str(key) for key, _ in store.items()] == ["1", "2", "3", "5", "4", "6", "7"]
    assert {type(key) for key, _ in store.items()} == {int, Decimal}
    assert list(map(repr, store.shown([2, 1, 6]))) == ["Decimal('2')", "1", "Decimal('6')"]


@pytest.mark.usefixtures("soon")
def test_a_key_that_is_known_stays_as_it_was_shown_when_keys_no_longer_fit() -> None:
    store = RowStore()
    for keys in ([1, 2, 3, 4], [1], [Decimal(1), 2**63]):
        forms = canonical_rows(keys)
        if forms is not keys:
            store.remember(keys, forms)
        held, places = store.take(forms)
        for place in places:
            held[place] = 0
        store.put([0] * len(keys))
    assert [repr(key) for key, _ in store.items()] == ["1", "2", "3", "4", str(2**63)]


def test_a_key_that_is_plain_and_no_canonical_form_is_shown_too() -> None:
    store = RowStore()
    for keys in ([True, 2.0, 3, "a"], [Decimal(1), Decimal(2), Decimal(3), "a", Decimal("NaN")]):
        forms = canonical_rows(keys)
        if forms is not keys:
            store.remember(keys, forms)
        held, places = store.take(forms)
        for place in places:
            held[place] = 0
    assert list(map(repr, store.shown(forms))) == ["True", "2.0", "3", "'a'", "Decimal('NaN')"]
    assert len(store) == 5


@pytest.mark.usefixtures("soon")
def test_a_key_is_discarded_and_nothing_is_packed_again() -> None:
    model = Model()
    for _ in range(2):
        model.bring_forward(list("abcd"), [1] * 4)
    assert model.state.is_packed
    model.state.discard("b")
    model.state.discard("unknown")
    del model.expected["b"]
    for _ in range(2):
        model.bring_forward(list("aebcdf"), [2] * 6)
    assert not model.state.is_packed
    assert [key for key, _ in model.state.items()] == list("acdebf")
