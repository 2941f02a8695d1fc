"""When a task takes local snapshots, which are kept, and that no set of deaths asks for what is gone."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minishuffle.exchange.rownumbers import ChannelRows
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.worker.tasks.localsnapshots import KEPT_MAX, LocalSnapshots, covers
from support.soak import examples

EDGE = 4


def counted(taken: int = 0, written: int = 0, version: int = 1) -> TaskStateSnapshot:
    return TaskStateSnapshot(taken={EDGE: [ChannelRows(0, version, taken)]}, written={EDGE: [written]})


def snapshots(**options: Any) -> LocalSnapshots:
    return LocalSnapshots(
        counted(), **{"interval": 1.0, "phase": 0.0, "cost_max": 0.1, "now": 0.0, "begun_at": 0.0} | options
    )


def take(machine: LocalSnapshots, what: TaskStateSnapshot, begun: float, now: float, stable: int = -1) -> int:
    number = machine.take(what, begun, {EDGE: [stable]})
    machine.note_cost(now - begun, now)
    return number


# --- when -------------------------------------------------------------------------------------------------


@given(
    interval=st.floats(0.001, 3600),
    phase=st.floats(0, 1),
    now=st.floats(0, 1e6),
    cost=st.floats(0, 10),
)
def test_snapshots_of_all_tasks_are_due_at_the_same_times(
    interval: float, phase: float, now: float, cost: float
) -> None:
    machine = snapshots(interval=interval, phase=phase * interval)
    machine.take(counted(1), now, {EDGE: [-1]})
    assert machine.due() == math.inf, "the holder has yet to say that it has the last"
    machine.note_cost(cost, now)
    machine.hold(1, [0, 1])
    due, tiny = machine.due(), 1e-9 * (1 + now)
    earliest = now + max(interval / 2, cost / 0.1)
    assert earliest - tiny <= due <= earliest + interval + tiny
    intervals = (due - phase * interval) / interval
    assert intervals == pytest.approx(round(intervals), abs=1e-6)


def test_the_next_is_due_behind_the_interval_or_later_where_taking_one_is_long() -> None:
    machine = snapshots(phase=0.1)
    assert machine.due() == 1.1
    assert take(machine, counted(1), 1.1, 1.15) == 1
    machine.hold(1, [0, 1])
    assert machine.due() == 2.1
    take(machine, counted(2), 3.0, 3.5)
    machine.hold(2, [0, 1, 2])
    assert machine.due() == 9.1, "a tenth of the time, and with the others"


def test_at_the_beginning_of_the_job_one_is_taken_at_once() -> None:
    options = {"interval": 1.0, "phase": 0.0, "cost_max": 0.1, "now": 5.0, "begun_at": 5.0}
    machine = LocalSnapshots(TaskStateSnapshot(), **options)
    assert machine.due() < 5.0
    take(machine, counted(), 5.0, 5.01)
    machine.hold(1, [0, 1])
    assert machine.due() == 6.0
    assert machine.advance({EDGE: [0]}), "nothing was written, and any consumer is served"


def test_its_age_is_that_of_what_a_next_attempt_begins_with() -> None:
    machine = snapshots(now=5.0, begun_at=3.0)
    assert machine.covered_at == 3.0
    take(machine, counted(1, written=7), 6.0, 6.05)
    machine.hold(1, [0, 1])
    assert machine.covered_at == 3.0, "consumers may ask for what it wrote before"
    assert machine.advance({EDGE: [7]})
    assert machine.covered_at == 3.0, "the holder has yet to hear which one is the oldest"
    machine.hold(0, [1])
    assert machine.covered_at == 6.0
    machine.postpone(8.0)
    assert machine.covered_at == 8.0, "the task has done nothing since"
    machine.change_holder()
    assert machine.covered_at is None
    take(machine, counted(2, written=7), 9.0, 9.05, stable=7)
    machine.hold(2, [2])
    assert machine.covered_at == 9.0


def test_one_that_is_asked_for_takes_half_of_the_time_at_most() -> None:
    machine = snapshots()
    take(machine, counted(1), 1.0, 1.25)
    machine.hold(1, [0, 1])
    machine.ask()
    assert machine.due() == 1.5
    take(machine, counted(2), 1.5, 1.75)
    machine.hold(2, [0, 1, 2])
    assert machine.due() == 5.0


def test_a_task_that_has_done_nothing_takes_none() -> None:
    machine = snapshots()
    assert machine.is_news(counted(1)) and not machine.is_news(counted())
    machine.ask()
    assert machine.due() == 0.0 and machine.is_urgent
    machine.postpone(1.0)
    assert machine.due() == 2.0 and not machine.is_urgent, "it would free nothing"


def test_without_copies_a_new_holder_gets_the_next_one_at_once() -> None:
    machine = snapshots()
    machine.change_holder()
    assert machine.due() == -math.inf and not machine.is_protected
    take(machine, counted(3, 5), 7.0, 7.0)
    machine.hold(1, [0, 1])
    assert not machine.advance({EDGE: [4]}) and machine.stable() is None, "consumers may ask for row 4"
    assert machine.advance({EDGE: [5]}) and machine.numbers == [1]
    assert machine.stable() is None, "the holder has yet to hear which one is the oldest"
    assert not machine.is_protected
    machine.hold(0, [1])
    assert machine.is_protected
    assert machine.stable() == counted(3).taken


def test_a_new_holder_to_which_all_are_sent_again_protects_as_they_arrive() -> None:
    machine = snapshots()
    take(machine, counted(3, 5), 1.0, 1.0)
    machine.hold(1, [0, 1])
    take(machine, counted(6, 7), 2.0, 2.0)
    assert machine.advance({EDGE: [6]}) and machine.numbers == [1, 2]
    machine.renew_holder()
    assert machine.due() == math.inf and not machine.is_protected and machine.stable() is None
    machine.hold(1, [1])
    assert machine.is_protected and machine.stable() == counted(3).taken
    assert not machine.advance({EDGE: [7]}), "the holder does not have the second"
    machine.hold(2, [1, 2])
    assert machine.advance({EDGE: [7]}) and math.isfinite(machine.due())


def test_before_there_is_a_holder_one_is_taken_for_it() -> None:
    machine = snapshots(is_held=False)
    assert machine.due() == 1.0 and not machine.has_holder and not machine.is_protected
    take(machine, counted(3, 5), 1.0, 1.0)
    assert machine.due() == math.inf
    machine.hold(1, [0, 1])
    assert machine.has_holder and machine.advance({EDGE: [5]})
    machine.hold(0, [1])
    assert machine.is_protected


# --- which are kept ---------------------------------------------------------------------------------------


def test_while_a_consumer_holds_the_oldest_back_the_newest_is_replaced() -> None:
    machine, kept = snapshots(), []
    for number in range(1, 5):
        take(machine, counted(number, number), 0.0, 0.0)
        machine.hold(number, machine.numbers)
        assert not machine.advance({EDGE: [0]})
        kept.append(machine.numbers)
    assert kept == [[0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert machine.advance({EDGE: [2]}) and machine.numbers == [1, 4]
    machine.hold(4, [1, 4])
    assert machine.stable() == counted(1).taken and machine.stable() is None


def test_one_that_serves_all_consumers_takes_the_place_of_those_before_as_it_arrives() -> None:
    machine = snapshots()
    take(machine, counted(1, 5), 1.0, 1.0, stable=4)
    machine.hold(1, [0, 1])
    assert machine.numbers == [0, 1]
    take(machine, counted(2, 5), 2.0, 2.0, stable=5)
    assert machine.numbers == [2] and machine.covered_at == 0.0 and machine.stable() is None
    machine.hold(2, [2])
    assert machine.covered_at == 2.0 and machine.stable() == counted(2).taken
    take(machine, TaskStateSnapshot(collected=7), 3.0, 3.0)
    assert machine.numbers == [3], "a sink has no consumer"


# --- deaths -----------------------------------------------------------------------------------------------


@dataclass
class Holder:
    """Has the snapshots of one task. What it hears and says is under way for a while."""

    kept: dict[int, TaskStateSnapshot]
    oldest: int = 0
    heard: deque[tuple[int, TaskStateSnapshot | None, list[int]]] = field(default_factory=deque)
    said: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def hear(self) -> None:
        number, snapshot, numbers = self.heard.popleft()
        if snapshot is not None:
            self.kept[number] = snapshot
        self.kept = {each: held for each, held in self.kept.items() if each in numbers}
        self.oldest = numbers[0]
        self.said.append((number, numbers))


class Subtask:
    """A task of a chain, with what it retains for the one behind it. Its rows are numbered only."""

    def __init__(self, version: int, begun: TaskStateSnapshot, holder: Holder) -> None:
        (self.taken,), (self.written,) = begun.taken[EDGE], begun.written[EDGE]
        self.version, self.first, self.stable = version, self.written, self.written
        self.holder = holder
        self.machine = LocalSnapshots(begun, interval=1.0, phase=0.0, cost_max=0.1, now=0.0, begun_at=0.0)
        self.copies = {0: begun}
        self.told: deque[ChannelRows] = deque()
        """Under way to its producer."""

    def counted(self) -> TaskStateSnapshot:
        return TaskStateSnapshot(taken={EDGE: [self.taken]}, written={EDGE: [self.written]})

    def consumed(self, *, last: bool) -> int:
        return self.written if last else self.stable

    def advance(self, *, last: bool) -> None:
        machine, stable = self.machine, {EDGE: [self.consumed(last=last)]}
        is_awaited = machine.awaited is not None and covers(stable, machine.awaited)
        advances = machine.advance(stable)
        assert advances == is_awaited, "consumers wake the task if, and only if, that changes something"
        if advances:
            self.holder.heard.append((0, None, machine.numbers))
        if (rows := machine.stable()) is not None:
            self.told += rows[EDGE]


class Deaths(RuleBasedStateMachine):
    """A chain of three tasks, each of which may die at any time, with its holder or without."""

    COUNT = 3

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 1
        self.begin()

    def begin(self) -> None:
        begun = counted(version=0)
        self.tasks = [self.subtask(each, begun, Holder({0: begun})) for each in range(self.COUNT)]
        for number in range(1, self.COUNT):
            self.attach(number)

    def subtask(self, number: int, begun: TaskStateSnapshot, holder: Holder) -> Subtask:
        """The source makes the same rows again, and keeps its version."""
        self.attempts += number > 0
        return Subtask(self.attempts if number else 1, begun, holder)

    def attach(self, number: int) -> None:
        """A task reads from its producer, as of an attempt of either: nothing that it needs is gone."""
        task, producer = self.tasks[number], self.tasks[number - 1]
        if task.taken.version == producer.version:
            assert producer.stable <= task.taken.row
        else:
            assert producer.stable == producer.first <= task.taken.row, "it gets all of the new version"
            task.taken = ChannelRows(0, producer.version, producer.first)

    @rule(rows=st.integers(1, 5), results=st.lists(st.integers(0, 5), min_size=3, max_size=3))
    def run(self, rows: int, results: list[int]) -> None:
        """Each task reads some rows, and makes some of them."""
        for number, task in enumerate(self.tasks):
            if number:
                rows = max(0, min(rows, self.tasks[number - 1].written - task.taken.row))
                task.taken = task.taken._replace(row=task.taken.row + rows)
            if rows:
                task.written += results[number]

    @rule(number=st.integers(0, 2), steps=st.integers(0, 4))
    def take(self, number: int, steps: int) -> None:
        """A task takes a snapshot if one is due, and some of what is under way arrives."""
        task = self.tasks[number]
        if task.machine.due() < math.inf and task.machine.is_news(task.counted()):
            taken, last = task.counted(), number == self.COUNT - 1
            number_taken = take(task.machine, taken, 0.0, 0.0, task.consumed(last=last))
            task.copies[number_taken] = taken
            task.holder.heard.append((number_taken, taken, task.machine.numbers))
        for _ in range(steps):
            if task.holder.said:
                task.machine.hold(*task.holder.said.popleft())
                task.advance(last=number == self.COUNT - 1)
            elif task.holder.heard:
                task.holder.hear()

    @rule(number=st.integers(1, 2))
    def hear_stable(self, number: int) -> None:
        task, producer = self.tasks[number], self.tasks[number - 1]
        if task.told and (rows := task.told.popleft()).version == producer.version:
            producer.stable = max(rows.row, producer.stable)
            producer.advance(last=False)

    @rule(numbers=st.sets(st.integers(0, 2), min_size=1), heard=st.integers(0, 4))
    def die(self, numbers: set[int], heard: int) -> None:
        """The next attempts go on from what their holders have once they have ``heard`` some more."""
        for number in numbers:
            holder = self.tasks[number].holder
            for _ in range(min(heard, len(holder.heard))):
                holder.hear()
            if holder.oldest not in holder.kept:  # it was lost before, and none serves all consumers yet
                assert not self.tasks[number].machine.is_protected
                self.begin()
                return
            begun = holder.kept[holder.oldest]
            self.tasks[number] = self.subtask(number, begun, Holder({0: begun}))
        for number in range(1, self.COUNT):
            if {number, number - 1} & numbers:
                self.attach(number)

    @rule(number=st.integers(0, 2))
    def lose_holder(self, number: int) -> None:
        task = self.tasks[number]
        task.holder = Holder({})
        task.machine.change_holder()

    @rule(number=st.integers(0, 2))
    def replace_holder(self, number: int) -> None:
        """The task sends again whatever it keeps, unless it has lost what it began with."""
        task, numbers = self.tasks[number], self.tasks[number].machine.numbers
        if numbers[0] == 0 and not task.machine.is_protected:
            return
        task.holder = Holder({})
        task.machine.renew_holder()
        for at, each in enumerate(numbers, 1):
            task.holder.heard.append((each, task.copies[each], numbers[:at]))

    @invariant()
    def what_is_kept_serves_everybody(self) -> None:
        for number, task in enumerate(self.tasks):
            machine, numbers = task.machine, task.machine.numbers
            assert 1 <= len(numbers) <= KEPT_MAX and numbers == sorted(set(numbers))
            oldest = task.holder.kept.get(task.holder.oldest)
            assert oldest is not None or not machine.is_protected
            if oldest is None:
                continue
            if number < self.COUNT - 1:
                assert oldest.written[EDGE][0] <= task.stable
            if number:
                (taken,) = oldest.taken[EDGE]
                producer = self.tasks[number - 1]
                covered = taken.row if taken.version == producer.version else producer.first
                heard = [each.row for each in task.told if each.version == producer.version]
                assert max([producer.stable, *heard]) <= covered


TestDeaths = Deaths.TestCase
TestDeaths.settings = settings(max_examples=examples(150))
