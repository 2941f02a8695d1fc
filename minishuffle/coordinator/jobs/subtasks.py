"""The subtasks of one job: the current attempt of each, and what is counted over all of them. Pure.

Which states there are, and what belongs to each transition, stands in
:mod:`~minishuffle.coordinator.jobs.lifecycle`; what the attempts before the current one have counted in
:mod:`~minishuffle.coordinator.jobs.lossaccounting`.
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
    """What an attempt that runs has counted and exchanged."""

    attempt: int
    counters: TaskCounters
    traffic: bytes


@dataclass(slots=True)
class Subtask(AttemptRecord):
    """One subtask and its current attempt; while it is pending, the attempt that ended."""

    name: str = ""
    state: str = "created"
    on_worker: bool = True
    """Its worker has not been lost since the attempt was deployed."""
    resumption: Resumption = Resumption()
    """Where the attempt goes on, if it is a source's, and which files of earlier ones are listed."""
    result: bytes = b""
    announced: int = 0
    """Where the rows end that readers of a kept result have heard of."""
    base: int = FIRST_ATTEMPT
    """The first of the attempts that write the same rows, this one the last: see
    :mod:`~minishuffle.coordinator.jobs.consumption`."""
    round: int = 0
    """Counts the decisions of a job by which attempts were deployed: that of this attempt."""
    base_round: int = 0
    """That of its base."""
    rows_collected: int = 0
    """Rows that the client has of the attempt."""
    readable: list[int] = field(default_factory=list)
    """Edges for which the attempt has begun a buffer, as far as their consumers waited for that."""

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"

    def begin_first(self, worker: int, round: int) -> None:
        """Its first attempt is deployed there."""
        self.attempt = self.base = FIRST_ATTEMPT
        self.round = self.base_round = round
        self.worker, self.on_worker = worker, True

    def begin_next(self, worker: int, round: int, resumption: Resumption) -> None:
        """The next attempt is deployed there, of which nothing is known so far."""
        self.attempt, self.round, self.resumption = self.attempt + 1, round, resumption
        if not self.repeated:
            self.base, self.base_round = self.attempt, round
        self.worker, self.on_worker, self.end = worker, True, ""
        self.counters, self.traffic, self.result, self.rows_made = TaskCounters(), b"", b"", 0
        self.rows_listed, self.rows_leased, self.passed_on_max, self.repeated = 0, 0, None, ""
        self.rows_collected, self.readable = 0, []

    def record(self) -> Subtask:
        """For the journal. What an attempt that runs has counted is in a record of its own."""
        task = Subtask(*_FIELDS_OF(self))  # Takes a fifth of the time of ``replace``.
        task.resumption = self.resumption._replace(files=dict(self.resumption.files))
        if self.runs:
            task.counters, task.traffic = TaskCounters(), b""
        return task

    def counts_record(self) -> CountsRecord | None:
        """What an attempt that runs has counted and exchanged; None if none runs."""
        return CountsRecord(self.attempt, self.counters, self.traffic) if self.runs else None

    def recall_counts(self, counts: CountsRecord | None) -> None:
        """What :meth:`counts_record` gave last, maybe of another attempt."""
        if counts is not None and self.runs and counts.attempt == self.attempt:
            self.counters, self.traffic = counts.counters, counts.traffic

    @property
    def runs(self) -> bool:
        """Its attempt is deployed and has not ended."""
        return self.state in ("created", "running")

    @property
    def stays(self) -> bool:
        """It has finished, and its worker has what it wrote, wherever its slot moves."""
        return self.state == "finished" and self.on_worker

    @property
    def hears(self) -> bool:
        """A message to its attempt can be answered: it has a worker."""
        return self.on_worker and self.state in ("created", "running", "finished")

    @property
    def rows_kept(self) -> int:
        """How many rows it has kept, if it is a sink: the next attempt numbers on from there."""
        return max(self.resumption.first_row, self.counters.rows_kept, self.announced)

    def enter(self, state: str) -> None:
        """It comes to that state."""
        self.state = state

    def leave_worker(self) -> None:
        """Its worker is lost, or is to have nothing of it any more."""
        self.on_worker = False

    def can_be_read(self, edge: int) -> None:
        """Its partition on that edge has its first buffer."""
        self.readable = sorted({edge, *self.readable})

    def collected(self, rows: int) -> None:
        """So many more of its rows are with the client."""
        self.rows_collected += rows

    def gave(self, result: bytes) -> None:
        """Its sink has closed with that result."""
        self.result = result

    def announce(self) -> bool:
        """Readers hear where its rows end; False if they have heard that before."""
        before, self.announced = self.announced, max(self.announced, self.rows_kept)
        return self.announced > before

    def info(self, totals: Totals, results: bool) -> TaskInfo:
        """As clients see it, with the totals of all its attempts."""
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
        )


_FIELDS_OF: Final = attrgetter(*(each.name for each in fields(Subtask)))


