"""The holder of a task's snapshots, which runs on another worker than the task.

To its worker it is an attempt with one input channel, over which the snapshots come, and one partition, from
which the next attempt of the task takes the oldest that is kept. There may be nothing to take: what the first
attempt begins with, and what a holder has that was named later. Snapshots lie in memory as long as those of
all holders of the worker have room there, and beyond that on disk.

A thread reads what comes and stores it. Which snapshots are kept is a matter of the loop: it takes those
that are whole, gives up what the task says need not be kept, and then acknowledges. Once the coordinator has
named another attempt of the task, nothing that an earlier one has sent is taken or acknowledged any more. So
what the other attempt reads stays as it is, and the earlier one, should it still run, cannot have its
producers give up what the other will ask for.

A holder that can take no more, since the disk is full or a snapshot has not come as a whole, says so and
reads nothing any more. What it has stays as it is, for a next attempt to go on from, until another has all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from functools import partial
from typing import Literal

from minishuffle import limits
from minishuffle.errors import (
    PartitionLost,
    RemoteProtocolError,
    ShuffleError,
    TaskCancelled,
    clipped,
    described,
)
from minishuffle.exchange.blocking import BlockingPartition
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.elements import ElementFormat, Part, pack_header
from minishuffle.exchange.elementstore import ElementStore
from minishuffle.exchange.rownumbers import ChannelRows
from minishuffle.ids import (
    FIRST_ATTEMPT,
    AttemptId,
    PartitionId,
    held_operator,
    snapshot_edge,
    state_edge,
)
from minishuffle.wire.reports import SnapshotsHeld
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.tasks.attempt import WorkerServices
from minishuffle.worker.tasks.handoff import WAIT_SECONDS_MAX, TaskPaths
from minishuffle.worker.tasks.snapshotstream import BEGUN, Arrival, SnapshotMarker, SnapshotStreamInput
from minishuffle.worker.tasks.statehandover import state_partition

__all__ = ["SnapshotHolder", "cannot_hold", "snapshot_memory"]

_log = logging.getLogger("minishuffle.worker")


def snapshot_memory(setting: int | Literal["auto"]) -> int:
    """Bytes of memory for the snapshots that a worker holds, as ``snapshot_memory_bytes`` says."""
    if setting != "auto":
        return setting
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // limits.SNAPSHOT_MEMORY_SHARE, limits.SNAPSHOT_MEMORY_BYTES_MAX)


def cannot_hold(holder: AttemptId, error: Exception, *, readable: bool = False) -> SnapshotsHeld:
    """The report of a holder that takes no more snapshots; whether what it has can be read."""
    problem = str(error) if isinstance(error, ShuffleError) else described(error)
    return SnapshotsHeld(
        attempt=holder, problem=clipped(problem, limits.LINK_ERROR_CHARS_MAX), readable=readable
    )


def _incomplete(missing: Collection[int], marker: SnapshotMarker) -> RemoteProtocolError:
    """The error for a marker that wants snapshots kept which the holder does not have."""
    numbers = ", ".join(map(str, sorted(missing)))
    return RemoteProtocolError(
        f"not all of snapshot {numbers} has come before the marker of {marker.elements} elements that wants "
        "it kept: another holder gets all snapshots again"
    )


class SnapshotHolder:
    """Holds the snapshots of one task; its thread runs from the beginning to :meth:`release`.

    Invariants: the latest attempt of the task that the coordinator has named has sent every snapshot that is
    kept, or has begun with it; none is given up before this attempt says so. A marker is acknowledged only if
    every snapshot that it wants kept is.

    Args:
        id: of the holder, see :func:`~minishuffle.ids.holder_operator`.
        task_attempt: the attempt of the task that sends first.

    Raises:
        ResourceExhausted: the system does not give the memory of its buffers.
        RuntimeError: there can be no further thread.
    """

    def __init__(self, id: AttemptId, task_attempt: int, services: WorkerServices) -> None:
        job, index = id.subtask.job, id.subtask.index
        operator = held_operator(id.subtask.operator)
        self.id = id
        self._services = services
        self._paths = TaskPaths(services.inbox)
        self._partition_id = PartitionId(job, state_edge(operator), index)
        stream = PartitionId(job, snapshot_edge(operator), index)
        self._input = SnapshotStreamInput(
            stream,
            self._paths,
            services.budget,
            segment_bytes=services.pool.segment_bytes,
            on_event=partial(services.channel_event, ChannelKey(id, stream.edge, index)),
        )
        # The loop's.
        self._attempt = task_attempt
        self._stopped = False
        """Nothing is taken any more."""
        self._nothing = self._make_partition()
        self._nothing.finish()
        self._kept = {BEGUN: self._nothing} if id.attempt == FIRST_ATTEMPT else dict[int, BlockingPartition]()
        """By number. The first holder of a task has what the task begins with, which is nothing."""
        self._has_all = bool(self._kept)
        """It has had all snapshots that are to be kept, and so has ever since. It says so once these are
        snapshots: a task may begin with the state of a savepoint, which is not here."""
        self._has_said_so = False
        # The thread's.
        self._coming: BlockingPartition | None = None
        """The part of a snapshot that has come."""
        self._next = (0, 0)
        """The attempt and row of the element that continues it."""
        self.thread = threading.Thread(
            target=self._run, name=f"{job}:snapshots of {operator}[{index}]", daemon=True
        )
        self.thread.start()

    def _make_partition(self) -> BlockingPartition:
        services = self._services
        store = ElementStore(
            f"a snapshot for {self._partition_id} on worker {services.worker}",
            services.place,
            memory=services.snapshots,
        )
        return state_partition(
            self._partition_id,
            store,
            capacity=services.pool.segment_bytes,
            disk=services.disk,
            lost=self._lose,
        )

    # --- thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        paths = self._paths
        try:
            while True:
                paths.check()
                paths.bell.clear()
                arrival = self._input.poll()
                if arrival is None:
                    paths.wait(WAIT_SECONDS_MAX)
                else:
                    self._take(arrival)
        except TaskCancelled:
            pass
        except Exception as error:  # whatever it is: the task gets another holder
            paths.post(self._stop, error)
        finally:
            self._drop_coming()

    def _take(self, arrival: Arrival) -> None:
        """An element that does not continue what has come is of another attempt, or follows a gap."""
        attempt, row, what = arrival
        if (attempt, row) != self._next:
            self._drop_coming()
        self._next = attempt, row + 1
        if isinstance(what, memoryview):
            if self._coming is None:
                self._coming = self._make_partition()
            parts: list[Part] = [pack_header(len(what), 1, ElementFormat.STATE), what]
            self._coming.write(0, 1, parts)
            return
        whole = self._take_whole(what)
        # Not by the paths, which drop what is said once they are closed: the snapshot is to be freed.
        self._services.inbox.post(self._on_marker, attempt, row + 1, what, whole)

    def _take_whole(self, marker: SnapshotMarker) -> BlockingPartition | None:
        """The snapshot that ends with that marker; None if it marks none, or not all of one has come."""
        coming, self._coming = self._coming, None
        if coming is None:
            if not marker.ends_one:
                return None
            coming = self._make_partition()
        (subpartition,) = coming.subpartitions
        if not marker.ends_one or len(subpartition.log.elements) != marker.elements:
            coming.release(False)
            return None
        coming.finish()
        return coming

    def _drop_coming(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.release(False)

    # --- loop ------------------------------------------------------------------------------------

    def _lose(self, error: PartitionLost) -> None:
        """One that is kept cannot be read."""
        _log.error("holder %s: %s", self.id, error)
        self._services.snapshots_held(cannot_hold(self.id, error))

    def _stop(self, error: Exception) -> None:
        """No more can be taken: the task needs another holder, and may go on from what is here until then."""
        expected = isinstance(error, ShuffleError)
        _log.warning("holder %s takes no more: %s", self.id, error, exc_info=None if expected else error)
        self._stopped = True
        self._paths.close()
        self._input.gate.close()
        self._services.snapshots_held(cannot_hold(self.id, error, readable=True))

    @property
    def channel(self) -> InputChannel:
        return self._input.channel

    @property
    def partition(self) -> BlockingPartition:
        """The oldest snapshot that is kept."""
        return self._kept[min(self._kept)] if self._kept else self._nothing

    @property
    def bytes(self) -> int:
        """The size of all snapshots that are kept, in memory and on disk."""
        return sum(each.subpartitions[0].log.bytes for each in self._kept.values())

    def _on_marker(
        self, attempt: int, end: int, marker: SnapshotMarker, whole: BlockingPartition | None
    ) -> None:
        """A marker has come, with the snapshot before it if that is whole; ``end`` is the row behind it."""
        if attempt < self._attempt or self._stopped:
            if whole is not None:
                whole.release(False)
            return
        self.fence(attempt)
        missing = set(marker.keep) - self._kept.keys() - {BEGUN}
        if whole is not None:
            missing.discard(marker.number)
        elif marker.ends_one:
            missing.add(marker.number)
        if missing and marker.holder == self.id.attempt:  # one that is for another may follow a gap
            self._stop(_incomplete(missing, marker))
            return
        if whole is not None:
            self._keep(self._kept.keys() - {marker.number})  # it may have come before
            self._kept[marker.number] = whole
        self._keep(marker.keep)
        self.channel.make_stable(ChannelRows(self._partition_id.producer, attempt, end))
        if marker.holder == self.id.attempt and self._kept.keys() == set(marker.keep):
            self._has_all = True
        has_begun = self._kept.get(BEGUN) is not self._nothing
        if self._has_all and has_begun and not self._has_said_so:
            self._has_said_so = True
            self._services.snapshots_held(SnapshotsHeld(attempt=self.id))

    def _keep(self, numbers: Collection[int]) -> None:
        for number in [number for number in self._kept if number not in numbers]:
            self._kept.pop(number).release(False)

    def fence(self, attempt: int) -> None:
        """The coordinator has named that attempt of the task, and earlier ones send no more. The attempt
        begins with the oldest snapshot here; if not all were here yet, with one of the holder before."""
        if attempt > self._attempt:
            self._attempt = attempt
            begun = self._kept.pop(min(self._kept)) if self._has_all and self._kept else None
            self._keep([])
            if begun is not None:
                self._kept[BEGUN] = begun
        self.partition.fence(self._partition_id.producer, attempt)

    def release(self) -> None:
        """Hold nothing any more; idempotent."""
        self._stopped = True
        self._paths.close()
        self._input.gate.close()
        self._keep([])
