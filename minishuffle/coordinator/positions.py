"""Where the sources of a job are, so that a next attempt goes on there. Pure: times are passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions

__all__ = ["Resumption", "SourceProgress"]


class Resumption(NamedTuple):
    """What the next attempt of a source's subtask gets (see ``TaskSpec``), and what it costs."""

    positions: bytes
    positions_age: float
    lease_rows: int
    """Rows that the attempt before may have emitted beyond the positions that it was at when it reported:
    they are not emitted again, or with ``repeats`` all are."""


@dataclass(slots=True)
class _Subtask:
    reported_at: float
    splits: dict[int, SplitPosition] = field(default_factory=dict)


class SourceProgress:
    """The positions that the source subtasks of one job have reported.

    Reports of one subtask come in order, and only from its current attempt: what it says last counts, also
    when it takes a lease back.

    Args:
        repeats: the next attempt begins at the position, not behind the lease (``source_lease`` 0).
    """

    def __init__(self, *, repeats: bool) -> None:
        self.repeats = repeats
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

    def resume(self, operator: int, index: int, at: float) -> Resumption:
        """Have the next attempt of a subtask go on, now: the leases of the one before are closed."""
        subtask = self._subtasks.get((operator, index))
        if subtask is None:
            return Resumption(b"", 0.0, 0)
        entries = list(subtask.splits.values())
        rows = sum(entry.lease for entry in entries)
        if self.repeats:
            entries = [entry._replace(lease=0) for entry in entries]
        subtask.splits = {entry.split: entry._replace(position=entry.end, lease=0) for entry in entries}
        return Resumption(pack_positions(entries), max(0.0, at - subtask.reported_at), rows)
