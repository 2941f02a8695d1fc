"""Profiles of tasks: samples at their times, one profile at a time, and what ends it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.wire.inquiries import ProfiledTask, TaskProfile
from minishuffle.worker.introspection.profiling import Sampler, TaskProfiles
from minishuffle.worker.introspection.stacks import FoldedStacks
from minishuffle.worker.tasks.task import Task

if TYPE_CHECKING:
    from conftest import Site

SECONDS_MAX = 60.0


class Held:
    """A place in user code where a task is held until the test lets it go."""

    reached = threading.Event()
    let_go = threading.Event()


@pytest.fixture(autouse=True)
def _hold_anew() -> Iterator[None]:
    Held.reached, Held.let_go = threading.Event(), threading.Event()
    yield
    Held.let_go.set()


def holds(row: Any) -> Any:
    Held.reached.set()
    Held.let_go.wait(SECONDS_MAX)
    return row


async def holds_a_loop(row: Any) -> Any:
    await asyncio.sleep(0)
    return holds(row)


async def held_task(site: Site, stream: Stream[Any] | None = None) -> Task:
    (task,) = site.deploy((stream or Stream.items([1]).map(holds)).to_count())
    await site.until(Held.reached.is_set)
    return task


class Clock:
    """Passes by what is waited for, and by ``late`` seconds more, once each."""

    def __init__(self, *late: float) -> None:
        self.now = 100.0
        self._late = list(late)
        self.waits = 0

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        self.now += seconds + (self._late.pop(0) if self._late else 0.0)
        return False


def asked(name: str = "p", seconds: float = SECONDS_MAX, hertz: float = 50.0) -> ProfiledTask:
    return ProfiledTask(profile=name, operator=0, index=0, seconds=seconds, hertz=hertz)


async def test_samples_are_taken_at_their_times_and_a_late_one_counts_for_those_it_has_delayed(
    site: Site,
) -> None:
    task, clock = await held_task(site), Clock(0.0, 0.07)
    sampler = Sampler(task, asked(seconds=0.2), clock.read, clock.wait)
    assert sampler.profile() == TaskProfile(state="sampling")
    sampler.run()
    found = sampler.profile()
    assert (found.state, found.why, found.attempt) == ("ended", "", 1)
    assert clock.waits == 7, "of ten, three were not taken in time"
    assert found.samples == {"busy": 10} and found.seconds == pytest.approx(0.2)
    assert [each.samples for each in found.stacks] == [10]
    assert "holds" in [found.frames[position].function for position in found.stacks[0].frames]
    Held.let_go.set()
    await site.finish()


async def test_an_asynchronous_function_that_runs_is_seen_while_its_task_waits(site: Site) -> None:
    task, clock = await held_task(site, Stream.items([1]).map_async(holds_a_loop, concurrency=1)), Clock()
    await site.until(lambda: task.paths.clock.present()[0] == "backpressured")
    sampler = Sampler(task, asked(seconds=0.1), clock.read, clock.wait)
    sampler.run()
    found = sampler.profile()
    names = [found.frames[position].function for position in found.stacks[0].frames]
    assert names[:3] == ["asynchronous calls", "holds_a_loop", "holds"] and found.samples == {"busy": 5}
    Held.let_go.set()
    await site.finish()
    assert task.async_frame(sys._current_frames()) is None


async def test_a_profile_that_cannot_be_taken_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task, clock = await held_task(site), Clock()

    def broken(*_: object) -> None:
        raise RuntimeError("no such stack")

    sampler = Sampler(task, asked(), clock.read, clock.wait)
    monkeypatch.setattr(FoldedStacks, "add", broken)
    sampler.run()
    why = "it cannot be taken: RuntimeError: no such stack"
    assert sampler.profile() == TaskProfile(state="refused", why=why)
    Held.let_go.set()
    await site.finish()


async def test_a_profile_ends_with_its_task(site: Site) -> None:
    task, profiles = await held_task(site), TaskProfiles(site.deployment, lambda: 0.0)
    began = TaskProfile.model_validate_json(profiles.answer("j1", asked(seconds=limits.PROFILE_SECONDS_MAX)))
    assert began == TaskProfile(state="sampling")
    Held.let_go.set()
    await site.finish()

    def found() -> TaskProfile:
        return TaskProfile.model_validate_json(profiles.answer("j1", asked()))

    await site.until(lambda: found().state == "ended")
    assert found().why == "the task has ended"
    late = TaskProfile.model_validate_json(profiles.answer("j1", asked("another")))
    assert (late.state, late.why) == ("refused", "subtask 0.0 does not run on the worker: ask again")
    assert task.thread is not None and not task.thread.is_alive()
    for thread in profiles.close():
        thread.join(SECONDS_MAX)


async def test_a_worker_takes_one_profile_at_a_time_until_nobody_asks_for_it(site: Site) -> None:
    await held_task(site)
    now = [0.0]
    profiles = TaskProfiles(site.deployment, lambda: now[0])

    def state(name: str) -> str:
        return TaskProfile.model_validate_json(profiles.answer("j1", asked(name))).state

    assert [state("one"), state("two"), state("one")] == ["sampling", "refused", "sampling"]
    now[0] = limits.PROFILE_UNASKED_SECONDS_MAX
    profiles.expire()
    assert state("two") == "refused"
    now[0] = 2 * limits.PROFILE_UNASKED_SECONDS_MAX + 1
    profiles.expire()
    assert state("two") == "sampling", "nobody asked for the first one any more"
    (thread,) = profiles.close()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive() and profiles.close() == []
    Held.let_go.set()
    await site.finish()
