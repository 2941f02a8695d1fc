"""Keys of joins: compared in their canonical form, and numbered in the order in which they first come.

A key that is null, or has a null in it, is equal to none and has no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Mask, Numbers
from minishuffle.exchange.gather import take
from minishuffle.exchange.keys import canonical_rows
from minishuffle.operators.key_columns import null_marks
from minishuffle.operators.key_index import KeyIndex

__all__ = ["JoinKeys", "KeySlots", "has_null"]

_MAY_HAVE_NULLS: Final = frozenset({tuple, NoneType})


@dataclass(slots=True, eq=False)
class JoinKeys:
    """The keys of a batch as they are compared, without those that have a null.

    ``forms`` is a list of canonical forms for keys of rows, a tuple of columns for those of columns. ``kept``
    marks the records whose keys are in it; None: all are.
    """

    forms: list[Any] | tuple[pa.Array, ...]
    kept: Mask | None = None

    @staticmethod
    def of_rows(keys: list[Any]) -> JoinKeys:
        """Raises UsageError: see ``exchange.keys.canonical``."""
        forms = canonical_rows(keys)
        if _MAY_HAVE_NULLS.isdisjoint(map(type, forms)):
            return JoinKeys(forms)
        kept = np.array([not has_null(form) for form in forms], np.bool_)
        return JoinKeys(list(compress(forms, kept.tolist())), kept)

    @staticmethod
    def of_columns(columns: Sequence[pa.Array]) -> JoinKeys:
        """Columns of one length, at least one."""
        found = [marks for marks in map(null_marks, columns) if marks is not None]
        if not found:
            return JoinKeys(tuple(columns))
        kept = ~np.logical_or.reduce(found)
        rows = np.flatnonzero(kept)
        return JoinKeys(tuple(take(column, rows) for column in columns), kept)

    def spread(self, slots: Numbers) -> Numbers:
        """Slots of the keys as slots of all records of the batch: -1 for a key with a null."""
        if self.kept is None:
            return slots
        spread = np.full(len(self.kept), -1, np.int64)
        spread[self.kept] = slots
        return spread


class KeySlots:
    """Slots (0, 1, …) of the keys of one side of a join: of rows in a dict by canonical form, of columns in a
    :class:`KeyIndex`."""

    def __init__(self) -> None:
        self._forms: dict[Any, int] = {}
        self._index: KeyIndex | None = None
        """None: there are no keys of columns."""

    def __len__(self) -> int:
        return len(self._forms if self._index is None else self._index)

    def lookup(self, keys: JoinKeys) -> Numbers:
        """The slot of each record's key, -1 for one with a null; new keys get the next slots.

        Raises: as ``KeyIndex.lookup``.
        """
        forms = keys.forms
        if not isinstance(forms, list):
            if self._index is None:
                self._index = KeyIndex()
            return keys.spread(self._index.lookup(forms))
        slots = self._forms
        numbers = [slots.setdefault(form, len(slots)) for form in forms]
        return keys.spread(np.array(numbers, dtype=np.int64))

    def find(self, keys: JoinKeys) -> Numbers:
        """The same, but -1 for keys that are not there.

        Raises: as ``KeyIndex.find``.
        """
        forms = keys.forms
        if not isinstance(forms, list):
            found = np.full(len(forms[0]), -1) if self._index is None else self._index.find(forms)
            return keys.spread(found)
        get = self._forms.get
        return keys.spread(np.array([get(form, -1) for form in forms], dtype=np.int64))

    def columns(self, slots: Numbers) -> list[pa.Array]:
        """The keys in these slots, which are of columns."""
        return [] if self._index is None else self._index.keys(slots)

    def keep(self, marks: Mask) -> None:
        """Forget the keys whose slots are not marked, and number the others anew, in order."""
        index, self._index = self._index, None
        if index is None:
            self._forms = {form: slot for slot, form in enumerate(compress(self._forms, marks.tolist()))}
        elif marks.any():
            self._index = KeyIndex()
            self._index.lookup(index.keys(np.flatnonzero(marks)))


def has_null(form: Any) -> bool:
    """Whether a canonical key is null or has a null in it."""
    return form is None or (type(form) is tuple and any(map(has_null, form)))
