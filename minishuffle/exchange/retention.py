"""What a worker retains: elements that were sent and may be asked for again, in memory first and then on disk.

All partitions of a worker share one bound (:class:`RetainedBytes`), and each has a store
(:class:`RetainedStore`). When memory is full, the store that is written to next moves its oldest elements
into a file, which is given up once nobody retains any of it. The bound holds between elements only: all
that a task writes for one element that it reads may exceed it, on disk. If a disk is full, elements stay in
memory, the writer waits, and what is full is said; nothing is dropped.

A store is written to by one thread (the task's) and freed by another (the loop's), without a lock: each
element leaves one of its two tables by one step that the interpreter does not divide, and who took it out
counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from minishuffle.errors import ResourceExhausted
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import Part, encode
from minishuffle.exchange.elementstore import ElementStore, StoredElement
from minishuffle.limits import RETAINED_FILE_BYTES, RETAINED_LOOK_BYTES

__all__ = ["RetainedBytes", "RetainedElement", "RetainedStore", "Spilled"]

ELEMENT_OVERHEAD_BYTES: Final = 400
"""What an element takes beside its bytes: Python's objects for it, and its places in logs and tables."""
_SPILL_DOWN_TO: Final = 7 / 8
"""Of the memory, so that not every element makes the next one move."""


class Spilled(NamedTuple):
    """Where an element lies on disk."""

    store: ElementStore
    element: StoredElement

    def read(self) -> list[Part]:
        """Its bytes. (Any thread; it may wait for the disk.) Raises PartitionLost: they are not what was
        written."""
        return [self.store.read(self.element)]


Held: TypeAlias = "list[Part] | Batch | Spilled | None"


class RetainedElement:
    """One element that is retained, for one consumer or, if it was broadcast, for several.

    Args:
        size: bytes of ``data``: the element's parts, or a batch that was handed over, as it is.
        holders: logs that hold it.
    """

    __slots__ = ("data", "freed", "holders", "number", "rows", "size")

    def __init__(self, number: int, rows: int, size: int, data: list[Part] | Batch, holders: int) -> None:
        self.number = number
        self.rows = rows
        self.size = size
        self.data: Held = data
        """None: nobody holds it any more."""
        self.holders = holders
        """(Loop.)"""
        self.freed = False
        """(Loop.) Nobody holds it: set before it is taken out of a table."""

    @property
    def charged(self) -> int:
        """The bytes that it counts for."""
        return self.size + ELEMENT_OVERHEAD_BYTES


class RetainedBytes:
    """The bytes that all tasks of a worker retain.

    Invariants, behind each look of a store (at the least every ``RETAINED_LOOK_BYTES`` that it takes in)::

        memory ≤ memory_bytes + Σ keep_bytes of stores, or a disk is full
        used = memory + disk = Σ over elements that are held

    and between the elements that a task reads ``used ≤ limit_bytes + what the last one made``.

    Args:
        limit_bytes: the bound of memory and disk together.
        memory_bytes: above so many bytes in memory, stores move elements to disk.
        on_half: called by any thread when half of the bound is reached, once until less than that is held: a
            snapshot of the consumers would free what is retained.
        on_disk_full: called by a task's thread with the error of a disk that takes no more, once until one
            takes something.
    """

    def __init__(
        self,
        limit_bytes: int,
        memory_bytes: int,
        *,
        on_half: Callable[[], None] = lambda: None,
        on_disk_full: Callable[[ResourceExhausted], None] = lambda error: None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.memory_bytes = memory_bytes
        self.half_reached = False
        """At least half of the bound is held."""
        self.disk_full = False
        self._stores: list[RetainedStore] = []
        self._on_half = on_half
        self._on_disk_full = on_disk_full

    @property
    def memory(self) -> int:
        """(Any thread.) Bytes in memory."""
        return sum(store.memory for store in self._stores)

    @property
    def used(self) -> int:
        """(Any thread.) Bytes in memory and on disk."""
        return sum(store.held for store in self._stores)

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
        if error is not None and not self.disk_full:
            self._on_disk_full(error)
        self.disk_full = error is not None


class RetainedStore:
    """What one partition retains.

    Args:
        keep_bytes: so much of the newest stays in memory: consumers that keep up never wait for a disk.
        make_store: gives the store of the next file, with nothing in memory.
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
        self._in_memory: dict[int, RetainedElement] = {}
        """By number, the oldest first."""
        self._on_disk: dict[int, RetainedElement] = {}
        self._file: ElementStore | None = None
        # Each of these has one writer: the task's thread …
        self._number = 0
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

    def add(self, rows: int, size: int, data: list[Part] | Batch, holders: int = 1) -> RetainedElement:
        """Retain an element. What memory has no room for goes to disk; this waits for nobody."""
        if type(data) is list and len(data) > 3:
            data = [_owned(part) for part in data]
        self._number = number = self._number + 1
        element = RetainedElement(number, rows, size, data, holders)
        self._in_memory[number] = element
        self._added = added = self._added + size + ELEMENT_OVERHEAD_BYTES
        if added >= self._look_at:
            self._look()
        return element

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
        """Move the oldest elements to disk; False: it takes no more."""
        budget = self._budget
        down_to = int(budget.memory_bytes * _SPILL_DOWN_TO)
        for number in list(self._in_memory):
            if self.memory <= self._keep_bytes or budget.memory <= down_to:
                break
            element = self._in_memory.get(number)
            if element is None or (data := element.data) is None:
                continue  # it was freed
            assert not isinstance(data, Spilled)
            parts = data if isinstance(data, list) else encode(data)[1]
            try:
                self._move(element, parts)
            except ResourceExhausted as error:
                budget.note_disk(error)
                return budget.memory < budget.memory_bytes
            budget.note_disk(None)
        return True

    def _move(self, element: RetainedElement, parts: list[Part]) -> None:
        store = self._file
        if store is None or store.bytes >= RETAINED_FILE_BYTES:
            store = self._file = self._make_store()
        spilled = Spilled(store, store.append(element.rows, parts))
        if self._in_memory.pop(element.number, None) is None:
            return  # it was freed meanwhile
        element.data = spilled
        self._spilled += element.charged
        self._on_disk[element.number] = element
        if element.freed and self._on_disk.pop(element.number, None) is not None:
            element.data = None  # the loop found it in neither table
            self._freed_late += element.charged

    # --- loop ------------------------------------------------------------------------------------

    def free(self, element: RetainedElement) -> None:
        """One log holds the element no more; call :meth:`RetainedBytes.note_freed` behind the last."""
        element.holders -= 1
        if element.holders:
            return
        element.freed = True  # before the look: see _move
        if self._in_memory.pop(element.number, None) is not None:
            self._freed_memory += element.charged
            element.data = None
        elif self._on_disk.pop(element.number, None) is not None:
            self._freed_disk += element.charged
            element.data = None

    def note_freed(self) -> None:
        """Elements were freed."""
        self._budget.note_freed()

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
        memory, disk = (sum(each.charged for each in at.values()) for at in (self._in_memory, self._on_disk))
        assert (self.memory, self.held) == (memory, memory + disk)
        assert all(not isinstance(each.data, Spilled) for each in self._in_memory.values())
        assert all(isinstance(each.data, Spilled) for each in self._on_disk.values())
        assert all(each.holders > 0 for at in (self._in_memory, self._on_disk) for each in at.values())


def _owned(part: Part) -> Part:
    """The part in memory of its own: texts lie in the columns that they were taken from."""
    return bytes(part) if isinstance(part, memoryview) and isinstance(part.obj, np.ndarray) else part
