"""The search for a row that ends its process, without processes: a row is met, and the attempt is over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, groupby
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.jobs.deaths import Deaths
from minishuffle.counters import TaskCounters
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Emit, Operator, Program, TaskContext
from minishuffle.operators.chained import ChainedOperator, ForgivingOperator
from minishuffle.runtime.chain import Chain
from minishuffle.wire.messages import PoisonRow, PoisonSearch
from minishuffle.wire.requests import UserCall
from minishuffle.worker.tasks.poisonrows import PARTS, PoisonRows, PoisonWatch

KEY = (1, 0)
FAR = 1_000_000


def search(row: int = 0, rows: int = 0, *found: int, reach: int = FAR) -> PoisonSearch:
    named = [PoisonRow(row=each, place=0, reach=reach, why="took it") for each in found]
    return PoisonSearch(row=row, rows=rows, reach=reach, found=named)


def batch_of(rows: Sequence[Any], kind: str = "rows") -> Batch:
    if kind == "rows":
        return Batch(list(rows))
    values = pa.array([[row] for row in rows]) if kind == "lists" else pa.array(rows)
    return Batch(pa.record_batch({"n": values, "m": values}))


def cut(rows: Sequence[Any], sizes: Iterator[int]) -> Iterator[Batch]:
    at = 0
    while at < len(rows):
        size = next(sizes)
        yield batch_of(rows[at : at + size])
        at += size


def values(batch: Batch) -> list[Any]:
    return batch.payload if isinstance(batch.payload, list) else batch.payload["n"].to_pylist()


def hash_of(row: Any, kind: str = "rows") -> int:
    (piece,) = PoisonRows(search(0, 1)).pieces(batch_of([row], kind))
    return piece.first


def lengths(poison: PoisonRows, rows: Sequence[Any], kind: str = "rows") -> list[int]:
    pieces = list(poison.pieces(batch_of(rows, kind)))
    assert [value for piece in pieces for value in values(piece.batch)] == values(batch_of(rows, kind))
    return [len(piece.batch) for piece in pieces]


@pytest.mark.parametrize("kind", ["rows", "columns", "lists"])
def test_a_row_is_known_by_what_is_in_it_in_whichever_batch(kind: str) -> None:
    hashes = [hash_of(row, kind) for row in range(100)]
    assert len(set(hashes)) == 100 and all(0 < each < 2**63 for each in hashes)
    pieces = list(PoisonRows(search(hash_of(7, kind), 1)).pieces(batch_of(range(20), kind)))
    assert [(values(each.batch), each.first) for each in pieces[4:6]] == [
        (values(batch_of(range(4, 7), kind)), hashes[4]),
        (values(batch_of([7], kind)), hashes[7]),
    ]


def test_batches_are_whole_but_at_the_beginning_and_behind_the_row_that_is_looked_for() -> None:
    poison = PoisonRows(search(hash_of(5_050), 256))
    sizes = [size for begin in range(0, 8_000, 100) for size in lengths(poison, range(begin, begin + 100))]
    assert [(size, len(list(alike))) for size, alike in groupby(sizes)] == [
        *[(4, 256), (76, 1), (100, 39)],
        *[(50, 1), (4, 12), (2, 1), (4, 244), (24, 1), (100, 19)],
    ]
    assert not poison.has_ended


def test_without_such_a_row_the_first_of_each_batch_is_noted() -> None:
    poison = PoisonRows(search(0, 10))
    (piece,) = poison.pieces(batch_of(range(50)))
    assert piece.first == hash_of(0) and len(piece.batch) == 50 and not poison.has_ended


def test_rows_that_no_exchange_takes_are_not_known() -> None:
    poison = PoisonRows(search(hash_of(1), 64))
    assert [(len(each.batch), each.first) for each in poison.pieces(Batch([object(), 1, 2]))] == [
        (1, 0),
        (1, hash_of(1)),
        (1, hash_of(2)),
    ]


def test_a_row_that_is_found_is_left_out_once_of_rows_that_are_alike() -> None:
    poison = PoisonRows(search(0, 0, hash_of(3), hash_of(5)))
    pieces = list(poison.pieces(batch_of([1, 3, 2, 3, 3])))
    assert [(values(each.batch), each.found is not None) for each in pieces if each.found] == [([3], True)]
    assert [value for each in pieces if not each.found for value in values(each.batch)] == [1, 2, 3, 3]
    assert poison.left_out == [0] and not poison.has_ended
    assert [each.found for each in poison.pieces(batch_of([3]))] == [None]
    (piece,) = poison.pieces(batch_of([5]))
    assert piece.found is not None and piece.found.row == hash_of(5)
    assert poison.left_out == [0, 1] and poison.has_ended


def test_a_later_attempt_does_not_leave_out_again_what_its_snapshot_is_without() -> None:
    poison = PoisonRows(search(0, 0, hash_of(3), hash_of(5)), [0])
    pieces = list(poison.pieces(batch_of([3, 5, 3])))
    assert [values(each.batch) for each in pieces if each.found] == [[5]]
    assert poison.left_out == [0, 1] and poison.has_ended


def test_the_search_ends_at_its_reach() -> None:
    poison = PoisonRows(search(0, 0, hash_of(-1), reach=100))
    lengths(poison, range(99))
    assert not poison.has_ended
    lengths(poison, range(1))
    assert poison.has_ended


@given(
    rows=st.integers(1, 300),
    poison=st.integers(0, 299),
    alike=st.integers(1, 300),
    failures_max=st.integers(1, 6),
    data=st.data(),
)
def test_each_death_leaves_fewer_rows_until_one_is_found_and_left_out(
    rows: int, poison: int, alike: int, failures_max: int, data: st.DataObject
) -> None:
    """Every attempt gets the rows in the same order, in other batches, from a later snapshot on."""
    stream = [row % alike for row in range(rows)]
    fatal = stream[poison % rows]
    first = stream.index(fatal)
    deaths, number, begin, died = Deaths(failures_max, 0.0, searches=True), 0, 0, []
    while True:
        number += 1
        begin = data.draw(st.integers(begin, first))
        looked = deaths.search(KEY)
        attempt = None if looked is None else PoisonRows(looked)
        sizes = cycle(data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)))
        position, taken = 0, []
        for batch in cut(stream[begin:], sizes):
            pieces = [(batch, 0, None)] if attempt is None else attempt.pieces(batch)
            for piece, row, found in pieces:
                if found is not None:
                    assert values(piece) == [fatal]
                    assert position == first - begin, "it is the first of those that are alike"
                    return
                if fatal in values(piece):
                    taken, row_of = values(piece), row
                    break
                position += len(piece)
            if taken:
                break
        assert taken, "it dies at that row, or leaves it out"
        call = UserCall(
            job="j1", operator=1, index=0, attempt=number, position=position, rows=len(taken), row=row_of
        )
        counted = deaths.count(call, "it died", float(number))
        assert counted is not None and counted.count == number
        if looked is not None and looked.row:
            assert len(taken) <= max(1, looked.rows // PARTS)
        died.append(len(taken))
        assert number <= failures_max + math.ceil(math.log2(max(died))) + 2
        if deaths.find_row(KEY) is None:
            assert not deaths.too_many(KEY)


# --- in a chain -----------------------------------------------------------------------------------


class Died(BaseException):
    """The process has ended."""


class Calls:
    """What is noted of an attempt."""

    def __init__(self) -> None:
        self.first, self.place = 0, (-1, 0, 0)

    def note_first(self, row: int) -> None:
        self.first = row

    def go_in(self, place: int, rows: int = 0, row: int = 0) -> tuple[int, int, int]:
        before, self.place = self.place, (place, rows, row)
        return before

    def go_back(self, before: tuple[int, int, int]) -> None:
        self.place = before


class Counting(ChainedOperator):
    """Gives each row, some times, with its number among those that are alike; or at the end the last one."""

    name = "count"

    def __init__(self, times: int = 1, *, at_end: bool = False, mark: Any = None) -> None:
        self._times, self._at_end, self._mark = times, at_end, mark
        self._seen: Counter[Any] = Counter()

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        made = []
        for row in batch.payload:
            self._seen[row] += 1
            made += [(row, self._seen[row], time, self._mark) for time in range(self._times)]
        if not self._at_end:
            emit(Batch(made))

    def finish(self, emit: Emit) -> None:
        if self._at_end:
            emit(Batch([(row, number, 0, self._mark) for row, number in self._seen.items()]))


class Killing(ForgivingOperator):
    """Ends its process at some rows, and keeps the others."""

    name = "kill"

    def __init__(self, kills: Callable[[Any], bool], taken: list[Any]) -> None:
        super().__init__("skip")
        self._kills, self._taken = kills, taken

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        for row in batch.payload:
            if self._kills(row):
                raise Died
            self._taken.append(row)


def attempts(
    operators: Callable[[int, list[Any]], list[Operator]],
    rows: Sequence[int],
    sizes: Sequence[int],
    failures_max: int = 2,
) -> tuple[list[Any], list[PoisonRow], int]:
    """What the attempt has taken that gets to the end, the rows that were found, and how many have died."""
    deaths = Deaths(failures_max, 0.0, searches=True)
    for number in range(1, 40):
        looked, calls = deaths.search(KEY), Calls()
        watch = None if looked is None else PoisonWatch(PoisonRows(looked), calls, lambda places: None)
        taken: list[Any] = []
        program = Program(None, operators(number, taken), [])
        chain = Chain(program, {}, 0, TaskCounters(), watch=watch)
        chain.open(TaskContext("j1", "t", 0, 1, number) for _ in program.operators)
        position = in_hand = 0
        try:
            for batch in cut(rows, cycle(sizes)):
                for piece in [batch] if watch is None else watch.pieces(batch):
                    in_hand = len(piece)
                    chain.entrance(0)(piece)
                    position, in_hand = position + in_hand, 0
            chain.finish(lambda: None)
            return taken, [] if looked is None else looked.found, number - 1
        except Died:
            place, place_rows, place_row = calls.place
            call = UserCall(
                job="j1",
                operator=1,
                index=0,
                attempt=number,
                position=position,
                rows=in_hand,
                row=calls.first if in_hand else 0,
                place=place,
                place_rows=place_rows,
                place_row=place_row,
            )
        assert deaths.count(call, "it died", float(number)) is not None
        if deaths.find_row(KEY) is None:
            assert not deaths.too_many(KEY)
    raise AssertionError


@given(
    fatal=st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(0, 2)),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    failures_max=st.integers(1, 4),
    at_end=st.booleans(),
)
def test_a_row_is_left_out_in_front_of_the_operator_that_it_ends_and_counts_before(
    fatal: tuple[int, int, int], sizes: list[int], failures_max: int, at_end: bool
) -> None:
    fatal = (fatal[0], 20, 0) if at_end else fatal
    failures_max = max(2, failures_max) if at_end else failures_max

    def operators(number: int, taken: list[Any]) -> list[Operator]:
        return [Counting(3, at_end=at_end), Killing(lambda row: row[:3] == fatal, taken)]

    taken, found, died = attempts(operators, [row % 7 for row in range(140)], sizes, failures_max)
    times = [(20, 0)] if at_end else [(number, time) for number in range(1, 21) for time in range(3)]
    expected = {(row, *each, None) for row in range(7) for each in times} - {(*fatal, None)}
    assert set(taken) == expected and len(taken) == len(expected)
    assert [(each.at, each.place) for each in found] == [(1, 1)]
    assert died <= failures_max + math.ceil(math.log2(300)) + 2


@pytest.mark.parametrize("times", [1, 3])
def test_what_comes_of_an_input_row_is_left_out_where_it_is_another_each_time(times: int) -> None:
    def operators(number: int, taken: list[Any]) -> list[Operator]:
        return [Counting(times, mark=number), Killing(lambda row: row[0] == 77, taken)]

    taken, found, _ = attempts(operators, range(100), [30])
    assert [row[:3] for row in taken] == [
        (row, 1, n) for row in range(100) if row != 77 for n in range(times)
    ]
    assert [(each.row, each.at, each.place) for each in found] == [(hash_of(77), 0, 1)]


def test_rows_of_two_operators_are_both_found() -> None:
    def operators(number: int, taken: list[Any]) -> list[Operator]:
        class First(Killing):
            def process(self, batch: Batch, input: int, emit: Emit) -> None:
                super().process(batch, input, emit)
                emit(batch)

        return [
            First(lambda row: row == 40, []),
            Counting(),
            Killing(lambda row: row[0] == 50, taken),
        ]

    taken, found, _ = attempts(operators, range(100), [30])
    assert [row[0] for row in taken] == [row for row in range(100) if row not in (40, 50)]
    assert sorted((each.at, each.place) for each in found) == [(0, 0), (2, 2)]


def test_a_record_of_no_batch_is_noted_by_itself_and_left_out_once_it_is_found() -> None:
    calls, left_out = Calls(), list[int]()
    record = ["timer", 7, 3]
    row = PoisonRows(search(0, 1)).alone(record, 1).first
    watch = PoisonWatch(PoisonRows(search(0, 1)), calls, left_out.extend)
    assert watch.alone(1, record) is None and calls.place == (1, 1, row)
    found = PoisonRow(row=row, at=1, place=1, reach=FAR, why="took it")
    watch = PoisonWatch(PoisonRows(PoisonSearch(reach=FAR, found=[found])), calls, left_out.extend)
    assert watch.alone(2, record) is watch.alone(1, ["timer", 8, 3]) is None
    assert watch.alone(1, record) == "took it" and left_out == [0]
    assert watch.has_ended and watch.alone(1, record) is None


def test_a_watch_that_has_given_up_notes_no_row_and_leaves_out_what_is_found() -> None:
    calls, taken = Calls(), list[Any]()
    found = PoisonRow(row=hash_of(40), at=0, place=0, reach=FAR, why="took it")
    looked = PoisonSearch(row=hash_of(5), rows=640, place=1, reach=FAR, found=[found])
    watch = PoisonWatch(PoisonRows(looked), calls, lambda places: None)
    sizes = []
    for piece in watch.pieces(batch_of(range(100))):
        sizes.append(len(piece))
        if len(sizes) == 1:
            watch.give_up()
        watch.take(1, piece, lambda item: taken.append(calls.place), lambda why, batch: None)
        assert calls.first == 0 or len(sizes) == 1
    assert sizes == [10, 30, 1, 59] and set(taken) == {(1, 0, 0)} and watch.has_ended
