"""The life cycle of a job and of the attempts of its tasks: which move follows which.

Both are tables of moves. A job::

    created --all run--> running --all finished--> finished, or finished_with_loss
       |                    |
       +--a task failed for good, too many rows-----------> failing  --all ended-> failed
       +--the user asks-----------------------------------> canceling --all ended-> canceled

One that runs may be paused (:mod:`~minishuffle.coordinator.pausing`), and ends from there as it does when it
runs::

    running --the user asks--> pausing --all stand--> paused --the user asks--> running
       ^                          |
       +--too late, or too often--+

A task. On a schedule that does not deploy all tasks at once it begins as *waiting*: without an attempt, and
part of nothing before it is deployed. An attempt may end in five ways. If it did not finish, and the job goes
on, the next attempt takes its place: in the same slot after the delay of
:mod:`~minishuffle.coordinator.failover`, or in another slot if its worker is lost, which it may have to wait
for::

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
:mod:`~minishuffle.coordinator.lostpartitions` says, with any strategy.

A job with the restart strategy ``none`` fails with its first task. A job on its way to ``failed`` or
``canceled`` ends there whatever its tasks report meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import TypeAdapter

from minishuffle import limits
from minishuffle.coordinator.books import AttemptRecord, TaskKey, Totals
from minishuffle.coordinator.positions import Resumption
from minishuffle.coordinator.recordcodec import Record
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import TaskInfo

__all__ = [
    "ENDED",
    "JOB_MOVES",
    "JOB_OVER",
    "NOT_DEPLOYED",
    "PENDING",
    "TASK_MOVES",
    "WAITING",
    "Subtask",
    "recalled_subtask",
    "results_too_large",
]

ENDED: Final = frozenset({"finished", "failed", "canceled", "abandoned", "lost"})
PENDING: Final = frozenset({"restarting", "waiting for a slot"})
"""States of a task whose next attempt is not deployed yet."""
WAITING: Final = "waiting"
"""The state of a task of which no attempt was deployed so far, since its time has not come."""
NOT_DEPLOYED: Final = FIRST_ATTEMPT - 1
"""The attempt of such a task."""
TASK_MOVES: Final[Mapping[str, frozenset[str]]] = {
    WAITING: frozenset({"created", "canceled"}),
    "created": ENDED | {"running"},
    "running": ENDED,
    "finished": frozenset({"lost", "restarting"}),
    "failed": frozenset({"restarting"}),
    "canceled": frozenset({"restarting"}),
    "abandoned": frozenset({"restarting"}),
    "lost": frozenset({"restarting"}),
    "restarting": frozenset({"waiting for a slot", "created", "canceled"}),
    "waiting for a slot": frozenset({"created", "canceled"}),
}
"""What is not here cannot happen to a task."""
JOB_MOVES: Final[Mapping[str, frozenset[str]]] = {
    "created": frozenset({"running", "failing", "canceling"}),
    "running": frozenset({"pausing", "finished", "finished_with_loss", "failing", "canceling"}),
    "pausing": frozenset({"running", "paused", "finished", "finished_with_loss", "failing", "canceling"}),
    "paused": frozenset({"running", "failing", "canceling"}),
    "failing": frozenset({"failed"}),
    "canceling": frozenset({"canceled"}),
}
JOB_OVER: Final = frozenset({"finished", "finished_with_loss", "failed", "canceled"})


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
    :mod:`~minishuffle.coordinator.ends`."""
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

    def record(self) -> dict[str, Any]:
        """For the journal. What an attempt that runs has counted is in a record of its own."""
        resumption = self.resumption._replace(files=dict(self.resumption.files))
        task = replace(self, resumption=resumption)
        if self.runs:
            task.counters, task.traffic = TaskCounters(), b""
        fields: dict[str, Any] = _SUBTASK.dump_python(task)
        return fields

    def counts_record(self) -> CountsRecord:
        """What an attempt that runs has counted and exchanged."""
        return CountsRecord(self.attempt, self.counters, self.traffic)

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


_SUBTASK: Final = TypeAdapter(Subtask)


def recalled_subtask(fields: Mapping[str, Any], counts: CountsRecord | None) -> Subtask:
    """What :meth:`Subtask.record` gave, and :meth:`Subtask.counts_record` last, maybe of another attempt."""
    task = _SUBTASK.validate_python(fields)
    if counts is not None and task.runs and counts.attempt == task.attempt:
        task.counters, task.traffic = counts.counters, counts.traffic
    return task


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
