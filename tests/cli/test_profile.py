"""Which subtask a profile is of, and a profile as text."""

from __future__ import annotations

import pytest

from minishuffle.cli.profile import chosen_task, profile_lines
from minishuffle.counters import TaskCounters
from minishuffle.errors import UsageError
from minishuffle.wire.inquiries import ProfiledFrame, ProfiledStack, TaskProfile
from minishuffle.wire.requests import JobInfo, TaskInfo

NAMES = ("generate -> parse", "count")
BUSY = {(0, 0): 0.5, (0, 1): 0.7, (1, 0): 0.2, (1, 1): 0.9}
"""Shares of their time."""


class OneJob:
    """Its subtasks have been running two seconds more whenever it is looked at."""

    def __init__(self, state: str = "running") -> None:
        self._state = state
        self._seconds = 0.0

    def job(self, job: str) -> JobInfo:
        self._seconds += 2.0
        tasks = [
            TaskInfo(
                operator=operator,
                name=NAMES[operator],
                index=index,
                attempt=1,
                state="running",
                worker=1 + index,
                counters=TaskCounters(
                    busy_seconds=share * self._seconds, idle_seconds=(1 - share) * self._seconds
                ),
            )
            for (operator, index), share in BUSY.items()
        ]
        return JobInfo(
            job=job, name="j", state=self._state, submitted_at=1.0, ended_at=0.0, tasks=tasks, causes=[]
        )

    def jobs(self, *, tasks: bool) -> list[JobInfo]:
        raise AssertionError("the job is named")


@pytest.mark.parametrize(
    ("named", "name", "why"),
    [
        ("count[0]", "count[0]", ""),
        ("parse[1]", "generate -> parse[1]", ""),
        ("1[1]", "count[1]", ""),
        ("parse", "generate -> parse[1]", ": the busiest of vertex parse, 70% of its time"),
        (None, "count[1]", ": the busiest of the job, 90% of its time"),
    ],
)
def test_a_subtask_is_named_or_is_the_busiest(
    monkeypatch: pytest.MonkeyPatch, named: str | None, name: str, why: str
) -> None:
    monkeypatch.setattr("minishuffle.cli.top.SPAN_SECONDS", 0.0)
    chosen = chosen_task(OneJob(), "j1", named)
    assert (chosen.name, chosen.why) == (name, why)
    assert chosen.task.worker == 1 + chosen.task.index


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (
            "cuont[0]",
            r"no vertex or operator 'cuont': did you mean 'count'\? It has 0 \(generate -> parse\), 1",
        ),
        ("x", "no vertex or operator 'x': name one by .*; functions are what a profile shows"),
        ("count[2]", "count of job j1 has no subtask 2: it has 0 to 1"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(named: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        chosen_task(OneJob(), "j1", named)


def test_a_job_that_has_ended_has_no_profile() -> None:
    with pytest.raises(UsageError, match="job j1 is finished: only one that runs has a profile"):
        chosen_task(OneJob("finished"), "j1", "count[0]")


def test_a_profile_is_the_functions_and_the_tree_without_what_only_calls_on() -> None:
    found = TaskProfile(
        state="ended",
        why="the task has ended",
        seconds=2.0,
        cpu_seconds=1.5,
        samples={"busy": 900, "idle": 100},
        left_out=4,
        frames=[
            ProfiledFrame(function="map", kind="operator"),
            ProfiledFrame(function="process", kind="runtime", file="minishuffle/x.py", line=5),
            ProfiledFrame(function="crunch", kind="code", file="job.py", line=10),
            ProfiledFrame(function="rare", kind="code", file="job.py", line=2),
            ProfiledFrame(function="waits for input", kind="wait"),
        ],
        stacks=[
            ProfiledStack(samples=895, frames=[0, 1, 2]),
            ProfiledStack(samples=100, frames=[4]),
            ProfiledStack(samples=5, frames=[0, 1, 3]),
        ],
    )
    lines = [" ".join(line.split()) for line in profile_lines(found)]
    assert lines == [
        "1,000 samples in 2.0 s, then the task has ended: busy 90% (on a processor 75%), waits for input "
        "10%, for output 0%",
        "4 samples are of stacks beyond the limit, and not below",
        "",
        "own all function place",
        "89.5% 89.5% crunch job.py:10",
        "10.0% 10.0% waits for input",
        "0.5% 0.5% rare job.py:2",
        "",
        "own all what calls what place",
        "0.0% 90.0% map",
        "89.5% 89.5% crunch job.py:10",
        "10.0% 10.0% waits for input",
    ]
    assert not any("what calls what" in line for line in profile_lines(found, tree=False))
    nothing = TaskProfile(state="ended", why="the task has ended")
    assert [line.split(":")[0] for line in profile_lines(nothing)] == [
        "0 samples in 0.0 s, then the task has ended"
    ]
