"""``bench state``: what a value by key costs in each store of keyed state, beside a plain dict.

Each store has all keys, then takes the same rows in batches of a given size: a number is added to the value
of each row's key, and the value behind each row is given, as by a fold that emits each. Processor time of the
process counts, of the best of some runs, which the stores have in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.operators.aggregate_states import Outputs
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.row_store import ABSENT, RowStore

__all__ = ["STATE_BATCHES", "STATE_KEYS", "measure_state"]

STATE_BATCHES: Final = (1, 16, 128, 512, 4_096, 65_536)
STATE_KEYS: Final = (1_000, 50_000)
_ROWS_MAX: Final = 65_536
"""At most so many are in one run."""
_RUNS_MAX: Final = 9

Take: TypeAlias = Callable[[Any, Any], Any]
"""Takes keys and numbers, and gives the sums of their keys behind each."""


def _into_dict() -> Take:
    table: dict[str, float] = {}

    def take(keys: list[str], numbers: list[float]) -> list[float]:
        values: list[float] = []
        get, append = table.get, values.append
        for key, number in zip(keys, numbers, strict=True):
            table[key] = value = get(key, 0.0) + number
            append(value)
        return values

    return take


def _added(held: Any, places: Any, numbers: list[float]) -> list[float]:
    values: list[float] = []
    append = values.append
    for place, number in zip(places, numbers, strict=True):
        value = held[place]
        held[place] = value = number if value is ABSENT else value + number
        append(value)
    return values


def _into_store(store: RowStore) -> Take:
    def take(keys: list[str], numbers: list[float]) -> list[float]:
        held, places = store.take(keys)
        values = _added(held, places, numbers)
        store.put(values)
        return values

    return take


def _into_objects() -> Take:
    return _into_store(RowStore(packs=False))


def _into_packed() -> Take:
    store = RowStore()
    store.pack()
    return _into_store(store)


def _into_state(state: KeyedState) -> Take:
    """Into objects or packed, as the state chooses."""

    def take(keys: list[str], numbers: list[float]) -> list[float]:
        held, places, _ = state.take(keys)
        values = _added(held, places, numbers)
        state.put(values)
        return values

    return take


def _into_slots(state: KeyedState, outputs: Outputs) -> Take:
    ((_, _, aggregate),) = outputs

    def take(keys: pa.Array, numbers: pa.Array) -> pa.Array:
        return aggregate.running(state.take_columns([keys]), numbers)

    return take


def _sums() -> Outputs:
    return outputs_of({"total": ("number", "sum")}, None)


_STORES: Final[dict[str, Callable[[], Take]]] = {
    "dict": _into_dict,
    "objects": _into_objects,
    "packed": _into_packed,
    "keyed_state": lambda: _into_state(KeyedState()),
    "slots": lambda: _into_slots(KeyedState(outputs := _sums()), outputs),
}


def _items(name: str, keys: int, rows: int, batch: int) -> tuple[list[Any], list[Any]]:
    """Batches with every key once, and then batches of so many rows, in the form for that store. A store that
    chooses by the size of batches gets the keys in batches of that size too, and one more of rows."""
    dice = np.random.default_rng(keys)
    first, then = dice.permutation(keys), dice.integers(0, keys, rows)
    filling = _ROWS_MAX
    if name == "keyed_state":
        first, filling = np.concatenate([first, then[:batch]]), batch
    return _cut(name, first, filling), _cut(name, then, batch)


def _cut(name: str, numbers: Any, batch: int) -> list[Any]:
    pieces: list[Any] = []
    for begin in range(0, len(numbers), batch):
        some = numbers[begin : begin + batch].tolist()
        keys, values = [f"key {number}" for number in some], [number / 4 for number in some]
        pieces.append((pa.array(keys), pa.array(values)) if name == "slots" else (keys, values))
    return pieces


def _cell(keys: int, batch: int, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    rows = min(_ROWS_MAX, max(512, 128 * batch))
    items = {name: _items(name, keys, rows, batch) for name in _STORES}
    spent: dict[str, list[float]] = {name: [] for name in _STORES}
    for _ in range(_RUNS_MAX):
        for name, make in _STORES.items():
            spent[name].append(_nanoseconds(make(), *items[name]) / rows)
        if time.monotonic() > deadline:
            break
    best = {name: min(runs) for name, runs in spent.items()}
    return {
        "keys": keys,
        "batch": batch,
        "ns_per_row": {name: round(each, 2) for name, each in best.items()},
        "of_dict": {name: round(best["dict"] / each, 3) for name, each in best.items()},
    }


def _nanoseconds(take: Take, before: Sequence[Any], items: Sequence[Any]) -> int:
    for item in before:
        take(*item)
    begin = time.process_time_ns()
    for item in items:
        take(*item)
    return time.process_time_ns() - begin


def _parts(name: str, keys: int) -> dict[str, Any]:
    """What it costs to write the state that has all keys in that store, and to read it."""
    outputs = _sums()
    state, other = KeyedState(outputs), KeyedState(_sums())
    take = _into_slots(state, outputs) if name == "slots" else _into_state(state)
    for item in _items(name, keys, 0, _ROWS_MAX)[0]:
        take(*item)
    begin = time.process_time_ns()
    parts = list(state.write())
    written = time.process_time_ns()
    other.read(parts)
    read = time.process_time_ns()
    return {
        "keys": keys,
        "store": name,
        "write_ns_per_key": round((written - begin) / keys),
        "read_ns_per_key": round((read - written) / keys),
        "bytes_per_key": round(sum(part.batch.nbytes for part in parts) / keys, 1),
    }


def measure_state(
    batches: Sequence[int] = STATE_BATCHES, keys: Sequence[int] = STATE_KEYS, *, seconds: float
) -> dict[str, Any]:
    """The stores with so many keys, in batches of so many rows; and what it costs to write and read them.

    Args:
        seconds: for all of it, about: each is measured once at least, however long that takes.
    """
    cells = [(number, batch) for number in keys for batch in batches]
    end, found = time.monotonic() + seconds, []
    for done, (number, batch) in enumerate(cells):
        left = max(0.0, end - time.monotonic())
        found.append(_cell(number, batch, left / (len(cells) - done)))
    parts = [_parts(name, number) for number in keys for name in ("keyed_state", "slots")]
    return {"cells": found, "parts": parts}
