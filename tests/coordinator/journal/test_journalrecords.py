from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import is_dataclass
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from pydantic import BaseModel, GetPydanticSchema

from minishuffle import limits
from minishuffle.coordinator.clients.status import CoordinatorFacts
from minishuffle.coordinator.journal.codec import FORMAT, pack_record, require_format, unpack_record
from minishuffle.coordinator.journal.journalrecords import (
    KINDS,
    Recorder,
    job_records,
    recalled_clock,
    recalled_counts,
    recalled_jobs,
    recalled_workers,
)
from minishuffle.coordinator.journal.store import FILE_NAME, CoordinatorJournal
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.ids import AttemptId, RecordKey
from minishuffle.plan.graph import Edge, JobGraph, Vertex
from minishuffle.wire.clients import CommitResult, DescribeResult, DescribeStream, OpenUpstream
from minishuffle.wire.messages import TaskReport
from minishuffle.wire.packed import SplitPosition, pack_positions
from minishuffle.wire.reports import FileCompleted, SourcePositions
from minishuffle.wire.requests import CancelJob, GetEvents, GetLogs

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]


JOURNALS = Path(__file__).with_name("journals")
TERM = 7
ORDERS = Vertex(
    name="from_spark orders",
    parallelism=1,
    operators=["from_spark"],
    is_source=True,
    bounded=False,
    program=b"",
    stream="orders",
    stream_schema=b"s",
)
KEPT = Vertex(
    name="to_spark",
    parallelism=1,
    operators=["to_spark"],
    is_source=False,
    bounded=False,
    program=b"",
    sink="kept",
    sink_schema=b"s",
)


def half() -> float:
    return 0.5


# --- formats ---------------------------------------------------------------------------------------


