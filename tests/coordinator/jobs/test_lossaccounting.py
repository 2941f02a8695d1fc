"""What the coordinator adds up over all attempts: totals, undelivered rows, rows in what died."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.coordinator.jobs.lossaccounting import ATTEMPTS_KEPT, AttemptRecord, Books, rows_received
from minishuffle.counters import TaskCounters
from minishuffle.plan.graph import Edge
from minishuffle.wire.packed import PeerRows, pack_traffic

END = Literal["", "finished", "early", "died"]
EDGES = [Edge(source=0, target=1, partitioner="hash"), Edge(source=1, target=2, partitioner="hash")]
"""A source 0, a map 1 and a sink 2."""


def record(
    operator: int,
    attempt: int = 1,
    *peers: PeerRows,
    worker: int = 1,
    index: int = 0,
    end: END = "",
    **counters: int,
) -> AttemptRecord:
    """It was done with one row for each that it has written, if nothing else is said."""
    traffic = pack_traffic(peers)
    counters.setdefault("rows_done", counters.get("records_out", 0))
    return AttemptRecord(operator, index, worker, attempt, end, TaskCounters(**counters), traffic)


def sent(edge: int, rows: int, attempt: int = 1, index: int = 0) -> PeerRows:
    return PeerRows(edge, index, attempt, sent=rows)


def received(edge: int, rows: int, attempt: int = 1, index: int = 0) -> PeerRows:
    return PeerRows(edge, index, attempt, received=rows)


def books(*ended: AttemptRecord, current: list[AttemptRecord]) -> Books:
    made = Books(EDGES)
    for each in ended:
        made.close(each, current)
    return made


def test_a_job_in_which_nothing_fails_loses_nothing() -> None:
    current = [
        record(0, 1, sent(0, 100), end="finished", records_out=100),
        record(1, 1, received(0, 100), sent(1, 50), end="finished", records_in=100),
        record(2, 1, received(1, 50), end="finished", records_in=50),
    ]
    assert books(current=current).losses(current)[:3] == ({}, 0, False)


def test_rows_on_their_way_are_not_lost_while_the_consumer_runs() -> None:
    current = [record(0, 1, sent(0, 100)), record(1, 1, received(0, 60), records_in=60)]
    assert books(current=current).losses(current)[:3] == ({}, 0, False)


def test_rows_sent_to_an_attempt_that_ended_early_and_not_received_are_undelivered() -> None:
    ended = record(1, 1, received(0, 60), end="early", records_in=60)
    ended.counters.rows_dropped = {"queue_discarded": 5, "failed_batch": 2}
    current = [record(0, 1, sent(0, 70), sent(0, 30, attempt=2)), record(1, 2, received(0, 20))]
    made = books(ended, current=current)
    assert made.losses(current).dropped == {"failed_batch": 2, "queue_discarded": 5 + 10}
    # What its producer had sent before comes to be known later: the number grows.
    current[0].traffic = pack_traffic([sent(0, 75), sent(0, 30, attempt=2)])
    assert made.losses(current).dropped["queue_discarded"] == 5 + 15


def test_rows_that_a_link_lost_between_tasks_that_finished_are_undelivered() -> None:
    current = [
        record(0, 1, sent(0, 27), end="finished", records_out=27),
        record(1, 1, received(0, 25), end="finished", records_in=25),
        record(2, 1, end="finished"),
    ]
    assert books(current=current).losses(current)[:3] == ({"queue_discarded": 2}, 0, True)


def test_what_a_dead_producer_had_sent_unreported_hides_no_row_that_a_link_lost() -> None:
    """The consumer has 30 rows of a worker that died, which had reported 10 of them; of the other producer
    2 of 27 are missing."""
    died = record(1, 1, sent(1, 10), worker=5, end="died", records_in=10)
    current = [
        record(0, 1, end="finished"),
        record(1, 2, end="finished"),
        record(1, 1, sent(1, 27), index=1, end="finished"),
        record(2, 1, received(1, 25, index=1), received(1, 30), end="finished", records_in=55),
    ]
    assert books(died, current=current).losses(current).dropped == {"queue_discarded": 2}


def test_tasks_that_all_finished_and_took_less_than_was_written_have_lost_some() -> None:
    """Even if it is not known yet that the producer has sent the rest."""
    current = [
        record(0, 1, sent(0, 25), end="finished", records_out=27),
        record(1, 1, received(0, 25), end="finished", records_in=25),
        record(2, 1, end="finished"),
    ]
    assert books(current=current).losses(current)[:3] == ({}, 0, True)
    current[1].counters.records_in = 27
    assert books(current=current).losses(current)[:3] == ({}, 0, False)


def test_an_attempt_that_has_ended_counts_whatever_becomes_of_those_beside_it() -> None:
    first = record(1, 1, received(0, 40), end="early", records_in=1)
    sibling = record(1, 1, received(0, 50), index=1)
    current = [record(0, 1, sent(0, 43), sent(0, 57, index=1)), record(1, 2, worker=1), sibling]
    made = books(first, current=current)
    assert made.losses(current).dropped == {"queue_discarded": 3}
    sibling.end = "finished"
    assert made.losses(current).dropped == {"queue_discarded": 10}


@pytest.mark.parametrize("end", ["", "early", "finished"])
def test_a_sink_that_died_had_in_flight_what_it_lacked_whatever_its_siblings_took(end: END) -> None:
    """They have its attempt number and its worker's id, which a worker may have after one that was lost."""
    died = record(2, 1, received(1, 900), worker=5, index=1, end="died", records_in=900, rows_done=900)
    sibling = record(2, 1, received(1, 1000), worker=5, end=end, records_in=1000)
    current = [record(1, 1, sent(1, 1000), sent(1, 910, index=1)), record(2, 2, index=1), sibling]
    found = books(died, current=current).losses(current)
    assert (found.dropped, found.in_flight) == ({}, 10)


