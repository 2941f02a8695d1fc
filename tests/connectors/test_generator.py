"""Generated records: each number once, at any rate; options and results that are refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.connectors.generator import GeneratorSource
from minishuffle.errors import UsageError
from support.sourcereading import read_all


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate is 0"),
        ({"rate": 10**26}, "rate is 1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"records": -1}, "records is -1"),
        ({"splits": 0}, "splits is 0"),
    ],
)
def test_generator_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GeneratorSource(numbered, **options)


def test_generator_refuses_another_number_of_records() -> None:
    with pytest.raises(UsageError, match="asked for 4 records from number 4 on and gave 1"):
        list(
            GeneratorSource(
                lambda start, count: [start] * (4 if start == 0 else 1), records=8, splits=2
            ).read(1, 0)
        )


@pytest.mark.parametrize(
    ("format", "given", "told"),
    [
        ("rows", None, "gave a NoneType: return a list, or say format='arrow'"),
        ("rows", pa.record_batch({"n": [0]}), "gave a RecordBatch: return a list"),
        ("arrow", [0], "gave a list: return a RecordBatch"),
    ],
)
def test_generator_refuses_another_kind_of_batch(format: Any, given: Any, told: str) -> None:
    source = GeneratorSource(lambda start, count: given, records=1, splits=1, format=format)
    with pytest.raises(UsageError, match=told):
        list(source.read(0, 0))


@given(st.integers(0, 300), st.integers(1, 9), st.none() | st.floats(1, 1e6))
def test_generator_gives_each_number_once(records: int, splits: int, rate: float | None) -> None:
    assert sorted(read_all(GeneratorSource(numbered, rate, records, splits))) == list(range(records))


def test_generator_without_end_goes_on_where_it_was() -> None:
    source = GeneratorSource(numbered, rate=1000, splits=2)
    assert source.bounded is False
    batches = source.read(1, 0)
    first, second = next(batches), next(batches)
    resumed = source.read(1, len(first) + 3)
    assert next(resumed) == second[3:]
    assert next(resumed) == next(batches)
