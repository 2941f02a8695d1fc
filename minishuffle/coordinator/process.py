"""The coordinator process: an event loop around the state machine.

It listens for workers and clients, passes their messages to :class:`CoordinatorState`, and carries out its
instructions. Its caller passes in servers, as for metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import platform
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Protocol

from minishuffle import limits
from minishuffle.clock import AnchoredClock
from minishuffle.config import (
    ClusterSettings,
    CoordinatorPlace,
    TlsFiles,
    forget_coordinator,
    read_coordinator,
    write_coordinator,
)
from minishuffle.coordinator.clients.status import CoordinatorFacts
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
)
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.savepoints import FolderWork
from minishuffle.coordinator.journal.codec import OtherFormat, require_format
from minishuffle.coordinator.journal.journalrecords import recalled_clock
from minishuffle.coordinator.journal.store import CoordinatorJournal, JournalLost
from minishuffle.coordinator.snapshotfolders import SnapshotFolders
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.coordinator.workers import Worker
from minishuffle.counters import CoordinatorSnapshot
from minishuffle.errors import PeerLost, ResourceExhausted, ShuffleError, error_from_code
from minishuffle.ids import Address, Changes, RecordKey
from minishuffle.snapshots.storage import place_for_all
from minishuffle.transport.addresses import cannot_listen
from minishuffle.transport.admission import RefusalLog
from minishuffle.transport.control import ControlLink, ControlServer
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.hostlook import host_answers
from minishuffle.transport.interfaces import host_identity
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import ControlMessage, DeployTasks, HostLook
from minishuffle.wire.registration import Register
from minishuffle.wire.requests import Failure

__all__ = ["Coordinator", "run_coordinator"]

STOP_SECONDS_MAX: Final = 10.0
"""Seconds beyond ``task_cancel_timeout`` that an orderly stop may take."""
HAND_OVER_SECONDS_MAX: Final = 20.0
"""Seconds that the last write for the next coordinator may take; mostly rows for clients."""
OWN_LINK: Final = 0
"""The link number of requests of this process itself."""
TERM_SECONDS: Final = 1.0
"""Seconds between two checks whether another coordinator has taken over."""
_log = logging.getLogger("minishuffle.coordinator")


class _Server(Protocol):
    @property
    def port(self) -> int: ...

    async def close(self) -> None: ...


class Storage(Protocol):
    """Storage of records that outlive this process."""

    @property
    def term(self) -> int: ...

    @property
    def records(self) -> Mapping[RecordKey, bytes]: ...

    def write(self, changes: Changes, done: Callable[[Exception | None], None], *, whole: bool) -> None:
        """Write without waiting for the disk. ``done`` is called on the loop with the error, if any. See
        :meth:`~minishuffle.coordinator.journal.store.CoordinatorJournal.write`."""


class JournalThread:
    """A journal with a thread of its own, which writes in order and does not block the loop."""

    def __init__(self, journal: CoordinatorJournal) -> None:
        self.term = journal.term
        self.records = journal.records
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._works = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="journal")
        self._thread.start()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()

    def write(self, changes: Changes, done: Callable[[Exception | None], None], *, whole: bool) -> None:
        """See :class:`Storage`."""

        def work() -> None:
            error: Exception | None = None
            try:
                self._journal.write(changes, whole=whole)
            except Exception as raised:  # whatever the error, the loop needs it
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for it.
                self._loop.call_soon_threadsafe(done, error)

        self._works.put(work)

    def close(self) -> None:
        """Wait for the last write; its ``done`` may not be called."""
        self._works.put(None)
        self._thread.join()


class _Silent(asyncio.Protocol):
    """A connection that carries no data, and resolves ``closed`` when its process ends."""

    def __init__(self, closed: asyncio.Future[None]) -> None:
        self._closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


class Coordinator:
    """A coordinator process, for one term; created on the loop on which it runs."""

    def __init__(
        self,
        settings: ClusterSettings,
        cluster: str,
        journal: Storage,
        state_dir: Path | None = None,
        *,
        workers_anew: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.stopped: asyncio.Future[None] = self._loop.create_future()
        """Resolved when the cluster is shut down."""
        now, identity = self._loop.time(), host_identity()
        offset = recalled_clock(journal.records, identity)
        self._clock = AnchoredClock(time.time() if offset is None else now + offset, now)
        facts = CoordinatorFacts(
            cluster=cluster,
            version=metadata.version("minishuffle"),
            python=".".join(platform.python_version_tuple()[:2]),
            pid=os.getpid(),
            term=journal.term,
            wall_offset=self._clock.read(time.time(), now) - now,
            identity=identity,
            workers_anew=workers_anew,
            snapshot_dir=place_for_all(settings.snapshot_dir) or _snapshots_in(state_dir),
        )
        self._folders = SnapshotFolders()
        self._state = CoordinatorState(settings, facts, journal.records, random.random, now)
        self._journal = journal
        self._cluster = cluster
        self._server = ControlServer()
        self._links: dict[int, ControlLink] = {}
        self._links_seen = OWN_LINK
        self._replies: dict[int, asyncio.Future[ControlMessage]] = {}
        """Open requests of this process itself."""
        self._asked = 0
        self._messages: deque[Instruction] = deque()
        """Instructions that may be carried out."""
        self._steps: deque[CoordinatorStep] = deque()
        """Steps to carry out after :attr:`_messages`, and after the journal write under way."""
        self._leaving = False
        """This coordinator hands over: incoming messages are ignored."""
        self._is_writing = False
        """A journal write is under way; :attr:`_steps` wait for it unless the last write failed."""
        self._has_written = False
        """There was a journal write since the last :meth:`_look_at_term`."""
        self._unwritten: Changes | None = None
        """Records whose write failed, or waits for the next try; None while writes succeed."""
        self._submitted: list[Changes] = []
        """Records of submissions that wait for the next try to write."""
        self._whole = False
        """The next write replaces the whole journal."""
        self._watches: set[asyncio.Task[None]] = set()
        """Background tasks, for processes with a closed control link and for silent hosts."""
        self._watch_seconds = settings.heartbeat_timeout
        self._look: asyncio.TimerHandle | None = None
        self._refusals = RefusalLog(_log.warning, self._loop.call_at)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._carry_out(self._state.handle_timer(self._loop.time()))

    async def listen(self, host: str, port: int, secret: bytes, tls: Credentials | None = None) -> int:
        """Accept workers and clients, with ``tls`` only over TLS. Returns the port.

        Raises:
            UsageError: the port is taken, or the host is not one of this machine's.
        """
        identity = Identity(Role.COORDINATOR, self._cluster, 0, 0)
        self._folders = SnapshotFolders(secret)
        await self._server.start(
            host,
            port,
            identity,
            secret,
            on_link=self._on_link,
            refused=self._on_refused,
            authorize=_authorize,
            tls=tls,
        )
        self._look_at_term()
        return self._server.port

    def web_started(self, port: int) -> None:
        """Set the port of the metrics server, for ``cluster status``."""
        self._state.web_started(port)

    async def ask(self, request: ControlMessage) -> ControlMessage:
        """The reply that a client would get to a request.

        Raises:
            ShuffleError: the request cannot be fulfilled.
        """
        if self._leaving:
            raise PeerLost("this coordinator ends: ask the next one")
        self._asked += 1
        number, reply = self._asked, self._loop.create_future()
        self._replies[number] = reply
        try:
            self._carry_out(self._state.client_request(OWN_LINK, number, request, self._loop.time()))
            message: ControlMessage = await reply
        finally:
            del self._replies[number]
        if isinstance(message, Failure):
            raise error_from_code(message.code, message.text)
        return message

    @property
    def clock(self) -> float:
        """The clock of events: seconds since 1970, without jumps."""
        now = self._loop.time()
        return self._clock.read(time.time(), now)

    @property
    def journal_writable(self) -> bool:
        """Whether the last journal write succeeded."""
        return not self._state.write_ahead.problem

    def look(self) -> tuple[list[Job], list[Worker]]:
        """Jobs that have not ended, and all workers; valid until the caller awaits."""
        return self._state.look()

    def snapshot(self) -> CoordinatorSnapshot:
        """The values of ``/metrics``."""
        return self._state.snapshot(self._loop.time(), self._refusals.counts)

    def stop(self) -> None:
        """Begin to shut down the cluster; :attr:`stopped` resolves when it is done."""
        self._carry_out(self._state.stop(self._loop.time()))

    async def hand_over(self) -> bool:
        """End while jobs and workers run on: the next coordinator continues with the full state.

        Returns False, and does nothing, if the cluster is being shut down.

        Raises:
            ResourceExhausted: the journal cannot be written; the next coordinator lacks the unwritten
                records.
            Superseded: another coordinator has begun a later term.
        """
        if self._state.stopping:
            return False
        self._carry_out(self._state.hand_over(self._loop.time()))
        self._leaving = True
        for watch in self._watches:
            watch.cancel()
        self._write_again()
        self._go_on()
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS_MAX):
                await self.stopped
            problem = "" if self._unwritten is None else self._state.write_ahead.problem
        except TimeoutError:
            problem = f"the journal does not have all of it after {HAND_OVER_SECONDS_MAX:g} s"
        if problem:
            raise ResourceExhausted(
                f"jobs and workers run on, and the next coordinator does not know all about them: {problem}"
            )
        jobs, workers = self.look()
        there = sum(each.state in ("alive", "awaited") for each in workers)
        _log.warning(
            "handed over: workers (%d) and jobs (%d) run on, and wait for the next coordinator",
            there,
            len(jobs),
        )
        return True

    async def close(self) -> None:
        """Close every link, after sending its queued messages."""
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._server.close()

    # --- links -----------------------------------------------------------------------------------

    def _on_link(self, link: ControlLink) -> None:
        self._links_seen += 1
        number = self._links_seen
        self._links[number] = link
        state, loop = self._state, self._loop

        def on_message(message: ControlMessage, request: int) -> None:
            if self._leaving:
                return  # reports are repeated to the next coordinator, and clients ask it
            if isinstance(message, Register):
                message = message.model_copy(update={"seen": link.remote_host})
            if link.peer.role == Role.WORKER:
                self._carry_out(state.worker_message(number, message, loop.time()))
            else:
                self._carry_out(state.client_request(number, request, message, loop.time()))

        def on_closed(error: Exception | None) -> None:
            del self._links[number]
            if self._leaving:
                return
            why = f"its control link closed ({error})" if error is not None else "its control link closed"
            for_cause = error is not None and not isinstance(error, PeerLost)
            self._carry_out(state.link_closed(number, loop.time(), why, for_cause=for_cause))

        link.start(on_message, on_closed)

    async def _watch(self, watch: WatchProcess) -> None:
        """Connect to the port of a process whose control link closed, for as long as the decision may take.

        If the process has ended, its kernel refuses connections at once, or resets them: it is gone. But a
        firewall may reset a connection too, and a process that lives ends a silent connection after
        HANDSHAKE_SECONDS_MAX. So a second connection is made, and the process is gone if that connection ends
        at once as well: docker-proxy, for one, accepts for a process that has ended. If the host is gone,
        there is no answer, and nothing is known. If the host name has several addresses and all refuse, the
        process counts as unknown too.
        """
        address, transport, again, gone = watch.address, None, False, False
        try:
            async with asyncio.timeout(self._watch_seconds):
                while not gone:
                    closed: asyncio.Future[None] = self._loop.create_future()
                    transport, _ = await self._loop.create_connection(
                        partial(_Silent, closed), address.host, address.data_port
                    )
                    since = self._loop.time()
                    self._carry_out(self._state.process_found(watch.link, since))
                    await closed
                    gone = again and self._loop.time() - since < limits.LINK_GRACE_SECONDS
                    again = True
        except ConnectionError:
            gone = True
        except OSError as error:
            if transport is None:  # else its process lives
                why = str(error) or f"it does not answer in {self._watch_seconds:g} s"
                _log.warning("whether worker %d is there is not known: %s", address.worker, why)
        finally:
            if transport is not None:
                transport.abort()
        if gone:
            self._carry_out(self._state.process_gone(watch.link, self._loop.time()))

    async def _look_for_host(self, look: HostLook) -> None:
        answer = await host_answers(look.addresses, look.times, look.seconds)
        self._carry_out(self._state.host_looked(look.ticket, answer, self._loop.time()))

    async def _work_in_folder(self, work: FolderWork) -> None:
        found = await self._folders.work_in(work)
        if work.work != "discard":
            self._carry_out(self._state.folder_ready(work, found, self._loop.time()))
        elif isinstance(found, ShuffleError):
            _log.warning("what a savepoint has left is not removed: %s", found)

    async def _read_snapshot(self, read: ReadSnapshot) -> None:
        found = await self._folders.manifest_for(read.message)
        self._carry_out(self._state.snapshot_read(read.ticket, found, self._loop.time()))

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> None:
        watch = self._loop.create_task(work, name=name)
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _on_refused(self, reason: str, text: str, remote: str) -> None:
        self._refusals.refused(reason, text, remote, self._loop.time())

    # --- steps -----------------------------------------------------------------------------------

    def _carry_out(self, step: CoordinatorStep) -> None:
        """Carry out the duties of a step: see :class:`CoordinatorStep`."""
        self._take(step)
        self._go_on()

    def _take(self, step: CoordinatorStep) -> None:
        """Queue a step after the earlier ones."""
        self._steps.append(step)
        self._set_timer(step.timers)

    def _go_on(self) -> None:
        """Carry out all that does not wait for the journal; end when another coordinator takes over."""
        while True:
            while self._messages:
                self._carry_out_one(self._messages.popleft())
            if not self._steps or (self._is_writing and self._unwritten is None):
                break
            step = self._steps.popleft()
            if self._unwritten is not None:
                self._keep(step)
            elif step.records or step.submissions:
                self._write(step)
            else:
                self._messages.extend(step.messages)
        if self._leaving and not self._is_writing:
            self._carry_out_one(Stopped())

    def _carry_out_one(self, instruction: Instruction) -> None:
        match instruction:
            case SendToWorker(worker, number, message):
                self._send_to_worker(worker, number, message)
            case Reply(number, request, message):
                self._reply(number, request, message)
            case CloseLink(number, why, refusal):
                self._close_link(number, why, refusal)
            case WatchProcess(address=address):
                self._in_background(self._watch(instruction), f"watch {address.worker}")
            case LookForHost(look):
                self._in_background(self._look_for_host(look), "look for a host")
            case WorkInFolder(work):
                self._in_background(self._work_in_folder(work), f"{work.work} {work.job} {work.savepoint}")
            case ReadSnapshot():
                self._in_background(self._read_snapshot(instruction), "read a snapshot")
            case Stopped():
                if not self.stopped.done():
                    self.stopped.set_result(None)

    # --- journal ---------------------------------------------------------------------------------

    def _write(self, first: CoordinatorStep) -> None:
        """Write the records of a step, together with the records of all steps queued after it: one write
        takes long enough."""
        together = [first, *self._steps]
        self._steps.clear()
        records = Changes()
        for each in together:
            records.update(each.records)
        submissions = [changes for each in together for changes in each.submissions]
        messages = [each for step in together for each in step.messages]
        self._begin_write(CoordinatorStep(records, submissions, messages))

    def _keep(self, step: CoordinatorStep) -> None:
        """Keep a step's records while the journal cannot be written; its messages do not wait."""
        assert self._unwritten is not None
        self._unwritten.update(step.records)
        self._messages.extend(step.messages)
        if step.submissions:
            self._submitted.extend(step.submissions)
            self._write_again()

    def _write_again(self) -> None:
        """Try to write the kept records; meanwhile the loop goes on."""
        if self._unwritten is not None and not self._is_writing:
            records, self._unwritten = self._unwritten, Changes()
            submissions, self._submitted = self._submitted, []
            self._begin_write(CoordinatorStep(records, submissions))

    def _begin_write(self, step: CoordinatorStep) -> None:
        together = step.records.copy()
        for each in step.submissions:
            together.update(each)
        self._is_writing = self._has_written = True
        self._journal.write(together, partial(self._written, step), whole=self._whole)

    def _written(self, step: CoordinatorStep, error: Exception | None) -> None:
        """A write has ended. Without an error, the step's messages may be sent; with one, only messages that
        need not wait."""
        self._is_writing = False
        newer, now = self._unwritten, self._loop.time()
        if error is not None and not isinstance(error, ResourceExhausted):
            self._steps.clear()
            if not self.stopped.done():
                self.stopped.set_exception(error)
            return
        self._unwritten = None if error is None else step.records | (newer or {})
        self._steps.appendleft(CoordinatorStep(messages=step.messages))
        if error is not None:
            if newer is None:
                _log.error("submissions are refused, and restarts wait, until it can be written: %s", error)
            self._steps = deque(self._state.write_ahead.failed(self._steps, str(error)))
            if isinstance(error, JournalLost):
                self._unwritten, self._whole = self._state.everything(now), True
                self._steps = deque(replace(each, records=Changes()) for each in self._steps)
        else:
            self._whole = False
            if newer is not None:
                _log.warning("the journal is written again, with everything that happened meanwhile")
                self._steps.append(CoordinatorStep(newer, self._submitted, self._state.write_ahead.written()))
                self._submitted = []
        for _ in step.submissions:
            self._take(self._state.journaled(error, now))
        if isinstance(error, JournalLost):
            self._write_again()
        self._go_on()

    def _look_at_term(self) -> None:
        """Check periodically, with a write if there was none, whether another coordinator has taken over;
        also tries again to write kept records."""
        if not self.stopped.done():
            now = self._loop.time()
            # When heartbeats of this machine arrive, to wake only once. It may come a little early.
            due = math.ceil(now / TERM_SECONDS + 0.1) * TERM_SECONDS
            self._look = self._loop.call_at(due, self._look_at_term)
            self._carry_out(self._state.anchor(self._clock.read(time.time(), now) - now))
            self._write_again()
            if not (self._is_writing or self._has_written):
                self._begin_write(CoordinatorStep())
            self._has_written = False

    def _close_link(self, number: int, why: str, refusal: str) -> None:
        link = self._links.get(number)
        if link is None:
            return
        if refusal:
            self._on_refused(refusal, why, link.remote)
        else:
            _log.warning("link to %s at %s closed: %s", link.peer, link.remote, why)
        link.close()

    def _send_to_worker(self, worker: int, number: int, message: ControlMessage) -> None:
        link = self._links.get(number)
        if link is None:
            return
        try:
            link.send(message)
        except ResourceExhausted as error:
            if not isinstance(message, DeployTasks):
                raise
            # After the queued steps: CancelTasks must not overtake DeployTasks.
            self._take(self._state.undeployable(worker, message, error, self._loop.time()))

    def _reply(self, number: int, request: int, message: ControlMessage) -> None:
        if number == OWN_LINK and (asked := self._replies.get(request)) is not None and not asked.done():
            asked.set_result(message)
        link = self._links.get(number)
        if link is None:
            return
        try:
            link.send(message, request)
        except ResourceExhausted as error:
            link.send(Failure(code=error.code, text=str(error)), request)

    # --- time ------------------------------------------------------------------------------------

    def _set_timer(self, deadline: float | None) -> None:
        """Call the machine at this time."""
        if deadline is None or self._leaving or self.stopped.done():
            return
        if self._timer is not None:
            if self._timer_due == deadline:
                return
            self._timer.cancel()
        self._timer, self._timer_due = self._loop.call_at(deadline, self._on_timer), deadline

    def _on_timer(self) -> None:
        self._timer = None
        if not self._leaving:
            self._carry_out(self._state.handle_timer(self._loop.time()))


