"""Supervision of a local cluster: lost processes are replaced, and processes that hang are ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from minishuffle import limits
from minishuffle.client import Client
from minishuffle.config import CoordinatorPlace, read_coordinator
from minishuffle.errors import PeerLost, ResourceExhausted, ShuffleError, UsageError
from minishuffle.launch import OUTLIVED, Child, LocalProcesses, signals_later, stop_children
from minishuffle.postmortem import signal_name
from minishuffle.replacements import CoordinatorRestarts, Replacements, SignalSequence
from minishuffle.wire.requests import Accepted, ClusterStatus, GetStatus, WorkerEnded

__all__ = ["Supervisor", "how_it_ended"]

LOOK_SECONDS = 0.1
"""Between two looks at processes."""
LOOK_SECONDS_LOST = 0.02
"""The same while a lost one has no replacement."""
VERDICT_SECONDS = 0.2
"""Seconds between two questions to the coordinator for lost workers."""
VERDICT_SECONDS_QUIET = 1.0
"""Seconds between two questions while no worker is silent."""
STOP_SECONDS = 5.0
"""Seconds for workers to stop when their coordinator is not restarted."""
_log = logging.getLogger("minishuffle.local")


def how_it_ended(code: int) -> str:
    """An exit code in words; negative for a signal."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal_name(-code)}"


