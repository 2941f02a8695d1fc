"""How batches are cut by bytes: no piece is much longer than the limit, and together they are the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.exchange import elements
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import decode, read_header
from minishuffle.exchange.sizes import RowsOut, encode_all, pieces
from minishuffle.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX, MIB
from support.batches import as_batch

LONG = "x" * (MIB // 4)


def in_rows(batch: Any) -> list[Any]:
    payload = as_batch(batch).payload
    return [row["v"] for row in payload.to_pylist()] if isinstance(payload, pa.RecordBatch) else payload


BATCHES: dict[str, Callable[[], Any]] = {
    "texts": lambda: [LONG] * 80,
    "dicts": lambda: [{"id": number, "text": LONG} for number in range(80)],
    "nested": lambda: [(number, {"texts": ["x" * 1024] * 256}) for number in range(80)],
    "numbers": lambda: [list(range(30_000)) for _ in range(80)],
    "keyed": lambda: Batch([(LONG,)] * 80, list(range(80))),
    "arrow": lambda: pa.RecordBatch.from_pydict({"v": [LONG] * 80}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_long_rows_is_cut_into_pieces_of_about_the_limit(name: str) -> None:
    batch = BATCHES[name]()
    found = list(pieces(as_batch(batch)))
    assert [row for piece in found for row in in_rows(piece)] == in_rows(batch)
    assert 2 <= len(found) <= 8
    sizes = [read_header(parts[0])[0] for _, parts in encode_all(as_batch(batch))]
    assert max(sizes) <= 2 * BATCH_BYTES_MAX


def test_a_batch_of_short_rows_stays_whole() -> None:
    rows = [{"id": number, "text": "x" * 80} for number in range(BATCH_ROWS_MAX)]
    whole = Batch(rows)
    assert list(pieces(whole)) == [whole]
    whole = Batch(pa.RecordBatch.from_pylist(rows))
    assert list(pieces(whole)) == [whole]


@pytest.mark.parametrize("arrow", [False, True])
def test_a_few_long_rows_among_short_ones_make_no_long_element(arrow: bool) -> None:
    """What is judged by a few rows is looked at again once it is packed."""
    rows = ["x"] * 1000 + [LONG] * 99 + ["y"] * 1001
    batch = pa.RecordBatch.from_pydict({"v": rows}) if arrow else rows
    found = []
    for count, parts in encode_all(as_batch(batch)):
        size, rows_of_it, kind = read_header(parts[0])
        assert size <= 2 * BATCH_BYTES_MAX
        assert rows_of_it == count
        found += in_rows(decode(kind, count, b"".join(parts[1:])).payload)
    assert found == rows


def test_a_row_that_no_element_takes_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "ELEMENT_BYTES_MAX", 16 * MIB)
    with pytest.raises(elements.UsageError, match=r"a row takes 178\d+ bytes.*write its path instead"):
        list(encode_all(Batch(["short", "x" * (17 * MIB), "short"])))


def test_rows_go_out_as_soon_as_they_come_to_the_limit() -> None:
    emitted: list[list[Any]] = []
    out = RowsOut(emitted.append)
    for number in range(200):
        out.rows.append(LONG)
        if len(out.rows) >= out.room:
            out.look()
        assert number + 1 - sum(map(len, emitted)) <= 64, number
    out.flush()
    assert sum(map(len, emitted)) == 200
    assert max(map(len, emitted)) <= 4 * BATCH_BYTES_MAX // MIB


def test_short_rows_go_out_by_their_number() -> None:
    emitted: list[list[Any]] = []
    out = RowsOut(emitted.append)
    for number in range(BATCH_ROWS_MAX + 10):
        out.rows.append(number)
        if len(out.rows) >= out.room:
            out.look()
    out.flush()
    assert list(map(len, emitted)) == [BATCH_ROWS_MAX, 10]
