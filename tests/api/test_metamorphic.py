"""Random pipelines on random rows give the same answer however they are cut, and it is that of plain Python.

A pipeline is steps of rows, then one that brings records together, then maybe another step. Each knows what
it adds to a stream and what it makes of a list. ``MINISHUFFLE_SOAK=1`` runs 20,000 of them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minishuffle import testing
from minishuffle.api.stream import Stream, Table
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.operators import combining
from minishuffle.plan.nodes import inputs_first
from minishuffle.plan.rewrites import REWRITES
from support.cutjobs import Cut, run
from support.pipelines import (
    APART,
    FLOAT_KEYS,
    KEYED,
    SCHEMA,
    STEPS,
    TABLES,
    Given,
    Keyed,
    Step,
    answer,
    as_tuple,
    source,
    timed,
)
from support.plainanswers import SECOND, Rows
from support.soak import SOAK

MANY = 20_000 if SOAK else 200

# --- rows --------------------------------------------------------------------------------------------

QUARTERS = st.integers(-40, 40).map(lambda n: n / 4)
KEYS = st.sampled_from([0, 1, True, 1.0, "a", None, (1, "b"), 0.5])
INTEGER_KEYS = st.none() | st.integers(0, 2)
KEYS_APART = (INTEGER_KEYS | st.just(2**53 + 1), st.none() | st.sampled_from([0.0, 1.0, 2.5, 2.0**53]))
"""Integers and floats that no one type holds."""


def rows_of(keys: st.SearchStrategy[Any], optional: bool) -> st.SearchStrategy[Rows]:
    fields = {
        "k": keys,
        "g": st.sampled_from("pqr"),
        "t": st.integers(0, 60).map(lambda n: n * SECOND) | (st.none() if optional else st.nothing()),
        "v": st.integers(-100, 100) | (st.booleans() if optional else st.nothing()),
        "x": st.none() | QUARTERS,
    }
    others = {"o": st.integers(0, 5), "u": st.integers(0, 1) | st.text(max_size=1), "l": st.just([1])}
    return st.lists(st.fixed_dictionaries(fields, optional=others if optional else {}), max_size=24)


# --- pipelines ---


@pytest.fixture(scope="module", autouse=True)
def short_batches_are_combined() -> Iterator[None]:
    """Those of the pipelines are too short for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combining, "SHORT_ROWS", 1)
        yield


SEEDS, SIZES = st.integers(0, 99), st.integers(1, 9) | st.none()
REWRITTEN = st.none() | st.sets(st.sampled_from(sorted(REWRITES))).map(lambda names: tuple(sorted(names)))
"""Which rewrites of the plan are made."""
CUTS = st.tuples(
    st.builds(Cut, st.just(1), SEEDS, st.none(), st.just(True)),
    st.builds(Cut, st.just(1), SEEDS, st.integers(1, 4), optimise=REWRITTEN),
    st.builds(Cut, st.just(2), SEEDS, SIZES, st.booleans()),
    st.builds(Cut, st.just(4), SEEDS, SIZES, st.booleans(), REWRITTEN),
    st.builds(Cut, st.just(2), SEEDS, SIZES, st.booleans(), restarts=st.just(True)),
)


@dataclass(frozen=True)
class Pipeline:
    format: str
    rows: Rows
    others: Rows
    steps: list[Step]
    keyed: Keyed
    schemas: tuple[pa.Schema, pa.Schema]


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    is_rows = draw(st.sampled_from([True, True, False]))
    steps, apart = draw(st.lists(st.sampled_from(STEPS), max_size=3)), not is_rows and draw(st.booleans())
    keyed = draw(st.sampled_from(APART if apart else KEYED if is_rows else KEYED + TABLES))
    keys = KEYS_APART if apart else (KEYS if is_rows else INTEGER_KEYS,) * 2
    rows, others = (draw(rows_of(each, is_rows)) for each in keys)
    schemas = (SCHEMA, FLOAT_KEYS if apart else SCHEMA)
    return Pipeline("rows" if is_rows else "arrow", rows, others, steps, keyed, schemas)


