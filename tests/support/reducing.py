"""Operators with one value for each key, as the streams and tables build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.chained import Emission, OnError
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.reductions import Aggregation, KeyCount, KeyedReduction, RowFold, count_by_key

__all__ = ["aggregating", "counting", "counting_columns", "folding", "reducing"]


def counting(emit: Emission) -> KeyedReduction:
    return KeyedReduction(KeyCount(), emit)


def folding(
    create: Callable[[], Any], add: Callable[[Any, Any], Any], emit: Emission, on_error: OnError = "fail"
) -> KeyedReduction:
    return KeyedReduction(RowFold(add, create), emit, on_error)


def reducing(fn: Callable[[Any, Any], Any], emit: Emission, on_error: OnError = "fail") -> KeyedReduction:
    return KeyedReduction(RowFold(fn), emit, on_error)


def counting_columns(keys: Sequence[str], emit: Emission, name: str = "count") -> KeyedReduction:
    return KeyedReduction(count_by_key(keys, name), emit)


def aggregating(
    keys: Sequence[str], columns: Mapping[str, Any], emit: Emission, time: EventTime | None = None
) -> KeyedReduction:
    """``columns``: by name of the output, the input column and the function."""
    return KeyedReduction(Aggregation(keys, outputs_of(columns, time)), emit)
