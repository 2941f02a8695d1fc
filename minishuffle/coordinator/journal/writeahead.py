"""What is held back while the journal cannot be written. Pure.

Nothing that the next coordinator would contradict leaves before the journal has it: no attempt is deployed
that another may be given the number of, none is released that another would ask for, and no report of a
worker is acknowledged. While the journal cannot be written (its disk is full), tasks run on, and rows flow;
reports are heard, and workers keep them for the next coordinator; clients are answered. Tasks that failed
restart once the journal is written, and files of sinks get their names then. A job can end meanwhile, for it
may be what fills the disk: it runs again if the next coordinator does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from minishuffle.coordinator.instructions import CoordinatorStep, Instruction, Reply, SendToWorker
from minishuffle.wire.clients import DropResult, ServeResult
from minishuffle.wire.inquiries import WorkerAsked
from minishuffle.wire.messages import (
    Acknowledge,
    Advertise,
    CancelTasks,
    ConsumersEnded,
    ControlMessage,
    DeployTasks,
    Dial,
    HostLook,
    PrepareJob,
    Probe,
    Registered,
    Shutdown,
    TasksRestarted,
)
from minishuffle.wire.requests import Accepted

__all__ = ["WriteAhead"]

HARMLESS: Final = (
    Acknowledge,
    Advertise,
    Dial,
    DropResult,
    HostLook,
    PrepareJob,
    Probe,
    ServeResult,
    Shutdown,
    WorkerAsked,
)
"""What the next coordinator need not know of. A reader that it sends to rows which were given up hears so
from the worker."""


class WriteAhead:
    """Instructions that wait for the journal.

    Invariant: none waits while :attr:`problem` is empty.
    """

    def __init__(self) -> None:
        self.problem = ""
        """Why the journal could not be written last; empty: it could."""
        self._held: list[SendToWorker] = []
        self._unacknowledged: dict[int, list[SendToWorker]] = {}
        """By worker. An acknowledgement that is not ``refused`` stands for all before it."""
        self._journaled: dict[int, int] = {}
        """By worker of which reports were applied since: the last one before them."""

    def failed(self, steps: Iterable[CoordinatorStep], problem: str) -> list[CoordinatorStep]:
        """The journal could not be written; gives the steps that wait for it, in their order, with such of
        their messages as may be carried out."""
        self.problem = problem
        return [replace(each, messages=list(self.passed(each.messages))) for each in steps]

    def written(self) -> list[Instruction]:
        """All of it is written: gives what was held back."""
        held: list[Instruction] = [*self._held]
        held += [each for waiting in self._unacknowledged.values() for each in waiting]
        self.problem = ""
        self._held = []
        self._unacknowledged.clear()
        self._journaled.clear()
        return held

    def give_up(self, job: str) -> list[tuple[int, DeployTasks]]:
        """The job ends: gives which deployments were held back on the way to which worker. Neither they are
        sent any more nor what is about such attempts. What is to be released stays."""
        held, self._held = self._held, []
        deployments: list[tuple[int, DeployTasks]] = []
        for each in held:
            if not _is_of_attempts(each.message, job):
                self._held.append(each)
            elif isinstance(each.message, DeployTasks):
                deployments.append((each.worker, each.message))
        return deployments

    def passed(self, instructions: Iterable[Instruction]) -> Iterator[Instruction]:
        """Those that may be carried out now."""
        for each in instructions:
            if not self.problem:
                yield each
                continue
            match each:
                case SendToWorker(worker, _, Acknowledge(journaled=True) as message):
                    self._hold_back(worker, each, message)
                    yield replace(each, message=_with(message, journaled=False))
                case SendToWorker(worker, _, Registered() as message):
                    self._unacknowledged.pop(worker, None)  # It repeats those reports.
                    applied = min(message.applied, self._journaled.get(worker, message.applied))
                    yield replace(each, message=_with(message, applied=applied))
                case SendToWorker(message=CancelTasks(attempts=[])):
                    # Once more for a deployment that is sent before it is given up.
                    self._held.append(each)
                    yield each
                case SendToWorker(worker, _, ConsumersEnded(job=job)) if not self._deploys(worker, job):
                    yield each
                case SendToWorker(message=message) if not isinstance(message, HARMLESS):
                    self._held.append(each)
                case Reply(message=Accepted() as message):
                    warning = f"{self.problem}; a coordinator that is started again would not know of this"
                    more = f"; {message.warning}" if message.warning else ""
                    yield replace(each, message=_with(message, warning=warning + more))
                case _:
                    yield each

    def _deploys(self, worker: int, job: str) -> bool:
        """Whether attempts of that job are held back on the way there: what is about them comes behind.

        Else it does no harm to say which consumers have ended. These repeat it to the next coordinator, and
        if a producer waited for it, the disk might never have room again.
        """
        return any(
            each.worker == worker and isinstance(each.message, DeployTasks) and each.message.job == job
            for each in self._held
        )

    def _hold_back(self, worker: int, instruction: SendToWorker, message: Acknowledge) -> None:
        self._journaled.setdefault(worker, message.number - 1)
        waiting = self._unacknowledged.setdefault(worker, [])
        last = waiting[-1].message if waiting else None
        if isinstance(last, Acknowledge) and not message.refused and not last.refused:
            waiting.pop()
        waiting.append(instruction)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert self.problem or not (self._held or self._unacknowledged or self._journaled)
        assert self._unacknowledged.keys() <= self._journaled.keys()


def _is_of_attempts(message: ControlMessage, job: str) -> bool:
    """Whether it is about attempts of that job that start, or by name about some that are to end."""
    match message:
        case DeployTasks() | TasksRestarted():
            return message.job == job
        case CancelTasks():
            return message.job == job and bool(message.attempts)
    return False


def _with(message: Any, **fields: Any) -> Any:
    return message.model_copy(update=fields)
