"""The history of a job, kept for clients: events, log lines, collected rows and causes of failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from minishuffle import limits
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import PartitionNotFound, PeerLost, ResourceExhausted, TaskCancelled, clipped_inside
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import JobEvent, JobEvents, JobLogs, JobRows

__all__ = ["History", "REPLY_BYTES_MAX", "REPLY_EVENTS_MAX", "TEXT_CHARS_MAX"]

TEXT_CHARS_MAX = 1_000
"""Longest text of an event, in characters."""
REPLY_EVENTS_MAX = 1_000
"""Most events in one reply; the client asks for the next ones."""
REPLY_BYTES_MAX = 16 * limits.MIB
"""Most bytes of collected rows in one reply, unless a single batch is longer."""

_FOLLOWS = frozenset({PeerLost.code, PartitionNotFound.code, TaskCancelled.code})

REPLY_LINES_MAX = 1000
"""Most log lines in one reply."""

assert 4 * limits.LOG_LINE_CHARS_MAX * REPLY_LINES_MAX < limits.CONTROL_FRAME_BYTES_MAX
assert limits.LOG_LINE_CHARS_MAX < limits.JOB_LOG_CHARS_KEPT
assert (
    4 * (TEXT_CHARS_MAX + limits.EVENT_TRACEBACK_CHARS_MAX) * REPLY_EVENTS_MAX
    < limits.CONTROL_FRAME_BYTES_MAX
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord(Record):
    """The causes of a job's failure, and the number of batches it has collected."""

    roots: tuple[ErrorInfo, ...]
    followers: tuple[ErrorInfo, ...]
    batches: int
    """Batches collected so far."""
    first_failure: JobEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesRecord(Record):
    """Log lines handed over to the next coordinator, and the numbers of lost and fetched batches."""

    lost: int
    fetched: int
    lines_seen: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRecord(Record):
    """A batch of collected rows handed over to the next coordinator."""

    sink: str
    rows: bytes


