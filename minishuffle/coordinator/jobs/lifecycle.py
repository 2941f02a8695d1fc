"""The life cycle of a job and of its tasks: two tables of transitions, with the actors and effects of each.

A job::

    created --all run--> running --all finished--> finished, or finished_with_loss
       |                    |
       +--a task failed for good, too many rows-----------> failing  --all ended-> failed
       +--the user asks-----------------------------------> canceling --all ended-> canceled

A running job may be paused (:mod:`~minishuffle.coordinator.jobs.pausing`), and ends from there as from
running::

    running --the user asks--> pausing --all stand--> paused --the user asks--> running
       ^                          |
       +--too late, or too often--+

A task. On a schedule that does not deploy all tasks at once it begins as *waiting*, without an attempt. An
attempt can end in five ways. If the task is not finished and the job continues, the next attempt takes its
place: in the same slot after the delay of :mod:`~minishuffle.coordinator.jobs.failover`, or in another slot
if its worker is lost, for which it may have to wait::

    waiting --deployed--> created
    created --> running --> finished | failed | canceled | abandoned | lost
       ^                       |          |         |           |        |
       |                       +--lost---(its worker, while consumers need its partitions)
       |                       +----------+---------+-----------+--------+
       |                                            v
       +--deployed------------- restarting <--------+
       +--deployed-- waiting for a slot <---+

With the strategies ``region`` and ``full``, other tasks are cancelled then, and all restart together once
they have ended. A finished task restarts with them if a restarting consumer has not read it to the end. Tasks
that read or write blocking exchanges restart by the rules of
:mod:`~minishuffle.coordinator.jobs.lostpartitions`, with any strategy.

A job with the restart strategy ``none`` fails with its first task. A job that is failing or canceling reaches
``failed`` or ``canceled``, whatever its tasks report meanwhile.

Each transition of the tables has its actors and its effects, in order. :meth:`Job._transition` and
:meth:`Job._transition_job` are the only places that change a state. They refuse a transition that is not in
the table, or not allowed for the actor, and apply the effects, so no caller repeats them. (The model: the
states of Arroyo's job controller.) Effects for a task::

    leave channels      its next attempt reads kept partitions again; a source may repeat its rows
    count lost rows     rows it may have emitted, and listed files that may still be hidden
    move stage          its stage changes its state
    settle files        its listed files have their final names
    end attempt         its end is no longer awaited; its recovery begins, or is complete
    end move            it has processed the rows for which a moving slot waits
    interrupt           a pause or move that waits for it begins again, or is given up
    block slot          its thread still runs: the slot takes no other task
    count restart       by the end of the last attempt
    begin timer         for the restart, or for the time it may wait for a slot
    end timer           it waits no longer
    begin first         the first attempt gets the worker of its slot
    begin next          the next attempt continues from the last one, whose account is closed
    record event        for the users of the job
    clear deaths        no death counts against it any more
    read inputs         its producers may be released, and so may it
    complete exchange   the last producer of a blocking exchange has finished

The journal is written after each transition as well. Effects for a job::

    record event        for its users
    end pause           stopped tasks continue
    stop tasks          pending and waiting tasks are canceled; no task restarts or moves any more
    resume clocks       sources and recoveries do not count the time of the pause
    end                 the time of its end; it needs no links
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from minishuffle.ids import FIRST_ATTEMPT

__all__ = [
    "ENDED",
    "JOB_TRANSITIONS",
    "JOB_ENDED",
    "NOT_DEPLOYED",
    "PENDING",
    "TASK_TRANSITIONS",
    "WAITING",
    "Actor",
    "Transition",
    "JobEffect",
    "TaskEffect",
    "effects_of",
    "may",
]

ENDED: Final = frozenset({"finished", "failed", "canceled", "abandoned", "lost"})
PENDING: Final = frozenset({"restarting", "waiting for a slot"})
"""States of a task whose next attempt is not deployed yet."""
WAITING: Final = "waiting"
"""The state of a task whose first attempt is not deployed yet, because its schedule delays it."""
NOT_DEPLOYED: Final = FIRST_ATTEMPT - 1
"""The attempt number of a waiting task."""


Actor: TypeAlias = Literal["coordinator", "worker", "user"]
"""The actor of a transition: the coordinator by itself, a report of a worker, or a request of a user."""
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
    """The actors and effects of a transition."""

    by: frozenset[Actor]
    effects: tuple[Effect, ...]
    """Effects in the order in which they are applied."""


Transitions: TypeAlias = Mapping[tuple[str, str], Transition[Effect]]
"""Transitions by the states before and after."""
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
"""All transitions of a task; others cannot happen."""

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
"""All transitions of a job; others cannot happen."""
JOB_ENDED: Final = frozenset({"finished", "finished_with_loss", "failed", "canceled"})


def may(table: Transitions[Effect], before: str, to: str, by: Actor) -> bool:
    """Whether the table has this transition, for this actor."""
    found = table.get((before, to))
    return found is not None and by in found.by


def effects_of(table: Transitions[Effect], name: str, before: str, to: str, by: Actor) -> tuple[Effect, ...]:
    """The effects of a transition of the task or job called ``name``.

    Raises:
        AssertionError: the table does not have it, or not for this actor.
    """
    if not may(table, before, to, by):
        raise AssertionError(f"{name}: the {by} may not bring it from {before} to {to}")
    return table[before, to].effects
