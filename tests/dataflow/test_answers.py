"""Jobs whose answer must not depend on which operators share a thread, nor on how batches are cut."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from minishuffle.dataflow.stream import Stream
from support.cutjobs import Cut, run

CUTS = [Cut(1), Cut(1, seed=3, merges=True), Cut(1, seed=1, rows=1), Cut(2, seed=2, rows=3, merges=True)]


def numbered(rows: list[dict[str, Any]]) -> Stream[Any]:
    return Stream.items(copy.deepcopy(rows)).event_time("t", out_of_order=timedelta(seconds=100))


def in_order(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=repr)


# --- what a function gets is its own -----------------------------------------------------------------


def tagged(joined: tuple[Any, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Changes the rows that it gets, as it may."""
    _, left, right = joined
    left["c"] = right["c"]
    left["tags"].append(right["c"])
    return left


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rows_of_a_join_may_be_changed(cut: Cut) -> None:
    left = numbered([{"k": 1, "t": 0, "tags": [], "id": number} for number in range(2)])
    right = numbered([{"k": 1, "t": 0, "c": c} for c in (1, 2, 3)])
    joined = left.key_by("k").join(right.key_by("k"), within=timedelta(seconds=1)).map(tagged)
    rows = run(joined.collect(), cut).rows
    assert sorted((row["id"], row["c"], row["tags"]) for row in rows) == [
        (number, c, [c]) for number in range(2) for c in (1, 2, 3)
    ]


def with_total(given: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {"v": given["v"] + row["v"]}


def emptied(pair: tuple[Any, dict[str, Any]]) -> tuple[Any, int]:
    value: int = pair[1]["v"]
    pair[1]["v"] = 0
    return pair[0], value


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_values_that_a_reduce_emits_may_be_changed(cut: Cut) -> None:
    rows = Stream.items([{"k": 1, "v": 1} for _ in range(5)])
    found = run(rows.key_by("k").reduce(with_total, "each").map(emptied).collect(), cut).rows
    assert found == [(1, total) for total in range(1, 6)]


def appended(values: list[int], row: int) -> list[int]:
    values.append(row)
    return values


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_fold_emits_its_value_as_it_is_then(cut: Cut) -> None:
    folded = Stream.items(list(range(4))).key_by(lambda row: 0).fold(list, appended, "each")
    expected = [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert run(folded.map(lambda pair: (pair[0], len(pair[1]))).collect(), cut).rows == expected
    whole = run(folded.collect(), cut).rows
    assert [len(value) for _, value in whole] == [1, 2, 3, 4]


def count_in_state(row: Any, context: Any) -> list[dict[str, Any]]:
    context.state["n"] = context.state.get("n", 0) + 1
    return [context.state]


def popped(row: dict[str, Any]) -> int:
    n: int = row.pop("n")
    return n


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_process_may_return_its_state(cut: Cut) -> None:
    counted = Stream.items([7] * 4).key_by(lambda row: row).process(count_in_state).map(popped)
    assert run(counted.collect(), cut).rows == [1, 2, 3, 4]


def with_mark(row: dict[str, Any]) -> dict[str, Any]:
    row["tags"].append(row["id"])
    return row


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_nested_values_of_a_broadcast_join_may_be_changed(cut: Cut) -> None:
    small = Stream.items([{"k": 1, "tags": []}])
    big = Stream.items([{"k": 1, "id": number} for number in range(3)])
    rows = run(big.broadcast_join(small, "k").map(with_mark).collect(), cut).rows
    assert sorted((row["id"], row["tags"]) for row in rows) == [(0, [0]), (1, [1]), (2, [2])]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_that_flat_map_repeats_is_several(cut: Cut) -> None:
    thrice = Stream.items([{"id": 1, "tags": []}]).flat_map(lambda row: [row] * 3).map(with_mark)
    assert [row["tags"] for row in run(thrice.collect(), cut).rows] == [[1]] * 3


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_that_a_collection_repeats_is_several(cut: Cut) -> None:
    row = {"id": 1, "tags": []}
    rows = run(Stream.items([row] * 3).map(with_mark).collect(), cut).rows
    assert [row["tags"] for row in rows] == [[1]] * 3


class Keeper:
    """A sink that changes what it gets."""

    def open(self, context: Any) -> None:
        self.rows: list[Any] = []

    def write(self, batch: Any) -> None:
        for row in batch:
            row[1]["v"] += 100

    def close(self) -> None:
        return None


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_sink_may_change_what_it_gets(cut: Cut) -> None:
    seen: list[Any] = []

    def total(given: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        assert given["v"] < 100, given
        return {"v": given["v"] + row["v"]}

    rows = Stream.items([{"k": 1, "v": 1} for _ in range(5)])
    run(rows.key_by("k").reduce(total, "each").to(Keeper()), cut)
    assert not seen
