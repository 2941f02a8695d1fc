from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.instructions import Journal
from minishuffle.coordinator.journalrecords import (
    Recorder,
    job_records,
    recalled_clock,
    recalled_counts,
    recalled_jobs,
    recalled_workers,
)
from minishuffle.coordinator.recordcodec import pack_record
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.coordinator.status import CoordinatorFacts
from minishuffle.errors import ShuffleError
from minishuffle.ids import RecordKey
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.packed import SplitPosition, pack_positions
from minishuffle.wire.requests import CancelJob, GetEvents

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]


def half() -> float:
    return 0.5


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
    job.changed = set(job.keys())
    recorder.job(job)
    everything = recorder.take(0.0)
    assert everything == {key: each for key, each in job_records(job).items() if each is not None}
    recorder.job(job)
    assert recorder.take(0.0) == {}
    job.changed = set(job.keys())
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
    assert [(each.slots, each.standby, each.heard_at) for each in found] == [(3, False, 5.0), (2, True, 5.0)]
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
        records: dict[RecordKey, bytes] = {}
        for each in state.handle_timer(1.0):
            if isinstance(each, Journal):
                records.update({key: record for key, record in each.changes.items() if record is not None})
        return [recalled_clock(records, host) for host in ("host 1", "host 2", "")]

    assert written(500.0) == [500.0, None, None]
    assert written(500.9) == [None, None, None], "it has not moved far enough"
    assert written(501.1) == [501.1, None, None]
    with pytest.raises(ShuffleError, match="record clock cannot be read: ClockRecord.offset: Field required"):
        recalled_clock({("clock", ""): pack_record({"host": "h"})}, "h")


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
