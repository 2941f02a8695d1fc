"""Sources and sinks in the hands of the program that runs a plan: rows are pushed in, and taken out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import pyarrow as pa

from minishuffle.errors import UnserializableRecord, UsageError
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.collected import pack_collected, unpack_collected
from minishuffle.exchange.elements import may_change
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.exchange.schemas import batch_without_rows, without_dictionary
from minishuffle.exchange.sizes import Drop, sendable
from minishuffle.limits import BATCH_ROWS_MAX, LIST_ROWS
from minishuffle.operators.base import Emit, TimedBatch
from minishuffle.operators.batch_times import given_times
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.misplaced_nulls import misplaced_null
from minishuffle.operators.pandas_index import given_table
from minishuffle.operators.row_conversion import RowsToArrow
from minishuffle.operators.row_copies import own_rows
from minishuffle.operators.wider_type import in_schema, wider

__all__ = ["PushedSource", "TakenSink"]


class PushedSource:
    """Gives what is pushed, in that order, and ends when that is said. It has one split.

    Args:
        name: of the source whose place it takes, for errors.
        schema: of its record batches; None: it gives rows.
        bounded: what the source says of itself.
        held: the rows or the table that the source has in memory, to be pushed by who wants them; None: none.
    """

    def __init__(self, name: str, schema: pa.Schema | None, *, bounded: bool, held: Any = None) -> None:
        self.name = name
        self.held = held
        self.bounded = bounded
        self.format: Literal["rows", "arrow"] = "rows" if schema is None else "arrow"
        self._schema = schema
        self._waiting: deque[Payload | TimedBatch[Payload]] = deque()
        self._ended = False

    def push(self, rows: Any) -> None:
        """Give these next: any rows; with a schema a ``pyarrow.Table``, a DataFrame or dicts, which are cast
        to it where that changes no value. A :class:`TimedBatch` of any of these brings their times.

        Raises:
            UsageError: they are not of the kind that the source gives, or not of its schema; times are not as
                many, or none; or it has ended.
        """
        if self._ended:
            raise UsageError(f"{self.name!r} has ended: push rows before finish()")
        if isinstance(rows, TimedBatch):
            batches = list(self._given(rows.batch))
            times = given_times(rows.times, sum(map(len, batches)))
            for batch in batches:
                self._waiting.append(TimedBatch(batch, times[: len(batch)]))
                times = times[len(batch) :]
        else:
            self._waiting += self._given(rows)

    def _given(self, rows: Any) -> Iterator[Payload]:
        if self._schema is None:
            given = self._rows(rows, "a list of rows")
            return (given[at : at + LIST_ROWS] for at in range(0, len(given), LIST_ROWS))
        return self._batches(rows, self._schema)

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Payload | TimedBatch[Payload]]:
        while self._waiting or not self._ended:
            yield self._waiting.popleft() if self._waiting else []

    def _rows(self, given: Any, wanted: str) -> list[Any]:
        single = isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable)
        if single or hasattr(given, "__arrow_c_stream__"):
            raise UsageError(f"{self.name!r} takes {wanted}, not a {type(given).__name__}")
        return list(given)

    def _batches(self, given: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        if hasattr(given, "__arrow_c_stream__"):
            table = self._checked(given_table(given, repr(self.name)), schema)
        elif rows := self._rows(given, "a pyarrow.Table, a DataFrame or a list of dicts"):
            for name in (name for row in rows if isinstance(row, dict) for name in row):
                if name not in schema.names:
                    raise UsageError(
                        f"rows for {self.name!r}: {name!r} is no column of its schema ({_shown(schema)})"
                    )
            try:
                table = pa.Table.from_batches([RowsToArrow(schema).convert(rows)])
            except UsageError as error:
                raise UsageError(f"rows for {self.name!r}: {error}") from error
        else:
            table = pa.Table.from_batches([batch_without_rows(schema)])
        return iter(table.to_batches(max_chunksize=BATCH_ROWS_MAX))

    def _checked(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """The table with the columns of the schema, in its order and cast to its types: no value changes."""
        wrong = [f"{name} is not there" for name in schema.names if name not in table.schema.names]
        wrong += [f"{name} is not in it" for name in table.schema.names if name not in schema.names]
        if not wrong:
            wrong = [
                f"{field.name} is {own.type}, not {field.type}{_TEXTS if _are_texts_for(own, field) else ''}"
                for own, field in ((table.schema.field(field.name), field) for field in schema)
                if wider(own.type, field.type) is None
            ]
        if not wrong:
            table = in_schema(table.select(schema.names), schema, f"the table for {self.name!r}")
            place = misplaced_null(table, schema)
            wrong = [] if place is None else [f"{place} has nulls"]
        if wrong:
            raise UsageError(
                f"the table for {self.name!r} is not of its schema ({_shown(schema)}): {'; '.join(wrong)}; "
                "cast it, or give a list of dicts"
            )
        return table


_TEXTS: Final = " (a text is no time: pandas.to_datetime(column) makes some)"


def _are_texts_for(own: pa.Field, wanted: pa.Field) -> bool:
    """Whether texts stand where times belong."""
    return pa.types.is_temporal(wanted.type) and without_dictionary(own.type) in (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
    )


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


class TakenSink(ChainedOperator):
    """Keeps what reaches it until it is taken.

    Args:
        sends: rows are packed and unpacked, as those are that a cluster sends to its client.
    """

    name = "taken"
    only_reads = True

    def __init__(self, *, sends: bool) -> None:
        self.drop: Drop | None = None
        """What drops rows that cannot be sent; None: they raise."""
        self._sends = sends
        self._kept: list[Payload] = []

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        if isinstance(rows, list):
            rows = self._sent(batch) if self._sends else own_rows(batch).payload
        elif may_change(rows):
            rows = unpack_collected(pack_collected(rows))
        if len(rows):
            self._kept.append(rows)

    def _sent(self, batch: Batch) -> list[Any]:
        try:
            return unpack_rows(pack_rows(batch.payload))
        except UnserializableRecord:
            if self.drop is None:
                raise
            return unpack_rows(pack_rows(sendable(Batch(batch.payload), self.drop).payload))

    def take(self) -> list[Payload]:
        """The batches since the last call."""
        taken = self._kept[:]
        self._kept.clear()  # Operators under another name are copies, which share the list.
        return taken
