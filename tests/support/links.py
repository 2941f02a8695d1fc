"""Links without a socket, for consumers and producers of either side."""

from __future__ import annotations

from minishuffle.counters import ConnectionCounters
from minishuffle.exchange.channels import InputChannel, RemoteAttachment
from minishuffle.protocol.channel import ConsumerChannel
from minishuffle.protocol.connection import Connection


class BareLink:
    """A connection that is flushed when the test moves its bytes; ``flushes`` counts what asked for it."""

    def __init__(self, *, dialer: bool = False) -> None:
        self.connection = Connection(dialer=dialer, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.flushes = 0
        self.paused = False

    def flush_soon(self) -> None:
        self.flushes += 1


def consumer_of(channel: InputChannel) -> ConsumerChannel:
    """The consuming end that carries a channel now; a channel is attached to a link for that."""
    attachment = channel.attachment
    assert isinstance(attachment, RemoteAttachment)
    return attachment.consumer
