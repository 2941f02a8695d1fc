"""Traces of channels between two workers: what is answered, what ends them, and their bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.inquiries import TracedChannel, WorkerAnswered, WorkerAsked
from minishuffle.wire.messages import CancelTasks
from minishuffle.worker.introspection.answers import Inspection

if TYPE_CHECKING:
    from conftest import Coordinator

SETTINGS = JobSettings(restart_strategy="none", latency_interval=0.01)


def channel(producer: int, index: int) -> TracedChannel:
    return TracedChannel(producer_operator=0, producer=producer, operator=1, index=index)


async def traced(coordinator: Coordinator, worker: int, which: TracedChannel) -> dict[str, Any]:
    ticket = 1 + len(coordinator.said(WorkerAnswered))
    asked = WorkerAsked(term=coordinator.term, ticket=ticket, job="j1", trace=which)
    coordinator.links[worker].send(asked)
    await coordinator.until(lambda: len(coordinator.said(WorkerAnswered)) == ticket)
    found: dict[str, Any] = json.loads(coordinator.said(WorkerAnswered)[-1].answer)
    return found


async def endless(coordinator: Coordinator) -> None:
    """A job of two sources and two sinks, on two workers."""
    for worker in (1, 2):
        await coordinator.worker(worker)
    numbers = Stream.generate(lambda start, count: list(range(start, start + count)), rate=20_000)
    coordinator.deploy(
        numbers.key_by(lambda row: row).count(emit="batch").to_count(), {0: 1, 1: 2}, settings=SETTINGS
    )


async def test_the_frames_of_a_channel_come_in_order_and_of_that_one_alone(coordinator: Coordinator) -> None:
    await endless(coordinator)
    found: list[dict[str, Any]] = []
    kinds: set[str] = set()
    while not ({"buffer_response", "add_credit"} <= kinds and len(found) > 20):
        answer = await traced(coordinator, 2, channel(0, 1))
        assert not answer["left_out"]
        found += answer["frames"]
        kinds = {frame["frame"] for frame in found}
    (seen,) = answer["channels"]
    assert (seen["phase"], seen["producer_worker"], seen["local"]) == ("attached", 1, False)
    assert [frame["at"] for frame in found] == sorted(frame["at"] for frame in found)
    buffers = [frame for frame in found if frame["frame"] == "buffer_response"]
    first = buffers[0]["sequence"]
    assert [frame["sequence"] for frame in buffers] == list(range(first, first + len(buffers)))
    assert {frame["way"] for frame in buffers} == {"in"}
    assert {(frame["edge"], frame["generation"]) for frame in found} == {(0, 1)}
    while "latency_marker" not in {frame.get("event") for frame in found}:
        found += (await traced(coordinator, 2, channel(0, 1)))["frames"]
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended()) == 4)


async def test_channels_without_frames_are_named_as_what_they_are(coordinator: Coordinator) -> None:
    await endless(coordinator)
    local = await traced(coordinator, 2, channel(1, 1))
    while not local["channels"][0]["local"]:
        local = await traced(coordinator, 2, channel(1, 1))
    assert local["frames"] == []
    assert (await traced(coordinator, 2, channel(7, 1)))["channels"] == []
    assert (await traced(coordinator, 1, channel(0, 1)))["channels"] == [], "it is the other worker's"
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended()) == 4)


async def test_a_trace_that_nobody_asks_for_is_bounded_and_ends(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRACE_FRAMES_MAX", 1)
    made: list[Inspection] = []
    begin = Inspection.__init__

    def note(inspection: Inspection, *parts: Any, **more: Any) -> None:
        made.append(inspection)
        begin(inspection, *parts, **more)

    monkeypatch.setattr(Inspection, "__init__", note)
    await endless(coordinator)
    answer = await traced(coordinator, 2, channel(0, 1))
    while not answer["left_out"]:
        answer = await traced(coordinator, 2, channel(0, 1))
        assert len(answer["frames"]) <= 1
    monkeypatch.setattr(limits, "TRACE_SECONDS_MAX", 0.0)
    await coordinator.until(lambda: not any(each._traces._traces for each in made))
    assert len(made) == 2
    links = [link for each in made for link in each._dumped.links]
    assert links and all(link.connection._tap is None for link in links)
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended()) == 4)
