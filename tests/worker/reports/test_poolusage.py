"""Looks at the buffers of tasks: what is added up, and who has a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minishuffle.api.stream import Stream
from minishuffle.counters import FLOW
from minishuffle.ids import JobId, PartitionId
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.frames import PartitionRequest
from minishuffle.worker.reports import poolusage
from minishuffle.worker.reports.poolusage import Turns
from support.attempts import attempt
from support.links import BareLink

if TYPE_CHECKING:
    from conftest import Site

SETTINGS = JobSettings(restart_strategy="none", buffers_per_channel=2, floating_buffers_per_gate=4)


class Counted:
    """Has so many channels, and counts its turns."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.turns = 0

    def look(self) -> None:
        self.turns += 1


def test_everybody_has_as_many_turns_as_the_others_and_a_turn_costs_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poolusage, "CHANNELS_PER_LOOK", 10)
    turns, there = Turns(), [Counted(4) for _ in range(6)]
    turns.take(there)
    assert [each.turns for each in there] == [1, 1, 0, 0, 0, 0]
    for _ in range(5):
        turns.take(there)
    assert [each.turns for each in there] == [2] * 6
    late = Counted(100)
    turns.take([*there[1:], late])
    assert late.turns == 1, "one that is new comes first"
    assert [each.turns for each in there] == [2] * 6
    for _ in range(3):
        turns.take(there[1:])
    assert [each.turns for each in there] == [2, 4, 3, 3, 3, 3]


async def test_a_producer_whose_consumer_is_not_there_has_a_full_output(site: Site) -> None:
    stream = Stream.items([bytes(500)] * 1_000).rebalance().to_count()
    (source, sink) = site.deploy(stream, settings=SETTINGS, connect=False)
    key = source.attempt_id
    await site.until(lambda: source.state == "running" and source.paths.clock.present()[0] == "backpressured")
    site.deployment.look()
    site.deployment.look()
    found = site.deployment.attempts[key].report().counters.flow
    assert set(found) <= set(FLOW)
    assert (found["looks"], found["output"]) == (2.0, 2.0)
    assert "uncredited" not in found, "nobody reads it"
    waiting = site.deployment.attempts[sink.attempt_id].report().counters.flow
    assert waiting == {"looks": 2.0}


async def test_what_has_backlog_waits_for_credit_or_for_the_socket(site: Site) -> None:
    stream = Stream.items([bytes(500)] * 1_000).rebalance().to_count()
    source = site.deploy(stream, settings=SETTINGS, connect=False)[0]
    made = site.deployment.attempts[source.attempt_id]
    await site.until(lambda: source.state == "running" and source.paths.clock.present()[0] == "backpressured")
    link, consumer = BareLink(), BareLink(dialer=True)
    request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=1, initial_credit=3)
    link.connection.producers.expect(request)
    from minishuffle.exchange.partition import serve

    serve(link, request, made.partitions[0].subpartitions[0])
    made.look()
    assert "unsent" not in made.report().counters.flow, "it will leave at the end of the turn"
    link.paused = True
    made.look()
    assert made.report().counters.flow["unsent"] == 1.0
    _, pieces = link.connection.data_to_send(16)
    for piece in pieces:
        piece.released()
    assert len(pieces) == 3 and consumer.flushes == 0
    made.look()
    found = made.report().counters.flow
    assert (found["unsent"], found["uncredited"], found["looks"]) == (1.0, 1.0, 3.0)


async def test_a_task_that_has_ended_is_not_looked_at(site: Site) -> None:
    (source, sink) = site.deploy(Stream.items([1]).rebalance().to_count(), settings=SETTINGS)
    await site.until(lambda: len(site.outcomes) == 2)
    for task in (source, sink):
        site.deployment.attempts[task.attempt_id].look()
    assert site.deployment.attempts[attempt(0)].report().counters.flow == {}
