"""Taps of edges: samples of the rows that this worker's subtasks write for one edge.

A tap begins with its first question. It ends with a question that says so, or after ``TAP_SECONDS_MAX``
without a question. Several clients that look at the same edge have a tap each. (Loop.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minishuffle import limits
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.rowtaps import RowTap, TappedFields
from minishuffle.ids import AttemptId
from minishuffle.wire.inquiries import TappedEdge
from minishuffle.worker.tasks.deployment import Deployment

__all__ = ["EdgeTaps"]


@dataclass(slots=True)
class _EdgeTap:
    job: str
    edge: int
    asked_at: float
    rows: list[TappedFields] = field(default_factory=list)
    given: int = 0
    """How many of the rows were in answers."""
    taps: dict[AttemptId, RowTap] = field(default_factory=dict)
    """By producer."""


class EdgeTaps:
    """The taps of one worker.

    Args:
        clock: the loop's, in seconds.
        wall: seconds since 1970; any thread may call it.
    """

    def __init__(self, deployment: Deployment, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._deployment = deployment
        self._clock = clock
        self._wall = wall
        self._open: dict[str, _EdgeTap] = {}
        """By id, ordered by the last question, the oldest first."""

    def answer(self, job: str, question: TappedEdge) -> bytes:
        """As JSON, the rows since the question before, and how many producers of the edge are here."""
        now = self._clock()
        tap = self._open.pop(question.tap, None) or _EdgeTap(job, question.edge, now)
        tap.asked_at = now
        self._open[question.tap] = tap
        producers = dict(self._producers(tap))
        for attempt in producers.keys() - tap.taps.keys():
            tap.taps[attempt] = RowTap(attempt, tap.rows, self._wall)
            producers[attempt].taps += (tap.taps[attempt],)
        for attempt in tap.taps.keys() - producers.keys():
            del tap.taps[attempt]
        rows = tap.rows[tap.given : limits.TAP_ROWS]
        tap.given += len(rows)
        if question.ends:
            self._end(question.tap)
        while len(self._open) > limits.TAPS_MAX:
            self._end(next(iter(self._open)))
        return json.dumps({"rows": rows, "producers": len(producers)}, ensure_ascii=False).encode()

    def expire(self) -> None:
        """End taps that nobody asks for any more."""
        over = self._clock() - limits.TAP_SECONDS_MAX
        for name in [name for name, tap in self._open.items() if tap.asked_at < over]:
            self._end(name)

    def _end(self, name: str) -> None:
        tap = self._open.pop(name)
        for attempt, partition in self._producers(tap):
            ended = tap.taps.get(attempt)
            partition.taps = tuple(each for each in partition.taps if each is not ended)

    def _producers(self, tap: _EdgeTap) -> Iterator[tuple[AttemptId, ResultPartition]]:
        for attempt in self._deployment.attempts:
            partition = self._deployment.partition(attempt, tap.edge)
            if attempt.subtask.job == tap.job and partition is not None:
                yield attempt, partition
