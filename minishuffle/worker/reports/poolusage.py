"""How full the buffers of tasks are, added up over many looks: see :data:`~minishuffle.counters.FLOW`.

A heartbeat with the state of one moment would miss short events. So the loop samples the buffers four times a
second and adds up the samples. The growth of a sum divided by the growth of the number of samples is the
mean. Attempts take turns, so that a sample costs the same for any number of channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.segments import LocalPool

__all__ = ["FLOW_SECONDS", "FlowTotals", "Turns"]

FLOW_SECONDS: Final = 0.25
"""Between two looks, at the times at which a worker wakes for other reports anyway."""
CHANNELS_PER_LOOK: Final = 256
"""Channels of a worker that are looked at in one turn of the loop; the last attempt may have more."""


class FlowTotals:
    """The sums of one attempt. (Loop.)"""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def look(
        self,
        gates: Collection[InputGate],
        partitions: Collection[ResultPartition],
        pools: Collection[LocalPool],
    ) -> None:
        """Add what is true now."""
        self._add("looks", 1.0)
        if not all(gate.unused for gate in gates):
            self._look_at_input(gates)
        self._add("output", _share(sum(p.in_use for p in pools), sum(p.size for p in pools)))
        self._look_at_credit(partitions)

    def _look_at_input(self, gates: Collection[InputGate]) -> None:
        used = dict.fromkeys(("exclusive", "floating"), 0)
        capacity = dict.fromkeys(("exclusive", "floating"), 0)
        starved = queued = False
        for gate in gates:
            now = gate.snapshot()
            used["exclusive"] += now.exclusive_used
            used["floating"] += now.floating_used
            capacity["exclusive"] += now.exclusive_capacity
            capacity["floating"] += now.floating_capacity
            starved |= now.channels_starved > 0
            queued |= now.queue_buffers > 0
        for kind in used:
            self._add(kind, _share(used[kind], capacity[kind]))
        self._add("input", _share(sum(used.values()), sum(capacity.values())))
        self._add("starved", starved)
        self._add("queued", queued)

    def _look_at_credit(self, partitions: Iterable[ResultPartition]) -> None:
        uncredited = unsent = False
        for partition in partitions:
            for subpartition in partition.subpartitions:
                view = subpartition.view
                if view is None or view.channel is None:
                    continue
                credit = view.channel.credit  # first: it is there nearly always, and the backlog takes longer
                if credit.sent == credit.granted:
                    uncredited = uncredited or view.backlog() > 0
                elif view.link is not None and view.link.paused:
                    unsent = unsent or view.backlog() > 0
        self._add("uncredited", uncredited)
        self._add("unsent", unsent)

    def _add(self, what: str, amount: float) -> None:
        if amount:
            self._sums[what] = self._sums.get(what, 0.0) + amount

    def read(self) -> dict[str, float]:
        """The sums so far; what is zero is left out."""
        return dict(self._sums)


def _share(used: int, capacity: int) -> float:
    return min(1.0, max(0, used) / capacity) if capacity else 0.0


class Looked(Protocol):
    """An object with buffers to sample."""

    @property
    def channels(self) -> int: ...

    def look(self) -> None: ...


class Turns:
    """The order in which buffers are sampled."""

    def __init__(self) -> None:
        self._looked: dict[Looked, None] = {}
        """Already sampled objects, the most recent last."""

    def take(self, there: Sequence[Looked]) -> None:
        """Look at the buffers of those that were not looked at for longest, until it is enough for once."""
        present = set(there)
        before = [each for each in self._looked if each in present]
        new = [each for each in there if each not in self._looked]
        self._looked = dict.fromkeys(before)
        channels = 0
        for each in (*new, *before):
            if channels >= CHANNELS_PER_LOOK:
                return
            each.look()
            channels += 1 + each.channels
            self._looked.pop(each, None)
            self._looked[each] = None
