"""What a ``collect`` sink sends to the client."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.collected import (
    gatherable,
    pack_collected,
    pack_gathered,
    table_of,
    unpack_collected,
)

MOMENT = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
TEXTS = pa.dictionary(pa.int8(), pa.string())
ORDERED = pa.DictionaryArray.from_arrays(pa.array([1, None], pa.int8()), ["S", "M", "L"], ordered=True)
COLUMNS: dict[str, Any] = {
    "decimal": pa.array([Decimal("1.50"), None], pa.decimal128(20, 2)),
    "zone": pa.array([MOMENT, None], pa.timestamp("ns", "Europe/Oslo")),
    "late": pa.array([10**17, None], pa.timestamp("s")),
    "categories": pa.array(["a", None], TEXTS),
    "ordered": ORDERED,
    "lists of categories": pa.array([["a", "b"], None], pa.list_(TEXTS)),
    "nested": pa.array([{"x": [1], "m": {"k": Decimal(1)}}, None]),
    "view": pa.array(["a", None], pa.string_view()),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
    "uuid": pa.array([b"1" * 16, None], pa.uuid()),
    "null": pa.nulls(2),
}


@pytest.mark.parametrize("rows", [2, 0])
def test_columns_come_back_in_their_types(rows: int) -> None:
    batch = pa.record_batch(COLUMNS).slice(0, rows)
    back = unpack_collected(pack_collected(batch))
    assert back.equals(batch) and back.schema == batch.schema  # type: ignore[union-attr]
    assert table_of([back, back]).equals(pa.Table.from_batches([batch, batch]))  # type: ignore[list-item]


def test_rows_come_back_as_rows() -> None:
    for rows in ([], [1, ("a", None)], [{"k": 1}] * 100_000):
        assert unpack_collected(pack_collected(rows)) == rows


def test_a_dictionary_is_sent_with_the_entries_that_stand_in_the_batch() -> None:
    words = [f"word {number}" for number in range(10_000)]
    column = pa.array([*words, None]).dictionary_encode()
    few = pa.record_batch({"word": column}).slice(9_998)
    packed = pack_collected(few)
    assert len(packed) < 1_000
    back: Any = unpack_collected(packed)
    assert back.to_pylist() == few.to_pylist() and back.schema == few.schema


def test_small_batches_go_together_in_their_types() -> None:
    batch = pa.record_batch(COLUMNS).drop_columns("ordered")
    parts = [batch.slice(0, 1), batch.slice(1, 1), batch.slice(0, 0)]
    small = [gatherable(part) for part in parts]
    packed, count = pack_gathered([found[0] for found in small if found is not None])
    back = unpack_collected(packed)
    assert count == 3 and back.equals(batch) and back.schema == batch.schema  # type: ignore[union-attr]


def test_more_categories_than_their_indices_have_numbers_for_go_in_parts() -> None:
    batches = [pa.record_batch({"c": pa.array([str(number)]).cast(TEXTS)}) for number in range(200)]
    packed, count = pack_gathered(batches)
    assert count == 100 and unpack_collected(packed).column("c").type == TEXTS  # type: ignore[union-attr]
    rest, left = pack_gathered(batches[count:])
    assert (count + left, len(unpack_collected(rest))) == (200, 100)


NUMBERS = np.arange(4)
WORDS = pa.array([f"word {number}" for number in range(10_000)])


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        (ORDERED, None),
        (pa.array(np.arange(1_000_000)), None),
        (pa.array(np.arange(1_000_000)).slice(7, 2), 2),
        (WORDS.dictionary_encode().slice(9_998), 2),
        (pa.array(NUMBERS), 4),
        (pa.DictionaryArray.from_arrays(pa.array([3, 3]), pa.array(NUMBERS)), 2),
    ],
)
def test_a_batch_that_waits_for_others_is_small_and_nobody_writes_to_it(
    column: pa.Array, rows: int | None
) -> None:
    batch = pa.record_batch({"n": column})
    found = gatherable(batch)
    if found is None:
        assert rows is None
        return
    own, size = found
    before = batch.to_pylist()
    NUMBERS[3] += 1
    assert own.to_pylist() == before and len(own) == rows
    assert own.get_total_buffer_size() < size < 1_000


def test_what_is_a_dictionary_in_some_batches_alone_is_plain_in_all() -> None:
    encoded, plain = pa.record_batch({"o": ORDERED}), pa.record_batch({"o": ["L"]})
    table = table_of([encoded, plain])
    assert table.equals(pa.table({"o": ["M", None, "L"]}))


@pytest.mark.parametrize("kept", [pa.array([b"1" * 16], pa.uuid()), pa.array(["a"], TEXTS)])
def test_a_dictionary_of_what_no_stream_has_in_one_is_sent_plain(kept: pa.Array) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), kept)
    back: Any = unpack_collected(pack_collected(pa.record_batch({"id": column})))
    assert back.column(0).type in (pa.uuid(), pa.string()) and len(back) == 2


@pytest.mark.parametrize("keep", [4, 200])
def test_columns_that_were_cut_are_refused(keep: int) -> None:
    packed = pack_collected(pa.record_batch(COLUMNS))
    with pytest.raises(RemoteProtocolError, match="collected columns cannot be read"):
        unpack_collected(packed[:keep])