@pytest.mark.parametrize("end", ["", "early", "finished"])
def test_a_source_that_died_had_in_flight_what_nobody_has_whatever_its_siblings_sent(end: END) -> None:
    died = record(0, 1, sent(0, 895), worker=5, index=1, end="died", records_out=895)
    died.rows_made = 900
    sibling = record(0, 1, sent(0, 1000), worker=5, end=end, records_out=1000)
    middle = record(1, 1, received(0, 1000), received(0, 895, index=1), worker=9, records_in=1895)
    current = [record(0, 2, index=1), sibling, middle]
    found = books(died, current=current).losses(current)
    assert (found.dropped, found.in_flight) == ({}, 5)


def test_what_died_with_a_worker_had_rows_in_flight() -> None:
    died = record(1, 1, received(0, 90), sent(1, 80), worker=5, end="died", records_in=85)
    current = [
        record(0, 1, sent(0, 100), worker=9),
        record(1, 2, worker=9),
        record(2, 1, received(1, 70), worker=9),
    ]
    losses = books(died, current=current).losses(current)
    assert losses[:3] == ({}, 30, True), "100 sent to it, 70 received from it"


@pytest.mark.parametrize(("written", "came", "late"), [(9, 9, 0), (9, 7, 0), (270, 260, 0), (80, 75, 10)])
def test_rows_that_it_left_out_or_made_of_others_are_not_in_flight(
    written: int, came: int, late: int
) -> None:
    """Of 100 that were sent to it 10 are in its queue; it has made more or fewer of the 90 others."""
    died = record(1, 1, worker=5, end="died", records_out=written, records_in=90, rows_done=90)
    died.counters.rows_dropped = {"late_after_recovery": late} if late else {}
    current = [record(0, 1, sent(0, 100), worker=9), record(1, 2), record(2, 1, received(1, came), worker=9)]
    assert books(died, current=current).losses(current).in_flight == 10 + written - came


def test_rows_that_a_source_left_out_are_not_in_flight() -> None:
    died = record(0, 1, worker=5, end="died", records_out=9, rows_done=900)
    died.rows_made = 1000
    current = [record(0, 2, worker=9), record(1, 1, received(0, 8), worker=9)]
    assert books(died, current=current).losses(current).in_flight == 100 + 1


