"""Savepoints of a job that come to an end, or do not; most of it is in the transcripts ``savepoint*.txt``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.instructions import CoordinatorStep, ReadSnapshot, WorkInFolder
from minishuffle.coordinator.jobs.savepoints import FETCH_SECONDS, FolderWork
from minishuffle.counters import TaskCounters
from minishuffle.errors import StorageUnavailable, UsageError
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.wire.messages import FolderChecked, PauseTasks, WriteState
from minishuffle.wire.reports import StateTaken, StateWritten
from minishuffle.wire.requests import (
    CancelJob,
    GetEvents,
    GetRows,
    PauseJob,
    ResumeJob,
    SaveJob,
    SubmitJob,
    WaitSavepoint,
)

if TYPE_CHECKING:
    from conftest import FakeCluster

Pair = "tuple[FakeWorker, FakeWorker]"


@pytest.fixture
def work(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> list[FolderWork]:
    """What the coordinator's process was to do in folders."""
    found: list[FolderWork] = []
    carry_out = cluster.do

    def do(step: CoordinatorStep) -> None:
        found.extend(each.work for each in step.messages if isinstance(each, WorkInFolder))
        carry_out(step)

    monkeypatch.setattr(cluster, "do", do)
    return found


def begin(
    cluster: FakeCluster, pair: tuple[Any, ...], job: str, work: list[FolderWork], **fields: Any
) -> None:
    """Up to the barrier, or to the answers of some workers."""
    number = cluster.show(job).savepoint.number + 1
    cluster.request(SaveJob(job=job, token=f"t{number}", directory="/s", **fields))
    cluster.do(cluster.state.folder_ready(work[-1], None, cluster.now))
    for worker in pair:
        cluster.send(worker, FolderChecked(term=cluster.term, job=job, savepoint=number))


def take(cluster: FakeCluster, pair: Pair, job: str, **fields: Any) -> None:
    tell(cluster, pair, job, StateTaken, **fields)


def tell(cluster: FakeCluster, pair: Pair, job: str, kind: Any, **fields: Any) -> None:
    number = cluster.show(job).savepoint.number
    for worker in pair:
        for key, task in worker.tasks.items():
            attempt = AttemptId.of(*key, task.attempt)
            cluster.fact(worker, kind(attempt=attempt, savepoint=number, **fields))


def end(cluster: FakeCluster, job: str) -> tuple[str, str]:
    """Where a savepoint is, and why it failed."""
    found = cluster.show(job).savepoint
    return found.phase, found.problem


