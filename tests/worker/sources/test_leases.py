"""What sources may emit before the coordinator has their positions, and where they go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.api.stream import Stream
from minishuffle.connectors.generator import TURNS_PER_SECOND
from minishuffle.operators.base import TimedBatch
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.wire.packed import Cursor, SplitPosition, pack_positions, unpack_positions
from minishuffle.worker.sources.leases import SourceLeases
from minishuffle.worker.state import StartTask
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Site

LEASE = JobSettings(source_lease=10)
SECONDS_MAX = 20.0


class Numbers:
    """Two splits of numbers without end, ten at a time; the second begins at a thousand."""

    bounded = False

    def splits(self) -> list[int]:
        return [0, 1000]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        while True:
            yield [split + number for number in range(offset, offset + 10)]
            offset += 10


class Once(Numbers):
    """One split of 100 rows, which a test lets go."""

    bounded = True
    let_go = threading.Event()

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for first in range(offset, 100, 10):
            yield list(range(first, first + 10))
            assert self.let_go.wait(SECONDS_MAX)


class Slow(Once):
    """As ``Once``, for tests of its own."""

    let_go = threading.Event()


def ill_at_55(row: int) -> int:
    if row == 55:
        raise ValueError(row)
    return row


def entries_of(tables: list[bytes]) -> list[SplitPosition]:
    return [entry for table in tables for entry in unpack_positions(table)]


async def test_nothing_is_emitted_beyond_what_was_acknowledged(site: Site) -> None:
    site.acknowledges = False
    (task,) = site.deploy(Stream.source(Numbers()).collect(), settings=LEASE)
    reported = site.positions.setdefault(attempt(), [])
    await site.until(lambda: len(reported) == 1)
    assert entries_of(reported) == [SplitPosition(0, 0, 10), SplitPosition(1, 0, 10)]
    assert site.rows == []
    task.leases.acknowledge()
    await site.until(lambda: len(site.rows) >= 20)
    assert site.rows == [*range(10), *range(1000, 1010)]
    assert entries_of(reported[1:]) == [SplitPosition(0, 10, 10)]
    task.leases.acknowledge()
    await site.until(lambda: len(site.rows) >= 30)
    assert site.rows[20:] == list(range(10, 20))
    task.paths.cancel()
    (outcome,) = await site.finish()
    assert entries_of([outcome.positions]) == [SplitPosition(0, 20), SplitPosition(1, 10)]


async def test_a_task_that_raises_says_exactly_where_it_was(site: Site) -> None:
    (outcome,) = await site.run(Stream.source(Once()).map(ill_at_55).collect(), settings=LEASE)
    assert outcome.state == "failed"
    assert entries_of([outcome.positions]) == [SplitPosition(0, 60)]


async def test_a_source_that_finishes_says_that_its_splits_are_done(site: Site) -> None:
    (outcome,) = await site.run(Stream.items(range(10)).collect())
    last = {entry.split: entry for entry in entries_of([*site.positions[attempt()], outcome.positions])}
    assert last == {split: SplitPosition(split, 1, 0, True) for split in range(10)}


async def test_the_loop_says_where_a_source_is_that_reads_for_long(site: Site) -> None:
    """Not while the task stands at a barrier."""
    (task,) = site.deploy(Stream.source(Slow()).collect(), settings=JobSettings(source_lease=40))
    reported = site.positions.setdefault(attempt(), [])
    await site.until(lambda: site.rows == list(range(10)))
    assert entries_of(reported) == [SplitPosition(0, 0, 40)]
    assert site.deployment.reads_sources
    task.paths.pause.at = 1
    assert site.deployment.renew_leases() == []
    task.paths.pause.at = 0
    (fact,) = site.deployment.renew_leases()
    assert entries_of([fact.positions]) == [SplitPosition(0, 10, 40)]
    assert site.deployment.renew_leases() == [], "it is under way"
    task.leases.acknowledge()
    assert site.deployment.renew_leases() == [], "nothing has changed since"
    Slow.let_go.set()
    await site.finish()
    assert site.deployment.renew_leases() == []


def test_the_loop_does_not_wait_for_a_task_nor_overtake_it() -> None:
    posted: list[tuple[Any, ...]] = []
    reported: list[list[SplitPosition]] = []
    bell = SimpleNamespace(ring=lambda: None)
    paths: Any = SimpleNamespace(bell=bell, post=lambda *call: posted.append(call))
    leases = SourceLeases(paths, lambda table, within: reported.append(unpack_positions(table)), rows=10)
    assert leases.renew(0.0) == (b"", 0.0)
    reader = leases.open(Numbers(), 0, 1, 0.0, in_turn=False)
    assert leases.renew(0.0)[0] == b"", "the task has posted a report before"
    while posted:
        call, *arguments = posted.pop(0)
        call(*arguments)
        leases.acknowledge()
    assert reported == [[SplitPosition(0, 0, 10), SplitPosition(1, 0, 10)]]
    assert len(reader.poll(0.0) or ()) == 10
    with leases._lock:
        assert leases.renew(1.0)[0] == b"", "its thread uses the ledger"
    leases.take(10, 1.0)
    assert len(posted) == 1
    leases.acknowledge()
    assert leases.renew(1.25)[0] == b"", "its report has not arrived"


async def test_without_restarts_nothing_is_reported(site: Site) -> None:
    (outcome,) = await site.run(
        Stream.items(range(10)).collect(), settings=JobSettings(restart_strategy="none")
    )
    assert site.positions == {}
    assert outcome.positions == b""


async def test_the_next_attempt_goes_on_behind_the_lease(site: Site) -> None:
    message = site.message(compile_job(Stream.items(range(1000)).collect(), settings=LEASE), "j1")
    positions = [SplitPosition(0, 3, 2), SplitPosition(1, 15, 0, True)]
    positions += [SplitPosition(split, 0, 0, True) for split in range(2, 64)]
    update = {"attempt": 2, "positions": pack_positions(positions)}
    spec = message.tasks[0].model_copy(update=update)
    site.deployment.start(StartTask(message, spec))
    await site.until(lambda: bool(site.outcomes))
    assert site.rows == list(range(5, 15))
    assert site.recovered == [(attempt(number=2), "first record")], "its first batch was passed on"
    assert entries_of(site.positions[attempt(number=2)])[0] == SplitPosition(0, 5, 10)


class Named:
    """One split of a hundred numbers whose positions are texts."""

    replayable = True

    def splits(self) -> list[str]:
        return ["numbers"]

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[int], bytes]]:
        for first in range(int(position or b"0"), 100, 10):
            yield list(range(first, first + 10)), b"%d" % (first + 10)


async def test_a_split_with_a_name_is_read_on_from_the_position_before_the_lease(site: Site) -> None:
    message = site.message(compile_job(Stream.source(Named()).collect(), settings=LEASE), "j1")
    positions = pack_positions([SplitPosition(0, 20, 15, False, Cursor("numbers", b"20", 20))])
    spec = message.tasks[0].model_copy(update={"attempt": 2, "positions": positions})
    site.deployment.start(StartTask(message, spec))
    await site.until(lambda: bool(site.outcomes))
    assert site.rows == list(range(35, 100))
    first, *others = entries_of(site.positions[attempt(number=2)])
    assert first == SplitPosition(0, 35, 10, False, Cursor("numbers", b"20", 20))
    assert others[0] == SplitPosition(0, 40, 10, False, Cursor("numbers", b"40", 40))
    last = [*others, *entries_of([site.outcomes[attempt(number=2)].positions])][-1]
    assert last == SplitPosition(0, 100, 0, True, Cursor("numbers", b"100", 100))


class Timed(Named):
    def read(self, split: str, position: bytes, /) -> Iterator[Any]:
        for rows, behind in super().read(split, position):
            yield TimedBatch(rows, rows), behind


async def test_times_that_a_source_brings_go_with_its_rows(site: Site) -> None:
    kept = (
        Stream.source(Timed()).event_time().key_by(abs).process(lambda row, context: [context.time]).collect()
    )
    assert {outcome.state for outcome in await site.run(kept)} == {"finished"}


class Acknowledged(Named):
    """Notes what is acknowledged, after the rows that it has given by then."""

    noted: ClassVar[list[Any]] = []

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[int], bytes]]:
        for rows, behind in super().read(split, position):
            self.noted.append(rows[-1])
            yield rows, behind

    def acknowledge(self, positions: dict[str, bytes]) -> None:
        self.noted.append(positions)


@pytest.mark.parametrize("restarts", ["individual", "none"])
async def test_a_source_acknowledges_what_was_passed_on_and_is_durable(site: Site, restarts: Any) -> None:
    Acknowledged.noted.clear()
    settings = JobSettings(source_lease=10, restart_strategy=restarts)
    (outcome,) = await site.run(Stream.source(Acknowledged()).collect(), settings=settings)
    assert outcome.state == "finished"
    noted = Acknowledged.noted
    acknowledged = [each for each in noted if isinstance(each, dict)]
    ends = [int(each["numbers"]) for each in acknowledged]
    assert ends == sorted(set(ends))
    assert ends[-1] == 100
    assert noted[-1] == {"numbers": b"100"}, "it has ended, and the coordinator has that"
    for number, each in enumerate(noted):
        if isinstance(each, dict):
            assert each["numbers"] in [b"%d" % (row + 1) for row in noted[:number] if isinstance(row, int)]


async def test_a_position_that_the_coordinator_may_not_have_is_not_acknowledged(site: Site) -> None:
    Acknowledged.noted.clear()
    site.acknowledges = False
    (task,) = site.deploy(Stream.source(Acknowledged()).collect(), settings=LEASE)
    reported = site.positions.setdefault(attempt(), [])
    for count in range(1, 4):
        await site.until(lambda count=count: len(reported) == count)
        task.leases.acknowledge(durable=False)
    await site.until(lambda: len(reported) == 4)
    assert all(isinstance(each, int) for each in Acknowledged.noted)
    task.leases.acknowledge()
    await site.until(lambda: len(reported) == 5)
    assert [each for each in Acknowledged.noted if isinstance(each, dict)] == [{"numbers": b"30"}]
    task.paths.cancel()
    await site.finish()


class Held:
    """The leases of a task that takes snapshots, and reads ten rows at each step."""

    def __init__(self) -> None:
        paths: Any = SimpleNamespace(bell=SimpleNamespace(ring=lambda: None))
        self.leases = SourceLeases(paths, None, rows=None, held=True)
        self.reader = self.leases.open(Acknowledged(), 0, 1, 0.0, in_turn=False)

    def read(self) -> int:
        """Where the source is behind ten more rows."""
        self.reader.poll(0.0)
        self.leases.take(10, 0.0)
        return self.reader.positions[0]

    def acknowledged(self) -> list[int]:
        Acknowledged.noted.clear()
        self.leases.idle(0.0)
        return [int(each["numbers"]) for each in Acknowledged.noted]


def test_positions_are_acknowledged_once_snapshots_of_both_kinds_cover_them() -> None:
    held = Held()
    leases = held.leases
    held.read()
    leases.cut(1, is_alone=False)
    held.read()
    leases.safe(1)
    leases.cut_complete(1, 1, freed=False)
    assert not held.acknowledged(), "its next attempt may begin before the durable snapshot"
    leases.snapshot(2)
    assert not held.acknowledged(), "nobody has that one"
    leases.safe(2)
    assert held.acknowledged() == [10]
    held.read()
    leases.cut(2, is_alone=False)
    leases.snapshot(3)
    leases.safe(3)
    leases.cut_complete(2, 1, freed=False)
    assert not held.acknowledged(), "the job may go back to the first"
    leases.cut(3, is_alone=False)
    leases.snapshot(4)
    leases.safe(4)
    leases.cut_complete(3, 2, freed=False)
    assert held.acknowledged() == [30]
    leases.finish(0.0)
    assert leases.exact() == b"", "the coordinator is told nothing"


def test_a_durable_snapshot_that_failed_is_acknowledged_with_the_next() -> None:
    held = Held()
    for number in (1, 2):
        held.read()
        held.leases.cut(number, is_alone=False)
    held.leases.snapshot(1)
    held.leases.safe(1)
    assert not held.acknowledged()
    held.leases.cut_complete(2, 2, freed=False)
    assert held.acknowledged() == [20]


@pytest.mark.parametrize(("is_alone", "freed"), [(True, True), (True, False), (False, True)])
def test_a_task_without_a_holder_begins_at_durable_snapshots(*, is_alone: bool, freed: bool) -> None:
    held = Held()
    held.read()
    held.leases.cut(1, is_alone=is_alone)
    held.leases.cut_complete(1, 1, freed=freed)
    assert held.acknowledged() == ([10] if is_alone and freed else [])


STEPS = ("read", "snapshot", "safe", "cut", "alone", "complete", "freed")


@given(st.lists(st.sampled_from(STEPS), max_size=30))
def test_nothing_is_acknowledged_before_which_an_attempt_may_begin(steps: list[str]) -> None:
    held, where, oldest, last, cut = Held(), 0, 0, 0, (0, 0, False)
    snapshot, kept = (0, 0), [(0, 0)]
    for step in [*steps, *3 * ("read", "cut", "snapshot", "safe", "complete")]:
        if step == "read":
            where = held.read()
        elif step == "snapshot":
            snapshot = snapshot[0] + 1, where
            held.leases.snapshot(snapshot[0])
        elif step == "safe":
            held.leases.safe(snapshot[0])
            oldest = max(oldest, snapshot[1])
        elif step in ("cut", "alone"):
            cut = cut[0] + 1, where, step == "alone"
            held.leases.cut(cut[0], is_alone=cut[2])
        elif cut[0] > kept[-1][0]:
            kept = [*kept, cut[:2]][-2:]
            held.leases.cut_complete(cut[0], kept[0][0], freed=step == "freed")
            oldest = max(oldest, cut[1] if cut[2] and step == "freed" else 0)
        for last in held.acknowledged():
            assert 0 < last <= min(oldest, kept[0][1])
    assert last == kept[0][1], "all of it, in the end"


class Ends:
    """The leases of a task into which programs write, with their receipts; ``cuts``: as for the leases."""

    def __init__(self, *, cuts: bool = True) -> None:
        paths: Any = SimpleNamespace(bell=SimpleNamespace(ring=lambda: None))
        self.leases = SourceLeases(paths, None, rows=None, held=True, cuts=cuts)
        self.receipts: list[int] = []
        self.ends = 0

    def end(self, *, before: bool = False) -> None:
        """The next end is read, or was by an earlier attempt."""
        number, self.ends = self.ends, self.ends + 1
        give = partial(self.receipts.append, number)
        if before:
            self.leases.read_before(give)
        else:
            self.leases.end(number, give)

    def mark(self, *, is_urgent: bool = False) -> None:
        """Something more of a split is read, which counts like an end."""
        number, self.ends = self.ends, self.ends + 1
        self.leases.mark(partial(self.receipts.append, number), is_urgent=is_urgent)


def test_a_receipt_waits_for_snapshots_of_both_kinds() -> None:
    ends = Ends()
    leases = ends.leases
    assert leases.awaited_cut == -1
    leases.cut(3, is_alone=False)
    ends.end()
    leases.cut_complete(3, 3, freed=False)
    leases.snapshot(1)
    leases.safe(1)
    assert not ends.receipts and leases.awaited_cut == 0, "the third was taken before the end"
    leases.cut(4, is_alone=False)
    assert leases.awaited_cut == 4
    leases.cut(6, is_alone=False)
    assert leases.awaited_cut == 4, "it may have failed: then the sixth will do"
    ends.end()
    leases.cut_complete(6, 3, freed=False)
    assert ends.receipts == [0] and leases.awaited_cut == 0, "whatever older one is kept"
    leases.cut(7, is_alone=False)
    leases.cut_complete(7, 6, freed=False)
    assert ends.receipts == [0] and leases.awaited_cut == -1, "its next attempt begins before that end"
    leases.snapshot(2)
    leases.safe(2)
    assert ends.receipts == [0, 1]


@pytest.mark.parametrize(("is_alone", "freed"), [(True, True), (True, False), (False, True)])
def test_receipts_of_a_task_without_a_holder_wait_for_durable_snapshots_alone(
    *, is_alone: bool, freed: bool
) -> None:
    ends = Ends()
    ends.end()
    ends.leases.cut(1, is_alone=is_alone)
    ends.leases.cut_complete(1, 1, freed=freed)
    assert ends.receipts == ([0] if is_alone and freed else [])


def test_of_an_end_that_an_earlier_attempt_has_read_no_durable_snapshot_is_known() -> None:
    ends = Ends()
    ends.end(before=True)
    ends.leases.cut(5, is_alone=False)
    assert not ends.receipts
    ends.leases.cut_complete(5, 4, freed=False)
    assert ends.receipts == [0], "its own snapshots cover that"


def test_where_no_durable_snapshot_can_be_taken_receipts_wait_for_none() -> None:
    ends = Ends(cuts=False)
    ends.end(before=True)
    assert ends.receipts == [0]
    ends.end()
    assert ends.leases.awaited_cut == -1 and ends.receipts == [0]
    ends.leases.cut(1, is_alone=True)
    ends.leases.cut_complete(1, 1, freed=True)
    assert ends.receipts == [0], "it may begin at an earlier snapshot of its own"
    ends.leases.snapshot(1)
    ends.leases.safe(1)
    assert ends.receipts == [0, 1]


def test_a_mark_has_snapshots_taken_sooner_if_it_is_urgent() -> None:
    marks = Ends()
    leases = marks.leases
    marks.mark()
    assert leases.awaited_cut == -1 and not leases.awaits_snapshot
    marks.mark(is_urgent=True)
    marks.mark()
    assert leases.awaited_cut == 0 and not leases.awaits_snapshot, "a durable one is waited for first"
    leases.cut(3, is_alone=False)
    assert leases.awaited_cut == 3
    leases.cut_complete(3, 3, freed=False)
    assert leases.awaited_cut == -1 and leases.awaits_snapshot and not marks.receipts
    leases.snapshot(1)
    leases.safe(1)
    assert marks.receipts == [0, 1, 2] and not leases.awaits_snapshot


def test_where_no_durable_snapshot_can_be_taken_an_urgent_mark_has_others_taken_sooner() -> None:
    marks = Ends(cuts=False)
    marks.mark(is_urgent=True)
    assert marks.leases.awaits_snapshot and marks.leases.awaited_cut == -1
    ends = Ends(cuts=False)
    ends.end()
    assert not ends.leases.awaits_snapshot, "a program waits for an interval, and nothing stands"


@given(st.lists(st.sampled_from(("end", "mark", *STEPS[1:])), max_size=30))
def test_no_receipt_is_given_before_which_an_attempt_may_begin(steps: list[str]) -> None:
    ends, oldest, cut, complete = Ends(), 0, (0, 0, False), (0, 0)
    snapshot = (0, 0)
    for step in [*steps, *2 * ("end", "cut", "snapshot", "safe", "complete")]:
        if step == "end":
            ends.end()
        elif step == "mark":
            ends.mark()
        elif step == "snapshot":
            snapshot = snapshot[0] + 1, ends.ends
            ends.leases.snapshot(snapshot[0])
        elif step == "safe":
            oldest = max(oldest, snapshot[1])
            ends.leases.safe(snapshot[0])
        elif step in ("cut", "alone"):
            cut = cut[0] + 1, ends.ends, step == "alone"
            ends.leases.cut(cut[0], is_alone=cut[2])
        elif cut[0] > complete[0]:
            complete = cut[:2]
            ends.leases.cut_complete(cut[0], max(1, cut[0] - 1), freed=step == "freed")
            oldest = max(oldest, cut[1] if cut[2] and step == "freed" else 0)
        assert ends.receipts == list(range(min(oldest, complete[1])))
    assert len(ends.receipts) == ends.ends and ends.leases.awaited_cut == -1


async def test_rows_that_fell_due_while_nobody_ran_are_counted(site: Site) -> None:
    stream = Stream.generate(rate=6_400).collect()
    message = site.message(compile_job(stream, settings=LEASE), "j1")
    positions = pack_positions([SplitPosition(split, 40, 10) for split in range(64)])
    update = {"attempt": 2, "positions": positions, "positions_age": 0.5}
    site.deployment.start(StartTask(message, message.tasks[0].model_copy(update=update)))
    (task,) = site.tasks()
    await site.until(lambda: len(site.rows) >= 64)
    assert task.read_counters().rows_skipped == 64 * 40
    block = 6_400 // 64 // TURNS_PER_SECOND
    assert min(site.rows) == 90 // block * 64 * block + 90 % block, "split 0 goes on at 40 + 0.5 s"
    task.paths.cancel()
    await site.finish()


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[Any]:
    Once.let_go = threading.Event()
    Once.let_go.set()
    yield
    Once.let_go.set()
