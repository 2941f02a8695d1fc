"""What a task reads from its gates: batches and marks, by input number and in order. Does not block."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from minishuffle.dataflow.operators.base import Active, Batch, Idle, Mark, SplitMark, Watermark
from minishuffle.exchange.elements import decode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.watermarks import WatermarkValve

__all__ = ["Inputs"]

Item: TypeAlias = "Batch | Mark"


@dataclass(slots=True)
class _Input:
    """All gates of one input number; ``told`` is what the operator knows of their watermark."""

    number: int
    valve: WatermarkValve
    told: tuple[int, bool]


@dataclass(slots=True)
class _Gate:
    gate: InputGate
    input: _Input
    position: int
    """The gate's number in its input's valve."""
    split: int = -1
    """The split of the last batch, where the gate tells splits apart."""
    ended: bool = False


class Inputs:
    """Takes turns between gates, an element each.

    Args:
        first_input: while gates of that input have not ended no other is read; None: all in turn.
    """

    def __init__(self, gates: list[InputGate], first_input: int | None) -> None:
        inputs: dict[int, _Input] = {}
        self._gates: list[_Gate] = []
        for gate in gates:
            valve = WatermarkValve()
            each = inputs.setdefault(gate.input, _Input(gate.input, valve, (valve.watermark, valve.idle)))
            self._gates.append(_Gate(gate, each, each.valve.add()))
        self._first_input = first_input
        self._turn = 0
        self._ready: deque[tuple[int, Item]] = deque()

    @property
    def finished(self) -> bool:
        """Every gate has ended, and everything was taken."""
        return not self._ready and all(gate.ended for gate in self._gates)

    def poll(self) -> tuple[int, Item] | None:
        """The next batch or mark and the number of its input; None if there is nothing now.

        Raises:
            ShuffleError: a channel failed.
        """
        if not self._ready:
            self._read()
        return self._ready.popleft() if self._ready else None

    def _read(self) -> None:
        """Give each gate its turn until one has something."""
        gates = self._readable()
        for step in range(len(gates)):
            self._read_gate(gates[(self._turn + step) % len(gates)])
            if self._ready:
                break
        self._turn += 1

    def _readable(self) -> list[_Gate]:
        first = [gate for gate in self._gates if gate.input.number == self._first_input and not gate.ended]
        return first or [gate for gate in self._gates if not gate.ended]

    def _read_gate(self, each: _Gate) -> None:
        gate, number = each.gate, each.input.number
        element = gate.poll()
        changes = gate.split_changes
        if changes is not None:
            while changes:
                split, state = changes.popleft()
                self._ready.append((number, SplitMark(split, state)))
        elif gate.marked:
            gate.marked = False
            self._tell(each, gate.valve.watermark, gate.valve.idle)
        if element is not None:
            if changes is not None and element.channel.producer != each.split:
                each.split = element.channel.producer
                self._ready.append((number, SplitMark(each.split, "current")))
            self._ready.append((number, decode(element.format, element.rows, element.payload)))
        if gate.finished:
            each.ended = True
            each.input.valve.end(each.position)
            self._tell_all(each.input)

    def _tell(self, each: _Gate, time: int, idle: bool) -> None:
        each.input.valve.update(each.position, time, idle)
        self._tell_all(each.input)

    def _tell_all(self, each: _Input) -> None:
        """What the operator does not know yet of its input's watermark."""
        time, idle = each.valve.watermark, each.valve.idle
        told_time, told_idle = each.told
        if time > told_time:
            self._ready.append((each.number, Watermark(time)))
        elif told_idle and not idle:
            self._ready.append((each.number, Active()))
        if idle and (not told_idle or time > told_time):
            self._ready.append((each.number, Idle()))
        each.told = (time, idle)
