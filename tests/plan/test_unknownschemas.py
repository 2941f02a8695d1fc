from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.cli.loading import load_job
from minishuffle.errors import InvalidGraph
from minishuffle.exchange.batch import Batch
from minishuffle.operators.unknown_columns import UnknownColumns
from minishuffle.plan.column_steps import UnknownStep
from minishuffle.plan.nodes import inputs_first
from minishuffle.plan.unknownschemas import CallPlace, drafting, unknown_columns


def unknown() -> UnknownColumns:
    return unknown_columns("map_batches", "nobody knows", "write schema=...", "schema={}")


def test_the_error_names_the_step_its_place_what_to_write_and_the_command() -> None:
    with pytest.raises(InvalidGraph) as error:
        unknown()
    file = "tests/plan/test_unknownschemas.py"
    place = CallPlace(file, unknown.__code__.co_firstlineno + 1)
    assert str(error.value) == (
        f"map_batches at {place}: nobody knows: write schema=...; `minishuffle schema {file}:JOB` shows one "
        "for the job (or function) JOB of that file"
    )


def test_a_draft_has_something_in_its_place_that_does_not_run() -> None:
    with drafting():
        placed = unknown()
    assert (placed.step, placed.form, Path(placed.place).name.partition(":")[0]) == (
        "map_batches",
        "schema={}",
        Path(__file__).name,
    )
    with pytest.raises(InvalidGraph, match="this plan is a draft"):
        placed.process(Batch([]), 0, print)
    with pytest.raises(InvalidGraph, match="nobody knows"):
        unknown()


def test_the_command_is_for_the_file_where_the_program_begins_not_for_a_module_that_it_imports(
    tmp_path: Path,
) -> None:
    (tmp_path / "beside.py").write_text("def clean(rows):\n    return rows.map(str).to_table()\n")
    (tmp_path / "job.py").write_text(
        "from beside import clean\nfrom minishuffle import Stream\n\n\n"
        "def job():\n    return clean(Stream.items([1]))\n"
    )
    with pytest.raises(InvalidGraph, match=r"to_table at .*beside.py:2: .*`minishuffle schema .*job.py:JOB`"):
        load_job(f"{tmp_path}/job.py:job").build()
    file = re.escape(str(Path(__file__).relative_to(Path.cwd())))
    clean = sys.modules.pop("beside").clean
    with pytest.raises(InvalidGraph, match=rf"beside.py:2: .*`minishuffle schema {file}:JOB`"):
        clean(Stream.items([1]))


class Batches:
    format = "arrow"

    def splits(self) -> list[int]:
        return []

    def read(self, split: int, offset: int) -> Iterator[pa.RecordBatch]:
        raise AssertionError("a source is not read while the job is made")


@pytest.mark.parametrize(
    ("step", "make"),
    [
        ("Table.source", lambda: Table.source(Batches())),
        ("Table.generate", lambda: Table.generate(lambda start, count: None)),  # type: ignore[arg-type,return-value]
        ("map_batches", lambda: Table.from_arrow(pa.table({"n": [1]})).map_batches(lambda batch: None)),
    ],
)
def test_columns_are_not_checked_behind_a_step_of_unknown_ones_in_a_draft(step: str, make: Any) -> None:
    with pytest.raises(InvalidGraph, match=rf"^{step} at .*test_unknownschemas.py:\d+: "):
        make()
    with drafting():
        table = make()
        hours = table.filter(pc.field("x") > 1).event_time("t").key_by("k").window(timedelta(hours=1))
        (end,) = hours.aggregate(n=("x", "sum")).map_batches(lambda batch: batch).collect().plan.ends
    steps = [node.step for node in inputs_first([end])]
    (stand_in,) = (step.unknown for step in steps if isinstance(step, UnknownStep))
    assert (stand_in.step, stand_in.form) == (step, "schema={}")
