"""One split of a source, read from where an earlier attempt was.

A split is read on from a number of records (:class:`~minishuffle.operators.base.Source`), or if it has a name
from a position of the source's own (:class:`~minishuffle.operators.base.SplitSource`). The second begins at
or before the records that are wanted, and leaves out what comes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from inspect import iscoroutinefunction, isgeneratorfunction
from typing import Any, Final

import pyarrow as pa

from minishuffle.errors import UsageError, WrongResult
from minishuffle.exchange.batch import Payload, Times
from minishuffle.limits import (
    BATCH_ROWS_MAX,
    NAMED_SPLITS_MAX,
    SPLIT_NAME_BYTES_MAX,
    SPLIT_POSITION_BYTES_MAX,
)
from minishuffle.operators.base import AnySource, Portion, SplitSource, TimedBatch
from minishuffle.operators.batch_times import given_times
from minishuffle.operators.pandas_index import without_unnamed_index
from minishuffle.wire.packed import Cursor, SplitPosition

__all__ = ["NamedSplit", "Split", "acknowledge", "check_count", "checked_names", "given_splits"]

_END: Final[Any] = object()


class Split:
    """A split that is read on from a number of records.

    Args:
        value: as the source gives it.
        resumed: where an earlier attempt was, whose lease counts as read.
    """

    def __init__(self, source: AnySource, value: Any, resumed: SplitPosition) -> None:
        self.number = resumed.split
        self.position = resumed.end
        """Records read, those included that an earlier attempt has emitted."""
        self.records = 0
        """How many of them the batch taken last stands for; the source may have left some out."""
        self.skipped = 0
        """How many were left out of it, as an earlier attempt may have emitted them."""
        self.is_idle = False
        """Its source says that nobody is to wait for it, until it has a record again."""
        self.times: Times | None = None
        """The event times that came with it."""
        self.left_out: Portion | None = None
        """That batch, if records are missing from it."""
        self.cursor: Cursor | None = None
        """Where it is read on, if it has a name."""
        self._source: Any = source
        self._source_name = type(source).__name__
        self._value = value
        self._batches: Iterator[Any] | None = None

    def take(self) -> Payload | None:
        """The next batch, or an empty list if there is none now; None at the end.

        Raises:
            WrongResult: the source yields what it must not.
            Exception: what the source raises.
        """
        self.records, self.left_out = 0, None
        try:
            if self._batches is None:
                self._batches = self._begun()
            given = next(self._batches, _END)
        except Exception as error:
            error.add_note(
                f"raised by {self._source_name}.read in split {self._shown} after {self.position} records"
            )
            raise
        if given is _END:
            self._batches = None
            return None
        return self._taken(given)

    def at(self, *, done: bool = False) -> SplitPosition:
        """Where it is, behind all that was taken."""
        return SplitPosition(self.number, self.position, 0, done, self.cursor)

    def close(self) -> None:
        """Let go of what the source has open for it."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    @property
    def _shown(self) -> str:
        return str(self.number)

    def _begun(self) -> Iterator[Any]:
        given = self._begin()
        if not isinstance(given, Iterable):
            raise WrongResult(
                f"{self._source_name}.read gives a {type(given).__name__}: write it as a plain function that "
                "yields"
            )
        return iter(given)

    def _begin(self) -> Any:
        return self._source.read(self._value, self.position)

    def _taken(self, given: Any) -> Payload:
        if isinstance(given, Portion):
            self.left_out, self.records = given, given.records
            batch = self._checked(given.batch)
        else:
            batch = self._checked(given)
            self.records = len(batch)
        self.position += self.records
        return batch

    def _checked(self, given: Any) -> Payload:
        """The batch, whose times are kept."""
        if not isinstance(given, TimedBatch):
            self.times = None
            return self._checked_batch(given)
        batch = self._checked_batch(given.batch)
        try:
            self.times = given_times(given.times, len(batch))
        except UsageError as error:
            raise WrongResult(f"{self._source_name}.read yields a TimedBatch with {error}") from error
        return batch

    def _checked_batch(self, batch: Any) -> Payload:
        name, format = self._source_name, getattr(self._source, "format", "rows")
        if isinstance(batch, pa.RecordBatch):
            if format != "arrow":
                raise WrongResult(f'{name} yields Arrow batches: set its attribute format = "arrow"')
            if batch.num_rows > BATCH_ROWS_MAX:
                raise WrongResult(
                    f"{name} yields an Arrow batch of {batch.num_rows} rows: "
                    f"yield slices of at most {BATCH_ROWS_MAX}"
                )
            return without_unnamed_index(batch)
        if not isinstance(batch, list):
            raise WrongResult(
                f"{name}.read yields a {type(batch).__name__}: yield lists of rows or pyarrow.RecordBatch"
            )
        if format != "rows" and batch:
            raise WrongResult(f'{name} yields lists of rows: set its attribute format = "rows"')
        return batch


