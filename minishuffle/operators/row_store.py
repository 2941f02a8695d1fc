"""Values of Python by canonical key, in a dict or packed into vectors, whichever is faster for them.

A dict of str to float takes some 130 bytes a key, in four places of memory: with 50,000 keys in each of two
workers that leaves the processor's cache, and records then wait for memory (``bench keyby --format rows
--record event`` ran at 0.5 to 0.7 of the rate that it has with 1,000 keys). Packed, a key takes a third of
that, and a whole batch's values are fetched at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.exchange.keys import key_array
from minishuffle.exchange.rows import SCALARS
from minishuffle.operators.aggregate_states import grown
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.row_copies import copied

__all__ = ["ABSENT", "PACKED_KEYS_MIN", "PACKED_ROWS_MIN", "FrozenRows", "RowStore"]

ABSENT: Any = object()
"""The value of a key that has none, and of a record that was dropped."""
PACKED_KEYS_MIN: Final = 16_384
"""Fewer keys stay in a core's cache as a dict."""
PACKED_ROWS_MIN: Final = 512
"""Rows of the mean batch from which on vectors pay, with 50,000 keys: at 128 rows they take twice as long
as a dict, at 512 the same, at 4,096 half, since their operations cost alike for short batches and long."""
_LOOK_ALIKE: Final = frozenset({int, str, bytes, NoneType})
"""Equal keys look the same if they are of one of these types. Others (-0.0 and 0.0, or tuples) may not."""
_WHOLE_ROWS: Final = 65_536
"""Keys at a time in packing."""

_KEY_TYPES: Final = (pa.int64(), pa.large_string(), pa.large_binary(), pa.date32())
"""Columns whose values come back as the very keys that went in."""
_DTYPES: Final[dict[type, Any]] = {float: np.float64, int: np.int64, object: object}
"""How values of a type are kept; integers as objects if one is longer than 64 bits."""


_NOTHING: Final[tuple[list[Any], list[Any], dict[Any, Any]]] = ([], [], {})


class _Equal:
    """Is equal to a key, and keeps the object in a dict that it was found equal to."""

    __slots__ = ("_form", "found")

    def __init__(self, form: Any) -> None:
        self._form = self.found = form

    def __hash__(self) -> int:
        code: int = self._form.__hash__()
        return code

    def __eq__(self, other: object) -> bool:
        if other != self._form:
            return False
        self.found = other
        return True


class _Objects(dict[Any, Any]):
    """Gives ``ABSENT`` for a key that is not there."""

    __slots__ = ()

    def __missing__(self, key: Any) -> Any:
        return ABSENT

    def are_known(self, forms: list[Any]) -> list[bool]:
        """Which of these keys are there."""
        return list(map(self.__contains__, forms))

    def stored(self, form: Any) -> Any:
        """The key itself that is equal to this one: True, say, if 1 is asked for."""
        equal = _Equal(form)
        self.get(equal)
        return equal.found


