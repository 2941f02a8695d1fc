"""The subtasks of one job: the current attempt of each, and the counts over all of them. Pure.

Their states and transitions are in :mod:`~minishuffle.coordinator.jobs.lifecycle`, the counts of earlier
attempts in :mod:`~minishuffle.coordinator.jobs.lossaccounting`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final

from minishuffle import limits
from minishuffle.coordinator.jobs.lifecycle import ENDED, NOT_DEPLOYED, WAITING
from minishuffle.coordinator.jobs.lossaccounting import AttemptRecord, TaskKey, Totals
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.journal.codec import Record
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted
from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import TaskInfo

__all__ = ["CountsRecord", "Subtask", "Subtasks", "first_attempts", "names_of", "results_too_large"]


@dataclass(frozen=True, slots=True)
class CountsRecord(Record):
    """The counters and traffic of a running attempt, as they are journaled."""

    attempt: int
    counters: TaskCounters
    traffic: bytes


@dataclass(slots=True)
class Subtask(AttemptRecord):
    """A subtask and its current attempt; while it is pending, its last attempt."""

    name: str = ""
    state: str = "created"
    on_worker: bool = True
    """Its worker has not been lost since the attempt was deployed."""
    resumption: Resumption = Resumption()
    """The position at which the attempt begins, if it is a source's, and the listed files of earlier
    attempts."""
    result: bytes = b""
    announced: int = 0
    """End of the rows announced to readers of a kept result."""
    version: int = FIRST_ATTEMPT
    """The attempt that began the version of the rows, which later attempts make again; the attempt itself if
    it begins one: see :mod:`~minishuffle.coordinator.jobs.consumption`."""
    same_rows: bool = False
    """All its attempts from now on make the same rows in the same order, and keep the version."""
    round: int = 0
    """The round of deployments, counted for the job, in which this attempt was deployed."""
    version_round: int = 0
    """The round in which the attempt was deployed that began the version."""
    rows_collected: int = 0
    """Rows of the attempt that the client has."""
    collected_end: int = 0
    """The greatest number behind a row that the client has, in a job that loses nothing."""
    listed_before: int = 0
    """Rows that earlier attempts have had listed, since the job began or went back."""
    state_bytes: int = 0
    """Size of the state that its attempt keeps for the next attempt, since it has moved."""
    starts_over: bool = False
    """Its next attempt begins with ``resumption``, whatever earlier ones have done."""
    readable: list[int] = field(default_factory=list)
    """Edges for which the attempt has begun a buffer, if their consumers waited for it."""

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"

    def begin_first(self, worker: int, round: int) -> None:
        """Deploy its first attempt on a worker."""
        self.attempt = self.version = FIRST_ATTEMPT
        self.round = self.version_round = round
        self.worker, self.on_worker = worker, True

    def begin_from(self, resumption: Resumption) -> None:
        """Its first attempt begins with what a savepoint has for it."""
        self.resumption = resumption

    def start_over(self, resumption: Resumption) -> None:
        """Its next attempt begins with this, and with a version of its rows of its own. Rows that it keeps go
        on behind the numbers that readers may have."""
        self.resumption, self.starts_over = resumption._replace(first_row=self.rows_kept), True
        self.repeated, self.state_bytes, self.collected_end = "", 0, 0

    def keep_version(self) -> None:
        """Its next attempts make the same rows in the same order."""
        self.same_rows = True

    def has_begun(self) -> None:
        """Its attempt runs: what a savepoint had for it is taken."""
        self.resumption = self.resumption._replace(restoration=None)

    def begun_again(self, resumption: Resumption) -> Resumption:
        """The state for the next attempt, that of a savepoint included if no attempt has taken it."""
        before = self.resumption
        return resumption._replace(restoration=before.restoration, has_ended=before.has_ended)

    def begin_next(self, worker: int, round: int, resumption: Resumption) -> None:
        """Deploy its next attempt on a worker, with all its counts reset."""
        self.attempt, self.round, self.resumption = self.attempt + 1, round, resumption
        if self.starts_over or not (self.repeated or self.same_rows):
            self.version, self.version_round = self.attempt, round
        self.listed_before = self.listed_in_all
        self.worker, self.on_worker, self.end = worker, True, ""
        self.counters, self.traffic, self.result, self.rows_made = TaskCounters(), b"", b"", 0
        self.rows_listed, self.rows_leased, self.passed_on_max, self.repeated = 0, 0, None, ""
        self.rows_collected, self.readable = 0, []
        self.moved, self.state_bytes, self.starts_over = False, 0, False

    def record(self) -> Subtask:
        """For the journal. The counts of a running attempt have a record of their own."""
        task = Subtask(*_FIELDS_OF(self))  # takes a fifth of the time of ``replace``
        task.resumption = self.resumption._replace(files=dict(self.resumption.files))
        if self.runs:
            task.counters, task.traffic = TaskCounters(), b""
        return task

    def counts_record(self) -> CountsRecord | None:
        """For the journal: the counters and traffic of a running attempt; None if it does not run."""
        return CountsRecord(self.attempt, self.counters, self.traffic) if self.runs else None

    def recall_counts(self, counts: CountsRecord | None) -> None:
        """Restore the counts from the last :meth:`counts_record`, unless it belongs to another attempt."""
        if counts is not None and self.runs and counts.attempt == self.attempt:
            self.counters, self.traffic = counts.counters, counts.traffic

    @property
    def runs(self) -> bool:
        """Whether its attempt is deployed and has not ended."""
        return self.state in ("created", "running")

    @property
    def stays(self) -> bool:
        """Whether it has finished and its worker keeps its partitions, even if its slot moves."""
        return self.state == "finished" and self.on_worker

    @property
    def is_reachable(self) -> bool:
        """Whether its current attempt is on a worker that can answer a message."""
        return self.on_worker and self.state in ("created", "running", "finished")

    @property
    def rows_kept(self) -> int:
        """The number of rows it has kept, if it is a sink; its next attempt continues the row numbers from
        there."""
        return max(self.resumption.first_row, self.counters.rows_kept, self.announced)

    @property
    def listed_in_all(self) -> int:
        """Rows that its attempts have had listed since the job began or went back."""
        return 0 if self.starts_over else self.listed_before + self.rows_listed

    @property
    def state_held(self) -> tuple[int, int] | None:
        """The worker and the attempt with the state that the next attempt goes on with, or the current one
        while it has not read the state; None: there is no state."""
        if self.state_bytes:
            return self.worker, self.attempt
        kept = self.resumption
        return (kept.state_worker, kept.state_attempt) if kept.keeps_state else None

    def keep_state(self, size: int) -> None:
        """Its attempt ended at the barrier of a move, and keeps ``size`` bytes of state."""
        self.hold_nothing()
        self.state_bytes = size

    def drop_state(self) -> None:
        """The state kept for it was read, or is lost."""
        self.state_bytes = 0
        self.resumption = self.resumption._replace(state_worker=0, state_attempt=0)

    def enter(self, state: str) -> None:
        """Set its state."""
        self.state = state

    def leave_worker(self) -> None:
        """Its worker is lost, or must release it."""
        self.on_worker = False

    def can_be_read(self, edge: int) -> None:
        """Its partition on this edge has its first buffer."""
        self.readable = sorted({edge, *self.readable})

    def collected(self, first_row: int, rows: int) -> int:
        """Count ``rows`` more rows that the client has, from number ``first_row`` on. Returns how many of
        them it may have twice, if rows are numbered by subtask."""
        self.rows_collected += rows
        again = max(0, min(rows, self.collected_end - first_row))
        self.collected_end = max(self.collected_end, first_row + rows)
        return again

    def gave(self, result: bytes) -> None:
        """Its sink has closed with this result."""
        self.result = result

    def announce(self) -> bool:
        """Announce the end of its rows to readers; False if it was announced already."""
        before, self.announced = self.announced, max(self.announced, self.rows_kept)
        return self.announced > before

    def info(self, totals: Totals, results: bool, *, holder: int = 0) -> TaskInfo:
        """The subtask for clients, with the totals of all its attempts; ``holder``: see ``TaskInfo``."""
        return TaskInfo(
            operator=self.operator,
            name=self.name,
            index=self.index,
            attempt=self.attempt,
            state=self.state,
            worker=self.worker,
            counters=totals.counters,
            rows_sent=totals.rows_sent,
            rows_received=totals.rows_received,
            result=self.result if results else b"",
            state_rows_lost=totals.state_rows_lost,
            holder=holder,
        )


_FIELDS_OF: Final = attrgetter(*(each.name for each in fields(Subtask)))


class Subtasks(Mapping[TaskKey, Subtask]):
    """The subtasks of one job, by operator and index.

    Invariants: ``states`` counts them; the kept results have at most ``RESULT_BYTES_MAX`` bytes in all.

    Args:
        waiting: all subtasks wait for their first deployment.
    """

    def __init__(self, graph: JobGraph, placement: Placement, *, waiting: bool = False) -> None:
        self._widths = [vertex.parallelism for vertex in graph.vertices]
        self._tasks = first_attempts(graph, placement, waiting=waiting)
        self.states = Counter(task.state for task in self._tasks.values())
        """Number of subtasks in each state; may have zeros."""
        self.changed: set[TaskKey] = set()
        """Subtasks whose changes are not journaled yet."""
        self.moved: set[TaskKey] = set()
        """Subtasks whose only change may be the position of their source."""
        self._result_bytes = 0
        """Size of all kept results."""

    def __getitem__(self, key: TaskKey) -> Subtask:
        return self._tasks[key]

    def __iter__(self) -> Iterator[TaskKey]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def values(self) -> ValuesView[Subtask]:
        """All subtasks, by operator, then by index."""
        return self._tasks.values()

    # --- what is there --------------------------------------------------------------------------

    def of(self, operator: int) -> list[Subtask]:
        """The subtasks of an operator, by index."""
        return [self._tasks[operator, index] for index in range(self._widths[operator])]

    def on(self, worker: int) -> list[Subtask]:
        """The subtasks whose attempt is on a worker, and not lost with it."""
        return [task for task in self._tasks.values() if task.worker == worker and task.on_worker]

    def attempts_on(self, worker: int) -> list[tuple[TaskKey, int]]:
        """The running attempts on a worker."""
        return [(task.key, task.attempt) for task in self.on(worker) if task.runs]

    def current(self, worker: int, attempt: AttemptId) -> Subtask | None:
        """The subtask of an attempt, if the attempt is the current one and on this worker; else None."""
        task = self._tasks.get(attempt.subtask.key)
        if task is None or (task.worker, task.attempt, True) != (worker, attempt.attempt, task.on_worker):
            return None
        return task

    def open_workers(self) -> list[int]:
        """Workers with a task that has not ended."""
        return sorted({task.worker for task in self._tasks.values() if task.runs})

    def rows_kept(self, operator: int) -> list[int]:
        """The number of kept rows of each subtask of a sink; its next attempt continues the row numbers from
        there."""
        return [task.rows_kept for task in self.of(operator)]

    def some_wait(self, operator: int) -> bool:
        """Whether subtasks of an operator wait for their first deployment."""
        return any(task.state == WAITING for task in self.of(operator))

    @property
    def all_wait(self) -> bool:
        """Whether no subtask was deployed yet."""
        return self.states[WAITING] == len(self._tasks)

    @property
    def all_ended(self) -> bool:
        """Whether all subtasks have ended."""
        return sum(self.states[state] for state in ENDED) == len(self._tasks)

    # --- what happens ---------------------------------------------------------------------------

    def enter(self, task: Subtask, state: str) -> None:
        """Set the state of a subtask."""
        self.states[task.state] -= 1
        self.states[state] += 1
        task.enter(state)
        self.changed.add(task.key)

    def begin_next(self, task: Subtask, worker: int, round: int, resumption: Resumption) -> None:
        """Begin the next attempt of a subtask: see :meth:`Subtask.begin_next`."""
        self._result_bytes -= len(task.result)
        task.begin_next(worker, round, resumption)

    def make_same_rows(self, task: Subtask, graph: JobGraph) -> None:
        """A subtask makes the same rows in each attempt from now on. So do the subtasks that get all rows
        from it, unless they have had rows of an earlier version."""
        vertices, found = graph.same_rows(of_one_split=True), [task]
        while found:
            task = found.pop()
            task.keep_version()
            self.touch(task.key)
            if task.version == FIRST_ATTEMPT:
                found += [self._tasks[key] for key in graph.consumers(*task.key) if key[0] in vertices]

    def keep_result(self, task: Subtask, result: bytes) -> bool:
        """Keep the result of a closed sink. False, and nothing is kept, if all results together would be too
        large."""
        if self._result_bytes + len(result) > limits.RESULT_BYTES_MAX:
            return False
        self._result_bytes += len(result)
        task.gave(result)
        return True

    def announce(self, operator: int) -> None:
        """Record that readers are about to learn the ends of a sink's rows."""
        self.touch(*(task.key for task in self.of(operator) if task.announce()))

    # --- the journal ----------------------------------------------------------------------------

    def touch(self, *keys: TaskKey) -> None:
        """Note that these subtasks have changes to journal."""
        self.changed.update(keys)

    def move(self, key: TaskKey) -> None:
        """Note that the source of a subtask has moved."""
        self.moved.add(key)

    def take_changed(self) -> set[TaskKey]:
        """Take the subtasks whose changes are not journaled yet, those of their sources included."""
        changed = self.changed | self.moved
        self.changed, self.moved = set(), set()
        return changed

    def take_moved(self) -> set[TaskKey]:
        """Take the subtasks whose sources have moved; of a job where nothing else has changed."""
        moved, self.moved = self.moved, set()
        return moved

    def recall(self, tasks: Mapping[TaskKey, Subtask], counts: Mapping[TaskKey, CountsRecord]) -> None:
        """Restore the subtasks and their counts from the journal."""
        self._tasks.update(tasks)
        for key, task in tasks.items():
            task.recall_counts(counts.get(key))
        self.states = Counter(task.state for task in self._tasks.values())
        self._result_bytes = sum(len(task.result) for task in self._tasks.values())

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert Counter(task.state for task in self._tasks.values()) == +self.states
        assert sum(len(task.result) for task in self._tasks.values()) <= limits.RESULT_BYTES_MAX
        never = {key for key, task in self._tasks.items() if task.attempt == NOT_DEPLOYED}
        assert {self._tasks[key].state for key in never} <= {WAITING, "canceled"}


