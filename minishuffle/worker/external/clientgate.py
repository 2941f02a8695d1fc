"""Channels that external clients write into: a gate whose channels are the splits of a source.

A partition of a write is a split with a name. A program may try to write it several times; its rows are read
once. If the link of an attempt breaks, or a newer attempt supersedes it, the channel ends after the elements
that arrived completely. Elements that the task has read by then count, and the next attempt continues after
them.

The next attempt of the task itself continues there as well, if tasks restart: leases and positions are those
of every source (:class:`~minishuffle.worker.sources.leases.SourceLeases`). The position of a partition is a
checksum, by which its writer finds that it brings the same rows again. A partition is complete, and its
program gets the receipt, once the coordinator knows its end. In a job that loses nothing positions are in the
snapshots of the task, and the receipt follows once no next attempt begins before the end, and the whole job
does not go back to before it: programs send again what came behind the snapshot with which the task goes on.
Event time does not wait for the receipt, nor does a commit fail that comes before it: it waits.

So that a writer has whatever may be asked for again, it keeps what it has sent until it hears that the rows
are stable, as the partitions of tasks do (``Stable``). At its bound it waits. At half of that snapshots are
begun for it: what was taken of a partition is counted here for that, and marked every WRITER_MARK_BYTES. How
much a writer keeps of what came before the attempt of the task is not known here; so a durable snapshot is
begun for that, too.

What other sources do not have is the channels: credit, a link that breaks while the task goes on, and
attempts of a program that supersede each other.

Event time waits for open writes. If the number of partitions is known, each is a split from the beginning of
the write. If not, a single split stands for all partitions that have not begun, until the write ends. A
subtask without partitions has no split and is idle. If the program of a write may be gone, its splits are
closed until it reconnects; its rows may then be late.

The stream may end while programs write. What was let in by then is read to its end: in a job that loses
nothing also over the next link, or by the next attempt of the task, which hears what was let in before. It
does not wait for a program that may be gone.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from minishuffle.errors import PeerLost, ShuffleError, Superseded, UsageError
from minishuffle.exchange.channels import Attachment, InputChannel
from minishuffle.exchange.elements import Assembler
from minishuffle.exchange.gate import Element, InputGate, SplitChange, SplitChannels
from minishuffle.exchange.rownumbers import NO_VERSION, ChannelRows
from minishuffle.limits import WRITER_MARK_BYTES, WRITER_UNSTABLE_BYTES_MAX
from minishuffle.wire.clients import partition_split, write_and_partition
from minishuffle.wire.packed import Cursor, SplitPosition
from minishuffle.worker.sources.leases import SourceLeases

__all__ = ["UPSTREAM_EDGE", "Progress", "UpstreamChannel", "UpstreamGate"]

UPSTREAM_EDGE = 0xFFFF_FFFF
"""The edge in a PartitionRequest to a program that writes: no edge of the graph."""
NO_SPLIT = -1
_POSITION: Final = struct.Struct(">QI")
"""The position of a split: ``base`` and ``checksum`` of :class:`Progress`."""


@dataclass(slots=True)
class Progress:
    """Progress of a partition of a write; ``rows`` and ``checksum`` are written by the task."""

    name: str = ""
    """Name of the split."""
    split: int = NO_SPLIT
    """Number of the split, unique among all writes of this gate."""
    rows: int = 0
    checksum: int = 0
    """CRC-32 of the payloads of the elements that these rows came in, from row ``base`` on."""
    base: int = 0
    """Rows below are not read again, even if an earlier attempt of the task has lost them."""
    attempt: int = -1
    connection: int = 0
    """How often the program of that attempt has lost its connection."""
    ended: bool = False
    """Its end was read."""
    complete: bool = False
    """It has its receipt, or may have it: nothing begins before its end any more."""
    opened: bool = False
    """An attempt was let in, here or before this attempt of the task."""
    expected: bool = False
    """The attempt was let in, and its program has yet to come."""
    bytes: int = 0
    """Taken by this attempt of the task, which writes it."""
    marked: int = 0
    """``bytes`` at the last mark."""
    stable: int = 0
    """Rows below are never asked for again: nothing begins before them."""
    stable_bytes: int = 0
    """``bytes`` at that row."""
    channel: UpstreamChannel | None = None
    """The channel of the attempt that writes now."""
    waiting: list[Callable[[Progress], None]] = field(default_factory=list)
    """Called when that channel has ended."""

    @classmethod
    def resumed(cls, entry: SplitPosition, cursor: Cursor) -> Progress:
        """As an earlier attempt of the task has reported it. What lies in a lease may have been read or not:
        nothing is known of the rows below its end any more."""
        base, checksum = _POSITION.unpack(cursor.position)
        if entry.end > cursor.rows:
            base, checksum = entry.end, 0
        progress = cls(cursor.name, entry.split, entry.end, checksum, base)
        progress.ended = entry.done
        return progress

    def cursor(self, rows: int = 0, checksum: int | None = None) -> Cursor:
        """Behind ``rows`` more, after which the checksum is this one."""
        checksum = self.checksum if checksum is None else checksum
        return Cursor(self.name, _POSITION.pack(self.base, checksum), self.rows + rows)


@dataclass(slots=True)
class _Write:
    partitions: dict[int, Progress] = field(default_factory=dict)
    """The known partitions of this subtask."""
    rest: int = NO_SPLIT
    """The split for all partitions that have not begun, if the number of partitions is not known."""
    ended: bool = False
    idle: bool = False
    """Its program may be gone: event time does not wait for it."""
    begun: bool = False
    """The number of partitions for this subtask is known, or is known to be unknown."""


class UpstreamChannel(InputChannel):
    """An attempt to write a partition. A broken link ends the channel and not the task."""

    def __init__(
        self,
        gate: InputGate,
        write: _Write,
        progress: Progress,
        disconnect: Callable[[ShuffleError], None],
    ) -> None:
        super().__init__(progress.split, 0, Assembler(gate.budget), gate.buffers, gate.ready)
        self.write = write
        self.progress = progress
        self.disconnect = disconnect
        """Closes the program's link. Only a channel that was read to its end is cancelled; this is the
        program's receipt."""

    def detach(self, error: ShuffleError | None = None) -> None:
        super().detach(error)
        if error is not None:
            self.disconnect(error)

    def end(self, attachment: Attachment) -> None:
        """The gate closes the channel, which is the receipt, once the end counts."""

    def be_stable(self, rows: int) -> None:
        """(Loop.) The writer need not keep the rows below that number; it hears so when it has answered."""
        self.make_stable(ChannelRows(self.producer, NO_VERSION, rows))

    def cut(self) -> None:
        """(Loop.) Take nothing more from this attempt; what is queued is still read."""
        self.disconnect(PeerLost("a newer attempt took the partition over"))


