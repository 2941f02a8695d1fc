"""Which consumer gets which rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UnknownName, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.keys import CHUNK_ROWS, destination, hash_columns, hash_rows, stable_hash
from minishuffle.exchange.rows import preview
from minishuffle.exchange.schemas import require_plain
from minishuffle.kernels.machinecode import kernel

__all__ = ["Kind", "Partitioner"]

Kind: TypeAlias = Literal["hash", "rebalance", "rescale", "forward", "broadcast", "custom"]
Pieces: TypeAlias = "Iterator[tuple[int, Batch]]"
Vector: TypeAlias = "np.ndarray[Any, Any]"

FIRST_ROWS: Final = 16_384
FIRST_BLOCK_ROWS: Final = 16
BLOCK_ROWS: Final = 1_024
"""Columns are dealt out by so many rows in turn, but the first of them, ``FIRST_ROWS``, by fewer: a short
table is to keep all consumers busy, and a long one is not to be cut up finely. ``FIRST_ROWS``
is a multiple of both."""
OWN_PIECE_ROWS_MIN: Final = 8_192
"""Rows of a piece, on the average, that has memory of its own: each gather costs microseconds a column."""
FEW_ROWS: Final = 8
"""A batch of rows that has no more is dealt out by key without vectors, whose calls take 17 microseconds or
more: one row takes 2 to 5, eight take 11 to 33."""
_ROWS_PER_CONSUMER: Final = 4096
"""An Arrow batch is cut up by chunks, longer for many consumers so that the pieces do not become too
small."""


class Partitioner:
    """Cuts the batches of one producer up among the consumers of one edge.

    Args:
        kind: ``hash`` (by key: record batches by the columns ``keys``; None: by the batch's own keys),
            ``rebalance``, ``rescale`` and ``forward`` (dealt out in turn: see :meth:`_in_turn`),
            ``broadcast``, or ``custom`` (``choose(row, consumers)`` says where each row goes).
        consumers: how many this producer feeds.
        start: the consumer that is dealt to first; the producer's index, so that not all begin with
            the same.
        hot_keys: looks at some of the keys, if rows go by key.
        columns: those of record batches that the pieces have; None: all.
    """

    def __init__(
        self,
        kind: str,
        consumers: int,
        keys: tuple[str, ...] | None,
        choose: Callable[[Any, int], int] | None,
        start: int,
        *,
        hot_keys: HotKeys | None = None,
        columns: frozenset[str] | None = None,
    ) -> None:
        assert kind != "custom" or choose is not None
        self._kind = kind
        self._split = _SPLITS[kind]
        self._consumers = consumers
        self._keys = keys
        self._choose = choose
        self._columns = columns
        self._start = start
        self.dealt = 0
        """Rows that were dealt out in turn, by earlier attempts as well: set before the first, it has each
        row go where it went before."""
        self._hot_keys = hot_keys
        self._schema: pa.Schema | None = None
        self._key_columns: list[int] = []

    def split(self, batch: Batch) -> Pieces:
        """Pieces of ``batch`` with the position (from 0) of the consumer that gets each.

        No piece is empty, and the pieces of a consumer hold its rows in their order. A long record
        batch gives several pieces for one consumer, each made when it is asked for: what is written
        out before the next is taken stays in the cache.

        Raises:
            UnknownName: the batch lacks a key column; names those that it has.
            WrongColumns: a key column is of a type that cannot be one.
            UsageError: a key cannot be hashed, or ``choose`` gave no consumer.
        """
        if self._columns is not None and not isinstance(batch.payload, list):
            batch = _with_columns(batch, self._columns)
        if not len(batch.payload):
            return iter(())
        if self._consumers == 1:
            self._check(batch)
            return iter([(0, batch)])
        return self._split(self, batch)

    def _check(self, batch: Batch) -> None:
        """One consumer gets everything, and what is refused is not to depend on their number."""
        payload = batch.payload
        if self._kind == "custom" and isinstance(payload, list):
            self._choices(payload)
        elif self._kind == "hash" and isinstance(payload, list):
            hash_rows(batch.keys)
        elif self._kind == "hash" and payload.schema != self._schema:
            self._prepare(batch)
            hash_columns([payload.column(number).slice(0, 0) for number in self._key_columns])

    def _to_all(self, batch: Batch) -> Pieces:
        return ((position, batch) for position in range(self._consumers))

    def _in_turn(self, batch: Batch) -> Pieces:
        """Rows one by one, and columns by blocks, as their running number says: whatever batches they come
        in, each row goes where it would go in any others."""
        begin = self.dealt
        self.dealt = end = begin + len(batch.payload)
        if isinstance(batch.payload, list):
            return self._rows_in_turn(batch, self._start + begin)
        return self._blocks_in_turn(batch, begin, end)

    def _rows_in_turn(self, batch: Batch, first: int) -> Pieces:
        payload, keys, times = batch.payload, batch.keys, batch.times
        step = self._consumers
        for at in range(min(len(payload), step)):
            rows = payload[at::step]
            own = keys if keys is None else rows if keys is payload else keys[at::step]
            yield (first + at) % step, Batch(rows, own, None if times is None else times[at::step])

    def _blocks_in_turn(self, batch: Batch, begin: int, end: int) -> Pieces:
        first = self._start + _block_of(begin)
        blocks = list(pairwise(bound - begin for bound in _block_bounds(begin, end)))
        for at in range(min(len(blocks), self._consumers)):
            yield (first + at) % self._consumers, _joined(batch, blocks[at :: self._consumers])

    def _by_key(self, batch: Batch) -> Pieces:
        return self._rows_by_key(batch) if isinstance(batch.payload, list) else self._columns_by_key(batch)

    def _columns_by_key(self, batch: Batch) -> Pieces:
        rows = batch.payload.num_rows
        chunk_rows = max(CHUNK_ROWS, _ROWS_PER_CONSUMER * self._consumers)
        if rows <= chunk_rows:
            yield from self._chunk_by_key(batch)
            return
        for begin in range(0, rows, chunk_rows):
            yield from self._chunk_by_key(batch.slice(begin, min(begin + chunk_rows, rows)))

    def _rows_by_key(self, batch: Batch) -> Pieces:
        positions: Any
        pieces: Pieces
        if len(batch.payload) == 1:
            positions = [destination(stable_hash(batch.keys[0]), self._consumers)]
            pieces = iter([(positions[0], batch)])
        elif len(batch.payload) <= FEW_ROWS:
            positions = [destination(stable_hash(key), self._consumers) for key in batch.keys]
            pieces = _pick_few(batch, positions)
        else:
            positions = destination(hash_rows(batch.keys), self._consumers)
            pieces = _pick_rows(batch, *_arrange(positions, self._consumers))
        if self._hot_keys is not None:
            self._hot_keys.look(len(batch.payload), batch.keys.__getitem__, positions)
        return pieces

    def _chunk_by_key(self, batch: Batch) -> Pieces:
        payload = batch.payload
        if payload.schema != self._schema:
            self._prepare(batch)
        columns = [payload.column(number) for number in self._key_columns]
        positions = destination(hash_columns(columns), self._consumers)
        if self._hot_keys is not None:
            self._hot_keys.look(payload.num_rows, partial(_key_of, columns), positions)
        order, bounds = _arrange(positions, self._consumers)
        return self._pick_columns(batch, order, bounds)

    def _prepare(self, batch: Batch) -> None:
        """Look a schema's columns over once. Raises UsageError: a column holds runs or a union."""
        schema = batch.payload.schema
        for field in schema:
            require_plain(field)
        if self._keys is None:
            self._key_columns = list(batch.keys.numbers)
        else:
            self._key_columns = [_column_number(schema, name) for name in self._keys]
        self._schema = schema

    def _pick_columns(self, batch: Batch, order: Vector, bounds: list[int]) -> Pieces:
        """Long pieces have memory of their own, so that one can be handed over and keeps nothing of another;
        short ones are slices of one gather."""
        if len(order) >= OWN_PIECE_ROWS_MIN * self._consumers:
            for position, (begin, end) in enumerate(pairwise(bounds)):
                if begin < end:
                    yield position, batch.take(order[begin:end])
            return
        gathered = batch.take(order)
        for position, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                yield position, gathered.slice(begin, end)

    def _as_chosen(self, batch: Batch) -> Pieces:
        order, bounds = _arrange(np.array(self._choices(batch.payload), dtype=np.int64), self._consumers)
        return _pick_rows(batch, order, bounds)

    def _choices(self, rows: list[Any]) -> list[int]:
        """The consumer of each row.

        Raises:
            UsageError: the partitioner gave something else.
        """
        assert self._choose is not None
        chosen = list(map(self._choose, rows, repeat(self._consumers)))
        for row, choice in zip(rows, chosen, strict=True):
            if not isinstance(choice, int | np.integer) or not 0 <= choice < self._consumers:
                raise UsageError(
                    f"the partitioner gave {choice!r} for the row {preview(row)}: return an int from 0 to "
                    f"{self._consumers - 1}, the consumer's index"
                )
        return chosen


_SPLITS: Final[dict[str, Callable[[Partitioner, Batch], Pieces]]] = {
    "hash": Partitioner._by_key,
    "rebalance": Partitioner._in_turn,
    "rescale": Partitioner._in_turn,
    "forward": Partitioner._in_turn,
    "broadcast": Partitioner._to_all,
    "custom": Partitioner._as_chosen,
}
"""By kind. A method of the partitioner itself would keep it, and the user's function, in a circle."""


def _joined(batch: Batch, spans: list[tuple[int, int]]) -> Batch:
    """The rows of these spans of columns, in their order; those of a single one are not copied."""
    payload, times = batch.payload, batch.times
    if len(spans) == 1:
        return batch.slice(*spans[0])
    if times is not None:
        times = np.concatenate([times[begin:end] for begin, end in spans])
    return Batch(pa.concat_batches([payload.slice(one, end - one) for one, end in spans]), None, times)


def _block_of(row: int) -> int:
    """The number of the block that a row is in, by its running number."""
    small = min(row, FIRST_ROWS)
    return small // FIRST_BLOCK_ROWS + (row - small) // BLOCK_ROWS


def _block_bounds(begin: int, end: int) -> list[int]:
    """Where the blocks of these rows begin and end."""
    small = range(begin - begin % FIRST_BLOCK_ROWS, min(end, FIRST_ROWS), FIRST_BLOCK_ROWS)
    later = max(begin, FIRST_ROWS)
    large = range(later - later % BLOCK_ROWS, end, BLOCK_ROWS)
    return [begin, *(bound for bound in (*small, *large) if bound > begin), end]


def _with_columns(batch: Batch, names: frozenset[str]) -> Batch:
    """The columns of those names, in their order."""
    given = batch.payload.schema.names
    numbers = [number for number, name in enumerate(given) if name in names]
    return batch if len(numbers) == len(given) else Batch(batch.payload.select(numbers), None, batch.times)


def _column_number(schema: pa.Schema, name: str) -> int:
    number: int = schema.get_field_index(name)
    if number < 0:
        raise UnknownName(f"no key column {name!r} (or several): the batch has {', '.join(schema.names)}")
    return number


def _key_of(columns: list[pa.Array], row: int) -> Any:
    values = [_shown(column[row]) for column in columns]
    return values[0] if len(values) == 1 else tuple(values)


def _shown(value: pa.Scalar) -> Any:
    """The value in Python; a time whose nanoseconds Python lacks as their number."""
    return value.value if getattr(value.type, "unit", "") == "ns" else value.as_py()


def _arrange(positions: Vector, consumers: int) -> tuple[Vector, list[int]]:
    """Row numbers by consumer, in their order; and where those of each begin, with the end."""
    order = np.empty(len(positions), np.int64)
    bounds = np.zeros(consumers + 2, np.int64)
    kernel("arrange")(positions, order, bounds, consumers, len(order))
    return order, bounds[:-1].tolist()


def _pick_few(batch: Batch, positions: list[int]) -> Pieces:
    """As :func:`_arrange` and :func:`_pick_rows` do it, without a vector."""
    payload, keys, times = batch.payload, batch.keys, batch.times
    for position in sorted(set(positions)):
        numbers = [number for number, each in enumerate(positions) if each == position]
        if len(numbers) == len(positions):
            yield position, batch
            return
        rows = [payload[number] for number in numbers]
        own = rows if keys is payload else [keys[number] for number in numbers]
        yield position, Batch(rows, own, None if times is None else times[numbers])


def _pick_rows(batch: Batch, order: Vector, bounds: list[int]) -> Pieces:
    payload, keys, times = batch.payload, batch.keys, batch.times
    numbers = order.tolist()
    for position, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        # One index too many makes sure that a tuple comes back; it is dropped again.
        pick = itemgetter(*numbers[begin:end], 0)
        rows = list(pick(payload)[:-1])
        own = keys
        if keys is not None:
            own = rows if keys is payload else list(pick(keys)[:-1])
        yield position, Batch(rows, own, None if times is None else times[order[begin:end]])
