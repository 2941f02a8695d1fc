"""Draining: how a worker leaves the cluster in order. Pure.

A draining worker takes no new slots. Its slots move as soon as others have free ones; until then its tasks
run on. When it has no tasks, and no partitions or rows that others still have to read, it is shut down. If
the drain's deadline passes earlier, its tasks are *evicted*: they end in order, so that sources stop at exact
positions, and then wait for a slot like the tasks of a lost worker.

A worker that leaves because its process got SIGTERM, as when a machine or a set of containers is stopped,
leaves at once if all other workers leave too. (Spark: decommissioning of executors.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from minishuffle.coordinator.journal.codec import Record

__all__ = ["EVICTION_SECONDS_MAX", "Drain"]

EVICTION_SECONDS_MAX: Final = 0.75
"""Seconds that evicted tasks may take to end."""


@dataclass(slots=True)
class Drain(Record):
    """The drain of one worker. Times are wall clock, so the next coordinator can continue with them."""

    until: float | None
    """The time at which its tasks are evicted; None: never."""
    signalled: bool
    """Its process got SIGTERM."""
    others_leave: bool = False
    """Other workers have begun to leave, or have left, since this one began."""
    phase: Literal["moving", "evicting", "ending"] = "moving"
    """Ending: Shutdown was sent to the worker."""

    def order(self, until: float | None, *, signalled: bool) -> None:
        """A repeated request to leave: the stricter limits count."""
        self.signalled = self.signalled or signalled
        if self.phase == "moving":
            self.until = min((each for each in (self.until, until) if each is not None), default=None)

    def join(self) -> None:
        """Another worker leaves as well."""
        self.others_leave = True

    def is_to_evict(self, at: float, *, others_stay: bool) -> bool:
        """True, once, when its tasks must be evicted."""
        is_over = self.until is not None and at >= self.until
        is_alone = self.signalled and self.others_leave and not others_stay
        if self.phase != "moving" or not (is_over or is_alone):
            return False
        self.phase, self.until = "evicting", at + EVICTION_SECONDS_MAX
        return True

    def is_to_end(self, at: float, *, needed: bool) -> bool:
        """True, once, when the worker must shut down."""
        is_over = self.phase == "evicting" and self.until is not None and at >= self.until
        if self.phase == "ending" or (needed and not is_over):
            return False
        self.phase, self.until = "ending", None
        return True

    def link_renewed(self) -> None:
        """The worker has a new control link: Shutdown may have been lost with the old one."""
        if self.phase == "ending":
            self.phase, self.until = "evicting", 0.0

    def record(self) -> Drain:
        """For the journal. The next coordinator sends Shutdown again."""
        return replace(self, phase="evicting", until=0.0) if self.phase == "ending" else self
