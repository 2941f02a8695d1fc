"""Each compiled loop against plain Python."""

from __future__ import annotations

import json
import statistics
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.keys import MASK, mix
from minishuffle.kernels.machinecode import kernel, text_kernel

SUM, MINIMUM, MAXIMUM = 0, 1, 2
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
OFFSETS = st.sampled_from(["int32", "int64"])


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


# --- hashing --------------------------------------------------------------------------------------


@given(st.lists(INT64, max_size=20), st.sampled_from([1, 1000]), UINT64)
def test_hash_of_words(values: list[int], factor: int, tag: int) -> None:
    hashes = np.empty(len(values), np.uint64)
    kernel("hash_words")(ints(*values), factor, tag, hashes, len(values))
    assert hashes.tolist() == [mix((value * factor & MASK) ^ tag) for value in values]


@given(st.lists(st.binary(max_size=40), max_size=8), OFFSETS, UINT64)
def test_hash_of_texts(texts: list[bytes], offset: str, tag: int) -> None:
    def expected(text: bytes) -> int:
        value = tag ^ len(text)
        for at in range(0, len(text), 8):
            value = mix(value ^ int.from_bytes(text[at : at + 8], "little"))
        return value

    hashes = np.empty(len(texts), np.uint64)
    offsets, data = offsets_and_data(texts, offset)
    text_kernel("hash_texts", offsets)(offsets, data, tag, hashes, len(texts))
    assert hashes.tolist() == list(map(expected, texts))


def offsets_and_data(texts: list[bytes], offset: str) -> tuple[np.ndarray, np.ndarray]:
    """Of texts that stand behind others; what follows them is not zero."""
    data = b"before" + b"".join(texts) + b"behind--"
    ends = np.cumsum([len(b"before"), *map(len, texts)])
    return ends.astype(offset), np.frombuffer(data, np.uint8)


@given(st.lists(st.tuples(UINT64, UINT64), max_size=8))
def test_hashes_of_parts_are_combined(pairs: list[tuple[int, int]]) -> None:
    hashes = words(*(pair[0] for pair in pairs))
    kernel("combine_hashes")(hashes, words(*(pair[1] for pair in pairs)), len(pairs))
    assert hashes.tolist() == [mix(before ^ part) for before, part in pairs]


# --- partition ------------------------------------------------------------------------------------


@given(st.lists(UINT64, max_size=30), st.integers(1, 4) | st.integers(1, 1000))
def test_rows_are_arranged_by_consumer(hashes: list[int], consumers: int) -> None:
    positions, order = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
    bounds = np.zeros(consumers + 2, np.int64)
    kernel("choose_consumers")(words(*hashes), consumers, positions, len(hashes))
    expected = [(value >> 32) * consumers >> 32 for value in hashes]
    assert positions.tolist() == expected
    kernel("arrange")(positions, order, bounds, consumers, len(hashes))
    assert order.tolist() == sorted(range(len(hashes)), key=expected.__getitem__)
    assert bounds.tolist()[:-1] == [
        sum(at < consumer for at in expected) for consumer in range(consumers + 1)
    ]


# --- rows -----------------------------------------------------------------------------------------

PACKED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-200, 300)
    | st.floats(width=32)
    | st.text(max_size=40)
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(lambda body: msgpack.ExtType(7, body)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.integers(0, 99), inner, max_size=18),
    max_leaves=20,
)


def arrays_in(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(arrays_in, value))
    return sum(map(arrays_in, value.values())) if isinstance(value, dict) else 0


def count_arrays(packed: bytes) -> int:
    return kernel("count_arrays")(np.frombuffer(packed, np.uint8), len(packed))


@given(PACKED, st.booleans())
def test_arrays_are_counted_in_any_value(value: Any, single: bool) -> None:
    packed = msgpack.packb([value, [1]], use_single_float=single)
    assert count_arrays(packed) == arrays_in([value, [1]])


