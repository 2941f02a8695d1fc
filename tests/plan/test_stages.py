"""Which vertices run at one time, in which order, and with how many slots."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.plan.stages import Stage, slots_needed, stages_of


def graph(*edges: str, vertices: int = 4, widths: Any = (), schedule: Any = "stages") -> JobGraph:
    """Edges as ``0-1``, pipelined, and ``0=1``, blocking."""
    return JobGraph(
        vertices=[
            Vertex(
                name=f"v{number}",
                parallelism=widths[number] if widths else 1,
                operators=[],
                is_source=False,
                program=b"",
            )
            for number in range(vertices)
        ],
        edges=[
            Edge(
                source=int(edge[0]),
                target=int(edge[2]),
                partitioner="hash",
                kind="blocking" if edge[1] == "=" else "pipelined",
            )
            for edge in edges
        ],
        settings=JobSettings(schedule=schedule),
    )


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([], [Stage((0,)), Stage((1,)), Stage((2,)), Stage((3,))]),
        (["0-1", "1-2", "2-3"], [Stage((0, 1, 2, 3))]),
        (["0-1", "2-3"], [Stage((0, 1)), Stage((2, 3))]),
        (["0-1", "1=2", "2-3"], [Stage((0, 1)), Stage((2, 3), (1,), (0,))]),
        (
            ["3=2", "2=1", "1=0"],
            [Stage((3,)), Stage((2,), (0,), (0,)), Stage((1,), (1,), (1,)), Stage((0,), (2,), (2,))],
        ),
        (
            ["0=1", "0=2", "1=3", "2=3"],
            [Stage((0,)), Stage((1,), (0,), (0,)), Stage((2,), (1,), (0,)), Stage((3,), (2, 3), (1, 2))],
        ),
        (["0=2", "1-2", "2-3"], [Stage((0,)), Stage((1, 2, 3), (0,), (0,))]),
        (["0=1", "0=1", "2-3"], [Stage((0,)), Stage((1,), (0, 1), (0,)), Stage((2, 3))]),
        (["0=1", "0-2", "1-2"], [Stage((0, 1, 2)), Stage((3,))]),
        (["0=2", "1=3", "2-1", "3-0"], [Stage((0, 1, 2, 3))]),
        (["0=1", "1=2", "0-2", "2=3"], [Stage((0, 1, 2)), Stage((3,), (3,), (0,))]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
)
def test_pipelined_edges_join_and_blocking_ones_order(edges: list[str], expected: list[Stage]) -> None:
    assert list(stages_of(graph(*edges))) == expected


def test_a_long_job_has_its_stages_at_once() -> None:
    count = 300
    chained = JobGraph(
        vertices=graph(vertices=count).vertices,
        edges=[
            Edge(source=n, target=n + 1, partitioner="hash", kind="blocking" if n % 2 else "pipelined")
            for n in range(count - 1)
        ],
    )
    assert [stage.vertices for stage in stages_of(chained)] == [(n, n + 1) for n in range(0, count, 2)]


@pytest.mark.parametrize(
    ("edges", "groups", "at_once", "in_stages"),
    [
        (["0-1", "1-2", "2-3"], "    ", 5, 5),
        (["0-1", "1=2", "2-3"], "    ", 5, 5),
        (["0-1", "1-2", "2-3"], "aabb", 8, 8),
        (["0-1", "1=2", "2-3"], "aabb", 8, 5),
        (["0=1", "1=2", "2=3"], "abcd", 11, 5),
        (["0-1", "1=2", "2-3"], "abab", 7, 7),
    ],
)
def test_groups_add_up_and_stages_follow_each_other(
    edges: list[str], groups: str, at_once: int, in_stages: int
) -> None:
    given = graph(*edges, widths=(5, 2, 3, 1))
    vertices = [
        vertex.model_copy(update={"slot_group": group.strip()})
        for vertex, group in zip(given.vertices, groups, strict=True)
    ]
    for schedule, expected in (("eager", at_once), ("first_output", at_once), ("stages", in_stages)):
        settings = JobSettings.model_validate({"schedule": schedule})
        changed = given.model_copy(update={"vertices": vertices, "settings": settings})
        assert slots_needed(changed) == expected, schedule


def test_an_empty_job_needs_none() -> None:
    assert slots_needed(JobGraph(vertices=[], edges=[], settings=JobSettings(schedule="stages"))) == 0
