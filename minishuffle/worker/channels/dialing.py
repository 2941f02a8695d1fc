"""Which peers a worker knows of, and when it dials them. Pure.

Of two workers, the worker with the lower id dials. The other worker asks it to, through the coordinator. A
worker that needs a link tries with growing pauses until the link is up or the time has passed. After a link
is lost, the dialing worker dials again, even if only the other worker reads: there may be no coordinator to
ask.

A link counts as good once it has been up long enough for Pings to have found a fault. Until then its peer
counts as unreachable, so a link that is made and lost again and again counts as no link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from minishuffle.backoff import Backoff
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.wire.handshake import HandshakeRefused
from minishuffle.wire.messages import WorkerAddress

__all__ = ["LINK_BACKOFF", "Dialing"]

LINK_BACKOFF: Final = Backoff(0.1, 2.0)
"""Between two tries to reach a peer, or to read a channel of it."""
PEER_SECONDS_MAX: Final = 10.0
"""How long a connection to a peer is tried for before the channels that need it fail."""


@dataclass(slots=True)
class _Peer:
    """Another worker, by the coordinator's word; a link changes nothing of that."""

    address: WorkerAddress
    up: bool = False
    """There is a link to the process of that epoch."""
    linked: bool = False
    """There is one, or has been."""
    lost: bool = False
    """The coordinator has declared the process of that epoch lost."""
    suspected: bool = False
    """It has answered no Ping, and there has been no link to it since."""
    dialing: bool = False
    """A dial of this process is under way; another's link would take the place of this one's."""
    try_at: float | None = None
    """When to dial, or have the peer asked, again; None while a dial is under way or none is wanted."""
    give_up_at: float | None = None
    tries: int = 0
    """Dials, or requests to be dialed, of this time."""
    failure: str = ""
    """Why the last dial of this time failed, as the end of a sentence."""
    up_at: float = 0.0
    """When the link that there is, or the last one, was made."""
    needed_since: float | None = None
    """Since when channels have needed a link that there is not, or that is not known to be good."""
    why: str = ""
    """The error of the last dial, or of the end of the last link."""


