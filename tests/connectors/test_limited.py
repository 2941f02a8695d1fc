"""The first records of a source: how many in which pieces, and whether those were all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.connectors.limited import Limit, LimitedSource
from minishuffle.operators.base import Portion, TimedBatch


class Batches:
    """Gives these batches in each of two splits."""

    def __init__(self, batches: list[Any], **attributes: Any) -> None:
        self.batches = batches
        vars(self).update(attributes)

    def splits(self) -> list[str]:
        return ["a", "b"]

    def read(self, split: str, offset: int) -> Iterator[Any]:
        yield from self.batches[offset:]


def sizes(source: LimitedSource) -> list[list[int]]:
    return [[len(batch) for batch in source.read(split, 0)] for split in source.splits()]


@pytest.mark.parametrize(
    ("records", "bounded", "found", "is_cut"),
    [
        (100, True, [[1, 1, 2, 2, 0, 1], [6, 0, 1]], False),
        (14, True, [[1, 1, 2, 2, 0, 1], [6, 0, 1]], False),
        (14, False, [[1, 1, 2, 2, 0, 1], [6, 0, 1]], True),
        (13, True, [[1, 1, 2, 2, 0, 1], [6]], True),
        (5, True, [[1, 1, 2, 1], []], True),
    ],
)
def test_pieces_grow_up_to_the_limit(
    records: int, bounded: bool, found: list[list[int]], is_cut: bool
) -> None:
    limit = Limit(records)
    source = LimitedSource(Batches([list(range(6)), [], [6]], bounded=bounded), limit)
    assert sizes(source) == found
    assert (limit.is_cut, limit.read) == (is_cut, sum(map(sum, found)))


def test_pieces_have_their_own_times() -> None:
    source = LimitedSource(Batches([TimedBatch(list("abc"), [1, 2, 3])]), Limit(2))
    assert list(source.read("a", 0)) == [TimedBatch(["a"], [1]), TimedBatch(["b"], [2])]


def test_it_is_like_the_source_in_all_else() -> None:
    batch = pa.record_batch({"n": [1, 2, 3], "m": [4, 5, 6]})
    whole = Batches([batch], format="arrow", rate=5.0)
    whole.projected = lambda names: Batches([batch.select(sorted(names))])  # type: ignore[attr-defined]
    source = LimitedSource(whole, Limit(2))
    assert (source.format, source.rate, getattr(source, "bounded", "none")) == ("arrow", 5.0, "none")
    (first, second) = source.projected(frozenset({"m"})).read("a", 0)
    assert (first, second) == (batch.select(["m"]).slice(0, 1), batch.select(["m"]).slice(1, 1))
    assert (source.limit.left, source.limit.is_cut) == (0, True)
    named = LimitedSource(Batches([(None, b""), ([1, 2, 3], b"3")], replayable=False), Limit(2))
    assert named.replayable is False
    assert [*named.read("a", 0)] == [(None, b""), ([1], b"3"), ([2], b"3")]
    left_out = Portion(batch, 5, "skip", ["x", "y"])
    limit = Limit(3)
    assert [*LimitedSource(Batches([left_out]), limit).read("a", 0)] == [left_out]
    assert (limit.left, limit.read) == (0, 5)


def test_what_a_source_reads_with_is_closed() -> None:
    class Reading:
        closed = 0

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> list[int]:
            return [1, 2]

        def close(self) -> None:
            self.closed += 1

    reading = Reading()
    source = Batches([])
    source.read = lambda split, offset: reading  # type: ignore[method-assign]
    assert len(list(LimitedSource(source, Limit(3)).read("a", 0))) == 3
    begun = LimitedSource(source, Limit(3)).read("a", 0)
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert reading.closed == 2
