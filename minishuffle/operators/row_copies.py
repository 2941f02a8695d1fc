"""Copies of rows, so that what a function gets is nobody else's.

Rows that hold nothing but values that cannot be changed are not copied: a look at their types is all that
they cost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.rows import SCALARS
from minishuffle.operators.base import Aside

__all__ = ["copied", "copies_of", "own_rows", "set_apart"]


def own_rows(batch: Batch) -> Batch:
    """The batch, no row of which shares with anything else what could be changed in it. (Nothing can be in
    Arrow's.)"""
    return batch if batch.keys is not None else batch.map_rows(_own)


def _own(rows: list[Any]) -> list[Any]:
    return rows if _are_fixed(rows) else copies_of(rows)


def copies_of(rows: Iterable[Any]) -> list[Any]:
    """Copies of the rows, each made before the next one is asked for."""
    return [row if type(row) in SCALARS else copied(row) for row in rows]


def set_apart(rows: Sequence[Any]) -> list[Any]:
    """The rows, none of which shares with another what could be changed in it: those are copied that have
    an object which one before has too."""
    if _are_fixed(rows):
        return list(rows)
    seen: set[int] = set()
    found = []
    for row in rows:
        held = list(_changeable(row))
        found.append(row if seen.isdisjoint(held) and len(set(held)) == len(held) else copied(row))
        seen.update(held)
    return found


def copied(value: Any) -> Any:
    """A value with new lists, dicts and bytearrays all the way down; whatever else a value is stays itself.

    Values that no exchange takes (sets, objects of the user's) are theirs to keep apart.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is dict:
        return {key: each if type(each) in SCALARS else copied(each) for key, each in value.items()}
    if kind is list:
        return [each if type(each) in SCALARS else copied(each) for each in value]
    if kind is tuple:
        if SCALARS.issuperset(map(type, value)):
            return value
        return tuple([each if type(each) in SCALARS else copied(each) for each in value])
    if isinstance(value, bytearray):
        return copy.copy(value)
    return _copied_subclass(value)


def _copied_subclass(value: Any) -> Any:
    """Instances of subclasses keep their class and what else they know."""
    if isinstance(value, Aside):
        return Aside(value.name, copied(value.row))
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(copied, value))
    if not isinstance(value, dict | list):
        return value
    new = copy.copy(value)
    for place, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        new[place] = copied(each)
    return new


def _are_fixed(rows: Sequence[Any]) -> bool:
    """Whether nothing in the rows can be changed; two levels of tuples are looked at."""
    kinds = set(map(type, rows)) - SCALARS
    if not kinds:
        return True
    if kinds != {tuple}:
        return False
    kinds = set(map(type, chain.from_iterable([row for row in rows if type(row) is tuple]))) - SCALARS
    if kinds != {tuple}:
        return not kinds
    inner = [each for row in rows if type(row) is tuple for each in row if type(each) is tuple]
    return set(map(type, chain.from_iterable(inner))) <= SCALARS


def _changeable(value: Any) -> list[int]:
    """The identities of what can be changed in a value."""
    if isinstance(value, dict):
        inner: Any = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        return [id(value)] if isinstance(value, bytearray) else []
    found = [] if isinstance(value, tuple) else [id(value)]
    for each in inner:
        if type(each) not in SCALARS:
            found += _changeable(each)
    return found