def test_a_job_that_a_user_has_paused_stays_paused(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    cluster.request(PauseJob(job=job))
    cluster.stand_all(job)
    begin(cluster, pair, job, work)
    assert all(worker.got(WriteState) for worker in pair)
    take(cluster, pair, job)
    tell(cluster, pair, job, StateWritten)
    cluster.do(cluster.state.folder_ready(work[-1], None, cluster.now))
    assert (end(cluster, job), cluster.show(job).state) == (("none", ""), "paused")
    assert cluster.show(job).savepoint.stood_seconds == 0.0


@pytest.mark.parametrize(
    ("what", "phase", "text"),
    [
        ("lost worker", "none", "ended before its state was written"),
        ("answer", "taking", ""),
        ("nothing", "none", r"^worker 2 did not look for /s/j1-savepoint-1-\d+ within 600 s"),
        ("cancel", "none", "the job is"),
        ("coordinator", "none", "the coordinator was lost"),
    ],
)
def test_a_worker_that_does_not_answer_is_named(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork], what: str, phase: str, text: str
) -> None:
    begin(cluster, pair[:1], job, work)
    assert end(cluster, job) == ("checking", "")
    match what:
        case "lost worker":
            cluster.lose(pair[1])
        case "answer":
            cluster.send(pair[1], FolderChecked(term=cluster.term, job=job, savepoint=1))
        case "nothing":
            cluster.advance(cluster.settings.savepoint_timeout + 1.0)
        case "cancel":
            cluster.request(CancelJob(job=job))
        case "coordinator":
            cluster.lose_coordinator()
    found = end(cluster, job)
    assert found[0] == phase and re.search(text, found[1])


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("at", ["aligning", "taking", "writing", "committing"])
@pytest.mark.parametrize("what", ["lost worker", "cancel", "deadline", "coordinator", "problem"])
def test_whatever_ends_it_leaves_no_manifest_and_a_job_that_runs(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork], stop: bool, at: str, what: str
) -> None:
    if at == "aligning" and not stop:
        cluster.report(pair[1], (job, 1, 1), "failed")
    begin(cluster, pair, job, work, stop=stop)
    if at != "aligning":
        cluster.stand_all(job)
    if at in ("writing", "committing"):
        take(cluster, pair, job)
    if at == "committing":
        tell(cluster, pair, job, StateWritten)
    assert end(cluster, job) == (at, "")
    committing = work[-1]
    match what:
        case "lost worker":
            cluster.lose(pair[1])
        case "cancel":
            cluster.request(CancelJob(job=job))
        case "deadline":
            cluster.advance(cluster.settings.savepoint_timeout + 1.0)
        case "coordinator":
            cluster.lose_coordinator()
        case "problem" if at == "committing":
            cluster.do(cluster.state.folder_ready(committing, StorageUnavailable("full"), cluster.now))
        case "problem":
            kind = StateTaken if at == "taking" else StateWritten
            tell(cluster, pair, job, kind, problem="full")
    phase, problem = end(cluster, job)
    if (at, what) in (("aligning", "lost worker"), ("aligning", "problem"), ("committing", "lost worker")):
        assert (phase, problem) == (at, ""), "nothing is lost by that"
        return
    if (at, what, stop) in (("writing", "cancel", False), ("committing", "cancel", False)):
        assert work[-1].work == "discard" or phase == at
        return
    assert phase == "none" and problem
    assert work[-1].work == "discard"
    if what != "cancel":
        assert cluster.show(job).state in ("running", "created")
    if at == "committing":  # That was too late.
        cluster.do(cluster.state.folder_ready(committing, None, cluster.now))
        assert end(cluster, job) == (phase, problem)


