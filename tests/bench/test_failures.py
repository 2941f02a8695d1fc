"""Failures of a numbered job: what a round says of a job that does not recover."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.bench import failures
from minishuffle.bench.numbered import NumberedRun
from minishuffle.errors import ShuffleError
from minishuffle.wire.requests import JobEvent, JobInfo, TaskInfo


def task(name: str, index: int, state: str = "running", attempt: int = 1, worker: int = 1) -> TaskInfo:
    return TaskInfo.model_validate(
        {
            "operator": 0,
            "name": name,
            "index": index,
            "attempt": attempt,
            "state": state,
            "worker": worker,
            "counters": {},
        }
    )


def failing(path: Path, *infos: JobInfo, standby: int = 0, ages: list[float] | None = None) -> NumberedRun:
    """On a job that looks like these, one after the other, the last one for ever. Worker n listens at port
    1000 + n; ``ages``: of the last heartbeats of its workers, at each look."""
    looks, heartbeats = list(infos), list(ages or [0.0])

    def status() -> Any:
        age = heartbeats.pop(0) if len(heartbeats) > 1 else heartbeats[0]
        fields = {"host": "127.0.0.1", "state": "alive", "standby": False, "heartbeat_age_seconds": age}
        workers = [SimpleNamespace(worker=n, data_port=1_000 + n, **fields) for n in range(1, 6)]
        return SimpleNamespace(workers=workers)

    def look(job: str = "j1") -> JobInfo:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    cluster: Any = SimpleNamespace(
        client=SimpleNamespace(job=look, status=status, events=lambda job: iter(())),
        status=status,
        submit=lambda stream, **options: SimpleNamespace(id="j1", info=look),
        workers=dict.fromkeys(range(1, 6), 4711),
    )
    return NumberedRun(cluster, "drill", 1.0, str(path), standby=standby, choose=lambda count: count - 1)


def job(*tasks: TaskInfo, state: str = "running") -> JobInfo:
    return JobInfo(job="j1", name="drill", state=state, submitted_at=0.0, tasks=list(tasks))


def test_a_job_is_whole_when_all_its_tasks_run(tmp_path: Path) -> None:
    broken, whole = job(task("process", 0, "restarting")), job(task("process", 0, attempt=2))
    assert failing(tmp_path, broken, broken, whole).failures.wait_until_whole() is whole


def test_a_job_that_has_ended_or_lacks_a_standby_worker_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ShuffleError, match="the job is failed instead of running"):
        failing(tmp_path, job(state="failed")).failures.wait_until_whole()
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", 0.01)
    with pytest.raises(ShuffleError, match=r"has not recovered within 0.01 s"):
        failing(tmp_path, job(task("process", 0)), standby=1).failures.wait_until_whole()
    with pytest.raises(ShuffleError, match="has had no output"):
        failing(tmp_path, job(task("process", 0))).wait_for_output()


def test_a_job_is_whole_when_a_process_has_taken_the_place_of_each_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are those that the next failure needs, where nobody is on standby."""
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", 0.05)
    series = failing(tmp_path, job(task("process", 0)))
    series.failures.wait_until_whole()
    series._cluster.workers[6] = 4712
    with pytest.raises(ShuffleError, match="has not recovered"):
        series.failures.wait_until_whole()


def test_a_task_that_does_not_answer_fails_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", 0.05)
    running = job(task("Numbered", 0), *(task("process", index) for index in range(8)))
    with pytest.raises(ShuffleError, match="keyed subtask 7 has not answered to 'fail' in time"):
        failing(tmp_path, running).failures.fail("task", 0.0)
    assert (tmp_path / "fail-7").exists()


def test_a_round_counts_the_attempts_that_were_replaced_beside_the_victims(tmp_path: Path) -> None:
    (tmp_path / "failed-7").touch()
    before = job(task("Numbered", 0), *(task("process", index) for index in range(8)))
    attempts = {3: 2, 7: 2}
    later = [task("process", index, attempt=attempts.get(index, 1)) for index in range(8)]
    found = failing(tmp_path, before, before, job(task("Numbered", 0), *later)).failures.fail("task", 0.0)
    assert (found.kind, found.victims, found.restarted) == ("task", frozenset([7]), 1)
    assert found.at <= found.whole_at


@pytest.mark.parametrize(
    ("home", "victim", "asked", "address"),
    [(1, 2, 0, "127.0.0.1:1002"), (5, 2, 7, "127.0.0.1:1005")],
)
def test_a_link_is_cut_where_it_was_dialed(
    home: int, victim: int, asked: int, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there is a connection to an address that is known, which the worker with the higher id listens
    at; source and collector may be on any worker once that of the beginning was lost."""
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", 0.05)
    running = job(
        task("Numbered", 0, worker=home),
        *(task("process", index, worker=home if index < 4 else victim) for index in range(4)),
        *(task("process", index, worker=victim) for index in range(7, 8)),
    )
    with pytest.raises(ShuffleError, match=f"subtask {asked} has not answered to 'cut'"):
        failing(tmp_path, running).failures.fail("link", 0.0)
    assert (tmp_path / f"cut-{asked}").read_text() == address


def test_attempts_that_are_replaced_between_two_failures_count_too(tmp_path: Path) -> None:
    """A worker that lives is declared lost, for one."""
    (tmp_path / "failed-7").touch()
    keyed = [task("process", index) for index in range(8)]
    before = job(task("Numbered", 0), *keyed)
    after = job(task("Numbered", 0), *keyed[:7], task("process", 7, attempt=2))
    later = job(task("Numbered", 0, attempt=2), *keyed[:7], task("process", 7, attempt=2))
    last = job(task("Numbered", 0, attempt=2), *keyed[:7], task("process", 7, attempt=3))
    series = failing(tmp_path, before, before, after, after, later, later, last)
    assert series.failures.fail("task", 0.0).restarted == 0
    (tmp_path / "failed-7").touch()
    assert series.failures.fail("task", 0.0).restarted == 1


def test_a_suspicion_counts_if_it_is_not_of_the_worker_that_was_struck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job(task("Numbered", 0), *(task("process", index, worker=2) for index in range(8)))
    later = job(task("Numbered", 0), *(task("process", index, attempt=2, worker=3) for index in range(8)))
    series = failing(tmp_path, whole, whole, later)
    series._cluster.kill_worker = lambda worker, number: None  # type: ignore[method-assign]
    kinds = ["worker suspected", "worker suspected", "worker trusted"]
    events = [
        JobEvent(number=number, at=0.0, kind=kind, text="", worker=worker)
        for number, (kind, worker) in enumerate(zip(kinds, (2, 4, 4), strict=True), 1)
    ]
    looks = [[], events]
    client: Any = series._cluster.client
    client.events = lambda job: iter(looks.pop(0))
    assert series.failures.fail("stop", 0.0).suspicions == 1


def test_reports_are_waited_for_from_every_worker(tmp_path: Path) -> None:
    running = job(task("process", 0))
    series = failing(tmp_path, running, ages=[3600.0, 3600.0, 0.0])
    assert series.wait_for_reports(time.monotonic_ns() - 10**9) is running
