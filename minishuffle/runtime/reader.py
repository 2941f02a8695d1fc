"""Reads a source's splits for one subtask, at the source's pace. No clock: ``now`` is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Payload
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Portion, Source, SplitMark
from minishuffle.operators.pandas_index import without_unnamed_index
from minishuffle.wire.packed import SplitPosition

__all__ = ["SourceReader"]

IDLE_SECONDS = 0.01
"""How soon a source that had nothing is asked again."""
STALL_SECONDS_MAX = 1.0
"""What a paced source may catch up on after a stall; the rest is left out of its pace."""

SPLITS_IN_TURN_MAX = 64
"""Most splits of a bounded source that are read in turn, which keeps that many files open."""

_END: Any = object()


@dataclass(slots=True)
class _Split:
    number: int
    value: Any
    batches: Iterator[Payload] | None = None
    position: int = 0
    """Records read; with :meth:`Source.read`'s offset, where to go on."""


@dataclass(slots=True)
class _Pace:
    """Lets a batch go when the ones before it are due at ``rate`` records/s since ``since``."""

    rate: float
    since: float
    records: int = 0

    def due(self, now: float) -> float:
        """When the next batch may go."""
        due = self.since + self.records / self.rate
        if due < now - STALL_SECONDS_MAX:
            self.since, self.records = now - STALL_SECONDS_MAX, 0
            return self.since
        return due


class SourceReader:
    """Polls the splits that belong to subtask ``index`` of ``parallelism``.

    Bounded sources are read split after split, unbounded ones and with ``in_turn`` a batch of each split
    in turn.
    ``next_due`` says when to poll again after an empty answer, in the unit and origin of ``now``
    (seconds).

    Args:
        resumed: where an earlier attempt was, which this one goes on from. An endless source with a pace
            goes on where it would be by now, and what it skips is counted: it is not caught up on.
        age: seconds since that attempt said so.

    Raises:
        UsageError: (from :meth:`poll`) the source yields what it must not.
    """

    def __init__(
        self,
        source: Source,
        index: int,
        parallelism: int,
        started_at: float,
        *,
        in_turn: bool = False,
        resumed: Iterable[SplitPosition] = (),
        age: float = 0.0,
    ) -> None:
        everything = list(source.splits())
        mine = [_Split(number, everything[number]) for number in range(index, len(everything), parallelism)]
        rate: float | None = getattr(source, "rate", None)
        self._source = source
        self._format = getattr(source, "format", "rows")
        bounded = getattr(source, "bounded", True)
        self.rate = rate / len(everything) if rate and everything else None
        """Records/s of each split; None: as fast as they are taken."""
        self.rows_skipped = 0
        """Records between where an earlier attempt was and where this one began."""
        self._pace = _Pace(self.rate * len(mine), started_at) if self.rate and mine else None
        mine = self._go_on(mine, {entry.split: entry for entry in resumed}, 0.0 if bounded else age)
        self._in_turn = SPLITS_IN_TURN_MAX if bounded and in_turn else 1 if bounded else len(mine)
        """How many splits at the head of those that wait take turns."""
        self._waiting = deque(mine)
        self._marks = [SplitMark(split.number, "open") for split in mine]
        self.current = -1
        """The split of the batch polled last."""
        self.records = 0
        """How many of that split the batch polled last stands for; the source may have left some out."""
        self._left_out: list[Portion] = []
        self._splits = mine
        self.next_due = started_at

    def _go_on(
        self, mine: Sequence[_Split], resumed: dict[int, SplitPosition], seconds: float
    ) -> list[_Split]:
        """The splits that have not ended, where an earlier attempt would be after ``seconds`` more."""
        due = int(seconds * (self.rate or 0.0)) if resumed else 0
        for split in mine:
            entry = resumed.get(split.number, SplitPosition(split.number, 0))
            skipped = max(0, due - entry.lease)
            split.position = entry.end + skipped
            self.rows_skipped += skipped
        return [split for split in mine if not (split.number in resumed and resumed[split.number].done)]

    @property
    def positions(self) -> dict[int, int]:
        """Records read of each split, by the split's index in ``source.splits()``; of one that is read where
        another attempt was, those before it included."""
        return {split.number: split.position for split in self._splits}

    @property
    def upcoming(self) -> Iterator[int]:
        """The splits that have not ended, in the order in which they are read."""
        return (split.number for split in self._waiting)

    def poll(self, now: float) -> Payload | None:
        """The next batch; an empty list if there is none now; None after the last split's end. One without
        rows may stand for records that were left out."""
        self.records = 0
        if not self._waiting:
            return None
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
            batch, count = self._next_of(split)
            if batch is None:
                self._waiting.popleft()
                self._marks.append(SplitMark(split.number, "done"))
                continue
            if turns > 1:
                self._waiting.popleft()
                self._waiting.insert(turns - 1, split)
            if count:
                if split.number != self.current:
                    self.current = split.number
                    self._marks.append(SplitMark(split.number, "current"))
                split.position += count
                if self._pace is not None:
                    self._pace.records += count
                self.next_due = now
                self.records = count
                return batch
            asked += 1
        return None

    def take_marks(self) -> list[SplitMark]:
        """What changed about splits up to the batch polled last; comes before it."""
        marks, self._marks = self._marks, []
        return marks

    def take_left_out(self) -> list[Portion]:
        """Portions polled, the last one included, from which records are missing."""
        left_out, self._left_out = self._left_out, []
        return left_out

    def close(self) -> None:
        """Let go of open files: close every read that has not ended."""
        for split in self._splits:
            close = getattr(split.batches, "close", None)
            if close is not None:
                close()
        self._waiting.clear()

    def _next_of(self, split: _Split) -> tuple[Payload | None, int]:
        """The next batch and the records that it stands for."""
        try:
            if split.batches is None:
                split.batches = iter(self._source.read(split.value, split.position))
            batch = next(split.batches, _END)
        except Exception as error:
            error.add_note(
                f"raised by {type(self._source).__name__}.read in split {split.number} "
                f"after {split.position} records"
            )
            raise
        if batch is _END:
            split.batches = None
            return None, 0
        count = None
        if isinstance(batch, Portion):
            self._left_out.append(batch)
            batch, count = batch.batch, batch.records
        self._check(batch)
        count = len(batch) if count is None else count
        return without_unnamed_index(batch) if isinstance(batch, pa.RecordBatch) else batch, count

    def _check(self, batch: Any) -> None:
        name = type(self._source).__name__
        if isinstance(batch, pa.RecordBatch):
            if self._format != "arrow":
                raise UsageError(f'{name} yields Arrow batches: set its attribute format = "arrow"')
            if batch.num_rows > BATCH_ROWS_MAX:
                raise UsageError(
                    f"{name} yields an Arrow batch of {batch.num_rows} rows: "
                    f"yield slices of at most {BATCH_ROWS_MAX}"
                )
        elif not isinstance(batch, list):
            raise UsageError(
                f"{name}.read yields a {type(batch).__name__}: yield lists of rows or pyarrow.RecordBatch"
            )
        elif self._format != "rows" and batch:
            raise UsageError(f'{name} yields lists of rows: set its attribute format = "rows"')
