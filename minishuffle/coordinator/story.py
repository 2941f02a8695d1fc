"""What is remembered of a job for those who ask: events, log lines, collected rows, causes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from minishuffle import limits
from minishuffle.errors import PartitionNotFound, PeerLost, TaskCancelled
from minishuffle.wire.messages import ErrorInfo, JobEvent, JobEvents, JobLogs, JobRows

__all__ = ["Story"]

TEXT_CHARS_MAX = 1_000
"""Of an event."""
REPLY_BYTES_MAX = 16 * limits.MIB
"""Of collected rows in one reply, unless a single batch is longer."""

_FOLLOWS = frozenset({PeerLost.code, PartitionNotFound.code, TaskCancelled.code})

assert 4 * limits.LOG_LINE_CHARS_MAX * limits.JOB_LOG_LINES_KEPT < limits.CONTROL_FRAME_BYTES_MAX
assert 4 * TEXT_CHARS_MAX * limits.JOB_EVENTS_KEPT < limits.CONTROL_FRAME_BYTES_MAX


class Story:
    """Bounded in every part; numbers go on counting when the oldest are dropped.

    Invariants: ``len(events) ≤ JOB_EVENTS_KEPT``; ``len(lines) ≤ JOB_LOG_LINES_KEPT``;
    ``collected_bytes ≤ COLLECT_BYTES_MAX``; ``len(causes) ≤ ERROR_CAUSES_KEPT``.
    """

    def __init__(self) -> None:
        self.collected_bytes = 0
        self._events: deque[JobEvent] = deque(maxlen=limits.JOB_EVENTS_KEPT)
        self._event_number = 0
        self._lines: deque[str] = deque(maxlen=limits.JOB_LOG_LINES_KEPT)
        self._lines_seen = 0
        self._batches: list[bytes] = []
        self._roots: list[ErrorInfo] = []
        self._followers: list[ErrorInfo] = []

    # --- taking in -------------------------------------------------------------------------------

    def note(
        self,
        at: float,
        kind: str,
        text: str,
        *,
        operator: int = -1,
        index: int = -1,
        attempt: int = 0,
        worker: int = 0,
    ) -> None:
        """Add an event; ``at`` is the wall clock."""
        self._event_number += 1
        self._events.append(
            JobEvent(
                number=self._event_number,
                at=at,
                kind=kind,
                text=text[:TEXT_CHARS_MAX],
                operator=operator,
                index=index,
                attempt=attempt,
                worker=worker,
            )
        )

    def log(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._lines_seen += 1
            self._lines.append(line[: limits.LOG_LINE_CHARS_MAX])

    def collect(self, payload: bytes) -> bool:
        """Keep a batch of rows; False, and nothing kept, when it would be too much."""
        if self.collected_bytes + len(payload) > limits.COLLECT_BYTES_MAX:
            return False
        self.collected_bytes += len(payload)
        self._batches.append(payload)
        return True

    def blame(self, cause: ErrorInfo, *, verdict: bool = False) -> None:
        """Add a cause of the job's failure.

        Lost peers and cancelled tasks follow from something else, which may be reported later (a
        peer notices a killed process before the coordinator does): they come after every
        other cause, unless it is the coordinator's own ``verdict``.
        """
        kept = self._followers if cause.code in _FOLLOWS and not verdict else self._roots
        kept.append(cause)
        del self._roots[limits.ERROR_CAUSES_KEPT :]
        del self._followers[limits.ERROR_CAUSES_KEPT - len(self._roots) :]

    # --- giving out ------------------------------------------------------------------------------

    @property
    def causes(self) -> list[ErrorInfo]:
        """First cause first."""
        return [*self._roots, *self._followers]

    @property
    def explained(self) -> bool:
        """Whether some cause does not itself follow from another."""
        return bool(self._roots)

    def has_events(self, number: int) -> bool:
        """Whether there is any event above that number."""
        return self._event_number > number

    def has_lines(self, number: int) -> bool:
        """Whether there are more lines than so many."""
        return self._lines_seen > number

    @property
    def batches(self) -> int:
        return len(self._batches)

    def events_after(self, number: int, over: bool) -> JobEvents:
        new = max(0, min(self._event_number - number, len(self._events)))
        return JobEvents(events=list(self._events)[len(self._events) - new :], over=over)

    def logs_after(self, number: int, over: bool) -> JobLogs:
        """``number`` counts the lines that the caller has had."""
        new = max(0, min(self._lines_seen - number, len(self._lines)))
        return JobLogs(lines=list(self._lines)[len(self._lines) - new :], next=self._lines_seen, over=over)

    def rows_after(self, number: int, over: bool) -> JobRows:
        """``number`` counts the batches that the caller has had; bounded by REPLY_BYTES_MAX."""
        first = end = min(max(0, number), len(self._batches))
        size = 0
        for batch in self._batches[first:]:
            size += len(batch)
            if size > REPLY_BYTES_MAX and end > first:
                break
            end += 1
        return JobRows(batches=self._batches[first:end], next=end, over=over)

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert len(self._events) <= min(self._event_number, limits.JOB_EVENTS_KEPT)
        assert len(self._lines) <= min(self._lines_seen, limits.JOB_LOG_LINES_KEPT)
        assert 0 <= self.collected_bytes <= limits.COLLECT_BYTES_MAX
        assert self.collected_bytes == sum(map(len, self._batches))
        assert len(self._roots) + len(self._followers) <= limits.ERROR_CAUSES_KEPT
