"""Messages held back while the journal cannot be written. Pure.

No message is sent before the journal has it if the next coordinator could contradict it: no attempt is
deployed whose number another may get, none is released that another coordinator would ask for, and no report
of a worker is acknowledged. While the journal cannot be written (its disk is full), tasks run on and rows
flow. Reports are applied, and workers keep them for the next coordinator. Clients are answered. Failed tasks
restart once the journal is written, and files of sinks get their final names then. A job can end meanwhile,
since its output may be what fills the disk. If the next coordinator does not know that, the job runs again.
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
    Shutdown,
    TasksRestarted,
)
from minishuffle.wire.registration import Registered
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
"""Messages that the next coordinator need not know of. A reader that is sent to dropped rows gets the error
from the worker."""


class WriteAhead:
    """The instructions that wait for the journal.

    Invariant: none waits while :attr:`problem` is empty.
    """

    def __init__(self) -> None:
        self.problem = ""
        """Why the last journal write failed; empty: it succeeded."""
        self._held: list[SendToWorker] = []
        self._unacknowledged: dict[int, list[SendToWorker]] = {}
        """Held acknowledgements by worker. One without ``refused`` includes all before it."""
        self._journaled: dict[int, int] = {}
        """By worker with reports applied since the failure, the number of the last report before it."""

    def failed(self, steps: Iterable[CoordinatorStep], problem: str) -> list[CoordinatorStep]:
        """The journal could not be written. Returns the waiting steps in order, with the messages that may be
        carried out anyway."""
        self.problem = problem
        return [replace(each, messages=list(self.passed(each.messages))) for each in steps]

    def written(self) -> list[Instruction]:
        """The journal is written. Returns the instructions that were held back."""
        held: list[Instruction] = [*self._held]
        held += [each for waiting in self._unacknowledged.values() for each in waiting]
        self.problem = ""
        self._held = []
        self._unacknowledged.clear()
        self._journaled.clear()
        return held

    def give_up(self, job: str) -> list[tuple[int, DeployTasks]]:
        """A job ends: drop the held messages about its attempts, except releases. Returns the dropped
        deployments with their workers."""
        held, self._held = self._held, []
        deployments: list[tuple[int, DeployTasks]] = []
        for each in held:
            if not _is_of_attempts(each.message, job):
                self._held.append(each)
            elif isinstance(each.message, DeployTasks):
                deployments.append((each.worker, each.message))
        return deployments

    def passed(self, instructions: Iterable[Instruction]) -> Iterator[Instruction]:
        """The instructions that may be carried out now; holds back the others."""
        for each in instructions:
            if not self.problem:
                yield each
                continue
            match each:
                case SendToWorker(worker, _, Acknowledge(journaled=True) as message):
                    self._hold_back(worker, each, message)
                    yield replace(each, message=_with(message, journaled=False))
                case SendToWorker(worker, _, Registered() as message):
                    self._unacknowledged.pop(worker, None)  # it repeats these reports
                    applied = min(message.applied, self._journaled.get(worker, message.applied))
                    desired = [replace(each, message=one) for one in message.desired]
                    now = [one.message for one in self.passed(desired) if isinstance(one, SendToWorker)]
                    yield replace(each, message=_with(message, applied=applied, desired=now))
                case SendToWorker(message=CancelTasks(attempts=[])):
                    # Held as well, for a deployment that may be sent before it is given up.
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
        """Whether deployments of the job to this worker are held back: messages about these attempts must
        follow them.

        Otherwise the ends of consumers may be sent. Their workers report them to the next coordinator again,
        and a producer that waited for an end might never free the disk.
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
    """Whether a message starts attempts of the job, or cancels attempts by name."""
    match message:
        case DeployTasks() | TasksRestarted():
            return message.job == job
        case CancelTasks():
            return message.job == job and bool(message.attempts)
    return False


def _with(message: Any, **fields: Any) -> Any:
    return message.model_copy(update=fields)
