"""What a dump says of two workers: a task that is stuck, channels without credit, requests that wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.inquiries import WorkerAnswered, WorkerAsked
from minishuffle.wire.messages import CancelTasks, DeployTasks

if TYPE_CHECKING:
    from conftest import Coordinator

SECONDS_MAX = 20.0
SETTINGS = JobSettings(restart_strategy="none", buffers_per_channel=2, floating_buffers_per_gate=4)


class Held:
    """A place in user code where a task is held until the test lets it go."""

    reached = threading.Event()
    let_go = threading.Event()


@pytest.fixture(autouse=True)
def _hold_anew() -> Iterator[None]:
    Held.reached, Held.let_go = threading.Event(), threading.Event()
    yield
    Held.let_go.set()


class Endless:
    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield [bytes(5_000)] * 50


def never_returns(row: Any) -> Any:
    Held.reached.set()
    Held.let_go.wait(SECONDS_MAX)
    return row


async def dumped(coordinator: Coordinator, worker: int, job: str = "") -> dict[str, Any]:
    """What that worker answers."""
    ticket = 1 + len(coordinator.said(WorkerAnswered))
    coordinator.links[worker].send(WorkerAsked(term=coordinator.term, ticket=ticket, job=job))
    await coordinator.until(lambda: len(coordinator.said(WorkerAnswered)) == ticket)
    answered = coordinator.said(WorkerAnswered)[-1]
    assert (answered.ticket, answered.term) == (ticket, coordinator.term)
    found: dict[str, Any] = json.loads(answered.answer)
    assert found["worker"] == worker
    return found


def tasks_of(found: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    return {(task["operator"], task["index"]): task for task in found["tasks"]}


async def test_a_stuck_task_is_shown_with_its_place_and_with_all_that_waits_for_it(
    coordinator: Coordinator,
) -> None:
    for worker in (1, 2):
        await coordinator.worker(worker)
    stream = Stream.source(Endless()).partition(lambda row, consumers: 1).map(never_returns).to_count()
    coordinator.deploy(stream, {0: 1, 1: 2}, settings=SETTINGS)

    async def producing() -> tuple[dict[str, Any], dict[str, Any]]:
        """What worker 1 holds, and its channel to the task that is stuck."""
        found = await dumped(coordinator, 1)
        (partition,) = tasks_of(found)[0, 0]["partitions"]
        return found, next(channel for channel in partition["channels"] if channel["consumer"] == 1)

    await coordinator.until(Held.reached.is_set)
    producer, full = await producing()
    while full.get("credit") != 0 or not tasks_of(producer)[0, 0]["waits_for"].startswith("a segment of"):
        producer, full = await producing()
    source = tasks_of(producer)[0, 0]
    assert (source["thread"], source["waits_for"]) == ("backpressured", "a segment of output j1/edge0.0")
    (partition,) = source["partitions"]
    assert partition["pool"]["in_use"] == partition["pool"]["size"]
    assert (full["reader"], full["credit"], full["backlog"] > 0) == ("worker 2", 0, True)
    assert full["consumer_attempt"] == full["generation"] == 1
    assert [link["peer"] for link in producer["links"]] == ["worker 2"]
    idle = tasks_of(producer)[1, 0]
    assert (idle["thread"], idle["waits_for"]) == ("idle", "input")

    sink = tasks_of(await dumped(coordinator, 2))[1, 1]
    while sink["gates"][0]["channels"][0].get("credit", {}).get("announced") != 0 or (
        sink["gates"][0]["waiting_for_floating"] != [0]
    ):
        sink = tasks_of(await dumped(coordinator, 2))[1, 1]
    assert sink["thread"] == "busy" and not sink["waits_for"]
    assert any(frame.endswith(" never_returns") for frame in sink["stack"]), sink["stack"]
    (gate,) = sink["gates"]
    remote, local = gate["channels"]
    assert (remote["producer"], remote["worker"], remote["phase"]) == (0, 1, "attached")
    assert remote["credit"]["announced"] == 0 and remote["credit"]["starved"]
    assert gate["waiting_for_floating"] == [0]
    assert remote["queue"] > 0 and local["queue"] > 0
    assert local["local"]["lent"] == local["local"]["credit"] == 6
    assert gate["pool"]["in_use"] == 2 + 4, "the rest is for the local channel, should it become remote"
    assert sink["cancelled"] is False
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    Held.let_go.set()
    await coordinator.until(lambda: len(coordinator.ended()) == 4)


async def test_a_request_for_a_partition_that_is_not_there_waits_in_the_dump(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in (1, 2):
        await coordinator.worker(worker)
    first = coordinator.links[1]
    held: list[DeployTasks] = []
    send = first.send
    monkeypatch.setattr(
        first,
        "send",
        lambda message: held.append(message) if isinstance(message, DeployTasks) else send(message),
    )
    # Worker 1 learns where worker 2 is, but not that it has a source of the job.
    coordinator.deploy(Stream.items([1]).to_count(), {0: 1, 1: 2}, "j0", settings=SETTINGS)
    stream = Stream.source(Endless()).rebalance().to_count()
    coordinator.deploy(stream, {0: 1, 1: 2}, settings=SETTINGS)

    found = await dumped(coordinator, 1)
    while not found["requests_waiting"]:
        found = await dumped(coordinator, 1)
    (request,) = found["requests_waiting"]
    assert (request["from"], request["job"], request["producer"]) == ("worker 2", "j1", 0)
    assert (request["consumer"], request["producer_attempt"]) == (1, 1)
    assert 0 < request["seconds_left"] <= coordinator.settings.partition_request_timeout
    waiting = tasks_of(await dumped(coordinator, 2, "j1"))[1, 1]["gates"][0]["channels"][0]
    assert (waiting["phase"], waiting["waits_for"]) == ("requested", "the producer's first buffer or event")
    for message in held:
        send(message)
    while found["requests_waiting"]:
        found = await dumped(coordinator, 1)


async def test_a_dump_is_bounded_and_names_what_waits_first(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DUMP_CHANNELS_MAX", 2)
    monkeypatch.setattr(limits, "DUMP_CHANNELS_IN_ALL_MAX", 6)
    monkeypatch.setattr(limits, "DUMP_FRAMES_MAX", 3)
    settings = coordinator.settings.model_copy(update={"slots": 4})
    await coordinator.worker(settings=settings)
    stream = Stream.source(Endless()).partition(lambda row, consumers: 3).map(never_returns).to_count()
    coordinator.deploy(stream, dict.fromkeys(range(4), 1), settings=SETTINGS)
    await coordinator.until(Held.reached.is_set)
    found = await dumped(coordinator, 1)
    while tasks_of(found)[0, 0]["thread"] != "backpressured":
        found = await dumped(coordinator, 1)
    tasks = found["tasks"]
    ends = [end for task in tasks for end in (*task["gates"], *task["partitions"])]
    assert sum(len(end["channels"]) for end in ends) == 6
    assert sum(len(end["channels"]) + end["channels_left_out"] for end in ends) == 2 * 4 * 4
    first = tasks_of(found)[0, 0]["partitions"][0]
    assert 3 in [channel["consumer"] for channel in first["channels"]], "the one that has a queue"
    assert all(len(task["stack"]) <= 3 for task in tasks)
    monkeypatch.setattr(limits, "DUMP_TASKS_MAX", 5)
    found = await dumped(coordinator, 1)
    assert (len(found["tasks"]), found["tasks_left_out"]) == (5, 3)
    assert (await dumped(coordinator, 1, "j9"))["tasks"] == []
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    Held.let_go.set()
    await coordinator.until(lambda: len(coordinator.ended()) == 8)
