"""The loads of subtasks and vertices: busy and back-pressured shares, and rates, from the growth between two
looks.

A subtask is always busy, idle or back-pressured, so the growth of the three times is the time between the
looks, however late heartbeats are. The levels are Flink's (``JobVertexBackPressureHandler``).
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
"""BEHIND: the vertex falls behind before any task waits for it, see
:func:`~minishuffle.observe.diagnosis.level_loads`."""


@dataclass(frozen=True, slots=True)
class SubtaskLoad:
    """A subtask's shares of time, 0 to 1, and records per second."""

    index: int
    worker: int
    state: str
    busy: float
    backpressured: float
    records_in: float
    records_out: float


@dataclass(frozen=True, slots=True)
class VertexLoad:
    """A vertex's load: the greatest shares of any subtask, with its index, and the sums of the rates."""

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
    """A subtask at a look."""

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
    """The loads of a job's vertices between two looks."""
    return loads_between({(task.operator, task.index): task.counters for task in before.tasks}, after.tasks)


def loads_between(
    before: Mapping[tuple[int, int], TaskCounters], after: Iterable[CountedSubtask]
) -> list[VertexLoad]:
    """The loads of vertices since the counters ``before``, by operator and index."""
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
