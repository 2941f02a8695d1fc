"""What a worker retains: memory first, then disk, and neither beyond its bound."""

from __future__ import annotations

import os

import pytest

from minishuffle.errors import ResourceExhausted
from minishuffle.exchange.elements import Part
from minishuffle.exchange.elementstore import ElementStore, StoredElement, StorePlace
from minishuffle.exchange.retention import RetainedBlock, RetainedBytes, RetainedStore, Spilled

PAGE = 100


class FullDisk(ElementStore):
    """Takes nothing while it is full."""

    full = True

    def append(self, rows: int, parts: list[Part]) -> StoredElement:
        if self.full:
            raise ResourceExhausted("what is retained cannot be kept in /state: No space left on device")
        return super().append(rows, parts)


class Worker:
    """A bound, and stores that share it."""

    def __init__(
        self, limit_bytes: int = 100_000, memory_bytes: int = 10_000, *, keep_bytes: int = 0
    ) -> None:
        self.halves = 0
        self.wakes = 0
        self.errors: list[ResourceExhausted] = []
        self.budget = RetainedBytes(
            limit_bytes, memory_bytes, PAGE, on_half=self._half, on_disk_full=self.errors.append
        )
        self.disk = FullDisk("what is retained", StorePlace())
        self.disk.full = False
        self.keep_bytes = keep_bytes

    def _half(self) -> None:
        self.halves += 1

    def _wake(self) -> None:
        self.wakes += 1

    def store(self) -> RetainedStore:
        return RetainedStore(self.budget, lambda: self.disk, keep_bytes=self.keep_bytes, wake=self._wake)


def add(store: RetainedStore, size: int, holders: int = 1) -> RetainedBlock:
    block = RetainedBlock(holders=holders)
    block.write(1, [b"h", b"x" * (size - 1)], size)
    store.close(block)
    store.validate()
    return block


def is_on_disk(block: RetainedBlock) -> bool:
    return isinstance(block.data, Spilled)


def test_the_oldest_blocks_go_to_disk_when_memory_is_full() -> None:
    worker = Worker()
    one, other = worker.store(), worker.store()
    blocks = [add(one, 300) for _ in range(9)]
    assert not any(map(is_on_disk, blocks)) and worker.budget.memory == worker.budget.used
    more = [add(other, 300) for _ in range(9)]
    assert worker.budget.memory <= worker.budget.memory_bytes
    assert any(map(is_on_disk, more)) and not any(map(is_on_disk, blocks)), "each moves its own"
    more += [add(one, 300) for _ in range(9)]
    ages = list(map(is_on_disk, blocks))
    assert ages == sorted(ages, reverse=True) and ages[0]
    found = next(block for block in blocks if is_on_disk(block)).data
    assert isinstance(found, Spilled) and b"".join(found.read()) == b"h" + b"x" * 299
    for block in (*blocks, *more):
        (one if block in blocks or block in more[9:] else other).free(block)
    assert worker.budget.used == worker.budget.memory == 0
    one.validate()


def test_what_a_store_is_to_keep_in_memory_stays_there() -> None:
    worker = Worker(keep_bytes=5_000)
    one, other = worker.store(), worker.store()
    for _ in range(30):
        add(one, 300)
    few = [add(other, 300) for _ in range(5)]
    assert not any(map(is_on_disk, few))
    assert worker.budget.memory <= worker.budget.memory_bytes + 2 * worker.keep_bytes


