"""The search for a row that ends its process, without processes: a row is met, and the attempt is over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, groupby
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.jobs.deaths import Deaths
from minishuffle.exchange.batch import Batch
from minishuffle.wire.messages import PoisonRow, PoisonSearch
from minishuffle.wire.requests import UserCall
from minishuffle.worker.tasks.poisonrows import PARTS, PoisonRows

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
