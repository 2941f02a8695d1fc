"""Restarts of failed subtasks: delay, restart strategy, and limit of failures. Pure.

The first restart is immediate. Then the delay is 100 ms and doubles up to 10 s, with some jitter, so that
subtasks that failed together do not restart together. After a minute without a failure the delay starts from
zero again. ``restart_failures_max`` failures within five minutes end the job. These are Flink's
exponential-delay and failure-rate restart strategies (FLIP-364), applied to each subtask separately. Lost
workers do not count as failures. If attempts fail in a row with the same mistake in a function before they
have processed a row, ``restart_mistakes_max`` of them end the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from minishuffle import limits
from minishuffle.backoff import Backoff
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import ResourceExhausted, counted
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import ErrorInfo

__all__ = [
    "QUIET_SECONDS",
    "RESTART_BACKOFF",
    "Failures",
    "JobFailures",
    "Regions",
    "pipelined_regions",
]

# --- delays and limits ----------------------------------------------------------------------------

RESTART_BACKOFF: Final = Backoff(0.1, 10.0, jitter=0.1)
QUIET_SECONDS: Final = 60.0
"""Time without a failure after which the next restart is immediate again."""


@dataclass(frozen=True, slots=True)
class FailuresRecord(Record):
    """The journal's record of :class:`Failures`."""

    recent: tuple[tuple[float, ErrorInfo], ...]
    in_row: int
    last: float
    same: int = 0


class Failures:
    """The failures of one subtask within ``RESTART_FAILURE_WINDOW_SECONDS``.

    Args:
        failures_max: failures that end the job.
        mistakes_max: failures in a row, with the same mistake and no row done, that end the job too.
        random: a number from 0 to 1, for the jitter.
    """

    def __init__(self, failures_max: int, mistakes_max: int, random: Callable[[], float]) -> None:
        self._failures_max = failures_max
        self._mistakes_max = mistakes_max
        self._random = random
        self._recent: deque[tuple[float, ErrorInfo]] = deque()
        self._in_row = 0
        """Number of failures before the last one, with less than ``QUIET_SECONDS`` between any two in
        sequence."""
        self._last = 0.0
        self._same = 0
        """Number of the last failures with the same mistake and no row done, with less than ``QUIET_SECONDS``
        between any two in sequence."""

    @property
    def count(self) -> int:
        """Failures within the window, including the last one."""
        return len(self._recent)

    @property
    def first(self) -> ErrorInfo:
        """The cause of the first failure within the window."""
        return self._recent[0][1]

    def add(self, cause: ErrorInfo, now: float, *, rows_done: int = 0) -> float | None:
        """Count a failure of an attempt that had processed ``rows_done`` rows. Returns the seconds until the
        subtask restarts; None: a limit is reached."""
        if rows_done or not cause.mistake:
            self._same = 0
        elif self._same and now < self._last + QUIET_SECONDS and cause.text == self._recent[-1][1].text:
            self._same += 1
        else:
            self._same = 1
        self._in_row = 0 if now >= self._last + QUIET_SECONDS else self._in_row + 1
        self._last = now
        self._recent.append((now, cause))
        while self._recent[0][0] <= now - limits.RESTART_FAILURE_WINDOW_SECONDS:
            self._recent.popleft()
        if self.count >= self._failures_max or self._is_hopeless:
            return None
        return RESTART_BACKOFF.seconds(self._in_row, self._random())

    @property
    def _is_hopeless(self) -> bool:
        return self._same >= self._mistakes_max

    def record(self) -> FailuresRecord:
        """For the journal."""
        return FailuresRecord(tuple(self._recent), self._in_row, self._last, self._same)

    def recall(self, record: FailuresRecord) -> None:
        """Restore from the record."""
        self._recent, self._in_row, self._last = deque(record.recent), record.in_row, record.last
        self._same = record.same

    def limit_reached(self, task: str) -> ErrorInfo:
        """Why the job ends; ``task`` is the name of the subtask."""
        if self._is_hopeless:
            text = (
                f"{task} failed {counted(self._same, 'time')} with the same error before it got a row done: "
                "a restart does not help (restart_mistakes_max): correct the function, or allow more with "
                "--set restart_mistakes_max=N"
            )
            return ErrorInfo(code=ResourceExhausted.code, text=text, task=task)
        seconds = limits.RESTART_FAILURE_WINDOW_SECONDS
        text = (
            f"{task} failed {self.count} times within {seconds:g} s (restart_failures_max): remove the "
            "cause, or allow more with --set restart_failures_max=N"
        )
        return ErrorInfo(code=ResourceExhausted.code, text=text, task=task)


class JobFailures:
    """The failures of all subtasks of one job; the arguments are those of :class:`Failures`."""

    def __init__(self, failures_max: int, mistakes_max: int, random: Callable[[], float]) -> None:
        self._failures_max = failures_max
        self._mistakes_max = mistakes_max
        self._random = random
        self._of: dict[TaskKey, Failures] = {}

    def of(self, key: TaskKey) -> Failures:
        """The failures of a subtask."""
        if key not in self._of:
            self._of[key] = Failures(self._failures_max, self._mistakes_max, self._random)
        return self._of[key]

    def record(self, key: TaskKey) -> FailuresRecord | None:
        """For the journal; None if there were none."""
        return self._of[key].record() if key in self._of else None

    def recall(self, key: TaskKey, record: FailuresRecord | None) -> None:
        """Restore from the result of :meth:`record`."""
        if record is not None:
            self.of(key).recall(record)


