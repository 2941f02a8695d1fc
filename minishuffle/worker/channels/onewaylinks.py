"""The one-way connections of a worker, for jobs with ``flow_control = "tcp"``: see ``protocol/oneway.py``.

An *inlet* is the consuming end of one, an *outlet* the producing end. Either exists from the first request
on, before its connection is there, and belongs to the ordinary link over which it was requested: with that,
it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final, Protocol, TypeAlias

from minishuffle.counters import ConnectionCounters, OneWayCounts
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.protocol.oneway import OneWayReceiver, OneWaySender
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.frames import OneWay, PartitionRequest
from minishuffle.wire.handshake import Identity
from minishuffle.worker.channels.dialing import LINK_BACKOFF, PEER_SECONDS_MAX

__all__ = ["OneWayLinks"]

_log = logging.getLogger("minishuffle.worker")
CallAt: TypeAlias = Callable[[float, Callable[[], None]], object]
LOOK_SECONDS: Final = 0.005
"""Between two looks at a connection that something was sent over."""
RETRANSMITS_MAX: Final = 7
"""In a row, from about 0.2 s on: some 25 s."""
CLOSED_FROM: Final = 0.5
"""Share of that time from which TCP's window counts as closed."""


class SenderStages:
    """The stages of back-pressure that a connection has reached on its sender's side, in order: its
    ``window`` is closed, and then its ``transport`` is paused. Each listener gets each stage once."""

    def __init__(self) -> None:
        self._before_window: list[Callable[[str], None]] = []
        self._before_pause: list[Callable[[str], None]] = []
        self._looked_at = self._closed = 0.0
        """Time of the last look, and the seconds that the window had been closed then."""

    def listen(self, hit: Callable[[str], None]) -> None:
        """Have ``hit`` called with the name of each of the two."""
        self._before_window.append(hit)

    @property
    def awaited(self) -> bool:
        """Whether a listener has not been told of a stage yet."""
        return bool(self._before_window or self._before_pause)

    def look(self, now: float, closed: float, paused: bool) -> None:
        """``closed``: for how many seconds, in all, the window has been; ``paused``: the transport is."""
        if (seconds := now - self._looked_at) >= LOOK_SECONDS / 2:  # timers are not exact
            if self._before_window and closed - self._closed >= CLOSED_FROM * seconds:
                for hit in self._before_window:
                    hit("window")
                self._before_pause += self._before_window
                self._before_window.clear()
            self._looked_at, self._closed = now, closed
        if paused:
            for hit in self._before_pause:
                hit("transport")
            self._before_pause.clear()


class Inlet:
    """The consuming end of one connection: a ``ConsumerLink``.

    Args:
        pair: the ordinary link to the same worker.
        drained: called when it has no channel any more.
    """

    def __init__(
        self,
        purpose: OneWay,
        pair: DataLink,
        counters: ConnectionCounters,
        drained: Callable[[Inlet], None],
    ) -> None:
        self.purpose = purpose
        self.pair = pair
        self.connection = OneWayReceiver(pair.connection, purpose.number, counters)
        self.link: DataLink | None = None
        """None before it is connected."""
        self._drained = drained

    def connect(self, link: DataLink) -> None:
        """The connection is established."""
        self.link = link

    def disconnect(self) -> None:
        """It is gone."""
        self.link = None

    def flush_soon(self) -> None:
        self.pair.flush_soon()
        if self.link is not None:
            self.link.stepped()
        if not self.connection.channels:
            self._drained(self)

    def end(self, error: ShuffleError) -> None:
        """Nothing more comes."""
        if self.link is not None:
            self.link.abort(error)
        self.connection.lost(error)


