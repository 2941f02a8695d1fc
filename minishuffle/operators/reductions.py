"""One value for each key, brought forward by each record: fold, reduce, count and aggregate.

:class:`KeyedReduction` says when values go out. How a batch brings them forward is said by its
:class:`Reduction`: for rows by a loop that calls a function of the user, for columns by compiled loops over
the slots of keyed state, and for counts by neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.gather import take
from minishuffle.exchange.keys import key_array
from minishuffle.exchange.rows import SCALARS
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import Outputs, RowCount, grown, pieces_of
from minishuffle.operators.aggregates import input_of
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import Emission, Failed, OnError, RecordOperator, emit_rows
from minishuffle.operators.column_store import Vector
from minishuffle.operators.first_last import FirstOrLast
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.row_copies import copied
from minishuffle.operators.row_functions import COLUMN_KEYS_MIN
from minishuffle.operators.row_store import ABSENT
from minishuffle.operators.state_parts import StatePart

__all__ = ["Aggregation", "FirstOfKeys", "KeyCount", "KeyedReduction", "RowFold", "count_by_key"]

_FEW: Final = 4
"""Up to so many keys are counted in a loop of Python sooner than one of C is reached."""
_STAMPS: Final = 255
"""How many stamps of batches there are besides 0."""


class Reduction:
    """How records bring the values of their keys forward; the values are in ``state``."""

    name: str
    fn: Any = None
    """The function of the user that is called for each record, if there is one."""
    state: KeyedState

    def bring(self, batch: Batch, failed: Failed) -> None:
        """Bring values forward, and emit nothing."""
        raise NotImplementedError

    def each(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        """And emit, for each record, its key as it brought it and the value after it."""
        raise NotImplementedError

    def latest(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        """And emit each key of the batch, in the order of their first records, and its value."""
        raise NotImplementedError

    def all(self, emit: Emit) -> None:
        """Emit all keys, as their first records brought them, and values, in the order in which keys first
        came."""
        raise NotImplementedError

    @property
    def reads_times(self) -> bool:
        """Whether it reads the event times beside records."""
        return False

    def rows(self) -> int:
        """How many keys there are."""
        return len(self.state)

    def write(self, *, frozen: bool = False) -> Iterator[StatePart]:
        """See :meth:`KeyedState.write`."""
        return self.state.write(frozen=frozen)

    def read(self, parts: Iterable[StatePart]) -> None:
        self.state.read(parts)


class KeyedReduction(RecordOperator):
    """Emits values by key: with ``emit="each"`` for each record, with ``"batch"`` for each key of a batch,
    with ``"end"`` for each key when the data end.

    A record whose function raises is dropped (or fails the task) and leaves its key's value as it was, unless
    the function had already changed that in place.
    """

    def __init__(self, reduction: Reduction, emit: Emission, on_error: OnError = "fail") -> None:
        super().__init__(reduction.fn, on_error)
        self.name = reduction.name
        self._reduction = reduction
        self.emission = emit
        self._take = reduction.each if emit == "each" else reduction.latest

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if not len(batch.payload):
            return
        if self.emission == "end":
            self._reduction.bring(batch, self.failed)
        else:
            self._take(batch, self.failed, emit)

    def finish(self, emit: Emit) -> None:
        if self.emission == "end":
            self._reduction.all(emit)

    def state_rows(self) -> int:
        return self._reduction.rows()

    def write_state(self) -> Iterator[StatePart]:
        return self._reduction.write()

    def freeze_state(self) -> Iterator[StatePart]:
        return self._reduction.write(frozen=True)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self._reduction.read(parts)


def _emit_pairs(pairs: Iterator[Any], emit: Emit) -> None:
    while chunk := list(islice(pairs, BATCH_ROWS_MAX)):
        emit_rows(chunk, emit)


# --- rows -----------------------------------------------------------------------------------------------


class RowFold(Reduction):
    """``add(value, row)`` gives the next value of a key, or the same changed in place: what is emitted before
    the end is a copy. ``create()`` makes the first value; without it the first row is. What is emitted are
    (key, value).
    """

    def __init__(self, add: Callable[[Any, Any], Any], create: Callable[[], Any] | None = None) -> None:
        self.name = "reduce" if create is None else "aggregate"
        self.fn = add
        self.state = KeyedState()
        self._create = create

    def bring(self, batch: Batch, failed: Failed) -> None:
        self._brought(batch, failed, copies=False)

    def each(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        values, _, dropped = self._brought(batch, failed, copies=True)
        keys = batch.keys
        if dropped:
            kept = [value is not ABSENT for value in values]
            keys, values = list(compress(keys, kept)), list(compress(values, kept))
        if values:
            emit(Batch(list(zip(keys, values, strict=True))))

    def latest(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        values, forms, dropped = self._brought(batch, failed, copies=False)
        last = dict(zip(forms, values, strict=True))
        if dropped:
            pairs = zip(forms, values, strict=True)
            last = {form: value for form, value in pairs if value is not ABSENT}
        if last:
            shown = self.state.shown(last)
            emit(Batch([(key, copied(value)) for key, value in zip(shown, last.values(), strict=True)]))

    def all(self, emit: Emit) -> None:
        _emit_pairs(self.state.items(), emit)

    def _brought(self, batch: Batch, failed: Failed, *, copies: bool) -> tuple[list[Any], list[Any], bool]:
        """The value after each record (ABSENT if it was dropped), the canonical keys, and whether one was
        dropped. Values are those that the state goes on with, or ``copies``."""
        rows = batch.payload
        held, places, forms = self.state.take(batch.keys)
        values: list[Any] = []
        records = zip(places, rows, strict=True)
        advance = self._reduce if self._create is None else self._fold
        has_copies, dropped = False, set[int]()
        while True:
            try:
                has_copies |= advance(records, held, values, copies)
                break
            except Exception as error:
                failed(error, rows[len(values)])
                dropped.add(len(values))
                values.append(ABSENT)
        # Whether there are copies before the error is not known.
        self.state.put(None if dropped or has_copies else values, dropped)
        return values, forms, bool(dropped)

    def _fold(self, records: Iterator[tuple[Any, Any]], held: Any, values: list[Any], copies: bool) -> bool:
        """Take (place, row) after (place, row), bring ``held[place]`` forward and append the value, or a copy
        where it may change; whether there are such."""
        add, create, absent, append = self.fn, self._create, ABSENT, values.append
        assert create is not None
        has_copies = False
        for place, row in records:
            value = held[place]
            held[place] = value = add(create() if value is absent else value, row)
            if type(value) in SCALARS:
                append(value)
            else:
                append(copied(value) if copies else value)
                has_copies = copies
        return has_copies

    def _reduce(self, records: Iterator[tuple[Any, Any]], held: Any, values: list[Any], copies: bool) -> bool:
        """The same where the first row is the first value."""
        fn, absent, append = self.fn, ABSENT, values.append
        has_copies = False
        for place, row in records:
            value = held[place]
            held[place] = value = row if value is absent else fn(value, row)
            if type(value) in SCALARS:
                append(value)
            else:
                append(copied(value) if copies else value)
                has_copies = copies
        return has_copies


class KeyCount(Reduction):
    """The number of rows of each key; what is emitted are (key, count).

    Keys that come as columns (``functions.keys_alone``) are counted as columns, if nothing is emitted before
    the end and as long as all have one type.
    """

    name = "count"

    def __init__(self) -> None:
        self.state = KeyedState(packs=False)
        """Keys that came as rows; while others are counted as columns, in short batches since the last of
        these: all in ``_columns`` came before them."""
        self._columns: KeyedState | None = None
        self._count = RowCount()
        """The counts of the keys in ``_columns``."""
        self._type: pa.DataType | None = None
        """The type of the keys in ``_columns``."""
        self._is_mixed = False
        """Keys have come that no column holds as they are."""
        self._short_rows = 0
        """So many rows are in ``state`` since there are columns."""

    def bring(self, batch: Batch, failed: Failed) -> None:
        column = _column_of(batch)
        if column is not None and self._fits(column.type):
            assert self._columns is not None
            for begin, rows in pieces_of(len(column)):
                piece = column.slice(begin, rows)
                self._count.update(self._columns.take_columns([piece]), piece)
            return
        keys = _keys_of(batch, column)
        self._counted(keys)
        if self._columns is not None:
            self._short_rows += len(keys)
            if self._short_rows >= COLUMN_KEYS_MIN:
                self._put_together()

    def each(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        keys = _keys_of(batch, _column_of(batch))
        held, _, forms = self.state.take(keys)
        get = held.get
        values: list[int] = []
        append = values.append
        for form in forms:
            held[form] = value = get(form, 0) + 1
            append(value)
        emit(Batch(list(zip(keys, values, strict=True))))

    def latest(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        counts, forms = self._counted(_keys_of(batch, _column_of(batch)))
        last = dict.fromkeys(forms)
        shown = self.state.shown(last)
        if shown is last:
            emit(Batch([(key, counts[key]) for key in last]))
        else:
            emit(Batch([(key, counts[form]) for key, form in zip(shown, last, strict=True)]))

    def all(self, emit: Emit) -> None:
        self._put_together()
        pairs = self.state.items() if self._columns is None else _pairs(self._columns)
        _emit_pairs(pairs, emit)

    def rows(self) -> int:
        """The number of keys; some of short batches, fewer than ``COLUMN_KEYS_MIN``, may be in it twice."""
        return len(self.state) + (0 if self._columns is None else len(self._columns))

    def write(self, *, frozen: bool = False) -> Iterator[StatePart]:
        """As rows, whichever way they came."""
        self._put_together()
        if self._columns is None:
            return self.state.write(frozen=frozen)
        state = KeyedState(packs=False)
        _add_counts(state, _pairs(self._columns))
        return state.write(frozen=frozen)

    def _counted(self, keys: list[Any]) -> tuple[dict[Any, int], list[Any]]:
        """Count these keys; the counts by canonical key, and the canonical keys."""
        held, _, forms = self.state.take(keys)
        if len(forms) > _FEW:
            Counter.update(held, forms)  # In a loop of C, which takes a while to get to.
            return held, forms
        for form in forms:
            held[form] = held.get(form, 0) + 1
        return held, forms

    def _fits(self, kind: pa.DataType) -> bool:
        """Whether keys of that type are counted as columns; those that came before them are in front."""
        if self._columns is None and not self._is_mixed:
            self._count = RowCount()
            self._columns, self._type = KeyedState([("count", "key", self._count)]), kind
        elif kind != self._type:
            self._give_up_columns()
        self._put_together()
        return self._columns is not None

    def _put_together(self) -> None:
        """Have all counts in one place, as columns if there are any and short batches allow it."""
        if self._columns is None or not len(self.state):
            return
        pairs = list(self.state.items())
        keys = key_array([key for key, _ in pairs])
        if keys is None or keys.type != self._type:
            self._give_up_columns()
        else:
            counts = pa.array([count for _, count in pairs], pa.int64())
            self._count.merge(self._columns.take_columns([keys]), [counts])
            self.state = KeyedState(packs=False)
        self._short_rows = 0

    def _give_up_columns(self) -> None:
        if self._columns is not None:
            later, self.state = self.state, KeyedState(packs=False)
            _add_counts(self.state, _pairs(self._columns))
            _add_counts(self.state, later.items())
        self._columns, self._is_mixed = None, True


def _column_of(batch: Batch) -> pa.Array | None:
    """The column that keys alone came as; None where they came with rows."""
    return None if isinstance(batch.payload, list) else batch.payload.column(0)


def _keys_of(batch: Batch, column: pa.Array | None) -> list[Any]:
    keys: list[Any] = batch.keys if column is None else column.to_pylist()
    return keys


def _add_counts(state: KeyedState, pairs: Iterator[tuple[Any, int]]) -> None:
    """Add to counts of rows these of some keys."""
    while some := list(islice(pairs, BATCH_ROWS_MAX)):
        held, places, _ = state.take([key for key, _ in some])
        for place, (_, count) in zip(places, some, strict=True):
            held[place] = held.get(place, 0) + count


def _pairs(state: KeyedState) -> Iterator[tuple[Any, int]]:
    for _, (keys,), (counts,) in state.columns():
        yield from zip(keys.to_pylist(), counts.to_pylist(), strict=True)


# --- columns --------------------------------------------------------------------------------------------


class FirstOfKeys:
    """Which records of a batch are the first with their keys."""

    def __init__(self) -> None:
        self._stamps = np.zeros(0, dtype=np.uint8)
        """By slot, that of the last of the batches with the key; 0 for one that is long ago."""
        self._stamp = 0

    def of(self, slots: Vector, size: int) -> Vector:
        """The numbers of these records, by the slots of all; there are slots up to ``size``."""
        self._stamps = grown(self._stamps, size, 0)
        self._stamp = self._stamp % _STAMPS + 1
        if self._stamp == 1:
            self._stamps.fill(0)
        rows = np.empty(len(slots), dtype=np.int64)
        return rows[: kernel("first_rows")(slots, self._stamps, self._stamp, rows, len(slots))]


class Aggregation(Reduction):
    """Aggregates of columns. What is emitted are the key columns and one column for each aggregate.

    Args:
        keys: names of the key columns.
        outputs: (name, input column, aggregate).
    """

    def __init__(self, keys: Sequence[str], outputs: Outputs, name: str = "aggregate") -> None:
        self.name = name
        self._keys = tuple(keys)
        self._names = [*keys, *(each for each, _, _ in outputs)]
        self._outputs = outputs
        self.state = KeyedState(outputs)
        self._firsts = FirstOfKeys()

    @property
    def reads_times(self) -> bool:
        return any(isinstance(each, FirstOrLast) and each.reads_times for _, _, each in self._outputs)

    def bring(self, batch: Batch, failed: Failed) -> None:
        for piece in _pieces(batch):
            self._brought(piece)

    def each(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        for piece in _pieces(batch):
            # Nothing of a piece is held while the next one is made: its memory is used again.
            emit(Batch(self._running(piece)))

    def latest(self, batch: Batch, failed: Failed, emit: Emit) -> None:
        taken = [self._brought(piece) for piece in _pieces(batch)]
        slots = np.concatenate(taken) if len(taken) > 1 else taken[0]
        rows = self._firsts.of(slots, len(self.state))
        chosen = slots.take(rows)
        keys = [take(column, rows) for column in self._keys_of(batch.payload)]
        emit(Batch(self._made([*keys, *(aggregate.at(chosen) for _, _, aggregate in self._outputs)])))

    def all(self, emit: Emit) -> None:
        for _, keys, values in self.state.columns():
            emit(Batch(self._made([*keys, *values])))

    def _keys_of(self, columns: pa.RecordBatch) -> list[pa.Array]:
        return [columns.column(name) for name in self._keys]

    def _brought(self, piece: Batch) -> Vector:
        """The slots of the records' keys."""
        slots = self.state.take_columns(self._keys_of(piece.payload))
        for _, column, aggregate in self._outputs:
            aggregate.update(slots, input_of(piece.payload, column, aggregate, piece.times))
        return slots

    def _running(self, piece: Batch) -> pa.RecordBatch:
        """The keys, and the aggregates after each record."""
        columns, times = piece.payload, piece.times
        keys = self._keys_of(columns)
        slots = self.state.take_columns(keys)
        values = [
            each.running(slots, input_of(columns, column, each, times)) for _, column, each in self._outputs
        ]
        return self._made([*keys, *values])

    def _made(self, columns: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(columns, names=self._names)


def count_by_key(keys: Sequence[str], name: str = "count") -> Aggregation:
    """The number of rows of each key, in a column of that name (int64)."""
    return Aggregation(keys, [(name, keys[0], RowCount())], "count")


def _pieces(batch: Batch) -> Iterator[Batch]:
    """Pieces that stay in the processor's cache."""
    count = batch.payload.num_rows
    for begin, rows in pieces_of(count):
        yield batch if rows == count else batch.slice(begin, begin + rows)
