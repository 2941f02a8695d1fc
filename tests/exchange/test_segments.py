"""Global and local pools: Flink's own figures, and any order of requests and resizes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.errors import LocalProtocolError, ResourceExhausted
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.limits import SEGMENT_HEADROOM_BYTES


def sizes(*pools: LocalPool) -> list[int]:
    return [pool.size for pool in pools]


def take(pool: LocalPool, count: int) -> list[Segment]:
    segments = [pool.request() for _ in range(count)]
    assert None not in segments
    return [segment for segment in segments if segment is not None]


def test_segments_have_headroom_and_do_not_overlap() -> None:
    pool = NetworkBufferPool(4, 256)
    local = pool.create_pool("p", 4, 4)
    segments = take(local, 4)
    for number, segment in enumerate(segments):
        assert len(segment.memory) == SEGMENT_HEADROOM_BYTES + 256
        segment.memory[:] = bytes([number]) * len(segment.memory)
    assert [set(bytes(segment.memory)) for segment in segments] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("segments", [2**40, 2**60])
def test_more_memory_than_there_can_be_is_refused_with_the_setting_to_lower(segments: int) -> None:
    with pytest.raises(ResourceExhausted, match="cannot allocate .* lower network_memory_bytes"):
        NetworkBufferPool(segments, 32_768)


def test_minimums_above_the_total_are_refused_with_the_arithmetic() -> None:
    """Cases 231 and 239, NetworkBufferPoolTest and BufferPoolFactoryTest."""
    pool = NetworkBufferPool(10, 256)
    pool.create_pool("first", 6, 10)
    with pytest.raises(ResourceExhausted, match="for second: needs 5, but 6 of 10 are required"):
        pool.create_pool("second", 5, 5)
    assert pool.required == 6


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 1), (3, 2), (-1, 4)])
def test_a_pool_has_a_minimum_and_no_maximum_below_it(minimum: int, maximum: int) -> None:
    """Case 218, LocalBufferPoolTest."""
    pool = NetworkBufferPool(10, 256)
    with pytest.raises(LocalProtocolError, match=f"0 < minimum {minimum} ≤ maximum {maximum}"):
        pool.create_pool("p", minimum, maximum)
    assert pool.required == 0


def test_segments_that_were_written_off_are_promised_to_nobody() -> None:
    pool = NetworkBufferPool(10, 256)
    lost = pool.create_pool("abandoned", 5, 5)
    segments = take(lost, 2)
    for segment in [*segments, segments[0]]:
        segment.write_off()
    lost.destroy()
    text = "needs 9, but 0 of 10 are required by other tasks and 2 were written off with abandoned tasks"
    with pytest.raises(ResourceExhausted, match=text):
        pool.create_pool("second", 9, 9)
    second = pool.create_pool("second", 1, 10)
    assert second.size == 8
    assert len(take(second, 8)) == 8
    pool.validate()
    segments[0].recycle()
    assert pool.written_off == 1
    assert pool.create_pool("third", 8, 8).size == 8


def test_the_exact_minimum_works() -> None:
    """Case 289, NettyShuffleEnvironmentTest."""
    pool = NetworkBufferPool(10, 256)
    pool.create_pool("first", 6, 6)
    assert pool.create_pool("second", 4, 4).size == 4


def test_two_unbounded_pools_split_evenly() -> None:
    """Case 241, BufferPoolFactoryTest."""
    pool = NetworkBufferPool(10, 256)
    first = pool.create_pool("first", 1, 100)
    assert first.size == 10
    second = pool.create_pool("second", 1, 100)
    assert sizes(first, second) == [5, 5]


def test_three_segments_for_three_pools() -> None:
    """Case 242, BufferPoolFactoryTest."""
    pool = NetworkBufferPool(3, 256)
    assert sizes(*[pool.create_pool(name, 1, 10) for name in "abc"]) == [1, 1, 1]


def test_fixed_pools_are_left_alone_and_the_rest_goes_to_the_others() -> None:
    """Case 244, BufferPoolFactoryTest."""
    pool = NetworkBufferPool(10, 256)
    fixed = pool.create_pool("fixed", 3, 3)
    growing = pool.create_pool("growing", 2, 100)
    assert sizes(fixed, growing) == [3, 7]
    fixed.destroy()
    assert growing.size == 10


def test_a_pool_never_grows_above_its_maximum() -> None:
    """Case 221, LocalBufferPoolTest."""
    assert NetworkBufferPool(10, 256).create_pool("p", 1, 4).size == 4


def test_surplus_above_a_shrunken_size_comes_back_as_it_is_recycled() -> None:
    """Cases 212 and 216, LocalBufferPoolTest."""
    pool = NetworkBufferPool(10, 256)
    first = pool.create_pool("first", 2, 10)
    held = take(first, 10)
    second = pool.create_pool("second", 1, 4)
    assert sizes(first, second) == [6, 4]
    assert take(second, 1)[0].extra
    assert second.request() is None
    assert first.request() is None
    held.pop().recycle()
    assert first.request() is None, "it holds more than its size"
    assert second.request() is not None
    for segment in held:
        first.recycle(segment)
    assert (first.in_use, pool.free) == (0, 9)


def test_the_segment_that_came_back_last_is_lent_first() -> None:
    """Others have long left the processor's caches, and some were never touched."""
    pool = NetworkBufferPool(10, 256).create_pool("p", 10, 10)
    held = take(pool, 3)
    for segment in held:
        segment.recycle()
    assert take(pool, 3) == held[::-1]


