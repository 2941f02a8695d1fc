"""Whether a source keeps its contract, as far as reading shows it. No clock.

Each subtask reads its splits; then each split is read again from places where an attempt could have ended,
and the rest has to be what it was. It is :class:`~minishuffle.runtime.reader.SourceReader` that reads, as in
a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Payload
from minishuffle.exchange.rows import preview
from minishuffle.operators.base import AnySource
from minishuffle.runtime.reader import SourceReader
from minishuffle.wire.packed import Cursor, SplitPosition

__all__ = ["SourceCheck"]

EMPTY_ANSWERS: Final = 100
"""After so many in a row a source without an end has given all that it has."""
RESTARTS: Final = 8
"""Places in each split from which it is read again."""


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
    """The beginning, and behind each batch."""
    rows: list[Any] = field(default_factory=list)
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

    def run(self) -> None:
        """Raises UsageError: the source does not keep its contract. Exception: what it raises."""
        splits = list(self._copy().splits())
        if not self._discovers and list(self._copy().splits()) != splits:
            raise UsageError(
                f"{self._name}.splits() gives other splits when asked again: give the same list each time"
            )
        for index in range(self._parallelism):
            readings = self._read(index, self._records, kept=self.batches)
            for number, reading in readings.items():
                for place, lease in self._restarts(reading):
                    others = [
                        SplitPosition(each, 0, 0, True, other.places[0].cursor)
                        for each, other in readings.items()
                        if each != number
                    ]
                    at = SplitPosition(number, place.position, lease, False, place.cursor)
                    self._check(index, reading, place.rows + lease, [at, *others])

    def _read(
        self,
        index: int,
        records: int,
        resumed: Sequence[SplitPosition] = (),
        kept: list[Payload] | None = None,
    ) -> dict[int, _Reading]:
        """What a subtask reads of each of its splits, by their numbers; batches are put into ``kept``."""
        reader = SourceReader(self._copy(), index, self._parallelism, 0.0, resumed=resumed)
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
                now = max(now, reader.next_due)
                empty = 0 if reader.records else empty + 1
                left -= reader.records
                if reader.records:
                    reading = found[reader.current]
                    reading.rows += batch if isinstance(batch, list) else batch.to_pylist()
                    position = reader.positions[reader.current]
                    reading.places.append(_Place(position, len(reading.rows), reader.cursor))
                    if kept is not None:
                        # The source may fill its list again.
                        kept.append([*batch] if isinstance(batch, list) else batch)
        finally:
            reader.close()
        return found

    def _restarts(self, reading: _Reading) -> Iterator[tuple[_Place, int]]:
        """Places to read again from, each also with a lease in whose middle a batch ends."""
        places = reading.places
        if not self._comes_again:
            places = places[-1:] if reading.has_ended else []
        step = max(1, (len(places) - 1) // (RESTARTS - 1))
        for number in sorted({*range(0, len(places), step), len(places) - 1}) if places else ():
            place = places[number]
            yield place, 0
            following = places[number + 1 : number + 3]
            rows = [after.rows - place.rows for after in following]
            # Records that the source left out count in a lease, and are not among the rows.
            if rows and self._comes_again and following[-1].position - place.position == rows[-1]:
                yield place, (rows[0] + rows[-1]) // 2

    def _check(self, index: int, reading: _Reading, before: int, resumed: list[SplitPosition]) -> None:
        """Raises UsageError: reading on from there does not give what comes after ``before`` rows."""
        expected = reading.rows[before:]
        (at, *_) = resumed
        found = self._read(index, max(1, len(expected)), resumed)[at.split].rows
        wrong = [
            number
            for number, (row, other) in enumerate(zip(expected, found, strict=False))
            if repr(row) != repr(other) and row != other  # Of arrays != has no truth value.
        ]
        if not wrong and len(found) < len(expected):
            wrong = [len(found)]
        if not wrong and reading.has_ended and len(found) > len(expected):
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


def _row(rows: Sequence[Any], number: int) -> str:
    return preview(rows[number]) if number < len(rows) else "no further row"