class NamedSplit(Split):
    """A split that has a name, and is read on from a position of the source's own.

    Raises:
        UsageError: the name is not that of the split which an earlier attempt has read.
    """

    def __init__(self, source: SplitSource[Any], name: str, resumed: SplitPosition) -> None:
        super().__init__(source, name, resumed)
        self.cursor: Cursor = resumed.cursor or Cursor(name)
        if self.cursor.name != name:
            raise UsageError(
                f"{self._source_name}.splits() gives {name!r} where it gave {self.cursor.name!r} before: "
                "give the same names in the same order each time"
            )
        self._skips = self.position - self.cursor.rows if source.replayable else 0
        """Records behind the cursor that are left out."""

    @property
    def _shown(self) -> str:
        return repr(self._value)

    def _begin(self) -> Any:
        return self._source.read(self._value, self.cursor.position)

    def _taken(self, given: Any) -> Payload:
        if not isinstance(given, tuple) or len(given) != 2:
            what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
            raise WrongResult(
                f"{self._source_name}.read yields {what}: yield pairs of a batch and the position behind it, "
                "or leave the attribute replayable out"
            )
        batch, position = self._checked([] if given[0] is None else given[0]), given[1]
        self.is_idle = given[0] is None or (self.is_idle and not len(batch))
        if not isinstance(position, bytes) or len(position) > SPLIT_POSITION_BYTES_MAX:
            what = f"{len(position)} bytes" if isinstance(position, bytes) else type(position).__name__
            raise WrongResult(
                f"{self._source_name}.read yields {what} as a position: give bytes, at most "
                f"{SPLIT_POSITION_BYTES_MAX}"
            )
        self.skipped = skipped = min(self._skips, len(batch))
        self._skips -= skipped
        self.records = len(batch) - skipped
        self.position += self.records
        self.cursor = Cursor(self.cursor.name, position, self.position - self._skips)
        if not skipped:
            return batch
        if self.times is not None:
            self.times = self.times[skipped:]
        return batch[skipped:] if isinstance(batch, list) else batch.slice(skipped)


def given_splits(source: AnySource, *, ordered: bool = True) -> list[Any]:
    """All of its splits, in its order, which counts if they are dealt in turn (``ordered``).

    Raises:
        WrongResult: it gives no list, or a set, which has another order in each process, so that some splits
            would be read twice and others by nobody.
        Exception: what ``splits()`` raises.
    """
    name = type(source).__name__
    try:
        splits: Any = source.splits()
        given = None if isinstance(splits, str | bytes) or not isinstance(splits, Iterable) else list(splits)
    except Exception as error:
        error.add_note(f"raised by {name}.splits()")
        raise
    if ordered and isinstance(splits, set | frozenset):
        raise WrongResult(
            f"{name}.splits() gives a set, whose order is another one in each process: "
            "give a list, sorted(...) for example"
        )
    if given is None:
        raise WrongResult(f"{name}.splits() gives {splits!r:.80}: give a list of the splits")
    return given


def acknowledge(source: Any, positions: dict[str, bytes]) -> None:
    """Call its ``acknowledge``.

    Raises:
        WrongResult: a call of it does nothing.
        Exception: what that raises.
    """
    if iscoroutinefunction(source.acknowledge) or isgeneratorfunction(source.acknowledge):
        raise WrongResult(
            f"{type(source).__name__}.acknowledge is an async function or a generator: a call of it does "
            "nothing; make it a plain function"
        )
    try:
        source.acknowledge(positions)
    except Exception as error:
        names = ", ".join(map(repr, positions))
        error.add_note(f"raised by {type(source).__name__}.acknowledge of {names:.200}")
        raise


def check_count(source: SplitSource[Any], count: int) -> None:
    """Raises WrongResult unless one subtask can have so many splits, those included that have ended and are
    still given."""
    if count > NAMED_SPLITS_MAX:
        raise WrongResult(
            f"{type(source).__name__}.splits() gives {count} splits with names to one subtask, and at most "
            f"{NAMED_SPLITS_MAX} fit: raise its parallelism, or with discovery_interval leave out the names "
            "of splits that have ended"
        )


def checked_names(source: SplitSource[Any], names: list[Any]) -> list[str]:
    """The names of its splits.

    Raises:
        WrongResult: they are not different texts of at most SPLIT_NAME_BYTES_MAX.
    """
    what = f"{type(source).__name__}.splits() gives"
    for name in names:
        if not isinstance(name, str):
            raise WrongResult(
                f"{what} a {type(name).__name__}: give the names of the splits, which are texts"
            )
        if any("\ud800" <= each <= "\udfff" for each in name):
            raise WrongResult(
                f"{what} the name {name!r:.80}, which is no Unicode: escape it, and undo that in read"
            )
        if not 0 < len(name.encode()) <= SPLIT_NAME_BYTES_MAX:
            raise WrongResult(f"{what} the name {name!r:.80}: give one of 1 to {SPLIT_NAME_BYTES_MAX} bytes")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise WrongResult(f"{what} {twice!r} twice: give each split a name of its own")
    return names
