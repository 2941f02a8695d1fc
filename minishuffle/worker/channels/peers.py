"""A worker's data connections to its peers: authorization of peers, and the effects of instructions on links.

A peer's epoch is the one that the coordinator announced, in a deployment or a request to dial. A link of a
later epoch is *early*: it is established and kept, and its requests are held back, until the coordinator has
announced this epoch; then it replaces the previous link. So a process that claims a false epoch has no effect
on the pair, and a worker that dials before its epoch is announced loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field

from minishuffle import limits
from minishuffle.errors import PeerLost, PeerSuspected, RemoteProtocolError, ShuffleError
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.partition import PartitionView, ResultPartition, serve
from minishuffle.ids import Address
from minishuffle.protocol.connection import (
    ConnectionEvent,
    MessageReceived,
    PartitionCancelled,
    PartitionReleased,
    PartitionRequested,
    PeerSilent,
)
from minishuffle.transport.admission import RefusalLog
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Message, OneWay, PartitionRequest, Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import PeerReport, WorkerAddress
from minishuffle.worker.channels.onewaylinks import OneWayLinks
from minishuffle.worker.external.clients import ExternalClients
from minishuffle.worker.instructions import Attach, CloseLinks, Refuse, RequestPartition, WorkerStep
from minishuffle.worker.sources.witnesses import Witnesses
from minishuffle.worker.state import WorkerState

__all__ = ["PeerLinks"]

_log = logging.getLogger("minishuffle.worker")


@dataclass(slots=True)
class _EarlyLink:
    """A link whose epoch the coordinator has not announced yet, and what it asked for."""

    link: DataLink
    requests: dict[int, PartitionRequest] = field(default_factory=dict)
    """By channel."""


class PeerLinks:
    """The ``EndpointHandler`` of a registered worker, with at most one link to each peer.

    Args:
        endpoint: the one served from now on.
        external: the clients of this worker.
        refusals: of the endpoint.
        carry_out: carries out the steps of the worker's machine.
        now: the loop's clock, in seconds.
        call_at: calls a function at a time of this clock.
        in_background: runs a coroutine as a background task of the loop.
        witnesses: gives who takes messages of peers.
    """

    def __init__(
        self,
        endpoint: DataEndpoint,
        identity: Identity,
        state: WorkerState,
        external: ExternalClients,
        *,
        refusals: RefusalLog,
        carry_out: Callable[[WorkerStep], None],
        now: Callable[[], float],
        call_at: Callable[[float, Callable[[], None]], object],
        in_background: Callable[[Coroutine[None, None, None], str], None],
        witnesses: Callable[[], Witnesses],
    ) -> None:
        self.external = external
        self._endpoint = endpoint
        self._state = state
        self._refusals = refusals
        self._carry_out = carry_out
        self._now = now
        self._witnesses = witnesses
        self._links: dict[int, DataLink] = {}
        """Links by worker, of the epoch that the coordinator announced."""
        self._early: dict[tuple[int, int], _EarlyLink] = {}
        """By worker and epoch."""
        self.one_way = OneWayLinks(
            endpoint.counters,
            self._pair,
            lambda worker: state.worker < worker,
            self._dial_one_way,
            in_background,
            now=now,
            call_at=call_at,
        )
        endpoint.serve(identity, self, self.one_way.machine)

    # --- EndpointHandler -------------------------------------------------------------------------

    def authorize(self, peer: Identity) -> str | None:
        if peer.role == Role.CLIENT:
            return self.external.refusal(peer.worker, peer.epoch)
        if peer.role == Role.PROBE:
            return None
        if peer.role != Role.WORKER:
            return "only workers connect to a worker's data port, and programs that are expected"
        refusal = self._state.channels.peers.refusal(peer.worker, peer.epoch)
        if refusal is not None:
            return refusal
        if peer.one_way is not None:
            return self.one_way.refusal(peer, peer.one_way)
        link = self._known(peer)
        if link is not None and link.peer.epoch == peer.epoch and link.peer.counter >= peer.counter:
            return f"worker {peer.worker} is connected already"
        return None

    def _known(self, peer: Identity) -> DataLink | None:
        """The link to the peer's worker in its epoch, or the established link of an earlier epoch."""
        early = self._early.get((peer.worker, peer.epoch))
        return early.link if early is not None else self._links.get(peer.worker)

    def _pair(self, worker: int, epoch: int) -> DataLink | None:
        """The ordinary link to that worker in that epoch."""
        early, link = self._early.get((worker, epoch)), self._links.get(worker)
        if early is not None:
            return early.link
        return link if link is not None and link.peer.epoch == epoch else None

    def refused(self, reason: str, text: str, remote: str) -> None:
        self._refusals.refused(reason, text, remote, self._now())

    def link_up(self, link: DataLink) -> None:
        if link.peer.role == Role.CLIENT:
            self.external.link_up(link)
            return
        peer = link.peer
        if link.one_way is not None:
            self.one_way.link_up(link)
            return
        if peer.role == Role.PROBE:
            return  # It has seen what it wanted, and closes the connection.
        refusal = self._state.channels.peers.refusal(peer.worker, peer.epoch)
        if refusal is not None:  # the coordinator said so while this side dialed
            link.abort(PeerLost(refusal))
        elif peer.epoch == self._state.channels.peers.announced(peer.worker):
            self._adopt(link)
        else:
            self._wait_for_word(link)

    def _adopt(self, link: DataLink) -> None:
        """The link becomes the pair's one."""
        worker = link.peer.worker
        old = self._links.get(worker)
        self._links[worker] = link
        if old is not None:
            self._witnesses().peer_lost(worker)
            old.abort(PeerLost(f"worker {worker} connected anew"))
        self._carry_out(self._state.peer_up(worker, self._now()))

    def _wait_for_word(self, link: DataLink) -> None:
        key = (link.peer.worker, link.peer.epoch)
        old = self._early.pop(key, None)
        self._early[key] = _EarlyLink(link)
        if old is not None:
            old.link.abort(PeerLost(f"worker {link.peer.worker} connected anew"))
        elif len(self._early) > limits.EARLY_LINKS_MAX:
            oldest = self._early.pop(next(iter(self._early)))
            oldest.link.abort(
                PeerLost(
                    f"more than {limits.EARLY_LINKS_MAX} connections wait for the coordinator to announce "
                    "their worker"
                )
            )

    def review(self) -> None:
        """The coordinator has spoken: adopt or drop early links, and drop those of epochs that are past."""
        for key in list(self._early):
            announced = self._state.channels.peers.announced(key[0])
            if key[1] > announced or key not in self._early:
                continue
            early = self._early.pop(key)
            if key[1] < announced:
                early.link.abort(PeerLost(f"worker {key[0]} has epoch {announced} by now"))
                continue
            self._adopt(early.link)
            for request in early.requests.values():
                self._requested(early.link, request)
        for worker, link in list(self._links.items()):
            announced = self._state.channels.peers.announced(worker)
            if link.peer.epoch < announced:
                link.abort(PeerLost(f"worker {worker} has epoch {announced} by now"))

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        for event in events:
            if isinstance(event, PartitionRequested) and link.peer.role == Role.CLIENT:
                self.external.readers.requested(link, event.request)
            elif isinstance(event, PartitionRequested):
                self._requested(link, event.request)
            elif isinstance(event, PartitionCancelled):
                self._cancelled(link, event.channel)
                self._released(link)
            elif isinstance(event, PartitionReleased):
                self._released(link)
            elif isinstance(event, PeerSilent):
                self._silent(link, event.seconds)
            elif isinstance(event, MessageReceived):
                self._message(link, event.message)

    def linked(self) -> Collection[int]:
        """The peers with which there is a link."""
        return self._links.keys()

    def send(self, worker: int, message: Message) -> None:
        """A message to a peer, if there is a link."""
        if (link := self._links.get(worker)) is not None:
            _send(link, message)

    def _message(self, link: DataLink, message: Message) -> None:
        """Handle a peer's message. An early link is served too: its epoch cannot be announced while there is
        no coordinator."""
        if self._links.get(link.peer.worker) is not link and self._early_of(link) is None:
            link.abort(RemoteProtocolError(f"{link.peer} sent a message, which no peer of its kind may"))
            return
        try:
            answer = self._witnesses().received(link.peer.worker, message)
        except RemoteProtocolError as error:
            link.abort(error)
            return
        if answer is not None:
            _send(link, answer)

    def _released(self, link: DataLink) -> None:
        if link.peer.role == Role.WORKER:
            self.one_way.released(link)

    def _silent(self, link: DataLink, seconds: float) -> None:
        """A peer is silent: close the link, so that segments it still uses here are freed, unless the state
        machine tolerates it. Called again after each interval of silence."""
        if link.peer.role == Role.WORKER:
            if self._state.tolerates_silence(seconds):
                return
            error: PeerLost = PeerSuspected(
                f"worker {link.peer.worker} has answered no Ping for {seconds:.2f} s"
            )
            _log.warning("%s: it is suspected", error)
        else:
            error = PeerLost(f"{link.peer} was silent for {seconds:.1f} s")
        link.abort(error)

    def _requested(self, link: DataLink, request: PartitionRequest) -> None:
        worker = link.peer.worker
        if self._links.get(worker) is link:
            self._carry_out(self._state.partition_requested(worker, request, self._now()))
            return
        early = self._early_of(link)
        if early is None:
            return
        early.requests[request.channel] = request
        if len(early.requests) > limits.EARLY_REQUESTS_MAX:
            link.abort(
                PeerLost(
                    f"{link.peer} asked for more than {limits.EARLY_REQUESTS_MAX} partitions before the "
                    "coordinator announced it"
                )
            )

    def _cancelled(self, link: DataLink, channel: int) -> None:
        if self._links.get(link.peer.worker) is link:
            self._carry_out(self._state.partition_cancelled(link.peer.worker, channel))
        elif (early := self._early_of(link)) is not None:
            early.requests.pop(channel, None)

    def _early_of(self, link: DataLink) -> _EarlyLink | None:
        early = self._early.get((link.peer.worker, link.peer.epoch))
        return early if early is not None and early.link is link else None

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        worker = link.peer.worker
        if link.peer.role == Role.CLIENT:
            self.external.readers.link_down(link)
        elif link.peer.role == Role.PROBE:
            pass
        elif link.one_way is not None:
            self.one_way.link_down(link)
        elif self._links.get(worker) is link:
            del self._links[worker]
            self._witnesses().peer_lost(worker)
            self.one_way.pair_down(link, error)
            self._carry_out(self._state.peer_down(worker, error, self._now()))
        elif self._early_of(link) is not None:
            del self._early[worker, link.peer.epoch]
            self.one_way.pair_down(link, error)
        else:  # another has taken its place
            self.one_way.pair_down(link, error)

    # --- instructions ----------------------------------------------------------------------------

    async def dial(self, peer: WorkerAddress) -> None:
        """Connect to a peer, or report the error."""
        try:
            await self._endpoint.dial(Address(peer.host, peer.data_port), peer.worker, peer.epoch)
        except ShuffleError as error:
            _log.warning("dialing worker %d: %s", peer.worker, error)
            self._carry_out(self._state.dial_failed(peer, error, self._now()))

    async def _dial_one_way(self, worker: int, epoch: int, purpose: OneWay) -> DataLink:
        peer = self._state.channels.peers.address(worker)
        return await self._endpoint.dial(Address(peer.host, peer.data_port), worker, epoch, purpose)

    def request(self, instruction: RequestPartition, channel: InputChannel | None) -> None:
        """Open a channel; nothing happens if its task or the link is gone meanwhile."""
        link, request = self._links.get(instruction.worker), instruction.request
        if channel is None or link is None:
            return
        partition = request.partition
        source = link if channel.credit else self.one_way.inlet(link, partition.job, partition.edge)
        channel.attach_remote(source, request)

    def attach(
        self, instruction: Attach, partition: ResultPartition | None, hit: Callable[[str], None]
    ) -> PartitionView | None:
        """Serve a peer's request from a partition here; gives the view by which it reads. ``hit`` is called
        with each limit of its connection, see :data:`~minishuffle.counters.TCP_LIMITS`."""
        link, consumer = self._links.get(instruction.link), instruction.request.subpartition
        if link is None:
            return None
        subpartition = partition.subpartition(consumer) if partition is not None else None
        if subpartition is None:
            error = RemoteProtocolError(f"attempt {instruction.producer} has no subpartition {consumer}")
            self._refuse(link, instruction.request.channel, error)
            return None
        request = instruction.request
        if not request.one_way:
            return serve(link, request, subpartition).view
        outlet = self.one_way.outlet(link, request)
        outlet.stages.listen(hit)
        return serve(outlet, request, subpartition).view

    def _refuse(self, link: DataLink, channel: int, error: ShuffleError) -> None:
        link.connection.refuse(channel, error)
        link.flush_soon()
        self.one_way.released(link)

    def refuse(self, instruction: Refuse) -> None:
        link = self._links.get(instruction.link)
        if link is not None:
            self._refuse(link, instruction.channel, instruction.error)

    def close(self, instruction: CloseLinks) -> None:
        link = self._links.get(instruction.worker)
        if link is not None and link.peer.epoch <= instruction.epoch:
            link.abort(PeerLost(f"worker {instruction.worker} was declared lost"))
        for (worker, epoch), early in list(self._early.items()):
            if worker == instruction.worker and epoch <= instruction.epoch:
                early.link.abort(PeerLost(f"worker {worker} was declared lost"))

    def reports(self) -> list[PeerReport]:
        """For the heartbeat: every ordinary connection, by peer; early links are nobody's yet. The others are
        checked."""
        self.one_way.check()
        links: dict[int, list[DataLink]] = {}
        for link in self._endpoint.links:
            if link.peer.role == Role.WORKER and self._early_of(link) is None and link.one_way is None:
                links.setdefault(link.peer.worker, []).append(link)
        return [_report(peer, all_) for peer, all_ in sorted(links.items())]


def _report(peer: int, links: list[DataLink]) -> PeerReport:
    measured = links[0].measured()
    return PeerReport(
        worker=peer,
        epoch=links[0].peer.epoch,
        connections=len(links),
        local=links[0].local,
        remote=links[0].remote,
        round_trip_seconds=measured.round_trip,
        unsent_bytes=measured.unsent,
        smoothed_round_trip_seconds=measured.smoothed,
        in_flight_bytes=measured.in_flight,
    )


def _send(link: DataLink, message: Message) -> None:
    link.connection.send_message(message)
    link.flush_soon()
