"""A worker's data connections to its peers: who may connect, and what instructions do to a link."""

from __future__ import annotations

import logging
from collections.abc import Callable

from minishuffle.errors import PeerLost, RemoteProtocolError, ShuffleError
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.partition import ResultPartition, serve
from minishuffle.ids import Address
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested, PeerSilent
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import PeerReport, WorkerAddress
from minishuffle.worker.clients import Visitors
from minishuffle.worker.state import Attach, CloseLinks, Instruction, Refuse, RequestPartition, WorkerState

__all__ = ["PeerLinks"]

_log = logging.getLogger("minishuffle.worker")


class PeerLinks:
    """The ``EndpointHandler`` of a worker; at most one link to each peer.

    Args:
        carry_out: what the worker does with instructions.
        now: the loop's clock, in seconds.
    """

    def __init__(self, carry_out: Callable[[list[Instruction]], None], now: Callable[[], float]) -> None:
        self.refusals: dict[str, int] = {}
        """Connections turned away, by reason."""
        self._carry_out = carry_out
        self._now = now
        self._links: dict[int, DataLink] = {}
        self._endpoint: DataEndpoint | None = None
        self._state: WorkerState
        self.visitors: Visitors

    def registered(self, endpoint: DataEndpoint, state: WorkerState, visitors: Visitors) -> None:
        """The worker has its id: peers may connect from now on."""
        self._endpoint = endpoint
        self._state = state
        self.visitors = visitors

    # --- EndpointHandler -------------------------------------------------------------------------

    def authorize(self, peer: Identity) -> str | None:
        if self._endpoint is None:
            return "this worker is not registered yet"
        if peer.role == Role.CLIENT:
            return self.visitors.refusal(peer.worker, peer.epoch)
        if peer.role != Role.WORKER:
            return "only workers connect to a worker's data port, and programs that are expected"
        link = self._links.get(peer.worker)
        if link is not None and (link.peer.epoch, link.peer.counter) >= (peer.epoch, peer.counter):
            return f"worker {peer.worker} is connected already"
        return None

    def refused(self, reason: str, text: str, remote: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        _log.warning("connection from %s refused (%s): %s", remote, reason, text)

    def link_up(self, link: DataLink) -> None:
        if link.peer.role == Role.CLIENT:
            self.visitors.link_up(link)
            return
        worker = link.peer.worker
        old = self._links.get(worker)
        self._links[worker] = link
        if old is not None:
            old.abort(PeerLost(f"worker {worker} connected anew"))
        address = WorkerAddress(worker=worker, epoch=link.peer.epoch, host="", data_port=0)
        self._carry_out(self._state.peer_up(address))

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        for event in events:
            if isinstance(event, PartitionRequested) and link.peer.role == Role.CLIENT:
                self.visitors.readers.requested(link, event.request)
            elif isinstance(event, PartitionRequested):
                worker, request = link.peer.worker, event.request
                self._carry_out(self._state.partition_requested(worker, request, self._now()))
            elif isinstance(event, PeerSilent):
                link.abort(PeerLost(f"{link.peer} was silent for {event.seconds:.1f} s"))

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        worker = link.peer.worker
        if link.peer.role == Role.CLIENT:
            self.visitors.readers.link_down(link)
        elif self._links.get(worker) is link:
            del self._links[worker]
            self._carry_out(self._state.peer_down(worker))

    # --- instructions ----------------------------------------------------------------------------

    async def dial(self, peer: WorkerAddress) -> None:
        """Connect to a peer, or say why that failed."""
        assert self._endpoint is not None
        try:
            await self._endpoint.dial(Address(peer.host, peer.data_port), peer.worker, peer.epoch)
        except ShuffleError as error:
            _log.warning("dialing worker %d: %s", peer.worker, error)
            self._carry_out(self._state.dial_failed(peer.worker, error, self._now()))

    def request(self, instruction: RequestPartition, channel: InputChannel | None) -> None:
        """Open a channel; nothing happens if its task or the link is gone meanwhile."""
        link = self._links.get(instruction.worker)
        if channel is not None and link is not None:
            channel.attach_remote(link, instruction.request)

    def attach(self, instruction: Attach, partition: ResultPartition | None) -> None:
        """Serve a peer's request from a partition here."""
        link, consumer = self._links.get(instruction.link), instruction.request.subpartition
        if link is None:
            return
        subpartition = partition.subpartition(consumer) if partition is not None else None
        if subpartition is None:
            error = RemoteProtocolError(f"{instruction.partition} has no subpartition {consumer}")
            link.connection.refuse(instruction.request.channel, error)
            link.flush_soon()
        else:
            serve(link, instruction.request, subpartition)

    def refuse(self, instruction: Refuse) -> None:
        link = self._links.get(instruction.link)
        if link is not None:
            link.connection.refuse(instruction.channel, instruction.error)
            link.flush_soon()

    def close(self, instruction: CloseLinks) -> None:
        link = self._links.get(instruction.worker)
        if link is not None and link.peer.epoch <= instruction.epoch:
            link.abort(PeerLost(f"worker {instruction.worker} was declared lost"))

    def reports(self) -> list[PeerReport]:
        """For the heartbeat: every connection, by peer."""
        links: dict[int, list[DataLink]] = {}
        for link in self._endpoint.links if self._endpoint is not None else ():
            if link.peer.role == Role.WORKER:
                links.setdefault(link.peer.worker, []).append(link)
        return [
            PeerReport(worker=peer, connections=len(all_), local=all_[0].local, remote=all_[0].remote)
            for peer, all_ in sorted(links.items())
        ]
