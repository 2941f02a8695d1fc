"""The gate that other programs write to, where tasks restart: what is reported, and where the next one is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import TaskCancelled
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import BufferFlags, DataType, EventKind, PartitionRequest
from minishuffle.wire.packed import Cursor, SplitPosition, unpack_positions
from minishuffle.worker.external import clientgate
from minishuffle.worker.external.clientgate import UPSTREAM_EDGE, Progress, UpstreamChannel, UpstreamGate
from minishuffle.worker.sources.leases import SourceLeases
from support.frames import buffer_header
from support.links import BareLink, consumer_of

SEGMENT_BYTES = 4096


def there(partition: int, rows: int, base: int = 0, checksum: int = 0, done: bool = False) -> SplitPosition:
    """What was reported of a partition of write ``w``."""
    cursor = Cursor(f"w/{partition}", struct.pack(">QI", base, checksum), rows)
    return SplitPosition(partition, rows, 0, done, cursor)


class Stand:
    """A gate with leases of 3 rows. The coordinator acknowledges when the task waits, or in :meth:`turn`."""

    def __init__(self, *resumed: SplitPosition, held: bool = False, cuts: bool = False) -> None:
        network = NetworkBufferPool(16, SEGMENT_BYTES)
        self.reports: list[list[SplitPosition]] = []
        self.waits = 0
        self.cancelled = False
        self.acknowledges = True
        self.now = 0.0
        self._posted: list[tuple[Any, ...]] = []
        paths: Any = SimpleNamespace(
            wait_until=self._wait, bell=SimpleNamespace(ring=lambda: None), post=self._post
        )
        self.leases = SourceLeases(paths, None if held else self._report, rows=3, held=held, cuts=cuts)
        self.upstreams = UpstreamGate(
            lambda splits: InputGate(
                UPSTREAM_EDGE,
                0,
                GateBuffers(network.create_pool("stream", 3, 8), SEGMENT_BYTES, 2, 4),
                wake=lambda: None,
                give_back=lambda buffer: buffer.attachment.consumed(buffer),
                budget=AssemblyBudget(1 << 20),
                counters=TaskCounters(),
                splits=splits,
            ),
            self.leases,
            post=self._post,
            clock=lambda: self.now,
            resumed=None if held else resumed,
        )
        self.gate = self.upstreams.gate
        self.told: list[Progress] = []

    def _post(self, *call: Any) -> None:
        self._posted.append(call)

    def _report(self, table: bytes, within: float) -> None:
        self.reports.append(unpack_positions(table))

    def _wait(self, ready: Callable[[], bool]) -> None:
        self.waits += 1
        if self.cancelled:
            raise TaskCancelled("by the test")
        while not ready():
            self.turn()

    def turn(self) -> None:
        """The loop's: what was posted, and the coordinator's acknowledgement of each report."""
        while self._posted:
            (call, *arguments), *self._posted = self._posted
            reported = len(self.reports)
            call(*arguments)
            if len(self.reports) > reported and self.acknowledges:
                self.leases.acknowledge()

    def open(self, partition: int = 0, attempt: int = 1, **fields: Any) -> UpstreamChannel:
        self.upstreams.begin("w", range(2))
        self.upstreams.expect("w", partition, attempt, self.told.append, **fields)
        channel = self.upstreams.open_channel("w", partition, attempt)
        channel.attach_remote(BareLink(), PartitionRequest(PartitionId(JobId("j1"), UPSTREAM_EDGE, 0), 0))
        return channel

    def rows(self) -> list[Any]:
        found: list[Any] = []
        while (item := self.gate.poll()) is not None:
            rows = decode(item.format, item.rows, item.payload).payload
            assert isinstance(rows, list)
            found += rows
        return found

    def exact(self) -> list[SplitPosition]:
        """The last report."""
        return unpack_positions(self.leases.exact())


def arrive(channel: UpstreamChannel, *rows: str) -> None:
    data = b"".join(bytes(part) for part in encode(Batch(list(rows)))[1])
    consumer = consumer_of(channel)
    consumer.credit.take_unannounced()
    flags = BufferFlags.STARTS | BufferFlags.ENDS
    header = buffer_header(
        consumer.id,
        consumer.expected,
        DataType.DATA,
        len(data),
        flags=flags,
        rows=len(rows),
        row=max(0, consumer.row),
    )
    consumer.begin(header)[:] = data
    consumer.end()


def arrive_end(channel: UpstreamChannel) -> None:
    consumer = consumer_of(channel)
    header = buffer_header(consumer.id, consumer.expected, DataType.EVENT, 1)
    consumer.begin(header)[0] = EventKind.END_OF_PARTITION
    consumer.end()


def test_nothing_is_taken_before_the_coordinator_knows() -> None:
    stand = Stand()
    arrive(stand.open(), "a", "b")
    assert stand.rows() == ["a", "b"] and stand.waits == 1
    first = stand.reports[0][0]
    assert first == there(0, 0)._replace(lease=3)


def test_what_waits_for_a_lease_when_the_task_is_cancelled_was_not_taken() -> None:
    """Its program sends it again."""
    stand = Stand()
    arrive(stand.open(), "a", "b")
    stand.cancelled = True
    with pytest.raises(TaskCancelled):
        stand.rows()
    assert stand.exact() == [there(0, 0)]


def test_a_report_names_the_checksum_of_the_rows_up_to_its_position() -> None:
    stand = Stand()
    channel = stand.open()
    arrive(channel, "a", "b")
    stand.rows()
    arrive(channel, "c", "d")
    stand.rows()
    exact = there(0, 4, checksum=channel.progress.checksum)
    assert channel.progress.checksum and stand.exact() == [exact]
    stand.turn()
    stand.now += 10
    stand.rows()
    assert stand.reports[-1] == [exact._replace(lease=3)]


def test_the_receipt_of_a_partition_waits_for_the_coordinator() -> None:
    stand = Stand()
    channel = stand.open()
    arrive(channel, "a")
    arrive_end(channel)
    stand.rows()
    assert channel.attachment is not None and not channel.progress.complete
    assert stand.upstreams.end_write("w", [0]) == [0], "not yet"
    stand.turn()
    stand.rows()
    stand.turn()
    assert stand.reports[-1] == [there(0, 1, checksum=channel.progress.checksum, done=True)]
    assert channel.attachment is None and channel.progress.complete
    assert stand.upstreams.end_write("w", [0]) == []


def test_an_end_that_was_not_acknowledged_is_in_the_last_report() -> None:
    """The next attempt of the task knows that the partition is complete, and its program hears so."""
    stand = Stand()
    channel = stand.open()
    arrive(channel, "a")
    stand.rows()
    arrive_end(channel)
    stand.acknowledges = False
    stand.rows()
    stand.turn()
    found = {each.split: each for report in [*stand.reports, stand.exact()] for each in report}
    assert found[0].done
    again = Stand(found[0])
    again.upstreams.begin("w", range(2))
    again.upstreams.expect("w", 0, 2, again.told.append)
    assert (again.told[0].complete, again.told[0].rows) == (True, 1)


def test_the_next_attempt_goes_on_where_the_last_was() -> None:
    stand = Stand(there(0, 7, base=5, checksum=9))
    channel = stand.open()
    told = stand.told[0]
    assert (told.rows, told.base, told.checksum, told.complete) == (7, 5, 9, False)
    arrive(channel, "h")
    assert stand.rows() == ["h"]
    assert stand.exact()[0] == there(0, 8, base=5, checksum=channel.progress.checksum)


@pytest.mark.parametrize(
    "entry", [there(0, 7, checksum=9)._replace(lease=3), there(0, 7)._replace(position=10)]
)
def test_nothing_is_known_of_the_rows_in_a_lease(entry: SplitPosition) -> None:
    """Be it that of the attempt before, or of one whose next has reported nothing."""
    stand = Stand(entry)
    arrive(stand.open(), "k")
    told = stand.told[-1]
    assert (told.rows, told.base, told.checksum, told.complete) == (10, 10, 0, False)
    stand.rows()
    assert [(each.split, each.position) for each in stand.exact()] == [(0, 11)]
    assert list(stand.upstreams.changes) == [(0, "open"), (1, "open")], "no other split has its number"


@pytest.mark.parametrize(("sent", "begins"), [(-1, 100), (40, 40), (100, 100), (120, 100)])
def test_a_lease_beyond_what_was_ever_sent_passes_over_no_row(sent: int, begins: int) -> None:
    stand = Stand(there(0, 100, base=100))
    channel = stand.open(sent=sent)
    assert (stand.told[0].rows, stand.told[0].base) == (begins, begins)
    arrive(channel, "a")
    stand.rows()
    assert stand.exact()[0] == there(0, begins + 1, base=begins, checksum=channel.progress.checksum)


def test_a_partition_that_goes_on_holds_event_time_back_and_one_that_is_complete_does_not() -> None:
    stand = Stand(
        there(0, 7, done=True),
        there(1, 3),
    )
    stand.upstreams.begin("w", range(3))
    assert stand.gate.split_changes is not None
    assert [state for _, state in stand.gate.split_changes] == ["open", "open"]


def test_a_program_that_connects_again_ends_the_connection_that_it_has_lost() -> None:
    """The worker may not know yet that it is gone."""
    stand = Stand()
    channel = stand.open()
    ends: list[Any] = []
    channel.disconnect = ends.append
    stand.upstreams.expect("w", 0, 1, stand.told.append, connection=1)
    assert len(ends) == 1


def test_a_task_that_takes_snapshots_goes_on_at_one_and_answers_once_it_knows_which() -> None:
    stand = Stand(held=True)
    heard: list[str] = []
    stand.upstreams.once_resumed(lambda: heard.append("early"))
    assert not heard
    stand.gate.resume([])
    assert heard == ["early"] and stand.gate.has_splits
    channel = stand.open()
    arrive(channel, "a", "b", "c", "d")
    assert stand.rows() == ["a", "b", "c", "d"] and not (stand.waits or stand.reports)
    (position,) = [each for each in stand.gate.positions() if each.end]
    assert position == there(0, 4, checksum=channel.progress.checksum)
    again = Stand(held=True)
    again.gate.resume(stand.gate.positions())
    again.upstreams.once_resumed(lambda: heard.append("late"))
    assert heard[1:] == ["late"]
    again.upstreams.begin("w", range(2))
    again.upstreams.expect("w", 0, 2, again.told.append)
    (progress,) = again.told
    assert (progress.rows, progress.checksum, progress.base) == (4, channel.progress.checksum, 0)


def test_the_receipt_of_a_partition_waits_for_a_snapshot_behind_its_end() -> None:
    stand = Stand(held=True)
    stand.gate.resume([])
    channel = stand.open()
    arrive(channel, "a")
    stand.leases.snapshot(1)
    arrive_end(channel)
    stand.rows()
    stand.leases.safe(1)
    stand.leases.snapshot(2)
    assert not channel.progress.complete, "a next attempt may begin before its end"
    assert [each.done for each in stand.gate.positions()] == [True, False]
    stand.leases.safe(2)
    assert channel.progress.complete and stand.upstreams.end_write("w", [0]) == []


def settled(stand: Stand, *partitions: int) -> list[str]:
    """Gets an item once none of these waits for its receipt."""
    heard: list[str] = []
    stand.upstreams.once_settled("w", list(partitions), lambda: heard.append("settled"))
    return heard


def test_a_commit_waits_for_receipts_that_wait_for_a_durable_snapshot_and_event_time_does_not() -> None:
    stand = Stand(held=True, cuts=True)
    stand.gate.resume([])
    channel, _ = stand.open(), stand.open(1)
    arrive(channel, "a")
    assert settled(stand, 0, 1), "what has not ended is missing, which is answered at once"
    arrive_end(channel)
    stand.rows()
    stand.turn()
    assert list(stand.upstreams.changes) == [(0, "open"), (1, "open"), (0, "done")]
    heard = settled(stand, 0, 1)
    stand.leases.snapshot(1)
    stand.leases.safe(1)
    stand.leases.cut(1, is_alone=False)
    assert not (heard or channel.progress.complete or channel.attachment is None)
    stand.leases.cut_complete(1, 1, freed=False)
    assert heard and channel.progress.complete and channel.attachment is None
    assert stand.upstreams.end_write("w", [0]) == []


def test_what_an_earlier_attempt_has_read_to_its_end_has_its_receipt_once_a_durable_snapshot_covers_it() -> (
    None
):
    """That attempt may have died between two of them."""
    stand = Stand(held=True, cuts=True)
    stand.gate.resume([there(0, 7, checksum=9, done=True)])
    assert not stand.upstreams.changes, "event time does not wait for it"
    heard = settled(stand, 0)
    channel = stand.open(attempt=2)
    (told,) = stand.told
    assert (told.rows, told.checksum, told.complete) == (7, 9, False), "its program passes over all rows"
    arrive_end(channel)
    assert stand.rows() == []
    stand.turn()
    assert not heard and channel.attachment is not None
    stand.leases.cut(4, is_alone=False)
    stand.leases.cut_complete(4, 4, freed=False)
    assert heard and channel.progress.complete and channel.attachment is None


def test_an_attempt_that_brings_more_than_the_one_before_waits_for_its_own_end() -> None:
    stand = Stand(held=True, cuts=True)
    stand.gate.resume([there(0, 7, done=True)])
    channel = stand.open(attempt=2)
    arrive(channel, "more")
    assert stand.rows() == ["more"]
    stand.leases.cut(1, is_alone=True)
    stand.leases.cut_complete(1, 1, freed=True)
    assert not channel.progress.complete and not stand.gate.positions()[0].done
    arrive_end(channel)
    stand.rows()
    stand.leases.cut(2, is_alone=True)
    stand.leases.cut_complete(2, 1, freed=True)
    assert channel.progress.complete and stand.gate.positions()[0].end == 8


class Marking(Stand):
    """In a job that loses nothing, whose writers keep 80 bytes of rows, of which ten are a mark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *resumed: SplitPosition, cuts: bool = True) -> None:
        monkeypatch.setattr(clientgate, "WRITER_MARK_BYTES", 10)
        monkeypatch.setattr(clientgate, "WRITER_UNSTABLE_BYTES_MAX", 80)
        super().__init__(held=True, cuts=cuts)
        self.gate.resume(list(resumed))
        self.channel = self.open()
        self.link: Any = self.channel.attachment.link  # type: ignore[union-attr]

    def take(self, rows: int) -> None:
        """That many, of at least ten bytes each."""
        for _ in range(rows):
            arrive(self.channel, "ten bytes, or more")
            self.rows()

    def cut(self, number: int) -> None:
        self.leases.cut(number, is_alone=False)

    def stable(self) -> int:
        """What a writer hears that opens now; it is what the one that is there has heard."""
        heard = self.link.connection._stable.get(consumer_of(self.channel).id, (0, 0))[1]
        assert heard == self.upstreams.stable(self.channel.progress)
        return int(heard)


