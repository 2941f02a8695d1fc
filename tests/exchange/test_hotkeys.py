"""Hot keys from a sample: who is found, who is not, and how little is looked at."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.exchange import hotkeys
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.hotkeys import (
    COUNTERS,
    FIRST_SAMPLES,
    FIRST_SAMPLES_MAX,
    KEY_CHARS_MAX,
    ROWS_PER_FIRST_SAMPLE,
    ROWS_PER_SAMPLE,
    SAMPLES_MAX,
    HotKeys,
)
from minishuffle.exchange.partitioner import Partitioner
from minishuffle.limits import ROW_PREVIEW_CHARS


def fed(keys: list[Any], batch: int = 100, to: int = 0) -> HotKeys:
    """What is known after these keys came in batches, all for one consumer."""
    found = HotKeys()
    for begin in range(0, len(keys), batch):
        part = keys[begin : begin + batch]
        found.look(len(part), part.__getitem__, [to] * len(part))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_key_with_a_good_share_of_the_rows_is_found_with_about_that_share(seed: int, share: float) -> None:
    random = Random(seed)
    keys = ["hot" if random.random() < share else random.randrange(10**6) for _ in range(100_000)]
    shares = fed(keys, to=3).shares()
    assert list(shares) == [(3, "'hot'")]
    assert shares[3, "'hot'"] == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("keys", [1_000, 50])
def test_keys_that_are_spread_are_not_hot(keys: int) -> None:
    random = Random(1)
    assert fed([random.randrange(keys) for _ in range(100_000)]).shares() == {}


def test_few_rows_say_nothing() -> None:
    assert fed(["hot"] * 1_000).shares() == {}


def test_a_key_that_was_hot_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotkeys, "HALVED_AT", 300)
    random = Random(2)
    keys = ["old"] * 100_000
    assert list(fed(keys).shares()) == [(0, "'old'")]
    keys += [random.randrange(10**6) for _ in range(1_000 * ROWS_PER_SAMPLE)]
    assert fed(keys).shares() == {}


def test_what_is_looked_at_and_kept_is_bounded() -> None:
    found, taken = HotKeys(), Counter[int]()

    def key(row: int) -> str:
        taken[row] += 1
        return f"{row:09}" * 1_000 if row == 0 else str(row)

    for _ in range(ROWS_PER_FIRST_SAMPLE * 10):
        found.look(1, key, [0])
    assert sum(taken.values()) == 10
    many = np.zeros(1_000_000, np.int64)
    for _ in range(3):
        found.look(len(many), key, many)
    assert sum(taken.values()) == 10 + 3 * FIRST_SAMPLES_MAX >= FIRST_SAMPLES
    for _ in range(10):
        found.look(len(many), key, many)
    assert sum(taken.values()) == 10 + 3 * FIRST_SAMPLES_MAX + 10 * SAMPLES_MAX
    taken.clear()
    for _ in range(ROWS_PER_SAMPLE * 100):
        found.look(1, key, [0])
    assert sum(taken.values()) == 100
    assert len(found._counts) <= COUNTERS and max(map(len, found._counts)) <= ROW_PREVIEW_CHARS + 1
    assert [len(key) for _, key in found.shares()] == [KEY_CHARS_MAX]


@pytest.mark.parametrize("columns", [["key"], ["key", "other"]])
def test_a_partitioner_says_which_key_goes_where(columns: list[str]) -> None:
    random = Random(3)
    values = [7 if random.random() < 0.5 else random.randrange(10**6) for _ in range(20_000)]
    found = HotKeys()
    partitioner = Partitioner("hash", 4, tuple(columns), None, 0, hot_keys=found)
    to: set[int] = set()
    for begin in range(0, len(values), 200):
        part = values[begin : begin + 200]
        batch = Batch(pa.record_batch({"key": part, "other": ["x"] * len(part)}))
        pieces = [(position, piece.payload["key"]) for position, piece in partitioner.split(batch)]
        to |= {position for position, keys in pieces if 7 in keys.to_pylist()}
    (consumer,) = to
    assert list(found.shares()) == [(consumer, "7" if len(columns) == 1 else "(7, 'x')")]


def test_rows_with_keys_are_looked_at_too() -> None:
    found = HotKeys()
    partitioner = Partitioner("hash", 2, None, None, 0, hot_keys=found)
    for _ in range(200):
        for _ in partitioner.split(Batch(list(range(100)), ["a"] * 60 + list(range(40)))):
            pass
    ((_, key),) = found.shares()
    assert key == "'a'"