def test_drops_that_it_had_reported_are_not_in_flight() -> None:
    died = record(1, 1, worker=5, end="died")
    died.counters.rows_dropped = {"partial_element": 4}
    current = [record(0, 1, sent(0, 10), worker=9), record(1, 2, worker=9)]
    assert books(died, current=current).losses(current)[:3] == ({"partial_element": 4}, 6, True)


def test_rows_between_tasks_that_died_together_are_counted_once() -> None:
    middle = record(1, 1, received(0, 90), sent(1, 80), worker=5, end="died")
    sink = record(2, 1, received(1, 75), worker=5, end="died", records_in=60, rows_done=60)
    current = [record(0, 1, sent(0, 100), worker=9), record(1, 2), record(2, 2)]
    losses = books(middle, sink, current=current).losses(current)
    assert losses.in_flight == 40, "100 sent to the worker, 60 taken in by its sink"


@pytest.mark.parametrize("reported", [0, 60, 90, 95])
def test_rows_that_died_on_one_worker_and_whose_producer_died_unreported_on_another_are_in_flight(
    reported: int,
) -> None:
    """The source's last heartbeat may be older than that of the map, which had received 90 rows, and was done
    with 80."""
    source = record(0, 1, sent(0, reported), worker=4, end="died", records_out=reported)
    source.rows_made = 100
    middle = record(1, 1, received(0, 90), sent(1, 80), worker=5, end="died", records_in=90, records_out=80)
    current = [record(0, 2), record(1, 2), record(2, 1, received(1, 75), worker=9)]
    losses = books(source, middle, current=current).losses(current)
    assert losses.in_flight == 100 - 75 + max(0, reported - 90), "what the source made, and the sink has not"


def test_a_sink_has_delivered_what_it_took_in() -> None:
    died = record(2, 1, received(1, 95), worker=5, end="died", records_in=90, rows_done=90)
    current = [record(1, 1, sent(1, 100), worker=9), record(2, 2, worker=9)]
    assert books(died, current=current).losses(current).in_flight == 10


def test_what_a_source_may_have_emitted_and_nobody_has_is_in_flight() -> None:
    died = record(0, 1, sent(0, 20), worker=5, end="died", records_out=90, rows_skipped=7)
    died.counters.rows_dropped = {"upstream_unavailable": 3}
    died.rows_made = 107
    middle = record(1, 1, received(0, 20), sent(1, 15), worker=5, end="died")
    current = [
        record(0, 2, worker=9),
        record(1, 1, received(0, 60), worker=9, index=1),
        record(1, 2, worker=9),
        record(2, 1, received(1, 15), worker=9),
    ]
    losses = books(died, middle, current=current).losses(current)
    assert losses.in_flight == (107 - 7 - 3 - 60 - 20) + (20 - 15)


def test_a_source_that_ends_in_a_sink_has_delivered_what_it_made() -> None:
    died = record(0, 1, worker=5, end="died", records_out=90)
    died.rows_made = 100
    made = Books([])
    made.close(died, [record(0, 2, worker=9)])
    assert made.losses([record(0, 2, worker=9)]).in_flight == 10


def test_a_source_whose_positions_are_not_known_takes_nothing_from_what_died_beside_it() -> None:
    source = record(0, 1, worker=5, end="died")
    middle = record(1, 1, worker=5, end="died")
    current = [
        record(0, 1, sent(0, 10), worker=9, index=1),
        record(1, 1, received(0, 60), worker=9, index=1),
        record(0, 2, worker=9),
        record(1, 2, worker=9),
    ]
    assert books(source, middle, current=current).losses(current).in_flight == 10


def test_a_source_that_starts_again_has_nothing_in_flight_but_may_have_lost_rows() -> None:
    died = record(0, 1, sent(0, 10), worker=5, end="died", records_out=10)
    current = [record(0, 2, worker=9), record(1, 1, received(0, 8), worker=9)]
    assert books(died, current=current).losses(current)[:3] == ({}, 0, True)


