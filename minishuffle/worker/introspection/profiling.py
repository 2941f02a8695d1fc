"""Profiles of subtasks: a separate thread samples, at a fixed rate, where the task's thread is, or one of its
asynchronous functions while the thread waits.

A worker takes one profile at a time. It begins with the first question for it, and ends when its time is up,
when the task or the worker ends, or when nobody has asked for PROFILE_UNASKED_SECONDS_MAX.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from minishuffle import limits
from minishuffle.errors import clipped, described
from minishuffle.ids import JobId, OperatorId, SubtaskId
from minishuffle.wire.inquiries import ProfiledTask, TaskProfile
from minishuffle.worker.interpreter import compete
from minishuffle.worker.introspection.stacks import FoldedStacks
from minishuffle.worker.tasks.deployment import Deployment
from minishuffle.worker.tasks.task import Task

__all__ = ["Sampler", "TaskProfiles"]

HAS_ENDED: Final = "the task has ended"


class Sampler:
    """The sampling of one profile.

    Args:
        now: seconds of any origin.
        wait: waits for the given seconds; True: the profile must stop.
    """

    def __init__(
        self, task: Task, asked: ProfiledTask, now: Callable[[], float], wait: Callable[[float], bool]
    ) -> None:
        self._task = task
        self._asked = asked
        self._now = now
        self._wait = wait
        self._stacks = FoldedStacks(task.first_operator)
        self._result: TaskProfile | None = None

    def run(self) -> None:
        """(A thread of its own.) Sample the task until the profile has ended. It catches every exception, so
        that the client learns why there is no profile, and the worker can take another one."""
        try:
            self._result = self._sampled()
        except Exception as error:  # the stack is that of any code at all
            why = clipped(f"it cannot be taken: {described(error)}", limits.MESSAGE_NAME_CHARS_MAX)
            self._result = TaskProfile(state="refused", why=why)

    def _sampled(self) -> TaskProfile:
        hertz, begin, cpu_seconds = self._asked.hertz, self._now(), self._task.processor.had_seconds()
        ticks, due, why = max(1, round(self._asked.seconds * hertz)), 0, ""
        while due < ticks and not self._wait(max(0.0, begin + (due + 1) / hertz - self._now())):
            late = int((self._now() - begin) * hertz)
            before, due = due, min(ticks, max(due + 1, late))
            if not self._look(due - before):
                why = HAS_ENDED
                break
        return TaskProfile(
            state="ended",
            why=why,
            attempt=self._task.attempt_id.attempt,
            seconds=self._now() - begin,
            cpu_seconds=self._task.processor.had_seconds() - cpu_seconds,
            samples=dict(self._stacks.samples),
            left_out=self._stacks.left_out,
            frames=self._stacks.frames,
            stacks=self._stacks.stacks(),
        )

    def _look(self, samples: int) -> bool:
        """Where the thread is now; False: it has ended."""
        thread, state = self._task.thread, self._task.paths.clock.present()[0]
        if thread is None or thread.ident is None or state is None or not thread.is_alive():
            return False
        frames = sys._current_frames()
        frame = frames.get(thread.ident)
        if state != "busy" and (running := self._task.async_frame(frames)) is not None:
            state, frame = "busy", running
        self._stacks.add(frame, state, samples)
        return True

    def profile(self) -> TaskProfile:
        """(Any thread.) As far as it is."""
        found = self._result
        return found if found is not None else TaskProfile(state="sampling")


class _Profile:
    """A profile that runs, or has ended and can still be fetched."""

    def __init__(self, name: str, task: Task, asked: ProfiledTask) -> None:
        self.name = name
        self.subject = f"{task.name}[{asked.index}]"
        self._stop = threading.Event()
        self._sampler = Sampler(task, asked, time.monotonic, self._stop.wait)
        self.thread = threading.Thread(target=self._run, name=f"profile of {self.subject}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        compete()
        self._sampler.run()

    def now(self) -> TaskProfile:
        return self._sampler.profile()

    def end(self) -> None:
        self._stop.set()


class TaskProfiles:
    """The profiles of one worker. (Loop.)

    Args:
        clock: the loop's, in seconds.
    """

    def __init__(self, deployment: Deployment, clock: Callable[[], float]) -> None:
        self._deployment = deployment
        self._clock = clock
        self._profile: _Profile | None = None
        self._asked_at = 0.0

    def answer(self, job: str, asked: ProfiledTask) -> bytes:
        """The profile as far as it is, as JSON; the first question for it begins it."""
        return self._answer(job, asked).model_dump_json().encode()

    def _answer(self, job: str, asked: ProfiledTask) -> TaskProfile:
        profile = self._profile
        if profile is None or profile.name != asked.profile:
            if profile is not None and profile.now().state == "sampling":
                why = f"the worker takes a profile of {profile.subject}: ask again when that has ended"
                return TaskProfile(state="refused", why=why)
            task = self._task(job, asked)
            if task is None:
                why = f"subtask {asked.operator}.{asked.index} does not run on the worker: ask again"
                return TaskProfile(state="refused", why=why)
            profile = self._profile = _Profile(asked.profile, task, asked)
        self._asked_at = self._clock()
        return profile.now()

    def _task(self, job: str, asked: ProfiledTask) -> Task | None:
        """The newest attempt of it that is here and runs."""
        subtask = SubtaskId(JobId(job), OperatorId(asked.operator), asked.index)
        found = [
            attempt
            for key, attempt in self._deployment.attempts.items()
            if key.subtask == subtask and attempt.paths.clock.present()[0] is not None
        ]
        return max(found, key=lambda attempt: attempt.id.attempt).task if found else None

    def expire(self) -> None:
        """End a profile that nobody asks for any more."""
        if self._clock() - self._asked_at > limits.PROFILE_UNASKED_SECONDS_MAX:
            self.close()

    def close(self) -> list[threading.Thread]:
        """End it; gives the thread that is about to end."""
        profile, self._profile = self._profile, None
        if profile is None:
            return []
        profile.end()
        return [profile.thread]
