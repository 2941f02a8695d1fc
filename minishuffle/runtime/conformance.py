"""Whether a source keeps its contract, as far as reading shows it. No clock.

Each subtask reads its splits; then each split is read again from places where an attempt could have ended,
and the rest has to be what it was. Last, its ``acknowledge`` is called for the first half, and another
attempt goes on behind that. It is :class:`~minishuffle.runtime.reader.SourceReader` that reads, as in a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Payload
from minishuffle.exchange.rows import preview
from minishuffle.operators.base import AnySource, names_splits
from minishuffle.runtime.reader import SourceReader
from minishuffle.runtime.splits import acknowledge, given_splits
from minishuffle.wire.packed import Cursor, SplitPosition

__all__ = ["SourceCheck"]

EMPTY_ANSWERS: Final = 100
"""After so many in a row a source without an end has given all that it has."""
RESTARTS: Final = 8
"""Places in each split from which it is read again, of those behind a batch, and of those that the source
gave without a row."""


class _Place(NamedTuple):
    """Where an attempt may have ended."""

    position: int
    rows: int
    """Those that were read of the split so far; records that the source left out are not among them."""
    cursor: Cursor | None


@dataclass(slots=True)
class _Reading:
    """What was read of one split."""

    places: list[_Place]
    """The beginning, and behind each batch or move without a row."""
    rows: list[Any] = field(default_factory=list)
    """With their event times, as pairs, if it brings these."""
    has_ended: bool = False


class SourceCheck:
    """Puts a source through reading, restarts and its end.

    Args:
        copy: makes a copy of the source, as each subtask has one.
        records: how many each subtask reads at most.
    """

    def __init__(self, copy: Callable[[], AnySource], parallelism: int, records: int) -> None:
        self.batches: list[Payload] = []
        """What was read first, subtask after subtask."""
        self._copy = copy
        self._parallelism = parallelism
        self._records = records
        source = copy()
        self._name = type(source).__name__
        self._discovers = getattr(source, "discovery_interval", None) is not None
        self._comes_again = bool(getattr(source, "replayable", True))
        self._acknowledges = callable(getattr(source, "acknowledge", None))
        if self._acknowledges and not names_splits(source):
            raise UsageError(
                f"{self._name}.acknowledge is never called: say replayable, give the splits names, and yield "
                "pairs of a batch and the position behind it"
            )

    def run(self) -> None:
        """Raises UsageError: the source does not keep its contract. Exception: what it raises."""
        if not self._discovers and given_splits(self._copy()) != given_splits(self._copy()):
            raise UsageError(
                f"{self._name}.splits() gives other splits when asked again: give the same list each time"
            )
        for index in range(self._parallelism):
            confirms = self._acknowledges and not self._comes_again
            readings = self._read(index, self._records, kept=self.batches, confirms=confirms)
            for number, reading in readings.items():
                for place, lease in self._restarts(reading):
                    others = [
                        SplitPosition(each, 0, 0, True, other.places[0].cursor)
                        for each, other in readings.items()
                        if each != number
                    ]
                    at = SplitPosition(number, place.position, lease, False, place.cursor)
                    expected = reading.rows[place.rows + lease :]
                    found = self._read(index, max(1, len(expected)), [at, *others])
                    self._compare(at, expected, found[number].rows, reading.has_ended)
            if self._acknowledges and self._comes_again:
                self._check_behind_acknowledged(index, readings)

    def _read(
        self,
        index: int,
        records: int,
        resumed: Sequence[SplitPosition] = (),
        kept: list[Payload] | None = None,
        *,
        confirms: bool = False,
        in_turn: bool = False,
    ) -> dict[int, _Reading]:
        """What a subtask reads of each of its splits, by their numbers; batches are put into ``kept``. With
        ``confirms`` its ``acknowledge`` is called behind each batch."""
        source: Any = self._copy()
        reader = SourceReader(source, index, self._parallelism, 0.0, in_turn=in_turn, resumed=resumed)
        starts = {entry.split: entry.end for entry in resumed}
        found: dict[int, _Reading] = {}
        now, left, empty = 0.0, records, 0
        try:
            while left > 0 and empty < EMPTY_ANSWERS:
                batch = reader.poll(now)
                for mark in reader.take_marks():
                    if mark.state == "open":
                        start = starts.get(mark.split, 0)
                        found[mark.split] = _Reading([_Place(start, 0, reader.cursors.get(mark.split))])
                    elif mark.state == "done":
                        found[mark.split].has_ended = True
                if batch is None:
                    break
                moved = reader.take_moved()
                for number, cursor in moved.items():
                    there = _Place(reader.positions[number], len(found[number].rows), cursor)
                    found[number].places.append(there)
                now = max(now, reader.next_due)
                empty = 0 if reader.records else empty + 1
                left -= reader.records
                if reader.records:
                    reading = found[reader.current]
                    rows = batch if isinstance(batch, list) else batch.to_pylist()
                    times = reader.times
                    reading.rows += rows if times is None else zip(rows, times.tolist(), strict=True)
                    position = reader.positions[reader.current]
                    reading.places.append(_Place(position, len(reading.rows), reader.cursor))
                    if kept is not None:
                        # The source may fill its list again.
                        kept.append([*batch] if isinstance(batch, list) else batch)
                    if reader.cursor is not None:
                        moved[reader.current] = reader.cursor
                if confirms and moved:
                    acknowledge(source, {cursor.name: cursor.position for cursor in moved.values()})
        finally:
            reader.close()
        return found

    def _restarts(self, reading: _Reading) -> Iterator[tuple[_Place, int]]:
        """Places to read again from, each also with a lease in whose middle a batch ends."""
        places = reading.places
        if not self._comes_again:
            yield from ((place, 0) for place in places[-1:] if reading.has_ended)
            return
        quiet = [number for number in range(1, len(places)) if places[number].rows == places[number - 1].rows]
        others = [number for number in range(len(places)) if number not in quiet]
        for number in [*_spread(others), *_spread(quiet)]:
            place = places[number]
            yield place, 0
            following = places[number + 1 : number + 3]
            rows = [after.rows - place.rows for after in following]
            # Records that the source left out count in a lease, and are not among the rows.
            if rows and following[-1].position - place.position == rows[-1] > 0:
                yield place, (rows[0] + rows[-1]) // 2

    def _check_behind_acknowledged(self, index: int, readings: dict[int, _Reading]) -> None:
        """Have the first half acknowledged, and read on behind what was read, as the next attempt does."""
        half = max(1, sum(len(reading.rows) for reading in readings.values()) // 2)
        first = self._read(index, half, confirms=True, in_turn=True)
        places = {number: reading.places[-1] for number, reading in first.items()}
        resumed = [
            SplitPosition(number, place.position, 0, first[number].has_ended, place.cursor)
            for number, place in places.items()
        ]
        rest = {number: readings[number].rows[place.rows :] for number, place in places.items()}
        found = self._read(index, sum(map(len, rest.values())), resumed, confirms=True)
        for at in resumed:
            if not at.done:
                rows = found[at.split].rows if at.split in found else []
                self._compare(at, rest[at.split], rows, readings[at.split].has_ended)

    def _compare(
        self, at: SplitPosition, expected: Sequence[Any], found: Sequence[Any], has_ended: bool
    ) -> None:
        """Raises UsageError: reading on from there does not give what came before; to the end of the split,
        if it ``has_ended`` then."""
        wrong = [
            number
            for number, (row, other) in enumerate(zip(expected, found, strict=False))
            if repr(row) != repr(other) and row != other  # Of arrays != has no truth value.
        ]
        if not wrong and len(found) < len(expected):
            wrong = [len(found)]
        if not wrong and has_ended and len(found) > len(expected):
            wrong = [len(expected)]
        if wrong:
            (first, *_) = wrong
            where = f"offset {at.end}" if at.cursor is None else f"position {at.cursor.position!r}"
            raise UsageError(
                f"{self._name}.read from {where} of split {self._shown(at)} on gives "
                f"{_row(found, first)} where {_row(expected, first)} came before: give the same rows again "
                "in the same order, or set replayable = False beside positions of your own"
            )

    @staticmethod
    def _shown(at: SplitPosition) -> str:
        return str(at.split) if at.cursor is None else repr(at.cursor.name)


def _spread(numbers: Sequence[int]) -> list[int]:
    """RESTARTS of them, or not many more: the first, the last, and some between."""
    step = max(1, (len(numbers) - 1) // (RESTARTS - 1))
    return sorted({*numbers[::step], *numbers[-1:]})


def _row(rows: Sequence[Any], number: int) -> str:
    return preview(rows[number]) if number < len(rows) else "no further row"
