"""The numbers of rows: which of them a consumer leaves out, and what it has missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.rownumbers import RowNumbers
from support.soak import examples


class Reader:
    """A consumer of one channel; each row is its version and number."""

    def __init__(self) -> None:
        self.rows = RowNumbers()
        self.given: list[tuple[int, int]] = []
        self.incomplete = 0

    def attach(self, version: int, row: int, *sizes: int, half: int = 0) -> None:
        """An attachment that begins with a row, and brings elements of so many rows; at its end, the
        beginning of one."""
        rows = self.rows
        self.incomplete += rows.attach(version)
        if sizes or half:
            self.incomplete += rows.begin(row)[1]
        for size in sizes:
            skip, first = rows.take(size), rows.at - size
            self.given += [(version, number) for number in range(first + skip, rows.at)]
        rows.detach(half)


def test_a_first_attempt_is_taken_whole() -> None:
    reader = Reader()
    reader.attach(1, 0, 4, 5)
    assert reader.given == [(1, n) for n in range(9)]
    assert reader.rows.wanted(1) == 9 and reader.rows.wanted(2) == 0


def test_a_version_that_comes_again_goes_on_where_it_was_whatever_elements_rows_come_in() -> None:
    reader = Reader()
    reader.attach(1, 0, 4, 5, half=3)
    reader.attach(1, 0, 7)
    reader.attach(1, 0, 1, 10, 2)
    assert reader.given == [(1, n) for n in range(13)]
    assert (reader.incomplete, reader.rows.missed, reader.rows.lost) == (0, 0, 0)


def test_another_version_is_new_from_its_first_row_on() -> None:
    reader = Reader()
    reader.attach(1, 0, 4, half=2)
    reader.attach(2, 0, 3)
    assert reader.given == [*((1, n) for n in range(4)), (2, 0), (2, 1), (2, 2)]
    assert reader.incomplete == 2


def test_what_was_missed_is_lost_once_it_has_come_again_in_vain() -> None:
    reader = Reader()
    reader.attach(1, 0, 3, half=2)
    reader.attach(1, 7, 1)  # the link broke
    assert (reader.rows.missed, reader.incomplete, reader.rows.lost) == (2, 2, 0), "5 and 6 have not come"
    reader.attach(1, 0, 4, 3)
    assert reader.rows.lost == 0
    reader.attach(1, 0, 9)
    assert reader.given == [*((1, n) for n in (0, 1, 2, 7, 8))]
    assert (reader.rows.missed, reader.incomplete, reader.rows.lost) == (0, 2, 2)


def test_a_half_element_is_counted_if_the_channel_closes() -> None:
    reader = Reader()
    reader.attach(1, 0, 1, half=3)
    assert (reader.rows.close(), reader.rows.close()) == (3, 0)


def test_behind_the_end_nothing_is_taken_and_nothing_is_lost() -> None:
    reader = Reader()
    reader.attach(1, 0, 3)
    reader.rows.finish()
    reader.attach(1, 0, 9)
    reader.attach(2, 5, 9)
    assert len(reader.given) == 3 and reader.rows.lost == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 9), st.lists(st.integers(0, 6), max_size=5), st.integers(0, 3)
        ),
        max_size=examples(12),
    )
)
def test_each_row_of_a_version_is_given_out_once_and_in_order(
    attachments: list[tuple[int, int, list[int], int]],
) -> None:
    """Versions ascend; an attachment begins before what has come, or further on, where rows were lost."""
    reader, version = Reader(), 1
    for later, begin, sizes, half in attachments:
        version += later // 2
        there = reader.rows.wanted(version)
        reader.attach(version, max(0, there + begin - 6), *sizes, half=half)
        rows = reader.rows
        of_it = [number for each, number in reader.given if each == version]
        assert len(of_it) + rows.missed <= rows.next and (not of_it or of_it[-1] < rows.next)
    assert reader.given == sorted(set(reader.given))
