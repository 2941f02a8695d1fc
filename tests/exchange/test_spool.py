"""Results that wait for a reader: any range, any number of times, and room that comes free by files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import ResourceExhausted, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import ELEMENT_HEADER, decode, read_header
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.spool import Spool


def stores(directory: str | None) -> Callable[[], ElementStore]:
    return partial(ElementStore, "results of the test", StorePlace(directory))


def batch(begin: int, rows: int) -> pa.RecordBatch:
    numbers = range(begin, begin + rows)
    return pa.record_batch({"n": pa.array(numbers, pa.int64()), "s": pa.array(map(str, numbers))})


def numbers_of(spool: Spool, begin: int, end: int) -> list[int]:
    found: list[int] = []
    for rows, parts in spool.read(begin, end):
        data = b"".join(parts)
        size, count, kind = read_header(data)
        payload = memoryview(data)[ELEMENT_HEADER.size :]
        assert size == len(payload) and count == rows
        element = decode(kind, count, payload).payload
        assert isinstance(element, pa.RecordBatch)
        assert element.column("s").to_pylist() == [str(number) for number in element.column("n").to_pylist()]
        found += element.column("n").to_pylist()
    return found


def filled(spool: Spool, sizes: list[int]) -> Spool:
    for size in sizes:
        spool.append(Batch(batch(spool.rows, size)))
    spool.validate()
    return spool


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    assert not list(tmp_path.iterdir())


@given(
    sizes=st.lists(st.integers(0, 7), max_size=8),
    bytes_max=st.none() | st.integers(1, 4_000),
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4),
)
def test_every_range_reads_the_same_however_often(
    sizes: list[int], bytes_max: int | None, ranges: list[tuple[int, int]]
) -> None:
    spool = filled(Spool(stores(None), bytes_max), sizes)
    for one, two in ranges:
        begin, end = sorted((min(one, spool.rows), min(two, spool.rows)))
        assert numbers_of(spool, begin, end) == list(range(begin, end))


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    bytes_max=st.none() | st.integers(1, 4_000),
    commits=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4),
)
def test_what_was_not_freed_stays_whole(
    sizes: list[int], bytes_max: int | None, commits: list[tuple[int, int]]
) -> None:
    spool = filled(Spool(stores(None), bytes_max), sizes)
    freed = 0
    for one, two in commits:
        begin, read = sorted((one, two))
        freed = max(freed, min(begin, spool.rows))
        spool.free(begin, read)
        spool.validate()
        assert spool.freed == freed
        assert numbers_of(spool, freed, spool.rows) == list(range(freed, spool.rows))


def test_a_range_that_is_not_there_is_refused_with_what_is(directory: str) -> None:
    spool = filled(Spool(stores(directory), None), [5, 5])
    with pytest.raises(UsageError, match="rows 3 to 11 were asked for, and there are 10"):
        spool.check(3, 11)
    with pytest.raises(UsageError, match="rows 4 to 3"):
        spool.check(4, 3)
    spool.free(6, 8)
    with pytest.raises(UsageError, match="those below 6 were given up because a reader had committed"):
        next(spool.read(5, 7))
    assert numbers_of(spool, 6, 10) == [6, 7, 8, 9]


def test_files_are_closed_when_what_is_in_them_was_freed(directory: str) -> None:
    before = open_files()
    spool = filled(Spool(stores(directory), 4), [10, 10, 10])
    assert len(open_files() - before) == 3
    spool.free(19, 19)
    assert len(open_files() - before) == 2
    spool.free(30, 30)
    assert len(open_files() - before) == 1  # the one that is being written
    del spool
    assert open_files() == before


def test_a_reader_goes_on_over_what_is_freed_meanwhile(directory: str) -> None:
    spool = filled(Spool(stores(directory), 4), [10, 10])
    reading = spool.read(0, 20)
    assert next(reading)[0] == 10
    spool.free(20, 20)
    assert next(reading)[0] == 10
    assert next(reading, None) is None


def test_what_is_given_up_leaves_no_file_and_who_reads_it_goes_on(directory: str) -> None:
    before = open_files()
    spool = filled(Spool(stores(directory), 4), [10, 10, 10])
    reading = spool.read(0, 20)
    assert next(reading)[0] == 10
    spool.give_up()
    spool.validate()
    assert next(reading)[0] == 10
    assert next(reading, None) is None
    del reading
    assert open_files() == before
    with pytest.raises(UsageError, match="those below 30 were given up"):
        spool.check(0, 10)


def test_only_what_nobody_has_read_takes_room(directory: str) -> None:
    spool = Spool(stores(directory), 2_000)
    while spool.has_room:
        spool.append(Batch(batch(spool.rows, 10)))
    full = spool.rows
    spool.free(0, full)
    assert spool.has_room and spool.freed == 0
    assert numbers_of(spool, 0, full) == list(range(full))
    while spool.has_room:
        spool.append(Batch(batch(spool.rows, 10)))
    assert spool.rows == 2 * full
    assert Spool(stores(directory), None).has_room


def test_a_full_disk_is_named_and_leaves_what_was_there(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = filled(Spool(stores(directory), None), [5])
    real = os.pwrite

    def full_after_half(number: int, data: memoryview, at: int) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, data[: len(data) // 2], at)

    monkeypatch.setattr(os, "pwrite", full_after_half)
    with pytest.raises(ResourceExhausted, match="No space left on device; make room there"):
        spool.append(Batch(batch(5, 50)))
    monkeypatch.undo()
    assert spool.rows == 5
    filled(spool, [5])
    assert numbers_of(spool, 0, 10) == list(range(10))


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    spool = Spool(stores(str(tmp_path / "missing")), None)
    with pytest.raises(ResourceExhausted, match=r"missing: No such file or directory; make room"):
        spool.append(Batch(batch(0, 1)))


def test_an_attempt_makes_again_what_others_kept_behind_its_snapshot() -> None:
    spool = Spool(stores(None), None, 30, is_guaranteed=True)
    assert not spool.rows_again and spool.read_rows == 30
    spool.begin_at(12)
    assert (spool.rows_again, spool.rows) == (18, 30)


def test_the_next_spool_goes_on_with_what_readers_had_yet_to_deal_with() -> None:
    before = filled(Spool(stores(None), None), [3, 4, 5])
    before.free(0, 5)
    unread = before.unread()
    before.free(12, 12)
    filled(before, [2])
    after = Spool(stores(None), None, first=20)
    after.go_back(12, unread)
    assert numbers_of(after, 20, after.rows) == list(range(5, 12)), "as of then, and read later"
    assert after.rows_again == 20 - 12 + 7
    after.validate()
