"""A profile of a task of a whole worker, which ends under it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.wire.inquiries import ProfiledTask, TaskProfile, WorkerAnswered, WorkerAsked

if TYPE_CHECKING:
    from conftest import Coordinator


def profilers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("profile of ")]


async def test_a_profile_ends_with_its_worker(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.generate(lambda start, count: [start], rate=100).to_count(), {0: 1})
    asked = ProfiledTask(profile="p", operator=0, index=0, seconds=limits.PROFILE_SECONDS_MAX)

    async def state() -> str:
        ticket = 1 + len(coordinator.said(WorkerAnswered))
        question = WorkerAsked(term=coordinator.term, ticket=ticket, job="j1", profile=asked)
        coordinator.links[1].send(question)
        await coordinator.until(lambda: len(coordinator.said(WorkerAnswered)) == ticket)
        return TaskProfile.model_validate_json(coordinator.said(WorkerAnswered)[-1].answer).state

    while await state() != "sampling":
        assert profilers() == [], "the task does not run yet"
    assert len(profilers()) == 1
    running.stop.set()
    await running.ended()
    assert profilers() == []
