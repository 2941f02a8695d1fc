"""Functions of rows that get pairs of a time and a row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from inspect import isgeneratorfunction

from minishuffle.dataflow.operators.base import Aside
from minishuffle.dataflow.operators.pairs import awaited_pair, flat_pairs, mapped_pair, of_row, stamped


def test_what_is_made_has_the_time_of_its_row() -> None:
    assert stamped(5, "a") == (5, "a")
    assert stamped(5, Aside("odd", "a")) == Aside("odd", (5, "a"))
    assert mapped_pair(len)((5, "abc")) == (5, 3)
    assert mapped_pair(lambda row: Aside("odd", row))((5, 1)) == Aside("odd", (5, 1))

    async def double(row: int) -> int:
        return 2 * row

    async def call() -> object:
        return await awaited_pair(double)((5, 4))

    assert asyncio.run(call()) == (5, 8)


def test_a_question_about_a_row_may_have_more_to_it() -> None:
    assert of_row(bool)((5, "")) is False
    assert of_row(lambda row, count: row % count)((5, 7), 4) == 3


def test_a_generator_function_stays_one_and_others_give_all_at_once() -> None:
    taken = []

    def twice(row: int) -> Iterator[int]:
        for number in (row, row + 1):
            taken.append(number)
            yield number

    generated = flat_pairs(twice)
    assert isgeneratorfunction(generated)
    items = iter(generated((5, 1)))
    assert (next(items), taken) == ((5, 1), [1])
    assert list(items) == [(5, 2)]
    listed = flat_pairs(str.split)
    assert not isgeneratorfunction(listed)
    assert listed((5, "a b")) == [(5, "a"), (5, "b")]
