"""The leases of a source's subtask: rows that it may emit in each of its splits before its next report. Pure.

A *lease* is a number of rows after a reported position. After a failure the next attempt continues after the
leases, so that no row is emitted twice, and at most one lease of each split is lost. (With ``source_lease`` 0
it continues at the positions: no row is lost, and at most a lease is repeated.) The next lease is requested
before one is used up, so that its acknowledgement arrives in time: when the worker asks for it, which it does
every LEASE_SECONDS, so that the coordinator journals the reports of all sources together; or once little of
it is left. If the rate of a source is not known yet, or leases have a fixed length, the next is requested
when half is used.

Only one report is under way at a time. A source with a rate has many splits whose leases are used one after
the other: they are requested together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from minishuffle.limits import LEASE_SECONDS
from minishuffle.wire.packed import Cursor, SplitPosition, pack_positions

__all__ = ["LeaseLedger"]

FIRST_ROWS: Final = 64
"""The least lease of a split before its first row, if its rate is not known."""
AHEAD: Final = 16
"""Splits that have a lease before their first row, so that short ones need no wait each. Of a source whose
rate is known all have one: together they are as many rows as are emitted in LEASE_SECONDS."""
TOGETHER_SECONDS: Final = LEASE_SECONDS / 10
"""Between reports that nobody waits for."""
SPARE: Final = 4
"""A lease covers the rows emitted between two reports, plus 1/SPARE of them."""
LITTLE: Final = 8
"""The next lease is asked for when 1/LITTLE of the current one is left, or less than the next batch, or than
two batches that come within LITTLE_SECONDS."""
LITTLE_SECONDS: Final = 0.1
ANSWERED_SECONDS: Final = LEASE_SECONDS / 10
"""The lease for which the worker asks next is there so long after it has asked: none is asked for that lasts
until then."""
ACKNOWLEDGED_SHARE: Final = 3
"""The acknowledgement should arrive within 1/ACKNOWLEDGED_SHARE of the time that the lease still lasts."""
ACKNOWLEDGED_SECONDS_MAX: Final = 0.1
SHRINK: Final = 4
"""A lease of more than SHRINK times the rows needed now is reduced."""
GUESS_SHRINK: Final = 2
"""The same for a guessed lease."""
GROWTH: Final = 4
"""A guess for LEASE_SECONDS is at most GROWTH times the rows that the split has emitted so far."""


@dataclass(slots=True)
class _Window:
    """How many rows are emitted in LEASE_SECONDS."""

    since: float
    count: int = 0
    """Since then."""
    before: int = 0
    """In the window before, scaled to LEASE_SECONDS."""
    is_guessed: bool = False
    """There was none before: what the rest of it brings is guessed."""
    is_known: bool = False
    """There was one before that is known whole."""

    def add(self, rows: int, now: float) -> None:
        passed = now - self.since
        if passed >= LEASE_SECONDS:
            self.before = math.ceil(self.count * LEASE_SECONDS / passed)
            self.since, self.count, self.is_guessed, self.is_known = now, 0, False, True
        self.count += rows

    def rows(self, now: float, need: int = 0) -> int:
        """As of now, once ``need`` more have been emitted."""
        self.add(0, now)
        count = self.count + need
        if self.is_guessed:
            passed = max(0.0, now - self.since)
            guess = math.ceil(count / (1 / GROWTH + passed / LEASE_SECONDS))
            return max(self.before, guess, count)
        return max(self.before, count)


@dataclass(slots=True)
class _Split:
    number: int
    emitted: int
    """Rows from the split's beginning, like the other positions here."""
    granted: int
    """The end of what may be emitted."""
    reported: int
    """The end in the report that is under way, else ``granted``."""
    window: _Window
    lease: int = 0
    """Rows of the last one."""
    begun: bool = False
    done: bool = False
    batch: int = 0
    """Rows emitted last."""
    guessed: bool = False
    """The last lease was."""
    cursor: Cursor | None = None
    """Where it is read on after ``emitted`` rows, or before those that an attempt skips at its begin."""
    is_moved: bool = False
    """The cursor is not the one reported last."""


