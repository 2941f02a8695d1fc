"""What a job with a guarantee must not contain, each with its reason; and what the guarantee takes."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle import Stream
from minishuffle.errors import InvalidGraph
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.plan.guarantee import check_guarantee, guarantee_lines, never_saved
from minishuffle.plan.planner import compile_job


def vertex(name: str, **others: Any) -> Vertex:
    fields = {"parallelism": 2, "operators": [name], "is_source": name == "read", "program": b"", **others}
    return Vertex(name=name, **fields)


def graph(
    *, kind: Any = "pipelined", read: Any = (), write: Any = (), also: Any = (), **settings: Any
) -> JobGraph:
    """Sources ``read`` and ``also``, whose records ``write`` gets, the latter's by a pipelined edge."""
    vertices = [vertex("read", **dict(read)), vertex("write", **dict(write))]
    edges = [Edge(source=0, target=1, partitioner="hash", kind=kind)]
    if also:
        vertices.append(vertex("also", is_source=True, **dict(also)))
        edges.append(Edge(source=2, target=1, input=1, partitioner="hash"))
    given = JobSettings.model_validate({"guarantee": "at_least_once", **settings})
    return JobGraph(vertices=vertices, edges=edges, settings=given)


ENDLESS = {"bounded": False}
QUEUE = {**ENDLESS, "replayable": False, "acknowledges": True}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"restart_strategy": "none"}, 'with restart_strategy="none"'),
        ({"on_unavailable": "drop"}, 'with on_unavailable="drop"'),
        ({"schedule": "first_output"}, 'with schedule="first_output"'),
        ({"source_lease": 0}, "with source_lease"),
        ({"source_lease": 100}, "with source_lease"),
        ({"flow_control": "tcp"}, 'with flow_control="tcp": a barrier holds one channel back'),
        ({"buffers_per_channel": 0}, "with buffers_per_channel=0: a barrier holds one channel back"),
        ({"read": {"stream": "orders"}}, "for what other programs write into 'orders'"),
        ({"read": {"replayable": False}}, "for the source of 'read', which does not give again"),
        ({"read": {"acknowledges": True}}, "for the source of 'read', which may end before"),
        ({"read": QUEUE, "durable_interval": 0}, "for the source of 'read', .* are none: durable_interval"),
        ({"read": QUEUE, "write": {"sink": "s"}}, "for the source of 'read', .* are none: its sink 's'"),
        ({"write": {"sink": "answers"}}, "for the results that 'answers' keeps"),
        ({"kind": "blocking", "also": ENDLESS}, "for the blocking exchange read => write"),
    ],
)
def test_what_a_guarantee_cannot_be_kept_with_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidGraph, match=f'^guarantee="at_least_once" cannot be kept {reason}'):
        check_guarantee(graph(**fields))
    if "also" not in fields:
        check_guarantee(graph(**{**fields, "guarantee": "loss"}))


@pytest.mark.parametrize(
    "fields", [{}, {"read": ENDLESS}, {"read": QUEUE}, {"kind": "blocking"}, {"on_unavailable": "wait"}]
)
def test_other_jobs_may_have_one_and_wait_for_what_is_down(fields: dict[str, Any]) -> None:
    check_guarantee(graph(**fields))
    assert graph(**fields).on_unavailable == "wait"


def test_tasks_that_blocking_exchanges_join_take_no_snapshots_and_all_others_do() -> None:
    assert graph().snapshotted() == graph(read=ENDLESS).snapshotted() == {0, 1}
    assert graph(kind="blocking").snapshotted() == graph(guarantee="loss").snapshotted() == frozenset()


def test_sides_that_are_broadcast_are_retained_like_all_else() -> None:
    side = Edge(source=0, target=1, input=1, partitioner="broadcast")
    for guarantee, kept in (("loss", {0}), ("at_least_once", set[int]())):
        settings = JobSettings.model_validate({"guarantee": guarantee})
        job = JobGraph(vertices=[vertex("read"), vertex("write")], edges=[side], settings=settings)
        assert job.kept_edges() == kept


def test_the_cost_is_said_in_words() -> None:
    assert guarantee_lines(graph(guarantee="loss")) == []
    assert guarantee_lines(graph(snapshot_interval=2, durable_interval=0)) == [
        "guarantee at_least_once: 4 tasks send a snapshot of their state to another worker every 2 s, or "
        "later where that would take more than 3% of their time",
        "  1 of 1 exchanges retain what was sent until snapshots cover it: what comes in two intervals, in "
        "memory and then on disk (retained_bytes of each worker)",
        "  no durable snapshots (durable_interval), and so two workers at least",
    ]
    assert guarantee_lines(graph(kind="blocking"))[-1] == (
        "  no snapshots of read, write: blocking exchanges join them, and they run again as a whole"
    )


def test_sources_that_end_keep_their_version_where_steps_go_by_each_row_alone() -> None:
    assert graph(read={"by_row": True}).same_rows() == {0}
    for read in ({}, {"by_row": True, "bounded": False}):
        assert not graph(read=read).same_rows()
    assert not graph(read={"by_row": True}, kind="blocking").same_rows()


def test_which_steps_go_by_each_row_alone() -> None:
    items = Stream.items(range(9))
    by_row = items.map(str).filter(bool).flat_map(list)
    cut = items.to_table({"n": "int64"}).map_batches(lambda batch: batch)
    jobs = [compile_job(each.rebalance().collect()) for each in (by_row, cut)]
    assert [job.vertices[0].by_row for job in jobs] == [True, False]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "blocking"}, "a blocking exchange stores its rows outside of all tasks (read => write)"),
        ({"read": {"stream": "clicks"}}, "other programs write to its stream 'clicks'"),
        ({"write": {"sink": "scores"}}, "its sink 'scores' keeps rows for other programs"),
        ({}, ""),
    ],
)
def test_what_is_outside_of_tasks_is_in_no_savepoint(fields: dict[str, Any], text: str) -> None:
    found = graph(**fields)
    assert never_saved(found).startswith(text) and bool(never_saved(found)) == bool(text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "a durable snapshot of the whole job every 30 s"),
        ({"kind": "blocking"}, "no durable snapshots, and so two workers at least: a blocking exchange"),
        ({"durable_interval": 0}, "no durable snapshots (durable_interval), and so two workers at least"),
    ],
)
def test_a_reader_is_told_of_durable_snapshots(fields: dict[str, Any], text: str) -> None:
    found = "\n".join(guarantee_lines(graph(**fields)))
    assert text in found
