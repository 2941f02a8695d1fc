"""Rows that come once more: which of them are left out."""

from __future__ import annotations

from random import Random

import pytest

from minishuffle.exchange.repeats import Rendition, RowsTaken


def taken(rows: RowsTaken, stream: range, sizes: list[int]) -> list[int]:
    """What is given out of a stream that comes in elements of these sizes."""
    found, at = list[int](), stream.start
    for size in sizes:
        skip = rows.take(size)
        found += list(range(at + skip, at + size))
        at += size
    return found


def test_a_first_attempt_is_taken_whole() -> None:
    rows = RowsTaken()
    assert rows.attach(Rendition(1, 1)) == 0
    assert taken(rows, range(0, 9), [4, 5]) == list(range(9))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_elements_rows_come_in_each_is_given_out_once(seed: int) -> None:
    random = Random(seed)
    rows, found = RowsTaken(), list[int]()
    for attempt in range(1, 5):
        rows.attach(Rendition(attempt, 1))
        sizes = [random.randint(1, 7) for _ in range(random.randint(0, 9))]
        found += taken(rows, range(sum(sizes)), sizes)
    assert found == list(range(len(found)))


def test_an_attempt_with_a_base_of_its_own_is_taken_whole() -> None:
    rows = RowsTaken()
    rows.attach(Rendition(1, 1))
    taken(rows, range(0, 5), [5])
    rows.attach(Rendition(2, 2))
    assert taken(rows, range(5, 8), [3]) == [5, 6, 7]
    rows.attach(Rendition(3, 2))
    assert taken(rows, range(5, 9), [4]) == [8], "counted from the base on"


def test_half_an_element_is_lost_unless_it_comes_once_more() -> None:
    for next_attempt, lost in ((Rendition(2, 1), 0), (Rendition(2, 2), 3), (Rendition(1, 1), 3)):
        rows = RowsTaken()
        rows.attach(Rendition(1, 1))
        rows.detach(3)
        assert rows.attach(next_attempt) == lost
        assert rows.close() == 0, "once"
    rows.detach(2)
    assert rows.close() == 2


def test_behind_a_gap_nothing_is_taken_once_more_and_the_rest_is_lost() -> None:
    """Six of ten rows were taken before and behind a gap: which ones, nobody knows."""
    rows = RowsTaken()
    rows.attach(Rendition(1, 1))
    taken(rows, range(3), [3])
    rows.attach(Rendition(1, 1))  # the link broke
    taken(rows, range(5, 8), [3])
    rows.attach(Rendition(2, 1))
    assert taken(rows, range(10), [4, 6]) == [] and rows.lost == 4


@pytest.mark.parametrize("silent", [True, False])
def test_a_link_that_breaks_before_anything_came_once_more_leaves_no_gap(silent: bool) -> None:
    rows = RowsTaken()
    rows.attach(Rendition(1, 1))
    taken(rows, range(3), [3])
    rows.attach(Rendition(2, 1))
    rows.attach(Rendition(2, 1), silent=silent)
    assert taken(rows, range(9), [9]) == ([3, 4, 5, 6, 7, 8] if silent else [])
    assert rows.lost == (0 if silent else 6)


def test_behind_the_end_nothing_is_taken_and_nothing_is_lost() -> None:
    rows = RowsTaken()
    rows.attach(Rendition(1, 1))
    taken(rows, range(3), [3])
    rows.finish()
    rows.attach(Rendition(2, 1))
    assert taken(rows, range(9), [9]) == [] and rows.lost == 0
