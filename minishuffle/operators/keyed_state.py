"""Keyed state: one value for each key, or for each key in each namespace. (Flink: ``KeyedStateBackend``.)

A namespace is the start of a window, in microseconds, or None. Keys are compared in their canonical form
(``exchange.keys``) and shown as the first record that gave them a value brought them. Iteration is in the
order in which namespaces, and keys in them, first came.

:class:`KeyedState` has three stores, and no operator knows which one holds what:

* objects: a dict by canonical key, while there are few keys or batches are short (``row_store``);
* packed: keys in an index, values in a vector of floats, integers or objects, for many keys of one type in
  long batches (``row_store``);
* slots: vectors of aggregates, for keys that are columns (``column_store``).

What is no value of a key is in a ``TaskState``, which is written and read in the same way.

=======================  =======  ====================  ======================================================
operator                 payload  store                 what it writes
=======================  =======  ====================  ======================================================
reduce, fold             rows     objects, packed       values: numbers, or packed objects
count                    rows     objects; slots        values: numbers
count, aggregate         columns  slots                 columns of the aggregates
distinct                 columns  slots                 keys alone
top_n                    columns  TaskState             its rows, by key
process                  rows     objects; timers, age  values: dicts; with ttl when touched; when timers are
                                                        due
window fold, reduce,     rows     objects, packed       values by start of window; how many panes were shown,
count                                                   and which values were not
window aggregate, count  columns  slots                 columns by start of window; the same of panes
session, count_window    rows     objects; TaskState    key, first, last, row count, value; rows that wait
session, count_window    columns  TaskState             first, last, row count, aggregates; rows that wait
interval join            both     slots; TaskState      both sides' rows by key, with time, and which matched
as-of join               columns  TaskState             both sides' rows by key, with time
broadcast join           both     TaskState             the small side, whole, once for all subtasks
event_time               both     TaskState             the greatest time of each split, for all subtasks
map_async                rows     TaskState             rows whose call has not ended: none behind a barrier
sinks                    both     TaskState             the open file, numbers of results, for one subtask
all others               both     none                  nothing
=======================  =======  ====================  ======================================================

Joins number keys in slots of their own (``key_slots``), by which keys of two sides are compared.
``map_async`` and sinks write nothing so far. ``top_n`` numbers keys in an index of its own.

What an operator emits, and in which order, depends on its state and its input alone: not on the store that
holds the state, on when it grew or was made smaller, on whether it was written and read back, or on the hash
seed of the process. So no order is that of a set, or of a dict in which entries come or go otherwise than by
the input; what is due at one time goes by a number or a key that is in the state.

Of the input the order of its rows counts, over all channels together, and not how they are cut into batches;
that counts for values that go out once a batch, for combining, for functions of the user that take a batch,
for the order of what a batch leads to in left, right, full and semi joins, and for when watermarks go out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, repeat
from operator import itemgetter
from types import NoneType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.exchange.keys import canonical_rows
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import Outputs
from minishuffle.operators.column_store import Columns, ColumnStore, Vector
from minishuffle.operators.key_timers import KeyTimers
from minishuffle.operators.row_store import ABSENT, FrozenRows, RowStore
from minishuffle.operators.state_parts import (
    ORDER,
    SLICE_ROWS,
    StatePart,
    as_column,
    by_rows,
    chunks,
    from_column,
    in_order,
    keys_of,
)

__all__ = ["KeyedState"]

Namespace: TypeAlias = "int | None"
"""The start of a window, in microseconds; None for values that are in none."""

_PLAIN: Final = frozenset({int, str, bytes, bool, NoneType})
"""Keys of these types are canonical to a dict as they are; their types are cheaper to ask for than forms."""


class KeyedState:
    """Values by namespace and key, brought forward a batch at a time.

    For rows: :meth:`take` the values of a batch's keys, set each record's new one, :meth:`put` them. For
    columns: :meth:`take_columns`, and bring the aggregates forward by slot.

    Args:
        outputs: (name, input column, aggregate) of keys that are columns.
        timers: of keys (canonical, without a namespace), by the name of their clock. A key with a timer has
            a value.
        ages: whether it is known when each key was last touched, see :meth:`touch`.
        packs: see ``RowStore``.
        name: of its parts, among those of an operator that has several states.
    """

    def __init__(
        self,
        outputs: Outputs | None = None,
        *,
        timers: Mapping[str, KeyTimers] | None = None,
        ages: bool = False,
        packs: bool = True,
        name: str = "values",
    ) -> None:
        self.timers = timers or {}
        self._name = name
        self._columns = ColumnStore(outputs or [])
        self._packs = packs
        self._stores: dict[Namespace, RowStore] = {}
        self._last: Sequence[tuple[RowStore, list[int] | None]] = ()
        """The packed stores of the last batch, and which of its records are of each; None: all."""
        self._counted: dict[Namespace, int] = {}
        """How many keys of each namespace are in ``_total``."""
        self._total = 0
        self._arrived: list[Namespace] = []
        """Namespaces of rows that have come since :meth:`arrived` was last called."""
        self._moved: set[Namespace] = set()
        """Namespaces that may have other keys than were counted."""
        self._touched: dict[Any, float] | None = {} if ages else None
        """When each canonical key was touched, those that were not for longest first."""
        self._frozen: dict[Namespace, FrozenRows] = {}
        """By namespace, what is being written while the state goes on."""

    def __len__(self) -> int:
        """How many values there are, in all namespaces."""
        if self._moved:
            self._count_moved()
        return self._total + len(self._columns)

    def _count_moved(self) -> None:
        for namespace in self._moved:
            count = len(self._stores[namespace])
            self._total += count - self._counted.get(namespace, 0)
            self._counted[namespace] = count
        self._moved.clear()

    def __contains__(self, namespace: Namespace) -> bool:
        return namespace in self._stores or namespace in self._columns.namespaces

    def __iter__(self) -> Iterator[Namespace]:
        """The namespaces, in the order in which they first came."""
        return chain(self._stores, self._columns.namespaces)

    def arrived(self) -> list[Namespace]:
        """The namespaces that have come since this was last called, in that order; but not None for keys that
        are columns."""
        found, self._arrived = [*self._arrived, *self._columns.arrived()], []
        return found

    # --- a batch of rows -------------------------------------------------------------------------------

    def take(self, keys: list[Any], namespace: Namespace = None) -> tuple[Any, Any, list[Any]]:
        """The values of a batch's keys, at least one: ``held``, ``places`` and the canonical ``forms``.

        ``held[place]`` is the value of the key at the same position of ``keys``, ``ABSENT`` if it has none,
        and is to be set to the new one, record after record; then :meth:`put` is called.

        Raises:
            UsageError: see ``exchange.keys.canonical``.
        """
        forms = keys if _PLAIN.issuperset(map(type, keys)) else canonical_rows(keys)
        store = self._store(namespace)
        if forms is not keys:
            store.remember(keys, forms)
        held, places = store.take(forms)
        self._keep(namespace, forms, held, places)
        self._last = () if places is keys else ((store, None),)
        return held, places, forms

    def take_each(
        self, keys: list[Any], namespaces: list[int]
    ) -> tuple[Iterable[Any], Iterable[Any], list[Any]]:
        """As :meth:`take` where each record has a namespace of its own: there is one ``held`` for each."""
        first = namespaces[0]
        if namespaces.count(first) == len(namespaces):
            held, places, forms = self.take(keys, first)
            return repeat(held), places, forms
        forms = canonical_rows(keys)
        stores = {namespace: self._store(namespace) for namespace in dict.fromkeys(namespaces)}
        if forms is keys and not self._frozen:
            tables = {namespace: store.table for namespace, store in stores.items()}
            if None not in tables.values():
                self._last = ()
                return map(tables.__getitem__, namespaces), forms, forms
        return *self._taken_apart(keys, forms, namespaces, stores), forms

    def _taken_apart(
        self, keys: list[Any], forms: list[Any], namespaces: list[int], stores: dict[int, RowStore]
    ) -> tuple[list[Any], list[Any]]:
        rows: dict[int, list[int]] = {namespace: [] for namespace in stores}
        for row, namespace in enumerate(namespaces):
            rows[namespace].append(row)
        tables, places = [None] * len(keys), [None] * len(keys)
        last: list[tuple[RowStore, list[int] | None]] = []
        for namespace, mine in rows.items():
            store, own = stores[namespace], [forms[row] for row in mine]
            if forms is not keys:
                store.remember([keys[row] for row in mine], own)
            held, found = store.take(own)
            self._keep(namespace, own, held, found)
            for row, place in zip(mine, found, strict=True):
                tables[row], places[row] = held, place
            if found is not own or forms is not keys:
                last.append((store, mine))
        self._last = last
        return tables, places

    def put(self, values: list[Any] | None, dropped: Collection[int] = frozenset()) -> None:
        """The values after each record of the last batch; None if some record had none, or nobody knows.

        Args:
            dropped: numbers of records that had none, and left their key's value as it was.
        """
        for store, rows in self._last:
            if rows is None:
                store.put(values, dropped)
            else:
                mine = values if values is None else [values[row] for row in rows]
                store.put(
                    mine, [number for number, row in enumerate(rows) if row in dropped] if dropped else ()
                )

    def _store(self, namespace: Namespace) -> RowStore:
        store = self._stores.get(namespace)
        if store is None:
            store = self._stores[namespace] = RowStore(packs=self._packs)
            self._arrived.append(namespace)
        self._moved.add(namespace)
        return store

    def _keep(self, namespace: Namespace, forms: list[Any], held: Any, places: Iterable[Any]) -> None:
        """Values that a batch may change are written as they are now."""
        if namespace in self._frozen:
            self._frozen[namespace].keep(forms, held, places)

    def _leave(self, namespace: Namespace, form: Any, value: Any) -> None:
        """A key's value goes; ABSENT: it has none."""
        if value is not ABSENT and namespace in self._frozen:
            self._frozen[namespace].leave(form, value)

    # --- what there is of rows -------------------------------------------------------------------------

    def items(self, namespace: Namespace = None) -> Iterator[tuple[Any, Any]]:
        """Keys, as they are shown, and values of a namespace, in the order in which they first came."""
        store = self._stores.get(namespace)
        return iter(()) if store is None else store.items()

    def pairs(self, forms: list[Any], namespace: Namespace = None) -> list[tuple[Any, Any]]:
        """What :meth:`items` gives of some canonical keys, at least one, all of which have a value."""
        return self._stores[namespace].pairs(forms)

    def shown(self, forms: Iterable[Any], namespace: Namespace = None) -> Iterable[Any]:
        """Canonical keys of a namespace, as a batch brought them, as they are shown."""
        store = self._stores.get(namespace)
        return forms if store is None else store.shown(forms)

    def held(self, keys: list[Any]) -> tuple[Any, list[Any]]:
        """The values of all keys without a namespace, by canonical key, ``ABSENT`` for one that has none, and
        the canonical forms of ``keys``. For a state that does not pack, whose values are changed in place and
        begin with :meth:`begin`.

        Raises:
            UsageError: see ``exchange.keys.canonical``.
        """
        forms = keys if _PLAIN.issuperset(map(type, keys)) else canonical_rows(keys)
        table = self._store(None).table
        self._keep(None, forms, table, forms)
        return table, forms

    def begin(self, key: Any, form: Any, value: Any) -> None:
        """Give a canonical key without a namespace its first value, or again a first one; it is shown as
        ``key``."""
        store = self._store(None)
        self._leave(None, form, store.table[form])
        store.begin(key, form, value)

    def key(self, form: Any) -> Any:
        """A canonical key that came by :meth:`begin`, or was read, as it is shown."""
        return self._stores[None].key(form)

    def pop(self, namespace: Namespace = None) -> Iterator[tuple[Any, Any]]:
        """Let go of a namespace, and give what :meth:`items` gives of it."""
        store = self._stores.pop(namespace, None)
        if store is None:
            return iter(())
        self._moved.discard(namespace)
        self._total -= self._counted.pop(namespace, 0)
        if (frozen := self._frozen.pop(namespace, None)) is not None:
            frozen.keep_all()
        return store.items()

    def discard(self, form: Any, namespace: Namespace = None) -> None:
        """Let go of a canonical key's value, if it has one. Its timers are not deleted."""
        if namespace in self._stores:
            self._leave(namespace, form, self._store(namespace).discard(form))
        if self._touched is not None:
            self._touched.pop(form, None)

    # --- a batch of columns ----------------------------------------------------------------------------

    def take_columns(self, keys: Sequence[pa.Array], namespaces: Vector | None = None) -> Vector:
        """The slot of each record's key (and namespace), by which the aggregates are brought forward; they
        have room for it.

        Raises: as ``KeyIndex.lookup``.
        """
        return self._columns.take(keys, namespaces)

    def columns(self) -> Iterator[Columns]:
        """Namespaces (None: there are none), keys and aggregates, as many at a time as make a batch, in the
        order in which namespaces, and keys in them, first came."""
        return self._columns.columns()

    def slots_of(self, namespaces: Iterable[int]) -> Vector:
        """The slots of these namespaces, in the order of iteration; those of a batch that is taken later may
        be others."""
        return self._columns.slots_of(namespaces)

    def columns_at(self, slots: Vector) -> Iterator[Columns]:
        """What :meth:`columns` gives of these slots, before the next batch is taken."""
        return self._columns.at(slots)

    def pop_columns(self, namespaces: Sequence[int]) -> Iterator[Columns]:
        """Let go of these namespaces, and give what :meth:`columns` gives of them, before the next batch is
        taken. A namespace that comes again is a new one."""
        return self._columns.pop(namespaces)

    # --- ages ------------------------------------------------------------------------------------------

    def touch(self, form: Any, now: float) -> None:
        """A canonical key without a namespace is in use at ``now``, which is not before any given earlier."""
        assert self._touched is not None
        self._touched.pop(form, None)
        self._touched[form] = now

    def is_older(self, form: Any, time: float) -> bool:
        """Whether a canonical key was last touched at that time or before."""
        assert self._touched is not None
        return self._touched.get(form, math.inf) <= time

    def oldest(self, most: int) -> list[tuple[Any, float]]:
        """Canonical keys that were not touched for longest, and when they were; at most so many."""
        assert self._touched is not None
        return list(islice(self._touched.items(), most))

    # --- parts -----------------------------------------------------------------------------------------

    def write(self, stood: float = 0.0, *, frozen: bool = False) -> Iterator[StatePart]:
        """All of it as of now, as parts in which each row has the hash of its key and its number in the order
        of iteration.

        Args:
            stood: seconds to add to the times at which keys were touched.
            frozen: the parts, which are shorter, are made one by one while the state goes on. Rows of which
                an earlier call has yet to make parts are copied for it, and its parts of columns are made.

        Raises:
            UnserializableRecord: (with each part) an exchange would not take a value, or it would come back
                as another type.
        """
        stores = {namespace: store.freeze() for namespace, store in self._stores.items()}
        touched = None if self._touched is None else self._touched.copy()
        count = sum(map(len, stores.values()))
        timers = list(self._write_timers(count))
        columns = self._columns.write(
            self._columns_name, count + sum(part.batch.num_rows for part in timers), frozen=frozen
        )
        rows = self._write_rows(stores, SLICE_ROWS if frozen else BATCH_ROWS_MAX, touched, stood)
        if frozen:
            for earlier in self._frozen.values():
                earlier.keep_all()
            self._frozen = dict(stores)
            rows = self._write_frozen(rows, self._frozen)
        return chain(rows, timers, columns)

    def _write_rows(
        self, stores: dict[Namespace, FrozenRows], most: int, touched: dict[Any, float] | None, stood: float
    ) -> Iterator[StatePart]:
        number = 0
        for namespaces, keys, values in _entries(stores, most):
            columns = {"namespace": pa.array(namespaces, pa.int64()), "value": as_column(values, alike=True)}
            if touched is not None:
                columns["touched"] = pa.array([touched[form] + stood for form in canonical_rows(keys)])
            yield by_rows(self._name, keys, **_numbers(number, keys), **columns)
            number += len(keys)

    def _write_frozen(
        self, rows: Iterator[StatePart], frozen: dict[Namespace, FrozenRows]
    ) -> Iterator[StatePart]:
        yield from rows
        if self._frozen is frozen:
            self._frozen = {}

    def _write_timers(self, number: int) -> Iterator[StatePart]:
        for clock, timers in self.timers.items():
            for set_ones in chunks(timers):
                keys = list(self.shown(form for form, _ in set_ones))
                times = pa.array([time for _, time in set_ones])
                yield by_rows(self._timers_name(clock), keys, **_numbers(number, keys), at=times)
                number += len(keys)

    def read(self, parts: Iterable[StatePart], stood: float = 0.0, now: float = 0.0) -> None:
        """Go on with the parts of its name that :meth:`write` gave, in an empty state. What one subtask has
        written is iterated in the order that it had there.

        Args:
            stood: seconds to take off the times at which keys were touched.
            now: when keys count as touched for which no time was written.

        Raises:
            UsageError: the parts are of another version.
        """
        clocks = {self._timers_name(clock): timers for clock, timers in self.timers.items()}
        names = {self._name, self._columns_name, *clocks}
        for part in in_order(part for part in parts if part.name in names):
            if part.name == self._columns_name:
                self._columns.read(part)
            elif part.name == self._name:
                self._read_rows(part, stood, now)
            else:
                for form, time in zip(
                    canonical_rows(keys_of(part)), part.batch["at"].to_pylist(), strict=True
                ):
                    clocks[part.name].set(form, time)
        if self._touched is not None:
            self._touched = dict(sorted(self._touched.items(), key=itemgetter(1)))

    @property
    def _columns_name(self) -> str:
        return f"{self._name} of columns"

    def _timers_name(self, clock: str) -> str:
        return f"{self._name} due by {clock}"

    def _read_rows(self, part: StatePart, stood: float, now: float) -> None:
        keys = keys_of(part)
        forms, values = canonical_rows(keys), from_column(part.batch["value"])
        at = 0
        for namespace, same in groupby(part.batch["namespace"].to_pylist()):
            some = slice(at, at := at + len(list(same)))
            own = forms[some]
            self._store(namespace).restore(own if forms is keys else keys[some], own, values[some])
        if self._touched is not None:
            has_times = "touched" in part.batch.schema.names
            times = part.batch["touched"].to_numpy() - stood if has_times else np.full(len(forms), now)
            self._touched.update(zip(forms, times.tolist(), strict=True))


def _entries(
    stores: dict[Namespace, FrozenRows], most: int
) -> Iterator[tuple[list[Namespace], list[Any], list[Any]]]:
    """Namespaces, keys and values, so many at a time; no object is made for each."""
    namespaces: list[Namespace] = []
    keys: list[Any] = []
    values: list[Any] = []
    for namespace, store in stores.items():
        first = 0
        while first < len(store):
            last = min(len(store), first + most - len(keys))
            some, held = store.items(first, last)
            namespaces += repeat(namespace, len(some))
            keys += some
            values += held
            first = last
            if len(keys) == most:
                yield namespaces, keys, values
                namespaces, keys, values = [], [], []
    if keys:
        yield namespaces, keys, values


def _numbers(first: int, keys: list[Any]) -> dict[str, Vector]:
    return {ORDER: np.arange(first, first + len(keys))}
