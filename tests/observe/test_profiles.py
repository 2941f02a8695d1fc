"""Profiles as a tree of calls, as functions by their own time, and as folded stacks."""

from __future__ import annotations

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import UsageError
from minishuffle.observe.profiles import ProfileQuestion, SubtaskProfile, calls, folded_lines, functions
from minishuffle.wire.inquiries import (
    AskWorkers,
    ProfiledFrame,
    ProfiledStack,
    ProfiledTask,
    TaskProfile,
    WorkersAnswered,
)
from minishuffle.wire.requests import TaskInfo

FRAMES = [
    ProfiledFrame(function="map", kind="operator"),
    ProfiledFrame(function="MapRows.process", kind="runtime", file="minishuffle/operators/row.py", line=46),
    ProfiledFrame(function="fold", kind="code", file="job.py", line=10),
    ProfiledFrame(function="fold", kind="code", file="job.py", line=12),
    ProfiledFrame(function="odd;name", kind="code", file="job.py", line=20),
    ProfiledFrame(function="waits for input", kind="wait"),
]
PROFILE = TaskProfile(
    state="ended",
    seconds=2.0,
    samples={"busy": 90, "idle": 10},
    frames=FRAMES,
    stacks=[
        ProfiledStack(samples=50, frames=[0, 1, 2]),
        ProfiledStack(samples=30, frames=[0, 1, 3, 2, 4]),
        ProfiledStack(samples=10, frames=[0, 1]),
        ProfiledStack(samples=10, frames=[5]),
    ],
)


def test_the_tree_has_what_each_called_with_its_busiest_line() -> None:
    root = calls(PROFILE)
    assert root.samples == 100
    operator, wait = root.called()
    assert [(each.function, each.samples, each.own, each.place) for each in (operator, wait)] == [
        ("map", 90, 0, ""),
        ("waits for input", 10, 10, ""),
    ]
    (process,) = operator.called()
    assert (process.kind, process.samples, process.own) == ("runtime", 90, 10)
    (fold,) = process.called()
    assert (fold.samples, fold.own, fold.place) == (80, 50, "job.py:10")
    (again,) = fold.called()
    assert (again.function, again.samples, again.own) == ("fold", 30, 0)
    assert [(each.function, each.own) for each in again.called()] == [("odd;name", 30)]


def test_functions_have_their_own_time_and_a_sample_once() -> None:
    found = [(each.function, each.own, each.samples, each.place) for each in functions(PROFILE)]
    assert found == [
        ("fold", 50, 80, "job.py:10"),
        ("odd;name", 30, 30, "job.py:20"),
        ("MapRows.process", 10, 90, "minishuffle/operators/row.py:46"),
        ("waits for input", 10, 10, ""),
        ("map", 0, 90, ""),
    ]


def test_stacks_are_folded_as_other_tools_read_them() -> None:
    process = "MapRows.process (minishuffle/operators/row.py:46)"
    assert list(folded_lines(PROFILE)) == [
        f"map;{process};fold (job.py:10) 50",
        f"map;{process};fold (job.py:12);fold (job.py:10);odd,name (job.py:20) 30",
        f"map;{process} 10",
        "waits for input 10",
    ]


def test_a_worker_is_asked_until_the_profile_has_ended_and_a_refusal_says_why() -> None:
    place = {"operator": 1, "name": "map", "index": 3, "attempt": 1, "state": "running", "worker": 2}
    task = TaskInfo.model_validate({**place, "counters": TaskCounters()})
    question = ProfileQuestion("j1", task, "p", seconds=2.0, hertz=50.0)
    asked = ProfiledTask(profile="p", operator=1, index=3, seconds=2.0, hertz=50.0)
    assert question.message == AskWorkers(job="j1", workers=[2], profile=asked)

    def read(profile: TaskProfile) -> SubtaskProfile | None:
        return question.read(WorkersAnswered(answers={2: profile.model_dump_json().encode()}))

    assert read(TaskProfile(state="sampling")) is None
    assert question.read(WorkersAnswered(answers={}, silent=[2])) is None
    found = read(PROFILE)
    assert found is not None and (found.job, found.task, found.worker) == ("j1", "map[3]", 2)
    assert (found.frames, found.stacks) == (PROFILE.frames, PROFILE.stacks)
    with pytest.raises(UsageError, match="takes a profile of a"):
        read(TaskProfile(state="refused", why="it takes a profile of a[1]"))
    assert "worker 2 does not give its profile of map[3]: 'minishuffle dump j1'" in str(question.unanswered())
    nowhere = task.model_copy(update={"worker": 0, "state": "created"})
    with pytest.raises(UsageError, match=r"map\[3\] of job j1 is created, on no worker: ask when it runs"):
        ProfileQuestion("j1", nowhere, "p", seconds=2.0, hertz=50.0)
