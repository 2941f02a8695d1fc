"""The rows that a source task may emit. The ledger belongs to the task's thread, and every LEASE_SECONDS for
a moment to the loop; reports and acknowledgements are on the loop. What external clients write is read as
splits too (``external/clientgate.py``).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from minishuffle.operators.base import AnySource, names_splits
from minishuffle.runtime.reader import SourceReader
from minishuffle.runtime.splits import acknowledge
from minishuffle.wire.packed import Cursor, SplitPosition, unpack_positions
from minishuffle.worker.sources.leaseledger import LeaseLedger
from minishuffle.worker.tasks.handoff import TaskPaths

__all__ = ["ReadSplits", "SourceLeases"]


class ReadSplits(Protocol):
    """The splits of a subtask, and which of them is read now: a
    :class:`~minishuffle.runtime.reader.SourceReader` for one."""

    @property
    def rate(self) -> float | None:
        """Records/s of each split; None: not known."""
        ...

    @property
    def positions(self) -> Mapping[int, int]:
        """Where each split begins, if not with its first record; may grow."""
        ...

    @property
    def cursors(self) -> Mapping[int, Cursor]:
        """The same of splits that have names; may grow."""
        ...

    @property
    def current(self) -> int:
        """The split of the batch read last."""
        ...

    @property
    def cursor(self) -> Cursor | None:
        """Where that is read on behind it, if it has a name."""
        ...

    @property
    def upcoming(self) -> Iterable[int]:
        """The splits that have not ended, in the order in which they are read."""
        ...


@dataclass(slots=True)
class _Cut:
    """A durable snapshot that no acknowledgement has followed so far."""

    number: int
    positions: dict[str, bytes]
    """Where splits were when the task took its state for it, if they have moved since the last one."""
    is_alone: bool
    """The task had no holder of its own snapshots."""
    snapshot: float = math.inf
    """The number of the first snapshot of the task that covers them; inf: none does so far."""


@dataclass(slots=True)
class _HeldPlace:
    """A place in a split whose receipt waits for a safe snapshot of the task, and perhaps for a complete
    durable one: the end, or a mark. The writer keeps the rows behind the last mark that has its receipt."""

    receipt: Callable[[], None]
    cut: float
    """The number of the first durable snapshot that covers it; inf: none does so far; 0: none need."""
    snapshot: float = math.inf
    """The same of the task's own."""
    hastens_cut: bool = True
    """A durable snapshot is to begin soon for it."""
    hastens_snapshot: bool = False
    """The job's tasks are to take snapshots of their own soon for it."""


