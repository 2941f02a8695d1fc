"""What an input channel that has ended says to a producer that runs again: that it wants nothing."""

from __future__ import annotations

from typing import Any, Protocol

from minishuffle.errors import ShuffleError
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer, Received
from minishuffle.protocol.connection import Connection
from minishuffle.wire.frames import NO_SEQUENCE, CancelReason, PartitionRequest

__all__ = ["ConsumerLink", "DecliningAttachment"]


class ConsumerLink(Protocol):
    """A link to a producer, of whatever transport."""

    @property
    def connection(self) -> Connection: ...

    def flush_soon(self) -> None: ...


class DecliningAttachment:
    """A channel of a link without credit, for a consumer that has read all of an earlier attempt.

    As soon as the producer answers, the request is cancelled: it is not wanted to the end. While a request
    waits to be answered, a cancel would leave no trace.

    Args:
        channel: an :class:`InputChannel`; its ``declined`` closes this.
    """

    def __init__(self, channel: Any, link: ConsumerLink, generation: int, segment_bytes: int) -> None:
        self.channel = channel
        self.generation = generation
        self.rows_received = 0
        self._link = link
        self.consumer = ConsumerChannel(self, [], segment_bytes)

    def open(self, request: PartitionRequest) -> None:
        """Ask the producer for the subpartition."""
        self._link.connection.request_partition(self.consumer, request)
        self._link.flush_soon()

    @property
    def last_sequence(self) -> int:
        return NO_SEQUENCE

    def close(self, reason: CancelReason) -> None:
        self._link.connection.cancel(self.consumer, reason)
        self._link.flush_soon()
        self.consumer.close()

    def _decline(self) -> None:
        if self.channel.attachment is self:
            self.channel.declined(self)

    # --- for the ConsumerChannel -----------------------------------------------------------------

    def request_floating(self) -> FreeBuffer | None:
        self._decline()  # the producer has announced its backlog
        return None

    def wait_in_line(self, channel: ConsumerChannel) -> None:
        """There is no buffer that it would wait for."""

    def leave_line(self, channel: ConsumerChannel) -> None:
        """It stands in none."""

    def release_floating(self, buffer: FreeBuffer) -> None:
        """It has none."""

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        """It has none."""

    def consumed(self, buffer: Any) -> None:
        """The task gets nothing of it."""

    def deliver(self, received: Received) -> None:
        self._decline()

    def fail(self, error: ShuffleError) -> None:
        if self.channel.attachment is self:
            self.channel.detach(error)
