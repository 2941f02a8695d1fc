"""Holders of snapshots, with their threads: what they keep, and what the next attempt of a task reads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import PartitionLost, PeerLost
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.elements import ElementFormat, Part, with_header
from minishuffle.exchange.elementstore import ElementStore
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retention import RetainedStore
from minishuffle.ids import AttemptId, PartitionId, holder_operator, snapshot_edge, state_edge
from minishuffle.wire.messages import HolderSpec
from minishuffle.wire.reports import SnapshotsHeld
from minishuffle.worker.instructions import Fence, StartHolder
from minishuffle.worker.tasks.handoff import TaskPaths
from minishuffle.worker.tasks.snapshotholder import SnapshotHolder, snapshot_memory
from minishuffle.worker.tasks.snapshotstream import SnapshotMarker, SnapshotWriter
from minishuffle.worker.tasks.statehandover import StateInput

if TYPE_CHECKING:
    from conftest import Site

OPERATOR, INDEX = 3, 1
STREAM = PartitionId("j1", snapshot_edge(OPERATOR), INDEX)  # type: ignore[arg-type]


def elements(text: str, count: int = 3) -> list[list[Part]]:
    """A snapshot of that text, once in each element."""
    return [with_header(1, ElementFormat.STATE, [text.encode()]) for _ in range(count)]


class SnapshotTask:
    """The task's end of a stream."""

    def __init__(self, site: Site, attempt: int = 1, holder: int = 0) -> None:
        self.attempt = attempt
        self.said: list[Any] = []
        """What was acknowledged: numbers, with those that are kept; or that there is another holder."""
        self.paths = TaskPaths(site.inbox)
        services = site.deployment.services
        store = RetainedStore(
            services.retained,
            lambda: ElementStore("snapshots", services.place),
            keep_bytes=0,
            wake=self.paths.bell.ring,
        )
        self.writer = SnapshotWriter(
            lambda stable, fenced: RetainedPartition(
                STREAM,
                range(INDEX, INDEX + 1),
                self.paths.notify,
                TaskCounters(),
                store,
                version=attempt,
                wait=self.paths.wait_until,
                wake=self.paths.bell.ring,
                flushing=Flush.AT_ONCE,
                capacity=services.pool.segment_bytes,
                unread_bytes=None,
                disk=services.disk,
                fenced=fenced,
                on_stable=stable,
            ),
            lambda: ElementStore("copies", services.place, memory_bytes=1 << 20),
            lambda number, keep: self.said.append((number, list(keep))),
            lambda: self.said.append("another holder"),
            holder,
        )

    def write(self, number: int, keep: list[int], count: int = 3) -> None:
        sizes = list(self.writer.write(number, elements(f"{self.attempt}:{number}", count), keep))
        assert len(sizes) == count and all(sizes)