class History:
    """The bounded history of a job. Numbers keep counting when the oldest entries are dropped.

    Invariants: ``len(events) ≤ JOB_EVENTS_KEPT``; ``len(lines) ≤ JOB_LOG_LINES_KEPT``, with at most
    ``JOB_LOG_CHARS_KEPT`` characters in all; ``collected_bytes ≤ COLLECT_BYTES_MAX``; ``len(causes) ≤
    ERROR_CAUSES_KEPT``.
    """

    def __init__(self) -> None:
        self.collected_bytes = 0
        self._events: deque[JobEvent] = deque(maxlen=limits.JOB_EVENTS_KEPT)
        self._event_number = 0
        self._lines: deque[str] = deque()
        self._lines_seen = 0
        self._line_chars = 0
        self._batches: list[tuple[str, bytes]] = []
        """Batches of rows, each with the name of its sink."""
        self._dropped = 0
        """Number of first batches that are no longer kept."""
        self._lost = 0
        """Number of first batches that were lost with an earlier coordinator."""
        self.fetched = 0
        """Number of first batches that a client has fetched."""
        self.first_failure: JobEvent | None = None
        """The first event of a failed task, even if it is no longer among the kept events."""
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
        since: float = 0.0,
        traceback: str = "",
    ) -> None:
        """Add an event; ``at`` is the wall clock."""
        self._event_number += 1
        event = JobEvent(
            number=self._event_number,
            at=at,
            kind=kind,
            text=text[:TEXT_CHARS_MAX],
            operator=operator,
            index=index,
            attempt=attempt,
            worker=worker,
            since=since,
            traceback=clipped_inside(traceback, limits.EVENT_TRACEBACK_CHARS_MAX),
        )
        self._events.append(event)
        if kind == "task failed" and self.first_failure is None:
            self.first_failure = event

    def log(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._lines_seen += 1
            self._lines.append(line[: limits.LOG_LINE_CHARS_MAX])
            self._line_chars += len(self._lines[-1])
        while len(self._lines) > limits.JOB_LOG_LINES_KEPT or self._line_chars > limits.JOB_LOG_CHARS_KEPT:
            self._line_chars -= len(self._lines.popleft())

    def collect(self, sink: str, payload: bytes) -> bool:
        """Keep a batch of a sink's rows. False, and nothing is kept, if COLLECT_BYTES_MAX would be
        exceeded."""
        if self.collected_bytes + len(payload) > limits.COLLECT_BYTES_MAX:
            return False
        self.collected_bytes += len(payload)
        self._batches.append((sink, payload))
        return True

    def blame(self, cause: ErrorInfo, *, verdict: bool = False) -> None:
        """Add a cause of the job's failure.

        Lost peers and cancelled tasks are consequences of another cause, which may be reported later (a peer
        notices a killed process before the coordinator does). So they are listed after every other cause,
        unless the cause is the coordinator's own ``verdict``.
        """
        kept = self._followers if cause.code in _FOLLOWS and not verdict else self._roots
        kept.append(cause)
        del self._roots[limits.ERROR_CAUSES_KEPT :]
        del self._followers[limits.ERROR_CAUSES_KEPT - len(self._roots) :]

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> HistoryRecord:
        """For the journal: all except events, lines and the contents of batches."""
        return HistoryRecord(
            roots=tuple(self._roots),
            followers=tuple(self._followers),
            batches=self.batches,
            first_failure=self.first_failure,
        )

    def events_above(self, number: int) -> list[JobEvent]:
        """The kept events with a number above ``number``."""
        new = max(0, min(self._event_number - number, len(self._events)))
        return list(islice(self._events, len(self._events) - new, None))

    def handed_over(self) -> tuple[LinesRecord, dict[int, RowsRecord]]:
        """The contents that :meth:`record` leaves out, for the next coordinator: lines, and rows by the
        number of their batch."""
        about = LinesRecord(
            lost=self._lost, fetched=self.fetched, lines_seen=self._lines_seen, lines=tuple(self._lines)
        )
        batches = enumerate(self._batches, self._dropped)
        return about, {number: RowsRecord(sink=sink, rows=rows) for number, (sink, rows) in batches}

    def take_over(self, about: LinesRecord, rows: Mapping[int, RowsRecord]) -> None:
        """Take over lines and rows from the previous coordinator; called after :meth:`recall`."""
        for number in sorted(rows):
            self.collect(rows[number].sink, rows[number].rows)
        self._dropped -= len(rows)
        self._lost, self.fetched = about.lost, about.fetched
        self.log(about.lines)
        self._lines_seen = about.lines_seen

    def last_events(self, count: int) -> list[JobEvent]:
        """The last ``count`` kept events."""
        return self.events_above(self._event_number - count)

    def recall(self, record: HistoryRecord, events: Iterable[JobEvent]) -> None:
        """Restore from the records. Rows and lines were lost with the coordinator that had them, unless
        :meth:`take_over` follows."""
        self._roots, self._followers = list(record.roots), list(record.followers)
        self._dropped = self._lost = record.batches
        self.first_failure = record.first_failure
        self._events.clear()
        self._events.extend(sorted(events, key=lambda event: event.number))
        self._event_number = self._events[-1].number if self._events else 0

    # --- giving out ------------------------------------------------------------------------------

    @property
    def causes(self) -> list[ErrorInfo]:
        """All causes, the first one first."""
        return [*self._roots, *self._followers]

    @property
    def explained(self) -> bool:
        """Whether there is a cause that is not a consequence of another."""
        return bool(self._roots)

    def has_events(self, number: int) -> bool:
        """Whether there is an event with a number above ``number``."""
        return self._event_number > number

    def has_lines(self, number: int) -> bool:
        """Whether there have been more than ``number`` lines."""
        return self._lines_seen > number

    def has_rows(self, number: int) -> bool:
        """Whether there have been more than ``number`` batches."""
        return self.batches > number

    @property
    def batches(self) -> int:
        """Batches collected, dropped ones included."""
        return self._dropped + len(self._batches)

    def events_after(self, number: int, terminal: bool) -> JobEvents:
        new = max(0, min(self._event_number - number, len(self._events)))
        first = len(self._events) - new
        return JobEvents(
            events=list(islice(self._events, first, first + REPLY_EVENTS_MAX)), terminal=terminal
        )

    def client_has(self, number: int) -> None:
        """A client asks for what follows the first ``number`` batches."""
        self.fetched = max(self.fetched, min(number, self.batches))

    def logs_after(self, number: int, terminal: bool) -> JobLogs:
        """The lines after the first ``number``, which the caller has; at most REPLY_LINES_MAX."""
        first = len(self._lines) - max(0, min(self._lines_seen - number, len(self._lines)))
        lines = list(islice(self._lines, first, first + REPLY_LINES_MAX))
        after = self._lines_seen - len(self._lines) + first + len(lines)
        return JobLogs(lines=lines, next=after, terminal=terminal)

    def rows_after(self, number: int, terminal: bool) -> JobRows:
        """The batches after the first ``number``, which the caller has; at most REPLY_BYTES_MAX.

        Raises:
            ResourceExhausted: some of these batches were dropped.
        """
        number = min(number, self.batches)
        if number < self._lost:
            raise ResourceExhausted(
                f"collected rows that nobody had fetched were lost with the coordinator (batches: "
                f"{self._lost - number}); run the job again, or write its rows with to_files"
            )
        if number < self._dropped:
            which, most = "have ended", limits.COLLECTED_ENDED_BYTES_MAX
            if not terminal:
                which, most = "run", limits.COLLECTED_RUNNING_BYTES_MAX
            raise ResourceExhausted(
                f"at most {most:,} bytes of rows of all jobs that {which} are "
                "kept; run the job again and read its rows when it ends, or write them with to_files"
            )
        self.client_has(number)
        first = end = number - self._dropped
        size = 0
        for _, batch in self._batches[first:]:
            size += len(batch)
            if size > REPLY_BYTES_MAX and end > first:
                break
            end += 1
        given = self._batches[first:end]
        return JobRows(
            batches=[batch for _, batch in given],
            next=self._dropped + end,
            terminal=terminal,
            sinks=[sink for sink, _ in given],
        )

    # --- dropping --------------------------------------------------------------------------------

    def drop_fetched_rows(self) -> int:
        """Drop the fetched batches. Returns their size in bytes."""
        return self._drop_rows(max(0, self.fetched - self._dropped))

    def drop_rows(self) -> int:
        """Drop all batches. Returns their size in bytes."""
        return self._drop_rows(len(self._batches))

    def _drop_rows(self, count: int) -> int:
        size = sum(len(batch) for _, batch in self._batches[:count])
        del self._batches[:count]
        self._dropped += count
        self.collected_bytes -= size
        return size

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert len(self._events) <= min(self._event_number, limits.JOB_EVENTS_KEPT)
        assert len(self._lines) <= min(self._lines_seen, limits.JOB_LOG_LINES_KEPT)
        assert sum(map(len, self._lines)) == self._line_chars <= limits.JOB_LOG_CHARS_KEPT
        assert 0 <= self.collected_bytes <= limits.COLLECT_BYTES_MAX
        assert self.collected_bytes == sum(len(batch) for _, batch in self._batches)
        assert 0 <= self.fetched <= self.batches
        assert len(self._roots) + len(self._followers) <= limits.ERROR_CAUSES_KEPT
