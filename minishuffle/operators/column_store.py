"""Aggregates of columns by the slot of a key, or of a namespace and key: no Python per row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import Outputs, merge_states, states_of
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.state_parts import ORDER, StatePart, by_columns, cut, key_columns_of

__all__ = ["ColumnStore", "Columns", "Vector"]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Columns: TypeAlias = "tuple[Vector | None, list[pa.Array], list[pa.Array]]"
"""Namespaces (None: there are none), keys and aggregates of some slots."""

_SPARE_SLOTS: Final = 4096
"""So many slots of namespaces that have gone are not worth making the state smaller."""
SLICE_SLOTS: Final = 16_384
"""Slots that are written between two batches, at least: in 0.3 ms, or in 2 if all were copied before."""
COPIED_ROWS_MAX: Final = 262_144
"""Copies of so many slots are not put together with others: that would take longer than 5 ms."""
_NAMESPACE: Final = "namespace"


class ColumnStore:
    """Slots of keys, either all with a namespace (int64) or none.

    A namespace that was taken out is a new one if it comes again. Its slots stay until most are such, or
    until it comes again; then the others are numbered anew.

    Args:
        outputs: (name, input column, aggregate); the aggregates belong to the store.
    """

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._index = KeyIndex()
        self._size = 0
        """How many slots there are."""
        self._slots: dict[int, list[Vector]] = {}
        """By namespace its slots, ascending; in the order in which namespaces first came."""
        self._is_plain = False
        """There are keys, and no namespaces."""
        self._arrived: list[int] = []
        """Namespaces that have come since :meth:`arrived` was last called."""
        self._gone: set[int] = set()
        """Namespaces that have gone, and still have slots."""
        self._latest_gone = 0
        """The greatest of them."""
        self._spare = 0
        """How many these are."""
        self._frozen: _FrozenSlots | None = None
        """What is being written while the state goes on."""

    def __len__(self) -> int:
        return self._size - self._spare

    @property
    def namespaces(self) -> Iterable[int | None]:
        return (None,) if self._is_plain else self._slots

    def take(self, keys: Sequence[pa.Array], namespaces: Vector | None = None) -> Vector:
        """The slot of each record's key (and namespace), up to which the aggregates have room.

        Raises: as ``KeyIndex.lookup``.
        """
        if self._gone and namespaces is not None and self._must_compact(namespaces):
            if self._frozen is not None:
                self._frozen.write_all()
            self._compact()
        known = self._size
        slots = self._index.lookup([*keys] if namespaces is None else [pa.array(namespaces), *keys])
        size = self._size = len(self._index)
        for _, _, aggregate in self._outputs:
            aggregate.grow(size)
        if self._frozen is not None:
            self._frozen.keep(slots)
        if size == known:
            return slots
        if namespaces is None:
            self._is_plain = True
            return slots
        owners = np.empty(size - known, np.int64)
        is_new = slots >= known
        owners[slots[is_new] - known] = namespaces[is_new]
        order = np.argsort(owners, kind="stable")
        found, firsts = np.unique(owners[order], return_index=True)
        groups = np.split(order + known, firsts[1:])
        # In the order in which they first came.
        for place in np.argsort([group[0] for group in groups]).tolist():
            namespace = int(found[place])
            if namespace not in self._slots:
                self._slots[namespace] = []
                self._arrived.append(namespace)
            self._slots[namespace].append(groups[place])
        return slots

    def _must_compact(self, namespaces: Vector) -> bool:
        if self._spare > max(_SPARE_SLOTS, self._size // 2):
            return True
        # As a rule only windows that are later than all that have fired come.
        if namespaces.min() > self._latest_gone:
            return False
        return bool(np.isin(namespaces, list(self._gone)).any())

    def _compact(self) -> None:
        live = np.sort(self.slots_of(self._slots))
        index = KeyIndex()
        index.lookup(self._index.keys(live))
        self._index, self._size, self._spare, self._gone = index, len(index), 0, set()
        for _, _, aggregate in self._outputs:
            aggregate.keep(live)
        for namespace, groups in self._slots.items():
            self._slots[namespace] = [np.searchsorted(live, group) for group in groups]

    def arrived(self) -> list[int]:
        """The namespaces that have come since this was last called, in that order."""
        found, self._arrived = self._arrived, []
        return found

    def slots_of(self, namespaces: Iterable[int]) -> Vector:
        """The slots of these namespaces, in the order of iteration."""
        groups = [group for namespace in namespaces for group in self._slots.get(namespace, ())]
        return np.concatenate(groups) if groups else np.zeros(0, np.int64)

    def _all_slots(self) -> Vector:
        """In the order of iteration."""
        return np.arange(self._size) if self._is_plain else self.slots_of(self._slots)

    def _some_slots(self, most: int) -> Iterator[Vector]:
        """The same as of now, so many at a time."""
        size = self._size
        if self._is_plain:
            return (np.arange(first, min(first + most, size)) for first in range(0, size, most))
        slots = self._all_slots()
        return (slots[first : first + most] for first in range(0, len(slots), most))

    # --- reading ---------------------------------------------------------------------------------------

    def columns(self) -> Iterator[Columns]:
        """All that there is, as many slots at a time as make a batch; in the order in which namespaces, and
        keys in them, first came. RuntimeError if slots are numbered anew before all is read."""
        if not self._is_plain:
            return self.at(self.slots_of(self._slots))
        return self._plain_columns()

    def _plain_columns(self) -> Iterator[Columns]:
        keys, size = self._index.keys(), self._size
        for first in range(0, size, BATCH_ROWS_MAX):
            some = slice(first, min(first + BATCH_ROWS_MAX, size))
            values = [aggregate.at(some) for _, _, aggregate in self._outputs]
            yield None, [column.slice(first, some.stop - first) for column in keys], values

    def pop(self, namespaces: Sequence[int]) -> Iterator[Columns]:
        """Let go of these namespaces, and give what :meth:`columns` gives of them."""
        slots = self.slots_of(namespaces)
        if gone := [namespace for namespace in namespaces if self._slots.pop(namespace, None)]:
            latest = max(gone)
            self._latest_gone = max(latest, self._latest_gone) if self._gone else latest
            self._gone.update(gone)
        self._spare += len(slots)
        return self.at(slots)

    def at(self, slots: Vector) -> Iterator[Columns]:
        """What :meth:`columns` gives of these slots, before the next batch is taken."""
        return self._pieces(slots, self._index)

    def _pieces(self, slots: Vector, index: KeyIndex) -> Iterator[Columns]:
        for first in range(0, len(slots), BATCH_ROWS_MAX):
            if self._index is not index:
                raise RuntimeError("keyed state has changed while it was read")
            some = slots[first : first + BATCH_ROWS_MAX]
            namespaces, keys = self._keys_at(some)
            yield namespaces, keys, [aggregate.at(some) for _, _, aggregate in self._outputs]

    def _keys_at(self, slots: Vector) -> tuple[Vector | None, list[pa.Array]]:
        keys = self._index.keys(slots)
        return (None, keys) if self._is_plain else (keys[0].to_numpy(), keys[1:])

    # --- parts -----------------------------------------------------------------------------------------

    def write(self, name: str, number: int, *, frozen: bool = False) -> Iterator[StatePart]:
        """Parts of that name; the numbers of keys in the order of iteration begin with ``number``.

        Args:
            frozen: the parts, which are shorter, are made one by one while the state goes on. What an earlier
                call has yet to make is made now.
        """
        if not frozen or any(aggregate.reads_all for _, _, aggregate in self._outputs):
            slots = self._some_slots(BATCH_ROWS_MAX)
            parts = self._write(name, number, slots, partial(states_of, self._outputs))
            return iter(list(parts)) if frozen else parts
        if self._frozen is not None:
            self._frozen.write_all()
        make = partial(self._write, name, number, self._some_slots(SLICE_SLOTS))
        held = self._frozen = _FrozenSlots(self._outputs, self._size, make)
        return self._frozen_parts(held)

    def _frozen_parts(self, frozen: _FrozenSlots) -> Iterator[StatePart]:
        yield from frozen
        if self._frozen is frozen:
            self._frozen = None

    def _write(
        self,
        name: str,
        number: int,
        slots: Iterable[Vector],
        states: Callable[[Vector], dict[str, pa.Array]],
    ) -> Iterator[StatePart]:
        for some in slots:
            namespaces, keys = self._keys_at(some)
            columns = {ORDER: pa.array(np.arange(number, number + len(some)))}
            number += len(some)
            if namespaces is not None:
                columns[_NAMESPACE] = pa.array(namespaces)
            yield from cut(by_columns(name, keys, columns | states(some)))

    def read(self, part: StatePart) -> None:
        """Go on with a part; those of one subtask come in order."""
        names = part.batch.schema.names
        namespaces = part.batch[_NAMESPACE].to_numpy() if _NAMESPACE in names else None
        slots = self.take(key_columns_of(part), namespaces)
        merge_states(self._outputs, slots, self._size, part.batch)


class _FrozenSlots:
    """The states of slots as of one moment, read bit by bit while the aggregates go on: those of slots that
    change are copied before, see :meth:`keep`. Iterated once.

    Args:
        make: gives parts, with states of slots as it is given them.
    """

    def __init__(
        self,
        outputs: Outputs,
        size: int,
        make: Callable[[Callable[[Vector], dict[str, pa.Array]]], Iterator[StatePart]],
    ) -> None:
        self._outputs = outputs
        self._place = np.zeros(size, np.int32)
        """By slot the number of its copy, from 1; 0: there is none; -1: it was read."""
        self._copies: list[pa.Table] = []
        self._ends = np.zeros(0, np.int64)
        """The number of copies up to the end of each of ``_copies``."""
        self._ready: deque[StatePart] = deque()
        self._parts = make(self._states)
        """What is yet to be made."""

    def __iter__(self) -> Iterator[StatePart]:
        while True:
            if self._ready:
                yield self._ready.popleft()
            elif (part := next(self._parts, None)) is not None:
                yield part
            else:
                return

    def write_all(self) -> None:
        """Slots are about to be numbered anew."""
        self._ready.extend(self._parts)
        self._place = np.zeros(0, np.int32)

    def keep(self, slots: Vector) -> None:
        """The states of these slots may change from now on."""
        own = slots[slots < len(self._place)]
        own = own[self._place[own] == 0]
        if not len(own):
            return
        places = np.arange(1, len(own) + 1)
        self._place[own] = places
        own = own[self._place[own] == places]  # each once
        end = self._ends[-1] if len(self._ends) else 0
        self._place[own] = np.arange(end + 1, end + 1 + len(own))
        self._ends = np.append(self._ends, end + len(own))
        self._copies.append(pa.table(states_of(self._outputs, own)))
        while len(self._copies) > 1 and self._are_short(*self._copies[-2:]):
            both = pa.concat_tables(self._copies[-2:], promote_options="permissive").combine_chunks()
            self._copies[-2:], self._ends = [both], np.delete(self._ends, -2)

    def _are_short(self, first: pa.Table, second: pa.Table) -> bool:
        """Whether these copies are better read as one: there are fewer then, and each is moved few times."""
        rows, more = int(first.num_rows), int(second.num_rows)
        return rows < 2 * more and rows + more <= COPIED_ROWS_MAX

    def _states(self, slots: Vector) -> dict[str, pa.Array]:
        """What :func:`states_of` gave of these slots at that moment. Each is read once."""
        places = self._place[slots]
        self._place[slots] = -1
        as_they_are = np.flatnonzero(places == 0)
        if len(as_they_are) == len(slots):
            return states_of(self._outputs, slots)
        tables = [pa.table(states_of(self._outputs, slots[as_they_are]))]
        order = np.argsort(places, kind="stable")  # Those without a copy come first.
        numbers, begin = places[order[len(as_they_are) :]].astype(np.int64) - 1, 0
        cuts = [0, *np.searchsorted(numbers, self._ends).tolist()]
        for (first, last), copies, end in zip(pairwise(cuts), self._copies, self._ends.tolist(), strict=True):
            if first < last:
                tables.append(copies.take(pa.array(numbers[first:last] - begin)))
            begin = end
        # An aggregate may have gone over to a wider type meanwhile.
        table = pa.concat_tables(tables, promote_options="permissive")
        ordered = table.take(pa.array(np.argsort(order))).combine_chunks()
        return {name: ordered[name].chunk(0) for name in ordered.column_names}