def test_what_a_stopped_job_held_is_in_its_savepoint_and_not_lost(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    begin(cluster, pair, job, work, stop=True)
    cluster.stand_all(job)
    take(cluster, pair, job)
    tell(cluster, pair, job, StateWritten)
    cluster.do(cluster.state.folder_ready(work[-1], None, cluster.now))
    counters = TaskCounters(records_in=70, rows_done=70, state_rows=4)
    cluster.report_all(job, "canceled", counters=counters)
    info = cluster.show(job)
    assert (info.state, info.state_rows_lost, info.rows_dropped, info.rows_in_flight) == (
        "canceled",
        0,
        {},
        0,
    )


def test_a_barrier_passes_through_a_job_that_runs(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    begin(cluster, pair, job, work)
    asked = pair[0].got(WriteState)[-1]
    assert asked.goes_on and not pair[0].got(PauseTasks) and cluster.show(job).state == "running"
    take(cluster, pair[:1], job, stood=0.25)
    assert not pair[0].got(PauseTasks), "some have yet to come to it"
    take(cluster, pair[1:], job, stood=0.125)
    ended = pair[0].got(PauseTasks)[-1]
    assert (ended.barrier, ended.paused) == (asked.barrier, False)
    cluster.advance(7.0)
    tell(cluster, pair, job, StateWritten)
    cluster.do(cluster.state.folder_ready(work[-1], None, cluster.now))
    found = cluster.show(job)
    assert (found.state, found.savepoint.phase, found.savepoint.problem) == ("running", "none", "")
    assert found.savepoint.stood_seconds == 0.25


def test_a_task_that_ends_before_the_barrier_is_not_waited_for(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    begin(cluster, pair, job, work)
    for worker, kind in ((worker, kind) for worker in pair for kind in (StateTaken, StateWritten)):
        for key in [key for key in worker.tasks if key[1] == 1]:
            attempt = AttemptId.of(*key, worker.tasks[key].attempt)
            cluster.fact(worker, kind(attempt=attempt, savepoint=1))
    assert end(cluster, job) == ("taking", "")
    for worker in pair:
        for key in [key for key in worker.tasks if key[1] == 0]:
            cluster.report(worker, key, "finished")
    assert end(cluster, job) == ("committing", "")
    manifest = work[-1].manifest
    assert manifest is not None and [each.state for each in manifest.tasks] == [
        *["ended"] * 2,
        *["running"] * 2,
    ]


def test_some_tasks_of_a_vertex_that_end_before_the_barrier_are_named(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    begin(cluster, pair, job, work)
    cluster.report(pair[1], (job, 1, 1), "finished")
    take(cluster, pair, job)
    assert "has ended, and the rest of" in end(cluster, job)[1]
    assert not pair[0].got(PauseTasks)[-1].paused


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("pause", "a client pauses the job meanwhile: take it again"),
        ("away", "worker 2 was away meanwhile: take it again"),
        ("restart", "ended before its state was written"),
    ],
)
def test_what_needs_another_barrier_takes_it_back(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork], what: str, text: str
) -> None:
    begin(cluster, pair, job, work)
    asked = pair[0].got(WriteState)[-1]
    match what:
        case "pause":
            cluster.request(PauseJob(job=job))
        case "away":
            cluster.add()
            assert end(cluster, job) == ("taking", ""), "it has none of its tasks"
            cluster.break_link(pair[1])
            cluster.come_back(pair[1])
        case "restart":
            cluster.report(pair[1], (job, 1, 1), "failed")
    phase, problem = end(cluster, job)
    assert phase == "none" and text in problem and work[-1].work == "discard"
    said = pair[0].got(PauseTasks)[-1]
    assert (said.barrier, said.paused) == (
        (asked.barrier + 1, True) if what == "pause" else (asked.barrier, False)
    )


@pytest.mark.parametrize("comes", [False, True])
def test_it_waits_for_tasks_that_restart_and_for_no_longer_than_a_pause_would(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork], comes: bool
) -> None:
    cluster.report(pair[1], (job, 1, 1), "failed")
    begin(cluster, pair, job, work)
    cluster.advance(cluster.settings.pause_timeout - 1.0)
    assert (end(cluster, job), pair[0].got(WriteState)) == (("aligning", ""), [])
    if not comes:
        cluster.advance(2.0)
        assert "not all of its tasks ran within 10 s (pause_timeout)" in end(cluster, job)[1]
        return
    cluster.report(pair[1], (job, 1, 1), "running", attempt=2)
    assert len(pair[0].got(WriteState)) == 1
    cluster.advance(cluster.settings.pause_timeout + 1.0)
    assert end(cluster, job) == ("taking", ""), "nobody stands for it"
    cluster.advance(cluster.settings.savepoint_timeout)
    assert "had not taken their state within 600 s (savepoint_timeout)" in end(cluster, job)[1]


