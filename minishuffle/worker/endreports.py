"""Reports of the partitions that the tasks of a worker have read to the end. Pure.

Ends are collected for ENDS_WAIT_SECONDS and sent together, in one message per job. If the task itself ends
within this time, its channel ends are not sent: its own final report already implies them.
"""

from __future__ import annotations

from typing import Final

from minishuffle.ids import AttemptId
from minishuffle.wire.messages import ChannelEnds, EndsRead
from minishuffle.worker.registry import ChannelKey

__all__ = ["ENDS_WAIT_SECONDS", "EndReports"]

ENDS_WAIT_SECONDS: Final = 0.05
"""How long an end waits for others."""


class EndReports:
    """Ends read by running attempts and not reported yet."""

    def __init__(self) -> None:
        self._read: dict[AttemptId, dict[int, list[int]]] = {}
        """By edge, producers."""
        self._due: float | None = None

    def read(self, channel: ChannelKey, now: float) -> None:
        """An attempt has read that channel to the end."""
        self._read.setdefault(channel.attempt, {}).setdefault(channel.edge, []).append(channel.producer)
        self._due = now + ENDS_WAIT_SECONDS if self._due is None else self._due

    def forget(self, attempt: AttemptId) -> None:
        """The attempt has ended."""
        self._read.pop(attempt, None)

    def next_deadline(self) -> float | None:
        """When :meth:`take` has something."""
        return self._due

    def take(self, term: int, now: float) -> list[EndsRead]:
        """The messages that are due, one for each job."""
        if self._due is None or now < self._due:
            return []
        found: dict[str, list[ChannelEnds]] = {}
        for attempt, edges in self._read.items():
            subtask = attempt.subtask
            found.setdefault(subtask.job, []).extend(
                ChannelEnds(
                    operator=subtask.operator,
                    index=subtask.index,
                    attempt=attempt.attempt,
                    edge=edge,
                    producers=producers,
                )
                for edge, producers in edges.items()
            )
        self._read.clear()
        self._due = None
        return [EndsRead(term=term, job=job, ends=ends) for job, ends in found.items()]
