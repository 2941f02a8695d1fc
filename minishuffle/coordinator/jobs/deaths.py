"""Deaths of worker processes that count against subtasks, and the limit for them. Pure.

A function that ends its process also ends everything else in it, each time that its subtask restarts. So a
death counts against a subtask, but only if the subtask may have caused it: its thread was inside user code,
and the process ended in a way that user code can cause::

    end of the process                                                 counts
    -----------------------------------------------------------------  -----------------------------------
    SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL                           yes
    an exit that the worker had not announced, with any code           yes
    SIGKILL, while the ``oom_kill`` of its cgroup rose                 yes
    its launcher killed it because it did not react, although it was   yes
    neither stopped nor waiting for a disk
    any other signal: SIGTERM, SIGKILL (``worker kill``)               no
    unknown, but its connection closed and its port is refused         if the subtask had passed on nothing
                                                                       for ``STALLED_SECONDS``
    its host is silent, or its link is lost                            no

If the launcher reports the end, the places of the attempts come from the record that the worker has kept
(``worker/tasks/crashrecord.py``), otherwise from its last heartbeat.

A position is the number of rows that an attempt has processed since its start. (A position in the input would
not help: the next attempt of a source continues after the rows in progress, and a consumer's gets other
rows.) All deaths of a subtask are cleared when an attempt gets beyond the position of the last death plus the
rows in hand at that time, or still makes progress ``SETTLED_SECONDS`` after its first row. So a function is
found that ends its process at its first row, at its thousandth, or after a minute for lack of memory. A
subtask that merely runs in the same process gets beyond its position and is cleared.

**Poison.** In a job that loses nothing the next attempt gets the same rows, so that a row which ends its
process would end the job. There each attempt after a counted death looks for that row
(:mod:`~minishuffle.worker.tasks.poisonrows`): from the row on that the last one had first in hand, it takes
few rows at a time, so that each death leaves fewer rows. At the limit the job goes on if it is known which
row it is: the next attempt leaves that out, as ``on_error`` of the operator says that had it. Behind the
first operator that is a row that comes to it, if two attempts in a row have had the same one; if what comes
there is not the same again, the input row. Else there may be some further deaths before the job fails::

    deaths ≤ restart_failures_max + log2(rows in hand) + 2

Other subtasks of the process that look for rows too wait meanwhile outside user code, so that an end soon
counts against one alone. Only such an end decides which row it is, and whether the limit is reached; those
that count against several do only beyond ``UNCLEAR_DEATHS_MAX`` more.

Since rows may come from several channels in another order, and each attempt begins where a snapshot is, the
place of a death is wider there: ``reach`` instead of ``needed``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import ResourceExhausted
from minishuffle.limits import POISON_ROWS_MAX
from minishuffle.wire.messages import ErrorInfo, PoisonRow, PoisonSearch, TaskReport
from minishuffle.wire.requests import UserCall, WorkerEnded

__all__ = [
    "COUNTS",
    "SETTLED_SECONDS",
    "STALLED_SECONDS",
    "Deaths",
    "TaskDeaths",
    "UnexplainedEnd",
    "UnexplainedEnds",
    "end_in_words",
    "kind_of",
]

STALLED_SECONDS: Final = 10.0
"""A subtask that has passed on nothing for this time may have caused a death with an unknown end."""
SETTLED_SECONDS: Final = 10.0
"""An attempt that still makes progress this long after its first row does not end its process at its
start."""

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
"""Restart strategies, from the narrowest to the widest."""
REACH_ROWS: Final = 100_000
"""Rows of other channels that may come before the place of a death."""
UNCLEAR_DEATHS_MAX: Final = 10
"""Deaths beyond the limit of a subtask that may as well be another's."""
REPLAY_SECONDS_MAX: Final = 60.0
"""An attempt may take so long at most for the rows that the last one had before it died; and so long always
if it takes them in pieces."""
ESCALATION: Final = ((1 / 3, "region"), (2 / 3, "full"))
"""Pairs (share, strategy): if more than this share of ``restart_failures_max`` attempts in a row have died in
the same step of a recovery, the strategy is widened, since the cause may be state that other subtasks
hold."""
FATAL_SIGNALS: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"})
KILL: Final = "SIGKILL"


def kind_of(end: WorkerEnded) -> EndKind:
    """The kind of end that a launcher has reported."""
    if end.code >= 0:
        return "unannounced exit"
    if end.signal in FATAL_SIGNALS:
        return "fatal signal"
    if end.signal == KILL and end.out_of_memory:
        return "out of memory"
    return "hung" if end.hung else "other signal"


