"""The current batch of each task of a worker, recorded in memory that outlives the process.

The launcher of a worker makes a memory file (``memfd_create``), which the worker inherits and both map. Each
attempt has an entry there: which one it is, whether its thread is inside user code, how many rows it had
dealt with before, and how many it has in hand. Those that look for a row take turns in user code, so that one
alone is inside when the process ends. One that looks for a row that ends its process
(:mod:`~minishuffle.worker.tasks.poisonrows`) also notes which row is the first of these, which operator has
what came of it, how many rows that is, and which is the first. The thread writes that itself, a few words of
8 bytes around each batch, with no lock and no call of the system; nothing of it touches a disk. The kernel
keeps what was written, however the process ends, and the launcher reads it then.

A worker that ends by itself records this first (LEAVING). Without this mark the process was ended from
outside, whatever its exit code.

Without a launcher that reads it the entries are in the worker's own memory, for its heartbeats alone.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from mmap import mmap
from typing import Final, Protocol

from minishuffle.ids import AttemptId
from minishuffle.wire.requests import UserCall

__all__ = ["RECORD_BYTES", "CrashRecord", "TaskCalls", "calls_in", "is_leaving", "is_used"]

WORD_BYTES: Final = 8
ENTRY_WORDS: Final = 20
ENTRY_BYTES: Final = ENTRY_WORDS * WORD_BYTES
ENTRIES: Final = 2_048
"""Attempts that are recorded at once; further ones are not."""
RECORD_BYTES: Final = (1 + ENTRIES) * ENTRY_BYTES
"""The first entry is of the process: its first word is UNUSED, SERVING or LEAVING."""
UNUSED, SERVING, LEAVING = range(3)
"""No worker has mapped the file yet; a worker has; the worker ends by itself."""
STATE, OPERATOR, INDEX, ATTEMPT, POSITION, ROWS, FIRST, PLACE, PLACE_ROWS, PLACE_FIRST, JOB_BYTES, JOB = (
    range(12)
)
"""The words of an entry; the name of the job takes the rest. PLACE is 0 if it is not known, else one more."""
JOB_BYTES_MAX: Final = (ENTRY_WORDS - JOB) * WORD_BYTES
FREE, OUTSIDE, INSIDE = range(3)
"""States: the entry is of no attempt, or its thread is outside or inside user code."""


def _words(memory: mmap | bytearray | bytes) -> memoryview:
    return memoryview(memory).cast("B").cast("Q")


class CallTurns(Protocol):
    """A lock of the process."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class TaskCalls:
    """The entry of one attempt. Its thread writes; the loop reads, and others see a moment of it."""

    __slots__ = ("_at", "_has_turn", "_rests", "_turns", "_view")

    def __init__(self, view: memoryview, at: int) -> None:
        self._view = view
        self._at = at
        self._rests = OUTSIDE
        """State to return to when the thread leaves user code."""
        self._turns: CallTurns | None = None
        """Who has it is inside user code; None: the entry waits for no other."""
        self._has_turn = False

    @classmethod
    def private(cls) -> TaskCalls:
        """An entry that nobody else sees."""
        return cls(_words(bytearray(ENTRY_BYTES)), 0)

    # --- task ------------------------------------------------------------------------------------

    def enter(self, rows: int = 0) -> None:
        """The thread calls user code with a batch of ``rows`` input rows."""
        if self._turns is not None:
            self._take_turn(self._turns)
        view, at = self._view, self._at
        view[at + ROWS] = rows
        view[at] = INSIDE

    def leave(self, rows: int = 0) -> None:
        """The call has returned; ``rows`` input rows are done."""
        view, at = self._view, self._at
        view[at] = self._rests
        view[at + POSITION] += rows
        view[at + ROWS] = 0
        if self._turns is not None:
            self.end_turn()

    def pause(self) -> int:
        """The thread waits; gives what :meth:`resume` takes."""
        view, at = self._view, self._at
        state: int = view[at]
        view[at] = self._rests
        if self._turns is not None:
            self.end_turn()
        return state

    def resume(self, state: int) -> None:
        """It goes on with what it did before the wait."""
        if self._turns is not None and state == INSIDE:
            self._take_turn(self._turns)
        self._view[self._at] = state

    def take_turns(self, turns: CallTurns) -> None:
        """(Before the thread starts.) It is inside user code only while it has that lock."""
        self._turns = turns

    def _take_turn(self, turns: CallTurns) -> None:
        if not self._has_turn:
            turns.acquire()
            self._has_turn = True

    def end_turn(self) -> None:
        """The thread is outside user code, or has ended."""
        if self._turns is not None and self._has_turn:
            self._has_turn = False
            self._turns.release()

    def note_first(self, row: int) -> None:
        """(Before :meth:`enter`.) The hash of the first row of that batch; 0: it is not known."""
        self._view[self._at + FIRST] = row

    def go_in(self, place: int, rows: int = 0, row: int = 0) -> tuple[int, int, int]:
        """The operator at that place in the chain takes over, with ``rows`` that the operator before it has
        made; ``row`` is the hash of the first, 0: it is not known. Gives what :meth:`go_back` takes."""
        view, at = self._view, self._at
        before = view[at + PLACE], view[at + PLACE_ROWS], view[at + PLACE_FIRST]
        self.go_back((place + 1, rows, row))
        return before

    def go_back(self, before: tuple[int, int, int]) -> None:
        """The operator that was called before goes on, with what it had."""
        view, at = self._view, self._at
        view[at + PLACE], view[at + PLACE_ROWS], view[at + PLACE_FIRST] = before

    def run_on(self) -> None:
        """Another thread runs user code from now on, also while this one does not."""
        self._rests = INSIDE

    # --- any thread ------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        return bool(self._view[self._at] == INSIDE)

    @property
    def position(self) -> int:
        """Rows that the attempt has dealt with."""
        return int(self._view[self._at + POSITION])

    @property
    def in_hand(self) -> int:
        return int(self._view[self._at + ROWS])

    def detach(self) -> int:
        """Go on in memory of its own, with what was written; gives where the entry was."""
        at, view = self._at, self._view
        own = _words(bytearray(ENTRY_BYTES))
        own[:] = view[at : at + ENTRY_WORDS]
        self._view, self._at = own, 0
        return at


