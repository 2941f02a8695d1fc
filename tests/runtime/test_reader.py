"""The source reader: order of splits, pace under a given clock, and what a source must not yield."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.connectors.generator import TURNS_PER_SECOND, GeneratorSource
from minishuffle.errors import UsageError
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import TimedBatch
from minishuffle.runtime import reader as reader_module
from minishuffle.runtime.reader import SourceReader
from minishuffle.wire.packed import Cursor, SplitPosition


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def arrow_numbered(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count))})


class Fed:
    """Yields the batches that it was made with, split by split."""

    def __init__(self, *splits: list[Any], bounded: bool = True, **attributes: Any) -> None:
        self._splits = splits
        self.bounded = bounded
        vars(self).update(attributes)

    def splits(self) -> range:
        return range(len(self._splits))

    def read(self, split: int, offset: int) -> Iterator[Any]:
        for batch in self._splits[split][offset:]:
            if isinstance(batch, Exception):
                raise batch
            yield batch


def test_bounded_splits_are_read_in_sequence_unbounded_ones_in_turn() -> None:
    splits = [["a"], ["b"]], [["x"], [], ["y"]]
    reader = SourceReader(Fed(*splits), 0, 1, 0.0)
    assert [reader.poll(0.0) for _ in range(6)] == [["a"], ["b"], ["x"], [], ["y"], None]
    reader = SourceReader(Fed(*splits, bounded=False), 0, 1, 0.0)
    assert [reader.poll(0.0) for _ in range(6)] == [["a"], ["x"], ["b"], [], ["y"], None]
    assert reader.poll(1.0) is None
    assert reader.positions == {0: 2, 1: 2}


@pytest.mark.parametrize("reads", [True, False])
def test_times_that_batches_bring_are_those_of_the_last_one_if_they_are_read(reads: bool) -> None:
    reader = SourceReader(Fed([TimedBatch(["a", "b"], [7, 8]), ["c"]]), 0, 1, 0.0, times=reads)
    found = [(reader.poll(0.0), None if reader.times is None else reader.times.tolist()) for _ in range(2)]
    assert found == [(["a", "b"], [7, 8] if reads else None), (["c"], None)]


def test_nothing_now_says_when_to_ask_again() -> None:
    reader = SourceReader(Fed([[], [1]], [[], [2]], bounded=False), 0, 1, 5.0)
    assert reader.poll(5.0) == []
    assert 5.0 < reader.next_due <= 5.1
    assert reader.poll(reader.next_due) == [1]


def test_a_subtask_without_splits_ends_at_once() -> None:
    assert SourceReader(Fed([[1]]), 1, 2, 0.0).poll(0.0) is None
    assert SourceReader(Fed(rate=10), 0, 1, 0.0).poll(0.0) is None


@pytest.mark.parametrize("parallelism", [1, 3])
def test_pace_is_the_share_of_the_rate(parallelism: int) -> None:
    source = GeneratorSource(numbered, rate=1000, splits=10)
    emitted = []
    for index in range(parallelism):
        reader, now, count = SourceReader(source, index, parallelism, 100.0), 100.0, 0
        while now < 110.0:
            batch = reader.poll(now)
            assert batch is not None
            count += len(batch)
            assert count <= (now - 100.0) * 1000 + 100  # never ahead by more than a batch
            if not batch:
                assert reader.next_due > now
                now = reader.next_due
        emitted.append(count)
        share = 1000 * len(range(10)[index::parallelism]) / 10
        assert abs(count - 10 * share) <= 50
    assert abs(sum(emitted) - 10_000) <= 50 * parallelism


def test_after_a_stall_no_more_than_a_second_is_caught_up() -> None:
    reader = SourceReader(GeneratorSource(numbered, rate=1000, splits=1), 0, 1, 0.0)

    def burst(now: float) -> int:
        count = 0
        while batch := reader.poll(now):
            count += len(batch)
        return count

    block = 1000 // TURNS_PER_SECOND
    assert burst(0.0) == block
    assert 1000 <= burst(60.0) <= 1000 + block
    assert 500 - block <= burst(60.5) <= 500 + block
    reader = SourceReader(GeneratorSource(numbered, rate=1000, splits=1), 0, 1, 60.0, behind=5.0)
    assert 5000 <= burst(60.0) <= 5000 + block, "what fell due since its snapshot"
    assert 500 - block <= burst(60.5) <= 500 + block


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Fed([(1, 2)]), r"Fed\.read yields a tuple: yield lists of rows"),
        (Fed([None]), r"Fed\.read yields a NoneType"),
        (Fed([arrow_numbered(0, 1)]), 'set its attribute format = "arrow"'),
        (Fed([[1]], format="arrow"), 'set its attribute format = "rows"'),
        (Fed([arrow_numbered(0, BATCH_ROWS_MAX + 1)], format="arrow"), "yield slices of at most 65536"),
    ],
)
def test_sources_that_yield_what_they_must_not(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SourceReader(source, 0, 1, 0.0).poll(0.0)


def test_a_source_that_raises_says_where() -> None:
    reader = SourceReader(Fed([[1, 2], OSError("disk")]), 0, 1, 0.0)
    assert reader.poll(0.0) == [1, 2]
    with pytest.raises(OSError, match="disk") as caught:
        reader.poll(0.0)
    assert caught.value.__notes__ == ["raised by Fed.read in split 0 after 2 records"]


def test_close_closes_reads_that_have_not_ended() -> None:
    closed = []

    class Held(Fed):
        def read(self, split: int, offset: int) -> Iterator[Any]:
            try:
                yield [1]
            finally:
                closed.append(split)

    reader = SourceReader(Held([], []), 0, 1, 0.0)
    assert reader.poll(0.0) == [1]
    reader.close()
    assert closed == [0]
    assert reader.poll(0.0) is None


def test_bounded_splits_are_read_in_turn_when_asked_for() -> None:
    splits = [["a"], ["b"]], [["x"], ["y"], ["z"]]
    reader = SourceReader(Fed(*splits), 0, 1, 0.0, in_turn=True)
    assert [reader.poll(0.0) for _ in range(6)] == [["a"], ["x"], ["b"], ["y"], ["z"], None]


def test_no_more_splits_than_the_limit_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "SPLITS_IN_TURN_MAX", 2)
    reader = SourceReader(Fed([["a"], ["b"]], [["m"], ["n"]], [["x"]]), 0, 1, 0.0, in_turn=True)
    assert [reader.poll(0.0) for _ in range(6)] == [["a"], ["m"], ["b"], ["n"], ["x"], None]


def test_marks_say_which_split_a_batch_is_of_and_which_have_ended() -> None:
    reader = SourceReader(Fed([["a"], ["b"]], [["skipped"]], [["x"]]), 0, 2, 0.0)
    seen: list[Any] = []
    while (batch := reader.poll(0.0)) is not None:
        seen += [*((mark.split, mark.state) for mark in reader.take_marks()), batch]
    seen += [(mark.split, mark.state) for mark in reader.take_marks()]
    assert seen == [
        (0, "open"),
        (2, "open"),
        (0, "current"),
        ["a"],
        ["b"],
        (0, "done"),
        (2, "current"),
        ["x"],
        (2, "done"),
    ]


# --- the next attempt -------------------------------------------------------------------------------


def test_a_next_attempt_goes_on_behind_the_lease_and_reads_no_split_that_has_ended() -> None:
    source = Fed([["a"], ["b"], ["c"]], [["m"]], [["x"], ["y"]])
    resumed = [SplitPosition(0, 1, 1), SplitPosition(1, 1, 0, True)]
    reader = SourceReader(source, 0, 1, 0.0, resumed=resumed)
    assert list(reader.upcoming) == [0, 2]
    assert reader.positions == {0: 2, 2: 0}
    assert [reader.poll(0.0) for _ in range(4)] == [["c"], ["x"], ["y"], None]
    assert [(mark.split, mark.state) for mark in reader.take_marks() if mark.state != "current"] == [
        (0, "open"),
        (2, "open"),
        (0, "done"),
        (2, "done"),
    ]


class Partitions:
    """Of each letter its batches; a position is how many of these were read."""

    replayable = True
    bounded = False

    def __init__(self, **splits: list[list[str]]) -> None:
        self._splits = splits

    def splits(self) -> list[str]:
        return list(self._splits)

    def read(self, split: str, position: bytes, /) -> Iterator[Any]:
        yield from (
            (batch, b"%d" % n) for n, batch in enumerate(self._splits[split], 1) if n > int(position or 0)
        )


def test_splits_with_names_go_on_behind_the_lease_and_say_where_each_is_read_on() -> None:
    source = Partitions(a=[["1", "2"], ["3", "4"], ["5"]], b=[["6"]], c=[[], ["7"]], d=[])
    resumed = [SplitPosition(0, 2, 1, False, Cursor("a", b"1", 2)), SplitPosition(2, 0, cursor=Cursor("c"))]
    reader = SourceReader(source, 0, 2, 0.0, resumed=resumed)
    assert reader.cursors == {0: Cursor("a", b"1", 2), 2: Cursor("c")}
    assert (reader.poll(0.0), reader.cursor) == (["4"], Cursor("a", b"2", 4))
    assert (reader.poll(0.0), reader.cursor) == (["5"], Cursor("a", b"3", 5))
    assert reader.take_moved() == {2: Cursor("c", b"1", 0)}
    assert reader.take_moved() == {}
    assert (reader.poll(0.0), reader.current) == (["7"], 2)
    assert reader.poll(0.0) is None
    assert reader.positions == {0: 5, 2: 1}
    with pytest.raises(UsageError, match="does not give 'c' any more, which has not ended"):
        SourceReader(Partitions(a=[], b=[]), 0, 2, 0.0, resumed=resumed)


def test_splits_that_are_discovered_are_read_and_nobody_waits_while_there_are_none() -> None:
    source = Partitions()
    source.discovery_interval = timedelta(seconds=5)  # type: ignore[attr-defined]
    reader = SourceReader(source, 0, 1, 10.0)

    def poll(now: float) -> tuple[Any, list[tuple[int, str]]]:
        return reader.poll(now), [(mark.split, mark.state) for mark in reader.take_marks()]

    assert poll(10.0) == ([], [(-1, "none")])
    assert reader.next_due == 15.0
    source._splits = {"a": [["1"], ["2"]]}
    assert poll(14.0) == ([], [])
    assert poll(15.0) == (["1"], [(0, "open"), (0, "current")])
    assert reader.cursors == {0: Cursor("a")}
    source._splits = {"b": [["3"]], "a": [["1"], ["2"]]}
    assert [poll(20.0), poll(20.0)] == [(["2"], [(1, "open")]), (["3"], [(1, "current")])]
    assert poll(20.0) == ([], [(0, "done"), (1, "done"), (-1, "none")])
    assert reader.next_due == 25.0


def test_a_split_says_once_that_it_is_idle() -> None:
    source = Partitions(a=[None, [], None, ["1"], None])  # type: ignore[list-item]
    reader = SourceReader(source, 0, 1, 0.0)
    found = [(reader.poll(0.0), [mark.state for mark in reader.take_marks()]) for _ in range(5)]
    assert found == [([], ["open", "idle"]), ([], []), ([], []), (["1"], ["current"]), ([], ["idle"])]


def test_what_is_left_out_at_the_beginning_does_not_wait() -> None:
    source = Partitions(a=[["1"], ["2"], ["3"]])
    reader = SourceReader(source, 0, 1, 0.0, resumed=[SplitPosition(0, 0, 2, False, Cursor("a"))])
    assert reader.poll(0.0) == ["3"]


def test_an_endless_paced_source_goes_on_where_it_would_be_by_now() -> None:
    source = GeneratorSource(numbered, rate=1000, splits=10)
    resumed = [SplitPosition(split, 40, 25) for split in range(0, 10, 2)]
    reader = SourceReader(source, 0, 2, 100.0, resumed=resumed, age=0.5)
    assert reader.positions == dict.fromkeys(range(0, 10, 2), 90), "40 + 0.5 s at 100 rows/s"
    assert reader.rows_skipped == 5 * (50 - 25)
    batch, block = reader.poll(100.0), 100 // TURNS_PER_SECOND
    begin, within = divmod(90, block)
    assert batch == numbered(begin * block * 10 + within, block - within), "the numbers of split 0 there"
    assert not reader.poll(100.0), "at its pace, and nothing caught up"
    assert reader.next_due > 100.0


def test_a_lease_longer_than_the_gap_is_not_skipped_twice() -> None:
    source = GeneratorSource(numbered, rate=1000, splits=1)
    reader = SourceReader(source, 0, 1, 0.0, resumed=[SplitPosition(0, 100, 250)], age=0.1)
    assert reader.positions == {0: 350}
    assert reader.rows_skipped == 0


@pytest.mark.parametrize("options", [{"records": 10_000, "rate": 1000}, {}], ids=["bounded", "unpaced"])
def test_sources_that_end_or_have_no_pace_skip_nothing(options: dict[str, Any]) -> None:
    source = GeneratorSource(numbered, splits=1, **options)
    reader = SourceReader(source, 0, 1, 0.0, resumed=[SplitPosition(0, 100)], age=60.0)
    assert reader.positions == {0: 100}
    assert reader.rows_skipped == 0


def test_a_first_attempt_skips_nothing() -> None:
    source = GeneratorSource(numbered, rate=1000, splits=1)
    assert SourceReader(source, 0, 1, 0.0, age=60.0).positions == {0: 0}


def test_the_pace_does_not_slow_down_with_splits_that_have_ended() -> None:
    source = GeneratorSource(numbered, rate=1000, splits=2, records=10_000)
    reader = SourceReader(source, 0, 1, 0.0, resumed=[SplitPosition(0, 5_000, 0, True)])
    count = sum(len(reader.poll(turn / 100) or ()) for turn in range(1, 101))
    block = 500 // TURNS_PER_SECOND
    assert 1000 - block <= count <= 1000 + block


# --- a snapshot -------------------------------------------------------------------------------------


def test_a_snapshot_says_of_each_split_where_it_is_and_another_reader_goes_on_there() -> None:
    batches = [[["a"], ["b"]], [["m"]], [["x"], ["y"]], [["z"]]]
    resumed = [SplitPosition(3, 1, 0, True)]
    reader = SourceReader(Fed(*batches), 0, 1, 0.0, resumed=resumed)
    whole = [["a"], ["b"], ["m"], ["x"], ["y"], None]
    for number in range(len(whole)):
        places = reader.snapshot()
        assert sorted(each.split for each in places) == [0, 1, 2, 3]
        assert SplitPosition(3, 1, 0, True) in places
        other = SourceReader(Fed(*batches), 0, 1, 0.0, resumed=places)
        assert [other.poll(0.0) for _ in whole[number:]] == whole[number:]
        assert reader.poll(0.0) == whole[number]
    assert all(each.done for each in reader.snapshot())


def test_whoever_goes_on_at_a_snapshot_takes_splits_in_the_order_of_the_reader_before() -> None:
    source = GeneratorSource(numbered, splits=5)
    reader = SourceReader(source, 1, 2, 0.0)
    assert reader.dealt == 2
    found = [(reader.snapshot(), reader.poll(0.0)) for _ in range(5)]
    for number, (places, _) in enumerate(found):
        other = SourceReader(source, 1, 2, 0.0, resumed=places)
        assert [other.poll(0.0) for _ in found[number:]] == [batch for _, batch in found[number:]]


def test_a_snapshot_of_splits_with_names_has_their_positions() -> None:
    source = Partitions(a=[["1"], ["2"]], b=[["3"]])
    reader = SourceReader(source, 0, 1, 0.0)
    assert {each.cursor.name for each in reader.snapshot() if each.cursor} == {"a", "b"}
    first = reader.poll(0.0)
    other = SourceReader(Partitions(a=[["1"], ["2"]], b=[["3"]]), 0, 1, 0.0, resumed=reader.snapshot())

    def rest(of: SourceReader) -> list[Any]:
        return [row for _ in range(6) for row in (of.poll(0.0) or [])]

    assert first == ["1"]
    assert sorted(rest(other)) == sorted(rest(reader)) == ["2", "3"]


def test_a_split_that_is_gone_and_has_not_ended_is_an_error_with_a_name_or_without() -> None:
    for ended in (True, False):
        resumed = [SplitPosition(0, 1), SplitPosition(1, 1, 0, ended)]
        if ended:
            assert SourceReader(Fed([["a"], ["b"]]), 0, 1, 0.0, resumed=resumed).poll(0.0) == ["b"]
        else:
            with pytest.raises(UsageError, match=r"Fed\.splits\(\) does not give number 1 any more"):
                SourceReader(Fed([["a"], ["b"]]), 0, 1, 0.0, resumed=resumed)
