"""Errors as users see them: their own frames, whatever else was under way."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from minishuffle.errors import InvalidGraph, TaskFailed, WrongResult, end_job_by
from minishuffle.operators.flat_map import FlatMap
from minishuffle.plan.graph import JobGraph
from minishuffle.runtime.usererrors import PACKAGE, describe_failure, without_runtime


def test_the_runtimes_frames_are_left_out_of_every_error_behind_the_first() -> None:
    """One raised by the runtime itself, while another was on its way, inside a group."""

    def fail_twice() -> None:
        try:
            msgpack_failure()
        except InvalidGraph:
            raise ExceptionGroup("both", [KeyError("inner")]) from None

    def msgpack_failure() -> None:
        JobGraph.from_bytes(None)  # type: ignore[arg-type]

    try:
        fail_twice()
    except ExceptionGroup as group:
        group.__suppress_context__ = False
        info = describe_failure(group, "t[0]")
    assert "in msgpack_failure" in info.traceback
    assert "KeyError: 'inner'" in info.traceback
    assert str(PACKAGE) not in info.traceback


def test_a_folder_whose_name_begins_like_the_packages_is_the_users(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    filename = f"{PACKAGE}-jobs/mine.py"
    exec(compile("def mine():\n    raise ValueError('here')\n", filename, "exec"), namespace)
    with pytest.raises(ValueError, match="here") as raised:
        namespace["mine"]()
    info = describe_failure(raised.value, "t[0]")
    assert filename in info.traceback and info.code == TaskFailed.code
    end_job_by(raised.value)
    assert describe_failure(raised.value, "t[0]").code == WrongResult.code


def test_a_traceback_keeps_the_users_frames_alone_if_there_are_any() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        FlatMap(lambda row: [1 / row]).call([0])
    kept = traceback.extract_tb(without_runtime(raised.tb))
    assert len(traceback.extract_tb(raised.tb)) > len(kept) == 2
    assert {frame.filename for frame in kept} == {__file__}


def test_a_traceback_of_the_runtime_alone_stays_whole() -> None:
    with pytest.raises(InvalidGraph) as raised:
        JobGraph.from_bytes(None)  # type: ignore[arg-type]
    inside = raised.tb.tb_next
    assert inside is not None and without_runtime(inside) is inside