def _snapshots_in(state_dir: Path | None) -> str:
    """Where savepoints are if no setting says so; empty: nowhere."""
    return "" if state_dir is None else str(state_dir.absolute() / "snapshots")


def _authorize(peer: Identity) -> str | None:
    if peer.role in (Role.WORKER, Role.CLIENT):
        return None
    return "only workers and clients connect to a coordinator"


async def _require_port(host: str, port: int) -> None:
    """Raises UsageError: the port is taken, or the host is not one of this machine's."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    server.close()
    await server.wait_closed()


async def _serve(
    coordinator: Coordinator, stop: asyncio.Event, leave: asyncio.Event, stop_seconds: float
) -> bool:
    """Wait for the end. True: the whole cluster has ended; False: the next coordinator takes over."""
    waiting = [asyncio.create_task(each.wait()) for each in (stop, leave)]
    try:
        ends: list[asyncio.Future[Any]] = [*waiting, coordinator.stopped]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
    if coordinator.stopped.done():
        coordinator.stopped.result()
    elif leave.is_set() and not stop.is_set() and await coordinator.hand_over():
        return False
    coordinator.stop()
    async with asyncio.timeout(stop_seconds):
        await coordinator.stopped
    return True


def _place(
    address: Address, term: int, tls: Credentials | None, settings: ClusterSettings
) -> CoordinatorPlace:
    """Where it is, for other processes of this machine: all paths are absolute."""
    files = tls.files if tls is not None else None
    found_by = None if files is None else TlsFiles(*map(os.path.abspath, files))
    return CoordinatorPlace(address, term, tls=found_by, snapshot_dir=place_for_all(settings.snapshot_dir))


async def run_coordinator(
    settings: ClusterSettings,
    *,
    cluster: str,
    host: str,
    port: int,
    state_dir: Path,
    secret: bytes,
    web: Callable[[Coordinator, int], Awaitable[_Server]],
    web_port: int,
    ready: Callable[[dict[str, Any]], None],
    stop: asyncio.Event,
    leave: asyncio.Event,
    tls: Credentials | None = None,
    workers_anew: bool = False,
) -> None:
    """Run a coordinator until ``stop`` or ``leave`` is set, or a client stops the cluster.

    ``stop`` ends the cluster in order: running jobs are cancelled, workers shut down and links closed, each
    within its limit. ``leave`` ends only this process: the next coordinator goes on with jobs and workers.

    Args:
        state_dir: exists; the journal is kept there.
        web: starts the HTTP server (coordinator, port).
        ready: called with both ports and the term once it listens.
        tls: all connections of workers and clients use TLS.
        workers_anew: all workers are restarted as well.

    Raises:
        UsageError: a port is taken, the host is not one of this machine's, or the certificate is not for it.
        ShuffleError: the journal cannot be opened or read, or at the end lacks records.
        Superseded: another coordinator has begun a later term.
    """
    if tls is not None:
        tls.check_host(host)
    await _require_port(host, port)  # before the term of a running coordinator ends
    with CoordinatorJournal(state_dir) as journal, contextlib.closing(JournalThread(journal)) as storage:
        try:
            require_format(journal.records)
            coordinator = Coordinator(settings, cluster, storage, state_dir, workers_anew=workers_anew)
        except OtherFormat as error:
            raise journal.of_another_release(str(error)) from error
        except ShuffleError as error:
            raise journal.damaged(str(error)) from error
        server: _Server | None = None
        try:
            listening = await coordinator.listen(host, port, secret, tls)
            server = await web(coordinator, web_port)
            coordinator.web_started(server.port)
            place = _place(Address(host, listening), journal.term, tls, settings)
            write_coordinator(state_dir, place)
            ready({"port": listening, "web_port": server.port, "term": journal.term})
            if await _serve(coordinator, stop, leave, settings.task_cancel_timeout + STOP_SECONDS_MAX):
                forget_coordinator(state_dir, journal.term)
            elif read_coordinator(state_dir) == place:  # else another has taken its place
                write_coordinator(state_dir, place._replace(handed_over=True))
        finally:
            await coordinator.close()
            if server is not None:
                await server.close()
