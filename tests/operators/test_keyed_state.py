"""Keyed state against a plain dict, in each store and from one to another; written, divided and read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.errors import UnserializableRecord
from minishuffle.exchange.keys import canonical, destination, stable_hash
from minishuffle.operators import column_store, keyed_state, row_store
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.key_timers import KeyTimers
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.row_store import ABSENT
from minishuffle.operators.state_parts import StatePart, divided
from support.soak import examples

PACKABLE = [
    st.sampled_from(["a", "b", "", "é", "c\0", "a rather long key, of more than one word"]),
    st.integers(-4, 4),
    st.sampled_from([b"", b"a", b"\xff"]),
    st.sampled_from([date(2026, 1, 1), date(2026, 1, 2)]),
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)),
]
MIXED = st.sampled_from(
    [True, 1, 1.0, Decimal(1), Decimal(2), 2, 2**63, "1", None, 0.5, math.nan, Decimal("NaN")]
    + [(), (1, "a"), (1, None)]
)
VALUES = [st.integers(-3, 3) | st.just(2**63), st.floats(allow_nan=False)]
VALUES += [st.sampled_from([0, 0.0, False, None, "x", [1]])]
STARTS = [0, 10, 20]
FAR = 10**9


def as_form(key: Any) -> Any:
    """The canonical key, NaN as one that a dict knows again."""
    form = canonical(key)
    return "NaN" if form != form else form


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or repr(one) == repr(other))


def listed(state: KeyedState) -> list[Any]:
    return [
        (namespace, repr(key), repr(value)) for namespace in state for key, value in state.items(namespace)
    ]


def summed(found: Any) -> list[Any]:
    """(namespace, key, sum) of columns."""
    return [
        each
        for namespaces, (keys,), (totals,) in found
        for each in zip(
            [None] * len(keys) if namespaces is None else namespaces.tolist(),
            keys.to_pylist(),
            totals.to_pylist(),
            strict=True,
        )
    ]


class Machine(RuleBasedStateMachine):
    """What rows and columns have in common: they are written, at once or while they go on."""

    state: KeyedState
    outputs: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(column_store, "_SPARE_SLOTS", 2)
        self.patch.setattr(column_store, "SLICE_SLOTS", 2)
        self.patch.setattr(keyed_state, "SLICE_ROWS", 2)
        self.parts: Iterator[StatePart] | None = None

    def teardown(self) -> None:
        self.patch.undo()

    def made(self) -> KeyedState:
        raise NotImplementedError

    def current(self, state: KeyedState) -> dict[Any, Any]:
        """By namespace and canonical key, the key as it is shown and its value, in order."""
        raise NotImplementedError

    @rule()
    def freeze(self) -> None:
        """What is read from now on is as it is now."""
        if self.parts is None:
            self.frozen = list(self.current(self.state).items())
            self.parts, self.read = self.state.write(frozen=True), []

    @precondition(lambda self: self.parts is not None)
    @rule(count=st.integers(1, 3), writes=st.booleans())
    def read_on(self, count: int, writes: bool) -> None:
        assert self.parts is not None
        if writes:
            list(self.state.write())
        some = list(islice(self.parts, count))
        assert all(part.batch.num_rows <= 2 or "due by" in part.name for part in some)
        self.read += some
        if len(some) < count:
            outputs, there = self.outputs, self.made()
            self.parts, self.outputs = None, outputs
            there.read(self.read)
            assert list(self.current(there).items()) == self.frozen

    @rule(dice=st.randoms(use_true_random=False), stood=st.sampled_from([0.0, 5.0]))
    def go_on_elsewhere(self, dice: Any, stood: float) -> None:
        """What is written is read by one subtask, and by three."""
        parts = list(self.state.write(stood))
        dice.shuffle(parts)
        shares = []
        for index in range(3):
            share = self.made()
            share.read(divided(parts, index, 3))
            for _, key in self.current(share):
                wanted = "NaN" if key == "NaN" else destination(stable_hash(key), 3)
                assert wanted in ("NaN", index)
            shares.append(self.current(share))
        whole = self.current(self.state)
        assert sum(map(len, shares)) == len(whole)
        assert {each: value for share in shares for each, value in share.items()} == whole
        self.state, self.parts = self.made(), None
        self.state.read(divided(parts, 0, 1), stood)
        assert list(self.current(self.state).items()) == list(whole.items())


class Rows(Machine):
    """Values of Python by namespace and key; or without namespaces, with timers and ages."""

    @initialize(
        keys_min=st.sampled_from([1, 3, FAR]),
        rows_min=st.sampled_from([1, 2]),
        keys=st.sampled_from(PACKABLE),
        values=st.sampled_from(VALUES),
        processes=st.booleans(),
        drops=st.booleans(),
    )
    def begin(
        self, keys_min: int, rows_min: int, keys: Any, values: Any, processes: bool, drops: bool
    ) -> None:
        self.patch.setattr(row_store, "PACKED_KEYS_MIN", keys_min)
        self.patch.setattr(row_store, "PACKED_ROWS_MIN", rows_min)
        self.keys, self.values, self.processes, self.drops = keys, values, processes, drops and not processes
        self.expected: dict[int | None, dict[Any, list[Any]]] = {}
        self.ages: dict[Any, float] = {}
        self.timers: list[tuple[Any, int]] = []
        self.now = 0.0
        self.state = self.made()

    def made(self) -> KeyedState:
        if self.processes:
            return KeyedState(timers={"event": KeyTimers()}, ages=True, packs=False)
        return KeyedState()

    def current(self, state: KeyedState) -> dict[Any, Any]:
        return {
            (namespace, as_form(key)): (repr(key), repr(value))
            for namespace in state
            for key, value in state.items(namespace)
        }

    @rule(data=st.data())
    def batch(self, data: st.DataObject) -> None:
        """Keys and values are most often of the same types."""
        kind = self.keys if data.draw(st.integers(0, 4)) else MIXED
        keys = data.draw(st.lists(kind, min_size=1, max_size=8))
        value = self.values if data.draw(st.integers(0, 4)) else st.one_of(VALUES)
        news = [data.draw(st.just(ABSENT) | value if self.drops else value) for _ in keys]
        one = None if self.processes else data.draw(st.sampled_from([None, *STARTS]))
        namespaces: list[Any] = [one] * len(keys)
        if one is not None and data.draw(st.booleans()):
            namespaces = [data.draw(st.sampled_from(STARTS)) for _ in keys]
        self.bring_forward(keys, news, namespaces)

    def bring_forward(self, keys: list[Any], news: list[Any], namespaces: list[Any]) -> None:
        if self.processes:
            table, forms = self.state.held(keys)
            held, places = [table] * len(keys), forms
        elif namespaces[0] is None:
            table, places, forms = self.state.take(keys)
            held = [table] * len(keys)
        else:
            held, places, forms = self.state.take_each(keys, namespaces)  # type: ignore[assignment]
        for key, form, namespace, values, place, new in zip(
            keys, forms, namespaces, held, places, news, strict=False
        ):
            assert same(canonical(key), canonical(form))
            known = self.expected.setdefault(namespace, {})
            entry = known.get(as_form(key))
            assert same(values[place], ABSENT if entry is None else entry[1])
            if type(new) is list:
                new = values[place] if type(values[place]) is list else []
                new.append(len(new))
            if new is not ABSENT:
                if self.processes and entry is None:
                    self.state.begin(key, form, new)
                else:
                    values[place] = new
                known.setdefault(as_form(key), [key, None])[1] = new
            if self.processes:
                self.touch(form)
        dropped = [number for number, new in enumerate(news) if new is ABSENT]
        has_lists = any(type(new) is list for new in news)
        self.state.put(None if dropped or has_lists else list(news), dropped)

    def touch(self, form: Any) -> None:
        self.now += 1
        self.state.touch(form, self.now)
        self.ages.pop(as_form(form), None)
        self.ages[as_form(form)] = self.now

    @precondition(lambda self: self.processes and self.expected.get(None))
    @rule(data=st.data(), time=st.integers(0, 9), is_set=st.booleans())
    def timer(self, data: st.DataObject, time: int, is_set: bool) -> None:
        key = data.draw(st.sampled_from(list(self.expected[None].values())))[0]
        timer = (canonical(key), time)
        if timer[0] != timer[0]:
            return
        change = self.state.timers["event"].set if is_set else self.state.timers["event"].delete
        assert change(*timer) == ((timer in self.timers) != is_set)
        self.timers = [each for each in self.timers if is_set or each != timer]
        self.timers += [timer] if is_set and timer not in self.timers else []

    @rule(start=st.sampled_from(STARTS))
    def fire(self, start: int) -> None:
        found = list(self.state.pop(start))
        known = self.expected.pop(start, {})
        assert self.is_like(found, list(known.values()))
        assert start not in self.state and list(self.state.items(start)) == []

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        namespace = None if self.processes else data.draw(st.sampled_from([None, *STARTS]))
        form = canonical(data.draw(self.keys))
        if any(each == form for each, _ in self.timers):
            return
        self.state.discard(form, namespace)
        self.expected.setdefault(namespace, {}).pop(as_form(form), None)
        self.ages.pop(as_form(form), None)

    def is_like(self, found: list[Any], wanted: list[Any]) -> bool:
        one, other = chain.from_iterable(found), chain.from_iterable(wanted)
        return len(found) == len(wanted) and all(map(same, one, other))

    @invariant()
    def values_are_those_of_the_dict(self) -> None:
        for namespace, known in self.expected.items():
            assert self.is_like(list(self.state.items(namespace)), list(known.values()))
        assert len(self.state) == sum(map(len, self.expected.values()))
        if self.processes:
            assert list(self.state.timers["event"]) == self.timers
            oldest = [(as_form(form), at) for form, at in self.state.oldest(FAR)]
            assert oldest == list(self.ages.items())
            for key, _ in self.expected.get(None, {}).values():
                assert same(self.state.key(form := canonical(key)), key)
                age = self.ages[as_form(form)]
                assert (self.state.is_older(form, age), self.state.is_older(form, age - 1)) == (True, False)


class Sums(Machine):
    """Aggregates of columns, with namespaces or without."""

    @initialize(namespaced=st.booleans())
    def begin(self, namespaced: bool) -> None:
        self.namespaced = namespaced
        self.state = self.made()
        self.expected: dict[Any, int] = {}

    def made(self) -> KeyedState:
        self.outputs = outputs_of({"total": ("v", "sum")}, None)
        return KeyedState(self.outputs)

    def current(self, state: KeyedState) -> dict[Any, Any]:
        return {(namespace, key): total for namespace, key, total in summed(state.columns())}

    @rule(
        records=st.lists(
            st.tuples(
                st.sampled_from(STARTS),
                st.sampled_from([None, "", "a", "b", "a long key"]),
                st.integers(-9, 9),
            ),
            min_size=1,
            max_size=12,
        )
    )
    def add(self, records: list[tuple[int, Any, int]]) -> None:
        starts = np.array([start for start, _, _ in records], np.int64) if self.namespaced else None
        slots = self.state.take_columns([pa.array([key for _, key, _ in records], pa.string())], starts)
        for _, _, aggregate in self.outputs:
            aggregate.update(slots, pa.array([value for _, _, value in records], pa.int64()))
        for start, key, value in records:
            each = (start if self.namespaced else None, key)
            self.expected[each] = self.expected.get(each, 0) + value

    @precondition(lambda self: self.namespaced)
    @rule(starts=st.sets(st.sampled_from(STARTS)))
    def fire(self, starts: set[int]) -> None:
        wanted = self.listed(list(starts))
        assert summed(self.state.pop_columns(list(starts))) == wanted
        self.expected = {each: total for each, total in self.expected.items() if each[0] not in starts}

    def listed(self, starts: list[Any]) -> list[Any]:
        return [
            (*each, total) for start in starts for each, total in self.expected.items() if each[0] == start
        ]

    @invariant()
    def sums_are_those_of_the_dict(self) -> None:
        starts = list(dict.fromkeys(start for start, _ in self.expected))
        assert list(self.state) == starts
        assert summed(self.state.columns()) == self.listed(starts)
        assert len(self.state) == len(self.expected)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=examples(25), stateful_step_count=15, deadline=None)
TestSums = Sums.TestCase
TestSums.settings = settings(max_examples=examples(15), stateful_step_count=15, deadline=None)


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.tuples(MIXED, st.sampled_from([None, *STARTS]), st.integers(0, 3)), max_size=30),
    st.integers(2, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_as_many_subtasks_as_before_go_on_in_the_order_in_which_they_were(
    records: list[Any], before: int, after: int, dice: Any
) -> None:
    states = [KeyedState() for _ in range(before)]
    for key, namespace, value in records:
        state = states[destination(stable_hash(key), before)]
        held, (place,), _ = state.take([key], namespace)
        held[place] = value
        state.put([value])
    parts = list(chain.from_iterable(state.write() for state in states))
    dice.shuffle(parts)
    for index, state in enumerate(states):
        assert listed(again(parts, index, before)) == listed(state)
    shares = [listed(again(parts, index, after)) for index in range(after)]
    assert sorted(chain(*shares), key=repr) == sorted(chain(*map(listed, states)), key=repr)


def again(parts: list[StatePart], index: int = 0, parallelism: int = 1) -> KeyedState:
    state = KeyedState()
    state.read(divided(parts, index, parallelism))
    return state


def with_values(keys: list[Any], values: list[Any]) -> KeyedState:
    state = KeyedState()
    held, places, _ = state.take(keys)
    for place, value in zip(places, values, strict=True):
        held[place] = value
    state.put(values)
    return state


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, 3], pa.int64()),
        ([1.0, 2.5, math.inf], pa.float64()),
        ([1, 2.0, 3], pa.large_binary()),
        ([2**70, 1, 2], pa.large_binary()),
        ([True, False, True], pa.large_binary()),
        ([["list"], None, ("tuple", 1)], pa.large_binary()),
    ],
)
def test_numbers_are_written_as_numbers_and_come_back_as_what_they_are(
    values: list[Any], kind: pa.DataType
) -> None:
    state = with_values(["a", "b", "c"], values)
    (part,) = state.write()
    assert part.batch.schema.field("value").type == kind
    assert part.batch.schema.names == ["hash", "key", "order", "namespace", "value"]
    assert listed(again([part])) == listed(state)


@pytest.mark.parametrize("frozen", [False, True])
def test_values_that_would_be_read_as_others_are_not_written(frozen: bool) -> None:
    state = KeyedState()
    held, places, _ = state.take(["a"])
    held[places[0]] = Counter({"x": 1})
    with pytest.raises(UnserializableRecord, match="holds a Counter, which would be of type dict"):
        list(state.write(frozen=frozen))


def test_several_states_of_an_operator_read_their_own_parts() -> None:
    one, other = KeyedState(name="one"), KeyedState(name="other")
    for state, key in ((one, "a"), (other, "b")):
        held, places, _ = state.take([key])
        held[places[0]] = 1
        state.put([1])
    parts = [*one.write(), *other.write()]
    found = KeyedState(name="other")
    found.read(parts)
    assert listed(found) == [(None, "'b'", "1")]


def test_it_is_known_which_namespaces_have_come_since_one_last_asked() -> None:
    by_rows, by_columns = KeyedState(), KeyedState([])
    for starts in ([20, 10, 20], [10, 30]):
        by_rows.take_each(list("abc")[: len(starts)], starts)
        by_columns.take_columns([pa.array(list("abc")[: len(starts)])], np.array(starts))
    assert by_rows.arrived() == by_columns.arrived() == [20, 10, 30]
    assert by_rows.arrived() == by_columns.arrived() == []
    list(by_columns.pop_columns([10]))
    by_rows.pop(10)
    by_rows.take(["a"], 10)
    by_columns.take_columns([pa.array(["a"])], np.array([10]))
    assert by_rows.arrived() == by_columns.arrived() == [10]


def test_columns_of_some_slots_of_a_namespace() -> None:
    state = KeyedState([])
    state.take_columns([pa.array(list("abcd"))], np.array([20, 10, 10, 20]))
    slots = state.slots_of([10, 20])
    assert slots.tolist() == [1, 2, 0, 3]
    ((starts, (keys,), _),) = state.columns_at(slots[1:3])
    assert starts is not None
    assert (starts.tolist(), keys.to_pylist()) == ([10, 20], ["c", "a"])


def with_lengths(*batches: list[Any]) -> KeyedState:
    """Keys in the namespace 7, each with the length of its text."""
    state = KeyedState()
    for keys in batches:
        held, places, _ = state.take(keys, 7)
        for place, key in zip(places, keys, strict=True):
            held[place] = len(str(key))
        state.put(None)
    return state


def test_pairs_of_some_packed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "PACKED_KEYS_MIN", 1)
    monkeypatch.setattr(row_store, "PACKED_ROWS_MIN", 1)
    state = with_lengths(["a", "bb", "ccc"], ["a", "bb"])
    assert state._stores[7].is_packed
    assert state.pairs(["ccc", "a"], 7) == [("ccc", 3), ("a", 1)]
    assert list(state.items(7)) == [("a", 1), ("bb", 2), ("ccc", 3)]


def test_pairs_have_keys_as_the_first_record_brought_them() -> None:
    pairs = with_lengths([True, 2], [1, 2], [Decimal(2), 3.0]).pairs([3, 1, 2], 7)
    assert pairs == [(3, 3), (1, 1), (2, 1)]
    assert [type(key) for key, _ in pairs] == [float, bool, int]


def test_a_timer_that_is_read_is_due_as_its_clock_says() -> None:
    state = KeyedState(timers={"wall": KeyTimers()})
    state.timers["wall"].set("a", 100)
    found = KeyedState(timers={"wall": KeyTimers(lambda time: time - 7)})
    found.read(state.write())
    assert (list(found.timers["wall"]), found.timers["wall"].earliest) == ([("a", 100)], 93)


def test_keys_of_which_no_age_was_written_count_as_touched_now() -> None:
    found = KeyedState(ages=True, packs=False)
    found.read(with_values([True, 2], [1, 2]).write(), now=7.0)
    assert found.oldest(9) == [(True, 7.0), (2, 7.0)]
    assert found.key(1) is True
