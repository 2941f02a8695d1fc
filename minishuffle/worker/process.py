"""The worker process: an event loop that owns the network, around the machines that decide.

It registers with the coordinator, listens for peers, carries out the instructions of
:class:`WorkerState`, and sends heartbeats. Servers (metrics) are handed in by whoever starts it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from minishuffle import limits
from minishuffle.backoff import Backoff
from minishuffle.clock import set_by
from minishuffle.config import ClusterSettings, CoordinatorPlace
from minishuffle.counters import (
    LAG_SECONDS_BOUNDS,
    ConnectionCounters,
    Histogram,
    TaskCounters,
    WorkerSnapshot,
)
from minishuffle.errors import (
    PartitionLost,
    PeerLost,
    RemoteProtocolError,
    ShuffleError,
    UsageError,
    error_from_code,
)
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.exchange.debloater import DEBLOAT_SECONDS
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import Address, AttemptId
from minishuffle.operators.base import CompleteFile
from minishuffle.runtime.usererrors import describe_failure
from minishuffle.transport.control import ControlLink, connect_control
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.hostlook import host_answers
from minishuffle.transport.interfaces import address_toward
from minishuffle.transport.tcp import DataEndpoint
from minishuffle.wire.advertised import is_loopback, is_wildcard
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    Advertised,
    ClockSet,
    ControlMessage,
    Heartbeat,
    HostLook,
    HostLooked,
    PartitionReadable,
    Probed,
    Register,
    Registered,
    Shutdown,
    SourcePositions,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
    WorkerAddress,
    WritePosition,
)
from minishuffle.wire.outputs import FileCompleted
from minishuffle.wire.requests import Failure
from minishuffle.worker.clients import ExternalClients, ResultReaders
from minishuffle.worker.crashrecord import CrashRecord
from minishuffle.worker.flow import FLOW_SECONDS
from minishuffle.worker.handoff import LoopInbox
from minishuffle.worker.inspection import Inspection
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
    LoadPrograms,
    LookThere,
    MoveTasks,
    ProbePeer,
    Refuse,
    Release,
    RequestPartition,
    Send,
    ServeStream,
    SetPause,
    StartTask,
    attempt_id,
)
from minishuffle.worker.interpreter import GarbageClock, collect_garbage
from minishuffle.worker.outbox import ACKNOWLEDGE_LOOKS, NumberedReport, OutboxSender, ReportLog
from minishuffle.worker.peers import PeerLinks
from minishuffle.worker.preparation import ProgramLoader
from minishuffle.worker.probing import Prober
from minishuffle.worker.registry import ChannelKey, Progress
from minishuffle.worker.state import WorkerState
from minishuffle.worker.stuck import StuckThreads
from minishuffle.worker.task import Task, TaskOutcome
from minishuffle.worker.tasks import Attempt, Deployment
from minishuffle.worker.timers import Alarm, Timers
from minishuffle.worker.wallclock import WallClock
from minishuffle.worker.workerreports import (
    resident_bytes,
    short_failure,
    worker_report,
    worker_snapshot,
)

__all__ = ["COORDINATOR_SECONDS_MAX", "Worker"]

LAG_PROBE_SECONDS: Final = 0.05
COORDINATOR_SECONDS_MAX: Final = 30.0
"""How long a worker tries to reach its coordinator at its start before it gives up."""
MOVES_SECONDS: Final = 0.02
"""Between two looks at tasks that are to move."""
LEAVE_SECONDS_MAX: Final = 0.4
"""For task threads to end of a process that was sent SIGTERM, once it is time to end."""
RETURN_BACKOFF: Final = Backoff(0.1, 0.5)
"""Between two tries to reach a coordinator that was lost."""
_log = logging.getLogger("minishuffle.worker")


class Worker:
    """One registration of this process."""

    def __init__(
        self,
        settings: ClusterSettings,
        cluster: str,
        secret: bytes,
        spool_directory: str | None = None,
        find: Callable[[], CoordinatorPlace | None] = lambda: None,
        *,
        record: CrashRecord | None = None,
        tls: Credentials | None = None,
    ) -> None:
        self.settings = settings
        self._record = record or CrashRecord()
        self._secret = secret
        self._spool_directory = spool_directory
        self._find = find
        self.remote, self.loop_lag = ConnectionCounters(), Histogram(LAG_SECONDS_BOUNDS)
        self._garbage, self._wall = GarbageClock(time.perf_counter), WallClock()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolved with the reason why this worker is to stop; empty for an orderly one."""
        self._loop = asyncio.get_running_loop()
        self._inbox = LoopInbox(self._loop)
        self.pool = _network_pool(settings)
        self._peers = PeerLinks(self._carry_out, self._loop.time, self._loop.call_at, self._in_background)
        self.refusals = self._peers.refusals.counts
        self.endpoint = DataEndpoint(
            self._peers,
            Identity(Role.WORKER, cluster, 0, 0),
            secret,
            self.remote,
            settings.ping_interval,
            suspect_after=settings.suspect_after,
            tls=tls,
        )
        self._background: set[asyncio.Task[None]] = set()
        """Dials, and what else is awaited beside the loop's other work."""
        self._timers = Timers(self._loop, self.loop_lag)
        self._alarm = Alarm(self._loop, self._on_alarm)
        """For the machine's next deadline."""
        self._flushing: set[float] = set()
        """Buffer timeouts that have a timer, in seconds."""
        self._control: ControlLink | None = None
        """To the coordinator; None while there is none."""
        self._unregistered: ControlLink | None = None
        """A link over which the answer to a registration is awaited."""
        self._request: Register | None = None
        self._given_address = False
        """It was started with an address to advertise."""
        self._home: Address | None = None
        """Where the coordinator was found last."""
        self._return: asyncio.Task[None] | None = None
        """Looks for the coordinator while there is none."""
        self._machine: WorkerState | None = None
        self._deployed: Deployment | None = None
        self._prober: Prober | None = None
        self._outgoing: OutboxSender | None = None
        self._inspection: Inspection | None = None
        self._reports, self._stuck, self._programs = ReportLog(), StuckThreads(), ProgramLoader()
        self._answer: asyncio.Future[Registered] = self._loop.create_future()
        """To the registration that was asked for last."""

    @property
    def _state(self) -> WorkerState:
        assert self._machine is not None, "the worker is not registered yet"
        return self._machine

    @property
    def _deployment(self) -> Deployment:
        assert self._deployed is not None, "the worker is not registered yet"
        return self._deployed

    @property
    def _sender(self) -> OutboxSender:
        assert self._outgoing is not None, "the worker is not registered yet"
        return self._outgoing

    # --- registration and end ----------------------------------------------------------------------

    async def register(self, control: ControlLink, request: Register, home: Address) -> Registered:
        """Say who we are and learn our id; ``home`` is where the coordinator is.

        Raises:
            ShuffleError: the coordinator refuses, or went away.
        """
        request = request.model_copy(update={"end_is_told": self._record.is_read})
        self._request, self._home = request, home
        self._given_address = bool(request.advertise)
        reply = await self._ask(control, request)
        self._timers.every("heartbeat", reply.heartbeat_interval, self._heartbeat)
        self._timers.every("lag", LAG_PROBE_SECONDS, lambda: None)
        self._timers.every("reports", self.settings.heartbeat_timeout / ACKNOWLEDGE_LOOKS, self._excuse_late)
        return reply

    async def _ask(self, link: ControlLink, request: Register) -> Registered:
        """Have a registration answered over that link, which is the control link from then on."""
        answer = self._answer = self._loop.create_future()
        self._unregistered = link
        link.start(partial(self._on_control, link), partial(self._on_control_closed, link))
        link.send(request)
        try:
            return await asyncio.wait_for(answer, COORDINATOR_SECONDS_MAX)
        except TimeoutError as error:
            raise PeerLost(
                f"the coordinator did not register this worker within {COORDINATOR_SECONDS_MAX:g} s"
            ) from error
        finally:
            self._unregistered = None
            if self._control is not link:
                link.close()

    def _on_control(self, link: ControlLink, message: ControlMessage, request: int) -> None:
        if link is self._control:
            self._carry_out(self._state.handle(message, self._loop.time()))
            self._peers.review()
        elif link is not self._unregistered or self._answer.done():
            return
        elif isinstance(message, Registered):
            if self._machine is None:
                self._begin(message)
            else:
                self._machine.taken_back(message)
            self._control = link
            link.on_writable = self._sender.pump
            self._answer.set_result(message)
            self._say_kept(message.applied)
        elif isinstance(message, Failure):
            self._answer.set_exception(error_from_code(message.code, message.text))
        else:
            name = type(message).__name__
            raise RemoteProtocolError(f"the coordinator sent {name} before it registered this worker")

    def _begin(self, message: Registered) -> None:
        """The first registration. Before anything else is handled: peers may dial, and be dialed, from now
        on."""
        cluster = self.endpoint.identity.cluster
        self.endpoint.identity = Identity(Role.WORKER, cluster, message.worker, message.epoch)
        state = self._machine = WorkerState(
            self.settings, message.worker, message.epoch, message.term, self._progress
        )
        self._prober = Prober(
            self.endpoint.identity,
            self._secret,
            self.remote,
            self.settings.ping_interval,
            tls=self.endpoint.tls,
        )
        self._outgoing = OutboxSender(
            lambda: state.term, self._send, self._writable, self._loop.call_soon, self._loop.call_later
        )
        self._deployed = Deployment(
            message.worker,
            self.pool,
            self._inbox,
            self._on_report,
            self._sender.notify,
            spool_directory=self._spool_directory,
            spool_bytes_max=self.settings.spool_bytes_max,
            blocking_bytes_max=self.settings.blocking_bytes_max,
            channel_event=self._on_channel_event,
            moved=self._on_moved,
            first_record=self._on_first_record,
            stands=self._on_stands,
            filed=self._on_filed,
            readable=self._on_readable,
            partition_lost=self._on_partition_lost,
            clock=self._loop.time,
            wall=self._wall,
            away=lambda: self._control is None,
            record=self._record,
        )
        self._inspection = Inspection(
            state,
            self._deployed,
            self.endpoint.links,
            self._inbox,
            outgoing=self._outgoing,
            reports=self._reports,
            connected=lambda: self._control is not None,
            clock=self._loop.time,
            wall=self._wall,
        )
        self._timers.every("flow", FLOW_SECONDS, self._inspection.look)
        readers = ResultReaders(lambda: state.term, self._deployment, self._inbox, self._send)
        external = ExternalClients(lambda: state.term, self._deployment, readers, self._send)
        self._peers.registered(self.endpoint, self._state, external)

    def _writable(self) -> bool:
        """Whether rows and lines may be sent."""
        return self._control is not None and self._control.writable and not self._reports.full

    def _on_control_closed(self, link: ControlLink, error: Exception | None) -> None:
        why = str(error) if error is not None else "it closed the connection"
        if link is self._control:
            self._lose_coordinator(why)
        elif link is self._unregistered and not self._answer.done():
            self._answer.set_exception(error or PeerLost("the coordinator closed the connection"))

    # --- without a coordinator -----------------------------------------------------------------------
    #
    # Tasks and data links go on. Reports are kept and repeated; rows for clients wait in front of them.

    def _lose_coordinator(self, why: str) -> None:
        """Look for it, or for the one that takes its place, for ``coordinator_timeout`` at most."""
        self._control = None
        if self._state.leaving:
            self._end("")
        if self.ended.done():
            return
        _log.warning(
            "the coordinator is gone (%s): tasks run on, and this worker ends if there is none within %g s",
            why,
            self.settings.coordinator_timeout,
        )
        self._excuse_sources(self._reports.last)
        self._deployment.ring()
        self._return = self._loop.create_task(self._look_for_it(), name="return to the coordinator")

    async def _look_for_it(self) -> None:
        seconds = self.settings.coordinator_timeout
        deadline = self._loop.time() + seconds
        tries = 0
        while True:
            tries += 1
            try:
                await self._try_to_return(max(0.1, deadline - self._loop.time()))
            except UsageError as error:
                self._end(f"the coordinator does not take this worker back: {error}")
            except ShuffleError as error:
                if self._loop.time() < deadline:
                    await asyncio.sleep(RETURN_BACKOFF.seconds(tries))
                    continue
                self._end(f"the coordinator is gone, and none was found within {seconds:g} s: {error}")
            return

    async def _try_to_return(self, seconds: float) -> None:
        """Register again, with everything that is here.

        Raises:
            UsageError: the coordinator refuses.
            ShuffleError: there is none, or one that other workers do not obey any more.
        """
        state, request, home = self._state, self._request, self._home
        assert request is not None and home is not None
        if (place := self._find()) is not None:
            home = place.address
        identity = Identity(Role.WORKER, self.endpoint.identity.cluster, state.worker, state.epoch)
        timeout = min(seconds, limits.HANDSHAKE_SECONDS_MAX)
        link = await connect_control(home, identity, self._secret, timeout=timeout, tls=self.endpoint.tls)
        await self._ask(
            link,
            request.model_copy(
                update={
                    "requested_worker": state.worker,
                    "epoch": state.epoch,
                    "term": state.term,
                    "attempts": state.held(),
                    "jobs": state.jobs(),
                }
            ),
        )
        self._home = home
        _log.warning("the coordinator at %s has taken this worker back, in term %d", home, state.term)

    def _say_kept(self, applied: int) -> None:
        """Resend the reports that the coordinator has not applied, after it has registered this worker.
        Reports are applied in the order of their numbers, so messages waiting in outboxes get their numbers
        after this."""
        self._acknowledged(applied, files=False)
        control = self._control
        assert control is not None
        for report in self._reports.kept(self._state.term):
            control.send(report)
        self._sender.pump()
        self._heartbeat()

    def _excuse_late(self) -> None:
        """The coordinator may be stopped, or has declared this worker lost by then, if the link is broken."""
        for report in self._reports.look():
            self._grant(report)

    def _excuse_sources(self, number: int) -> None:
        """Sources do not wait for reports up to that number to be acknowledged any more."""
        for report in self._reports.excuse(number):
            self._grant(report)

    def _grant(self, report: SourcePositions) -> None:
        """The source may continue after the positions that it has reported."""
        attempt = self._deployment.attempts.get(attempt_id(report.job, report))
        if attempt is not None:
            attempt.acknowledge()

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def leave(self) -> None:
        """The process was sent SIGTERM: end once its tasks have moved elsewhere, or at once if there is no
        coordinator to see to that."""
        if self._machine is None:
            self._end("")
        elif self._control is None:
            self._machine.leave(self._loop.time())
            self._end("")
        elif not self._machine.leaving:
            _log.info(
                "sent SIGTERM: it leaves when nothing runs on it, or after %g s", self.settings.drain_timeout
            )
            self._carry_out(self._state.leave(self._loop.time()))

    async def close(self) -> None:
        """Cancel what runs, close every socket; bounded by ``task_cancel_timeout``, or by
        ``LEAVE_SECONDS_MAX`` if the process was sent SIGTERM."""
        self._timers.cancel()
        self._garbage.close()
        if self._return is not None:
            self._return.cancel()
            await asyncio.gather(self._return, return_exceptions=True)
        if self._control is not None:
            # The final message: without it a closed link looks as if this process had been killed.
            self._send(Shutdown(term=self._state.term, reason="the worker is stopped"))
        if self._machine is not None:
            attempts = list(self._deployment.attempts.values())
            for attempt in attempts:
                attempt.paths.cancel()
            threads = [attempt.task.thread for attempt in attempts if attempt.task.thread is not None]
            threads += [*self._peers.external.readers.close(), *self._programs.threads]
            if self._inspection is not None:
                threads += self._inspection.profiles.close()
            seconds = self.settings.task_cancel_timeout
            if self._machine.leaving:
                seconds = min(seconds, LEAVE_SECONDS_MAX)
            deadline = self._loop.time() + seconds
            while any(thread.is_alive() for thread in threads) and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
        for task in self._background:
            task.cancel()
        if self._prober is not None:
            await self._prober.close()
        await self.endpoint.close()
        if self._deployed is not None:
            self._deployed.disk.close()
        self._inbox.close()
        self._alarm.cancel()
        for link in (self._control, self._unregistered):
            if link is not None:
                link.close()

    def _send(self, message: ControlMessage) -> None:
        control = self._control
        if control is None:
            self._keep(message)
        elif isinstance(message, NumberedReport):
            numbered = self._reports.keep(message)
            try:
                control.send(numbered)
            except BaseException:
                self._reports.take_back()
                raise
        else:
            control.send(message)

    def _keep(self, message: ControlMessage) -> None:
        """There is no coordinator: reports are for the next one, and nothing else is."""
        if isinstance(message, NumberedReport):
            self._reports.keep(message)
            self._excuse_sources(self._reports.last)

    def _acknowledged(
        self, number: int, *, refused: bool = False, files: bool = True, journaled: bool = True
    ) -> None:
        """The coordinator has applied reports. The file that the last one names may be ``refused``."""
        if not journaled:
            self._reports.free_rows(number)
            self._excuse_sources(number)
            return
        for report in self._reports.acknowledge(number, files=files):
            if isinstance(report, FileCompleted):
                attempt = self._deployment.attempts.get(attempt_id(report.job, report))
                if attempt is not None and not (refused and report.number == number):
                    attempt.task.files.acknowledge()
            else:
                self._grant(report)

    # --- instructions ------------------------------------------------------------------------------

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out_one(instruction)
        self._alarm.set(self._state.next_deadline())

    def _carry_out_one(self, instruction: Instruction) -> None:
        deployment = self._deployment
        match instruction:
            case Send(TaskStateChanged(state="abandoned") as message):
                attempt = deployment.attempts[attempt_id(message.job, message)]
                self._sender.end(attempt.task.outbox, rows=True)
                self._send(attempt.completed(message))
            case Send(message):
                self._send(message)
            case StartTask():
                self._start(instruction)
            case LoadPrograms(job, programs):
                self._programs.load(job, programs)
            case ConnectLocal(key, producer, generation, base):
                deployment.connect_local(key, producer, generation, base=base)
            case RequestPartition():
                self._peers.request(instruction, deployment.channel(instruction.channel))
                deployment.count_received(instruction)
            case Attach():
                self._attach(instruction)
            case Refuse():
                self._peers.refuse(instruction)
            case CancelTask(stopping):
                deployment.attempts[stopping].paths.cancel()
            case AbandonTask(key):
                self._abandon(deployment.attempts[key])
            case FailChannel(key, generation, error):
                if (failed := deployment.channel(key)) is not None:
                    failed.fail(generation, error)
            case Fence():
                deployment.fence(instruction)
            case SetPause() | MoveTasks():
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
                self._acknowledged(number, refused=refused, journaled=journaled)
                self._sender.pump()  # rows that wait behind reports may follow
            case AnswerQuestion(question) if self._inspection is not None:
                self._send(self._inspection.answer(question))
            case Exit(reason):
                self._end(reason)

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

    def _start(self, instruction: StartTask) -> None:
        job, spec = instruction.message.job, instruction.spec
        try:
            self._deployment.start(instruction)
        except Exception as error:  # whatever it is (no more threads, say), it ends this task alone
            name = f"{spec.name}[{spec.index}]"
            _log.warning("%s of %s cannot start", name, job, exc_info=error)
            info = describe_failure(error, name)
            nothing = TaskCounters()
            ended = self._state.task_ended(attempt_id(job, spec), "failed", info, b"", nothing)
            self._carry_out(ended)
        self._flush_in_time()

    def _release(self, attempts: list[AttemptId]) -> None:
        for attempt in self._deployment.release(attempts):
            traffic, rows_dropped = attempt.rows()
            self._send(
                TaskReleased(
                    term=self._state.term,
                    **attempt.id.fields(),
                    traffic=traffic,
                    rows_dropped=rows_dropped,
                )
            )

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _look_for_host(self, look: HostLook) -> None:
        answer = await host_answers(look.addresses, look.times, look.seconds)
        self._send(HostLooked(term=look.term, ticket=look.ticket, answer=answer))

    async def _probe(self, peer: WorkerAddress) -> None:
        """Say whether that worker can be reached."""
        assert self._prober is not None
        why = await self._prober.probe(peer)
        if why is not None:
            self._send(Probed(term=self._state.term, worker=peer.worker, epoch=peer.epoch, why=why))

    async def _advertise(self, toward: str) -> None:
        """Have others use the address by which that host is reached, if this worker listens on all and was
        given none; say so if it has none."""
        assert self._request is not None
        found = ""
        if is_wildcard(self._request.host) and not self._given_address:
            found = await address_toward(toward)
        if found and self.endpoint.tls is not None:
            try:
                self.endpoint.tls.check_host(found)
            except UsageError as error:
                _log.warning("%s", error)
                found = ""
        if found and not is_loopback(found):
            self._request = self._request.model_copy(update={"advertise": found})
            _log.warning("there are workers on other hosts: this one advertises %s from now on", found)
        else:
            found = ""
            _log.warning(
                "there are workers on other hosts, as at %s, which cannot reach this one at %s: it takes no "
                "slots of jobs that run on several hosts; start it with --host or --advertise",
                toward,
                self._request.advertise or self._request.host,
            )
        self._send(Advertised(term=self._state.term, host=found))

    # --- tasks (called on the loop through the inbox) ------------------------------------------------

    def _on_report(self, task: Task, outcome: TaskOutcome | None) -> None:
        key = task.attempt_id
        if outcome is None:
            self._carry_out(self._state.task_running(key))
            return
        attempt = self._deployment.attempts.get(key)  # None: it was released meanwhile
        traffic, writes = attempt.end() if attempt is not None else (b"", [])
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
                writes=writes,
            )
            self._carry_out(ended)
        except Exception as error:  # without a report of its end the job would never end
            _log.exception("the end of attempt %s cannot be reported", task.attempt_id)
            self._send(short_failure(self._state.term, task.attempt_id, outcome.state, error))

    def _on_channel_event(self, key: ChannelKey, generation: int, event: ChannelEvent) -> None:
        self._carry_out(self._state.channel_event(key, generation, event, self._loop.time()))

    def _on_moved(
        self, attempt: AttemptId, positions: bytes, within: float, writes: list[WritePosition]
    ) -> None:
        """A source reports how far it is."""
        self._send(
            SourcePositions(
                term=self._state.term,
                **attempt.fields(),
                positions=positions,
                within=within,
                writes=writes,
            )
        )

    def _progress(self, key: AttemptId) -> Progress:
        return self._deployment.progress(key)

    def _on_first_record(self, key: AttemptId) -> None:
        self._state.first_record(key, self._loop.time())
        self._alarm.set(self._state.next_deadline())

    def _on_partition_lost(self, key: AttemptId, error: PartitionLost) -> None:
        _log.warning("%s", error)
        self._carry_out(self._state.partition_lost(key, error))

    def _on_readable(self, key: AttemptId, edge: int) -> None:
        """A partition has its first buffer, for which its consumers may wait."""
        self._send(
            PartitionReadable(
                term=self._state.term,
                **key.fields(),
                edge=edge,
            )
        )

    def _on_stands(self, key: AttemptId) -> None:
        """A task has stopped at a barrier, or cannot stop because it waits; heartbeats repeat the state."""
        attempt = self._deployment.attempts.get(key)
        if attempt is not None:
            self._send(
                TaskStands(
                    term=self._state.term,
                    **key.fields(),
                    standing=attempt.standing(),
                )
            )

    def _stop_tasks(self, instruction: SetPause | MoveTasks) -> None:
        self._deployment.stop_tasks(instruction)
        self._watch_moves()

    def _watch_moves(self) -> None:
        """Report the moving attempts that have stopped and whose output was read completely."""
        for key in self._deployment.moved_on():
            self._on_stands(key)
        every = MOVES_SECONDS if self._deployment.moves else None
        self._timers.every("moves", every, self._watch_moves)

    def _on_filed(self, key: AttemptId, file: CompleteFile) -> None:
        """A sink has completed a file. That of a task that was abandoned meanwhile is not output."""
        attempt = self._deployment.attempts.get(key)
        if attempt is None or attempt.task.state == "abandoned":
            return
        self._send(
            FileCompleted(
                term=self._state.term,
                **key.fields(),
                file=file.number,
                path=file.path,
                rows=file.rows,
                bytes=file.bytes,
                checksum=file.checksum,
            )
        )

    # --- timers and stats ----------------------------------------------------------------------------

    def _flush_in_time(self) -> None:
        """Jobs have come or gone: flush each at its own buffer timeout, and debloat if any wants that."""
        intervals = self._deployment.flush_intervals()
        for interval in self._flushing | intervals:
            every = interval if interval in intervals else None
            self._timers.every(f"flush {interval}", every, partial(self._deployment.flush, interval))
        self._flushing = intervals
        seconds = DEBLOAT_SECONDS if self._deployment.debloats else None
        self._timers.every("debloat", seconds, self._deployment.debloat)

    def _on_alarm(self) -> None:
        self._carry_out(self._state.handle_timer(self._loop.time()))

    def _heartbeat(self) -> None:
        state = self._state
        self._look_for_successor()
        self._tell_clock_set()
        stuck = self._stuck.slots()
        state.still_run(len(self._stuck))
        report = worker_report(
            self.pool,
            self.remote,
            self._deployment,
            self.loop_lag,
            abandoned=state.abandoned,
            stuck=stuck,
            jobs_loaded=self._programs.loaded,
            clock=self._loop.time(),
            cpu_seconds=time.process_time(),
            gc_seconds=self._garbage.seconds,
            memory_bytes=resident_bytes(),
        )
        self._send(
            Heartbeat(
                term=state.term,
                worker=state.worker,
                epoch=state.epoch,
                report=report.model_copy(update={"loop_lag_seconds": self._timers.take_latest()}),
                tasks=self._deployment.reports(),
                peers=self._peers.reports(),
                unlinked=state.unlinked(self._loop.time()),
            )
        )

    def _tell_clock_set(self) -> None:
        """The system clock was set: say so once there is somebody to hear it."""
        self._wall()
        for seconds in self._wall.take_steps() if self._control is not None else ():
            _log.warning("the system clock was set %s", set_by(seconds))
            self._send(ClockSet(term=self._state.term, seconds=abs(seconds), forward=seconds > 0))

    def _look_for_successor(self) -> None:
        """The coordinator may be stopped, and another have taken its place without that its link closed."""
        control = self._control
        if control is not None and (place := self._find()) is not None and place.term > self._state.term:
            control.close()
            self._lose_coordinator(f"one of term {place.term} has taken its place")

    def snapshot(self) -> WorkerSnapshot:
        """Everything that ``/metrics`` is made from. It may be asked for before the registration, which says
        where it is served."""
        return worker_snapshot(
            self.endpoint.identity,
            self.pool,
            self._deployed,
            slots=self.settings.slots,
            remote=self.remote,
            connections=len(self.endpoint.links),
            refused=self.refusals,
            loop_lag=self.loop_lag,
            abandoned=self._machine.abandoned if self._machine is not None else 0,
            suspicions=self._machine.suspicions if self._machine is not None else 0,
            gc_seconds=self._garbage.seconds,
            wall=self._wall(),
            one_way=self._peers.one_way_counts(),
        )


def _network_pool(settings: ClusterSettings) -> NetworkBufferPool:
    stride = settings.segment_bytes + limits.SEGMENT_HEADROOM_BYTES
    return NetworkBufferPool(settings.network_memory_bytes // stride, settings.segment_bytes)
