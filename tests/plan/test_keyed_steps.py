"""Keys, aggregates and when they are emitted: what a user may write, and what each mistake is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import KeyedStream, Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.plan.nodes import Node

TABLE = pa.table({"user": ["a", "b"], "amount": [1, 2]})


def rows() -> Stream[Any]:
    return Stream.items([1, 2, 3])


def dicts() -> Stream[Any]:
    """Their columns are known."""
    return Table.from_arrow(TABLE).to_rows()


def last(stream: Stream[Any]) -> Node:
    (node,) = stream.plan.ends
    return node


class Numbers:
    """A source of the user's own."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        yield [split]


def test_key_by_takes_names_a_list_of_names_or_a_function() -> None:
    for key in (("user",), ("user", "amount"), (["user", "amount"],), (len,)):
        assert isinstance(dicts().key_by(*key), KeyedStream)


@pytest.mark.parametrize("key", [(), ([],), (3,), ("user", len), (None,)])
def test_other_keys_are_refused(key: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="column names or one function"):
        rows().key_by(*key)


def test_a_column_is_no_key_twice() -> None:
    with pytest.raises(UsageError, match="names a column twice"):
        dicts().key_by("user", "user")


def test_on_error_needs_a_key_function() -> None:
    with pytest.raises(UsageError, match="about a key function"):
        dicts().key_by("user", on_error="skip")
    assert rows().key_by(len, on_error="skip").count()


def test_an_unknown_key_column_is_told_at_once_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no column 'usr'; did you mean 'user'\? there are user, amount"):
        dicts().key_by("usr")


def test_known_columns_last_as_long_as_they_are_known() -> None:
    known = [
        dicts().filter(bool),
        dicts().rebalance(),
        dicts().union(dicts()),
        rows().to_table({"user": str}).to_rows(),
    ]
    for stream in known:
        with pytest.raises(UnknownName):
            stream.key_by("city")
    unknown = [rows(), dicts().map(dict), dicts().union(rows()), dicts().key_by("user").count()]
    for stream in unknown:
        assert stream.key_by("city")


def test_what_works_on_columns_says_so() -> None:
    with pytest.raises(
        UsageError, match=r"aggregate\(\) works on columns, and this is a KeyedStream of rows: call"
    ):
        rows().key_by(abs).aggregate(total=("amount", "sum"))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"asof_join\(\) works on columns"):
        rows().key_by(abs).asof_join(rows().key_by(abs))  # type: ignore[attr-defined]
    for keyed in (rows().key_by(abs), Table.generate(records=1).key_by("number")):
        with pytest.raises(
            AttributeError, match=r"no attribute 'collect': say what to compute .*, such as count"
        ):
            keyed.collect()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        rows().key_by(abs).nothing  # type: ignore[attr-defined]  # noqa: B018


def test_reduce_and_fold_take_functions() -> None:
    keyed = rows().key_by(abs)
    for call in (lambda: keyed.reduce(1), lambda: keyed.fold(0, max), lambda: keyed.fold(int, None)):
        with pytest.raises(UsageError, match="takes a function"):
            call()


def emission(stream: Stream[Any]) -> str:
    return last(stream).step.emission  # type: ignore[attr-defined,no-any-return]


def test_values_are_emitted_at_the_end_if_there_is_one() -> None:
    endless = Stream.generate(rate=1).map(abs)
    assert emission(rows().key_by(abs).count()) == "end"
    assert emission(endless.key_by(abs).count()) == "batch"
    assert emission(rows().union(endless).key_by(abs).count()) == "batch"
    assert emission(Stream.source(Numbers()).key_by(abs).reduce(max)) == "batch"
    assert emission(Stream.generate(records=5).key_by(abs).count()) == "end"
    assert emission(rows().key_by(abs).count("each")) == "each"


def test_emit_is_checked() -> None:
    with pytest.raises(UsageError, match="write 'each', 'batch' or 'end'"):
        rows().key_by(abs).count("always")  # type: ignore[arg-type]
    with pytest.raises(InvalidGraph, match="would never emit"):
        Stream.generate(rate=1).key_by(abs).count("end")


def test_an_aggregate_with_its_column_behind_is_turned_round() -> None:
    table = Stream.items([{"user": 1, "amount": 2}]).to_table({"user": int, "amount": int})
    with pytest.raises(
        UnknownName, match=r"no column 'sum'; .*: the column comes first: write \w+=\('amount', 'sum'\)"
    ):
        table.key_by("user").aggregate(total=("sum", "amount"))
