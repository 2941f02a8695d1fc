"""The chain of a task: operators that hand batches and marks to each other, and the partitions behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minishuffle.counters import TaskCounters
from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Batch,
    Emit,
    Idle,
    KeyedRows,
    Mark,
    Operator,
    Output,
    Program,
    Side,
    Watermark,
)
from minishuffle.exchange.elements import encode
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.partitioner import Partitioner

__all__ = ["Chain"]


class Chain:
    """The opened operators of one attempt, wired up.

    Args:
        partitions: by edge.
        index: of the subtask; the first consumer that it deals to.
    """

    def __init__(
        self,
        program: Program,
        partitions: Mapping[int, ResultPartition],
        index: int,
        counters: TaskCounters,
    ) -> None:
        self.operators = program.operators
        self._partitions = partitions
        self._counters = counters
        self._writers = [
            (output.side, _edge_writer(output, partitions[output.edge], index)) for output in program.outputs
        ]
        self._watermark = BEGINNING_OF_TIME
        plain = [write for side, write in self._writers if side is None]
        only = plain[0] if len(plain) == 1 else None

        def end(item: Batch | Mark) -> None:
            if isinstance(item, Mark):
                self._mark(item)
            elif only is not None:
                only(item)
            else:
                for write in plain:
                    write(item)

        self._stages: list[Emit] = [end]
        for operator in reversed(program.operators):
            self._stages.insert(0, self._stage(operator, 0, self._stages[0]))

    def entrance(self, input: int) -> Emit:
        """Where the items of input number ``input`` go in."""
        if input == 0:
            return self._stages[0]
        return self._stage(self.operators[0], input, self._stages[1])

    def _stage(self, operator: Operator, input: int, following: Emit) -> Emit:
        end = self._stages[-1]

        def take(item: Batch | Mark) -> None:
            if not isinstance(item, Mark):
                operator.process(item, input, following)
            elif isinstance(item, Side):
                end(item)
            else:
                operator.on_mark(item, input, following)

        return take

    def _mark(self, mark: Mark) -> None:
        """A mark has come to the chain's end. That time has ended is said by the end of data."""
        match mark:
            case Side(tag, batch):
                for side, write in self._writers:
                    if side == tag:
                        write(batch)
            case Watermark(time):
                if self._watermark < time < END_OF_TIME:
                    self._watermark = self._counters.watermark = time
                    self._broadcast(idle=False)
            case Idle():
                self._broadcast(idle=True)
            case Active():
                self._broadcast(idle=False)

    def _broadcast(self, *, idle: bool) -> None:
        for partition in self._partitions.values():
            partition.broadcast_watermark(self._watermark, idle)

    # --- clocks and end --------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When :meth:`on_clock` is due; None if no operator waits for the clock."""
        times = [time for operator in self.operators if (time := operator.deadline()) is not None]
        return min(times, default=None)

    def on_clock(self, now: float) -> None:
        for operator, following in zip(self.operators, self._stages[1:], strict=True):
            due = operator.deadline()
            if due is not None and due <= now:
                operator.on_clock(now, following)

    def finish(self, check: Callable[[], None]) -> None:
        """Every input has ended; ``check`` raises if the task was cancelled meanwhile."""
        for operator, following in zip(self.operators, self._stages[1:], strict=True):
            check()
            operator.finish(following)


def _edge_writer(output: Output, partition: ResultPartition, start: int) -> Callable[[Any], None]:
    consumers = len(partition.subpartitions)
    partitioner = Partitioner(output.partitioner, consumers, output.keys, output.choose, start)
    broadcast = output.partitioner == "broadcast"

    def write(batch: list[Any] | KeyedRows | Any) -> None:
        if not len(batch):
            return
        if broadcast:
            rows, parts = encode(batch)
            for position in range(consumers):
                partition.write(position, rows, parts)
            return
        for position, piece in partitioner.split(batch):
            rows, parts = encode(piece)
            partition.write(position, rows, parts)

    return write