def test_a_new_pool_has_its_minimum_although_others_keep_what_they_were_lent() -> None:
    """Case 233, NetworkBufferPoolTest. They may keep it for as long as the new one does not read it: see the
    queues of lost consumers."""
    pool = NetworkBufferPool(10, 256)
    first = pool.create_pool("first", 2, 10)
    held = take(first, 10)
    second = pool.create_pool("second", 4, 6)
    assert second.available
    extra = take(second, 4)
    assert (pool.extra, pool.free, second.size) == (4, 0, 6)
    assert {len(segment.memory) for segment in extra} == {SEGMENT_HEADROOM_BYTES + 256}
    assert second.request() is None, "what is above the minimum is lent once it is free"
    pool.validate()
    held.pop().recycle()
    assert second.request() is not None
    extra.pop().recycle()
    assert (pool.extra, pool.free) == (3, 0), "an extra segment is not lent again"


def test_an_extra_segment_that_was_written_off_takes_nothing_from_the_others() -> None:
    pool = NetworkBufferPool(4, 256)
    first = pool.create_pool("first", 1, 4)
    held = take(first, 4)
    second = pool.create_pool("second", 1, 1)
    (extra,) = take(second, 1)
    extra.write_off()
    assert pool.written_off == 0
    second.destroy()
    for segment in held:
        segment.recycle()
    assert first.size == 4
    extra.recycle()
    assert (pool.extra, pool.free) == (0, 4)


def test_a_starved_pool_is_told_when_a_segment_comes_back() -> None:
    """Case 219, LocalBufferPoolTest."""
    pool = NetworkBufferPool(4, 256)
    first = pool.create_pool("first", 1, 4)
    held = take(first, 4)
    second = pool.create_pool("second", 1, 2)
    take(second, 1)
    told: list[str] = []
    second.on_available(lambda: told.append("second"))
    assert second.request() is None
    held[0].recycle()
    assert told == ["second"]
    assert second.available


def test_starved_pools_are_told_once_each_in_turn_even_if_they_get_none_again() -> None:
    """A gate asks again from within the notice, as the others do: only one of them finds the segment."""
    pool = NetworkBufferPool(8, 256)
    first = pool.create_pool("first", 1, 8)
    held = take(first, 8)
    told: list[str] = []
    waiting = [pool.create_pool(name, 1, 2) for name in ("second", "third")]
    for local in waiting:
        take(local, 1)

    def ask_again(local: LocalPool) -> None:
        told.append(local.name)
        if len(told) > 10:
            raise AssertionError("told for ever")
        segment = local.request()
        if segment is not None:
            got.append(segment)

    got: list[Segment] = []
    for local in waiting:
        local.on_available(lambda local=local: ask_again(local))  # type: ignore[misc]
        assert local.request() is None
    held.pop().recycle()
    assert told == ["second", "third"]
    assert [segment.owner for segment in got] == [waiting[0]]
    held.pop().recycle()
    assert [segment.owner for segment in got] == waiting, "the one that got none was still to be told"


