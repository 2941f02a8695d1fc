"""Which vertex of a job a name means."""

from __future__ import annotations

import re

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import UnknownName
from minishuffle.observe.vertices import vertex_number
from minishuffle.wire.requests import JobInfo, TaskInfo


def job(*names: str) -> JobInfo:
    tasks = [
        TaskInfo(
            operator=number,
            name=name,
            index=0,
            attempt=1,
            state="running",
            worker=1,
            counters=TaskCounters(),
        )
        for number, name in enumerate(names)
    ]
    return JobInfo(
        job="j1", name="words", state="running", submitted_at=1.0, ended_at=0.0, tasks=tasks, causes=[]
    )


def test_a_vertex_is_named_by_its_name_its_number_or_an_operator() -> None:
    assert vertex_number(job("lines", "count"), "count") == 1
    assert vertex_number(job("lines", "count"), "0") == 0
    assert vertex_number(job("lines -> words", "count -> to_count"), "count") == 1


@pytest.mark.parametrize(
    ("vertex", "text"),
    [
        (
            "counts",
            "job j1 has no vertex or operator 'counts': name one by its number: 0 (lines), 1 (map), 2 (map)",
        ),
        ("9", "job j1 has no vertex or operator '9'"),
        ("map", "job j1 has several vertices 'map'"),
    ],
)
def test_a_vertex_that_is_not_there_or_not_one_is_refused(vertex: str, text: str) -> None:
    with pytest.raises(UnknownName, match=re.escape(text)):
        vertex_number(job("lines", "map", "map"), vertex)
