"""Timers of keys against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minishuffle.operators.key_timers import KeyTimers

Action = tuple[str, int, int]
actions = st.lists(
    st.tuples(st.sampled_from(["set", "delete", "take", "clear"]), st.integers(0, 2), st.integers(0, 9)),
    max_size=40,
)


@given(actions=actions)
def test_timers_agree_with_a_sorted_list(actions: list[Action]) -> None:
    timers = KeyTimers()
    expected: list[tuple[int, int]] = []
    """Of key and time, in the order of setting."""
    for action, key, time in actions:
        if action == "set":
            assert timers.set(key, time) == ((key, time) not in expected)
            expected += [] if (key, time) in expected else [(key, time)]
        elif action == "delete":
            assert timers.delete(key, time) == ((key, time) in expected)
            expected = [each for each in expected if each != (key, time)]
        elif action == "clear":
            timers.clear()
            expected = []
        else:
            due = sorted((each for each in expected if each[1] <= time), key=lambda each: each[1])
            assert list(timers.take_until(time)) == [(*each, each[1]) for each in due]
            expected = [each for each in expected if each[1] > time]
        assert len(timers) == len(expected)
        assert [each for each in range(3) if timers.has_key(each)] == sorted({each for each, _ in expected})
        assert timers.earliest == min((each[1] for each in expected), default=None)


def test_timers_set_while_others_are_taken_come_in_order_too() -> None:
    timers = KeyTimers()
    timers.set("a", 1)
    timers.set("a", 9)
    taken = []
    for key, time, _ in timers.take_until(9):
        taken.append(time)
        if time < 8:
            timers.set(key, time + 3)
    assert taken == [1, 4, 7, 9]
    assert timers.earliest == 10


def test_deleted_timers_leave_nothing_behind() -> None:
    timers = KeyTimers()
    timers.set("kept", 5)
    for number in range(10_000):
        timers.set("k", number)
        timers.delete("k", number)
    assert len(timers._heap) < 200
    assert timers.earliest == 5


def test_a_timer_may_be_due_at_another_time_than_its_own() -> None:
    timers = KeyTimers()
    assert timers.set("late", 5, due=9) and timers.set("own", 6) and not timers.set("late", 5)
    assert timers.earliest == 6
    assert list(timers.take_until(8)) == [("own", 6, 6)]
    assert ("late", 5) in timers
    for number in range(200):  # So many that what is left is put into another heap.
        timers.set("k", number, due=number + 20)
        timers.delete("k", number)
    assert timers.earliest == 9
    assert list(timers.take_until(9)) == [("late", 5, 9)]
    assert not len(timers)
