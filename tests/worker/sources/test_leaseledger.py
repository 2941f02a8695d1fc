"""Leases of sources: what is lost, and what repeated, when an attempt dies at any point."""

from __future__ import annotations

import itertools
from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.coordinator.jobs.positions import SourceProgress
from minishuffle.limits import LEASE_SECONDS
from minishuffle.wire.packed import Cursor, SplitPosition, unpack_positions
from minishuffle.worker.sources import leaseledger
from minishuffle.worker.sources.leaseledger import AHEAD, FIRST_ROWS, TOGETHER_SECONDS, LeaseLedger
from support.soak import examples

SPLITS = 4


class Source(RuleBasedStateMachine):
    """One subtask with splits without end, its attempts one after another, and the coordinator. Reports and
    acknowledgements are under way as long as the rules like."""

    @initialize(
        rows=st.none() | st.integers(1, 40),
        repeats=st.booleans(),
        rate=st.none() | st.just(100.0),
        guesses=st.booleans(),
        named=st.booleans(),
    )
    def begin(self, rows: int | None, repeats: bool, rate: float | None, guesses: bool, named: bool) -> None:
        self.rows, self.repeats, self.rate, self.guesses = rows, repeats, rate, guesses
        self.cursors = {split: Cursor(str(split)) for split in range(SPLITS) if named}
        self.now = 1000.0
        self.coordinator = SourceProgress(repeats=repeats)
        self.emitted: Counter[tuple[int, int]] = Counter()
        self.lost = self.lost_at_most = self.repeated = self.repeated_at_most = 0
        self.ended: set[int] = set()
        self.largest = 1
        self.start({})

    def start(self, positions: dict[int, int]) -> None:
        self.at = {split: positions.get(split, 0) for split in range(SPLITS)}
        self.ledger = LeaseLedger(
            dict(self.at), self.rows, self.rate, self.now, cursors=dict(self.cursors), guesses=self.guesses
        )
        self.reports: deque[bytes] = deque()
        self.acknowledgements = 0
        self.report()

    def upcoming(self) -> list[int]:
        return [split for split in range(SPLITS) if split not in self.ended]

    def report(self, need: tuple[int, int] | None = None) -> None:
        table = self.ledger.report(self.now, self.upcoming(), need)
        if table:
            self.reports.append(table)
            for entry in unpack_positions(table):
                assert entry.position == self.at[entry.split]
                assert entry.done or entry.lease >= 1
                assert entry.cursor == self.cursors.get(entry.split)

    @rule(
        batches=st.lists(st.tuples(st.integers(0, SPLITS - 1), st.integers(1, 60)), min_size=1, max_size=8),
        arrives=st.booleans(),
    )
    def run(self, batches: list[tuple[int, int]], arrives: bool) -> None:
        """Emit what may be emitted. With ``arrives`` reports and acknowledgements take no time."""
        for split, rows in batches:
            if arrives:
                self.arrive()
            if split not in self.ended:
                self.emit(split, rows)

    def emit(self, split: int, rows: int) -> None:
        self.largest = max(self.largest, rows)
        if not self.ledger.covers(split, rows):
            self.report((split, rows))
            return
        self.emitted.update((split, self.at[split] + row) for row in range(rows))
        self.at[split] += rows
        self.move(split, self.at[split])
        self.ledger.emit(split, rows, self.now, self.cursors.get(split))
        self.report()

    def move(self, split: int, rows: int) -> None:
        if (cursor := self.cursors.get(split)) is not None:
            self.cursors[split] = Cursor(cursor.name, cursor.position + b".", rows)

    @precondition(lambda self: self.cursors)
    @rule(split=st.integers(0, SPLITS - 1))
    def read_nothing(self, split: int) -> None:
        """The source goes on without a row."""
        if split not in self.ended:
            self.move(split, self.cursors[split].rows)
            self.ledger.move(split, self.cursors[split])
            self.report()

    @rule(seconds=st.floats(0.0, 3 * LEASE_SECONDS))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.ask(self.now)
        self.report()

    @rule(split=st.integers(0, SPLITS - 1))
    def end(self, split: int) -> None:
        if split not in self.ended:
            self.ended.add(split)
            self.ledger.end(split)

    @precondition(lambda self: self.reports)
    @rule()
    def deliver_report(self) -> None:
        self.coordinator.report(0, 0, self.reports.popleft(), self.now)
        self.acknowledgements += 1

    @precondition(lambda self: self.acknowledgements)
    @rule()
    def deliver_acknowledgement(self) -> None:
        self.acknowledgements -= 1
        self.ledger.acknowledged += 1

    def arrive(self) -> None:
        while self.reports:
            self.deliver_report()
        while self.acknowledgements:
            self.deliver_acknowledgement()

    def resume(self) -> dict[int, SplitPosition]:
        found = self.coordinator.resume(0, 0, self.now)
        entries = {entry.split: entry for entry in unpack_positions(found.positions)}
        self.ended &= {split for split, entry in entries.items() if entry.done}
        for split in self.cursors:
            entry = entries.get(split, SplitPosition(split, 0, cursor=Cursor(str(split))))
            assert entry.cursor is not None
            assert entry.cursor.rows <= entry.position
            self.cursors[split] = entry.cursor
        self.start({split: entry.end for split, entry in entries.items()})
        return entries

    @rule(arrive=st.integers(0, 3))
    def die(self, arrive: int) -> None:
        """The process is killed: a few of the reports under way arrive, the others never do."""
        for _ in range(min(arrive, len(self.reports))):
            self.coordinator.report(0, 0, self.reports.popleft(), self.now)
        before = dict(self.at)
        rows_at_risk = self.risk()
        entries = self.resume()
        for split, reached in before.items():
            lease = rows_at_risk.get(split, 0)
            missed = self.at[split] - reached
            if self.repeats:
                assert -lease <= missed <= 0
                self.repeated_at_most += lease
            else:
                assert 0 <= missed <= lease
                self.lost += missed
                self.lost_at_most += lease
            if self.rows is not None:
                assert lease <= max(self.rows, self.largest)
        assert set(entries) <= set(before)

    def risk(self) -> dict[int, int]:
        """Rows of each split behind the position that the coordinator has."""
        kept = self.coordinator._subtasks.get((0, 0))
        return {} if kept is None else {split: entry.lease for split, entry in kept.splits.items()}

    @rule()
    def fail_in_order(self) -> None:
        """The task raises, or is cancelled: its last report is exact and stands behind all others."""
        while self.reports:
            self.coordinator.report(0, 0, self.reports.popleft(), self.now)
        self.coordinator.report(0, 0, self.ledger.exact(), self.now)
        before, ended = dict(self.at), set(self.ended)
        self.resume()
        assert self.at == before
        assert self.ended == ended

    @invariant()
    def every_row_is_emitted_once_or_accounted_for(self) -> None:
        if not hasattr(self, "emitted"):
            return
        twice = sum(count - 1 for count in self.emitted.values())
        behind = sum(1 for split, row in self.emitted if row >= self.at[split])
        assert len(self.emitted) - behind == sum(self.at.values()) - self.lost
        if self.repeats:
            assert not self.lost
            assert twice + behind <= self.repeated_at_most
        else:
            assert not twice
            assert not behind
            assert self.lost <= self.lost_at_most

    def teardown(self) -> None:
        """The source is not stuck: once everything has arrived it may emit."""
        if not hasattr(self, "ledger"):
            return
        for split in self.upcoming():
            for _ in range(3):
                self.arrive()
                if not self.ledger.covers(split, 70):
                    self.report((split, 70))
            assert self.ledger.covers(split, 70)