class Held:
    """A holder on the site, with what it is attached to."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.generation = 0
        self.tasks: list[SnapshotTask] = []

    def start(self, number: int = 1, task_attempt: int = 1) -> SnapshotHolder:
        key = AttemptId.of("j1", holder_operator(OPERATOR), INDEX, number)
        spec = HolderSpec(
            operator=OPERATOR, index=INDEX, attempt=number, task_attempt=task_attempt, task_worker=2
        )
        self.site.deployment.hold(StartHolder(key, spec))
        self.generation = 0
        return self.site.deployment.holders[key]

    def task(self, attempt: int = 1, holder: int = 0) -> SnapshotTask:
        self.tasks.append(SnapshotTask(self.site, attempt, holder))
        return self.tasks[-1]

    def attach(self, holder: SnapshotHolder, task: SnapshotTask) -> None:
        self.generation += 1
        subpartition = task.writer.partition.subpartitions[0]
        holder.channel.attach_local(
            subpartition,
            self.generation,
            lambda piece: None,
            attempt=holder.id.attempt,
            version=task.attempt,
        )

    def fence(self, holder: SnapshotHolder, attempt: int) -> None:
        """The coordinator names that attempt of the task."""
        consumer = AttemptId.of("j1", OPERATOR, INDEX, attempt)
        self.site.deployment.fence(Fence(holder.id, state_edge(OPERATOR), consumer))

    async def read(self, holder: SnapshotHolder, attempt: int = 2) -> str:
        """What the next attempt of the task gets."""
        paths, services = TaskPaths(self.site.inbox), self.site.deployment.services
        edge = state_edge(OPERATOR)
        read = StateInput(
            PartitionId("j1", edge, INDEX),  # type: ignore[arg-type]
            paths,
            services.budget,
            segment_bytes=services.pool.segment_bytes,
            store=ElementStore("state", services.place, memory_bytes=1 << 20),
            on_event=lambda generation, event: None,
            clock=lambda: 0.0,
        )
        partition = self.site.deployment.partition(holder.id, edge)
        assert partition is not None
        subpartition = partition.subpartition(INDEX)
        assert subpartition is not None
        read.channel.attach_local(subpartition, 1, lambda piece: None, attempt=attempt)
        found: list[str] = []

        def is_finished() -> bool:
            while (element := read.gate.poll()) is not None:
                found.append(bytes(element.payload).decode())
            return read.gate.finished

        await self.site.until(is_finished)
        read.gate.close()
        return " ".join(found)


@pytest.fixture
async def held(site: Site) -> AsyncIterator[Held]:
    held = Held(site)
    yield held
    holders = list(site.deployment.holders.values())
    site.deployment.release([each.id for each in holders])
    assert not site.deployment.holders and not site.deployment.snapshot_bytes
    await site.until(lambda: not any(each.thread.is_alive() for each in holders))
    for task in held.tasks:
        task.writer.partition.release(False)
    assert site.deployment.services.snapshots.used == 0
    assert site.deployment.services.retained.used == 0


async def test_the_oldest_snapshot_is_read_and_the_others_are_given_up(site: Site, held: Held) -> None:
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [0, 1])
    task.write(2, [0, 1, 2])
    await site.until(lambda: task.said == [(1, [0, 1]), (2, [0, 1, 2])])
    assert not site.held and await held.read(holder) == "", "what the task has begun with"
    task.writer.keep([1, 2])
    await site.until(lambda: task.said[2:] == [(0, [1, 2])])
    assert site.held == [SnapshotsHeld(attempt=holder.id)]
    assert await held.read(holder) == "1:1 1:1 1:1"
    task.write(3, [2, 3])
    await site.until(lambda: task.said[3:] == [(3, [2, 3])])
    assert await held.read(holder) == "1:2 1:2 1:2"
    assert len(site.held) == 1
    assert site.deployment.services.retained.used <= 2 * site.pool.segment_bytes, (
        "what was acknowledged is freed"
    )


async def test_an_attempt_goes_on_from_the_oldest_whatever_the_last_one_has_sent(
    site: Site, held: Held
) -> None:
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [1])
    task.write(2, [1, 2])
    await site.until(lambda: len(task.said) == 2)
    held.fence(holder, 2)
    task.writer.keep([2])  # it is still attached, and its worker does not know
    next_task = held.task(2)
    assert await held.read(holder) == "1:1 1:1 1:1"
    holder.channel.fail(held.generation, PeerLost("reset by peer"))
    held.attach(holder, next_task)
    next_task.write(1, [0, 1], count=1)
    await site.until(lambda: next_task.said == [(1, [0, 1])])
    assert len(task.said) == 2, "nothing was acknowledged to the attempt that was replaced"
    assert await held.read(holder, 3) == "1:1 1:1 1:1"
    next_task.writer.keep([1])
    await site.until(lambda: next_task.said[1:] == [(0, [1])])
    assert await held.read(holder, 3) == "2:1"


async def test_a_holder_whose_link_breaks_goes_on_where_it_was(site: Site, held: Held) -> None:
    holder, task = held.start(), held.task()
    held.attach(holder, task)

    def parts() -> Iterator[list[Part]]:
        first, *others = elements("1:1")
        yield first
        holder.channel.fail(held.generation, PeerLost("reset by peer"))
        held.attach(holder, task)
        yield from others

    assert len(list(task.writer.write(1, parts(), [1]))) == 3
    await site.until(lambda: task.said == [(1, [1])])
    assert await held.read(holder) == "1:1 1:1 1:1"
    assert holder.channel.rows.next == 4


async def test_a_snapshot_that_its_attempt_has_not_sent_to_the_end_is_dropped(site: Site, held: Held) -> None:
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [1])
    for element in elements("1:2", 2):
        task.writer.partition.write(0, 1, element)
    await site.until(lambda: holder.channel.rows.next == 6)
    held.fence(holder, 2)
    next_task = held.task(2)
    held.attach(holder, next_task)
    next_task.write(1, [0, 1])
    await site.until(lambda: next_task.said == [(1, [0, 1])])
    assert await held.read(holder, 3) == "1:1 1:1 1:1"
    next_task.writer.keep([1])
    await site.until(lambda: len(next_task.said) == 2)
    assert await held.read(holder, 3) == "2:1 2:1 2:1"


async def test_another_holder_has_nothing_of_what_was_acknowledged(site: Site, held: Held) -> None:
    first, task = held.start(), held.task()
    held.attach(first, task)
    task.write(1, [0, 1])
    task.writer.keep([1])
    await site.until(lambda: len(task.said) == 2)
    task.write(2, [1, 2], count=1)
    await site.until(lambda: len(task.said) == 3)
    task.writer.partition.fence(INDEX, 2)
    second = held.start(2)
    held.attach(second, task)
    task.write(3, [0, 3])
    await site.until(lambda: task.writer.partition.stable() == task.writer.partition.written())
    assert task.said[3:] == ["another holder"], "the task has yet to hear of it"
    assert await held.read(first) == "1:1 1:1 1:1", "it stays until it is released"
    assert [each.attempt for each in site.held] == [first.id], "though the second may have the first snapshot"
    task.writer.begin(elements("begun"))
    assert task.writer.send_again([0, 3])
    await site.until(lambda: len(site.held) == 2)
    assert site.held[1] == SnapshotsHeld(attempt=second.id)
    assert await held.read(second) == "begun begun begun"
    task.writer.keep([3])
    await site.until(lambda: task.said[-1] == (0, [3]))
    assert await held.read(second) == "1:3 1:3 1:3"


async def test_an_attempt_that_begins_elsewhere_is_not_held_by_one_that_has_not_had_all(
    site: Site, held: Held
) -> None:
    holder, task = held.start(2), held.task()
    held.attach(holder, task)
    task.write(1, [0, 1])
    await site.until(lambda: task.said == [(1, [0, 1])])
    held.fence(holder, 2)
    assert await held.read(holder) == "" and not site.held


async def test_another_holder_has_all_once_it_has_what_the_attempt_has_begun_with(
    site: Site, held: Held
) -> None:
    holder, task = held.start(2, task_attempt=2), held.task(2, holder=2)
    held.attach(holder, task)
    task.write(0, [0])
    await site.until(lambda: task.said == [(0, [0])])
    assert site.held == [SnapshotsHeld(attempt=holder.id)]
    held.fence(holder, 3)
    assert await held.read(holder, 3) == "2:0 2:0 2:0"


async def test_snapshots_beyond_the_memory_lie_on_disk(
    site: Site, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = site.deployment.services.snapshots
    monkeypatch.setattr(memory, "limit_bytes", 4096)
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    texts = ["a" * 3000, "b" * 3000]
    sent = task.writer.write(1, (with_header(1, ElementFormat.STATE, [each.encode()]) for each in texts), [1])
    assert all(size > 3000 for size in sent)
    await site.until(lambda: len(task.said) == 1)
    assert 3000 < memory.used <= 4096 and site.deployment.snapshot_bytes > 6000
    assert await held.read(holder) == " ".join(texts)
    task.writer.keep([])
    await site.until(lambda: site.deployment.snapshot_bytes == 0)
    assert memory.used == 0


async def test_a_full_disk_is_said_at_once_and_what_is_there_can_be_read(
    site: Site, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, is_full = os.pwrite, False

    def pwrite(file: int, data: Any, at: int) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(site.deployment.services.snapshots, "limit_bytes", 0)
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [1])
    await site.until(lambda: task.said == [(1, [1])])
    is_full = True
    task.write(2, [2])
    await site.until(lambda: len(site.held) == 2)
    assert site.held[1].readable and "No space left on device; make room there" in site.held[1].problem
    await site.until(lambda: not holder.thread.is_alive())
    assert task.said == [(1, [1])] and not task.writer.is_read
    assert await held.read(holder) == "1:1 1:1 1:1"
    assert caplog.text.count("No space") == 1 and "Traceback" not in caplog.text
    caplog.clear()  # of the error, and so of the file


async def test_a_snapshot_of_which_a_part_is_missing_is_not_acknowledged(
    site: Site, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the task takes it for safe, and its producers retain nothing that its next attempt needs."""
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [1])
    await site.until(lambda: task.said == [(1, [1])])
    for element in elements("1:2", 2):
        task.writer.partition.write(0, 1, element)
    marker = SnapshotMarker(2, 3, (2,), 1)
    task.writer.partition.write(0, 1, with_header(1, ElementFormat.SNAPSHOT, [marker.pack()]))
    await site.until(lambda: len(site.held) == 2)
    assert site.held[1].readable and site.held[1].problem == (
        "not all of snapshot 2 has come before the marker of 3 elements that wants it kept: another holder "
        "gets all snapshots again"
    )
    task.write(3, [3])
    await site.until(lambda: not holder.thread.is_alive())
    assert task.said == [(1, [1])] and await held.read(holder) == "1:1 1:1 1:1"
    assert caplog.text.count("not all of snapshot 2") == 1


