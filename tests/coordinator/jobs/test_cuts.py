"""Durable snapshots of a job with a guarantee: when they are taken, what ends them, and which are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.instructions import CoordinatorStep, WorkInFolder
from minishuffle.coordinator.jobs.cuts import (
    CUTS_KEPT,
    HASTENED_SECONDS,
    RETRY_SECONDS,
    CompleteCut,
    JobCuts,
)
from minishuffle.coordinator.jobs.fallback import STORAGE_SECONDS_MAX, RestorePoint
from minishuffle.coordinator.jobs.holders import Holders
from minishuffle.coordinator.jobs.savepoints import FolderWork
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    ResourceExhausted,
    ShuffleError,
    StateLost,
    StorageUnavailable,
    UnreadableSnapshot,
)
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph, StatefulOperator
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.wire.messages import (
    CancelTasks,
    CutComplete,
    DeployTasks,
    ErrorInfo,
    PauseTasks,
    TakeSnapshots,
    TaskReport,
    TaskSpec,
    WriteState,
)
from minishuffle.wire.reports import StateTaken, StateWritten
from minishuffle.wire.requests import CancelJob, GetEvents, PauseJob, ResumeJob, SaveJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker


class Cuts:
    """A job on two workers that take its durable snapshots, step by step."""

    def __init__(
        self, cluster: FakeCluster, graph: JobGraph, patch: pytest.MonkeyPatch, *, slots: int = 2
    ) -> None:
        self.cluster = cluster
        self.work: list[FolderWork] = []
        """What the coordinator's process was to do in folders."""
        carry_out = cluster.do

        def do(step: CoordinatorStep) -> None:
            self.work += [each.work for each in step.messages if isinstance(each, WorkInFolder)]
            carry_out(step)

        patch.setattr(cluster, "do", do)
        self.workers = (cluster.add(slots=slots), cluster.add(slots=slots))
        self.job = cluster.submit(graph)
        cluster.report_all(self.job, "running")
        self.interval = graph.settings.durable_interval

    def answer(self, error: ShuffleError | None = None) -> None:
        """The coordinator's process has done the last of its work."""
        self.cluster.do(self.cluster.state.folder_ready(self.work[-1], error, self.cluster.now))

    def lose_workers(self) -> list[int]:
        """All of them; gives those that come instead."""
        for worker in self.workers:
            self.cluster.lose(worker)
        return [self.cluster.add(), self.cluster.add()]

    def begin(self) -> None:
        """Up to the barrier."""
        self.cluster.advance(self.interval + 1.0)
        assert self.work[-1].work == "prepare"
        self.answer()

    def tell(self, kind: Any, worker: FakeWorker, *keys: tuple[int, int], **fields: Any) -> None:
        """Of all tasks there, or these."""
        for (job, *key), task in worker.tasks.items():
            if not keys or tuple(key) in keys:
                attempt = AttemptId.of(job, *key, task.attempt)
                self.cluster.fact(worker, kind(attempt=attempt, savepoint=self.asked.savepoint, **fields))

    def tell_all(self, kind: Any) -> None:
        for worker in self.workers:
            self.tell(kind, worker)

    @property
    def asked(self) -> WriteState:
        """What the tasks were asked for last."""
        found = [each for worker in self.workers for each in worker.got(WriteState)]
        return max(found, key=attrgetter("savepoint"))

    def take(self) -> None:
        """From its beginning to its end."""
        self.begin()
        self.tell_all(StateTaken)
        self.tell_all(StateWritten)
        assert self.work[-1].work == "commit"
        self.answer()

    def discarded(self) -> list[int]:
        return [each.savepoint for each in self.work if each.work == "discard"]

    def events(self) -> list[str]:
        return [event.kind for event in self.cluster.request(GetEvents(job=self.job)).events]


CutsOf = Callable[..., Cuts]


