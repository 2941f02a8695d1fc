"""Which edge is looked at, and how what workers answer becomes one sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.errors import UnknownName, UsageError
from minishuffle.observe.edgerows import EdgeSample
from minishuffle.wire.inquiries import AskWorkers, TappedEdge, WorkersAnswered
from minishuffle.wire.requests import EdgeInfo, GraphInfo, JobInfo, VertexInfo


def sample(edge: int | None = None, edges: int = 1, state: str = "running") -> EdgeSample:
    names = ("read", "count", "write")
    vertices = [
        VertexInfo(name=name, parallelism=2, operators=[], is_source=False, bounded=True, stream="", sink="")
        for name in names
    ]
    graph = GraphInfo(
        job="j1",
        vertices=vertices,
        edges=[EdgeInfo(source=n, target=n + 1, input=0, partitioner="hash") for n in range(edges)],
        restart_strategy="individual",
        on_unavailable="wait",
    )
    job = JobInfo(job="j1", name="words", state=state, submitted_at=1.0)
    return EdgeSample(job, graph, edge, "id")


def row(at: float, **fields: Any) -> dict[str, Any]:
    values = {"producer": 0, "attempt": 1, "consumer": 1, "time": None, "key": None, "columns": []}
    return {**values, "at": at, "values": [f"row {at}"], **fields}


def answered(*rows: list[dict[str, Any]], silent: tuple[int, ...] = ()) -> WorkersAnswered:
    answers = {
        worker: json.dumps({"rows": each, "producers": 2}).encode() for worker, each in enumerate(rows, 1)
    }
    return WorkersAnswered(answers=answers, silent=list(silent))


def test_rows_of_all_workers_come_in_order_and_the_first_are_the_sample() -> None:
    look = sample()
    assert look.question() == AskWorkers(job="j1", tap=TappedEdge(edge=0, tap="id"))
    assert look.question(ends=True) == AskWorkers(job="j1", tap=TappedEdge(edge=0, tap="id", ends=True))
    look.add(answered([row(1.0), row(3.0)], [row(2.0, consumer=None)], silent=(3,)))
    assert [each.at for each in look.found.rows] == [1.0, 2.0, 3.0]
    assert (look.found.producers, look.found.silent, look.complete) == (4, [3], False)
    look.add(answered([row(4.0 + number) for number in range(30)]))
    assert (len(look.found.rows), look.complete, look.found.silent) == (limits.TAP_ROWS, True, [])
    assert (look.found.source, look.found.target, look.found.partitioner) == ("read", "count", "hash")


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"state": "finished"}, UsageError, "job j1 is finished: nothing crosses its edges any more"),
        ({"edges": 0}, UsageError, "job j1 has no edge: all of it is one chain"),
        ({"edges": 2}, UsageError, "name one: 0 (read => count), 1 (count => write)"),
        ({"edges": 2, "edge": 2}, UnknownName, "job j1 has no edge 2; its edges: 0 (read => count), 1"),
    ],
)
def test_what_cannot_be_looked_at_says_why(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        sample(**given)
    assert text in str(caught.value)
