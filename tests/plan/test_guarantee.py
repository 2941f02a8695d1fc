"""What a job with a guarantee must not contain, each with its reason; and what the guarantee takes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from minishuffle import Stream, TaskContext
from minishuffle.bench.numbered import Numbered
from minishuffle.errors import InvalidGraph
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.plan.guarantee import (
    check_guarantee,
    guarantee_lines,
    never_cut,
    never_saved,
    receipted_by_cuts,
)
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
        ({"source_lease": 0}, "with source_lease"),
        ({"source_lease": 100}, "with source_lease"),
        ({"flow_control": "tcp"}, 'with flow_control="tcp": a barrier holds one channel back'),
        ({"buffers_per_channel": 0}, "with buffers_per_channel=0: a barrier holds one channel back"),
        ({"read": {"replayable": False}}, "for the source of 'read', which does not give again"),
        ({"read": {"acknowledges": True}}, "for the source of 'read', which may end before"),
        ({"read": QUEUE, "durable_interval": 0}, "for the source of 'read', .* are none: durable_interval"),
        ({"write": {"sink": "answers"}}, "for the results that 'answers' keeps"),
        ({"write": {"keeps": "Largest"}}, r"for the rows that the sink 'Largest' keeps .* give it flush\(\)"),
        ({"kind": "blocking", "also": ENDLESS}, "for the blocking exchange read => write"),
    ],
)
def test_what_a_guarantee_cannot_be_kept_with_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidGraph, match=f'^guarantee="at_least_once" cannot be kept {reason}'):
        check_guarantee(graph(**fields))
    if "also" not in fields:
        check_guarantee(graph(**{**fields, "guarantee": "loss"}))


class Largest:
    def open(self, context: TaskContext) -> None:
        self.best = 0

    def write(self, batch: list[int]) -> None:
        self.best = max([self.best, *batch])

    def close(self) -> int:
        return self.best


class Flushing(Largest):
    def flush(self) -> None:
        """Sends the rows."""


class Outside(Largest):
    result_only = False


def test_a_sink_of_ones_own_that_keeps_rows_is_refused_before_it_runs() -> None:
    settings = JobSettings(guarantee="at_least_once")
    for sink in (Flushing(), Outside()):
        compile_job(Stream.items([1]).to(sink), settings=settings)
    with pytest.raises(InvalidGraph, match="for the rows that the sink 'Largest' keeps in its process"):
        compile_job(Stream.items([1]).to(Largest()), settings=settings)
    compile_job(Stream.items([1]).to(Largest()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"read": ENDLESS},
        {"read": QUEUE},
        {"read": {"stream": "orders"}},
        {"write": {**ENDLESS, "sink": "answers"}},
        {"read": QUEUE, "write": {**ENDLESS, "sink": "answers"}},
        {"kind": "blocking"},
        {"on_unavailable": "wait"},
        {"schedule": "first_output"},
    ],
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


BY_ORDER = {"by_order": True}


@pytest.mark.parametrize(
    ("fields", "always", "of_one_split"),
    [
        ({"read": BY_ORDER}, {0}, {0}),
        ({"read": {**BY_ORDER, **ENDLESS}}, {0}, {0}),
        ({"read": {**BY_ORDER, "in_turn": True}}, set(), {0}),
        ({}, set(), set()),
        ({"write": BY_ORDER}, set(), set()),
        ({"read": {**BY_ORDER, "replayable": False}}, set(), set()),
        ({"read": BY_ORDER, "kind": "blocking"}, set(), set()),
        ({"read": BY_ORDER, "write": BY_ORDER}, {0}, {0}),
        ({"read": {**BY_ORDER, "parallelism": 1}, "write": BY_ORDER}, {0, 1}, {0, 1}),
        ({"read": {**BY_ORDER, "parallelism": 1, "in_turn": True}, "write": BY_ORDER}, set(), {0, 1}),
        ({"read": {"parallelism": 1}, "write": BY_ORDER}, set(), set()),
        ({"read": {**BY_ORDER, "parallelism": 1}, "write": BY_ORDER, "also": BY_ORDER}, {0, 2}, {0, 2}),
    ],
)
def test_versions_are_kept_where_the_order_of_rows_is_the_same(
    fields: dict[str, Any], always: set[int], of_one_split: set[int]
) -> None:
    found = graph(**fields)
    assert (found.same_rows(), found.same_rows(of_one_split=True)) == (always, of_one_split)
    assert not graph(**fields, guarantee="loss").same_rows(of_one_split=True)


def test_what_a_function_deals_out_it_may_deal_otherwise_the_next_time() -> None:
    job = graph(read=BY_ORDER)
    chosen = [edge.model_copy(update={"partitioner": "custom"}) for edge in job.edges]
    assert job.same_rows() and not job.model_copy(update={"edges": chosen}).same_rows(of_one_split=True)


ITEMS = Stream.items([("a", 1), ("b", 2)])
KEYED = ITEMS.key_by(lambda row: row[0])


@pytest.mark.parametrize(
    ("stream", "by_order"),
    [
        (ITEMS.map(str).filter(bool).flat_map(list).rebalance(), [True, False]),
        (ITEMS.map(str, on_error="skip").rebalance(), [False, False]),
        (ITEMS.key_by(str, on_error="dead_letter").count(emit="each").rebalance(), [False, True, False]),
        (ITEMS.event_time(lambda row: row[1]).rebalance(), [True, False]),
        (ITEMS.to_table({"n": "int64"}).map_batches(lambda batch: batch).rebalance(), [False, False]),
        (KEYED.process(lambda row, state: [row]).rebalance(), [True, True, False]),
        (KEYED.process(lambda row, state: [], lambda key, state: []).rebalance(), [True, False, False]),
        (KEYED.process(lambda row, state: [row], ttl=timedelta(1)).rebalance(), [True, False, False]),
        (KEYED.fold(list, lambda found, row: found, emit="each").rebalance(), [True, True, False]),
        (KEYED.fold(list, lambda found, row: found, emit="batch").rebalance(), [True, False, False]),
        (KEYED.count(emit="each").rebalance(), [True, True, False]),
    ],
)
def test_which_steps_go_by_the_order_of_rows_alone(stream: Any, by_order: list[bool]) -> None:
    job = compile_job(stream.collect(), parallelism=2)
    assert [vertex.by_order for vertex in job.vertices] == by_order


class Found:
    """A source whose splits become more."""

    bounded = False
    discovery_interval = timedelta(seconds=1)
    replayable = True

    def splits(self) -> list[str]:
        return ["a"]

    def read(self, split: str, position: bytes) -> Iterator[tuple[list[int], bytes]]:
        yield [1], b""


@pytest.mark.parametrize(
    ("source", "by_order", "in_turn"),
    [
        (Stream.items([1]), True, False),
        (Stream.items([1]).event_time(int), True, True),
        (Stream.generate(), True, False),
        (Stream.generate().event_time(int), True, False),
        (Stream.source(Numbered(1.0, "stop", "begin")), True, True),
        (Stream.source(Found()), False, True),
    ],
)
def test_what_the_order_of_a_sources_rows_hangs_on(source: Any, by_order: bool, in_turn: bool) -> None:
    vertex = compile_job(source.rebalance().collect(), parallelism=2).vertices[0]
    assert (vertex.by_order, vertex.in_turn) == (by_order, in_turn)


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
    assert never_cut(found) == (never_saved(found) if text.startswith("a blocking") else "")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "a durable snapshot of the whole job every 30 s"),
        ({"kind": "blocking"}, "no durable snapshots, and so two workers at least: a blocking exchange"),
        ({"durable_interval": 0}, "no durable snapshots (durable_interval), and so two workers at least"),
        ({"read": {"stream": "s"}}, "a write to 's' ends once a durable snapshot covers it, which is begun"),
        (
            {"read": {"stream": "s", **ENDLESS}, "write": {"sink": "counts", **ENDLESS}},
            "it also waits until readers have committed what counts keeps of it",
        ),
        (
            {"read": {"stream": "s"}, "durable_interval": 0},
            "a write to 's' ends once local snapshots cover it",
        ),
    ],
)
def test_a_reader_is_told_of_durable_snapshots(fields: dict[str, Any], text: str) -> None:
    found = "\n".join(guarantee_lines(graph(**fields)))
    assert text in found


@pytest.mark.parametrize(
    ("fields", "by_cuts"),
    [
        ({"read": {"stream": "s"}}, {0}),
        ({"read": {"stream": "s"}, "also": {"stream": "t"}}, {0, 2}),
        ({"read": {"stream": "s"}, "durable_interval": 0}, set()),
        ({"read": {"stream": "s"}, "guarantee": "loss"}, set()),
        ({"read": {"stream": "s"}, "kind": "blocking"}, set()),
        ({}, set()),
    ],
)
def test_receipts_of_writes_wait_for_durable_snapshots_where_there_are_any(
    fields: dict[str, Any], by_cuts: set[int]
) -> None:
    assert receipted_by_cuts(graph(**fields)) == by_cuts


def test_receipts_wait_for_none_where_a_stream_leads_to_an_input_that_is_read_first() -> None:
    """That input does not end before it has all receipts, and until then there is no durable snapshot."""
    job = graph(read={"stream": "s"}, also={"stream": "t"})
    behind = [*job.vertices, vertex("match"), vertex("rows", is_source=True)]
    side = Edge(source=1, target=3, input=1, partitioner="broadcast")
    edges = [job.edges[0], side, Edge(source=4, target=3, partitioner="hash")]
    others = [Edge(source=2, target=3, partitioner="hash")]
    found = job.model_copy(update={"vertices": behind, "edges": [*edges, *others]})
    assert receipted_by_cuts(found) == {2}
    assert "the job fails if a task is lost with the holder" in "\n".join(guarantee_lines(found))