async def test_a_marker_that_wants_a_snapshot_kept_which_never_came_is_not_acknowledged(
    site: Site, held: Held
) -> None:
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [1])
    await site.until(lambda: task.said == [(1, [1])])
    task.writer.keep([7])
    await site.until(lambda: len(site.held) == 2)
    assert site.held[1].problem.startswith("not all of snapshot 7 ") and task.said == [(1, [1])]
    assert await held.read(holder) == "1:1 1:1 1:1"


async def test_what_cannot_be_read_is_reported(site: Site, held: Held) -> None:
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.writer.partition.write(0, 1, with_header(1, ElementFormat.SNAPSHOT, [b"short"]))
    await site.until(lambda: len(site.held) == 1)
    assert site.held[0].attempt == holder.id and "error: unpack" in site.held[0].problem
    await site.until(lambda: not holder.thread.is_alive())


async def test_a_snapshot_that_its_disk_does_not_give_back_is_reported(
    site: Site, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each next attempt of the task would ask for it again."""
    monkeypatch.setattr(site.deployment.services.snapshots, "limit_bytes", 0)
    holder, task = held.start(), held.task()
    held.attach(holder, task)
    task.write(1, [1])
    await site.until(lambda: len(task.said) == 1)
    monkeypatch.setattr(os, "pread", lambda file, size, at: b"")
    with pytest.raises(PartitionLost, match="the file ends"):
        await held.read(holder)
    assert [each.attempt for each in site.held if each.problem] == [holder.id]
    assert "the file ends" in site.held[-1].problem
    caplog.clear()  # of the error, and so of the file


def test_by_default_snapshots_have_a_quarter_of_the_memory_but_no_more_than_a_bound() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < snapshot_memory("auto") <= min(memory // 4, limits.SNAPSHOT_MEMORY_BYTES_MAX)
    assert snapshot_memory(17) == 17
