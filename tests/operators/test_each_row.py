"""Functions of rows: results, calls per record, and what a raising record does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minishuffle.errors import WrongResult
from minishuffle.exchange import sizes as exchange_sizes
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Aside, Side, TaskContext
from minishuffle.operators.chained import OnError
from minishuffle.operators.filter import Filter
from minishuffle.operators.flat_map import FlatMap
from minishuffle.operators.row_functions import KeyRows, MapRows
from support.batches import Calls, run_operator, shown
from support.soak import examples

OPERATORS = {MapRows: "map", Filter: "filter", FlatMap: "flat_map", KeyRows: "key_by"}


def plain(kind: type, fn: Callable[[Any], Any], rows: list[Any]) -> Any:
    if kind is MapRows:
        return [fn(row) for row in rows]
    if kind is Filter:
        return [row for row in rows if fn(row)]
    if kind is FlatMap:
        return [item for row in rows for item in fn(row)]
    return [fn(row) for row in rows], rows


def pairs_function(row: int) -> tuple[int, ...]:
    return (row,) * (row % 3)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("on_error", ["fail", "skip", "dead_letter"])
@given(rows=st.lists(st.integers(0, 9), max_size=20))
def test_result_is_that_of_plain_python_with_one_call_per_record(
    kind: type, on_error: str, rows: list[int]
) -> None:
    fn = Calls(pairs_function)
    out = run_operator(kind(fn, on_error), rows)
    expected = plain(kind, pairs_function, rows)
    assert out == ([expected] if expected not in ([], ([], [])) else [])
    assert fn.seen == rows


@pytest.mark.parametrize(("kind", "name"), OPERATORS.items())
@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("error", [ValueError, StopIteration, KeyError])
def test_failure_is_the_users_own_and_names_operator_and_record(
    kind: type, name: str, bad: int, error: type[Exception]
) -> None:
    def fn(row: int) -> list[int]:
        if row == bad:
            raise error("mine")
        return [row]

    calls = Calls(fn)
    with pytest.raises(error, match="mine") as caught:
        run_operator(kind(calls), [0, 1, 2, 3, 4])
    assert caught.value.__notes__ == [f"raised in operator {name!r} by the record {bad}"]
    assert calls.seen == list(range(bad + 1))


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("on_error", ["skip", "dead_letter"])
def test_only_the_bad_records_are_dropped_counted_and_logged(kind: type, on_error: str) -> None:
    def fn(row: int) -> tuple[int]:
        if row % 2:
            raise ValueError(f"odd {row}")
        return (row,)

    lines: list[str] = []
    context = TaskContext("job", "task", 0, 1, 1, log=lines.append)
    calls = Calls(fn)
    rows = [0, 1, 2, 3, 3, 4]
    out = run_operator(kind(calls, on_error), rows, context=context)
    assert out == [plain(kind, fn, [0, 2, 4])]
    assert calls.seen == rows
    assert context.counters.user_errors == {on_error: 3}
    if on_error == "skip":
        assert lines == []
    else:
        assert len(lines) == 3
        assert "ValueError: odd 1: record 1" in lines[0]


@pytest.mark.parametrize("on_error", ["fail", "skip", "dead_letter"])
@pytest.mark.parametrize(
    "operator",
    [
        lambda on_error: MapRows(lambda n: Aside("odd", n), on_error),
        lambda on_error: FlatMap(lambda n: [n, Aside("odd", n)], on_error),
        lambda on_error: FlatMap(each_and_aside, on_error),
    ],
)
def test_a_row_for_a_side_output_is_none_for_the_next_step(operator: Any, on_error: str) -> None:
    with pytest.raises(WrongResult, match=r"map: its function gave Aside\('odd', .* write sides=\['odd'\]"):
        run_operator(operator(on_error), [1])


def each_and_aside(n: int) -> Iterator[Any]:
    yield n
    yield Aside("odd", n)


def mapped(row: int) -> Any:
    if row % 5 == 0:
        raise ValueError(f"no {row}")
    return Aside("odd", (row,)) if row % 7 == 3 else (row,)


def is_kept(row: int) -> Any:
    if row % 5 == 0:
        raise ValueError(f"no {row}")
    return [False, True, 0, 300, "", "yes", np.True_, Neither()][row % 8]


class Neither:
    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")


def several(row: int) -> Any:
    """Some rows, as a list or an iterator that may raise."""
    if row % 5 == 0:
        raise ValueError(f"no {row}")
    made = [Aside("odd", (row, n)) if n % 7 == 3 else (row, n) for n in range(row % 4)]
    return made if row % 2 else iter(made)


def generated(row: int) -> Iterator[Any]:
    held: dict[int, int] = {}
    for _ in range(row % 90):
        held[0] = row
        yield held
    if row % 5 == 0:
        raise ValueError(f"no {row}")


@pytest.mark.parametrize(
    ("kind", "fn"),
    [(MapRows, mapped), (Filter, is_kept), (FlatMap, several), (FlatMap, generated)],
    ids=["map", "filter", "flat_map", "generator"],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(15))
@given(
    rows=st.one_of(
        st.lists(st.integers(1, 100), min_size=1, max_size=5),
        st.lists(st.integers(1, 100), min_size=63, max_size=200),
        st.lists(st.integers(1, 100).filter(lambda row: row % 5 and row % 8 != 7), min_size=1, max_size=200),
    ),
    on_error=st.sampled_from(["fail", "skip", "side"]),
)
def test_what_is_made_of_a_row_has_its_time(
    kind: Any, fn: Any, rows: list[int], on_error: OnError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row shows what it was made of, whose time is ten times that. Wherever batches are cut."""
    monkeypatch.setattr(exchange_sizes, "BATCH_BYTES_MAX", 700)
    found: dict[bool, list[Any]] = {True: [], False: []}
    for timed, out in found.items():
        operator = kind(fn, on_error)
        operator.side_tags, operator.errors_tag = {"odd": "odd"}, "errors"
        operator.open(TaskContext("job", "task", 0, 1, 1, put_aside=out.append))
        for some in filter(None, (rows[: len(rows) // 3], rows[len(rows) // 3 :])):
            with suppress(ValueError, TypeError):
                operator.process(Batch(some, None, np.array(some) * 10 if timed else None), 0, out.append)
    assert list(map(shown, found[True])) == list(map(shown, found[False]))
    for item in found[True]:
        batch = item.batch if isinstance(item, Side) else item
        made_of = [row["record"] if "record" in row else row[0] for row in map(as_held, batch.payload)]
        assert batch.times.tolist() == [10 * row for row in made_of]


def as_held(row: Any) -> Any:
    return (row,) if isinstance(row, int) else row
