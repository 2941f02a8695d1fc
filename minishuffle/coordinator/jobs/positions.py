"""The positions of a job's sources, from which their next attempts continue. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from minishuffle.coordinator.journal.codec import Record
from minishuffle.wire.messages import PoisonSearch, Restoration
from minishuffle.wire.packed import PositionTable, SplitPosition, pack_positions, unpack_positions

__all__ = ["Resumption", "SourceProgress"]


class Resumption(NamedTuple):
    """The state with which the next attempt of a subtask starts, see ``TaskSpec``."""

    positions: bytes = b""
    positions_age: float = 0.0
    files: Mapping[int, int] = MappingProxyType({})
    first_row: int = 0
    committable: bytes = b""
    files_complete: bool = False
    rows_collected: int = 0
    rows_listed: int = 0
    rows_again: int = 0
    state_worker: int = 0
    state_attempt: int = 0
    state_holder: bool = False
    needs_state: bool = False
    holder: int = 0
    restoration: Restoration | None = None
    has_ended: bool = False
    poison: PoisonSearch | None = None

    @property
    def keeps_state(self) -> bool:
        """An earlier attempt keeps its state for this one, because it has moved."""
        return self.state_attempt > 0 and not self.state_holder


@dataclass(frozen=True, slots=True)
class PositionsRecord(Record):
    """The positions of a source's subtask, as they are journaled."""

    at: float
    """Time of the report."""
    splits: PositionTable
    began: int


@dataclass(slots=True)
class _Subtask:
    reported_at: float
    splits: dict[int, SplitPosition] = field(default_factory=dict)
    began: int = 0
    """Where the current attempt began, summed over the splits, without those that are forgotten."""


class SourceProgress:
    """The positions reported by the source subtasks of one job.

    Reports of a subtask arrive in order, and only from its current attempt: the last one counts, even if it
    takes a lease back. A witness's report of a source may be ahead of them: a source's positions never go
    back. Positions of external writes may: a program may have sent less than was leased.

    Args:
        repeats: the next attempt begins at the position, not after the lease (``source_lease`` 0).
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._subtasks: dict[tuple[int, int], _Subtask] = {}
        """By operator and index of the subtask."""

    def report(
        self, operator: int, index: int, positions: bytes, at: float, *, external: bool = False
    ) -> None:
        """Note the positions of a subtask's current attempt; an empty table changes nothing. ``at`` is in
        seconds of any clock.

        Args:
            external: external clients write the rows.

        Raises:
            ValueError: ``positions`` is not a table of positions.
        """
        if positions:
            subtask = self._subtasks.setdefault((operator, index), _Subtask(at))
            subtask.reported_at = at
            for entry in unpack_positions(positions):
                known = subtask.splits.get(entry.split)
                if known is not None and entry.position < known.position and not external:
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

    def recall(self, operator: int, index: int, record: PositionsRecord) -> None:
        """Restore a subtask from its record."""
        splits = {entry.split: entry for entry in unpack_positions(record.splits)}
        self._subtasks[operator, index] = _Subtask(record.at, splits, record.began)

    def rows_made(self, operator: int, index: int) -> int:
        """Rows that the current attempt may have emitted, its leases included, or skipped."""
        subtask = self._subtasks.get((operator, index))
        return 0 if subtask is None else sum(entry.end for entry in subtask.splits.values()) - subtask.began

    def rows_leased(self, operator: int, index: int) -> int:
        """Rows of its leases, which the next attempt emits again; 0 unless ``repeats``."""
        subtask = self._subtasks.get((operator, index)) if self._repeats else None
        return 0 if subtask is None else sum(entry.lease for entry in subtask.splits.values())

    def stand_still(self, seconds: float) -> None:
        """The job was paused for ``seconds``: the age of the positions does not include them, so sources with
        a rate do not catch up."""
        for subtask in self._subtasks.values():
            subtask.reported_at += seconds

    def reset(self, operator: int, index: int, positions: bytes = b"") -> None:
        """The next attempt of a subtask emits its rows again from ``positions``, by default from the
        beginning."""
        subtask = self._subtasks.pop((operator, index), None)
        if subtask is not None:
            self.report(operator, index, positions, subtask.reported_at)

    def start_over(self, operator: int, index: int, positions: bytes, at: float) -> None:
        """The next attempt of a subtask begins at these positions, wherever earlier ones were."""
        self._subtasks.pop((operator, index), None)
        self.report(operator, index, positions, at)

    def resume(self, operator: int, index: int, at: float) -> Resumption:
        """Close the leases of a subtask, and give the positions for its next attempt, which begins now."""
        subtask = self._subtasks.get((operator, index))
        if subtask is None:
            return Resumption()
        entries = list(subtask.splits.values())
        if self._repeats:
            entries = [entry._replace(lease=0) for entry in entries]
        subtask.splits = {entry.split: entry._replace(position=entry.end, lease=0) for entry in entries}
        subtask.began = sum(entry.end for entry in entries)
        return Resumption(pack_positions(entries), max(0.0, at - subtask.reported_at))

    def forget(self, operator: int, are_gone: Callable[[str], bool]) -> None:
        """Forget the splits of an operator whose names ``are_gone``: they will not be written again."""
        for (of, _), subtask in self._subtasks.items():
            for entry in list(subtask.splits.values()) if of == operator else ():
                if entry.cursor is not None and are_gone(entry.cursor.name):
                    del subtask.splits[entry.split]
                    subtask.began -= entry.end
