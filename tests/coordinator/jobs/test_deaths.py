"""Deaths of processes: which of them count against which subtasks, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs.deaths import (
    COUNTS,
    REACH_ROWS,
    SETTLED_SECONDS,
    STALLED_SECONDS,
    UNCLEAR_DEATHS_MAX,
    Deaths,
    end_in_words,
    kind_of,
)
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import DeployTasks, PoisonRow, PoisonSearch, TaskReport, WorkerLost
from minishuffle.wire.requests import Accepted, GetEvents, JobEvent, JobEvents, UserCall, WorkerEnded

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
KEY = (0, 0)
MAX = 4
GIB = 1024 * limits.MIB
FATAL = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
UNANNOUNCED = ", which was not its own doing"
IN_HAND = "the attempt was inside user code with {} rows in hand behind the {} that it had done"


def ended(**fields: Any) -> WorkerEnded:
    return WorkerEnded(worker=1, epoch=1, **fields)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "counts", "words"),
    [
        *((ended(signal=name), "yes", f"was killed by {name}") for name in FATAL),
        *((ended(code=code), "yes", f"ended with code {code}{UNANNOUNCED}") for code in (0, 1, 139)),
        (
            ended(signal="SIGKILL", out_of_memory=True),
            "yes",
            "was killed for want of memory (SIGKILL, and its cgroup counts an oom_kill)",
        ),
        *(
            (
                ended(signal=name, hung=True),
                "yes",
                f"did not react, as if a function held the interpreter: its launcher sent {name}",
            )
            for name in ("SIGKILL", "SIGTERM")
        ),
        (ended(signal="SIGKILL"), "no", "was killed by SIGKILL"),
        (ended(signal="SIGTERM"), "no", "was killed by SIGTERM"),
        (ended(signal="SIGTERM", out_of_memory=True), "no", "was killed by SIGTERM"),
        (ended(signal="signal 40"), "no", "was killed by signal 40"),
    ],
)
def test_a_death_counts_if_user_code_may_bring_it_about(end: WorkerEnded, counts: str, words: str) -> None:
    assert (COUNTS[kind_of(end)], end_in_words(end)) == (counts, words)


# --- one job's ------------------------------------------------------------------------------------


def call(attempt: int, position: int = 0, rows: int = 0) -> UserCall:
    return UserCall(job="j1", operator=0, index=0, attempt=attempt, position=position, rows=rows)


def report(
    attempt: int,
    position: int,
    rows: int = 0,
    *,
    key: tuple[int, int] = (0, 0),
    inside: bool = True,
    out: int = 0,
) -> TaskReport:
    return TaskReport(
        attempt=AttemptId.of("j1", *key, attempt),
        counters=TaskCounters(records_out=out),
        position=position,
        in_hand=rows,
        inside=inside,
    )


def counts(deaths: Deaths, *calls: UserCall) -> list[int | None]:
    found = [deaths.count(each, "it died", 1.0) for each in calls]
    return [None if each is None else each.count for each in found]


def test_deaths_at_the_same_place_add_up_and_each_counts_once() -> None:
    deaths = Deaths(MAX, 0.0)
    assert counts(deaths, call(1, 0, 100), call(1, 0, 100), call(2, 0, 50), call(1, 0, 100)) == [
        1,
        None,
        2,
        None,
    ]
    last = deaths.of(KEY)
    assert last is not None and (last.attempt, last.position, last.rows) == (2, 0, 50)
    assert counts(deaths, call(3, 0, 50), call(4, 0, 50)) == [3, 4]
    reached = deaths.of(KEY)
    assert reached is not None and deaths.too_many(KEY)
    assert deaths.limit_reached("map[0]", reached).text == (
        "map[0] was inside user code each of the 4 times that its worker died (restart_failures_max), and "
        f"got no further; the last time it died; {IN_HAND.format(50, 0)}: correct the function, give workers "
        "more memory if it takes that much, or allow more with --set restart_failures_max=N"
    )


@pytest.mark.parametrize(("position", "count"), [(0, 2), (1_099, 2), (1_100, 1), (9_000, 1)])
def test_an_attempt_that_died_behind_the_place_of_the_last_one_begins_anew(position: int, count: int) -> None:
    deaths = Deaths(MAX, 0.0)
    assert counts(deaths, call(1, 1_000, 100), call(2, position, 7)) == [1, count]


@pytest.mark.parametrize(("position", "cleared"), [(0, False), (1_099, False), (1_100, True)])
def test_an_attempt_that_gets_past_the_place_clears_the_subtask(position: int, cleared: bool) -> None:
    deaths = Deaths(MAX, 0.0)
    counts(deaths, call(1, 1_000, 100))
    assert not deaths.note_report(KEY, report(1, 5_000), 1.0), "that is the one that died"
    assert deaths.note_report(KEY, report(2, position), 2.0) == cleared
    assert (deaths.of(KEY) is None) == cleared


def test_without_rows_in_hand_the_next_row_is_past_it() -> None:
    deaths = Deaths(MAX, 0.0)
    counts(deaths, call(1, 0, 0))
    assert not deaths.note_report(KEY, report(2, 0), 1.0)
    assert deaths.note_report(KEY, report(2, 1), 2.0)


def test_an_attempt_that_still_moves_a_while_after_its_first_row_clears_the_subtask() -> None:
    deaths = Deaths(MAX, 0.0)
    counts(deaths, call(1, 1_000_000, 100))
    assert not deaths.note_report(KEY, report(2, 10), 5.0)
    assert not deaths.note_report(KEY, report(2, 10), 5.0 + SETTLED_SECONDS), "it does not move"
    assert deaths.note_report(KEY, report(2, 11), 5.5 + SETTLED_SECONDS)


def test_a_subtask_that_has_finished_is_cleared() -> None:
    deaths = Deaths(MAX, 0.0)
    counts(deaths, call(1))
    assert deaths.finished(KEY) and not deaths.finished(KEY)
    assert deaths.of(KEY) is None


def test_a_subtask_is_stalled_when_no_attempt_of_it_has_passed_anything_on() -> None:
    deaths = Deaths(MAX, 100.0)
    assert not deaths.is_stalled(KEY, 100.0 + STALLED_SECONDS - 0.1)
    assert deaths.is_stalled(KEY, 100.0 + STALLED_SECONDS)
    deaths.note_report(KEY, report(1, 5), 200.0)
    deaths.note_report(KEY, report(1, 5, out=1), 201.0)
    deaths.note_report(KEY, report(2, 0), 205.0)
    assert not deaths.is_stalled(KEY, 201.0 + STALLED_SECONDS - 0.1)
    assert deaths.is_stalled(KEY, 201.0 + STALLED_SECONDS)


def test_what_an_attempt_had_in_hand_is_known_from_its_heartbeats() -> None:
    deaths = Deaths(MAX, 0.0)
    assert deaths.last_seen(KEY, 1) == (0, 0), "it said nothing: it may have been inside"
    deaths.note_report(KEY, report(1, 30, 4), 1.0)
    assert (deaths.last_seen(KEY, 1), deaths.last_seen(KEY, 2)) == ((30, 4), (0, 0))
    deaths.note_report(KEY, report(1, 34, inside=False), 2.0)
    assert deaths.last_seen(KEY, 1) is None


@pytest.mark.parametrize(
    ("stuck", "own", "strategy"),
    [
        (0, "individual", "individual"),
        (3, "individual", "individual"),
        (4, "individual", "region"),
        (6, "individual", "region"),
        (7, "individual", "full"),
        (4, "full", "full"),
        (7, "region", "full"),
    ],
)
def test_the_more_die_in_the_same_step_the_more_restarts(stuck: int, own: str, strategy: str) -> None:
    deaths = Deaths(10, 0.0)
    for attempt in range(1, stuck + 2):
        deaths.count(call(attempt), "it died", 1.0, "" if attempt == 1 else "inputs")
    assert deaths.strategy(own) == strategy
    deaths.count(call(stuck + 2), "it died", 1.0, "outputs")
    assert deaths.strategy(own) == own, "it has got further"
    deaths.count(call(stuck + 3), "it died", 1.0, "")
    assert deaths.strategy(own) == own, "it was back"


def test_the_journal_has_what_counts() -> None:
    deaths, recalled = Deaths(MAX, 0.0), Deaths(MAX, 0.0)
    assert deaths.record(KEY) is None
    recalled.recall(KEY, None, ())
    assert counts(deaths, call(1, 5, 6), call(2, 5, 6)) == [1, 2]
    recalled.recall(KEY, deaths.record(KEY), ())
    assert recalled.of(KEY) == deaths.of(KEY) != replace(deaths.counted()[KEY], count=1)


# --- poison ---------------------------------------------------------------------------------------


def with_row(attempt: int, position: int, rows: int, row: int) -> UserCall:
    return call(attempt, position, rows).model_copy(update={"row": row, "place": 3})


def test_a_job_that_may_lose_rows_looks_for_none() -> None:
    deaths = Deaths(1, 0.0)
    counts(deaths, with_row(1, 0, 1, 77))
    assert deaths.search(KEY) is None and deaths.find_row(KEY) is None and deaths.too_many(KEY)


def test_the_row_that_is_alone_in_hand_at_the_limit_is_found_and_clears_its_subtask() -> None:
    deaths = Deaths(2, 0.0, searches=True)
    assert deaths.search(KEY) is None
    counts(deaths, with_row(1, 10, 1, 77))
    assert deaths.find_row(KEY) is None, "it may have been chance"
    assert deaths.search(KEY) == PoisonSearch(row=77, rows=1, place=3, reach=22 + REACH_ROWS)
    counts(deaths, with_row(2, 3, 1, 77))
    found = deaths.find_row(KEY)
    left = deaths.of(KEY)
    assert found is not None and left is not None
    assert (found.count, found.earlier, left.count, left.earlier, left.in_a_row) == (2, 0, 0, 2, 2)
    row = PoisonRow(
        row=77,
        place=3,
        reach=8 + REACH_ROWS,
        why="took this record each of the 2 times that its worker died; the last time it died",
    )
    assert deaths.search(KEY) == PoisonSearch(reach=8 + REACH_ROWS, found=[row])
    recalled = Deaths(2, 0.0, searches=True)
    recalled.recall(KEY, deaths.record(KEY), deaths.poison_record(KEY))
    assert recalled.search(KEY) == deaths.search(KEY)
    assert counts(deaths, with_row(3, 50, 9, 78)) == [1] and deaths.counted()[KEY].in_a_row == 3
    assert deaths.search(KEY) == PoisonSearch(row=78, rows=9, place=3, reach=118 + REACH_ROWS, found=[row])


@pytest.mark.parametrize(
    ("rows", "row", "further"), [(1, 7, 2), (64, 7, 8), (65, 7, 9), (9, 0, 1), (0, 0, 0)]
)
def test_a_search_has_some_more_deaths_in_which_to_find_its_row(rows: int, row: int, further: int) -> None:
    deaths = Deaths(MAX, 0.0, searches=True)
    for number in range(1, MAX + further):
        counts(deaths, with_row(number, 0, rows if number < 3 else min(rows, 2), row))
        assert not deaths.too_many(KEY)
    counts(deaths, with_row(MAX + further, 0, min(rows, 2), row))
    assert deaths.too_many(KEY)


@pytest.mark.parametrize(
    ("died", "found"),
    [
        # what comes to the operator at place 1: (rows, first row), beside one input row, 9
        ([(50, 70), (1, 75), (1, 75)], (75, 1)),
        ([(1, 75), (1, 75)], (75, 1)),
        ([(50, 70), (1, 75)], None),  # it has yet to come again
        ([(1, 70), (1, 71)], (9, 0)),  # it is another one each time
        ([(50, 70), (7, 71), (7, 72)], (9, 0)),
        ([(1, 0)], (9, 0)),  # no exchange would take it
    ],
)
def test_a_row_in_front_of_a_later_operator_is_found_if_it_comes_again(
    died: list[tuple[int, int]], found: tuple[int, int] | None
) -> None:
    deaths = Deaths(1, 0.0, searches=True)
    for number, (rows, row) in enumerate(died, start=1):
        assert deaths.of(KEY) is None or deaths.find_row(KEY) is None
        fields = {"row": 9, "place": 1, "place_rows": rows, "place_row": row}
        counts(deaths, call(number, 0, 1).model_copy(update=fields))
        assert not deaths.too_many(KEY) or found is not None
        search = deaths.search(KEY)
        assert search is not None
        assert (search.place, search.place_rows, search.place_row) == (1, rows, row)
    left = deaths.find_row(KEY)
    assert (left is not None) == (found is not None)
    if left is not None and found is not None:
        text = "its worker {} times, in 'map': the next attempt leaves {}, or fails"
        what = "it out" if found[1] else "out all that comes of it there"
        assert text.format(len(died), what) in deaths.row_found("t[0]", left, ["count", "map"])
        search = deaths.search(KEY)
        assert search is not None and search.place == -1
        assert [(each.row, each.at, each.place) for each in search.found] == [(*found, 1)]


def test_a_row_that_came_of_no_input_row_is_found_where_it_went() -> None:
    deaths = Deaths(2, 0.0, searches=True)
    counts(deaths, call(1), call(2))
    for number in (3, 4):
        assert not deaths.too_many(KEY), (
            "the second attempt may have begun before the first death was counted"
        )
        fields = {"place": 2, "place_rows": 1, "place_row": 7}
        counts(deaths, call(number, 40, 0).model_copy(update=fields))
    assert deaths.find_row(KEY) is not None
    search = deaths.search(KEY)
    assert search is not None and [(each.row, each.at) for each in search.found] == [(7, 2)]


def test_a_job_that_reaches_its_limit_names_the_step_that_the_attempt_was_in() -> None:
    deaths = Deaths(1, 0.0, searches=True)
    for number, (place, named) in enumerate([(1, ", in 'map': co"), (-1, "done: co"), (5, "done: co")], 1):
        died = deaths.count(call(number).model_copy(update={"place": place}), "it died", 1.0)
        assert died is not None and named in deaths.limit_reached("t[0]", died, ["count", "map"]).text


def test_rows_are_looked_for_although_none_were_in_hand() -> None:
    deaths = Deaths(MAX, 0.0, searches=True)
    counts(deaths, call(1, 40, 0))
    search = deaths.search(KEY)
    assert search is not None and (search.row, search.rows) == (0, 1), "asynchronous calls may have had them"


def test_deaths_that_may_be_anothers_decide_later() -> None:
    deaths = Deaths(MAX, 0.0, searches=True)
    for number in range(1, MAX + UNCLEAR_DEATHS_MAX):
        counts(deaths, call(number).model_copy(update={"place": 0}))
        assert deaths.too_many(KEY) == (number >= MAX) and not deaths.too_many(KEY, alone=False)
    counts(deaths, call(MAX + UNCLEAR_DEATHS_MAX).model_copy(update={"place": 0}))
    assert deaths.too_many(KEY, alone=False)


def test_so_many_rows_of_a_subtask_are_left_out_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minishuffle.coordinator.jobs.deaths.POISON_ROWS_MAX", 2)
    deaths = Deaths(1, 0.0, searches=True)
    for number, is_found in [(1, True), (2, True), (3, False)]:
        counts(deaths, with_row(number, 0, 1, number))
        assert (deaths.find_row(KEY) is not None) == is_found
    assert deaths.too_many(KEY)
    search = deaths.search(KEY)
    assert search is not None and [each.row for each in search.found] == [1, 2]


def test_a_replay_is_not_past_the_place_before_it_took_longer_than_the_one_that_died() -> None:
    deaths = Deaths(MAX, 0.0, searches=True)
    deaths.note_report(KEY, report(1, 1), 100.0)
    deaths.count(call(1, 1_000, 10), "it died", 120.0)
    assert not deaths.note_report(KEY, report(2, 1), 200.0)
    assert not deaths.note_report(KEY, report(2, 1_020), 200.0 + SETTLED_SECONDS + 39.0)
    assert deaths.note_report(KEY, report(2, 1_021), 200.0 + SETTLED_SECONDS + 40.0)


@pytest.mark.parametrize("fields", [{"row": 7, "rows": 10}, {"place": 1, "place_row": 7, "place_rows": 10}])
def test_an_attempt_that_takes_rows_in_pieces_has_more_time_to_get_to_the_place(fields: Any) -> None:
    deaths = Deaths(MAX, 0.0, searches=True)
    deaths.count(call(1, 1_000, 0).model_copy(update=fields), "it died", 120.0)
    assert not deaths.note_report(KEY, report(2, 1), 200.0)
    assert not deaths.note_report(KEY, report(2, 1_020), 200.0 + SETTLED_SECONDS + 59.0)
    assert deaths.note_report(KEY, report(2, 1_021), 200.0 + SETTLED_SECONDS + 60.0)


def test_a_row_that_ends_its_process_does_not_widen_the_restart_strategy() -> None:
    deaths = Deaths(3, 0.0, searches=True)
    for number in (1, 2, 3):
        deaths.count(with_row(number, 0, 5, 7), "it died", 1.0, "first record")
    assert deaths.strategy("individual") == "individual"


# --- the coordinator ------------------------------------------------------------------------------


@pytest.fixture
def told(cluster: FakeCluster) -> tuple[FakeWorker, FakeWorker]:
    """Two workers whose launchers tell how they end."""
    return cluster.add(end_is_told=True), cluster.add(end_is_told=True)


def killed(worker: FakeWorker, *calls: UserCall, **fields: Any) -> WorkerEnded:
    how = fields or {"signal": "SIGSEGV"}
    return WorkerEnded(
        **{"worker": worker.worker, "epoch": worker.epoch, "recorded": True, "calls": list(calls), **how}
    )


def start(cluster: FakeCluster, graph: JobGraph) -> None:
    cluster.submit(graph)
    cluster.report_all("j1", "running")


def events(cluster: FakeCluster, kind: str) -> list[JobEvent]:
    reply = cluster.request(GetEvents(job="j1"))
    assert isinstance(reply, JobEvents)
    return [event for event in reply.events if event.kind == kind]


def one_slot(make_graph: MakeGraph, **settings: Any) -> JobGraph:
    return make_graph(1, 1, **({"restart_strategy": "individual", "restart_failures_max": 3} | settings))


def subtask(attempt: int, **fields: Any) -> UserCall:
    return call(attempt, **fields).model_copy(update={"operator": 1})


def test_a_function_that_ends_its_process_again_and_again_fails_the_job(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    workers = [cluster.add(end_is_told=True)]
    start(cluster, one_slot(make_graph))
    for attempt in (1, 2, 3):
        assert cluster.show("j1").state in ("created", "running")
        worker = workers[-1]
        cluster.lose(worker)
        assert cluster.request(killed(worker, subtask(attempt, rows=9))) == Accepted()
        workers.append(cluster.add(end_is_told=True, requested_worker=worker.worker))
    info = cluster.show("j1")
    assert info.state == "failed"
    assert info.causes[0].code == ResourceExhausted.code
    assert info.causes[0].text.startswith(
        "count[0] was inside user code each of the 3 times that its worker died (restart_failures_max), and "
        f"got no further; the last time worker 1 was killed by SIGSEGV; {IN_HAND.format(9, 0)}: correct"
    )
    assert info.causes[0].task == "count[0]"
    assert [event.text.partition(";")[0] for event in events(cluster, "death counted")] == [
        f"count[0]: death {number} of 3" for number in (1, 2, 3)
    ]
    assert [event.attempt for event in events(cluster, "death counted")] == [1, 2, 3]


@pytest.mark.parametrize("how", [{"signal": "SIGKILL"}, {"signal": "SIGTERM"}])
def test_a_process_that_somebody_ends_counts_for_nobody(
    cluster: FakeCluster, make_graph: MakeGraph, how: dict[str, Any]
) -> None:
    worker = cluster.add(end_is_told=True)
    start(cluster, one_slot(make_graph))
    for attempt in range(1, 9):
        cluster.lose(worker)
        assert cluster.request(killed(worker, subtask(attempt), **how)) == Accepted()
        worker = cluster.add(end_is_told=True, requested_worker=1)
        cluster.report_all("j1", "running", attempt=attempt + 1)
    assert cluster.show("j1").state == "running"
    assert cluster.show("j1").restarts == {"lost": 16}
    assert events(cluster, "death counted") == []


def test_a_launcher_may_know_of_an_end_before_the_link_closes(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    link = told[0].link
    assert cluster.request(killed(told[0], subtask(1))) == Accepted()
    assert len(events(cluster, "death counted")) == 1
    (lost, _) = events(cluster, "task lost")
    assert lost.text.endswith("was lost: its process was killed by SIGSEGV")
    assert told[0].got(WorkerLost), "should it be there after all"
    assert link in cluster.closed
    cluster.do(cluster.state.link_closed(link, cluster.now))
    cluster.advance(10.0)
    assert cluster.request(killed(told[0], subtask(1))) == Accepted()
    assert len(events(cluster, "death counted")) == 1, "it is told twice"
    assert {task.worker for task in cluster.show("j1").tasks} == {2}


def test_a_report_of_an_earlier_process_ends_no_later_one(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    cluster.lose(told[0])
    again = cluster.add(end_is_told=True, requested_worker=1)
    cluster.request(killed(told[0], subtask(1)))
    assert again.got(WorkerLost) == []
    assert len(events(cluster, "death counted")) == 1


def test_a_subtask_that_a_death_counts_against_waits_to_hear_how_the_next_one_ended(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    third = cluster.add(end_is_told=True)
    start(cluster, one_slot(make_graph))
    cluster.lose(told[0])
    assert [task.worker for task in cluster.show("j1").tasks] == [2, 2], "the first one is at once"
    cluster.request(killed(told[0], subtask(1)))
    cluster.report_all("j1", "running", attempt=2)
    cluster.lose(told[1])
    assert {task.state for task in cluster.show("j1").tasks} == {"restarting"}, "both are of the same slot"
    cluster.advance(0.1)
    cluster.request(killed(told[1], subtask(2)))
    assert {task.name: task.worker for task in cluster.show("j1").tasks} == {"read": 3, "count": 3}
    cluster.report_all("j1", "running", attempt=3)
    cluster.lose(third)
    cluster.add(end_is_told=True)
    cluster.advance(limits.END_REPORT_SECONDS - 0.1)
    assert {task.state for task in cluster.show("j1").tasks} == {"restarting"}
    cluster.advance(0.2)
    assert {task.state for task in cluster.show("j1").tasks} == {"created"}, "nobody told"
    assert cluster.show("j1").state in ("created", "running")


@pytest.mark.parametrize(
    ("inside", "stalled", "found"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_nobody_knows_how_a_process_ended(
    cluster: FakeCluster, make_graph: MakeGraph, inside: bool, stalled: bool, found: int
) -> None:
    worker, _ = cluster.add(), cluster.add()
    start(cluster, one_slot(make_graph))
    own = report(1, 5, 3, key=(1, 0), inside=inside)
    other = report(1, 5, 3, inside=False)
    cluster.advance(60.0)
    beat = {"tasks": [own, other], "memory_bytes": 3 * GIB}
    cluster.heartbeat(worker, **beat)
    for _ in range(int(STALLED_SECONDS * 2) if stalled else 2):
        cluster.advance(0.5)
        cluster.heartbeat(worker, **beat)
    cluster.lose(worker)
    counted = events(cluster, "death counted")
    assert [event.text for event in counted] == [
        f"count[0]: death 1 of 3; worker 1 (pid {worker.about.pid} on 10.0.0.1) was lost: its control link "
        f"closed, and it used 3,072 MiB at its last report; {IN_HAND.format(3, 5)}"
    ][:found]


def test_a_launcher_that_does_not_tell_is_waited_for_and_then_nobody_knows(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    cluster.advance(60.0)
    cluster.lose(told[0])
    cluster.advance(limits.END_REPORT_SECONDS - 0.1)
    assert events(cluster, "death counted") == []
    cluster.advance(0.2)
    assert [event.operator for event in events(cluster, "death counted")] == [0, 1], (
        "nothing was heard of them"
    )


@pytest.mark.parametrize("is_told", [True, False])
def test_an_end_that_a_lost_coordinator_waited_to_hear_of_counts_with_the_next_one(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph, is_told: bool
) -> None:
    """It does not know what ran there, and need not: launchers name those that were inside, and repeat that
    until they have an answer. An end that nobody tells of is not counted then; the next one is."""
    start(cluster, one_slot(make_graph))
    cluster.advance(60.0)
    cluster.lose(told[0])
    cluster.lose_coordinator()
    cluster.come_back(told[1])
    if is_told:
        assert cluster.request(killed(told[0], subtask(1))) == Accepted()
    cluster.advance(limits.END_REPORT_SECONDS + 1.0)
    assert len(events(cluster, "death counted")) == is_told
    assert {task.worker for task in cluster.show("j1").tasks} == {2}
    cluster.report_all("j1", "running", attempt=2)
    cluster.request(killed(told[1], subtask(2)))
    *_, last = events(cluster, "death counted")
    assert f"death {2 if is_told else 1} of 3" in last.text


def test_a_lost_host_or_link_counts_for_nobody(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    cluster.advance(60.0)
    del cluster.workers[told[0].link]
    cluster.advance(10.0)
    assert {task.worker for task in cluster.show("j1").tasks} == {2}, "it was silent"
    cluster.report_all("j1", "running", attempt=2)
    third = cluster.add()
    cluster.break_link(told[1])
    cluster.advance(10.0)
    assert {task.worker for task in cluster.show("j1").tasks} == {third.worker}, "nothing answered"
    assert events(cluster, "death counted") == []


def test_where_no_record_could_be_kept_heartbeats_say_who_was_inside(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    own = report(1, 5, 3, key=(1, 0))
    cluster.heartbeat(told[0], tasks=[own, report(1, 5, inside=False)])
    cluster.lose(told[0])
    cluster.request(killed(told[0], code=3, recorded=False))
    (counted,) = events(cluster, "death counted")
    assert counted.text == (
        f"count[0]: death 1 of 3; worker 1 ended with code 3{UNANNOUNCED}; {IN_HAND.format(3, 5)}"
    )


def test_the_count_outlives_the_coordinator(cluster: FakeCluster, told: Any, make_graph: MakeGraph) -> None:
    start(cluster, one_slot(make_graph))
    cluster.lose(told[0])
    cluster.request(killed(told[0], subtask(1)))
    cluster.lose_coordinator()
    cluster.come_back(told[1])
    cluster.check_journal()
    cluster.report_all("j1", "running", attempt=2)
    assert cluster.request(killed(told[1], subtask(2))) == Accepted()
    assert [event.text[:21] for event in events(cluster, "death counted")] == [
        "count[0]: death 1 of ",
        "count[0]: death 2 of ",
    ]
    cluster.check_journal()


def test_the_next_coordinator_knows_of_nobody_that_it_has_passed_nothing_on(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    one, two = cluster.add(), cluster.add()
    job = cluster.submit(make_graph(restart_strategy="individual"))
    cluster.report_all(job, "running")
    cluster.advance(2 * STALLED_SECONDS)
    cluster.lose_coordinator()
    for worker in (one, two):
        cluster.come_back(worker)
    cluster.lose(two)
    kinds = [event.kind for event in cluster.request(GetEvents(job=job)).events]
    assert "task lost" in kinds and "death counted" not in kinds


def test_a_launcher_tells_the_next_coordinator_before_the_worker_is_missed(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    cluster.lose_coordinator()
    assert cluster.request(killed(told[0], subtask(1))) == Accepted()
    cluster.come_back(told[1])
    assert len(events(cluster, "death counted")) == 1
    assert {task.worker for task in cluster.show("j1").tasks} == {2}, "it is not waited for"


def test_an_attempt_that_gets_past_the_place_clears_its_subtask(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph))
    cluster.lose(told[0])
    cluster.request(killed(told[0], subtask(1, position=10, rows=5)))
    cluster.report_all("j1", "running", attempt=2)
    cluster.heartbeat(told[1], tasks=[report(2, 15, key=(1, 0))])
    cluster.check_journal()
    cluster.add(end_is_told=True)
    cluster.lose(told[1])
    assert {task.state for task in cluster.show("j1").tasks} == {"created"}, "nothing is waited for"
    cluster.request(killed(told[1], subtask(2, position=15)))
    assert [event.text[:20] for event in events(cluster, "death counted")] == ["count[0]: death 1 of"] * 2


def test_a_job_whose_attempts_die_again_and_again_as_they_recover_restarts_more_and_more_of_it(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    settings = {"restart_strategy": "individual", "restart_failures_max": 6}
    others = cluster.add(slots=2, end_is_told=True)
    worker = cluster.add(slots=1, end_is_told=True)
    start(cluster, make_graph(2, 3, partitioner="rescale", **settings))
    placed = {(task.operator, task.index): task.worker for task in cluster.show("j1").tasks}
    (slot,) = [index for (operator, index), at in placed.items() if operator == 1 and at == worker.worker]
    restarted: list[int] = []
    for attempt in range(1, 6):
        cluster.lose(worker)
        cluster.request(killed(worker, subtask(attempt).model_copy(update={"index": slot})))
        canceled = {(key[1], key[2]) for key in others.canceled_attempts}
        restarted.append(len(canceled))
        for job, operator, index, number in sorted(others.canceled_attempts):
            cluster.report(others, (job, operator, index), "canceled", attempt=number)
        others.canceled_attempts.clear()
        worker = cluster.add(slots=1, end_is_told=True, requested_worker=worker.worker)
        for each in (worker, others):
            for key, task in list(each.tasks.items()):
                cluster.report(each, key, "running", attempt=task.attempt)
        cluster.check_journal()
    assert restarted[:3] == [0, 0, 0], "stuck 0, 1 and 2 times: by itself"
    assert restarted[3] > 0, "3 of 6: its region"
    kinds = [event.text.partition(",")[0] for event in events(cluster, "restart strategy")]
    assert kinds == ["region"]
    assert cluster.state.snapshot(cluster.now, {}).recoveries[0].unfinished >= 4
    cluster.lose_coordinator()
    for each in (worker, others):
        cluster.come_back(each)
    assert cluster.state._jobs["j1"].cancellations.regions.strategy == "region"
    current = {task.index: task.attempt for task in cluster.show("j1").tasks if task.operator == 1}[slot]
    past = report(current, 5, key=(1, slot))
    cluster.heartbeat(worker, tasks=[past])
    assert cluster.state._jobs["j1"].cancellations.regions.strategy == "individual"
    cluster.check_journal()


@pytest.mark.parametrize("strategy", ["region", "full"])
def test_what_restarts_together_waits_together(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph, strategy: str
) -> None:
    third = cluster.add(end_is_told=True)
    start(cluster, one_slot(make_graph, restart_strategy=strategy))
    cluster.lose(told[0])
    cluster.request(killed(told[0], subtask(1)))
    cluster.report_all("j1", "running", attempt=2)
    cluster.lose(told[1])
    assert third.got(DeployTasks) == []
    cluster.request(killed(told[1], subtask(2)))
    (deployed,) = third.got(DeployTasks)
    assert [(task.operator, task.attempt) for task in deployed.tasks] == [(0, 3), (1, 3)]


def test_a_job_without_restarts_fails_as_before(
    cluster: FakeCluster, told: Any, make_graph: MakeGraph
) -> None:
    start(cluster, one_slot(make_graph, restart_strategy="none"))
    assert cluster.request(killed(told[0], subtask(1))) == Accepted()
    info = cluster.show("j1")
    assert (info.state, [cause.text for cause in info.causes]) == (
        "failed",
        [
            f"worker 1 (pid {told[0].about.pid} on 10.0.0.1) was lost: its process was killed by SIGSEGV; "
            "read[0], count[0] ran there"
        ],
    )


def test_a_job_that_loses_nothing_leaves_the_row_out(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    workers = [cluster.add(slots=1, end_is_told=True) for _ in range(3)]
    cluster.submit(one_slot(make_graph, guarantee="at_least_once"))
    cluster.report_all("j1", "running")
    for number, rows in [(1, 500), (2, 500), (3, 500), (4, 1)]:
        at = next(task.worker for task in cluster.show("j1").tasks if task.operator == 1)
        (worker,) = [each for each in workers if each.worker == at]
        cluster.lose(worker)
        died = subtask(number, rows=rows).model_copy(update={"row": 7 if number > 1 else 0})
        assert cluster.request(killed(worker, died)) == Accepted()
        workers.remove(worker)
        workers.append(cluster.add(slots=1, end_is_told=True, requested_worker=worker.worker))
        cluster.report_all("j1", "running", attempt=number + 1)
    assert cluster.show("j1").state == "running"
    specs = [
        spec
        for worker in workers
        for message in worker.got(DeployTasks)
        for spec in message.tasks
        if (spec.operator, spec.attempt) == (1, 5)
    ]
    (search,) = [spec.poison for spec in specs if spec.poison is not None]
    assert (search.row, search.rows, [each.row for each in search.found]) == (0, 0, [7])
    (event,) = events(cluster, "row found")
    assert event.text == (
        "count[0]: one row ended its worker 4 times: the next attempt leaves it out, or fails with it, as "
        "on_error says"
    )
    assert events(cluster, "restart strategy") == []
