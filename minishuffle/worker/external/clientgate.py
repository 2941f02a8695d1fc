"""Channels that external clients write into: a gate whose channels are the splits of a source.

Each (write, partition) is a unit that a program may try several times; its rows are read once. If the link
of an attempt breaks, or a newer attempt supersedes it, the channel ends after the elements that arrived
completely. Elements that the task has read by then count, and the next attempt continues after them.

The next attempt of the task itself continues there as well, if tasks restart: for the task, a partition is a
split of a source, and its positions are reported to the coordinator before rows are read
(:class:`~minishuffle.worker.sources.leases.WriteLeases`). A partition is complete, and its program gets the
receipt, once the coordinator knows its end.

Event time waits for open writes. If the number of partitions is known, each is a split from the beginning of
the write. If not, a single split stands for all partitions that have not begun, until the write ends. A
subtask without partitions has no split and is idle. If the program of a write may be gone, its splits are
closed until it reconnects; its rows may then be late.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minishuffle.errors import PeerLost, ShuffleError, Superseded, UsageError
from minishuffle.exchange.channels import Attachment, InputChannel
from minishuffle.exchange.elements import Assembler
from minishuffle.exchange.gate import Element, InputGate, SplitChange, SplitChannels
from minishuffle.limits import WRITES_KEPT
from minishuffle.wire.clients import ROWS_FORGOTTEN, query_and_batch
from minishuffle.wire.messages import WritePosition
from minishuffle.wire.packed import SplitPosition
from minishuffle.worker.sources.leases import WriteLeases

__all__ = ["UPSTREAM_EDGE", "Progress", "UpstreamChannel", "UpstreamGate"]

UPSTREAM_EDGE = 0xFFFF_FFFF
"""The edge in a PartitionRequest to a program that writes: no edge of the graph."""
NO_SPLIT = -1


@dataclass(slots=True)
class Progress:
    """Progress of a partition of a write; ``rows`` and ``checksum`` are written by the task."""

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
    """The coordinator knows of the end, if it is to be reported."""
    expected: bool = False
    """The attempt was let in, and its program has yet to come."""
    channel: UpstreamChannel | None = None
    """The channel of the attempt that writes now."""
    waiting: list[Callable[[Progress], None]] = field(default_factory=list)
    """Called when that channel has ended."""


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
        """Ends the program's link. Only a channel that was read to its end is cancelled: that is the
        program's receipt."""

    def detach(self, error: ShuffleError | None = None) -> None:
        super().detach(error)
        if error is not None:
            self.disconnect(error)

    def end(self, attachment: Attachment) -> None:
        """The gate closes the channel, which is the receipt, once the end counts."""

    def cut(self) -> None:
        """(Loop.) Take nothing more from this attempt; what is queued is still read."""
        self.disconnect(PeerLost("a newer attempt took the partition over"))