def end_in_words(end: WorkerEnded) -> str:
    """The end in words, as they follow the worker's name in a text."""
    if end.code >= 0:
        return f"ended with code {end.code}, which was not its own doing"
    if kind_of(end) == "out of memory":
        return f"was killed for want of memory ({KILL}, and its cgroup counts an oom_kill)"
    if kind_of(end) == "hung":
        return f"did not react, as if a function held the interpreter: its launcher sent {end.signal}"
    return f"was killed by {end.signal}"


class UnexplainedEnd(NamedTuple):
    """A worker whose process has ended, and whose launcher may report how."""

    worker: int
    due: float
    """Deadline for the launcher's report."""
    how: str
    """Description of the end without the report."""
    attempts: dict[str, list[tuple[TaskKey, int]]]
    """Attempts that died with it, by job."""


class UnexplainedEnds:
    """Unexplained ends of workers, by epoch. Not journaled: launchers repeat how a process ended, with its
    calls inside user code."""

    def __init__(self) -> None:
        self._ends: dict[int, UnexplainedEnd] = {}

    def add(self, epoch: int, end: UnexplainedEnd) -> None:
        """A process has ended; its launcher's report is due at ``end.due``."""
        self._ends[epoch] = end

    def take(self, epoch: int) -> UnexplainedEnd | None:
        """Take the end of a process that is explained now; None: it is not awaited."""
        return self._ends.pop(epoch, None)

    def take_due(self, now: float) -> list[UnexplainedEnd]:
        """Take the ends whose deadline has passed."""
        due = [epoch for epoch, end in self._ends.items() if now >= end.due]
        return [self._ends.pop(epoch) for epoch in due]

    def next_deadline(self) -> float | None:
        """The earliest deadline."""
        return min((end.due for end in self._ends.values()), default=None)


@dataclass(slots=True)
class TaskDeaths(Record):
    """The deaths that count against a subtask."""

    attempt: int
    """The attempt that died last."""
    position: int
    """Its position when it died."""
    rows: int
    """Rows it had in hand."""
    how: str
    """Description of that end: a sentence without its full stop."""
    at: float
    count: int = 1
    step: str = ""
    """The step of its recovery in which the attempt died. Empty: it was not a recovery, or it had passed on a
    first batch."""
    stuck: int = 0
    """Number of attempts in a row that died in this step."""
    lived: float = 0.0
    """Seconds from its first progress to its death, as far as heartbeats tell."""
    row: int = 0
    """The hash of the first row in hand; 0: it is not known."""
    place: int = -1
    """The place in the chain of the operator that the attempt was in; -1: it is not known."""
    place_row: int = 0
    """The hash of the first row that this operator had in hand; 0: it is not known."""
    place_rows: int = 0
    """Rows that it had in hand."""
    row_before: int = 0
    """``place_row`` of the attempt before, if that died at the same place."""
    rows_before: int = 0
    """``place_rows`` of it."""
    rows_max: int = 0
    """The most rows that one of these attempts had in hand."""
    earlier: int = 0
    """Deaths before these by rows that were found, which no attempt has got past so far."""

    @property
    def needed(self) -> int:
        """The position at which an attempt clears the subtask."""
        return self.position + max(1, self.rows)

    @property
    def reach(self) -> int:
        """The place of the death is among so many first rows of each attempt that loses none."""
        return 2 * self.needed + REACH_ROWS

    @property
    def in_a_row(self) -> int:
        """All deaths since an attempt last got past the place of one."""
        return self.count + self.earlier

    @property
    def found(self) -> tuple[int, int] | None:
        """The row that ended the process, and the place of the operator in front of which it was alone; 0: it
        is one of the input. None: it is not known."""
        if self.place_rows == 1 and 0 < self.place_row == self.row_before:
            return self.place_row, self.place
        narrows = not 0 < self.rows_before <= self.place_rows
        if self.rows != 1 or not self.row or (self.place_row and narrows):
            return None
        return self.row, 0

    def __str__(self) -> str:
        rows = f"with {self.rows:,} rows in hand behind" if self.rows else "before the next row behind"
        return f"{self.how}; the attempt was inside user code {rows} the {self.position:,} that it had done"


@dataclass(slots=True)
class _Life:
    """The progress of a subtask's current attempt, from heartbeats."""

    attempt: int
    position: int
    rows: int
    inside: bool
    passed_on: int
    moved_at: float
    """When the subtask last made progress, in this attempt or an earlier one."""
    began_at: float
    """When the attempt first made progress; 0: not yet."""