class Supervisor:
    """The supervision of a launcher's coordinator and workers; :mod:`~minishuffle.replacements` decides when
    a process is started.

    The coordinator is restarted with its state directory and ports, so that workers and clients find it, even
    if SIGTERM ended it: this is not an order to end the cluster. Workers that end in order are not replaced,
    nor is a coordinator that ended with its cluster or has a successor. How a worker ended, unless by itself,
    is reported to the coordinator. A worker that hangs, so that the coordinator has declared it lost, is
    ended and replaced at once. The caller calls :meth:`check` periodically, or :meth:`start` starts a thread
    for it.

    Args:
        client: a connection for the supervisor alone; closed by :meth:`stop`.
        coordinator: replace the coordinator.
        workers: replace workers.
    """

    def __init__(
        self,
        processes: LocalProcesses,
        client: Client,
        *,
        coordinator: bool = True,
        workers: bool = True,
    ) -> None:
        self.failure: ShuffleError | None = None
        """Why the coordinator is not restarted any more."""
        self._processes = processes
        self._client = client
        self._replaces_coordinator = coordinator
        self._replaces_workers = workers
        self._restarts = CoordinatorRestarts(time.monotonic())
        self._restart_at: float | None = None
        """Time of the next start of a coordinator; None while one runs."""
        self._replacements = Replacements(list(processes.workers))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._term = 0
        """The highest term of a coordinator started here."""
        self._is_replaced = False
        """Another launcher has started a coordinator since."""
        self._ended: dict[int, Child] = {}
        """By worker id, the last process that has ended, or hangs."""
        self._ask_at = 0.0
        """Time of the next question for lost workers."""
        self._sequences: dict[int, SignalSequence] = {}
        """Signal sequences of hanging processes, by process id."""
        self._is_hindered = False
        """The last :meth:`check` failed."""
        self._untold: list[WorkerEnded] = []
        """Ends of workers not reported to the coordinator yet."""

    def start(self) -> None:
        """Start a thread that checks until :meth:`stop`, or until the coordinator is not restarted any more:
        then it stops the workers."""
        self._thread.start()

    def stop(self) -> None:
        """Start no more processes; running ones continue."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._processes.kill_hung()
        self._client.close()

    def _run(self) -> None:
        pending = False
        while not self._stopping.wait(LOOK_SECONDS_LOST if pending else LOOK_SECONDS):
            with contextlib.suppress(ShuffleError):  # The coordinator does not answer, and is asked again.
                self.check()
            if self.failure is not None:
                _log.error("%s", self.failure)
                stop_children(list(self._processes.workers.values()), STOP_SECONDS)
                return
            pending = (
                self._replacements.pending
                or self._restart_at is not None
                or bool(self._processes.hung or self._untold)
            )

    def check(self) -> dict[int, Child]:
        """Start what is due; gives the new processes by worker id, and the coordinator's as 0.

        Raises:
            ShuffleError: the coordinator does not answer, or refuses; or it is not started again; or this
                process cannot look, for want of descriptors, say.
        """
        try:
            new = self._check(time.monotonic())
        except OSError as error:
            if not self._is_hindered:
                _log.warning("cannot look after the cluster's processes, and try again: %s", error)
            self._is_hindered = True
            raise ResourceExhausted(f"cannot look after the cluster's processes: {error}") from error
        self._is_hindered = False
        return new

    def _check(self, now: float) -> dict[int, Child]:
        self._look_at_workers(now)
        self._end_hung(now)
        if (coordinator := self._check_coordinator(now)) is not None:
            return {0: coordinator}
        is_due = self._replacements.pending or (self._replaces_workers and now >= self._ask_at)
        if not (is_due or self._untold) or not self._answers():
            return {}
        self._tell_ends()
        if self._replaces_workers and now >= self._ask_at:
            self._find_hung(now)
        return self._start_workers(now) if self._replacements.pending else {}

    def _tell_ends(self) -> None:
        while self._untold:
            try:
                self._client.request(self._untold[0], Accepted)
            except PeerLost:  # Another try follows.
                raise
            except ShuffleError as error:
                _log.warning("the coordinator does not want to know how a worker ended: %s", error)
            del self._untold[0]

    # --- the coordinator -------------------------------------------------------------------------

    @property
    def ended_in_order(self) -> bool:
        """The coordinator has, or the one that took its place, and with it the cluster: one that hands over
        leaves its place on record."""
        ended = self._processes.coordinator.process.poll() == 0 or self._is_replaced
        return ended and self._place() is None

    def _place(self) -> CoordinatorPlace | None:
        return read_coordinator(self._processes.launch.state_dir)

    def _replaced_by_another(self) -> bool:
        """Whether somebody else has started one with the same state directory, which is asked then."""
        ready, place = self._processes.coordinator.read_ready(), self._place()
        if ready is not None:
            self._term = max(self._term, ready["term"])
        if place is None or place.term <= self._term or place.handed_over:
            return False
        self._client.address, self._is_replaced = place.address, True
        return True

    def _answers(self) -> bool:
        """Whether there is a coordinator to ask."""
        coordinator = self._processes.coordinator
        if coordinator.process.poll() is None:
            return coordinator.read_ready() is not None
        return self._replaced_by_another()

    def _check_coordinator(self, now: float) -> Child | None:
        """Start it again if that is due; gives the new process."""
        old = self._processes.coordinator
        code = old.process.poll()
        if code is None or not self._replaces_coordinator or self._replaced_by_another():
            return None
        if code == 0 and self._place() is None:
            return None  # It has ended with its cluster.
        if self.failure is None and self._restart_at is None:
            self._restart_at = now if code == 0 else self._restarts.due(now)
            if self._restart_at is None:
                self.failure = _lost_too_often(old, code)
        if self.failure is not None:
            raise self.failure
        if self._restart_at is None or now < self._restart_at or self._stopping.is_set():
            return None
        tail = f"\n{old.tail()}" if old.read_ready() is None else ""
        processes, self._restart_at = self._processes, None
        try:
            with signals_later():
                new = processes.coordinator_launch.start(processes.address.port, processes.web_port)
                processes.coordinator = new
                self._restarts.started(now)
        except (OSError, UsageError) as error:  # There is no room, or there are no descriptors, for a moment.
            self._restarts.started(now)
            self._restart_at = self._restarts.due(now)
            if self._restart_at is None:
                self.failure = PeerLost(f"the coordinator cannot be started again: {error}")
                raise self.failure from error
            _log.warning("the coordinator cannot be started again, which is tried once more: %s", error)
            return None
        how = how_it_ended(code) if code else "handed over"
        _log.warning("the coordinator (pid %d) %s: it is started again%s", old.pid, how, tail)
        old.close()
        return new

    # --- workers ---------------------------------------------------------------------------------

    def _look_at_workers(self, now: float) -> None:
        for worker, child in self._processes.workers.items():
            code = child.process.poll()
            if code is None:
                child.observation.look(now)
            if code is None or self._ended.get(worker) is child:
                continue
            ready = child.read_ready()
            self._ended[worker] = child
            lost = code != 0 or not child.observation.ended_by_itself(code)
            if (end := child.observation.report(ready, code)) is not None:
                self._untold.append(end)
            child.observation.close()
            if lost and self._replaces_workers:
                self._replacements.lost(worker, now)
            if code and ready is None:
                _log.warning(
                    "%s (pid %d) %s before it was ready\n%s",
                    child.name,
                    child.pid,
                    how_it_ended(code),
                    child.tail(),
                )

    def _find_hung(self, now: float) -> None:
        self._ask_at = now + VERDICT_SECONDS
        status = self._client.request(GetStatus(jobs=False, reports=False), ClusterStatus)
        heard = {
            each.pid
            for each in status.workers
            if each.state == "alive" and each.heartbeat_age_seconds < VERDICT_SECONDS_QUIET
        }
        children = {
            worker: child
            for worker, child in self._processes.workers.items()
            if child.process.poll() is None and self._ended.get(worker) is not child
        }
        pids = {worker: child.own_pid for worker, child in children.items()}
        if heard.issuperset(pids.values()):
            self._ask_at = now + VERDICT_SECONDS_QUIET
        for worker in self._replacements.hung(status.workers, pids, now):
            child = self._ended[worker] = children[worker]
            _log.warning(
                "%s (pid %d) hangs and counts as lost: it is ended, and another is started",
                child.name,
                child.pid,
            )
            child.observation.hangs()
            self._processes.hung.append(child)
            self._sequences[child.pid] = SignalSequence(now)
        self._end_hung(now)

    def _end_hung(self, now: float) -> None:
        for child in list(self._processes.hung):
            if (code := child.process.poll()) is not None:
                _log.warning("%s (pid %d) %s", child.name, child.pid, how_it_ended(code))
                if (end := child.observation.report(child.read_ready(), code)) is not None:
                    self._untold.append(end)
                self._processes.hung.remove(child)
                del self._sequences[child.pid]
                child.close()
                continue
            sequence = self._sequences[child.pid]
            for number in sequence.due(now):
                child.send_signal(number)
            if sequence.outlived(now):
                _log.warning("%s (pid %d) %s", child.name, child.pid, OUTLIVED)

    def _start_workers(self, now: float) -> dict[int, Child]:
        new: dict[int, Child] = {}
        for worker in self._replacements.due(self._client.status(), now):
            old = self._processes.workers[worker]
            if self._stopping.is_set():
                break
            try:
                with signals_later():
                    new[worker] = self._processes.launch.start(worker, self._client.address)
                    self._processes.workers[worker] = new[worker]
            except (OSError, UsageError) as error:
                _log.warning(
                    "no process can be started in place of %s (pid %d): %s", old.name, old.pid, error
                )
                self._replacements.lost(worker, now)
                continue
            if old not in self._processes.hung:
                old.close()
        return new


def _lost_too_often(last: Child, code: int) -> PeerLost:
    return PeerLost(
        f"the coordinator was lost {limits.COORDINATOR_RESTARTS_MAX + 1} times in a row within "
        f"{limits.YOUNG_SECONDS:g} s of its start, and is not started again; the last time it "
        f"{how_it_ended(code)}: look at {last.log}\n{last.tail()}".rstrip()
    )
