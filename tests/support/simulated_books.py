"""The books of a simulated run: each row that an attempt wrote or received is in exactly one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from minishuffle.exchange.blocking import BlockingPartition
from minishuffle.wire.packed import unpack_traffic
from minishuffle.worker.tasks.attempt import Attempt
from support.simulated_jobs import ELEMENT_ROWS_MAX

__all__ = ["OF_THE_CHAIN", "Book"]

OF_THE_CHAIN = frozenset({"failed_batch", "late_after_recovery"})
"""Rows that were taken before they were lost."""


@dataclass(frozen=True)
class Book:
    """The rows of one attempt that has been released. Nothing of it is queued any more."""

    name: str
    finished: bool
    repeats: bool
    """Some of what it sends or receives is kept, and sent again."""
    written: int
    consumers: int
    """The most of any partition."""
    sent: int
    received: int
    taken: int
    """By the task, in batches."""
    dropped_out: Mapping[str, int]
    """Of those written, by reason."""
    dropped_in: Mapping[str, int]
    """Of those received, by reason."""

    @classmethod
    def of(cls, attempt: Attempt) -> Book:
        counters = attempt.task.counters
        peers = unpack_traffic(attempt.traffic.table())
        dropped_out = Counter[str]()
        for partition in attempt.partitions.values():
            dropped_out.update(partition.rows_dropped())
        dropped = Counter(attempt.task.read_counters().rows_dropped) - dropped_out
        return cls(
            name=str(attempt.id),
            finished=attempt.task.state == "finished",
            repeats=any(gate.kept for gate in attempt.gates)
            or any(isinstance(each, BlockingPartition) for each in attempt.partitions.values()),
            written=counters.records_out if attempt.partitions else 0,
            consumers=max((len(each.subpartitions) for each in attempt.partitions.values()), default=0),
            sent=sum(peer.sent for peer in peers),
            received=sum(peer.received for peer in peers),
            taken=counters.records_in,
            dropped_out=+dropped_out,
            dropped_in={reason: rows for reason, rows in dropped.items() if reason not in OF_THE_CHAIN},
        )

    def check(self, again: bool) -> None:
        """A writer that was interrupted may have begun an element that does not count as written: for one
        consumer, or, if it was broadcast, for all of them. If some task has run ``again`` for consumers that
        had yet to read its end, there are rows that others leave out, which are counted nowhere."""
        if self.repeats:
            return
        out = self.sent + sum(self.dropped_out.values()) - self.written
        assert (again or out >= 0) and out <= (0 if self.finished else ELEMENT_ROWS_MAX * self.consumers), (
            f"{out} rows too many are sent or dropped: {self}"
        )
        left = self.received - self.taken - sum(self.dropped_in.values())
        assert left == 0 or (again and left > 0), f"{left} rows that came are in no place: {self}"
