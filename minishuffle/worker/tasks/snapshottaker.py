"""Takes the local snapshots of one task, between two elements, and sends them to their holder.

What holder and consumers say arrives on the loop, and waits here for the task's thread, which alone decides:
see :mod:`~minishuffle.worker.tasks.localsnapshots`. The thread looks here before each element, while it waits
for input, and while it waits for room in what its worker retains.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from minishuffle.errors import PartitionLost, UnserializableRecord, WrongResult
from minishuffle.exchange.elementstore import ElementStore
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.rownumbers import NO_VERSION, ChannelRows
from minishuffle.exchange.spool import Spool
from minishuffle.ids import READERS_EDGE
from minishuffle.limits import HOLDER_AWAY_SECONDS, SLICE_SECONDS, SLICE_SHARE
from minishuffle.plan.graph import JobSettings
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.packed import SplitPosition
from minishuffle.worker.reports.filereports import FileReports
from minishuffle.worker.reports.outbox import Outbox
from minishuffle.worker.sources.leases import SourceLeases
from minishuffle.worker.tasks.handoff import TaskPaths
from minishuffle.worker.tasks.lateparts import made_in_turn
from minishuffle.worker.tasks.localsnapshots import LocalSnapshots, covers
from minishuffle.worker.tasks.snapshotstream import SnapshotWriter
from minishuffle.worker.tasks.statehandover import pack_state

__all__ = ["SnapshotParts", "SnapshotTaker"]

_NEW_HOLDER: Final = -1
_log = logging.getLogger("minishuffle.worker")
_STEPS: Final = 16
"""Snapshots of a vertex are due this part of the interval behind those of the vertex before it in the job,
whose rows it has read by then; and the subtasks of a worker do not take theirs at the same moment."""
_DEFERRED_SECONDS: Final = 0.05
"""How soon a sink that defers a snapshot is asked again while no element comes."""


class SnapshotParts(NamedTuple):
    """Other parts of a task that are in its snapshots, or wait until they are safe."""

    outbox: Outbox
    leases: SourceLeases
    files: FileReports
    spool: Spool | None


@dataclass(frozen=True, slots=True)
class _Seen:
    at: float | None = None
    """When the task was where a next attempt begins."""
    taken: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """For how long the thread has had a processor for the last one."""


class _Cut(NamedTuple):
    """The state that was taken last for a snapshot of the whole job; the thread sets it."""

    number: int
    taken: list[list[ChannelRows]]
    """The rows that it covers, by gate, if producers may give them up once it is complete."""
    newest: int
    """The number of the last local snapshot before it."""
    is_alone: bool
    """The task had no holder."""
    holder: int
    """The number of the holder that was named last; 0: none was."""
    kept: int
    """The rows that the task had kept for readers."""
    is_noticed: bool
    """A next attempt that goes on from the oldest local snapshot notices that rows are gone: it has rows of
    the same versions. Another version may begin before these, and what is given up of it may lie there."""


class _Rest(NamedTuple):
    """The rest of a snapshot under way."""

    steps: Iterator[int]
    """Each sends a part of a local snapshot, or makes a part of a durable one, and gives its bytes."""
    is_local: bool


class SnapshotTaker:
    """The local snapshots of one attempt.

    Args:
        partitions: that the task writes, by edge, once it begins.
        make_partition, make_store: those of the stream to the holder: see :class:`SnapshotWriter`.
        holder: the number of the first holder; 0: there is none so far.
        wall: the cluster's time.
        place: of the task in its job: the number of its vertex, and which part of that is before its subtask.
        is_held: whether it has what the attempt begins with, or there has been no holder.
        is_restored: the task may begin with the state of a savepoint.
        again: rows that earlier attempts have counted as coming twice.
        clock: seconds, of any origin.
        cpu: for how many seconds the thread that asks has had a processor.
    """

    def __init__(
        self,
        paths: TaskPaths,
        gates: Sequence[InputGate],
        partitions: Mapping[int, ResultPartition],
        make_partition: Callable[[Callable[[], None], Callable[[int], None]], RetainedPartition],
        make_store: Callable[[], ElementStore],
        *,
        parts: SnapshotParts,
        wall: Callable[[], float],
        place: float,
        settings: JobSettings,
        holder: int,
        is_held: bool,
        is_restored: bool,
        again: int,
        clock: Callable[[], float],
        cpu: Callable[[], float],
    ) -> None:
        self._paths, self._gates, self._partitions = paths, gates, partitions
        self._retained: dict[int, RetainedPartition] = {}
        self._parts, self._settings, self._wall, self._clock = parts, settings, wall, clock
        self._cpu, self._place = cpu, place
        self._holder, self._is_held, self._is_restored = holder, is_held, is_restored
        self._counted_before, self._uncounted = again, 0
        """Rows that came twice to earlier attempts: as the coordinator knows, and as the snapshot says beyond
        that."""
        self.writer = SnapshotWriter(make_partition, make_store, self._held, self._holder_changed, holder)
        self._said: deque[tuple[int, Sequence[int]]] = deque()
        """Acknowledgements of the holder, or _NEW_HOLDER; the loop adds, the thread takes."""
        self._safe = 0
        """No next attempt begins before the snapshot of that number."""
        self._is_deferred = False
        """One is due that a sink defers."""
        self._cut = _Cut(0, [], 0, is_alone=False, holder=holder, kept=0, is_noticed=False)
        self._is_pressed = False
        """Whether a snapshot was wanted since the last one of the whole job was complete; the loop's."""
        self._outdated = -1
        """Producers do not have the rows behind local snapshots up to that one; the loop sets it."""
        self._left_out: Sequence[int] = ()
        self._is_resumed = False
        self._is_told = self._is_wanted = False
        """Something was said to the thread, and somebody wants a snapshot: the loop sets them, and the thread
        clears them before it looks."""
        self._left_at = math.inf
        """When the thread has first seen that no holder reads the snapshots, since it last heard of one."""
        self._awaited: Mapping[int, Sequence[int]] | None = None
        """Consumers whose snapshots cover less say nothing to the thread; the thread sets it."""
        self._error: PartitionLost | None = None
        """Why what the task retains cannot be read; the loop sets it."""
        self._rests: deque[_Rest] = deque()
        """The rests of snapshots under way: of a local one, and then of durable ones."""
        self._went_on = 0.0
        """When parts of these were sent or made last, or the first of them was begun."""
        self._bytes, self._cost = 0, 0.0
        """Bytes sent of the local one, and seconds of a processor for it."""
        self._due = -math.inf
        """When the next one is, as of the last look."""
        self._last = _Seen()
        """The last one, for whoever reads the counters; the thread sets it."""

    # --- task ------------------------------------------------------------------------------------

    def begin(self, begun: TaskStateSnapshot) -> None:
        """(Before the chain is opened.) Go on with the rows of that snapshot, and what its sink reports."""
        self._uncounted = max(0, begun.again - self._counted_before)
        self._parts.files.restore(begun.pending, is_end=_is_end(begun))
        self._parts.outbox.begin_at(begun.collected)
        self._left_out = begun.left_out
        partitions = self._partitions.values()
        self._retained = {each.id.edge: each for each in partitions if isinstance(each, RetainedPartition)}
        for edge, rows in begun.written.items():
            if edge != READERS_EDGE:
                self._retained[edge].begin_at(rows)
        if self._parts.spool is not None:
            (row,) = begun.written.get(READERS_EDGE, [0])
            self._parts.spool.begin_at(row)
        for gate in self._gates:
            if taken := begun.taken.get(gate.edge):
                gate.begin_at(taken)
        if any(gate.has_splits for gate in self._gates):
            is_first = begun == TaskStateSnapshot()
            self._paths.post(self._resume, self._parts.leases.resumed() if is_first else begun.positions)
            self._paths.wait_until(lambda: self._is_resumed)
        interval = self._settings.snapshot_interval
        self._machine = LocalSnapshots(
            begun,
            interval=interval,
            phase=(self._clock() - self._wall() + self._place * interval / _STEPS) % interval,
            cost_max=self._settings.snapshot_cost_max,
            now=self._clock(),
            begun_at=self._clock() - (max(0.0, self._wall() - begun.at) if begun.at else 0.0),
            is_held=self._holder > 0,
        )
        self._last = _Seen(self._machine.covered_at)
        if begun != TaskStateSnapshot() or not self._is_restored:
            self.writer.begin(pack_state(begun))
        if not self._is_held:
            self._change_holder()

    def look(self, chain: Chain, positions: Callable[[], Sequence[SplitPosition]]) -> float:
        """(Between two elements.) Hear what was said, take a snapshot if one is due, and send a part of it;
        gives in how many seconds that is to be called again.

        Raises:
            PartitionLost: what the task retains, for consumers or its holder, cannot be read.
            WrongResult: what an operator holds cannot be written down.
            TaskCancelled: while calls of an operator end.
        """
        if self._is_told or self._rests or (seconds := self._due - self._clock()) <= 0.0:
            seconds = self._look(chain, positions)
        return seconds

    def _look(self, chain: Chain, positions: Callable[[], Sequence[SplitPosition]]) -> float:
        if not self._rests and self._is_told:
            self._hear()
        if not self._rests and self._machine.due() <= self._clock():
            self._take(chain, positions)
        if self._rests:
            self._go_on(max(SLICE_SECONDS, SLICE_SHARE * (self._clock() - self._went_on)))
            if self._rests:
                return 0.0
        self._due = self._machine.due()
        seconds = self._due - self._clock()
        return max(seconds, _DEFERRED_SECONDS) if self._is_deferred else seconds

    def leave_out(self, places: Sequence[int]) -> None:
        """Note all poison rows that were left out so far, by their places in the search for them."""
        self._left_out = tuple(places)

    def make_parts(self) -> None:
        """(The task is about to stand.) Make the rest of a snapshot of the whole job.

        Raises: as :meth:`look`.
        """
        if not all(rest.is_local for rest in self._rests):
            self._end()

    def cut(
        self,
        number: int,
        freeze: Callable[[], TaskStateSnapshot],
        made: Callable[[TaskStateSnapshot | str], None],
    ) -> TaskStateSnapshot:
        """Take the state for a snapshot of the whole job, as ``freeze`` gives it. Its parts are made between
        the elements that follow, and after those of a snapshot under way; then ``made`` gets all of
        them, or why they cannot be written. Note which rows it covers, if the task has no holder, or has kept
        rows with which no reader has dealt: until one has, local snapshots cover nothing more.

        Raises: as ``freeze``.
        """
        holder = self.writer.last_holder  # before the look at what was said
        if not self._rests:  # else the task would stand for all of that
            self._hear()
        is_alone = not self._machine.has_holder or self._is_left()
        spool = self._parts.spool
        kept, is_unread = (0, False) if spool is None else (spool.rows, spool.read_rows < spool.rows)
        taken = [gate.taken() for gate in self._gates] if is_alone or is_unread else []
        newest, is_noticed = self._machine.numbers[-1], self._is_noticed()
        self._cut = _Cut(number, taken, newest, is_alone, holder, kept, is_noticed)
        self._parts.leases.cut(number, is_alone=is_alone)
        snapshot = freeze()
        self._begin_rest(made_in_turn(snapshot, made), is_local=False)
        return snapshot

    def _is_noticed(self) -> bool:
        """See :class:`_Cut`."""
        begun = self._machine.taken
        return all(
            before.version in (NO_VERSION, now.version)
            for gate in self._gates
            for before, now in zip(begun.get(gate.edge, ()), gate.taken(), strict=False)
        )

    @property
    def is_due(self) -> bool:
        """Whether :meth:`look` has something to do."""
        is_due = not self._is_deferred and self._due <= self._clock()
        return is_due or len(self._rests) > 0 or self._is_told

    def secure(self, chain: Chain, positions: Callable[[], Sequence[SplitPosition]]) -> None:
        """Take a snapshot, and wait until no next attempt begins before it: a sink is about to have listed
        what it has taken. Not where there is no holder (any more), or consumers of the task may hold that up.

        Raises: as :meth:`look`.
        """
        machine, last = self._machine, -1
        while not self._retained:
            self._hear()
            if 0 <= last <= self._safe or not machine.has_holder or self._is_left():
                return
            if last not in machine.numbers and math.isfinite(machine.due()):
                machine.ask()
                self._take(chain, positions)
                self._end()
                last = machine.numbers[-1]
            else:
                self._paths.wait_until(lambda: self._is_told or self._is_left())

    def _is_left(self) -> bool:
        """Whether the holder has gone, and for so long that the coordinator has no other to name."""
        now = self._clock()
        self._left_at = math.inf if self.writer.is_read else min(self._left_at, now)
        return now - self._left_at >= HOLDER_AWAY_SECONDS

    def take_last(self, chain: Chain, positions: Callable[[], Sequence[SplitPosition]]) -> None:
        """(All input is read.) Take a snapshot that covers it, and wait for nobody: once it is the oldest,
        producers need retain nothing for the task.

        Raises: as :meth:`look`.
        """
        self._hear()
        self._machine.ask()
        self._take(chain, positions)
        self._end()

    def attend(self) -> None:
        """(The task has finished.) Until it is released, send what is kept to another holder, and tell
        producers what its last snapshot covers. If what it retains cannot be read, that was reported."""
        paths = self._paths
        try:
            while not paths.cancelled:
                paths.bell.clear()
                if self._is_told:
                    self._hear()
                paths.bell.wait(math.inf)
        except Exception:  # it is released meanwhile, or has no copies to send: it stays unprotected
            if not paths.cancelled:
                _log.exception("a task that has finished cannot send its snapshots again")

    def _hear(self) -> None:
        self._is_told = False  # before the look at what was said
        if self._error is not None:
            raise self._error
        self._end()
        machine, advances = self._machine, False
        while self._said:
            number, kept = self._said.popleft()
            self._left_at = math.inf
            if number == _NEW_HOLDER:
                self._change_holder()
            else:
                machine.hold(number, kept)
        if self._is_wanted:
            self._is_wanted = False
            machine.ask()
        self._awaited = machine.awaited
        while machine.advance(self._stable()):
            advances, self._awaited = True, machine.awaited
        if advances:
            self.writer.keep(machine.numbers)
        if (stable := machine.stable()) is not None:
            for gate in self._gates:
                self._paths.post(gate.make_stable, stable[gate.edge])
            self._safe = machine.numbers[0]
            for part in (self._parts.files, self._parts.leases):
                self._paths.post(part.safe, self._safe)
        self._last = replace(self._last, at=machine.covered_at)
        self._due = machine.due()

    def _stable(self) -> dict[int, list[int]]:
        """By edge, what its consumers will not ask for any more. Those of kept rows are their readers."""
        stable = {edge: each.stable() for edge, each in self._retained.items()}
        spool = self._parts.spool
        return stable if spool is None else {**stable, READERS_EDGE: [spool.read_rows]}

    def _written(self) -> dict[int, list[int]]:
        written = {edge: each.written() for edge, each in self._retained.items()}
        spool = self._parts.spool
        return written if spool is None else {**written, READERS_EDGE: [spool.rows]}

    def _change_holder(self) -> None:
        """Another holder begins with all that is kept, or with the next one. So it does if a durable snapshot
        has had producers give up the rows behind what is kept."""
        if self._machine.numbers[0] <= self._outdated:
            self.writer.forget()
        if self.writer.send_again(self._machine.numbers):
            self._machine.renew_holder()
        else:
            self._machine.change_holder()

    def _take(self, chain: Chain, positions: Callable[[], Sequence[SplitPosition]]) -> None:
        machine, begun = self._machine, self._clock()
        if not (machine.is_news(self._counted(positions())) or self._parts.files.is_ahead):
            machine.postpone(begun)
            self._last = replace(self._last, at=machine.covered_at)
            return
        self._paths.calls.enter()
        self._is_deferred = not chain.before_snapshot(self._paths.check, urgent=machine.is_urgent)
        if self._is_deferred:
            self._paths.calls.leave()
            return
        cpu = self._cpu()
        snapshot = self._wrapped(lambda: chain.snapshot(frozen=True))
        if missing := chain.left_out(snapshot):
            raise WrongResult(
                f"what {', '.join(missing)} holds cannot be written down, so it could be lost: leave that "
                'step out, or set guarantee="loss"'
            )
        self._paths.calls.leave()
        counted = self._counted(positions())
        number = machine.take(counted, begun, self._stable())
        self._parts.leases.snapshot(number)
        whole = replace(
            counted,
            parts=snapshot.parts,
            watermark=snapshot.watermark,
            dealt=chain.dealt(),
            pending=self._parts.files.snapshot(number),
            at=self._wall(),
        )
        self._bytes, self._cost = 0, self._cpu() - cpu
        self._begin_rest(self.writer.write(number, pack_state(whole), machine.numbers), is_local=True)

    def _begin_rest(self, steps: Iterator[int], *, is_local: bool) -> None:
        if not self._rests:
            self._went_on = self._clock()
        self._rests.append(_Rest(steps, is_local))

    def _go_on(self, seconds: float) -> None:
        """Send or make more of the snapshots that are being taken, for so long."""
        until = self._clock() + seconds
        while self._rests:
            has_ended = self._advance(self._rests[0], until)
            self._went_on = self._clock()
            if not has_ended:
                return
            self._rests.popleft()

    def _advance(self, rest: _Rest, until: float) -> bool:
        """Go on with the rest of a snapshot, to that time; True: nothing is left of it."""
        sent, cpu, has_ended = 0, self._cpu(), False
        while not has_ended:
            size = self._wrapped(lambda: next(rest.steps, None))
            has_ended, sent = size is None, sent + (size or 0)
            if not has_ended and self._clock() >= until:
                break
        if rest.is_local:
            self._bytes, self._cost = self._bytes + sent, self._cost + self._cpu() - cpu
            if has_ended:
                self._machine.note_cost(self._cost, self._clock())
                self._last = _Seen(self._machine.covered_at, self._last.taken + 1, self._bytes, self._cost)
        return has_ended

    def _end(self) -> None:
        """Send and make the rest of the snapshots that are being taken."""
        self._go_on(math.inf)

    def _wrapped(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except UnserializableRecord as error:
            raise WrongResult(f"its state cannot be written down, so it could be lost: {error}") from error

    def _counted(self, positions: Sequence[SplitPosition]) -> TaskStateSnapshot:
        return TaskStateSnapshot(
            positions=positions,
            taken={gate.edge: gate.taken() for gate in self._gates},
            written=self._written(),
            collected=self._parts.outbox.rows_collected,
            left_out=self._left_out,
            again=self._counted_before + self.rows_again,
        )

    @property
    def rows_again(self) -> int:
        """(Any thread.) Rows of the task that have come twice, and that no earlier attempt has counted. What
        an attempt counts is in its snapshots: it may die before it has told the coordinator."""
        spool = self._parts.spool
        published = self._parts.files.rows_again + (0 if spool is None else spool.rows_again)
        return self._uncounted + published + sum(gate.rows_again for gate in self._gates)

    # --- loop ------------------------------------------------------------------------------------

    def _resume(self, positions: Sequence[SplitPosition]) -> None:
        """Gates whose channels are splits go on there."""
        for gate in self._gates:
            gate.resume(positions)
        self._is_resumed = True
        self._paths.bell.ring()

    def seen(self) -> dict[str, float]:
        """For :attr:`~minishuffle.counters.TaskCounters.snapshot`, as of now."""
        last = self._last
        age = {} if last.at is None else {"age": max(0.0, self._clock() - last.at)}
        return {"taken": last.taken, "bytes": last.bytes, "seconds": last.seconds, **age}

    def _held(self, number: int, kept: Sequence[int]) -> None:
        """The holder has that snapshot, and keeps those: see :meth:`LocalSnapshots.hold`."""
        self._said.append((number, kept))
        self._tell()

    def _holder_changed(self) -> None:
        """There is another holder, which has nothing."""
        self._held(_NEW_HOLDER, ())

    def consumed(self) -> None:
        """A consumer's snapshots cover more of what the task has written."""
        if self._awaited is not None and covers(self._stable(), self._awaited):
            self._tell()

    def cut_complete(self, number: int, kept: int, *, freed: bool) -> None:
        """A durable snapshot is complete, and the job goes back to none before number ``kept``. If the
        coordinator takes the task for ``freed``, producers need not retain the rows that it covers. Should
        another holder be named by now, they do: it may get older snapshots.

        Nor need they where that is wanted, and local snapshots wait for readers of rows that it has: should
        the task be lost before these have come, it asks for rows that are not there any more, and the whole
        job goes back."""
        cut = self._cut
        is_same = self.writer.last_holder == cut.holder and not self.writer.is_read
        is_free = freed and cut.is_alone and is_same
        if cut.number == number and cut.taken and (is_free or self._waits_for_readers(cut)):
            self._outdated = cut.newest
            for gate, taken in zip(self._gates, cut.taken, strict=True):
                gate.make_stable(taken)
        self._is_pressed = False
        self._parts.leases.cut_complete(number, kept, freed=freed)

    def _waits_for_readers(self, cut: _Cut) -> bool:
        spool = self._parts.spool
        is_unread = spool is not None and spool.read_rows < cut.kept
        return self._is_pressed and cut.is_noticed and is_unread

    def lose(self, error: PartitionLost) -> None:
        """Have the task fail, since what it retains cannot be read: its next attempt makes that again."""
        self._error = error
        self._tell()

    def ask(self) -> None:
        """A snapshot would free what producers retain."""
        self._is_wanted = self._is_pressed = True
        self._tell()

    def _tell(self) -> None:
        """Have the thread look at what was said."""
        self._is_told = True
        self._paths.bell.ring()


def _is_end(begun: TaskStateSnapshot) -> bool:
    """Whether it was taken behind all that the task reads."""
    channels = [channel.ended for channels in begun.taken.values() for channel in channels]
    ends = channels or [split.done for split in begun.positions]
    return bool(ends) and all(ends)
