"""What waits for its time, against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minishuffle.operators.base import END_OF_TIME
from minishuffle.operators.time_heap import TimeHeap


@given(st.lists(st.tuples(st.booleans(), st.integers(-5, 5)), max_size=40))
def test_a_heap_agrees_with_a_sorted_list(actions: list[tuple[bool, int]]) -> None:
    heap: TimeHeap[int] = TimeHeap()
    expected: list[tuple[int, int]] = []
    for number, (is_push, time) in enumerate(actions):
        if is_push:
            heap.push(time, number)
            expected.append((time, number))
        else:
            due = sorted(each for each in expected if each[0] <= time)
            assert list(heap.take_until(time)) == due
            expected = [each for each in expected if each[0] > time]
        assert len(heap) == len(expected)
        assert heap.earliest == min((each[0] for each in expected), default=END_OF_TIME)
        assert not expected or heap.first == min(expected)[1]


def test_what_is_pushed_while_others_are_taken_comes_in_order_too() -> None:
    heap: TimeHeap[str] = TimeHeap()
    heap.push(1, "a")
    heap.push(3, "c")
    taken = []
    for time, thing in heap.take_until(3):
        taken.append(thing)
        if time == 1:
            heap.push(2, "b")
            heap.push(3, "d")
            heap.push(4, "e")
    assert taken == ["a", "b", "c", "d"]


def test_things_of_one_time_come_by_the_numbers_that_they_were_given() -> None:
    heap: TimeHeap[str] = TimeHeap()
    for time, number in ((2, 7), (1, 9), (1, 3), (2, 0)):
        heap.push(time, f"{time}.{number}", number)
    assert [thing for _, thing in heap.take_until(2)] == ["1.3", "1.9", "2.0", "2.7"]
