"""The numbers of rows: which of them a consumer leaves out, and what it has missed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minishuffle.exchange.rownumbers import NO_VERSION, RetainedRowNumbers, RowNumbers
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


# --- through versions -----------------------------------------------------------------------------


class ThroughVersions(RuleBasedStateMachine):
    """A channel whose producer begins versions, and whose consumer restarts at its snapshots.

    ``stable`` is what the oldest snapshot covers of the version that there is, which begins before that.
    """

    @initialize()
    def make(self) -> None:
        self.rows = RetainedRowNumbers()
        self.version, self.begins = 1, 0
        self.snapshots = [(NO_VERSION, 0)]
        self.taken: list[tuple[int, int]] = []
        """Version and number of each row that was taken, by earlier attempts too."""
        self.lengths = [0]
        """Of ``taken``, in each snapshot."""
        self.start = self.given = 0
        self.at: int | None = None
        """The row that comes next; None: nothing is attached."""
        self.rows.attach(self.version)

    @property
    def stable(self) -> int:
        version, row = self.snapshots[0]
        return row if version == self.version else self.begins

    @rule(back=st.integers(0, 9))
    def attach(self, back: int) -> None:
        """It begins with a row that is wanted, or before."""
        wanted = self.rows.wanted(self.version)
        row = max(self.stable, (wanted or self.stable) - back)
        self.rows.attach(self.version)
        assert self.rows.begin(row) == (0, 0) and self.rows.version == self.version
        self.at = row

    @rule(size=st.integers(0, 6))
    def take(self, size: int) -> None:
        if self.at is None:
            return
        skip = self.rows.take(size)
        numbers = range(self.at + skip, self.at + size)
        self.taken += [(self.version, number) for number in numbers]
        self.given += len(numbers)
        self.at += size
        assert self.rows.at == self.at

    @rule(half=st.integers(0, 3))
    def detach(self, half: int) -> None:
        self.rows.detach(half)
        self.at = None

    @rule(back=st.integers(0, 9))
    def begin_version(self, back: int) -> None:
        """The producer goes on at a snapshot of its own, which serves the consumer's oldest."""
        self.begins = max(0, self.stable - back)
        self.version += 1
        self.detach(0)
        self.rows.attach(self.version)

    @rule(drops=st.booleans())
    def take_snapshot(self, drops: bool) -> None:
        self.snapshots.append((self.rows.version, self.rows.next))
        self.lengths.append(len(self.taken))
        if drops:
            del self.snapshots[0], self.lengths[0]

    @rule()
    def restart(self) -> None:
        (version, row), length = self.snapshots[0], self.lengths[0]
        del self.snapshots[1:], self.lengths[1:], self.taken[length:]
        self.rows = RetainedRowNumbers()
        self.rows.restore(version, row)
        self.rows.attach(self.version)
        self.start, self.given, self.at = row, 0, None

    @invariant()
    def is_right(self) -> None:
        if not hasattr(self, "rows"):
            return
        rows = self.rows
        assert self.begins <= self.stable <= max(rows.next, self.begins) and rows.version <= self.version
        assert self.stable <= rows.next or rows.version < self.version
        assert self.given == rows.next - self.start + rows.again
        assert {number for _, number in self.taken} >= set(range(rows.next)), "each row at least once"
        assert all(
            number == last + 1 if version == before else version > before and number <= last + 1
            for (before, last), (version, number) in pairwise(self.taken)
        )
        assert (rows.missed, rows.lost) == (0, 0)


TestThroughVersions = ThroughVersions.TestCase
TestThroughVersions.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_version_takes_the_place_of_what_was_taken_beyond_its_beginning() -> None:
    rows = RetainedRowNumbers()
    rows.restore(1, 10)
    rows.attach(2)
    assert (rows.version, rows.next, rows.wanted(2)) == (1, 10, 0), "nothing of it was taken yet"
    assert rows.begin(6) == (0, 0) and (rows.version, rows.next, rows.again) == (2, 6, 4)
    assert (rows.take(3), rows.next) == (0, 9)
    rows.attach(2)
    assert rows.begin(7) == (0, 0) and (rows.take(4), rows.next, rows.again) == (2, 11, 4)


def test_a_row_that_is_missing_is_said() -> None:
    rows = RetainedRowNumbers()
    rows.restore(1, 10)
    rows.attach(1)
    assert rows.begin(13) == (3, 0)


def test_rows_of_a_new_version_are_left_out_once_the_end_has_come() -> None:
    rows = RetainedRowNumbers()
    rows.restore(1, 10)
    rows.finish()
    rows.attach(2)
    assert rows.begin(6) == (0, 0) and rows.take(9) == 9
    assert (rows.version, rows.next, rows.again) == (1, 10, 0)
