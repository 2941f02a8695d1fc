"""The two half-ledgers of credit-based flow control (Flink FLINK-7282; ``BufferManager``).

One credit is one free buffer that the consumer has set aside. The producer's half
(:class:`SendCredit`) counts what it was granted and what it spent. The consumer's half
(:class:`ReceiveCredit`) holds the buffers behind the promise: *exclusive* ones, which belong to the
channel for good, and *floating* ones, which it borrows from its gate while the producer's backlog
asks for more. Credit is granted when a buffer is consumed, never when one arrives.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Generic, TypeVar

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["ENDLESS_CREDIT", "BufferKind", "ReceiveCredit", "SendCredit"]

B = TypeVar("B")
"""A free receive buffer; opaque here."""


class BufferKind(Enum):
    """Whose a receive buffer is."""

    EXCLUSIVE = 1
    FLOATING = 2


_EXCLUSIVE, _FLOATING = BufferKind.EXCLUSIVE, BufferKind.FLOATING


ENDLESS_CREDIT: Final = 1 << 62
"""The credit of a channel whose consumer grants none: TCP stops the producer instead."""


class SendCredit:
    """Producer's half. Invariant: ``0 ≤ sent ≤ granted``."""

    __slots__ = ("granted", "sent")

    def __init__(self, initial: int) -> None:
        self.granted = initial
        self.sent = 0

    @property
    def available(self) -> int:
        return self.granted - self.sent

    @property
    def endless(self) -> bool:
        return self.granted >= ENDLESS_CREDIT

    def grant(self, credit: int) -> None:
        """The consumer set ``credit`` more buffers aside.

        Raises:
            RemoteProtocolError: more than ``CREDIT_MAX`` would be outstanding.
        """
        granted = self.granted + credit
        if credit <= 0 or granted - self.sent > limits.CREDIT_MAX:
            raise RemoteProtocolError(
                f"AddCredit {credit} on top of {self.available}: at most {limits.CREDIT_MAX} may be "
                "outstanding"
            )
        self.granted = granted

    def spend(self) -> None:
        """One data buffer leaves.

        Raises:
            LocalProtocolError: there was no credit for it.
        """
        if self.sent >= self.granted:
            raise LocalProtocolError("a data buffer was polled without credit")
        self.sent += 1

    def validate(self) -> None:
        assert 0 <= self.sent <= self.granted


class ReceiveCredit(Generic[B]):
    """Consumer's half, with the free buffers that stand behind the credit.

    Invariants::

        received ≤ granted
        idle = len(exclusive) + len(floating) = granted + unannounced − received
        len(exclusive) ≤ exclusive_total
        waiting ⇒ idle < required
    """

    __slots__ = (
        "exclusive",
        "exclusive_total",
        "floating",
        "granted",
        "idle",
        "received",
        "required",
        "unannounced",
        "waiting",
    )

    def __init__(self, exclusive: list[B]) -> None:
        self.exclusive = deque(exclusive)
        self.floating: deque[B] = deque()
        self.exclusive_total = len(exclusive)
        self.granted = len(exclusive)
        """Buffers promised to the producer so far; begins with the initial credit."""
        self.received = 0
        self.required = 0
        """Idle buffers wanted: the producer's backlog plus the initial credit."""
        self.unannounced = 0
        self.waiting = False
        """Stands in the gate's line for the next floating buffer that comes free."""
        self.idle = len(exclusive)
        """Free buffers of both kinds."""

    def on_backlog(self, backlog: int) -> int:
        """The producer has ``backlog`` buffers more; says how many floating ones to ask for.

        A backlog of 0 asks for nothing beyond the exclusive buffers. While the channel waits in line
        a new backlog only changes what is required.
        """
        required = self.required = backlog + self.exclusive_total if backlog else 0
        return 0 if self.waiting or self.idle >= required else required - self.idle

    def on_floating(self, buffer: B) -> bool:
        """A floating buffer was obtained; True if yet another one is wanted."""
        self.floating.append(buffer)
        self.unannounced += 1
        self.idle += 1
        return self.idle < self.required

    def on_exclusive(self, buffer: B) -> None:
        """A further exclusive buffer was obtained; it is credit, and counts like those of the beginning."""
        self.exclusive.append(buffer)
        self.exclusive_total += 1
        self.unannounced += 1
        self.idle += 1
        if self.required:
            self.required += 1

    def on_buffer(self) -> tuple[BufferKind, B]:
        """A data buffer arrives: take the free buffer that it is to be copied into.

        Floating buffers go first, so that they come back to the gate first.

        Raises:
            RemoteProtocolError: the producer had no credit for it.
        """
        if self.received >= self.granted:
            raise RemoteProtocolError(f"the producer overdrew its credit of {self.granted} buffers")
        self.received += 1
        self.idle -= 1
        if self.required:
            self.required -= 1
        if self.floating:
            return _FLOATING, self.floating.popleft()
        return _EXCLUSIVE, self.exclusive.popleft()

    def on_consumed(self, buffer: B) -> B | None:
        """An exclusive buffer was consumed; returns a floating buffer that is no longer required, or None.

        The exclusive buffer becomes credit again, unless the channel holds more than it requires: then a
        floating buffer goes back to the gate in its place, and no credit is granted.
        """
        self.exclusive.append(buffer)
        if self.floating and self.idle >= max(self.required, self.exclusive_total):
            # The exclusive buffer now backs the credit that the floating one had backed.
            return self.floating.popleft()
        self.unannounced += 1
        self.idle += 1
        return None

    @property
    def is_due(self) -> bool:
        """Whether an AddCredit is to leave for what is unannounced; else that goes with what else leaves.

        Credit waits until it is more than half of the initial credit. A producer with a backlog gets half of
        it, or whatever there is if it has none left.
        """
        credit = self.unannounced
        if 2 * credit > self.exclusive_total:
            return True
        return self.required > 0 and credit > 0 and (2 * credit == self.exclusive_total or self.is_spent)

    @property
    def is_ample(self) -> bool:
        """(Any thread.) The producer has half of the initial credit left and no backlog, and nobody has lent
        this channel a buffer."""
        left = self.granted - self.received
        return 2 * left >= self.exclusive_total and left > 0 and not (self.required or self.floating)

    @property
    def is_spent(self) -> bool:
        """The producer has no credit left."""
        return self.received >= self.granted

    def take_unannounced(self) -> int:
        """The credit of the next AddCredit."""
        credit, self.unannounced = self.unannounced, 0
        self.granted += credit
        return credit

    def limits_hit(self) -> list[str]:
        """Which limits it is at, by their names in :data:`~minishuffle.counters.LIMITS`."""
        limits = [] if self.exclusive else ["exclusive"]
        if self.waiting:
            limits += ["floating"] if self.idle else ["floating", "credit"]
        return limits

    def void(self) -> tuple[list[B], list[B]]:
        """The channel has ended: give up every idle buffer, as (exclusive, floating)."""
        exclusive, floating = list(self.exclusive), list(self.floating)
        self.exclusive.clear()
        self.floating.clear()
        self.required = self.unannounced = self.idle = 0
        self.received = self.granted
        self.waiting = False
        return exclusive, floating

    def validate(self) -> None:
        assert 0 <= self.received <= self.granted
        assert self.idle == len(self.exclusive) + len(self.floating)
        assert self.idle == self.granted + self.unannounced - self.received, self
        assert len(self.exclusive) <= self.exclusive_total
        assert not self.waiting or self.idle < self.required
