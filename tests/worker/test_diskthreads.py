"""Reads from disk do not run on the loop, and what they find, or why they find nothing, comes back there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.errors import PartitionLost, ResourceExhausted, ShuffleError
from minishuffle.worker.diskthreads import DiskThreads
from minishuffle.worker.tasks.handoff import LoopInbox

if TYPE_CHECKING:
    from conftest import Site, Turns


class Run:
    """Reads of one worker, and what the loop was told."""

    def __init__(self, turns: Turns, inbox: LoopInbox) -> None:
        self.threads = DiskThreads(inbox)
        self.told: list[tuple[object, str]] = []
        self._turns = turns

    def done(self, found: object) -> None:
        self.told.append((found, threading.current_thread().name))

    def finish(self) -> None:
        """What was asked for has been read, and the loop takes its turn."""
        self.threads._threads.shutdown(wait=True)
        self._turns.turn()


@pytest.fixture
def run(turns: Turns, inbox: LoopInbox) -> Run:
    return Run(turns, inbox)


def fail(error: Exception) -> str:
    raise error


def test_a_thread_reads_and_the_loop_is_told(run: Run) -> None:
    names: list[str] = []
    run.threads.run(lambda: names.append(threading.current_thread().name), run.done)
    run.finish()
    assert [name.startswith("disk") for name in names] == [True]
    assert run.told == [(None, threading.current_thread().name)]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PartitionLost("block 3"), PartitionLost, "block 3"),
        (MemoryError("no more"), ResourceExhausted, "a read from disk failed: MemoryError: no more"),
    ],
)
def test_whoever_waits_hears_of_every_failure(
    error: Exception, kind: type[ShuffleError], text: str, run: Run
) -> None:
    run.threads.run(lambda: fail(error), run.done)
    run.finish()
    ((found, _),) = run.told
    assert isinstance(found, kind)
    assert str(found) == text


def test_a_worker_that_ends_reads_nothing_more_and_closes_its_files(
    run: Run, turns: Turns, tmp_path: Path
) -> None:
    one, two, three = (os.open(tmp_path, os.O_RDONLY) for _ in range(3))
    run.threads.close_file(one)
    assert os.fstat(one), "the loop has a thread do it"
    turns.turn()
    run.threads.close_file(three)
    run.threads.close()
    run.threads.close_file(two)
    run.threads.run(lambda: fail(AssertionError()), run.done)
    run.finish()
    ((found, _),) = run.told
    assert isinstance(found, ResourceExhausted) and "nothing can be read from disk" in str(found)
    for number in (one, two, three):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


async def test_a_side_that_is_kept_on_disk_is_not_read_on_the_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, readers, real = threading.current_thread(), set[threading.Thread](), os.pread

    def pread(number: int, size: int, at: int) -> bytes:
        readers.add(threading.current_thread())
        return real(number, size, at)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(limits, "KEPT_MEMORY_BYTES", 0)
    small = Stream.items([{"k": k, "name": f"name {k}"} for k in range(50)])
    large = Stream.items([{"k": n % 50, "n": n} for n in range(2_000)])
    outcomes = await site.run(large.broadcast_join(small, "k").collect(), parallelism=2)
    assert {outcome.state for outcome in outcomes} == {"finished"}
    assert len(site.rows) == 2_000 and {row["name"] for row in site.rows} == {f"name {k}" for k in range(50)}
    assert loop not in readers and any(each.name.startswith("disk") for each in readers)
