"""What a worker retains: elements that were sent and may be asked for again, in memory first, then on disk.

Elements are held in *blocks*: some short ones that fill a buffer together, or a longer one. Short ones are
copied into *pages* of a buffer's size, which are used again: memory that is kept for a second and then
given back would be cleared by the system each time, which takes longer than the copy. A longer one stays
where it was encoded. All partitions of a worker share one bound (:class:`RetainedBytes`), and each has a
store (:class:`RetainedStore`). When memory is full, the store that is written to next moves its oldest
blocks into a file, which is given up once nobody retains any of it. The bound holds between elements only:
all that a task writes for one element that it reads may exceed it, on disk. If a disk is full, blocks stay
in memory, the writer waits, and what is full is said; nothing is dropped.

Few objects are kept for a block that is complete. They live for a second, among rows that live for a
millisecond: one that stays has pymalloc keep the whole pool in which it lies, and rows that are made later
lie scattered, in memory that no cache holds. So what is only needed while a block is written goes when it is
complete, and how many rows and bytes it has stands in arrays of the logs that hold it.

A store is written to by one thread (the task's) and freed by another (the loop's), without a lock: each block
leaves one of its two tables by one step that the interpreter does not divide, and who took it out counts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from minishuffle.errors import ResourceExhausted
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import Part, encode
from minishuffle.exchange.elementstore import ElementStore, StoredElement
from minishuffle.limits import RETAINED_FILE_BYTES, RETAINED_LOOK_BYTES

__all__ = [
    "OpenElements",
    "RetainedBlock",
    "RetainedBytes",
    "RetainedData",
    "RetainedStore",
    "Spilled",
    "block_parts",
]

BLOCK_OVERHEAD_BYTES: Final = 600
"""What a block takes beside its pages: Python's objects for it, and its places in logs and tables."""
_SPILL_DOWN_TO: Final = 7 / 8
"""This share of the memory stays full, so that not every block makes the next one move."""
_PAGES_AT_ONCE: Final = 64
"""So many pages are made together: made one by one, each would lie among rows, in a pool that it keeps."""
_FREE_SHARE: Final = 2
"""One part in so many of the memory may be free pages that wait to be used again."""


@dataclass(frozen=True, slots=True)
class Spilled:
    """Where a block lies on disk."""

    store: ElementStore
    element: StoredElement

    def read(self) -> tuple[Part, ...]:
        """Its bytes. (Any thread; it may wait for the disk.) Raises PartitionLost: they are not what was
        written."""
        return (self.store.read(self.element),)


class OpenElements:
    """What is in a block that is open. The writer appends; whoever holds this while the block is completed
    sees all that was written to it."""

    __slots__ = ("batch", "ends", "parts", "size", "width")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ends: list[int] = []
        """The rows up to the end of each element. One is there once its end is."""
        self.width = 0
        """Parts of each of these elements."""
        self.size = 0
        """Bytes."""
        self.batch: Batch | None = None
        """One that was handed over, and makes up the block."""


RetainedData: TypeAlias = "OpenElements | Part | tuple[Part, ...] | Batch | Spilled | None"
"""What is in a block: its elements while it is open; once it is complete, a page with their bytes, the bytes
alone if they are few, or the parts of a long one; a batch that is handed over as it is; a place on disk;
nothing once nobody holds it."""


