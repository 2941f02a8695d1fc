"""Whether the keys of a join's two sides can be equal at all: a number and a text never are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from minishuffle.errors import WrongColumns
from minishuffle.exchange.keys import family
from minishuffle.exchange.schemas import without_dictionary
from minishuffle.operators.base import TaskContext

__all__ = ["RowKinds", "check_key_kinds"]


def check_key_kinds(method: str, left: Iterable[pa.Field], right: Iterable[pa.Field]) -> None:
    """Raises WrongColumns if key columns that are compared, in order, have types that are never equal.

    Numbers, texts, bytes, timestamps, dates, times of day, durations and UUIDs are such kinds; a null is no
    key of a join.
    """
    for one, other in zip(left, right, strict=True):
        kinds = {family(without_dictionary(field.type)) for field in (one, other)} - {"null"}
        if len(kinds) > 1:
            raise WrongColumns(
                f"{method}: the keys in {one.name!r} of type {one.type} and in {other.name!r} of type "
                f"{other.type} are never equal: cast one of them first{_way(one, other)}"
            )


def _way(one: pa.Field, other: pa.Field) -> str:
    """The hint at the end of the error: to cast the other field to text, or UUIDs to bytes. Empty where
    neither side is text, or bytes beside UUIDs, or where no identifier names the field to cast."""
    for text, given in ((one, other), (other, one)):
        to, of = (family(without_dictionary(field.type)) for field in (text, given))
        if of == "uuid" and to == "text":
            return (
                f", the texts in {text.name!r} to UUIDs, by map_batches(): pyarrow has no function for that"
            )
        kind = {"text": "string", "binary": "binary"}.get(to) if of == "uuid" or to == "text" else None
        if kind and given.name.isidentifier():
            return f", as in with_columns({given.name}=col({given.name!r}).cast('{kind}'))"
    return ""


class RowKinds:
    """The kinds of the keys, in their canonical form, that each side's rows have had, until both sides have
    had one of them."""

    def __init__(self) -> None:
        self._kinds: tuple[set[Any], set[Any]] = (set(), set())
        self._are_apart = True

    def note(self, forms: Sequence[Any], input: int) -> None:
        if self._are_apart:
            kinds = {_kind(form) for form in forms} if tuple in set(map(type, forms)) else _kinds(forms)
            self._kinds[input].update(kind for kind in kinds if "null" not in kind)
            self._are_apart = self._kinds[0].isdisjoint(self._kinds[1])

    def complain(self, operator: str, context: TaskContext) -> None:
        """Write into the job's log if no key of one side was of a kind that the other had."""
        if self._are_apart and all(self._kinds):
            left, right = (", ".join(sorted(map(_shown, kinds))) for kinds in self._kinds)
            context.log(
                f"{operator}: the keys of the left side ({left}) were never equal to those of the right "
                f"({right}), which are of another type: give both sides keys of one type"
            )


_NAMES = {bool: "number", int: "number", float: "number", Decimal: "number"}
_NAMES |= {str: "text", type(None): "null"}


def _kinds(forms: Sequence[Any]) -> set[Any]:
    return {_NAMES.get(kind, kind.__name__) for kind in set(map(type, forms))}


def _kind(form: Any) -> Any:
    """The kind of one key. For a tuple: the kinds of its parts, or the kind of its only part."""
    if type(form) is not tuple:
        return _kinds([form]).pop()
    return _kind(form[0]) if len(form) == 1 else tuple(map(_kind, form))


def _shown(kind: Any) -> str:
    return f"({', '.join(map(_shown, kind))})" if isinstance(kind, tuple) else str(kind)