def test_a_full_disk_has_the_writer_wait_and_drops_nothing() -> None:
    worker = Worker()
    store = worker.store()
    worker.disk.full = True
    blocks = [add(store, 300) for _ in range(20)]
    assert store.full and worker.budget.disk_problem and len(worker.errors) == 1
    assert worker.budget.needs_room and worker.halves == 1, "snapshots are to free something"
    assert not any(map(is_on_disk, blocks)) and worker.budget.memory > worker.budget.memory_bytes
    assert not store.make_room() and store.waits
    assert len(worker.errors) == 1, "it is said once"
    worker.disk.full = False
    assert store.make_room() and not store.waits and not worker.budget.disk_problem
    assert worker.budget.memory <= worker.budget.memory_bytes and is_on_disk(blocks[0])
    worker.disk.full = True
    blocks += [add(store, 300) for _ in range(20)]
    assert store.full and len(worker.errors) == 2
    assert not store.make_room()
    for block in blocks:
        store.free(block)
    store.note_freed()
    assert worker.wakes and store.make_room(), "memory has room once it is freed"
    assert worker.budget.disk_problem and not worker.budget.needs_room


def test_the_bound_is_of_memory_and_disk_together_and_half_of_it_is_said_once() -> None:
    worker = Worker(limit_bytes=20_000)
    one, other = worker.store(), worker.store()
    blocks = []
    while not one.full:
        assert worker.halves == (2 * worker.budget.used >= 20_000 and worker.budget.half_reached)
        blocks.append(add(one, 300))
    assert worker.halves == 1 and worker.budget.used >= 20_000
    add(one, 50_000)
    assert worker.budget.used > 70_000, "what is made of one element may exceed it"
    assert worker.budget.memory <= 10_000 + 60_000
    assert not other.make_room() and not one.make_room() and worker.budget.memory <= 10_000
    one.release()
    assert worker.wakes == 1 and other.make_room() and worker.budget.used == 0
    assert not worker.budget.half_reached


def test_pages_are_used_again_but_for_those_that_somebody_has() -> None:
    worker = Worker()
    store = worker.store()
    block, lent, short = add(store, 80), add(store, 80), add(store, 20)
    assert [each.charged - 600 for each in (block, lent, short)] == [PAGE, PAGE, 20]
    assert isinstance(block.data, memoryview) and isinstance(lent.data, memoryview)
    page, held = block.data.obj, lent.data
    lent.lent = 1
    for each in (block, lent, short):
        store.free(each)
    store.slice_released(lent)
    again = [add(store, 70), add(store, 70)]
    pages = [each.data.obj for each in again if isinstance(each.data, memoryview)]
    assert pages[0] is page and pages[1] is not page
    assert bytes(held) == b"h" + b"x" * 79


def test_pages_do_not_lie_among_the_rows_that_are_made_between_them() -> None:
    worker = Worker(memory_bytes=400 * PAGE)
    store = worker.store()
    rows, blocks = [[(0, each) for each in range(100_000)]], []  # there is no room left by earlier tests
    for number in range(32):
        rows.append([(number, each) for each in range(300)])
        blocks.append(add(store, PAGE))
    pages = [block.data.obj for block in blocks if isinstance(block.data, memoryview)]
    assert len(pages) == 32 and len({id(page) >> 14 for page in pages}) < 8, "pools of pymalloc"


def test_a_block_is_held_until_its_last_log_frees_it() -> None:
    worker = Worker(memory_bytes=0)
    store = worker.store()
    before = set(os.listdir("/proc/self/fd"))
    block = add(store, 300, holders=2)
    assert is_on_disk(block)
    store.free(block)
    assert worker.budget.used == block.charged
    store.free(block)
    assert worker.budget.used == 0 and block.data is None
    store.validate()
    store.release()
    worker.disk = FullDisk("another", StorePlace())
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_that_is_freed_while_it_goes_to_disk_is_counted_once(when: str) -> None:
    """The loop frees it while the task's thread writes it."""
    worker = Worker(memory_bytes=0)
    store = worker.store()

    class Frees(FullDisk):
        full = False

        def append(self, rows: int, parts: list[Part]) -> StoredElement:
            if when == "before":
                store.free(block)
            found = super().append(rows, parts)
            if when == "after":
                store.free(block)
            return found

    worker.disk = Frees("what is retained", StorePlace())
    block = RetainedBlock()
    block.write(1, [b"x" * 300], 300)
    store.close(block)
    assert (worker.budget.used, worker.budget.memory, block.data) == (0, 0, None)
    store.validate()
