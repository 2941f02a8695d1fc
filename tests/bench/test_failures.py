"""Failures of a numbered job: what a round says of a job that does not recover."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.bench import failures
from minishuffle.bench.failures import FailureSeries
from minishuffle.errors import ShuffleError
from minishuffle.wire.requests import JobInfo, TaskInfo


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


def failing(path: Path, *infos: JobInfo, standby: int = 0) -> FailureSeries:
    """On a job that looks like these, one after the other, the last one for ever."""
    looks = list(infos)
    handle: Any = SimpleNamespace(
        info=lambda: looks.pop(0) if len(looks) > 1 else looks[0], events=lambda: iter(())
    )
    cluster: Any = SimpleNamespace(status=lambda: SimpleNamespace(workers=[]))
    return FailureSeries(cluster, handle, str(path), standby=standby, choose=lambda count: count - 1)


def job(*tasks: TaskInfo, state: str = "running") -> JobInfo:
    return JobInfo(job="j1", name="drill", state=state, submitted_at=0.0, tasks=list(tasks))


def test_a_job_is_whole_when_all_its_tasks_run(tmp_path: Path) -> None:
    broken, whole = job(task("process", 0, "restarting")), job(task("process", 0, attempt=2))
    assert failing(tmp_path, broken, broken, whole).wait_until_whole() is whole


def test_a_job_that_has_ended_or_lacks_a_standby_worker_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ShuffleError, match="the job is failed instead of running"):
        failing(tmp_path, job(state="failed")).wait_until_whole()
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", 0.01)
    with pytest.raises(ShuffleError, match=r"has not recovered within 0.01 s"):
        failing(tmp_path, job(task("process", 0)), standby=1).wait_until_whole()
    with pytest.raises(ShuffleError, match="has had no output"):
        failing(tmp_path, job(task("process", 0))).wait_for_output()


def test_a_task_that_does_not_answer_fails_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", 0.05)
    running = job(task("Numbered", 0), *(task("process", index) for index in range(8)))
    with pytest.raises(ShuffleError, match="keyed subtask 7 has not answered to 'fail' in time"):
        failing(tmp_path, running).fail("task", 0.0)
    assert (tmp_path / "fail-7").exists()


def test_a_round_counts_the_attempts_that_were_replaced_beside_the_victims(tmp_path: Path) -> None:
    (tmp_path / "failed-7").touch()
    before = job(task("Numbered", 0), *(task("process", index) for index in range(8)))
    attempts = {3: 2, 7: 2}
    later = [task("process", index, attempt=attempts.get(index, 1)) for index in range(8)]
    found = failing(tmp_path, before, job(task("Numbered", 0), *later)).fail("task", 0.0)
    assert (found.kind, found.victims, found.restarted) == ("task", frozenset([7]), 1)
    assert found.at <= found.whole_at
