"""What is wrong with a source, as reading it again shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.connectors.generator import GeneratorSource, number_batch
from minishuffle.connectors.items import ArrowItemsSource, ItemsSource
from minishuffle.errors import UsageError
from minishuffle.operators.base import AnySource, TimedBatch
from minishuffle.runtime.conformance import SourceCheck


class Counted:
    """Three splits, of ten rows each, that are read on from a number of rows."""

    def splits(self) -> list[int]:
        return [0, 10, 20]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for start in range(offset, 10, 4):
            yield list(range(split + start, split + min(start + 4, 10)))


class Named:
    """The same with names; a position is the text of an offset."""

    replayable = True

    def splits(self) -> list[str]:
        return ["a", "b", "c"]

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[str], bytes]]:
        for start in range(int(position or b"0"), 10, 4):
            end = min(start + 4, 10)
            yield [f"{split}{number}" for number in range(start, end)], b"%d" % end


class Repeating(Counted):
    """It gives the first rows whatever the offset."""

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        yield from super().read(split, 0)


class TooMany(Counted):
    """A row more when it is read on."""

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        yield from super().read(split, offset)
        if offset:
            yield [99]


class Before(Named):
    """Its positions stand before the batch."""

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[str], bytes]]:
        for start in range(int(position or b"0"), 10, 4):
            yield [f"{split}{number}" for number in range(start, min(start + 4, 10))], b"%d" % start


class Stray(Named):
    """Between two batches it gives a position that is wrong."""

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[str], bytes]]:
        for batch, behind in super().read(split, position):
            yield batch, behind
            yield [], b"0" if behind == b"8" else behind + b" "


class Confirmed(Named):
    """It reads no further back than what was acknowledged."""

    def __init__(self, given: dict[str, int]) -> None:
        self.given = given

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[str], bytes]]:
        yield from super().read(split, b"%d" % max(self.given.get(split, 0), int(position or b"0")))

    def acknowledge(self, positions: dict[str, bytes]) -> None:
        self.given |= {name: int(position) for name, position in positions.items()}


class Hasty(Confirmed):
    """It lets go of a row too many."""

    def acknowledge(self, positions: dict[str, bytes]) -> None:
        self.given |= {name: int(position) + 1 for name, position in positions.items()}


class ConfirmedQueue(Confirmed):
    replayable = False


class Unheard(Counted):
    def acknowledge(self, positions: dict[str, bytes]) -> None:
        """Never called."""


class Clocked(Counted):
    """The times of its rows go by when they are read."""

    def read(self, split: int, offset: int) -> Iterator[Any]:
        for rows in super().read(split, offset):
            yield TimedBatch(rows, [row + offset for row in rows])


class Shuffled(Counted):
    """Another list of splits each time."""

    asked = 0

    def splits(self) -> list[int]:
        Shuffled.asked += 1
        return [Shuffled.asked]


class Queue(Named):
    """Each row can be read once."""

    replayable = False
    left = 10

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[str], bytes]]:
        while Queue.left:
            Queue.left -= 1
            yield [str(Queue.left)], b""


class Waiting(Named):
    """It has no end, and after ten rows nothing for the moment."""

    bounded = False

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[list[str], bytes]]:
        yield from super().read(split, position)
        while True:
            yield [], b"10"


def checked(source: Callable[[], AnySource], records: int = 100) -> list[Any]:
    check = SourceCheck(source, 2, records)
    check.run()
    return [
        row for batch in check.batches for row in (batch if isinstance(batch, list) else batch.to_pylist())
    ]


class Refilled(Counted):
    """One list for all batches, whose rows have no truth value when they are compared."""

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        filled: list[Any] = []
        for rows in super().read(split, offset):
            filled[:] = [np.array([row, row]) for row in rows]
            yield filled


def test_what_was_read_comes_subtask_after_subtask() -> None:
    assert checked(Counted) == [*range(10), *range(20, 30), *range(10, 20)]
    assert checked(Named) == [f"{split}{number}" for split in "acb" for number in range(10)]
    assert len(checked(Waiting)) == 30
    assert sorted(checked(Queue)) == sorted(map(str, range(10))), "it is not read again"
    assert [row[0] for row in checked(Refilled)] == checked(Counted)
    for kind in (Confirmed, ConfirmedQueue):
        given: dict[str, int] = {}
        assert checked(lambda kind=kind, given=given: kind(given)) == checked(Named)  # type: ignore[misc]
        assert given == dict.fromkeys("abc", 10), "all of it is acknowledged in the end"


@pytest.mark.parametrize(
    "source",
    [
        ItemsSource(range(100)),
        ArrowItemsSource(pa.table({"n": [1.5, float("nan"), None]})),
        GeneratorSource(number_batch, rate=1000.0, format="arrow"),
    ],
    ids=["items", "arrow", "generator"],
)
def test_the_librarys_own_pass(source: AnySource) -> None:
    assert checked(lambda: source)


left: dict[str, int] = {}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            Repeating,
            r"Repeating\.read from offset 6 of split 0 on gives 0 where 6 came before: give the same rows",
        ),
        (TooMany, r"TooMany\.read from offset \d+ of split 0 on gives 99 where no further row came before"),
        (Before, r"Before\.read from position b'0' of split 'a' on gives .* came before"),
        (Stray, r"Stray\.read from position b'0' of split 'a' on gives .* came before"),
        (
            lambda: Hasty(left),
            r"Hasty\.read from position b'8' of split 'a' on gives 'a9' where 'a8' came before",
        ),
        (Clocked, r"Clocked\.read from offset 6 of split 0 on gives \(6, 12\) where \(6, 6\) came before"),
        (Unheard, r"Unheard\.acknowledge is never called: say replayable, give the splits names"),
        (Shuffled, r"Shuffled\.splits\(\) gives other splits when asked again"),
    ],
)
def test_what_is_wrong(source: Callable[[], AnySource], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked(source)