# --- regions --------------------------------------------------------------------------------------


RegionsRecord: TypeAlias = tuple[tuple[int, tuple[TaskKey, ...]], ...]


class Regions:
    """The subtasks of a job that restart together.

    A region is a single subtask with the strategy ``individual``, the whole job with ``full``, and with
    ``region`` the subtasks connected by exchanges that are not blocking (Flink: a pipelined region, FLIP-1).
    A region that restarts is *ending* until none of its attempts runs; then all its subtasks are deployed
    together.

    Args:
        strategy: by default the job's own.
    """

    def __init__(self, graph: JobGraph, strategy: str = "") -> None:
        self.strategy = strategy = strategy or graph.settings.restart_strategy
        self.joint = strategy in ("region", "full")
        """Whether other subtasks restart together with a failed one."""
        self._members: list[list[TaskKey]] = []
        self._number: dict[TaskKey, int] = {}
        """The region of each subtask, as an index into ``_members``."""
        self._ending: dict[int, set[TaskKey]] = {}
        """By ending region, the subtasks whose attempt still runs."""
        if self.joint:
            blocking = [number for number, edge in enumerate(graph.edges) if edge.kind == "blocking"]
            self._members = [_subtasks(graph)] if strategy == "full" else pipelined_regions(graph, blocking)
            self._number = {key: n for n, members in enumerate(self._members) for key in members}

    def of(self, keys: Iterable[TaskKey]) -> list[TaskKey]:
        """All subtasks that restart together with any of these, including them."""
        if not self.joint:
            return list(keys)
        numbers = dict.fromkeys(self._number[key] for key in keys)
        return [key for number in numbers for key in self._members[number]]

    def restart(self, keys: Sequence[TaskKey], running: Callable[[TaskKey], bool]) -> list[TaskKey]:
        """Restart the regions of these subtasks. Returns the subtasks to cancel for it.

        Args:
            running: whether the current attempt of a subtask still runs.
        """
        canceled = []
        for number in dict.fromkeys(self._number[key] for key in keys) if self.joint else ():
            ending = self._ending.setdefault(number, set())
            fresh = [key for key in self._members[number] if key not in ending and running(key)]
            ending.update(fresh)
            canceled += fresh
        return canceled

    def must_end(self, key: TaskKey) -> bool:
        """Whether a subtask was canceled for the restart of its region, and still runs."""
        return self.joint and key in self._ending.get(self._number[key], ())

    def ended(self, key: TaskKey) -> None:
        """The current attempt of a subtask has ended, in any way."""
        if self.joint:
            self._ending.get(self._number[key], set()).discard(key)

    def is_ending(self, key: TaskKey) -> bool:
        """Whether the region of a subtask is ending."""
        return self.joint and self._number[key] in self._ending

    def take_ended(self) -> list[list[TaskKey]]:
        """Remove and return the ending regions whose attempts have all ended."""
        numbers = [number for number, running in self._ending.items() if not running]
        for number in numbers:
            del self._ending[number]
        return [self._members[number] for number in numbers]

    @property
    def at_rest(self) -> bool:
        """No region is ending."""
        return not self._ending

    def give_up(self) -> None:
        """Forget the ending regions: nothing restarts any more."""
        self._ending.clear()

    def record(self) -> RegionsRecord:
        """For the journal: the ending regions by number, each with the subtasks whose attempt still runs."""
        return tuple((number, tuple(sorted(running))) for number, running in sorted(self._ending.items()))

    def recall(self, record: RegionsRecord) -> list[TaskKey]:
        """Restore from the record. Returns the subtasks whose attempt still runs."""
        self._ending = {number: set(running) for number, running in record}
        return sorted(key for running in self._ending.values() for key in running)


def _subtasks(graph: JobGraph) -> list[TaskKey]:
    return [
        (number, index) for number, each in enumerate(graph.vertices) for index in range(each.parallelism)
    ]


def pipelined_regions(graph: JobGraph, kept: Collection[int]) -> list[list[TaskKey]]:
    """The subtasks connected by edges that are not ``kept``, by union-find."""
    above = {key: key for key in _subtasks(graph)}

    def root(key: TaskKey) -> TaskKey:
        while above[key] != key:
            above[key] = key = above[above[key]]
        return key

    for number, edge in enumerate(graph.edges):
        if number in kept:
            continue
        targets = range(graph.vertices[edge.target].parallelism)
        if edge.pointwise:
            pairs = [(producer, each) for each in targets for producer in graph.producers_of(number, each)]
        else:
            pairs = [(0, each) for each in targets]
            pairs += [(producer, 0) for producer in range(graph.vertices[edge.source].parallelism)]
        for producer, consumer in pairs:
            above[root((edge.source, producer))] = root((edge.target, consumer))
    components: dict[TaskKey, list[TaskKey]] = {}
    for key in above:
        components.setdefault(root(key), []).append(key)
    return list(components.values())