class SourceLeases:
    """The leases of one attempt of a source.

    In a job that loses nothing there are none: the next attempt begins at the positions of a snapshot.
    A position is safe there, and acknowledged, once::

        position ≤ position in the oldest durable snapshot that is kept (the job may go back to it)
        position ≤ position in the oldest local snapshot (the next attempt begins with it)

    The receipt of what a program has written waits likewise, but for the newest durable snapshot alone: a
    job with such receipts goes back to no other (``Job._fall_back``), and a program waits for one, not two.
    So does, for places within a split, what its writer hears of the rows that it need not keep
    (:meth:`mark`).

    Args:
        report: called on the loop with a table of positions for the coordinator, and the seconds within which
            its acknowledgement is needed. None: the task never restarts, so nothing is reported and all rows
            may be emitted.
        rows: of each lease, see ``JobSettings.source_lease``.
        resumed: a table of positions that an earlier attempt has reported.
        age: seconds since it has.
        held: snapshots are taken of the task.
        cuts: receipts wait for durable ones, too.
    """

    def __init__(
        self,
        paths: TaskPaths,
        report: Callable[[bytes, float], None] | None,
        *,
        rows: int | None,
        resumed: bytes = b"",
        age: float = 0.0,
        held: bool = False,
        cuts: bool = False,
    ) -> None:
        self._paths = paths
        self._held = held
        self._first_cut = math.inf if cuts else 0
        """The ``cut`` of an end that was just read."""
        self._report = report
        self._rows = rows or None
        self._resumed = resumed
        self._age = age
        self._splits: ReadSplits | None = None
        self._reader: SourceReader | None = None
        """Reads a source of the job's own whose splits have names; None: there is no such source."""
        self._told: AnySource | None = None
        """The source, if it has the method ``acknowledge``."""
        self._passed: dict[str, bytes] = {}
        """Positions that were passed on without leases, and since the last durable snapshot or the last call
        of ``acknowledge``."""
        self._cuts: deque[_Cut] = deque()
        self._safe_number = 0
        """No attempt begins before the snapshot of that number; written by the loop."""
        self._complete: deque[tuple[int, int, bool]] = deque()
        """Arguments of :meth:`cut_complete`, which the loop adds."""
        self._complete_number = self._kept_number = 0
        """The last durable snapshot that is complete, and the oldest that is kept."""
        self._ledger: LeaseLedger | None = None
        self._lock = threading.Lock()
        """Held, for a few steps, by whoever uses the ledger. The loop does not wait for it."""
        self._posted = self._arrived = 0
        """Number of reports posted by the task, and number of reports that have arrived on the loop."""
        self._held_places: deque[_HeldPlace] = deque()
        """In the order in which snapshots come to cover them. The task adds, the loop removes."""
        self._cut_alone = self._covered_alone = 0
        """The last durable snapshot that the task took its state for without a holder of its own snapshots,
        and the last of these that is complete: the task goes on from nothing earlier."""
        self._covered_number = 0
        """The last durable snapshot that is complete; of the loop."""
        self._ends: dict[int, Callable[[], None]] = {}
        """By split, the receipt of its end, which is not reported yet."""
        self._receipts: deque[tuple[int, Callable[[], None]]] = deque()
        """Receipts of ends that were, each with the number of the report."""

    # --- task ------------------------------------------------------------------------------------

    def resumed(self) -> list[SplitPosition]:
        """Where the task begins, if no snapshot of its own says so."""
        return unpack_positions(self._resumed)

    def open(
        self,
        source: AnySource,
        index: int,
        parallelism: int,
        now: float,
        *,
        in_turn: bool,
        times: bool = True,
        resumed: Sequence[SplitPosition] | None = None,
        behind: float = 0.0,
    ) -> SourceReader:
        """A reader that goes on where an earlier attempt was, as it has reported or as ``resumed`` says; the
        first leases are asked for.

        Args and raises: as :class:`SourceReader`.
        """
        if resumed is None:
            resumed = self.resumed()
        reader = SourceReader(
            source,
            index,
            parallelism,
            now,
            in_turn=in_turn,
            times=times,
            resumed=resumed,
            age=self._age,
            behind=behind,
        )
        self._reader = reader if names_splits(source) else None
        self._told = source if hasattr(source, "acknowledge") else None
        self.begin(reader, now)
        self.look(now)
        return reader

    def begin(self, splits: ReadSplits, now: float, *, guesses: bool = False) -> None:
        """These splits are read, of which nothing was so far. ``guesses``: see :class:`LeaseLedger`."""
        self._splits = splits
        if self._report is not None:
            self._ledger = LeaseLedger(
                splits.positions, self._rows, splits.rate, now, cursors=splits.cursors, guesses=guesses
            )

    def take(self, rows: int, now: float) -> None:
        """Count ``rows`` rows just read as emitted; wait until a lease covers them.

        Raises:
            TaskCancelled: they must not be emitted.
        """
        ledger, splits = self._ledger, self._splits
        assert splits is not None
        split, cursor = splits.current, splits.cursor
        if cursor is not None:  # else it names nothing that could be confirmed
            self._confirm()
        if ledger is None:
            if cursor is not None and self._told is not None:
                self._passed[cursor.name] = cursor.position
            return

        def emitted() -> bool:
            with self._lock:
                if not ledger.covers(split, rows):
                    self._post(ledger.report(now, splits.upcoming, (split, rows)))
                    return False
                ledger.emit(split, rows, now, cursor)
                self._look(now)
            return True

        if not emitted():
            self._paths.wait_until(emitted)

    def look(self, now: float) -> None:
        """Report what is to be reported by now."""
        with self._lock:
            self._look(now)

    def _look(self, now: float) -> None:
        """(Under the lock.)"""
        if self._reader is not None:
            self._note_changes(self._reader)
        ledger, splits = self._ledger, self._splits
        if ledger is not None and splits is not None and (self._ends or ledger.is_due(now)):
            need = next(((split, 0) for split in self._ends), None)
            self._post(ledger.report(now, splits.upcoming, need))

    def _note_changes(self, reader: SourceReader) -> None:
        """Note the changes of splits that no read record has shown."""
        moved, changes = reader.take_moved(), reader.take_changes()
        if self._ledger is None:
            self._passed |= {cursor.name: cursor.position for cursor in moved.values()}
            return
        for entry in changes:
            self._ledger.note(entry)
        for split, cursor in moved.items():
            self._ledger.move(split, cursor)

    def idle(self, now: float) -> None:
        """Everything that was read is passed on, and there is nothing more for now: see :meth:`look`."""
        self._confirm()
        self.look(now)

    def finish(self, now: float) -> None:
        """Everything is passed on, and all splits have ended: have the source acknowledge the last positions,
        which the coordinator has to have first.

        Raises:
            TaskCancelled: the task is to end.
        """
        ledger = self._ledger
        if self._told is not None and ledger is not None:

            def ready() -> bool:
                with self._lock:
                    settled = ledger.is_settled()
                    self._post(ledger.report(now, ()))
                return settled

            if not ready():
                self._paths.wait_until(ready)
        self._confirm()

    def _confirm(self) -> None:
        """Tell the source what is safe: its batches were passed on, and no later attempt begins before."""
        if self._ledger is not None:
            with self._lock:
                safe = self._ledger.take_durable()
        elif self._held:
            safe = self._covered()
        else:
            safe, self._passed = self._passed, {}
        if safe and self._told is not None:
            acknowledge(self._told, safe)

    def _covered(self) -> dict[str, bytes]:
        """Take the positions that snapshots of both kinds cover."""
        while self._complete:
            self._complete_number, self._kept_number, freed = self._complete.popleft()
            for cut in self._cuts if freed else ():
                if cut.is_alone and cut.number <= self._complete_number:
                    cut.snapshot = 0
        safe: dict[str, bytes] = {}
        while self._cuts and self._cuts[0].number <= self._kept_number:
            if self._cuts[0].snapshot > self._safe_number:
                break
            safe |= self._cuts.popleft().positions
        return safe

    def snapshot(self, number: int) -> None:
        """The snapshot of that number is taken now: all that was read is passed on."""
        for place in tuple(self._held_places):  # copied in one step
            place.snapshot = min(place.snapshot, number)
        for cut in self._cuts:
            cut.snapshot = min(cut.snapshot, number)

    def cut(self, number: int, *, is_alone: bool) -> None:
        """The state for the durable snapshot of that number is taken now; ``is_alone``: the task has no
        holder of its own snapshots."""
        passed, self._passed = self._passed, {}
        if self._cuts and self._cuts[-1].number > self._complete_number:  # It has failed.
            passed = self._cuts.pop().positions | passed
        self._cuts.append(_Cut(number, passed, is_alone))
        self._cut_alone = number if is_alone else self._cut_alone
        for place in tuple(self._held_places):  # copied in one step
            place.cut = min(place.cut, number)

    def end(self, split: int, receipt: Callable[[], None] | None = None) -> None:
        """All rows of a split were read. ``receipt`` is called on the loop: once the coordinator knows, if it
        is to know."""
        if self._ledger is not None:
            with self._lock:
                self._ledger.end(split)
                if receipt is not None:
                    self._ends[split] = receipt
        elif receipt is not None and self._held:
            self._held_places.append(_HeldPlace(receipt, self._first_cut))
        elif receipt is not None:
            self._paths.post(receipt)

    def mark(self, receipt: Callable[[], None], *, is_urgent: bool) -> None:
        """(A task of which snapshots are taken.) All that was read so far is in its splits: ``receipt`` is
        called on the loop once no attempt begins before. ``is_urgent``: have snapshots taken soon for
        that."""
        place = _HeldPlace(receipt, self._first_cut, hastens_cut=is_urgent, hastens_snapshot=is_urgent)
        self._held_places.append(place)

    def read_before(self, receipt: Callable[[], None]) -> None:
        """(Before anything is read.) An earlier attempt has read that much of a split, or its end. Its
        snapshots cover that; whether a durable one does is not known."""
        if self._first_cut:
            self._held_places.append(_HeldPlace(receipt, self._first_cut, snapshot=0))
        else:
            receipt()

    def exact(self) -> bytes:
        """Where the attempt has ended, for its last report; it emits nothing more."""
        return b"" if self._ledger is None else self._ledger.exact()

    def _post(self, table: bytes) -> None:
        if table and self._ledger is not None:
            self._posted += 1
            self._note_receipts(self._ledger)
            self._paths.post(self._take_report, table, self._ledger.within)

    def _note_receipts(self, ledger: LeaseLedger) -> None:
        """A report has all ends so far."""
        self._receipts.extend((ledger.reports, receipt) for receipt in self._ends.values())
        self._ends.clear()

    # --- loop ------------------------------------------------------------------------------------

    def safe(self, number: int) -> None:
        """No attempt begins before the snapshot of that number."""
        self._safe_number = number
        self._give_receipts()
        self._paths.bell.ring()

    def _give_receipts(self) -> None:
        while self._held_places and self._is_covered(self._held_places[0]):
            self._held_places.popleft().receipt()

    def _is_covered(self, place: _HeldPlace) -> bool:
        is_safe = place.snapshot <= self._safe_number or 0 < place.cut <= self._covered_alone
        return is_safe and place.cut <= self._covered_number

    @property
    def is_held(self) -> bool:
        """Whether the next attempt goes on at a snapshot of this one."""
        return self._held

    @property
    def awaited_cut(self) -> int:
        """The number of a durable snapshot for which receipts wait, or for a later one; 0: for the next that
        begins; -1: for none."""
        last = max((each.cut for each in tuple(self._held_places) if each.hastens_cut), default=0)
        if last <= self._covered_number:
            return -1
        return int(last) if math.isfinite(last) else 0

    @property
    def awaits_snapshot(self) -> bool:
        """Whether something urgent waits for the task's own snapshots alone. These wait for those of its
        consumers."""
        covered = self._covered_number
        return any(each.hastens_snapshot and each.cut <= covered for each in tuple(self._held_places))

    def cut_complete(self, number: int, kept: int, *, freed: bool) -> None:
        """The durable snapshot of that number is complete, and the job goes back to none before ``kept``;
        ``freed``: the task begins at nothing earlier if it had no holder then."""
        self._complete.append((number, kept, freed))
        self._covered_number = number
        if freed and number == self._cut_alone:
            self._covered_alone = number
        self._give_receipts()
        self._paths.bell.ring()

    def _take_report(self, table: bytes, within: float) -> None:
        self._arrived += 1
        assert self._report is not None
        self._report(table, within)

    def renew(self, now: float) -> tuple[bytes, float]:
        """The table of positions to report now, though the thread may be in a long read, and the seconds
        within which its acknowledgement is needed. The table is empty if nothing is due, while the thread
        uses the ledger, which then reports itself, and while a report of the thread is on its way here."""
        ledger, splits = self._ledger, self._splits
        if ledger is None or splits is None:
            return b"", 0.0
        ledger.ask(now)
        if not self._lock.acquire(blocking=False):
            return b"", 0.0
        try:
            table = b"" if self._posted > self._arrived else ledger.report(now, splits.upcoming)
            if table:
                self._note_receipts(ledger)
            return table, ledger.within
        finally:
            self._lock.release()

    def acknowledge(self, *, durable: bool = True) -> None:
        """The coordinator has applied the report that was under way; not ``durable``: it does not answer."""
        if self._ledger is not None:
            self._ledger.acknowledge(durable=durable)
            while self._receipts and self._receipts[0][0] <= self._ledger.durable:
                self._receipts.popleft()[1]()
            self._paths.bell.ring()
