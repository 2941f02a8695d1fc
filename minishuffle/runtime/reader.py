"""Reads a source's splits for one subtask, at the source's pace. No clock: ``now`` is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Payload, Times
from minishuffle.limits import SPLITS_MAX
from minishuffle.operators.base import AnySource, Portion, SplitMark, names_splits
from minishuffle.plan.arguments import discovery_seconds
from minishuffle.runtime.discovery import SplitDiscovery
from minishuffle.runtime.splits import NamedSplit, Split, check_count, checked_names, given_splits
from minishuffle.wire.packed import Cursor, SplitPosition

__all__ = ["SourceReader"]

IDLE_SECONDS = 0.01
"""How soon a source that had nothing is asked again."""
STALL_SECONDS_MAX = 1.0
"""What a paced source may catch up on after a stall; the rest is left out of its pace."""

SPLITS_IN_TURN_MAX = 64
"""Most splits of a bounded source that are read in turn, which keeps that many files open."""


@dataclass(slots=True)
class _Pace:
    """Lets a batch go when the ones before it are due at ``rate`` records/s since ``since``."""

    rate: float
    since: float
    stall: float = STALL_SECONDS_MAX
    """What it may catch up on."""
    records: int = 0

    def due(self, now: float) -> float:
        """When the next batch may go."""
        due = self.since + self.records / self.rate
        if due < now - self.stall:
            self.since, self.records = now - self.stall, 0
            return self.since
        return due


class SourceReader:
    """Polls the splits that belong to subtask ``index`` of ``parallelism``: they are dealt in turn, or found
    by :class:`~minishuffle.runtime.discovery.SplitDiscovery`.

    Bounded sources are read split after split, unbounded ones and with ``in_turn`` a batch of each split
    in turn, beginning with the one whose turn it was (:meth:`snapshot`).
    ``next_due`` says when to poll again after an empty answer, in the unit and origin of ``now``
    (seconds).

    Args:
        times: something reads the event times that batches bring; else they are left out.
        resumed: where an earlier attempt was, which this one goes on from. An endless source with a pace
            goes on where it would be by now, and what it skips is counted: it is not caught up on. One that
            names its splits goes on where it was.
        age: seconds since that attempt said so.
        behind: seconds since it was there, on which a source with a pace catches up.

    Raises:
        WrongResult: ``splits()`` gives what it must not, or more than NAMED_SPLITS_MAX splits that have names
            to this subtask; (from :meth:`poll`) the source yields what it must not.
        UsageError: it gives other names than for that attempt.
    """

    def __init__(
        self,
        source: AnySource,
        index: int,
        parallelism: int,
        started_at: float,
        *,
        in_turn: bool = False,
        times: bool = True,
        resumed: Sequence[SplitPosition] = (),
        age: float = 0.0,
        behind: float = 0.0,
    ) -> None:
        bounded = getattr(source, "bounded", True)
        self.rate: float | None = None
        """Records/s of each split; None: as fast as they are taken."""
        self.rows_skipped = 0
        """Records between where an earlier attempt was and where this one began."""
        self._pace: _Pace | None = None
        self._discovery: SplitDiscovery | None = None
        self.dealt: int | None = None
        """How many splits this subtask has, those included that have ended; None: they are found, and may
        become more."""
        self.cursors: dict[int, Cursor] = {}
        """Where each split that has a name begins."""
        self._moved: dict[int, Cursor] = {}
        self._changes: list[SplitPosition] = []
        self._in_turn = SPLITS_IN_TURN_MAX if bounded and in_turn else 1 if bounded else SPLITS_MAX
        """How many splits at the head of those that wait take turns."""
        self._waiting: deque[Split] = deque()
        self._splits: list[Split] = []
        self._marks: list[SplitMark] = []
        self.current = -1
        """The split of the batch polled last."""
        self.cursor: Cursor | None = None
        """Where that is read on, if it has a name."""
        self.records = 0
        """How many records of that split the batch polled last stands for."""
        self.times: Times | None = None
        """The event times that came with it, microseconds since 1970, if they are read."""
        self._reads_times = times
        self._left_out: list[Portion] = []
        self._ended = {entry.split: entry for entry in resumed if entry.done}
        """The ends of splits that are not read any more."""
        self.next_due = started_at
        if names_splits(source) and (interval := discovery_seconds(source)) is not None:
            self._discovery = SplitDiscovery(source, index, parallelism, interval, resumed)
            self._discover(self._discovery, started_at)
        else:
            before = {entry.split: entry for entry in resumed}
            self._deal(source, index, parallelism, before, age=age, behind=behind)

    def _deal(
        self,
        source: AnySource,
        index: int,
        parallelism: int,
        before: Mapping[int, SplitPosition],
        *,
        age: float,
        behind: float,
    ) -> None:
        """Open the splits of this subtask, where they are dealt in turn."""
        everything = given_splits(source)
        numbers = range(index, len(everything), parallelism)
        self.dealt = len(numbers)
        places = [before.get(each, SplitPosition(each, 0)) for each in numbers]
        if self._in_turn > 1 and before.keys() >= set(numbers):
            places = [entry for entry in before.values() if entry.split in numbers]
        rate: float | None = getattr(source, "rate", None)
        if rate and places:
            self.rate = rate / len(everything)
            self._pace = _Pace(self.rate * len(places), self.next_due - behind, STALL_SECONDS_MAX + behind)
        mine: list[Split] = []
        _require_unfinished(source, len(everything), before)
        if names_splits(source):
            names = checked_names(source, everything)
            check_count(source, len(places))
            mine += (NamedSplit(source, names[each.split], each) for each in places)
        else:
            mine += (Split(source, everything[each.split], each) for each in places)
            if before and not getattr(source, "bounded", True):
                self._go_on(mine, before, age)
        self._open(split for split in mine if not (split.number in before and before[split.number].done))

    def _open(self, splits: Iterable[Split]) -> None:
        """From now on these are read too."""
        for split in splits:
            self._splits.append(split)
            self._waiting.append(split)
            self._marks.append(SplitMark(split.number, "open"))
            if split.cursor is not None:
                self.cursors[split.number] = split.cursor
        self._note_none()

    def _discover(self, discovery: SplitDiscovery, now: float) -> None:
        """Ask for the names of splits: new ones are read too, and nothing is kept of forgotten ones."""
        self._open(discovery.look(now))
        changes = discovery.take_changes()
        self._changes += changes
        forgotten = {each.split for each in changes if each.forgotten}
        self._splits = [split for split in self._splits if split.number not in forgotten]
        for number in forgotten:
            self.cursors.pop(number, None)
            self._ended.pop(number, None)

    def _note_none(self) -> None:
        """Nobody is to wait for a subtask that may get splits and has none."""
        if self._discovery is not None and not self._waiting:
            self._marks.append(SplitMark(-1, "none"))

    def _go_on(self, mine: Sequence[Split], before: Mapping[int, SplitPosition], seconds: float) -> None:
        """Have the splits go on where an earlier attempt would be after ``seconds`` more."""
        due = int(seconds * (self.rate or 0.0))
        for split in mine:
            entry = before.get(split.number)
            skipped = max(0, due - (entry.lease if entry is not None else 0))
            split.position += skipped
            self.rows_skipped += skipped

    @property
    def positions(self) -> dict[int, int]:
        """Records read of each split, by the split's index in ``source.splits()``; of one that is read where
        another attempt was, those before it included."""
        return {split.number: split.position for split in self._splits}

    def snapshot(self) -> list[SplitPosition]:
        """Where each split is, those included that have ended: behind all batches that were polled."""
        return [*self._ended.values(), *(split.at() for split in self._waiting)]

    @property
    def upcoming(self) -> Iterator[int]:
        """(Any thread.) The splits that have not ended, in the order in which they are read."""
        for split in tuple(self._waiting):  # in one step
            yield split.number

    def poll(self, now: float) -> Payload | None:
        """The next batch; an empty list if there is none now; None after the last split's end. One without
        rows may stand for records that were left out."""
        self.records = 0
        if self._discovery is not None and now >= self._discovery.due:
            self._discover(self._discovery, now)
        if not self._waiting:
            return self._nothing_left()
        if self._pace is not None and (due := self._pace.due(now)) > now:
            self.next_due = due
            return []
        asked = 0
        while self._waiting:
            turns = min(self._in_turn, len(self._waiting))
            if asked >= turns:
                self.next_due = now + IDLE_SECONDS
                return []
            split = self._waiting[0]
            cursor, was_idle = split.cursor, split.is_idle
            batch = split.take()
            if batch is None:
                self._waiting.popleft()
                self._marks.append(SplitMark(split.number, "done"))
                self._ended[split.number] = split.at(done=True)
                if self._discovery is not None and isinstance(split, NamedSplit):
                    self._discovery.end(split)
                self._note_none()
                continue
            if turns > 1:
                self._waiting.popleft()
                self._waiting.insert(turns - 1, split)
            if split.left_out is not None:
                self._left_out.append(split.left_out)
            if split.records:
                return self._given(split, batch, now)
            if split.is_idle and not was_idle:
                self._marks.append(SplitMark(split.number, "idle"))
            if split.cursor is not None and split.cursor != cursor:
                self._moved[split.number] = split.cursor
            asked += not split.skipped
        return self._nothing_left()

    def _nothing_left(self) -> Payload | None:
        """What :meth:`poll` gives where no split has more."""
        if self._discovery is None:
            return None
        self.next_due = self._discovery.due
        return []

    def _given(self, split: Split, batch: Payload, now: float) -> Payload:
        if split.number != self.current:
            self.current = split.number
            self._marks.append(SplitMark(split.number, "current"))
        if self._pace is not None:
            self._pace.records += split.records
        self._moved.pop(split.number, None)
        self.next_due, self.records, self.cursor = now, split.records, split.cursor
        self.times = split.times if self._reads_times else None
        return batch

    def take_marks(self) -> list[SplitMark]:
        """What changed about splits up to the batch polled last; comes before it."""
        marks, self._marks = self._marks, []
        return marks

    def take_left_out(self) -> list[Portion]:
        """Portions polled, the last one included, from which records are missing."""
        left_out, self._left_out = self._left_out, []
        return left_out

    def take_moved(self) -> dict[int, Cursor]:
        """Where splits are read on that have moved on without a record since the last call."""
        moved, self._moved = self._moved, {}
        return moved

    def take_changes(self) -> list[SplitPosition]:
        """Splits that were found since the last call, and those of which nothing is kept any more."""
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Let go of open files: close every read that has not ended."""
        for split in self._splits:
            split.close()
        self._waiting.clear()


def _require_unfinished(source: AnySource, count: int, before: Mapping[int, SplitPosition]) -> None:
    """Raises UsageError: a split is missing that an earlier attempt has not read to its end."""
    for number, entry in before.items():
        if number >= count and not entry.done:
            name, what = f"number {number}", "splits"
            advice = "or begin without their positions (--drop-state)"
            if entry.cursor is not None:
                name, what, advice = repr(entry.cursor.name), "names", "or set discovery_interval"
            raise UsageError(
                f"{type(source).__name__}.splits() does not give {name} any more, which has not ended: "
                f"give the same {what} in the same order each time, {advice}"
            )
