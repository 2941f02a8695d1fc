"""The link between a registered worker and its coordinator, and the worker's behaviour while there is none.

Without a coordinator, tasks and data links go on. Reports are kept for the next coordinator; rows for clients
wait before them; sources wait for a peer instead of acknowledgements (``sources.witnesses``). A worker that
comes back sends everything that it has kept in one message, and gets its desired state in one: see
``wire.registration``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from minishuffle import limits
from minishuffle.backoff import Backoff
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.ids import Address
from minishuffle.transport.control import ControlLink, connect_control
from minishuffle.wire.control import encode_message
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    Advertised,
    ControlMessage,
    Heartbeat,
    LogLines,
    Shutdown,
    WitnessedPositions,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import Collected, Fact, SourcePositions, TaskStateChanged
from minishuffle.worker.registration import UnregisteredWorker, ask_registration
from minishuffle.worker.reports.attemptreports import AttemptReports, AwaitedFact
from minishuffle.worker.reports.workerreports import short_failure
from minishuffle.worker.state import WorkerState

__all__ = ["CoordinatorLink"]

RETURN_BACKOFF: Final = Backoff(0.1, 0.5)
"""Wait between two tries to reach a lost coordinator."""
_log = logging.getLogger("minishuffle.worker")


class CoordinatorLink:
    """The ``LinkOwner`` of a registered worker.

    Args:
        start: the process before its registration.
        request: the registration it has sent.
        home: where the coordinator is.
        handle: called with each message of the coordinator.
        heartbeat: makes one.
        lost: called when there is no coordinator any more.
        pump: called when the link takes rows and lines again.
        applied: called with facts for which tasks wait, once the coordinator has applied them.
        call_by: calls :meth:`flush` at a time of the loop's clock or earlier; None: not at all.
        unblocked: called with positions whose sources wait for the coordinator no longer.
        witnessed: gives the positions that other workers without a coordinator have sent.
        handed_on: called when a coordinator has these.
    """

    def __init__(
        self,
        start: UnregisteredWorker,
        request: Register,
        home: Address,
        state: WorkerState,
        *,
        handle: Callable[[ControlMessage], None],
        heartbeat: Callable[[], Heartbeat],
        lost: Callable[[], None],
        pump: Callable[[], None],
        applied: Callable[[AwaitedFact], None],
        call_by: Callable[[float | None], None],
        unblocked: Callable[[list[SourcePositions]], None],
        witnessed: Callable[[], list[WitnessedPositions]],
        handed_on: Callable[[list[WitnessedPositions]], None],
    ) -> None:
        self.reports = AttemptReports()
        self.request = request
        """The registration it sends again."""
        self._start = start
        self._home = home
        """Where the coordinator was found last."""
        self._state = state
        self._handle, self._heartbeat, self._lost = handle, heartbeat, lost
        self._pump, self._applied, self._call_by = pump, applied, call_by
        self._unblocked, self._witnessed, self._handed_on = unblocked, witnessed, handed_on
        self._loop = asyncio.get_running_loop()
        self._link: ControlLink | None = None
        """None while there is no coordinator."""
        self._return: asyncio.Task[None] | None = None
        """Looks for the coordinator while there is none."""
        self._said = 0
        """The number of the last report that it has come back with."""

    @property
    def connected(self) -> bool:
        """Whether there is a coordinator."""
        return self._link is not None

    @property
    def writable(self) -> bool:
        """Whether rows and lines may be sent."""
        return self._link is not None and self._link.writable and not self.reports.full

    # --- LinkOwner ---------------------------------------------------------------------------------

    def connect(self, link: ControlLink) -> None:
        """The coordinator at the other end has registered this worker for the first time."""
        self._link = link
        link.on_writable = self._pump
        self.beat()

    def on_message(self, link: ControlLink, message: ControlMessage) -> None:
        if link is self._link:
            self._handle(message)

    def on_closed(self, link: ControlLink, error: Exception | None) -> None:
        if link is self._link:
            self._lose(str(error) if error is not None else "it closed the connection")

    # --- without a coordinator ---------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """Look for it, or for the one that takes its place, for ``coordinator_timeout`` at most."""
        self._link = None
        if self._state.leaving:
            self.end("")
        if self._start.ended.done():
            return
        _log.warning(
            "the coordinator is gone (%s): tasks run on, and this worker ends if there is none within %g s",
            why,
            self._start.settings.coordinator_timeout,
        )
        self._unblock_sources(self.reports.last)
        self._lost()
        self._return = self._loop.create_task(self._look_for_it(), name="return to the coordinator")

    async def _look_for_it(self) -> None:
        seconds = self._start.settings.coordinator_timeout
        deadline = self._loop.time() + seconds
        tries = 0
        while True:
            tries += 1
            try:
                await self._try_to_return(max(0.1, deadline - self._loop.time()))
            except UsageError as error:
                self.end(f"the coordinator does not take this worker back: {error}")
            except ShuffleError as error:
                if self._loop.time() < deadline:
                    await asyncio.sleep(RETURN_BACKOFF.seconds(tries))
                    continue
                self.end(f"the coordinator is gone, and none was found within {seconds:g} s: {error}")
            return

    async def _try_to_return(self, seconds: float) -> None:
        """Register again, with all facts.

        Raises:
            UsageError: the coordinator refuses.
            ShuffleError: there is none, or one that other workers do not obey any more.
        """
        start, state, home = self._start, self._state, self._home
        if (place := start.find()) is not None:
            home = place.address
        identity = Identity(Role.WORKER, start.endpoint.identity.cluster, state.worker, state.epoch)
        timeout = min(seconds, limits.HANDSHAKE_SECONDS_MAX)
        link = await connect_control(home, identity, start.secret, timeout=timeout, tls=start.endpoint.tls)
        facts = self._facts()
        await ask_registration(link, facts, partial(self._go_on, link, facts.witnessed))
        self._home = home
        _log.warning("the coordinator at %s has taken this worker back, in term %d", home, state.term)

    def _facts(self) -> Register:
        """All that a coordinator may not know."""
        self.flush()
        state, reports = self._state, self.reports.first_kept(self._state.term)
        self._said = reports[-1].number if reports else 0
        facts = {
            "requested_worker": state.worker,
            "epoch": state.epoch,
            "term": state.term,
            "attempts": state.tasks.held(),
            "jobs": state.tasks.jobs(),
            "prepared": state.tasks.prepared_jobs(),
            "reports": reports,
            "witnessed": self._witnessed(),
            "heartbeat": self._heartbeat(),
        }
        return self.request.model_copy(update=facts)

    def _go_on(
        self, link: ControlLink, witnessed: list[WitnessedPositions], registered: Registered
    ) -> CoordinatorLink:
        """A coordinator takes this worker back. It gets the reports that have not come with the facts before
        others get their numbers; then follows what is desired."""
        self._state.taken_back(registered)
        self._link = link
        link.on_writable = self._pump
        self.acknowledged(registered.applied, files=False)
        for report in self.reports.kept(self._state.term, behind=self._said):
            link.send(report)
        for command in registered.desired:
            self._handle(command)
        self._pump()
        self._handed_on(witnessed)
        return self

    def look_for_successor(self) -> None:
        """The coordinator may be stopped, and another have taken its place without that its link closed."""
        link = self._link
        if link is not None and (place := self._start.find()) and place.term > self._state.term:
            link.close()
            self._lose(f"one of term {place.term} has taken its place")

    # --- messages and reports ----------------------------------------------------------------------

    def send(self, message: ControlMessage) -> None:
        """Send a message after all earlier reports; lost if there is no coordinator."""
        self.flush()
        if self._link is not None:
            self._link.send(message)

    def send_rows(self, message: Collected | LogLines) -> None:
        """At once: whether the link takes more is asked again after each."""
        if isinstance(message, LogLines):
            self.send(message)
        else:
            self.report(message)
            self.flush()

    def report(self, fact: Fact) -> None:
        """Report a fact, together with all other facts of this turn of the loop."""
        if self.reports.add(fact, self._loop.time()):
            self._loop.call_soon(self.flush)
        self._call_by(self.reports.next_deadline())

    def report_at_once(self, facts: list[SourcePositions]) -> None:
        """Report positions with all that is due or held."""
        for fact in facts:
            self.reports.add(fact, self._loop.time(), held=False)
        self.flush()

    def flush(self) -> None:
        """Send the reports that are due. Without a coordinator they are kept for the next one, which takes
        the worker back only if they can be sent."""
        while (report := self.reports.take(self._state.term, self._loop.time())) is not None:
            try:
                if self._link is not None:
                    self._link.send(report)
                else:
                    encode_message(report, 0)
            except Exception as error:
                self.reports.take_back(report)
                if len(report.facts) == 1:
                    self._report_shortly(report.facts[0], error)
                continue
            if self._link is None:
                self._unblock_sources(self.reports.last)

    def _report_shortly(self, fact: Fact, error: Exception) -> None:
        """A fact cannot be sent. Without a report of its end an attempt, and so its job, would never end."""
        if not isinstance(fact, TaskStateChanged) or not fact.ends or fact.is_short:
            raise error
        _log.error("the end of attempt %s cannot be reported", fact.attempt, exc_info=error)
        self.reports.add(short_failure(fact.attempt, fact.state, error), self._loop.time())

    def acknowledged(
        self, number: int, *, refused: bool = False, files: bool = True, journaled: bool = True
    ) -> None:
        """The coordinator has applied reports. The file that the last one names may be ``refused``."""
        if not journaled:
            for rows in self.reports.free_rows(number):
                self._applied(rows)
            self._unblock_sources(number)
            return
        for fact in self.reports.acknowledge(number, refused=refused, files=files):
            self._applied(fact)

    def unblock_late_sources(self) -> None:
        """To be called ACKNOWLEDGE_LOOKS times in each ``heartbeat_timeout``. The coordinator may be stopped,
        or has declared this worker lost by then, if the link is broken."""
        if late := self.reports.look():
            self._unblocked(late)

    def _unblock_sources(self, number: int) -> None:
        """Let sources continue that wait for the acknowledgement of reports up to ``number``."""
        if waiting := self.reports.unblock_sources(number):
            self._unblocked(waiting)

    def beat(self) -> None:
        """Send a heartbeat, if there is a coordinator."""
        if self._link is not None:
            self.send(self._heartbeat())

    def advertise(self, host: str) -> None:
        """Others reach this worker by that address; empty: it has none."""
        if host:
            self.request = self.request.model_copy(update={"advertise": host})
        self.send(Advertised(term=self._state.term, host=host))

    # --- the end -----------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """The process is to stop."""
        if not self._start.ended.done():
            self._start.ended.set_result(reason)

    async def finish(self) -> None:
        """Stop looking for a coordinator. A connected one gets the final message: without it a closed link
        looks as if this process had been killed."""
        if self._return is not None:
            self._return.cancel()
            await asyncio.gather(self._return, return_exceptions=True)
        if self._link is not None:
            self.send(Shutdown(term=self._state.term, reason="the worker is stopped"))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