class _Packed:
    """Keys in a :class:`KeyIndex`, values in a vector by the keys' slots."""

    def __init__(self, kind: type = object) -> None:
        self._index = KeyIndex()
        self._types: list[pa.DataType] = []
        self._tuples = False
        self._kind = kind
        """Type of the values: float, int, or object for any."""
        self._values = np.zeros(0, _DTYPES[kind])
        # The last batch's:
        self._known = 0
        """Keys that there were before it."""
        self._slots = np.empty(0, np.int64)
        self._held: list[Any] = []
        self._places: list[int] = []
        self._first = np.empty(0, np.int32)
        """By slot the first row that has it; anything for slots that the batch lacks."""

    def __len__(self) -> int:
        return len(self._index)

    def take(self, forms: list[Any]) -> tuple[list[Any], list[int]] | None:
        """As :meth:`RowStore.take`; None, and nothing changed, for keys that do not fit the others."""
        columns = self._columns(forms)
        if columns is None:
            return None
        self._known = known = len(self._index)
        self._slots = slots = self._index.lookup(columns)
        count = len(self._index)
        self._first = grown(self._first, count, 0)
        self._first[slots[::-1]] = np.arange(len(slots) - 1, -1, -1, dtype=np.int32)
        self._places = self._first.take(slots).tolist()
        self._values = grown(self._values, count, 0)
        self._held = self._values.take(slots).tolist()
        if count > known:
            for row in np.flatnonzero(slots >= known).tolist():
                self._held[row] = ABSENT
        return self._held, self._places

    def are_known(self, forms: list[Any]) -> list[bool] | None:
        """Which of these keys have a slot; None for keys that do not fit the others."""
        columns = self._columns(forms)
        if columns is None:
            return None
        known: list[bool] = (self._index.find(columns) >= 0).tolist()
        return known

    def _columns(self, forms: list[Any]) -> list[pa.Array] | None:
        tuples = type(forms[0]) is tuple
        if not tuples:
            columns = [key_array(forms)]
        elif set(map(type, forms)) == {tuple} and len(set(map(len, forms))) == 1:
            columns = [key_array(column) for column in zip(*forms, strict=True)]
        else:
            return None
        arrays = [column for column in columns if column is not None and column.type in _KEY_TYPES]
        if not arrays or len(arrays) < len(columns):
            return None
        types = [array.type for array in arrays]
        if not self._types:
            self._types, self._tuples = types, tuples
        return arrays if types == self._types and tuples == self._tuples else None

    def put(self, values: list[Any] | None) -> None:
        """As :meth:`RowStore.put`."""
        if values is None:
            values = [self._held[place] for place in self._places]
        if self._kind is not object and set(map(type, values)) != {self._kind}:
            self._widen()
        try:
            vector = np.fromiter(values, _DTYPES[self._kind], len(values))
        except OverflowError:
            self._widen()
            vector = np.fromiter(values, object, len(values))
        self._values[self._slots] = vector  # of equal slots the last assignment stays

    def _widen(self) -> None:
        """Go over to objects."""
        self._kind, self._values = object, self._values.astype(object)

    def slots_without(self, dropped: Collection[int]) -> Any:
        """The slots of the keys that have a value, in the order in which keys first had one; None: it is the
        order of all slots.

        Args:
            dropped: numbers of records of the last batch that gave their keys none.
        """
        slots = np.delete(self._slots, list(dropped))
        new = slots[slots >= self._known]
        new = new[np.sort(np.unique(new, return_index=True)[1])]
        if len(new) == len(self._index) - self._known and np.all(new[1:] > new[:-1]):
            return None
        return np.concatenate((np.arange(self._known), new))

    def items(self, slots: Any = None) -> Iterator[tuple[Any, Any]]:
        """As :meth:`RowStore.items`, with canonical keys; of some slots, or all."""
        values = self._values[: len(self._index)] if slots is None else self._values[slots]
        return zip(self.forms(slots), values.tolist(), strict=True)

    def forms(self, slots: Any = None) -> Iterator[Any]:
        """The canonical keys of these slots, or of all."""
        columns = list(map(pa.Array.to_pylist, self._index.keys(slots)))
        return zip(*columns, strict=True) if self._tuples else iter(columns[0])

    def freeze(self) -> tuple[Callable[[slice], list[Any]], Any]:
        """As :class:`FrozenRows` takes them: slots keep their keys."""
        values = self._values[: len(self._index)]
        return self._some_forms, values.tolist() if self._kind is object else values.copy()

    def _some_forms(self, some: slice) -> list[Any]:
        return list(self.forms(np.arange(some.start, some.stop)))


class FrozenRows:
    """Keys and values of a store as of one moment, read bit by bit while the store goes on.

    The keys and values that there are then are held by reference, which takes 10 ns for each. A value that
    can be changed in place is copied before somebody may: see :meth:`keep`.

    Args:
        forms: gives canonical keys by their numbers.
        values: a list, or a vector of numbers.
        shown: the keys to show for canonical keys, where these differ.
    """

    __slots__ = ("_forms", "_kept", "_shown", "_values")

    def __init__(self, forms: Callable[[slice], list[Any]], values: Any, shown: dict[Any, Any]) -> None:
        self._forms, self._values, self._shown = forms, values, shown
        self._kept: dict[Any, Any] = {}
        """By canonical key, values as they were."""

    def __len__(self) -> int:
        return len(self._values)

    def keep(self, forms: Iterable[Any], held: Any, places: Iterable[Any]) -> None:
        """The values of these canonical keys may be changed from now on; see :meth:`RowStore.take`."""
        if not isinstance(self._values, list):
            return
        kept = self._kept
        for form, place in zip(forms, places, strict=True):
            if form not in kept:
                value = held[place]
                kept[form] = value if type(value) in SCALARS else copied(value)

    def leave(self, form: Any, value: Any) -> None:
        """The key goes, with that value, and may come again with another."""
        self.keep([form], {form: value}, [form])

    def keep_all(self) -> None:
        """All values may be changed from now on."""
        if isinstance(self._values, list):
            self.keep(self._forms(slice(0, len(self))), self._values, range(len(self)))

    def items(self, first: int, last: int) -> tuple[list[Any], list[Any]]:
        """Keys, as they are shown, and values of those numbers, in the order in which keys first came."""
        some = slice(first, last)
        forms, values = self._forms(some), self._values[some]
        if not isinstance(values, list):
            values = values.tolist()
        if self._kept:
            values = list(map(self._kept.get, forms, values))
        return list(map(self._shown.get, forms, forms)) if self._shown else forms, values


