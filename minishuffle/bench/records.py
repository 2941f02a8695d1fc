"""Records of the keyBy benchmark: generators, the sink that checks, and the independent computation.

Record number ``i`` of a run is a pure function of ``i``, so that any process can compute any of them.
``int``: key = splitmix64(i) mod 100,000, or as many keys as are asked for; value drawn likewise, mod
100,000. ``event``: (user of 11 characters out of as many, city, ts, amount, qty); amounts are multiples of a
quarter, so that their sums are exact in any order. Split ``s`` of ``S`` makes the blocks ``s``, ``s + S``, …
of ``BLOCK[format]`` records.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Payload
from minishuffle.exchange.keys import Texts
from minishuffle.operators.base import TaskContext

__all__ = ["KEYS", "Checker", "Numbers", "blocks_of", "expected_sums"]

KEYS: Final = 100_000
BLOCK: Final = {"arrow": 65_536, "rows": 8_192}
"""Records of a batch: the most that is allowed; for rows between what stays in a core's cache (2,048) and
what makes the vectors of a keyed sum pay."""
USER_CHARS: Final = 11
_DIGITS: Final = USER_CHARS - len("user")
CITIES: Final = ("Lisbon", "Oslo", "Quito", "Perth", "Kyoto", "Cairo", "Lima", "Turin")
TS_BEGIN: Final = 1_700_000_000_000
_UNSEEN: Final = -1
"""Less than any sum."""
U64 = np.ndarray[Any, np.dtype[np.uint64]]
VALUE_SALT: Final = np.uint64(0xD1B54A32D192ED03)
Kind = Literal["int", "event"]


def splitmix64(numbers: U64) -> U64:
    """The finaliser of SplitMix64 over ``numbers`` + its increment; a new array of the same length."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    shifted = z >> np.uint64(30)
    z ^= shifted
    z *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(z, np.uint64(27), out=shifted)
    z ^= shifted
    z *= np.uint64(0x94D049BB133111EB)
    np.right_shift(z, np.uint64(31), out=shifted)
    z ^= shifted
    return z


def _modulo(values: U64, divisor: int) -> U64:
    """``values`` mod ``divisor``, in place; a division by a constant is cheaper than numpy's modulo."""
    quotient = values // np.uint64(divisor)
    quotient *= np.uint64(divisor)
    values -= quotient
    return values


def keys_and_values(start: int, count: int, keys: int = KEYS) -> tuple[U64, U64]:
    """Keys (0 … ``keys`` − 1) and values (0 … ``KEYS`` − 1) of records ``start`` … ``start + count − 1``."""
    numbers = np.arange(start, start + count, dtype=np.uint64)
    return _modulo(splitmix64(numbers), keys), _modulo(splitmix64(numbers ^ VALUE_SALT), KEYS)


def blocks_of(block: int, split: int, splits: int, records: int | None) -> Iterator[tuple[int, int]]:
    """(first record, how many) of each block of a split; endless when ``records`` is None."""
    start = split * block
    while records is None or start < records:
        yield start, block if records is None else min(block, records - start)
        start += splits * block


SCHEMAS: Final[dict[str, dict[str, type]]] = {
    "int": {"key": int, "value": int},
    "event": {"user": str, "city": str, "ts": int, "amount": float, "qty": int},
}
"""Columns of each kind of record."""


class Numbers:
    """Source of the benchmark: ``records`` in all, or as many as ``seconds`` allow."""

    def __init__(
        self,
        kind: Kind,
        format: Literal["arrow", "rows"],
        splits: int,
        records: int | None,
        seconds: float | None,
        *,
        keys: int = KEYS,
    ) -> None:
        self.kind = kind
        self.keys = keys
        self.format = format
        self.schema = SCHEMAS[kind]
        self.bounded = True
        self._splits = splits
        self._records = records
        self._seconds = seconds

    def splits(self) -> Sequence[int]:
        return range(self._splits)

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        """Batches of one block each; ``offset`` is 0 here, since nothing is restarted."""
        make = getattr(self, f"_{self.kind}_{self.format}")
        shared: tuple[Any, ...] = ()
        if self.format == "arrow":
            shared = (pa.array(user_names(np.arange(self.keys, dtype=np.uint64))), pa.array(CITIES))
        end = None if self._seconds is None else time.monotonic() + self._seconds
        for start, count in blocks_of(BLOCK[self.format], split, self._splits, self._records):
            if end is not None and time.monotonic() >= end:
                return
            yield make(start, *keys_and_values(start, count, self.keys), *shared)

    def _int_arrow(self, start: int, keys: U64, values: U64, *_: Any) -> pa.RecordBatch:
        columns = [pa.array(keys.view(np.int64)), pa.array(values.view(np.int64))]
        return pa.RecordBatch.from_arrays(columns, list(self.schema))

    def _int_rows(self, start: int, keys: U64, values: U64, *_: Any) -> list[Any]:
        return list(zip(keys.tolist(), values.tolist(), strict=True))

    def _event_arrow(self, start: int, keys: U64, values: U64, users: Any, cities: Any) -> pa.RecordBatch:
        columns = [
            users.take(pa.array(keys)),
            cities.take(pa.array(values % np.uint64(len(CITIES)))),
            pa.array(np.arange(TS_BEGIN + start, TS_BEGIN + start + len(keys))),
            pa.array(values.astype(np.float64) * 0.25),
            pa.array((values % np.uint64(9)).view(np.int64)),
        ]
        return pa.RecordBatch.from_arrays(columns, list(self.schema))

    def _event_rows(self, start: int, keys: U64, values: U64) -> list[Any]:
        return list(
            zip(
                user_names(keys),
                map(CITIES.__getitem__, (values % np.uint64(len(CITIES))).tolist()),
                range(TS_BEGIN + start, TS_BEGIN + start + len(keys)),
                (values.astype(np.float64) * 0.25).tolist(),
                (values % np.uint64(9)).tolist(),
                strict=True,
            )
        )


