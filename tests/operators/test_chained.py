"""What every operator of a chain shares: its defaults, records whose function raises, side outputs, hooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minishuffle.errors import WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX, ROW_PREVIEW_CHARS
from minishuffle.operators.base import Aside, Side, TaskContext, Watermark
from minishuffle.operators.chained import ChainedOperator, dropper_of, emit_rows
from minishuffle.operators.filter import Filter
from minishuffle.operators.flat_map import FlatMap
from minishuffle.operators.row_functions import MapRows
from support.batches import run_operator, shown

# --- defaults ---------------------------------------------------------------------------------------


def test_an_operator_passes_marks_on_and_has_nothing_to_keep() -> None:
    operator, out = ChainedOperator(), list[Any]()
    operator.on_mark(Watermark(5), 1, out.append)
    operator.on_clock(1.0, out.append)
    operator.on_barrier(out.append)
    operator.finish(out.append)
    assert out == [Watermark(5)]
    assert (operator.deadline(), operator.state_rows(), list(operator.write_state())) == (None, 0, [])
    assert (operator.close(), operator.claim()) == (None, None)


def test_another_name_and_id_are_those_of_a_copy() -> None:
    operator = MapRows(str)
    named = operator.named("texts", "a/b")
    assert (named.name, named.id, named.fn) == ("texts", "a/b", str)
    assert (operator.name, operator.id) == ("map", "")
    assert operator.named("map") is operator


def test_rows_are_emitted_in_batches_within_bounds_with_their_times() -> None:
    out: list[Batch] = []
    emit_rows([], out.append)
    assert out == []
    rows = list(range(BATCH_ROWS_MAX + 2))
    emit_rows(rows, out.append, rows)
    assert max(map(len, out)) <= BATCH_ROWS_MAX
    assert [row for batch in out for row in batch.payload] == rows
    assert [time for batch in out for time in np.asarray(batch.times).tolist()] == rows


# --- records whose function raises ------------------------------------------------------------------


def test_note_shows_only_the_beginning_of_a_long_record() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_operator(MapRows(lambda row: 1 // 0), ["x" * 10_000])
    assert len(caught.value.__notes__[0]) < ROW_PREVIEW_CHARS + 60


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


def test_what_cannot_be_sent_is_dropped_by_the_operator_that_made_it() -> None:
    maker, reader = MapRows(str, "skip"), MapRows(bool, "skip")
    reader.only_reads = True
    assert dropper_of([maker, reader]) == maker.drop
    assert dropper_of([MapRows(str, "skip"), MapRows(str)]) is None, "the last one fails its task"
    assert dropper_of([reader]) is None
    assert dropper_of([]) is None


# --- side outputs -----------------------------------------------------------------------------------


def test_rows_go_to_the_side_output_that_they_name() -> None:
    operator = MapRows(lambda n: Aside("odd", n) if n % 2 else n)
    operator.side_tags = {"odd": "side-1"}
    assert run_operator(operator, [1, 2, 3, 4]) == [("side-1", [1, 3]), [2, 4]]
    operator.side_tags = {"even": "side-1"}
    wanted = re.escape("map: its function gave Aside('odd', ...) and there is no such side output: write ")
    with pytest.raises(WrongResult, match=wanted + re.escape("sides=['even', 'odd']")):
        run_operator(operator, [1])


@pytest.mark.parametrize("name", [5, ["odd"]])
def test_the_name_of_a_side_output_is_a_text(name: Any) -> None:
    operator = MapRows(lambda n: Aside(name, n))
    operator.side_tags = {"odd": "side-1"}
    with pytest.raises(WrongResult, match="there is no such side output"):
        run_operator(operator, [1])


# --- hooks ------------------------------------------------------------------------------------------


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
