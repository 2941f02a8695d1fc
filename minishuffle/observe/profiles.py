"""Views of a subtask's profile: the tree of calls, the functions by their own time, and folded stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from minishuffle.errors import PeerLost, UsageError
from minishuffle.wire.inquiries import (
    AskWorkers,
    FrameKind,
    ProfiledFrame,
    ProfiledTask,
    TaskProfile,
    WorkersAnswered,
)
from minishuffle.wire.requests import TaskInfo

__all__ = [
    "PROFILE_LATE_SECONDS_MAX",
    "Called",
    "ProfileQuestion",
    "SubtaskProfile",
    "calls",
    "folded_lines",
    "functions",
]

Function: TypeAlias = tuple[str, str]
"""Its name and its file."""
PROFILE_LATE_SECONDS_MAX: Final = 5.0
"""Seconds for which an overdue profile is asked for, from a worker that is held up."""


@dataclass(slots=True)
class Called:
    """A function, operator or wait in one place of the tree of calls, or in all of them."""

    function: str
    kind: FrameKind
    file: str
    samples: int = 0
    """Samples in it, and in functions called by it."""
    own: int = 0
    """Samples in itself."""
    lines: Counter[int] = field(default_factory=Counter)
    """Samples by line."""
    inner: dict[Function, Called] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """File and line with the most samples; empty for an operator and for a wait."""
        return f"{self.file}:{self.lines.most_common(1)[0][0]}" if self.file else ""

    def count(self, frame: ProfiledFrame, samples: int, *, innermost: bool) -> None:
        self.samples += samples
        self.own += samples if innermost else 0
        self.lines[frame.line] += samples

    def called(self) -> list[Called]:
        """The functions it called, the one with the most samples first."""
        return sorted(self.inner.values(), key=lambda each: each.samples, reverse=True)


class SubtaskProfile(TaskProfile):
    """An ended profile, with its subtask."""

    job: str
    task: str
    """Name and index of the subtask."""
    worker: int


class ProfileQuestion:
    """The questions to the worker of a subtask for its profile, until it has ended.

    Args:
        name: a unique id of the profile.

    Raises:
        UsageError: the subtask is on no worker.
    """

    def __init__(self, job: str, task: TaskInfo, name: str, *, seconds: float, hertz: float) -> None:
        self._job, self._task = job, task
        self._subject = f"{task.name}[{task.index}]"
        if not task.worker:
            raise UsageError(f"{self._subject} of job {job} is {task.state}, on no worker: ask when it runs")
        asked = ProfiledTask(
            profile=name, operator=task.operator, index=task.index, seconds=seconds, hertz=hertz
        )
        self.message = AskWorkers(job=job, workers=[task.worker], profile=asked)

    def read(self, answered: WorkersAnswered) -> SubtaskProfile | None:
        """The profile; None: it has not ended, or the worker was held up.

        Raises:
            UsageError: the worker refuses it.
        """
        answer = answered.answers.get(self._task.worker)
        if answer is None:
            return None
        profile = TaskProfile.model_validate_json(answer)
        if profile.state == "refused":
            raise UsageError(profile.why)
        if profile.state != "ended":
            return None
        whose = {"job": self._job, "task": self._subject, "worker": self._task.worker}
        return SubtaskProfile.model_validate(whose | profile.model_dump())

    def unanswered(self) -> PeerLost:
        """The error for a profile that is PROFILE_LATE_SECONDS_MAX overdue."""
        return PeerLost(
            f"worker {self._task.worker} does not give its profile of {self._subject}: 'minishuffle dump "
            f"{self._job}' shows whether it answers"
        )


def _stacks(profile: TaskProfile) -> Iterator[tuple[list[ProfiledFrame], int]]:
    for stack in profile.stacks:
        yield [profile.frames[position] for position in stack.frames], stack.samples


def _entry(there: dict[Function, Called], frame: ProfiledFrame) -> Called:
    return there.setdefault((frame.function, frame.file), Called(frame.function, frame.kind, frame.file))


def calls(profile: TaskProfile) -> Called:
    """The tree of calls of the task, operators and waits first."""
    root = Called("", "operator", "")
    for frames, samples in _stacks(profile):
        root.samples += samples
        at = root
        for depth, frame in enumerate(frames, start=1):
            at = _entry(at.inner, frame)
            at.count(frame, samples, innermost=depth == len(frames))
    return root


def functions(profile: TaskProfile) -> list[Called]:
    """All functions wherever they were called, the one with the most samples of its own first."""
    found: dict[Function, Called] = {}
    for frames, samples in _stacks(profile):
        # A recursive function counts once in a sample, at its innermost place.
        last = {(frame.function, frame.file): frame for frame in frames}
        for frame in last.values():
            _entry(found, frame).count(frame, samples, innermost=frame is frames[-1])
    return sorted(found.values(), key=lambda each: (each.own, each.samples), reverse=True)


def folded_lines(profile: TaskProfile) -> Iterator[str]:
    """Each stack as ``operator;function (file:line);… samples``, as flame graph tools read it."""
    for frames, samples in _stacks(profile):
        yield f"{';'.join(map(_folded, frames))} {samples}"


def _folded(frame: ProfiledFrame) -> str:
    text = f"{frame.function} ({frame.file}:{frame.line})" if frame.file else frame.function
    return text.replace(";", ",").replace("\n", " ")
