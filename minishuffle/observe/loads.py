"""How busy and how back-pressured subtasks and vertices are, and their rates: the growth between two looks.

A subtask is busy, idle or back-pressured at any time, so the growth of the three is the time between the
looks, whatever delays heartbeats had. Levels are those of Flink (``JobVertexBackPressureHandler``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from minishuffle.counters import TaskCounters
from minishuffle.wire.requests import JobInfo

__all__ = ["Level", "SubtaskLoad", "VertexLoad", "level_of", "loads_between", "vertex_loads"]

LOW_FROM: Final = 0.10
HIGH_FROM: Final = 0.50
"""Shares of a subtask's time in back-pressure beyond which a vertex is LOW and HIGH."""

Level: TypeAlias = Literal["OK", "LOW", "HIGH", "BEHIND"]
"""BEHIND: it falls behind what is sent to it while nobody waits for it yet, see
:func:`~minishuffle.observe.diagnosis.level_loads`."""


@dataclass(frozen=True, slots=True)
class SubtaskLoad:
    """Shares of its time, 0 to 1, and records per second."""

    index: int
    worker: int
    state: str
    busy: float
    backpressured: float
    records_in: float
    records_out: float


@dataclass(frozen=True, slots=True)
class VertexLoad:
    """The greatest shares of any subtask, with its index, and the sums of the rates."""

    name: str
    level: Level
    backpressured: float
    most_backpressured: int
    busy: float
    busiest: int
    records_in: float
    records_out: float
    subtasks: list[SubtaskLoad]


def level_of(backpressured: float) -> Level:
    """OK ≤ 0.10 < LOW ≤ 0.50 < HIGH."""
    return "OK" if backpressured <= LOW_FROM else "LOW" if backpressured <= HIGH_FROM else "HIGH"


class CountedSubtask(Protocol):
    """What is known of a subtask at one look."""

    @property
    def operator(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def worker(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def counters(self) -> TaskCounters: ...


def vertex_loads(before: JobInfo, after: JobInfo) -> list[VertexLoad]:
    """What the vertices of a job did between two looks at it."""
    return loads_between({(task.operator, task.index): task.counters for task in before.tasks}, after.tasks)


def loads_between(
    before: Mapping[tuple[int, int], TaskCounters], after: Iterable[CountedSubtask]
) -> list[VertexLoad]:
    """What vertices did since their subtasks, by operator and index, had counted ``before``."""
    vertices: dict[int, tuple[str, list[SubtaskLoad]]] = {}
    for task in after:
        load = _subtask_load(before[task.operator, task.index], task)
        vertices.setdefault(task.operator, (task.name, []))[1].append(load)
    return [_vertex_load(name, loads) for _, (name, loads) in sorted(vertices.items())]


def _subtask_load(was: TaskCounters, after: CountedSubtask) -> SubtaskLoad:
    now = after.counters
    seconds = max(0.0, now.seconds - was.seconds)

    def per_second(growth: float) -> float:
        return max(0.0, growth) / seconds if seconds else 0.0

    return SubtaskLoad(
        after.index,
        after.worker,
        after.state,
        round(per_second(now.busy_seconds - was.busy_seconds), 4),
        round(per_second(now.backpressured_seconds - was.backpressured_seconds), 4),
        round(per_second(now.records_in - was.records_in), 1),
        round(per_second(now.records_out - was.records_out), 1),
    )


def _vertex_load(name: str, subtasks: list[SubtaskLoad]) -> VertexLoad:
    held = max(subtasks, key=lambda load: load.backpressured)
    busiest = max(subtasks, key=lambda load: load.busy)
    return VertexLoad(
        name,
        level_of(held.backpressured),
        held.backpressured,
        held.index,
        busiest.busy,
        busiest.index,
        round(sum(load.records_in for load in subtasks), 1),
        round(sum(load.records_out for load in subtasks), 1),
        subtasks,
    )