@pytest.fixture
def cuts_of(
    make_cluster: Callable[..., FakeCluster],
    make_graph: Callable[..., JobGraph],
    monkeypatch: pytest.MonkeyPatch,
) -> CutsOf:
    """Of a job of two vertices, with these fields of the one and of the other changed, and of the edge."""

    def make(*changes: dict[str, Any], **of_edge: Any) -> Cuts:
        graph = make_graph(restart_strategy="individual", guarantee="at_least_once", durable_interval=40)
        vertices = [
            vertex.model_copy(update=fields)
            for vertex, fields in zip_longest(graph.vertices, changes, fillvalue={})
        ]
        edges = [edge.model_copy(update=of_edge) for edge in graph.edges]
        graph = graph.model_copy(update={"vertices": vertices, "edges": edges})
        return Cuts(make_cluster(snapshot_dir="/s"), graph, monkeypatch)

    return make


@pytest.fixture
def cuts(cuts_of: CutsOf) -> Cuts:
    return cuts_of()


def test_a_folder_that_is_made_too_late_is_removed(cuts: Cuts) -> None:
    cuts.cluster.advance(cuts.interval + 1.0)
    preparing = cuts.work[-1]
    assert preparing.work == "prepare"
    cuts.cluster.request(CancelJob(job=cuts.job))
    assert cuts.work[-1] == preparing, "the folder is not there yet"
    cuts.answer()
    assert (cuts.work[-1].work, cuts.work[-1].folder) == ("discard", preparing.folder)


def test_one_is_taken_each_interval_while_the_job_runs_and_the_last_two_are_kept(cuts: Cuts) -> None:
    for number in range(1, 5):
        cuts.begin()
        assert cuts.asked.goes_on and cuts.asked.savepoint == number
        assert cuts.asked.folder.startswith(f"/s/{cuts.job}-durable-{number}-")
        cuts.tell(StateTaken, cuts.workers[0])
        cuts.tell(StateTaken, cuts.workers[1], (0, 1))
        assert not cuts.workers[0].got(PauseTasks)[number - 1 :], "one has yet to come to the barrier"
        cuts.tell(StateTaken, cuts.workers[1], (1, 1))
        ended = cuts.workers[0].got(PauseTasks)[-1]
        assert (ended.barrier, ended.paused) == (cuts.asked.barrier, False)
        cuts.tell_all(StateWritten)
        manifest = cuts.work[-1].manifest
        assert manifest is not None and (manifest.kind, manifest.number) == ("durable", number)
        before = cuts.cluster.show(cuts.job)
        assert (before.state, before.durable.number) == ("running", number - 1)
        cuts.answer()
        found = cuts.cluster.show(cuts.job).durable
        assert (found.number, found.taken, found.failed, found.problem) == (number, number, 0, "")
        assert sorted(set(cuts.discarded())) == list(range(1, number + 1 - CUTS_KEPT))
    cuts.cluster.request(CancelJob(job=cuts.job))
    cuts.cluster.report_all(cuts.job, "canceled")
    assert sorted(set(cuts.discarded())) == [1, 2, 3, 4], "nobody goes back to one when the job has ended"
    assert "job falls back" not in cuts.events()