class Dialing:
    """The peers of worker ``worker``.

    Invariant: no link is wanted to a peer that is up or lost.

    Args:
        good_after: seconds for which a link has to be there before it is known to be good.
    """

    def __init__(self, worker: int, good_after: float) -> None:
        self._worker = worker
        self._good_after = good_after
        self._peers: dict[int, _Peer] = {}
        self._trying: dict[int, _Peer] = {}
        """Peers that a link is wanted to."""

    # --- the coordinator's word ------------------------------------------------------------------

    def announced(self, worker: int) -> int:
        """The newest epoch of that worker that the coordinator named; 0 if it named none."""
        peer = self._peers.get(worker)
        return peer.address.epoch if peer is not None else 0

    def address(self, worker: int) -> WorkerAddress:
        return self._peers[worker].address

    def announce(self, address: WorkerAddress) -> bool:
        """The coordinator says where a worker is; True if that is another process than before. The same one
        may have another address by now, for the next dial."""
        worker, epoch = address.worker, address.epoch
        if worker == self._worker or epoch <= self.announced(worker):
            if worker in self._peers and epoch == self.announced(worker):
                self._peers[worker].address = address
            return False
        self._stop(worker)
        self._peers[worker] = _Peer(address)
        return True

    def declare_lost(self, worker: int, epoch: int) -> bool:
        """The coordinator has declared a worker lost; False if that was known."""
        peer = self._peers.get(worker)
        if peer is None or peer.lost or peer.address.epoch > epoch:
            return False
        self._stop(worker)
        peer.lost, peer.suspected, peer.needed_since = True, False, None
        return True

    def is_lost(self, worker: int) -> bool:
        """Declared lost, or never announced."""
        peer = self._peers.get(worker)
        return peer is None or peer.lost

    def refusal(self, worker: int, epoch: int) -> str | None:
        """Why no link is made to that worker in that epoch; None: it may be."""
        announced = self.announced(worker)
        if epoch < announced:
            return f"worker {worker} has epoch {announced} by now"
        if epoch == announced and self.is_lost(worker):
            return f"worker {worker} was declared lost"
        return None

    # --- links -----------------------------------------------------------------------------------

    def is_up(self, worker: int) -> bool:
        """There is a link to that worker."""
        peer = self._peers.get(worker)
        return peer is not None and peer.up

    def link_up(self, worker: int, now: float) -> None:
        """There is a link, which may take the place of another."""
        self._stop(worker)
        peer = self._peers[worker]
        self._look_whether_good(peer, now)
        peer.up, peer.linked, peer.dialing, peer.up_at = True, True, False, now

    def link_down(self, worker: int, error: ShuffleError, now: float) -> None:
        peer = self._peers[worker]
        self._look_whether_good(peer, now)
        peer.up, peer.why = False, str(error)

    def _look_whether_good(self, peer: _Peer, now: float) -> None:
        if peer.up and now >= peer.up_at + self._good_after:
            peer.needed_since, peer.why = None, ""

    def need(self, worker: int, now: float) -> None:
        """Channels need a link to a peer; nothing new if there is one, or they have needed it before."""
        peer = self._peers.get(worker)
        if peer is not None and peer.needed_since is None and not (peer.up or peer.lost):
            peer.needed_since = now

    def unlinked(self, now: float) -> list[tuple[WorkerAddress, float, str]]:
        """The peers that channels have needed a link to, each with the seconds since :meth:`need`, and why
        there is none as far as is known here. While there is one the seconds do not go on."""
        found = []
        for _, peer in sorted(self._peers.items()):
            self._look_whether_good(peer, now)
            if peer.needed_since is not None:
                missing = (peer.up_at if peer.up else now) - peer.needed_since
                found.append((peer.address, max(0.0, missing), peer.why))
        return found

    def spare(self, worker: int) -> None:
        """No channel needs a link to that peer any more."""
        self._peers[worker].needed_since = None

    def restore(self, worker: int, now: float) -> None:
        """Dial again after a link was lost, if this worker is the dialing one. It waits a moment first: most
        links end because the peer has ended, and the coordinator will say so."""
        peer = self._peers[worker]
        if self._worker < worker and peer.linked and not peer.lost and worker not in self._trying:
            self._trying[worker] = peer
            peer.give_up_at = now + PEER_SECONDS_MAX
            peer.tries, peer.failure = 0, ""
            peer.try_at = None if peer.dialing else now + LINK_BACKOFF.seconds(1)

    def suspect(self, worker: int, suspected: bool) -> bool:
        """A link ends because the peer answers no Ping, or there is one again; False if that is not new."""
        peer = self._peers[worker]
        if peer.suspected == suspected or peer.lost:
            return False
        peer.suspected = suspected
        return True

    def want(self, worker: int, now: float) -> bool:
        """A link is wanted to a peer that has none; True: dial it, or have it asked to dial, at once."""
        if worker in self._trying or self.is_lost(worker):
            return False
        peer = self._trying[worker] = self._peers[worker]
        peer.give_up_at = now + PEER_SECONDS_MAX
        peer.tries, peer.failure = 0, ""
        if peer.dialing:
            return False
        self._try(worker, peer, now)
        return True

    def _try(self, worker: int, peer: _Peer, now: float) -> None:
        peer.tries += 1
        peer.dialing = self._worker < worker
        peer.try_at = None if peer.dialing else now + LINK_BACKOFF.seconds(peer.tries)

    def dial_failed(self, dialed: WorkerAddress, error: ShuffleError, now: float) -> bool:
        """A dial has failed. True: it is useless to try again.

        The failed dial of an earlier epoch is ignored. The process that answers may change: a worker that has
        just registered may not have read its id yet, or another one's old link may still exist.
        """
        peer = self._peers[dialed.worker]
        if dialed.epoch != peer.address.epoch:
            return False
        peer.dialing = False
        if peer.up:
            return False
        peer.why = str(error)
        passing = error.retriable or (isinstance(error, HandshakeRefused) and error.reason == "peer")
        if passing and peer.give_up_at is not None and now < peer.give_up_at:
            peer.tries = max(1, peer.tries)
            peer.try_at = now + LINK_BACKOFF.seconds(peer.tries)
            peer.failure = f": {error}"
            return False
        self._stop(dialed.worker)
        return True

    def _stop(self, worker: int) -> None:
        """No link is wanted any more."""
        peer = self._trying.pop(worker, None)
        if peer is not None:
            peer.try_at = peer.give_up_at = None

    # --- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        times = [time for peer in self._trying.values() for time in (peer.try_at, peer.give_up_at)]
        return min((time for time in times if time is not None), default=None)

    def due(self, now: float) -> Iterator[tuple[int, PeerLost | None]]:
        """Peers to dial, or to have asked to dial, now, and peers to give up, which come with an error."""
        for worker, peer in list(self._trying.items()):
            if peer.give_up_at is not None and now >= peer.give_up_at:
                self._stop(worker)
                text = f"no connection to worker {worker} within {PEER_SECONDS_MAX:g} s{peer.failure}"
                yield worker, PeerLost(text)
            elif peer.try_at is not None and now >= peer.try_at:
                self._try(worker, peer, now)
                yield worker, None

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert self._worker not in self._peers
        for worker, peer in self._peers.items():
            assert (self._trying.get(worker) is peer) == (peer.give_up_at is not None)
            assert peer.try_at is None or (peer.give_up_at is not None and not peer.dialing)
            assert not ((peer.up or peer.lost) and worker in self._trying)
            assert not (peer.up and peer.dialing)
            assert not (peer.suspected and (peer.up or peer.lost))
            assert peer.needed_since is None or not peer.lost
        assert set(self._trying) <= set(self._peers)
