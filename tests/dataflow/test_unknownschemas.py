from __future__ import annotations

from pathlib import Path

import pytest

from minishuffle.dataflow.operators.unknowncolumns import UnknownColumns
from minishuffle.dataflow.unknownschemas import CallPlace, drafting, unknown_columns
from minishuffle.errors import InvalidGraph
from minishuffle.exchange.batch import Batch


def unknown() -> UnknownColumns:
    return unknown_columns("map_batches", "nobody knows", "write schema=...", "schema={}")


def test_the_error_names_the_step_its_place_what_to_write_and_the_command() -> None:
    with pytest.raises(InvalidGraph) as error:
        unknown()
    file = "tests/dataflow/test_unknownschemas.py"
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