def test_a_writer_hears_which_rows_are_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Marking(monkeypatch)
    stand.take(2)
    stand.leases.snapshot(1)
    stand.cut(1)
    stand.take(1)
    stand.leases.safe(1)
    assert stand.stable() == 0, "the job may go back to its beginning"
    stand.leases.cut_complete(1, 1, freed=False)
    assert stand.stable() == 2
    stand.leases.snapshot(2)
    stand.leases.safe(2)
    assert stand.stable() == 2
    stand.cut(2)
    stand.leases.cut_complete(2, 1, freed=False)
    assert stand.stable() == 3


def test_from_half_of_what_a_writer_keeps_on_a_durable_snapshot_begins_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Marking(monkeypatch)
    size = len(b"".join(bytes(part) for part in encode(Batch(["ten bytes, or more"]))[1][1:]))
    rows = -(-40 // size)
    stand.take(rows - 1)
    assert stand.leases.awaited_cut == -1
    stand.take(1)
    assert stand.leases.awaited_cut == 0
    stand.leases.snapshot(1)
    stand.cut(1)
    stand.take(1)
    stand.leases.safe(1)
    stand.leases.cut_complete(1, 1, freed=False)
    assert stand.stable() == rows
    stand.leases.snapshot(2)
    stand.leases.safe(2)
    stand.cut(2)
    stand.leases.cut_complete(2, 1, freed=False)
    stand.take(rows - 1)
    assert stand.leases.awaited_cut == -1, "half of it is counted anew from what is stable"


def test_where_there_are_no_durable_snapshots_others_begin_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Marking(monkeypatch, cuts=False)
    stand.take(4)
    assert stand.leases.awaits_snapshot and stand.leases.awaited_cut == -1
    stand.leases.snapshot(1)
    stand.leases.safe(1)
    assert stand.stable() == 4 and not stand.leases.awaits_snapshot


@pytest.mark.parametrize("cuts", [False, True])
def test_a_restarted_task_has_a_durable_snapshot_begin_for_what_was_read_before(
    monkeypatch: pytest.MonkeyPatch, *, cuts: bool
) -> None:
    """How much of that its writer still keeps is not known; it may wait at its bound."""
    stand = Marking(monkeypatch, there(0, 7), cuts=cuts)
    assert stand.leases.awaited_cut == (0 if cuts else -1)
    stand.take(1)
    if cuts:
        assert stand.stable() == 0
        stand.cut(9)
        stand.leases.cut_complete(9, 8, freed=False)
    assert stand.stable() == 7


@pytest.mark.parametrize("what_comes", ["its end", "the end of the write", "nobody"])
def test_the_end_of_a_stream_waits_for_partitions_that_were_let_in_before_this_attempt_of_the_task(
    what_comes: str,
) -> None:
    stand = Stand(held=True)
    stand.upstreams.begin("w", range(2), opened=[1])
    stand.gate.resume([])
    stand.upstreams.end()
    assert not stand.gate.finished
    if what_comes == "nobody":
        stand.upstreams.begin("w", None, idle=True)
    elif what_comes == "the end of the write":
        stand.upstreams.end_write("w", [])
    else:
        channel = stand.open(1)
        arrive(channel, "a")
        arrive_end(channel)
        assert len(stand.rows()) == 1
        stand.turn()
        assert not stand.gate.finished
        stand.leases.snapshot(1)
        stand.leases.safe(1)
        stand.turn()
    assert stand.gate.finished


def test_the_end_of_a_stream_waits_for_a_partition_whose_link_has_broken() -> None:
    stand = Stand(held=True)
    stand.gate.resume([])
    channel = stand.open()
    stand.upstreams.end()
    stand.upstreams.over(channel)
    stand.turn()
    assert not (stand.gate.channels or stand.gate.finished)


def test_the_end_of_a_stream_waits_for_nobody_in_a_job_that_may_lose_rows() -> None:
    stand = Stand()
    stand.upstreams.begin("w", range(2), opened=[1])
    stand.upstreams.end()
    assert stand.gate.finished


def test_a_writer_whose_job_may_lose_rows_hears_of_none_that_is_stable() -> None:
    stand = Stand()
    channel = stand.open()
    assert stand.upstreams.stable(channel.progress) == -1


def test_a_write_that_nobody_knows_any_more_does_not_hold_event_time_back() -> None:
    """It was given up, and forgotten, behind the snapshot with which the attempt begins."""
    stand = Stand(held=True)
    stand.gate.resume([there(0, 7), there(1, 3, done=True)])
    assert list(stand.upstreams.changes) == [(0, "open")]
    stand.upstreams.keep(["w", "x"])
    assert len(stand.upstreams.changes) == 1, "it has yet to begin"
    stand.upstreams.keep(["x"])
    assert list(stand.upstreams.changes) == [(0, "open"), (0, "done")]
    assert stand.gate.positions() == []
    stand.open()
    stand.upstreams.keep(["x"])
    assert len(stand.gate.positions()) == 2, "one that has begun in this attempt is forgotten by its name"
