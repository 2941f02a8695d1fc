"""A worker that is to leave: what it waits for, until when, and when it goes at once. Pure.

It takes no new slots. Its slots move as soon as others have free ones; until then its tasks run on. When
nothing runs on it and it keeps nothing that others have yet to read, it is shut down. If its time is up
before that, its tasks are *evicted*: they end in order, so that sources stand at exact positions, and wait
for a slot, as those of a lost worker do.

One that leaves because its process was sent SIGTERM, as when a machine or a set of containers is stopped,
goes at once when no worker stays: there is nobody to wait for. (Spark: decommissioning of executors.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from minishuffle.coordinator.journal.codec import Record

__all__ = ["EVICTION_SECONDS_MAX", "Drain"]

EVICTION_SECONDS_MAX: Final = 0.75
"""How long evicted tasks may take to end."""


@dataclass(slots=True)
class Drain(Record):
    """Times are of the wall clock: a coordinator that takes over goes on with them."""

    until: float | None
    """When its tasks are evicted; None: they have all the time that they need."""
    signalled: bool
    """Its process was sent SIGTERM."""
    others_leave: bool = False
    """Others have begun to leave, or left, since it did."""
    phase: Literal["moving", "evicting", "ending"] = "moving"
    """Ending: it was sent Shutdown."""

    def order(self, until: float | None, *, signalled: bool) -> None:
        """Somebody wants it to leave once more: what is stricter counts."""
        self.signalled = self.signalled or signalled
        if self.phase == "moving":
            self.until = min((each for each in (self.until, until) if each is not None), default=None)

    def join(self) -> None:
        """Another worker leaves, too."""
        self.others_leave = True

    def is_to_evict(self, at: float, *, others_stay: bool) -> bool:
        """True, once, when its tasks are to be evicted."""
        is_over = self.until is not None and at >= self.until
        is_alone = self.signalled and self.others_leave and not others_stay
        if self.phase != "moving" or not (is_over or is_alone):
            return False
        self.phase, self.until = "evicting", at + EVICTION_SECONDS_MAX
        return True

    def is_to_end(self, at: float, *, needed: bool) -> bool:
        """True, once, when the worker is to shut down."""
        is_over = self.phase == "evicting" and self.until is not None and at >= self.until
        if self.phase == "ending" or (needed and not is_over):
            return False
        self.phase, self.until = "ending", None
        return True

    def link_renewed(self) -> None:
        """The worker has another control link: Shutdown may have been lost with the last one."""
        if self.phase == "ending":
            self.phase, self.until = "evicting", 0.0

    def record(self) -> Drain:
        """For the journal. The next coordinator sends Shutdown again."""
        return replace(self, phase="evicting", until=0.0) if self.phase == "ending" else self
