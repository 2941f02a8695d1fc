"""Who has the snapshots of a task, whatever becomes of the workers that hold them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.jobs.holders import HeldTask, Holders, state_lost
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.subtasks import Subtasks
from minishuffle.errors import StateLost, error_from_code
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.reports import SnapshotsHeld

MakeGraph = Callable[..., JobGraph]
KEY = (1, 0)


def report(each: Holders, worker: int, number: int, problem: str = "", *, readable: bool = False) -> bool:
    """The holder of that number says that it has all, or can hold no more."""
    held = HeldTask(KEY, number)
    fact = SnapshotsHeld(attempt=held.of("j1"), problem=problem, readable=readable)
    return each.reported(worker, held, fact, 100.0)


def new_holders() -> Holders:
    """Of a job with two tasks, both on worker 1."""
    vertices = [
        Vertex(name=name, parallelism=1, operators=[name], is_source=name == "read", program=b"")
        for name in ("read", "count")
    ]
    edges = [Edge(source=0, target=1, partitioner="hash")]
    graph = JobGraph(vertices=vertices, edges=edges, settings=JobSettings(guarantee="at_least_once"))
    return Holders(graph, Subtasks(graph, (1,)))


def source(each: Holders) -> tuple[int, int, bool]:
    """Worker and number of the holder that the next attempt reads, and whether that must have something."""
    found = each.for_next(KEY, Resumption())
    assert found.state_holder == bool(found.state_attempt)
    return found.state_worker, found.state_attempt, found.needs_state


def test_without_a_guarantee_nobody_holds(make_graph: MakeGraph) -> None:
    graph = make_graph(1, 1)
    each = Holders(graph, Subtasks(graph, (1,)))
    assert not each and KEY not in each and each.worker_of(KEY) == 0
    assert each.for_next(KEY, Resumption()) == each.for_first(KEY, Resumption()) == Resumption()
    assert each.record(KEY) is None and not each.unprotected()


def test_the_next_attempt_begins_anew_while_no_holder_was_ever_named() -> None:
    each = new_holders()
    assert source(each) == (0, 0, False) and each.record(KEY) is None
    assert [task.key for task in each.unprotected()] == [(0, 0), KEY]


def test_the_last_one_that_had_all_is_read_until_the_next_has() -> None:
    each = new_holders()
    each.name(KEY, 2)
    assert source(each) == (2, 1, False)
    each.name(KEY, 3)
    each.name(KEY, 4)
    assert source(each) == (2, 1, False) and each.take_dropped() == [(3, HeldTask(KEY, 2))]
    assert report(each, 4, 3)
    assert source(each) == (4, 3, False) and each.take_dropped() == [(2, HeldTask(KEY, 1))]
    assert not report(each, 2, 1)


def test_a_holder_that_comes_once_the_task_runs_is_not_the_first_and_has_nothing_yet() -> None:
    each = new_holders()
    each.name(KEY, 2, runs=True)
    assert source(each) == (2, 2, False) and KEY in {task.key for task in each.unprotected()}
    each.freed([KEY])
    assert source(each) == (2, 2, True)
    assert report(each, 2, 2)
    assert source(each) == (2, 2, False) and KEY not in {task.key for task in each.unprotected()}
    each.name(KEY, 3, runs=True)
    assert source(each) == (2, 2, False)
    each.validate()


def test_one_that_cannot_give_what_it_has_is_lost_though_the_next_is_named() -> None:
    each = new_holders()
    each.name(KEY, 2)
    assert report(each, 2, 1)
    each.name(KEY, 3)
    assert source(each) == (2, 1, False)
    assert report(each, 2, 1, "its disk is broken")
    assert source(each) == (3, 2, True) and each.take_dropped() == [(2, HeldTask(KEY, 1))]
    each.validate()


def test_one_that_can_hold_no_more_serves_what_it_has_until_the_next_has_all() -> None:
    each = new_holders()
    each.name(KEY, 2)
    report(each, 2, 1)
    assert report(each, 2, 1, "the disk is full", readable=True)
    assert source(each) == (2, 1, False) and not each.take_dropped() and each.worker_of(KEY) == 0
    each.name(KEY, 3)
    report(each, 3, 2, "the disk is full", readable=True)
    assert source(each) == (2, 1, False) and each.take_dropped() == [(3, HeldTask(KEY, 2))]
    each.name(KEY, 4)
    report(each, 4, 3)
    assert source(each) == (4, 3, False) and each.take_dropped() == [(2, HeldTask(KEY, 1))]
    each.validate()


def test_a_task_that_nobody_else_can_hold_for_is_alone_until_the_next_try() -> None:
    each = new_holders()
    each.name(KEY, 2)
    report(each, 2, 1)
    report(each, 2, 1, "the disk is full", readable=True)
    assert KEY not in each.alone(), "what is there may serve as long as another can be named"
    assert each.unheld(KEY) and not each.unheld(KEY)
    assert KEY in each.alone() and each.take_dropped() == [(2, HeldTask(KEY, 1))]
    assert KEY in {task.key for task in each.unprotected()}
    each.retry(109.9)
    assert each.of(KEY).shunned == (2,) and each.next_time() == 110.0
    each.retry(110.0)
    assert each.of(KEY).shunned == () and each.next_time() is None
    each.name(KEY, 2)
    report(each, 2, 2, "the disk is full", readable=True)
    assert each.next_time() == 120.0, "the second wait is twice as long"
    assert not each.unheld(KEY), "it was said"
    each.retry(120.0)
    each.name(KEY, 2)
    report(each, 2, 3)
    assert source(each) == (2, 3, False) and each.of(KEY).failures == 0 and not each.of(KEY).is_bare
    each.validate()


def test_what_was_lost_is_needed_of_the_next_one_and_not_any_more_once_that_has_all() -> None:
    each = new_holders()
    each.name(KEY, 2)
    each.worker_lost(2)
    tasks = [each_task for each_task in each.unprotected() if each_task.key == KEY]
    assert each.without_state(tasks) == tasks and source(each) == (0, 0, True)
    each.name(KEY, 3)
    assert source(each) == (3, 2, True) and not each.without_state(tasks)
    report(each, 3, 2)
    assert source(each) == (3, 2, False)


def test_a_task_without_a_holder_cannot_begin_anew_once_a_durable_snapshot_has_freed_rows() -> None:
    each = new_holders()
    assert KEY in each.alone() and each.record(KEY) is None
    each.freed([KEY])
    tasks = [task for task in each.unprotected() if task.key == KEY]
    assert each.without_state(tasks) == tasks and each.record(KEY) is not None
    each.name(KEY, 2)
    assert source(each) == (2, 1, True) and KEY not in each.alone()
    assert KEY in {task.key for task in each.unprotected()}, "it has nothing so far"
    report(each, 2, 1)
    each.freed([KEY])
    assert source(each) == (2, 1, False), "the holder has what came after"


def test_a_task_that_had_ended_in_what_its_job_began_with_needs_no_holder() -> None:
    """It takes no snapshot that a holder could have."""
    each = new_holders()
    each.name(KEY, 2)
    each.worker_lost(2)
    (task,) = [task for task in each.unprotected() if task.key == KEY]
    assert each.without_state([task]) == [task]
    task.begin_from(Resumption(has_ended=True))
    assert KEY not in {task.key for task in each.unprotected()} and not each.without_state([task])


def test_all_are_released_when_tasks_begin_with_something_else() -> None:
    each = new_holders()
    each.name(KEY, 2)
    each.name(KEY, 3)
    each.worker_lost(2)
    each.start_over()
    assert source(each) == (0, 0, False) and not each.workers()
    assert each.take_dropped() == [(3, HeldTask(KEY, 2))]
    each.name(KEY, 2)
    assert source(each) == (2, 3, False)


def test_the_error_of_lost_state_names_the_tasks_and_the_reason() -> None:
    error = state_lost(new_holders().unprotected(), "worker 2 was lost")
    assert not error_from_code(error.code, error.text).final and error.code == StateLost.code
    assert error.text.startswith(
        "read[0], count[0] cannot go on alone: no worker has their snapshots any more (wo"
    )


EVENTS = st.lists(
    st.tuples(st.sampled_from(["name", "all", "fails", "lost"]), st.integers(2, 5)), max_size=20
)


@given(EVENTS)
def test_nobody_reads_a_holder_that_is_gone_and_none_goes_before_its_successor_has_all(
    events: list[tuple[str, int]],
) -> None:
    each = new_holders()
    there: dict[int, int] = {}
    """Holders that were named and are neither lost nor released, with their workers."""
    has: int = 0
    """The last one that had all; 0: none, or it is gone."""
    for kind, worker in events:
        holder = each.of(KEY)
        if kind == "name" and worker != holder.worker and worker not in holder.shunned:
            each.name(KEY, worker)
            there[holder.number] = worker
        elif kind == "lost":
            each.worker_lost(worker)
            there = {number: at for number, at in there.items() if at != worker}
        elif kind in ("all", "fails") and holder.worker:
            report(each, holder.worker, holder.number, "full" if kind == "fails" else "")
            has = holder.number if kind == "all" else has
        for _, held in each.take_dropped():
            there.pop(held.number, None)
            assert held.number != has or kind == "fails"
        each.validate()
        at, number, needs = source(each)
        assert there.get(number, 0) == at
        assert {held.number for worker in range(2, 6) for held in each.on(worker)} == set(there)
        if has in there:
            assert number == has and not needs
        again = new_holders()
        again.recall(KEY, each.record(KEY))
        assert source(again) == (at, number, needs)