def live_in(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    """Have happen what the journal keeps records of each kind of; the coordinator then hands over."""
    worker = cluster.add(slots=4)
    cluster.add(standby=True)
    cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    cluster.report_all("j1", "running")
    positions = pack_positions([SplitPosition(0, 10, 5)])
    cluster.fact(worker, SourcePositions(attempt=AttemptId.of("j1", 0, 0, 1), positions=positions), 1)
    cluster.fail(worker, ("j1", 0, 0), 1, "first")
    cluster.advance(1.0)
    cluster.report(worker, ("j1", 0, 0), "running", attempt=2)
    cluster.fact(worker, SourcePositions(attempt=AttemptId.of("j1", 0, 0, 2), positions=positions), 2)
    sink, path = AttemptId.of("j1", 1, 0, 1), "/out/a.parquet"
    cluster.fact(worker, FileCompleted(attempt=sink, file=0, path=path, rows=10, bytes=99, checksum="ab"), 3)
    cluster.collect(worker, ("j1", 1, 0), b"rows")
    cluster.log(worker, "j1", "a line")
    edges = [Edge(source=0, target=1, partitioner="forward")]
    cluster.submit(JobGraph(vertices=[ORDERS, KEPT], edges=edges))
    cluster.report_all("j2", "running")
    cluster.ask(
        OpenUpstream(stream="orders", write="w", partition=0, partitions=1, attempt=1, schema_message=b"s")
    )
    counters = TaskCounters(rows_kept=6)
    kept = TaskReport(attempt=AttemptId.of("j2", 1, 0, 1), counters=counters)
    cluster.heartbeat(worker, [kept])
    cluster.request(CommitResult(job="j2", sink="kept", offsets={0: 4}))
    cluster.do(cluster.state.hand_over(cluster.now))


def written(path: Path, records: Mapping[RecordKey, bytes]) -> None:
    """A journal with these records alone, and no longer than it has to be."""
    path.unlink(missing_ok=True)
    with CoordinatorJournal(path.parent) as journal:
        journal.write(records)
    (path.parent / FILE_NAME).rename(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 1024", "VACUUM"):
            database.execute(statement)


def test_a_journal_of_this_format_says_what_would_be_written_now(
    make_cluster: Callable[..., FakeCluster],
    make_graph: MakeGraph,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Who changes what records say gives ``FORMAT`` the next number, unless no release has this one, and has
    a journal of it written: ``--rewrite-transcripts``."""
    path = JOURNALS / f"format-{FORMAT}.sqlite"
    if request.config.getoption("--rewrite-transcripts"):
        cluster = make_cluster()
        live_in(cluster, make_graph)
        written(path, cluster.journal)
    copyfile(path, tmp_path / FILE_NAME)
    with CoordinatorJournal(tmp_path) as journal:
        records = journal.records
    require_format(records)
    assert {kind for kind, _ in records} == KINDS.keys()
    for key, record in records.items():
        assert pack_record(unpack_record(KINDS[key[0]], key, record)) == record, key
    cluster = make_cluster(records)
    job = cluster.show("j1")
    assert (job.name, job.state, job.restarts) == ("count words", "running", {"failed": 1})
    assert (job.file_rows, job.collected_batches, [task.attempt for task in job.tasks]) == (10, 1, [2, 1])
    assert cluster.request(GetLogs(job="j1")).lines == ["a line"]
    cluster.advance(cluster.settings.heartbeat_timeout)  # Nobody comes back.
    assert cluster.request(DescribeStream(stream="orders")).job == "j2"
    (subtask,) = cluster.request(DescribeResult(job="j2", sink="kept")).subtasks
    assert subtask.end == 6


def parts_of(kind: Any) -> Iterator[Any]:
    """The types of which facts of a type consist; one with a schema of its own has no parts."""
    if any(isinstance(each, GetPydanticSchema) for each in getattr(kind, "__metadata__", ())):
        return
    yield kind
    parts: Iterable[Any] = () if get_origin(kind) is Literal else get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        parts = [each.annotation for each in kind.model_fields.values()]
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        parts = [each for each in get_type_hints(kind).values() if get_origin(each) is not ClassVar]
    for each in parts:
        yield from parts_of(each)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_has_types_down_to_its_last_part(kind: str) -> None:
    """There is no map or list in it whose entries are packed and unpacked by hand."""
    parts = list(parts_of(KINDS[kind]))
    assert [each for each in parts if each in (Any, object, dict, list, tuple, Mapping, Sequence)] == []
    for each in parts:
        assert not is_dataclass(each) or each.__pydantic_config__["extra"] == "forbid"


# --- jobs ------------------------------------------------------------------------------------------


def test_what_is_recalled_has_the_same_records(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    """Causes, failures, positions, replaced attempts and due times included."""
    worker = cluster.add()
    cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    cluster.report_all("j1", "running")
    positions = pack_positions([SplitPosition(0, 10, 5)])
    cluster.fail(worker, ("j1", 0, 0), 1, "first")
    for attempt in (2, 3):
        key = ("j1", 0, 0)
        cluster.advance(1.0)
        cluster.report(worker, key, "running", attempt=attempt)
        cluster.report(worker, key, "failed", attempt=attempt, positions=positions)
    cluster.check_journal()
    (job,) = recalled_jobs(cluster.journal, half)
    live = cluster.state._jobs["j1"]
    assert job_records(job) == job_records(live)
    assert job.info(results=True) == live.info(results=True)
    assert job.next_time() == live.next_time() is not None
    assert job.history.events_after(0, False) == live.history.events_after(0, False)
    job.validate()


def test_a_change_is_written_once_and_what_does_not_change_is_not(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    cluster.add()
    cluster.submit(make_graph(1, 1))
    job = cluster.state._jobs["j1"]
    recorder = Recorder({})
    job.subtasks.touch(*job.subtasks)
    recorder.job(job)
    everything = recorder.take(0.0)
    assert everything == {key: each for key, each in job_records(job).items() if each is not None}
    recorder.job(job)
    assert recorder.take(0.0) == {}
    job.subtasks.touch(*job.subtasks)
    recorder.job(job)
    assert recorder.take(0.0) == {}
    recorder.forget_job("j1")
    assert recorder.take(0.0) == dict.fromkeys(everything)


def test_the_functions_of_a_job_that_has_ended_are_not_kept(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    cluster.add()
    cluster.submit(make_graph(1, 1))
    program = cluster.state._jobs["j1"].graph.vertices[0].program
    assert program and program in cluster.journal["graph", "j1"]
    cluster.report_all("j1", "finished")
    assert recalled_jobs(cluster.journal, half)[0].graph.vertices[0].program == b""
    assert len(recalled_jobs(cluster.journal, half)[0].info(results=True).tasks) == 2


def test_old_events_are_dropped_from_the_journal_too(
    cluster: FakeCluster, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOB_EVENTS_KEPT", 4)
    cluster.add()
    cluster.submit(make_graph(2, 2))
    cluster.report_all("j1", "running")
    cluster.report_all("j1", "finished")
    assert sum(kind == "event" for kind, _ in cluster.journal) == 4
    cluster.check_journal()


def test_workers_that_have_not_ended_are_recalled_with_what_they_were(cluster: FakeCluster) -> None:
    first, second, standby = cluster.add(), cluster.add(slots=3), cluster.add(standby=True)
    cluster.lose(first)
    found = recalled_workers(cluster.journal, 5.0)
    assert [(each.worker, each.epoch, each.state) for each in found] == [
        (second.worker, 2, "awaited"),
        (standby.worker, 3, "awaited"),
    ]
    assert [(each.slots, each.standby, each.last_seen_at) for each in found] == [
        (3, False, 5.0),
        (2, True, 5.0),
    ]
    assert recalled_counts(cluster.journal) == (0, (3, 3, 0))


@pytest.mark.parametrize("damage", [b"", b"\x20\x80", b"\x02\xc1", b"\x02\x80"])
def test_a_record_that_makes_no_sense_is_named(
    cluster: FakeCluster, make_graph: MakeGraph, damage: bytes
) -> None:
    cluster.add()
    cluster.submit(make_graph(1, 1))
    for key, recall in (("job", recalled_jobs), ("graph", recalled_jobs), ("worker", recalled_workers)):
        name = "1" if key == "worker" else "j1"
        records: Any = cluster.journal | {(key, name): damage}
        with pytest.raises(
            ShuffleError, match=rf"{key}.* {name} cannot be read|of job {name} cannot be read"
        ):
            recall(records, 0.0)  # type: ignore[operator]


def test_the_wall_clock_of_a_host_is_recalled_there_as_long_as_it_runs(cluster: FakeCluster) -> None:
    state = CoordinatorState(
        cluster.settings, CoordinatorFacts("test", "0", "3.11", 1, 9, 500.0, "host 1"), {}, lambda: 0.5, 0.0
    )

    def written(offset: float) -> list[float | None]:
        state.anchor(offset)
        changes = state.handle_timer(1.0).records
        records = {key: record for key, record in changes.items() if record is not None}
        return [recalled_clock(records, host) for host in ("host 1", "host 2", "")]

    assert written(500.0) == [500.0, None, None]
    assert written(500.9) == [None, None, None], "it has not moved far enough"
    assert written(501.1) == [501.1, None, None]
    with pytest.raises(ShuffleError, match="record clock cannot be read: ClockRecord.offset: Field required"):
        recalled_clock({("clock", ""): bytes((FORMAT,)) + msgpack.packb({"host": "h"})}, "h")


def test_the_wall_clock_of_a_coordinator_does_not_run_back(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    cluster.add(slots=4)
    cluster.submit(make_graph())
    at = cluster.show("j1").at
    assert at == cluster.show("j1").submitted_at
    cluster.state.anchor(at - cluster.now - 5.0)
    cluster.now += 1.0
    cluster.request(CancelJob(job="j1"))
    (event,) = [each for each in cluster.request(GetEvents(job="j1")).events if each.kind == "canceling"]
    assert event.at == at
    cluster.now += 6.0
    assert cluster.show("j1").at == at + 2.0