@pytest.mark.parametrize("at", ["taking", "writing", "committing"])
@pytest.mark.parametrize(
    "what", ["lost worker", "problem", "deadline", "pause", "savepoint", "coordinator", "cancel"]
)
def test_one_that_fails_is_followed_by_the_next_and_the_last_good_one_stays(
    cuts: Cuts, at: str, what: str
) -> None:
    cluster = cuts.cluster
    cuts.take()
    cuts.begin()
    barrier = cuts.asked.barrier
    if at != "taking":
        cuts.tell_all(StateTaken)
    if at == "committing":
        cuts.tell_all(StateWritten)
    match what:
        case "lost worker":
            cluster.lose(cuts.workers[1])
        case "problem" if at == "committing":
            cuts.answer(StorageUnavailable("full"))
        case "problem":
            kind = StateTaken if at == "taking" else StateWritten
            cuts.tell(kind, cuts.workers[1], (1, 1), problem="full")
        case "deadline":
            cluster.advance(cluster.settings.savepoint_timeout + 1.0)
        case "pause":
            cluster.request(PauseJob(job=cuts.job))
        case "savepoint":
            cluster.request(SaveJob(job=cuts.job, token="t", directory="/mine"))
        case "coordinator":
            cluster.lose_coordinator()
        case "cancel":
            cluster.request(CancelJob(job=cuts.job))
    found = cluster.show(cuts.job).durable
    if (at, what) == ("committing", "lost worker"):
        assert (found.number, found.failed) == (1, 0), "all of it is written"
        return
    assert (found.number, found.taken) == (1, 1)
    assert (found.failed > 0 and found.problem != "") == (what != "cancel")
    assert 2 in cuts.discarded() and 1 not in cuts.discarded()
    if what in ("problem", "deadline") or (what == "savepoint" and at == "taking"):
        ended = cuts.workers[0].got(PauseTasks)[-1]
        assert ended.barrier >= barrier and not ended.paused
    if what == "problem":
        cuts.take()
        found = cluster.show(cuts.job).durable
        assert (found.number, found.problem) == (3, "")


def test_what_is_removed_is_removed_once_more(cuts: Cuts) -> None:
    """A worker may have written into the folder of one that had failed, and a coordinator that was lost may
    have removed nothing."""
    cuts.begin()
    cuts.tell(StateTaken, cuts.workers[1], (1, 1), problem="full")
    assert cuts.discarded() == [1]
    cuts.take()
    assert cuts.discarded() == [1, 1]
    cuts.take()
    cuts.take()
    assert cuts.discarded() == [1, 1, 2]
    cuts.cluster.lose_coordinator()
    assert cuts.discarded() == [1, 1, 2, 2]


def test_a_task_that_ends_before_the_barrier_comes_is_in_it_as_ended(cuts: Cuts) -> None:
    cuts.begin()
    for index, worker in enumerate(cuts.workers):
        cuts.tell(StateTaken, worker, (1, index))
    assert not cuts.workers[0].got(PauseTasks)
    for index, worker in enumerate(cuts.workers):
        cuts.cluster.report(worker, (cuts.job, 0, index), "finished")
    for index, worker in enumerate(cuts.workers):
        cuts.tell(StateWritten, worker, (1, index), file=f"{index}.state")
    manifest = cuts.work[-1].manifest
    assert manifest is not None
    assert {task.vertex: task.state for task in manifest.tasks} == {0: "ended", 1: "running"}


def test_while_the_job_cannot_take_one_it_is_tried_again(cuts: Cuts) -> None:
    cuts.cluster.request(PauseJob(job=cuts.job))
    cuts.cluster.stand_all(cuts.job)
    cuts.cluster.advance(2 * cuts.interval)
    assert not cuts.work
    cuts.cluster.request(ResumeJob(job=cuts.job))
    cuts.cluster.advance(2 * RETRY_SECONDS)
    assert [each.work for each in cuts.work] == ["prepare"]


def test_none_begins_that_the_next_coordinator_would_not_know_of(cuts: Cuts) -> None:
    """It would look for one that was removed since, and have the job begin anew."""
    cluster = cuts.cluster
    cuts.take()
    cluster.journal_error = ResourceExhausted("the journal cannot be written")
    cluster.state.write_ahead.failed([], str(cluster.journal_error))
    before = len(cuts.work)
    cluster.advance(3 * cuts.interval)
    assert len(cuts.work) == before
    cluster.journal_error = None
    cluster.state.write_ahead.written()
    cluster.advance(2 * RETRY_SECONDS)
    assert [each.work for each in cuts.work[before:]] == ["prepare"]


