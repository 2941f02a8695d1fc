"""What tasks have in hand, as their launcher reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from mmap import mmap
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import TaskContext
from minishuffle.wire.requests import UserCall
from minishuffle.worker.tasks import crashrecord
from minishuffle.worker.tasks.crashrecord import (
    RECORD_BYTES,
    CrashRecord,
    TaskCalls,
    calls_in,
    is_leaving,
    is_used,
)
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Site

SEEN: list[list[UserCall]] = []
MEMORY: list[mmap] = []


@pytest.fixture
def shared() -> Iterator[tuple[CrashRecord, mmap]]:
    """A worker's record, and its launcher's view of it."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, RECORD_BYTES)
    with mmap(descriptor, RECORD_BYTES) as memory:
        assert not is_used(memory)
        record = CrashRecord(descriptor)
        assert is_used(memory)
        yield record, memory
        record._forked()  # Lets go of the mapping.


def call(operator: int, index: int, number: int, position: int, rows: int, *, job: str = "j1") -> UserCall:
    return UserCall(job=job, operator=operator, index=index, attempt=number, position=position, rows=rows)


def test_what_is_inside_user_code_is_read_with_its_position_and_rows(
    shared: tuple[CrashRecord, mmap],
) -> None:
    record, memory = shared
    first, second = record.claim(attempt(2, 3, 4, job="j17")), record.claim(attempt(0, 1, 1))
    assert calls_in(memory) == [], "both are outside"
    first.enter(100)
    assert calls_in(memory) == [call(2, 3, 4, 0, 100, job="j17")]
    first.leave(100)
    first.enter(50)
    second.enter()
    assert calls_in(memory) == [call(2, 3, 4, 100, 50, job="j17"), call(0, 1, 1, 0, 0)]
    assert (first.inside, first.position, first.in_hand) == (True, 100, 50)
    record.release(second)
    second.enter(7)
    assert calls_in(memory) == [call(2, 3, 4, 100, 50, job="j17")], "its entry is free"
    assert second.in_hand == 7


def test_the_first_row_in_hand_and_the_operator_that_has_it_are_read(
    shared: tuple[CrashRecord, mmap],
) -> None:
    record, memory = shared
    calls = record.claim(attempt())
    calls.note_first(77)
    calls.enter(2)
    assert [each.place for each in calls_in(memory)] == [-1], "it is not known"
    assert calls.go_in(0) == (0, 0, 0)
    before = calls.go_in(1, 5, 78)
    found = {"row": 77, "place": 1, "place_rows": 5, "place_row": 78}
    assert calls_in(memory) == [call(0, 0, 1, 0, 2).model_copy(update=found)]
    calls.go_back(before)
    found = {"row": 77, "place": 0}
    assert calls_in(memory) == [call(0, 0, 1, 0, 2).model_copy(update=found)]
    calls.leave(2)
    calls.enter()
    assert [each.row for each in calls_in(memory)] == [0], "it has no row in hand"


def test_attempts_that_take_turns_are_inside_one_after_the_other(shared: tuple[CrashRecord, mmap]) -> None:
    record, memory = shared
    first, second, third = (record.claim(attempt(0, index)) for index in range(3))
    turns = threading.Lock()
    for calls in (first, second, third):
        calls.take_turns(turns)
    other = record.claim(attempt(1))
    seen: list[list[int]] = []

    def run() -> None:
        second.enter(5)
        second.enter(5)
        seen.append([each.index for each in calls_in(memory) if each.operator == 0])
        record.release(second)

    first.enter(1)
    other.enter(1)
    thread = threading.Thread(target=run)
    thread.start()
    assert [(each.operator, each.index) for each in calls_in(memory)] == [(0, 0), (1, 0)]
    state = first.pause()
    thread.join()
    assert seen == [[1]]
    first.resume(state)
    assert [(each.operator, each.index) for each in calls_in(memory)] == [(0, 0), (1, 0)]
    first.leave(1)
    third.enter()
    record.release(third)
    first.enter()
    record.release(first)


