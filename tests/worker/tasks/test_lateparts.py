"""Parts of a frozen state that are made between elements."""

from __future__ import annotations

import math
from collections.abc import Iterator

from minishuffle.errors import UnserializableRecord
from minishuffle.limits import SLICE_SECONDS
from minishuffle.operators.state_parts import StatePart
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.worker.tasks.lateparts import LateParts
from support.savedjobs import counts

KEYS = ["a", "b", "c", "d"]


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def parts(clock: Clock, seconds: float) -> Iterator[StatePart]:
    """One for each key, each of which takes so long."""
    for key in KEYS:
        clock.time += seconds
        yield counts([key])


def test_they_are_made_as_long_as_an_element_may_wait_and_given_together() -> None:
    clock, made = Clock(), list[TaskStateSnapshot | str]()
    late = LateParts(clock)
    assert late.go_on() == math.inf and not late.under_way
    late.begin(TaskStateSnapshot({"count": parts(clock, 0.6 * SLICE_SECONDS)}, watermark=7), made.append)
    assert (late.go_on(), clock.time) == (0.0, 2 * 0.6 * SLICE_SECONDS)
    assert late.under_way and not made
    assert (late.go_on(), late.go_on()) == (0.0, math.inf)
    assert not late.under_way
    (snapshot,) = made
    assert isinstance(snapshot, TaskStateSnapshot) and snapshot.watermark == 7
    found = list(snapshot.parts["count"])
    assert [part.batch for part in found] == [counts([key]).batch for key in KEYS]


def test_where_elements_take_long_more_of_them_are_made_between_two() -> None:
    clock, made = Clock(), list[TaskStateSnapshot | str]()
    late = LateParts(clock)
    clock.time = 500.0
    late.begin(TaskStateSnapshot({"count": parts(clock, 0.04)}), made.append)
    clock.time += 1.0
    late.go_on()
    assert round(clock.time, 3) == 501.12, "as long as a tenth of the element took, and the last piece"
    late.go_on()
    assert round(clock.time, 3) == 501.16
    assert late.go_on() == math.inf


def test_whoever_is_to_end_or_to_stand_makes_the_rest() -> None:
    clock, made = Clock(), list[TaskStateSnapshot | str]()
    late = LateParts(clock)
    late.begin(TaskStateSnapshot({"count": parts(clock, 1.0)}), made.append)
    assert late.go_on() == 0.0
    late.end()
    assert not late.under_way and len(made) == 1
    late.end()
    assert len(made) == 1


def test_parts_that_cannot_be_written_are_said() -> None:
    def broken() -> Iterator[StatePart]:
        yield counts(["a"])
        raise UnserializableRecord("a lock")

    made = list[TaskStateSnapshot | str]()
    late = LateParts(Clock())
    late.begin(TaskStateSnapshot({"count": broken()}), made.append)
    late.end()
    assert made == ["its state cannot be written: a lock"]
