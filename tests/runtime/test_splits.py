"""One split: what a source may yield, and where the next attempt goes on in one that has a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.errors import UsageError, WrongResult
from minishuffle.exchange.batch import Payload
from minishuffle.limits import NAMED_SPLITS_MAX, SPLIT_NAME_BYTES_MAX, SPLIT_POSITION_BYTES_MAX
from minishuffle.operators.base import TimedBatch
from minishuffle.runtime.splits import (
    NamedSplit,
    Split,
    acknowledge,
    check_count,
    checked_names,
    given_splits,
)
from minishuffle.wire.packed import Cursor, SplitPosition

FIRST = SplitPosition(0, 0)


class Log:
    """Ten records in batches of three, or what it is given; a position is the text of an offset."""

    def __init__(self, given: Any = None, *, replayable: bool = True, format: str = "rows") -> None:
        self.given = given
        self.replayable = replayable
        self.format = format

    def splits(self) -> list[str]:
        return ["log"]

    def read(self, split: str, position: bytes, /) -> Iterator[Any]:
        if self.given is not None:
            yield self.given
        for start in range(int(position or b"0"), 10, 3):
            rows: Payload = list(range(start, min(start + 3, 10)))
            batch = pa.record_batch({"n": rows}) if self.format == "arrow" else rows
            yield batch, str(min(start + 3, 10)).encode()


def taken(split: Split) -> list[tuple[Any, int, int]]:
    """Each batch, how many records it stands for, and where the split is then."""
    found = []
    while (batch := split.take()) is not None:
        rows = batch if isinstance(batch, list) else batch["n"].to_pylist()
        found.append((rows, split.records, split.position))
    return found


def test_a_named_split_is_read_on_from_the_position_that_its_source_gave() -> None:
    split = NamedSplit(Log(), "log", FIRST)
    assert split.cursor == Cursor("log")
    assert split.take() == [0, 1, 2]
    assert split.take() == [3, 4, 5]
    assert split.cursor == Cursor("log", b"6", 6)
    again = NamedSplit(Log(), "log", SplitPosition(0, 6, 0, False, split.cursor))
    assert taken(again) == [([6, 7, 8], 3, 9), ([9], 1, 10)]
    assert again.cursor == Cursor("log", b"10", 10)


@pytest.mark.parametrize("format", ["rows", "arrow"])
def test_what_a_lease_covers_is_read_again_and_left_out(format: str) -> None:
    resumed = SplitPosition(0, 3, 4, False, Cursor("log", b"3", 3))
    split = NamedSplit(Log(format=format), "log", resumed)
    assert split.position == 7
    assert split.take() in ([], pa.record_batch({"n": pa.array([], pa.int64())}))
    assert (split.records, split.skipped, split.cursor) == (0, 3, Cursor("log", b"6", 6))
    assert taken(split) == [([7, 8], 2, 9), ([9], 1, 10)]


def test_times_of_what_is_left_out_are_left_out_too() -> None:
    split = NamedSplit(Log((TimedBatch([1, 2, 3], [10, 20, 30]), b"5")), "log", SplitPosition(0, 0, 2))
    assert split.take() == [3]
    assert split.times is not None
    assert split.times.tolist() == [30]
    assert split.take() == [0, 1, 2]
    assert split.times is None


def test_a_source_that_cannot_be_read_again_leaves_nothing_out() -> None:
    resumed = SplitPosition(0, 3, 4, False, Cursor("log", b"3", 3))
    split = NamedSplit(Log(replayable=False), "log", resumed)
    assert taken(split) == [([3, 4, 5], 3, 10), ([6, 7, 8], 3, 13), ([9], 1, 14)]
    assert split.cursor == Cursor("log", b"10", 14)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [1],
            r"Log\.read yields a list: yield pairs of a batch and the position behind it, or leave",
        ),
        (([1],), r"yields a tuple of 1: yield pairs"),
        (([1], 5), r"yields int as a position: give bytes, at most 1024"),
        (([1], bytes(SPLIT_POSITION_BYTES_MAX + 1)), "yields 1025 bytes as a position"),
        (("text", b""), r"Log\.read yields a str: yield lists of rows"),
        ((TimedBatch([1], []), b""), r"Log\.read yields a TimedBatch with 0 times for 1 rows: give each row"),
        ((TimedBatch("text", []), b""), r"Log\.read yields a str: yield lists of rows"),
    ],
)
def test_named_splits_that_yield_what_they_must_not(given: Any, message: str) -> None:
    with pytest.raises(WrongResult, match=message):
        NamedSplit(Log(given), "log", FIRST).take()


@pytest.mark.parametrize("kind", [Split, NamedSplit])
def test_a_read_that_yields_nothing_ends_the_job(kind: type[Split]) -> None:
    source = Log()
    vars(source).update(read=lambda split, position: None)
    with pytest.raises(WrongResult, match=r"Log\.read gives a NoneType: write it as a plain function"):
        kind(source, "log", FIRST).take()


def test_a_split_that_raises_says_which() -> None:
    split = NamedSplit(Log(([1], b"five")), "log", FIRST)
    assert split.take() == [1]
    split = NamedSplit(Log(), "log", SplitPosition(0, 1, 0, False, split.cursor))
    with pytest.raises(ValueError, match="five") as caught:
        split.take()
    assert caught.value.__notes__ == ["raised by Log.read in split 'log' after 1 records"]


def test_another_name_than_an_earlier_attempt_had_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Log\.splits\(\) gives 'log' where it gave 'other' before"):
        NamedSplit(Log(), "log", SplitPosition(0, 1, 0, False, Cursor("other", b"1", 1)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([1], r"Log\.splits\(\) gives a int: give the names"),
        ([""], r"gives the name '': give one of 1 to 1024 bytes"),
        (["é" * (SPLIT_NAME_BYTES_MAX // 2 + 1)], "give one of 1 to 1024 bytes"),
        (["a", "b", "a"], "gives 'a' twice"),
        (["\udcff.csv"], "which is no Unicode"),
    ],
)
def test_names_that_are_none(names: list[Any], message: str) -> None:
    with pytest.raises(WrongResult, match=message):
        checked_names(Log(), names)


class Given(Log):
    """Gives that as its splits, or raises it."""

    def splits(self) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def acknowledge(self, positions: dict[str, bytes]) -> None:
        raise self.given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a", "b"}, r"Given\.splits\(\) gives a set, .*: give a list"),
        (None, r"Given\.splits\(\) gives None: give a list of the splits"),
        ("a", r"Given\.splits\(\) gives 'a': give a list"),
    ],
)
def test_what_is_no_list_of_splits_ends_the_job(given: Any, message: str) -> None:
    with pytest.raises(WrongResult, match=message):
        given_splits(Given(given))


def test_a_set_of_names_has_no_order_and_needs_none_where_they_are_discovered() -> None:
    assert sorted(given_splits(Given({"a", "b"}), ordered=False)) == ["a", "b"]


def test_what_methods_of_a_source_raise_says_which() -> None:
    source = Given(OSError("down"))
    with pytest.raises(OSError, match="down") as caught:
        given_splits(source)
    with pytest.raises(OSError, match="down") as caught:
        acknowledge(source, {"a": b"1"})
    assert caught.value.__notes__ == ["raised by Given.splits()", "raised by Given.acknowledge of 'a'"]


class AcknowledgingAsync(Log):
    async def acknowledge(self, positions: dict[str, bytes]) -> None:
        raise AssertionError(positions)


def test_an_acknowledge_whose_call_does_nothing_ends_the_job() -> None:
    with pytest.raises(WrongResult, match=r"Async\.acknowledge is an async function or a generator"):
        acknowledge(AcknowledgingAsync(), {"a": b"1"})


def test_names_that_a_message_would_not_hold_end_the_job() -> None:
    count = NAMED_SPLITS_MAX + 1
    with pytest.raises(WrongResult, match=f"gives {count} splits with names to one subtask"):
        check_count(Log(), count)