@pytest.mark.parametrize(
    ("ended", "certain"),
    [
        (record(1, 1, end="early"), False),
        (record(1, 1, end="early", records_in=1), True),
        (record(0, 1, end="early", records_out=5), False),
        (record(1, 1, end="died"), False),
        (record(0, 1, end="died"), False),
    ],
    ids=["empty", "with rows", "a source", "died before its first row", "a source died before its first row"],
)
def test_an_attempt_that_held_rows_when_it_ended_has_lost_some(ended: AttemptRecord, certain: bool) -> None:
    current = [record(0), record(1, 2)]
    assert books(ended, current=current).losses(current).certain == certain


def test_late_reports_of_replaced_attempts_change_the_books() -> None:
    ended = record(0, 1, sent(0, 10), end="early")
    current = [record(0, 2), record(1)]
    made = books(ended, current=current)
    table = pack_traffic([sent(0, 12)])
    assert made.report(1, (0, 0), 1, table, {"queue_discarded": 4})
    assert made.totals(current[0]).rows_sent == 12
    assert made.losses(current).dropped == {"queue_discarded": 4}
    for worker, key, attempt in ((2, (0, 0), 1), (1, (0, 1), 1), (1, (0, 0), 2)):
        assert not made.report(worker, key, attempt, table, {})


def test_totals_are_over_all_attempts_and_old_ones_do_not_leave_them() -> None:
    current = record(1, 1)
    made = Books(EDGES)
    for attempt in range(1, ATTEMPTS_KEPT + 10):
        current = record(1, attempt, received(0, 3, attempt=7), end="early", records_in=2)
        current.counters.rows_dropped = {"failed_batch": 1}
        made.close(current, [current])
    last = record(1, ATTEMPTS_KEPT + 10, received(0, 3), records_in=2)
    count = ATTEMPTS_KEPT + 10
    totals = made.totals(last)
    assert (totals.counters.records_in, totals.rows_received) == (2 * count, 3 * count)
    assert made.losses([last]).dropped == {"failed_batch": count - 1}


@pytest.mark.parametrize("end", ["early", "died"])
def test_books_of_what_goes_on_are_not_changed_by_attempts_that_are_not_kept_any_more(end: END) -> None:
    """The sink beside it has each row, and so has each attempt but the first, which lacked 3."""
    made, sources = Books(EDGES[:1]), list[PeerRows]()
    beside = record(1, 1, worker=5, index=1)
    died = record(0, 1, worker=9, end="died")
    for attempt in range(1, ATTEMPTS_KEPT + 4):
        sources.append(sent(0, 10 + 3 * (attempt == 1), attempt))
        died.traffic = pack_traffic([*sources, sent(0, 7 * attempt, index=1)])
        died.rows_made = 3 + 17 * attempt
        beside.traffic = pack_traffic([received(0, 7 * attempt)])
        ended = record(1, attempt, received(0, 10), worker=5, end=end, records_in=10, rows_done=10)
        made.close(ended, [died, beside, ended])
    beside.end = "finished"
    current = [died, beside, record(1, ATTEMPTS_KEPT + 4)]
    taken = {"early": ({"queue_discarded": 3}, 3), "died": ({}, 3 + 3)}
    again = Books(EDGES[:1])
    again.recall(made.record(), {(1, 0): made.past_record((1, 0))})
    for each in (made, again):
        found = each.losses(current)
        assert (found.dropped, found.in_flight) == taken[end]


def test_a_consumer_that_ended_early_had_all_of_a_producer_whose_rows_another_gets_once_more() -> None:
    first = record(0, 1, sent(0, 1000), sent(0, 1000, index=1), worker=9, end="died", records_out=2000)
    first.repeated = "part"
    raised = record(1, 1, received(0, 1000), worker=5, end="early", records_in=1000)
    current = [
        record(0, 2, sent(0, 1000, index=1), worker=8, end="finished", records_out=1000),
        record(1, 2, worker=5, end="finished"),
        record(1, 1, received(0, 400), received(0, 1000, 2), worker=5, index=1, end="finished"),
    ]
    found = books(first, raised, current=current).losses(current)
    assert (found.dropped, found.in_flight) == ({}, 0)


