"""The records that one side of an interval join holds, found by key and time a batch at a time.

Records have numbers in the order in which they came. By number stand the slots of their keys, their times,
and whether they had a partner; compiled loops walk along chains of those of one key and time bucket (as wide
as the join's bounds are apart). The records themselves, Arrow's or Python's, lie in chunks. Chunks of like
size are merged, which leaves few of them and copies each record a logarithmic number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from minishuffle.exchange.batch import Batch, Mask, Numbers, Times
from minishuffle.exchange.sizes import row_bytes, rows_that_fit
from minishuffle.kernels.machinecode import kernel
from minishuffle.operators.base import END_OF_TIME

__all__ = ["Chunk", "Held"]

CHUNK_ROWS_MAX: Final = 1 << 18
"""Longer ones do not come from merging: one merge stays below a tenth of a second."""
CHUNK_BYTES_MAX: Final = 1 << 28
"""Likewise; and the offsets of a text column do not overflow."""
ROOM: Final = 64
"""Numbers that there is room for at first. Of fewer none are given anew, however many are gone."""


class Chunk:
    """Records whose numbers follow each other from ``first`` on to before ``end``. The first ``gone`` by time
    are let go."""

    def __init__(self, batch: Batch, first: int) -> None:
        assert batch.times is not None
        self.batch = batch
        self._times = batch.times
        self.first = first
        self.end = first + len(self._times)
        self.gone = 0
        self.row_bytes = row_bytes(batch.payload)
        self.earliest = int(self._times.min())
        """The least time that is held."""
        self._by_time: Numbers | None = None
        """The places of the records in order of time; None until one is let go: most chunks merge before."""

    @property
    def numbers(self) -> Numbers:
        """Those of the records that are held, in order."""
        if not self.gone or self._by_time is None:
            return np.arange(self.first, self.end)
        return np.sort(self._by_time[self.gone :]) + self.first

    def records(self, numbers: Numbers) -> Batch:
        """Those of these numbers, in their order."""
        return self.batch.take(numbers - self.first)

    def pieces(self, most: int) -> Iterator[tuple[Numbers, Batch]]:
        """(Numbers, records) that are held, in order, at most so many at a time. As long as none is let go,
        columns are not copied."""
        numbers = self.numbers
        for begin in range(0, len(numbers), most):
            some = numbers[begin : begin + most]
            yield some, self.records(some) if self.gone else self.batch.slice(begin, begin + len(some))

    def take_until(self, limit: int) -> Numbers:
        """Let go of the records up to ``limit``, and give their numbers, in order."""
        if self._by_time is None:
            self._by_time = np.argsort(self._times, kind="stable")
        before, order = self.gone, self._by_time
        self.gone = int(np.searchsorted(self._times, limit, "right", sorter=order))
        if self.gone < len(order):
            self.earliest = int(self._times[order[self.gone]])
        return np.sort(order[before : self.gone]) + self.first


class Held:
    """All records of a side that are held.

    Args:
        before: how far before a record of the other side its partners are; microseconds.
        after: how far after it.
    """

    def __init__(self, before: int, after: int) -> None:
        self.chunks: list[Chunk] = []
        """In order of their numbers, of which some may be missing."""
        self._before, self._after = before, after
        # As many times as partners may have: these are then in one bucket, or in two that follow each other.
        self._width = before + after + 1
        self._count = self._gone = 0
        """Numbers given, and those whose records are held no more."""
        self.slots = self.times = np.zeros(0, dtype=np.int64)
        self.matched: Mask = np.zeros(0, dtype=np.bool_)
        self._make_room(ROOM)

    def __len__(self) -> int:
        return self._count - self._gone

    @property
    def earliest(self) -> int:
        """The least time; ``END_OF_TIME`` if there are no records."""
        return min((chunk.earliest for chunk in self.chunks), default=END_OF_TIME)

    def add(self, batch: Batch, slots: Numbers, matched: Mask) -> None:
        """Hold records with times, at least one, and the slots of their keys."""
        assert batch.times is not None
        first, end = self._count, self._count + len(slots)
        if end > len(self.slots):
            self._make_room(end)
        self.slots[first:end], self.times[first:end], self.matched[first:end] = slots, batch.times, matched
        self._count = end
        self._link(first)
        # The times may be a part of a longer vector, which would stay as long.
        self.chunks.append(Chunk(Batch(batch.payload, batch.keys, self.times[first:end].copy()), first))
        while len(self.chunks) > 1 and _is_worth_merging(*self.chunks[-2:]):
            last, before = self.chunks.pop(), self.chunks.pop()
            self.chunks.append(self._merged(before, last))

    def _merged(self, before: Chunk, last: Chunk) -> Chunk:
        chunk = Chunk(Batch.concat([before.batch, last.batch]), before.first)
        if before.gone or last.gone:
            # What is gone of either is earlier than all that is held.
            chunk.take_until(min(before.earliest, last.earliest) - 1)
        return chunk

    def find(self, slots: Numbers, batch: Batch) -> Iterator[tuple[Numbers, Numbers]]:
        """The partners of records of ``batch``, which have times, with these keys (-1: none): (places in it,
        numbers), pairwise, as many at a time as make a batch.

        In order of the places; of one record those of an earlier time bucket first, of one bucket those that
        came last first. How many make a batch, or a chunk, changes nothing of that.
        """
        if not self.chunks:
            return iter(())
        weight = row_bytes(batch.payload) + max(chunk.row_bytes for chunk in self.chunks)
        return self._pairs(slots, batch.times, rows_that_fit(weight))

    def records(self, numbers: Numbers) -> Batch:
        """Those of these numbers, at least one, in their order."""
        for chunk in self.chunks:
            if chunk.first <= numbers[0] < chunk.end:
                if chunk.first <= numbers.min() and numbers.max() < chunk.end:
                    return chunk.records(numbers)
                break
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        ends = np.array([chunk.end for chunk in self.chunks])
        cuts = [0, *np.searchsorted(ordered, ends).tolist()]
        found = [
            chunk.records(ordered[begin:end])
            for chunk, begin, end in zip(self.chunks, cuts, cuts[1:], strict=False)
            if begin < end
        ]
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return Batch.concat(found).take(places)

    def batches(self, numbers: Numbers) -> Iterator[Batch]:
        """The same, as many at a time as make a batch; also of none."""
        most = rows_that_fit(max((chunk.row_bytes for chunk in self.chunks), default=0.0))
        for begin in range(0, len(numbers), most):
            yield self.records(numbers[begin : begin + most])

    def _pairs(self, slots: Numbers, times: Times | None, most: int) -> Iterator[tuple[Numbers, Numbers]]:
        """(Places given, numbers) of all pairs, at most so many at a time."""
        asked, numbers = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        place = np.array([0, 0, -2], dtype=np.int64)
        look = kernel("find_rows")
        while place[0] < len(slots):
            count = look(
                slots,
                times,
                len(slots),
                self.slots,
                self.times,
                self._heads,
                self._shift,
                self._following,
                self._width,
                self._before,
                self._after,
                place,
                asked,
                numbers,
                most,
            )
            if count:
                yield asked[:count], numbers[:count]

    def take_until(self, limit: int) -> Iterator[tuple[Chunk, Numbers]]:
        """Let go of the records up to ``limit``: (chunk, numbers), in order, before the next call of any
        method."""
        for chunk in self.chunks:
            if chunk.earliest <= limit:
                gone = chunk.take_until(limit)
                self._gone += len(gone)
                yield chunk, gone
        self.chunks = [chunk for chunk in self.chunks if chunk.gone < chunk.end - chunk.first]
        if self._count > ROOM and 2 * self._gone > self._count:
            self.renumber()

    def renumber(self, slots: Numbers | None = None) -> None:
        """Give new numbers to what is held; and new slots to the keys, by their slots before."""
        numbers = np.concatenate([self.slots[:0], *(chunk.numbers for chunk in self.chunks)])
        before, self.chunks, first = self.chunks, [], 0
        self.slots, self.times = self.slots[numbers], self.times[numbers]
        self.matched = self.matched[numbers]
        for chunk in before:
            self.chunks.append(Chunk(chunk.records(chunk.numbers), first))
            first = self.chunks[-1].end
        if slots is not None:
            self.slots = slots[self.slots]
        self._count, self._gone = len(numbers), 0
        self._make_room(self._count)

    def _make_room(self, count: int) -> None:
        """Room for so many numbers, and as many more."""
        room = max(ROOM, 2 * count)
        self.slots = _longer(self.slots, room)
        self.times = _longer(self.times, room)
        self.matched = _longer(self.matched, room)
        bits = max(1, (room - 1).bit_length())
        self._shift = 64 - bits
        self._heads = np.full(1 << bits, -1, dtype=np.int64)
        self._following = np.empty(room, dtype=np.int64)
        self._link(0)

    def _link(self, first: int) -> None:
        """Find those from number ``first`` on by key and time, once: a chain would never end."""
        if first < self._count:
            kernel("link_rows")(
                self.slots,
                self.times,
                self._width,
                self._heads,
                self._shift,
                self._following,
                first,
                self._count,
            )


def _longer(array: Any, room: int) -> Any:
    anew = np.empty(room, dtype=array.dtype)
    anew[: len(array)] = array
    return anew


def _is_worth_merging(before: Chunk, last: Chunk) -> bool:
    own, others = last.end - last.first, before.end - before.first
    if before.end != last.first or others > 2 * own or own + others > CHUNK_ROWS_MAX:
        return False
    return before.row_bytes * others + last.row_bytes * own <= CHUNK_BYTES_MAX