class Subtasks(Mapping[TaskKey, Subtask]):
    """The subtasks of one job, by operator and index.

    Invariants: they are counted by their states; the results that are kept have at most ``RESULT_BYTES_MAX``
    bytes in all.

    Args:
        waiting: none is deployed before its time has come.
    """

    def __init__(self, graph: JobGraph, placement: Placement, *, waiting: bool = False) -> None:
        self._widths = [vertex.parallelism for vertex in graph.vertices]
        self._tasks = first_attempts(graph, placement, waiting=waiting)
        self.states = Counter(task.state for task in self._tasks.values())
        """How many there are in each state; a state may be there with 0."""
        self.changed: set[TaskKey] = set()
        """Those that the journal is behind with."""
        self._result_bytes = 0
        """The size of all results that are kept."""

    def __getitem__(self, key: TaskKey) -> Subtask:
        return self._tasks[key]

    def __iter__(self) -> Iterator[TaskKey]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def values(self) -> ValuesView[Subtask]:
        """All of them, by operator, then by index."""
        return self._tasks.values()

    # --- what is there --------------------------------------------------------------------------

    def of(self, operator: int) -> list[Subtask]:
        """Those of an operator, by index."""
        return [self._tasks[operator, index] for index in range(self._widths[operator])]

    def on(self, worker: int) -> list[Subtask]:
        """Those whose attempt is on a worker, and not lost with it."""
        return [task for task in self._tasks.values() if task.worker == worker and task.on_worker]

    def attempts_on(self, worker: int) -> list[tuple[TaskKey, int]]:
        """The attempts that run there."""
        return [(task.key, task.attempt) for task in self.on(worker) if task.runs]

    def current(self, worker: int, attempt: AttemptId) -> Subtask | None:
        """The subtask of an attempt, if that is its current one, and is on that worker."""
        task = self._tasks.get(attempt.subtask.key)
        if task is None or (task.worker, task.attempt, True) != (worker, attempt.attempt, task.on_worker):
            return None
        return task

    def open_workers(self) -> list[int]:
        """Workers with a task that has not ended."""
        return sorted({task.worker for task in self._tasks.values() if task.runs})

    def rows_kept(self, operator: int) -> list[int]:
        """By subtask of a sink, how many rows it has kept."""
        return [task.rows_kept for task in self.of(operator)]

    def some_wait(self, operator: int) -> bool:
        """Whether subtasks of an operator were not deployed so far."""
        return any(task.state == WAITING for task in self.of(operator))

    @property
    def all_wait(self) -> bool:
        """Whether none was deployed so far."""
        return self.states[WAITING] == len(self._tasks)

    @property
    def all_ended(self) -> bool:
        """Whether no attempt runs or follows."""
        return sum(self.states[state] for state in ENDED) == len(self._tasks)

    # --- what happens ---------------------------------------------------------------------------

    def enter(self, task: Subtask, state: str) -> None:
        """A subtask comes to a state."""
        self.states[task.state] -= 1
        self.states[state] += 1
        task.enter(state)
        self.changed.add(task.key)

    def begin_next(self, task: Subtask, worker: int, round: int, resumption: Resumption) -> None:
        """The next attempt of a subtask takes the place of the last: see :meth:`Subtask.begin_next`."""
        self._result_bytes -= len(task.result)
        task.begin_next(worker, round, resumption)

    def keep_result(self, task: Subtask, result: bytes) -> bool:
        """Its sink has closed with that result; False, and nothing kept, if that is too much with those of
        the others."""
        if self._result_bytes + len(result) > limits.RESULT_BYTES_MAX:
            return False
        self._result_bytes += len(result)
        task.gave(result)
        return True

    def announce(self, operator: int) -> None:
        """Readers are about to hear where the rows of a sink end."""
        self.touch(*(task.key for task in self.of(operator) if task.announce()))

    # --- the journal ----------------------------------------------------------------------------

    def touch(self, *keys: TaskKey) -> None:
        """Something has happened to these that the journal is to have."""
        self.changed.update(keys)

    def take_changed(self) -> set[TaskKey]:
        """Those that the journal is behind with, and that were not given before."""
        changed, self.changed = self.changed, set()
        return changed

    def recall(self, tasks: Mapping[TaskKey, Subtask], counts: Mapping[TaskKey, CountsRecord]) -> None:
        """Become what the journal has of each subtask, and of what it has counted."""
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
    """All subtasks of a job that is about to be deployed, or whose subtasks wait for their time."""
    firsts = graph.first_slots()
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
        )
        for operator, vertex in enumerate(graph.vertices)
        for index in range(vertex.parallelism)
    }


def results_too_large(task: Subtask) -> ErrorInfo:
    """What fails a job when a sink has ended, and with its result those of all are more than a job keeps."""
    text = (
        f"the sinks of this job returned more than {limits.RESULT_BYTES_MAX} bytes at their close: "
        "write large results with to_files"
    )
    return ErrorInfo(code=ResourceExhausted.code, text=text, task=str(task))


NAMES_SHOWN: Final = 5
"""Tasks that a text names at most."""


def names_of(tasks: Sequence[Subtask]) -> str:
    """The first of them, for a text."""
    more = " and others" if len(tasks) > NAMES_SHOWN else ""
    return ", ".join(str(task) for task in tasks[:NAMES_SHOWN]) + more