@pytest.mark.parametrize("missing", [0, 4])
def test_rows_of_peers_that_are_counted_together_are_compared_in_their_sum(missing: int) -> None:
    together = PeerRows(0, 0, 0, received=50 - missing)
    current = [
        *(record(0, 1, sent(0, 10), index=index, end="finished", records_out=10) for index in range(8)),
        record(1, 1, received(0, 10, index=5), received(0, 20, index=7), together, end="finished"),
    ]
    current[-1].counters.records_in = 80
    found = books(current=current).losses(current)
    assert found.dropped == ({"queue_discarded": missing} if missing else {})


attempts = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.sampled_from(["early", "died"])), max_size=8
)


@given(attempts, st.integers(0, 20), st.integers(0, 20))
def test_dropped_and_in_flight_are_what_was_sent_and_did_not_come_out(
    history: list[tuple[int, int, END]], queued: int, dropped: int
) -> None:
    """A map that fails or dies after so many rows, and its sink on another worker: one row for each."""
    source, sink = record(0, 1, worker=1), record(2, 1, worker=1)
    made, sent_rows, got_rows, in_flight, undelivered = Books(EDGES), [], [], 0, 0
    for number, (taken, more, end) in enumerate(history, 1):
        worker = 10 + number
        attempt = record(
            1, number, received(0, taken), sent(1, taken), worker=worker, end=end, records_in=taken
        )
        sent_rows.append(sent(0, taken + more, number))
        got_rows.append(received(1, taken, number))
        if end == "died":
            in_flight += more
        else:
            undelivered += more
        made.close(attempt, [source, attempt, sink])
    source.traffic, sink.traffic = pack_traffic(sent_rows), pack_traffic(got_rows)
    source.counters.rows_dropped = {"queue_discarded": queued, "upstream_unavailable": dropped}
    current = [source, record(1, len(history) + 1, worker=9), sink]
    losses = made.losses(current)
    assert losses.in_flight == in_flight
    assert losses.dropped.get("queue_discarded", 0) == queued + undelivered
    assert losses.dropped.get("upstream_unavailable", 0) == dropped
    assert losses.certain or not any((in_flight, undelivered, queued, dropped))


@pytest.mark.parametrize(("end", "rows"), [("early", 7), ("died", 7), ("finished", 0)])
def test_state_is_lost_with_an_attempt_that_did_not_finish(end: END, rows: int) -> None:
    ended = record(1, 1, received(0, 100), end=end, records_in=100, state_rows=7)
    current = [record(0, 1, sent(0, 100)), record(1, 2, state_rows=3)]
    assert books(ended, current=current).losses(current).state_rows == rows


def test_each_task_has_its_own_share_of_the_state_that_was_lost() -> None:
    current = [record(0, 1), record(1, ATTEMPTS_KEPT + 3)]
    made = Books(EDGES)
    for attempt in range(1, ATTEMPTS_KEPT + 3):
        made.close(record(1, attempt, end="early", state_rows=2), current)
    lost = [made.totals(each).state_rows_lost for each in current]
    assert lost == [0, 2 * (ATTEMPTS_KEPT + 2)]
    assert sum(lost) == made.losses(current).state_rows


def test_what_attempts_that_are_not_kept_have_lost_stays_lost() -> None:
    current = [record(0, ATTEMPTS_KEPT + 4), record(1, 1)]
    made = Books(EDGES)
    for attempt in range(1, ATTEMPTS_KEPT + 4):
        source = record(0, attempt, end="died", state_rows=2)
        source.rows_made = 5
        made.close(source, current)
    lost = made.losses(current)
    assert (lost.in_flight, lost.state_rows) == (5 * (ATTEMPTS_KEPT + 3), 2 * (ATTEMPTS_KEPT + 3))


