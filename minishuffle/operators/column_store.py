"""Aggregates of columns by the slot of a key, or of a namespace and key: no Python per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import Outputs, grown, merge_states, states_of
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.state_parts import ORDER, StatePart, by_columns, cut, key_columns_of

__all__ = ["ColumnStore", "Columns", "Vector"]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Columns: TypeAlias = "tuple[Vector | None, list[pa.Array], list[pa.Array]]"
"""Namespaces (None: there are none), keys and aggregates of some slots."""

_SPARE_SLOTS: Final = 4096
"""So many slots of namespaces that have gone are not worth making the state smaller."""
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
        self._marks = np.zeros(0, np.int64)
        """By slot the last mark before it was last touched."""

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
            self._compact()
        known = self._size
        slots = self._index.lookup([*keys] if namespaces is None else [pa.array(namespaces), *keys])
        size = self._size = len(self._index)
        for _, _, aggregate in self._outputs:
            aggregate.grow(size)
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
        self._marks = self._marks[live[live < len(self._marks)]]
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

    # --- what has changed ------------------------------------------------------------------------------

    def touch(self, slots: Vector, mark: int) -> None:
        self._marks = grown(self._marks, self._size, -1)
        self._marks[slots] = mark

    def touched_since(self, mark: int) -> Iterator[Columns]:
        """What :meth:`columns` gives of the slots that were touched at that mark or later."""
        live = self._all_slots()
        return self.at(live[grown(self._marks, self._size, -1)[live] >= mark])

    # --- parts -----------------------------------------------------------------------------------------

    def write(self, name: str, number: int) -> Iterator[StatePart]:
        """Parts of that name; the numbers of keys in the order of iteration begin with ``number``."""
        slots = self._all_slots()
        for first in range(0, len(slots), BATCH_ROWS_MAX):
            some = slots[first : first + BATCH_ROWS_MAX]
            namespaces, keys = self._keys_at(some)
            columns = {ORDER: pa.array(np.arange(number + first, number + first + len(some)))}
            if namespaces is not None:
                columns[_NAMESPACE] = pa.array(namespaces)
            yield from cut(by_columns(name, keys, columns | states_of(self._outputs, some)))

    def read(self, part: StatePart) -> None:
        """Go on with a part; those of one subtask come in order."""
        names = part.batch.schema.names
        namespaces = part.batch[_NAMESPACE].to_numpy() if _NAMESPACE in names else None
        slots = self.take(key_columns_of(part), namespaces)
        merge_states(self._outputs, slots, self._size, part.batch)
