"""Where the sources of a job are, so that a next attempt goes on there. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions

__all__ = ["Resumption", "SourceProgress"]


class Resumption(NamedTuple):
    """What the next attempt of a subtask gets, see ``TaskSpec``."""

    positions: bytes
    positions_age: float
    files: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class _Subtask:
    reported_at: float
    splits: dict[int, SplitPosition] = field(default_factory=dict)
    began: int = 0
    """Where the current attempt began, summed over the splits."""


class SourceProgress:
    """The positions that the source subtasks of one job have reported.

    Reports of one subtask come in order, and only from its current attempt: what it says last counts, also
    when it takes a lease back.

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
            struct.error: ``positions`` is no table of positions.
        """
        if positions:
            subtask = self._subtasks.setdefault((operator, index), _Subtask(at))
            subtask.reported_at = at
            subtask.splits.update((entry.split, entry) for entry in unpack_positions(positions))

    def rows_made(self, operator: int, index: int) -> int:
        """Rows that the current attempt may have emitted, its leases included, or skipped."""
        subtask = self._subtasks.get((operator, index))
        return 0 if subtask is None else sum(entry.end for entry in subtask.splits.values()) - subtask.began

    def resume(self, operator: int, index: int, at: float) -> Resumption:
        """Have the next attempt of a subtask go on, now: the leases of the one before are closed."""
        subtask = self._subtasks.get((operator, index))
        if subtask is None:
            return Resumption(b"", 0.0)
        entries = list(subtask.splits.values())
        if self._repeats:
            entries = [entry._replace(lease=0) for entry in entries]
        subtask.splits = {entry.split: entry._replace(position=entry.end, lease=0) for entry in entries}
        subtask.began = sum(entry.end for entry in entries)
        return Resumption(pack_positions(entries), max(0.0, at - subtask.reported_at))
