"""Which worker processes are started in place of lost ones, and when."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.replacements import (
    ORDER_BACKOFF,
    ORDER_FAILURES_MAX,
    RECOVERY_SECONDS_MAX,
    REGISTRATION_SECONDS_MAX,
    SETTLE_SECONDS,
    CoordinatorRestarts,
    Orders,
    Replacements,
    SignalSequence,
)
from minishuffle.wire.messages import WorkerReport
from minishuffle.wire.requests import ClusterStatus, JobInfo, TaskInfo, WorkerInfo


def worker(number: int, *, state: str = "alive") -> WorkerInfo:
    return WorkerInfo(
        worker=number,
        epoch=number,
        state=state,
        host="h",
        pid=number,
        data_port=1,
        metrics_port=1,
        slots=1,
        slots_free=0,
        heartbeat_age_seconds=0.0,
        report=WorkerReport(),
        peers=[],
    )


def status(workers: Iterable[WorkerInfo], *states: str, job: str = "running") -> ClusterStatus:
    """One job, whose tasks have these states."""
    tasks = [
        TaskInfo(operator=0, name="t", index=i, attempt=1, state=state, worker=1, counters=TaskCounters())
        for i, state in enumerate(states)
    ]
    info = JobInfo(job="j1", name="j", state=job, submitted_at=0.0, tasks=tasks)
    return ClusterStatus(
        cluster="c", version="0", term=1, pid=1, web_port=0, workers=list(workers), jobs=[info]
    )


def test_a_process_takes_the_place_and_the_id_of_a_lost_one() -> None:
    replacements = Replacements([1, 2])
    assert not replacements.pending
    assert replacements.due(status([worker(1), worker(2)]), 1.0) == []
    replacements.lost(2, 2.0)
    assert replacements.pending
    assert replacements.due(status([worker(1)]), 2.0) == [2]
    assert not replacements.pending
    assert replacements.due(status([worker(1)]), 3.0) == []


def test_it_waits_until_the_coordinator_knows_of_the_loss() -> None:
    replacements = Replacements([1])
    replacements.lost(1, 2.0)
    assert replacements.due(status([worker(1)]), 2.0) == [], "its id is still held"
    assert replacements.due(status([worker(1, state="lost")]), 2.1) == [1]


@pytest.mark.parametrize("state", ["lost", "restarting", "created"])
def test_it_waits_until_the_recovery_is_over_but_not_for_ever(state: str) -> None:
    replacements = Replacements([1, 2])
    for at, recovered in ((2.0, 3.0), (50.0, math.inf)):
        replacements.lost(1, at)
        due = min(recovered + SETTLE_SECONDS, at + RECOVERY_SECONDS_MAX)
        assert replacements.due(status([worker(2)], "running", state), min(recovered, due - 0.1)) == []
        now = "running" if recovered < due else state
        assert replacements.due(status([worker(2)], "running", now), due - 0.1) == []
        assert replacements.due(status([worker(2)], "running", now), due) == [1]


def test_it_waits_for_links_of_tasks_that_run_and_for_nothing_without_a_job() -> None:
    replacements = Replacements([1, 2])
    replacements.lost(1, 2.0)
    assert replacements.due(status([worker(2)], "running"), 2.0 + SETTLE_SECONDS - 0.1) == []
    assert replacements.due(status([worker(2)], "running"), 2.0 + SETTLE_SECONDS) == [1]
    replacements.lost(1, 20.0)
    assert replacements.due(status([worker(2)], "finished", job="finished"), 20.0) == [1]


def test_a_task_that_waits_for_a_slot_has_one_started_at_once() -> None:
    replacements = Replacements([1, 2])
    replacements.lost(1, 2.0)
    waiting = status([worker(2)], "restarting", "waiting for a slot")
    assert replacements.due(waiting, 2.0) == [1]


def test_a_process_that_is_lost_and_runs_on_hangs_and_is_replaced_at_once() -> None:
    replacements = Replacements([1, 2])
    both = {1: 1, 2: 2}
    assert replacements.hung([worker(1), worker(2)], both, 1.0) == []
    assert replacements.hung([worker(1), worker(2, state="awaited")], both, 2.0) == []
    lost = [worker(1), worker(2, state="lost")]
    assert replacements.hung(lost, both, 3.0) == [2]
    assert replacements.pending
    assert replacements.due(status(lost), 3.0) == [2]
    assert replacements.hung(lost, {1: 1}, 3.1) == [], "that of the new process is not known yet"
    assert replacements.hung(lost, {1: 1, 2: 22}, 3.2) == [], "that was the process before"
    assert replacements.hung([worker(1), worker(2, state="gone")], both, 4.0) == [], "it has left in order"
    assert not replacements.pending


def test_a_process_that_does_not_come_to_register_hangs() -> None:
    replacements = Replacements([1])
    assert replacements.hung([], {1: 1}, 1000.0) == [], "the first ones have registered"
    replacements.lost(1, 1000.0)
    assert replacements.due(status([]), 1000.0) == [1]
    late = 1000.0 + REGISTRATION_SECONDS_MAX
    assert replacements.hung([worker(1, state="lost")], {1: 11}, late - 0.1) == []
    assert replacements.hung([worker(1, state="lost")], {1: 11}, late) == [1]
    assert replacements.due(status([]), late) == [1]
    assert replacements.hung([worker(1)], {1: 1}, late + 1.0) == []
    assert replacements.hung([], {1: 1}, 9999.0) == [], "it has registered, and was forgotten since"


def test_a_process_that_hangs_is_continued_and_asked_and_killed_a_second_later() -> None:
    sequence = SignalSequence(5.0)
    assert sequence.due(4.9) == []
    assert sequence.due(5.0) == [signal.SIGCONT, signal.SIGTERM]
    assert sequence.due(5.9) == []
    assert sequence.due(6.0) == [signal.SIGKILL]
    assert sequence.due(100.0) == []
    late = SignalSequence(5.0)
    assert late.due(7.0) == [signal.SIGCONT, signal.SIGTERM, signal.SIGKILL]


def test_one_that_outlives_sigkill_is_named_once() -> None:
    sequence = SignalSequence(5.0)
    assert [sequence.outlived(at) for at in (6.0, 7.9, 8.0, 8.1, 99.0)] == [False, False, True, False, False]


def test_jobs_that_have_ended_or_are_ending_are_not_waited_for() -> None:
    replacements = Replacements([1])
    replacements.lost(1, 2.0)
    assert replacements.due(status([], "created", "restarting", job="failing"), 2.0) == [1]


def test_a_process_that_is_lost_soon_each_time_is_started_less_and_less_often() -> None:
    replacements = Replacements([1])
    now, waits = 0.0, []
    for _ in range(8):
        replacements.lost(1, now)
        begin = now
        while not replacements.due(status([]), now):
            now += 0.25
        waits.append(now - begin)
        now += 1.0
    assert waits == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    now += 10.0
    replacements.lost(1, now)
    assert replacements.due(status([]), now) == [1], "it ran for a while"


@given(st.data())
def test_in_the_end_there_are_as_many_as_at_the_beginning(data: st.DataObject) -> None:
    """Processes die and register in any order."""
    ids = [1, 2, 3]
    alive, starting = set(ids), set[int]()
    replacements, now = Replacements(ids), 0.0

    def look() -> None:
        due = replacements.due(status(map(worker, alive)), now)
        assert not (alive | starting) & set(due)
        starting.update(due)

    for _ in range(data.draw(st.integers(0, 12), label="steps")):
        now += data.draw(st.sampled_from([0.1, 6.0]))
        match data.draw(st.sampled_from(["dies", "dies", "registers", "looks"])):
            case "dies" if alive or starting:
                number = data.draw(st.sampled_from(sorted(alive | starting)))
                alive.discard(number)
                starting.discard(number)
                replacements.lost(number, now)
            case "registers" if starting:
                number = data.draw(st.sampled_from(sorted(starting)))
                starting.remove(number)
                alive.add(number)
            case _:
                look()
    now += 20.0
    look()
    assert alive | starting == set(ids)
    assert not replacements.pending


def test_a_coordinator_that_is_lost_soon_each_time_starts_less_and_less_soon_and_not_for_ever() -> None:
    restarts = CoordinatorRestarts(100.0)
    waits, now = [], 101.0
    while (due := restarts.due(now)) is not None:
        waits.append(due - now)
        restarts.started(due)
        now = due + 1.0
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_a_coordinator_that_ran_for_a_while_starts_again_at_once_any_number_of_times() -> None:
    restarts, now = CoordinatorRestarts(100.0), 100.0
    for _ in range(3 * limits.COORDINATOR_RESTARTS_MAX):
        now += limits.YOUNG_SECONDS
        assert restarts.due(now) == now
        restarts.started(now)


# --- workers that others start ---------------------------------------------------------------------


def test_all_are_ordered_at_once_and_no_more() -> None:
    orders = Orders(3)
    assert orders.due(0.0) == [1, 2, 3]
    assert orders.due(0.0) == []


def test_a_worker_that_ran_is_replaced_at_once_under_a_new_number() -> None:
    orders = Orders(2)
    orders.due(0.0)
    orders.ended(1, "its executor is lost", True, 10.0)
    assert orders.due(10.0) == [3]
    assert orders.open == {2, 3}
    assert not orders.first_failure


def test_another_order_takes_the_place_of_one_whose_worker_is_lost_before_that_has_ended() -> None:
    orders = Orders(2)
    orders.due(0.0)
    orders.lost(1)
    assert orders.due(10.0) == [3]
    orders.ended(1, "it hung", True, 11.0)
    assert orders.due(11.0) == []
    assert orders.open == {2, 3}


@pytest.mark.parametrize("failures, seconds", [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)])
def test_after_a_failure_the_next_order_waits_longer_each_time(failures: int, seconds: float) -> None:
    orders = Orders(1)
    now = 0.0
    for _ in range(failures):
        (order,) = orders.due(now)
        orders.ended(order, "no Python", False, now)
        before, now = now, now + ORDER_BACKOFF.longest
    assert orders.due(before + seconds - 0.001) == []
    assert orders.due(before + seconds) == [failures + 1]


def test_failures_in_a_row_end_it_with_the_first_reason() -> None:
    orders = Orders(1)
    for number in range(ORDER_FAILURES_MAX):
        assert not orders.failed
        (order,) = orders.due(number * 100.0)
        orders.ended(order, f"reason {number}", False, number * 100.0)
    assert orders.failed
    assert orders.first_failure == "reason 0"
    assert orders.due(1e9) == []


def test_a_worker_that_registered_ends_the_row() -> None:
    orders = Orders(1)
    now = 0.0
    for number in range(3 * ORDER_FAILURES_MAX):
        (order,) = orders.due(now)
        orders.ended(order, "x", number % ORDER_FAILURES_MAX == 0, now)
        now += 100.0
    assert not orders.failed


@given(
    wanted=st.integers(1, 5),
    steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 4), st.booleans())),
)
def test_orders_never_exceed_what_is_wanted_and_no_number_comes_twice(
    wanted: int, steps: list[tuple[float, int, bool]]
) -> None:
    orders = Orders(wanted)
    placed: list[int] = []
    now = 0.0
    for seconds, which, was_registered in steps:
        now += seconds
        placed += orders.due(now)
        assert len(orders.open) <= wanted
        assert orders.open <= set(placed)
        there = sorted(orders.open)
        if which < len(there):
            orders.ended(there[which], "it ended", was_registered, now)
    assert placed == sorted(set(placed))
    due = orders.due(now + ORDER_BACKOFF.longest)
    assert bool(due) <= (not orders.failed)
    assert orders.failed or len(orders.open) == wanted
