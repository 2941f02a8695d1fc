"""Rows of an edge as lines."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle.cli.taprows import LINE_CHARS_MAX, row_line
from minishuffle.observe.edgerows import EdgeRow, EdgeRows

EDGE = EdgeRows(job="j1", edge=0, source="read", target="count", partitioner="hash")


def line(**fields: Any) -> str:
    """Without its time."""
    values = {"at": 1.5, "producer": 0, "attempt": 1, "consumer": 3, "time": None, "key": None}
    row = EdgeRow.model_validate({**values, "columns": [], "values": ["('a', 1)"], **fields})
    return row_line(EDGE, row).partition(" ")[2]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "read[0] => count[3]: ('a', 1)"),
        ({"consumer": None}, "read[0] => count[all]: ('a', 1)"),
        (
            {"key": "'a'", "time": 1_000_000},
            "read[0] => count[3] (key 'a', event time 1970-01-01T00:00:01+00:00): ('a', 1)",
        ),
        ({"time": 1 << 62}, "read[0] => count[3] (event time 4611686018427387904 µs since 1970): ('a', 1)"),
        ({"columns": ["n", "text"], "values": ["1", "'x'"]}, "read[0] => count[3]: n=1, text='x'"),
        ({"values": ["\x1b[2J"]}, "read[0] => count[3]: \\x1b[2J"),
    ],
)
def test_a_row_is_a_line(fields: dict[str, Any], expected: str) -> None:
    assert line(**fields) == expected


def test_a_line_is_cut() -> None:
    assert len(line(columns=["c"] * 64, values=["x" * 500] * 64)) < LINE_CHARS_MAX