TestSource = pytest.mark.slow(Source.TestCase)
TestSource.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


class Told:
    """A ledger whose reports are acknowledged at once, and what it has reported. Its worker asks in time, but
    not while nothing is emitted."""

    def __init__(
        self, rows: int | None = None, rate: float | None = None, splits: int = 1, *, guesses: bool = False
    ) -> None:
        self.ledger = LeaseLedger({}, rows, rate, 0.0, guesses=guesses)
        self.splits = list(range(splits))
        self.entries: list[SplitPosition] = []
        self.waits = 0
        self.asks_at = LEASE_SECONDS

    def report(self, now: float, need: tuple[int, int] | None = None) -> list[SplitPosition]:
        if now >= self.asks_at:
            self.asks_at = (now // LEASE_SECONDS + 1) * LEASE_SECONDS
            self.ledger.ask(now)
        entries = unpack_positions(self.ledger.report(now, self.splits, need))
        self.entries += entries
        self.ledger.acknowledged += bool(entries)
        return entries

    def emit(self, rows: int, now: float, split: int = 0) -> None:
        if not self.ledger.covers(split, rows):
            self.waits += 1
            self.report(now, (split, rows))
        self.ledger.emit(split, rows, now)
        self.report(now)


@pytest.mark.parametrize("rate", [100.0, 20_000.0])
def test_a_source_asks_for_leases_four_times_a_second_and_never_waits(rate: float) -> None:
    source = Told(rate=rate)
    source.report(0.0)
    step = 0.01
    for turn in range(500):
        before = len(source.entries)
        source.emit(int(rate * step), turn * step)
        if len(source.entries) > before and turn * step > 2 * LEASE_SECONDS:
            assert 0.01 < source.ledger.within < LEASE_SECONDS / 4, "others may be journaled with it"
    assert not source.waits
    assert max(entry.lease for entry in source.entries) <= 1.3 * rate * LEASE_SECONDS
    assert len(source.entries) <= 5 * 1.1 / LEASE_SECONDS


def test_a_slow_source_reports_only_when_it_is_asked() -> None:
    """As it will be again in time."""
    source = Told(rate=12.5)
    source.report(0.0)
    reports: list[float] = []
    for turn in range(500):
        now = turn * 0.08 + 0.01
        while now > source.asks_at:
            reports += [source.asks_at] if source.report(source.asks_at) else []
        before = len(source.entries)
        source.emit(1, now)
        reports += [now] if len(source.entries) > before else []
    assert not source.waits
    assert all(at % LEASE_SECONDS == 0 for at in reports[5:])
    assert max(entry.lease for entry in source.entries[5:]) <= 5


def test_the_first_leases_of_a_split_grow_fast() -> None:
    """Doubling them took ten reports of the first quarter of a second."""
    source = Told(guesses=True)
    for turn in range(63):
        source.emit(10_000, turn * 0.004)
    assert source.waits == 1
    assert len(source.entries) <= 7
    assert all(entry.lease <= min(4 * (entry.position + 10_000), 650_000) for entry in source.entries)


def test_a_clock_that_is_set_back_makes_no_longer_guess() -> None:
    source = Told(guesses=True)
    source.emit(1_000, 1.0)
    source.emit(1_000, 1.0 - LEASE_SECONDS / 4)
    source.emit(10_000, 0.5)
    assert max(entry.lease for entry in source.entries) <= 4 * 12_000


def test_what_a_burst_at_the_beginning_was_given_is_taken_back() -> None:
    source = Told(guesses=True)
    for _ in range(3):
        source.emit(10_000, 0.0)
    assert source.entries[-1].lease > 60_000
    source.report(LEASE_SECONDS)
    assert source.entries[-1] == SplitPosition(0, 30_000, 37_500)


@pytest.mark.parametrize(("block", "each_lease"), [(15, 5.0), (62, LEASE_SECONDS / TOGETHER_SECONDS)])
def test_splits_that_take_turns_report_together(block: int, each_lease: float) -> None:
    """Also those that use a whole lease at once."""
    source = Told(rate=20_000 / 64, splits=64)
    source.report(0.0)
    reports = 0
    for turn in range(64 * 100):
        before = len(source.entries)
        source.emit(block, turn * block / 20_000, turn % 64)
        reports += len(source.entries) > before
    assert not source.waits
    assert reports <= each_lease * 6_400 * block / 20_000 / LEASE_SECONDS


def test_leases_grow_with_an_unknown_rate_and_are_taken_back_when_it_falls() -> None:
    source = Told()
    source.report(0.0)
    assert source.entries[-1].lease == FIRST_ROWS
    for turn in range(100):
        source.emit(5_000, turn * 0.005)
    fast = source.entries[-1].lease
    assert fast == pytest.approx(1_250_000 * LEASE_SECONDS, rel=0.1)
    source.emit(50, 2.0)
    source.emit(50, 4.0)
    assert source.entries[-1].lease == 62


def test_a_source_that_pauses_takes_its_lease_back() -> None:
    source = Told()
    source.report(0.0)
    for turn in range(100):
        source.emit(100, turn * 0.005)
    assert source.entries[-1].lease > 1_000
    for turn in range(3):
        source.report(1.0 + turn)
    assert source.entries[-1] == SplitPosition(0, 10_000, 100)


def test_a_lease_that_is_taken_back_covers_nothing_from_then_on() -> None:
    source = Told()
    source.report(0.0)
    for turn in range(100):
        source.emit(100, turn * 0.005)
    source.report(1.0)
    assert source.ledger.covers(0, 1_000)
    source.ledger.ask(2.0)
    table = source.ledger.report(2.0, [0])
    assert unpack_positions(table) == [SplitPosition(0, 10_000, 100)]
    assert not source.ledger.covers(0, 1_000)
    assert source.ledger.covers(0, 100)


def test_the_next_lease_is_asked_for_when_half_of_one_is_used() -> None:
    source = Told(rows=100)
    assert source.report(0.0) == [SplitPosition(0, 0, 100)]
    source.emit(49, 0.0)
    assert len(source.entries) == 1
    source.emit(1, 0.0)
    assert source.entries[1:] == [SplitPosition(0, 50, 100)]


def test_one_report_is_under_way_at_a_time() -> None:
    ledger = LeaseLedger({}, 10, None, 0.0)
    assert ledger.report(0.0, [0])
    assert ledger.within == 0.0
    assert not ledger.covers(0, 1)
    assert not ledger.report(0.0, [0], (0, 20))
    ledger.acknowledged += 1
    assert ledger.covers(0, 10)
    assert unpack_positions(ledger.report(0.0, [0], (0, 20))) == [SplitPosition(0, 0, 20)]
    assert ledger.covers(0, 10)
    assert not ledger.covers(0, 11)
    ledger.acknowledged += 1
    assert ledger.covers(0, 20)


def test_short_splits_have_leases_before_their_turn() -> None:
    source = Told(splits=1_000)
    source.report(0.0)
    assert len(source.entries) == AHEAD
    for split in list(source.splits):
        source.emit(10, 0.0, split)
        source.ledger.end(split)
        source.splits.remove(split)
    source.report(1.0)
    assert not source.waits
    assert len({entry.split for entry in source.entries if entry.done}) == 1_000
    assert source.ledger.exact() == b""


@pytest.mark.parametrize("rows", [300, 3_000, 300_000])
def test_at_most_half_a_second_of_rows_is_at_risk_and_later_splits_need_no_wait(rows: int) -> None:
    rate, batch = 20_000, 100
    source = Told(splits=40 if rows < 100_000 else 2)
    source.report(0.0)
    at_risk: dict[int, int] = {}
    now, most, waits = 0.0, 0, 0
    for split in list(source.splits):
        for _ in range(rows // batch):
            source.emit(batch, now, split)
            now += batch / rate
            at_risk |= {entry.split: entry.lease for entry in source.entries}
            source.entries.clear()
            most = max(most, sum(at_risk.values()))
        source.ledger.end(split)
        source.splits.remove(split)
        waits = source.waits if split < 3 else waits
    assert most <= 0.5 * rate + AHEAD * FIRST_ROWS
    assert source.waits == waits


def test_an_end_is_reported_as_such() -> None:
    source = Told(rows=5, splits=3)
    source.report(0.0)
    source.ledger.emit(0, 3, 0.0)
    for split in (0, 1, 7):
        source.ledger.end(split)
    found = unpack_positions(source.ledger.exact())
    assert found == [
        SplitPosition(0, 3, 0, True),
        SplitPosition(1, 0, 0, True),
        SplitPosition(2, 0),
        SplitPosition(7, 0, 0, True),
    ]


def test_splits_that_come_and_go_are_reported_without_a_lease() -> None:
    ledger = LeaseLedger({}, 5, None, 0.0, cursors={1: Cursor("b")})
    found = [SplitPosition(number, 0, cursor=Cursor(name)) for number, name in enumerate("abc")]
    for entry in found:
        ledger.note(entry)
    assert unpack_positions(ledger.exact()) == found
    leased = found[1]._replace(lease=5)
    assert unpack_positions(ledger.report(0.0, [1])) == [found[0], found[2], leased]
    ledger.acknowledge()
    ledger.emit(1, 2, 0.0, Cursor("b", b"2", 2))
    ledger.end(1)
    gone = [
        SplitPosition(number, 2, 0, True, Cursor(name, b"2", 2), forgotten=True)
        for number, name in enumerate("ab")
    ]
    for entry in gone:
        ledger.note(entry)
    expected = [gone[0]._replace(cursor=None), gone[1]]
    assert unpack_positions(ledger.exact()) == expected
    assert unpack_positions(ledger.report(0.0, [])) == expected
    ledger.acknowledge()
    assert ledger.take_durable() == {"b": b"2"}
    assert ledger.is_settled()


def test_another_thread_may_ask_where_a_source_is_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of an abandoned task still has the ledger: here it gets to a next split meanwhile."""
    source = Told(rows=5, splits=3)
    source.report(0.0)
    splits = itertools.count(7)

    def interrupted(*fields: int) -> SplitPosition:
        source.ledger.end(next(splits))
        return SplitPosition(*fields)

    monkeypatch.setattr(leaseledger, "SplitPosition", interrupted)
    assert [entry.split for entry in unpack_positions(source.ledger.exact())] == [0, 1, 2]


def test_positions_that_are_not_durable_are_kept_once() -> None:
    ledger = LeaseLedger({0: 0}, 4, None, 0.0, cursors={0: Cursor("log")})
    ledger.report(0.0, [0])
    for number in range(1, 9):
        ledger.acknowledge(durable=False)
        assert ledger.covers(0, 4)
        ledger.emit(0, 4, float(number), Cursor("log", b"%d" % number, 4 * number))
        assert ledger.report(float(number), [0])
        assert len(ledger._unsafe) == 1
        assert ledger.take_durable() == {}
    ledger.acknowledge()
    assert ledger.take_durable() == {"log": b"8"}
