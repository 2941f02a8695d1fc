"""The worker process: an event loop that owns the network, around the machines that decide.

Once registered (``registration``) it talks to peers, carries out the instructions of :class:`WorkerState`,
and sends heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from minishuffle.clock import set_by
from minishuffle.counters import (
    LAG_SECONDS_BOUNDS,
    Histogram,
    TaskCounters,
    WorkerSnapshot,
)
from minishuffle.errors import (
    PartitionLost,
    UsageError,
)
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.exchange.debloater import DEBLOAT_SECONDS
from minishuffle.ids import Address, AttemptId
from minishuffle.limits import LEASE_SECONDS
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.runtime.usererrors import describe_failure
from minishuffle.transport.control import ControlLink
from minishuffle.transport.hostlook import host_answers
from minishuffle.transport.interfaces import address_toward
from minishuffle.wire.advertised import is_loopback, is_wildcard
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    CheckFolder,
    ClockSet,
    ControlMessage,
    CutComplete,
    Heartbeat,
    HostLook,
    HostLooked,
    Probed,
    Step,
    TakeSnapshots,
    WorkerAddress,
    WriteState,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import (
    Fact,
    FileCompleted,
    SnapshotsHeld,
    SourcePositions,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)
from minishuffle.worker.channels.peers import PeerLinks
from minishuffle.worker.channels.probing import Prober
from minishuffle.worker.channels.registry import ChannelKey, Progress
from minishuffle.worker.coordinatorlink import CoordinatorLink
from minishuffle.worker.diskthreads import DiskThreads
from minishuffle.worker.external.clients import ExternalClients, ResultReaders
from minishuffle.worker.instructions import (
    AbandonTask,
    Acknowledged,
    AnswerQuestion,
    Attach,
    CancelTask,
    CloseLinks,
    CloseSubpartitions,
    ConnectLocal,
    DialPeer,
    Exit,
    FailChannel,
    Fence,
    FindAddress,
    ForgetJob,
    Instruction,
    KeepResults,
    KeptState,
    LoadPrograms,
    LookThere,
    MoveTasks,
    ProbePeer,
    Refuse,
    Release,
    Report,
    RequestPartition,
    SaveTasks,
    Send,
    ServeStream,
    SetPause,
    StartHolder,
    StartTask,
    WorkerStep,
    attempt_id,
)
from minishuffle.worker.interpreter import collect_garbage
from minishuffle.worker.introspection.answers import Inspection
from minishuffle.worker.registration import UnregisteredWorker, ask_registration
from minishuffle.worker.reports.attemptreports import ACKNOWLEDGE_LOOKS, AwaitedFact
from minishuffle.worker.reports.outbox import OutboxSender
from minishuffle.worker.reports.poolusage import FLOW_SECONDS
from minishuffle.worker.reports.workerreports import (
    resident_bytes,
    short_failure,
    worker_report,
    worker_snapshot,
)
from minishuffle.worker.sources.witnesses import Witnesses
from minishuffle.worker.state import WorkerState
from minishuffle.worker.tasks.attempt import Attempt, WorkerServices
from minishuffle.worker.tasks.deployment import Deployment
from minishuffle.worker.tasks.handoff import LoopInbox
from minishuffle.worker.tasks.programcache import ProgramLoader
from minishuffle.worker.tasks.snapshotholder import cannot_hold, snapshot_memory
from minishuffle.worker.tasks.statewriter import StateWriter
from minishuffle.worker.tasks.task import Task, TaskOutcome
from minishuffle.worker.tasks.threadwatchdog import StuckThreads
from minishuffle.worker.timers import Alarm, Timers

__all__ = ["Worker", "register"]

MOVES_SECONDS: Final = 0.02
"""Between two looks at tasks that are to move."""
LEAVE_SECONDS_MAX: Final = 0.4
"""For task threads to end of a process that was sent SIGTERM, once it is time to end."""
_log = logging.getLogger("minishuffle.worker")


async def register(
    start: UnregisteredWorker,
    link: ControlLink,
    request: Register,
    home: Address,
    began: Callable[[Worker], None],
) -> Registered:
    """Have the coordinator, which is at ``home``, register a process for the first time.

    Args:
        began: gets what the process is from then on. Peers may dial, and be dialed, before this returns.

    Raises:
        ShuffleError: the coordinator refuses, went away, or does not answer.
    """

    def accept(registered: Registered) -> CoordinatorLink:
        worker = Worker(start, request, home, registered)
        began(worker)
        worker.coordinator.connect(link)
        return worker.coordinator

    return await ask_registration(link, request, accept)


class Worker:
    """A registered worker process.

    Args:
        start: the process so far.
        request: the registration it has sent.
        home: where the coordinator is.
        registered: the coordinator's answer.
    """

    def __init__(
        self, start: UnregisteredWorker, request: Register, home: Address, registered: Registered
    ) -> None:
        self.settings, self.pool, self.endpoint = start.settings, start.pool, start.endpoint
        self._refusals, self._garbage, self._wall = start.refusals, start.garbage, start.wall
        self.loop_lag = Histogram(LAG_SECONDS_BOUNDS)
        self._loop = asyncio.get_running_loop()
        self._inbox = LoopInbox(self._loop)
        self._background: set[asyncio.Task[None]] = set()
        """Background tasks of the loop, such as dials."""
        self._timers = Timers(self._loop, self.loop_lag)
        self._alarm = Alarm(self._loop, self._on_alarm)
        """For the machine's next deadline."""
        self._flushing: set[float] = set()
        """Buffer timeouts that have a timer, in seconds."""
        self._given_address = bool(request.advertise)
        """It was started with an address to advertise."""
        self._stuck, self._programs = StuckThreads(), ProgramLoader()
        worker, epoch = registered.worker, registered.epoch
        self._state = state = WorkerState(self.settings, worker, epoch, registered.term, self._progress)
        self.coordinator = link = self._new_link(start, request, home)
        self._sender = OutboxSender(
            lambda: state.term,
            link.send_rows,
            lambda: link.writable,
            self._loop.call_soon,
            self._loop.call_later,
        )
        self._deployment = self._new_deployment(start)
        self._savepoints = StateWriter(DiskThreads(self._inbox, "snapshots"), self._on_fact, link.send)
        identity = Identity(Role.WORKER, self.endpoint.identity.cluster, worker, epoch)
        self._prober = Prober(
            identity, start.secret, self.endpoint.counters, self.settings.ping_interval, tls=self.endpoint.tls
        )
        self._inspection = Inspection(
            state,
            self._deployment,
            self.endpoint.links,
            self._inbox,
            outgoing=self._sender,
            reports=link.reports,
            connected=lambda: link.connected,
            clock=self._loop.time,
            wall=self._wall,
        )
        readers = ResultReaders(lambda: state.term, self._deployment, self._inbox, link.send)
        self._peers = PeerLinks(
            self.endpoint,
            identity,
            state,
            ExternalClients(lambda: state.term, self._deployment, readers, link.send),
            refusals=self._refusals,
            carry_out=self._carry_out,
            now=self._loop.time,
            call_at=self._loop.call_at,
            in_background=self._in_background,
            witnesses=lambda: self._witnesses,
        )
        self._witnesses = self._new_witnesses()
        self._begin_timers(registered.heartbeat_interval)

    def _new_link(self, start: UnregisteredWorker, request: Register, home: Address) -> CoordinatorLink:
        link = CoordinatorLink(
            start,
            request,
            home,
            self._state,
            handle=self._on_message,
            heartbeat=self._heartbeat,
            lost=lambda: self._deployment.ring(),
            pump=lambda: self._sender.pump(),
            applied=self._on_applied,
            call_by=self._alarm.set,
            unblocked=lambda facts: self._witnesses.ask(
                facts, link.reports.positions(), last=link.reports.last
            ),
            witnessed=lambda: self._witnesses.kept(),
            handed_on=lambda said: self._witnesses.handed_on(said),
        )
        return link

    def _new_witnesses(self) -> Witnesses:
        state, link = self._state, self.coordinator
        return Witnesses(
            state.worker,
            state.epoch,
            linked=self._peers.linked,
            send=self._peers.send,
            hand_on=lambda said: link.send(said.model_copy(update={"term": state.term})),
            go_on=lambda fact: self._on_applied(fact, durable=False),
        )

    def _new_deployment(self, start: UnregisteredWorker) -> Deployment:
        services = WorkerServices(
            worker=self._state.worker,
            pool=self.pool,
            inbox=self._inbox,
            report=self._on_report,
            said=self._sender.notify,
            fact=self._on_fact,
            recovered=self._on_recovered,
            saved=self._on_saved,
            made=lambda *made: self._savepoints.made(*made),
            stands=self._on_stands,
            partition_lost=self._on_partition_lost,
            snapshot_wanted=lambda: self._deployment.want_snapshots(),
            snapshots_held=self._on_snapshots_held,
            channel_event=self._on_channel_event,
            clock=self._loop.time,
            cpu=lambda: time.thread_time(),
            wall=self._wall,
            secret=start.secret,
            away=lambda: not self.coordinator.connected,
            record=start.record,
            spool_directory=start.spool_directory,
            spool_bytes_max=self.settings.spool_bytes_max,
            blocking_bytes_max=self.settings.blocking_bytes_max,
            retained_bytes=self.settings.retained_bytes,
            snapshot_memory_bytes=snapshot_memory(self.settings.snapshot_memory_bytes),
        )
        return Deployment(services)

    def _begin_timers(self, heartbeat_interval: float) -> None:
        self._timers.every("flow", FLOW_SECONDS, self._inspection.look)
        self._timers.every("heartbeat", heartbeat_interval, self._beat)
        self._timers.every(
            "reports",
            self.settings.heartbeat_timeout / ACKNOWLEDGE_LOOKS,
            self.coordinator.unblock_late_sources,
        )

    # --- the coordinator, and the end --------------------------------------------------------------

    def _on_message(self, message: ControlMessage) -> None:
        self._carry_out(self._state.handle(message, self._loop.time()))
        self._peers.review()

    def _on_applied(self, fact: AwaitedFact, *, durable: bool = True) -> None:
        """The source may continue after the positions that it has reported, which the coordinator has if they
        are ``durable``; or the file is listed, or the client has the rows."""
        attempt = self._deployment.attempts.get(fact.attempt)
        if attempt is None:
            return
        if isinstance(fact, SourcePositions):
            attempt.task.leases.acknowledge(durable=durable)
        elif isinstance(fact, FileCompleted):
            attempt.task.files.acknowledge(fact.writer)
        else:
            attempt.task.outbox.acknowledge(fact.rows)

    def leave(self) -> None:
        """The process was sent SIGTERM: end once its tasks have moved elsewhere, or at once if there is no
        coordinator to see to that."""
        if not self.coordinator.connected:
            self._state.leave(self._loop.time())
            self.coordinator.end("")
        elif not self._state.leaving:
            _log.info(
                "sent SIGTERM: it leaves when nothing runs on it, or after %g s", self.settings.drain_timeout
            )
            self._carry_out(self._state.leave(self._loop.time()))

    async def close(self) -> None:
        """Cancel what runs, close every socket; bounded by ``task_cancel_timeout``, or by
        ``LEAVE_SECONDS_MAX`` if the process was sent SIGTERM."""
        self._timers.cancel()
        self._garbage.close()
        await self.coordinator.finish()
        attempts = list(self._deployment.attempts.values())
        for attempt in attempts:
            attempt.paths.cancel()
        threads = [attempt.task.thread for attempt in attempts if attempt.task.thread is not None]
        for holder in self._deployment.holders.values():
            holder.release()
            threads.append(holder.thread)
        threads += [*self._peers.external.readers.close(), *self._programs.threads]
        threads += self._inspection.profiles.close()
        seconds = self.settings.task_cancel_timeout
        if self._state.leaving:
            seconds = min(seconds, LEAVE_SECONDS_MAX)
        deadline = self._loop.time() + seconds
        while any(thread.is_alive() for thread in threads) and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        for task in self._background:
            task.cancel()
        await self._prober.close()
        await self.endpoint.close()
        self._deployment.services.disk.close()
        self._savepoints.disk.close()
        self._inbox.close()
        self._alarm.cancel()
        self.coordinator.close()

    # --- steps -------------------------------------------------------------------------------------

    def _carry_out(self, step: WorkerStep) -> None:
        """See :class:`WorkerStep`."""
        self._alarm.set(step.timers)
        for instruction in step.messages:
            self._carry_out_one(instruction)

    def _carry_out_one(self, instruction: Instruction) -> None:
        deployment = self._deployment
        match instruction:
            case Report(TaskStateChanged(state="abandoned") as fact):
                self._report_abandoned(deployment.attempts[fact.attempt], fact)
            case Report(fact):
                self.coordinator.report(fact)
            case Send(message):
                self.coordinator.send(message)
            case StartTask() | StartHolder():
                self._start(instruction)
            case LoadPrograms(job, programs):
                self._programs.load(job, programs)
            case ConnectLocal(key, producer, generation, version):
                deployment.connect_local(key, producer, generation, version=version)
            case RequestPartition():
                self._peers.request(instruction, deployment.channel(instruction.channel))
                deployment.count_received(instruction)
            case Attach():
                self._attach(instruction)
            case Refuse():
                self._peers.refuse(instruction)
            case CancelTask(stopping, job_ends):
                deployment.attempts[stopping].paths.cancel(job_ends=job_ends)
            case AbandonTask(key):
                self._abandon(deployment.attempts[key])
            case FailChannel(key, generation, error):
                if (failed := deployment.channel(key)) is not None:
                    failed.fail(generation, error)
            case Fence():
                deployment.fence(instruction)
            case SetPause() | MoveTasks() | SaveTasks():
                self._stop_tasks(instruction)
            case CloseSubpartitions(producer, edge, consumers):
                deployment.close_subpartitions(producer, edge, consumers)
            case Release(attempts):
                self._release(attempts)
                if not deployment.attempts:
                    collect_garbage(settled=not (self._programs.threads or self._stuck.slots()))
                self._flush_in_time()
            case ForgetJob(job):
                self._programs.forget(job)
                self._peers.external.forget(job)
                self._peers.one_way.forget(job)
            case DialPeer() | FindAddress() | LookThere() | ProbePeer():
                self._ask_network(instruction)
            case CloseLinks():
                self._peers.close(instruction)
            case ServeStream(message):
                self._peers.external.serve(message)
            case KeepResults(message):
                self._peers.external.readers.serve(message)
            case Acknowledged(number, refused, journaled):
                self.coordinator.acknowledged(number, refused=refused, journaled=journaled)
                self._sender.pump()  # rows that wait for reports may follow
            case AnswerQuestion(question):
                self.coordinator.send(self._inspection.answer(question))
            case Exit(reason):
                self.coordinator.end(reason)

    def _save(self, message: CheckFolder | WriteState | CutComplete | TakeSnapshots) -> None:
        match message:
            case TakeSnapshots():
                self._deployment.want_snapshots(message.job)
            case CheckFolder():
                self._savepoints.check(message)
            case WriteState():
                attempts = self._deployment.attempts.values()
                here = [each.paths for each in attempts if each.id.subtask.job == message.job]
                self._savepoints.begin(message, here)
            case CutComplete():
                self._deployment.cut_complete(message)

    def _attach(self, instruction: Attach) -> None:
        """A peer's request is granted."""
        deployment, producer = self._deployment, instruction.producer
        partition = deployment.partition(producer, instruction.request.partition.edge)
        view = self._peers.attach(instruction, partition, partial(deployment.note_limit, producer))
        if view is not None:
            deployment.count_sent(instruction, view)

    def _ask_network(self, instruction: DialPeer | FindAddress | LookThere | ProbePeer) -> None:
        """Begin what takes as long as others take to answer."""
        match instruction:
            case DialPeer(peer):
                self._in_background(self._peers.dial(peer), f"dial worker {peer.worker}")
            case FindAddress(toward):
                self._in_background(self._advertise(toward), f"find an address toward {toward}")
            case LookThere(look):
                self._in_background(self._look_for_host(look), "look for a host")
            case ProbePeer(peer):
                self._in_background(self._probe(peer), f"probe worker {peer.worker}")

    def _abandon(self, attempt: Attempt) -> None:
        attempt.abandon()
        if attempt.task.thread is not None:
            self._stuck.add(attempt.id, attempt.slot, attempt.task.thread.is_alive)
        _log.error("task %s still runs after its cancel: abandoned", attempt.id)

    def _report_abandoned(self, attempt: Attempt, fact: TaskStateChanged) -> None:
        self._sender.end(attempt.task.outbox, rows=True)
        self.coordinator.report(attempt.completed(fact))

    def _start(self, instruction: StartTask | StartHolder) -> None:
        if isinstance(instruction, StartHolder):
            self._hold(instruction)
            return
        job, spec = instruction.message.job, instruction.spec
        try:
            if self._deployment.start(instruction).task.snapshots is not None:
                self._programs.load_arrow()
        except Exception as error:  # whatever the error (e.g. no more threads), it ends only this task
            name = f"{spec.name}[{spec.index}]"
            _log.warning("%s of %s cannot start", name, job, exc_info=error)
            info = describe_failure(error, name)
            nothing = TaskCounters()
            ended = self._state.task_ended(attempt_id(job, spec), "failed", info, b"", nothing)
            self._carry_out(ended)
        self._flush_in_time()

    def _hold(self, instruction: StartHolder) -> None:
        try:
            self._deployment.hold(instruction)
        except Exception as error:  # as for a task
            _log.warning("holder %s cannot start", instruction.holder, exc_info=error)
            self._on_snapshots_held(cannot_hold(instruction.holder, error))

    def _release(self, attempts: list[AttemptId]) -> None:
        for key in attempts:
            self.coordinator.reports.forget_ends(key)
        for attempt in self._deployment.release(attempts):
            traffic, rows_dropped = attempt.rows()
            self.coordinator.report(
                TaskReleased(attempt=attempt.id, traffic=traffic, rows_dropped=rows_dropped)
            )

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _look_for_host(self, look: HostLook) -> None:
        answer = await host_answers(look.addresses, look.times, look.seconds)
        self.coordinator.send(HostLooked(term=look.term, ticket=look.ticket, answer=answer))

    async def _probe(self, peer: WorkerAddress) -> None:
        """Report whether a worker can be reached."""
        why = await self._prober.probe(peer)
        if why is not None:
            self.coordinator.send(
                Probed(term=self._state.term, worker=peer.worker, epoch=peer.epoch, why=why)
            )

    async def _advertise(self, toward: str) -> None:
        """Advertise the address by which a host is reached, if this worker listens on all addresses and was
        given none to advertise. Answers without an address if it has none."""
        found, request = "", self.coordinator.request
        if is_wildcard(request.host) and not self._given_address:
            found = await address_toward(toward)
        if found and self.endpoint.tls is not None:
            try:
                self.endpoint.tls.check_host(found)
            except UsageError as error:
                _log.warning("%s", error)
                found = ""
        if found and not is_loopback(found):
            _log.warning("there are workers on other hosts: this one advertises %s from now on", found)
        else:
            found = ""
            _log.warning(
                "there are workers on other hosts, as at %s, which cannot reach this one at %s: it takes no "
                "slots of jobs that run on several hosts; start it with --host or --advertise",
                toward,
                request.advertise or request.host,
            )
        self.coordinator.advertise(found)

    # --- tasks (called on the loop through the inbox) ------------------------------------------------

    def _on_report(self, task: Task, outcome: TaskOutcome | None) -> None:
        key = task.attempt_id
        if outcome is None:
            self._carry_out(self._state.task_running(key, state_lost=task.state_handover.lost))
            return
        attempt = self._deployment.attempts.get(key)  # None: it was released meanwhile
        traffic = attempt.end(moved=outcome.moved) if attempt is not None else b""
        self._sender.end(task.outbox, rows=outcome.state != "finished")
        try:
            counters = task.read_counters()
            ended = self._state.task_ended(
                key,
                outcome.state,
                outcome.error,
                outcome.result,
                counters,
                traffic=traffic,
                positions=outcome.positions,
                state=KeptState(outcome.moved, task.state_handover.bytes, task.state_handover.lost),
                dealt=outcome.dealt,
            )
            self._carry_out(ended)
        except Exception as error:
            _log.exception("the end of attempt %s cannot be reported", key)
            self.coordinator.report(short_failure(key, outcome.state, error))

    def _on_channel_event(self, key: ChannelKey, generation: int, event: ChannelEvent) -> None:
        self._carry_out(self._state.channel_event(key, generation, event, self._loop.time()))

    def _progress(self, key: AttemptId) -> Progress:
        return self._deployment.progress(key)

    def _on_recovered(self, key: AttemptId, step: Step) -> None:
        self._carry_out(self._state.recovered(key, step, self._loop.time()))

    def _on_partition_lost(self, key: AttemptId, error: PartitionLost) -> None:
        _log.warning("%s", error)
        self._carry_out(self._state.partition_lost(key, error))

    def _on_snapshots_held(self, fact: SnapshotsHeld) -> None:
        self._carry_out(self._state.snapshots_held(fact))

    def _on_fact(self, fact: Fact) -> None:
        """Report a fact about an attempt. A fact of an abandoned task is not output."""
        attempt = self._deployment.attempts.get(fact.attempt)
        if attempt is not None and attempt.task.state != "abandoned":
            self.coordinator.report(fact)

    def _on_saved(
        self, key: AttemptId, message: WriteState, taken: TaskStateSnapshot | str, stood: float
    ) -> None:
        """A task has taken its state, or says why not, and has stood for so many seconds if it goes on."""
        attempt = self._deployment.attempts.get(key)
        if message.goes_on and attempt is not None:
            attempt.pass_barrier(message.barrier)
        self._savepoints.taken(key, message, taken, stood)

    def _on_stands(self, key: AttemptId) -> None:
        """A task has stopped at a barrier, or cannot stop because it waits; heartbeats repeat the state."""
        attempt = self._deployment.attempts.get(key)
        if attempt is not None:
            self.coordinator.report(TaskStands(attempt=key, standing=attempt.standing()))

    def _stop_tasks(self, instruction: SetPause | MoveTasks | SaveTasks) -> None:
        if isinstance(instruction, SaveTasks):
            self._save(instruction.message)
            return
        self._deployment.stop_tasks(instruction)
        self._watch_moves()

    def _watch_moves(self) -> None:
        """Report the moving attempts that have stopped and whose output was read completely."""
        for key in self._deployment.moved_on():
            self._on_stands(key)
        every = MOVES_SECONDS if self._deployment.moves else None
        self._timers.every("moves", every, self._watch_moves)

    # --- timers and stats ----------------------------------------------------------------------------

    def _flush_in_time(self) -> None:
        """Jobs have come or gone: flush each at its own buffer timeout, debloat if any wants that, and renew
        the leases of sources."""
        intervals = self._deployment.flush_intervals()
        for interval in self._flushing | intervals:
            every = interval if interval in intervals else None
            self._timers.every(f"flush {interval}", every, partial(self._deployment.flush, interval))
        self._flushing = intervals
        seconds = DEBLOAT_SECONDS if self._deployment.debloats else None
        self._timers.every("debloat", seconds, self._deployment.debloat)
        seconds = LEASE_SECONDS if self._deployment.reads_sources else None
        self._timers.every("leases", seconds, self._renew_leases)

    def _renew_leases(self) -> None:
        self.coordinator.report_at_once(self._deployment.renew_leases())

    def _on_alarm(self) -> None:
        self.coordinator.flush()
        self._alarm.set(self.coordinator.reports.next_deadline())
        self._carry_out(self._state.handle_timer(self._loop.time()))

    def _beat(self) -> None:
        self.coordinator.look_for_successor()
        self._tell_clock_set()
        self.coordinator.beat()

    def _heartbeat(self) -> Heartbeat:
        """The current report of this process and its tasks."""
        state = self._state
        stuck = self._stuck.slots()
        state.tasks.still_run(len(self._stuck))
        report = worker_report(
            self.pool,
            self.endpoint.counters,
            self._deployment,
            self.loop_lag,
            abandoned=state.tasks.abandoned,
            stuck=stuck,
            jobs_loaded=self._programs.loaded,
            clock=self._loop.time(),
            cpu_seconds=time.process_time(),
            gc_seconds=self._garbage.seconds,
            memory_bytes=resident_bytes(),
        )
        return Heartbeat(
            term=state.term,
            worker=state.worker,
            epoch=state.epoch,
            report=report.model_copy(update={"loop_lag_seconds": self._timers.take_latest()}),
            tasks=self._deployment.reports(),
            peers=self._peers.reports(),
            unlinked=state.channels.unlinked(self._loop.time()),
        )

    def _tell_clock_set(self) -> None:
        """The system clock was set: report it once there is a coordinator."""
        self._wall()
        for seconds in self._wall.take_steps() if self.coordinator.connected else ():
            _log.warning("the system clock was set %s", set_by(seconds))
            self.coordinator.send(ClockSet(term=self._state.term, seconds=abs(seconds), forward=seconds > 0))

    def snapshot(self) -> WorkerSnapshot:
        """Everything that ``/metrics`` is made from."""
        return worker_snapshot(
            self.endpoint,
            self.pool,
            self._deployment,
            slots=self.settings.slots,
            refused=self._refusals.counts,
            loop_lag=self.loop_lag,
            abandoned=self._state.tasks.abandoned,
            suspicions=self._state.channels.suspicions,
            gc_seconds=self._garbage.seconds,
            wall=self._wall(),
            one_way=self._peers.one_way.counts(),
        )
