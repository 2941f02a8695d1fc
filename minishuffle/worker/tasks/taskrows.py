"""The rows of a task's inputs: how many it has dealt with, has in hand, and has lost when it ends. Pure."""

from __future__ import annotations

from minishuffle.counters import TaskCounters

__all__ = ["TaskRows"]


class TaskRows:
    """The rows that the chain of one attempt has read.

    The task's thread writes. Once an attempt is abandoned, the loop says what it has lost: see
    :meth:`write_off`.

    Args:
        counters: of the task, which say what it has passed on.
    """

    __slots__ = ("_counters", "_failed", "_in_hand", "_late", "_left", "taken")

    def __init__(self, counters: TaskCounters) -> None:
        self.taken = 0
        """Rows that the chain has read, without rows that the next attempt reads again."""
        self._counters = counters
        self._in_hand = (0, 0)
        """Rows of the current batch, and the number of rows passed on before it."""
        self._failed = self._left = self._late = 0

    def _passed_on(self) -> int:
        return self._counters.records_out + self._counters.rows_filed

    # --- task ------------------------------------------------------------------------------------

    def take(self, rows: int) -> None:
        """The chain gets a batch."""
        self._in_hand = rows, self._passed_on()

    def done(self, *, repeated: bool) -> None:
        """It has taken the batch, which the next attempt gets again if it is ``repeated``."""
        if not repeated:
            self.taken += self._in_hand[0]
        self._in_hand = 0, 0

    def fail(self, kept: int) -> None:
        """The chain has raised. Rows of the batch are lost unless they were passed on or ``kept`` as state.
        Rows kept earlier and passed on now do not belong to this batch."""
        rows, written = self._in_hand
        self._failed = min(max(0, rows - (self._passed_on() - written + kept)), rows)

    def drop_late(self, rows: int) -> None:
        """Rows were dropped because they were late after a restart of their producer."""
        self._late += rows

    def leave(self, rows: int) -> None:
        """The task has ended, and has not taken these rows of batches that it had read from a gate."""
        self._left = rows

    # --- loop ------------------------------------------------------------------------------------

    def write_off(self) -> None:
        """The thread does not end: the rows that it has in hand are lost."""
        rows, written = self._in_hand
        self._failed = max(0, rows - (self._passed_on() - written))

    def dropped(self) -> dict[str, int]:
        """Rows that are lost so far, by reason."""
        found = {
            "failed_batch": self._failed,
            "queue_discarded": self._left,
            "late_after_recovery": self._late,
        }
        return {reason: rows for reason, rows in found.items() if rows}
