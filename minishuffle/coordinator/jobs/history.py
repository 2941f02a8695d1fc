"""What the coordinator keeps of a job for its clients: events, log lines, collected rows, causes."""

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
"""The text of an event."""
REPLY_EVENTS_MAX = 1_000
"""In one reply; the client asks for the next ones."""
REPLY_BYTES_MAX = 16 * limits.MIB
"""Collected rows in one reply, unless a single batch is longer."""

_FOLLOWS = frozenset({PeerLost.code, PartitionNotFound.code, TaskCancelled.code})

REPLY_LINES_MAX = 1000
"""Log lines in one reply."""

assert 4 * limits.LOG_LINE_CHARS_MAX * REPLY_LINES_MAX < limits.CONTROL_FRAME_BYTES_MAX
assert limits.LOG_LINE_CHARS_MAX < limits.JOB_LOG_CHARS_KEPT
assert (
    4 * (TEXT_CHARS_MAX + limits.EVENT_TRACEBACK_CHARS_MAX) * REPLY_EVENTS_MAX
    < limits.CONTROL_FRAME_BYTES_MAX
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord(Record):
    """Why a job failed, and how much of what it collected there was."""

    roots: tuple[ErrorInfo, ...]
    followers: tuple[ErrorInfo, ...]
    batches: int
    """Collected so far."""
    first_failure: JobEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesRecord(Record):
    """Log lines that a coordinator hands over, and how many batches it lost or gave out."""

    lost: int
    fetched: int
    lines_seen: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRecord(Record):
    """A batch of collected rows that a coordinator hands over."""

    sink: str
    rows: bytes


class History:
    """Bounded in every part; numbers go on counting when the oldest are dropped.

    Invariants: ``len(events) ≤ JOB_EVENTS_KEPT``; ``len(lines) ≤ JOB_LOG_LINES_KEPT``, and all of them have
    at most ``JOB_LOG_CHARS_KEPT`` characters; ``collected_bytes ≤ COLLECT_BYTES_MAX``; ``len(causes) ≤
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
        """Rows, each with the name of their sink."""
        self._dropped = 0
        """Batches that are not kept any more: the first ones."""
        self._lost = 0
        """Those among them that were lost with an earlier coordinator."""
        self._fetched = 0
        """Batches that some client has said it has: the first ones."""
        self.first_failure: JobEvent | None = None
        """The first event of a task that failed, also when it is among the events no more."""
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
        """Keep a batch of a sink's rows; False, and nothing kept, when it would be too much."""
        if self.collected_bytes + len(payload) > limits.COLLECT_BYTES_MAX:
            return False
        self.collected_bytes += len(payload)
        self._batches.append((sink, payload))
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

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> HistoryRecord:
        """All but events, lines, and what was in batches."""
        return HistoryRecord(
            roots=tuple(self._roots),
            followers=tuple(self._followers),
            batches=self.batches,
            first_failure=self.first_failure,
        )

    def events_above(self, number: int) -> list[JobEvent]:
        """Events that are kept, above that number."""
        new = max(0, min(self._event_number - number, len(self._events)))
        return list(islice(self._events, len(self._events) - new, None))

    def handed_over(self) -> tuple[LinesRecord, dict[int, RowsRecord]]:
        """What :meth:`record` leaves out, for the next coordinator: lines, and rows by the number of their
        batch."""
        about = LinesRecord(
            lost=self._lost, fetched=self._fetched, lines_seen=self._lines_seen, lines=tuple(self._lines)
        )
        batches = enumerate(self._batches, self._dropped)
        return about, {number: RowsRecord(sink=sink, rows=rows) for number, (sink, rows) in batches}

    def take_over(self, about: LinesRecord, rows: Mapping[int, RowsRecord]) -> None:
        """After :meth:`recall`: have what the last coordinator has handed over."""
        for number in sorted(rows):
            self.collect(rows[number].sink, rows[number].rows)
        self._dropped -= len(rows)
        self._lost, self._fetched = about.lost, about.fetched
        self.log(about.lines)
        self._lines_seen = about.lines_seen

    def last_events(self, count: int) -> list[JobEvent]:
        """So many at most."""
        return self.events_above(self._event_number - count)

    def recall(self, record: HistoryRecord, events: Iterable[JobEvent]) -> None:
        """Become what the records say. Rows and lines were lost with the coordinator that had them, unless
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

    def has_rows(self, number: int) -> bool:
        """Whether there are more batches than so many."""
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

    def logs_after(self, number: int, terminal: bool) -> JobLogs:
        """``number`` counts the lines that the caller has had; bounded by REPLY_LINES_MAX."""
        first = len(self._lines) - max(0, min(self._lines_seen - number, len(self._lines)))
        lines = list(islice(self._lines, first, first + REPLY_LINES_MAX))
        after = self._lines_seen - len(self._lines) + first + len(lines)
        return JobLogs(lines=lines, next=after, terminal=terminal)

    def rows_after(self, number: int, terminal: bool) -> JobRows:
        """``number`` counts the batches that the caller has had; bounded by REPLY_BYTES_MAX.

        Raises:
            ResourceExhausted: some of the others were dropped.
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
        self._fetched = max(self._fetched, number)
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
        """Drop the batches that a client has; gives their bytes."""
        return self._drop_rows(max(0, self._fetched - self._dropped))

    def drop_rows(self) -> int:
        """Drop all batches; gives their bytes."""
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
        assert 0 <= self._fetched <= self.batches
        assert len(self._roots) + len(self._followers) <= limits.ERROR_CAUSES_KEPT
