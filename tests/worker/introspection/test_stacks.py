"""Stacks of task threads that sit in a known function: what is shown of them, and within which bounds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.operators.base import TaskContext
from minishuffle.wire.inquiries import ProfiledFrame
from minishuffle.worker.introspection.stacks import FoldedStacks
from minishuffle.worker.tasks.task import Task

if TYPE_CHECKING:
    from conftest import Site

SECONDS_MAX = 20.0


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


def calls_itself(row: int) -> Any:
    return calls_itself(row - 1) if row else holds(row)


def as_is(row: Any) -> Any:
    return row


class HoldingSource:
    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield [holds(1)]


class HoldingSink:
    def open(self, context: TaskContext) -> None:
        holds(context.index)

    def write(self, batch: Any) -> None:
        """Takes what comes."""

    def close(self) -> None:
        return None


async def held(site: Site, stream: Stream[Any]) -> tuple[Task, FrameType]:
    """The task that holds, and its innermost frame."""
    tasks = site.deploy(stream)
    await site.until(Held.reached.is_set)
    frames = sys._current_frames()
    for task in tasks:
        assert task.thread is not None and task.thread.ident is not None
        innermost = outer = frames.get(task.thread.ident)
        while outer is not None and outer.f_code is not holds.__code__:
            outer = outer.f_back
        if innermost is not None and outer is not None:
            return task, innermost
    raise AssertionError("no task holds")


def shown(stacks: FoldedStacks) -> list[ProfiledFrame]:
    """The one stack."""
    (stack,) = stacks.stacks()
    return [stacks.frames[position] for position in stack.frames]


@pytest.mark.parametrize(
    ("stream", "first"),
    [
        (Stream.items([1]).map(as_is).filter(holds).to_count(), "filter"),
        (Stream.items([1]).rebalance().map(as_is).map(holds).name("parse").to_count(), "parse"),
        (Stream.source(HoldingSource()).name("clicks").map(as_is).to_count(), "clicks"),
        (Stream.items([1]).to(HoldingSink()).name("shelf"), "shelf"),
    ],
    ids=["chained behind a source", "behind an exchange", "a source", "open"],
)
async def test_a_stack_begins_with_the_operator_that_the_thread_is_in(
    site: Site, stream: Stream[Any], first: str
) -> None:
    task, frame = await held(site, stream)
    stacks = FoldedStacks(task.first_operator)
    stacks.add(frame, "busy", 2)
    found = shown(stacks)
    assert [found[0]] == [each for each in found if each.kind == "operator"]
    assert found[0] == ProfiledFrame(function=first, kind="operator")
    users = [each for each in found if each.kind == "code"]
    place = next(each for each in users if each.function == "holds")
    assert place.file.endswith("worker/introspection/test_stacks.py")
    assert place.line == holds.__code__.co_firstlineno + 2
    assert users[-1].function == "Condition.wait" and users[-1].file == "threading.py"
    runtime = {each.file for each in found if each.kind == "runtime"}
    assert runtime and all("minishuffle/" in file for file in runtime)
    Held.let_go.set()
    await site.finish()


async def test_equal_stacks_are_counted_together_and_a_wait_is_no_stack(site: Site) -> None:
    task, frame = await held(site, Stream.items([1]).map(holds).to_count())
    stacks = FoldedStacks(task.first_operator)
    for state in ("busy", "idle", "busy", "backpressured"):
        stacks.add(frame, state, 3)
    assert stacks.samples == {"busy": 6, "idle": 3, "backpressured": 3}
    first, *waits = stacks.stacks()
    assert first.samples == 6 and stacks.frames[first.frames[0]].function == "map"
    names = [[stacks.frames[position].function for position in each.frames] for each in waits]
    assert names == [["waits for input"], ["waits for output"]]
    Held.let_go.set()
    await site.finish()


async def test_depth_places_and_stacks_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task, frame = await held(site, Stream.items([300]).map(calls_itself).to_count())
    stacks = FoldedStacks(task.first_operator)
    stacks.add(frame, "busy")
    found = shown(stacks)
    assert len(found) == 1 + limits.PROFILE_FRAMES_MAX
    assert (found[0].function, found[-3].function) == ("deeper", "holds")
    monkeypatch.setattr(limits, "PROFILE_STACKS_MAX", 1)
    stacks.add(frame.f_back, "busy", 4)
    assert (stacks.left_out, stacks.samples["busy"]) == (4, 5)
    stacks.add(frame, "busy")
    assert stacks.stacks()[0].samples == 2, "a stack that is known still counts"
    monkeypatch.setattr(limits, "PROFILE_PLACES_MAX", 2)
    few = FoldedStacks(task.first_operator)
    few.add(frame, "busy")
    assert (few.left_out, few.stacks(), len(few.frames)) == (1, [], 2)
    Held.let_go.set()
    await site.finish()
