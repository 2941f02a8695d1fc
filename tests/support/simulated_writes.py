"""The debug log of a simulated run: for each consumer, which rows producers wrote, and which they skipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.partitioner import Partitioner
from minishuffle.plan.graph import Edge
from minishuffle.runtime import chain
from support.simulated_jobs import Sender, as_rows

__all__ = ["WriteLog", "log_writes"]

Consumer: TypeAlias = tuple[int, int]
"""Edge, and index of the consumer."""
Row: TypeAlias = tuple[Sender, int]
"""Who has sent it last, and the number that this attempt gave it."""
_hand: ContextVar[list[Any]] = ContextVar("rows that the writer of this thread has in hand")


def _no_rows() -> defaultdict[Consumer, set[Row]]:
    return defaultdict(set)


@dataclass
class WriteLog:
    """By consumer, rows by their sender and its number."""

    written: defaultdict[Consumer, set[Row]] = field(default_factory=_no_rows)
    """Also those that were cut off while they were being written."""
    skipped: defaultdict[Consumer, set[Row]] = field(default_factory=_no_rows)
    """Their consumer had gone."""
    handed_over: int = 0
    """Batches that consumers on the same worker got as they are."""

    def check(self, edges: list[Edge], received: Mapping[Sender, Mapping[Sender, list[int]]]) -> None:
        """What was skipped was neither written nor received, by any attempt, and nothing came that was not
        written for that very subtask."""
        between = {(edge.source, edge.target): number for number, edge in enumerate(edges)}
        for consumer, skipped in self.skipped.items():
            both = skipped & self.written[consumer]
            assert not both, f"{len(both)} rows for {consumer} were skipped and written: {sorted(both)[:3]}"
        for receiver, senders in received.items():
            for sender, numbers in senders.items():
                consumer = between[sender[0], receiver[0]], receiver[1]
                came = {(sender, number) for number in numbers}
                skipped, foreign = came & self.skipped[consumer], came - self.written[consumer]
                assert not skipped, f"{receiver} received {sorted(skipped)[:3]}, which {sender} had skipped"
                assert not foreign, f"{receiver} received {sorted(foreign)[:3]}, which {sender} never wrote"


class _LoggedPartition:
    """A partition as its writer sees it."""

    def __init__(self, partition: Any, log: WriteLog) -> None:
        self.subpartitions, self.hot_keys = partition.subpartitions, partition.hot_keys
        self.taps = ()
        self._partition, self._log = partition, log

    def skips(self, position: int, rows: int) -> bool:
        skipped: bool = self._partition.skips(position, rows)
        if skipped:
            self._note(self._log.skipped, position)
        return skipped

    def hand_over(self, position: int, batch: Batch) -> bool:
        self._note(self._log.written, position)  # first: the run may end within the call
        handed: bool = self._partition.hand_over(position, batch)
        self._log.handed_over += handed
        return handed

    def write(self, position: int, rows: int, parts: list[Any]) -> None:
        self._note(self._log.written, position)
        self._partition.write(position, rows, parts)

    def broadcast(self, positions: list[int], rows: int, parts: list[Any]) -> None:
        for position in positions:
            self._note(self._log.written, position)
        self._partition.broadcast(positions, rows, parts)

    def _note(self, noted: defaultdict[Consumer, set[Row]], position: int) -> None:
        consumer = self._partition.id.edge, self.subpartitions[position].consumer
        noted[consumer].update(((row[2], row[3], row[4]), row[5]) for row in _hand.get())


def log_writes(patch: pytest.MonkeyPatch) -> WriteLog:
    """Have every writer log what it does, as long as the patch lasts."""
    log, edge_writer = WriteLog(), chain._edge_writer

    class NotingPartitioner(Partitioner):
        def split(self, batch: Batch) -> Iterator[tuple[int, Batch]]:
            for position, piece in super().split(batch):
                _hand.set(as_rows(piece))
                yield position, piece

    def logged(output: Any, partition: Any, *more: Any) -> Callable[[Any], None]:
        write = edge_writer(output, _LoggedPartition(partition, log), *more)  # type: ignore[arg-type]

        def note(batch: Batch) -> None:
            _hand.set(as_rows(batch))
            write(batch)

        return note

    patch.setattr(chain, "Partitioner", NotingPartitioner)
    patch.setattr(chain, "_edge_writer", logged)
    return log