def test_waits_are_outside_unless_another_thread_runs_user_code(shared: tuple[CrashRecord, mmap]) -> None:
    record, memory = shared
    calls = record.claim(attempt())
    calls.enter(5)
    before = calls.pause()
    assert calls_in(memory) == []
    calls.resume(before)
    assert calls_in(memory) == [call(0, 0, 1, 0, 5)]
    calls.leave(5)
    calls.resume(calls.pause())
    assert calls_in(memory) == [], "it was outside before the wait"
    calls.run_on()
    calls.enter(3)
    calls.leave(3)
    calls.pause()
    assert calls_in(memory) == [call(0, 0, 1, 8, 0)]


def test_an_entry_is_used_again_and_too_many_are_private(
    shared: tuple[CrashRecord, mmap],
) -> None:
    record, memory = shared
    entries = [record.claim(attempt(0, index)) for index in range(crashrecord.ENTRIES + 1)]
    for each in entries:
        each.enter(1)
    assert [each.index for each in calls_in(memory)] == list(range(crashrecord.ENTRIES))
    record.release(entries[-1])
    record.release(entries[5])
    record.claim(attempt(1, 1)).enter(2)
    assert calls_in(memory)[5] == call(1, 1, 1, 0, 2)


def test_a_worker_that_ends_by_itself_says_so(shared: tuple[CrashRecord, mmap]) -> None:
    record, memory = shared
    assert record.is_read and not is_leaving(memory)
    record.leave()
    assert is_leaving(memory)


def test_without_a_launcher_a_task_still_knows_what_it_has_in_hand() -> None:
    record = CrashRecord()
    calls = record.claim(attempt())
    calls.enter(9)
    record.leave()
    record.release(calls)
    assert not record.is_read
    assert (calls.inside, calls.in_hand) == (True, 9)
    assert not TaskCalls.private().inside


def test_a_descriptor_of_something_else_is_refused() -> None:
    descriptor = os.memfd_create("short")
    try:
        with pytest.raises(OSError, match=r"."):
            CrashRecord(descriptor)
        with pytest.raises(OSError, match=r"."):
            CrashRecord(2**20)
    finally:
        os.close(descriptor)


def test_what_a_process_forks_writes_nothing_there(shared: tuple[CrashRecord, mmap]) -> None:
    record, memory = shared
    calls = record.claim(attempt())
    calls.enter(4)
    if (pid := os.fork()) == 0:
        calls.leave(4)
        record.claim(attempt(5, 5)).enter(1)
        record.leave()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert calls_in(memory) == [call(0, 0, 1, 0, 4)] and not is_leaving(memory)


class Looking:
    """A sink that looks each time that it is called."""

    def open(self, context: TaskContext) -> None:
        look(None)

    def write(self, batch: Batch) -> None:
        look(None)

    def close(self) -> None:
        look(None)


def look(row: Any) -> Any:
    SEEN.append(calls_in(MEMORY[0]))
    return row


async def test_a_task_writes_what_it_has_in_hand(site: Site, shared: tuple[CrashRecord, mmap]) -> None:
    record, memory = shared
    site.deployment.services = replace(site.deployment.services, record=record)
    SEEN.clear()
    MEMORY[:] = [memory]
    await site.run(Stream.items(range(100)).map(look).collect())
    assert len(SEEN) == 100 and all(len(found) == 1 for found in SEEN)
    for row, (seen,) in enumerate(SEEN):
        assert (seen.job, seen.operator, seen.index, seen.attempt) == ("j1", 0, 0, 1)
        assert seen.position <= row < seen.position + seen.rows
    assert SEEN[-1][0].position > 0
    assert calls_in(memory) == [], "the task has ended"


async def test_a_task_is_inside_user_code_while_its_functions_are_opened_and_closed(
    site: Site, shared: tuple[CrashRecord, mmap]
) -> None:
    record, memory = shared
    site.deployment.services = replace(site.deployment.services, record=record)
    SEEN.clear()
    MEMORY[:] = [memory]
    await site.run(Stream.items([1]).to(Looking()))
    assert [(each.position, each.rows) for found in SEEN for each in found] == [(0, 0), (0, 1), (1, 0)]
