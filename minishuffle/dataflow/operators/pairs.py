"""Functions of rows as functions of pairs: each row beside the time at which what it was made of happened.

See ``rowtimes``; a time is int microseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from inspect import isgeneratorfunction
from typing import Any, TypeAlias

from minishuffle.dataflow.operators.base import NO_ROWS, Aside, refuse_as_rows

__all__ = ["awaited_pair", "flat_pairs", "mapped_pair", "of_row", "stamped"]

Pair: TypeAlias = tuple[int, Any]
"""An event time, and a row."""


def stamped(time: int, made: Any) -> Any:
    """The pair of a row that a function has made, or has put aside."""
    return Aside(made.name, (time, made.row)) if type(made) is Aside else (time, made)


def of_row(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For what is asked of a row; it may have further arguments."""

    def asked(pair: Pair, *others: Any) -> Any:
        return fn(pair[1], *others)

    return asked


def mapped_pair(fn: Callable[[Any], Any]) -> Callable[[Pair], Any]:
    def mapped(pair: Pair) -> Any:
        return stamped(pair[0], fn(pair[1]))

    return mapped


def flat_pairs(fn: Callable[[Any], Iterable[Any]]) -> Callable[[Pair], Iterable[Any]]:
    """A generator function stays one: its items are taken some at a time."""
    if isgeneratorfunction(fn):

        def generated(pair: Pair) -> Iterator[Any]:
            for made in fn(pair[1]):
                yield stamped(pair[0], made)

        return generated

    def mapped(pair: Pair) -> list[Any]:
        time, row = pair
        if type(rows := fn(row)) in NO_ROWS:
            refuse_as_rows(rows)
        return [stamped(time, made) for made in rows]

    return mapped


def awaited_pair(fn: Callable[[Any], Awaitable[Any]]) -> Callable[[Pair], Awaitable[Any]]:
    async def awaited(pair: Pair) -> Any:
        return stamped(pair[0], await fn(pair[1]))

    return awaited
