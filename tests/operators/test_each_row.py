"""Functions of rows: results, calls per record, and what a raising record does."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minishuffle.errors import UsageError, WrongResult
from minishuffle.exchange import sizes as exchange_sizes
from minishuffle.exchange.batch import Batch
from minishuffle.limits import ROW_PREVIEW_CHARS
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


def test_note_shows_only_the_beginning_of_a_long_record() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_operator(MapRows(lambda row: 1 // 0), ["x" * 10_000])
    assert len(caught.value.__notes__[0]) < ROW_PREVIEW_CHARS + 60


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="write 'fail', 'skip', 'dead_letter' or 'side'"):
        MapRows(str, "ignore")  # type: ignore[arg-type]


class Shy:
    def __repr__(self) -> str:
        raise ValueError("no repr")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def mute(row: Any) -> Any:
    raise Mute


def test_records_and_errors_that_cannot_be_shown_are_dropped_all_the_same() -> None:
    lines: list[str] = []
    context = TaskContext("job", "task", 0, 1, 1, log=lines.append)
    assert run_operator(MapRows(mute, "dead_letter"), [Shy()], context=context) == []
    (line,) = lines
    assert "Mute: (its text cannot be had: __str__ raised RuntimeError)" in line
    assert "record a Shy whose repr raises ValueError" in line


def test_rows_go_to_the_side_output_that_they_name() -> None:
    operator = MapRows(lambda n: Aside("odd", n) if n % 2 else n)
    operator.side_tags = {"odd": "side-1"}
    assert run_operator(operator, [1, 2, 3, 4]) == [("side-1", [1, 3]), [2, 4]]
    operator.side_tags = {"even": "side-1"}
    wanted = re.escape("map: its function gave Aside('odd', ...) and there is no such side output: write ")
    with pytest.raises(WrongResult, match=wanted + re.escape("sides=['even', 'odd']")):
        run_operator(operator, [1])


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


@pytest.mark.parametrize("name", [5, ["odd"]])
def test_the_name_of_a_side_output_is_a_text(name: Any) -> None:
    operator = MapRows(lambda n: Aside(name, n))
    operator.side_tags = {"odd": "side-1"}
    with pytest.raises(WrongResult, match="there is no such side output"):
        run_operator(operator, [1])


def test_a_process_knows_whether_there_is_any_row_for_a_side_output() -> None:
    packed = pickle.dumps(Aside("odd", 1))
    code = (
        "from minishuffle import Aside; import pickle\n"
        f"print(Aside.made, pickle.loads({packed!r}), Aside.made)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False Aside(name='odd', row=1) True\n"


def test_a_record_that_no_exchange_takes_is_a_text_among_the_errors() -> None:
    put: list[Side] = []
    context = TaskContext("job", "task", 0, 1, 1, put_aside=put.append)
    operator = MapRows(lambda row: 1 // len(row), "side")
    operator.errors_tag = "errors-1"
    assert run_operator(operator, [{1}, set(), ""], context=context) == [[1]]
    error = "ZeroDivisionError: integer division or modulo by zero"
    assert list(map(shown, put)) == [
        ("errors-1", [{"operator": "map", "error": error, "record": text}]) for text in ("set()", "")
    ]
    assert context.counters.user_errors == {"side": 2}


class Opened:
    """A function that knows its subtask, and says when it opens and closes."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def open(self, context: TaskContext) -> None:
        self.said.append(("open", context.index))

    def __call__(self, row: Any) -> Any:
        self.said.append(row)
        return [row]

    def close(self) -> str:
        self.said.append("close")
        return "not the result of the task"


def test_a_function_that_is_an_object_opens_and_closes_with_its_operator() -> None:
    for kind in (MapRows, FlatMap, Filter):
        fn = Opened()
        run_operator(kind(fn), [1, 2], context=TaskContext("job", "task", 3, 4, 1))
        assert fn.said == [("open", 3), 1, 2, "close"]
        assert kind(fn).close() is None


def test_a_class_as_a_function_has_no_hooks() -> None:
    assert [type(row) for row in run_operator(MapRows(Path), ["a"])[0]] == [type(Path("a"))]


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
