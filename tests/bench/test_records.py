"""The benchmark's records, its sink and its independent computation against plain Python."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from minishuffle.bench.records import (
    BLOCK,
    CITIES,
    KEYS,
    TS_BEGIN,
    Checker,
    Kind,
    Numbers,
    blocks_of,
    expected_sums,
)
from minishuffle.operators.base import TaskContext

MASK = 2**64 - 1
SALT = 0xD1B54A32D192ED03
RECORDS = 20_000


def splitmix64(number: int) -> int:
    z = number + 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def record(kind: Kind, number: int) -> tuple[Any, ...]:
    key, value = splitmix64(number) % KEYS, splitmix64(number ^ SALT) % KEYS
    if kind == "int":
        return key, value
    return f"user{key:07d}", CITIES[value % 8], TS_BEGIN + number, value * 0.25, value % 9


def rows_of(batch: Any) -> list[tuple[Any, ...]]:
    return (
        batch if isinstance(batch, list) else list(zip(*(c.to_pylist() for c in batch.columns), strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["rows", "arrow"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_record_is_made_once_and_from_its_number_alone(kind: Kind, format: Any) -> None:
    records = 2 * BLOCK[format] + 100
    source = Numbers(kind, format, 2, records, None)
    splits = [list(source.read(split, 0)) for split in source.splits()]
    made = [row for batches in splits for batch in batches for row in rows_of(batch)]
    assert max(len(batch) for batches in splits for batch in batches) <= 65_536
    assert sorted(made) == sorted(record(kind, number) for number in range(records))
    assert all(type(key) in (str, int) for key, *_ in made[:100])


def checked(kind: Kind, format: Any, spoil: Any = lambda outputs: outputs) -> dict[str, Any]:
    """What the sink says of a running sum over the records, one output for each."""
    checker = Checker(kind)
    checker.open(TaskContext("job", "task", 0, 1, 1))
    sums: dict[Any, Any] = {}
    outputs = []
    for number in range(RECORDS):
        key, value = (row := record(kind, number))[0], row[1 if kind == "int" else 3]
        sums[key] = sums.get(key, 0) + value
        outputs.append((key, sums[key]))
    for begin in range(0, RECORDS, 7_000):
        batch = spoil(outputs)[begin : begin + 7_000]
        if format == "arrow":
            import pyarrow as pa

            keys, values = zip(*batch, strict=True)
            checker.write(pa.RecordBatch.from_arrays([pa.array(keys), pa.array(values)], ["key", "total"]))
        else:
            checker.write(batch)
    return checker.close()


@pytest.mark.parametrize("format", ["rows", "arrow"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_sink_and_the_independent_sums_agree(kind: Kind, format: Any) -> None:
    found = checked(kind, format)
    sums, key_sum, counts = expected_sums(kind, blocks_of(BLOCK["rows"], 0, 1, RECORDS))
    keys = np.frombuffer(found["keys"], dtype=np.int64)
    assert found["outputs"] == counts.sum() == RECORDS
    assert found["key_sum"] == key_sum
    assert keys.tolist() == np.flatnonzero(counts).tolist()
    assert np.frombuffer(found["sums"], dtype=sums.dtype).tolist() == sums[keys].tolist()
