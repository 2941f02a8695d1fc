"""Pools and channels of one vertex: which subtasks they are of, and what each side knows."""

from __future__ import annotations

import re
from typing import Any

from minishuffle.cli.vertexchannels import (
    channel_maps,
    channel_table,
    pool_maps,
    pool_table,
)
from minishuffle.console import console

CREDIT = {"announced": 2, "unannounced": 1, "starved": True}


def subtask(operator: int, index: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "operator": operator,
        "index": index,
        "attempt": attempt,
        "gates": [],
        "partitions": [],
        **fields,
    }


def gate(producers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    channels = [{"producer": producer, "queue": 3, **fields} for producer, fields in producers.items()]
    return {"edge": 0, "from_operator": 0, "pool": {"in_use": 4, "size": 9}, "channels": channels}


def partition(pool: dict[str, int] | None, **fields: Any) -> dict[str, Any]:
    channels = [{"consumer": 1, "queue": 5, "backlog": 4, **fields}]
    return {"edge": 0, "to_operator": 1, "pool": pool, "channels": channels}


WORKERS = [
    {"tasks": [subtask(1, 1, gates=[gate({0: {"credit": CREDIT}, 1: {"local": {}}})]), subtask(2, 0)]},
    {
        "tasks": [
            subtask(0, 1, partitions=[partition({"in_use": 7, "size": 8}, credit=0)]),
            subtask(1, 0, attempt=3, gates=[gate({0: {}})]),
            subtask(1, 0, attempt=2, gates=[gate({0: {}, 1: {}})]),
        ]
    },
]


def test_an_input_shows_the_credit_that_it_has_announced_and_whether_it_starves() -> None:
    of_first, remote, local = channel_maps(WORKERS, 1)
    assert of_first["channel"] == "0.0:1.0", "of its newest attempt alone"
    assert remote == {
        "channel": "0.0:1.1",
        "side": "in",
        "queue": 3,
        "backlog": None,
        "credit": 2,
        "unannounced": 1,
        "starved": True,
    }
    assert (local["channel"], local["credit"], local["starved"]) == ("0.1:1.1", None, False)


def test_an_output_shows_its_backlog_and_the_credit_that_it_holds() -> None:
    (found,) = channel_maps(WORKERS, 0)
    assert (found["channel"], found["side"], found["queue"]) == ("0.1:1.1", "out", 5)
    assert (found["backlog"], found["credit"], found["unannounced"]) == (4, 0, None)


def test_pools_are_of_inputs_and_of_outputs_that_are_not_kept() -> None:
    assert pool_maps(WORKERS, 0) == [{"subtask": 1, "side": "out", "edge": 0, "in_use": 7, "size": 8}]
    assert [(each["subtask"], each["side"]) for each in pool_maps(WORKERS, 1)] == [(0, "in"), (1, "in")]
    kept = [{"tasks": [subtask(0, 0, partitions=[partition(None)])]}]
    assert pool_maps(kept, 0) == []


def test_tables_name_subtasks_and_say_what_starves() -> None:
    out = console()
    with out.capture() as text:
        out.print(pool_table(pool_maps(WORKERS, 0), "lines"), channel_table(channel_maps(WORKERS, 1)))
    shown = [re.sub(" +", " ", line.strip()) for line in text.get().splitlines()]
    assert "lines[1] out of edge 0 7 8" in shown
    assert "0.0:1.1 in 3 - 2 1 starved" in shown
    assert "0.1:1.1 in 3 - - -" in shown
