"""The first records of a source, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from minishuffle.exchange.batch import Payload
from minishuffle.limits import LIST_ROWS
from minishuffle.operators.base import AnySource, Portion, TimedBatch, names_splits

__all__ = ["Limit", "LimitedSource"]

OF_THE_SOURCE: Final = frozenset({"bounded", "format", "rate", "replayable", "schema", "shares"})
"""Attributes that are asked of the source itself, which may not have them."""


@dataclass(slots=True)
class Limit:
    """How far a source is read, all of its splits together."""

    left: int
    """Records that it may still give."""
    read: int = 0
    is_cut: bool = False
    """Some split was not read to its end."""

    def take(self, records: int) -> None:
        """So many are given."""
        self.left, self.read = max(0, self.left - records), self.read + records

    def cut(self) -> None:
        """A split has more than is given."""
        self.left, self.is_cut = 0, True


class LimitedSource:
    """Gives what another source gives, up to a number of records: one at first, then at most as many at a
    time as it has given before, so that whoever wants a few, or has little time, can stop soon.

    It is bounded if that source is; who plans with it shall see the same.
    """

    def __init__(self, source: AnySource, limit: Limit) -> None:
        self.limit = limit
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_SOURCE:
            return getattr(self._source, name)
        raise AttributeError(name)

    def projected(self, columns: frozenset[str]) -> LimitedSource:
        """The same for these columns, if the source can leave others out."""
        project = getattr(self._source, "projected", None)
        return self if project is None else LimitedSource(project(columns), self.limit)

    def splits(self) -> Sequence[Any]:
        return self._source.splits()

    def read(self, split: Any, offset: Any) -> Iterator[Any]:
        limit, is_bounded = self.limit, getattr(self._source, "bounded", True)
        if limit.left:
            batches: Any = iter(self._source.read(split, offset))
            with closing(batches) if hasattr(batches, "close") else nullcontext():
                for batch in batches:
                    if not limit.left:
                        break
                    yield from self._pieces_of(batch)
                    if limit.is_cut or not (limit.left or is_bounded):
                        break
                else:
                    return
        limit.cut()

    def _pieces_of(self, given: Any) -> Iterator[Any]:
        """Nobody goes on in the middle of a batch: the position behind it is that of all its pieces."""
        if not (names_splits(self._source) and isinstance(given, tuple) and given):
            yield from self._pieces(given)
        elif given[0] is None:
            yield given
        else:
            yield from ((piece, *given[1:]) for piece in self._pieces(given[0]))

    def _pieces(self, given: Any) -> Iterator[Payload | Portion | TimedBatch[Any]]:
        limit, begin = self.limit, 0
        if isinstance(given, Portion):
            limit.take(given.records)
            yield given
            return
        batch = given.batch if isinstance(given, TimedBatch) else given
        if not len(batch):
            yield batch
        while begin < len(batch):
            if not limit.left:
                limit.cut()
                return
            count = min(len(batch) - begin, limit.left, max(1, limit.read), LIST_ROWS)
            limit.take(count)
            end = begin + count
            piece = batch[begin:end] if isinstance(batch, list) else batch.slice(begin, count)
            yield TimedBatch(piece, given.times[begin:end]) if isinstance(given, TimedBatch) else piece
            begin = end
