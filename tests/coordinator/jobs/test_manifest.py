"""The manifest: which files are output, and what a next attempt hears of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs import manifest as manifest_module
from minishuffle.coordinator.jobs.manifest import Manifest
from minishuffle.counters import TaskCounters
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import Acknowledge, ErrorInfo, TaskReport
from minishuffle.wire.outputs import GetFiles, JobFiles
from minishuffle.wire.reports import FileCompleted
from minishuffle.wire.requests import CancelJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

TERM = 7


def completed(file: int, rows: int = 10, *, attempt: int = 1, index: int = 0) -> FileCompleted:
    return FileCompleted(
        attempt=AttemptId.of("j1", 1, index, attempt),
        file=file,
        path=f"/out/part-{index}-{attempt}-{file}.parquet",
        rows=rows,
        bytes=100 * rows,
        checksum="ab",
    )


def test_files_of_an_attempt_are_listed_once_and_in_order() -> None:
    manifest = Manifest()
    assert manifest.add(completed(0)) and manifest.add(completed(1, 5))
    assert not manifest.add(completed(1, 5)), "it is listed already"
    assert not manifest.add(completed(3)), "one in front of it is missing"
    assert manifest.add(completed(0, 7, attempt=2)) and manifest.add(completed(0, 1, index=1))
    assert (manifest.files, manifest.rows) == (4, 23)
    assert manifest.counts(1, 0) == {1: 2, 2: 1} and manifest.counts(1, 1) == {1: 1}
    assert manifest.counts(0, 0) == {}
    assert [file.rows for file in manifest.after(1).files] == [5, 7, 1]


def test_a_file_from_a_snapshot_counts_as_that_of_the_attempt_that_wrote_it() -> None:
    manifest = Manifest()
    assert manifest.add(completed(0))
    first, second = (completed(n, attempt=3).model_copy(update={"writer": 1}) for n in (0, 1))
    assert not manifest.add(first) and manifest.lists(first), "it was listed before"
    assert not manifest.lists(second)
    assert manifest.add(second) and manifest.lists(second)
    assert manifest.counts(1, 0) == {1: 2}
    assert [file.attempt for file in manifest.after(0).files] == [1, 1]


def test_the_last_file_of_a_subtask_is_known_to_the_next_attempt() -> None:
    manifest = Manifest()
    assert manifest.add(completed(0)) and not manifest.is_complete(1, 0)
    assert manifest.add(completed(1).model_copy(update={"is_last": True}))
    recalled = Manifest()
    recalled.recall(manifest.record(), [])
    for each in (manifest, recalled):
        assert each.is_complete(1, 0) and not each.is_complete(1, 1)
        each.start_over()
        assert not each.is_complete(1, 0) and each.files == 2, "rows may come that nobody had listed"


def test_what_a_sink_has_prepared_is_no_file_and_known_to_the_next_attempt() -> None:
    manifest = Manifest()
    for number in range(2):
        prepared = completed(number).model_copy(update={"path": "", "committable": b"%d" % number})
        assert manifest.add(prepared) and manifest.lists(prepared)
    assert (manifest.files, manifest.rows, manifest.after(0).files) == (0, 0, [])
    recalled = Manifest()
    recalled.recall(manifest.record(), [])
    assert manifest.committed == recalled.committed == 20
    for each in (manifest, recalled):
        assert (each.committable(1, 0), each.committable(1, 1), each.counts(1, 0)) == (b"1", b"", {1: 2})


def test_the_last_files_are_kept_and_given_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOB_FILES_KEPT", 5)
    monkeypatch.setattr(manifest_module, "REPLY_FILES_MAX", 3)
    manifest = Manifest()
    for number in range(8):
        manifest.add(completed(number))
    first = manifest.after(0)
    assert ([file.path[-9] for file in first.files], first.next) == (["3", "4", "5"], 6)
    assert [file.path[-9] for file in manifest.after(6).files] == ["6", "7"]
    assert manifest.after(8) == manifest.after(99) == JobFiles(files=[], next=8)
    assert (manifest.files, manifest.rows) == (8, 80)


# --- in the coordinator ---------------------------------------------------------------------------


def files(cluster: FakeCluster, job: str) -> list[str]:
    reply: Any = cluster.request(GetFiles(job=job))
    return [file.path for file in reply.files]


def filed(cluster: FakeCluster, worker: FakeWorker, rows: int, attempt: int = 1) -> None:
    """The sink's heartbeat says that it has taken so many rows."""
    counters = TaskCounters(records_in=rows, rows_filed=rows, rows_done=rows)
    report = TaskReport(attempt=AttemptId.of("j1", 1, 0, attempt), counters=counters)
    cluster.heartbeat(worker, [report])