def test_one_that_waits_for_tasks_takes_a_job_that_is_paused_meanwhile(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    cluster.report(pair[1], (job, 1, 1), "failed")
    begin(cluster, pair, job, work)
    cluster.request(PauseJob(job=job))
    assert end(cluster, job) == ("aligning", "")
    cluster.report(pair[1], (job, 1, 1), "running", attempt=2)
    cluster.stand_all(job)
    assert not pair[0].got(WriteState)[-1].goes_on
    cluster.advance(cluster.settings.pause_timeout + 1.0)
    take(cluster, pair, job)
    assert (end(cluster, job), cluster.show(job).state) == (("writing", ""), "paused")


@pytest.mark.parametrize("setting", [{"flow_control": "tcp"}, {"buffers_per_channel": 0}])
def test_a_job_stands_whose_channels_cannot_be_held_back_one_by_one(
    cluster: FakeCluster,
    pair: Pair,
    make_graph: Callable[..., JobGraph],
    work: list[FolderWork],
    setting: dict[str, Any],
) -> None:
    job = cluster.submit(make_graph(**setting))
    cluster.report_all(job, "running")
    begin(cluster, pair, job, work)
    assert cluster.show(job).state == "pausing"
    cluster.stand_all(job)
    assert not pair[0].got(WriteState)[-1].goes_on
    take(cluster, pair, job)
    assert (end(cluster, job), cluster.show(job).state) == (("writing", ""), "running")


def test_rows_that_nobody_has_fetched_are_waited_for_and_then_refused(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    for fetches in (True, False):
        cluster.collect(pair[0], ("j1", 1, 0), b"rows", rows=1)
        begin(cluster, pair, job, work)
        cluster.stand_all(job)
        take(cluster, pair, job)
        tell(cluster, pair, job, StateWritten)
        assert end(cluster, job) == ("writing", "")
        if fetches:
            cluster.ask(GetRows(job=job, after=1, wait_seconds=30.0))
            assert work[-1].work == "commit"
            cluster.do(cluster.state.folder_ready(work[-1], None, cluster.now))
        else:
            cluster.advance(FETCH_SECONDS + 0.5)
            assert "nobody has fetched rows" in end(cluster, job)[1]


def test_a_worker_that_comes_back_is_asked_again(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    begin(cluster, pair, job, work, stop=True)
    cluster.stand_all(job)
    one, other = pair
    take(cluster, (one,), job)
    for worker in pair:
        cluster.break_link(worker)
        cluster.come_back(worker)
    assert [len(worker.got(WriteState)) for worker in pair] == [1, 2]
    take(cluster, (other,), job)
    assert end(cluster, job) == ("writing", "")


def test_who_waits_hears_of_the_end(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    begin(cluster, pair, job, work, stop=True)
    wait = cluster.ask(WaitSavepoint(job=job, wait_seconds=30.0))
    assert cluster.reply(wait) is None
    cluster.request(ResumeJob(job=job))
    assert cluster.reply(wait).savepoint.problem
    code, text = cluster.refusal(SaveJob(job="j9", token="t"))
    assert code != UsageError.code and "j9" in text


def test_a_client_that_goes_while_its_savepoint_is_read_starts_no_job(
    cluster: FakeCluster, pair: Pair, make_graph: Callable[..., JobGraph]
) -> None:
    graph = make_graph(1, 1).to_bytes()
    read: list[ReadSnapshot] = []
    for goes in (True, False):
        submit = SubmitJob(name="n", python="3.11", graph=graph, restore_from="/s")
        step = cluster.state.client_request(1_000 + goes, 70, submit, cluster.now)
        read += [each for each in step.messages if isinstance(each, ReadSnapshot)]
        cluster.do(step)
        if goes:
            cluster.do(cluster.state.link_closed(1_000 + goes, cluster.now))
        manifest = SnapshotManifest("1", "savepoint", 1, 0.0, "c", "j1", "n")
        cluster.do(cluster.state.snapshot_read(read[-1].ticket, manifest, cluster.now))
        assert len(cluster.jobs_journaled()) == (not goes)


def test_events_show_no_key_of_an_object_store(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    cluster.request(SaveJob(job=job, token="t", directory="s3://key:word@bucket/saved?region=here"))
    assert "word@" in work[-1].folder
    cluster.advance(cluster.settings.savepoint_timeout + 1.0)
    texts = [event.text for event in cluster.request(GetEvents(job=job)).events]
    assert any("into s3://bucket/saved/" in text for text in texts) and "word@" not in "".join(texts)


def test_only_who_takes_one_sees_the_key_of_its_store(
    cluster: FakeCluster, pair: Pair, job: str, work: list[FolderWork]
) -> None:
    """The page and ``jobs show`` show its place to whoever may read them."""
    cluster.request(SaveJob(job=job, token="t", directory="s3://key:word@bucket/s?region=here"))
    taken = cluster.request(WaitSavepoint(job=job, wait_seconds=0.0))
    assert work[-1].folder == taken.savepoint.path
    assert taken.savepoint.path.startswith("s3://key:word@bucket/s/j1-") and "?region" in work[-1].folder
    assert cluster.show(job).savepoint.path == work[-1].folder.replace("key:word@", "").partition("?")[0]
