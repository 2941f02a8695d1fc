"""One value for each key of rows, packed once there are many.

A dict of str to float takes some 130 bytes a key, in four places of memory: with 50,000 keys in each of
two workers that leaves the processor's cache, and records then wait for memory (``bench keyby --format
rows --record event`` ran at 0.5 to 0.7 of the rate that it has with 1,000 keys). Packed, a key takes a
third of that, in vectors, and a whole batch's are fetched at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.columns import grown
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.exchange.keys import key_array

__all__ = ["NOTHING", "PACKED_KEYS_MIN", "PACKED_ROWS_MIN", "KeyedValues"]

NOTHING: Any = object()
"""Stands for the value of a key that was never seen, and of a record that was dropped."""
PACKED_KEYS_MIN: Final = 16_384
"""Fewer keys stay in a core's cache as a dict."""
PACKED_ROWS_MIN: Final = 512
"""Rows of the mean batch from which on vectors pay, with 50,000 keys: at 128 rows they take twice as long
as a dict, at 512 the same, at 4,096 half, since their operations cost alike for short batches and long."""
_WHOLE_ROWS: Final = 65_536
"""Keys at a time in packing and unpacking."""

_KEY_TYPES: Final = (pa.int64(), pa.large_string(), pa.large_binary(), pa.date32())
"""Columns whose values come back as the very keys that went in."""
_DTYPES: Final[dict[type, Any]] = {float: np.float64, int: np.int64, object: object}
"""How values of a type are kept; integers as objects if one is longer than 64 bits."""


class _Missing(dict[Any, Any]):
    """Gives ``NOTHING`` for a key that is not there."""

    def __missing__(self, key: Any) -> Any:
        return NOTHING


class KeyedValues:
    """Values by canonical key (see ``exchange.keys``), brought forward a batch at a time.

    :meth:`take` gives what stands for the batch's values and where each record finds its own;
    :meth:`put` takes the values back. They come in the batch's order, so that of several records of
    one key the last one's value stays.
    """

    def __init__(self) -> None:
        self._dict: _Missing | None = _Missing()
        """None while packed."""
        self._packed = _PackedValues()
        self._check_at: float = PACKED_KEYS_MIN
        """Look again whether to pack at so many keys; inf: never."""
        self._batches = self._rows = 0
        """Since the last look."""

    def __len__(self) -> int:
        """How many keys there are; packed ones without a value among them."""
        return len(self._packed) if self._dict is None else len(self._dict)

    def take(self, keys: list[Any]) -> tuple[Any, Iterable[Any]]:
        """``held`` and ``places``: ``held[place]`` is the value of the key at the same position of
        ``keys``, :data:`NOTHING` if it has none yet, and is to be set to the new one."""
        if self._dict is None:
            found = self._packed.take(keys)
            if found is not None:
                return found
            self._dict = _Missing(self._packed.items())
            self._packed, self._check_at = _PackedValues(), math.inf
        self._batches += 1
        self._rows += len(keys)
        if len(self._dict) >= self._check_at and self._pack():
            return self.take(keys)
        return self._dict, keys

    def put(self, values: list[Any] | None) -> None:
        """The values after each record of the last batch; None if not every record had one."""
        if self._dict is None:
            self._packed.put(values)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Keys and values, in the order in which keys first came."""
        return self._packed.items() if self._dict is None else iter(self._dict.items())

    def _pack(self) -> bool:
        """Go over to vectors, if batches are long and the keys' types allow it; False if not."""
        assert self._dict is not None
        if self._rows < PACKED_ROWS_MIN * self._batches:
            self._check_at, self._batches, self._rows = 2 * len(self._dict), 0, 0
            return False
        keys, values = list(self._dict), list(self._dict.values())
        kinds = set(map(type, values))
        packed = _PackedValues(kinds.pop() if len(kinds) == 1 and kinds <= _DTYPES.keys() else object)
        for begin in range(0, len(keys), _WHOLE_ROWS):
            if packed.take(keys[begin : begin + _WHOLE_ROWS]) is None:
                self._check_at = math.inf
                return False
            packed.put(values[begin : begin + _WHOLE_ROWS])
        self._dict, self._packed = None, packed
        return True


class _PackedValues:
    """Keys in a :class:`KeyIndex`, values in a vector by the keys' slots."""

    def __init__(self, kind: type = object) -> None:
        self._index = KeyIndex()
        self._types: list[pa.DataType] = []
        self._tuples = False
        self._kind = kind
        """Type of the values: float, int, or object for any."""
        self._values = np.zeros(0, _DTYPES[kind])
        # The last batch's:
        self._slots = np.empty(0, np.int64)
        self._held: list[Any] = []
        self._places: list[int] = []
        self._first = np.empty(0, np.int32)
        """By slot the first row that has it; anything for slots that the batch lacks."""

    def __len__(self) -> int:
        return len(self._index)

    def take(self, keys: list[Any]) -> tuple[list[Any], list[int]] | None:
        """As :meth:`KeyedValues.take`; None, and nothing changed, for keys that do not fit the others."""
        columns = self._columns(keys)
        if columns is None:
            return None
        known = len(self._index)
        self._slots = slots = self._index.lookup(columns)
        count = len(self._index)
        self._first = grown(self._first, count, 0)
        self._first[slots[::-1]] = np.arange(len(slots) - 1, -1, -1, dtype=np.int32)
        self._places = self._first.take(slots).tolist()
        self._values = grown(self._values, count, 0)
        self._held = self._values.take(slots).tolist()
        if count > known:
            for row in np.flatnonzero(slots >= known).tolist():
                self._held[row] = NOTHING
        return self._held, self._places

    def _columns(self, keys: list[Any]) -> list[pa.Array] | None:
        tuples = type(keys[0]) is tuple
        if not tuples:
            columns = [key_array(keys)]
        elif set(map(type, keys)) == {tuple} and len(set(map(len, keys))) == 1:
            columns = [key_array(column) for column in zip(*keys, strict=True)]
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
        """As :meth:`KeyedValues.put`."""
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

    def items(self) -> Iterator[tuple[Any, Any]]:
        """As :meth:`KeyedValues.items`."""
        columns = list(map(pa.Array.to_pylist, self._index.keys()))
        keys = zip(*columns, strict=True) if self._tuples else iter(columns[0])
        pairs = zip(keys, self._values[: len(self._index)].tolist(), strict=True)
        return (pair for pair in pairs if pair[1] is not NOTHING)