class LeaseLedger:
    """The leases of one attempt. All but ``acknowledged``, ``durable``, :meth:`ask` and :meth:`exact` belongs
    to one thread at a time.

    Invariant: of each split, emitted ≤ granted ≤ the end that was reported last; granted is above the end
    reported before that only once the last report was acknowledged.

    Args:
        positions: where this attempt begins in each of its splits.
        rows: of each lease, or as many as a single emission has; None: what the split emits in LEASE_SECONDS.
        rate: rows/s of each split, if it is known.
        now: seconds, on the clock of every other ``now``.
        cursors: where each split that has a name begins; may grow.
        guesses: leases of a split in its first LEASE_SECONDS are up to GROWTH times what it has emitted. For
            an owner that asks for reports also while nothing is emitted: what a burst got is taken back then.
    """

    def __init__(
        self,
        positions: Mapping[int, int],
        rows: int | None,
        rate: float | None,
        now: float,
        *,
        cursors: Mapping[int, Cursor] = MappingProxyType({}),
        guesses: bool = False,
    ) -> None:
        self.acknowledged = 0
        """(Any thread.) Reports that the coordinator has applied."""
        self.durable = 0
        """(Any thread.) The number of the last report that it is sure to have."""
        self.reports = 0
        """How many there were; they are numbered from 1."""
        self.within = 0.0
        """Seconds within which the last report is to be acknowledged; 0: at once."""
        self._positions = positions
        self._cursors = cursors
        self._rows = rows
        self._first = rows or (FIRST_ROWS if rate is None else max(1, math.ceil(rate * LEASE_SECONDS)))
        self._is_paced = rate is not None
        self._guesses = guesses
        self._under_way: list[_Split] = []
        self._unsafe: deque[tuple[int, dict[str, bytes]]] = deque()
        """By report, the positions in it of splits that have names, until they are durable."""
        self._splits: dict[int, _Split] = {}
        """Splits with a lease, or with an end that is not reported yet."""
        self._notes: dict[int, SplitPosition] = {}
        """Other positions to report, of splits without a lease."""
        self._unbegun = 0
        """Splits among them without any row yet."""
        self._window = _Window(now)
        """All splits together."""
        self._longest = 0
        """Rows of the longest split that has ended."""
        self._more_ahead = False
        """There are splits that had no lease yet when the last were asked for."""
        self._is_due = True
        self._asked_at = -math.inf
        self._together = TOGETHER_SECONDS if rows is None and rate is not None else 0.0
        self._not_before = now
        """When what is due is reported at the earliest, if nobody waits for it."""

    # --- emission --------------------------------------------------------------------------------

    def covers(self, split: int, rows: int) -> bool:
        """Whether ``rows`` more rows of the split may be emitted now."""
        if self._under_way:
            self._settle()
        each = self._splits.get(split)
        return each is not None and each.emitted + rows <= each.granted

    def emit(self, split: int, rows: int, now: float, cursor: Cursor | None = None) -> None:
        """Count ``rows`` rows, covered by a lease, as emitted; the split is read on at the ``cursor``."""
        if self._under_way:
            self._settle()
        each = self._splits[split]
        assert each.emitted + rows <= each.granted
        if not each.begun:
            self._begin(each)
            beside = sum(other.begun and not other.done for other in self._splits.values())
            before = max(self._first, self._window.rows(now) // beside)
            each.window = _Window(now, before=before, is_guessed=self._guesses)
        each.window.add(rows, now)
        self._window.add(rows, now)
        each.emitted += rows
        each.batch = rows
        each.cursor, each.is_moved = cursor, cursor is not None
        if self._is_short(each, now):
            self._is_due = True

    def move(self, split: int, cursor: Cursor) -> None:
        """The split is read on there, without a further row."""
        each = self._splits.get(split) or self._open(split, self._window.since)
        each.cursor, each.is_moved = cursor, True

    def note(self, entry: SplitPosition) -> None:
        """Have a split reported that was found and has no lease so far, so that it is known should its source
        not give it again; or one that is forgotten."""
        if entry.forgotten and self._splits.pop(entry.split, None) is None:
            entry = entry._replace(cursor=None)  # Its last position was reported with its end.
        self._notes[entry.split] = entry
        self._is_due = True

    def end(self, split: int) -> None:
        """There are no more rows in the split."""
        each = self._splits.get(split) or self._open(split, self._window.since)
        if not each.begun:
            self._begin(each)
        each.done = True
        self._longest = max(self._longest, each.emitted - self._positions.get(split, 0))

    def _begin(self, each: _Split) -> None:
        each.begun = True
        self._unbegun -= 1
        self._is_due = self._is_due or self._more_ahead or self._unbegun > 0

    # --- reports ---------------------------------------------------------------------------------

    def ask(self, now: float) -> None:
        """(Any thread.) Have leases compared with what is needed at the next report. The worker asks every
        LEASE_SECONDS."""
        self._is_due, self._not_before, self._asked_at = True, now, now

    def is_due(self, now: float) -> bool:
        """Whether :meth:`report` has something to say although nobody waits for it."""
        return self._is_due and now >= self._not_before

    def report(self, now: float, upcoming: Iterable[int], need: tuple[int, int] | None = None) -> bytes:
        """The table of positions to report now; empty if nothing is due.

        Args:
            upcoming: the splits read now, and the next ones.
            need: a split and the rows of it that wait for a lease.
        """
        self._settle()
        if self._under_way:
            return b""
        if need is None and not self.is_due(now):
            return b""
        self._is_due, self._not_before = False, now + self._together
        wanted = self._look_ahead(upcoming, now)
        needed = dict([need] if need else [])
        for split in needed:
            self._splits.get(split) or self._open(split, now)
        entries = [entry for split, entry in self._notes.items() if split not in self._splits]
        self._notes.clear()
        self.within = 0.0 if needed else ACKNOWLEDGED_SECONDS_MAX
        for each in list(self._splits.values()):
            least = needed.get(each.number, 0)
            rows = max(least, wanted.get(each.number, 0) or self._wanted(each, now, least))
            if self._is_to_change(each, least, rows):
                entries.append(self._renew(each, rows))
                left = each.granted - each.emitted
                self.within = min(self.within, self._lasts(each, now, left) / ACKNOWLEDGED_SHARE)
        self.reports += bool(entries)
        cursors = [entry.cursor for entry in entries if entry.cursor is not None and entry.cursor.position]
        if cursors:
            before: dict[str, bytes] = {}
            while self._unsafe and self._unsafe[-1][0] > self.durable:  # Durable with this report, or later.
                before = self._unsafe.pop()[1] | before
            now_there = {cursor.name: cursor.position for cursor in cursors}
            self._unsafe.append((self.reports, before | now_there))
        return pack_positions(entries)

    def take_durable(self) -> dict[str, bytes]:
        """By name of their splits, the positions that no later attempt begins before, since the coordinator
        has them; those that were not given before."""
        durable: dict[str, bytes] = {}
        while self._unsafe and self._unsafe[0][0] <= self.durable:
            durable |= self._unsafe.popleft()[1]
        return durable

    def is_settled(self) -> bool:
        """Whether all splits have ended, and everything reported was acknowledged; else what is left is
        reported at once."""
        self._is_due, self._not_before = True, -math.inf
        return not self._splits and self.acknowledged >= self.reports

    def _look_ahead(self, upcoming: Iterable[int], now: float) -> dict[int, int]:
        """The leases of the splits that are next. If the rate is not known: together as many rows as all
        splits emit in LEASE_SECONDS, and each as long as a split has been so far."""
        left = self._window.rows(now) if not self._is_paced else 0
        wanted: dict[int, int] = {}
        self._more_ahead = False
        for split in upcoming:
            each = self._splits.get(split)
            if each is None:
                if self._unbegun >= AHEAD and not self._is_paced:
                    self._more_ahead = True
                    break
                each = self._open(split, now)
            if not each.begun:
                rows = min(left, self._longest or left)
                left -= rows
                wanted[split] = self._rows or max(rows, self._first)
        return wanted

    def acknowledge(self, *, durable: bool = True) -> None:
        """(Loop.) The coordinator has applied the next report; not ``durable``: it does not answer, and may
        not have it."""
        self.acknowledged += 1
        if durable:
            self.durable = self.acknowledged

    def _settle(self) -> None:
        if self._under_way and self.acknowledged >= self.reports:
            for each in self._under_way:
                each.granted = each.reported
            self._under_way = []

    def _open(self, split: int, now: float) -> _Split:
        start = self._positions.get(split, 0)
        window = _Window(now, is_guessed=self._guesses)
        cursor = self._cursors.get(split)
        each = self._splits[split] = _Split(split, start, start, start, window, cursor=cursor)
        self._unbegun += 1
        return each

    def _wanted(self, each: _Split, now: float, need: int) -> int:
        if self._rows is not None:
            return max(self._rows, each.batch)
        if not each.begun and not need:
            return self._first
        rows = each.window.rows(now, need)
        return max(rows + (rows + 1) // SPARE if each.window.is_known else rows, each.batch)

    def _is_short(self, each: _Split, now: float) -> bool:
        """Whether the next lease is to be asked for now."""
        left = each.reported - each.emitted
        if self._rows is not None or not each.window.is_known:
            return 2 * left <= each.lease
        lasts = self._lasts(each, now, left)
        if now < self._asked_at + LEASE_SECONDS < now + lasts - ANSWERED_SECONDS:
            return False
        if LITTLE * left <= each.lease or left < each.batch:
            return True
        return left < 2 * each.batch and lasts < LITTLE_SECONDS

    @staticmethod
    def _lasts(each: _Split, now: float, left: int) -> float:
        """Seconds until more rows than are ``left`` are emitted, if one more batch than is known comes in
        LEASE_SECONDS; 0 if nothing is known. A split that has ended needs no more."""
        if each.done:
            return ACKNOWLEDGED_SECONDS_MAX * ACKNOWLEDGED_SHARE
        if not each.window.is_known:
            return 0.0
        batch = max(1, each.batch)
        return (left // batch + 1) * batch * LEASE_SECONDS / (each.window.rows(now) + batch)

    @staticmethod
    def _is_to_change(each: _Split, need: int, wanted: int) -> bool:
        """Whether a quarter of a split's lease is used, or it is far too short or too long, or at its end, or
        it has a cursor that was not reported."""
        left = each.granted - each.emitted
        shrink = GUESS_SHRINK if each.guessed else SHRINK
        return (
            each.done
            or each.is_moved
            or left < need
            or (4 * left <= 3 * each.lease if each.begun else 2 * left <= wanted)
            or left > shrink * wanted
        )

    def _renew(self, each: _Split, rows: int) -> SplitPosition:
        if each.done:
            del self._splits[each.number]
            return SplitPosition(each.number, each.emitted, 0, True, each.cursor)
        each.is_moved = False
        each.lease, each.guessed = rows, each.window.is_guessed
        each.reported = each.emitted + rows
        each.granted = min(each.granted, each.reported)
        self._under_way.append(each)
        return SplitPosition(each.number, each.emitted, rows, False, each.cursor)

    def exact(self) -> bytes:
        """Where every split is whose last report is not exact: what the attempt emits from now on is lost.
        Any thread may ask, also while the ledger's own goes on: that of an abandoned task does."""
        notes, splits = list(self._notes.values()), list(self._splits.values())  # each in one step
        exact = (SplitPosition(each.number, each.emitted, 0, each.done, each.cursor) for each in splits)
        return pack_positions([*notes, *exact])