def test_growth_is_told_too() -> None:
    pool = NetworkBufferPool(4, 256)
    first, second = pool.create_pool("first", 1, 4), pool.create_pool("second", 1, 4)
    told: list[int] = []
    first.on_available(lambda: told.append(first.size))
    second.destroy()
    assert told == [4]


def test_a_segment_cannot_be_recycled_twice() -> None:
    local = NetworkBufferPool(1, 256).create_pool("p", 1, 1)
    (segment,) = take(local, 1)
    segment.recycle()
    with pytest.raises(LocalProtocolError, match="recycled twice"):
        segment.recycle()


def test_the_peak_is_remembered() -> None:
    pool = NetworkBufferPool(8, 256)
    local = pool.create_pool("p", 1, 8)
    for segment in take(local, 5):
        local.recycle(segment)
    take(local, 2)
    assert pool.peak_used == 5


class Pools(RuleBasedStateMachine):
    """Any order of create, request, recycle and destroy. Cases 223, 228 and 237, LocalBufferPoolTest and
    NetworkBufferPoolTest."""

    @initialize(total=st.integers(1, 24))
    def begin(self, total: int) -> None:
        self.pool = NetworkBufferPool(total, 256)
        self.locals: list[LocalPool] = []
        self.held: list[Segment] = []

    @rule(minimum=st.integers(1, 6), more=st.integers(0, 12))
    def create(self, minimum: int, more: int) -> None:
        required = self.pool.required
        try:
            self.locals.append(self.pool.create_pool("p", minimum, minimum + more))
        except ResourceExhausted:
            assert required + minimum > self.pool.total
            assert self.pool.required == required

    @precondition(lambda self: self.locals)
    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        local = data.draw(st.sampled_from(self.locals))
        promised = local.in_use < local.minimum
        extra = self.pool.extra
        assert local.available or not promised
        segment = local.request()
        if segment is not None:
            assert local.in_use <= local.size
            self.held.append(segment)
        else:
            assert not promised
            assert local.in_use >= local.size or self.pool.free == 0
        if self.pool.extra > extra:
            kept = sum(max(0, each.in_use - each.size) for each in self.locals)
            ended = sum(each.owner not in self.locals for each in self.held)
            assert self.pool.extra <= kept + ended, "others hold that many above their share"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def recycle(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).recycle()

    @precondition(lambda self: self.locals)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        self.locals.pop(data.draw(st.integers(0, len(self.locals) - 1))).destroy()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pool"):
            self.pool.validate()
            assert self.pool.free + len(self.held) == self.pool.total + self.pool.extra
            for local in self.locals:
                assert sum(each.owner is local and each.extra for each in self.held) <= local.minimum


TestPools = Pools.TestCase


def test_a_destroyed_pool_lends_nothing_and_takes_back_what_it_lent() -> None:
    """Cases 227 and 238, LocalBufferPoolTest and NetworkBufferPoolTest."""
    network = NetworkBufferPool(4, 256)
    pool = network.create_pool("ends", 2, 4)
    held = pool.request()
    assert held is not None
    pool.destroy()
    assert pool.request() is None
    assert not pool.available
    held.recycle()
    assert pool.request() is None
    assert (pool.in_use, network.free) == (0, 4)
    network.validate()


def test_a_segment_with_several_readers_comes_home_with_the_last_of_them() -> None:
    """Case 268, RecordWriterTest."""
    network = NetworkBufferPool(2, 256)
    pool = network.create_pool("p", 1, 2)
    segment = pool.request()
    assert segment is not None
    segment.readers = 3
    for left in (1, 1, 0):
        segment.recycle()
        assert pool.in_use == left
    with pytest.raises(LocalProtocolError, match="recycled twice"):
        segment.recycle()
    again = pool.request()
    assert again is not None
    again.recycle()
    assert pool.in_use == 0
    network.validate()