@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 15, 16, 17, 31, 32, 255, 256, 65535, 65536])
@pytest.mark.parametrize(
    "kind",
    [
        lambda size: "x" * size,
        bytes,
        lambda size: [None] * size,
        lambda size: dict.fromkeys(range(size)),
        lambda size: msgpack.ExtType(3, b"\x91" * size),
    ],
    ids=["text", "bytes", "array", "map", "extension"],
)
def test_arrays_are_counted_behind_values_of_any_length(kind: Any, size: int) -> None:
    value = [kind(size), [[]]]
    assert count_arrays(msgpack.packb(value)) == arrays_in(value)


def test_values_that_are_cut_are_counted_as_far_as_they_go() -> None:
    packed = msgpack.packb([["x" * 300, [1.5, 2**40]], {"a": [b"y" * 70_000]}])
    found = [count_arrays(packed[:size]) for size in [*range(330), len(packed) - 1]]
    assert found == sorted(found)
    assert found[-1] == count_arrays(packed) == 4


# --- tables of keys -------------------------------------------------------------------------------


def key_with_hash(value: int) -> int:
    """The key of one word that has this hash in a table."""
    key = value * pow(0x9E37_79B9_7F4A_7C15, -1, 2**64) & MASK
    return key - 2**64 if key >= 2**63 else key


ALIKE = [key_with_hash(31 << 59 | number << 20 | 5) for number in range(12)]
"""Keys whose place in a table of 32 is the last, and whose tag there is the same."""


