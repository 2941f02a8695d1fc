"""Loads between two looks at subtasks, as a client or the coordinator itself sees them."""

from __future__ import annotations

from dataclasses import dataclass

from minishuffle.counters import TaskCounters
from minishuffle.observe.loads import loads_between


@dataclass
class Counted:
    operator: int
    name: str
    index: int
    counters: TaskCounters
    worker: int = 1
    state: str = "running"


def test_vertices_come_in_the_order_of_their_numbers() -> None:
    tasks = [
        Counted(1, "count", 0, TaskCounters(busy_seconds=2.0, records_in=8)),
        Counted(0, "lines", 1, TaskCounters(busy_seconds=1.0, idle_seconds=1.0, records_out=6)),
        Counted(0, "lines", 0, TaskCounters(backpressured_seconds=4.0, records_out=4)),
    ]
    found = loads_between({(task.operator, task.index): TaskCounters() for task in tasks}, tasks)
    assert [(load.name, load.level, load.busy, load.records_out) for load in found] == [
        ("lines", "HIGH", 0.5, 3.0 + 1.0),
        ("count", "OK", 1.0, 0.0),
    ]
    assert found[0].most_backpressured == 0
    assert found[0].busiest == 1


def test_counters_that_began_anew_are_no_negative_rates() -> None:
    before = TaskCounters(busy_seconds=50.0, records_in=100)
    after = Counted(0, "count", 0, TaskCounters(busy_seconds=60.0, records_in=10))
    (load,) = loads_between({(0, 0): before}, [after])
    assert (load.busy, load.records_in) == (1.0, 0.0)


def test_the_time_of_a_subtask_is_that_of_its_three_states() -> None:
    assert TaskCounters(busy_seconds=1.0, idle_seconds=2.0, backpressured_seconds=4.0).seconds == 7.0