def first_attempts(graph: JobGraph, placement: Placement, *, waiting: bool = False) -> dict[TaskKey, Subtask]:
    """All subtasks of a new job, at their first attempt or ``waiting``."""
    firsts, same_rows = graph.first_slots(), graph.same_rows()
    attempt = NOT_DEPLOYED if waiting else FIRST_ATTEMPT
    state = WAITING if waiting else "created"
    return {
        (operator, index): Subtask(
            operator,
            index,
            placement[firsts[operator] + index],
            attempt,
            name=vertex.name,
            state=state,
            on_worker=not waiting,
            same_rows=operator in same_rows,
        )
        for operator, vertex in enumerate(graph.vertices)
        for index in range(vertex.parallelism)
    }


def results_too_large(task: Subtask) -> ErrorInfo:
    """The error of a job whose sinks have returned more result bytes in all than a job keeps."""
    text = (
        f"the sinks of this job returned more than {limits.RESULT_BYTES_MAX} bytes at their close: "
        "write large results with to_files"
    )
    return ErrorInfo(code=ResourceExhausted.code, text=text, task=str(task))


NAMES_SHOWN: Final = 5
"""Most tasks named in a text."""


def names_of(tasks: Sequence[Subtask]) -> str:
    """The names of the first tasks, for a text."""
    more = " and others" if len(tasks) > NAMES_SHOWN else ""
    return ", ".join(str(task) for task in tasks[:NAMES_SHOWN]) + more