@pytest.mark.parametrize("width", [1, 3])
@given(numbers=st.lists(st.sampled_from(ALIKE) | st.integers(-5, 5), max_size=40))
def test_keys_get_slots_as_they_come(width: int, numbers: list[int]) -> None:
    rows = [(number,) * (width - 1) + (number // 2 if width > 1 else number,) for number in numbers]
    given_words = ints(*(word for row in rows for word in row))
    slots: dict[Any, int] = {}
    for row in rows:
        slots.setdefault(row, len(slots))
    table, stored = np.zeros(32, np.uint32), np.zeros(24 * width, np.int64)
    found, count = np.empty(len(rows), np.int64), ints(0)
    arguments = (table, 5, stored, width, given_words)
    reached = kernel("add_keys")(*arguments, found, 0, len(rows), count, 3)
    assert count[0] == min(3, len(slots))
    assert reached == next((at for at, row in enumerate(rows) if slots[row] == 3), len(rows))
    assert kernel("add_keys")(*arguments, found, reached, len(rows), count, 24) == len(rows)
    assert (found.tolist(), count[0]) == ([slots[row] for row in rows], len(slots))
    assert stored.reshape(-1, width)[: len(slots)].tolist() == list(map(list, slots))
    for again in (table, filled(stored, width, len(slots))):
        asked = ints(*given_words, *[99] * width)
        found = np.empty(len(rows) + 1, np.int64)
        assert kernel("find_keys")(again, 5, stored, width, asked, found, len(rows) + 1) == 1
        assert found.tolist() == [*(slots[row] for row in rows), -1]


def filled(stored: np.ndarray, width: int, count: int) -> np.ndarray:
    table = np.zeros(32, np.uint32)
    kernel("fill_table")(table, 5, stored, width, count)
    return table


@given(st.lists(st.binary(max_size=20), max_size=8), OFFSETS, st.integers(1, 3))
def test_texts_as_words(texts: list[bytes], offset: str, width: int) -> None:
    rows = np.full((len(texts), width + 2), 77, np.int64)
    offsets, data = offsets_and_data(texts, offset)
    longest = text_kernel("write_texts", offsets)(
        offsets, data, rows.reshape(-1), width + 2, 1, width, len(texts)
    )
    assert longest == max(map(len, texts), default=0)
    for row, text in zip(rows, texts, strict=True):
        assert row[0] == row[-1] == 77
        contents = bytes([len(text)]) + text[: 8 * width - 1]
        assert row[1:-1].tobytes() == contents.ljust(8 * width, b"\0")


# --- aggregation ----------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-100, 100)), max_size=40)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-50, 50), max_size=4)), max_size=12))
def test_spread_of_values_that_come_in_groups(groups: list[tuple[int, list[int]]]) -> None:
    counts, means, squares = (np.zeros(3) for _ in range(3))
    parts = [
        (len(some), statistics.fmean(some or [0]), len(some) * statistics.pvariance(some or [0]))
        for _, some in groups
    ]
    columns = [np.array([part[place] for part in parts], dtype=np.float64) for place in range(3)]
    variances = np.empty(len(groups))
    slots = ints(*(slot for slot, _ in groups))
    kernel("fold_spread")(counts, means, squares, slots, *columns, variances, len(groups))
    for row, (slot, _) in enumerate(groups):
        values = [value for other, some in groups[: row + 1] for value in some if other == slot]
        wanted = statistics.variance(values) if len(values) > 1 else -1.0
        assert variances[row] == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("operation", "plain"), [(SUM, sum), (MINIMUM, min), (MAXIMUM, max)])
@pytest.mark.parametrize(("name", "kind"), [("fold_ints", np.int64), ("fold_floats", np.float64)])
@given(rows=ROWS)
def test_running_values_carry_the_state_on(
    operation: int, plain: Any, name: str, kind: Any, rows: list[tuple[int, int]]
) -> None:
    after, running = list(range(4)), []
    for slot, value in rows:
        after[slot] = plain((after[slot], value))
        running.append(after[slot])
    state, results = np.arange(4, dtype=kind), np.empty(len(rows), kind)
    slots, values = (
        np.array([row[at] for row in rows]).astype(dtype) for at, dtype in ((0, np.int64), (1, kind))
    )
    assert kernel(name)(operation, state, slots, values, results, 1, len(rows)) == len(rows)
    assert (results.tolist(), state.tolist()) == (running, after)
    state, untouched = np.arange(4, dtype=kind), np.full(len(rows), 7, kind)
    assert kernel(name)(operation, state, slots, values, untouched, 0, len(rows)) == len(rows)
    assert (untouched.tolist(), state.tolist()) == ([7] * len(rows), after)


@pytest.mark.parametrize(
    ("held", "value"), [(2**63 - 1, 1), (-(2**63), -1), (2, 2**63 - 2), (-2, -(2**63) + 1)]
)
def test_a_sum_that_would_leave_int64_stops(held: int, value: int) -> None:
    state, results = ints(0, held), np.empty(3, np.int64)
    assert kernel("fold_ints")(SUM, state, ints(0, 1, 0), ints(5, value, 6), results, 1, 3) == 1
    assert (state.tolist(), results[0]) == ([5, held], 5)
    assert kernel("fold_ints")(SUM, state, ints(1), ints(-value), results, 1, 1) == 1


@given(
    st.sampled_from([2, 4]).flatmap(
        lambda width: st.tuples(
            st.just(width),
            st.lists(
                st.tuples(
                    st.integers(0, 1),
                    st.integers(-(2 ** (64 * width - 1)), 2 ** (64 * width - 1) - 1)
                    | st.integers(-2, 2).map(lambda value: value << 64),
                ),
                max_size=20,
            ),
        )
    ),
    st.booleans(),
)
def test_sums_of_256_bits(given_rows: tuple[int, list[tuple[int, int]]], wanted: bool) -> None:
    width, rows = given_rows

    def words_of(value: int, count: int) -> list[int]:
        whole = value & ((1 << 64 * count) - 1)
        return np.frombuffer(whole.to_bytes(8 * count, "little"), np.int64).tolist()

    state = np.zeros(8, np.int64)
    results = np.zeros(4 * len(rows) if wanted else 0, np.int64)
    values = ints(*(word for _, value in rows for word in words_of(value, width)))
    slots = ints(*(slot for slot, _ in rows))
    assert kernel("fold_wide")(state, slots, values, width, results, wanted, len(rows)) == len(rows)
    sums = [0, 0]
    for row, (slot, value) in enumerate(rows):
        sums[slot] += value
        if wanted:
            assert results[4 * row : 4 * row + 4].tolist() == words_of(sums[slot], 4)
    assert state.tolist() == [word for total in sums for word in words_of(total, 4)]


@pytest.mark.parametrize(("operation", "expected"), [(MINIMUM, [3.0, 2.0, 2.0]), (MAXIMUM, [3.0, 3.0, 3.0])])
def test_nan_is_no_value_for_extremes(operation: int, expected: list[float]) -> None:
    nan = float("nan")
    state, results = np.array([nan]), np.empty(4)
    kernel("fold_floats")(operation, state, ints(0, 0, 0, 0), np.array([nan, 3.0, 2.0, nan]), results, 1, 4)
    assert np.isnan(results[0])
    assert results[1:].tolist() == expected


@given(st.lists(st.integers(0, 5), max_size=30))
def test_first_rows_of_each_slot(slots: list[int]) -> None:
    chosen, stamps = np.empty(len(slots), np.int64), np.full(6, 77, np.uint8)
    count = kernel("first_rows")(ints(*slots), stamps, 78, chosen, len(slots))
    assert chosen[:count].tolist() == [row for row, slot in enumerate(slots) if slot not in slots[:row]]
    assert stamps.tolist() == [78 if slot in slots else 77 for slot in range(6)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=30),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_sessions_of_each_slot(rows: list[tuple[int, int]], gap: int, most: int) -> None:
    rows.sort(key=lambda row: row[0])
    size = len(rows)
    current, sessions = np.full(3, -1), np.empty(size, np.int64)
    firsts, lasts, owners, counts = (np.zeros(size, np.int64) for _ in range(4))
    times, slots = ints(*(time for time, _ in rows)), ints(*(slot for _, slot in rows))
    run = kernel("assign_sessions")
    known = run(times, slots, current, firsts, lasts, owners, counts, 0, gap, most, sessions, size)
    found: list[list[tuple[int, int]]] = []
    for (time, slot), number in zip(rows, sessions.tolist(), strict=True):
        mine = [session for session in found if session[0][1] == slot]
        if not mine or time >= mine[-1][-1][0] + gap or len(mine[-1]) == most:
            found.append([])
            mine.append(found[-1])
        mine[-1].append((time, slot))
        assert found[number] is mine[-1]
    assert known == len(found)
    shown = list(zip(firsts.tolist(), lasts.tolist(), owners.tolist(), counts.tolist(), strict=True))[:known]
    assert shown == [(session[0][0], session[-1][0], session[0][1], len(session)) for session in found]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 2)), max_size=20),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=20),
    st.integers(0, 9),
)
def test_the_latest_row_of_a_slot_up_to_each_time(
    rows: list[tuple[int, int]], others: list[tuple[int, int]], tolerance: int
) -> None:
    rows.sort(key=lambda row: row[0])
    others.sort(key=lambda row: row[0])
    found = np.empty(len(rows), np.int64)
    (times, slots), (other_times, other_slots) = (
        (ints(*(time for time, _ in some)), ints(*(slot for _, slot in some))) for some in (rows, others)
    )
    arguments = (times, slots, len(rows), other_times, other_slots, len(others))
    kernel("match_as_of")(*arguments, np.full(3, -1), tolerance, found)
    for (time, slot), place in zip(rows, found.tolist(), strict=True):
        before = [number for number, (t, s) in enumerate(others) if s == slot and t <= time]
        near = bool(before) and time - others[before[-1]][0] <= tolerance
        assert place == (before[-1] if near else -1)


# --- nesting of JSON --------------------------------------------------------------------------------


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(
    st.recursive(
        st.text('[]{}\\"a', max_size=4) | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{["\\'), inner, max_size=3),
        max_leaves=12,
    )
)
def test_nesting_is_that_of_lists_and_objects_outside_of_texts(value: Any) -> None:
    text = json.dumps(value, indent=1)
    data = np.frombuffer(text.encode(), np.uint8)
    assert kernel("deepest_nesting")(data, len(data)) == depth_of(value)
    assert kernel("count_begun")(data, len(data)) == text.count("[") + text.count("{")


@pytest.mark.parametrize(("text", "depth"), [("[[", 2), ('["[', 1), ("]]][", 0), ('{"a": "\\', 1), ("", 0)])
def test_nesting_of_what_is_no_json_is_bounded_by_it(text: str, depth: int) -> None:
    data = np.frombuffer(text.encode(), np.uint8)
    assert kernel("deepest_nesting")(data, len(data)) == depth
