"""Where sources are, for when a worker and its coordinator are lost together. Pure.

Sources go on behind their leases while the coordinator does not answer. Before a row behind a lease leaves,
a peer has the next one: it is the *witness*, which hands that on to the coordinator, or to the next one when
it registers there. If the worker dies before it has a coordinator again, its sources go on behind those
leases. A worker without a link to another has no witness: what its sources emit without a coordinator is
emitted again if it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from minishuffle.errors import RemoteProtocolError
from minishuffle.protocol.connection import MESSAGE_BODY_BYTES_MAX
from minishuffle.wire.control import pack_message, unpack_message
from minishuffle.wire.frames import Message
from minishuffle.wire.messages import AttemptPositions, WitnessedPositions
from minishuffle.wire.reports import SourcePositions

__all__ = ["Witnesses"]

WITNESSES_MAX: Final = 3
"""Peers that are asked; the first answer is enough."""


@dataclass(slots=True)
class _Asked:
    number: int
    waiting: Sequence[SourcePositions]
    """What goes on with the first answer."""
    peers: set[int]


class Witnesses:
    """The witnesses of one worker, and what it is a witness of.

    Args:
        linked: gives the peers with which there is a link.
        send: a message to one of them.
        hand_on: to the coordinator, if there is one.
        go_on: called with positions behind which a source may emit what it has reported.
    """

    def __init__(
        self,
        worker: int,
        epoch: int,
        *,
        linked: Callable[[], Collection[int]],
        send: Callable[[int, Message], None],
        hand_on: Callable[[WitnessedPositions], None],
        go_on: Callable[[SourcePositions], None],
    ) -> None:
        self._worker, self._epoch = worker, epoch
        self._linked, self._send, self._hand_on, self._go_on = linked, send, hand_on, go_on
        self._asked: list[_Asked] = []
        self._numbers = 0
        self._kept: dict[int, WitnessedPositions] = {}
        """What each other worker has said last."""

    def ask(
        self, waiting: Sequence[SourcePositions], unacknowledged: Iterable[SourcePositions], *, last: int
    ) -> None:
        """The coordinator does not answer: have peers keep what it may not have.

        Args:
            waiting: what sources wait for.
            unacknowledged: all that the coordinator may not have, in order.
            last: the number of the last report among those.
        """
        sources = [
            AttemptPositions(attempt=each.attempt, positions=each.positions) for each in unacknowledged
        ]
        message = WitnessedPositions(
            worker=self._worker, epoch=self._epoch, last_report=last, sources=sources
        )
        self._numbers += 1
        frame = Message(self._numbers, pack_message(message))
        peers = sorted(self._linked())[:WITNESSES_MAX]
        self._asked.append(_Asked(self._numbers, waiting, set(peers)))
        if len(frame.body) > MESSAGE_BODY_BYTES_MAX or not peers:
            self._end(self._asked[-1])
            return
        for peer in peers:
            self._send(peer, frame)

    def received(self, peer: int, message: Message) -> None:
        """A message of a peer, or its answer.

        Raises:
            RemoteProtocolError: it makes no sense.
        """
        if not message.body:
            for each in [each for each in self._asked if each.number <= message.request]:
                if peer in each.peers:
                    self._end(each)
            return
        said = unpack_message(message.body)
        if not isinstance(said, WitnessedPositions) or said.worker != peer:
            raise RemoteProtocolError(f"worker {peer} sent {type(said).__name__} that is not of its own")
        self._kept[peer] = said
        self._hand_on(said)
        self._send(peer, Message(message.request, b""))

    def peer_lost(self, peer: int) -> None:
        """Its link is gone: nobody waits for its answer."""
        for each in list(self._asked):
            each.peers.discard(peer)
            if not each.peers:
                self._end(each)

    def _end(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        for each in asked.waiting:
            self._go_on(each)

    # --- what others have said -------------------------------------------------------------------

    def kept(self) -> list[WitnessedPositions]:
        """What a coordinator is to hear when this worker registers again."""
        return list(self._kept.values())

    def handed_on(self, said: Iterable[WitnessedPositions]) -> None:
        """A coordinator has registered this worker, and journaled that; it hears what has come since."""
        for each in said:
            if self._kept.get(each.worker) is each:
                del self._kept[each.worker]
        for each in self.kept():
            self._hand_on(each)