class RetainedBlock:
    """Whole elements in their order, for one consumer or, if they are broadcast, for several: all of as many
    parts. Or a batch that is handed over.

    Args:
        holders: logs that hold it; each knows its rows and bytes.
    """

    __slots__ = ("charged", "closed", "data", "freed", "holders", "lent")

    def __init__(self, *, holders: int = 1) -> None:
        self.data: RetainedData = OpenElements()
        """(Writer, but for None.)"""
        self.closed = False
        """(Writer.) Nothing follows, and its logs have counted all that is in it."""
        self.charged = 0
        """The bytes that it counts for, once it is closed."""
        self.holders = holders
        """(Loop.)"""
        self.lent = 0
        """(Loop.) Pieces of it that consumers or sockets have."""
        self.freed = False
        """(Loop.) Nobody holds it: set before it is taken out of a table."""

    @property
    def open(self) -> OpenElements:
        """(Writer.) What is in a block that is not closed."""
        assert isinstance(self.data, OpenElements)
        return self.data

    def takes(self, parts: list[Part], size: int, capacity: int) -> bool:
        """(Writer.) Whether an element of so many bytes may follow."""
        elements = self.open
        return len(parts) == elements.width and elements.size + size <= capacity

    def write(self, rows: int, parts: list[Part], size: int) -> None:
        """(Writer.) Append one element to an open block."""
        elements = self.open
        elements.width = len(parts)
        elements.parts += parts
        elements.size += size
        ends = elements.ends
        ends.append(ends[-1] + rows if ends else rows)

    def hand_over(self, batch: Batch, size: int) -> None:
        """(Writer.) Have an open block with nothing in it be that batch, which is there once it is closed."""
        elements = self.open
        elements.batch, elements.size = batch, size


