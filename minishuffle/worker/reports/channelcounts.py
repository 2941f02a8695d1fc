"""The rows that attempts have exchanged with each other, as the coordinator's books need them."""

from __future__ import annotations

from typing import TypeAlias

from minishuffle import limits
from minishuffle.exchange.channels import Attachment, InputChannel
from minishuffle.exchange.partition import PartitionView
from minishuffle.wire.packed import PeerRows, pack_traffic

__all__ = ["Peer", "Traffic"]

Peer: TypeAlias = tuple[int, int, int]
"""Edge, and index and attempt of the subtask: see :class:`PeerRows`."""


class Traffic:
    """The rows that one attempt has exchanged with its peers.

    Attachments count them. The counts of an ended attachment are added to its peer's totals at the next
    read.
    """

    def __init__(self) -> None:
        self._totals: dict[Peer, PeerRows] = {}
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
        totals = dict(self._totals)
        for peer, view in self._views:
            _add(totals, peer, sent=view.rows_sent, skipped=view.rows_skipped)
        for peer, attachment in self._attachments:
            _add(totals, peer, received=attachment.rows_received)
        for channel, (peer, before) in self._read.items():
            _add(totals, peer, incomplete=channel.rows_incomplete - before)
        return pack_traffic(totals.values())

    def _keep(self, peer: Peer, **rows: int) -> None:
        _add(self._totals, peer, entries_max=limits.TRAFFIC_PEERS_MAX, **rows)


def _add(
    totals: dict[Peer, PeerRows],
    peer: Peer,
    *,
    entries_max: int = limits.TRAFFIC_ENTRIES_MAX,
    sent: int = 0,
    skipped: int = 0,
    received: int = 0,
    incomplete: int = 0,
) -> None:
    if peer not in totals and len(totals) >= entries_max:
        peer = (peer[0], 0, 0)
    old = totals.get(peer, PeerRows(*peer))
    totals[peer] = old._replace(
        sent=old.sent + sent,
        skipped=old.skipped + skipped,
        received=old.received + received,
        incomplete=old.incomplete + incomplete,
    )