class UpstreamGate:
    """The writes of external clients into a subtask, and the gate for them, the only gate of the task: a
    :class:`SplitChannels`.

    Args:
        make_gate: returns the gate for given channels.
        post: runs a call on the loop.
        leases: None: the task never restarts.
        moved: called on the loop with positions for the coordinator.
        resumed: the positions reported by an earlier attempt of the task; None: :meth:`resume` tells them.
    """

    rate: Final = None

    def __init__(
        self,
        make_gate: Callable[[SplitChannels], InputGate],
        leases: SourceLeases,
        *,
        post: Callable[..., None],
        clock: Callable[[], float],
        resumed: Iterable[SplitPosition] | None = (),
    ) -> None:
        self.changes: deque[SplitChange] = deque()
        self.positions: dict[int, int] = {}
        """Where this attempt of the task begins in each split; set before anything of it is read."""
        self.cursors: dict[int, Cursor] = {}
        self.current = NO_SPLIT
        self.cursor: Cursor | None = None
        self._leases = leases
        self._clock = clock
        self._splits = 0
        """The number of the next one."""
        self._open_splits: set[int] = set()
        self._post = post
        self._ended = self._is_over = False
        """The stream has ended, and nothing that was let in is awaited any more."""
        self._writes: dict[str, _Write] = {}
        self._is_resumed = False
        self._early: list[Callable[[], None]] = []
        """Calls that wait for :meth:`resume`."""
        self._unsettled: list[tuple[str, list[int], Callable[[], None]]] = []
        """Arguments of :meth:`once_settled`."""
        self.gate = make_gate(self)
        if resumed is not None:
            self.resume(resumed)

    def _resume(self, progress: Progress) -> None:
        write, partition = write_and_partition(progress.name)
        self._writes.setdefault(write, _Write()).partitions[partition] = progress
        self._splits = max(self._splits, progress.split + 1)
        if progress.ended:
            self._leases.read_before(partial(self._complete, progress, progress.rows))
            return
        if progress.rows and self._leases.is_held:
            self._leases.read_before(partial(self._make_stable, progress, progress.rows, 0))
        self._open_partition(progress)

    # --- task ------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """The stream has ended, and all is read that was let in before."""
        return self._is_over

    def polled(self, element: Element | None) -> None:
        """Wait until the coordinator knows that the element may be taken, and count it."""
        if element is None:
            self._leases.look(self._clock())
            return
        channel = element.channel
        assert isinstance(channel, UpstreamChannel)
        progress = channel.progress
        checksum = zlib.crc32(element.payload, progress.checksum)
        self.current, self.cursor = progress.split, progress.cursor(element.rows, checksum)
        self._leases.take(element.rows, self._clock())
        progress.rows, progress.checksum = progress.rows + element.rows, checksum
        progress.ended = False  # An attempt after one that had ended brings more.
        if self._leases.is_held:
            progress.bytes += len(element.payload)
            if progress.bytes - progress.marked >= WRITER_MARK_BYTES:
                self._mark(progress)

    def _mark(self, progress: Progress) -> None:
        """Have its writer hear when what was taken so far is stable."""
        progress.marked = progress.bytes
        is_urgent = progress.bytes - progress.stable_bytes >= WRITER_UNSTABLE_BYTES_MAX // 2
        receipt = partial(self._make_stable, progress, progress.rows, progress.bytes)
        self._leases.mark(receipt, is_urgent=is_urgent)

    @property
    def upcoming(self) -> Iterator[int]:
        """The splits that are written now."""
        channels = [channel for channel in self.gate.channels if isinstance(channel, UpstreamChannel)]
        return (channel.progress.split for channel in channels if not channel.progress.ended)

    def over(self, channel: InputChannel) -> None:
        assert isinstance(channel, UpstreamChannel)
        progress = channel.progress
        if not channel.ended or progress.complete:
            self._post(self._close_channel, channel)
            return
        if not progress.ended:
            progress.ended = True
            self._leases.end(progress.split, partial(self._complete, progress, progress.rows))
        self._post(self._close_split, progress.split)
        self._leases.look(self._clock())

    def snapshot(self) -> list[SplitPosition]:
        known = [each for write in list(self._writes.values()) for each in list(write.partitions.values())]
        return [SplitPosition(each.split, each.rows, 0, each.ended, each.cursor()) for each in known]

    # --- loop ------------------------------------------------------------------------------------

    def resume(self, positions: Iterable[SplitPosition]) -> None:
        for entry in positions:
            if entry.cursor is not None:
                self._resume(Progress.resumed(entry, entry.cursor))
        self._leases.begin(self, self._clock(), guesses=True)
        self._is_resumed = True
        early, self._early = self._early, []
        for call in early:
            call()

    def once_resumed(self, call: Callable[[], None]) -> None:
        """Have that called, now or once it is known where the task goes on."""
        if self._is_resumed:
            call()
        else:
            self._early.append(call)

    def begin(
        self, write: str, mine: range | None, *, idle: bool = False, opened: Iterable[int] = ()
    ) -> None:
        """Begin a write: the watermark waits for all its partitions of this subtask. ``mine``: their numbers;
        None: not known. ``opened``: those that were let in before. May be called again, also when the write
        becomes ``idle`` or no longer is."""
        known = self._writes.setdefault(write, _Write())
        for number in opened:
            self._add_partition(write, known, number)
            known.partitions[number].opened = True
        if known.begun and known.idle == idle:
            return
        if not known.begun:
            known.begun = True
            if mine is None:
                known.rest = self._next_split()
                self._open_split(known.rest)
            else:
                for number in mine:
                    self._add_partition(write, known, number)
                self._say_if_none(known)
        if known.idle != idle:
            self._set_idle(known, idle)
        self._look_at_end()
        self.gate.wake()

    def forget(self, write: str) -> None:
        """A write has ended, and no method will be called with it any more."""
        known = self._writes.pop(write, _Write())
        for progress in known.partitions.values():
            self.positions.pop(progress.split, None)
            self.cursors.pop(progress.split, None)

    def keep(self, known: Collection[str]) -> None:
        """Forget all writes but these that an earlier attempt had begun: they have ended meanwhile, and event
        time waits for none of them."""
        for write in [each for each, has in self._writes.items() if not has.begun and each not in known]:
            for progress in self._writes[write].partitions.values():
                self._close_split(progress.split)
            self.forget(write)

    def _set_idle(self, known: _Write, idle: bool) -> None:
        known.idle = idle
        silent = [each for each in known.partitions.values() if not each.ended and each.channel is None]
        for split in [known.rest, *(each.split for each in silent)]:
            if idle:
                self._close_split(split)
            elif split != NO_SPLIT and not known.ended:
                self._open_split(split)

    def connected(self) -> list[str]:
        """The writes that a program is connected for."""
        return [
            write
            for write, known in self._writes.items()
            if any(each.channel is not None for each in known.partitions.values())
        ]

    def _add_partition(self, write: str, known: _Write, number: int) -> None:
        if number not in known.partitions:
            progress = Progress(partition_split(write, number), self._next_split())
            known.partitions[number] = progress
            self._open_partition(progress)

    def _open_partition(self, progress: Progress) -> None:
        self._open_split(progress.split)
        self._begin_at(progress)

    def _begin_at(self, progress: Progress) -> None:
        self.positions[progress.split], self.cursors[progress.split] = progress.rows, progress.cursor()

    def expect(
        self,
        write: str,
        partition: int,
        attempt: int,
        ready: Callable[[Progress], None],
        *,
        connection: int = 0,
        sent: int = -1,
    ) -> None:
        """A new attempt at a partition; ``ready`` is called once nothing more comes of older ones.

        ``connection`` and ``sent``: see ``OpenUpstream``.

        Raises:
            Superseded: a newer attempt writes now.
            PeerLost: this very attempt does, over a connection that did not end yet.
            UsageError: the write has ended without that partition.
        """
        self.begin(write, None)
        known = self._writes[write]
        if not known.ended:
            self._add_partition(write, known, partition)
        progress = known.partitions.get(partition)
        if progress is not None and progress.complete:
            ready(progress)
            return
        if progress is None or known.ended:
            raise UsageError(f"write {write} has ended without partition {partition}: save again")
        name = f"attempt {attempt} of partition {partition} of write {write}"
        self._check_newer(progress, (attempt, connection), name)
        is_first = progress.attempt < 0
        progress.attempt, progress.connection = attempt, connection
        progress.expected = progress.opened = True
        if is_first and 0 <= sent < progress.rows == progress.base:
            # The lease of an earlier attempt of the task ended further on, but these rows were never sent.
            progress.rows = progress.base = sent
            self._begin_at(progress)
        if progress.channel is None:
            ready(progress)
        else:
            progress.waiting.append(ready)
            progress.channel.cut()

    @staticmethod
    def _check_newer(progress: Progress, number: tuple[int, int], name: str) -> None:
        """``number``: the attempt, and how often it has lost its connection."""
        if progress.expected or progress.channel is not None:
            if number[0] < progress.attempt:
                raise Superseded(f"{name} comes too late: attempt {progress.attempt} writes it now")
            if number <= (progress.attempt, progress.connection) and progress.channel is not None:
                raise PeerLost(f"{name} comes twice: number each attempt higher than those before it")

    def _next_split(self) -> int:
        """The next attempt of the task has the same numbers for the splits that were reported."""
        split, self._splits = self._splits, self._splits + 1
        return split

    def _open_split(self, split: int) -> None:
        self._open_splits.add(split)
        self.changes.append((split, "open"))

    def _close_split(self, split: int) -> None:
        if split in self._open_splits:
            self._open_splits.remove(split)
            self.changes.append((split, "done"))

    def _say_if_none(self, known: _Write) -> None:
        """Nothing of that write comes here: nobody waits for this subtask, if nothing of others does."""
        if not known.partitions and not self._open_splits:
            self.changes.append((NO_SPLIT, "none"))

    def open_channel(
        self,
        write: str,
        partition: int,
        attempt: int,
        disconnect: Callable[[ShuffleError], None] = lambda error: None,
    ) -> UpstreamChannel:
        """The channel of an attempt whose client has come; ``disconnect`` ends the client's link.

        Raises:
            Superseded: a newer one has come meanwhile.
            UsageError: the write has ended.
        """
        known = self._writes[write]
        progress = known.partitions[partition]
        if known.ended:
            raise UsageError(f"write {write} has ended without partition {partition}: save again")
        if progress.attempt != attempt or progress.channel is not None:
            raise Superseded(f"a newer attempt than {attempt} writes partition {partition} of {write}")
        channel = UpstreamChannel(self.gate, known, progress, disconnect)
        progress.channel, progress.expected = channel, False
        self.gate.channels.append(channel)
        if progress.stable:
            channel.be_stable(progress.stable)
        return channel

    def stable(self, progress: Progress) -> int:
        """The rows of a partition that its writer need not keep; -1: it is not told which."""
        return progress.stable if self._leases.is_held else -1

    def _make_stable(self, progress: Progress, rows: int, size: int) -> None:
        """Nothing begins before so many rows of a partition any more, of which so many bytes were taken in
        this attempt of the task."""
        progress.stable, progress.stable_bytes = rows, size
        if progress.channel is not None:
            progress.channel.be_stable(rows)

    def _complete(self, progress: Progress, rows: int) -> None:
        """Nothing begins before the end of a partition any more, which was read behind so many rows."""
        if not progress.ended or progress.rows != rows:
            return
        progress.complete = True
        self._close_split(progress.split)
        if (channel := progress.channel) is not None and channel.ended:
            self._close_channel(channel)
        self._look_at_end()
        unsettled, self._unsettled = self._unsettled, []
        for each in unsettled:
            self.once_settled(*each)

    def _close_channel(self, channel: UpstreamChannel) -> None:
        progress = channel.progress
        if channel not in self.gate.channels:
            return
        if progress.complete or channel.write.ended:
            self._close_split(progress.split)
        channel.close()
        self.gate.channels.remove(channel)
        if progress.channel is channel:
            progress.channel = None
        waiting, progress.waiting = progress.waiting, []
        for ready in waiting:
            ready(progress)
        self.gate.wake()

    def close(self) -> None:
        """The task is terminal; idempotent."""
        for channel in list(self.gate.channels):
            assert isinstance(channel, UpstreamChannel)
            channel.disconnect(PeerLost("the task that reads the stream has ended"))
        self.gate.close()

    def once_settled(self, write: str, partitions: list[int], call: Callable[[], None]) -> None:
        """Have that called once none of these partitions of a write waits for its receipt."""
        known = self._writes.get(write, _Write()).partitions
        if any((each := known.get(number)) and each.ended and not each.complete for number in partitions):
            self._unsettled.append((write, partitions, call))
        else:
            call()

    def end_write(self, write: str, partitions: list[int]) -> list[int]:
        """No further partition of a write begins; the watermark waits for none.

        Gives those of ``partitions`` that are not complete: then nothing has ended.
        """
        known = self._writes.get(write, _Write())
        complete = {number for number, progress in known.partitions.items() if progress.complete}
        missing = [number for number in partitions if number not in complete]
        if not missing and not known.ended and write in self._writes:
            known.ended = True
            self._close_split(known.rest)
            for progress in known.partitions.values():
                if progress.channel is None:
                    self._close_split(progress.split)
            self._say_if_none(known)
            self._look_at_end()
            self.gate.wake()
        return missing

    def end(self) -> None:
        """The stream has ended: nothing more is let in for the first time."""
        self._ended = True
        self._look_at_end()
        self.gate.wake()

    def _look_at_end(self) -> None:
        """Note whether the stream has ended, and nothing is awaited behind that (any more)."""
        self._is_over = self._ended and not (
            self._leases.is_held
            and any(
                each.opened and not each.complete
                for write in self._writes.values()
                if not (write.ended or write.idle)
                for each in write.partitions.values()
            )
        )
