"""Tasks whose output is retained: nothing is lost with a channel, and what is retained bounds the writer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream, Table
from minishuffle.errors import PeerLost
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.instructions import StartTask
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Site

ROWS = 20_000
BATCH = 50


class Numbers:
    """Rows, or columns, in order."""

    bounded = True

    def __init__(self, columns: bool = False) -> None:
        self.columns = columns
        if columns:
            self.format = "arrow"

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        for begin in range(offset, ROWS, BATCH):
            numbers = list(range(begin, begin + BATCH))
            yield pa.record_batch({"n": numbers}) if self.columns else numbers


def stable_everywhere(site: Site) -> None:
    """Snapshots of all tasks cover what these have taken."""
    for key in site.deployment.attempts:
        for gate in site.deployment.attempts[key].gates:
            gate.make_stable(gate.taken())


def partitions(site: Site) -> list[RetainedPartition]:
    found = [each for at in site.deployment.attempts.values() for each in at.partitions.values()]
    assert all(isinstance(each, RetainedPartition) for each in found)
    return [each for each in found if isinstance(each, RetainedPartition)]


def break_channels(site: Site, generation: int) -> None:
    """Every channel ends, and is attached once more."""
    for key, there in list(site.deployment.attempts.items()):
        for gate in there.gates:
            for channel in gate.channels:
                if channel.attachment is not None:
                    channel.detach(PeerLost("the link broke"))
                    producer: AttemptId = attempt(key.subtask.operator - 1, channel.producer)
                    site.deployment.connect_local(
                        ChannelKey(key, gate.edge, channel.producer), producer, generation, version=1
                    )


@pytest.mark.parametrize("columns", [False, True])
async def test_no_row_is_lost_or_comes_twice_when_channels_break(site: Site, columns: bool) -> None:
    if columns:
        table = Table.source(Numbers(columns), {"n": "int64"}).rebalance()
        job: Any = table.rename({"n": "m"}).rebalance().collect()
    else:
        job = Stream.source(Numbers()).rebalance().map(lambda row: row).rebalance().collect()
    site.deploy(job, parallelism=2, retained=True)
    generation = 1
    while len(site.outcomes) < len(site.deployment.attempts):
        generation += 1
        assert all(each.state == "finished" for each in site.outcomes.values())
        break_channels(site, generation)
        before = len(site.rows)
        await site.until(lambda at=before: len(site.rows) > at or len(site.outcomes) > 2)
        if generation > 30:
            await site.finish()
    assert sorted(row["m"] if columns else row for row in site.rows) == list(range(ROWS))
    assert generation > 3
    assert site.deployment.services.retained.used > 0
    assert all(not any(each.rows_dropped().values()) for each in partitions(site))
    site.release()
    assert site.deployment.services.retained.used == 0


async def test_a_later_attempt_does_not_wait_for_consumers_that_have_yet_to_come(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have read an earlier one to its end."""
    monkeypatch.setattr(limits, "OUTPUT_BUFFERS_PER_SUBPARTITION_MAX", 1)
    message = site.message(compile_job(Stream.source(Numbers()).rebalance().collect(), parallelism=1), "j1")
    (output,) = message.tasks[0].outputs
    source = message.tasks[0].model_copy(update={"outputs": [output.model_copy(update={"retained": True})]})
    site.deployment.start(StartTask(message, source))
    (first,) = partitions(site)
    await site.until(lambda: first.subpartitions[0].waits)
    site.release()
    site.deployment.start(StartTask(message, source.model_copy(update={"attempt": 2})))
    await site.until(lambda: attempt(0, number=2) in site.outcomes)
    assert partitions(site)[0].written() == [ROWS]


async def test_a_task_waits_between_elements_while_its_worker_retains_too_much(site_of: type[Site]) -> None:
    site = site_of(retained_bytes=64 * 1024)
    budget = site.deployment.services.retained
    site.deploy(Stream.source(Numbers()).rebalance().collect(), retained=True)
    source = site.deployment.attempts[attempt(0)].task
    (store,) = (each.store for each in partitions(site))
    await site.until(lambda: store.waits)
    assert site.snapshots_wanted == 1 and budget.half_reached
    assert source.paths.clock.present()[0] == "backpressured"
    assert budget.used < 2 * budget.limit_bytes and not site.outcomes
    while attempt(0) not in site.outcomes:
        stable_everywhere(site)
        await site.until(lambda: store.waits or attempt(0) in site.outcomes)
    await site.finish()
    stable_everywhere(site)
    assert site.rows == list(range(ROWS))
    assert site.snapshots_wanted > 1
    await site.close()


class Turns(Numbers):
    """A source whose splits are read in turn."""

    bounded = False

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def splits(self) -> list[int]:
        return list(range(self._count))

    def read(self, split: int, offset: int) -> Iterator[Any]:
        yield [split]


@pytest.mark.parametrize(
    ("splits", "version", "state"),
    [(1, 0, "finished"), (2, 0, "finished"), (1, 1, "finished"), (2, 1, "failed")],
)
async def test_a_source_says_how_many_splits_it_has_and_does_not_go_on_with_more_than_one(
    site: Site, splits: int, version: int, state: str
) -> None:
    settings = JobSettings(guarantee="at_least_once")
    graph = compile_job(Stream.source(Turns(splits)).rebalance().collect(), parallelism=1, settings=settings)
    message = site.message(graph, "j1")
    read = message.tasks[0].model_copy(update={"version": version})
    assert read.one_split
    site.deployment.start(StartTask(message, read))
    (outcome,) = await site.finish()
    assert outcome.state == state
    assert site.dealt == ([] if outcome.error else [splits])
    assert outcome.error is None or "which had one before" in outcome.error.text