def test_rows_of_a_sink_that_died_are_unfinished_in_flight_or_listed() -> None:
    """It had taken 60 rows, the last 5 of them were not filed yet, and 30 were in files that are listed."""
    died = record(2, 1, received(1, 70), worker=2, end="died", records_in=60, rows_filed=55, rows_done=55)
    died.rows_listed = 30
    current = [record(1, 1, sent(1, 100)), record(2, 2, worker=1)]
    found = books(died, current=current).losses(current)
    assert (found.dropped, found.in_flight) == ({"sink_unfinished": 25}, 45)
    died.rows_listed = 58
    found = books(died, current=current).losses(current)
    assert (found.dropped, found.in_flight) == ({}, 42)


@pytest.mark.parametrize(
    ("done", "filed", "in_flight"),
    [(60, 0, 40 - 3), (55, 50, 45 - 3), (5, 0, 95 - 3), (0, 0, 100 - 3)],
    ids=["no file", "filed", "about to file", "the first batch in hand"],
)
def test_rows_that_a_sink_had_taken_and_dropped_are_not_in_flight_once(
    done: int, filed: int, in_flight: int
) -> None:
    """Of 100 rows it had taken in 60, and dropped 5 of these; 3 others were dropped before."""
    counts = {"records_in": 60, "rows_filed": filed, "rows_done": done}
    died = record(2, 1, received(1, 70), worker=2, end="died", **counts)
    died.rows_listed = filed
    died.counters.rows_dropped |= {"late_after_recovery": 5, "partial_element": 3}
    current = [record(1, 1, sent(1, 100)), record(2, 2, worker=1)]
    assert books(died, current=current).losses(current).in_flight == in_flight


def test_rows_that_a_source_with_a_sink_had_made_and_dropped_are_not_in_flight_once() -> None:
    made = Books([])
    died = record(0, 1, worker=2, end="died", records_out=60)
    died.rows_made = 100
    died.counters.rows_dropped["late_after_recovery"] = 5
    made.close(died, [])
    assert made.losses([record(0, 2)]).in_flight == 40


def test_rows_that_come_once_more_hide_none_that_is_missing() -> None:
    """Others had 40 rows of a source when the coordinator was lost. It had leave to emit 60, and emitted 100,
    of which others have 70."""
    alive = [record(0, 1, records_out=40, worker=2), record(1, 1, received(0, 40))]
    assert Books(EDGES).passed_on(alive) == {(0, 0, 1): 40, (1, 0, 1): 0}
    died = record(0, 1, worker=2, end="died")
    died.rows_made, died.passed_on_max = 60, 40
    current = [record(0, 2), record(1, 1, received(0, 70))]
    assert books(died, current=current).losses(current).in_flight == 60 - 40
    died.passed_on_max = None
    assert books(died, current=current).losses(current).in_flight == 0


def test_rows_that_others_have_of_a_source_and_that_come_once_more_are_counted() -> None:
    """Those of its leases if it goes on at its positions, and what came since a coordinator was lost."""
    died = record(0, 1, worker=2, end="died")
    died.rows_made, died.rows_leased = 60, 20
    current = [record(0, 2), record(1, 1, received(0, 70))]
    assert books(died, current=current).losses(current).again == 20
    died.passed_on_max = 65
    assert books(died, current=current).losses(current).again == 20 + 5
    died.passed_on_max = 0
    assert books(died, current=current).losses(current).again == 70, "not more than others have"
    died.rows_leased = died.passed_on_max = 0
    died.repeated = "all"
    assert books(died, current=current).losses(current).again == 0, "those who have read it leave them out"


@pytest.mark.parametrize("end", ["", "early", "finished"])
def test_what_a_source_emits_twice_is_counted_of_one_that_died(end: END) -> None:
    live = record(0, 1, worker=2, end=end)
    live.rows_made, live.rows_leased = 60, 20
    current = [live, record(1, 1, received(0, 70))]
    assert books(current=current).losses(current).again == 0


def test_rows_of_a_lease_may_come_twice_from_a_source_with_a_sink() -> None:
    died = record(0, 1, worker=2, end="died", records_out=50)
    died.rows_made, died.rows_leased = 60, 20
    made = Books([])
    made.close(died, [record(0, 2)])
    assert made.losses([record(0, 2)]).again == 20