@pytest.mark.slow
@settings(
    max_examples=MANY if SOAK else MANY // 2,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
@given(pipelines(), CUTS, st.integers(1, 3))
def test_an_answer_does_not_depend_on_the_cut(pipeline: Pipeline, cuts: tuple[Cut, ...], splits: int) -> None:
    keyed, (schema, other_schema) = pipeline.keyed, pipeline.schemas
    stream = source(pipeline.rows, splits, pipeline.format, schema)
    other = source(pipeline.others, 1, pipeline.format, other_schema)
    expected = timed(copy.deepcopy(pipeline.rows))
    for step in pipeline.steps:
        stream = step.add(stream)
        expected = copy.deepcopy(step.plain(expected))
    job = keyed.add(stream, other).collect()
    wanted = answer(keyed.plain(expected, timed(copy.deepcopy(pipeline.others))), False)
    for cut in cuts:
        assert answer(run(job, cut).rows, keyed.last) == wanted, cut


@settings(max_examples=MANY // 6, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
@given(pipelines())
def test_a_job_in_a_test_gives_the_same_answer(pipeline: Pipeline) -> None:
    """It opens none of the sources, which have no rows here."""
    keyed, (schema, other_schema) = pipeline.keyed, pipeline.schemas
    stream = source([], 1, pipeline.format, schema)
    other = source([], 1, pipeline.format, other_schema).name("others")
    expected = timed(copy.deepcopy(pipeline.rows))
    for step in pipeline.steps:
        stream = step.add(stream)
        expected = copy.deepcopy(step.plain(expected))
    job = keyed.add(stream, other)
    inputs = {"Given": pipeline.rows, "others": pipeline.others}
    if "others" not in {node.label for node in inputs_first([job.plan.node])}:
        del inputs["others"]
    found = testing.run(job, inputs)
    dropped = []
    if isinstance(found, dict):
        dropped = [rows for name, rows in found.items() if name.startswith("event_time")]
    untimed = [row for rows in inputs.values() for row in rows if row["t"] is None]
    assert sum(map(len, dropped)) == len(untimed)
    found = found["collect"] if isinstance(found, dict) else found
    assert not isinstance(found, pa.Table) or found.schema == job.plan.gives.schema
    rows = unpack_rows(pack_rows(found.to_pylist())) if isinstance(found, pa.Table) else found
    assert answer(rows, keyed.last) == answer(
        keyed.plain(expected, timed(copy.deepcopy(pipeline.others))), False
    )


TIMES = st.lists(st.integers(0, 30), max_size=12)


@pytest.mark.slow
@settings(max_examples=MANY // 10, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
@given(st.lists(TIMES, min_size=1, max_size=2), st.integers(0, 9), CUTS, st.sampled_from(["rows", "arrow"]))
def test_what_is_late_after_each_record_does_not_depend_on_the_cut(
    splits: list[list[int]], delay: int, cuts: tuple[Cut, ...], format: str
) -> None:
    """Where each subtask reads one split; the order in each says what is late for windows of 10 s."""
    counted: Counter[Any] = Counter()
    for times in splits:
        closed = -1000
        for at in times:
            if at // 10 * 10 + 10 > closed:
                counted[at // 10 * 10] += 1
            closed = max(closed, at - delay)
    width = max(len(times) for times in splits)
    rows = [
        {"k": 1, "t": times[n] * SECOND} if n < len(times) else {"k": None, "t": None}
        for n in range(width) for times in splits
    ]  # fmt: skip
    make: Any = Stream if format == "rows" else Table
    given, late_by = Given(rows, len(splits), format, SCHEMA), timedelta(seconds=delay)
    each = (
        make.source(given)
        .parallel(len(splits))
        .event_time("t", out_of_order=late_by, watermarks="each", on_error="skip")
    )
    windows_of_each = each.key_by("k").window(timedelta(seconds=10)).count()
    job = (windows_of_each if format == "rows" else windows_of_each.to_rows()).map(as_tuple).collect()
    for cut in cuts:
        found = {int(start.timestamp()): count for _, start, count in run(job, cut).rows}
        assert found == counted, cut
