"""Where the sources of a job are, so that a next attempt goes on there. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from minishuffle.coordinator.journal.codec import Record
from minishuffle.wire.messages import WritePosition
from minishuffle.wire.packed import PositionTable, SplitPosition, pack_positions, unpack_positions

__all__ = ["Resumption", "SourceProgress", "WriteProgress"]


class Resumption(NamedTuple):
    """What the next attempt of a subtask gets, see ``TaskSpec``."""

    positions: bytes = b""
    positions_age: float = 0.0
    files: Mapping[int, int] = MappingProxyType({})
    writes: tuple[WritePosition, ...] = ()
    first_row: int = 0
    committable: bytes = b""


@dataclass(frozen=True, slots=True)
class PositionsRecord(Record):
    """Where the attempts of a source's subtask are."""

    at: float
    """When that was reported."""
    splits: PositionTable
    began: int


@dataclass(frozen=True, slots=True)
class WritesRecord(Record):
    """Where they are of one that external clients write to."""

    began: int
    entries: tuple[WritePosition, ...]


@dataclass(slots=True)
class _Subtask:
    reported_at: float
    splits: dict[int, SplitPosition] = field(default_factory=dict)
    began: int = 0
    """Where the current attempt began, summed over the splits, without those that are forgotten."""


class SourceProgress:
    """The positions that the source subtasks of one job have reported.

    Reports are only of the current attempt of a subtask, and come in order: what it says last counts, also
    when it takes a lease back. What a witness has said may be ahead of them: positions never go back.

    Args:
        repeats: the next attempt begins at the position, not behind the lease (``source_lease`` 0).
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._subtasks: dict[tuple[int, int], _Subtask] = {}
        """By operator and index."""

    def report(self, operator: int, index: int, positions: bytes, at: float) -> None:
        """The current attempt is there; an empty table says nothing. ``at`` is in seconds of any clock.

        Raises:
            ValueError: ``positions`` is no table of positions.
        """
        if positions:
            subtask = self._subtasks.setdefault((operator, index), _Subtask(at))
            subtask.reported_at = at
            for entry in unpack_positions(positions):
                known = subtask.splits.get(entry.split)
                if known is not None and entry.position < known.position:
                    continue
                subtask.splits[entry.split] = entry
                if entry.forgotten:
                    del subtask.splits[entry.split]
                    subtask.began -= entry.end

    def record(self, operator: int, index: int) -> PositionsRecord | None:
        """For the journal; None if nothing was reported."""
        subtask = self._subtasks.get((operator, index))
        if subtask is None:
            return None
        return PositionsRecord(subtask.reported_at, pack_positions(subtask.splits.values()), subtask.began)

    def recall(self, operator: int, index: int, record: PositionsRecord | None) -> None:
        """A subtask is where the record says."""
        if record is not None:
            splits = {entry.split: entry for entry in unpack_positions(record.splits)}
            self._subtasks[operator, index] = _Subtask(record.at, splits, record.began)

    def rows_made(self, operator: int, index: int) -> int:
        """Rows that the current attempt may have emitted, its leases included, or skipped."""
        subtask = self._subtasks.get((operator, index))
        return 0 if subtask is None else sum(entry.end for entry in subtask.splits.values()) - subtask.began

    def rows_leased(self, operator: int, index: int) -> int:
        """The rows of these that the next attempt emits, whether this one did or not."""
        subtask = self._subtasks.get((operator, index)) if self._repeats else None
        return 0 if subtask is None else sum(entry.lease for entry in subtask.splits.values())

    def stand_still(self, seconds: float) -> None:
        """The job was paused for so long: sources emit nothing for that time later on."""
        for subtask in self._subtasks.values():
            subtask.reported_at += seconds

    def begin_anew(self, operator: int, index: int, positions: bytes = b"") -> None:
        """The next attempt of a subtask emits everything once more from there on, by default all."""
        subtask = self._subtasks.pop((operator, index), None)
        if subtask is not None:
            self.report(operator, index, positions, subtask.reported_at)

    def resume(self, operator: int, index: int, at: float) -> Resumption:
        """Have the next attempt of a subtask go on, now: the leases of the one before are closed."""
        subtask = self._subtasks.get((operator, index))
        if subtask is None:
            return Resumption()
        entries = list(subtask.splits.values())
        if self._repeats:
            entries = [entry._replace(lease=0) for entry in entries]
        subtask.splits = {entry.split: entry._replace(position=entry.end, lease=0) for entry in entries}
        subtask.began = sum(entry.end for entry in entries)
        return Resumption(pack_positions(entries), max(0.0, at - subtask.reported_at))


@dataclass(slots=True)
class _Writes:
    partitions: dict[tuple[str, int], WritePosition] = field(default_factory=dict)
    """By write and partition."""
    began: int = 0
    """Where the current attempt began, summed over what is still known of it."""


class WriteProgress:
    """What the subtasks that external clients write to have reported of each partition of each write.

    A partition belongs to one subtask. Reports come in order, as those of sources do.

    Args:
        repeats: the next attempt takes everything behind the position again, not only what is behind the
            lease (``source_lease`` 0).
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._subtasks: dict[tuple[int, int], _Writes] = {}
        """By operator and index."""

    def report(self, operator: int, index: int, entries: Iterable[WritePosition]) -> None:
        """The current attempt is there."""
        for entry in entries:
            known = self._subtasks.setdefault((operator, index), _Writes())
            known.partitions[entry.write, entry.partition] = entry

    def rows_made(self, operator: int, index: int) -> int:
        """Rows that the current attempt may have taken, its leases included."""
        known = self._subtasks.get((operator, index))
        return 0 if known is None else sum(entry.end for entry in known.partitions.values()) - known.began

    def rows_leased(self, operator: int, index: int) -> int:
        """The rows of these that the next attempt takes, whether this one did or not."""
        known = self._subtasks.get((operator, index)) if self._repeats else None
        return 0 if known is None else sum(entry.lease for entry in known.partitions.values())

    def resume(self, operator: int, index: int) -> tuple[WritePosition, ...]:
        """Have the next attempt of a subtask go on, now: the leases of the one before are closed.

        What lies in a lease may have been taken or not: if it is not sent again, nothing is known of the rows
        below its end any more, and ``base`` is there.
        """
        known = self._subtasks.get((operator, index))
        if known is None:
            return ()
        for key, entry in known.partitions.items():
            change: dict[str, int] = {"lease": 0}
            if entry.lease and not self._repeats:
                change |= {"position": entry.end, "base": entry.end, "checksum": 0}
            known.partitions[key] = entry.model_copy(update=change)
        known.began = sum(entry.end for entry in known.partitions.values())
        return tuple(known.partitions.values())

    def record(self, operator: int, index: int) -> WritesRecord | None:
        """For the journal; None if nothing was reported."""
        known = self._subtasks.get((operator, index))
        return None if known is None else WritesRecord(known.began, tuple(known.partitions.values()))

    def recall(self, operator: int, index: int, record: WritesRecord | None) -> None:
        """A subtask is where the record says."""
        if record is not None:
            self.report(operator, index, record.entries)
            self._subtasks.setdefault((operator, index), _Writes()).began = record.began

    def forget(self, write: str) -> None:
        """Nobody will ask for a write again."""
        for known in self._subtasks.values():
            for key in [key for key in known.partitions if key[0] == write]:
                known.began -= known.partitions.pop(key).end
