"""The watermark of several channels together: what Flink's StatusWatermarkValve tests assert, and the
invariants under any order of steps; then on a gate, behind subpartitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.counters import TaskCounters
from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME, END_OF_TIME, WatermarkValve
from minishuffle.ids import JobId, PartitionId
from minishuffle.limits import EVENTS_QUEUED_PER_CHANNEL_MAX
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import WATERMARK_EVENT, EventKind

if TYPE_CHECKING:
    from conftest import Setup


def valve_of(channels: int) -> WatermarkValve:
    valve = WatermarkValve()
    assert [valve.add() for _ in range(channels)] == list(range(channels))
    return valve


def state(valve: WatermarkValve) -> tuple[int, bool]:
    return valve.watermark, valve.idle


def test_one_channel_passes_on_what_grows() -> None:
    valve = valve_of(1)
    assert state(valve) == (BEGINNING_OF_TIME, False)
    assert valve.update(0, 0, False)
    assert valve.update(0, 25, False)
    assert not valve.update(0, 18, False)
    assert not valve.update(0, 25, False)
    assert state(valve) == (25, False)


def test_several_channels_are_as_far_as_the_last_of_them() -> None:
    valve = valve_of(3)
    assert not valve.update(0, 0, False)
    assert not valve.update(1, 0, False)
    assert valve.update(2, 0, False)
    assert not valve.update(0, 12, False)
    assert not valve.update(2, 10, False)
    assert valve.update(1, 15, False)
    assert valve.watermark == 10
    assert valve.update(2, 20, False)
    assert valve.watermark == 12


def test_idle_channels_hold_nobody_back_and_count_again_when_they_go_on() -> None:
    valve = valve_of(3)
    valve.update(0, 15, False)
    valve.update(1, 10, False)
    assert valve.update(2, BEGINNING_OF_TIME, True)
    assert state(valve) == (10, False)
    assert valve.update(1, 10, True)
    assert state(valve) == (15, False)
    assert valve.update(0, 15, True)
    assert state(valve) == (15, True), "all idle: it holds"
    assert valve.update(2, BEGINNING_OF_TIME, False)
    assert state(valve) == (15, False), "one that lags is counted again, and nothing goes back"
    assert not valve.update(2, 12, False)
    assert valve.update(2, 17, False)
    assert valve.watermark == 17


def test_an_idle_channel_that_tells_a_time_and_stays_idle_changes_nothing_when_others_are_further() -> None:
    valve = valve_of(2)
    valve.update(0, 0, True)
    valve.update(1, 1, True)
    assert state(valve) == (1, True)
    assert not valve.update(0, 1, True)
    assert state(valve) == (1, True)


def test_ended_channels_hold_nobody_back_and_the_last_one_ends_all() -> None:
    valve = valve_of(3)
    valve.update(0, 5, False)
    valve.update(1, 7, False)
    assert valve.end(2)
    assert valve.watermark == 5
    assert valve.end(0)
    assert valve.watermark == 7
    assert valve.update(1, 7, True)
    assert state(valve) == (7, True), "the rest is idle, not over"
    assert valve.end(1)
    assert state(valve) == (END_OF_TIME, False)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(
            st.tuples(st.just("tell"), st.integers(-50, 50)),
            st.sampled_from([("idle", 0), ("active", 0), ("end", 0)]),
        ),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_never_goes_back_and_never_passes_an_active_channel(
    steps: list[tuple[int, tuple[str, int]]],
) -> None:
    valve = valve_of(4)
    times = [BEGINNING_OF_TIME] * 4
    active, ended = [True] * 4, [False] * 4
    for channel, (step, time) in steps:
        before, idle_before = state(valve)
        if ended[channel]:
            continue
        match step:
            case "tell":
                times[channel], active[channel] = max(times[channel], time), True
                changed = valve.update(channel, time, False)
            case "idle":
                active[channel] = False
                changed = valve.update(channel, times[channel], True)
            case "active":
                active[channel] = True
                changed = valve.update(channel, times[channel], False)
            case _:
                ended[channel] = active[channel] = True
                changed = valve.end(channel)
        assert changed == ((before, idle_before) != state(valve))
        assert valve.watermark >= before
        counting = [times[i] for i in range(4) if active[i] and not ended[i]]
        if counting:
            assert valve.watermark == max(before, min(counting))
        assert valve.idle == (not counting and not all(ended))


class Model:
    """The valve in plain words, O(channels) a step; ``behind``: channels of new producers that have not come
    as far as the rest."""

    def __init__(self, channels: int) -> None:
        self.watermark, self.idle = BEGINNING_OF_TIME, False
        self.times = [BEGINNING_OF_TIME] * channels
        self.status = ["active"] * channels
        self.behind: set[int] = set()

    def update(self, channel: int, time: int, idle: bool) -> None:
        if time == END_OF_TIME:
            self.end(channel)
        elif self.status[channel] in ("active", "idle", "lagging"):
            if time > self.times[channel]:
                self.times[channel] = time
                if time >= self.watermark:
                    self.behind.discard(channel)
                self.status[channel] = self.counting(channel)
                self.look()
            self.status[channel] = "idle" if idle else self.counting(channel)
            self.look()

    def counting(self, channel: int) -> str:
        return "lagging" if channel in self.behind else "active"

    def end(self, channel: int) -> None:
        self.status[channel] = "ended"
        self.look()

    def suspend(self, channel: int) -> None:
        self.status[channel] = "suspended"
        self.look()

    def rejoin(self, channel: int) -> None:
        self.times[channel] = BEGINNING_OF_TIME
        self.behind.add(channel)
        if self.watermark == BEGINNING_OF_TIME:
            self.behind.clear()
        self.status[channel] = self.counting(channel)
        self.look()

    def look(self) -> None:
        active = [t for t, status in zip(self.times, self.status, strict=True) if status == "active"]
        if active:
            self.watermark = max(self.watermark, min(active))
        elif set(self.status) == {"ended"}:
            self.watermark = END_OF_TIME
        waits = {"suspended", "lagging"} & set(self.status)
        self.idle = not active and "idle" in self.status and not waits


def any_steps(channels: int) -> st.SearchStrategy[list[tuple[int, tuple[str, int, bool]]]]:
    times = st.one_of(st.integers(-50, 50), st.sampled_from([BEGINNING_OF_TIME, END_OF_TIME]))
    others = st.sampled_from(["end", "suspend", "rejoin"])
    step = st.one_of(
        st.tuples(st.just("update"), times, st.booleans()),
        st.tuples(others, st.just(0), st.just(False)),
    )
    return st.lists(st.tuples(st.integers(0, channels - 1), step), max_size=80)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), any_steps(n))))
def test_it_is_what_the_plain_model_says_and_never_goes_back(
    drawn: tuple[int, list[tuple[int, tuple[str, int, bool]]]],
) -> None:
    channels, steps = drawn
    valve, model = valve_of(channels), Model(channels)
    for channel, (step, time, idle) in steps:
        before = state(valve)
        if step == "update":
            changed = valve.update(channel, time, idle)
            model.update(channel, time, idle)
        else:
            changed = getattr(valve, step)(channel)
            getattr(model, step)(channel)
        assert state(valve) == (model.watermark, model.idle)
        assert changed == (state(valve) != before)
        assert valve.watermark >= before[0]


class Compared(int):
    """A time that counts how often times are compared."""

    times = 0

    def __lt__(self, other: int) -> bool:
        Compared.times += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Compared.times += 1
        return int(self) > int(other)


def test_a_step_looks_at_few_of_many_channels() -> None:
    valve = valve_of(4_000)
    for channel in range(4_000):
        valve.update(channel, Compared(channel), False)
    Compared.times = 0
    for channel in range(100):
        assert valve.update(channel, Compared(5_000 + channel), False)
        assert valve.watermark == channel + 1
    assert Compared.times <= 100 * 4 * 12, "12 levels above 4,000 leaves"


def test_a_suspended_channel_is_left_out_and_holds_what_there_is_when_nobody_else_counts() -> None:
    valve = valve_of(3)
    valve.update(0, 5, False)
    valve.update(1, 9, False)
    valve.update(2, 7, False)
    assert valve.suspend(0)
    assert state(valve) == (7, False)
    valve.suspend(2)
    assert valve.update(1, 9, True) is False, "it holds: a channel that is down may come back"
    assert state(valve) == (9, False)
    assert not valve.update(2, 30, False), "nothing is heard of it"
    assert valve.end(0) is False and valve.end(2)
    assert state(valve) == (9, True)


def test_a_channel_that_rejoins_counts_when_its_new_producer_has_come_as_far_as_the_rest() -> None:
    valve = valve_of(2)
    valve.update(0, 5, False)
    valve.update(1, 9, False)
    assert valve.suspend(0)
    assert not valve.rejoin(0)
    assert not valve.update(0, 3, False)
    assert valve.update(1, 20, False), "a source that starts again holds no window back"
    assert not valve.update(0, 19, False)
    assert state(valve) == (20, False)
    assert not valve.update(0, 20, False)
    assert not valve.update(1, 30, False), "from now on it is waited for"
    assert valve.update(0, 25, False)
    assert state(valve) == (25, False)


def test_a_channel_that_rejoins_before_there_was_a_watermark_counts_at_once() -> None:
    valve = valve_of(2)
    valve.suspend(0)
    valve.rejoin(0)
    assert not valve.update(1, 9, False)
    assert valve.update(0, 7, False)
    assert state(valve) == (7, False)


def test_while_every_channel_is_down_or_behind_the_watermark_holds_and_is_not_idle() -> None:
    valve = valve_of(2)
    for channel in (0, 1):
        valve.update(channel, 9, False)
    for channel in (0, 1):
        assert not valve.suspend(channel)
    assert state(valve) == (9, False)
    assert not valve.rejoin(0)
    assert not valve.update(0, 5, True), "the other one may come back"
    assert not valve.update(0, 8, False)
    assert valve.update(0, 12, False)
    assert state(valve) == (12, False)


def test_an_end_that_is_taken_back_is_waited_for_once_it_has_come_as_far_as_the_rest() -> None:
    valve = valve_of(2)
    valve.update(0, 5, False)
    valve.end(1)
    assert state(valve) == (5, False)
    assert not valve.rejoin(1)
    assert not valve.update(1, 6, False)
    assert valve.update(0, 8, False)
    assert state(valve) == (6, False)
    assert valve.end(0) is False
    assert not valve.suspend(0), "an end that was not that of the partition"
    assert valve.update(1, 7, False) and state(valve) == (7, False)


# --- on a subpartition ----------------------------------------------------------------------------------


class Written:
    """A partition of one subpartition, and what its reader is told."""

    def __init__(self) -> None:
        pool = NetworkBufferPool(8, 16).create_pool("p", 1, 8)

        def acquire() -> Segment:
            segment = pool.request()
            assert segment is not None
            return segment

        partition_id = PartitionId(JobId("j1"), 0, 0)
        self.notified: list[PipelinedSubpartition] = []
        self.partition = PipelinedPartition(
            partition_id, range(1), acquire, self.notified.append, TaskCounters()
        )
        self.subpartition = self.partition.subpartitions[0]
        self.view = self.subpartition.attach(1, lambda: None)

    def polled(self) -> list[bytes | tuple[int, ...]]:
        found: list[bytes | tuple[int, ...]] = []
        while (piece := self.view.poll()) is not None:
            payload = bytes(piece.payload)
            is_mark = len(payload) == WATERMARK_EVENT.size and payload[0] == EventKind.WATERMARK
            found.append(WATERMARK_EVENT.unpack(payload) if is_mark else payload)
            piece.released()
        return found


WATERMARK = int(EventKind.WATERMARK)


def test_a_newer_watermark_takes_the_place_of_an_unsent_one_with_no_data_between() -> None:
    written = Written()
    for time in range(1000):
        written.partition.broadcast_watermark(time, False)
    written.partition.broadcast_watermark(999, True)
    assert written.polled() == [(WATERMARK, 1, 999)]
    written.partition.broadcast_watermark(1000, False)
    written.partition.write(0, 1, [b"row"])
    written.partition.broadcast_watermark(1001, False)
    written.partition.broadcast_watermark(1002, False)
    assert written.polled() == [(WATERMARK, 0, 1000), b"row", (WATERMARK, 0, 1002)]


def test_a_watermark_that_was_taken_is_not_changed_any_more() -> None:
    written = Written()
    written.partition.broadcast_watermark(1, False)
    piece = written.view.poll()
    assert piece is not None
    written.partition.broadcast_watermark(2, False)
    assert WATERMARK_EVENT.unpack(piece.payload) == (WATERMARK, 0, 1)
    assert written.polled() == [(WATERMARK, 0, 2)]


def test_watermarks_do_not_count_as_queued_events() -> None:
    written = Written()
    for time in range(8):
        written.partition.write(0, 1, [b"0123456789abcdef"])
        written.partition.broadcast_watermark(time, False)
    written.partition.broadcast_event(EventKind.END_OF_DATA)
    assert written.view.next_type() is NextType.DATA
    assert len(written.polled()) == 17


def test_a_new_view_is_told_watermark_and_ends_again() -> None:
    written = Written()
    written.partition.broadcast_watermark(5, False)
    written.partition.broadcast_watermark(7, True)
    assert written.polled() == [(WATERMARK, 1, 7)]
    written.view = written.subpartition.attach(2, lambda: None)
    assert written.polled() == [(WATERMARK, 1, 7)]
    written.partition.broadcast_event(EventKind.END_OF_DATA)
    assert written.polled() == [bytes((EventKind.END_OF_DATA,))]
    for generation in (3, 4):
        written.view = written.subpartition.attach(generation, lambda: None)
        assert written.polled() == [(WATERMARK, 1, 7), bytes((EventKind.END_OF_DATA,))]


# --- on a gate ------------------------------------------------------------------------------------------


def test_a_gate_gives_the_least_watermark_before_the_element_behind_it(make_setup: type[Setup]) -> None:
    setup = make_setup()
    first, second = setup.partition(0), setup.partition(1)
    first.broadcast_watermark(10, False)
    second.broadcast_watermark(8, False)
    second.write(0, 1, [setup.element(["behind"])])
    for partition in (first, second):
        partition.broadcast_event(EventKind.END_OF_DATA)
        setup.local(partition)
    gate = setup.gate
    element = gate.poll()
    assert element is not None
    assert setup.rows_of(element) == ["behind"]
    assert gate.marked
    assert gate.valve.watermark == 8
    gate.marked = False
    assert gate.poll() is None
    assert gate.marked
    assert gate.valve.watermark == END_OF_TIME


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_watermarks_replace_each_other_at_a_consumer_that_does_not_poll(
    make_setup: type[Setup], kind: str
) -> None:
    setup = make_setup(remote=int(kind == "remote"))
    partition = setup.partition(0)
    channel = setup.local(partition) if kind == "local" else setup.remotes[0]
    settle = (lambda: None) if kind == "local" else setup.wire([partition]).settle
    for time in range(10_000):
        partition.broadcast_watermark(time, False)
        settle()
    assert len(channel.queue) == 1
    partition.write(0, 1, [setup.element(["row"])])
    for time in range(10_000, 10_100):
        partition.broadcast_watermark(time, time % 2 == 1)
        settle()
    assert len(channel.queue) == 3
    gate = setup.gate
    element = gate.poll()
    assert element is not None and gate.valve.watermark == 9_999
    assert gate.poll() is None
    assert (gate.valve.watermark, gate.valve.idle) == (10_099, True)
    partition.broadcast_watermark(10_100, False)
    settle()
    assert gate.poll() is None
    assert (gate.valve.watermark, gate.valve.idle) == (10_100, False), "one that was read is not changed"


def test_watermarks_of_two_attachments_do_not_replace_each_other(make_setup: type[Setup]) -> None:
    setup = make_setup()
    partition = setup.partition(0)
    channel = setup.local(partition)
    partition.broadcast_watermark(5, False)
    channel.attach_local(partition.subpartitions[0], 2, setup.handed_over.append)
    partition.broadcast_watermark(6, False)
    assert [type(item).__name__ for item in channel.queue] == [
        "QueuedWatermark",
        "Detached",
        "Attached",
        "QueuedWatermark",
    ]
    assert setup.gate.poll() is None
    assert setup.gate.valve.watermark == 6


def test_events_that_never_end_are_an_error_of_their_channel(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=2)
    for _ in range(EVENTS_QUEUED_PER_CHANNEL_MAX):
        setup.arrive_event(setup.remotes[0], EventKind.END_OF_DATA)
    assert setup.remotes[0].attachment is not None
    setup.arrive_event(setup.remotes[0], EventKind.END_OF_DATA)
    assert setup.remotes[0].attachment is None
    with pytest.raises(RemoteProtocolError, match="more than 64 events in a row"):
        setup.gate.poll()
    for _ in range(2 * EVENTS_QUEUED_PER_CHANNEL_MAX):
        setup.arrive_event(setup.remotes[1], EventKind.END_OF_DATA)
        assert setup.gate.poll() is None


def test_a_watermark_of_the_wrong_size_is_refused(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1)
    setup.arrive_event(setup.remotes[0], EventKind.WATERMARK)
    with pytest.raises(RemoteProtocolError, match="event of unknown kind 3 and 1 bytes"):
        setup.gate.poll()
