"""Steps on rows: what they give and put aside, and what they need of their input."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.operators.event_time import BESIDE
from minishuffle.plan.nodes import Known, Needed, ObjectSchema
from minishuffle.plan.row_steps import FilterRowsStep, Key, KeyRowsStep, MapAsyncStep, MapStep, rows_by_key
from support.planned import planned

ROWS = Known(ObjectSchema(("a", "b")), BESIDE)


class Pair(TypedDict):
    n: int


def paired(row: Any) -> Pair:
    return {"n": row}


async def awaited(row: Any) -> Any:
    return row


def test_a_function_s_rows_have_the_times_of_those_it_got_and_what_it_is_annotated_with() -> None:
    step = MapStep(ROWS, paired, ("x",), "side")
    assert step.gives.time == BESIDE
    assert step.gives.columns is None
    assert set(step.sides) == {"x", "errors"}
    assert step.must_be_read == {"x"}
    assert Stream.items([1]).map(paired).to_table().plan.gives.columns == ("n",)


def test_a_filter_s_rows_are_those_that_it_got() -> None:
    step = FilterRowsStep(ROWS, bool)
    assert (step.gives.columns, step.gives.time, dict(step.sides)) == (("a", "b"), BESIDE, {})


def test_times_are_needed_of_the_input_if_they_are_read_behind() -> None:
    for times in (True, False):
        assert MapStep(ROWS, abs).needs(Needed(None, times=times), 0) == Needed(None, times=times)
        keyed = KeyRowsStep(ROWS, Key(("a",), None))
        assert keyed.needs(Needed(None, times=times), 0).times is times
    alone = KeyRowsStep(ROWS, Key(("a",), None), alone=True)
    assert not alone.needs(Needed(None, times=True), 0).times, "of rows of which only the keys are sent"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: MapStep(ROWS, abs, on_error="ignore"), "on_error is 'ignore': write 'fail', 'skip'"),  # type: ignore[arg-type]
        (lambda: MapStep(ROWS, abs, ("late",)), "'late' is not a name for a side output of your own"),
        (lambda: MapAsyncStep(ROWS, awaited, 0), r"map_async\(concurrency=...\) takes 1 to"),
        (lambda: MapAsyncStep(ROWS, abs, 1), "gives nothing to await|asynchronous function"),  # type: ignore[arg-type,return-value]
    ],
)
def test_a_step_checks_what_it_is_made_of(make: Any, problem: str) -> None:
    if "await" in problem:
        make()  # A plain function may give an awaitable.
        return
    with pytest.raises(UsageError, match=problem):
        make()


def test_each_part_of_a_union_is_keyed_by_itself() -> None:
    one, other = Table.from_arrow(_sales()).to_rows(), Stream.items([{"a": 1}])
    feeds = rows_by_key(one.union(other).plan, Key(("a",), None)).feeds
    assert [feed.node.label for feed in feeds] == ["key_by", "key_by"]
    assert [feed.node.feeds[0].node.label for feed in feeds] == ["to_rows", "items"]
    assert planned(feeds[0].node).name == "key_by"


def _sales() -> Any:
    import pyarrow as pa

    return pa.table({"a": [1]})