def test_rows_that_came_twice_stay_counted_when_attempts_are_not_kept() -> None:
    current = [record(0, ATTEMPTS_KEPT + 4), record(1, 1)]
    made = Books(EDGES)
    for attempt in range(1, ATTEMPTS_KEPT + 4):
        died = record(0, attempt, worker=2, end="died")
        died.rows_made = died.rows_leased = 10
        current[1].traffic = pack_traffic(received(0, 6, each + 1) for each in range(attempt))
        made.close(died, current)
    assert made.losses(current).again == 6 * (ATTEMPTS_KEPT + 3)
    other = Books(EDGES)
    other.recall(made.record(), {(0, 0): made.past_record((0, 0))})
    assert other.losses(current).again == 6 * (ATTEMPTS_KEPT + 3)


def test_what_is_beside_a_producer_is_not_passed_on() -> None:
    current = [record(0, 1), record(1, 1, received(0, 40)), record(1, 1, received(0, 9), index=1, worker=2)]
    assert Books(EDGES).passed_on(current)[0, 0, 1] == 9


def test_unfinished_rows_of_attempts_that_are_not_kept_stay_counted() -> None:
    kept = Books(EDGES)
    for attempt in range(1, ATTEMPTS_KEPT + 4):
        kept.close(record(2, attempt, end="early", records_in=3, rows_filed=3), [])
    current = [record(2, ATTEMPTS_KEPT + 4, end="finished", rows_filed=9)]
    assert kept.losses(current).dropped == {"sink_unfinished": 3 * (ATTEMPTS_KEPT + 3)}


SIDED = [
    Edge(source=0, target=1, partitioner="hash"),
    Edge(source=2, target=1, input=1, partitioner="broadcast"),
]
"""A source 0 and a side 2, both read by a sink 1."""


def test_nothing_of_a_kept_side_is_lost() -> None:
    """The sink had 40 rows of its side and 30 of the 50 that the source has sent."""
    kept = Books(SIDED, frozenset({1}))
    died = record(1, 1, received(1, 40), received(0, 35), worker=2, end="died", records_in=70, rows_done=30)
    side = record(2, 1, sent(1, 40), end="finished", records_out=40)
    source = record(0, 1, sent(0, 50), records_out=50)
    kept.close(died, [])
    found = kept.losses([source, side, record(1, 2, worker=1)])
    assert (found.dropped, found.in_flight) == ({}, 20)
    only_side = Books(SIDED, frozenset({1}))
    only_side.close(record(1, 1, received(1, 40), worker=2, end="early", records_in=40), [])
    assert only_side.losses([side, record(1, 2, worker=1)])[:3] == ({}, 0, False)


def test_what_writes_a_kept_side_loses_nothing() -> None:
    kept = Books(SIDED, frozenset({1}))
    died = record(2, 1, worker=2, end="died", records_out=40)
    died.counters.rows_dropped = {"failed_batch": 3}
    died.rows_made = 100
    kept.close(died, [])
    assert kept.losses([record(0), record(1), record(2, 2)])[:3] == ({}, 0, False)


def test_nothing_of_what_replays_is_lost() -> None:
    """Whatever became of the attempts of a map and its sink; a task beside them that does not replay has
    taken 30 rows of a blocking input, which come to it again."""
    made = Books(EDGES, frozenset({0}), frozenset({1, 2}))
    died = record(1, 1, received(0, 40), sent(1, 40), worker=2, end="died", records_in=40, state_rows=7)
    died.counters.rows_dropped = {"queue_discarded": 3}
    early = record(2, 1, received(1, 20), end="early", records_in=20, rows_filed=20)
    made.close(died, [])
    made.close(early, [])
    current = [record(0, end="finished", records_out=40), record(1, 2), record(2, 2)]
    assert made.losses(current) == ({}, 0, False, 0, 0)
    assert [made.totals(each).state_rows_lost for each in current] == [0, 0, 0]
    made.repeat(rows_received(record(1, 1, received(0, 30), received(1, 4)), {0}))
    assert made.losses(current).again == 30
    current[2].counters.rows_again = 5
    died.counters.rows_again = 2
    assert made.losses(current).again == 30 + 5 + 2
