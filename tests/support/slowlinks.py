"""A cable between two network interfaces that delays what it carries, and carries so much a second.

For root, on Linux. It stands for ``tc netem``, which not every kernel has.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from types import TracebackType

__all__ = ["SlowLink"]

SOL_PACKET = 263
PACKET_VNET_HDR = 15
"""Each frame comes with, and is sent with, what says which checksum is still to be made and how it is cut."""
PACKET_OUTGOING = 4
ETH_P_ALL = 3
FRAME_BYTES_MAX = 70_000
QUEUE_BYTES_MAX = 1 << 20
"""What waits in one direction; more is dropped."""
WAIT_SECONDS_MAX = 0.05


class _Direction:
    """From one interface to the other."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.queue: deque[tuple[float, bytes]] = deque()
        self.bytes = 0
        self.free_at = 0.0
        """When the last one has left the narrow place."""


class SlowLink:
    """Frames that come to one of two interfaces leave at the other, later.

    Args:
        delay: seconds, each way.
        bytes_per_second: each way; None for any number.
    """

    def __init__(
        self, one: str, other: str, *, delay: float = 0.0, bytes_per_second: float | None = None
    ) -> None:
        self.delay = delay
        self.bytes_per_second = bytes_per_second
        ends = [_opened(one), _opened(other)]
        self._ends = ends
        self._directions = {
            ends[0]: _Direction(ends[0], ends[1]),
            ends[1]: _Direction(ends[1], ends[0]),
        }
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="slow link")

    def __enter__(self) -> SlowLink:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            end.close()

    def _carry(self) -> None:
        while not self._stopped.is_set():
            now = time.monotonic()
            heads = [each.queue[0][0] for each in self._directions.values() if each.queue]
            wait = min([WAIT_SECONDS_MAX, *(max(0.0, head - now) for head in heads)])
            readable, _, _ = select.select(self._ends, [], [], wait)
            for end in readable:
                self._take(self._directions[end])
            for direction in self._directions.values():
                self._give(direction)

    def _take(self, direction: _Direction) -> None:
        frame, address = direction.source.recvfrom(FRAME_BYTES_MAX)
        if address[2] == PACKET_OUTGOING or direction.bytes + len(frame) > QUEUE_BYTES_MAX:
            return
        now = time.monotonic()
        if self.bytes_per_second is not None:
            direction.free_at = max(now, direction.free_at) + len(frame) / self.bytes_per_second
            now = direction.free_at
        direction.queue.append((now + self.delay, frame))
        direction.bytes += len(frame)

    def _give(self, direction: _Direction) -> None:
        while direction.queue and direction.queue[0][0] <= time.monotonic():
            _, frame = direction.queue.popleft()
            direction.bytes -= len(frame)
            direction.target.send(frame)


def _opened(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.bind((interface, ETH_P_ALL))
    return end
