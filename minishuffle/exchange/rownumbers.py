"""The numbers of a channel's rows, on the side of the consumer.

The rows that a producer makes for a consumer over an edge are numbered from 0 on, also those that are dropped
on the way. A *version* are the rows of one attempt, and of the later ones that make the same rows in the same
order. So a row is known by version and number, whatever elements and buffers it comes in. Where rows may be
lost, numbers begin anew with each version. Where producers retain what they have sent, they go on: a new
version begins somewhere in the rows of the one before, and takes the place of what lies behind.

Each buffer says the number of the first row that begins in it, and the end of the partition how many rows
there were. Within one attachment the numbers follow each other. The next attachment may begin further on:
what lies between was lost with a link. Or it begins before: another attempt makes the version once more, and
the task leaves out what it has had. What was missed stays missed then: behind rows that follow it, it would
come in disorder.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from minishuffle.exchange.watermarks import BEGINNING_OF_TIME
from minishuffle.ids import FIRST_ATTEMPT

__all__ = ["NO_VERSION", "ChannelRows", "RetainedRowNumbers", "RowNumbers"]

NO_VERSION: Final = 0
"""That of a producer which never runs again."""


class ChannelRows(NamedTuple):
    """How far a task is in the rows of one channel, as its snapshots say it."""

    producer: int
    """Index of the producer subtask."""
    version: int
    """The version of the rows that were taken last."""
    row: int
    """Rows below were taken."""
    ended: bool = False
    """So was the end behind them."""


class RowNumbers:
    """How far a task is in the rows of one channel.

    Invariants: ``rows given out of this version + missed ≤ next``; each number of a version is given out at
    most once, and the numbers that are given out ascend.
    """

    __slots__ = (
        *("_finished", "_half", "at", "begun", "lost", "missed", "next"),
        *("repeats_from", "repeats_to", "version"),
    )

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.at = 0
        """The number of the next row that comes, once the attachment has ``begun``."""
        self.next = 0
        """The number of the next row that is new: those before it were given out or missed."""
        self.begun = False
        """It is known with which row the attachment begins."""
        self.missed = 0
        """Rows before ``next`` that did not come, and have not come once more either."""
        self.lost = 0
        """Rows that were missed, and then left out when they came once more; in all versions."""
        self.repeats_from: int | None = None
        """The watermark of a producer that makes rows once more in another version, as it has said in that;
        None: it does not, or has caught up. Rows behind it that are late came in time before."""
        self.repeats_to = 0
        """The number behind the rows that came of a version before."""
        self._half = 0
        self._finished = False

    def wanted(self, version: int) -> int:
        """The number from which on rows of that version are new."""
        return self.next if version == self.version else 0

    def detach(self, half: int) -> None:
        """Nothing more comes of the attachment, which has begun an element of so many rows."""
        self._half += half

    def attach(self, version: int) -> int:
        """What comes now is of that version; gives the rows of the element that was begun last, if it is of
        another."""
        self.begun = False
        if version == self.version:
            return 0
        self.at = self.next = self.missed = 0  # first: the loop looks at both
        self.version = version
        return self.close()

    def begin(self, row: int) -> tuple[int, int]:
        """The attachment begins with that row. Gives how many are missed before it, and the rows of the
        element that was begun last, if it does not come once more."""
        half = self.close()
        if row <= self.at:
            half = 0
        missed = max(0, row - self.next)
        self.missed += max(0, missed - half)  # those of the element have come, and count as incomplete
        self.next += missed
        self.at, self.begun = row, True
        return missed, half

    def close(self) -> int:
        """Nothing comes any more: gives the rows of the element that was begun last."""
        half, self._half = self._half, 0
        return half

    def take(self, rows: int) -> int:
        """An element with so many rows has come; gives how many of the first of them are left out."""
        begin, known = self.at, self.next
        self.at = end = begin + rows
        if self._finished:
            return rows
        if end >= known:
            self.next = end
            if self.missed and begin < known:  # those that were missed have come with the others
                self.lost += self.missed
                self.missed = 0
        return min(rows, known - begin) if begin < known else 0

    def reach(self, time: int, *, idle: bool, watermark: int) -> None:
        """The producer has sent a watermark, and that of all channels together is ``watermark`` by now. Once
        it is as far, and behind the rows that came before, it has caught up."""
        if self.repeats_from is not None:
            has_caught_up = self.begun and self.at >= self.repeats_to and time >= watermark
            self.repeats_from = None if idle or has_caught_up else max(self.repeats_from, time)

    def finish(self) -> None:
        """The end has come: whatever comes once more is left out."""
        self._finished = True


class RetainedRowNumbers(RowNumbers):
    """The same where producers retain what they have sent: nothing is missed, and numbers go on through all
    versions.

    Invariants: ``row of each attachment ≤ next`` of then; the rows given out are ``next + again``, less what
    the task was restored with.
    """

    __slots__ = ("_attached", "again")

    def __init__(self) -> None:
        super().__init__()
        self.again = 0
        """Rows that came before, in another version, and may have come once more."""
        self._attached = NO_VERSION
        """The version of what comes now; ``version`` is that of the rows that were taken last."""

    def restore(self, version: int, row: int) -> None:
        """(Before anything is taken.) An earlier attempt has taken rows of that version, up to that one."""
        self.next = row  # first: the loop looks at both
        self.version = version

    def detach(self, half: int) -> None:
        """The element that was begun comes once more."""

    def attach(self, version: int) -> int:
        self.begun = False
        if FIRST_ATTEMPT < version != self._attached:
            self.repeats_from = BEGINNING_OF_TIME
        self._attached = version
        return 0

    def begin(self, row: int) -> tuple[int, int]:
        """As that of all channels. A version that is new begins with that row, whatever was taken beyond it:
        these rows are new."""
        missed = max(0, row - self.next)
        if self._attached != self.version and not self._finished:
            self.again += max(0, self.next - row)
            self.repeats_to = self.next
            self.next = row
            self.version = self._attached
        self.at, self.begun = row, True
        return missed, 0
