"""The rows that attempts have exchanged with each other, as the coordinator's books need them."""

from __future__ import annotations

from typing import TypeAlias

from minishuffle import limits
from minishuffle.exchange.channels import Attachment, InputChannel
from minishuffle.exchange.partition import PartitionView
from minishuffle.wire.packed import pack_traffic

__all__ = ["Peer", "Traffic"]

Peer: TypeAlias = tuple[int, int, int]
"""Edge, and index and attempt of the subtask: see :class:`~minishuffle.wire.packed.PeerRows`."""
SENT, SKIPPED, RECEIVED, INCOMPLETE = range(4)
"""The places of a peer's rows in a list."""


class Traffic:
    """The rows that one attempt has exchanged with its peers.

    Attachments count them. The counts of an ended attachment are added to its peer's totals at the next
    read.
    """

    def __init__(self) -> None:
        self._totals: dict[Peer, list[int]] = {}
        """Sums over attachments that have ended."""
        self._views: list[tuple[Peer, PartitionView]] = []
        self._attachments: list[tuple[Peer, Attachment]] = []
        self._read: dict[InputChannel, tuple[Peer, int]] = {}
        """Whom each channel was attached to last, and how many rows were incomplete before that."""

    def sends(self, peer: Peer, view: PartitionView) -> None:
        self._views.append((peer, view))

    def receives(self, peer: Peer, channel: InputChannel) -> None:
        """The channel's new attachment reads from ``peer``."""
        if channel.attachment is not None:
            self._attachments.append((peer, channel.attachment))
            incomplete = channel.rows_incomplete
            if channel in self._read:
                last, before = self._read[channel]
                self._keep(last, incomplete=incomplete - before)
            self._read[channel] = peer, incomplete

    def table(self) -> bytes:
        """The counts so far, packed for a message."""
        views, attachments = self._views, self._attachments
        for peer, view in views:
            if not view.current:
                self._keep(peer, sent=view.rows_sent, skipped=view.rows_skipped)
        for peer, attachment in attachments:
            if attachment.channel.attachment is not attachment:
                self._keep(peer, received=attachment.rows_received)
        self._views = [(peer, view) for peer, view in views if view.current]
        self._attachments = [each for each in attachments if each[1].channel.attachment is each[1]]
        totals = {peer: rows.copy() for peer, rows in self._totals.items()}
        for peer, view in self._views:
            entry = _entry(totals, peer)
            entry[SENT] += view.rows_sent
            entry[SKIPPED] += view.rows_skipped
        for peer, attachment in self._attachments:
            _entry(totals, peer)[RECEIVED] += attachment.rows_received
        for channel, (peer, before) in self._read.items():
            _entry(totals, peer)[INCOMPLETE] += channel.rows_incomplete - before
        return pack_traffic((*peer, *rows) for peer, rows in totals.items())

    def _keep(
        self, peer: Peer, *, sent: int = 0, skipped: int = 0, received: int = 0, incomplete: int = 0
    ) -> None:
        entry = _entry(self._totals, peer, limits.TRAFFIC_PEERS_MAX)
        entry[SENT] += sent
        entry[SKIPPED] += skipped
        entry[RECEIVED] += received
        entry[INCOMPLETE] += incomplete


def _entry(
    totals: dict[Peer, list[int]], peer: Peer, entries_max: int = limits.TRAFFIC_ENTRIES_MAX
) -> list[int]:
    """The rows of a peer, to be added to; those of all further peers on its edge if there are too many."""
    entry = totals.get(peer)
    if entry is None:
        if len(totals) >= entries_max:
            peer = (peer[0], 0, 0)
        entry = totals.setdefault(peer, [0, 0, 0, 0])
    return entry
