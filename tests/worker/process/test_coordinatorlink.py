"""A worker that loses its control link: its tasks go on, and it looks for a coordinator."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.config import ClusterSettings, CoordinatorPlace
from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.messages import Heartbeat, Leaving, LogLines, Shutdown
from minishuffle.wire.reports import AttemptReport, Collected, SourcePositions, TaskStateChanged
from minishuffle.wire.requests import Failure
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Coordinator, Running

LEASE = 10


class Numbers:
    """One after the other, for ever."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        while True:
            yield [offset]
            offset += 1


def rows_out(running: Running) -> int:
    return max((task.counters.records_out for task in running.snapshot().tasks), default=0)


async def test_tasks_and_registration_outlive_the_control_link(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    tasks = coordinator.deploy(Stream.source(Numbers()).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: len(coordinator.states()) == tasks == 2)
    coordinator.links[1].close()
    await coordinator.until(lambda: len(coordinator.requests) == 2)
    first, second = coordinator.requests
    assert (first.epoch, first.term, first.attempts) == (0, 0, [])
    assert (second.requested_worker, second.epoch, second.term) == (1, 1, coordinator.term)
    assert {*second.attempts} == {attempt(0), attempt(1)}
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) > beats + 2)
    assert coordinator.ended() == []
    assert running.task is not None and not running.task.done()


async def test_sources_go_on_while_there_is_no_coordinator(coordinator: Coordinator) -> None:
    """Nobody acknowledges their leases; where they are is said on return, before anything new."""
    running = await coordinator.worker()
    settings = JobSettings(source_lease=LEASE)
    coordinator.deploy(Stream.source(Numbers()).rebalance().to_count(), {0: 1}, settings=settings)
    await coordinator.until(lambda: coordinator.said(SourcePositions))
    await coordinator.lose()
    before = rows_out(running)
    await coordinator.until(lambda: rows_out(running) > before + 100 * LEASE)
    coordinator.messages.clear()
    coordinator.acknowledges = False
    await coordinator.start_again()
    await coordinator.until(lambda: coordinator.said(Heartbeat))
    kinds = [type(each) for each in coordinator.messages]
    reports = coordinator.messages[: kinds.index(Heartbeat)]
    facts = [fact for each in reports if isinstance(each, AttemptReport) for fact in each.facts]
    assert {type(fact) for fact in facts} - {TaskStateChanged} == {SourcePositions}


@pytest.mark.slow
async def test_a_source_waits_for_a_coordinator_that_is_slow_but_not_for_long(
    coordinator: Coordinator,
) -> None:
    """Until it would have declared the worker lost, if only its link is broken: what it emits behind its
    lease before that comes twice."""
    coordinator.acknowledges = False
    timing: Any = {"heartbeat_interval": 0.02, "heartbeat_timeout": 2.5, "task_cancel_timeout": 5.0}
    running = await coordinator.worker(settings=ClusterSettings(**timing))
    began = time.monotonic()
    settings = JobSettings(source_lease=LEASE)
    coordinator.deploy(Stream.source(Numbers()).rebalance().to_count(), {0: 1}, settings=settings)
    await coordinator.until(lambda: rows_out(running))
    assert time.monotonic() - began >= 2.5


async def test_an_end_that_came_while_there_was_no_coordinator_is_said_to_the_next(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    def held_up(number: int) -> int:
        with open(pipe) as there:
            there.read()
        return number

    await coordinator.worker()
    coordinator.deploy(Stream.items([1]).map(held_up).to_count(), {0: 1})
    await coordinator.until(lambda: "running" in [state for _, _, state in coordinator.states()])
    await coordinator.lose()
    await asyncio.to_thread(Path(pipe).write_text, "go on")
    coordinator.messages.clear()
    await coordinator.start_again()
    await coordinator.until(lambda: coordinator.ended())
    assert coordinator.ended() == ["finished"]
    assert len(coordinator.reports(TaskStateChanged)) == 1


async def test_rows_for_clients_wait_and_lines_beyond_the_bound_are_dropped_and_counted(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.limits.TASK_UNSENT_BYTES_MAX", 2_000)
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Numbers()).rebalance().collect(), {0: 1}, "j1")
    coordinator.deploy(Stream.source(Numbers()).rebalance().print(), {0: 1}, "j2")
    await coordinator.until(lambda: coordinator.said(Collected) and coordinator.said(LogLines))
    await coordinator.lose()

    def printed() -> int:
        return max(task.counters.records_in for task in running.snapshot().tasks if task.job == "j2")

    before = printed()
    await coordinator.until(lambda: printed() > before + 2_000)
    coordinator.messages.clear()
    await coordinator.start_again()

    def lines() -> list[str]:
        return [line for message in coordinator.said(LogLines) for line in message.lines]

    await coordinator.until(lambda: any("lines were dropped here while" in line for line in lines()))
    await coordinator.until(lambda: coordinator.said(Collected))


