"""Where sources are, as the coordinator keeps it, and what their next attempts get."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minishuffle.coordinator.jobs.attemptreports import apply_fact
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.positions import Resumption, SourceProgress
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import Acknowledge
from minishuffle.wire.packed import Cursor, SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import SourcePositions, TaskStateChanged
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

TERM = 7


def packed(*entries: SplitPosition) -> bytes:
    return pack_positions(entries)


def test_a_source_that_begins_anew_has_no_position() -> None:
    progress = SourceProgress(repeats=False)
    progress.report(0, 0, packed(SplitPosition(0, 10, 5)), 100.0)
    progress.report(0, 1, packed(SplitPosition(1, 7)), 100.0)
    progress.reset(0, 0)
    assert progress.resume(0, 0, 101.0) == Resumption(b"", 0.0)
    assert (progress.rows_made(0, 0), progress.rows_made(0, 1)) == (0, 7)


def test_a_next_attempt_goes_on_behind_the_lease_and_closes_it() -> None:
    progress = SourceProgress(repeats=False)
    progress.report(0, 0, packed(SplitPosition(0, 10, 5), SplitPosition(2, 0, 5)), 100.0)
    progress.report(0, 0, packed(SplitPosition(0, 12, 6)), 101.0)
    progress.report(0, 0, b"", 102.0)
    assert progress.rows_made(0, 0) == 18 + 5
    assert progress.rows_leased(0, 0) == 0, "nothing of them comes once more"
    raw = packed(SplitPosition(0, 12, 6), SplitPosition(2, 0, 5))
    assert progress.resume(0, 0, 101.5) == Resumption(raw, 0.5)
    closed = packed(SplitPosition(0, 18), SplitPosition(2, 5))
    assert progress.resume(0, 0, 103.0) == Resumption(closed, 2.0)
    assert progress.rows_made(0, 0) == 0
    progress.report(0, 0, packed(SplitPosition(0, 20, 8)), 104.0)
    progress.report(0, 0, packed(SplitPosition(0, 20, 2)), 104.0)
    assert progress.rows_made(0, 0) == 4, "a lease is taken back"
    progress.report(0, 0, packed(SplitPosition(0, 19, 9)), 104.0)  # A witness has said more by then.
    assert unpack_positions(progress.resume(0, 0, 104.0).positions)[0] == SplitPosition(0, 20, 2)
    # The program of an external write has sent less than was leased, and that is all.
    ended = SplitPosition(0, 21, 0, True)
    progress.report(0, 0, packed(ended), 105.0, external=True)
    assert unpack_positions(progress.resume(0, 0, 105.0).positions)[0] == ended


def test_without_a_lease_it_goes_on_where_the_position_is() -> None:
    progress = SourceProgress(repeats=True)
    progress.report(0, 1, packed(SplitPosition(1, 12, 6), SplitPosition(3, 7, 0, True)), 100.0)
    expected = packed(SplitPosition(1, 12), SplitPosition(3, 7, 0, True))
    assert (progress.rows_made(0, 1), progress.rows_leased(0, 1)) == (12 + 6 + 7, 6)
    assert progress.resume(0, 1, 100.0) == Resumption(expected, 0.0)
    assert progress.resume(0, 1, 100.0) == Resumption(expected, 0.0)
    assert progress.rows_leased(0, 1) == progress.rows_leased(0, 0) == 0


def test_the_cursor_of_a_split_stays_where_it_was_reported() -> None:
    cursor = Cursor("orders-0", b"\x07", 10)
    for repeats, closed in (
        (False, SplitPosition(0, 15, 0, False, cursor)),
        (True, SplitPosition(0, 10, 0, False, cursor)),
    ):
        progress = SourceProgress(repeats=repeats)
        progress.report(0, 0, packed(SplitPosition(0, 10, 5, False, cursor)), 100.0)
        progress.resume(0, 0, 100.0)
        assert unpack_positions(progress.resume(0, 0, 100.0).positions) == [closed]
        record = progress.record(0, 0)
        recalled = SourceProgress(repeats=repeats)
        recalled.recall(0, 0, record)
        assert recalled.resume(0, 0, 100.0) == progress.resume(0, 0, 100.0)


def test_a_split_that_is_forgotten_has_emitted_its_rows_all_the_same() -> None:
    progress = SourceProgress(repeats=False)
    known = SplitPosition(0, 10, 5, False, Cursor("a"))
    progress.report(0, 0, packed(known, SplitPosition(2, 0, 0, False, Cursor("b"))), 100.0)
    progress.resume(0, 0, 100.0)
    gone = [SplitPosition(number, 20, 0, True, None, forgotten=True) for number in (0, 4)]
    progress.report(0, 0, packed(*gone), 100.0)
    assert progress.rows_made(0, 0) == 5 + 20, "also of one that was not reported before"
    assert [entry.split for entry in unpack_positions(progress.resume(0, 0, 100.0).positions)] == [2]
    assert progress.rows_made(0, 0) == 0


def test_what_never_reported_begins_at_the_beginning() -> None:
    assert SourceProgress(repeats=False).resume(3, 1, 100.0) == Resumption(b"", 0.0)


def test_a_clock_that_goes_back_makes_no_negative_age() -> None:
    progress = SourceProgress(repeats=False)
    progress.report(0, 0, packed(SplitPosition(0, 1)), 100.0)
    assert progress.resume(0, 0, 99.0).positions_age == 0.0


def moved(position: int, number: int = 1, *, index: int = 0, within: float = 0.0) -> SourcePositions:
    table = packed(SplitPosition(0, position, 8))
    return SourcePositions(attempt=attempt(0, index, number), positions=table, within=within)


def test_a_job_keeps_what_current_attempts_report(make_graph: Callable[..., JobGraph]) -> None:
    job = Job("j1", "count", make_graph(), (1, 2), {1: 0, 2: 0}, at=100.0, random=lambda: 0.5)

    def kept() -> SplitPosition:
        (entry,) = unpack_positions(job.progress.sources.resume(0, 0, 101.0).positions)
        return entry

    assert apply_fact(job, 1, moved(10), 101.0)
    assert not apply_fact(job, 1, moved(99, 2), 101.0)
    assert not apply_fact(job, 2, moved(99), 101.0)
    assert kept() == SplitPosition(0, 10, 8)
    assert apply_fact(job, 1, moved(20), 101.0)
    table = packed(SplitPosition(0, 23))
    assert apply_fact(job, 1, TaskStateChanged(attempt=attempt(), state="failed", positions=table), 101.0)
    assert not apply_fact(job, 1, moved(99), 101.0)
    assert kept() == SplitPosition(0, 23)


def test_a_job_without_leases_repeats(make_graph: Callable[..., JobGraph]) -> None:
    job = Job("j1", "count", make_graph(source_lease=0), (1, 2), {1: 0, 2: 0}, at=100.0, random=lambda: 0.5)
    assert apply_fact(job, 1, moved(10), 101.0)
    assert job.progress.sources.resume(0, 0, 101.0) == Resumption(packed(SplitPosition(0, 10)), 0.0)


def test_positions_are_acknowledged_like_every_report(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: Callable[..., JobGraph]
) -> None:
    cluster.submit(make_graph())
    for number in (1, 2, 2, 3):
        cluster.fact(pair[0], moved(10 * number, 1 + number // 3), number)
    assert [message.number for message in pair[0].got(Acknowledge)] == [1, 2, 2, 3]
    assert cluster.state.ignored == 2


def test_positions_that_need_no_acknowledgement_at_once_are_journaled_together(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: Callable[..., JobGraph]
) -> None:
    """One that is needed at once, or anything else that happens, takes the others along. So does the last
    worker of those that have reported lately."""
    cluster.submit(make_graph())
    cluster.fact(pair[0], moved(5, within=0.05), 1)
    assert pair[0].got(Acknowledge), "no other worker is known to report"
    decisions, journal = cluster.decisions, dict(cluster.journal)
    cluster.fact(pair[1], moved(10, index=1, within=0.05), 1)
    assert cluster.journal == journal and not pair[1].got(Acknowledge)
    cluster.advance(0.049, heartbeats=False)
    assert cluster.decisions == decisions + 1, "nothing was due"
    cluster.advance(0.001, heartbeats=False)
    cluster.check_journal()
    assert cluster.journal != journal
    assert [message.number for worker in pair for message in worker.got(Acknowledge)] == [1, 1]
    for index in (0, 1):
        assert len(pair[0].got(Acknowledge)) == 1
        cluster.fact(pair[index], moved(15, index=index, within=0.05), 2)
    assert [message.number for worker in pair for message in worker.got(Acknowledge)] == [1, 2, 1, 2]
    for number, within in ((3, 0.05), (4, 0.0)):
        cluster.fact(pair[0], moved(10 * number, within=within), number)
    cluster.check_journal()
    assert [message.number for message in pair[0].got(Acknowledge)] == [1, 2, 4], "one stands for both"
