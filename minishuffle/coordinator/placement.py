"""Which slot of which worker runs what, and whether a job fits: pure arithmetic.

Slots are shared: subtask ``i`` of every operator runs in the job's slot ``i``. A *placement* is a
tuple with the worker id of each slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from minishuffle.dataflow.graph import JobGraph
from minishuffle.errors import ResourceExhausted

__all__ = ["BufferNeed", "Placement", "buffers_needed", "check_buffers", "place"]

Placement: TypeAlias = tuple[int, ...]

TERMS_SHOWN = 8
"""Terms of the arithmetic in an error; the largest come first."""


def place(free: Mapping[int, int], total: int, graph: JobGraph) -> Placement:
    """Spread the job's slots evenly over the workers.

    Args:
        free: free slots of each worker that is alive.
        total: all slots of these workers, used ones included.

    Raises:
        ResourceExhausted: there are not enough slots; with the arithmetic.
    """
    needed, available = graph.slots_needed, sum(free.values())
    if needed > available:
        raise ResourceExhausted(
            f"job needs {needed} slots (greatest parallelism), {available} are free of {total}: "
            "start more workers (--workers/--slots) or lower --parallelism"
        )
    taken: Counter[int] = Counter()
    slots: list[int] = []
    for _ in range(needed):
        open_workers = [worker for worker in free if taken[worker] < free[worker]]
        # The one with the fewest of this job; then the emptiest; then the lowest id.
        worker = min(open_workers, key=lambda w: (taken[w], taken[w] - free[w], w))
        taken[worker] += 1
        slots.append(worker)
    return tuple(slots)


@dataclass(slots=True)
class BufferNeed:
    """Segments that a job requires on one worker; ``terms`` counts equal parts of the sum."""

    segments: int = 0
    terms: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By (formula, segments of one)."""

    def add(self, formula: str, segments: int) -> None:
        self.segments += segments
        self.terms[formula, segments] += 1

    def arithmetic(self) -> str:
        """The sum as a reader can check it."""
        parts = sorted(self.terms.items(), key=lambda term: -term[0][1] * term[1])
        texts = [
            f"{formula} = {each}" if count == 1 else f"{count} x ({formula} = {each}) = {count * each}"
            for (formula, each), count in parts[:TERMS_SHOWN]
        ]
        if len(parts) > TERMS_SHOWN:
            texts.append(f"and {len(parts) - TERMS_SHOWN} more")
        return "; ".join(texts)


def buffers_needed(graph: JobGraph, placement: Placement) -> dict[int, BufferNeed]:
    """The least number of segments that each worker has to have for the job.

    An input gate needs ``remote channels x exclusive + 1``, one that other programs write to
    ``exclusive + 1``, a result partition ``consumers + 1``: the minimums with which a worker creates its
    local pools.
    """
    needs: dict[int, BufferNeed] = {worker: BufferNeed() for worker in sorted(set(placement))}
    exclusive = graph.settings.buffers_per_channel
    for vertex in graph.vertices:
        for worker in placement[: vertex.parallelism] if vertex.stream else ():
            formula = f"stream {vertex.stream}: {exclusive} exclusive + 1 floating"
            needs[worker].add(formula, exclusive + 1)
    for number, edge in enumerate(graph.edges):
        source, target = graph.vertices[edge.source], graph.vertices[edge.target]
        producers_on = Counter(placement[: source.parallelism])
        for index in range(target.parallelism):
            worker = placement[index]
            if edge.pointwise:
                remote = sum(placement[p] != worker for p in graph.producers_of(number, index))
            else:
                remote = source.parallelism - producers_on[worker]
            gate = f"input {edge.input} of {target.name}"
            formula = f"{gate}: {remote} channels x {exclusive} exclusive + 1 floating"
            needs[worker].add(formula, remote * exclusive + 1)
        for index in range(source.parallelism):
            consumers = len(graph.consumers_of(number, index))
            needs[placement[index]].add(f"output of {source.name}: {consumers} consumers + 1", consumers + 1)
    return needs


def check_buffers(needs: Mapping[int, BufferNeed], free: Mapping[int, int], total: Mapping[int, int]) -> None:
    """Compare with the segments of each worker that no other job requires.

    Raises:
        ResourceExhausted: they do not suffice on some worker; with the arithmetic of the first such.
    """
    for worker, need in needs.items():
        if need.segments > free[worker]:
            raise ResourceExhausted(
                f"job needs {need.segments} network buffers on worker {worker}, {free[worker]} are free of "
                f"{total[worker]} ({need.arithmetic()}): raise network_memory_bytes of the workers "
                "(--network-memory-bytes) or lower --parallelism"
            )
