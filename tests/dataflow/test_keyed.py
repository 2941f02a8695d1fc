"""Keys, aggregates and when they are emitted: what a user may write, and what each mistake is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.dataflow.keyed import KeyedStream
from minishuffle.dataflow.nodes import Node
from minishuffle.dataflow.stream import Stream
from minishuffle.errors import InvalidGraph, UnknownName, UsageError

TABLE = pa.table({"user": ["a", "b"], "amount": [1, 2]})


def rows() -> Stream[Any]:
    return Stream.items([1, 2, 3])


def arrow() -> Stream[Any]:
    return Stream.items(TABLE)


def last(stream: Stream[Any]) -> Node:
    (node,) = stream.ends
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
        assert isinstance(arrow().key_by(*key), KeyedStream)


@pytest.mark.parametrize("key", [(), ([],), (3,), ("user", len), (None,)])
def test_other_keys_are_refused(key: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="column names or one function"):
        rows().key_by(*key)


def test_a_column_is_no_key_twice() -> None:
    with pytest.raises(UsageError, match="names a column twice"):
        arrow().key_by("user", "user")


def test_on_error_needs_a_key_function() -> None:
    with pytest.raises(UsageError, match="about a key function"):
        arrow().key_by("user", on_error="skip")
    assert rows().key_by(len, on_error="skip").count()


def test_an_unknown_key_column_is_told_at_once_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no column 'usr'; did you mean 'user'\? there are user, amount"):
        arrow().key_by("usr")


def test_known_columns_last_as_long_as_they_are_known() -> None:
    known = [
        arrow().filter(bool),
        arrow().rebalance(),
        arrow().union(arrow()),
        rows().schema({"user": str}),
        arrow().key_by("user").count(),
        arrow().key_by("user").aggregate(total=("amount", "sum")),
    ]
    for stream in known:
        with pytest.raises(UnknownName):
            stream.key_by("city")
    unknown = [rows(), arrow().map(dict), arrow().map_batches(lambda b: b), arrow().union(rows())]
    for stream in unknown:
        assert stream.key_by("city")


@pytest.mark.parametrize(
    ("columns", "error", "told"),
    [
        ({}, UsageError, "at least one column"),
        ({"n": "amount"}, UsageError, r"write n=\('column', 'sum'\)"),
        ({"n": ("amount", "sum", 1)}, UsageError, r"write n=\('column', 'sum'\)"),
        ({"n": ("amount", "median")}, UsageError, "median"),
        ({"n": ("price", "sum")}, UnknownName, "no column 'price'"),
        ({"user": ("amount", "sum")}, UsageError, "two output columns"),
    ],
)
def test_aggregate_checks_its_columns(columns: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        arrow().key_by("user").aggregate(**columns)


def test_aggregate_needs_key_columns() -> None:
    with pytest.raises(InvalidGraph, match=r"write key_by\('column'\)"):
        arrow().key_by(len).aggregate(total=("amount", "sum"))


def test_reduce_and_fold_take_functions() -> None:
    keyed = rows().key_by(abs)
    for call in (lambda: keyed.reduce(1), lambda: keyed.fold(0, max), lambda: keyed.fold(int, None)):
        with pytest.raises(UsageError, match="takes a function"):
            call()


def emission(stream: Stream[Any]) -> str:
    return last(stream).operators[-1].emission  # type: ignore[attr-defined,no-any-return]


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