class Outlet:
    """The producing end of one connection: a ``ProducerLink``.

    Args:
        pair: the ordinary link to the same worker.
        now, call_at: the loop's clock, in seconds, and its timers.
    """

    def __init__(
        self,
        purpose: OneWay,
        pair: DataLink,
        counters: ConnectionCounters,
        *,
        now: Callable[[], float],
        call_at: CallAt,
    ) -> None:
        self.purpose = purpose
        self.pair = pair
        self.connection = OneWaySender(pair.connection, counters, self.flush_soon)
        self.used = False
        """A request for it was granted; its connection may be there before that."""
        self.link: DataLink | None = None
        """None before it is connected."""
        self.stages = SenderStages()
        self._now, self._call_at = now, call_at
        self._looks = False
        """There will be another look."""

    def connect(self, link: DataLink) -> None:
        """The connection is established."""
        self.link = link
        link.on_written = self.written

    def disconnect(self) -> None:
        """It is gone, or is to go."""
        self.link = None

    def use(self) -> None:
        """A request for it is granted."""
        self.used = True

    @property
    def paused(self) -> bool:
        """Whether the socket is full, or not open yet."""
        return self.link is None or self.link.paused

    def written(self) -> None:
        """Data was passed to the socket, or the socket is full."""
        if self.stages.awaited and (self.paused or not self._looks):
            self._look()

    def _look(self) -> None:
        """Look at the connection, again and again until all was sent."""
        if self.link is None or not self.stages.awaited:
            return
        now, measured = self._now(), self.link.measured()
        self.stages.look(now, measured.window_closed, self.link.paused)
        if (measured.unsent or self.link.paused) and not self._looks:
            self._looks = True
            self._call_at(now + LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._looks = False
        self._look()

    def flush_soon(self) -> None:
        if self.link is not None:
            self.link.flush_soon()

    def end(self, error: ShuffleError) -> None:
        """Nothing more can be sent."""
        link, self.link = self.link, None
        if link is not None:
            link.abort(error)
        self.connection.lost(error)
        self.pair.flush_soon()


class DialsForPurpose(Protocol):
    """Connects to a worker for that purpose; raises ShuffleError."""

    def __call__(self, worker: int, epoch: int, purpose: OneWay) -> Coroutine[None, None, DataLink]: ...


class OneWayLinks:
    """The one-way connections of a worker, by peer and number.

    Args:
        pair: returns the ordinary link to a worker in an epoch; None if there is none.
        dials: whether this side dials the given worker.
        in_background: runs a coroutine as a background task of the loop.
        now, call_at: the loop's clock, in seconds, and its timers.
    """

    def __init__(
        self,
        counters: ConnectionCounters,
        pair: Callable[[int, int], DataLink | None],
        dials: Callable[[int], bool],
        dial: DialsForPurpose,
        in_background: Callable[[Coroutine[None, None, None], str], None],
        *,
        now: Callable[[], float],
        call_at: CallAt,
    ) -> None:
        self.inlets: dict[tuple[int, int], Inlet] = {}
        self.outlets: dict[tuple[int, int], Outlet] = {}
        self._open: dict[tuple[int, str, int], Inlet] = {}
        """By worker, job and edge: the inlet that the next request is for."""
        self._last_number = 0
        self._counters = counters
        self._pair = pair
        self._dials = dials
        self._dial = dial
        self._in_background = in_background
        self._now = now
        self._call_at = call_at

    # --- what channels read and write -------------------------------------------------------------

    def inlet(self, pair: DataLink, job: str, edge: int) -> Inlet:
        """The inlet that a channel of ``edge`` reads from."""
        worker = pair.peer.worker
        inlet = self._open.get((worker, job, edge))
        if inlet is None or inlet.pair is not pair:
            self._last_number += 1
            purpose = OneWay(job, edge, not self._dials(worker), self._last_number)
            inlet = Inlet(purpose, pair, self._counters, self._drained)
            self._open[worker, job, edge] = self.inlets[worker, self._last_number] = inlet
            self._connect(inlet)
        return inlet

    def outlet(self, pair: DataLink, request: PartitionRequest) -> Outlet:
        """The outlet that answers ``request``."""
        partition = request.partition
        outlet = self._outlet(pair, partition.job, partition.edge, request.one_way)
        outlet.use()
        return outlet

    def _outlet(self, pair: DataLink, job: str, edge: int, number: int) -> Outlet:
        key = (pair.peer.worker, number)
        outlet = self.outlets.get(key)
        if outlet is None:
            purpose = OneWay(job, edge, self._dials(key[0]), number)
            outlet = self.outlets[key] = Outlet(
                purpose, pair, self._counters, now=self._now, call_at=self._call_at
            )
            self._connect(outlet)
        return outlet

    def _drained(self, inlet: Inlet) -> None:
        """Its last channel has ended: the next one of that edge has another connection."""
        worker, purpose = inlet.pair.peer.worker, inlet.purpose
        if self._open.get((worker, purpose.job, purpose.edge)) is inlet:
            del self._open[worker, purpose.job, purpose.edge]
        if inlet.link is None:
            self.inlets.pop((worker, purpose.number), None)
        elif inlet.connection.failed or not inlet.connection.touched:
            inlet.end(PeerLost("the connection has no channel any more"))

    def released(self, pair: DataLink) -> None:
        """A consumer has closed a channel from this peer: close connections without channels."""
        for key, outlet in list(self.outlets.items()):
            sender = outlet.connection
            if outlet.pair is not pair or not outlet.used or sender.channels or sender.wants_to_send:
                continue
            if not pair.connection.producers.requested(key[1]):
                del self.outlets[key]
                if outlet.link is not None:
                    outlet.link.close()
                    outlet.disconnect()

    # --- connecting -------------------------------------------------------------------------------

    def _connect(self, end: Inlet | Outlet) -> None:
        worker = end.pair.peer.worker
        if self._dials(worker):
            give_up_at = self._now() + PEER_SECONDS_MAX
            self._in_background(self._try(end, 1, give_up_at), f"dial worker {worker} for {end.purpose}")

    async def _try(self, end: Inlet | Outlet, tries: int, give_up_at: float) -> None:
        """Dial, again and again until it is of no use."""
        peer, purpose = end.pair.peer, end.purpose
        try:
            await self._dial(peer.worker, peer.epoch, purpose)
        except ShuffleError as error:
            if not self._wanted(end):
                return
            again_at = self._now() + LINK_BACKOFF.seconds(tries)
            name = f"dial worker {peer.worker} for {purpose}"
            _log.warning("%s: %s", name, error)
            if again_at >= give_up_at:
                self._drop(end)
                end.end(error)
                return
            again = partial(self._try, end, tries + 1, give_up_at)
            self._call_at(again_at, lambda: self._in_background(again(), name))

    def _wanted(self, end: Inlet | Outlet) -> bool:
        key = (end.pair.peer.worker, end.purpose.number)
        return end is self.inlets.get(key) or end is self.outlets.get(key)

    def _drop(self, end: Inlet | Outlet) -> None:
        key = (end.pair.peer.worker, end.purpose.number)
        if isinstance(end, Inlet):
            self.inlets.pop(key, None)
            place = (key[0], end.purpose.job, end.purpose.edge)
            if self._open.get(place) is end:
                del self._open[place]
        else:
            self.outlets.pop(key, None)

    def _end(self, worker: int, purpose: OneWay, dialer: bool) -> Inlet | Outlet | None:
        """This side's end of the connection."""
        key = (worker, purpose.number)
        end = self.outlets.get(key) if purpose.produces is dialer else self.inlets.get(key)
        return end if end is None or end.purpose == purpose else None

    def refusal(self, peer: Identity, purpose: OneWay) -> str | None:
        """Why a proven peer that has dialed may not connect, or None."""
        pair = self._pair(peer.worker, peer.epoch)
        end = self._end(peer.worker, purpose, False)
        if pair is None or self._dials(peer.worker):
            return f"worker {peer.worker} has no ordinary connection that this one could belong to"
        if end is None and (purpose.produces or (peer.worker, purpose.number) in self.outlets):
            return f"nothing reads edge {purpose.edge} of {purpose.job} over connection {purpose.number}"
        if end is not None and end.link is not None:
            return f"connection {purpose.number} of edge {purpose.edge} of {purpose.job} is there already"
        return None

    def machine(self, peer: Identity, purpose: OneWay, dialer: bool) -> OneWayReceiver | OneWaySender | None:
        """The protocol machine for the connection after its handshake; None if it is no longer needed."""
        end, pair = self._end(peer.worker, purpose, dialer), self._pair(peer.worker, peer.epoch)
        if end is None and pair is not None and not (dialer or purpose.produces):
            end = self._outlet(pair, purpose.job, purpose.edge, purpose.number)  # its request is on the way
        return end.connection if end is not None and end.link is None else None

    def link_up(self, link: DataLink) -> None:
        """A one-way connection is established."""
        for end in self._ends():
            if end.connection is link.machine:
                end.connect(link)
                link.flush_soon()

    def link_down(self, link: DataLink) -> None:
        """A one-way connection is gone, and its machine knows."""
        for end in self._ends():
            if end.link is link:
                self._drop(end)
                end.disconnect()
                end.pair.flush_soon()

    # --- ends -------------------------------------------------------------------------------------

    def pair_down(self, pair: DataLink, error: ShuffleError) -> None:
        """The ordinary link is gone, and with it all that was requested over it."""
        self._end_all(lambda end: end.pair is pair, error)

    def forget(self, job: str) -> None:
        """The job has ended everywhere."""
        self._end_all(lambda end: end.purpose.job == job, PeerLost(f"job {job} has ended"))

    def _end_all(self, which: Callable[[Inlet | Outlet], bool], error: ShuffleError) -> None:
        for end in filter(which, self._ends()):
            self._drop(end)
            end.end(error)

    def _ends(self) -> list[Inlet | Outlet]:
        return [*self.inlets.values(), *self.outlets.values()]

    def check(self) -> None:
        """End connections over which nothing gets through, although the ordinary ones live, whose Pings find
        out in all other cases. The kernel would go on for a quarter of an hour."""
        for outlet in list(self.outlets.values()):
            if outlet.link is not None and outlet.link.measured().retransmits >= RETRANSMITS_MAX:
                outlet.link.abort(PeerLost("nothing is acknowledged on the one-way connection"))

    def counts(self) -> OneWayCounts:
        """The numbers of open connections, by state."""
        read = [inlet.connection for inlet in self.inlets.values() if inlet.link is not None]
        sent = [outlet.link for outlet in self.outlets.values() if outlet.link is not None]
        reading, paused = sum(each.reading for each in read), sum(link.paused for link in sent)
        return OneWayCounts(
            reading,
            len(read) - reading,
            sum(each.held_bytes for each in read),
            len(sent) - paused,
            paused,
            sum(link.measured().window_closed for link in sent),
        )
