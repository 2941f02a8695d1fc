"""One batch of records: what an exchange gives an operator, and operators hand to each other.

Three fields with as many entries as there are records, cut, picked and put together as one:

* ``payload``: a list of rows (any Python objects), or an Arrow record batch.
* ``keys``: None where nothing is keyed. Of rows, the list of the very objects that the key function gave,
  which is ``payload`` itself where each row is its own key; they never become Arrow, so that mixed kinds stay
  what they are. Of columns, :class:`KeyColumns`: columns of the payload, never copies; an exchange, which
  sends no column twice, gives None, and the operator names its key columns.
* ``times``: None where nobody reads event time, else int64, microseconds since 1970 in UTC.

Nobody changes a batch, or a list or vector in it, once it was handed on: several may hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Batch", "KeyColumns", "Mask", "Numbers", "Payload", "Times"]

Payload: TypeAlias = "list[Any] | pa.RecordBatch"
"""What sources of users give, and sinks of users take."""
Times: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


class KeyColumns(tuple[Any, ...]):
    """The columns of a record batch by which its rows are keyed.

    They are found again by ``numbers``, their places in the schema: of what is cut from the record batch they
    are the same columns.
    """

    numbers: tuple[int, ...]

    def __new__(cls, payload: pa.RecordBatch, numbers: Sequence[int]) -> KeyColumns:
        made = super().__new__(cls, map(payload.column, numbers))
        made.numbers = tuple(numbers)
        return made


@dataclass(slots=True, eq=False)
class Batch:
    """Records with their keys and event times; see above.

    An operator knows by the plan whether it gets rows or columns, so that the fields are of type Any.
    """

    payload: Any
    """``list[Any] | pa.RecordBatch``."""
    keys: Any = None
    """``list[Any] | KeyColumns | None``."""
    times: Times | None = None

    def __len__(self) -> int:
        return len(self.payload)

    def take(self, rows: Numbers) -> Batch:
        """The records of these numbers, in the order of ``rows``; one may be in it several times."""
        times = None if self.times is None else self.times.take(rows)
        if not isinstance(self.payload, list):
            return self._with_columns(_taken(self.payload, rows), times)
        numbers = rows.tolist()
        payload = [self.payload[number] for number in numbers]
        keys = self.keys
        if keys is not None:
            keys = payload if keys is self.payload else [keys[number] for number in numbers]
        return Batch(payload, keys, times)

    def mask(self, kept: Mask) -> Batch:
        """The records for which ``kept`` holds, in order; the batch itself if it holds for all."""
        if kept.all():
            return self
        times = None if self.times is None else self.times[kept]
        if not isinstance(self.payload, list):
            return self._with_columns(_taken(self.payload, np.flatnonzero(kept)), times)
        marks = kept.tolist()
        payload = list(compress(self.payload, marks))
        keys = self.keys
        if keys is not None:
            keys = payload if keys is self.payload else list(compress(keys, marks))
        return Batch(payload, keys, times)

    def slice(self, begin: int, end: int) -> Batch:
        """The records from ``begin`` up to ``end``. Columns and times are not copied."""
        times = None if self.times is None else self.times[begin:end]
        if not isinstance(self.payload, list):
            return self._with_columns(self.payload.slice(begin, end - begin), times)
        payload = self.payload[begin:end]
        keys = self.keys
        if keys is not None:
            keys = payload if keys is self.payload else keys[begin:end]
        return Batch(payload, keys, times)

    def repeat(self, counts: Numbers) -> Batch:
        """Each record as often as ``counts`` says, one after the other. Rows are the same objects."""
        if not isinstance(self.payload, list):
            return self.take(np.repeat(np.arange(len(counts)), counts))
        times = None if self.times is None else np.repeat(self.times, counts)
        often = counts.tolist()
        keys = self.keys
        payload = list(chain.from_iterable(map(repeat, self.payload, often)))
        if keys is not None:
            keys = payload if keys is self.payload else list(chain.from_iterable(map(repeat, keys, often)))
        return Batch(payload, keys, times)

    def map_rows(self, fn: Callable[[list[Any]], list[Any]]) -> Batch:
        """The same records with ``fn(rows)``, as many, in place of their rows; the batch itself if that is
        the same list. Columns stay as they are."""
        rows = fn(self.payload) if isinstance(self.payload, list) else self.payload
        if rows is self.payload:
            return self
        return Batch(rows, rows if self.keys is self.payload else self.keys, self.times)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The records of some batches, at least one, in order. All are rows or all columns of one schema, all
        have keys (in the same columns) or none, all times or none."""
        first = batches[0]
        if len(batches) == 1:
            return first
        times = None if first.times is None else np.concatenate([batch.times for batch in batches])
        if not isinstance(first.payload, list):
            import pyarrow as pa

            return first._with_columns(pa.concat_batches([batch.payload for batch in batches]), times)
        payload = list(chain.from_iterable(batch.payload for batch in batches))
        if first.keys is None:
            return Batch(payload, None, times)
        if all(batch.keys is batch.payload for batch in batches):
            return Batch(payload, payload, times)
        return Batch(payload, list(chain.from_iterable(batch.keys for batch in batches)), times)

    def _with_columns(self, payload: pa.RecordBatch, times: Times | None) -> Batch:
        """What was made of this batch's columns, keyed as this one is."""
        keys = self.keys
        return Batch(payload, None if keys is None else KeyColumns(payload, keys.numbers), times)


def _taken(columns: pa.RecordBatch, rows: Numbers) -> pa.RecordBatch:
    from minishuffle.exchange.gather import taken  # which loads pyarrow

    return taken(columns, rows)
