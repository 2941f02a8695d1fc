"""The rows that a source task may emit: the ledger is on the task's thread, reports and acknowledgements are
on the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minishuffle.operators.base import AnySource
from minishuffle.runtime.reader import SourceReader
from minishuffle.runtime.splits import acknowledge
from minishuffle.wire.packed import SplitPosition, unpack_positions
from minishuffle.worker.sources.leaseledger import LeaseLedger
from minishuffle.worker.tasks.handoff import TaskPaths

__all__ = ["SourceLeases", "WriteLeases"]


class SourceLeases:
    """The leases of one attempt of a source.

    Args:
        report: called on the loop with a table of positions for the coordinator, and the seconds within which
            its acknowledgement is needed. None: the task never restarts, so nothing is reported and all rows
            may be emitted.
        rows: of each lease, see ``JobSettings.source_lease``.
        resumed: a table of positions that an earlier attempt has reported.
        age: seconds since it has.
    """

    def __init__(
        self,
        paths: TaskPaths,
        report: Callable[[bytes, float], None] | None,
        *,
        rows: int | None,
        resumed: bytes = b"",
        age: float = 0.0,
    ) -> None:
        self._paths = paths
        self._report = report
        self._rows = rows or None
        self._resumed = resumed
        self._age = age
        self._reader: SourceReader | None = None
        self._told: AnySource | None = None
        """The source, if it has the method ``acknowledge``."""
        self._passed: dict[str, bytes] = {}
        """Positions that were passed on in a task that never restarts, and were not confirmed so far."""
        self._ledger: LeaseLedger | None = None

    # --- task ------------------------------------------------------------------------------------

    def open(
        self,
        source: AnySource,
        index: int,
        parallelism: int,
        now: float,
        *,
        in_turn: bool,
        times: bool = True,
    ) -> SourceReader:
        """A reader that goes on where an earlier attempt was; the first leases are asked for.

        Args and raises: as :class:`SourceReader`.
        """
        resumed = unpack_positions(self._resumed)
        reader = SourceReader(
            source, index, parallelism, now, in_turn=in_turn, times=times, resumed=resumed, age=self._age
        )
        self._reader = reader
        self._told = source if hasattr(source, "acknowledge") else None
        if self._report is not None:
            self._ledger = LeaseLedger(reader.positions, self._rows, reader.rate, now, cursors=reader.cursors)
            self.look(now)
        return reader

    def take(self, rows: int, now: float) -> None:
        """Count ``rows`` rows just read as emitted; wait until a lease covers them.

        Raises:
            TaskCancelled: they must not be emitted.
        """
        ledger, reader = self._ledger, self._reader
        assert reader is not None
        split, cursor = reader.current, reader.cursor
        self._confirm()
        if ledger is None:
            if cursor is not None:
                self._passed[cursor.name] = cursor.position
            return

        def ready() -> bool:
            if not ledger.covers(split, rows):
                self._send(ledger.report(now, reader.upcoming, (split, rows)))
                return False
            return True

        if not ready():
            self._paths.wait_until(ready)
        ledger.emit(split, rows, now, cursor)
        self.look(now)

    def look(self, now: float) -> None:
        """Report what is to be reported by now."""
        assert self._reader is not None
        moved, changes = self._reader.take_moved(), self._reader.take_changes()
        if self._ledger is None:
            self._passed |= {cursor.name: cursor.position for cursor in moved.values()}
            return
        for entry in changes:
            self._ledger.note(entry)
        for split, cursor in moved.items():
            self._ledger.move(split, cursor)
        self._send(self._ledger.report(now, self._reader.upcoming))

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
                settled = ledger.is_settled()
                self._send(ledger.report(now, ()))
                return settled

            if not ready():
                self._paths.wait_until(ready)
        self._confirm()

    def _confirm(self) -> None:
        """Tell the source what is safe: its batches were passed on, and no later attempt begins before."""
        if self._ledger is not None:
            safe = self._ledger.take_durable()
        else:
            safe, self._passed = self._passed, {}
        if safe and self._told is not None:
            acknowledge(self._told, safe)

    def end(self, split: int) -> None:
        """The reader has come to the end of a split."""
        if self._ledger is not None:
            self._ledger.end(split)

    def exact(self) -> bytes:
        """Where the attempt has ended, for its last report; it emits nothing more."""
        return b"" if self._ledger is None else self._ledger.exact()

    def _send(self, table: bytes) -> None:
        if table and self._report is not None and self._ledger is not None:
            self._paths.post(self._report, table, self._ledger.within)

    # --- loop ------------------------------------------------------------------------------------

    def acknowledge(self, *, durable: bool = True) -> None:
        """The coordinator has applied the report that was under way; not ``durable``: it does not answer."""
        if self._ledger is not None:
            self._ledger.acknowledge(durable=durable)
            self._paths.bell.ring()


class WriteLeases:
    """The leases of one attempt that external clients write to: each partition is a split.

    Args:
        rows: of each lease, see ``JobSettings.source_lease``.
        clock: seconds, of any origin.
    """

    def __init__(self, paths: TaskPaths, *, rows: int | None, clock: Callable[[], float]) -> None:
        self.starts: dict[int, int] = {}
        """Where this attempt begins in each split; set before anything of it is read."""
        self.reports = 0
        """Reports that were given out so far."""
        self._paths = paths
        self._clock = clock
        self._ledger = LeaseLedger(self.starts, rows or None, None, clock(), guesses=True)

    # --- task ------------------------------------------------------------------------------------

    def wait(self, split: int, rows: int, send: Callable[[list[SplitPosition]], None]) -> None:
        """Wait until ``rows`` more rows of the split may be read; reports needed for it go to ``send``.

        Raises:
            TaskCancelled: they must not be taken.
        """

        def ready() -> bool:
            if self._ledger.covers(split, rows):
                return True
            send(self._given(self._ledger.report(self._clock(), (), (split, rows))))
            return False

        if not ready():
            self._paths.wait_until(ready)

    def emit(self, split: int, rows: int) -> None:
        """Count ``rows`` rows, covered by a lease, as read."""
        self._ledger.emit(split, rows, self._clock())

    def end(self, split: int) -> None:
        """There are no more rows in the split."""
        self._ledger.end(split)

    def look(self, splits: Iterable[int], ending: int | None) -> list[SplitPosition]:
        """The positions due for a report now; may be empty.

        ``splits`` are read at present; the end of ``ending`` is not reported yet.
        """
        need = None if ending is None else (ending, 0)
        return self._given(self._ledger.report(self._clock(), splits, need))

    def exact(self) -> list[SplitPosition]:
        """Where the attempt has ended, for its last report; it takes nothing more."""
        return unpack_positions(self._ledger.exact())

    def _given(self, table: bytes) -> list[SplitPosition]:
        self.reports += bool(table)
        return unpack_positions(table)

    # --- loop ------------------------------------------------------------------------------------

    def acknowledge(self) -> int:
        """The coordinator has applied the report that was under way; gives how many it has applied."""
        self._ledger.acknowledge()
        self._paths.bell.ring()
        return self._ledger.acknowledged
