"""Witnesses: peers that keep the positions of a worker's sources, in case it and its coordinator are lost
together. Pure.

Sources continue beyond their leases while the coordinator does not answer. Before a source emits a row beyond
a lease, a peer gets the next lease. This peer is the *witness*: it passes the positions on to the
coordinator, or to the next one when it registers there. If the worker dies before it has a coordinator again,
its sources continue after these leases. A worker without links to others has no witness: if it dies, rows
emitted without a coordinator are emitted again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError
from minishuffle.wire.control import pack_message, unpack_message
from minishuffle.wire.frames import Message
from minishuffle.wire.messages import AttemptPositions, WitnessedPositions
from minishuffle.wire.reports import SourcePositions

__all__ = ["Witnesses"]

WITNESSES_MAX: Final = 3
"""Number of peers asked; the first answer is enough."""
SOURCE_BYTES: Final = 1_024
"""The size that each source adds to that of a message: the values of a registration are bounded as well."""


@dataclass(slots=True)
class _Asked:
    number: int
    waiting: Sequence[SourcePositions]
    """Reports whose sources continue at the first answer."""
    peers: set[int]


class Witnesses:
    """The witnesses of one worker, and the positions it keeps for others.

    Args:
        linked: returns the linked peers.
        send: sends a message to a linked peer.
        hand_on: passes positions on to the coordinator, if there is one.
        go_on: called with positions after which a source may continue.
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
        """The last positions of each other worker."""
        self._sizes: dict[int, int] = {}
        """The sizes of these, see :func:`_size`."""

    def ask(
        self, waiting: Sequence[SourcePositions], unacknowledged: Iterable[SourcePositions], *, last: int
    ) -> None:
        """The coordinator does not answer: let peers keep the positions it may not have.

        Args:
            waiting: reports for which sources wait.
            unacknowledged: all reports that the coordinator may not have, in order.
            last: the number of the last report among them.
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
        if _size(message, frame) > limits.WITNESSED_BYTES_MAX or not peers:
            self._end(self._asked[-1])
            return
        for peer in peers:
            self._send(peer, frame)

    def received(self, peer: int, message: Message) -> Message | None:
        """Handle a message of a peer, or its answer. Returns what to answer, over the same link.

        Raises:
            RemoteProtocolError: the message is not valid.
        """
        if not message.body:
            for each in [each for each in self._asked if each.number <= message.request]:
                if peer in each.peers:
                    self._end(each)
            return None
        said = unpack_message(message.body)
        if not isinstance(said, WitnessedPositions) or said.worker != peer:
            raise RemoteProtocolError(f"worker {peer} sent {type(said).__name__} that is not of its own")
        self._keep(said, _size(said, message))
        self._hand_on(said)
        return Message(message.request, b"")

    def _keep(self, said: WitnessedPositions, size: int) -> None:
        """Instead of what that worker has said before. If it is too much, the coordinator hears of it now or
        never."""
        self._kept.pop(said.worker, None)
        self._sizes[said.worker] = size
        if size + sum(self._sizes[each] for each in self._kept) <= limits.WITNESSED_BYTES_MAX:
            self._kept[said.worker] = said

    def peer_lost(self, peer: int) -> None:
        """The link to a peer is gone: its answer is no longer awaited."""
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
        """The positions to send when this worker registers again."""
        return list(self._kept.values())

    def handed_on(self, said: Iterable[WitnessedPositions]) -> None:
        """A coordinator has registered this worker and journaled these positions: drop them, and pass on
        newer ones."""
        for each in said:
            if self._kept.get(each.worker) is each:
                del self._kept[each.worker]
        for each in self.kept():
            self._hand_on(each)


def _size(said: WitnessedPositions, frame: Message) -> int:
    """The size of a message, in bytes, with SOURCE_BYTES for each source."""
    return len(frame.body) + SOURCE_BYTES * len(said.sources)
