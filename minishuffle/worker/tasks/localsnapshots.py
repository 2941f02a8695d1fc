"""When a task takes local snapshots, which are kept, and what its producers need not retain any more. Pure.

A task takes snapshots of its own accord, uncoordinated with others, and its *holder* on another worker keeps
few of them. The next attempt goes on from the oldest one that is kept. So that this one serves whatever its
consumers ask for, though they die with it, a snapshot becomes the oldest once each consumer has said that
it will never ask for rows below those written up to it. And producers hear that rows are stable once the
snapshot that covers them is the oldest that the holder has: what a next attempt may ask for is retained.

Three are kept at most: the oldest, which the consumers hold back, the newest, and one between, so that the
oldest moves on however far behind they are. One that serves all consumers when it is taken, as that of a task
without any does, takes the place of all before it as it arrives. Number 0 is what the attempt began with: the
beginning of the job, or the snapshot of the attempt before. At the beginning of the job one is taken at once,
which says when that was: a source with a pace catches up on what has passed since.

A snapshot becomes the oldest sooner if those of the consumers follow it closely. So all are due at the same
times, without a message: at multiples of the interval by the cluster's clock, those of a consumer a little
later than those of its producer (``phase``).

(Uncoordinated checkpoints with a log at the sender: Elnozahy et al., "A Survey of Rollback-Recovery Protocols
in Message-Passing Systems", 2002. Flink has coordinated ones alone.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from minishuffle.exchange.rownumbers import ChannelRows
from minishuffle.runtime.statesnapshot import TaskStateSnapshot

__all__ = ["LocalSnapshots", "covers"]

KEPT_MAX: Final = 3
_BEGUN: Final = 0
"""The number of what the attempt has begun with."""


@dataclass(slots=True)
class _Kept:
    number: int
    counted: TaskStateSnapshot
    """Without the state of operators."""
    at: float
    """When it was taken, or the task was found to have done nothing since."""
    safe: bool = False
    """The holder has it."""


class LocalSnapshots:
    """The snapshots of one attempt; all belongs to its thread.

    Invariants, with ``stable`` as the consumers have said last::

        1 ≤ snapshots kept ≤ 3, and their numbers ascend
        rows written, oldest kept ≤ stable of each consumer
        rows announced as stable ≤ rows taken of the oldest snapshot at the holder
        processor's seconds for one ≤ cost_max · seconds from its end to the next, unless that was asked for

    Args:
        begun: what the attempt goes on from.
        interval: seconds between two snapshots.
        phase: they are due at this time and any number of intervals from it.
        cost_max: the greatest part of its time for which a task takes snapshots.
        now: seconds, on the clock of every other ``now``.
        begun_at: when ``begun`` was taken, on that clock.
        is_held: whether there is a holder, and it has ``begun``.
    """

    def __init__(
        self,
        begun: TaskStateSnapshot,
        *,
        interval: float,
        phase: float,
        cost_max: float,
        now: float,
        begun_at: float,
        is_held: bool = True,
    ) -> None:
        self._interval, self._phase, self._cost_max = interval, phase, cost_max
        self._kept = [_Kept(_BEGUN, replace(begun, parts={}), begun_at, safe=True)]
        self._number = _BEGUN
        """The number of the snapshot taken last."""
        self._lost = _BEGUN - is_held
        """The holder has none up to that one."""
        self._covered_at: float | None = begun_at
        """When the oldest snapshot at the holder was taken, as :class:`_Kept` says it."""
        self._has_holder = is_held
        self._oldest_held = self._announced = _BEGUN
        """The oldest snapshot at the holder, and the one whose rows were announced as stable."""
        self._looked_at, self._cost = now if begun != TaskStateSnapshot() else -math.inf, 0.0
        self._hurries = False

    @property
    def numbers(self) -> list[int]:
        """The numbers of snapshots that the holder is to keep; a next attempt goes on from the first."""
        return [each.number for each in self._kept]

    @property
    def taken(self) -> Mapping[int, Sequence[ChannelRows]]:
        """By edge, the rows that the oldest of them covers."""
        return self._kept[0].counted.taken

    @property
    def is_protected(self) -> bool:
        """Whether the holder has a snapshot that a next attempt can go on from."""
        return self._oldest_held > self._lost

    @property
    def has_holder(self) -> bool:
        """Whether there is a holder to which they are sent."""
        return self._has_holder

    @property
    def covered_at(self) -> float | None:
        """When the task was where a next attempt begins; None: the holder has nothing for one."""
        return self._covered_at if self.is_protected else None

    # --- when ------------------------------------------------------------------------------------

    def due(self) -> float:
        """When the next one is to be taken; inf: not before the holder has said something."""
        if not self._kept[-1].safe:
            return math.inf
        if self._hurries or self._looked_at == -math.inf:
            return self._looked_at + self._cost
        earliest = self._looked_at + max(self._interval / 2, self._cost / self._cost_max)
        return self._phase + self._interval * math.ceil((earliest - self._phase) / self._interval)

    def ask(self) -> None:
        """Have the next one taken as soon as the last has taken no more than half of the time."""
        self._hurries = True

    @property
    def is_urgent(self) -> bool:
        """Whether the next one was asked for."""
        return self._hurries

    def is_news(self, counted: TaskStateSnapshot) -> bool:
        """Whether the task has done anything since the last one, which says the same otherwise."""
        return counted != self._kept[-1].counted

    def postpone(self, now: float) -> None:
        """There is no need for one: the task has done nothing since the last."""
        self._looked_at, self._hurries = now, False
        self._kept[-1].at = now
        self._note_covered()

    @property
    def awaited(self) -> Mapping[int, Sequence[int]] | None:
        """Below which rows of each edge :meth:`advance` needs that no consumer asks; None: whatever they say,
        there is no other oldest snapshot. It is in force from when it was read before ``stable`` was."""
        return self._kept[1].counted.written if len(self._kept) > 1 and self._kept[1].safe else None

    # --- what happens ----------------------------------------------------------------------------

    def take(self, counted: TaskStateSnapshot, now: float, stable: Mapping[int, Sequence[int]]) -> int:
        """One is taken, and sent to the holder: gives its number. Say behind it which are to be kept.
        ``stable`` is as for :meth:`advance`."""
        self._number += 1
        if covers(stable, counted.written):
            self._kept.clear()  # the holder gives up what it has once it has this one
        elif len(self._kept) == KEPT_MAX:
            self._kept.pop()
        self._kept.append(_Kept(self._number, replace(counted, parts={}), now))
        self._hurries = False
        return self._number

    def note_cost(self, seconds: float, now: float) -> None:
        """The last snapshot is taken and sent, for which the thread had a processor for so many seconds."""
        self._looked_at, self._cost = now, seconds

    def hold(self, number: int, kept: Sequence[int]) -> None:
        """The holder has the snapshot ``number`` and all before it, and keeps those numbered ``kept``.
        Number 0 adds none."""
        for each in self._kept:
            each.safe = each.safe or each.number <= number
        self._oldest_held, self._has_holder = max(kept[0], self._oldest_held), True
        self._note_covered()

    def _note_covered(self) -> None:
        if self._lost < self._kept[0].number <= self._oldest_held:
            self._covered_at = self._kept[0].at

    def advance(self, stable: Mapping[int, Sequence[int]]) -> bool:
        """The consumers have said which rows of each edge they will not ask for any more. Whether there is
        another oldest snapshot: say which ones are to be kept."""
        for at in range(len(self._kept) - 1, 0, -1):
            each = self._kept[at]
            if each.safe and covers(stable, each.counted.written):
                del self._kept[:at]
                return True
        return False

    def renew_holder(self) -> None:
        """Another holder has none of them, and all are sent to it."""
        for each in self._kept:
            each.safe = False
        self._oldest_held = self._lost = _BEGUN - 1
        self._has_holder = True

    def change_holder(self) -> None:
        """Another holder has none of them. A next attempt could go on from none until one serves all
        consumers again."""
        self._kept = [_Kept(_BEGUN, TaskStateSnapshot(), -math.inf, safe=True)]
        self._lost, self._has_holder, self._hurries = self._number, True, True
        self._looked_at, self._covered_at = -math.inf, None

    def stable(self) -> Mapping[int, Sequence[ChannelRows]] | None:
        """By edge, the rows that producers need not retain any more; None: nothing new since then."""
        oldest = self._kept[0]
        if not self._announced < oldest.number <= self._oldest_held:
            return None
        self._announced = oldest.number
        return oldest.counted.taken


def covers(stable: Mapping[int, Sequence[int]], written: Mapping[int, Sequence[int]]) -> bool:
    """Whether consumers ask for none of the rows written, as they have said which ones are stable."""
    return all(
        row <= said for edge, rows in written.items() for row, said in zip(rows, stable[edge], strict=True)
    )
