"""What each kind of partitioner sends where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UnknownName, UsageError
from minishuffle.exchange import partitioner as partitioner_module
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import unpinned
from minishuffle.exchange.keys import destination, stable_hash
from minishuffle.exchange.partitioner import BLOCK_ROWS, OWN_PIECE_ROWS_MIN, Partitioner
from support.batches import as_batch


def rows_of(batch: Batch) -> list[Any]:
    payload = batch.payload
    if isinstance(payload, pa.RecordBatch):
        names = payload.schema.names
        return [tuple(row[name] for name in names) for row in payload.to_pylist()]
    return list(payload if batch.keys is None else zip(batch.keys, payload, strict=True))


def gathered(pieces: Iterable[tuple[int, Batch]]) -> dict[int, list[Any]]:
    """The rows that each consumer gets, in order."""
    found: dict[int, list[Any]] = defaultdict(list)
    for position, piece in pieces:
        assert len(piece)
        found[position] += rows_of(piece)
    return dict(found)


def expected(rows: list[Any], keys: list[Any], consumers: int) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for row, key in zip(rows, keys, strict=True):
        found[destination(stable_hash(key), consumers)].append(row)
    return dict(found)


def by_key(consumers: int, *names: str) -> Partitioner:
    return Partitioner("hash", consumers, names or None, None, 0)


CONSUMERS = [2, 3, 4, 5, 16, 300]


@pytest.mark.parametrize("consumers", CONSUMERS)
@pytest.mark.parametrize("kind", [int, str, lambda n: (n, str(n)), float])
def test_keyed_rows_go_where_the_hash_of_their_key_says(consumers: int, kind: Any) -> None:
    keys = [kind(n % 40) for n in range(500)]
    batch = Batch([f"row {n}" for n in range(500)], keys)
    assert gathered(by_key(consumers).split(as_batch(batch))) == expected(rows_of(batch), keys, consumers)


@given(
    st.lists(st.integers() | st.floats() | st.text() | st.none() | st.tuples(st.integers()), max_size=12),
    st.booleans(),
    st.integers(2, 9),
)
def test_few_rows_are_dealt_out_as_many_are(keys: list[Any], themselves: bool, consumers: int) -> None:
    batch = Batch(keys if themselves else [f"row {n}" for n in range(len(keys))], keys)
    dealt = []
    for few in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partitioner_module, "FEW_ROWS", few)
            pieces = list(by_key(consumers).split(as_batch(batch)))
        assert all(isinstance(piece.payload, list) for _, piece in pieces)
        assert all((piece.keys is piece.payload) is themselves for _, piece in pieces if len(piece))
        dealt.append([(position, repr(rows_of(piece))) for position, piece in pieces])
    assert dealt[0] == dealt[1]


@pytest.mark.parametrize("own", [1, 8_192])
@pytest.mark.parametrize("consumers", CONSUMERS)
def test_record_batches_go_the_same_way(consumers: int, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner_module, "OWN_PIECE_ROWS_MIN", own)
    numbers = np.random.default_rng(3).integers(-50, 50, 1000)
    batch = pa.record_batch(
        {
            "key": numbers,
            "narrow": numbers.astype(np.int8),
            "number": np.arange(1000),
            "text": pa.array([None if n % 7 == 0 else str(n) for n in range(1000)]),
            "gaps": pa.array([None if n % 3 == 0 else n for n in range(1000)]),
            "view": pa.array([str(n) * (n % 20) for n in range(1000)], pa.string_view()),
            "bytes": pa.array([bytes([n % 256]) for n in range(1000)], pa.binary_view()),
            "flag": pa.array([n % 2 == 0 for n in range(1000)]),
            "nested": pa.array([[n] for n in range(1000)]),
        }
    )
    rows = rows_of(Batch(batch))
    pieces: list[tuple[int, Any]] = list(by_key(consumers, "key").split(as_batch(batch)))
    assert gathered(pieces) == expected(rows, numbers.tolist(), consumers)
    assert all(piece.payload.schema == batch.schema for _, piece in pieces)
    for _, piece in pieces:
        piece.payload.validate(full=True)
    both = gathered(by_key(consumers, "text", "key").split(as_batch(batch.slice(100, 300))))
    keys = [(row[3], row[0]) for row in rows[100:400]]
    assert both == expected(rows[100:400], keys, consumers)


@pytest.mark.parametrize("consumers", [2, 3, 9])
def test_long_batches_are_cut_up_by_chunks_in_order(consumers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner_module, "CHUNK_ROWS", 64)
    monkeypatch.setattr(partitioner_module, "_ROWS_PER_CONSUMER", 16)
    batch = pa.record_batch({"k": np.arange(1000) % 37, "v": np.arange(1000)})
    pieces = list(by_key(consumers, "k").split(as_batch(batch)))
    assert len(pieces) > consumers
    assert gathered(pieces) == expected(rows_of(Batch(batch)), [n % 37 for n in range(1000)], consumers)


@pytest.mark.parametrize("consumers", [2, 3])
def test_long_pieces_keep_no_memory_of_each_other_and_short_ones_are_slices(consumers: int) -> None:
    rows = consumers * OWN_PIECE_ROWS_MIN
    batch = pa.record_batch(
        {"k": np.arange(rows), "v": np.arange(rows) / 7, "t": list(map(str, range(rows)))}
    )
    pieces: list[tuple[int, Any]] = list(by_key(consumers, "k").split(as_batch(batch)))
    assert len(pieces) == consumers
    assert all(unpinned(piece.payload) is piece.payload for _, piece in pieces)
    pieces = list(by_key(consumers, "k").split(as_batch(batch.slice(1))))
    assert len({piece.payload.column(0).buffers()[1].address for _, piece in pieces}) == 1


def test_one_partitioner_takes_batches_of_changing_schemas() -> None:
    partitioner = by_key(3, "k")
    for batch in (
        pa.record_batch({"k": [1, 2, 3], "v": ["a", "b", "c"]}),
        pa.record_batch({"v": [1.5, 2.5], "k": pa.array([3, 2], pa.int16())}),
        pa.record_batch({"k": pa.array(["x", None]).dictionary_encode()}),
    ):
        keys = batch.column("k").to_pylist()
        assert gathered(partitioner.split(Batch(batch))) == expected(rows_of(Batch(batch)), keys, 3)


@given(st.lists(st.integers(-3, 3) | st.none() | st.sampled_from(["a", 1.5, 2.0, True])), st.integers(2, 7))
def test_equal_keys_meet(keys: list[Any], consumers: int) -> None:
    batch = Batch(list(range(len(keys))), keys)
    met = gathered(by_key(consumers).split(as_batch(batch)))
    assert met == expected(rows_of(batch), keys, consumers)
    homes: dict[Any, set[int]] = defaultdict(set)
    for position, rows in met.items():
        for key, _ in rows:
            homes[key].add(position)
    assert all(len(home) == 1 for home in homes.values())


@pytest.mark.parametrize("kind", ["hash", "rebalance", "rescale", "forward", "broadcast", "custom"])
def test_one_consumer_gets_the_batch_itself(kind: str) -> None:
    partitioner = Partitioner(kind, 1, ("k",), lambda row, consumers: 0, 5)
    for batch in (Batch([1], [1]), Batch([2], [1]), Batch(pa.record_batch({"k": [1]}))):
        ((position, piece),) = partitioner.split(batch)
        assert position == 0
        assert piece is batch


def test_one_consumer_is_refused_what_several_are() -> None:
    with pytest.raises(UsageError, match="a key of type list cannot be hashed"):
        Partitioner("hash", 1, None, None, 0).split(Batch([2], [[1]]))
    with pytest.raises(UsageError, match="cannot be"):
        Partitioner("hash", 1, ("k",), None, 0).split(Batch(pa.record_batch({"k": [[1]]})))
    with pytest.raises(UnknownName, match="no key column 'k'"):
        Partitioner("hash", 1, ("k",), None, 0).split(Batch(pa.record_batch({"v": [1]})))
    with pytest.raises(UsageError, match="the partitioner gave 7"):
        Partitioner("custom", 1, None, lambda row, consumers: 7, 0).split(Batch([1]))


@pytest.mark.parametrize("kind", ["hash", "rebalance", "broadcast", "custom"])
def test_an_empty_batch_gives_no_piece(kind: str) -> None:
    partitioner = Partitioner(kind, 3, None, lambda row, consumers: 0, 0)
    assert list(partitioner.split(Batch([], []))) == []


def test_a_missing_key_column_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match=r"no key column 'user' \(or several\): the batch has k, v"):
        list(by_key(2, "k", "user").split(Batch(pa.record_batch({"k": [1], "v": [2]}))))


def test_a_key_that_cannot_be_hashed() -> None:
    with pytest.raises(UsageError, match="a key of type dict cannot be hashed"):
        list(by_key(2).split(Batch([1], [{}])))


# --- dealt out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rebalance", "rescale", "forward"])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_rows_are_dealt_out_one_by_one_from_the_start(kind: str, start: int) -> None:
    partitioner = Partitioner(kind, 3, None, None, start)
    found = gathered(
        piece for rows in ([0, 1], [2], [3, 4, 5, 6, 7]) for piece in partitioner.split(Batch(rows))
    )
    assert found == {(start + n) % 3: list(range(n, 8, 3)) for n in range(3)}


def test_short_tables_keep_all_consumers_busy_and_long_ones_are_not_cut_finely() -> None:
    partitioner = Partitioner("rebalance", 4, None, None, 1)
    first = list(partitioner.split(Batch(pa.record_batch({"v": np.arange(500)}))))
    assert [(position, len(piece)) for position, piece in first] == [(1, 128), (2, 128), (3, 128), (0, 116)]
    assert rows_of(first[0][1])[:17] == [*((n,) for n in range(16)), (64,)]
    for _ in range(3):
        pieces = list(partitioner.split(Batch(pa.record_batch({"v": np.arange(65_536)}))))
        assert len(pieces) == 4 and sum(len(piece) for _, piece in pieces) == 65_536
        assert max(len(piece) for _, piece in pieces) - min(len(piece) for _, piece in pieces) <= BLOCK_ROWS


@given(
    st.lists(st.integers(0, 700), max_size=12),
    st.lists(st.integers(0, 700), max_size=12),
    st.integers(2, 5),
    st.booleans(),
)
def test_a_row_goes_to_the_same_consumer_whatever_batches_rows_come_in(
    one: list[int], other: list[int], consumers: int, columns: bool
) -> None:
    """The running number decides; here the blocks become longer behind the first long one."""
    rows = min(sum(one), sum(other))
    dealt = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner_module, "FIRST_ROWS", BLOCK_ROWS)
        for sizes in (one, other):
            partitioner, begin, pieces = Partitioner("rebalance", consumers, None, None, 1), 0, []
            for size in [*sizes, 0]:
                numbers = np.arange(begin, min(rows, begin + size))
                begin += len(numbers)
                batch = Batch(pa.record_batch({"v": numbers}) if columns else numbers.tolist(), None, numbers)
                pieces += list(partitioner.split(batch))
            assert all([n if not columns else n[0] for n in rows_of(p)] == list(p.times) for _, p in pieces)
            dealt.append(gathered(pieces))
    assert dealt[0] == dealt[1]
    assert sorted(row for each in dealt[0].values() for row in each) == sorted(
        [(n,) if columns else n for n in range(rows)]
    )
    assert all(each == sorted(each) for each in dealt[0].values())
    counts = [len(dealt[0].get(position, ())) for position in range(consumers)]
    assert max(counts) - min(counts) <= (BLOCK_ROWS if columns else 1)


def test_every_format_is_dealt_out() -> None:
    batch = Batch(pa.record_batch({"v": np.arange(64)}))
    keyed = Batch(list("x" * 64), list(range(64)))
    for whole in (batch, keyed):
        pieces = list(Partitioner("rebalance", 2, None, None, 0).split(whole))
        assert [len(piece) for _, piece in pieces] == [32, 32]
        assert type(pieces[0][1].payload) is type(whole.payload)
        assert sorted(rows_of(pieces[0][1]) + rows_of(pieces[1][1])) == sorted(rows_of(whole))


def test_broadcast_gives_each_the_batch() -> None:
    batch = Batch([1, 2])
    assert list(Partitioner("broadcast", 3, None, None, 0).split(batch)) == [(n, batch) for n in range(3)]


# --- the user's own ---------------------------------------------------------------------------------


def test_custom_asks_for_each_row() -> None:
    asked: list[tuple[Any, int]] = []

    def choose(row: int, consumers: int) -> Any:
        asked.append((row, consumers))
        return np.int64(2) if row == 5 else row % 2

    rows = [4, 5, 6, 7, 8]
    partitioner = Partitioner("custom", 3, None, choose, 0)
    assert gathered(partitioner.split(Batch(rows))) == {0: [4, 6, 8], 1: [7], 2: [5]}
    assert asked == [(row, 3) for row in rows]
    keyed = Batch([7, 4], ["a", "b"])
    assert gathered(partitioner.split(keyed)) == {1: [("a", 7)], 0: [("b", 4)]}


@pytest.mark.parametrize("choice", [3, -1, None, "0", 0.0])
def test_custom_must_give_a_consumer(choice: Any) -> None:
    partitioner = Partitioner("custom", 3, None, lambda row, consumers: choice, 0)
    with pytest.raises(UsageError, match=r"gave .* for the row 'ro+…: return an int from 0 to 2"):
        list(partitioner.split(Batch(["ro" + "o" * 500 + "w"])))
