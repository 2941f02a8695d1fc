"""Joins whose keys can never be equal: tables are refused, streams say so in the job's log."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.operators.key_kinds import check_key_kinds
from support.cutjobs import Cut, run

AT = datetime(2026, 1, 1, tzinfo=UTC)
CUTS = (Cut(1), Cut(2, rows=1), Cut(3, seed=5, merges=True))


def table(name: str, keys: pa.Array) -> Table:
    return Table.from_arrow(pa.table({name: keys, "at": pa.array([AT] * len(keys))})).event_time("at")


NUMBERS, TEXTS = pa.array([1, 2]), pa.array(["1", "2"])


@pytest.mark.parametrize("texts", [TEXTS, TEXTS.dictionary_encode(), TEXTS.cast(pa.large_string())])
def test_texts_and_numbers_are_refused_before_the_job_is_submitted(texts: pa.Array) -> None:
    numbers = table("id", NUMBERS)
    says = re.escape(
        f"keys in 'ad' of type {texts.type} and in 'id' of type int64 are never equal: cast one of them first"
        ", as in with_columns(id=col('id').cast('string'))"
    )
    with pytest.raises(UsageError, match=f"^join: the {says}"):
        table("ad", texts).key_by("ad").join(numbers.key_by("id"))
    with pytest.raises(UsageError, match=f"^broadcast_join: the {says}"):
        table("ad", texts).broadcast_join(numbers, {"ad": "id"})


@pytest.mark.parametrize(
    ("one", "other", "is_fine"),
    [
        (pa.int8(), pa.float64(), True),
        (pa.bool_(), pa.decimal128(5, 2), True),
        (pa.timestamp("s"), pa.timestamp("us", "UTC"), True),
        (pa.binary(16), pa.large_binary(), True),
        (pa.null(), pa.string(), True),
        (pa.string(), pa.binary(), False),
        (pa.date32(), pa.timestamp("us"), False),
        (pa.int64(), pa.timestamp("us"), False),
        (pa.dictionary(pa.int8(), pa.string()), pa.int8(), False),
    ],
    ids=str,
)
def test_which_types_have_equal_keys(one: pa.DataType, other: pa.DataType, is_fine: bool) -> None:
    for left, right in ((one, other), (other, one)):
        fields = [pa.field("a", left)], [pa.field("b", right)]
        if is_fine:
            check_key_kinds("join", *fields)
        else:
            with pytest.raises(
                UsageError, match="join: the keys in 'a' of type .* are never equal: cast one"
            ):
                check_key_kinds("join", *fields)


def stream(keys: list[Any]) -> Stream[Any]:
    return Stream.items([{"k": key, "at": AT} for key in keys]).event_time("at")


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize(
    ("left", "right", "kinds"),
    [
        ([1, 2.5], ["1", "2"], r"left side \(number\) .* right \(text\),"),
        ([UUID(int=1)], [str(UUID(int=1))], r"left side \(UUID\) .* \(text\)"),
        ([b"x"], ["x"], r"left side \(bytes\) .* \(text\)"),
        ([date(2026, 1, 1)], [AT], r"left side \(date\) .* \(datetime\)"),
        ([(1, "a")], [("1", "a")], r"left side \(\(number, text\)\) .* \(\(text, text\)\)"),
        ([1, "a", None], [True, 2], None),
        ([None], ["x"], None),
        ([], ["x"], None),
    ],
)
def test_streams_say_in_the_log_that_no_keys_could_be_equal(
    left: list[Any], right: list[Any], kinds: str | None, looked_up: bool
) -> None:
    if looked_up:
        joined: Stream[Any] = stream(left).broadcast_join(stream(right), "k")
    else:
        joined = stream(left).key_by("k").join(stream(right).key_by("k"))
    log = run(joined.collect(), Cut(1)).log
    assert len(log) == (kinds is not None)
    assert kinds is None or re.search(f"^(broadcast_)?join: the keys of the {kinds}", log[0])