class Checker:
    """Sink: the last sum of every key, how many outputs there were, and the sum of their keys.

    Its result is a map: ``outputs``, ``key_sum`` (over all outputs, modulo 2**64), ``keys`` and
    ``sums`` (bytes of int64 or float64, one each per key seen).

    Args:
        keys: how many different ones there are.
    """

    result_only = False
    """What it has is lost with it; nothing fails here, and so it may be in a job that is to lose nothing."""

    def __init__(self, kind: Kind, keys: int = KEYS) -> None:
        self._kind, self._keys = kind, keys

    def open(self, context: TaskContext) -> None:
        self._outputs = 0
        self._key_sum = 0
        self._sums = np.full(self._keys, _UNSEEN, dtype=np.int64 if self._kind == "int" else np.float64)

    def write(self, batch: Payload) -> None:
        self._outputs += len(batch)
        keys, sums = self._arrow(batch) if isinstance(batch, pa.RecordBatch) else self._rows(batch)
        # The last of several outputs for one key is kept: assignment goes in order.
        self._sums[keys] = sums
        self._key_sum += int(keys.sum())

    def _arrow(self, batch: pa.RecordBatch) -> tuple[Any, Any]:
        column = batch.column(0)
        keys = _numbers_in(Texts(column)) if self._kind == "event" else column.to_numpy()
        return keys, batch.column(1).to_numpy()

    def _rows(self, rows: Any) -> tuple[Any, Any]:
        keys = map(itemgetter(0), rows)
        numbers = user_numbers(keys) if self._kind == "event" else np.fromiter(keys, np.int64, len(rows))
        return numbers, np.fromiter(map(itemgetter(1), rows), self._sums.dtype, len(rows))

    def close(self) -> dict[str, Any]:
        keys = np.flatnonzero(self._sums != _UNSEEN)
        return {
            "outputs": self._outputs,
            "key_sum": self._key_sum % 2**64,
            "keys": keys.astype(np.int64).tobytes(),
            "sums": self._sums[keys].tobytes(),
        }


def user_names(numbers: U64) -> list[str]:
    """The user of each number, made digit by digit: a table of all would not stay in the cache."""
    letters = np.empty((len(numbers), USER_CHARS), dtype=np.uint32)
    letters[:, : USER_CHARS - _DIGITS] = [ord(letter) for letter in "user"]
    rest = numbers
    for place in range(USER_CHARS - 1, USER_CHARS - _DIGITS - 1, -1):
        shorter = rest // np.uint64(10)
        letters[:, place] = rest - shorter * np.uint64(10) + np.uint64(ord("0"))
        rest = shorter
    names: list[str] = letters.view(f"U{USER_CHARS}").ravel().tolist()
    return names


def user_numbers(users: Iterable[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The number in each user's name."""
    return _numbers_of("".join(users).encode())


def _numbers_in(users: Texts) -> np.ndarray[Any, np.dtype[np.int64]]:
    return _numbers_of(users.data[users.offsets[0] : users.offsets[-1]])


def _numbers_of(users: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The number in each of these names, which follow each other."""
    letters = np.frombuffer(users, dtype=np.uint8).reshape(-1, USER_CHARS)
    numbers = np.zeros(len(letters), np.int64)
    for place in range(USER_CHARS - _DIGITS, USER_CHARS):
        numbers *= 10
        numbers += letters[:, place] - np.uint8(ord("0"))
    return numbers


def expected_sums(
    kind: Kind, blocks: Iterator[tuple[int, int]], keys: int = KEYS
) -> tuple[np.ndarray[Any, Any], int, np.ndarray[Any, Any]]:
    """Sum per key, sum of all keys, and count per key of those records, with numpy alone."""
    sums = np.zeros(keys, dtype=np.float64)
    counts = np.zeros(keys, dtype=np.int64)
    for start, count in blocks:
        found, values = keys_and_values(start, count, keys)
        signed = found.view(np.int64)
        sums += np.bincount(signed, weights=values.astype(np.float64), minlength=keys)
        counts += np.bincount(signed, minlength=keys)
    key_sum = int((counts * np.arange(keys)).sum())
    return (sums * 0.25 if kind == "event" else sums.astype(np.int64)), key_sum, counts