def test_a_file_is_listed_before_it_is_acknowledged(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.fact(pair[0], completed(0), 1)
    assert pair[0].inbox[-1] == Acknowledge(term=TERM, number=1)
    cluster.fact(pair[0], completed(0), 1)
    assert files(cluster, job) == ["/out/part-0-1-0.parquet"]
    info = cluster.show(job)
    assert (info.files_listed, info.file_rows) == (1, 10)


def test_files_of_a_fenced_attempt_are_not_listed_and_the_next_one_knows_which_are(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    heir = cluster.add(slots=1)
    cluster.fact(pair[0], completed(0))
    filed(cluster, pair[0], 25)
    cluster.lose(pair[0])
    (spec,) = [task for key, task in heir.tasks.items() if key[1] == 1]
    assert (spec.attempt, spec.files) == (2, {1: 1})
    cluster.fact(pair[0], completed(1))
    cluster.fact(heir, completed(0, attempt=2))
    assert files(cluster, job) == ["/out/part-0-1-0.parquet", "/out/part-0-2-0.parquet"]
    info = cluster.show(job)
    assert info.rows_dropped == {"sink_unfinished": 15}
    assert info.rows_in_flight == 0


def test_the_next_attempt_has_what_the_one_before_had_prepared(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    heir = cluster.add(slots=1)
    filed(cluster, pair[0], 25)
    cluster.fact(pair[0], completed(0).model_copy(update={"path": "", "committable": b"first"}))
    cluster.lose(pair[0])
    (spec,) = [task for key, task in heir.tasks.items() if key[1] == 1]
    assert (spec.attempt, spec.files, spec.committable) == (2, {1: 1}, b"first")
    assert cluster.show(job).rows_dropped == {"sink_unfinished": 15}
    assert files(cluster, job) == []


def test_a_file_that_is_not_listed_is_acknowledged_as_refused_also_when_it_is_named_again(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """It comes behind the end of its attempt."""
    cluster.fact(pair[0], completed(0), 1)
    cluster.report(pair[0], (job, 1, 0), "abandoned", number=2)
    for _ in range(2):
        cluster.fact(pair[0], completed(1), 3)
        assert pair[0].inbox[-1] == Acknowledge(term=TERM, number=3, refused=True)
    cluster.fact(pair[0], completed(0), 1)
    assert pair[0].inbox[-1] == Acknowledge(term=TERM, number=1), "that one is listed"
    assert files(cluster, job) == ["/out/part-0-1-0.parquet"]


def test_rows_in_files_that_were_listed_after_the_last_heartbeat_are_not_lost(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.add(slots=1)
    filed(cluster, pair[0], 25)
    cluster.fact(pair[0], completed(0, 40))
    cluster.lose(pair[0])
    assert cluster.show(job).rows_dropped == {}


def test_what_was_complete_survives_a_cancel_and_the_rest_is_counted(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.fact(pair[0], completed(0))
    cluster.request(CancelJob(job=job))
    cluster.fact(pair[0], completed(1))
    counters = TaskCounters(records_in=27, rows_filed=27)
    cluster.report(pair[0], (job, 1, 0), "canceled", counters=counters)
    cluster.report_all(job, "canceled")
    info = cluster.show(job)
    assert (info.state, info.files_listed, info.rows_dropped) == ("canceled", 2, {"sink_unfinished": 7})
    cluster.fact(pair[0], completed(2))
    assert len(files(cluster, job)) == 2


def test_a_result_that_a_cancelled_sink_gave_has_its_rows(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.request(CancelJob(job=job))
    counters = TaskCounters(records_in=27, rows_filed=27, rows_in_result=27)
    cluster.report(pair[0], (job, 1, 0), "canceled", counters=counters)
    cluster.report_all(job, "canceled")
    assert cluster.show(job).rows_dropped == {}


def test_a_result_that_nobody_gets_has_no_rows(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    """The attempt failed, and the next one gives another result."""
    counters = TaskCounters(records_in=27, rows_filed=27, rows_in_result=27)
    boom = ErrorInfo(code=60, text="boom")
    cluster.report(pair[0], (job, 1, 0), "failed", error=boom, counters=counters)
    assert cluster.show(job).rows_dropped == {"sink_unfinished": 27}


def test_files_of_a_worker_that_was_lost_may_be_hidden_until_the_next_attempt_runs(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: Callable[..., JobGraph]
) -> None:
    cluster.submit(make_graph(2, 1, restart_strategy="individual"))
    cluster.report_all("j1", "running")
    lost = next(worker for worker in pair if ("j1", 1, 0) in worker.tasks)
    spare = cluster.add()

    def named() -> list[bool]:
        return [file.named for file in cluster.request(GetFiles(job="j1")).files]

    for file in (0, 1):
        cluster.fact(lost, completed(file), file + 1)
    assert named() == [True, True]
    cluster.lose(lost)
    assert named() == [False, False]
    cluster.check_journal()
    (next_one,) = (worker for worker in (*pair, spare) if ("j1", 1, 0) in worker.tasks and worker is not lost)
    cluster.report(next_one, ("j1", 1, 0), "running", attempt=2)
    assert named() == [True, True]


def test_a_job_that_ends_before_the_next_attempt_runs_says_which_files_may_be_hidden(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: Callable[..., JobGraph]
) -> None:
    cluster.submit(make_graph(2, 1, restart_strategy="individual"))
    cluster.report_all("j1", "running")
    lost = next(worker for worker in pair if ("j1", 1, 0) in worker.tasks)
    cluster.fact(lost, completed(0), 1)
    cluster.lose(lost)
    cluster.request(CancelJob(job="j1"))
    cluster.report_all("j1", "canceled", attempt=2)
    cluster.report_all("j1", "canceled")
    assert cluster.show("j1").state == "canceled"
    (file,) = cluster.request(GetFiles(job="j1")).files
    assert not file.named
