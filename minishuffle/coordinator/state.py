"""The coordinator's decisions, as a pure state machine: messages, closed links and time in, steps out.

It registers workers and detects lost ones, admits jobs that fit and places them, follows their life cycles
(:mod:`~minishuffle.coordinator.jobs.job`), and answers clients. Each event gives a
:class:`~minishuffle.coordinator.instructions.CoordinatorStep`, which the shell (``process``) carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from minishuffle import limits
from minishuffle.clock import set_by
from minishuffle.config import ClusterSettings
from minishuffle.coordinator.clients.longpolls import LongPolls, Poll, PollRequest
from minishuffle.coordinator.clients.pending import Pending, PendingRequests
from minishuffle.coordinator.clients.questions import Questions
from minishuffle.coordinator.clients.results import GIVEN_UP, ResultRecord, ResultRequest, Results
from minishuffle.coordinator.clients.status import (
    ClusterView,
    CoordinatorFacts,
    StatusRequest,
    coordinator_snapshot,
    status_reply,
)
from minishuffle.coordinator.clients.streams import StreamRecord, StreamRequest, Streams
from minishuffle.coordinator.clients.submissions import Submission, Submissions
from minishuffle.coordinator.clusterclock import ClusterClock
from minishuffle.coordinator.instructions import (
    CloseLink,
    CoordinatorStep,
    Instruction,
    LookForHost,
    ReadSnapshot,
    Reply,
    SendToWorker,
    Stopped,
    WatchProcess,
    WorkInFolder,
    refusal,
)
from minishuffle.coordinator.jobs.attemptreports import (
    PositionRounds,
    apply_fact,
    may_wait,
    moves_only,
    refuses,
)
from minishuffle.coordinator.jobs.deaths import (
    COUNTS,
    UnexplainedEnd,
    UnexplainedEnds,
    end_in_words,
    kind_of,
)
from minishuffle.coordinator.jobs.fallback import RestorePoint
from minishuffle.coordinator.jobs.history import History
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.jobindex import JobTable
from minishuffle.coordinator.jobs.joblinks import Exclusion
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.restoring import resumptions_of
from minishuffle.coordinator.jobs.savepoints import FolderWork
from minishuffle.coordinator.journal import journalrecords
from minishuffle.coordinator.journal.writeahead import WriteAhead
from minishuffle.coordinator.links import ANSWER_SECONDS, Links, PairKey, pair_of
from minishuffle.coordinator.reconciler import Reconciler
from minishuffle.coordinator.scheduling.deployer import Deployer
from minishuffle.coordinator.scheduling.isolation import Isolation
from minishuffle.coordinator.scheduling.placement import admit, checked_graph
from minishuffle.coordinator.scheduling.standby import Preparations
from minishuffle.coordinator.shutdown import OrderlyStop
from minishuffle.coordinator.silenthosts import (
    OWN,
    HostSuspicion,
    HostVerdict,
    LookAtHost,
    SilentHosts,
)
from minishuffle.coordinator.workers import Worker, WorkerRegistry
from minishuffle.counters import CoordinatorSnapshot
from minishuffle.errors import PeerLost, ResourceExhausted, ShuffleError, UsageError
from minishuffle.ids import Changes, RecordKey
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.releases import compared_releases
from minishuffle.snapshots.catalog import folder_name
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.snapshots.storage import place_below
from minishuffle.wire.clients import ResultExpected, UpstreamExpected, WriteBegun, WriteEnded
from minishuffle.wire.inquiries import AskWorkers, WorkerAnswered
from minishuffle.wire.messages import (
    Acknowledge,
    Advertise,
    Advertised,
    AskDial,
    ClockSet,
    ControlMessage,
    DeployTasks,
    Dial,
    ErrorInfo,
    FolderChecked,
    Heartbeat,
    HostLooked,
    Leaving,
    LogLines,
    PeerSuspicion,
    Probed,
    RecoverySteps,
    ReleaseJob,
    Shutdown,
    TakeSnapshots,
    TaskReport,
    WitnessedPositions,
    WorkerAddress,
    WorkerLost,
)
from minishuffle.wire.registration import Register
from minishuffle.wire.reports import AttemptReport, Collected, Fact
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    CancelSubmission,
    DrainWorker,
    GetRows,
    PauseJob,
    ResumeJob,
    SaveJob,
    StopCluster,
    SubmitJob,
    WorkerEnded,
)

__all__ = ["CoordinatorState"]


@dataclass(slots=True, eq=False)
class _Postponed(Pending):
    """A request that needs workers, and waits until none is awaited."""

    message: ControlMessage


@dataclass(slots=True, eq=False)
class _Restored(Pending):
    """A submission whose savepoint is being read."""

    message: SubmitJob


TOGETHER_SECONDS_MAX: Final = 0.1
"""Longest time that reports of positions wait for others, to be journaled together."""

COUNTED_SECONDS_MAX: Final = 1.0
"""Longest time until what only heartbeats have counted is journaled, if its turn has come."""


class CoordinatorState:
    """One term of a coordinator.

    Invariants: ``0 ≤ slots used ≤ slots`` and ``0 ≤ segments required ≤ segments`` on each alive worker;
    every task that is not terminal is on such a worker; no request waits for a terminal job.

    State that must outlive it is journaled before its consequences are sent. Restored from such records, it
    awaits the registered workers, for at most ``heartbeat_timeout``; until they are back no task restarts,
    and requests that need workers wait. Later, while a single worker is awaited, only jobs with tasks on it
    wait, and submissions that fit nowhere else.

    Args:
        records: of the journal.
        random: a number from 0 to 1, for the jitter of restarts.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        facts: CoordinatorFacts,
        records: Mapping[RecordKey, bytes],
        random: Callable[[], float],
        now: float,
    ) -> None:
        self.web_port = 0
        self.ignored = 0
        """Number of ignored messages, of an earlier term, an older epoch or an unregistered process; and of
        stale facts, see ``attemptreports``."""
        self.write_ahead = WriteAhead()
        """Told by the shell whether the journal can be written."""
        self._settings = settings
        self._facts = facts
        self._wall = ClusterClock(facts.wall_offset)
        self._random = random
        self._recorder = journalrecords.Recorder(records)
        submitted, numbers = journalrecords.recalled_counts(records)
        self._workers = WorkerRegistry(settings, facts.python, facts.version, numbers)
        seconds = settings.host_timeout
        self._hosts = SilentHosts(facts.term, facts.identity, None if seconds == "off" else seconds)
        self._jobs = JobTable()
        self._preparations, self._isolation = Preparations(facts.term), Isolation(settings.slot_timeout)
        self._deployer = Deployer(
            facts.term,
            settings.slot_timeout,
            self._workers,
            self._preparations,
            self._send_to,
            self.write_ahead,
            self._isolation,
            settings.drain_timeout,
        )
        self._pending = PendingRequests()
        self._polls = LongPolls(self._pending)
        self._streams = Streams(facts.term, self._send_to, self._address, self._pending)
        self._results = Results(facts.term, self._jobs, self._send_to, self._address, self._pending)
        self._questions = Questions(facts.term, self._send_to, self._pending)
        self._reconciler = Reconciler(facts.term, self._workers, self._jobs, self._streams, self._results)
        self._out: list[Instruction] = []
        self._touched: dict[str, Job] = {}
        """Jobs to settle at the end of this call; ``_jobs.held`` may be out of date for them."""
        self._settle_by: float | None = None
        """Deadline for the consequences of positions and heartbeats; None if there are none."""
        self._rounds = PositionRounds()
        self._due: float | None = None
        """The deadline that was computed last."""
        self._links = Links(facts.term, max(settings.link_timeout, settings.heartbeat_timeout))
        self._history = History()
        """Events that belong to no job."""
        self._unexplained = UnexplainedEnds()
        self._orderly_stop = OrderlyStop(settings.task_cancel_timeout)
        self._submissions = Submissions(submitted)
        self._recall(records, now)

    def _recall(self, records: Mapping[RecordKey, bytes], now: float) -> None:
        for worker in journalrecords.recalled_workers(records, now):
            self._workers.recall(worker)
        if self._facts.workers_anew:
            self._workers.forget_standby()
        self._awaiting = bool(self._workers.awaited())
        streams = journalrecords.recalled_clients(records, StreamRecord)
        results = journalrecords.recalled_clients(records, ResultRecord)
        for job in journalrecords.recalled_jobs(records, self._random):
            self._jobs[job.id] = job
            self._results.add(job, job.graph, results[job.id])
            self._streams.add(job, job.graph, streams[job.id])
            if job.terminal:
                self._results.job_ended(job)
                self._streams.remove(job)
            else:
                job.coordinator_lost(self._wall(now))
                self._touch(job)

    def web_started(self, port: int) -> None:
        """Set the port of the metrics, for ``cluster status``."""
        self.web_port = port

    # --- the verbs -------------------------------------------------------------------------------

    def worker_message(self, link: int, message: ControlMessage, now: float) -> CoordinatorStep:
        """A message over a worker's link. If it has only positions whose acknowledgement may wait, or is a
        heartbeat that has changed nothing, its consequences follow with the next event, or at the deadline of
        this step."""
        worker = self._workers.by_link(link)
        if isinstance(message, Register):
            self._register(link, message, worker, now)
            self._hosts.joined(now)
        elif worker is None or (term := getattr(message, "term", 0)) < self._facts.term:
            self.ignored += 1
        elif term > self._facts.term:
            mine = self._facts.term
            why = f"worker {worker.worker} obeys a coordinator of term {term}, and this one is of term {mine}"
            self._out.append(CloseLink(link, why))
        else:
            worker.note_message(now)
            waiting = len(self._out)
            self._from_worker(worker, message, now)
            if isinstance(message, AttemptReport) and (within := may_wait(message)):
                if self._rounds.note(worker.worker, now):
                    return self._settle(now)
                return self._wait_for_others(now, min(within, TOGETHER_SECONDS_MAX))
            if isinstance(message, Heartbeat) and self._is_unmoved(waiting):
                return self._wait_for_others(now, COUNTED_SECONDS_MAX)
        return self._settle(now)

    def client_request(self, link: int, request: int, message: ControlMessage, now: float) -> CoordinatorStep:
        """A request of a client; it is answered once, now or later."""
        try:
            self._request(link, request, message, now)
        except ShuffleError as error:
            self._out.append(refusal(link, request, error))
        return self._settle(now)

    def link_closed(
        self, link: int, now: float, why: str = "its control link closed", *, for_cause: bool = False
    ) -> CoordinatorStep:
        """A link of a worker or client has closed.

        A worker's process may still live: then it comes back at once, and nothing restarts. Until this is
        known the worker is awaited, unless the link was closed here ``for_cause``.
        """
        self._pending.forget(link)
        worker = self._workers.by_link(link)
        if worker is None:
            pass
        elif for_cause or self._orderly_stop.phase != "up":
            self._end_worker(worker, "lost" if self._orderly_stop.phase == "up" else "gone", why, now)
        else:
            self._workers.link_lost(worker, why, now)
            self._preparations.worker_ended(worker.worker)
            self._awaiting = True
            self._out.append(WatchProcess(link, worker.address))
        return self._settle(now)

    def process_found(self, link: int, now: float) -> CoordinatorStep:
        """The process of a worker with a closed control link is alive."""
        self._workers.process_found(link)
        return self._settle(now)

    def process_gone(self, link: int, now: float) -> CoordinatorStep:
        """The process of a worker with a closed control link has ended."""
        worker = self._workers.absent(link)
        if worker is not None and worker.absence is not None:
            self._process_ended(worker, worker.absence.why, now)
        return self._settle(now)

    def host_looked(self, ticket: int, answer: bool | None, now: float) -> CoordinatorStep:
        """The result of a :class:`LookForHost`."""
        self._host_looked(OWN, ticket, answer, now)
        return self._settle(now)

    def journaled(self, error: ShuffleError | None, now: float) -> CoordinatorStep:
        """The oldest submission was journaled, or could not be."""
        submission = self._submissions.journaled()
        try:
            if error is not None:
                raise type(error)(f"the job cannot be accepted: {error}, and submit it again")
            self._recorder.note(submission.changes)
            accepted = self._start(submission, self._wall(now))
        except ShuffleError as refused:
            self._recorder.forget_job(submission.job)
            self._submissions.take_back(submission)
            self._out.append(refusal(submission.link, submission.request, refused))
        else:
            self._out.append(Reply(submission.link, submission.request, accepted))
        return self._settle(now)

    def everything(self, now: float) -> Changes:
        """All records, for a journal that has lost them."""
        self._recorder = journalrecords.Recorder({})
        self._wall.forget_recorded()
        for job in self._jobs.values():
            job.subtasks.touch(*job.subtasks)
        self._workers.touch(*self._workers)
        self._record(self._jobs, clients=self._jobs)
        return self._recorder.take(now)

    def undeployable(
        self, worker: int, message: DeployTasks, error: ShuffleError, now: float
    ) -> CoordinatorStep:
        """The shell could not send a DeployTasks (it is too long)."""
        job = self._jobs[message.job]
        job.undeployed(worker, message, error, self._wall(now))
        self._touch(job)
        return self._settle(now)

    def hand_over(self, now: float) -> CoordinatorStep:
        """Record everything for the next coordinator; jobs and workers go on. Later events reach the next
        coordinator from jobs and workers; here only :meth:`journaled` may follow."""
        self._recorder.hand_over(self._jobs.values())
        return self._settle(now)

    @property
    def stopping(self) -> bool:
        """The cluster is being shut down."""
        return self._orderly_stop.phase != "up"

    def anchor(self, wall_offset: float) -> CoordinatorStep:
        """Set the wall clock minus the clock of ``now``. It follows the system clock when that is set."""
        self._wall.anchor(wall_offset)
        return self._nothing_yet()

    def stop(self, now: float) -> CoordinatorStep:
        """Shut the cluster down: cancel jobs, shut workers down, then :class:`Stopped`. Idempotent."""
        self._begin_stop(now)
        return self._settle(now)

    def handle_timer(self, now: float) -> CoordinatorStep:
        for worker in self._workers.silent(now):
            seconds = self._workers.silence_max(worker)
            if worker.state == "awaited":
                before = f"{worker.absence.why}, and " if worker.absence is not None else ""
                self._end_worker(worker, "lost", f"{before}it did not come back within {seconds:g} s", now)
            else:
                self._cut_off(worker, f"it was silent for {seconds:g} s", now)
        self._look_after_hosts(now)
        self._workers.forget(now)
        self._probe(now)
        for each in self._unexplained.take_due(now):
            self._judge_unexplained(each, now)
        self._out += self._questions.due(now)
        self._touch(*(poll.job for poll in self._pending.due(Poll, now)))
        for job in self._timed():
            if job.id in self._touched:
                continue  # it may get a slot now: this is tried first
            if (time := job.next_time()) is not None and time <= self._wall(now):
                self._isolation.wait_on(job, self._wall(now))
                job.give_up_waiting(self._wall(now))
                job.end_overdue_pause(self._wall(now))
                job.end_overdue_move(self._wall(now))
                job.look_at_savepoint(self._wall(now))
                job.holders.retry(self._wall(now))
                # The next coordinator would know of none that begins now, and look for what that discards.
                job.cut_within(
                    self._settings.savepoint_timeout,
                    self._settings.pause_timeout,
                    "" if self.write_ahead.problem else self._facts.snapshot_dir,
                    self._wall(now),
                )
                self._touch(job)
        return self._settle(now)

    def _nothing_yet(self) -> CoordinatorStep:
        """A step without consequences so far."""
        return CoordinatorStep(timers=self._next_deadline())

    def _is_unmoved(self, waiting: int) -> bool:
        """Nothing follows from a heartbeat but what it has counted; ``waiting`` instructions did before."""
        if len(self._out) > waiting or self._touched or self._workers.changed:
            return False
        if self._workers.leaving() or self.stopping:
            return False
        return not any(job.subtasks.changed for job in self._jobs.active())

    def _wait_for_others(self, now: float, within: float) -> CoordinatorStep:
        """The consequences follow within the given seconds; what was due before still is, or comes later."""
        due = now + within
        self._settle_by = due if self._settle_by is None else min(self._settle_by, due)
        return CoordinatorStep(
            timers=self._settle_by if self._due is None else min(self._due, self._settle_by)
        )

    def _next_deadline(self) -> float | None:
        """The time of the next call of :meth:`handle_timer`; None: not needed."""
        times = [
            self._workers.next_deadline(),
            self._hosts.next_deadline(),
            self._pending.next_deadline(),
            self._links.next_deadline(),
            self._orderly_stop.next_deadline(),
            self._settle_by,
            self._unexplained.next_deadline(),
            self._next_drain(),
            *(self._wall.monotonic(time) for job in self._timed() if (time := job.next_time()) is not None),
        ]
        self._due = min((time for time in times if time is not None), default=None)
        return self._due

    def _timed(self) -> list[Job]:
        """The jobs whose deadlines count. Jobs that wait for awaited workers are left out, until these are
        back or lost."""
        jobs = self._jobs.active()
        if not self._awaiting:
            return jobs
        is_over = not self._workers.awaited()
        return [job for job in jobs if not (is_over or self._workers.awaits(job.workers()))]

    # --- workers ---------------------------------------------------------------------------------

    def _register(self, link: int, message: Register, known: Worker | None, now: float) -> None:
        try:
            if known is not None:
                raise UsageError(f"this link is registered as worker {known.worker} already")
            self._orderly_stop.require_up()
            if message.term > self._facts.term:
                self._out.append(CloseLink(link, f"a coordinator of term {message.term} has taken over"))
                return
            if message.epoch:
                self._take_back(link, message, now)
                return
            self._workers.checked(message)  # a refused one replaces no other worker
            for awaited in self._workers.awaited():
                if awaited.worker == message.requested_worker:
                    self._end_worker(awaited, "lost", "another process has its id", now)
            is_awaited = any(job.waits_for_slot for job in self._jobs.active())
            worker = self._workers.register(link, message, now, is_awaited=is_awaited)
        except UsageError as error:
            self._out.append(refusal(link, 0, error))
            self._out.append(CloseLink(link, f"registration refused: {error}", "peer"))
            return
        self._reconcile(worker, message, now, now)

    def _take_back(self, link: int, message: Register, now: float) -> None:
        """A worker comes back with its tasks.

        Raises:
            UsageError: it was declared lost.
        """
        since = self._workers.last_seen_at(message.requested_worker) - self._settings.heartbeat_timeout
        worker, old = self._workers.take_back(link, message, now)
        if old:
            self._out.append(CloseLink(old, f"worker {worker.worker} has a new control link"))
        number, jobs = worker.worker, self._jobs.active()
        self._preparations.worker_back(number, message, jobs)
        for job in jobs:
            job.progress.worker_back(number)
        self._touch(*jobs)
        self._reconcile(worker, message, since, now)

    def _reconcile(self, worker: Worker, message: Register, since: float, now: float) -> None:
        """Hear the facts that a worker has come with, and say what is desired of it: see ``reconciler``. The
        answer stands before whatever follows from the facts."""
        answer = worker.registered(self._facts.term, self._settings.heartbeat_interval)
        first, at = len(self._out), self._wall(now)
        for report in message.reports:
            self._reported(worker, report, at)
        for said in message.witnessed:
            self._witnessed(said, at)
        if message.heartbeat is not None:
            self._heartbeat(worker, message.heartbeat, now)
        for job in self._jobs.active():
            job.restart_undeployed(self._reconciler.missing(job, worker.worker, message), at)
            job.worker_returned(worker.worker, at)
            job.reconcile_holders(worker.worker, message.attempts)
        desired = self._reconciler.desired(worker, message, since)
        answer = answer.model_copy(update={"desired": desired})
        self._out.insert(first, SendToWorker(worker.worker, worker.link, answer))
        self._welcome(worker, now)

    def _welcome(self, worker: Worker, now: float) -> None:
        """Announce a registered worker to the others, and to it what it may be needed for."""
        joined = self._preparations.worker_joined(worker, self._workers.alive(), self._jobs.active())
        for number, ahead in joined:
            self._send_to(number, ahead)
        for each, toward in self._workers.to_advertise(worker):
            self._send(each, Advertise(term=self._facts.term, toward=toward))
        self._links.joined(worker, self._workers.alive(), now)
        self._probe(now)
        self._touch_waiting()

    def _from_worker(self, worker: Worker, message: ControlMessage, now: float) -> None:
        at = self._wall(now)
        match message:
            case Heartbeat():
                self._heartbeat(worker, message, now)
            case AttemptReport():
                self._reported(worker, message, at)
            case WitnessedPositions():
                self._witnessed(message, at)
            case LogLines() | RecoverySteps():
                self._about_job(message, at)
            case UpstreamExpected() | WriteBegun() | WriteEnded():
                self._out += self._streams.answered(message)
            case ResultExpected():
                self._out += self._results.answered(message)
            case WorkerAnswered():
                self._out += self._questions.answered(worker.worker, message)
            case AskDial(target=target):
                dialer = self._workers.get_alive(target)
                if dialer is not None and dialer is not worker:
                    self._send(dialer, Dial(term=self._facts.term, peer=worker.address))
            case Advertised(host=host):
                self._advertised(worker, host, now)
            case Probed():
                self._probed(worker, message, now)
            case HostLooked(ticket=ticket, answer=answer):
                self._host_looked(worker.worker, ticket, answer, now)
            case PeerSuspicion():
                self._suspected(worker, message, at)
            case FolderChecked(savepoint=number, problem=problem):
                if (saved := self._jobs.get(message.job)) is not None:
                    saved.folder_checked(worker.worker, number, problem, at)
                    self._touch(saved)
            case ClockSet(seconds=seconds, forward=forward):
                self._clock_set(worker, seconds if forward else -seconds, at)
            case Leaving(seconds=seconds):
                self._drain(worker, at + seconds, "its process was sent SIGTERM", at)
            case Shutdown(reason=reason):
                link = worker.link
                why = f"it was stopped ({reason})" if reason else "it was stopped"
                self._end_worker(worker, "gone", why, now)
                self._out.append(CloseLink(link, f"worker {worker.worker} left in order"))
            case _:
                why = f"it sent {message.type}, which no worker may"  # type: ignore[attr-defined]
                self._cut_off(worker, why, now, "malformed")

    def _clock_set(self, worker: Worker, seconds: float, at: float) -> None:
        """Record that a worker's system clock was set; nothing else follows."""
        text = (
            f"the system clock of worker {worker.worker} was set {set_by(seconds)}: rates and time-outs go "
            "on, wall times follow by 1 % a second"
        )
        self._history.note(at, "clock set", text, worker=worker.worker)
        self._touch(*self._jobs.note(worker.worker, "clock set", text, at))

    def _note_disk(self, worker: Worker, problem: str, now: float) -> None:
        """Record that the disk of a worker takes no more of what is retained there, or does again."""
        kind, text = "disk has room", f"worker {worker.worker} can retain rows on its disk again"
        if problem:
            kind = "disk full"
            text = f"worker {worker.worker} retains rows in memory alone, and tasks wait while that is full: "
            text += problem
        self._touch(*self._jobs.note(worker.worker, kind, text, self._wall(now)))

    def _advertised(self, worker: Worker, host: str, now: float) -> None:
        """A worker has an address for other hosts now: it can get slots of jobs that run there too."""
        if self._workers.advertised(worker, host):
            self._links.joined(worker, self._workers.alive(), now)
            self._probe(now)
            for number, dial in self._preparations.worker_moved(worker, self._workers.alive()):
                self._send_to(number, dial)
            self._touch_waiting()

    # --- links between workers -------------------------------------------------------------------

    def _probe(self, now: float) -> None:
        for number, probe in self._links.due(self._workers, now):
            self._send_to(number, probe)

    def _probed(self, by: Worker, message: Probed, now: float) -> None:
        """A worker reports a probe's result."""
        other = self._workers.get_alive(message.worker)
        if other is None or other.epoch != message.epoch:
            self.ignored += 1
            return
        is_new = self._links.probed(by.worker, message, now)
        at, pair = self._wall(now), (by.worker, other.worker)
        if is_new and self._links.pair(*pair).linked is False:
            self._history.note(at, "workers apart", self._workers.no_link(pair, message.why))
        elif is_new:
            self._history.note(at, "workers linked", f"{by.place} and {other.place} can connect again")
        self._readmit(now)
        self._probe(now)

    def _note_reach(self, number: int, at: float) -> None:
        """Record that the probes of a new worker have been answered."""
        worker, others = self._workers.get_there(number), self._links.known(number)
        if worker is None or not others:
            return
        apart = [self._workers.no_link(key, why) for key, why in self._links.failing() if number in key]
        text = f"{worker.place}: reachable: {self._links.reached[number]} of {others}"
        self._history.note(at, "worker probed", "; ".join([text, *apart]), worker=number)

    def _note_links(self, worker: Worker, message: Heartbeat, now: float) -> None:
        """Apply a heartbeat's missing links to the jobs whose tasks wait for them."""
        for name in self._links.note_heartbeat(worker, message, self._workers, now):
            job = self._jobs.get(name)
            if job is None or job.terminal:
                continue
            there, seconds = job.linked_workers().keys(), self._links.seconds
            apart = self._links.broken(name, now)
            if job.holders.set_apart(apart):
                self._touch(job)
            broken = {
                key: self._workers.no_link(key, why, seconds)
                for key, why in apart.items()
                if there >= set(key)
            }
            if job.links.set_broken(broken, self._wall(now), now):
                self._touch(job)
                judged = next(iter(job.links.broken), None)  # the first one is judged first
                around = _around(judged, there) if judged is not None else set()
                self._links.ask({*broken, *around}, now)
                self._probe(now)
            self._judge(job, now)

    def _judge(self, job: Job, now: float) -> None:
        """Exclude a worker from a job whose tasks have waited too long for a link, once probes have shown
        which workers of the job cannot reach each other, or have had the time for it."""
        at, links = self._wall(now), self._links
        slots = job.linked_workers()

        def answered(key: PairKey, since: float) -> bool:
            pairs = [links.pair(*pair) for pair in _around(key, slots)]
            return now >= since + ANSWER_SECONDS or all(pair.answered_at >= since for pair in pairs)

        def apart(one: int, other: int) -> bool:
            return links.pair(one, other).linked is False

        for key, since in job.links.to_judge(at, links.seconds).items():
            if job.stopping or not answered(key, since) or not apart(*key):
                continue
            worst = job.links.worst(key, slots, apart, self._workers.epoch_of)
            self._exclude(job, worst, key, now)
            return

    def _exclude(self, job: Job, number: int, key: PairKey, now: float) -> None:
        """Exclude a worker from a job; it keeps running other jobs."""
        worker = self._workers.get_alive(number)
        if worker is None:
            return
        text = self._workers.no_link(key, self._links.pair(*key).why, self._links.seconds)
        why = f"worker {number} is excluded from this job until others can connect to it: {text}"
        for holder, slot in sorted(job.slots.blocked):
            if holder == number:
                self._workers.write_off(worker, job.id, slot)
        other = key[0] if number == key[1] else key[1]
        attempts = job.exclude(number, Exclusion(other, why), self._wall(now))
        if attempts:
            self._send(worker, ReleaseJob(term=self._facts.term, job=job.id, attempts=attempts))
        self._out += self._streams.worker_ended()
        self._touch(job)

    def _readmit(self, now: float) -> None:
        """Readmit excluded workers that could have linked with all others of the job for long enough."""
        links, since = self._links, now - self._links.seconds
        for job in self._jobs.active():
            for number in list(job.links.excluded):
                pairs = [links.pair(number, other) for other in job.slots.held() if other != number]
                if all(pair.linked and pair.since <= since for pair in pairs):
                    job.links.readmit(number, links.seconds if pairs else 0.0, self._wall(now))
                    self._touch(job)

    def _watch(self, now: float) -> None:
        """Probe excluded workers repeatedly."""
        jobs = [job for job in self._jobs.active() if job.links.excluded]
        watched = {key for job in jobs for key in job.links.watched(job.slots.held())}
        if self._links.watch(watched, now):
            self._probe(now)

    def _suspected(self, by: Worker, message: PeerSuspicion, at: float) -> None:
        """Record a suspicion as an event, and prepare other workers; the worker is not judged."""
        worker = self._workers.get_alive(message.worker)
        if worker is None or worker.epoch != message.epoch:
            self.ignored += 1
            return
        if message.suspected:
            worker.suspect()
            self._prepare_for(worker)
        self._touch(*self._jobs.suspected(by.worker, message, at))

    def _prepare_for(self, suspect: Worker) -> None:
        """Prepare other workers for the tasks of a suspected one."""
        self._jobs.held.note(*self._touched.values())
        ahead = self._preparations.suspected(
            suspect, self._workers.alive(), self._jobs.active(), self._jobs.held
        )
        for number, message in ahead:
            self._send_to(number, message)

    def _reported(self, worker: Worker, message: AttemptReport, at: float) -> None:
        """Apply a report once, and acknowledge it. A report with number 0 is sent only once."""
        if not message.number or message.number > worker.applied:
            for fact in message.facts:
                self._fact(worker, fact, at)
        else:
            self.ignored += 1
        if message.number:
            self._workers.applied(worker, message.number)
            refused = any(refuses(self._jobs.get(fact.attempt.subtask.job), fact) for fact in message.facts)
            self._acknowledge(
                worker, Acknowledge(term=self._facts.term, number=message.number, refused=refused)
            )

    def _witnessed(self, message: WitnessedPositions, at: float) -> None:
        """A peer says where the sources of a worker are, which is awaited, or may have been lost before its
        peer was back."""
        known = next((each for each in self._workers if each.worker == message.worker), None)
        is_stale = known is not None and known.epoch == message.epoch and message.last_report <= known.applied
        if known is None or known.epoch < message.epoch or is_stale:
            self.ignored += 1
            return
        for each in message.sources:
            job = self._jobs.get(each.attempt.subtask.job)
            if job is None or not job.progress.witnessed(message.worker, each, at):
                self.ignored += 1
            else:
                self._touch(job)

    def _acknowledge(self, worker: Worker, message: Acknowledge) -> None:
        """Send an acknowledgement; without ``refused`` it includes the one before."""
        match self._out[-1:]:
            case [SendToWorker(number, _, Acknowledge(refused=False))] if number == worker.worker:
                if not message.refused:
                    self._out.pop()
        self._send(worker, message)

    def _fact(self, worker: Worker, fact: Fact, at: float) -> None:
        job = self._jobs.get(fact.attempt.subtask.job)
        counted = 0 if job is None else len(job.deaths.counted())
        if job is None or not apply_fact(job, worker.worker, fact, at):
            self.ignored += 1
            return
        if len(job.deaths.counted()) < counted:
            self._touch_waiting()
        if isinstance(fact, Collected):
            self._jobs.make_room(job, at)
        if not moves_only(fact):
            self._touch(job)

    def _about_job(self, message: LogLines | RecoverySteps, at: float) -> None:
        job = self._jobs.get(message.job)
        if job is None:
            self.ignored += 1
            return
        if isinstance(message, LogLines):
            job.history.log(message.lines)
        else:
            job.recovered(message, at)
        self._touch(job)

    def _free_retained(self, worker: int, now: float) -> None:
        """Have snapshots taken that free what a worker retains for its jobs."""
        for job in self._jobs.active():
            is_hastened = job.hasten_cut(self._wall(now))
            if job.reads_ahead(worker) or is_hastened:
                self._touch(job)
            for reader in sorted(job.readers_of(worker)):
                self._send_to(reader, TakeSnapshots(term=self._facts.term, job=job.id))

    def _hasten_receipts(self, job: Job, worker: int, report: TaskReport, now: float) -> None:
        """Have snapshots taken for programs that wait for their receipts. While a vertex waits for its first
        row no durable snapshot can be taken: a program that waits may have to write that row."""
        is_sooner = job.receipts_wait(report.attempt.subtask.key, report.awaits_cut, self._wall(now))
        reads_ahead = report.awaits_cut >= 0 and job.reads_ahead(worker)
        if is_sooner or reads_ahead:
            self._touch(job)
        for each in job.subtasks.open_workers() if report.awaits_snapshot else ():
            self._send_to(each, TakeSnapshots(term=self._facts.term, job=job.id))

    def _heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        if message.worker != worker.worker or message.epoch < worker.epoch:
            self.ignored += 1
            return
        self._note_links(worker, message, now)
        if message.report.retains_much:
            self._free_retained(worker.worker, now)
        if bool(message.report.disk_problem) != bool(worker.report.disk_problem):
            self._note_disk(worker, message.report.disk_problem, now)
        if self._workers.heartbeat(worker, message):
            self._touch_waiting()
        for report in message.tasks:
            job = self._jobs.get(report.attempt.subtask.job)
            counted = 0 if job is None else len(job.deaths.counted())
            paused = "" if job is None else job.state
            if job is None or not apply_fact(job, worker.worker, report, self._wall(now)):
                self.ignored += 1
            else:
                if len(job.deaths.counted()) < counted:  # its worker may take other jobs again
                    self._touch_waiting()
                if paused != job.state:
                    self._touch(job)
                self._hasten_receipts(job, worker.worker, report, now)
                self._recorder.reported(job, report.attempt.subtask.key)
                self._streams.note_report(report, self._wall(now))

    def _process_ended(self, worker: Worker, why: str, now: float) -> None:
        """A worker's process has ended. Its launcher reports soon how, or it stays unknown."""
        attempts = self._attempts_on(worker)
        due = now + limits.END_REPORT_SECONDS if worker.about.end_is_told else now
        self._end_worker(worker, "lost", why, now, end_reported_by=due)
        memory = f"it used {worker.report.memory_bytes / limits.MIB:,.0f} MiB at its last report"
        how = f"{worker} was lost: {why}" + (f", and {memory}" if worker.report.memory_bytes else "")
        unexplained = UnexplainedEnd(worker.worker, due, how, attempts)
        if due > now:
            self._unexplained.add(worker.epoch, unexplained)
        else:
            self._judge_unexplained(unexplained, now)

    def _judge_unexplained(self, ended: UnexplainedEnd, now: float) -> None:
        """Judge a death whose kind of end stays unknown."""
        at = self._wall(now)
        for name, attempts in ended.attempts.items():
            if (job := self._jobs.get(name)) is not None:
                calls = job.last_seen_inside(attempts, stalled_at=at)
                job.died_inside(calls, ended.how, ended.worker, at)
                job.end_reported(ended.worker, at)
                self._touch(job)

    def _end_explained(self, message: WorkerEnded, now: float) -> None:
        """Apply a launcher's report about the end of a process, whether its worker is lost already or not."""
        words, at = end_in_words(message), self._wall(now)
        worker = self._workers.get_there(message.worker)
        ended = self._unexplained.take(message.epoch)
        attempts = {} if ended is None else ended.attempts
        if worker is not None and worker.epoch == message.epoch:
            attempts = self._attempts_on(worker)
            if worker.state == "alive":
                self._cut_off(worker, f"its process {words}", now)
            else:
                self._end_worker(worker, "lost", f"its process {words}", now)
        counts = COUNTS[kind_of(message)] == "yes"
        for job in self._jobs.active():
            calls = [call for call in message.calls if call.job == job.id]
            if not message.recorded:
                calls = job.last_seen_inside(attempts.get(job.id, ()))
            if counts:
                job.died_inside(calls, f"worker {message.worker} {words}", message.worker, at)
            job.end_reported(message.worker, at)
            self._touch(job)

    def _attempts_on(self, worker: Worker) -> dict[str, list[tuple[TaskKey, int]]]:
        """The running attempts on a worker, by job."""
        jobs = [job for job in self._jobs.active() if worker.worker in job.slots.held()]
        return {job.id: job.subtasks.attempts_on(worker.worker) for job in jobs}

    def _end_worker(
        self,
        worker: Worker,
        state: Literal["lost", "gone"],
        why: str,
        now: float,
        *,
        end_reported_by: float | None = None,
    ) -> None:
        self._workers.end(worker, state, now)
        self._preparations.worker_ended(worker.worker)
        self._links.left(worker.worker)
        self._out += self._results.worker_ended(worker.worker, worker.epoch, self._wall(now))
        self._out += self._questions.worker_ended(worker.worker)
        verdict = WorkerLost(term=self._facts.term, worker=worker.worker, epoch=worker.epoch)
        for other in self._workers.alive():
            self._send(other, verdict)
        cause = ErrorInfo(code=PeerLost.code, text=f"{worker} was lost: {why}")
        for job in self._jobs.active():
            job.links.forget(worker.worker)
            if worker.worker in job.workers():
                at = self._wall(now)
                until = None if end_reported_by is None else at + end_reported_by - now
                job.worker_lost(worker.worker, cause, at, until)
                self._touch(job)
        self._readmit(now)
        self._out += self._streams.worker_ended()

    def _cut_off(self, worker: Worker, why: str, now: float, refusal: str = "") -> None:
        """Declare a worker with an open link lost, and tell it: it may be alive."""
        link = worker.link
        self._end_worker(worker, "lost", why, now)
        verdict = WorkerLost(term=self._facts.term, worker=worker.worker, epoch=worker.epoch, reason=why)
        self._out.append(SendToWorker(worker.worker, link, verdict))
        self._out.append(CloseLink(link, f"worker {worker.worker} is lost: {why}", refusal))

    def _host_looked(self, observer: int, ticket: int, answer: bool | None, now: float) -> None:
        self._hosts.answered(observer, ticket, answer)
        self._look_after_hosts(now)

    def _look_after_hosts(self, now: float) -> None:
        for each in self._hosts.due(self._workers.alive(), now):
            match each:
                case LookAtHost(observer, look) if observer == OWN:
                    self._out.append(LookForHost(look))
                case LookAtHost(observer, look):
                    self._send_to(observer, look)
                case HostSuspicion(workers):
                    for worker in workers:
                        self._prepare_for(worker)
                case HostVerdict(workers, why):
                    for worker in workers:
                        self._cut_off(worker, why, now)

    def _send_to(self, number: int, message: ControlMessage) -> bool:
        if (worker := self._workers.get_alive(number)) is not None:
            self._send(worker, message)
        return worker is not None

    def _address(self, number: int) -> WorkerAddress | None:
        worker = self._workers.get_there(number)
        return None if worker is None else worker.address

    def _send(self, worker: Worker, message: ControlMessage) -> None:
        self._out.append(SendToWorker(worker.worker, worker.link, message))

    # --- workers that leave ----------------------------------------------------------------------

    def _drain(self, worker: Worker, until: float | None, why: str, at: float) -> None:
        """Drain a worker, for the reason ``why``; empty: a client asks for it."""
        is_new = worker.drain is None or (bool(why) and not worker.drain.signalled)
        self._workers.drain(worker, until, signalled=bool(why))
        text = (
            f"worker {worker.worker} is to leave ({why or 'a client asks for it'}): its tasks move elsewhere"
        )
        for job in self._jobs.active():
            if worker.worker in job.workers():
                if is_new:
                    job.history.note(at, "worker draining", text, worker=worker.worker)
                self._touch(job)

    def _next_drain(self) -> float | None:
        drains = self._workers.leaving().values() if self._orderly_stop.phase == "up" else ()
        times = [self._wall.monotonic(drain.until) for drain in drains if drain.until is not None]
        return min(times, default=None)

    def _move_slots(self, at: float, called: set[int]) -> None:
        """Move the slots of draining workers to free ones, and evict their tasks when their time is up."""
        leaving = self._workers.leaving()
        for number, drain in leaving.items():
            if drain.is_to_evict(at, others_stay=self._workers.some_stay()):
                for job in self._jobs.active():
                    if job.can_move:
                        job.evict(number, at)
                        self._touch(job)
        for job in self._timed() if not self.write_ahead.problem else ():
            if self._deployer.move(job, leaving, self._jobs.held, at, called):
                self._jobs.held.note(job)
                self._touch(job)

    def _end_drained(self, at: float) -> None:
        """Shut down draining workers that are no longer needed, or whose eviction has timed out."""
        for number, drain in self._workers.leaving().items():
            needed = any(job.needs(number) for job in self._jobs.active()) or self._results.unread_at(number)
            if drain.is_to_end(at, needed=bool(needed)):
                self._send_to(number, Shutdown(term=self._facts.term, reason="nothing runs on it"))

    # --- requests --------------------------------------------------------------------------------

    def _request(self, link: int, request: int, message: ControlMessage, now: float) -> None:
        waits = self._workers.awaits(()) or (self._awaiting and not isinstance(message, SubmitJob))
        if waits and self._postpone(link, request, message):
            return
        match message:
            case _ if isinstance(message, PollRequest):
                self._poll(link, request, message, now)
                return
            case _ if isinstance(message, StreamRequest):
                self._out += self._streams.request(link, request, message, self._wall(now))
                self._touch(*self._jobs.active())
                return
            case _ if isinstance(message, ResultRequest):
                self._out += self._results.request(link, request, message)
                return
            case AskWorkers():
                self._out += self._questions.ask(link, request, message, self._workers.alive(), now)
                return
            case SubmitJob() if message.restore_from:
                self._read_snapshot(link, request, message)
                return
            case SubmitJob():
                try:
                    self._submit(link, request, message, self._wall(now))
                except ResourceExhausted:
                    if not (self._awaiting and self._postpone(link, request, message)):
                        raise
                return
            case CancelJob(job=name, give_up_results=unwanted):
                reply: ControlMessage = self._cancel(self._jobs.named(name), now, unwanted)
            case PauseJob(job=name) | ResumeJob(job=name):
                reply = self._pause(
                    self._jobs.named(name), self._wall(now), pauses=isinstance(message, PauseJob)
                )
            case SaveJob(job=name):
                reply = self._save(self._jobs.named(name), message, self._wall(now))
            case CancelSubmission(submission=submission):
                reply = self._cancel_submission(submission, now)
            case _ if isinstance(message, StatusRequest):
                reply = status_reply(message, self._view(), now)
            case WorkerEnded():
                self._end_explained(message, now)
                reply = Accepted()
            case DrainWorker(worker=number, seconds=seconds):
                at = self._wall(now)
                until = None if seconds is None else at + seconds
                self._drain(self._workers.named(number), until, "", at)
                reply = Accepted()
            case StopCluster():
                self._out.append(Reply(link, request, Accepted()))
                self._begin_stop(now)
                return
            case _:
                why = f"a client sent {message.type}"  # type: ignore[attr-defined]
                self._out.append(CloseLink(link, why, "malformed"))
                return
        self._out.append(Reply(link, request, reply))

    def _poll(self, link: int, request: int, message: PollRequest, now: float) -> None:
        """Answer a long poll now or later. A savepoint may wait for the rows that are fetched."""
        job = self._jobs.named(message.job)
        self._out += self._polls.ask(link, request, message, job, now)
        if job.savepoint.under_way:
            if isinstance(message, GetRows):
                job.history.client_has(message.after)
            job.look_at_savepoint(self._wall(now))
            self._touch(job)

    def _postpone(self, link: int, request: int, message: ControlMessage) -> bool:
        """Keep a request until no worker is awaited; False if it does not need workers.

        Raises:
            ResourceExhausted: too many requests of this link wait.
        """
        if not isinstance(message, SubmitJob | StreamRequest | ResultRequest):
            return False
        self._pending.require_room(_Postponed, link)
        self._pending.add(_Postponed(link, request, message))
        return True

    def _cancel(self, job: Job, now: float, unwanted: bool = False) -> Accepted:
        given_up = (unwanted or self.write_ahead.problem) and self._results.give_up(job)
        if job.terminal and not given_up:
            raise self._results.ended_already(job)
        job.cancel(self._wall(now), "cancelled by a client")
        self._touch(job)
        return Accepted(job=job.id, warning=GIVEN_UP if given_up and not unwanted else "")

    def _pause(self, job: Job, at: float, *, pauses: bool) -> Accepted:
        """Pause or resume a job. Raises UsageError: it is not in a state for it."""
        if pauses:
            job.pause_within(self._settings.pause_timeout, at)
        else:
            job.resume(at)
        self._touch(job)
        return Accepted(job=job.id)

    def _save(self, job: Job, message: SaveJob, at: float) -> Accepted:
        """Begin a savepoint. Raises UsageError: it cannot be taken."""
        directory = message.directory or self._facts.snapshot_dir
        if not directory:
            raise UsageError("there is no snapshot_dir: set one, or say where with --into")
        name = folder_name(job.id, "savepoint", job.next_snapshot)
        folder = place_below(directory, f"{name}-{int(at)}")
        within = self._settings.savepoint_timeout, self._settings.pause_timeout
        job.save_within(*within, folder, at, token=message.token, stops=message.stop)
        self._touch(job)
        return Accepted(job=job.id)

    def folder_ready(
        self, work: FolderWork, found: SnapshotManifest | ShuffleError | None, now: float
    ) -> CoordinatorStep:
        """The folder of a snapshot is prepared, or its manifest written or read; or that has failed."""
        job, at, problem = self._jobs.get(work.job), self._wall(now), ""
        if isinstance(found, ShuffleError):
            problem = str(found)
        if job is None:
            return self._settle(now)
        match work.work:
            case "prepare":
                job.folder_prepared(work, problem, at)
            case "open":
                job.snapshot_opened(work, found, at)
            case _:
                job.savepoint_committed(work.savepoint, problem, at)
        self._touch(job)
        return self._settle(now)

    def _read_snapshot(self, link: int, request: int, message: SubmitJob) -> None:
        """Have the savepoint read from which a submitted job goes on.

        Raises:
            ResourceExhausted: too many submissions of this link wait for that.
        """
        self._pending.require_room(_Restored, link)
        waiting = self._pending.add(_Restored(link, request, message))
        ticket = next(self._pending.tickets)
        self._pending.expect(ticket, waiting, waiting)
        self._out.append(ReadSnapshot(ticket, message))

    def snapshot_read(
        self, ticket: int, found: SnapshotManifest | ShuffleError, now: float
    ) -> CoordinatorStep:
        """The manifest for a :class:`ReadSnapshot` was read, or cannot be. Nothing follows if the client has
        gone."""
        waiting = self._pending.question(ticket, _Restored)
        if waiting is not None:
            self._pending.remove(waiting)
            try:
                if isinstance(found, ShuffleError):
                    raise found
                self._submit(waiting.link, waiting.request, waiting.message, self._wall(now), found)
            except ShuffleError as error:
                self._out.append(refusal(waiting.link, waiting.request, error))
        return self._settle(now)

    def _folder_work(self, job: Job) -> list[WorkInFolder]:
        """Take the work in the folder of a job's savepoint."""
        found = []
        for work in job.take_folder_work():
            manifest = work.manifest
            if manifest is not None:
                manifest = replace(manifest, cluster=self._facts.cluster, release=self._facts.version)
            found.append(WorkInFolder(replace(work, manifest=manifest)))
        return found

    def _cancel_submission(self, submission: str, now: float) -> Accepted:
        job = self._jobs.submitted(submission)
        if job is not None:
            return Accepted(job=job.id) if job.terminal else self._cancel(job, now)
        self._submissions.withdraw(submission)
        return Accepted()

    # --- submission ------------------------------------------------------------------------------

    def _submit(
        self,
        link: int,
        request: int,
        message: SubmitJob,
        at: float,
        manifest: SnapshotManifest | None = None,
    ) -> None:
        """Journal a job that fits, or raise. A submission that was accepted before gets the same answer."""
        if (job := self._jobs.submitted(message.submission)) is not None:
            self._out.append(Reply(link, request, Accepted(job=job.id)))
            return
        self._submissions.require_not_withdrawn(message.submission)
        graph = checked_graph(message, self._facts.python)
        origin = RestorePoint(message.restore_from, tuple(message.drop_state), message.trust_snapshot)
        resumptions = {} if manifest is None else resumptions_of(graph, manifest, origin)
        placement = self._admit(graph, at)
        warning = compared_releases(message.releases, self._workers.releases())
        submission = self._submissions.accept(
            link, request, message, graph, at, warning=warning, origin=origin, resumptions=resumptions
        )
        job = submission.make_job(*placement, self._random)
        self._submissions.journal(submission, journalrecords.job_records(job))

    def _admit(self, graph: JobGraph, at: float) -> tuple[Placement, dict[int, int]]:
        """The placement of a new job. Raises ShuffleError: it does not fit."""
        self._orderly_stop.require_up()
        self._streams.check(graph)
        self._results.check(graph)
        self._jobs.held.note(*self._touched.values())
        alive = self._workers.alive()
        self._isolation.look(self._jobs.active(), at)
        return admit(graph, alive, self._jobs.held, self._isolation.closed_to_new(alive))

    def _start(self, submission: Submission, at: float) -> Accepted:
        """Start a journaled job, or raise without a trace: it may no longer fit."""
        if (known := self._jobs.submitted(submission.id)) is not None:
            return Accepted(job=known.id)
        self._submissions.require_not_withdrawn(submission.id)
        graph = submission.graph
        job = submission.make_job(*self._admit(graph, at), self._random)
        self._jobs[job.id] = job
        self._streams.add(job, graph, {})
        self._results.add(job, graph, {})
        self._deployer.deploy(job, self._jobs.held, at)
        self._touch(job)
        return Accepted(job=job.id, warning=submission.warning)

    # --- what follows ----------------------------------------------------------------------------

    def _touch(self, *jobs: Job) -> None:
        self._touched.update((job.id, job) for job in jobs)

    def _touch_waiting(self) -> None:
        """Slots are free again: settle the jobs that wait for one."""
        self._touch(*self._jobs.waiting())

    def _settle(self, now: float) -> CoordinatorStep:
        """Carry out all consequences of an event, and return them as a step."""
        self._settle_by = None
        self._rounds.end(now)
        self._jobs.held.note(*self._touched.values())
        if self._awaiting and not self._workers.awaited():
            self._all_are_back(now)
        if self.write_ahead.problem:  # their deployments may have been held back since
            self._touch(*(job for job in self._jobs.active() if job.stopping))
        called = set[int]()
        touched = self._follow(now, called)
        if self._orderly_stop.phase == "up" and self._workers.leaving():
            self._isolation.look(self._jobs.active(), self._wall(now))
            self._move_slots(self._wall(now), called)
            touched |= self._follow(now, called)
            self._end_drained(self._wall(now))
            self._workers.touch(*(each for each in self._workers.alive() if each.drain is not None))
        self._watch(now)
        for number in self._links.take_new():
            self._note_reach(number, self._wall(now))
        self._workers.called_up(len(called))
        self._advance_stop(now)
        self._record(touched | {job.id for job in self._jobs.values() if job.subtasks.changed})
        messages, self._out = list(self.write_ahead.passed(self._out)), []
        submissions = self._submissions.take_unwritten()  # Each is answered with journaled().
        return CoordinatorStep(self._recorder.take(now), submissions, messages, self._next_deadline())

    def _follow(self, now: float, called: set[int]) -> set[str]:
        """Settle the touched jobs. Returns their ids. Newly called standby workers are added to
        ``called``."""
        touched = set[str]()
        suspect = self._isolation.look(self._jobs.active(), self._wall(now)) if self._touched else None
        while self._touched:
            # First jobs that have ended: slots with abandoned tasks are not free.
            first = [name for name, job in self._touched.items() if job.terminal]
            first += [suspect.id] if suspect is not None and suspect.id in self._touched else []
            job = self._touched.pop(first[0] if first else next(iter(self._touched)))
            if job.stopping:
                self._deployer.stop(job, self._wall(now))
            if job.terminal:
                self._release(job, self._wall(now))
            else:
                self._restart(job, self._wall(now), called)
            self._jobs.held.note(job)
            if job.slots.take_gave_back():
                self._touch(*(each for each in self._jobs.waiting() if each is not job))
            touched.add(job.id)
            self._out += [*self._polls.changed(job, now), *self._folder_work(job)]
        return touched

    def _record(self, jobs: Iterable[str], clients: Iterable[str] = ()) -> None:
        """Record all changes for the journal."""
        for name in self._jobs.keys() & jobs:
            self._recorder.job(self._jobs[name])
        for job in self._jobs.active():
            if job.subtasks.moved:
                self._recorder.moved(job)
        for name in self._jobs.keys() & (self._streams.changed() | self._results.changed() | {*clients}):
            self._recorder.clients(name, self._streams.record(name), self._results.record(name))
        for worker in self._workers.take_changed():
            self._recorder.worker(worker)
        for worker in self._workers.take_reported():
            self._recorder.applied(worker)
        self._recorder.counts(self._submissions.accepted, self._workers.numbers)
        if (offset := self._wall.take_offset()) is not None:
            self._recorder.clock(self._facts.identity, offset)

    def _all_are_back(self, now: float) -> None:
        """Every awaited worker has come back, or is lost: settle all jobs, and handle postponed requests."""
        self._awaiting = False
        self._touch(*self._jobs.active())
        postponed = self._pending.of(_Postponed)
        self._pending.remove(*postponed)
        for each in postponed:
            try:
                self._request(each.link, each.request, each.message, now)
            except ShuffleError as error:
                self._out.append(refusal(each.link, each.request, error))

    def _restart(self, job: Job, at: float, called: set[int]) -> None:
        """Deploy the due tasks of a job. ``called`` are standby workers already called up for the same
        loss."""
        if self._awaiting and self._workers.awaits(job.workers()):
            return
        was_stopping = job.stopping
        ready = self._deployer.restart(job, self._jobs.held, at, called)
        self._workers.touch(*(each for each in self._workers.alive() if each.worker in called))
        if job.terminal or (job.stopping and not was_stopping):
            self._touch(job)
        for task in ready:
            self._streams.redeployed(job, *task.key)
            self._results.redeployed(job, *task.key)

    def _release(self, job: Job, at: float) -> None:
        if job.released:
            return
        job.release()
        self._isolation.forget(job.id)
        self._out += self._streams.remove(job)
        self._results.job_ended(job)
        self._deployer.release(job, {*job.workers(), *self._preparations.job_ended(job.id)}, at)
        for number, slot in sorted(job.slots.blocked):
            if (worker := self._workers.get_alive(number)) is not None:
                self._workers.write_off(worker, job.id, slot)
        for name in self._jobs.forget():
            self._recorder.forget_job(name)
        self._touch_waiting()

    def _begin_stop(self, now: float) -> None:
        if self._orderly_stop.begin(now):
            for job in self._jobs.active():
                job.cancel(self._wall(now), "the cluster is shut down")
                self._touch(job)

    def _advance_stop(self, now: float) -> None:
        if self._orderly_stop.phase == "up":
            return
        self._workers.forget_standby()  # all workers are restarted next time, standby workers too
        if self._orderly_stop.drained(now, bool(self._jobs.active())):
            for worker in self._workers.alive():
                self._send(worker, Shutdown(term=self._facts.term, reason="the cluster is shut down"))
        if self._orderly_stop.closed(now, bool(self._workers.alive())):
            self._out.append(Stopped())

    # --- statistics ------------------------------------------------------------------------------

    def look(self) -> tuple[list[Job], list[Worker]]:
        """Jobs that have not ended, and all workers; to be read before anything else happens."""
        return self._jobs.active(), list(self._workers)

    def snapshot(self, now: float, refused: dict[str, int]) -> CoordinatorSnapshot:
        """Everything that ``/metrics`` is made from; ``refused`` counts connections by reason."""
        return coordinator_snapshot(self._view(), now, refused)

    def _view(self) -> ClusterView:
        problem = self.write_ahead.problem
        return ClusterView(
            self._facts,
            self.web_port,
            problem,
            self._workers,
            self._jobs,
            self._links,
            self._history,
            self._wall.offset,
        )

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert self._settle_by is not None or not (
            self._out or self._touched or self._workers.changed or self._workers.reported
        )
        assert not self._submissions.unwritten
        self._workers.validate()
        self._results.validate()
        self.write_ahead.validate()
        alive = {worker.worker for worker in self._workers.alive()}
        assert self._awaiting == bool(self._workers.awaited())
        self._preparations.validate(alive, {job.id for job in self._jobs.active()})
        self._links.validate({worker.worker for worker in self._workers.there()})
        for worker in self._workers.alive():
            assert 0 <= self._jobs.held.slots[worker.worker] <= worker.slots <= worker.about.slots
            assert 0 <= self._jobs.held.segments[worker.worker] <= worker.about.segments
            assert not (worker.standby and self._jobs.held.slots[worker.worker])
        for job in self._jobs.values():
            job.validate()
            assert set(job.subtasks.open_workers()) <= {worker.worker for worker in self._workers.there()}
            assert job.released == job.terminal
            assert not job.stopping or job.stop_sent
        self._jobs.validate()
        assert not any(poll.job.terminal for poll in self._pending.of(Poll))


def _around(key: PairKey, workers: Iterable[int]) -> set[PairKey]:
    """The pairs of ``workers`` that contain a worker of ``key``."""
    return {pair_of(one, other) for one in key for other in workers if one != other}
