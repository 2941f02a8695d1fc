"""Interval joins on event time, of rows and of columns.

A left record matches the right ones of its key whose times are at most ``before`` before and at most
``after`` after its own. A record is held until the other side's watermark is so much past it that nothing
which could match comes any more. Without event time records are held until both sides have ended.
(Flink: ``IntervalJoinOperator``; there without outer joins.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch, Mask, Numbers, Times
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Emit
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.held_records import Held
from minishuffle.operators.join_inputs import BOTH_DROPPED, LEFT, RIGHT, Bounds, TimedJoin, record_times
from minishuffle.operators.join_results import BatchesOut, JoinResults
from minishuffle.operators.key_slots import KeySlots
from minishuffle.operators.task_state import Records

__all__ = ["IntervalJoin"]

SPARE_KEYS: Final = 4096
"""So many keys of which nothing is held are not worth numbering the others anew."""


class IntervalJoin(TimedJoin):
    """Emits what its ``results`` make of pairs of records, and of records without a partner.

    Each side numbers its keys and holds its records in a :class:`Held`; the other side's keys are looked up
    there. When most keys have no records any more, the others are numbered anew.
    """

    name = "join"

    def __init__(
        self,
        results: JoinResults,
        bounds: Bounds,
        times: tuple[EventTime, EventTime],
        lateness: tuple[Late, Late] = BOTH_DROPPED,
        *,
        gives_times: bool = True,
    ) -> None:
        super().__init__(results.how, bounds, times, lateness)
        self.how = results.how
        self._results = results
        self._gives_times = gives_times and results.gives_times(times)
        self._keys = (KeySlots(), KeySlots())
        bounds = self.progress.bounds
        self._held = (Held(*bounds.of(RIGHT)), Held(*bounds.of(LEFT)))

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        held, keys = self._results.taken(batch, input)
        slots, others = self._keys[input].lookup(keys), self._keys[1 - input].find(keys)
        if input == RIGHT and self.how in ("semi", "anti"):
            firsts = _first_of_each(slots, record_times(held))
            held, slots, others = held.take(firsts), slots[firsts], others[firsts]
        out = BatchesOut(emit)
        matched = self._match(held, others, input, out)
        stays = (record_times(held) > self.progress.limit(input)) & (slots >= 0)
        if not stays.all():
            self._put_out_alone(held, np.flatnonzero(~stays & ~matched), input, out)
            kept = np.flatnonzero(stays)
            held, slots, matched = held.take(kept), slots[kept], matched[kept]
        if len(slots):
            self._held[input].add(held, slots, matched)
        out.flush()
        self._forget_keys(input)

    def _match(self, batch: Batch, slots: Numbers, input: int, out: BatchesOut) -> Mask:
        """Put out the pairs of these records with what the other side holds, where their keys have ``slots``
        (-1: none); which of them had a partner."""
        matched = np.zeros(len(slots), dtype=np.bool_)
        held, firsts = self._held[1 - input], list[Numbers]()
        for asked, numbers in held.find(slots, batch) if (slots >= 0).any() else ():
            matched[asked] = True
            if self.how not in ("semi", "anti"):
                self._put_out(self._results.pairs(batch.take(asked), held.records(numbers), input), out)
            elif self.how == "semi" and input == RIGHT:
                firsts.append(np.unique(numbers[~held.matched[numbers]]))
            held.matched[numbers] = True
        if self.how == "semi" and input == LEFT and matched.any():
            self._put_out(self._results.alone(batch.take(np.flatnonzero(matched)), LEFT), out)
        for some in held.batches(np.sort(np.concatenate(firsts))) if firsts else ():
            self._put_out(self._results.alone(some, LEFT), out)
        return matched

    def _put_out_alone(self, batch: Batch, rows: Numbers, input: int, out: BatchesOut) -> None:
        """Put out those of a batch of a side at ``rows``, without a partner, if such records go out."""
        ways = ("left", "full", "anti") if input == LEFT else ("right", "full")
        if len(rows) and self.how in ways:
            self._put_out(self._results.alone(batch.take(rows), input), out)

    def _put_out(self, batch: Batch, out: BatchesOut) -> None:
        out.add(batch if self._gives_times else Batch(batch.payload))

    # --- what is held -------------------------------------------------------------------------------

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        out, held = BatchesOut(emit), self._held[input]
        for chunk, numbers in held.take_until(limit):
            alone = numbers[~held.matched[numbers]] - chunk.first
            self._put_out_alone(chunk.batch, alone, input, out)
        out.flush()
        self._forget_keys(input)

    def _forget_keys(self, input: int) -> None:
        """Number the keys of a side anew that have records, once most have none."""
        keys, held = self._keys[input], self._held[input]
        if len(keys) <= SPARE_KEYS + 2 * len(held):
            return
        is_live = np.zeros(len(keys), dtype=np.bool_)
        for chunk in held.chunks:
            is_live[held.slots[chunk.numbers]] = True
        keys.keep(is_live)
        held.renumber(np.cumsum(is_live) - 1)

    def earliest(self, input: int) -> int:
        return self._held[input].earliest

    def state_rows(self) -> int:
        return len(self._held[LEFT]) + len(self._held[RIGHT])

    def finish(self, emit: Emit) -> None:
        self._results.finish(self.name, self.context)

    def write_side(self, input: int) -> Iterator[Records]:
        for chunk in self._held[input].chunks:
            for numbers, batch in chunk.pieces(BATCH_ROWS_MAX):
                yield self._records(numbers, batch, input)

    def _records(self, numbers: Numbers, batch: Batch, input: int) -> Records:
        held = self._held[input]
        marks = {"time": pa.array(record_times(batch)), "matched": pa.array(held.matched[numbers])}
        # Columns are held without those of their keys that are in no result.
        keys = self._keys[input].columns(held.slots[numbers]) if batch.keys is None else batch.keys
        return Records(batch.payload, keys, marks)

    def read_side(self, input: int, records: Records) -> None:
        batch, keys = self._results.restored(records, input)
        matched = records.marks["matched"].to_numpy(zero_copy_only=False)
        self._held[input].add(batch, self._keys[input].lookup(keys), matched)


def _first_of_each(slots: Numbers, times: Times) -> Numbers:
    """The records that are the first of their key and time. Where right ones only say that there are some,
    one does for all. (A key of 100,000 records on both sides would make ten thousand million pairs.)"""
    order = np.lexsort((times, slots))
    slots, times = slots[order], times[order]
    differs = (slots[1:] != slots[:-1]) | (times[1:] != times[:-1])
    return np.sort(order[np.concatenate([[True], differs])])
