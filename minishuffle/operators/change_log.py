"""Which keys were touched, and which namespaces have gone, since a mark: for snapshots of changes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

__all__ = ["ChangeLog", "Namespace"]

Namespace: TypeAlias = "int | None"
"""The start of a window, in microseconds; None for values that are in none."""

_RECENT_ROWS_MIN: Final = 4096
"""Records whose keys are gathered before it is worked out which of them differ."""


class ChangeLog:
    """Marks are numbers that grow. What was touched has the last mark before it.

    A batch's keys are kept as the list that they are. Once these are many, the last mark before each key's
    last touch takes their place: so a record costs one entry of a dict, and the log is at most about as long
    as there are keys.
    """

    def __init__(self) -> None:
        self.latest = 0
        """The last mark."""
        self._recent: list[tuple[Namespace, Iterable[Any]]] = []
        self._rows = 0
        self._touched: dict[Namespace, dict[Any, int]] = {}
        self._gone: dict[Namespace, int] = {}

    def mark(self) -> int:
        """A mark for now, after those that were given before."""
        self._settle()
        self.latest += 1
        return self.latest

    def touch(self, namespace: Namespace, forms: Sequence[Any]) -> None:
        """These canonical keys may get other values; the list is not changed any more."""
        self._recent.append((namespace, forms))
        self._rows += len(forms)
        if self._rows >= _RECENT_ROWS_MIN and self._rows >= sum(map(len, self._touched.values())):
            self._settle()

    def leave(self, namespace: Namespace) -> None:
        """All keys of a namespace have gone."""
        self._settle()
        self._touched.pop(namespace, None)
        self._gone[namespace] = self.latest

    def touched_since(self, mark: int) -> list[tuple[Namespace, Any]]:
        """Keys that were touched behind that mark, and are in no namespace that has gone since."""
        self._settle()
        return [
            (namespace, form)
            for namespace, forms in self._touched.items()
            for form, at in forms.items()
            if at >= mark
        ]

    def gone_since(self, mark: int) -> list[Namespace]:
        return [namespace for namespace, at in self._gone.items() if at >= mark]

    def forget_before(self, mark: int) -> None:
        """Nobody asks for what has changed before ``mark`` any more."""
        self._settle()
        self._gone = {namespace: at for namespace, at in self._gone.items() if at >= mark}
        for namespace, forms in list(self._touched.items()):
            kept = {form: at for form, at in forms.items() if at >= mark}
            if kept:
                self._touched[namespace] = kept
            else:
                del self._touched[namespace]

    def _settle(self) -> None:
        for namespace, forms in self._recent:
            self._touched.setdefault(namespace, {}).update(zip(forms, repeat(self.latest)))
        self._recent, self._rows = [], 0
