"""Attempts that end before they have finished: who is told, what is discarded, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import ShuffleError, TaskFailed
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.partition import serve
from minishuffle.ids import JobId, PartitionId
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.wire.frames import CancelReason, PartitionRequest
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.state import StartTask
from minishuffle.worker.tasks.task import Task
from support.attempts import attempt
from support.links import BareLink

if TYPE_CHECKING:
    from conftest import Site

CHANNEL = ChannelKey(attempt(1), 0, 0)


class Gate:
    """A source emits three rows, and raises when the test lets it go on."""

    go_on = threading.Event()


class ThenRaises:
    bounded = True

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield [1, 2, 3]
        while not Gate.go_on.is_set():
            yield []
        raise ValueError("the disk is gone")


@pytest.fixture(autouse=True)
def _closed() -> None:
    Gate.go_on = threading.Event()


def deploy(site: Site, connect: bool = True, **settings: Any) -> Task:
    """A source and a sink that it feeds, if ``connect``; gives the source."""
    chosen = JobSettings(buffer_timeout=0, **settings)
    stream = Stream.source(ThenRaises()).rebalance().to_count()
    return site.deploy(stream, settings=chosen, connect=connect)[0]


def channel_of(site: Site) -> InputChannel:
    channel = site.deployment.channel(CHANNEL)
    assert channel is not None
    return channel


async def failed(site: Site) -> None:
    Gate.go_on.set()
    await site.until(lambda: attempt(0) in site.outcomes)


async def test_a_task_that_fails_tells_its_consumers_in_this_process(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = deploy(site)
    channel = channel_of(site)
    errors: list[str] = []
    detach = InputChannel.detach

    def note(channel: InputChannel, error: ShuffleError | None = None) -> None:
        errors.append(str(error))
        detach(channel, error)

    monkeypatch.setattr(InputChannel, "detach", note)
    await site.until(lambda: source.counters.records_out == 3)
    await failed(site)
    assert errors == [f"attempt 1 of {source.name}[0] is failed"]
    assert channel.attachment is None
    view = site.deployment.attempts[attempt(0)].partitions[0].subpartitions[0].view
    assert view is None


async def test_what_nobody_has_read_of_a_task_that_failed_is_discarded_and_counted(site: Site) -> None:
    source = deploy(site, connect=False)
    await site.until(lambda: source.counters.records_out == 3)
    assert source.read_counters().rows_dropped == {}
    await failed(site)
    counters = source.read_counters()
    assert (counters.records_out, counters.rows_dropped) == (3, {"queue_discarded": 3})
    assert source.counters.rows_dropped == {}
    assert site.deployment.snapshots()[0].partitions[0].pool.used == 0


async def test_a_consumer_that_asks_an_attempt_that_has_failed_hears_so_at_once(site: Site) -> None:
    source = deploy(site, connect=False)
    await failed(site)
    site.deployment.connect_local(CHANNEL, attempt(0), 1, version=1)
    channel = channel_of(site)
    assert channel.attachment is None
    link = BareLink()
    request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, generation=2, channel=7, initial_credit=2)
    link.connection.producers.expect(request)
    serve(link, request, source.partitions[0].subpartitions[0])
    chunks, _ = link.connection.data_to_send(16)
    assert f"attempt 1 of {source.name}[0] is failed".encode() in b"".join(chunks)


@pytest.mark.parametrize("end", ["canceled", "abandoned"])
async def test_a_task_that_is_canceled_or_abandoned_discards_what_it_has_written(
    site: Site, end: str
) -> None:
    source = deploy(site, connect=False)
    await site.until(lambda: source.counters.records_out == 3)
    if end == "abandoned":
        source.state = "abandoned"
        site.deployment.attempts[attempt(0)].close()
    else:
        source.paths.cancel()
        await failed(site)
        assert site.outcomes[attempt(0)].state == "canceled"
    assert source.read_counters().rows_dropped == {"queue_discarded": 3}
    error = source.partitions[0].subpartitions[0].error
    assert isinstance(error, TaskFailed) and f"is {end}" in str(error)


async def test_a_task_that_has_finished_keeps_its_partitions(site: Site) -> None:
    stream = Stream.items([1, 2, 3]).rebalance().to_count()
    source = site.deploy(stream, connect=False)[0]
    await site.until(lambda: attempt(0) in site.outcomes)
    assert source.read_counters().rows_dropped == {}
    assert source.partitions[0].backlog() == 1
    assert source.partitions[0].subpartitions[0].error is None


async def test_what_is_dropped_after_the_end_of_a_task_is_reported_when_it_is_released(site: Site) -> None:
    stream = Stream.items([1, 2, 3]).rebalance().to_count()
    site.deploy(stream, connect=False, settings=JobSettings(on_unavailable="drop"))
    await site.until(lambda: attempt(0) in site.outcomes)
    source = site.deployment.attempts[attempt(0)]
    source.reported = source.rows()
    source.partitions[0].subpartitions[0].attach(1, lambda: None).release(CancelReason.FAILED)
    assert site.deployment.release([attempt(0)]) == [source]
    assert source.rows()[1] == {"queue_discarded": 3}


async def test_without_restarts_a_task_that_fails_keeps_what_it_has_written(site: Site) -> None:
    source = deploy(site, connect=False, restart_strategy="none")
    await site.until(lambda: source.counters.records_out == 3)
    await failed(site)
    assert source.partitions[0].subpartitions[0].error is None
    assert source.read_counters().rows_dropped == {}


@pytest.mark.parametrize(("policy", "dropped"), [("drop", {"queue_discarded": 3}), ("wait", {})])
async def test_the_job_says_what_becomes_of_rows_for_a_consumer_that_has_gone(
    site: Site, policy: Literal["drop", "wait"], dropped: dict[str, int]
) -> None:
    source = deploy(site, connect=False, on_unavailable=policy)
    subpartition = source.partitions[0].subpartitions[0]
    await site.until(lambda: source.counters.records_out == 3)
    subpartition.attach(1, lambda: None).release(CancelReason.FAILED)
    assert source.read_counters().rows_dropped == dropped
    assert subpartition.available == (policy == "wait")


async def test_a_local_consumer_reads_until_a_newer_attempt_of_it_is_named(site: Site) -> None:
    source = deploy(site)
    message = site.message(
        compile_job(Stream.source(ThenRaises()).rebalance().to_count(), parallelism=1), "j1"
    )
    spec = next(spec for spec in message.tasks if spec.inputs).model_copy(update={"attempt": 2})
    site.deployment.start(StartTask(message, spec))
    second = ChannelKey(attempt(1, number=2), 0, 0)
    site.deployment.connect_local(second, attempt(0), 1, version=1)
    channel, partition = site.deployment.channel(second), source.partitions[0]
    assert channel is not None
    for named in (1, 2):
        partition.fence(0, named)
        assert channel.attachment is not None
    partition.fence(0, 3)
    assert channel.attachment is None