class CrashRecord:
    """All entries of a worker.

    Args:
        descriptor: of the file that its launcher reads; -1: there is none.

    Raises:
        OSError: the descriptor is not of a file like this.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._view: memoryview | None = None
        self._free: deque[int] = deque()
        """Where entries begin that are of no attempt, in words."""
        self._used: set[TaskCalls] = set()
        if descriptor >= 0:
            try:
                self._view = _words(mmap(descriptor, RECORD_BYTES))
            except ValueError as error:  # it is shorter
                raise OSError(str(error)) from error
            os.close(descriptor)  # the mapping has one of its own
            self._view[0] = SERVING
            self._free.extend(range(ENTRY_WORDS, (1 + ENTRIES) * ENTRY_WORDS, ENTRY_WORDS))
            _records.add(self)

    @property
    def is_read(self) -> bool:
        """Whether a launcher reads it."""
        return self._view is not None

    def claim(self, attempt: AttemptId) -> TaskCalls:
        """The entry of an attempt that is about to start."""
        subtask = attempt.subtask
        job = subtask.job.encode()
        if self._view is None or not self._free or len(job) > JOB_BYTES_MAX:
            return TaskCalls.private()
        view, at = self._view, self._free.popleft()
        view[at : at + ENTRY_WORDS] = _words(bytearray(ENTRY_BYTES))
        padded = bytearray(job.ljust(JOB_BYTES_MAX, b"\0"))
        view[at + JOB : at + ENTRY_WORDS] = _words(padded)
        view[at + JOB_BYTES] = len(job)
        view[at + OPERATOR], view[at + INDEX] = subtask.operator, subtask.index
        view[at + ATTEMPT] = attempt.attempt
        view[at] = OUTSIDE
        calls = TaskCalls(view, at)
        self._used.add(calls)
        return calls

    def release(self, calls: TaskCalls) -> None:
        """(Any thread.) The thread of the attempt has ended, or was not started."""
        calls.end_turn()
        if self._view is not None and calls in self._used:
            self._used.discard(calls)
            at = calls.detach()
            self._view[at] = FREE
            self._free.append(at)

    def leave(self) -> None:
        """The worker ends by itself from here on."""
        if self._view is not None:
            self._view[0] = LEAVING

    def _forked(self) -> None:
        """This is a copy of the process, of which nobody wants to know what it has in hand."""
        for calls in self._used:
            calls.detach()
        self._used.clear()
        self._view = None


_records: weakref.WeakSet[CrashRecord] = weakref.WeakSet()


def _leave_the_parents() -> None:
    for record in list(_records):
        record._forked()
    _records.clear()


os.register_at_fork(after_in_child=_leave_the_parents)


def calls_in(memory: mmap) -> list[UserCall]:
    """(Launcher.) The attempts that were inside user code."""
    view = _words(memory[:])
    found = []
    for at in range(ENTRY_WORDS, len(view), ENTRY_WORDS):
        if view[at] == INSIDE:
            name = view[at + JOB : at + ENTRY_WORDS].tobytes()[: view[at + JOB_BYTES]]
            call = UserCall(
                job=name.decode(errors="replace"),
                operator=view[at + OPERATOR],
                index=view[at + INDEX],
                attempt=view[at + ATTEMPT],
                position=view[at + POSITION],
                rows=view[at + ROWS],
                row=view[at + FIRST] if view[at + ROWS] else 0,
                place=view[at + PLACE] - 1,
                place_rows=view[at + PLACE_ROWS],
                place_row=view[at + PLACE_FIRST],
            )
            found.append(call)
    return found


def is_used(memory: mmap) -> bool:
    """(Launcher.) Whether the worker has written there at all."""
    return memory[0] != UNUSED


def is_leaving(memory: mmap) -> bool:
    """(Launcher.) Whether the worker has ended by itself."""
    return memory[0] == LEAVING
