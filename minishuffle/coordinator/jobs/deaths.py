"""Which deaths of worker processes count against which subtasks, and when a subtask has died too often. Pure.

A function that ends its process takes along whatever else runs there, each time that its subtask starts
again. So a death counts against a subtask, but only if it may have been its doing: if its thread was inside
user code, and the process ended in a way that user code brings about::

    how the process ended                                              counts
    -----------------------------------------------------------------  -----------------------------------
    SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL                           yes
    an exit that the worker had not announced, with whatever code      yes
    SIGKILL, while the ``oom_kill`` of its cgroup rose                 yes
    its launcher ended it, since it did not react, though it was       yes
    neither stopped nor waited for a disk
    any other signal: SIGTERM, SIGKILL (``worker kill``)               no
    nobody knows, but its connection closed and its port is refused    if the subtask had passed on nothing
                                                                       for ``STALLED_SECONDS``
    its host is silent, or its link is lost                            no

Where the attempts are that a launcher reports comes from the record that the worker kept
(``worker/tasks/crashrecord.py``), else from its last heartbeat.

Positions are rows that an attempt has dealt with since its start. (A position in the input would say nothing:
the next attempt of a source goes on behind what was under way, and that of a consumer gets other rows.) An
attempt that has got past the one at which the last one died, with what that had in hand, or that still moves
``SETTLED_SECONDS`` after its first row, clears the subtask of all deaths. So a function that ends its process
at its first row is found, as is one that does at its thousandth, or for want of memory after a minute; a
subtask that is merely beside it gets past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import ResourceExhausted
from minishuffle.wire.messages import ErrorInfo, TaskReport
from minishuffle.wire.requests import UserCall, WorkerEnded

__all__ = ["COUNTS", "SETTLED_SECONDS", "STALLED_SECONDS", "Deaths", "TaskDeaths", "end_in_words", "kind_of"]

STALLED_SECONDS: Final = 10.0
"""A subtask that has passed nothing on for so long may have ended a process of whose end nobody knows."""
SETTLED_SECONDS: Final = 10.0
"""An attempt that still moves so long after its first row is not what ends its process at its start."""

EndKind: TypeAlias = Literal[
    "fatal signal", "unannounced exit", "out of memory", "hung", "other signal", "closed"
]
COUNTS: Final[Mapping[EndKind, Literal["yes", "no", "if stalled"]]] = {
    "fatal signal": "yes",
    "unannounced exit": "yes",
    "out of memory": "yes",
    "hung": "yes",
    "other signal": "no",
    "closed": "if stalled",
}
STRATEGIES: Final = ("none", "individual", "region", "full")
"""Each restarts more than the one before."""
ESCALATION: Final = ((1 / 3, "region"), (2 / 3, "full"))
"""When more than that part of ``restart_failures_max`` attempts in a row have died in the same step of a
recovery, that much restarts: what they meet there may be what others hold."""
FATAL_SIGNALS: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"})
KILL: Final = "SIGKILL"


def kind_of(end: WorkerEnded) -> EndKind:
    """How a process ended, as its launcher tells it."""
    if end.code >= 0:
        return "unannounced exit"
    if end.signal in FATAL_SIGNALS:
        return "fatal signal"
    if end.signal == KILL and end.out_of_memory:
        return "out of memory"
    return "hung" if end.hung else "other signal"


def end_in_words(end: WorkerEnded) -> str:
    """What its launcher knows of it, behind the name of the worker."""
    if end.code >= 0:
        return f"ended with code {end.code}, which was not its own doing"
    if kind_of(end) == "out of memory":
        return f"was killed for want of memory ({KILL}, and its cgroup counts an oom_kill)"
    if kind_of(end) == "hung":
        return f"did not react, as if a function held the interpreter: its launcher sent {end.signal}"
    return f"was killed by {end.signal}"


@dataclass(slots=True)
class TaskDeaths(Record):
    """The deaths that count against one subtask."""

    attempt: int
    """That which died last."""
    position: int
    """Where it died."""
    rows: int
    """What it had in hand."""
    how: str
    """What is known of that end: a sentence without its end."""
    at: float
    count: int = 1
    step: str = ""
    """The step of its recovery that the attempt died in; empty: it was no recovery, or it had passed a first
    batch on."""
    stuck: int = 0
    """So many attempts in a row died in that step."""

    @property
    def needed(self) -> int:
        """How far an attempt has to get to clear the subtask."""
        return self.position + max(1, self.rows)

    def __str__(self) -> str:
        rows = f"with {self.rows:,} rows in hand behind" if self.rows else "before the next row behind"
        return f"{self.how}; the attempt was inside user code {rows} the {self.position:,} that it had done"


@dataclass(slots=True)
class _Life:
    """What heartbeats have said of the current attempt of a subtask."""

    attempt: int
    position: int
    rows: int
    inside: bool
    passed_on: int
    moved_at: float
    """When the subtask was seen to have passed something on, be it in this attempt or in one before."""
    began_at: float
    """When the attempt was first seen to have done so; 0: not so far."""


class Deaths:
    """The deaths of all subtasks of one job.

    Args:
        failures_max: so many of one subtask end the job.
        at: when the job began.
    """

    def __init__(self, failures_max: int, at: float) -> None:
        self._failures_max = failures_max
        self._began_at = at
        """From when on it is known that a subtask of which nothing was heard has passed nothing on."""
        self._counted: dict[TaskKey, TaskDeaths] = {}
        self._lives: dict[TaskKey, _Life] = {}

    def of(self, key: TaskKey) -> TaskDeaths | None:
        """Those that count against a subtask, if any does."""
        return self._counted.get(key)

    def counted(self) -> Mapping[TaskKey, TaskDeaths]:
        """All subtasks that a death counts against."""
        return self._counted

    # --- life ------------------------------------------------------------------------------------

    def heard(self, key: TaskKey, report: TaskReport, at: float) -> bool:
        """A heartbeat of the current attempt of a subtask; True: it is cleared of its deaths by that."""
        life = self._lives.get(key)
        passed_on = report.counters.records_out
        attempt = report.attempt.attempt
        if life is None or life.attempt != attempt:
            moved_at = life.moved_at if life is not None else self._began_at
            life = self._lives[key] = _Life(attempt, 0, 0, False, 0, moved_at, 0.0)
        moves = report.position > life.position or passed_on > life.passed_on
        if moves:
            life.moved_at = at
            life.began_at = life.began_at or at
        life.position, life.passed_on = report.position, passed_on
        life.rows, life.inside = report.in_hand, report.inside
        deaths = self._counted.get(key)
        if deaths is None or attempt <= deaths.attempt:
            return False
        settled = moves and at >= life.began_at + SETTLED_SECONDS
        if settled or report.position >= deaths.needed:
            del self._counted[key]
            return True
        return False

    def finished(self, key: TaskKey) -> bool:
        """The subtask has finished; True: it is cleared of its deaths by that."""
        self._lives.pop(key, None)
        return self._counted.pop(key, None) is not None

    # --- deaths ----------------------------------------------------------------------------------

    def count(self, call: UserCall, how: str, at: float, step: str = "") -> TaskDeaths | None:
        """An attempt died inside user code, and it may have been its doing; gives the deaths of its subtask.
        None: it was counted before."""
        key = (call.operator, call.index)
        before = self._counted.get(key)
        if before is not None and call.attempt <= before.attempt:
            return None
        deaths = TaskDeaths(
            call.attempt, call.position, call.rows, how, at, step=step, stuck=1 if step else 0
        )
        if before is not None and call.position < before.needed:
            deaths.count = before.count + 1
            deaths.stuck += before.stuck if step == before.step else 0
        self._counted[key] = deaths
        return deaths

    def is_stalled(self, key: TaskKey, at: float) -> bool:
        """Whether the subtask has passed nothing on of late."""
        life = self._lives.get(key)
        return at >= (self._began_at if life is None else life.moved_at) + STALLED_SECONDS

    def last_seen(self, key: TaskKey, attempt: int) -> tuple[int, int] | None:
        """The position of an attempt, and what it had in hand, as far as its worker has said; None: it was
        not inside user code."""
        life = self._lives.get(key)
        if life is None or life.attempt != attempt:
            return 0, 0
        return (life.position, life.rows) if life.inside else None

    def strategy(self, own: str) -> str:
        """How much restarts with a subtask of a job, whose own strategy that is."""
        stuck = max((deaths.stuck for deaths in self._counted.values()), default=0)
        wider = [each for part, each in ESCALATION if stuck > part * self._failures_max]
        return max([own, *wider], key=STRATEGIES.index)

    def too_many(self, deaths: TaskDeaths) -> bool:
        """Whether the job ends for them."""
        return deaths.count >= self._failures_max

    def limit_reached(self, task: str, deaths: TaskDeaths) -> ErrorInfo:
        """Why the job ends; ``task`` is the name of the subtask."""
        text = (
            f"{task} was inside user code each of the {deaths.count} times that its worker died "
            f"(restart_failures_max), and got no further; the last time {deaths}: correct the function, give "
            "workers more memory if it takes that much, or allow more with --set restart_failures_max=N"
        )
        return ErrorInfo(code=ResourceExhausted.code, text=text, task=task)

    # --- the journal -----------------------------------------------------------------------------

    def coordinator_lost(self, at: float) -> None:
        """What heartbeats have said before is not known."""
        self._began_at = at

    def record(self, key: TaskKey) -> TaskDeaths | None:
        """For the journal: the deaths that count against a subtask."""
        return self._counted.get(key)

    def recall(self, key: TaskKey, record: TaskDeaths | None) -> None:
        """What :meth:`record` gave."""
        if record is not None:
            self._counted[key] = record