def _step(deaths: TaskDeaths, operators: Sequence[str]) -> str:
    """Where the attempt was, in words behind others; empty: it is not known."""
    return f", in {operators[deaths.place]!r}" if 0 <= deaths.place < len(operators) else ""


class Deaths:
    """The deaths of all subtasks of one job.

    Args:
        failures_max: deaths of one subtask that end the job.
        at: when the job began.
        searches: it loses nothing: see *Poison*.
    """

    def __init__(self, failures_max: int, at: float, *, searches: bool = False) -> None:
        self._failures_max, self._searches = failures_max, searches
        self._began_at = at
        """The time from which on a subtask without any report counts as stalled."""
        self._counted: dict[TaskKey, TaskDeaths] = {}
        self._lives: dict[TaskKey, _Life] = {}
        self._poison: dict[TaskKey, tuple[PoisonRow, ...]] = {}
        """Rows that are left out, in the order in which they were found."""

    def of(self, key: TaskKey) -> TaskDeaths | None:
        """The deaths that count against a subtask; None: none do."""
        return self._counted.get(key)

    def counted(self) -> Mapping[TaskKey, TaskDeaths]:
        """All subtasks with deaths that count."""
        return self._counted

    # --- life ------------------------------------------------------------------------------------

    def note_report(self, key: TaskKey, report: TaskReport, at: float) -> bool:
        """Note a heartbeat's report of a subtask's current attempt; True if it clears the subtask of its
        deaths."""
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
        in_pieces = deaths.row > 0 or deaths.place_row > 0
        replay = REPLAY_SECONDS_MAX if in_pieces else min(2 * deaths.lived, REPLAY_SECONDS_MAX)
        replay = replay if self._searches else 0.0
        settled = moves and at >= life.began_at + SETTLED_SECONDS + replay
        if settled or report.position >= self._place(deaths):
            del self._counted[key]
            return True
        return False

    def finished(self, key: TaskKey) -> bool:
        """Note that a subtask has finished; True if this clears it of deaths."""
        self._lives.pop(key, None)
        return self._counted.pop(key, None) is not None

    # --- deaths ----------------------------------------------------------------------------------

    def count(self, call: UserCall, how: str, at: float, step: str = "") -> TaskDeaths | None:
        """Count a death inside user code against its subtask. Returns all its deaths; None if this one was
        counted before."""
        key = (call.operator, call.index)
        before = self._counted.get(key)
        if before is not None and call.attempt <= before.attempt:
            return None
        step = "" if self._searches and call.rows else step  # other subtasks are not the cause
        life = self._lives.get(key)
        deaths = TaskDeaths(
            call.attempt,
            call.position,
            call.rows,
            how,
            at,
            step=step,
            stuck=1 if step else 0,
            lived=at - life.began_at if life and life.attempt == call.attempt and life.began_at else 0.0,
            row=call.row,
            place=call.place,
            place_row=call.place_row,
            place_rows=call.place_rows,
            rows_max=max(call.rows, call.place_rows),
        )
        if before is not None and call.position < self._place(before):
            deaths.count = before.count + 1
            deaths.stuck += before.stuck if step == before.step else 0
            deaths.rows_max = max(before.rows_max, deaths.rows_max)
            deaths.earlier = before.earlier
            if call.place == before.place:
                deaths.row_before, deaths.rows_before = before.place_row, before.place_rows
        self._counted[key] = deaths
        return deaths

    def is_stalled(self, key: TaskKey, at: float) -> bool:
        """Whether the subtask has made no progress for ``STALLED_SECONDS``."""
        life = self._lives.get(key)
        return at >= (self._began_at if life is None else life.moved_at) + STALLED_SECONDS

    def last_seen(self, key: TaskKey, attempt: int) -> tuple[int, int] | None:
        """The last reported position of an attempt and its rows in hand. None: it was not inside user
        code."""
        life = self._lives.get(key)
        if life is None or life.attempt != attempt:
            return 0, 0
        return (life.position, life.rows) if life.inside else None

    def strategy(self, own: str) -> str:
        """The restart strategy to use: ``own``, the job's own, or a wider one after repeated deaths."""
        stuck = max((deaths.stuck for deaths in self._counted.values()), default=0)
        wider = [each for part, each in ESCALATION if stuck > part * self._failures_max]
        return max([own, *wider], key=STRATEGIES.index)

    def too_many(self, key: TaskKey, *, alone: bool = True) -> bool:
        """Whether the deaths of a subtask reach the limit that ends the job; ``alone``: the last one counts
        against no other."""
        deaths = self._counted[key]
        unclear = UNCLEAR_DEATHS_MAX if self._searches and not alone else 0
        return deaths.count >= self._failures_max + self._further(key, deaths) + unclear

    def limit_reached(self, task: str, deaths: TaskDeaths, operators: Sequence[str] = ()) -> ErrorInfo:
        """Why the job ends; ``task`` is the name of the subtask, ``operators`` those of its chain."""
        step = _step(deaths, operators)
        text = (
            f"{task} was inside user code each of the {deaths.count} times that its worker died "
            f"(restart_failures_max), and got no further; the last time {deaths}{step}: correct the "
            "function, give workers more memory if it takes that much, or allow more with "
            "--set restart_failures_max=N"
        )
        return ErrorInfo(code=ResourceExhausted.code, text=text, task=task)

    def row_found(self, task: str, deaths: TaskDeaths, operators: Sequence[str]) -> str:
        """Says in words what :meth:`find_row` has found, and what becomes of it; arguments as above."""
        is_of_input = deaths.found is not None and deaths.found[1] < deaths.place
        left_out = "leaves out all that comes of it there" if is_of_input else "leaves it out"
        where = _step(deaths, operators)
        return (
            f"{task}: one row ended its worker {deaths.count} times{where}: the next attempt {left_out}, or "
            "fails with it, as on_error says"
        )

    # --- poison ----------------------------------------------------------------------------------

    def _place(self, deaths: TaskDeaths) -> int:
        return deaths.reach if self._searches else deaths.needed

    def _may_find(self, key: TaskKey) -> bool:
        return self._searches and len(self._poison.get(key, ())) < POISON_ROWS_MAX

    def _further(self, key: TaskKey, deaths: TaskDeaths) -> int:
        """Deaths beyond the limit in which the search may find its row."""
        if not self._may_find(key):
            return 0
        if not (deaths.row or deaths.place_row):
            # The attempt may have begun before its predecessor's death was counted.
            return 1 if deaths.place < 0 or deaths.rows or deaths.place_rows else 0
        return (deaths.rows_max - 1).bit_length() + 2

    def find_row(self, key: TaskKey) -> TaskDeaths | None:
        """Whether the limit is reached, and which row has brought the deaths about is known. Then it is to be
        left out, and the subtask has no deaths but earlier ones. Returns those that it had."""
        deaths = self._counted[key]
        found = deaths.found
        if deaths.count < self._failures_max or found is None or not self._may_find(key):
            return None
        row = PoisonRow(
            row=found[0],
            place=max(0, deaths.place),
            at=found[1],
            reach=deaths.reach,
            why=f"took this record each of the {deaths.count} times that its worker died; "
            f"the last time {deaths.how}",
        )
        self._poison[key] = (*self._poison.get(key, ()), row)
        self._counted[key] = replace(
            deaths,
            count=0,
            earlier=deaths.in_a_row,
            row=0,
            rows=0,
            place=-1,
            place_row=0,
            place_rows=0,
            rows_max=0,
        )
        return deaths

    def search(self, key: TaskKey) -> PoisonSearch | None:
        """The search of the next attempt of a subtask; None: it looks for nothing."""
        deaths, found = self._counted.get(key), self._poison.get(key, ())
        if not self._searches or (deaths is None and not found):
            return None
        reach = max((each.reach for each in found), default=0)
        if deaths is None:
            return PoisonSearch(reach=reach, found=list(found))
        reach = max(reach, deaths.reach)
        rows = deaths.rows if deaths.rows or not deaths.count else 1  # those of asynchronous calls, perhaps
        return PoisonSearch(
            row=deaths.row,
            rows=rows,
            place=deaths.place,
            place_row=deaths.place_row,
            place_rows=deaths.place_rows,
            reach=reach,
            found=list(found),
        )

    # --- the journal -----------------------------------------------------------------------------

    def coordinator_lost(self, at: float) -> None:
        """A new coordinator has taken over: earlier heartbeats are not known."""
        self._began_at = at

    def record(self, key: TaskKey) -> TaskDeaths | None:
        """For the journal: the deaths that count against a subtask."""
        return self._counted.get(key)

    def poison_record(self, key: TaskKey) -> tuple[PoisonRow, ...]:
        """For the journal: the rows that a subtask leaves out."""
        return self._poison.get(key, ())

    def recall(self, key: TaskKey, record: TaskDeaths | None, poison: tuple[PoisonRow, ...]) -> None:
        """Restore from the results of :meth:`record` and :meth:`poison_record`."""
        if record is not None:
            self._counted[key] = record
        if poison:
            self._poison[key] = poison
