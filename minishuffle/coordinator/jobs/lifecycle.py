"""The life cycle of a job and of its tasks: which transitions there are, for whom, and what belongs to each.

Both are tables of transitions. A job::

    created --all run--> running --all finished--> finished, or finished_with_loss
       |                    |
       +--a task failed for good, too many rows-----------> failing  --all ended-> failed
       +--the user asks-----------------------------------> canceling --all ended-> canceled

One that runs may be paused (:mod:`~minishuffle.coordinator.jobs.pausing`), and ends from there as it does
when it runs::

    running --the user asks--> pausing --all stand--> paused --the user asks--> running
       ^                          |
       +--too late, or too often--+

A task. On a schedule that does not deploy all tasks at once it begins as *waiting*: without an attempt, and
part of nothing before it is deployed. An attempt may end in five ways. If it did not finish, and the job goes
on, the next attempt takes its place: in the same slot after the delay of
:mod:`~minishuffle.coordinator.jobs.failover`, or in another slot if its worker is lost, which it may have to
wait for::

    waiting --deployed--> created
    created --> running --> finished | failed | canceled | abandoned | lost
       ^                       |          |         |           |        |
       |                       +--lost---(its worker, while consumers need what it wrote)
       |                       +----------+---------+-----------+--------+
       |                                            v
       +--deployed------------- restarting <--------+
       +--deployed-- waiting for a slot <---+

With the strategies ``region`` and ``full`` others are cancelled then and restart with it, once all of them
have ended. Of those that have finished, the ones restart that a consumer which restarts has yet to read to
the end. What reads or writes blocking exchanges restarts with what
:mod:`~minishuffle.coordinator.jobs.lostpartitions` says, with any strategy.

A job with the restart strategy ``none`` fails with its first task. A job on its way to ``failed`` or
``canceled`` ends there whatever its tasks report meanwhile.

Each transition of the tables names its actors and its effects, in their order. :meth:`Job._transition` and
:meth:`Job._transition_job` are the only places that change a state: they refuse what is not in the table, or
not for that actor, and apply the effects, so no caller repeats them. (The model: the states of Arroyo's job
controller.) Effects for a task::

    leave channels      its next attempt reads what is kept anew; a source may write its rows once more
    count lost rows     what it may have emitted, and which of its files may still be hidden
    move stage          its stage has come further, or back
    settle files        its files have the names that were listed
    end attempt         nobody waits for its end any more; its recovery begins, or is complete
    end move            it has taken all that a slot which moves waits for
    interrupt           a pause, or a move of slots, that waits for it begins again or is given up
    block slot          its thread still runs: the slot takes no other task
    count restart       by the end that the last attempt came to
    begin timer         for the restart, or for how long it waits for a slot
    end timer           it waits no more
    begin first         the first attempt gets the worker of its slot
    begin next          the next attempt goes on where the last one ended, whose books are closed
    record event        for the users of the job
    clear deaths        none counts against it any more
    read inputs         its producers may be released, and so may it be
    complete exchange   the last producer of a blocking exchange has finished

The journal is written with each, too. Effects for a job::

    record event        for its users
    end pause           whatever stands goes on
    stop tasks          what is pending or waits is canceled, and nothing restarts or moves any more
    resume clocks       sources and recoveries do not count the time of the pause
    end                 the time of its end; it needs no links
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from minishuffle import limits
from minishuffle.coordinator.jobs.lossaccounting import AttemptRecord, TaskKey, Totals
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.journal.codec import Record
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import TaskInfo

__all__ = [
    "ENDED",
    "JOB_TRANSITIONS",
    "JOB_OVER",
    "NOT_DEPLOYED",
    "PENDING",
    "TASK_TRANSITIONS",
    "WAITING",
    "Actor",
    "Transition",
    "JobEffect",
    "Subtask",
    "TaskEffect",
    "effects_of",
    "may",
    "results_too_large",
]

ENDED: Final = frozenset({"finished", "failed", "canceled", "abandoned", "lost"})
PENDING: Final = frozenset({"restarting", "waiting for a slot"})
"""States of a task whose next attempt is not deployed yet."""
WAITING: Final = "waiting"
"""The state of a task of which no attempt was deployed so far, since its time has not come."""
NOT_DEPLOYED: Final = FIRST_ATTEMPT - 1
"""The attempt of such a task."""


Actor: TypeAlias = Literal["coordinator", "worker", "user"]
"""Who asks for a transition: the coordinator by itself, a report of a worker, or a request of a user."""
TaskEffect: TypeAlias = Literal[
    "leave channels",
    "count lost rows",
    "move stage",
    "settle files",
    "end attempt",
    "end move",
    "interrupt",
    "block slot",
    "count restart",
    "begin timer",
    "end timer",
    "begin first",
    "begin next",
    "record event",
    "clear deaths",
    "read inputs",
    "complete exchange",
]
JobEffect: TypeAlias = Literal["record event", "end pause", "stop tasks", "resume clocks", "end"]
Effect = TypeVar("Effect", bound=str)


@dataclass(frozen=True, slots=True)
class Transition(Generic[Effect]):
    """What belongs to a transition."""

    by: frozenset[Actor]
    effects: tuple[Effect, ...]
    """In the order in which they are applied."""


Transitions: TypeAlias = Mapping[tuple[str, str], Transition[Effect]]
"""By the states before and after."""
COORDINATOR: Final = frozenset[Actor]({"coordinator"})
WORKER: Final = frozenset[Actor]({"worker"})
USER: Final = frozenset[Actor]({"user"})

_EARLY: Final[tuple[TaskEffect, ...]] = ("leave channels", "end attempt", "interrupt", "record event")
_ABANDONED: Final[tuple[TaskEffect, ...]] = ("block slot", *_EARLY)
_LOST: Final[tuple[TaskEffect, ...]] = ("count lost rows", *_EARLY)
_FINISHED: Final[tuple[TaskEffect, ...]] = (
    *("move stage", "end attempt", "end move", "record event"),
    *("clear deaths", "read inputs", "complete exchange"),
)
_RESTART: Final[tuple[TaskEffect, ...]] = ("count restart", "begin timer", "record event")
_NEXT: Final[tuple[TaskEffect, ...]] = ("end timer", "begin next", "record event")
_GIVEN_UP: Final[tuple[TaskEffect, ...]] = ("end attempt", "interrupt", "record event")

TASK_TRANSITIONS: Final[Transitions[TaskEffect]] = {
    (WAITING, "created"): Transition(COORDINATOR, ("move stage", "begin first", "record event")),
    (WAITING, "canceled"): Transition(COORDINATOR, ("move stage", *_GIVEN_UP)),
    ("created", "running"): Transition(WORKER, ("settle files", "record event")),
    ("created", "finished"): Transition(WORKER, _FINISHED),
    ("created", "failed"): Transition(WORKER | COORDINATOR, _EARLY),
    ("created", "canceled"): Transition(WORKER | COORDINATOR, _EARLY),
    ("created", "abandoned"): Transition(WORKER, _ABANDONED),
    ("created", "lost"): Transition(COORDINATOR, _LOST),
    ("running", "finished"): Transition(WORKER, _FINISHED),
    ("running", "failed"): Transition(WORKER, _EARLY),
    ("running", "canceled"): Transition(WORKER, _EARLY),
    ("running", "abandoned"): Transition(WORKER, _ABANDONED),
    ("running", "lost"): Transition(COORDINATOR, _LOST),
    ("finished", "lost"): Transition(WORKER | COORDINATOR, ("move stage", *_LOST)),
    ("finished", "restarting"): Transition(COORDINATOR, ("leave channels", "move stage", *_RESTART)),
    ("failed", "restarting"): Transition(COORDINATOR, _RESTART),
    ("canceled", "restarting"): Transition(COORDINATOR, _RESTART),
    ("abandoned", "restarting"): Transition(COORDINATOR, _RESTART),
    ("lost", "restarting"): Transition(COORDINATOR, _RESTART),
    ("restarting", "waiting for a slot"): Transition(COORDINATOR, ("begin timer", "record event")),
    ("restarting", "created"): Transition(COORDINATOR, _NEXT),
    ("restarting", "canceled"): Transition(COORDINATOR, ("end timer", *_GIVEN_UP)),
    ("waiting for a slot", "created"): Transition(COORDINATOR, _NEXT),
    ("waiting for a slot", "canceled"): Transition(COORDINATOR, ("end timer", *_GIVEN_UP)),
}
"""What is not here cannot happen to a task."""

_STOP: Final[tuple[JobEffect, ...]] = ("record event", "end pause", "stop tasks")
_DONE: Final[tuple[JobEffect, ...]] = ("end pause", "end", "record event")

JOB_TRANSITIONS: Final[Transitions[JobEffect]] = {
    ("created", "running"): Transition(COORDINATOR, ("record event",)),
    ("created", "failing"): Transition(COORDINATOR, _STOP),
    ("created", "canceling"): Transition(USER, _STOP),
    ("running", "pausing"): Transition(USER, ("record event",)),
    ("running", "finished"): Transition(COORDINATOR, _DONE),
    ("running", "finished_with_loss"): Transition(COORDINATOR, _DONE),
    ("running", "failing"): Transition(COORDINATOR, _STOP),
    ("running", "canceling"): Transition(USER, _STOP),
    ("pausing", "running"): Transition(USER | COORDINATOR, ("record event",)),
    ("pausing", "paused"): Transition(COORDINATOR, ("record event",)),
    ("pausing", "finished"): Transition(COORDINATOR, _DONE),
    ("pausing", "finished_with_loss"): Transition(COORDINATOR, _DONE),
    ("pausing", "failing"): Transition(COORDINATOR, _STOP),
    ("pausing", "canceling"): Transition(USER, _STOP),
    ("paused", "running"): Transition(USER, ("resume clocks", "end pause", "record event")),
    ("paused", "failing"): Transition(COORDINATOR, _STOP),
    ("paused", "canceling"): Transition(USER, _STOP),
    ("failing", "failed"): Transition(COORDINATOR, ("end", "record event")),
    ("canceling", "canceled"): Transition(COORDINATOR, ("end", "record event")),
}
"""The same of a job."""
JOB_OVER: Final = frozenset({"finished", "finished_with_loss", "failed", "canceled"})


def may(table: Transitions[Effect], before: str, to: str, by: Actor) -> bool:
    """Whether there is such a transition, and that actor may ask for it."""
    found = table.get((before, to))
    return found is not None and by in found.by


def effects_of(table: Transitions[Effect], name: str, before: str, to: str, by: Actor) -> tuple[Effect, ...]:
    """What belongs to that transition of the task or job of that name.

    Raises:
        AssertionError: there is none, or that actor may not ask for it.
    """
    if not may(table, before, to, by):
        raise AssertionError(f"{name}: the {by} may not bring it from {before} to {to}")
    return table[before, to].effects


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

    def counts_record(self) -> CountsRecord:
        """What an attempt that runs has counted and exchanged."""
        return CountsRecord(self.attempt, self.counters, self.traffic)

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
    def rows_kept(self) -> int:
        """See :meth:`Job.rows_kept`."""
        return max(self.resumption.first_row, self.counters.rows_kept, self.announced)

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