@pytest.mark.parametrize(
    "fields", [{"guarantee": "loss"}, {"durable_interval": 0}], ids=["no guarantee", "no interval"]
)
def test_other_jobs_take_none(
    make_cluster: Callable[..., FakeCluster],
    make_graph: Callable[..., JobGraph],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    graph = make_graph(restart_strategy="individual", **({"guarantee": "at_least_once"} | fields))
    cuts = Cuts(make_cluster(snapshot_dir="/s"), graph, monkeypatch)
    cuts.cluster.advance(100.0)
    assert not cuts.work


def deployed(worker: FakeWorker) -> list[TaskSpec]:
    return [task for message in worker.got(DeployTasks) for task in message.tasks]


def manifest(cuts: Cuts) -> SnapshotManifest:
    """That of the last complete one."""
    found = [each.manifest for each in cuts.work if each.manifest is not None][-1]
    return replace(found, cluster="test", release="0")


def test_when_two_workers_die_all_tasks_go_back_to_the_last_one(cuts: Cuts) -> None:
    cluster = cuts.cluster
    cuts.take()
    cuts.take()
    cluster.collect(cuts.workers[1], (cuts.job, 1, 1), b"rows", rows=5)
    for worker in cuts.workers:
        cluster.lose(worker)
    assert (cuts.work[-1].work, cuts.work[-1].savepoint) == ("open", 1)
    fresh = [cluster.add(), cluster.add()]
    assert not deployed(fresh[0]), "what they begin with is not known yet"
    cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    tasks = deployed(fresh[0]) + deployed(fresh[1])
    assert sorted((task.operator, task.index) for task in tasks) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not any(task.needs_state or task.rows_collected for task in tasks)
    assert all(task.version in (0, task.attempt) for task in tasks), "their rows are of new versions"
    for worker in fresh:
        for key, task in worker.tasks.items():
            cluster.report(worker, key, "running", attempt=task.attempt)
    info = cluster.show(cuts.job)
    assert (info.state, info.fallbacks, info.rows_again) == ("running", 1, 5)
    assert cuts.events().count("job falls back") == cuts.events().count("job begins again") == 1
    cuts.workers = (fresh[0], fresh[1])
    cuts.take()
    assert cluster.show(cuts.job).durable.number == 3


def test_tasks_that_still_run_end_first_and_what_has_finished_runs_again(cuts: Cuts) -> None:
    cluster, (one, two) = cuts.cluster, cuts.workers
    cuts.take()
    third = cluster.add()
    cluster.report(one, (cuts.job, 0, 0), "finished")
    cluster.fail(one, (cuts.job, 1, 0), StateLost.code, "nobody has its snapshots")
    assert one.got(CancelTasks) == [], "nothing of it runs there"
    cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    assert not [task for task in deployed(one) if task.attempt == 2]
    assert (cuts.job, 1, 1, 1) in two.canceled_attempts
    for operator in (0, 1):
        cluster.report(two, (cuts.job, operator, 1), "canceled")
    again = [task for worker in (one, two, third) for task in deployed(worker) if task.attempt == 2]
    assert sorted((task.operator, task.index) for task in again) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert cluster.show(cuts.job).fallbacks == 1


def test_one_whose_manifest_is_written_while_the_job_goes_back_is_none(cuts_of: CutsOf) -> None:
    """Programs would have receipts for what it covers, and the job goes on from the one before it."""
    cuts = cuts_of({"stream": "clicks"})
    cluster, (one, two) = cuts.cluster, cuts.workers
    cuts.take()
    cuts.begin()
    cuts.tell_all(StateTaken)
    cuts.tell_all(StateWritten)
    commits = cuts.work[-1]
    assert (commits.work, commits.savepoint) == ("commit", 2)
    cluster.fail(one, (cuts.job, 1, 0), StateLost.code, "nobody has its snapshots")
    assert "-durable-1-" in next(each.folder for each in cuts.work if each.work == "open")
    cluster.do(cluster.state.folder_ready(commits, None, cluster.now))
    assert [each.savepoint for each in two.got(CutComplete)] == [1]
    found = cluster.show(cuts.job).durable
    assert (found.number, found.failed) == (1, 1) and cuts.discarded() == [2]


@pytest.mark.parametrize("unreadable", [1, 2])
def test_one_that_cannot_be_read_is_passed_over(cuts: Cuts, unreadable: int) -> None:
    cluster = cuts.cluster
    cuts.take()
    cuts.take()
    fresh = cuts.lose_workers()
    for number in range(unreadable):
        assert f"-durable-{2 - number}-" in cuts.work[-1].folder
        cuts.answer(UnreadableSnapshot("it is gone"))
    if unreadable == 1:
        cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    assert len(deployed(fresh[0]) + deployed(fresh[1])) == 4
    assert cuts.events().count("snapshot passed over") == unreadable
    texts = [each.text for each in cluster.request(GetEvents(job=cuts.job)).events]
    where = "durable snapshot 1" if unreadable == 1 else "its beginning"
    assert f"all tasks go on from {where}" in texts


def test_a_storage_that_does_not_answer_is_asked_again_for_a_while(cuts: Cuts) -> None:
    """The job would begin at its beginning else, since a store was away for a moment."""
    cluster = cuts.cluster
    cuts.take()
    fresh = cuts.lose_workers()
    for _ in range(3):
        asked = len(cuts.work)
        cuts.answer(StorageUnavailable("503"))
        cluster.advance(2.0)
        assert [each.work for each in cuts.work[asked:]] == ["open"] and "-durable-1-" in cuts.work[-1].folder
    assert not deployed(fresh[0]) and cuts.events().count("snapshot awaited") == 1
    cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    assert len(deployed(fresh[0]) + deployed(fresh[1])) == 4


def test_no_wait_for_a_slot_ends_while_a_storage_does_not_answer(
    make_cluster: Callable[..., FakeCluster],
    make_graph: Callable[..., JobGraph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers may be there for long; it ends as late afterwards as it would have."""
    graph = make_graph(restart_strategy="individual", guarantee="at_least_once", durable_interval=40)
    cuts = Cuts(make_cluster(snapshot_dir="/s"), graph, monkeypatch, slots=1)
    cluster = cuts.cluster
    cuts.take()
    cluster.lose(cuts.workers[0])
    assert cluster.show(cuts.job).tasks[0].state == "waiting for a slot"
    cluster.lose(cuts.workers[1])
    for _ in range(int(cluster.settings.slot_timeout)):
        cuts.answer(StorageUnavailable("503"))
        cluster.advance(2.0)
    assert (info := cluster.show(cuts.job)).state == "running", info.causes
    opened = cuts.work[-1]
    cluster.do(cluster.state.folder_ready(opened, manifest(cuts), cluster.now))
    cluster.advance(cluster.settings.slot_timeout / 2)
    fresh = [cluster.add(), cluster.add()]
    assert len(deployed(fresh[0]) + deployed(fresh[1])) == 4


def test_a_storage_that_does_not_answer_for_long_is_done_without(cuts: Cuts) -> None:
    cluster, (one, two) = cuts.cluster, cuts.workers
    cuts.take()
    cluster.fail(one, (cuts.job, 1, 0), StateLost.code, "nobody has its snapshots")
    for worker, key in (one, (0, 0)), (two, (0, 1)), (two, (1, 1)):
        cluster.report(worker, (cuts.job, *key), "canceled")
    cluster.advance(STORAGE_SECONDS_MAX + 1.0)
    cuts.answer(StorageUnavailable("503"))
    assert cuts.events().count("snapshot passed over") == 1
    assert len([task for worker in (one, two) for task in deployed(worker) if task.attempt == 2]) == 4


def test_a_storage_that_hangs_is_waited_for_no_longer(cuts: Cuts) -> None:
    """As a file system of a network whose server has gone: the read never ends."""
    cluster = cuts.cluster
    cuts.take()
    fresh = cuts.lose_workers()
    hangs = cuts.work[-1]
    cluster.advance(STORAGE_SECONDS_MAX - 1.0)
    assert not deployed(fresh[0]) and hangs.work == "open"
    cluster.advance(2.0)
    assert len(deployed(fresh[0]) + deployed(fresh[1])) == 4
    assert cuts.events().count("snapshot passed over") == 1
    cluster.do(cluster.state.folder_ready(hangs, manifest(cuts), cluster.now))
    assert cluster.show(cuts.job).fallbacks == 1, "it comes too late"


def test_one_in_which_a_task_finds_its_state_broken_is_passed_over(cuts_of: CutsOf) -> None:
    """Its manifest is whole, and so are the lengths of all files."""
    counting = [StatefulOperator(id="count", name="count", kind="count")]
    cuts = cuts_of({}, {"states": counting})
    cluster = cuts.cluster
    for _ in range(2):
        cuts.begin()
        for index, worker in enumerate(cuts.workers):
            cuts.tell(StateTaken, worker, (0, index))
            cuts.tell(StateTaken, worker, (1, index), operators=["count"])
        cuts.tell_all(StateWritten)
        cuts.answer()
    fresh = cuts.lose_workers()
    cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    begun = [(worker, key, task.attempt) for worker in fresh for key, task in worker.tasks.items()]
    for worker, key, attempt in begun:
        if key[1] == 1:
            error = ErrorInfo(code=UnreadableSnapshot.code, text="it was changed")
            cluster.report(worker, key, "failed", attempt=attempt, error=error)
    assert cuts.work[-1].work == "open" and "-durable-1-" in cuts.work[-1].folder
    for worker, key, attempt in begun:
        if key[1] == 0:
            cluster.report(worker, key, "canceled", attempt=attempt)
    cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    cluster.advance(1.0)
    again = [task for worker in fresh for task in worker.tasks.values()]
    assert all("-durable-1-" in task.restoration.path for task in again if task.restoration is not None)
    assert sum(task.restoration is not None for task in again) == 2
    events = cluster.request(GetEvents(job=cuts.job)).events
    assert [each.kind for each in events].count("snapshot passed over") == 2, "each task says so"
    assert "all tasks go on from durable snapshot 1" in [each.text for each in events]
    assert cluster.show(cuts.job).fallbacks == 2


def test_a_job_whose_sources_acknowledge_does_not_begin_at_its_beginning(cuts_of: CutsOf) -> None:
    """What precedes its durable snapshots was acknowledged, and does not come again."""
    cuts = cuts_of({"acknowledges": True, "bounded": False, "replayable": False})
    cuts.take()
    for worker in cuts.workers:
        cuts.cluster.lose(worker)
    cuts.answer(UnreadableSnapshot("it is gone"))
    info = cuts.cluster.show(cuts.job)
    assert info.state == "failed"
    assert "durable snapshot 1 cannot be read" in info.causes[0].text


def test_one_is_taken_though_some_tasks_of_a_vertex_have_ended(cuts_of: CutsOf) -> None:
    """Receipts may wait for it: a stream has ended, its first subtask too and what is forwarded from that,
    and a program still writes to the second."""
    state = StatefulOperator(id="count", name="count", kind="count")
    cuts = cuts_of({"stream": "clicks"}, {"states": [state]}, partitioner="forward")
    for vertex in (0, 1):
        cuts.cluster.report(cuts.workers[0], (cuts.job, vertex, 0), "finished")
    cuts.begin()
    cuts.tell(StateTaken, cuts.workers[1], operators=["count"])
    cuts.tell(StateWritten, cuts.workers[1])
    cuts.answer()
    assert cuts.cluster.show(cuts.job).durable.number == 1
    manifest = cuts.work[-1].manifest
    assert manifest is not None
    assert [(task.vertex, task.index, task.state) for task in manifest.tasks] == [
        (0, 0, "ended"),
        (0, 1, "running"),
        (1, 0, "ended"),
        (1, 1, "running"),
    ]


def awaits(cuts: Cuts, number: int) -> None:
    """Receipts of the first task wait for that durable snapshot."""
    attempt = AttemptId.of(cuts.job, 0, 0, 1)
    report = TaskReport(attempt=attempt, counters=TaskCounters(), awaits_cut=number)
    cuts.cluster.heartbeat(cuts.workers[0], [report])


def test_a_job_says_that_programs_wait_for_the_next_one(cuts_of: CutsOf) -> None:
    cuts = cuts_of({"stream": "clicks"})
    awaits(cuts, 0)
    assert cuts.cluster.show(cuts.job).durable.awaited
    awaits(cuts, -1)
    assert not cuts.cluster.show(cuts.job).durable.awaited
    awaits(cuts, 0)
    cuts.cluster.report(cuts.workers[0], (cuts.job, 0, 0), "finished")
    assert not cuts.cluster.show(cuts.job).durable.awaited


def test_all_tasks_of_a_job_take_snapshots_for_a_writer_that_waits_for_these_alone(cuts_of: CutsOf) -> None:
    """That of the task alone would not do: the next attempt begins where its consumers may ask."""
    cuts = cuts_of({"stream": "clicks"})
    report = TaskReport(
        attempt=AttemptId.of(cuts.job, 0, 0, 1), counters=TaskCounters(), awaits_snapshot=True
    )
    cuts.cluster.heartbeat(cuts.workers[0], [report])
    assert [[each.job for each in worker.got(TakeSnapshots)] for worker in cuts.workers] == [[cuts.job]] * 2


def test_receipts_of_writes_have_the_next_one_begin_within_a_second(cuts_of: CutsOf) -> None:
    cuts = cuts_of({"stream": "clicks"})
    cluster = cuts.cluster
    awaits(cuts, -1)
    cluster.advance(1.0)
    assert not cuts.work
    for number in (1, 2):
        awaits(cuts, 0)
        cluster.advance(HASTENED_SECONDS)
        assert [each.savepoint for each in cuts.work if each.work == "prepare"][-1] == number
        cuts.answer()
        awaits(cuts, 0)
        cuts.tell_all(StateTaken)
        cuts.tell_all(StateWritten)
        cuts.answer()
        assert cuts.workers[0].got(CutComplete)[-1].savepoint == number
        begun = len(cuts.work)
        awaits(cuts, number)
        cluster.advance(HASTENED_SECONDS / 2)
        assert not [each for each in cuts.work[begun:] if each.work == "prepare"], "it is complete"
    awaits(cuts, 3)
    cluster.advance(HASTENED_SECONDS)
    assert cuts.work[-1].work == "prepare", "one that has failed"


def test_receipts_of_writes_have_one_under_way_for_half_of_the_time_at_most(cuts_of: CutsOf) -> None:
    cuts = cuts_of({"stream": "clicks"})
    cuts.begin()
    cuts.cluster.advance(4.0)
    cuts.tell_all(StateTaken)
    cuts.tell_all(StateWritten)
    cuts.answer()
    begun = len(cuts.work)
    awaits(cuts, 0)
    cuts.cluster.advance(3.0)
    assert len(cuts.work) == begun
    cuts.cluster.advance(3.0)
    assert [each.work for each in cuts.work[begun:]] == ["prepare"]


@pytest.mark.parametrize("sink", ["", "result"])
def test_one_begins_for_a_worker_that_retains_much_where_results_wait_for_readers(
    cuts_of: CutsOf, sink: str
) -> None:
    cuts = cuts_of({"bounded": False}, {"bounded": False, "sink": sink})
    cuts.take()
    assert len(cuts.workers[0].got(CutComplete)) == bool(sink)
    cuts.cluster.heartbeat(cuts.workers[0], retains_much=True)
    cuts.cluster.advance(2 * HASTENED_SECONDS)
    assert (cuts.work[-1].work == "prepare") == bool(sink)


@pytest.mark.parametrize("is_alone", [False, True])
def test_only_where_nothing_else_frees_what_is_retained_one_is_under_way_all_the_time(
    cuts_of: CutsOf, monkeypatch: pytest.MonkeyPatch, *, is_alone: bool
) -> None:
    cuts = cuts_of({"bounded": False}, {"bounded": False, "sink": "result"})
    cuts.begin()
    cuts.cluster.advance(4.0)
    cuts.tell_all(StateTaken)
    cuts.tell_all(StateWritten)
    cuts.answer()
    monkeypatch.setattr(Holders, "alone", lambda holders: [(0, 0)] if is_alone else [])
    cuts.cluster.heartbeat(cuts.workers[0], retains_much=True)
    cuts.cluster.advance(3.0)
    assert (cuts.work[-1].work == "prepare") == is_alone
    cuts.cluster.advance(3.0)
    assert cuts.work[-1].work == "prepare"


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_job_that_programs_write_to_goes_back_to_the_last_one_and_no_further(
    cuts_of: CutsOf, taken: int
) -> None:
    """Those that have their receipts do not write again, and before the first one none has."""
    cuts = cuts_of({"stream": "clicks"})
    for _ in range(taken):
        cuts.take()
    for worker in cuts.workers:
        cuts.cluster.lose(worker)
    fresh = [cuts.cluster.add(), cuts.cluster.add()]
    if not taken:
        assert len(deployed(fresh[0]) + deployed(fresh[1])) == 4
        return
    assert cuts.work[-1].work == "open" and f"-durable-{taken}-" in cuts.work[-1].folder
    cuts.answer(UnreadableSnapshot("it is gone"))
    info = cuts.cluster.show(cuts.job)
    assert info.state == "failed"
    assert f"durable snapshot {taken} cannot be read" in info.causes[0].text


def test_a_job_whose_receipts_wait_for_none_does_not_begin_at_its_beginning(cuts_of: CutsOf) -> None:
    """Its stream leads to an input that is read to its end first: until then there is none."""
    cuts = cuts_of({"stream": "clicks"}, partitioner="broadcast", input=1)
    assert not any(task.receipts_by_cuts for worker in cuts.workers for task in worker.tasks.values())
    for worker in cuts.workers:
        cuts.cluster.lose(worker)
    info = cuts.cluster.show(cuts.job)
    assert info.state == "failed"
    assert "no worker has their snapshots any more" in info.causes[0].text


def test_the_next_coordinator_has_the_job_go_back(cuts: Cuts) -> None:
    cluster = cuts.cluster
    cuts.take()
    for worker in cuts.workers:
        cluster.lose(worker)
    before = len(cuts.work)
    cluster.lose_coordinator()
    assert [each.work for each in cuts.work[before:]] == ["open"]
    fresh = [cluster.add(), cluster.add()]
    cluster.do(cluster.state.folder_ready(cuts.work[-1], manifest(cuts), cluster.now))
    assert len(deployed(fresh[0]) + deployed(fresh[1])) == 4


def test_a_job_that_is_cancelled_goes_back_no_more(cuts: Cuts) -> None:
    cluster = cuts.cluster
    cuts.take()
    for worker in cuts.workers:
        cluster.lose(worker)
    opened = cuts.work[-1]
    cluster.request(CancelJob(job=cuts.job))
    cluster.do(cluster.state.folder_ready(opened, manifest(cuts), cluster.now))
    assert cluster.show(cuts.job).state == "canceled" and 1 in cuts.discarded()


def test_where_the_last_one_is_is_shown_without_the_key_of_its_store() -> None:
    point = RestorePoint("s3://key:word@bucket/snapshots/j1-1?region=here", published=0, number=1)
    cuts = JobCuts(kept=(CompleteCut(point, 1.0, 2, 3.0),))
    assert cuts.info().path == "s3://bucket/snapshots/j1-1" and cuts.points() == [point]