class RowStore:
    """Values by canonical key (see ``exchange.keys``), brought forward a batch at a time.

    :meth:`take` gives what stands for the batch's values and where each record finds its own; :meth:`put`
    takes the values back. They come in the batch's order, so that of several records of one key the last
    one's value stays. A key is shown as the first record that gave it a value brought it.

    Args:
        packs: whether many values are packed; not worth it where a loop of C brings those of a dict forward.
    """

    __slots__ = ("_batches", "_brought", "_check_at", "_rows", "_shown", "_values")

    def __init__(self, *, packs: bool = True) -> None:
        self._values: _Objects | _Packed = _Objects()
        self._shown: dict[Any, Any] = {}
        """The key to show for a canonical key, where the two differ."""
        self._brought = _NOTHING
        """Keys, canonical keys, and those of them that were new, of the last batch until :meth:`put`; nothing
        if it was not given to :meth:`remember`."""
        self._check_at: float = PACKED_KEYS_MIN if packs else math.inf
        """Look again whether to pack at so many keys; inf: never."""
        self._batches = self._rows = 0
        """Since the last look."""

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._values)

    @property
    def is_packed(self) -> bool:
        return type(self._values) is _Packed

    @property
    def table(self) -> Any:
        """The ``held`` of any batch, in which the place of a record is its canonical key; None while packed.
        Keys that are shown in another form are to be given to :meth:`remember`."""
        return None if type(self._values) is _Packed else self._values

    def take(self, forms: list[Any]) -> tuple[Any, Any]:
        """``held`` and ``places``: ``held[place]`` is the value of the key at the same position of ``forms``
        (at least one), :data:`ABSENT` if it has none yet, and is to be set to the new one."""
        values = self._values
        if type(values) is _Packed:
            found = values.take(forms)
            if found is not None:
                return found
            values = self._unpacked()
        self._batches += 1
        self._rows += len(forms)
        if len(values) >= self._check_at:
            if self._rows < PACKED_ROWS_MIN * self._batches:
                self._check_at, self._batches, self._rows = 2 * len(values), 0, 0
            elif self.pack():
                return self.take(forms)
        return values, forms

    def pairs(self, forms: list[Any]) -> list[tuple[Any, Any]]:
        """What :meth:`items` gives of some canonical keys, at least one, all of which have a value."""
        values, shown = self._values, self._shown
        if isinstance(values, _Packed):
            found = values.take(forms)
            assert found is not None
            held, places = found
            return [(shown.get(form, form), held[place]) for form, place in zip(forms, places, strict=True)]
        return [(shown.get(form, values.stored(form)), values[form]) for form in forms]

    def put(self, values: list[Any] | None, dropped: Collection[int] = ()) -> None:
        """The values after each record of the last batch; None if not every record had one. Keys are in the
        order in which they first had a value, as in a dict: where ``dropped``, records that left their key's
        value as it was, make that another one than that of their slots, nothing is packed from then on."""
        packed = self._values
        if isinstance(packed, _Packed):
            packed.put(values)
            slots = packed.slots_without(dropped) if dropped else None
            if slots is not None:
                self._check_at = math.inf
                self._values = _Objects(packed.items(slots) if len(slots) else ())
        (keys, forms, new), self._brought = self._brought, _NOTHING
        if dropped and new:
            self._show_kept(keys, forms, new, set(dropped))

    def _show_kept(self, keys: list[Any], forms: list[Any], new: Collection[Any], dropped: set[int]) -> None:
        """Show the new keys of a batch as the first records brought them that were not dropped."""
        kept: dict[Any, Any] = {}
        for number, (key, form) in enumerate(zip(keys, forms, strict=True)):
            if number not in dropped:
                kept.setdefault(form, key)
        for form in new:
            self._shown.pop(form, None)
            if form in kept and kept[form] is not form:
                self._shown[form] = kept[form]

    def remember(self, keys: list[Any], forms: list[Any]) -> None:
        """Show new keys as these records brought them; called before they are taken."""
        known = self._values.are_known(forms)
        if known is None:
            known = self._unpacked().are_known(forms)
        new: dict[Any, Any] = {}
        for key, form, is_known in zip(keys, forms, known, strict=True):
            if not is_known:
                new.setdefault(form, key)
            elif key is not form and form not in self._shown:
                self._show_stored(form)
        self._shown.update((form, key) for form, key in new.items() if form is not key)
        self._brought = keys, forms, new

    def _show_stored(self, form: Any) -> None:
        """Show a key that is equal to its canonical form in a dict, and another object. None is packed."""
        if type(self._values) is _Objects:
            stored = self._values.stored(form)
            if type(stored) is not type(form):
                self._shown[form] = stored

    def shown(self, forms: Iterable[Any]) -> Iterable[Any]:
        """These canonical keys, as a batch brought them, as they are shown."""
        shown = self._shown
        return (shown.get(form, form) for form in forms) if shown else forms

    def begin(self, key: Any, form: Any, value: Any) -> None:
        """Give a canonical key that is not in a dict its value, and show it as this one."""
        assert isinstance(self._values, _Objects)
        self._values[form] = value
        if key is not form or type(key) not in _LOOK_ALIKE:
            self._shown[form] = key

    def key(self, form: Any) -> Any:
        """A canonical key that came by :meth:`begin` or :meth:`restore`, as it is shown."""
        if type(form) not in _LOOK_ALIKE and form not in self._shown:
            assert isinstance(self._values, _Objects)
            return self._values.stored(form)
        return self._shown.get(form, form)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Keys as they are shown, and values, in the order in which keys first came."""
        if not len(self._values):
            return iter(())
        pairs, shown = iter(self._values.items()), self._shown
        return ((shown.get(form, form), value) for form, value in pairs) if shown else pairs

    def freeze(self) -> FrozenRows:
        """What :meth:`items` gives now."""
        values = self._values
        if isinstance(values, _Packed) and len(values):
            return FrozenRows(*values.freeze(), self._shown.copy())
        forms, held = (list(values), list(values.values())) if isinstance(values, _Objects) else ([], [])
        return FrozenRows(forms.__getitem__, held, self._shown.copy())

    def discard(self, form: Any) -> Any:
        """Let go of a canonical key's value, and give it, :data:`ABSENT` if it has none; from then on nothing
        is packed."""
        found = self._unpacked().pop(form, ABSENT)
        if self._shown:
            self._shown.pop(form, None)
        return found

    def restore(self, keys: list[Any], forms: list[Any], values: list[Any]) -> None:
        """Add keys that are not there, before any batch was taken."""
        assert isinstance(self._values, _Objects)
        if forms is not keys:
            self.remember(keys, forms)
            self._brought = _NOTHING
        elif not _LOOK_ALIKE.issuperset(map(type, keys)):
            self._shown.update((key, key) for key in keys if type(key) not in _LOOK_ALIKE)
        self._values.update(zip(forms, values, strict=True))

    def pack(self) -> bool:
        """Go over to vectors, if the keys' types allow it; False if not, and then never again."""
        assert isinstance(self._values, _Objects)
        forms, values = list(self._values), list(self._values.values())
        kinds = set(map(type, values))
        packed = _Packed(kinds.pop() if len(kinds) == 1 and kinds <= _DTYPES.keys() else object)
        for begin in range(0, len(forms), _WHOLE_ROWS):
            if packed.take(forms[begin : begin + _WHOLE_ROWS]) is None:
                self._check_at = math.inf
                return False
            packed.put(values[begin : begin + _WHOLE_ROWS])
        self._values = packed
        return True

    def _unpacked(self) -> _Objects:
        """The values as objects, which they are from then on."""
        self._check_at = math.inf
        if isinstance(self._values, _Packed):
            self._values = _Objects(self._values.items() if len(self._values) else ())
        return self._values
