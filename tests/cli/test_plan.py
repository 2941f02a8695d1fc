"""What ``submit --describe`` says of exchanges, stages and slots."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle.cli.plan import plan_lines, plan_map
from minishuffle.dataflow.compile import compile_job
from minishuffle.dataflow.graph import JobGraph, JobSettings
from minishuffle.dataflow.stream import Stream


def graph(*, blocking: bool, **settings: Any) -> JobGraph:
    rows = Stream.items(["a"])
    stored = rows.map(str.upper)
    stored = stored.exchange("blocking") if blocking else stored
    both = stored.union(rows.filter(bool)).collect()
    return compile_job(both, parallelism=2, settings=JobSettings(**settings))


def test_exchanges_are_shown_with_their_kind_and_why() -> None:
    lines = plan_lines(graph(blocking=True))
    assert lines[lines.index("exchanges:") + 1 :] == [
        "  items => map: forward, pipelined_bounded",
        "  items => filter: forward, pipelined_bounded",
        "  map => collect: forward, blocking",
        "  filter => collect: forward, blocking (since it joins both ends of map => collect, which is "
        "blocking)",
        "",
        "schedule eager: all at once, 2 slots",
    ]


@pytest.mark.parametrize(
    ("blocking", "settings", "expected"),
    [
        (
            True,
            {"schedule": "stages"},
            "schedule stages: each when all of its blocking inputs are complete, 2 slots",
        ),
        (
            False,
            {"schedule": "stages"},
            "schedule stages is eager here, as no exchange is blocking: all at once, 2 slots",
        ),
        (
            False,
            {"schedule": "first_output"},
            "schedule first_output: each when any of its inputs have rows, 2 slots",
        ),
    ],
)
def test_the_schedule_is_said(blocking: bool, settings: dict[str, Any], expected: str) -> None:
    lines = plan_lines(graph(blocking=blocking, **settings))
    at = lines.index(expected)
    stages = ["  1: items; map; filter", "  2: collect, after 1"]
    assert lines[at + 1 :] == (stages if blocking else [])


def test_json_has_the_same() -> None:
    plan = plan_map(graph(blocking=True, schedule="stages", start_when="any"))
    assert [edge["kind"] for edge in plan["exchanges"]] == ["pipelined_bounded"] * 2 + ["blocking"] * 2
    assert [edge["because_of"] for edge in plan["exchanges"]] == [None, None, None, 2]
    assert plan["stages"] == [
        {"operators": ["items", "map", "filter"], "after": []},
        {"operators": ["collect"], "after": [0]},
    ]
    assert (plan["schedule"], plan["start_when"], plan["slots"]) == ("stages", "any", 2)
    assert plan_map(graph(blocking=False))["start_when"] is None
