"""What tests say over a data connection of their own."""

from __future__ import annotations

from minishuffle.errors import ShuffleError
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer, Received


class Reader:
    """A gate without floating buffers, of one channel, which waits for its failure."""

    def __init__(self) -> None:
        self.error: ShuffleError | None = None
        pool = NetworkBufferPool(1, 256).create_pool("reader", 1, 1)
        segment = pool.request()
        assert segment is not None
        self.channel = ConsumerChannel(self, [segment], 256)

    def request_floating(self) -> FreeBuffer | None:
        return None

    def wait_in_line(self, channel: ConsumerChannel) -> None: ...

    def leave_line(self, channel: ConsumerChannel) -> None: ...

    def release_floating(self, buffer: FreeBuffer) -> None: ...

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        buffer.recycle()

    def deliver(self, received: Received) -> None: ...

    def fail(self, error: ShuffleError) -> None:
        self.error = error
