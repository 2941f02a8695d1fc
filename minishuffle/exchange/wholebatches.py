"""Batches that stay in their process: what a result partition hands to a consumer on the same worker.

A local consumer gets Arrow columns as the object that they are: nothing is serialised, and nothing is copied
but a slice of something larger, which would keep all of that in memory. (Rows cross as bytes there too: they
are Python objects that can be changed, so somebody has to copy them, and packing them is the cheapest copy.)
What waits in queues is bounded twice: for each consumer by as many segments as a remote one may have, and for
the worker in bytes, apart from the network memory; what finds no room there goes through segments.
"""

from __future__ import annotations

from collections.abc import Callable

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import WholeBatch
from minishuffle.exchange.elements import ByteBudget, Part, encode, unpinned
from minishuffle.limits import BATCH_BYTES_MAX

__all__ = ["WholeBatches", "as_handed_over"]


class WholeBatches:
    """How one task hands batches over.

    Args:
        budget: of all tasks on the worker.
        segment_bytes: payload bytes of a segment.
        wait: (task) returns once what it is given says True, and raises if the task is to stop.
        wake: (loop) has a task that waits look again.
    """

    def __init__(
        self,
        budget: ByteBudget,
        segment_bytes: int,
        wait: Callable[[Callable[[], bool]], None],
        wake: Callable[[], None],
    ) -> None:
        self.wait = wait
        self._budget = budget
        self._segment_bytes = segment_bytes
        self._wake = wake

    def take(self, batch: Batch, buffer_size: int | None) -> WholeBatch | None:
        """A batch of columns as it goes into a queue; None if the worker has no room for it, or it is to be
        cut up.

        Args:
            buffer_size: bytes that it has for each buffer that it counts for; None: a segment's.
        """
        frozen = as_handed_over(batch)
        if frozen is None:
            return None
        handed, size = frozen
        whole = WholeBatch(
            handed,
            len(handed),
            size,
            self._segment_bytes if buffer_size is None else min(buffer_size, self._segment_bytes),
            parts=_parts,
            on_left=self._wake,
            on_freed=self._free,
        )
        return whole if self._budget.reserve(id(whole), size) else None

    def _free(self, whole: WholeBatch) -> None:
        self._budget.release(id(whole))


def as_handed_over(batch: Batch) -> tuple[Batch, int] | None:
    """A batch of columns as it stays in its process, in memory that nobody writes to, and its bytes; None: it
    is to be cut up."""
    if batch.payload.nbytes > 2 * BATCH_BYTES_MAX:
        return None
    columns = unpinned(batch.payload)
    size = columns.nbytes + (0 if batch.times is None else batch.times.nbytes)
    return Batch(columns, None, batch.times), size


def _parts(batch: Batch) -> list[Part]:
    return encode(batch)[1]