async def test_the_next_coordinator_hears_kept_reports_before_the_rows_that_waited_behind_them(
    coordinator: Coordinator,
) -> None:
    """It applies reports in the order of their numbers, and ignores those that come too late."""
    running = await coordinator.worker()
    settings = JobSettings(source_lease=LEASE)
    coordinator.deploy(Stream.source(Numbers()).rebalance().collect(), {0: 1}, settings=settings)
    await coordinator.until(lambda: coordinator.said(Collected) and coordinator.said(SourcePositions))
    await coordinator.lose()
    before = rows_out(running)
    await coordinator.until(lambda: rows_out(running) > before + 10 * LEASE)
    coordinator.messages.clear()
    await coordinator.start_again()
    await coordinator.until(lambda: coordinator.said(Collected) and coordinator.said(SourcePositions))
    numbers = [each.number for each in coordinator.said(AttemptReport)]
    assert numbers == sorted(numbers)


async def test_a_coordinator_elsewhere_is_found_and_its_predecessor_is_not_obeyed(
    coordinator: Coordinator,
) -> None:
    places: list[CoordinatorPlace] = []
    old = coordinator.server
    await coordinator.worker(find=lambda: places[-1] if places else None)
    await coordinator.start_again(0)
    assert coordinator.server.port != old.port
    places.append(CoordinatorPlace(Address("127.0.0.1", coordinator.server.port), coordinator.term))
    await coordinator.until(lambda: len(coordinator.requests) == 2)
    places[0] = CoordinatorPlace(Address("127.0.0.1", old.port), coordinator.term)
    coordinator.term -= 1  # the one at the old port answers now
    await coordinator.lose()
    await coordinator.until(lambda: len(coordinator.requests) >= 4)
    assert all(request.term == coordinator.term + 1 for request in coordinator.requests[2:])
    await old.close()


async def test_a_worker_that_is_not_taken_back_ends_with_the_reason(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.answer = Failure(code=UsageError.code, text="worker 1 was declared lost; start it again")
    coordinator.links[1].close()
    with pytest.raises(PeerLost, match="does not take this worker back: worker 1 was declared lost"):
        await running.ended()


async def test_a_worker_that_finds_no_coordinator_gives_up(coordinator: Coordinator) -> None:
    settings: Any = ClusterSettings(coordinator_timeout=0.2, task_cancel_timeout=5.0)
    running = await coordinator.worker(settings=settings)
    await coordinator.lose()
    with pytest.raises(PeerLost, match=r"the coordinator is gone, and none was found within 0.2 s: cannot"):
        await running.ended()
    assert running.web[0].closed


async def test_a_worker_without_a_coordinator_stops_in_order(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Numbers()).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: len(coordinator.states()) == 2)
    await coordinator.lose()
    running.stop.set()
    await running.ended()
    assert running.web[0].closed


async def test_a_worker_that_is_sent_sigterm_waits_to_be_told(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Numbers()).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: len(coordinator.states()) == 2)
    running.leave.set()
    await coordinator.until(lambda: coordinator.said(Leaving))
    assert coordinator.said(Leaving)[0].seconds == coordinator.settings.drain_timeout
    assert running.task is not None and not running.task.done() and not coordinator.ended()
    coordinator.send(Shutdown(term=coordinator.term, reason="nothing runs on it"))
    await running.ended()


async def test_a_worker_that_leaves_ends_at_once_when_it_loses_its_coordinator(
    coordinator: Coordinator,
) -> None:
    running = await coordinator.worker()
    running.leave.set()
    await coordinator.until(lambda: coordinator.said(Leaving))
    await coordinator.lose()
    await running.ended()


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "not there yet"])
async def test_a_worker_without_a_coordinator_leaves_at_once(coordinator: Coordinator, lost: bool) -> None:
    coordinator.silent = not lost
    running = await coordinator.worker() if lost else coordinator.begin()
    if lost:
        coordinator.deploy(Stream.source(Numbers()).rebalance().to_count(), {0: 1})
        await coordinator.until(lambda: len(coordinator.states()) == 2)
        await coordinator.lose()
    else:
        await coordinator.until(lambda: coordinator.requests)
    running.leave.set()
    await running.ended()
    assert running.web[0].closed


async def test_a_worker_that_is_to_stop_does_not_wait_for_its_tasks_to_move(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    running.leave.set()
    await coordinator.until(lambda: coordinator.said(Leaving))
    running.stop.set()
    await running.ended()


async def test_a_result_that_is_too_long_to_be_said_keeps_no_worker_from_coming_back(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.limits.CONTROL_FRAME_BYTES_MAX", 60_000)
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    class Long:
        def open(self, context: object) -> None: ...
        def write(self, batch: object) -> None: ...
        def close(self) -> str:
            with open(pipe) as there:
                there.read()
            return "x" * 100_000

    await coordinator.worker()
    coordinator.deploy(Stream.items([1]).to(Long()), {0: 1})
    await coordinator.until(lambda: "running" in [state for _, _, state in coordinator.states()])
    await coordinator.lose()
    await asyncio.to_thread(Path(pipe).write_text, "go on")
    await coordinator.start_again()
    await coordinator.until(lambda: coordinator.ended())
    assert coordinator.ended() == ["failed"]