class UpstreamGate:
    """The writes of external clients into a subtask, and the gate for them, the only gate of the task: a
    :class:`SplitChannels`.

    Args:
        make_gate: gives the gate, whose channels this is to own.
        post: has a call run on the loop.
        leases: None: no attempt will ever take the place of this one.
        moved: called on the loop with positions that the coordinator is to have.
        resumed: what an earlier attempt of the task has reported.
    """

    def __init__(
        self,
        make_gate: Callable[[SplitChannels], InputGate],
        *,
        post: Callable[..., None],
        leases: WriteLeases | None = None,
        moved: Callable[[list[WritePosition]], None] = lambda positions: None,
        resumed: Iterable[WritePosition] = (),
    ) -> None:
        self.changes: deque[SplitChange] = deque()
        self._leases = leases
        self._moved = moved
        self._splits = 0
        self._open_splits: set[int] = set()
        self._post = post
        self._ended = False
        self._writes: dict[str, _Write] = {}
        self._forgotten: dict[str, int] = {}
        """By streaming query, the last complete batch that is not in ``_writes`` any more."""
        self._by_split: dict[int, tuple[str, int, Progress]] = {}
        """Write, partition and progress of each split that is reported."""
        self._ending: dict[int, UpstreamChannel] = {}
        """By split, channels whose end was read and is not reported yet; the task's."""
        self._receipts: deque[tuple[int, UpstreamChannel]] = deque()
        """Channels whose end was, and the number of the report that the coordinator must have first."""
        for entry in resumed:
            self._resume(entry)
        self.gate = make_gate(self)

    def _resume(self, entry: WritePosition) -> None:
        known = self._writes.setdefault(entry.write, _Write())
        progress = Progress(rows=entry.position, checksum=entry.checksum, base=entry.base)
        progress.ended = progress.complete = entry.done
        known.partitions[entry.partition] = progress
        if not entry.done:
            self._open_partition(entry.write, entry.partition, progress)

    # --- task ------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """The stream has ended."""
        return self._ended

    def polled(self, element: Element | None) -> None:
        """Wait until the coordinator knows that the element may be taken, and count it."""
        if element is not None:
            channel = element.channel
            assert isinstance(channel, UpstreamChannel)
            progress = channel.progress
            if self._leases is not None:
                self._leases.wait(progress.split, element.rows, self._send)
            progress.checksum = zlib.crc32(element.payload, progress.checksum)
            progress.rows += element.rows
            if self._leases is not None:
                self._leases.emit(progress.split, element.rows)
        self._look()

    def _look(self) -> None:
        """Report what is to be reported by now."""
        if self._leases is not None:
            self._send(self._leases.look(self._read_splits(), next(iter(self._ending), None)))

    def _read_splits(self) -> list[int]:
        channels = self.gate.channels
        progresses = [channel.progress for channel in channels if isinstance(channel, UpstreamChannel)]
        return [progress.split for progress in progresses if not progress.ended]

    def _send(self, positions: list[SplitPosition]) -> None:
        if positions and self._leases is not None:
            ended = [self._ending.pop(each.split) for each in positions if each.done]
            self._receipts.extend((self._leases.reports, channel) for channel in ended)
            self._post(self._moved, [self._position(each) for each in positions])

    def _position(self, at: SplitPosition) -> WritePosition:
        """As the coordinator knows it."""
        write, partition, progress = self._by_split[at.split]
        return WritePosition(
            write=write,
            partition=partition,
            position=at.position,
            lease=at.lease,
            base=progress.base,
            checksum=progress.checksum,
            done=at.done,
        )

    def over(self, channel: InputChannel) -> None:
        assert isinstance(channel, UpstreamChannel)
        if self._leases is None or not channel.ended:
            self._post(self._close_channel, channel)
            return
        progress = channel.progress
        progress.ended = True
        self._ending[progress.split] = channel
        self._leases.end(progress.split)
        self._look()

    # --- loop ------------------------------------------------------------------------------------

    def begin(self, write: str, mine: range | None, *, idle: bool = False) -> None:
        """A write begins: the watermark waits for all of its partitions that come here.

        ``mine``: their numbers; None: not known. May be called again, also because it has become ``idle``, or
        is so no more.
        """
        if self._was_forgotten(write):
            return
        if write not in self._writes:
            self._forget_writes()
        known = self._writes.setdefault(write, _Write())
        if known.begun and known.idle == idle:
            return
        if not known.begun:
            known.begun = True
            if mine is None:
                known.rest = self._open_split()
            else:
                for number in mine:
                    self._add_partition(write, known, number)
                self._say_if_none(known)
        if known.idle != idle:
            self._set_idle(known, idle)
        self.gate.wake()

    def _set_idle(self, known: _Write, idle: bool) -> None:
        known.idle = idle
        silent = [each for each in known.partitions.values() if not each.complete and each.channel is None]
        for split in [known.rest, *(each.split for each in silent)]:
            if idle:
                self._close_split(split)
            elif split != NO_SPLIT and not known.ended:
                self._open_splits.add(split)
                self.changes.append((split, "open"))

    def connected(self) -> list[str]:
        """The writes that a program is connected for."""
        return [
            write
            for write, known in self._writes.items()
            if any(each.channel is not None for each in known.partitions.values())
        ]

    def _add_partition(self, write: str, known: _Write, number: int) -> None:
        if number not in known.partitions:
            progress = known.partitions[number] = Progress()
            self._open_partition(write, number, progress)

    def _open_partition(self, write: str, number: int, progress: Progress) -> None:
        split = progress.split = self._open_split()
        self._by_split[split] = write, number, progress
        if self._leases is not None:
            self._leases.starts[split] = progress.rows

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
        if self._was_forgotten(write):
            ready(Progress(rows=ROWS_FORGOTTEN, complete=True))
            return
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
        progress.attempt, progress.connection, progress.expected = attempt, connection, True
        if is_first and 0 <= sent < progress.rows == progress.base:
            # The lease of an earlier attempt of the task ended further on, and there were no such rows.
            progress.rows = progress.base = sent
            if self._leases is not None:
                self._leases.starts[progress.split] = sent
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

    def _open_split(self) -> int:
        split, self._splits = self._splits, self._splits + 1
        self._open_splits.add(split)
        self.changes.append((split, "open"))
        return split

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
        return channel

    def _close_channel(self, channel: UpstreamChannel) -> None:
        progress = channel.progress
        if channel not in self.gate.channels:
            return
        if channel.ended:
            progress.ended = progress.complete = True
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

    def acknowledge(self) -> None:
        """The coordinator has applied the report that was under way."""
        if self._leases is None:
            return
        applied = self._leases.acknowledge()
        while self._receipts and self._receipts[0][0] <= applied:
            self._close_channel(self._receipts.popleft()[1])

    def exact(self) -> list[WritePosition]:
        """Where every partition is whose last report is not exact: the attempt takes nothing more."""
        return [] if self._leases is None else [self._position(each) for each in self._leases.exact()]

    def close(self) -> None:
        """The task is terminal; idempotent."""
        for channel in list(self.gate.channels):
            assert isinstance(channel, UpstreamChannel)
            channel.disconnect(PeerLost("the task that reads the stream has ended"))
        self.gate.close()

    def end_write(self, write: str, partitions: list[int]) -> list[int]:
        """No further partition of a write begins; the watermark waits for none.

        Gives those of ``partitions`` that are not complete: then nothing has ended.
        """
        if self._was_forgotten(write):
            return []
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
            self.gate.wake()
        return missing

    def end(self) -> None:
        """The stream has ended: no channel comes any more."""
        self._ended = True
        self.gate.wake()

    def _forget_writes(self) -> None:
        done = [
            write
            for write, known in self._writes.items()
            if known.ended
            or (known.rest == NO_SPLIT and all(progress.complete for progress in known.partitions.values()))
        ]
        for write in done[: max(0, len(self._writes) + 1 - WRITES_KEPT)]:
            del self._writes[write]
            query, batch = query_and_batch(write)
            if query:
                self._forgotten[query] = max(batch, self._forgotten.get(query, 0))

    def _was_forgotten(self, write: str) -> bool:
        """Whether that is a batch of a streaming query which was complete long ago."""
        query, batch = query_and_batch(write)
        return write not in self._writes and batch <= self._forgotten.get(query, -1)