class RetainedBytes:
    """The bytes that all tasks of a worker retain.

    Invariants, behind each look of a store (at the least every ``RETAINED_LOOK_BYTES`` that it takes in)::

        memory ≤ memory_bytes + Σ keep_bytes of stores, or a disk is full
        used = memory + disk = Σ over closed blocks that are held

    and between the elements that a task reads ``used ≤ limit_bytes + what the last one made``. A block that
    is open, of up to a buffer for each consumer, is not counted.

    Args:
        limit_bytes: the bound of memory and disk together.
        memory_bytes: above so many bytes in memory, stores move blocks to disk.
        page_bytes: of a page: those of a buffer.
        on_half: called by any thread when half of the bound is reached, once until less than that is held,
            and when a disk is full: a snapshot of the consumers would free what is retained.
        on_disk_full: called by a task's thread with the error of a disk that takes no more, once until one
            takes something.
    """

    def __init__(
        self,
        limit_bytes: int,
        memory_bytes: int,
        page_bytes: int,
        *,
        on_half: Callable[[], None] = lambda: None,
        on_disk_full: Callable[[ResourceExhausted], None] = lambda error: None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.memory_bytes = memory_bytes
        self.page_bytes = page_bytes
        self.half_reached = False
        """At least half of the bound is held."""
        self.disk_problem = ""
        """Why the disk took no more when it was tried last; empty: it did."""
        self._stores: list[RetainedStore] = []
        self._free: deque[bytearray] = deque()
        """Pages that wait to be used again."""
        self._free_max = memory_bytes // _FREE_SHARE // page_bytes
        self._on_half = on_half
        self._on_disk_full = on_disk_full

    @property
    def memory(self) -> int:
        """(Any thread.) Bytes in memory, without free pages."""
        return sum(store.memory for store in self._stores)

    @property
    def used(self) -> int:
        """(Any thread.) Bytes in memory and on disk."""
        return sum(store.held for store in self._stores)

    @property
    def needs_room(self) -> bool:
        """(Any thread.) Snapshots are to free something soon: half of the bound is held, or what memory is
        for and no disk takes more."""
        return self.half_reached or (bool(self.disk_problem) and self.memory >= self.memory_bytes)

    def take_page(self) -> bytearray:
        """(Task.)"""
        try:
            return self._free.pop()  # which came back last: a cache may have it
        except IndexError:
            count = max(1, min(_PAGES_AT_ONCE, self._free_max))
            page, *more = [bytearray(self.page_bytes) for _ in range(count)]
            self._free.extend(more)
            return page

    def give_back(self, data: RetainedData) -> None:
        """(Loop.) Nobody looks at these pages any more."""
        if isinstance(data, memoryview) and len(self._free) < self._free_max:
            page = data.obj
            assert isinstance(page, bytearray)
            self._free.append(page)

    def enter(self, store: RetainedStore) -> None:
        """(Loop.) Count that store."""
        self._stores.append(store)

    def leave(self, store: RetainedStore) -> None:
        """(Loop.) It retains nothing any more."""
        self._stores.remove(store)
        self.note_freed()

    def note_used(self, used: int) -> None:
        """(Task.) So many bytes are held."""
        if not self.half_reached and 2 * used >= self.limit_bytes:
            self.half_reached = True
            self._on_half()

    def note_freed(self) -> None:
        """(Loop.) Something was freed: have those look again that wait for it."""
        if self.half_reached and 2 * self.used < self.limit_bytes:
            self.half_reached = False
        for store in self._stores:
            if store.waits:
                store.wake()

    def note_disk(self, error: ResourceExhausted | None) -> None:
        """(Task.) A disk has taken something, or is full."""
        was_full, self.disk_problem = bool(self.disk_problem), "" if error is None else str(error)
        if error is not None and not was_full:
            self._on_disk_full(error)
            self._on_half()


class RetainedStore:
    """What one partition retains.

    Args:
        make_store: gives the store of the next file, with nothing in memory.
        keep_bytes: so much of the newest stays in memory: consumers that keep up never wait for a disk.
        wake: (loop) has the writer look again whether there is room.
    """

    def __init__(
        self,
        budget: RetainedBytes,
        make_store: Callable[[], ElementStore],
        *,
        keep_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self.full = False
        """(Task.) The last look has found no room: wait, between elements, until :meth:`make_room`."""
        self.waits = False
        """The writer waits for room."""
        self.wake = wake
        self._budget = budget
        self._make_store = make_store
        self._keep_bytes = keep_bytes
        self._page_charged = budget.page_bytes + BLOCK_OVERHEAD_BYTES
        """What each block in a page counts for: one number for all."""
        self._in_memory: dict[RetainedBlock, bool] = {}
        """The oldest first; all are True."""
        self._on_disk: dict[RetainedBlock, bool] = {}
        self._file: ElementStore | None = None
        # Each of these has one writer: the task's thread …
        self._added = 0
        self._spilled = 0
        self._freed_late = 0
        """On disk, freed by the loop while the task's thread moved them there."""
        self._look_at = 0
        # … and the loop.
        self._freed_memory = 0
        self._freed_disk = 0
        budget.enter(self)

    @property
    def held(self) -> int:
        """(Any thread.) Bytes in memory and on disk."""
        return self._added - self._freed_memory - self._freed_disk - self._freed_late

    @property
    def memory(self) -> int:
        """(Any thread.) Bytes in memory."""
        return self._added - self._freed_memory - self._spilled

    # --- task ------------------------------------------------------------------------------------

    def close(self, block: RetainedBlock) -> None:
        """A block is complete: retain it. What memory has no room for goes to disk; this waits for nobody."""
        elements = block.open
        if elements.batch is not None:
            block.data, block.charged = elements.batch, elements.size + BLOCK_OVERHEAD_BYTES
        else:
            block.data, block.charged = self._packed(elements.parts, elements.size)
        self._in_memory[block] = True
        block.closed = True  # a log that holds it may free it from now on
        self._added = added = self._added + block.charged
        if added >= self._look_at:
            self._look()

    def _packed(self, parts: list[Part], size: int) -> tuple[Part | tuple[Part, ...], int]:
        """The bytes as they are held, and what the block counts for. A page has those that fill half of it;
        those of a longer element stay where they are."""
        page_bytes = self._budget.page_bytes
        if size > page_bytes:
            return tuple(map(_owned, parts)), size + BLOCK_OVERHEAD_BYTES
        joined = b"".join(parts)
        if 2 * size < page_bytes:
            return joined, size + BLOCK_OVERHEAD_BYTES
        view = memoryview(self._budget.take_page())[:size]
        view[:] = joined  # a bytearray would copy it twice
        return view, self._page_charged

    def make_room(self) -> bool:
        """Move to disk what is to go there; gives whether there is room within the bound."""
        self.waits = True  # before the look
        self._look()
        self.waits = self.full
        return not self.full

    def _look(self) -> None:
        budget = self._budget
        fits = budget.memory < budget.memory_bytes or self._spill()
        used = budget.used
        budget.note_used(used)
        self.full = not fits or used >= budget.limit_bytes
        self._look_at = self._added + min(RETAINED_LOOK_BYTES, budget.memory_bytes // 8)

    def _spill(self) -> bool:
        """Move the oldest blocks to disk; False: it takes no more."""
        budget = self._budget
        down_to = int(budget.memory_bytes * _SPILL_DOWN_TO)
        for block in list(self._in_memory):
            if self.memory <= self._keep_bytes or budget.memory <= down_to:
                break
            data = block.data
            if data is None:
                continue  # it was freed
            assert not isinstance(data, OpenElements | Spilled)
            try:
                self._move(block, encode(data)[1] if isinstance(data, Batch) else list(block_parts(data)))
            except ResourceExhausted as error:
                budget.note_disk(error)
                return budget.memory < budget.memory_bytes
            budget.note_disk(None)
        return True

    def _move(self, block: RetainedBlock, parts: list[Part]) -> None:
        """Its pages are not used again: a view may have looked at them just now."""
        store = self._file
        if store is None or store.bytes >= RETAINED_FILE_BYTES:
            store = self._file = self._make_store()
        spilled = Spilled(store, store.append(0, parts))  # its logs know how many rows there are
        if not self._in_memory.pop(block, False):
            return  # it was freed meanwhile
        block.data = spilled
        self._spilled += block.charged
        self._on_disk[block] = True
        if block.freed and self._on_disk.pop(block, False):
            block.data = None  # the loop found it in neither table
            self._freed_late += block.charged

    # --- loop ------------------------------------------------------------------------------------

    def free(self, block: RetainedBlock) -> None:
        """One log holds the closed block no more; call :meth:`note_freed` behind the last."""
        block.holders -= 1
        if block.holders:
            return
        block.freed = True  # before the look: see _move
        if self._in_memory.pop(block, False):
            self._freed_memory += block.charged
            data, block.data = block.data, None
            if not block.lent:
                self._budget.give_back(data)
        elif self._on_disk.pop(block, False):
            self._freed_disk += block.charged
            block.data = None

    def note_freed(self) -> None:
        """Blocks were freed."""
        self._budget.note_freed()

    def slice_released(self, block: RetainedBlock) -> None:
        """Whoever had a piece of that block has let go of it."""
        block.lent -= 1

    def release(self) -> None:
        """Nothing is retained any more."""
        self._budget.leave(self)
        self.clear()

    def clear(self) -> None:
        """Forget all of it; it was released, and nobody counts what an abandoned thread may have added."""
        self._in_memory.clear()
        self._on_disk.clear()
        self._file = None

    def validate(self) -> None:
        """Check the invariants; for tests."""
        tables = self._in_memory, self._on_disk
        memory, disk = (sum(each.charged for each in table) for table in tables)
        assert (self.memory, self.held) == (memory, memory + disk)
        assert all(isinstance(each.data, bytes | memoryview | tuple | Batch) for each in self._in_memory)
        assert all(isinstance(each.data, Spilled) for each in self._on_disk)
        assert all(each.closed and each.holders > 0 for table in tables for each in table)


def block_parts(data: Part | tuple[Part, ...]) -> tuple[Part, ...]:
    """The bytes of a block in memory."""
    return data if isinstance(data, tuple) else (data,)


def _owned(part: Part) -> Part:
    """The part in memory of its own: texts lie in the columns that they were taken from."""
    return bytes(part) if isinstance(part, memoryview) and isinstance(part.obj, np.ndarray) else part
